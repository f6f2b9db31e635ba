"""Chats over HTTP: the answer is that of the engine after the template of the conversation, and ends with its turn."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
import torch
from served import config_of, serving
from tiny_checkpoint import CONFIG

from andrea.checkpoint import write_checkpoint
from andrea.config import AttentionConfig, to_plain
from andrea.generation import Engine, Request, Sampling
from andrea.model import GPT, initialise
from andrea.text.chat import ASSISTANT, SYSTEM, USER, ChatTokenizer, Turn, fitting_prompt
from andrea.text.tokenizer import ByteTokenizer

TOKENIZER = ChatTokenizer(ByteTokenizer())


def make_chat_model() -> GPT:
    model = GPT(CONFIG, AttentionConfig("scaled_dot", "auto"), TOKENIZER.n_vocab)
    initialise(model, torch.Generator().manual_seed(7))
    with torch.no_grad():
        model.head.weight[TOKENIZER.end] = model.head.weight.mean(0) + 0.4  # turns end now and then
    return model


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("chats")
    attention = AttentionConfig("scaled_dot", "auto")
    config = {"model": to_plain(CONFIG), "attention": to_plain(attention)}
    state = {"step": 1, "tokens": 23, "config": config}
    write_checkpoint(folder / "one" / "checkpoints", state, make_chat_model().state_dict(), {}, TOKENIZER)
    with serving(config_of(folder, max_running=3)) as (url, _):
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


CONVERSATIONS = [
    [Turn(USER, "ab")],
    [Turn(SYSTEM, "s"), Turn(USER, "<|end|>")],
    [Turn(USER, "first"), Turn(ASSISTANT, "answer"), Turn(USER, "x")],
    [Turn(USER, "a long beginning"), Turn(ASSISTANT, "and its long answer"), Turn(USER, "now")],  # which does not fit
]


@pytest.mark.parametrize("turns", CONVERSATIONS)
def test_an_answer_is_that_of_the_engine(turns: list[Turn], client: openai.OpenAI) -> None:
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    ends = set()
    for seed in range(8):
        settings = {"model": "one", "messages": messages, "max_tokens": 5, "seed": seed, "temperature": 0.8}
        whole = client.chat.completions.create(**settings)
        pieces = [
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(**settings, stream=True)
            if chunk.choices
        ]
        ids, n_left_out, _ = fitting_prompt(TOKENIZER, turns, CONFIG.sequence_length - 5)
        engine = Engine(make_chat_model().eval(), TOKENIZER, dtype=torch.float32)
        expected = engine.write(ids, Request(5, seed=seed, sampling=Sampling(0.8)))[0]
        choice = whole.choices[0]
        assert choice.message.content == "".join(pieces) == expected and choice.message.role == "assistant"
        assert whole.model_extra["turns_left_out"] == n_left_out
        ends.add(choice.finish_reason)
    assert ends <= {"stop", "length"}


def test_turns_end(client: openai.OpenAI) -> None:
    """Of many answers some end with <|end|>, which is no text."""
    answers = client.chat.completions.create(
        model="one", messages=[{"role": "user", "content": "ab"}], max_tokens=11, n=32, seed=3
    ).choices
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    assert not any("<|end|>" in answer.message.content for answer in answers)


def test_a_message_that_does_not_fit_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="with its last message alone"):
        client.chat.completions.create(model="one", messages=[{"role": "user", "content": "x" * 500}], max_tokens=5)
