"""Checkpoints and prepared text with one edit and valid hashes, given to the code that resumes a run, up to its first step.

An edit must be refused before anything is written or moved, or the run must be able to start.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forked_train import ForkedTrain
from hypothesis import strategies as st

from andrea.api.command_line import compose, read
from andrea.api.run import train_one
from andrea.config import RunConfig, UserError, parse, to_plain
from andrea.config.keys import flatten
from andrea.text.corpus import VERIFIED, fingerprint_of, open_corpus
from andrea.text.loader import Loader
from andrea.training.health.health import make_health
from andrea.training.optimizer import LossScale
from andrea.training.planning.length import with_length_and_name
from andrea.training.planning.plan import keys_left_auto
from andrea.training.records import Progress
from andrea.training.records.run_folder import folder_to_write
from andrea.training.resume import (
    check_data,
    find_resume,
    is_done,
    merge,
    remembered_auto,
    resumed_progress,
    show_resume,
    verified_config,
)
from fuzzing.raw_values import json_text, numbers, replaced, wild_json
from fuzzing.trial import Handler

WORDS = [
    "model.d_model=16", "model.n_layer=2", "model.n_head=2", "model.d_mlp=32", "model.sequence_length=32",
    "tokenizer=bpe", "tokenizer.vocab_size=300", "logger=none", "compile=off", "threads=1", "device=cpu",
    "train.tokens_per_step=64", "train.steps=30", "train.log_every=5", "train.eval_every=10", "train.save_every=15",
    "train.sample_tokens=0", "data=text", "name=a",
]  # fmt: skip
# Exit codes of train.py for an edit that makes a run: it was done, not finite, failed its health checks, or was terminated.
ACCEPTED = {0, 3, 4, 128 + signal.SIGTERM, -signal.SIGTERM}
near_misses = st.sampled_from([True, False, "1", "12", 1.0, -1, [], {}, "auto", 15.5, 2**53, 1e39, 1e308, [1.0], None])
values = st.one_of(wild_json, numbers, near_misses)
files = st.sampled_from(["state.json"] * 5 + ["manifest.json", "tokenizer.json", "meta.json"])
resumes = st.tuples(files, st.lists(values, min_size=1, max_size=2), st.integers())


def edited(tree: Any, name: str, new: list[Any], rng: random.Random) -> Any:
    """`tree` with each of the values of `new` somewhere in it; seldom in the long list of random bytes."""
    if name != "state.json":
        for value in new:
            tree = replaced(tree, value, rng)
        return tree
    tree = copy.deepcopy(tree)
    bytes_of_random = tree.pop("torch_random")
    for value in new:
        tree = replaced(tree, value, rng)
    if isinstance(tree, dict) and "torch_random" not in tree and rng.random() < 0.97:
        if rng.random() < 0.05:
            bytes_of_random[rng.randrange(len(bytes_of_random))] = copy.deepcopy(new[0])  # it may be the whole tree
        tree["torch_random"] = bytes_of_random
    return tree


def with_new_fingerprint(meta: Any) -> Any:
    """What an attacker who can write meta.json would write: a fingerprint that agrees with the rest, if there is one."""
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
        return meta | {"fingerprint": fingerprint_of(meta["tokenizer"], meta)}
    return meta


def manifest_of(folder: Path) -> bytes:
    listed = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in folder.iterdir()
        if path.name != "manifest.json"
    }
    return json_text({"format_version": 1, "files": listed})


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file, except for the notes on which shards have been verified."""
    found = {}
    for place, _, names in os.walk(folder):
        if VERIFIED in names:
            names.remove(VERIFIED)
        for name in names:
            about = os.stat(os.path.join(place, name))
            found[os.path.join(place, name)] = about.st_size, about.st_mtime_ns
    return found


