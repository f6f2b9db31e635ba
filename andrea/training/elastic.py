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

# Wrong input, not finite, failed health; and stopped by a signal: whoever sent it did not mean another start.
NOT_RETRIED = (2, 3, 4, 130, 143)
SECONDS_TO_SPEAK = 10


class RankError(UserError):
    """A UserError of another rank than 0, which that rank shows itself."""


class RankLost(Exception):
    """Another rank has died or does not answer; a restart, which torchrun makes, goes on from the last checkpoint."""


def is_restart() -> bool:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def speaks() -> bool:
    """Whether this process shows what all ranks have to say: rank 0, and a process that torchrun did not start."""
    return os.environ.get("RANK", "0") == "0" or "WORLD_SIZE" not in os.environ


def let_rank_0_speak() -> None:
    """torchrun ends all ranks as soon as one has ended: this one waits to be ended."""
    time.sleep(SECONDS_TO_SPEAK)


def verdict() -> int | None:
    """The exit code with which an earlier start of this rank said that no other start is of use."""
    path = note()
    return int(path.read_text()) if is_restart() and path is not None and path.exists() else None


def note_verdict(code: int) -> None:
    path = note()
    if code in NOT_RETRIED and path is not None:
        path.write_text(str(code))


def note() -> Path | None:
    """In the folder that this torchrun process keeps for its ranks, over all restarts; None where none started this one."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # …/attempt_0/0/error.json
    return Path(error_file).parents[2] / "andrea-verdict" if error_file else None
