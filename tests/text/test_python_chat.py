"""Conversations about Python: the same every time, right by an independent check, and held out as documented."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from andrea.text.python_chat import FOLLOW_UPS, HELD_OUT, TEMPLATES, TRAIN, conversations, write_python_chat

KINDS = {
    "signature", "purpose", "parameters", "module", "methods", "addition", "subtraction", "comparison", "sequence",
    "brackets", "expression", "reverse", "upper", "length", "letter", "count", "small_talk", "unknown", "conversation",
}  # fmt: skip
REFERRING = {question for phrasings in FOLLOW_UPS.values() for question in phrasings} | {
    "Now in upper case.", "How long is that?", *(f"Add {number} to that." for number in range(10)),
}  # fmt: skip


@pytest.fixture(scope="module")
def files() -> dict[str, list[dict[str, Any]]]:
    return conversations()


def pairs(records: list[dict[str, Any]], kind: str) -> list[tuple[str, str]]:
    """Question and answer of each record of one question."""
    return [tuple(each["content"] for each in record["messages"]) for record in records if record["kind"] == kind]


def every_pair(files: dict[str, list[dict[str, Any]]], kind: str) -> list[tuple[str, str]]:
    return pairs(files[TRAIN], kind) + pairs(files[HELD_OUT], kind)


def operands(kind: str, question: str) -> tuple[str, ...]:
    """What stands in the place of {0}, {1} and {2} in the phrasing of a question."""
    for template in TEMPLATES[kind]:
        numbered = template
        for number in range(template.count("{}")):
            numbered = numbered.replace("{}", f"{{{number}}}", 1)
        pattern = re.sub(r"\\\{(\d)\\\}", r"(?P<g\1>.+)", re.escape(numbered))
        if found := re.fullmatch(pattern, question):
            return tuple(found[name] for name in sorted(found.groupdict()))
    raise AssertionError(f"{question} has no phrasing of {kind}")


def test_every_kind_is_in_both_files_and_a_tenth_is_held_out(files) -> None:
    counts = {name: {kind: 0 for kind in KINDS} for name in files}
    for name, records in files.items():
        for record in records:
            counts[name][record["kind"]] += 1
    assert min(counts[TRAIN].values()) >= 100 and min(counts[HELD_OUT].values()) >= 5
    n_answer = {name: sum(len(record["messages"]) // 2 for record in records) for name, records in files.items()}
    assert 15_000 < n_answer[TRAIN] < 25_000 and 0.07 < n_answer[HELD_OUT] / n_answer[TRAIN] < 0.15


def test_turns_alternate_and_are_short(files) -> None:
    for record in (*files[TRAIN], *files[HELD_OUT]):
        roles, contents = zip(*((each["role"], each["content"]) for each in record["messages"]), strict=True)
        assert roles == ("user", "assistant") * (len(roles) // 2)
        assert (len(roles) == 2) == (record["kind"] != "conversation") and len(roles) <= 14
        assert all(content and content == content.strip() and content.isascii() for content in contents)
        assert max(map(len, contents)) <= 100 and sum(map(len, contents)) <= 600


def test_no_question_of_the_held_out_file_is_in_the_training_file(files) -> None:
    prompts: dict[str, set[tuple[str, ...]]] = {TRAIN: set(), HELD_OUT: set()}
    alone: dict[str, set[str]] = {TRAIN: set(), HELD_OUT: set()}
    for name, records in files.items():
        for record in records:
            contents = [each["content"] for each in record["messages"]]
            prompts[name] |= {tuple(contents[: place + 1]) for place in range(0, len(contents), 2)}
            alone[name] |= {question for question in contents[::2] if question not in REFERRING}
    assert not prompts[TRAIN] & prompts[HELD_OUT] and not alone[TRAIN] & alone[HELD_OUT]
    assert len(alone[HELD_OUT]) > 1500


def test_a_question_has_one_answer_and_is_asked_once(files) -> None:
    singles = [pair for name in files for kind in KINDS - {"conversation"} for pair in pairs(files[name], kind)]
    assert len({question for question, _ in singles}) == len(singles)


@pytest.mark.parametrize("kind", ["signature", "purpose", "parameters", "module", "methods", "small_talk"])
def test_a_fact_that_is_asked_was_taught_in_other_words(files, kind: str) -> None:
    taught = {answer for _, answer in pairs(files[TRAIN], kind)}
    assert taught >= {answer for _, answer in pairs(files[HELD_OUT], kind)}


@pytest.mark.parametrize("kind", ["addition", "subtraction", "comparison", "sequence", "brackets", "reverse", "count"])
def test_operands_of_computed_answers_are_held_out(files, kind: str) -> None:
    def unordered(question: str) -> Any:
        values = operands(kind, question)
        if kind == "count":
            return values[0]
        return frozenset(values) - {"<", ">", "==", "!=", "<=", ">="} if kind in ("addition", "comparison") else values

    taught = {unordered(question) for question, _ in pairs(files[TRAIN], kind)}
    held_out = {unordered(question) for question, _ in pairs(files[HELD_OUT], kind)}
    assert held_out and not taught & held_out


def test_numbers_and_expressions_are_right(files) -> None:
    for question, answer in every_pair(files, "addition"):
        assert int(answer) == sum(map(int, re.findall(r"\d+", question)))
    for question, answer in every_pair(files, "subtraction"):
        assert int(answer) == int.__sub__(*map(int, operands("subtraction", question)))
    for question, answer in every_pair(files, "comparison"):
        assert answer == str(eval(" ".join(operands("comparison", question))))
    for question, answer in every_pair(files, "sequence"):
        *_, before, last = shown = [int(each) for each in operands("sequence", question)[0].split(", ")]
        assert [*shown, int(answer)] == list(range(shown[0], int(answer) + 1, last - before))
    for question, answer in every_pair(files, "expression"):
        assert eval(operands("expression", question)[0]) == ast.literal_eval(answer)


def test_brackets_are_closed(files) -> None:
    for question, answer in every_pair(files, "brackets"):
        left = re.sub(r"[^()\[\]{}]", "", operands("brackets", question)[0] + answer)
        while left != (left := re.sub(r"\(\)|\[\]|\{\}", "", left)):
            pass
        assert not left and not re.search(r"[^)\]}]", answer)


def test_answers_about_strings_are_right(files) -> None:
    right = {
        "reverse": lambda text: "".join(reversed(text)),
        "upper": lambda text: "".join(chr(ord(letter) - 32) for letter in text),
        "length": lambda text: str(sum(1 for _ in text)),
        "letter": lambda text, which, *_: text[{"first": 0, "begin": 0}.get(which, -1)],
        "count": lambda text, letter: str(sum(each == letter for each in text)),
    }
    for kind, rule in right.items():
        for question, answer in every_pair(files, kind):
            values = [value.strip("'") for value in operands(kind, question)]
            assert answer == rule(*values), question


@pytest.mark.skipif(sys.platform == "win32", reason="os.path is ntpath there, and the questions are of posixpath")
def test_facts_are_those_of_the_imported_library(files) -> None:
    """Names, parameters and docstrings of a few modules, by Python's own inspect."""
    checked = 0
    for question, answer in every_pair(files, "signature"):
        name = operands("signature", question)[0]
        module, _, function = name.rpartition(".")
        if module in ("textwrap", "shutil", "statistics", "shlex", "heapq", "os.path"):
            found = getattr(importlib.import_module(module), function)
            if inspect.isfunction(found):
                parameters = inspect.signature(found).parameters
                shown = ast.walk(ast.parse(answer.replace(name, "def f", 1) + ": 0"))
                assert sorted(parameters) == sorted(each.arg for each in shown if isinstance(each, ast.arg))
                checked += 1
    for question, answer in every_pair(files, "module"):
        module = importlib.import_module(answer)
        assert hasattr(module, operands("module", question)[0])
    for question, answer in every_pair(files, "methods"):
        module, _, name = operands("methods", question)[0].rpartition(".")
        assert all(
            callable(getattr(getattr(importlib.import_module(module), name), each)) for each in answer.split(", ")
        )
    for question, answer in every_pair(files, "purpose"):
        name = next(filter(None, re.findall(r"textwrap\.(\w+)", question)), None)
        if name:
            docstring = inspect.getdoc(getattr(importlib.import_module("textwrap"), name))
            assert " ".join(docstring.split()).startswith(answer[:-1])
            checked += 1
    assert checked > 100


