"""The command `sample`: text from a trained model."""

from __future__ import annotations

from andrea.cli.command_line import configure
from andrea.config import SampleConfig


def sample(argv: list[str]) -> int:
    """Generate text with a trained model."""
    config = configure(SampleConfig, "sample", argv)

    from andrea.generation.session import sample, tell
    from andrea.runtime.device import WEIGHT_DTYPE, choose_device, choose_precision, choose_threads
    from andrea.runtime.shared_cores import MACHINE, TAKES_TURNS

    device = choose_device(config.device)
    threads = choose_threads(config.threads)
    if device.type == "cpu":
        MACHINE.join(threads, on_wait=lambda: tell(f"{TAKES_TURNS}\n"))
    precision = choose_precision("auto" if config.precision == "int8" else config.precision, device)
    return sample(config, device, WEIGHT_DTYPE[precision.value])
