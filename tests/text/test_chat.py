"""Conversations: what is learned, that special tokens cannot be written by a message, whole conversations in windows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from andrea.config import DataConfig, Text, TokenizerConfig, UserError
from andrea.model import GPT, initialise
from andrea.text.chat import (
    ASSISTANT,
    END,
    ROLES,
    SPECIAL,
    SYSTEM,
    USER,
    ChatTokenizer,
    ConversationWindows,
    Turn,
    encode_conversation,
    fitting_prompt,
)
from andrea.text.corpus import open_corpus
from andrea.text.load_tokenizer import load_tokenizer
from andrea.text.loader import Loader, validation_batches
from andrea.text.shards import IGNORED_TARGET, TokenStream
from andrea.text.sources import texts_at
from andrea.text.tokenizer import ByteTokenizer, train_bpe

BYTES = ChatTokenizer(ByteTokenizer())
PROMPT_FORMS = [
    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]},
    {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Good day"}]},
    {"instruction": "Hello", "input": "", "output": "Good day"},
    {"prompt": "Hello", "completion": "Good day"},
]
contents = st.text(st.characters(codec="utf-8"), min_size=1, max_size=9) | st.sampled_from(SPECIAL)
turns_lists = st.lists(st.tuples(contents, contents), min_size=1, max_size=4).map(
    lambda pairs: [Turn(role, text) for pair in pairs for role, text in zip((USER, ASSISTANT), pair, strict=True)]
)


def windows_of(conversations: list[list[Turn]], length: int) -> ConversationWindows:
    tokens = [token for turns in conversations for token in encode_conversation(BYTES, turns)]
    return ConversationWindows(TokenStream([np.array(tokens, dtype=np.uint16)]), length, BYTES)


def learned_by(windows: ConversationWindows) -> list[int]:
    """All targets of all windows, in order."""
    return [int(t) for window in range(len(windows)) for t in windows.read(window)[1] if t != IGNORED_TARGET]


@given(turns_lists)
def test_only_special_tokens_have_special_ids(turns: list[Turn]) -> None:
    """A message that holds <|assistant|> or <|end|> cannot end its turn or speak for another role."""
    tokens = encode_conversation(BYTES, turns)
    marks = [token for token in tokens if token >= 256]
    expected = [BYTES.end_of_text]
    for turn in turns:
        expected += [BYTES.role_token(turn.role), BYTES.special[END]]
    assert marks == expected
    assert BYTES.decode(tokens) == "".join(turn.content for turn in turns)


@settings(deadline=None)
@given(st.lists(turns_lists, min_size=1, max_size=5))
def test_exactly_the_assistant_s_tokens_are_learned(conversations: list[list[Turn]]) -> None:
    expected = []
    for turns in conversations:
        for turn in turns:
            if turn.role == ASSISTANT:
                expected += [*BYTES.encode(turn.content), BYTES.end]
    windows = windows_of(conversations, 400)
    assert learned_by(windows) == expected
    assert windows.count_targets(np.arange(len(windows))) == len(expected)


@settings(deadline=None)
@given(st.lists(turns_lists, min_size=1, max_size=6), st.integers(30, 60))
def test_a_window_holds_whole_conversations_or_the_beginning_of_a_long_one(
    conversations: list[list[Turn]], length: int
) -> None:
    try:
        windows = windows_of(conversations, length)
    except UserError:
        return  # no answer fits
    whole = {tuple(encode_conversation(BYTES, turns)) for turns in conversations}
    seen = 0
    for window, spans in enumerate(windows.spans):
        tokens, targets = windows.read(window)
        assert len(tokens) == len(targets) <= length
        for begin, stop in spans:
            part = tuple(windows.stream[begin:stop].tolist())
            seen += 1
            assert part in whole or (
                part[-1] == BYTES.end and any(known[: len(part)] == part and len(known) > length + 1 for known in whole)
            )
    assert seen + windows.n_left_out == len(conversations)
    assert bool(windows.describe()) == any(len(known) > length + 1 for known in whole)


def test_a_changed_user_token_changes_no_target() -> None:
    one = windows_of([[Turn(USER, "abc"), Turn(ASSISTANT, "xyz")]], 32).read(0)
    other = windows_of([[Turn(USER, "abd"), Turn(ASSISTANT, "xyz")]], 32).read(0)
    assert (one[1] == other[1]).all() and (one[0] != other[0]).sum() == 1


def test_no_conversation_sees_another() -> None:
    """In one window, a change of the first conversation changes no logit of the second."""
    from tiny_checkpoint import CONFIG

    from andrea.config import AttentionConfig

    attention = AttentionConfig("scaled_dot", "auto", across_documents=False)
    model = GPT(CONFIG, attention, BYTES.n_vocab, BYTES.end_of_text)
    initialise(model, torch.Generator().manual_seed(3))
    second = [Turn(USER, "a"), Turn(ASSISTANT, "b")]
    logits = []
    for first in ("x", "y"):
        windows = windows_of([[Turn(USER, first), Turn(ASSISTANT, "z")], second], CONFIG.sequence_length)
        assert len(windows) == 1
        tokens = torch.from_numpy(windows.read(0)[0])[None]
        logits.append(model(tokens)[0, windows.spans[0][0][1] :])
    assert torch.equal(*logits)


def test_a_conversation_of_which_no_answer_fits_is_left_out_and_counted() -> None:
    short, long = [Turn(USER, "a"), Turn(ASSISTANT, "b")], [Turn(USER, "a" * 50), Turn(ASSISTANT, "b")]
    windows = windows_of([long, short, [*short, *long]], 20)
    assert (windows.n_left_out, windows.n_cut) == (1, 1)
    assert learned_by(windows) == [ord("b"), BYTES.end] * 2
    with pytest.raises(UserError, match=r"none of 1 conversations .* model.sequence_length=20"):
        windows_of([long], 20)


def test_held_out_conversations_that_do_not_fit_are_counted_too(tmp_path: Path) -> None:
    (tmp_path / "talk").mkdir()
    for name, n_character, count in (("train", 3, 9), ("held_out", 40, 5)):
        records = [{"prompt": f"{n}" * n_character, "response": "b"} for n in range(count)]
        write_records(tmp_path / "talk" / f"{name}.jsonl", [*records, {"prompt": "a", "response": "b"}])
    corpus = corpus_of(tmp_path / "talk", tmp_path, [])
    (line,) = Loader(corpus.sources, 20, 1).lines
    assert line.startswith("5 held-out conversations are longer than model.sequence_length=20: 0 end")


@given(turns_lists, st.integers(4, 60), st.booleans())
def test_a_prompt_fits_and_keeps_the_newest_whole_turns(turns: list[Turn], room: int, has_system: bool) -> None:
    turns = [*([Turn(SYSTEM, "s")] if has_system else []), *turns, Turn(USER, "last")]
    tokens, n_left_out, n_cut = fitting_prompt(BYTES, turns, room)
    assert tokens[0] == BYTES.end_of_text and tokens[-1] == BYTES.assistant and tokens[-2] == BYTES.end
    has_front = BYTES.role_token(SYSTEM) in tokens
    kept = [*turns[:has_front], *turns[n_left_out + has_front :]]
    whole = [*encode_conversation(BYTES, kept), BYTES.assistant]
    assert len(whole) - len(tokens) == n_cut and (len(tokens) <= room or n_cut == len("last") - 1)
    assert kept[has_front].role == USER and kept[-1] == turns[-1]
    if not n_cut:
        assert whole == tokens and (has_front or not has_system or n_left_out)
    else:
        mark = len(whole) - len("last") - 3  # of the last message, which it keeps
        assert whole[: mark + 1] == tokens[: mark + 1] and tokens[mark] == BYTES.role_token(USER)


def test_the_tokenizer_is_saved_and_loaded(tmp_path: Path) -> None:
    for base in (ByteTokenizer(), train_bpe(["some words and some more words"], 260)):
        folder = tmp_path / base.kind
        folder.mkdir()
        tokenizer = ChatTokenizer(base)
        tokenizer.save(folder)
        found = load_tokenizer(folder)
        assert isinstance(found, ChatTokenizer) and found.description() == tokenizer.description()
        assert found.base.description() == base.description() and found.ends == tokenizer.ends
        assert len(found.token_bytes()) == found.n_vocab == base.n_vocab + 4
        changed = json.loads((folder / "tokenizer.json").read_text()) | {"special": ["<|user|>"]}
        (folder / "tokenizer.json").write_text(json.dumps(changed))
        with pytest.raises(UserError, match="one of them was changed"):
            load_tokenizer(folder)


def corpus_of(path: Path, place: Path, said: list[str]):
    data = DataConfig("chat", Text(path), {})
    return open_corpus(data, TokenizerConfig("byte", None, None), place / "data", said.append)


def write_records(path: Path, records: list) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize("record", [*PROMPT_FORMS, *({**form, "text": "Hello. Good day."} for form in PROMPT_FORMS)])
def test_every_common_form_becomes_the_same_tokens(tmp_path: Path, record: dict) -> None:
    others = [[{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "n"}] for n in range(12)]
    write_records(tmp_path / "train.jsonl", [{"messages": messages} for messages in others])
    write_records(tmp_path / "held_out.jsonl", [record])
    corpus = corpus_of(tmp_path, tmp_path, said := [])
    expected = encode_conversation(BYTES, [Turn(USER, "Hello"), Turn(ASSISTANT, "Good day")])
    assert corpus.sources[0].val[:].tolist() == expected and corpus.sources[0].chat is not None
    assert corpus.tokenizer.identity == BYTES.identity
    assert "messages" in record or any(line.startswith("chat: the text of 1 records is ") for line in said)
    loader = Loader(corpus.sources, 64, 1, corpus.tokenizer.end_of_text)
    _, targets = loader.batch(0, len(loader.in_order[0]))
    assert (targets != IGNORED_TARGET).sum() == 2 * 12
    batches = list(validation_batches(corpus.sources[0].val, 64, 2, chat=corpus.sources[0].chat))
    assert len(batches) == 1 and (batches[0][1] != IGNORED_TARGET).sum() == len("Good day") + 1


def test_what_is_no_conversation_is_left_out_and_said(tmp_path: Path) -> None:
    def messages(*roles: str) -> dict:
        return {"messages": [{"role": role, "content": f"{role} {len(roles)}"} for role in roles]}

    good = [messages(*["user", "assistant"] * n) for n in range(1, 12)]
    write_records(tmp_path / "a.jsonl", [*good, messages("user"), messages("user", "tool", "assistant"), {"text": "a"}])
    corpus_of(tmp_path / "a.jsonl", tmp_path, said := [])
    lines = "\n".join(said)
    assert "left out 1 (conversations in which the assistant says nothing)" in lines
    assert "left out 1 (conversations with the role 'tool')" in lines
    assert "left out 1 (documents that are no conversation)" in lines


def test_a_role_and_a_field_with_braces_are_named_as_they_are(tmp_path: Path) -> None:
    good = [{"prompt": f"{n}", "completion": f"{n}"} for n in range(12)]
    odd = {"conversations": [{"from": "{user}", "value": "Hello"}, {"from": "gpt", "value": "Good day"}]}
    write_records(tmp_path / "a.jsonl", [*good, odd])
    corpus_of(tmp_path / "a.jsonl", tmp_path, said := [])
    assert "chat: left out 1 (conversations with the role '{user}'): a.jsonl#12" in said
    write_records(tmp_path / "b.jsonl", [{"{}": "text"}, {"other": 1}])
    texts_at(tmp_path / "b.jsonl", "text", "{}", (said := []).append)
    assert any('left out 1 (without the field "{}")' in line for line in said)


def with_half_a_pair(value: Any) -> list[Any]:
    """Copies of a record, in each of which another text that the model would read holds half of a surrogate pair."""
    if isinstance(value, str):
        return [] if value in (*ROLES, "human", "gpt") else [value + "\ud800", "\udc00" + value]
    places = value.items() if isinstance(value, dict) else enumerate(value)
    changed = [(place, other) for place, entry in places for other in with_half_a_pair(entry)]
    if isinstance(value, dict):
        return [value | {place: other} for place, other in changed]
    return [[*value[:place], other, *value[place + 1 :]] for place, other in changed]


PAIR_FORMS = [
    {"prompt": "Hello", "chosen": "Good day", "rejected": "No"},
    {
        name: [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": name}]
        for name in ("chosen", "rejected")
    },
    {"prompt": [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hello"}]}
    | {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")},
]


@pytest.mark.parametrize(
    ("form", "pairs"), [*((form, False) for form in PROMPT_FORMS), *((form, True) for form in PAIR_FORMS)]
)
def test_half_a_surrogate_pair_anywhere_in_a_record_leaves_it_out(tmp_path: Path, form: dict, pairs: bool) -> None:
    good = [json.loads(json.dumps(form).replace("Hello", f"Hello {n}")) for n in range(12)]
    bad = with_half_a_pair(form)
    assert len(bad) >= 4
    write_records(tmp_path / "a.jsonl", [*good, *bad])
    data = DataConfig("chat", str(tmp_path / "a.jsonl"), {})
    corpus = open_corpus(data, TokenizerConfig("byte", None, None), tmp_path / "data", (said := []).append, pairs)
    left_out = [
        int(n) for n in re.findall(r"left out (\d+) \(", "\n".join(said))
    ]  # also as a pair that begins differently
    assert sum(left_out) == len(bad) and "(unreadable or not valid UTF-8)" in "\n".join(said)
    (source,) = corpus.sources
    read = sum(int((stream[:] == BYTES.end_of_text).sum()) for stream in (source.train, source.val))
    assert read == len(good) * (1 + pairs)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"held_out": 5}, "none to train on; add some, or rename this file"),
        ({"held_out": 5, "train": 0}, "none to train on; add some, or rename this file"),
        ({"held_out": 0, "train": 5}, "no conversation in held_out.jsonl; add some, or remove the file"),
    ],
)
@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_a_side_without_conversations_is_named_with_what_to_do(
    tmp_path: Path, files: dict[str, int], said: str, tokenizer: str
) -> None:
    (tmp_path / "talk").mkdir()
    for name, count in files.items():
        records = [{"prompt": f"{name} {n}", "response": f"{n}"} for n in range(count)]
        write_records(tmp_path / "talk" / f"{name}.jsonl", records or [{"id": 1}])
    data = DataConfig("chat", str(tmp_path / "talk"), {})
    vocabulary = TokenizerConfig(tokenizer, 300 if tokenizer == "bpe" else None, None)
    with pytest.raises(UserError, match=re.escape(said)):
        open_corpus(data, vocabulary, tmp_path / "data", lambda line: None)


def test_a_held_out_file_may_be_in_a_folder_and_what_is_in_both_is_said(tmp_path: Path) -> None:
    (tmp_path / "talk" / "sub").mkdir(parents=True)
    records = [{"prompt": f"{n}", "response": f"{n}"} for n in range(12)]
    write_records(tmp_path / "talk" / "train.jsonl", records)
    write_records(tmp_path / "talk" / "sub" / "held_out.jsonl", [*records[:2], {"prompt": "new", "response": "new"}])
    source = corpus_of(tmp_path / "talk", tmp_path, said := []).sources[0]
    assert (source.val[:] == BYTES.end_of_text).sum() == 3 and (source.train[:] == BYTES.end_of_text).sum() == 12
    assert any("2 conversations of held_out.jsonl are training conversations too" in line for line in said)


def test_copies_of_a_conversation_are_on_one_side(tmp_path: Path) -> None:
    records = [{"prompt": f"{n}", "response": f"{n}"} for n in range(30)]
    write_records(tmp_path / "a.jsonl", records * 3)
    source = corpus_of(tmp_path / "a.jsonl", tmp_path, []).sources[0]

    def of(stream: TokenStream) -> set[tuple[int, ...]]:
        tokens = stream[:]
        return {
            tuple(part.tolist()) for part in np.split(tokens, np.flatnonzero(tokens == BYTES.end_of_text)) if len(part)
        }

    assert of(source.train).isdisjoint(of(source.val)) and len(of(source.train)) + len(of(source.val)) == 30
    assert len(of(source.val)) == 3
