"""Precompiles torch's C++ headers in a separate process, while training loads torch and prepares its text.

torch.compile precompiles these headers at its first use on a CPU with a new version of torch. This takes ten seconds of
one core, and normally starts only when the model is compiled. This process starts earlier, on a core that is still
idle. In the default run the first step then comes five to six seconds sooner, within 30 s of the command.

Training does not depend on this process. torch's own lock makes training wait for headers that are being compiled; if
the process fails, training compiles them itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from andrea.api.command_line import configure
from andrea.config import RunConfig
from andrea.runtime.code_cache import torch_cache_folder
from andrea.runtime.program import module_command, module_environment


def precompile_headers(config: RunConfig, argv: list[str]) -> threading.Thread | None:
    """Start the process if the run can benefit from it, and do not wait. argv: the command line of `config`."""
    may_use_card = config.device not in ("auto", "cpu") or (config.device == "auto" and Path("/dev/nvidia0").exists())
    compiles = config.compile != "off" and not config.dry_run and shutil.which("g++")
    has_idle_core = (os.cpu_count() or 1) > 1 and os.environ.get("LOCAL_RANK", "0") == "0"
    if may_use_card or not compiles or not has_idle_core or cached_headers():
        return None
    command, quiet = module_command("andrea.api.precompile_headers", argv), subprocess.DEVNULL
    options = {"stdin": quiet, "stdout": quiet, "stderr": quiet, "env": module_environment()}
    thread = threading.Thread(target=subprocess.run, args=(command,), kwargs=options, daemon=True)
    thread.start()
    return thread


def cached_headers() -> list[Path]:
    """The precompiled headers that torch keeps for this user in its usual folder."""
    folder = torch_cache_folder()
    return sorted(folder.glob("precompiled_headers/*.gch")) if folder else []


def main(argv: list[str]) -> None:
    """Compile the smallest program that needs the headers, if the run is long enough to be compiled."""
    import torch

    from andrea.model.size import flops_per_token
    from andrea.runtime.compiling import choose_compile, compile_graph, configure_compiler
    from andrea.runtime.device import choose_device
    from andrea.training.planning.length import planned_vocabulary, with_length_and_name

    config = with_length_and_name(configure(RunConfig, "train", argv))
    per_token = flops_per_token(config.model, config.attention, planned_vocabulary(config))
    device = choose_device(config.device)
    total_flops = config.steps * config.tokens_per_step * per_token
    if device.type == "cpu" and choose_compile(config.compile, device, total_flops).value != "off":
        torch.set_num_threads(1)
        configure_compiler(device)
        compile_graph(torch.exp)(torch.zeros(64, 64))


if __name__ == "__main__":
    main(sys.argv[1:])
