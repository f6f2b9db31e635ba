"""The command `evaluate`: its figures, the run's record of them, and everything that it refuses."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import sys
from pathlib import Path

import pytest
from conftest import run_script
from tiny_checkpoint import CONFIG, make_model, write_model

from andrea.__main__ import main
from andrea.checkpoint import locate
from andrea.config import to_plain
from andrea.evaluation.results import FILE, Figure, append_figures, read_figures, table_lines
from andrea.generation.packed_layers import library
from andrea.text.sources import texts_at

T = 97  # sequence_length: a choice of a task has fewer bytes
SIGN = Figure("one", "acc", 0.5, 0.1, 0.25, 30, "")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    longer = to_plain(dataclasses.replace(CONFIG, sequence_length=T))  # rotary positions have no weights
    write_model(tmp_path / "runs", make_model().state_dict(), {"model": longer})
    (tmp_path / "a.txt").write_text("One two three. " * 9)
    return tmp_path / "runs"


def evaluate(runs: Path, capsys: pytest.CaptureFixture, *words: str) -> tuple[int, str, str]:
    return run_script(main, ["evaluate", f"runs_dir={runs}", f"data_dir={runs.parent}", *words], capsys)


def test_bits_per_byte_of_a_file_need_no_other_package(runs: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # an import now fails
    code, out, _ = evaluate(runs, capsys, f"text={runs.parent / 'a.txt'}")
    assert code == 0 and "bits_per_byte" in out and "a.txt: 135 tokens, 135 bytes" in out
    ((step, figure),) = read_figures(runs / "one").values()
    assert (step, figure.task, figure.n) == (60, "bpb", 1) and 7 < figure.value < 9
    assert evaluate(runs, capsys, f"text={runs.parent / 'a.txt'}")[0] == 0  # again: one figure, two records
    assert len(read_figures(runs / "one")) == 1 and len((runs / "one" / FILE).read_text().splitlines()) == 2
    code, _, error = evaluate(runs, capsys, "tasks=andrea")
    assert code == 2 and "needs the package lm-eval" in error and "pip install lm-eval" in error


def test_each_precision_has_a_figure_and_the_bytes_of_its_weights(runs: Path, capsys) -> None:
    for precision in ("fp32", "bf16", "int8", "int4") if library() is not None else ("fp32", "bf16"):
        code, out, _ = evaluate(runs, capsys, f"text={runs.parent / 'a.txt'}", f"precision={precision}")
        assert code == 0 and f"weights in {precision}" in out
    figures = {figure.precision: figure for _, figure in read_figures(runs / "one").values()}
    assert figures["fp32"].n_byte == 2 * figures["bf16"].n_byte == 4 * sum(w.numel() for w in make_model().parameters())
    values = [figure.value for figure in figures.values()]
    assert len(set(values)) == len(figures) and max(values) - min(values) < 0.1
    if library() is not None:
        # Than in bf16 it is more: so small a model does not fill its blocks.
        assert figures["int4"].n_byte < figures["int8"].n_byte


def test_tasks_have_a_standard_error_and_the_level_of_chance(runs: Path, capsys) -> None:
    pytest.importorskip("lm_eval")
    words = ["tasks=bpb,andrea_names", "tasks=andrea_brackets", "limit=6", f"text={runs.parent / 'a.txt'}"]
    code, out, _ = evaluate(runs, capsys, *words)
    assert code == 0 and "contexts were longer than model.sequence_length=97" in out
    found = read_figures(runs / "one")
    assert {task for task, *_ in found} == {"bpb", "andrea_names", "andrea_brackets"}
    names = found["andrea_names", "acc", 6, "", "fp32"][1]
    assert names.chance == 0.25 and names.standard_error is not None
    assert found["andrea_brackets", "acc", 6, "", "fp32"][1].chance == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("text=absent.txt", "text=absent.txt does not exist"),
        ("checkpoint=two", "neither a folder nor a run"),
        ("checkpoint=one", "held-out text of .* name a file with text="),
        ("field=body", "name the text with text="),
        ("task=bpb", "did you mean tasks"),
        ("limit=0", "limit=0"),
        ("tasks=,", "tasks is empty"),
    ],
)
def test_what_is_refused_is_one_line(word: str, message: str, runs: Path, capsys) -> None:
    code, _, error = evaluate(runs, capsys, word)
    assert code == 2 and error.count("\n") == 1 and re.search(message, error)


def test_an_unknown_task_is_refused_with_the_nearest_name(runs: Path, capsys) -> None:
    pytest.importorskip("lm_eval")
    code, _, error = evaluate(runs, capsys, "tasks=andrea_name")
    assert code == 2 and "did you mean andrea_names" in error


def test_a_folder_is_judged_as_it_is_read_in_training(runs: Path, tmp_path: Path, capsys) -> None:
    """Compressed text, conversations, Latin-1, a broken line; what is left out is named."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "a.txt.gz").write_bytes(gzip.compress(b"packed text\n"))
    (mine / "b.txt").write_bytes("tr\u00e8s cher, d\u00e9j\u00e0\n".encode("latin-1"))
    turns = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Good day"}]
    (mine / "c.jsonl").write_text(
        json.dumps({"conversations": turns}) + "\nbroken\n" + json.dumps({"body": "x"}) + "\n"
    )
    code, out, _ = evaluate(runs, capsys, f"text={mine}")
    documents = texts_at(mine, "text", None, print)
    assert documents == ["packed text\n", "tr\u00e8s cher, d\u00e9j\u00e0\n", "user: Hello\n\nassistant: Good day\n"]
    assert (
        code == 0
        and f"mine: {sum(len(text.encode()) for text in documents):,} tokens" in out
        and "left out 1 (records that are no" in out
    )
    assert evaluate(runs, capsys, f"text={mine}", "field=body")[0] == 0


