"""How long the threads of GNU OpenMP spin before they sleep. Threads that sleep leave their cores to other processes.

A thread that waits for the other threads of its team first spins, which keeps its core busy, and then sleeps. By default
it spins 300,000 times, about ten milliseconds. In a process alone, no thread waits that long. If another process computes
too, a thread may spin while the thread that it waits for has no core. bench/two_processes.py measures what each number of spins
costs. GNU OpenMP reads the number when torch loads it, so this module imports no torch.
"""

from __future__ import annotations

import os
import sys

SPINS = 40_000  # 1,000 made a process alone up to 41 % slower, 40,000 at most 2 %
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # environment variables that decide how threads wait


def limit_spins() -> None:
    """Let the threads of this process and of its children spin SPINS times at most; a value that the user has set is kept.

    Call this before torch is imported. On other systems than Linux torch uses another OpenMP, which is left as it is.
    """
    if sys.platform == "linux" and not any(name in os.environ for name in VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


def describe_waiting() -> str:
    """The line on waiting threads that a run prints at its start; empty if no environment variable sets how they wait."""
    settings = " ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
    if settings == f"GOMP_SPINCOUNT={SPINS}":
        return (
            f"threads: a waiting thread sleeps after {SPINS:,} spins, so that other processes get its core ({settings})"
        )
    return f"threads: a waiting thread spins as set in the environment ({settings})" if settings else ""
