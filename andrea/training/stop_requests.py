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


class StopRequests:
    """What this process was asked, and what all ranks have agreed on.

    max_minutes: counted from here on. waiting: shows a line on the terminal.
    """

    def __init__(self, max_minutes: float | None, device: torch.device, waiting: Callable[[str], None]) -> None:
        self.max_minutes, self.device, self.waiting = max_minutes, device, waiting
        self.started = time.monotonic()
        self.signal: int | None = None  # the first one this process received
        self.agreed: Literal["interrupted", "stopped"] | None = None  # why all ranks stop after this step

    def out_of_time(self) -> bool:
        return self.max_minutes is not None and time.monotonic() - self.started > 60 * self.max_minutes

    def flags(self) -> list[Tensor]:
        """This rank's requests, to be summed over ranks: 1 for a signal, 1 for the time limit; 0-dim, on the device."""
        requests = (self.signal is not None, self.out_of_time())
        return [torch.full((), float(request), device=self.device) for request in requests]  # no copy to wait for

    def agree(self, summed_flags: Tensor) -> None:
        """summed_flags (2,): `flags` summed over all ranks."""
        interrupted, out_of_time = summed_flags.tolist()
        self.agreed = self.agreed or ("interrupted" if interrupted else "stopped" if out_of_time else None)

    @property
    def exit_code(self) -> int:
        """128 + the signal where one was received by any rank, else 0: a run stopped by its time limit is no failure."""
        return 128 + (self.signal or signal.SIGTERM) if self.agreed == "interrupted" else 0

    @contextmanager
    def signals_caught(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM let the step finish and the run save; a second Ctrl-C ends the process at once.

        A second SIGTERM changes nothing: a cluster sends it to torchrun and to its ranks, and torchrun forwards its own.
        Python lets the main thread alone catch signals; in another thread none is caught.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: Any) -> None:
            if self.signal and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal = self.signal or number
            self.waiting("interrupted: finishing the step and saving (once more to quit at once) …")

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
