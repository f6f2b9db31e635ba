"""Exact match: a chat model answers the questions of conversations, and an answer must equal the right one.

For each turn of the assistant the model reads the turns before it, with their right answers, and writes the likeliest token
at each step (temperature 0) until <|end|>.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from andrea.config import UserError
from andrea.evaluation.results import Figure
from andrea.evaluation.scoring import Subject
from andrea.generation.engine import Engine, Request
from andrea.generation.sample_command import make_engine
from andrea.generation.sampling import Sampling
from andrea.runtime.files import from_json, lines_of
from andrea.text.chat import ROLES, ChatTokenizer, Turn, fitting_prompt
from andrea.text.formats import turns_of

METRIC = "exact_match"
MORE_TOKENS = 8  # than the longest right answer of a batch: an answer that goes on is wrong


@dataclass(frozen=True)
class Question:
    """turns: all before the answer. kind: of the record, or ''."""

    turns: list[Turn]
    answer: str
    kind: str


def chat_figures(task: str, subject: Subject, path: Path, limit: int | None = None) -> list[Figure]:
    """The share of exact answers to the questions of a JSONL file, of all and of each kind.

    limit: the number of questions to ask, from the file's beginning. Raises UserError for another file, and for a model
    that was not trained on conversations.
    """
    if not isinstance(subject.tokenizer, ChatTokenizer):
        raise UserError(
            f"tasks={task} asks a chat model, and {subject.checkpoint.path} was not trained on conversations; choose another "
            f"checkpoint, or train one with data=python_chat"
        )
    questions = questions_of(path)[:limit]
    engine = make_engine(subject.gpt, subject.tokenizer, subject.precision)
    texts, n_left_out = answers(engine, questions, subject.scorer.batch_size)
    if n_left_out:
        print(f"{path.name}: {n_left_out:,} turns did not fit the model's window, and were left out or cut")
    is_right = [text == question.answer.strip() for text, question in zip(texts, questions, strict=True)]
    figures = [figure(task, is_right, path)]
    for kind in sorted({question.kind for question in questions} - {""}):
        of_kind = [right for right, question in zip(is_right, questions, strict=True) if question.kind == kind]
        figures.append(figure(f"{task}/{kind}", of_kind, path))
    return figures


def figure(task: str, is_right: Sequence[bool], path: Path) -> Figure:
    """value: the share of right answers, with the standard error of a binomial share."""
    share, n = sum(is_right) / len(is_right), len(is_right)
    return Figure(task, METRIC, share, math.sqrt(share * (1 - share) / n), None, n, path.name)


def questions_of(path: Path) -> list[Question]:
    """One question for each turn of the assistant in the file's conversations. Other lines are counted and reported.

    Raises UserError if the file has no question.
    """
    try:
        lines = [line for line in lines_of(path.read_bytes().decode("utf-8-sig")) if line.strip()]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"{path} cannot be read: {reason}; name a JSONL file of conversations with text=…") from None
    conversations = [each for each in map(conversation_of, lines) if each is not None]
    if len(conversations) < len(lines):
        print(f"{path.name}: left out {len(lines) - len(conversations):,} of {len(lines):,} lines (no conversation)")
    found = [
        Question(turns[:place], turn.content, kind)
        for turns, kind in conversations
        for place, turn in enumerate(turns)
        if turn.role == "assistant" and place
    ]
    if not found:
        raise UserError(f'{path} holds no answer of an assistant; each line must be {{"messages": [{{"role": …}}, …]}}')
    return found


def conversation_of(line: str) -> tuple[list[Turn], str] | None:
    """The turns and the kind of a line; None if it is no conversation."""
    try:
        record = from_json(line)
    except ValueError:
        return None
    turns = turns_of(record) if isinstance(record, dict) else None
    if turns and not {turn.role for turn in turns} <= set(ROLES):
        return None
    return turns and (turns, str(record.get("kind") or ""))


def answers(engine: Engine, questions: Sequence[Question], batch_size: int) -> tuple[list[str], int]:
    """The model's answer to each question without spaces around it, and the number of turns that did not fit."""
    tokenizer, n_window = engine.tokenizer, engine.model.config.sequence_length
    right = [tokenizer.encode(question.answer) for question in questions]
    most = [min(len(ids) + MORE_TOKENS, n_window // 2) for ids in right]
    fitted = [fitting_prompt(tokenizer, each.turns, n_window - n) for each, n in zip(questions, most, strict=True)]
    order = sorted(range(len(questions)), key=lambda index: len(fitted[index][0]))  # a batch has similar lengths
    texts = [""] * len(questions)
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        request = Request(max(most[index] for index in batch), sampling=Sampling(temperature=0))  # the likeliest tokens
        for token in engine.stream_all([fitted[index].tokens for index in batch], request):
            texts[batch[token.sample]] += token.text
    return [text.strip() for text in texts], sum(each.n_left_out + (each.n_cut > 0) for each in fitted)
