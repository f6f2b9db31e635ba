"""Train a GPT: `python train.py [key=value …]`; `python train.py --help` lists the keys. The same as `andrea train`."""

import sys

from andrea import __main__ as andrea
from andrea.cli.exit_code import run


def main(argv: list[str]) -> int:
    return andrea.main(["train", *argv])


if __name__ == "__main__":
    run(main, sys.argv[1:])
