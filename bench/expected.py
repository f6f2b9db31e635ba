"""Measures the expected curve of a preset on a text, and writes it into andrea/training/expected/.

    python bench/expected.py --model andrea-nano
    python bench/expected.py --model andrea-nano --steps 280 --threads 1 --parallel 2
    python bench/expected.py --model andrea-12m --data fineweb_edu --seeds 1337 1338

The whole held-out split is evaluated twenty times in each run. Finished runs are kept in bench/results/, and a run that was
cut off goes on from its checkpoint. The curve is written with the seeds that have ended; `python train.py` uses it from two
seeds on. Measure again when a preset has changed: its fingerprint is in the file, and a curve of another one is not used.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

from common import RESULTS, machine
from studies.runs import run_all
from study import Study

from andrea.api.command_line import configure
from andrea.config import RunConfig, recipe_fingerprint, recipe_values
from andrea.runtime.files import replace_text
from andrea.training.expected.curves import FOLDER, TEXTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="andrea-nano")
    parser.add_argument("--data", choices=list(TEXTS), default="pystdlib")
    parser.add_argument("--steps", type=int, help="default: the model's recipe_steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337, 1338, 1339])
    parser.add_argument("--evaluations", type=int, default=20, help="in a run, its end included")
    parser.add_argument("--threads", type=int, help="of each run; default: as train.py chooses")
    parser.add_argument("--parallel", type=int, default=1, help="runs at once; use --threads 1 with more than one")
    parser.add_argument("--words", nargs="*", default=[], help="key=value for every run; those of the recipe change it")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the curve")
    parser.add_argument("--output", type=Path, help="of the finished runs")
    chosen = parser.parse_args()
    words = [f"model={chosen.model}", f"data={chosen.data}"]
    config = configure(RunConfig, "train", [*words, *chosen.words])
    if config.data.path is not None and chosen.folder == FOLDER:
        parser.error(
            "a shipped curve is of the text that --data names: leave data.path out, or write to another --folder"
        )
    steps = chosen.steps or config.steps
    about = {"shape": "preset", "base": "base", "only": None, "equal_time": False}
    about["output"] = chosen.output or RESULTS / f"expected-{chosen.model}-{chosen.data}.json"
    described = {"shapes": {"preset": {"words": words, "steps": steps}}, "variants": {"base": {}}}
    study = Study(argparse.Namespace(**vars(chosen) | about), described)
    try:
        failed = run_all(study, chosen.parallel)
    finally:
        write_curve(study, config, steps, chosen.folder / f"{chosen.model}-{chosen.data}-{steps}.json")
    raise SystemExit(1 if failed else 0)


def write_curve(study: Study, config: RunConfig, steps: int, path: Path) -> None:
    """Write the curve of the seeds that have ended; nothing if there is none."""
    base = study.variants["base"]
    jobs = {seed: study.job(base, 1.0, seed, steps) for seed in study.chosen.seeds}
    rows = {seed: study.runs[job.key] for seed, job in jobs.items() if study.bpb(job) not in (None, float("inf"))}
    if not rows:
        return
    first, *others = [[round(tokens / config.tokens_per_step) for tokens, _ in row["curve"]] for row in rows.values()]
    assert all(other == first for other in others), "the seeds were evaluated at different steps: use another --output"
    content: dict[str, Any] = {
        "recipe": recipe_fingerprint(config),
        "preset": study.chosen.model,
        "text": study.chosen.data,
        "steps": steps,
        "at": first,
        "bits_per_byte": {str(seed): [round(bpb, 5) for _, bpb in row["curve"]] for seed, row in rows.items()},
        "values": recipe_values(config),
        "measured": {"date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}", **machine("cpu")},
    }
    replace_text(path, json.dumps(content, indent=1, default=str) + "\n")
    print(f"written: {path.name}, {len(rows)} of {len(study.chosen.seeds)} seeds")


if __name__ == "__main__":
    main()
