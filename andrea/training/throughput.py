"""Measures the training speed over the steps since the last record."""

from __future__ import annotations


class Throughput:
    """The speed of training since the last record.

    peak_flops: the peak of one device, in FLOP/s. If it is None, no MFU (model FLOPs utilisation) is reported.
    """

    def __init__(self, tokens_per_step: int, flops_per_token: int, peak_flops: float | None, n_device: int) -> None:
        self.tokens_per_step, self.flops_per_token = tokens_per_step, flops_per_token
        self.peak_flops = peak_flops * n_device if peak_flops else None
        self.steps, self.seconds = 0, 0.0

    def add_step(self, seconds: float) -> None:
        self.steps += 1
        self.seconds += seconds

    @property
    def seconds_per_step(self) -> float:
        return self.seconds / self.steps

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.seconds_per_step

    def take_figures(self) -> dict[str, float]:
        """The figures for a record. Resets the counts."""
        figures = {
            "train/tokens_per_second": self.tokens_per_second,
            "train/seconds_per_step": self.seconds_per_step,
        }
        if self.peak_flops:
            figures["train/mfu"] = self.tokens_per_second * self.flops_per_token / self.peak_flops
        self.steps, self.seconds = 0, 0.0
        return figures
