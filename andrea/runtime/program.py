"""The commands that start this program: as a user types them, and as the program starts new processes. Imports no torch."""

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

PACKAGE_PARENT = Path(__file__).resolve().parents[2]
STARTED_AS = "ANDREA_STARTED_AS"  # environment variable: `started_as` of the process that a user started


def started_as() -> list[str]:
    """The words with which the user started this program, up to its script or module: ['python', '-u', 'train.py']."""
    if STARTED_AS in os.environ:
        return shlex.split(os.environ[STARTED_AS])
    return sys.orig_argv[: max(1, len(sys.orig_argv) - len(sys.argv) + 1)] or [sys.executable]


STARTED = started_as()  # before a library changes sys.argv


def typed_command(command: str, torchrun: str = "") -> str:
    """`command` (train, sample, lens …) as the user can type it in the same folder, for messages.

    It is started as this process was: `python train.py`, `andrea train`, `python -m andrea train`, or by a path to one of
    them. torchrun: the command that takes the place of `python`; '' for none.
    """
    python, program, is_module = torchrun or shlex.quote(STARTED[0]), Path(STARTED[-1]), STARTED[-2:-1] == ["-m"]
    if program.name == "andrea" and not is_module and not torchrun:  # the console script
        is_known = shutil.which("andrea") == str(program)
        return f"{'andrea' if is_known else shlex.quote(str(program))} {command}"
    if program.name in ("train.py", "sample.py") and command in ("train", "sample"):
        return f"{python} {shlex.quote(str(program.with_name(f'{command}.py')))}"
    is_found = is_module or Path.cwd() == PACKAGE_PARENT or str(PACKAGE_PARENT) in sys.path[1:] or is_installed()
    return f"{'' if is_found else f'PYTHONPATH={shlex.quote(str(PACKAGE_PARENT))} '}{python} -m andrea {command}"


def is_installed() -> bool:
    """Whether Python's environment holds this package, itself or as a link to a clone."""
    import importlib.metadata

    return any(importlib.metadata.distributions(name="andrea", path=sys.path[1:]))


def torchrun_command() -> str:
    """The torchrun that started this process, as the user can type it; '' without. `…` stands for an address of machines."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    machines, ranks, restarts = (
        os.environ[name] for name in ("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS")
    )
    where = "--standalone" if machines == "1" else f"--nnodes={machines} …"
    return f"torchrun {where} --nproc-per-node={ranks}" + (f" --max-restarts={restarts}" if restarts != "0" else "")


def typed_words(**values: object) -> str:
    """`key=value …` as the user would type it in a shell: a value with special characters is quoted."""
    return " ".join(shlex.quote(f"{key}={value}") for key, value in values.items())


def module_command(module: str, argv: list[str]) -> list[str]:
    """The command for a module of this package, with `module_environment`. -P: a torch.py in the working folder never runs."""
    return [sys.executable, "-P", "-m", module, *argv]


def module_environment() -> dict[str, str]:
    """The environment of this process, changed so that a new process can import this package from any folder."""
    environment = os.environ | {STARTED_AS: shlex.join(STARTED)}
    if PACKAGE_PARENT == Path(sysconfig.get_path("purelib")).resolve():
        return environment
    paths = [str(PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")]
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
