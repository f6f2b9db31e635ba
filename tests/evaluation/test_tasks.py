"""The three tasks: their questions are fair, and the shipped files are what the generator makes."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from andrea.evaluation.tasks import data

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.append(str(BENCH))  # the generator is run by people, not by the package
import make_tasks  # noqa: E402
from make_tasks import (  # noqa: E402
    Question,
    at_white_space,
    balanced,
    bracket_questions,
    make_task,
    name_questions,
)

FOLDER = Path(data.__file__).parent
MADE_BY = (3, 11, 7)  # the version of Python whose library the shipped files are from


def shipped(name: str) -> list[Question]:
    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")
    return [Question(**json.loads(line)) for line in lines if line]


@pytest.mark.parametrize("name", make_tasks.TASKS)
def test_each_question_has_different_choices_and_a_text_that_ends_at_white_space(name: str) -> None:
    questions = shipped(name)
    assert len(questions) >= 100
    for question in questions:
        assert len(set(question.choices)) == len(question.choices) == (3 if name == "brackets" else 4)
        assert 0 <= question.answer < len(question.choices)
        assert question.text and not question.text[-1].isspace()
        assert all(choice[0].isspace() for choice in question.choices)


def test_no_answer_is_right_more_often_than_chance() -> None:
    assert len(set(Counter(each.answer for each in shipped("brackets")).values())) == 1
    for name in ("names", "signatures"):
        assert max(Counter(each.answer for each in shipped(name)).values()) < 100  # of 300, for 4 choices


@pytest.mark.skipif(sys.version_info[:3] != MADE_BY, reason="the shipped files are from another version's library")
@pytest.mark.parametrize("name", make_tasks.TASKS)
def test_the_shipped_files_are_what_the_generator_makes(name: str) -> None:
    made = make_task(name, make_tasks.held_out_modules())
    assert [asdict(each) for each in made] == [asdict(each) for each in shipped(name)]


def test_the_generator_takes_the_library_of_any_version_of_python() -> None:
    modules = make_tasks.held_out_modules()
    assert 20 < len(modules) and all(make_task(name, modules) for name in make_tasks.TASKS)


def test_names_are_of_the_code_before_and_not_of_comments() -> None:
    code = "# comment words\n" + "first = second + third * fourth\n" * 12
    for question in name_questions(code, make_tasks.random.Random(1)):
        names = {choice.split()[-1] for choice in question.choices}
        assert names == {"first", "second", "third", "fourth"}
        right = question.choices[question.answer]
        assert code.startswith(question.text + right, code.index(question.text))


def test_a_bracket_closes_the_one_that_was_opened_last() -> None:
    (inner, outer) = bracket_questions("value = call_it(with_list[some_index_here], more)", make_tasks.random.Random(1))
    assert inner.choices[inner.answer].endswith("some_index_here]") and outer.choices[outer.answer] == " more)"


def test_choices_take_over_what_follows_the_last_white_space() -> None:
    assert at_white_space("a = b.", ["c", "d"], 1) == Question("a =", [" b.c", " b.d"], 1)
    assert at_white_space("a:\n    ", ["c"], 0) == Question("a:", ["\n    c"], 0)


def test_as_many_questions_of_each_bracket() -> None:
    of_module = [Question(str(n), [], n % 3 if n < 6 else 0) for n in range(9)]
    assert Counter(each.answer for each in balanced([of_module], make_tasks.random.Random(1))) == {0: 2, 1: 2, 2: 2}
