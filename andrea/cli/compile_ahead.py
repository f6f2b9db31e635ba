"""torch's headers for a CPU, compiled in a process of its own while the training process loads torch and prepares the text.

At the first start with a version of torch they take ten seconds of one core, whatever the model, while the others are idle.
torch.compile waits for what is under way, by a lock of its own; where this process fails it makes them itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from andrea.cli.command_line import configure
from andrea.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]


def compile_headers_ahead(run: RunConfig, argv: list[str]) -> threading.Thread | None:
    """Begin, where nothing is kept and `run`, which argv says, may compile. Needs no torch, and nobody needs its end."""
    on_card = run.device not in ("auto", "cpu") or (run.device == "auto" and Path("/dev/nvidia0").exists())
    alone = (os.cpu_count() or 1) < 2 or os.environ.get("LOCAL_RANK", "0") != "0"
    if on_card or alone or run.compile == "off" or run.dry_run or not shutil.which("g++") or kept_headers():
        return None
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command, quiet = [sys.executable, "-m", "andrea.cli.compile_ahead", *argv], subprocess.DEVNULL
    settings = {"stdin": quiet, "stdout": quiet, "stderr": quiet, "env": os.environ | {"PYTHONPATH": paths}}
    thread = threading.Thread(target=subprocess.run, args=(command,), kwargs=settings, daemon=True)
    thread.start()
    return thread


def kept_headers() -> list[Path]:
    """What torch has kept of them for this user, where it does unless told otherwise."""
    everyones = Path(tempfile.gettempdir()).glob("torchinductor_*/precompiled_headers/*.gch")
    return sorted(path for path in everyones if path.stat().st_uid == os.getuid())


def main(argv: list[str]) -> None:
    """Compile the smallest program that needs the headers, where the run is long enough to be compiled."""
    import torch

    from andrea.model.size import flops_per_token
    from andrea.runtime.compiling import choose_compile, compile_graph, configure_compiler
    from andrea.runtime.device import choose_device
    from andrea.training.planning.length import planned_vocabulary, with_length_and_name

    run = with_length_and_name(configure(RunConfig, "train", argv))
    flops = run.steps * run.tokens_per_step * flops_per_token(run.model, run.attention, planned_vocabulary(run))
    device = choose_device(run.device)
    if device.type == "cpu" and choose_compile(run.compile, device, flops).value != "off":
        torch.set_num_threads(1)
        configure_compiler(device)
        compile_graph(torch.exp)(torch.zeros(64, 64))


if __name__ == "__main__":
    main(sys.argv[1:])
