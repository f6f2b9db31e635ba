"""The records and notes of a run folder, with one to three of them damaged, given to `resume=auto`, `runs` and `compare`.

Each must go on, or refuse in one line. No line may be lost in silence: it is a record that is read, it is counted as
damaged, or it is the last one and torn; and a resumed run keeps each whole record, and the file as it was.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from andrea.api.command_line import compose, read
from andrea.checkpoint.find_and_prune import mark_and_prune
from andrea.config import RunConfig, RunsConfig, UserError, parse
from andrea.insight.compare.comparison import scaling_lines
from andrea.insight.compare.page import render_page, terminal_lines
from andrea.insight.compare.runs import read_runs
from andrea.insight.runs import show_runs
from andrea.runtime.files import StorageFailed
from andrea.training.records.run_folder import RunFolder, folder_to_write, mark, read_records, run_folder_locked
from andrea.training.resume import find_resume, is_done
from fuzzing.raw_values import DEEP, any_text, damaged, json_text, numbers, replaced, wild_json
from fuzzing.resumes import EditedRun, manifest_of
from fuzzing.trial import Handler

RECORDS = ("metrics.jsonl", "samples.jsonl", "health.jsonl")
FILES = [*RECORDS, "checkpoints/best", "run.json", "config.yaml"]
NOT_RECORDS = [b"5", b"[]", b"{}", b'{"step": "x"}', b'{"step": 1e9}', b"null", b"\0" * 40, b"\xff\xfe", DEEP.encode(),
               b"9" * 5000, b'{"step": 5, "tr', b"<<<<<<< HEAD", b'{"step": -1}', b'{"step": true}', b"\xed\xa0\x80"]  # fmt: skip
value = st.one_of(wild_json, numbers)
lines = st.one_of(st.sampled_from(NOT_RECORDS), st.binary(max_size=40), st.builds(json_text, value))
whole = st.one_of(st.sampled_from([b"", b"\n", b"\0" * 5000, DEEP.encode(), b"step-99999999\n", b"../../x\n"]), lines,
                  st.builds(lambda text: text.encode("utf-8", "surrogatepass"), any_text))  # fmt: skip
damage = st.one_of(
    st.tuples(st.sampled_from(FILES), st.just("bits"), st.none(), st.integers()),
    st.tuples(st.sampled_from(RECORDS), st.sampled_from(["line", "more"]), lines, st.integers()),
    st.tuples(st.sampled_from(RECORDS), st.just("tree"), value, st.integers()),
    st.tuples(st.sampled_from(FILES), st.just("whole"), whole, st.integers()),
    st.tuples(st.sampled_from(FILES), st.sampled_from(["folder", "gone", "link"]), st.none(), st.integers()),
)
records = st.lists(damage, min_size=1, max_size=3)
KEPT_KEYS = {"model": ("name",), "train": ("steps",), "data": ("kind",), "tokenizer": ("kind",)}


class DamagedRecords(EditedRun):
    """A finished run with samples and alerts; its config.yaml is cut to the keys that are read, since YAML is slow."""

    def __init__(self, folder: Path) -> None:
        import yaml

        super().__init__(folder)
        self.run = self.runs / "a"
        samples = [{"step": step, "tokens": 64 * step, "prompt": "é", "text": "a\n"} for step in (10, 20, 30)]
        alerts = [{"step": step, "finding": "x", "begins": True, "message": "m"} for step in (10, 30)]
        for name, written in (("samples.jsonl", samples), ("health.jsonl", alerts)):
            (self.run / name).write_bytes(b"".join(json_text(each) + b"\n" for each in written))
        config = yaml.safe_load((self.run / "config.yaml").read_text(encoding="utf-8"))
        small = {group: {key: config[group][key] for key in keys} for group, keys in KEPT_KEYS.items()}
        small |= {"runs_dir": config["runs_dir"], "seed": config["seed"]}
        (self.run / "config.yaml").write_text(yaml.safe_dump(small), encoding="utf-8")
        for checkpoint in (self.run / "checkpoints").glob("step-*"):  # without 5056 numbers, which nothing here reads
            state = json.loads((checkpoint / "state.json").read_bytes())
            (checkpoint / "state.json").write_bytes(json_text(state | {"torch_random": [0]}))
            (checkpoint / "manifest.json").write_bytes(manifest_of(checkpoint))
        self.content = {name: (self.run / name).read_bytes() for name in FILES}
        self.expected = sorted(path.name for path in self.run.iterdir())

    def restore(self) -> None:
        for path in self.run.iterdir():
            if path.name not in self.expected:
                path.unlink()
        for name, content in self.content.items():
            path = self.run / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
            path.write_bytes(content)

    def damage(self, name: str, how: str, new: Any, rng: random.Random) -> None:
        path = self.run / name
        old = path.read_bytes() if path.is_file() else b""
        path.unlink() if path.is_file() or path.is_symlink() else shutil.rmtree(path, ignore_errors=True)
        of_lines = old.split(b"\n")
        at = rng.randrange(len(of_lines))
        if how == "folder":
            path.mkdir()
        elif how == "link":
            path.symlink_to("/dev/zero")
        elif how in ("line", "more"):
            of_lines[at : at + (how == "line")] = [new]
        elif how == "tree":
            with contextlib.suppress(ValueError, RecursionError):
                of_lines[at] = json_text(replaced(json.loads(of_lines[at]), new, rng))
        if how not in ("folder", "link", "gone"):
            path.write_bytes({"bits": damaged(old, rng), "whole": new}.get(how, b"\n".join(of_lines)))


def check_accounts(path: Path, good: bytes) -> list[str]:
    """Every line is a record, counted as damaged, blank, or torn; every line of `good` is a record. Returns the complaint."""
    found = read_records(path)
    if not path.is_file():
        return []
    there = path.read_bytes().split(b"\n")
    n_line = sum(bool(line.strip()) for line in there)
    n_torn = bool(there[-1].strip()) and there[-1] not in found.lines[-1:]
    assert n_line == len(found.records) + len(found.damaged) + n_torn
    survivors = set(good.split(b"\n")) - {b""}
    assert [line for line in there if line in survivors] == [line for line in found.lines if line in survivors]
    return [found.complaint] if found.damaged else []


def make_records(folder: Path) -> Handler:
    run = DamagedRecords(folder)
    typed = parse(RunConfig, compose("train", read(RunConfig, [*run.words, "resume=auto"])))
    listed = parse(RunsConfig, compose("runs", read(RunsConfig, [f"runs_dir={run.runs}"])))

    def resume(step: int, say: list[str]) -> None:
        """What `train.py resume=auto` does with the run folder before it trains."""
        found = find_resume(typed)
        is_done(found, found.step)
        place, is_own = folder_to_write(typed, found)
        assert is_own and place == run.run
        with run_folder_locked(place):
            mark_and_prune(place, 3)
            mark(place, found.state["run"])
            RunFolder(place).cut_after(step, say.append)

    def look(complaints: dict[str, list[str]]) -> None:
        """What `andrea runs` and `andrea compare` read. Raises UserError if both leave the run out by name."""
        said: list[str] = []
        show_runs(listed, said.append)
        compared, left_out = read_runs([run.run])
        if compared:
            scaling = scaling_lines(compared, None, None, 0)
            terminal_lines(compared, scaling)
            render_page(compared, left_out, scaling)
        for name in ("metrics.jsonl", "samples.jsonl"):
            for complaint in complaints[name]:
                assert not compared or any(complaint in line for line in left_out), left_out
                assert name == "samples.jsonl" or any(complaint in line for line in said), said
        assert compared or "left out" in left_out[0]

    def handle(tried: list[tuple[str, str, Any, int]]) -> None:
        run.restore()
        for name, how, new, rng_seed in tried:
            run.damage(name, how, new, random.Random(rng_seed))
        complaints = {name: check_accounts(run.run / name, run.content[name]) for name in RECORDS}
        before = {name: (run.run / name).read_bytes() for name in RECORDS if (run.run / name).is_file()}
        step, said = random.Random(tried[0][3]).choice([15, 30]), []
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                look(complaints)
                resume(step, said)
        except StorageFailed as refused:
            raise UserError(str(refused)) from None
        for name, content in before.items():
            kept = (run.run / name).read_bytes().split(b"\n")
            good = [json.loads(line) for line in kept if line]  # nothing but records, and all that are whole
            assert all(record["step"] <= step and "event" not in record for record in good)
            survivors = [line for line in content.split(b"\n") if line and line in run.content[name].split(b"\n")]
            early = [line for line in survivors if json.loads(line)["step"] <= step and b'"event"' not in line]
            assert [line for line in kept if line in early] == early
            for complaint in complaints[name]:
                assert sum(complaint in line for line in said) == 1
                assert any(path.read_bytes() == content for path in run.run.glob(f"aside-{name}-*"))

    return handle
