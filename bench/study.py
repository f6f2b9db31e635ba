"""What each variant of a recipe is worth: bits per byte at equal tokens and at equal time, over seeds.

    python bench/study.py --shape nano-280 --threads 1 --parallel 2
    python bench/study.py --shape nano-280 --only "value embeddings" --plan
    python bench/study.py --shape nano-280 --speed
    python bench/study.py --shape nano-280 --equal-time --threads 1 --parallel 2
    python bench/study.py --shape nano-280 --table

bench/variants.yaml lists the shapes and the variants, and models of an earlier recipe. A variant with `tune` is first trained
on the first seed with each of its factors, and with further ones until the best factor has a worse one on either side; then
the best is trained on all seeds. --speed measures the training speed of each variant, in runs of their own beside a run of the
base, each on half of the cores: let nothing else run meanwhile. --equal-time then trains each variant for as many tokens as it
learns in the base's time.

Every figure is the whole held-out split's bits per byte at the end of a `train.py` run. Each finished run is written at
once, and a run that was cut off goes on from its checkpoint. A run is recognised by the values of its configuration, not by
its name: it is trained again if a preset has changed, and not if a variant was renamed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from common import RESULTS, ROOT, machine
from studies.runs import Job, measure_speed, run_all
from studies.table import show_table

from andrea.api.command_line import configure
from andrea.config import RunConfig, UserError, digest, recipe_values
from andrea.runtime.files import exclusive_lock, replace_text

RATES = "optimizer.learning_rate optimizer.embedding_learning_rate optimizer.matrix_learning_rate"
FACTORS = (0.71, 1.0, 1.41)
MOST_FACTORS = 8  # tried for one variant
SAME_SPEED = 0.01  # a smaller difference of speed is not trained again at equal time


@dataclass(frozen=True)
class Variant:
    name: str
    words: tuple[str, ...]
    tune: tuple[str, ...]  # keys
    factors: tuple[float, ...]
    tokens: float  # share of the shape's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", type=Path, default=ROOT / "bench" / "variants.yaml")
    parser.add_argument("--shape", required=True)
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="besides the base; default: all of the shape")
    parser.add_argument("--base", default="base", metavar="VARIANT")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337, 1338, 1339])
    parser.add_argument("--threads", type=int, help="of each run; default: as train.py chooses")
    parser.add_argument("--parallel", type=int, default=1, help="runs at once; use --threads 1 with more than one")
    parser.add_argument("--evaluations", type=int, default=1, help="in a run, its end included")
    parser.add_argument("--equal-time", action="store_true", help="train for the base's time too; after --speed")
    parser.add_argument("--speed", action="store_true", help="measure speeds instead of training")
    parser.add_argument("--speed-steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3, help="of --speed")
    parser.add_argument("--plan", action="store_true", help="list the runs that are missing now, and stop")
    parser.add_argument("--table", action="store_true", help="print the table, and stop")
    parser.add_argument("--words", nargs="*", default=[], help="key=value for every run")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the runs are ended too, and saved
    try:
        study = Study(chosen, yaml.safe_load(chosen.variants.read_text(encoding="utf-8")))
        study.check()
    except UserError as error:
        sys.exit(f"error: {error}")
    if chosen.plan:
        for job in study.wanted():
            print(job.title)
    elif chosen.speed:
        measure_speed(study, chosen.rounds, chosen.speed_steps)
    elif not chosen.table:
        failed = run_all(study, chosen.parallel)
        show_table(study)
        sys.exit(1 if failed else 0)
    if not chosen.plan:
        show_table(study)


class Study:
    """The runs of one shape: which are recorded, and which are wanted next."""

    def __init__(self, chosen: argparse.Namespace, described: dict[str, Any]) -> None:
        """chosen: of the command line. described: the content of bench/variants.yaml."""
        if chosen.shape not in described["shapes"]:
            raise UserError(f"--shape {chosen.shape}: known shapes are {', '.join(described['shapes'])}")
        self.chosen, self.shape = chosen, described["shapes"][chosen.shape]
        self.models: dict[str, list[str]] = described.get("models", {})
        self.variants = chosen_variants(described["variants"], chosen.shape, chosen.only, chosen.base)
        self.output: Path = chosen.output or RESULTS / f"study-{chosen.shape}.json"
        self.place = Path(tempfile.gettempdir()) / f"andrea-study-{os.getuid()}" / self.output.stem
        self.place.mkdir(parents=True, exist_ok=True)
        self.runs: dict[str, dict[str, Any]] = {}
        self.speeds: dict[str, dict[str, Any]] = {}
        self.read()

    # ------------------------------------------------------------------------------------------------ the record

    def read(self) -> None:
        if self.output.exists():
            record = json.loads(self.output.read_text(encoding="utf-8"))
            self.runs, self.speeds = record["runs"], record["speeds"]

    def note(self, part: str, key: str, row: dict[str, Any]) -> None:
        """Write one result. Another process may write to the same file."""
        with exclusive_lock(self.place / "lock", on_wait=lambda: None):
            self.read()
            getattr(self, part)[key] = row
            record = {"bench": "study", "machine": machine("cpu"), "shape": self.chosen.shape, **self.shape}
            record |= {"speeds": self.speeds, "runs": self.runs}
            replace_text(self.output, json.dumps(record, indent=1) + "\n")

    # -------------------------------------------------------------------------------------------- what is missing

    def check(self) -> None:
        """Compose every configuration. Raises UserError for a wrong word."""
        for variant in self.variants.values():
            try:
                for factor in variant.factors:
                    self.config(self.words(variant, factor))
            except UserError as error:
                raise UserError(f"variant {variant.name!r}: {error}") from None

    def wanted(self) -> list[Job]:
        """The runs that are missing and whose factor is known: more may be wanted when these have ended."""
        jobs: dict[str, Job] = {}
        for variant in self.variants.values():
            for factor, seed, steps in self.wanted_of(variant):
                job = self.job(variant, factor, seed, steps)
                if job.key not in self.runs:
                    jobs.setdefault(job.key, job)
        return list(jobs.values())

    def wanted_of(self, variant: Variant) -> list[tuple[float, int, int]]:
        """Factor, seed and steps of the runs of a variant that can be known now."""
        first, *_ = self.chosen.seeds
        steps = self.steps(variant)
        factor = self.best_factor(variant)
        if factor is None:
            return [(factor, first, steps) for factor in self.factors_to_try(variant)]
        runs = [(factor, seed, steps) for seed in self.chosen.seeds]
        equal = self.equal_time_steps(variant)
        if self.chosen.equal_time and equal not in (None, steps):
            runs += [(factor, seed, equal) for seed in self.chosen.seeds]
        return runs

    def tried(self, variant: Variant) -> dict[float, float | None]:
        """The bits per byte of each factor on the first seed; None where there is no figure yet."""
        first, steps = self.chosen.seeds[0], self.steps(variant)
        factors, tried = sorted(variant.factors), {}
        while factors:
            factor = factors.pop(0)
            tried[factor] = self.bpb(self.job(variant, factor, first, steps))
            if not factors and None not in tried.values() and len(tried) < MOST_FACTORS:
                best = min(tried, key=lambda each: tried[each])
                low, *_, high = sorted(tried)
                ratio = sorted(tried)[1] / low
                factors = [round(low / ratio, 3)] if best == low else [round(high * ratio, 3)] if best == high else []
        return tried

    def factors_to_try(self, variant: Variant) -> list[float]:
        return [factor for factor, bpb in self.tried(variant).items() if bpb is None]

    def best_factor(self, variant: Variant) -> float | None:
        """None: not all factors have been tried."""
        if not variant.tune:
            return 1.0
        tried = self.tried(variant)
        return None if None in tried.values() else min(tried, key=lambda each: tried[each])

    def bpb(self, job: Job) -> float | None:
        """Infinite for a run that diverged; None if it is missing."""
        row = self.runs.get(job.key)
        return None if row is None else float("inf") if row["bpb"] is None else row["bpb"]

    # --------------------------------------------------------------------------------------- words and steps

    @functools.cache  # noqa: B019 (one study in a process)
    def words(self, variant: Variant, factor: float) -> tuple[str, ...]:
        """The config words of shape, variant and factor. Raises UserError."""
        words = (*self.shape["words"], *variant.words)
        config = self.config(words)
        for key in variant.tune:
            group, _, name = key.partition(".")
            value = getattr(getattr(config, group), name)
            if value is None or isinstance(value, (str, bool)):
                raise UserError(f"tune: {key}={value} is not a number")
            words += (f"{key}={float(f'{value * factor:.4g}')}",)
        return words

    @functools.cache  # noqa: B019
    def config(self, words: tuple[str, ...]) -> RunConfig:
        return configure(RunConfig, "train", self.replaced(words))

    def replaced(self, words: tuple[str, ...]) -> list[str]:
        """A variant's words replace the shape's, and the command line's replace both."""
        by_key = {word.partition("=")[0]: word for word in (*words, *self.chosen.words)}
        model = by_key.pop("model", "model=andrea-nano")
        of_model = self.models.get(model.partition("=")[2], [model])
        return list(({word.partition("=")[0]: word for word in of_model} | by_key).values())

    def steps(self, variant: Variant) -> int:
        """As many as the shape's tokens, or the variant's share of them, take."""
        ours, shape = self.config(self.words(variant, 1.0)), self.config(tuple(self.shape["words"]))
        return max(1, round(self.shape["steps"] * variant.tokens * shape.tokens_per_step / ours.tokens_per_step))

    def equal_time_steps(self, variant: Variant) -> int | None:
        """None: the speed is not known. The steps at equal tokens, if the speeds hardly differ."""
        ratio = self.speed_ratio(variant)
        if ratio is None:
            return None
        return round(self.steps(variant) * (1.0 if abs(ratio - 1) <= SAME_SPEED else ratio))

    def speed_ratio(self, variant: Variant) -> float | None:
        """The variant's speed as a share of the base's."""
        if variant.name == self.chosen.base:
            return 1.0
        measured = self.speeds.get(self.speed_key(variant))
        return measured["ratio"] if measured else None

    def speed_key(self, variant: Variant) -> str:
        base = self.variants[self.chosen.base]
        return digest([recipe_values(self.config(self.words(each, 1.0))) for each in (variant, base)])

    @functools.cache  # noqa: B019
    def job(self, variant: Variant, factor: float, seed: int, steps: int) -> Job:
        words = self.words(variant, factor)
        config = self.config(words)
        data = {"kind": config.data.kind, "path": Path(config.data.path or "").name}
        key = digest({**recipe_values(config), "steps": steps, "seed": seed, "data": data})
        about = {"variant": variant.name, "factor": factor, "seed": seed, "steps": steps}
        return Job(key, about | {"words": list(words)})


