"""The command `sample`: text from a trained model."""

from __future__ import annotations

from andrea.cli.command_line import configure
from andrea.config import SampleConfig


def sample(argv: list[str]) -> int:
    """Generate text with a trained model."""
    config = configure(SampleConfig, "sample", argv)

    from andrea.generation.session import sample
    from andrea.runtime.device import WEIGHT_DTYPE, choose_device, choose_precision, choose_threads
    from andrea.runtime.shared_cores import sharing_cores

    device = choose_device(config.device)
    choose_threads(config.threads)
    precision = choose_precision("auto" if config.precision == "int8" else config.precision, device)
    with sharing_cores(device.type == "cpu"):
        return sample(config, device, WEIGHT_DTYPE[precision.value])
