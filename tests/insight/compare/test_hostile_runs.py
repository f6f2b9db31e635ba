"""Run folders made by somebody who means harm: `runs`, `compare` and the pages neither fail nor do what is asked."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from run_folders import make_run
from test_compare_page import opened

from andrea.__main__ import main
from andrea.checkpoint import Checkpoint
from andrea.cli.exit_code import exit_code_of
from andrea.evaluation.results import Figure, append_figures
from andrea.insight.compare.page import RunPage, render_page
from andrea.insight.compare.runs import LeftOut, Run, read_run

EVIL = "</script><script>document.title='EVIL'</script><img src=x onerror=\"document.title='EVIL'\">&lt;\u2028"
Edit = Callable[[Path], object]


def metrics(first: int = 0, **changes: object) -> Edit:
    """Change keys of every record from `first` on; None removes one."""

    def edit(run: Path) -> None:
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        records[first:] = [record | changes for record in records[first:]]
        kept = [{key: value for key, value in record.items() if value is not None} for record in records]
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))

    return edit


def first_line(text: str) -> Edit:
    return lambda run: (run / "metrics.jsonl").write_text(text + "\n" + (run / "metrics.jsonl").read_text())


def config(group: str, key: str, value: object) -> Edit:
    def edit(run: Path) -> None:
        content = yaml.safe_load((run / "config.yaml").read_text())
        content[group] = content[group] | {key: value} if key else value
        (run / "config.yaml").write_text(yaml.safe_dump(content))

    return edit


def whole_config(text: str) -> Edit:
    return lambda run: (run / "config.yaml").write_text(text)


def header(content: bytes) -> Edit:
    return lambda run: (run / "checkpoints" / "step-00000100" / "model.safetensors").write_bytes(content)


def shapes(shape: object) -> Edit:
    text = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    return header(len(text).to_bytes(8, "little") + text + bytes(4))


def pipe(name: str) -> Edit:
    return lambda run: ((run / name).unlink(missing_ok=True), os.mkfifo(run / name))


def endless(name: str) -> Edit:
    return lambda run: ((run / name).unlink(missing_ok=True), (run / name).symlink_to("/dev/zero"))


def aliases() -> str:
    """300 bytes that stand for 9^20 entries."""
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {{{', '.join(f'k{each}: *a{n - 1}' for each in range(9))}}}" for n in range(1, 20)]
    return "\n".join([*lines, "model: {name: m}", "train: {steps: 1}", "data: {kind: text}", ""])


def judged(value: float) -> Edit:
    figure = Figure("t", "bits_per_byte", value, 0.01, None, 3, "", "fp32", 400)
    return lambda run: append_figures(run, Checkpoint(run / "checkpoints" / "step", {"step": 100}), [figure], {})


STATE = "checkpoints/step-00000100/state.json"
ATTACKS: dict[str, Edit] = {
    "a number of 5000 digits": first_line('{"step": ' + "9" * 5000 + "}"),
    "a deep line": first_line("[" * 100_000),
    "a number that no float holds": metrics(**{"val/bpb": 10**400}),
    "a huge step": metrics(step=10**3000),
    "huge figures": metrics(**{"val/loss": 1e308, "val/bpb": 1e308, "tokens": 1e308, "flops": 1e308, "seconds": 1e308}),
    "figures below 0": metrics(tokens=-5, flops=-1, seconds=-3, step=-1),
    "no axes": metrics(tokens=None),
    "text for figures": metrics(tokens=EVIL, flops=[], seconds={}, step="s"),
    "an event that is none": metrics(-1, event={"a": 1}),
    "an event for the terminal": metrics(-1, event="\x1b]0;title\x07\x1b[2J"),
    "text for steps": config("train", "steps", "\x1b[2J"),
    "a list for steps": config("train", "steps", [1]),
    "no steps": config("train", "steps", None),
    "a huge number of steps": config("train", "steps", 10**3000),
    "a mapping for a name": config("model", "name", {"a": 1}),
    "a name for the terminal": config("model", "name", "\x1b[2J"),
    "a formula for a name": config("model", "name", r"$\frac{$"),
    "a list for a group": config("model", "", [1]),
    "no data": config("data", "", [1]),
    "a deep config": whole_config("[" * 5000),
    "a config of aliases": whole_config(aliases()),
    "a config that runs code": whole_config("!!python/object/apply:os.system ['touch ran']"),
    "a deep state": lambda run: (run / STATE).write_text("[" * 100_000),
    "a header of 2^63 bytes": header((2**63).to_bytes(8, "little") + b"{}"),
    "a deep header": header((200_000).to_bytes(8, "little") + b"[" * 200_000),
    "a negative shape": shapes([-1]),
    "a huge shape": shapes([10**18, 10**18]),
    "a shape of lists": shapes([[1], 2]),
    "metrics that are a pipe": pipe("metrics.jsonl"),
    "samples that are a pipe": pipe("samples.jsonl"),
    "a config that is a pipe": pipe("config.yaml"),
    "a lock that is a pipe": pipe(".lock"),
    "a mark that is a pipe": pipe("run.json"),
    "a state that is a pipe": pipe(STATE),
    "weights that are a pipe": pipe("checkpoints/step-00000100/model.safetensors"),
    "a judged figure that is no number": judged(math.nan),
    "an infinite judged figure": judged(math.inf),
    "metrics without an end": endless("metrics.jsonl"),
    "a mark without an end": endless("run.json"),
    "a state without an end": endless(STATE),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_run_folder_is_shown_or_left_out(
    attack: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs" / "one")
    ATTACKS[attack](run)
    assert exit_code_of(main, ["runs", "runs"]) in (0, 2)
    try:
        read: Run | None = read_run(run, "one")
    except LeftOut:
        read = None
    if read is not None:
        json.loads(data_of(render_page([read])), parse_constant=refuse)
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err and not (tmp_path / "ran").exists()


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def data_of(page: str) -> str:
    return re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]


@pytest.mark.parametrize("name", [r"$\frac{$", "_hidden", "a\x1b[2J", "a\nb", EVIL.replace("/", "∕"), "\u202egnp"])
def test_a_hostile_name_is_shown_as_it_is(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make_run(tmp_path / "runs" / name)
    make_run(tmp_path / "runs" / "other", parameters=2000)
    assert exit_code_of(main, ["compare", str(tmp_path / "runs"), f"out={tmp_path / 'page.html'}"]) == 0
    assert exit_code_of(main, ["runs", str(tmp_path / "runs")]) == 0
    out = capsys.readouterr().out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", out)
    assert sum(line.startswith("other ") for line in out.splitlines()) == 2  # the table's rows are whole
    runs = json.loads(data_of((tmp_path / "page.html").read_text()))["runs"]
    assert name in [run["name"] for run in runs]


def evil_run(folder: Path) -> Path:
    """A run whose every text is an attack on the page's reader."""
    run = make_run(folder / EVIL.replace("/", "∕"))
    metrics(**{f"attention/heads/{EVIL}": [[0.5]]})(run)
    metrics(-1, event=EVIL)(run)
    config("model", "name", EVIL)(run)
    config("data", "path", EVIL)(run)
    sample = {"step": 100, "prompt": EVIL, "text": EVIL + "\ud800"}
    (run / "samples.jsonl").write_text(json.dumps(sample) + "\n" + '{"step": NaN, "prompt": "a", "text": "b"}\n')
    return run


