"""Runs compared: what is read of a run folder, what is said of it, and the page in a real browser."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from andrea.checkpoint import write_checkpoint
from andrea.cli.command_line import configure
from andrea.config import CompareConfig, RunConfig, UserError, to_plain
from andrea.insight.compare.compare import compare, page_of, run_words
from andrea.insight.compare.runs import LeftOut, differences, find_run_folders, read_run, read_runs, warnings_of
from andrea.insight.compare.table import looks, sequential, table, terminal_table
from andrea.text.tokenizer import ByteTokenizer
from andrea.training.start import plain_text

CONFIG = plain_text(to_plain(configure(RunConfig, "train", ["logger=none", "tokenizer=byte", "train.steps=100"])))
CHROMIUM = Path("/usr/bin/chromium")


def loss_of(parameters: float, tokens: float) -> float:
    return 1.2 + 9 / parameters**0.3 + 12 / tokens**0.25


def make_run(
    folder: Path,
    parameters: int = 1000,
    tokens: int = 10_000,
    step: int = 100,
    saved: bool = True,
    data: str = "aa",
    **keys,
) -> Path:
    """A run folder as the trainer leaves it, evaluated at each quarter, with a checkpoint of `parameters` numbers."""
    folder.mkdir(parents=True)
    config = copy.deepcopy(CONFIG)
    for key, value in keys.items():
        group, _, last = key.partition("__")
        config[group][last] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = []
    for done in range(5, step + 1, 5):
        seen = tokens * done // 100
        record = {"step": done, "tokens": seen, "flops": 6.0 * parameters * seen, "seconds": done / 10}
        record |= {"train/loss": loss_of(parameters, seen) + 0.1, "train/tokens_per_second": 1000.0 + done}
        if done % 25 == 0:
            record |= {"val/loss": loss_of(parameters, seen), "val/bpb": loss_of(parameters, seen) / 2}
        lines.append(json.dumps(record))
    if step == 100:
        event = {key: value for key, value in json.loads(lines[-1]).items() if not key.startswith("train/")}
        lines.append(json.dumps(event | {"event": "done"}))
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    if saved:
        state = {"step": step, "tokens": tokens, "config": config, "data": data * 32}
        write_checkpoint(
            folder / "checkpoints", state, {"w": torch.zeros(parameters - 3), "v": torch.zeros(3)}, {}, ByteTokenizer()
        )
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Eight finished runs of four sizes and two budgets, one of them with a hostile name."""
    for size in (1000, 4000, 16000, 64000):
        for budget in (5, 100):
            name = "a<b>&</script>" if (size, budget) == (1000, 5) else f"n{size}-r{budget}"
            make_run(tmp_path / "runs" / name.replace("/", "∕"), size, size * budget)
    return tmp_path / "runs"


def said(*words: str, **keys) -> str:
    lines: list[str] = []
    config = configure(CompareConfig, "compare", run_words(list(words)))
    size = configure(RunConfig, "train", [f"model={config.predict}"]).model if config.predict else None
    assert compare(config, size, lines.append) == 0
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------- reading


def test_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "one", parameters=1234, tokens=20_000), "one")
    assert (run.parameters, run.tokens, run.step, run.finished) == (1234, 20_000, 100, True)
    assert run.loss == pytest.approx(loss_of(1234, 20_000)) and run.bpb == pytest.approx(run.loss / 2)
    assert [point["step"] for point in run.validation] == [25, 50, 75, 100]  # the closing event is no fifth evaluation
    assert run.tokens_per_second == 1000 + (50 + 55) / 2  # of 5, 10, … 100, the median
    assert (run.mfu, run.peak_memory_bytes, run.fingerprint) == (None, None, "aa" * 32)
    assert run.tokenizer == ByteTokenizer().identity


