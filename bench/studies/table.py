"""The table of bench/study.py, in Markdown."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from study import Study, Variant

HEAD = (
    "variant",
    "factor",
    "bits per byte",
    "spread",
    "against the base",
    "tokens/s",
    "at equal time",
    "against the base",
)


@dataclass(frozen=True)
class Figures:
    """Bits per byte over the seeds that both the variant and the base have; the spread is largest less smallest."""

    mean: float
    spread: float
    difference: float  # mean over seeds of (variant - base)
    error: float | None  # standard error of the difference; None with one seed
    n_seed: int


def figures(ours: dict[int, float], base: dict[int, float]) -> Figures | None:
    """ours, base: bits per byte by seed. None without a common seed."""
    seeds = sorted(ours.keys() & base.keys())
    if not seeds:
        return None
    values = [ours[seed] for seed in seeds]
    if not all(map(math.isfinite, values)):
        return Figures(math.inf, math.inf, math.inf, None, len(seeds))
    differences = [ours[seed] - base[seed] for seed in seeds]
    error = statistics.stdev(differences) / math.sqrt(len(seeds)) if len(seeds) > 1 else None
    return Figures(statistics.mean(values), max(values) - min(values), statistics.mean(differences), error, len(seeds))


def by_seed(study: Study, variant: Variant, steps: int) -> dict[int, float]:
    """The recorded bits per byte of the best factor, by seed."""
    factor = study.best_factor(variant)
    if factor is None:
        return {}
    found = {seed: study.bpb(study.job(variant, factor, seed, steps)) for seed in study.chosen.seeds}
    return {seed: bpb for seed, bpb in found.items() if bpb is not None}


def show_table(study: Study) -> None:
    """Print one row for each variant that has a result, the best first, and name those that have none."""
    base = study.variants[study.chosen.base]
    of_base = by_seed(study, base, study.steps(base))
    rows, missing = [], []
    for variant in study.variants.values():
        equal_tokens = figures(by_seed(study, variant, study.steps(variant)), of_base)
        if equal_tokens is None:
            missing.append(variant.name)
            continue
        ratio, is_base = study.speed_ratio(variant), variant is base
        equal = None if is_base else study.equal_time_steps(variant)
        equal_time = figures(by_seed(study, variant, equal), of_base) if equal else None
        cells = [variant.name, f"{study.best_factor(variant):g}" if variant.tune else ""]
        cells += [number(equal_tokens.mean), number(equal_tokens.spread), "" if is_base else against(equal_tokens)]
        cells += ["" if ratio is None else f"{ratio:.2f}"]
        cells += [number(equal_time.mean), against(equal_time)] if equal_time else ["", ""]
        rows.append((equal_tokens.difference, cells))
    print(f"\n{study.chosen.shape}: seeds {', '.join(map(str, study.chosen.seeds))}")
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for _, cells in sorted(rows, key=lambda row: row[0]):
        print(f"| {' | '.join(cells)} |")
    if missing:
        print(f"without a result yet: {', '.join(missing)}")


def number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "diverged"


def against(found: Figures) -> str:
    """The difference from the base and its standard error; with the number of seeds where it is not the usual three."""
    if not math.isfinite(found.difference):
        return "diverged"
    error = "" if found.error is None else f" ± {found.error:.4f}"
    return f"{found.difference:+.4f}{error}" + (
        f" ({found.n_seed} seed{'s' * (found.n_seed > 1)})" if found.n_seed != 3 else ""
    )
