"""Let a trained model write: `python sample.py prompt="def main("`; `python sample.py --help` lists the keys."""

import sys

from andrea.cli.command_line import configure, run
from andrea.cli.help import help_text
from andrea.config import SampleConfig

USAGE = 'python sample.py [key=value …]     for example: python sample.py prompt="def main(" num_samples=3'


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(help_text("sample", USAGE))
        return 0
    config = configure(SampleConfig, "sample", argv)

    from andrea.generation.session import sample
    from andrea.runtime.device import choose_device, choose_precision, choose_threads, weight_dtype

    device = choose_device(config.device)
    choose_threads(config.threads)
    precision = choose_precision("auto" if config.precision == "int8" else config.precision, device)
    return sample(config, device, weight_dtype(precision.value))


if __name__ == "__main__":
    run(main, sys.argv[1:])
