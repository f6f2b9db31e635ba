"""What torchrun's restarts must not do again: exit codes that a restart cannot cure end the job.

torchrun starts all ranks anew when one ends with an exit code other than 0, whichever it is. So a rank that ends with a
verdict leaves a note for the torchrun process that started it, and a rank that finds one ends with it before it has
loaded or read anything. Imports no torch.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from andrea.config import UserError
from andrea.runtime.files import replace_text

# Wrong input, not finite, failed health; and stopped by a signal: whoever sent it did not mean another start.
NOT_RETRIED = (2, 3, 4, 130, 143)
RANK_LOST = 6  # an exit code that a restart may cure
SECONDS_TO_SPEAK = 10


class ErrorOfRank0(UserError):
    """A UserError of rank 0, raised on every rank; rank 0 alone shows it."""


class RankLost(Exception):
    """Another rank has died or does not answer; a restart, which torchrun makes, goes on from the last checkpoint."""


def restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def is_restart() -> bool:
    return restarts() > 0


def is_rank_0() -> bool:
    """Whether this process shows what all ranks have to say: rank 0, and a process that torchrun did not start."""
    return os.environ.get("RANK", "0") == "0" or "WORLD_SIZE" not in os.environ


def has_many_ranks() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def rank_prefix() -> str:
    """What a line of another rank than 0 begins with."""
    return "" if is_rank_0() else f"rank {os.environ['RANK']}: "


def give_rank_0_time() -> None:
    """torchrun ends all ranks as soon as one has ended: where rank 0 has the same to say, this one is ended here."""
    time.sleep(SECONDS_TO_SPEAK)


def recorded_exit_code() -> int | None:
    """The exit code with which the start before this one said that no other start is of use."""
    path = note()
    if path is None or not path.exists():
        return None
    code, start = map(int, path.read_text().split())
    if restarts() - start not in (0, 1):  # another start came between, in which the run went on
        path.unlink()
        return None
    record_exit_code(code)
    return code


def record_exit_code(code: int) -> None:
    path = note()
    if code in NOT_RETRIED and path is not None:
        replace_text(path, f"{code} {restarts()}")


def note() -> Path | None:
    """In the folder that this torchrun process keeps for its ranks, over all restarts; None where none started this one."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # …/attempt_0/0/error.json
    return Path(error_file).parents[2] / "andrea-verdict" if error_file else None
