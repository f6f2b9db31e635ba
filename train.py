"""Train a GPT: `python train.py [key=value …]`; `python train.py --help` lists the keys."""

import sys
from pathlib import Path

from andrea.cli.command_line import CommandLine, compose, read, run
from andrea.cli.compile_ahead import compile_headers_ahead
from andrea.cli.help import help_text
from andrea.cli.sweep import SWITCHES, sweep
from andrea.config import RunConfig, parse, to_plain
from andrea.runtime.own_parts import allowing

USAGE = "python train.py [key=value …]     for example: python train.py model=andrea-120m data=text data.path=notes/"


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(help_text("train", USAGE))
        return 0
    if set(SWITCHES) & set(argv):
        return sweep(Path(__file__).resolve(), argv)
    line = read(RunConfig, argv)
    config = parse(RunConfig, compose("train", line))  # a wrong command line ends here, before torch is loaded
    compile_headers_ahead(config, argv)
    with allowing((config.attention.compatibility, config.model.mlp), config.trust):
        return train(config, line)


def train(config: RunConfig, line: CommandLine) -> int:
    from andrea.insight.lens.small_lens import small_lens
    from andrea.training import resume
    from andrea.training.parallel.process_group import join_ranks
    from andrea.training.planning.dry_run import describe
    from andrea.training.planning.length import with_length_and_name
    from andrea.training.start import start

    typed = to_plain(config)
    config = with_length_and_name(config)
    if config.dry_run:
        print(describe(config))
        return 0
    with join_ranks(config.parallel.watchdog_minutes) as (ranks, watchdog):
        checkpoint = ranks.from_rank_0(lambda: resume.find_resume(config))
        if checkpoint is not None:
            saved, other_ranks = checkpoint.state["config"], checkpoint.state.get("ranks", 1) != ranks.size
            merged, changes = resume.merge(saved, typed, line.groups, line.values, other_ranks)
            config = with_length_and_name(parse(RunConfig, merged))
            if resume.is_done(checkpoint, config.steps):
                ranks.from_rank_0(lambda: resume.show_done(checkpoint, config.steps))
                return 0
            ranks.from_rank_0(lambda: resume.show_resume(checkpoint, changes, config))
        elif config.resume:
            ranks.from_rank_0(lambda: print("nothing to resume yet: starting"))
        return start(config, checkpoint, ranks, watchdog, draw_lens=small_lens)


if __name__ == "__main__":
    run(main, sys.argv[1:])
