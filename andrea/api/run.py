"""Trains the run that words of the form key=value describe: a new one, or a resumed one. Loads torch after the first checks."""

import dataclasses
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from andrea.api.command_line import CommandLine, compose, configure, read
from andrea.config import RunConfig, UserError, parse, to_plain
from andrea.config.keys import chosen_groups, flatten
from andrea.config.parse import check_combinations, is_null, parse_values
from andrea.config.schema import NOT_RUNS
from andrea.runtime.code_cache import torch_cache_folder
from andrea.runtime.program import module_command, module_environment
from andrea.runtime.user_classes import allowing
from andrea.training.planning.conversations import for_conversations

CONVERSATIONS = ("chat", "python_chat")  # kinds of data


class FinishedRun(NamedTuple):
    """exit_code: see docs/runs.md. folder: the run's folder; None if only a plan was printed."""

    exit_code: int
    folder: Path | None


def train_one(argv: list[str]) -> FinishedRun:
    """Train the run that the command line `argv` describes. Raises UserError."""
    started = time.monotonic()
    line = read(RunConfig, argv)
    composed = compose("train", line)
    check_command(composed)
    # By the user, not by a checkpoint:
    named = composed["attention"]["compatibility"], composed["model"]["mlp"], composed["objective"]["reward"]
    composed = with_init_from(composed, line)
    if has_conversations(composed["data"]):
        composed = for_conversations(composed, line.values)
    if composed["train"]["teachers"]:
        from andrea.training.resume import with_teachers

        composed = with_teachers(composed)
    typed = parse_values(RunConfig, composed)
    if typed.init_from and typed.objective.has_reference and not typed.train.teachers:
        # The reference of the objective: memory is planned for train.teachers, and a resumed run reads them again.
        typed = dataclasses.replace(typed, train=dataclasses.replace(typed.train, teachers=[typed.init_from]))
    if not typed.resume:  # typed values of a resumed run are checked with those of the run
        check_combinations(typed)  # without init_from, a wrong command line ends here, before torch is loaded
    precompile_headers(typed, argv)
    with allowing(named, typed.trust):
        return new_or_resumed(typed, line, started)


def with_init_from(composed: dict[str, Any], line: CommandLine) -> dict[str, Any]:
    """`composed`, not parsed yet, with the model and the tokenizer of init_from, unless others were typed. Raises UserError."""
    if is_null(composed["init_from"]):
        return composed
    from andrea.interop.importing.import_model import imported_if_foreign
    from andrea.training.resume import with_source

    composed["init_from"] = imported_if_foreign(composed["init_from"], composed["data_dir"])
    return with_source(composed, line.groups, line.values)


def check_command(composed: dict[str, Any]) -> None:
    """Raises UserError for what no run can be asked for, before a checkpoint is read. composed: not parsed yet."""
    if composed["name"] in NOT_RUNS:
        raise UserError(f"name={composed['name']} is the folder of wandb's or of sweeps' files; choose another name")
    if not is_null(composed["resume"]) and not is_null(composed["init_from"]):
        raise UserError(
            "resume and init_from exclude each other: resume=… continues a run, init_from=… starts a new one"
        )


def has_conversations(data: dict[str, Any]) -> bool:
    """Whether the text, or a source of a mixture, is conversations. data: not parsed yet."""
    sources = data["sources"].values() if isinstance(data["sources"], dict) else ()
    return any(isinstance(each, dict) and each.get("kind") in CONVERSATIONS for each in (data, *sources))


