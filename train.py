"""Train a GPT: `python train.py [key=value …]`; `python train.py --help` lists the keys."""

import sys
from pathlib import Path

from andrea.cli.command_line import compose, read, run
from andrea.cli.compile_ahead import compile_headers_ahead
from andrea.cli.help import help_text
from andrea.cli.sweep import SWITCHES, sweep
from andrea.config import RunConfig, parse, to_plain

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
    composed = to_plain(config)

    from andrea.insight.lens.small_lens import small_lens
    from andrea.training import resume
    from andrea.training.parallel.process_group import join_ranks
    from andrea.training.planning.dry_run import describe
    from andrea.training.planning.length import with_length_and_name
    from andrea.training.start import start

    config = with_length_and_name(config)
    if config.dry_run:
        print(describe(config))
        return 0
    with join_ranks(config.parallel.watchdog_minutes) as (ranks, watchdog):
        checkpoint = ranks.from_rank_0(lambda: resume.find_resume(config))
        if checkpoint is not None:
            merged, changes = resume.merge(
                checkpoint.state["config"],
                composed,
                line.groups,
                line.values,
                checkpoint.state.get("ranks", 1) != ranks.size,
            )
            config = with_length_and_name(parse(RunConfig, merged))
            if resume.is_done(checkpoint, config.steps):
                ranks.from_rank_0(lambda: resume.show_done(checkpoint, config.steps))
                return 0
            ranks.from_rank_0(lambda: resume.show_resume(checkpoint, changes))
        elif config.resume:
            ranks.from_rank_0(lambda: print("nothing to resume yet: starting"))
        return start(config, checkpoint, ranks, watchdog, draw_lens=small_lens)


if __name__ == "__main__":
    run(main, sys.argv[1:])
