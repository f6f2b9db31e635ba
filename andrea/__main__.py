"""`python -m andrea COMMAND [key=value …]`: a table of commands, and nothing else."""

from __future__ import annotations

import sys

from andrea.cli.command_line import configure, run
from andrea.cli.help import help_text
from andrea.cli.words import to_key_value
from andrea.config import CompareConfig, ConsolidateConfig, DashboardConfig, LensConfig, RunConfig, UserError, nearest


def prepare(words: list[str]) -> int:
    """Write the token shards of data=… with tokenizer=…, as train.py does by itself on first use."""
    from pathlib import Path

    from andrea.text.corpus import open_corpus

    config = configure(RunConfig, "train", words)
    corpus = open_corpus(config.data, config.tokenizer, Path(config.data_dir), print)
    for source in corpus.sources:
        print(
            f"{source.name}: {len(source.train):,} training tokens, {len(source.val):,} held out ({source.val_bytes:,} bytes)"
        )
    print(f"tokenizer {corpus.tokenizer.identity}, fingerprint {corpus.fingerprint[:12]}")
    return 0


def consolidate(words: list[str]) -> int:
    """Make one file of weights and one of optimizer state of what the ranks of a sharded run have written."""
    from pathlib import Path

    from andrea.checkpoint import consolidate, locate

    config = configure(ConsolidateConfig, "consolidate", words)
    checkpoint = locate(config.checkpoint, Path(config.runs_dir))
    consolidate(checkpoint.path)
    print(f"{checkpoint.path} {'is now' if checkpoint.is_sharded else 'was already'} in the single-folder format")
    return 0


def lens(words: list[str]) -> int:
    """Write a page that shows what every head does with prompt=…, and the arithmetic behind it."""
    config = configure(LensConfig, "lens", words)

    from andrea.insight.lens.lens import lens
    from andrea.runtime.device import choose_device, choose_threads

    device = choose_device(config.device)
    choose_threads(config.threads)
    return lens(config, device)


def compare(words: list[str]) -> int:
    """Compare run folders: a table, a page, a picture, and a scaling fit where the runs determine one."""
    from andrea.insight.compare.compare import compare

    config = configure(CompareConfig, "compare", to_key_value(words, positional="runs"))
    predicted = configure(RunConfig, "train", [f"model={config.predict}"]).model if config.predict else None
    return compare(config, predicted)


def dashboard(words: list[str]) -> int:
    """Save a wandb workspace that shows the runs of project=… side by side; offline, print what it would send."""
    from andrea.insight.dashboard import dashboard

    return dashboard(configure(DashboardConfig, "dashboard", to_key_value(words)))


COMMANDS = {"prepare": prepare, "consolidate": consolidate, "lens": lens, "compare": compare, "dashboard": dashboard}
# The YAML whose keys --help shows.
CONFIG_NAMES = {name: "train" if name == "prepare" else name for name in COMMANDS}


def main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print("python -m andrea COMMAND [key=value …]")
        for name, command in COMMANDS.items():
            print(f"  {name:<11} {command.__doc__}")
        return 0
    if words[0] not in COMMANDS:
        raise UserError(f"{words[0]!r} is not a command; allowed: {', '.join(COMMANDS)}{nearest(words[0], COMMANDS)}")
    if {"-h", "--help"} & set(words):
        print(help_text(CONFIG_NAMES[words[0]], f"python -m andrea {words[0]} [key=value …]"))
        return 0
    return COMMANDS[words[0]](words[1:])


if __name__ == "__main__":
    run(main, sys.argv[1:])