class EditedRun:
    """A finished run of thirty steps with its checkpoint of step 15 and its prepared text, of which one file is edited."""

    def __init__(self, folder: Path, train: Callable[[list[str]], Any] = train_one) -> None:
        self.folder, self.runs, text = folder, folder / "runs", folder / "text"
        text.mkdir(parents=True)
        (text / "a.txt").write_text("the quick brown fox jumps over the lazy dog, once more and once more\n" * 60)
        self.places = [f"runs_dir={self.runs}", f"data_dir={folder / 'data'}"]
        self.words = [*WORDS, *self.places, f"data.path={text}"]
        with contextlib.redirect_stdout(io.StringIO()):
            train(self.words)
        self.checkpoint = self.runs / "a" / "checkpoints" / "step-00000015"
        (self.prepared,) = (path.parent for path in (folder / "data").glob("*/meta.json"))
        places = [*self.checkpoint.iterdir(), *self.prepared.iterdir()]
        self.good = {path: path.read_bytes() for path in places}

    def edit(self, tried: tuple[str, list[Any], int]) -> None:
        """Put the original files back, then edit one and make the hashes valid again."""
        name, new, rng_seed = tried
        for path, content in self.good.items():
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)
        path = (self.prepared if name == "meta.json" else self.checkpoint) / name
        tree = edited(json.loads(self.good[path]), name, new, random.Random(rng_seed))
        path.write_bytes(json_text(with_new_fingerprint(tree) if name == "meta.json" else tree))
        if name not in ("manifest.json", "meta.json"):
            (self.checkpoint / "manifest.json").write_bytes(manifest_of(self.checkpoint))


def make_resumes(folder: Path) -> Handler:
    run = EditedRun(folder)
    line = read(RunConfig, [*run.words, f"resume={run.checkpoint}"])
    typed = parse(RunConfig, compose("train", line))
    restart = read(RunConfig, [f"resume={run.checkpoint}", *run.places])

    def resume() -> None:
        """What `train.py resume=…` does before it makes the model."""
        found = find_resume(typed)
        saved = verified_config(found, typed)
        left_auto = remembered_auto(found)
        merged, changes = merge(
            found.state["config"], to_plain(typed), restart.groups, restart.values, left_auto=left_auto
        )
        config = with_length_and_name(parse(RunConfig, merged))
        left_auto = keys_left_auto(flatten(merged), left_auto, restart.values)
        progress: Progress = resumed_progress(found, saved, config, left_auto)
        if is_done(found, progress.planned_steps):
            return
        show_resume(found, changes, saved, progress, config)
        folder_to_write(config, found)
        if (config.data, config.tokenizer, config.data_dir) != (typed.data, typed.tokenizer, typed.data_dir):
            return  # other text would be prepared now, whose path the user has been shown
        corpus = open_corpus(config.data, config.tokenizer, Path(config.data_dir), str)
        check_data(found, corpus)
        loader = Loader(corpus.sources, config.model.sequence_length, config.seed)
        loader.batch(found.step * config.sequences_per_step, 1)
        health = make_health(config, corpus, loader, found)
        health.note_step(found.step + 1, 2.0, 1.0)
        health.failed()
        LossScale(torch.device("cpu"), active=True).load_state(found.state["loss_scale"])
        progress.flops += 1
        progress.seconds += 1.0

    def handle(tried: tuple[str, list[Any], int]) -> None:
        run.edit(tried)
        before = snapshot(folder)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                resume()
        except UserError:
            assert snapshot(folder) == before, "written before the refusal"
            raise

    return handle


def make_commands(folder: Path) -> Handler:
    """The same edits, each given to train.py in a fork of this process, which must not have trained before: autograd forbids it."""

    def train(words: list[str]) -> None:
        with tempfile.TemporaryFile() as printed:
            assert ForkedTrain(words, printed, printed).wait() == 0

    run = EditedRun(folder, train)
    shutil.copytree(run.runs, folder / "runs-before")
    data_line = f"  data: text {folder / 'text'}\n"

    def handle(tried: tuple[str, list[Any], int]) -> None:
        shutil.rmtree(run.runs)
        shutil.copytree(folder / "runs-before", run.runs)
        run.edit(tried)
        before = snapshot(folder)
        reader, writer = os.pipe()
        with tempfile.TemporaryFile("w+") as errors:
            process = ForkedTrain([f"resume={run.checkpoint}", "name=a", *run.places], writer, errors)
            os.close(writer)
            with open(reader, encoding="utf-8", errors="replace") as shown:
                for line in shown:  # it trains, or would now prepare other text, whose path it has shown
                    if line.startswith("step ") or (line.startswith("  data: ") and line != data_line):
                        process.send_signal(signal.SIGTERM)
            code = process.wait()
            errors.seek(0)
            said = errors.read()
        assert "Traceback" not in said and code in ACCEPTED | {2}, f"exit code {code}: {said[-2000:]}"
        if code == 2:
            assert snapshot(folder) == before, "written before the refusal"
            raise UserError(said.strip().rpartition("\n")[2])

    return handle
