"""A prompt that ends with a space is continued as the tokenizer joins spaces to words."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from andrea.config import AttentionConfig, group_config
from andrea.generation import Engine, Request, Sampling, next_logits_uncached
from andrea.model import GPT, initialise
from andrea.text.tokenizer import ByteTokenizer, train_bpe

TEXT = "def main(self):\n    return self.name\n\n\ndef name(self):\n    return main(self)\n" * 20
BPE = train_bpe([TEXT], 280)
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def model() -> GPT:
    config = group_config("model", "andrea-nano", d_model=32, n_layer=2, n_head=2, d_mlp=40, sequence_length=64)
    model = GPT(dataclasses.replace(config), AttentionConfig("scaled_dot", "auto"), BPE.n_vocab)
    initialise(model, torch.Generator().manual_seed(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return model


def test_the_vocabulary_joins_spaces_to_words() -> None:
    assert BPE.encode("def main(") == [*BPE.encode("def"), *BPE.encode(" main"), *BPE.encode("(")]
    assert BPE.encode("def ") == [*BPE.encode("def"), *BPE.encode(" ")]


@pytest.mark.parametrize(("prompt", "kept"), [("def ", "def"), ("def name(self):\n    ", "def name(self):\n   ")])
def test_the_likeliest_token_with_a_space_comes_first_and_its_space_is_not_shown_twice(
    prompt: str, kept: str, model: GPT
) -> None:
    tokens = [BPE.end_of_text, *BPE.encode(kept)]
    logits = next_logits_uncached(model, torch.tensor([tokens]))[0]
    with_space = [index for index, token in enumerate(BPE.token_bytes()) if token.startswith(b" ")]
    first = max(with_space, key=lambda index: logits[index].item())
    engine = Engine(model, BPE)
    generated = list(engine.stream(engine.encode(prompt), Request(5, sampling=GREEDY)))
    assert generated[0].token == first
    written = BPE.decode_bytes([each.token for each in generated])
    assert written.startswith(b" ") and "".join(each.text for each in generated) == written[1:].decode(errors="replace")


def test_healed_texts_are_the_same_in_any_batch_and_with_lookahead(model: GPT) -> None:
    engine, prompts = Engine(model, BPE), ["def ", "def main", "return ", "x"]
    request = Request(20, sampling=Sampling(temperature=1.3), seed=5)
    tokens = [engine.encode(prompt) for prompt in prompts]

    def texts(lookahead: int) -> list[list[int]]:
        written: list[list[int]] = [[] for _ in prompts]
        for each in engine.stream_all(tokens, dataclasses.replace(request, lookahead=lookahead)):
            written[each.sample].append(each.token)
        return written

    alone = [
        [each.token for each in engine.stream(one, dataclasses.replace(request, seed=5 + index))]
        for index, one in enumerate(tokens)
    ]
    assert texts(0) == texts(3) == alone
    table = BPE.token_bytes()
    assert [table[written[0]].startswith(b" ") for written in alone][0::2] == [True, True]


def test_a_prompt_of_one_space_and_a_vocabulary_of_bytes_are_left_as_they_are() -> None:
    tokenizer = ByteTokenizer()
    config = group_config("model", "andrea-nano", d_model=32, n_layer=1, n_head=2, d_mlp=40, sequence_length=64)
    for one, prompt in ((tokenizer, [*b"def "]), (BPE, BPE.encode(" "))):
        engine = Engine(GPT(config, AttentionConfig("scaled_dot", "auto"), one.n_vocab), one)
        assert engine.healing.heal(prompt) == (prompt, False)
