"""The template of conversations in exports: other programs make the same tokens of a conversation as we do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from exportable import BLOCKS_OF_32, make_trained
from hypothesis import given, settings
from hypothesis import strategies as st
from importable import write_tokenizer as write_library_tokenizer

from andrea.interop.gguf import Gguf
from andrea.interop.hugging_face.tokenizer_files import write_tokenizer
from andrea.interop.proof import compared_text, prove
from andrea.text.chat import ASSISTANT, CHAT_TEMPLATE, SYSTEM, USER, ChatTokenizer, Turn, fitting_prompt
from andrea.text.load_tokenizer import load_hf_tokenizer
from andrea.text.tokenizer import ByteTokenizer, train_bpe

transformers = pytest.importorskip("transformers")
BPE = ChatTokenizer(train_bpe([Path(__file__).read_text(encoding="utf-8")], 400))
CONVERSATION = [
    Turn(SYSTEM, "Be brief."),
    Turn(USER, " Hi, \n{{ there }}"),
    Turn(ASSISTANT, "Yes? "),
    Turn(USER, "ü <b>"),
]


def messages_of(turns: list[Turn]) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in turns]


@pytest.mark.parametrize("tokenizer", [BPE, ChatTokenizer(ByteTokenizer())], ids=["bpe", "byte"])
def test_transformers_makes_the_same_tokens_of_a_conversation(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, tokenizer, 512)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1), min_size=1, max_size=5))
    def check(contents: list[str]) -> None:
        turns = [Turn((USER, ASSISTANT)[place % 2], content) for place, content in enumerate(contents)]
        for each in (turns, [*CONVERSATION[:1], *turns]):
            found = theirs.apply_chat_template(messages_of(each), add_generation_prompt=True)
            assert found["input_ids"] == fitting_prompt(tokenizer, each, 10**6)[0]

    check()
    for text in ("<|user|> and <|end|>", "<|endoftext|>"):  # asked for, text stays text
        assert theirs(text, split_special_tokens=True)["input_ids"][1:] == tokenizer.encode(text)


def test_the_tokens_of_turns_keep_their_ids_after_rows_without_a_token(tmp_path: Path) -> None:
    """As in Qwen and Pythia, whose models have more rows than tokens."""
    (tmp_path / "source").mkdir()
    (tmp_path / "out").mkdir()
    write_library_tokenizer(tmp_path / "source", 400)
    file = tmp_path / "source" / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    n_token = len(content["model"]["vocab"])
    content["added_tokens"].append(content["added_tokens"][0] | {"content": "<|added|>", "id": n_token})
    file.write_text(json.dumps(content), encoding="utf-8")
    ours = ChatTokenizer(load_hf_tokenizer(file, 400))
    assert n_token + 1 < 400  # there are such rows
    write_tokenizer(tmp_path / "out", ours, 512)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.convert_tokens_to_ids(["<|endoftext|>", "<|added|>", *ours.special]) == [
        ours.end_of_text,
        n_token,
        *ours.special.values(),
    ]
    found = theirs.apply_chat_template(messages_of(CONVERSATION), add_generation_prompt=True)
    assert found["input_ids"] == fitting_prompt(ours, CONVERSATION, 10**6)[0]
    again = load_hf_tokenizer(tmp_path / "out", ours.n_vocab)
    assert again.special == ours.special and again.encode("def main") == ours.encode("def main")


def test_an_exported_chat_model_is_proven(tmp_path: Path) -> None:
    from andrea.interop.hugging_face.target import HuggingFace

    trained = make_trained(tokenizer=BPE)
    target = HuggingFace(trained, "f32")
    target.write(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == list(BPE.ends)
    text = compared_text(trained, None, tmp_path, 100)
    assert prove(trained, target.rounded_gpt(), target.open(tmp_path), target.share, target.least, text)


def test_a_gguf_file_carries_the_template_and_the_end_of_a_turn(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    Gguf(make_trained(BLOCKS_OF_32, tokenizer=BPE), "f32").write(tmp_path)
    fields = gguf.GGUFReader(next(tmp_path.glob("*.gguf"))).fields
    assert fields["tokenizer.chat_template"].contents() == CHAT_TEMPLATE
    assert fields["tokenizer.ggml.eot_token_id"].contents() == BPE.end
    kinds = fields["tokenizer.ggml.token_type"].contents()
    assert all(kinds[token] == gguf.TokenType.CONTROL for token in BPE.special.values())
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert [tokens[token] for token in BPE.special.values()] == list(BPE.special)