def chosen_variants(described: dict[str, Any], shape: str, only: list[str] | None, base: str) -> dict[str, Variant]:
    """The base and the variants to train, by name. Raises UserError for an unknown name."""
    for name in [base, *(only or [])]:
        if name not in described:
            raise UserError(f"no variant {name!r}; known variants: {', '.join(described)}")
    names = [name for name, about in described.items() if shape in (about.get("shapes") or [shape])]
    names = [base] + [name for name in names if name != base and name in (only or names)]
    return {name: make_variant(described, name) for name in names}


def make_variant(described: dict[str, Any], name: str) -> Variant:
    about = described[name]
    if unknown := set(about) - {"words", "with", "without", "tune", "factors", "tokens", "shapes"}:
        raise UserError(f"variant {name!r} has unknown keys: {', '.join(sorted(unknown))}")
    words = tuple(word for part in parts_of(described, name) for word in described[part].get("words", []))
    tune = about.get("tune", "").replace("rates", RATES)
    factors = tuple(map(float, about.get("factors", FACTORS))) if tune else (1.0,)
    if tune and (len(factors) < 3 or min(factors) <= 0):
        raise UserError(f"variant {name!r}: factors={list(factors)}; tune needs at least three, above 0")
    tokens = float(about.get("tokens", 1))
    if not 0 < tokens <= 1:
        raise UserError(f"variant {name!r}: tokens={tokens}; it is a share, above 0 and at most 1")
    return Variant(name, words, tuple(tune.split()), factors, tokens)


def parts_of(described: dict[str, Any], name: str) -> list[str]:
    """The variant and those that it is made of, each once, in the order of their words."""
    about, parts = described[name], []
    for other in about.get("with", []):
        if other not in described:
            raise UserError(f"variant {name!r}: with: no variant {other!r}")
        parts += [part for part in parts_of(described, other) if part not in parts]
    left_out = about.get("without", [])
    if missing := set(left_out) - set(parts):
        raise UserError(f"variant {name!r}: without: {', '.join(sorted(missing))} is not in it")
    return [part for part in parts if part not in left_out] + [name]


if __name__ == "__main__":
    main()
