"""The command `train`: starts a new run, resumes a run, or starts a sweep of runs."""

from __future__ import annotations

from andrea.cli.command_line import CommandLine, compose, read
from andrea.cli.precompile_headers import precompile_headers
from andrea.cli.sweep import SWITCHES, sweep
from andrea.config import RunConfig, parse, to_plain
from andrea.runtime.own_parts import allowing
from andrea.training.progress import FinishedRun


def train(argv: list[str]) -> int:
    """Train a GPT, or resume a run; with -m, one run for each combination of values (seed=1,2)."""
    if set(SWITCHES) & set(argv):
        return sweep(argv)
    return train_one(argv).exit_code


def train_one(argv: list[str]) -> FinishedRun:
    """Train the run that the command line `argv` describes. Raises UserError."""
    line = read(RunConfig, argv)
    typed = parse(RunConfig, compose("train", line))  # a wrong command line ends here, before torch is loaded
    precompile_headers(typed, argv)
    with allowing((typed.attention.compatibility, typed.model.mlp), typed.trust):
        return new_or_resumed(typed, line)


def new_or_resumed(typed: RunConfig, line: CommandLine) -> FinishedRun:
    """Train a new run, or continue from the checkpoint that `resume` finds."""
    from andrea.insight.lens.training_lens import small_lens
    from andrea.insight.run_page import RunPage
    from andrea.training import resume
    from andrea.training.parallel.process_group import join_ranks
    from andrea.training.planning.dry_run import describe
    from andrea.training.planning.length import with_length_and_name
    from andrea.training.start import start

    config = with_length_and_name(typed)
    if config.dry_run:
        print(describe(config))
        return FinishedRun(0, None)
    with join_ranks(config.parallel.watchdog_minutes) as (ranks, watchdog):
        checkpoint = ranks.from_rank_0(lambda: resume.find_resume(config))
        if checkpoint is not None:
            saved, other_ranks = checkpoint.state["config"], checkpoint.state.get("ranks", 1) != ranks.size
            merged, changes = resume.merge(saved, to_plain(typed), line.groups, line.values, other_ranks)
            config = with_length_and_name(parse(RunConfig, merged))
            if resume.is_done(checkpoint, config.steps):
                ranks.from_rank_0(lambda: resume.show_done(checkpoint, config.steps))
                return FinishedRun(0, resume.run_folder_of(checkpoint) or checkpoint.path)
            ranks.from_rank_0(lambda: resume.show_resume(checkpoint, changes, config))
        elif config.resume:
            ranks.from_rank_0(lambda: print("nothing to resume yet: starting a new run"))
        return start(config, checkpoint, ranks, watchdog, draw_lens=small_lens, run_page=RunPage)
