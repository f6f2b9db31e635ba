"""The comparison page in a real browser: its figures, its keyboard, its width."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_folders import make_eight_runs

from andrea.insight.compare.comparison import compare_runs
from andrea.insight.compare.page.page import render_page
from andrea.insight.compare.runs import find_run_folders, read_run, read_runs

CHROMIUM = Path("/usr/bin/chromium")


def write_page(folder: Path, out: Path) -> None:
    runs, left_out = read_runs(find_run_folders([str(folder)]))
    out.write_text(render_page(compare_runs(runs, left_out, None, None, seed=3)), encoding="utf-8")


def test_no_name_of_a_run_can_end_the_script_element(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    write_page(make_eight_runs(tmp_path / "runs"), out)
    page = out.read_text(encoding="utf-8")
    assert page.count("</script>") == page.count("<script") == 2 and "a\\u003cb>" in page


def test_the_page_shows_figures_by_pointer_and_by_keyboard(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed")
    out = tmp_path / "page.html"
    runs = make_eight_runs(tmp_path / "runs")
    write_page(runs, out)
    largest = read_run(runs / "n64000-r100", "n64000-r100")
    flags = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync"
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=flags.split())
        page = browser.new_page(viewport={"width": 1000, "height": 900})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(out.as_uri())
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
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert errors == []
        browser.close()
