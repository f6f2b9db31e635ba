"""The conversation in the terminal: commands, several lines, what the model sees, Ctrl-C."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import CONFIG

from andrea.api.command_line import configure
from andrea.config import AttentionConfig, SampleConfig
from andrea.generation.chat_session import ChatSession, chat, talk
from andrea.generation.engine import Engine, Request
from andrea.generation.sampling import Sampling
from andrea.model import GPT, initialise
from andrea.text.chat import ASSISTANT, SYSTEM, USER, ChatTokenizer, Turn
from andrea.text.tokenizer import ByteTokenizer

REQUEST = Request(max_new_tokens=4, seed=5, sampling=Sampling(temperature=1.0))


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Of a model whose answers are noise, which depends on the seed."""
    tokenizer = ChatTokenizer(ByteTokenizer())
    model = GPT(CONFIG, AttentionConfig("scaled_dot", "auto"), tokenizer.n_vocab)
    initialise(model, torch.Generator().manual_seed(7))
    return Engine(model.eval(), tokenizer)


def session_after(engine: Engine, *lines: str) -> ChatSession:
    session = ChatSession(engine, REQUEST)
    for line in lines:
        session.take(line)
    return session


def test_turns_alternate_and_each_answer_has_its_seed(engine: Engine, capsys) -> None:
    session = session_after(engine, "a", "b")
    assert [turn.role for turn in session.turns] == [USER, ASSISTANT] * 2
    assert [turn.content for turn in session.turns[::2]] == ["a", "b"]
    assert session.request.seed == REQUEST.seed + 2
    assert capsys.readouterr().out.count("\n") >= 2


def test_a_retry_with_the_same_seed_is_the_same_answer_and_with_the_next_another(engine: Engine) -> None:
    first = session_after(engine, "hello").turns[-1]
    again = session_after(engine, "hello", "/seed 5", "/retry")
    assert again.turns == [Turn(USER, "hello"), first]
    assert session_after(engine, "hello", "/retry").turns[-1] != first


def test_an_edited_message_replaces_the_last(engine: Engine) -> None:
    edited = session_after(engine, "one", "two", "/seed 6", "/edit three")
    assert edited.turns == session_after(engine, "one", "three").turns


def test_a_system_turn_begins_a_conversation_and_stays(engine: Engine) -> None:
    session = session_after(engine, "x", "/system be brief", "y", "/new")
    assert session.turns == [Turn(SYSTEM, "be brief")]
    session.take("/system")
    assert session.turns == []


def test_a_conversation_is_saved_as_a_line_of_data_chat(engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "a b.jsonl"
    session = session_after(engine, "hi", f"/save '{file}'")
    assert json.loads(file.read_text()) == {"messages": [vars(turn) for turn in session.turns]}


def test_a_message_of_bytes_that_are_no_text_can_be_saved(engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "saved.jsonl"
    session_after(engine, "a\udcff", f"/save {file}")
    assert json.loads(file.read_text("utf-8"))["messages"][0]["content"] == "a\ufffd"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/retry", "no answer yet"), ("/edit x", "no answer yet"), ("/edit", "needs the new text"), ("/seed x", "whole number"),
        ("/save", "needs the name"), ("/save /proc/none/x", "/proc/none"), ("/what", "is no command"), ("/help", "/retry"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_line_and_the_session_goes_on(engine: Engine, line: str, said: str, capsys) -> None:
    session = session_after(engine, line)
    assert said in capsys.readouterr().err and session.turns == []


def test_old_turns_are_left_out_whole_and_this_is_said(engine: Engine, capsys) -> None:
    session_after(engine, *"abcdef")
    assert "does not see the oldest" in capsys.readouterr().err


def test_several_lines_are_one_message_until_the_input_ends(engine: Engine, monkeypatch, capsys) -> None:
    typed = b"first\\\nsecond\n\n/save out\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed)))
    asked: list[str] = []
    monkeypatch.setattr(ChatSession, "say", lambda self, message: asked.append(message))
    monkeypatch.setattr(ChatSession, "save", lambda self, words: asked.append(f"save {words}"))
    chat(engine, "from the command line", REQUEST)
    assert asked == ["from the command line", "first\nsecond", "save out"]


@pytest.mark.parametrize("content", [b"one\ntwo", b"one\ntwo\n", b"one\ntwo\r\n"])
def test_the_end_of_a_file_s_last_line_is_no_part_of_the_message(
    content: bytes, engine: Engine, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "message.txt").write_bytes(content)
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    monkeypatch.setattr("andrea.generation.chat_session.open_engine", lambda *_: (engine, ""))
    monkeypatch.setattr(ChatSession, "say", lambda self, message: asked.append(message))
    config = configure(SampleConfig, "sample", ["chat=true", f"prompt=@{tmp_path / 'message.txt'}"])
    assert talk(config, torch.device("cpu")) == 0 and asked == ["one\ntwo"]


def test_an_interrupted_answer_is_kept_and_the_session_goes_on(engine: Engine, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\n/save x\n")))
    stream, saved = engine.stream, []

    def interrupted(tokens: list[int], request: Request):
        yield next(stream(tokens, request))
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "stream", interrupted)
    monkeypatch.setattr(ChatSession, "save", lambda self, words: saved.append(list(self.turns)))
    chat(engine, "", REQUEST)
    assert [turn.role for turn in saved[0]] == [USER, ASSISTANT]
