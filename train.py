"""Train a GPT: `python train.py [key=value …]`; `python train.py --help` lists the keys."""

import sys
from pathlib import Path

from andrea.command_line import compose, help_text, read, run
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

    from andrea.insight.lens import small_lens
    from andrea.training import plan, resume
    from andrea.training.start import start

    config = plan.complete(config)
    if config.dry_run:
        print(plan.describe(config))
        return 0
    checkpoint = resume.find_resume(config)
    if checkpoint is not None:
        merged, changes = resume.merge(checkpoint.state["config"], composed, line.groups, line.values)
        config = plan.complete(parse(TrainingRun, merged))
        if resume.is_done(checkpoint, config.steps):
            print(f"already done: {checkpoint.path} is step {checkpoint.step} of {config.steps}")
            return 0
        print(f"resuming {checkpoint.path}: step {checkpoint.step}, {checkpoint.state['tokens']:,} tokens seen")
        for change in changes:
            print(f"  changed {change}")
    elif config.resume:
        print("nothing to resume yet: starting")
    return start(config, checkpoint, observe=small_lens)


if __name__ == "__main__":
    run(main, sys.argv[1:])