def test_an_unfinished_run_with_a_torn_line_counts_as_far_as_it_came(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "cut", step=70)
    with open(folder / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 75, "tok')
    run = read_run(folder, "cut")
    assert not run.finished
    assert run.progress == "at step 70 of 100, evaluated at 50"


def test_what_cannot_be_compared_is_left_out_by_name(tmp_path: Path) -> None:
    make_run(tmp_path / "early", step=20)
    make_run(tmp_path / "fine")
    make_run(tmp_path / "unsaved", saved=False)
    (tmp_path / "fresh").mkdir()
    (tmp_path / "fresh" / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.yaml").write_text("a: [")
    (tmp_path / "wandb").mkdir()
    found, left_out = read_runs(find_run_folders([str(tmp_path)]))
    assert [run.name for run in found] == ["fine"]
    reasons = {line.split(":")[0]: line for line in left_out}
    assert set(reasons) == {"early", "unsaved", "fresh", "odd"}
    assert "no evaluation yet, at step 20" in reasons["early"]
    assert "no checkpoint yet" in reasons["unsaved"] and "no record yet" in reasons["fresh"]
    assert "config.yaml" in reasons["odd"]


def test_a_damaged_checkpoint_is_a_reason_not_a_traceback(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one")
    next((folder / "checkpoints").glob("step-*/model.safetensors")).write_bytes(b"\x08")
    with pytest.raises(LeftOut, match="step-00000100 cannot be read"):
        read_run(folder, "one")


def test_runs_of_one_name_are_told_apart_by_their_folders_and_doubles_counted_once(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        make_run(tmp_path / parent / "same")
    found, _ = read_runs(find_run_folders([str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "b" / "same")]))
    assert [run.name for run in found] == ["a/same", "b/same"]


def test_paths_that_hold_no_run_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        find_run_folders([str(tmp_path / "none")])
    with pytest.raises(UserError, match="holds no run"):
        find_run_folders([str(tmp_path)])


# ---------------------------------------------------------------------------------------------------- comparing


def test_different_data_tokenizers_and_evaluations_are_warned_of(tmp_path: Path) -> None:
    one = read_run(make_run(tmp_path / "one"), "one")
    two = read_run(make_run(tmp_path / "two", data="bb", train__eval_tokens=4096), "two")
    assert warnings_of([one, one]) == []
    data, evaluated = warnings_of([one, two])
    assert "data differ" in data and "aaaaaaaaaaaa: one" in data and "bbbbbbbbbbbb: two" in data
    assert "null: one; 4096: two" in evaluated
    other = read_run(make_run(tmp_path / "three"), "three")
    object.__setattr__(other, "tokenizer", "bpe-300-ffff")
    assert any("tokenizers differ" in line and "bits per byte do" in line for line in warnings_of([one, other]))


def test_only_keys_that_differ_are_listed_and_names_and_paths_never(tmp_path: Path) -> None:
    one = read_run(make_run(tmp_path / "one"), "one")
    two = read_run(make_run(tmp_path / "two", optimizer__learning_rate=0.5, logger__tags=["x"]), "two")
    two.config["name"], two.config["newer"] = "other", {"key": 1}
    learned = CONFIG["optimizer"]["learning_rate"]
    assert differences([one, two]) == {"optimizer.learning_rate": [learned, 0.5], "newer.key": ["—", 1]}
    assert differences([one, one]) == {}


def test_the_table_is_aligned_within_a_hundred_columns(runs: Path) -> None:
    found, _ = read_runs(find_run_folders([str(runs)]))
    columns, rows = table(found)
    assert "MFU" not in [column.title for column in columns]  # no run recorded it
    named = [["a-very-long-name-of-a-run-" * 4, *row] for row in rows]
    lines = terminal_table(["run", *(column.title for column in columns)], named, 100).splitlines()
    assert max(map(len, lines)) <= 100
    assert {line.rindex(line.split("  ")[-1].strip()[-1]) for line in lines[1:]} == {len(lines[1]) - 1}
    assert all("…" in line for line in lines[1:])


def test_sizes_are_ordered_by_lightness_and_equal_sizes_told_apart(runs: Path) -> None:
    found, _ = read_runs(find_run_folders([str(runs)]))
    drawn = looks(found)
    for ground in ("light", "dark"):
        colours = list(dict.fromkeys(getattr(look, ground) for look in drawn))
        assert len(colours) == 4
        brightness = [
            sum(w * int(c[i : i + 2], 16) for w, i in ((0.2126, 1), (0.7152, 3), (0.0722, 5))) for c in colours
        ]
        assert brightness == sorted(brightness)
    assert all(
        first.light == second.light and first.mark != second.mark
        for first, second in zip(drawn[::2], drawn[1::2], strict=True)
    )
    assert sequential(0, 0.0, 0.0)[0] == "#" and len(sequential(1, 0.5, 1.0)) == 7


# ---------------------------------------------------------------------------------------------------- the command


def test_the_command_writes_page_and_picture_and_prints_the_answer(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "page.html"
    text = said(
        str(runs), f"out={out}", "size=900x600", "predict=andrea-nano", "predict_tokens=20M".replace("M", "000000")
    )
    assert "full law from 8 runs" in text and "predicted for andrea-nano" in text
    assert "on 20.0M tokens" in text and "take it as a guess" in text  # thousands of times the runs' size
    assert "caution" not in text
    page = out.read_text()
    assert (
        "@DATA@" not in page
        and "http://" not in page.replace("http://www.w3.org/2000/svg", "")
        and "https://" not in page
    )
    header = out.with_suffix(".png").read_bytes()[:24]
    assert (int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")) == (900, 600)


def test_fewer_than_four_finished_runs_are_no_fit_and_it_says_so(tmp_path: Path) -> None:
    for index, size in enumerate((1000, 2000, 4000)):
        make_run(tmp_path / f"r{index}", size, 20 * size)
    make_run(tmp_path / "cut", 9000, 90_000, step=50)
    text = said(str(tmp_path), f"out={tmp_path / 'p.html'}")
    assert "no fit: 3 finished runs" in text and "\n* cut: at step 50 of 100\n" in text


def test_runs_on_different_data_are_not_fitted(runs: Path, tmp_path: Path) -> None:
    make_run(runs / "elsewhere", 5000, 50_000, data="bb")
    text = said(str(runs), f"out={tmp_path / 'p.html'}")
    assert "no fit: the runs were trained on different data" in text and "warning: data differ" in text


def test_a_fit_over_two_recipes_is_cautioned(runs: Path, tmp_path: Path) -> None:
    make_run(runs / "other", 5000, 50_000, optimizer__learning_rate=0.5)
    text = said(str(runs), f"out={tmp_path / 'p.html'}")
    assert re.search(r"caution: .* differ in optimizer\.learning_rate", text)


def test_a_word_that_is_a_path_is_a_path_even_with_an_equals_sign(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "rate=0.1")
    assert run_words([str(folder), "out=x.html", "runs"]) == [f"runs={folder}", "out=x.html", "runs=runs"]
    assert configure(CompareConfig, "compare", run_words([str(folder)])).runs == [str(folder)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no run named"),
        (["runs=a", "out=x.png"], "must end in .html"),
        (["runs=a", "size=big"], "size=big is not a picture's size"),
        (["runs=a", "size=100x100"], "size=100x100"),
        (["runs=a", "predict_tokens=5"], "predict=andrea-480m"),
        (["runs=a", "predict=andrea-nano", "predict_tokens=-5"], "predict_tokens=-5 must be greater"),
        (["runs=a", "seed=-1"], "seed=-1 must be from 0"),
        (["runs=a", "predcit=x"], "did you mean predict"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        configure(CompareConfig, "compare", words)


# ------------------------------------------------------------------------------------------------- in a browser


def test_no_name_ends_the_script_it_stands_in() -> None:
    page = page_of({"runs": ["</script><script>bad()"]})
    assert page.count("</script>") == page.count("<script")


def test_the_page_answers_in_a_browser(runs: Path, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed")
    out = tmp_path / "page.html"
    said(str(runs), f"out={out}", "size=400x300")
    largest = read_run(runs / "n64000-r100", "n64000-r100")
    flags = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync"
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=flags.split())
        page = browser.new_page(viewport={"width": 1000, "height": 900})
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(out.as_uri())
        title = page.locator("#chart text.title").first
        assert title.text_content() == "tokens"
        page.check("input[value=flops]")
        assert title.text_content() == "FLOPs of training"
        page.check("input[value=bpb]")
        assert "bits per byte" in page.locator("#chart text.title").last.text_content()

        # The lowest mark is the largest run's last evaluation: point at it, and read its figures back.
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
        assert faults == []
        browser.close()
