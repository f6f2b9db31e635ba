"""Exact match of a chat model: a tiny model that has learned a few answers, and the readable form of greedy decoding."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_checkpoint import CONFIG

from andrea.config import AttentionConfig, UserError
from andrea.evaluation.chat import Question, answers, chat_figures, questions_of
from andrea.evaluation.scoring import Scorer, Subject
from andrea.generation import next_logits_uncached
from andrea.generation.engine import Engine
from andrea.model import GPT, initialise
from andrea.text.chat import ChatTokenizer, Turn, fitting_prompt
from andrea.text.tokenizer import ByteTokenizer

T = 61
TOKENIZER = ChatTokenizer(ByteTokenizer())
END = TOKENIZER.special["<|end|>"]
LEARNED = [
    ("sum", "1+2?", "3"),
    ("sum", "2+2?", "4"),
    ("word", "cat?", "tac"),
    ("word", "dog?", "god"),
    ("word", "hi?", "oh"),
]


def subject_of(model: GPT, tokenizer=TOKENIZER) -> Subject:
    return Subject(SimpleNamespace(path=Path("run/step")), model, tokenizer, Scorer(model, 2))


def new_model(d_model: int = 32) -> GPT:
    config = dataclasses.replace(CONFIG, sequence_length=T, d_model=d_model, n_head=2, d_mlp=64)
    model = GPT(config, AttentionConfig("scaled_dot", "auto"), TOKENIZER.n_vocab)
    initialise(model, torch.Generator().manual_seed(7))
    return model


@pytest.fixture(scope="module")
def trained() -> GPT:
    """A model that knows the answers of LEARNED by heart."""
    model = new_model()
    rows = [[*fitting_prompt(TOKENIZER, [Turn("user", q)], T)[0], *TOKENIZER.encode(a), END] for _, q, a in LEARNED]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [ord("!")] * (width - len(row)) for row in rows])  # after the end it writes "!"
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        logits = model.logits(model(tokens[:, :-1]))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def file_of(tmp_path: Path, conversations: list[tuple[str, str, str]]) -> Path:
    path = tmp_path / "talk.jsonl"
    records = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}], "kind": kind}
        for kind, q, a in conversations
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_what_was_learned_is_right_and_only_equal_answers_count(trained: GPT, tmp_path: Path) -> None:
    asked = [*LEARNED, ("sum", "1+2?", "33"), ("sum", "1+2?", " 3\n"), ("word", "cat?", "ta"), ("word", "cat?", "Tac")]
    figures = chat_figures("chat", subject_of(trained), file_of(tmp_path, asked))
    found = {each.task: (round(each.value * each.n), each.n) for each in figures}
    assert found == {"chat": (6, 9), "chat/sum": (3, 4), "chat/word": (3, 5)}
    assert {(each.metric, each.about) for each in figures} == {("exact_match", "talk.jsonl")}
    assert figures[0].standard_error == pytest.approx((6 / 9 * 3 / 9 / 9) ** 0.5)


def test_limit_asks_the_first_questions(trained: GPT, tmp_path: Path) -> None:
    (total, sums) = chat_figures("chat", subject_of(trained), file_of(tmp_path, LEARNED), limit=2)
    assert (total.n, sums.task, sums.value) == (2, "chat/sum", 1.0)


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_answers_are_those_of_greedy_decoding_one_by_one(trained: GPT, batch_size: int) -> None:
    asked = ["1+2?", "cat?", "c", "hi?", "dog? cat?", "2+2?", "1+2", "x" * 30]
    questions = [Question([Turn("user", text)], "tac", "") for text in asked]
    questions += [
        Question([Turn("user", "x" * n), Turn("assistant", "b"), Turn("user", "cat?")], "", "") for n in (3, 44)
    ]
    found, n_left_out = answers(Engine(trained, TOKENIZER, dtype=torch.float32), questions, batch_size)
    expected = [greedy(trained, question) for question in questions]
    assert n_left_out > 0  # of the last conversation
    for text, (other, has_ended) in zip(found, expected, strict=True):
        assert text == other if has_ended else text.startswith(other)
    assert sum(has_ended for _, has_ended in expected) >= 5 and len(set(found)) >= 5


def greedy(model: GPT, question: Question) -> tuple[str, bool]:
    """The answer, and whether it ended before its limit."""
    most = min(len(question.answer) + 8, T // 2)
    tokens, written = fitting_prompt(TOKENIZER, question.turns, T - most)[0], []
    while len(written) < most:
        token = int(next_logits_uncached(model, torch.tensor([tokens])).argmax())
        if token in (END, TOKENIZER.end_of_text):
            return TOKENIZER.decode(written).strip(), True
        written.append(token)
        tokens = [*tokens, token]
    return TOKENIZER.decode(written).strip(), False


def test_each_turn_of_the_assistant_is_a_question_with_all_turns_before_it(tmp_path: Path, capsys) -> None:
    path = tmp_path / "talk.jsonl"
    turns = [("system", "s"), ("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "b")]
    record = {"messages": [{"role": role, "content": content} for role, content in turns]}
    path.write_text(json.dumps(record) + "\n\nno JSON\n[1]\n" + json.dumps({"text": "x"}) + "\n")
    first, second = questions_of(path)
    assert [turn.content for turn in first.turns] == ["s", "u"] and first.answer == "a" and first.kind == ""
    assert [turn.content for turn in second.turns] == ["s", "u", "a", "v"] and second.answer == "b"
    assert "left out 3 of 4 lines" in capsys.readouterr().out


def test_what_cannot_be_asked_is_refused(trained: GPT, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not trained on conversations"):
        chat_figures("chat", subject_of(trained, ByteTokenizer()), file_of(tmp_path, LEARNED))
    with pytest.raises(UserError, match="cannot be read.*name a JSONL file"):
        questions_of(tmp_path / "absent.jsonl")
    (tmp_path / "empty.jsonl").write_text('{"messages": [{"role": "user", "content": "u"}]}\n')
    with pytest.raises(UserError, match="holds no answer"):
        questions_of(tmp_path / "empty.jsonl")