class Elements(HTMLParser):
    """Names and attributes of the elements that a browser makes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [tag, *(name for name, _ in attrs)]


def pages_of_evil_runs(folder: Path) -> list[Path]:
    evil_run(folder / "evil")
    run = evil_run(folder / "alone")
    RunPage(run).draw()
    make_run(folder / "evil" / "other")
    words = ["compare", str(folder / "evil"), f"out={folder / 'compare.html'}"]
    assert exit_code_of(main, words) == 0
    return [run / "run.html", folder / "compare.html"]


def test_no_text_of_a_run_becomes_an_element_of_a_page(tmp_path: Path) -> None:
    for page in pages_of_evil_runs(tmp_path):
        text = page.read_text(encoding="utf-8")
        found = Elements(text).found
        assert "img" not in found and "onerror" not in found and found.count("script") == 2, page
        assert "default-src 'none'" in text
        assert not any(isinstance(value, float) and math.isnan(value) for value in json.loads(data_of(text)).values())


def test_a_browser_runs_no_text_of_a_run(tmp_path: Path) -> None:
    for path in pages_of_evil_runs(tmp_path):
        copy = tmp_path / "page.html"  # the address of a page whose name is an attack would need quoting
        copy.write_bytes(path.read_bytes())
        with opened(copy) as page:
            assert page.title().startswith("ANDREA: ") and page.locator("img").count() == 0
            assert "<img src=x onerror=" in page.locator("body").inner_text()  # shown as text by the page's own script
