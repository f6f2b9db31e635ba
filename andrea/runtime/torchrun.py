"""Restarts by torchrun: an exit code that a restart cannot cure ends the job. Imports no torch.

torchrun restarts all ranks when one of them exits with any code other than 0. Therefore a rank that exits with a final
code records it in a file. After the restart each rank finds the file and exits with the same code, before it loads
anything. A second file names the run folder, in which a restarted run continues.
"""

import os
from contextlib import suppress
from pathlib import Path

from andrea.config import UserError
from andrea.runtime.files import replace_bytes, replace_text

# Wrong input, non-finite, failed health, SIGHUP, Ctrl-C, SIGTERM. Whoever sends a signal to stop wants no restart.
FINAL_EXIT_CODES = (2, 3, 4, 129, 130, 143)
RANK_LOST = 6  # an exit code that a restart may cure
GRACE_SECONDS = 10  # in which rank 0 prints an error that all ranks share: torchrun ends every rank when one exits


class ErrorOfRank0(UserError):
    """A UserError of rank 0, raised on every rank; rank 0 alone prints it."""


class RankLost(Exception):
    """Another rank has died or does not answer. torchrun can restart all ranks, which resume from the last checkpoint."""


def restarts() -> int:
    """How often torchrun has restarted the ranks so far."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def is_restart() -> bool:
    return restarts() > 0


def is_rank_0() -> bool:
    """Whether this process prints for all ranks: rank 0, or a process that torchrun did not start."""
    return os.environ.get("RANK", "0") == "0" or "WORLD_SIZE" not in os.environ


def has_many_ranks() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def rank_prefix() -> str:
    """The first words of a line that a rank other than 0 prints; empty on rank 0."""
    return "" if is_rank_0() else f"rank {os.environ['RANK']}: "


def recorded_exit_code() -> int | None:
    """The final exit code that the last start of the ranks recorded, if any. That of an earlier start is deleted."""
    path = note_path("andrea-verdict")
    if path is None or not path.exists():
        return None
    code, noted_at = map(int, path.read_text().split())
    if restarts() - noted_at not in (0, 1):  # a start in between did not exit with the noted code
        path.unlink()
        return None
    record_exit_code(code)
    return code


def record_exit_code(code: int) -> None:
    """Record `code` for the next start of the ranks if it is final. On a full disk, they meet the error again instead."""
    path = note_path("andrea-verdict")
    if code in FINAL_EXIT_CODES and path is not None:
        with suppress(OSError):
            replace_text(path, f"{code} {restarts()}")


def record_run_folder(folder: Path) -> None:
    """Record, on each host, where the run writes its checkpoints, for the next start of the ranks."""
    path = note_path("andrea-run-folder")
    if path is not None:
        with suppress(OSError):
            replace_bytes(path, os.fsencode(folder))


def recorded_run_folder() -> Path | None:
    """The run folder that an earlier start of the ranks recorded; None if none did."""
    path = note_path("andrea-run-folder")
    return Path(os.fsdecode(path.read_bytes())) if path is not None and is_restart() and path.exists() else None


def note_path(name: str) -> Path | None:
    """A file in a folder that torchrun keeps over all restarts; None without torchrun."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # …/attempt_0/0/error.json
    return Path(error_file).parents[2] / name if error_file else None
