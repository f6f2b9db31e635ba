"""How long the threads of GNU OpenMP spin before they sleep. Threads that sleep leave their cores to other processes.

A thread that waits for the other threads of its team first spins, which keeps its core busy, and then sleeps. By default
it spins 300,000 times, about ten milliseconds. A process alone never waits that long, but where another process computes
too, the threads spin while those that they wait for have no core. bench/two_processes.py measures what each number of spins
costs. GNU OpenMP reads the number when torch loads it, so this module imports no torch.
"""

from __future__ import annotations

import os
import sys

SPINS = 40_000  # 1,000 made a process alone up to 41 % slower, 40,000 at most 2 %
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # environment variables that decide how threads wait


def limit_spins() -> None:
    """Let the threads of this process and of its children spin SPINS times at most; what the user has set stays.

    Call this before torch is imported. On other systems than Linux torch uses another OpenMP, which is left as it is.
    """
    if sys.platform == "linux" and not any(name in os.environ for name in VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


def describe_waiting() -> str:
    """How the threads wait, for the line that a run prints at its start; empty where OpenMP's default holds."""
    settings = " ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
    if settings == f"GOMP_SPINCOUNT={SPINS}":
        return (
            f"threads: one that waits sleeps after {SPINS:,} spins, so that other processes get its core ({settings})"
        )
    return f"threads: they wait as set in the environment ({settings})" if settings else ""
