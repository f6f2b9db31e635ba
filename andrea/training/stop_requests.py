"""Requests to stop before the last step: a signal, `train.max_minutes`, or `train.patience`. All ranks agree on them once a step.

Together with the requests, the ranks exchange the length that rank 0 proposes for the run, from the time that is left.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from andrea.training.planning.time_budget import TimeBudget

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # if ranks received several, the first of these counts


class StopRequests:
    """The stop requests of this process, and the decision that all ranks have agreed on.

    budget: the time of train.max_minutes; None if it is not set. waiting: shows a line on the terminal.
    """

    def __init__(self, budget: TimeBudget | None, device: torch.device, waiting: Callable[[str], None]) -> None:
        self.budget, self.device, self.waiting = budget, device, waiting
        self.signal: int | None = None  # the first one this process received
        self.agreed: Literal["interrupted", "stopped"] | None = None  # why all ranks stop after this step
        self.agreed_signal: int | None = None  # one that this rank or another received
        self.is_out_of_patience = False  # whether train.patience is the reason
        self.wanted_steps = 0  # the length that rank 0 has last asked for; 0: none since it was taken

    def flags(self, wanted_steps: int) -> list[Tensor]:
        """This rank's requests, to be summed over ranks: signals, time limit and length, 0-dim on the device.

        The time limit and each of SIGNALS is 0 or 1. wanted_steps: the length that rank 0 asks for; 0 on all other ranks,
        and where rank 0 asks for none.
        """
        out_of_time = self.budget is not None and self.budget.is_over()
        requests = (*(self.signal == number for number in SIGNALS), out_of_time, wanted_steps)
        return [torch.full((), float(request), device=self.device) for request in requests]  # filled on the device

    def agree(self, summed_flags: Sequence[float]) -> None:
        """Decide whether and why all ranks stop, and the length. summed_flags: `flags` summed over all ranks."""
        *received, out_of_time, wanted_steps = summed_flags
        self.wanted_steps = int(wanted_steps) or self.wanted_steps
        if self.agreed:
            return
        self.agreed_signal = next((number for number, flag in zip(SIGNALS, received, strict=True) if flag), None)
        self.agreed = "interrupted" if self.agreed_signal else "stopped" if out_of_time else None

    def end_without_new_best(self) -> None:
        """Stop because of train.patience. Every rank must call this after the same step."""
        if not self.agreed:
            self.agreed, self.is_out_of_patience = "stopped", True

    def take_wanted_steps(self) -> int:
        """The length that all ranks have agreed on since the last call; 0: none."""
        wanted, self.wanted_steps = self.wanted_steps, 0
        return wanted

    @property
    def exit_code(self) -> int:
        """128 + the signal's number if any rank received a signal, else 0: reaching the time limit is not a failure."""
        return 128 + self.agreed_signal if self.agreed_signal else 0

    @contextmanager
    def signals_caught(self) -> Iterator[None]:
        """Ctrl-C, SIGTERM and SIGHUP let the step finish and the run save; a second Ctrl-C ends the process at once.

        A second SIGTERM is ignored: a cluster sends SIGTERM to torchrun and to its ranks, and torchrun forwards its
        own. SIGHUP means that the terminal is gone; where it was ignored before, as under nohup, it stays ignored. Only
        Python's main thread can catch signals; in another thread this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: Any) -> None:
            if self.signal and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal = self.signal or number
            self.waiting("interrupted: finishing the step and saving (interrupt again to quit at once) …")

        caught = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            caught.append(signal.SIGHUP)
        before = {number: signal.signal(number, note) for number in caught}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
