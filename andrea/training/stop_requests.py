"""Requests to stop before the last step: a signal, or `train.max_minutes`. All ranks agree on them once a step."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # if ranks received several, the first of these counts


class StopRequests:
    """The stop requests of this process, and the decision that all ranks have agreed on.

    max_minutes: time limit, counted from the construction of this object. waiting: shows a line on the terminal.
    """

    def __init__(self, max_minutes: float | None, device: torch.device, waiting: Callable[[str], None]) -> None:
        self.max_minutes, self.device, self.waiting = max_minutes, device, waiting
        self.started = time.monotonic()
        self.signal: int | None = None  # the first one this process received
        self.agreed: Literal["interrupted", "stopped"] | None = None  # why all ranks stop after this step
        self.agreed_signal: int | None = None  # one that this rank or another received

    def out_of_time(self) -> bool:
        return self.max_minutes is not None and time.monotonic() - self.started > 60 * self.max_minutes

    def flags(self) -> list[Tensor]:
        """This rank's requests, to be summed over ranks: SIGNALS and the time limit, each 0 or 1, 0-dim on the device."""
        requests = (*(self.signal == number for number in SIGNALS), self.out_of_time())
        return [torch.full((), float(request), device=self.device) for request in requests]  # filled on the device

    def agree(self, summed_flags: Tensor) -> None:
        """Decide whether and why all ranks stop. summed_flags (4,): `flags` summed over all ranks."""
        if self.agreed:
            return
        *received, out_of_time = summed_flags.tolist()
        self.agreed_signal = next((number for number, flag in zip(SIGNALS, received, strict=True) if flag), None)
        self.agreed = "interrupted" if self.agreed_signal else "stopped" if out_of_time else None

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
