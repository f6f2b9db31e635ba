"""Train a GPT: `python train.py [key=value …]`; `python train.py --help` lists the keys."""

import sys
from pathlib import Path

from andrea.command_line import compose, help_text, read, run
from andrea.compile_ahead import compile_headers_ahead
from andrea.config import TrainingRun, parse
from andrea.sweep import SWITCHES, sweep

USAGE = "python train.py [key=value …]     for example: python train.py model=andrea-120m data=text data.path=notes/"


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(help_text("train", USAGE))
        return 0
    if set(SWITCHES) & set(argv):
        return sweep(Path(__file__).resolve(), argv)
    line = read(TrainingRun, argv)
    composed = compose(TrainingRun, "train", line)
    config = parse(TrainingRun, composed)  # a wrong command line ends here, before torch is loaded
    compile_headers_ahead(config, argv)

    from andrea.insight.lens import small_lens
    from andrea.training import plan, resume
    from andrea.training.distributed import joined
    from andrea.training.start import start

    config = plan.complete(config)
    if config.dry_run:
        print(plan.describe(config))
        return 0
    with joined(config.parallel.watchdog_minutes) as (ranks, watchdog):
        checkpoint = ranks.told(lambda: resume.find_resume(config))
        if checkpoint is not None:
            merged, changes = resume.merge(
                checkpoint.state["config"],
                composed,
                line.groups,
                line.values,
                checkpoint.state.get("ranks", 1) != ranks.size,
            )
            config = plan.complete(parse(TrainingRun, merged))
            if resume.is_done(checkpoint, config.steps):
                ranks.told(lambda: resume.show_done(checkpoint, config.steps))
                return 0
            ranks.told(lambda: resume.show_resume(checkpoint, changes))
        elif config.resume:
            ranks.told(lambda: print("nothing to resume yet: starting"))
        return start(config, checkpoint, ranks, watchdog, observe=small_lens)


if __name__ == "__main__":
    run(main, sys.argv[1:])
