"""The processes of bench/study.py: training runs, side by side, and the measurement of speeds, one run at a time."""

from __future__ import annotations

import dataclasses
import os
import shutil
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from common import ROOT

from andrea.training.records.run_folder import read_lines

if TYPE_CHECKING:
    from study import Study, Variant

QUIET = ("device=cpu", "logger=none", "train.sample_tokens=0")
RARELY = 1_000_000  # steps
SAVES = 8  # in a run, so that one that was cut off loses little
POLL_S = 0.2
NOT_FINITE, INTERRUPTED = 3, (129, 130, 143, -2, -15)  # exit codes


@dataclasses.dataclass(frozen=True)
class Job:
    """One training run. about: variant, factor, seed, steps and words."""

    key: str
    about: dict[str, Any] = dataclasses.field(hash=False)

    @property
    def title(self) -> str:
        about = self.about
        factor = "" if about["factor"] == 1 else f", factor {about['factor']:g}"
        return f"{about['variant']}{factor}, {about['steps']} steps, seed {about['seed']}"


def run_all(study: Study, parallel: int) -> list[Job]:
    """Train until nothing is wanted, `parallel` runs at once. Returns the runs that failed, which are not tried again."""
    running: dict[str, tuple[Job, subprocess.Popen]] = {}
    failed: dict[str, Job] = {}
    try:
        while True:
            waiting = [job for job in study.wanted() if job.key not in running and job.key not in failed]
            for job in waiting[: max(0, parallel - len(running))]:
                running[job.key] = job, start(study, job)
            if not running:
                return list(failed.values())
            while all(process.poll() is None for _, process in running.values()):
                time.sleep(POLL_S)
            for key in [key for key, (_, process) in running.items() if process.poll() is not None]:
                job, process = running.pop(key)
                if not finish(study, job, process.returncode):
                    failed[key] = job
    finally:
        for _, process in running.values():
            process.terminate()  # it saves, and goes on from there next time
        for _, process in running.values():
            process.wait()


def start(study: Study, job: Job) -> subprocess.Popen:
    steps, threads = job.about["steps"], study.chosen.threads
    every = {"eval": -(-steps // study.chosen.evaluations), "save": -(-steps // SAVES)}
    words = [*job.about["words"], *QUIET, *(f"train.{name}_every={n}" for name, n in every.items())]
    words += [f"train.steps={steps}", f"seed={job.about['seed']}", "resume=auto", "train.keep=1"]
    words += [f"threads={threads}"] if threads else []
    return train(study, words, job.key)


def train(study: Study, words: list[str], name: str) -> subprocess.Popen:
    place = study.place
    words = [*words, f"runs_dir={place / 'runs'}", f"data_dir={place.parent / 'data'}", f"name={name}"]
    with open(place / f"{name}.txt", "w", encoding="utf-8") as log:
        command = [sys.executable, str(ROOT / "train.py"), *study.replaced(tuple(words))]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def finish(study: Study, job: Job, code: int) -> bool:
    """Record the run and remove its folder. Returns whether there was a result."""
    log, folder = study.place / f"{job.key}.txt", study.place / "runs" / job.key
    if code not in (0, NOT_FINITE):
        last = "" if code in INTERRUPTED else f": {log.read_text(encoding='utf-8')[-1000:]}"
        print(f"failed with exit code {code}: {job.title}{last}", flush=True)
        return False
    records = read_lines(folder / "metrics.jsonl")
    evaluations = [record for record in records if "val/bpb" in record and "event" not in record]
    row: dict[str, Any] = {"bpb": None, **job.about}  # None: the run diverged
    if code == 0:
        last = evaluations[-1]
        row |= {"bpb": last["val/bpb"], "tokens": last["tokens"], "seconds": round(last["seconds"], 1)}
        row["curve"] = [[each["tokens"], each["val/bpb"]] for each in evaluations]
    study.note("runs", job.key, row)
    print(f"{'diverged' if code else format(row['bpb'], '.4f')}  {job.title}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    log.unlink()
    return True


def measure_speed(study: Study, rounds: int, steps: int) -> None:
    """Measure each variant whose speed is not known: its speed over the base's, which runs beside it.

    Each of the two has half of the cores: what else the machine does, slows both. They change places from round to round.
    """
    base = study.variants[study.chosen.base]
    for variant in study.variants.values():
        if study.speed_ratio(variant) is not None:
            continue
        pairs = [speeds_side_by_side(study, variant, base, steps, swapped=bool(turn % 2)) for turn in range(rounds)]
        ratios = [ours / theirs for ours, theirs in pairs]
        row = {"variant": variant.name, "base": base.name, "ratio": statistics.median(ratios), "ratios": ratios}
        row |= {"tokens_per_second": statistics.median(ours for ours, _ in pairs)}
        row |= {"base_tokens_per_second": statistics.median(theirs for _, theirs in pairs)}
        study.note("speeds", study.speed_key(variant), row)
        print(f"{row['ratio']:.3f} ({min(ratios):.3f} to {max(ratios):.3f})  {variant.name}", flush=True)


def speeds_side_by_side(
    study: Study, variant: Variant, base: Variant, steps: int, swapped: bool
) -> tuple[float, float]:
    """Tokens per second of the variant and of the base, which train at the same time. swapped: on the other cores."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    assert half, "--speed needs two cores"
    halves = [cores[:half], cores[half : 2 * half]]
    started = {}
    for each, place in zip((variant, base), halves[::-1] if swapped else halves, strict=True):
        name = "speed-base" if each is base else "speed"
        shutil.rmtree(study.place / "runs" / name, ignore_errors=True)
        every = [f"train.{what}_every={RARELY}" for what in ("eval", "save")]
        words = [*study.words(each, 1.0), *QUIET, *every, "train.log_every=1", "train.eval_tokens=4096"]
        process = train(study, [*words, f"train.steps={steps}", f"threads={half}"], name)
        os.sched_setaffinity(process.pid, place)
        started[name] = process
    try:
        codes = [process.wait() for process in started.values()]
    finally:
        for process in started.values():
            process.terminate()
    for name, code in zip(started, codes, strict=True):
        log = (study.place / f"{name}.txt").read_text(encoding="utf-8")
        assert code == 0, f"exit code {code} of {name} for {variant.name}: {log[-1000:]}"
    return median_speed(study, "speed"), median_speed(study, "speed-base")


def median_speed(study: Study, name: str) -> float:
    """Tokens per second of a run: the median over its steps, so that those which it made alone count little."""
    records = read_lines(study.place / "runs" / name / "metrics.jsonl")
    return statistics.median([r["train/tokens_per_second"] for r in records if "train/tokens_per_second" in r][1:])
