"""`andrea COMMAND [key=value …]` and `python -m andrea COMMAND …`: a table of commands, and nothing else."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from andrea.cli import commands
from andrea.cli.exit_code import run
from andrea.cli.help import help_text
from andrea.config import UserError, nearest
from andrea.runtime.program import typed_command


@dataclass(frozen=True)
class Command:
    """A command. Its line in the list is the docstring of `main`; --help shows the keys of configs/CONFIG_NAME.yaml."""

    main: Callable[[list[str]], int]
    config_name: str
    example: str


COMMANDS = {
    "train": Command(commands.train, "train", "model=andrea-120m data=text data.path=notes/"),
    "sample": Command(commands.sample, "sample", 'prompt="def main(" num_samples=3'),
    "prepare": Command(commands.prepare, "train", "data=text data.path=notes/ tokenizer=byte"),
    "lens": Command(commands.lens, "lens", 'prompt="def main("'),
    "runs": Command(commands.runs, "runs", "runs_dir=runs"),
    "compare": Command(commands.compare, "compare", "runs/"),
    "consolidate": Command(commands.consolidate, "consolidate", "checkpoint=runs/NAME"),
    "export": Command(commands.export, "export", "checkpoint=NAME to=hf out=my-model"),
    "import": Command(commands.import_, "import", "from=FOLDER out=my-checkpoint"),
    "evaluate": Command(commands.evaluate, "evaluate", "checkpoint=NAME tasks=bpb text=notes.txt"),
    "serve": Command(commands.serve, "serve", "checkpoint=NAME port=8000"),
    "dashboard": Command(commands.dashboard, "dashboard", "project=andrea"),
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{typed_command('COMMAND')} [key=value …]    with --help: the keys of the command")
        for name, command in COMMANDS.items():
            print(f"  {name:<11} {command.main.__doc__}")
        return 0
    name, *words = argv
    if name not in COMMANDS:
        raise UserError(f"{name!r} is not a command; allowed: {', '.join(COMMANDS)}{nearest(name, COMMANDS)}")
    command = COMMANDS[name]
    if {"-h", "--help"} & set(words):
        typed = typed_command(name)
        usage = f"{typed} [key=value …]\nFor example: {typed} {command.example}"
        print(help_text(command.config_name, usage, words))
        return 0
    return command.main(words)


def start() -> None:
    """The console script `andrea`."""
    run(main, sys.argv[1:])


if __name__ == "__main__":
    start()
