"""The commands that start this program: as a user types them, and as the program starts new processes. Imports no torch."""

from __future__ import annotations

import os
import shlex
import sys
import sysconfig
from pathlib import Path

PACKAGE_PARENT = Path(__file__).resolve().parents[2]


def typed_command(command: str, launcher: str = "python") -> str:
    """`command` (train, sample, lens …) as the user would type it, for messages: `python train.py` or `andrea train`.

    launcher: the program in front of the script or module, e.g. `torchrun …`.
    """
    started = Path(sys.argv[0])
    if started.name == "andrea" and launcher == "python":
        return f"andrea {command}"
    has_script = command in ("train", "sample")
    as_module = started.name == "andrea" or (started.parent.name, started.name) == ("andrea", "__main__.py")
    return f"{launcher} -m andrea {command}" if as_module or not has_script else f"{launcher} {command}.py"


def typed_words(**values: object) -> str:
    """`key=value …` as the user would type it in a shell: a value with special characters is quoted."""
    return " ".join(shlex.quote(f"{key}={value}") for key, value in values.items())


def module_command(module: str, argv: list[str]) -> list[str]:
    """The command that runs a module of this package in a new process. Use it with `module_environment`.

    -P: without it, Python would search the working directory first, and run a torch.py that lies there.
    """
    return [sys.executable, "-P", "-m", module, *argv]


def module_environment() -> dict[str, str]:
    """The environment of this process, changed so that a new process can import this package from any folder."""
    if PACKAGE_PARENT == Path(sysconfig.get_path("purelib")).resolve():
        return dict(os.environ)
    paths = [str(PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