def new_or_resumed(typed: RunConfig, line: CommandLine, started: float) -> FinishedRun:
    """Train a new run, or continue from the checkpoint that `resume` finds. started: see `start`."""
    from andrea.insight.compare.page import RunPage
    from andrea.insight.lens.lens import small_lens
    from andrea.insight.lens.scores import probe_scores
    from andrea.training import resume
    from andrea.training.evaluation import Lens
    from andrea.training.parallel.ranks import join_ranks
    from andrea.training.planning.dry_run import describe
    from andrea.training.planning.length import with_length_and_name
    from andrea.training.planning.plan import keys_left_auto
    from andrea.training.records.run_folder import run_folder_of
    from andrea.training.start import start

    if typed.init_from:
        resume.check_source(typed)
    if "{" in (typed.name or ""):  # places to fill in, from what was typed alone: a resumed run may have another length
        check_combinations(typed)
        typed = dataclasses.replace(typed, name=with_length_and_name(typed).name)
    config = typed
    if not typed.resume:
        check_combinations(typed)
        config = with_length_and_name(typed)
    progress, groups = None, chosen_groups(line.groups)
    with join_ranks(config.parallel.watchdog_minutes) as (ranks, watchdog):
        checkpoint = ranks.from_rank_0(lambda: resume.find_resume(config)) if config.resume else None
        left_auto = keys_left_auto(flatten(to_plain(typed)))
        if checkpoint is not None:
            other_ranks = checkpoint.state["ranks"] != ranks.size
            saved = ranks.from_rank_0(lambda: resume.verified_config(checkpoint, typed))
            left_auto = resume.remembered_auto(checkpoint)
            known = checkpoint.state["groups"]
            replaced = {group: choice for group, choice in line.groups.items() if known.get(group) != choice}
            groups = known | line.groups
            merged, changes = resume.merge(
                checkpoint.state["config"], to_plain(typed), replaced, line.values, other_ranks, left_auto
            )
            left_auto = keys_left_auto(flatten(merged), left_auto, line.values)
            config = with_length_and_name(parse(RunConfig, merged), resumed=True)
            progress = ranks.from_rank_0(lambda: resume.resumed_progress(checkpoint, saved, config, left_auto))
            done = ranks.from_rank_0(lambda: resume.is_done(checkpoint, progress.planned_steps))
            if done and not config.dry_run:
                ranks.from_rank_0(lambda: resume.show_done(checkpoint, progress.planned_steps))
                return FinishedRun(0, run_folder_of(checkpoint) or checkpoint.path)
            if not done:
                ranks.from_rank_0(lambda: resume.show_resume(checkpoint, changes, saved, progress, config))
        elif config.resume:
            check_combinations(typed)
            config = with_length_and_name(typed)
            ranks.from_rank_0(lambda: print("nothing to resume yet: starting a new run"))
        if checkpoint is None and config.model.lora_rank and not config.init_from:
            frozen = f"model.lora_rank={config.model.lora_rank} freezes weights, which are random in a new run"
            raise UserError(f"{frozen}; name a trained model with init_from=…, or set model.lora_rank=0")
        if config.dry_run:
            ranks.from_rank_0(lambda: print(describe(config, checkpoint, progress)))
            return FinishedRun(0, None)
        lens = Lens(small_lens, probe_scores)
        return FinishedRun(*start(config, checkpoint, ranks, watchdog, lens, RunPage, left_auto, groups, started))


# ------------------------------------------------------------------------------------------------------- torch's headers
# torch.compile precompiles its C++ headers at its first use on a CPU with a new version of torch. This takes ten seconds of
# one core, and normally starts only when the model is compiled. A process of its own starts it earlier, on a core that is
# still idle, while training loads torch and prepares its text: the first step then comes five to six seconds sooner.
# Training does not depend on this process. torch's own lock makes training wait for headers that are being compiled; if the
# process fails, training compiles them itself.


def precompile_headers(config: RunConfig, argv: list[str]) -> threading.Thread | None:
    """Start the process if the run can benefit from it, and do not wait. argv: the command line of `config`."""
    may_use_card = config.device not in ("auto", "cpu") or (config.device == "auto" and Path("/dev/nvidia0").exists())
    compiles = config.compile != "off" and not config.dry_run and shutil.which("g++")
    has_idle_core = (os.cpu_count() or 1) > 1 and os.environ.get("LOCAL_RANK", "0") == "0"
    if may_use_card or not compiles or not has_idle_core or cached_headers():
        return None
    command, quiet = module_command("andrea.api.run", argv), subprocess.DEVNULL
    options = {"stdin": quiet, "stdout": quiet, "stderr": quiet, "env": module_environment()}
    thread = threading.Thread(target=subprocess.run, args=(command,), kwargs=options, daemon=True)
    thread.start()
    return thread


def cached_headers() -> list[Path]:
    """The precompiled headers that torch keeps for this user in its usual folder."""
    folder = torch_cache_folder()
    return sorted(folder.glob("precompiled_headers/*.gch")) if folder else []


def compile_headers(argv: list[str]) -> None:
    """Compile the smallest program that needs the headers, if the run is long enough to be compiled."""
    import torch

    from andrea.model.size import flops_per_token
    from andrea.runtime.compiling import choose_compile, compile_graph, configure_compiler
    from andrea.runtime.device import choose_device
    from andrea.training.planning.length import planned_vocabulary, with_length_and_name

    config = with_length_and_name(configure(RunConfig, "train", argv))
    per_token = flops_per_token(config.model, config.attention, planned_vocabulary(config))
    device = choose_device(config.device)
    total_flops = config.steps * config.tokens_per_step * per_token
    if device.type == "cpu" and choose_compile(config.compile, device, total_flops).value != "off":
        torch.set_num_threads(1)
        configure_compiler(device)
        compile_graph(torch.exp)(torch.zeros(64, 64))


if __name__ == "__main__":
    compile_headers(sys.argv[1:])
