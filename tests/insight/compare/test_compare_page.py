"""The comparison page in a real browser: its figures, its keyboard, its width."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import launched_browser
from run_folders import make_eight_runs, make_run

from andrea.checkpoint import Checkpoint
from andrea.evaluation.results import Figure, append_figures
from andrea.insight.compare.comparison import scaling_lines
from andrea.insight.compare.page import render_page
from andrea.insight.compare.runs import find_run_folders, read_run, read_runs


@contextlib.contextmanager
def opened(out: Path) -> Iterator:
    """The page in a browser. At the end, none of its scripts may have raised an error."""
    with launched_browser() as browser:
        page = browser.new_page(viewport={"width": 1000, "height": 900})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(out.as_uri())
        yield page
        assert errors == []


def write_page(folder: Path, out: Path) -> None:
    runs, left_out = read_runs(find_run_folders([str(folder)]))
    out.write_text(render_page(runs, left_out, scaling_lines(runs, None, None, seed=3)), encoding="utf-8")


def test_no_name_of_a_run_can_end_the_script_element(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    write_page(make_eight_runs(tmp_path / "runs"), out)
    page = out.read_text(encoding="utf-8")
    assert page.count("</script>") == page.count("<script") == 2 and "a\\u003cb>" in page


def test_the_page_shows_figures_by_pointer_and_by_keyboard(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    runs = make_eight_runs(tmp_path / "runs")
    write_page(runs, out)
    largest = read_run(runs / "n64000-r100", "n64000-r100")
    with opened(out) as page:
        title = page.locator("#chart text.title").first
        assert title.text_content() == "tokens"
        page.check("input[value=flops]")
        assert title.text_content() == "training FLOPs"
        page.check("input[value=bpb]")
        assert "bits per byte" in page.locator("#chart text.title").last.text_content()

        # The lowest marker is the last evaluation of the largest run.
        marks = [
            box for mark in page.locator("#chart > circle, #chart > polygon").all() if (box := mark.bounding_box())
        ]
        lowest = max(marks, key=lambda box: box["y"] + box["height"] / 2)
        page.mouse.move(lowest["x"] + lowest["width"] / 2, lowest["y"] + lowest["height"] / 2)
        tip = page.locator("#tip").text_content()
        assert tip.startswith("n64000-r100\n")
        assert float(re.search(r"bits per byte +([\d.]+)", tip)[1]) == pytest.approx(largest.bpb, abs=5e-5)
        assert float(re.search(r"([\d.]+e\d+) FLOPs", tip)[1]) == pytest.approx(largest.flops, rel=5e-3)

        page.focus("#chart")  # the keyboard alone reaches the same figures
        page.keyboard.press("ArrowLeft")
        assert "step 75 " in page.locator("#tip").text_content()
        page.keyboard.press("ArrowDown")
        assert not page.locator("#tip").text_content().startswith("n64000-r100\n")
        page.keyboard.press("Escape")
        assert page.locator("#tip").is_hidden()

        before = page.locator("#chart > circle, #chart > polygon").count()
        page.locator("#runs button").last.click()
        assert page.locator("#chart > circle, #chart > polygon").count() == before - len(largest.validation)
        assert page.locator("#figures tbody tr").count() == 8
        assert "a<b>&" in page.locator("#figures").text_content()
        page.set_viewport_size({"width": 360, "height": 740})
        page.wait_for_function("document.documentElement.scrollWidth <= 360")


def test_bits_per_byte_stand_against_the_bytes_of_the_weights_in_each_judged_precision(tmp_path: Path) -> None:
    out, runs = tmp_path / "page.html", make_eight_runs(tmp_path / "runs")
    judged = runs / "n64000-r100"
    figures = [
        Figure("andrea_bpb", "bits_per_byte", value, 0.01, None, 3, "", precision, n_byte)
        for value, precision, n_byte in ((1.5, "int4", 40_000), (1.4, "int8", 70_000), (1.39, "fp32", 256_000))
    ]
    other = Figure("wikitext", "bits_per_byte", 2.5, 0.01, None, 3, "", "fp32", 256_000)  # of another text: not drawn
    figures.append(other)
    append_figures(judged, Checkpoint(judged / "checkpoints" / "step", {"step": 100}), figures, {})
    write_page(runs, out)
    with opened(out) as page:
        page.check("input[value=bytes]")
        assert page.locator("#chart text.title").first.text_content() == "bytes of the weights"
        # One point for each run that was not judged, of its result in fp32, and three for the judged one.
        assert page.locator("#chart > circle, #chart > polygon").count() == 7 + 3
        page.focus("#chart")
        page.keyboard.press("ArrowLeft")  # the largest run's last point, then the one before
        page.keyboard.press("ArrowLeft")
        tip = page.locator("#tip").text_content()
        assert "1.4000" in tip and "int8, 70k bytes" in tip
        labels = [each.text_content() for each in page.locator("#chart text[text-anchor=end]").all()]
        assert len(set(labels)) == len(labels) > 1


def test_a_loss_that_falls_below_0_is_drawn_on_a_linear_axis(tmp_path: Path) -> None:
    """As of objective=grpo: the mean of advantage times log probability."""
    folder, out = make_run(tmp_path / "runs" / "one"), tmp_path / "page.html"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    records = [
        each | {"train/loss": math.sin(each["step"]), "attention/heads/induction_score": [[0.1]]} for each in records
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_page(folder, out)
    with opened(out) as page:
        for chart in ("#chart", "#births"):
            drawn = page.locator(f"{chart} > path").evaluate_all(
                "(paths) => paths.map((path) => path.getAttribute('d'))"
            )
            assert "NaN" not in "".join(drawn) and any(path.count("L") == 19 for path in drawn)  # of all 20 records


def test_figures_that_no_shown_run_has_are_no_error(tmp_path: Path) -> None:
    for name, score in (("with", 0.5), ("without", None)):
        with open(make_run(tmp_path / "runs" / name) / "metrics.jsonl", "a") as stream:
            record = {"step": 100, "tokens": 10_000, "flops": 1e9, "seconds": 10.0}
            stream.write(json.dumps(record | {"attention/heads/induction_score": [[score]]}) + "\n")
    write_page(tmp_path / "runs", tmp_path / "both.html")
    with opened(tmp_path / "both.html") as page:
        page.locator("#runs button", has_text="with ·").click()
        page.hover("#births")
        page.focus("#births")
        page.keyboard.press("ArrowLeft")
        assert page.locator("#births-tip").text_content() == ""
    write_page(tmp_path / "runs" / "without", tmp_path / "one.html")
    with opened(tmp_path / "one.html") as page:
        assert page.locator("#head-range").text_content() == "not measurable"


def test_a_single_run_s_page_shows_its_curve_samples_and_heads(tmp_path: Path) -> None:
    folder, out = make_run(tmp_path / "runs" / "a<b>", 5000, 50_000), tmp_path / "page.html"
    measured = (
        (folder / "metrics.jsonl")
        .read_text()
        .replace('"val/loss"', '"expected/bpb": 1.5, "expected/spread_bpb": 0.1, "val/loss"')
    )
    (folder / "metrics.jsonl").write_text(measured)
    with open(folder / "metrics.jsonl", "a") as stream:
        for step in (20, 60, 100):
            record = {"step": step, "tokens": 500 * step, "flops": 1.0, "seconds": 1.0}
            table = [[step / 100, None, 0.25], [0.5, 0.75, 1 - step / 200]]
            stream.write(json.dumps(record | {"attention/heads/entropy_share": table}) + "\n")
    samples = [{"step": step, "prompt": "<b>def ", "text": f"</pre>text {step}"} for step in range(20)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    write_page(folder, out)
    with opened(out) as page:
        assert page.locator("h1").text_content() == "Run a<b>" and page.title() == "ANDREA: Run a<b>"
        assert "5.00k parameters" in page.locator("#summary").text_content()
        assert page.locator("#scaling").is_hidden() and page.locator("#differences").is_hidden()
        assert page.locator("#chart .expected").count() == 0
        page.check("input[value=bpb]")
        assert page.locator("#chart .expected").count() == 2  # the mean and the band around it
        page.focus("#chart")
        page.keyboard.press("ArrowLeft")
        assert "expected         1.5000 ± 0.1000" in page.locator("#tip").text_content()
        assert page.locator("#heads rect").count() == 3 * 6
        page.locator("#heads rect").nth(5).hover()
        assert page.locator("#head-tip").text_content() == "head 1.2, step 20: 0.9"
        assert page.locator("#samples details").count() == 12
        assert page.locator("#samples details[open] pre").text_content() == "<b>def </pre>text 19"
        assert "8 earlier ones" in page.locator("#samples-note").text_content()
        # Every drawn point of the curves is inside the frame of the axes.
        inside = page.evaluate(
            "(() => { const frame = document.querySelector('#inside rect');"
            " const [top, height] = ['y', 'height'].map((name) => +frame.getAttribute(name));"
            " return [...document.querySelectorAll('#chart > path')].map((path) => path.getBBox()).every((curve) =>"
            " curve.y >= top && curve.y + curve.height <= top + height); })()"
        )
        assert inside
        page.set_viewport_size({"width": 360, "height": 740})
        page.wait_for_function("document.documentElement.scrollWidth <= 360")