def test_what_is_unknown_does_not_exist(files) -> None:
    every = every_pair(files, "unknown")
    for question, answer in every:
        (thing, name) = re.fullmatch(r"I do not know a (function|module|class) named ([\w.]+)\.", answer).groups()
        assert name in question
        if thing == "module":
            assert name not in sys.stdlib_module_names
        elif "." in name:
            module, _, function = name.rpartition(".")
            assert not hasattr(importlib.import_module(module), function)
    assert len({answer.split()[5] for _, answer in every}) == 3


def test_later_questions_refer_to_the_answer_before(files) -> None:
    of_module = [pair for pair in every_pair(files, "purpose") if " module " in pair[0]]
    sentences = {operands("about_module", question)[0]: answer for question, answer in of_module}
    seen = set()
    for record in files[TRAIN]:
        contents = [each["content"] for each in record["messages"]]
        for before, question, answer in zip(contents[1::2], contents[2::2], contents[3::2], strict=False):
            if found := re.fullmatch(r"Add (\d) to that\.", question):
                assert int(answer) == int(before) + int(found[1])
            elif question == "Now in upper case.":
                assert answer == before.upper()
            elif question == "How long is that?":
                assert answer == str(len(before))
            elif question in FOLLOW_UPS["about_module"]:
                assert sentences[before] == answer
            else:
                continue
            seen.add(question.split()[0])
    assert seen >= {"Add", "Now", "How", "Describe"}


def test_the_files_are_the_same_bytes_each_time_and_are_kept(tmp_path: Path, files) -> None:
    """Also in another process, whose sets have another order."""
    folder = tmp_path / "data" / "python_chat"
    code = f"from pathlib import Path; from andrea.text.python_chat import *; write_python_chat(Path({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONHASHSEED": "7"})
    assert sorted(path.name for path in folder.iterdir()) == [HELD_OUT, TRAIN]
    for name, records in files.items():
        assert (folder / name).read_text() == "".join(json.dumps(record) + "\n" for record in records)
    (folder / TRAIN).write_text("mine\n")
    assert write_python_chat(folder) == folder and (folder / TRAIN).read_text() == "mine\n"
    (folder / HELD_OUT).unlink()  # an interrupted run
    write_python_chat(folder)
    assert len((folder / TRAIN).read_text().splitlines()) == len(files[TRAIN])


def test_another_seed_gives_other_questions(files) -> None:
    assert conversations(seed=2)[HELD_OUT] != files[HELD_OUT]
