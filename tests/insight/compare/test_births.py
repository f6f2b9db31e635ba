"""The birth of heads: in which measurement a head first passes a pattern's threshold, and the picture of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_folders import make_run
from test_compare_page import opened, write_page

from andrea.insight.compare.births import birth_lines, birth_of, births_data
from andrea.insight.compare.runs import read_run
from andrea.insight.lens.scores import NAMES

PREVIOUS, INDUCTION = NAMES[:2]


def measured(folder: Path, induction: list[list[list[float | None]]], previous: float = 0.1) -> Path:
    """The run with one table (L, H) of induction scores for each measurement, at steps 10, 20, …; one score of the others."""
    with open(folder / "metrics.jsonl", "a") as stream:
        for index, table in enumerate(induction, 1):
            record = {"step": 10 * index, "tokens": 1000 * index, "flops": 1e6 * index, "seconds": 1.0 * index}
            record |= {"attention/heads/induction_score": table, "attention/in_context_nats": -0.1 * index}
            stream.write(json.dumps(record | {"attention/heads/previous_token_score": [[previous]]}) + "\n")
    return folder


LATE = [[[0.1, 0.2]], [[None, 0.25]], [[0.4, 0.3]], [[0.2, 0.9]]]


def test_a_head_is_born_when_one_first_has_the_threshold(tmp_path: Path) -> None:
    run = read_run(measured(make_run(tmp_path / "one"), LATE), "one")
    birth = birth_of(run, INDUCTION)
    assert (birth.record["step"], birth.record["tokens"], birth.score, birth.head) == (30, 3000, 0.4, "0.0")
    assert birth_of(run, PREVIOUS) is None and birth_of(run, NAMES[2]) is None  # too low, not measured
    found = births_data(run)["patterns"]
    assert found.keys() == {"previous_token", "induction"}
    assert found["induction"]["born"] == 2 and found["previous_token"]["born"] is None
    assert [point["score"] for point in found["induction"]["points"]] == [0.2, 0.25, 0.4, 0.9]
    assert [point["nats"] for point in births_data(run)["in_context"]] == pytest.approx([-0.1, -0.2, -0.3, -0.4])


def test_compare_says_after_how_many_tokens_each_run_has_its_first_head(tmp_path: Path) -> None:
    one, two, old = (make_run(tmp_path / name) for name in ("one", "two", "old"))
    runs = [read_run(measured(one, LATE), "one"), read_run(measured(two, LATE[:2]), "two"), read_run(old, "old")]
    assert birth_lines(runs) == [
        "induction head, first seen: one 3.00k tokens (step 30, head 0.0); two none in 2.00k tokens"
    ]
    assert birth_lines([read_run(old, "old")]) == []


def test_the_picture_of_one_run_shows_each_pattern_and_of_several_the_chosen_one(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    one = measured(make_run(tmp_path / "runs" / "one"), LATE, previous=0.7)
    write_page(one, out)
    with opened(out) as page:
        assert page.locator("#births .birth").count() == 2 and page.locator("#births-list li").count() == 2
        assert "induction: 3.00k tokens (step 30, head 0.0)" in page.locator("#births-list").text_content()
        assert page.locator("#births-choice").is_hidden()
        page.focus("#births")
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        tip = page.locator("#births-tip").text_content()
        assert tip == "step 30, 3k tokens: previous-token 0.7 (head 0.0) · induction 0.4 (head 0.0)"
        page.uncheck("#log-x")
        page.check("input[value=seconds]")
        assert page.locator("#births .birth").count() == 2
        page.set_viewport_size({"width": 360, "height": 740})
        page.wait_for_function("document.documentElement.scrollWidth <= 360")
    measured(make_run(tmp_path / "runs" / "two"), LATE[1:])
    make_run(tmp_path / "runs" / "old")
    write_page(tmp_path / "runs", out)
    with opened(out) as page:
        assert page.locator("#births .birth").count() == 2 and page.locator("#births-pattern").is_visible()
        assert page.locator("#births-list li").all_text_contents() == [
            "two: 2.00k tokens (step 20, head 0.0)",
            "one: 3.00k tokens (step 30, head 0.0)",
        ]
        page.locator("#runs button", has_text="one").click()
        assert page.locator("#births .birth").count() == 1
        page.select_option("#births-pattern", "previous_token")
        assert "two: none in 3.00k tokens" in page.locator("#births-list").text_content()


def test_runs_without_scores_have_no_picture(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    write_page(make_run(tmp_path / "runs" / "old"), out)
    with opened(out) as page:
        assert page.locator("#births-section").is_hidden()
