"""Generate text: `python sample.py [key=value …]`; `python sample.py --help` lists the keys. The same as `andrea sample`."""

import sys

from andrea import __main__ as andrea
from andrea.cli.exit_code import run


def main(argv: list[str]) -> int:
    return andrea.main(["sample", *argv])


if __name__ == "__main__":
    run(main, sys.argv[1:])
