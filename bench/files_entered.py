"""How many files of andrea/ a reader visits: those entered by one training step, and those from the command to the loop.

    python bench/files_entered.py
    python bench/files_entered.py data=text data.path=notes/

A default run on a CPU is traced with sys.settrace, uncompiled, with few steps and no evaluation in between; the words go to
train.py. A file counts if a function of it is called; one that is only imported does not count, though the bodies of its
classes run. One step is what lies between two calls of TrainingStep.run.
C++ and what torch runs in threads of its own are not seen: the kernels' files are those that their Python modules name.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from common import ROOT

sys.path.insert(0, str(ROOT))

PACKAGE = ROOT / "andrea"
COUNTED_STEP = (
    3  # the first steps also set up what later ones reuse; in a run of 24 steps, the fourth measures the heads
)
PLANNING = ("training", "api", "cli", "config")
FIXED = ["compile=off", "logger=none", "device=cpu", "train.steps=24", "train.eval_every=24", "name=traced"]
SMALL = ["model.n_layer=2", "train.tokens_per_step=2048", "train.micro_batch=2"]


class Visited:
    """The functions called so far, by file, split at each call of TrainingStep.run."""

    def __init__(self) -> None:
        self.parts: list[Counter[str]] = [Counter()]  # of the start, then of each step

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # not the body of a module or of a class
        if not is_function or not code.co_filename.startswith(str(PACKAGE)):
            return
        name = str(Path(code.co_filename).relative_to(PACKAGE))
        if name == "training/step.py" and code.co_qualname == "TrainingStep.run":
            self.parts.append(Counter())
        self.parts[-1][name] += 1


def main() -> None:
    from andrea import __main__ as andrea

    visited = Visited()
    with tempfile.TemporaryDirectory() as place:
        words = [*FIXED, *SMALL, f"runs_dir={place}/runs", f"data_dir={place}/data", *sys.argv[1:]]
        threading.settrace(visited)  # the backward pass and the loader have threads of their own
        sys.settrace(visited)
        try:
            andrea.main(["train", *words])
        finally:
            sys.settrace(None)
            threading.settrace(None)
    start, step = visited.parts[0], visited.parts[COUNTED_STEP]
    lines = {name: (PACKAGE / name).read_text(encoding="utf-8").count("\n") for name in start | step}
    for title, part in (("one step", step), ("from the command to the loop", start)):
        print(f"\n{title}: {len(part)} files, {sum(lines[name] for name in part):,} lines in them")
        for name, calls in sorted(part.items()):
            print(f"  {name:55}{calls:8} calls {lines[name]:6} lines")
    planning = [name for name in start if name.split("/")[0] in PLANNING]
    print(f"\nfrom the command to the loop, of {', '.join(PLANNING)}: {len(planning)} files")


if __name__ == "__main__":
    main()