def test_records_of_others_are_left_out(runs: Path) -> None:
    checkpoint = locate("one", runs)
    append_figures(runs / "one", checkpoint, [SIGN], {})
    path = runs / "one" / FILE
    good = json.loads(path.read_text())
    bad = [
        3,
        good | {"value": "x"},
        good | {"step": None},
        good | {"task": []},
        good | {"chance": [1]},
        good | {"n": 1.5},
        good | {"precision": 4},
        good | {"n_byte": "9"},
    ]
    with open(path, "ab") as file:
        file.write("".join(json.dumps(each) + "\n" for each in bad).encode() + b'\xff\n{"task": "to')
    assert read_figures(runs / "one") == {SIGN.asked: (60, SIGN)}
    append_figures(runs / "one", checkpoint, [SIGN], {})  # after a torn line
    *before, last = path.read_bytes().split(b"\n")[:-1]
    assert b"\xff" in before and json.loads(last)["task"] == "one"


def test_figures_of_other_texts_or_of_fewer_questions_stand_beside_each_other(runs: Path) -> None:
    checkpoint = locate("one", runs)
    others = [dataclasses.replace(SIGN, n=5), dataclasses.replace(SIGN, about="a.txt: 3 bytes")]
    newer = dataclasses.replace(SIGN, value=0.75)
    append_figures(runs / "one", checkpoint, [SIGN, *others], {})
    append_figures(runs / "one", checkpoint, [newer], {})
    assert [figure for _, figure in read_figures(runs / "one").values()] == [newer, *others]


def test_a_figure_says_whether_it_may_be_chance() -> None:
    near = Figure("two", "acc", 0.3, 0.05, 0.25, 30, "")
    _, first, second = table_lines([SIGN, near])
    assert first.endswith("2.5 standard errors above chance") and "0.500 ± 0.100" in first
    assert second.endswith("1.0 standard errors above chance: may be chance")
