"""Many runs from one command line: `andrea train -m model=andrea-nano,andrea-12m seed=1,2`.

Hydra's sweeper lists the combinations and Hydra's launcher starts the runs, one after another on this machine or as
jobs of a cluster (hydra/launcher=submitit_slurm). Hydra receives only the values, under placeholder names; each run
checks its own values. Each run is a separate process, so a run that fails does not end the others.
"""

import glob
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import typing
import zlib
from pathlib import Path
from typing import Any

from andrea.api.command_line import SWITCHES, check_once, hydra_defaults, hydra_errors
from andrea.config import CONFIGS, RunConfig, UserError, folder_name, readable_path
from andrea.config.keys import check_choice, not_key_value, type_of_key
from andrea.config.parse import is_text
from andrea.runtime.files import reporting_unusable
from andrea.runtime.program import module_command, module_environment, typed_command

INTERRUPTED = (129, 130, 143)
FULL_ERROR, FOLDER, WANDB_GROUP = "HYDRA_FULL_ERROR", "ANDREA_SWEEP_FOLDER", "WANDB_RUN_GROUP"  # environment variables
LONGEST_VALUE = 4096  # characters: Hydra's parser takes seconds for more


def sweep(argv: list[str]) -> int:
    """Train once for each combination of the values in argv. Returns 0, or the exit code of the first run that failed.

    The runs form one wandb group (name=…, or one named by the time) and are named by size, tokens and seed. The last line
    counts the runs that are done and names the runs that failed.
    """
    fixed, varied, for_hydra = split(argv)
    settings = dict(word.split("=", 1) for word in fixed)
    group = settings.get("name", time.strftime("sweep-%Y%m%d-%H%M%S"))
    fixed = [word for word in fixed if not word.startswith("name=")]
    keys = [word.partition("=")[0] for word in varied]
    if "train.max_minutes" not in (*settings, *keys):  # runs to compare have the same length on a slow machine
        fixed.append("train.max_minutes=null")
    if "{" in group:
        raise UserError(f"name={group}: a sweep's name has no places to fill in; size, tokens and seed name its runs")
    folder_name("name", group)  # it becomes part of a path whose old content is removed
    runs_dir = Path(readable_path("runs_dir", settings.get("runs_dir", "runs")))
    if alone := {"name", "runs_dir"} & set(keys):
        raise UserError(f"{min(alone)} holds all runs of a sweep, so it has one value; leave the others out")
    folder = runs_dir / "sweeps" / group
    with reporting_unusable(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    launch(fixed, varied, group, folder, for_hydra)
    # Of each run: the words in which it differs from the others, and the exit code of its process.
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    if not runs:
        raise UserError(f"the sweep makes no run: {' '.join(varied)} has no values")
    failed = [run for run in runs if run["code"]]
    for line in result_lines(runs_dir, group, [run["words"] for run in runs if run not in failed], keys):
        print(line)
    line = f"sweep: {len(runs) - len(failed)} of {len(runs)} runs done"
    if failed:
        line += "; failed: " + ", ".join(f"{' '.join(run['words'])} (exit code {run['code']})" for run in failed)
    print(line)
    return failed[0]["code"] if failed else 0


def split(argv: list[str]) -> tuple[list[str], list[str], list[str]]:
    """The words with one value, as each run gets them, those with several, and those for Hydra. Raises UserError."""
    words: dict[str, str] = {}
    fixed, varied, for_hydra = [], [], []
    for word in argv:
        key, equals, value = word.partition("=")
        if word in SWITCHES:
            continue
        if key.split(".")[0].split("/")[0] == "hydra":
            for_hydra.append(word)
            continue
        if not equals:
            raise not_key_value(RunConfig, word)
        check_once(words, key, word, type_of_key(RunConfig, key))
        override = read_value(key, value)
        is_varied = override is not None and override.is_sweep_override()
        text = as_text(override.value()) if override and not is_varied and value[:1] in ("'", '"') else value
        (varied if is_varied else fixed).append(f"{key}={text}")
        if (CONFIGS / key).is_dir():
            for choice in override.sweep_iterator() if is_varied else [text]:
                check_choice(key, str(choice))
    return fixed, varied, for_hydra


def read_value(key: str, value: str) -> Any:
    """The value as an override object of Hydra; None for a single text or path that Hydra cannot read. Raises UserError."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if len(value) > LONGEST_VALUE:
        raise UserError(f"{key} is {len(value)} characters long; -m reads at most {LONGEST_VALUE}")
    try:
        return OverridesParser.create().parse_override(f"value={value}")
    except (HydraException, RecursionError):
        hint = type_of_key(RunConfig, key)
        if any(map(is_text, typing.get_args(hint) or (hint,))) and "," not in value:
            return None
        raise UserError(
            f"{key}={value} cannot be read by -m: write a,b or range(1,4) for several values; quote a text that has "
            f"spaces, brackets or other special characters once more: {key}=\"'…'\" for one, {key}=\"'…','…'\" for two"
        ) from None


def launch(fixed: list[str], varied: list[str], group: str, folder: Path, for_hydra: list[str]) -> None:
    """Let Hydra start all runs. Each run writes its words and its exit code to a file in `folder`."""
    import hydra

    keys = [word.partition("=")[0] for word in varied]

    def run_job(_: Any) -> None:
        from hydra.core.hydra_config import HydraConfig
        from hydra.core.override_parser.overrides_parser import OverridesParser

        job = HydraConfig.get()
        overrides = OverridesParser.create().parse_overrides(list(job.overrides.task))
        given = {int(override.key_or_group.removeprefix("value")): override.value() for override in overrides}
        own = [f"{keys[number]}={as_text(value)}" for number, value in sorted(given.items())]
        print(f"sweep: run {job.job.num + 1}: {' '.join(own)}", flush=True)
        task = cluster_task()
        command = module_command("andrea", ["train", *fixed, *own, f"name={run_name(own, group)}"])
        code = wait_for(command, module_environment() | task | {WANDB_GROUP: group})
        if task.get("RANK", "0") == "0":
            (folder / f"{job.job.num:04d}.json").write_text(json.dumps({"words": own, "code": code}), encoding="utf-8")
        if code in INTERRUPTED:
            raise KeyboardInterrupt

    numbered = [f"+value{number}={word.partition('=')[2]}" for number, word in enumerate(varied)]
    quiet = ["hydra/job_logging=disabled", "hydra/hydra_logging=disabled", "hydra.output_subdir=null"]
    place = [f"hydra.sweep.dir=${{oc.env:{FOLDER}}}", "hydra.sweep.subdir=."]  # Hydra cannot read each path in a word
    argv, full_error = sys.argv, os.environ.get(FULL_ERROR)
    sys.argv = [sys.argv[0], "--multirun", *quiet, *place, *for_hydra, *numbered]
    os.environ[FOLDER] = str(folder.resolve())
    os.environ[FULL_ERROR] = "1"  # otherwise Hydra prints its errors itself and exits with code 1
    try:
        hydra.main(config_path=None, config_name=None, **hydra_defaults())(run_job)()
    except hydra_errors() as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{' '.join(for_hydra) or 'the sweep'} is refused by Hydra: {reason}") from None
    finally:
        sys.argv = argv
        os.environ.pop(FULL_ERROR)
        if full_error is not None:
            os.environ[FULL_ERROR] = full_error


def run_name(own: list[str], group: str) -> str:
    """The name of a run: size, tokens, seed (filled in by the run itself), the other varied keys, and the group."""
    parts = [word.partition("=") for word in own]
    others = [f"{key.rpartition('.')[2]}={value}" for key, _, value in parts if key not in ("model", "seed")]
    return "-".join(["{model}", "{tokens}", "seed{seed}", *others, group]).replace("/", "_")


def result_lines(runs_dir: Path, group: str, done: list[list[str]], varied: list[str]) -> list[str]:
    """The best run of a sweep, if all runs were judged on the same whole text, and the command that compares the runs.

    done: of each run that is done, its own words.
    """
    from andrea.insight.runs import result_in
    from andrea.training.records.run_folder import read_lines

    folders = sorted(runs_dir.glob(f"*-{glob.escape(group)}"))  # also those of a sweep whose name ends in the same way
    names = [name_pattern(own, group) for own in done]
    found = [folder for folder in folders if any(re.fullmatch(name, folder.name) for name in names)]
    results = {run.name: result_in(run, read_lines(run / "metrics.jsonl")) for run in found}
    figures = {name: result["val/bpb"] for name, result in results.items() if result}
    if len(figures) < 2:
        return []
    lines = []
    is_of_part = any("val/tokens" in result for result in results.values())  # max_minutes left no time for the rest
    if not is_of_part and not any(key.split(".")[0] in ("data", "tokenizer", "objective") for key in varied):
        best = min(figures, key=lambda name: figures[name])
        lines.append(f"sweep: fewest bits per byte: {best}, {figures[best]:.4f}")
    place = f"{shlex.quote(str(runs_dir))}/*-{shlex.quote(group)}" if found == folders else shlex.join(map(str, found))
    return [*lines, f"sweep: compare the runs: {typed_command('compare')} {place}"]


def name_pattern(own: list[str], group: str) -> str:
    """The regular expression of a run's name, whose places the run itself has filled in."""
    seeds = [word.removeprefix("seed=") for word in own if word.startswith("seed=") and word[5:].isdigit()]
    pattern = re.escape(run_name(own, group))
    for place, filled in {"model": ".+", "tokens": "[^-]+", "seed": seeds[0] if seeds else r"\d+"}.items():
        pattern = pattern.replace(re.escape(f"{{{place}}}"), filled)
    return pattern


def cluster_task() -> dict[str, str]:
    """The environment variables by which each task of a cluster job joins one run as a rank; {} for one task, or without."""
    if "submitit" not in sys.modules:  # submitit's launcher has not started this process
        return {}
    import submitit

    try:
        task = submitit.JobEnvironment()
    except RuntimeError:
        return {}
    if task.num_tasks == 1:
        return {}
    return {
        "RANK": str(task.global_rank),
        "WORLD_SIZE": str(task.num_tasks),
        "LOCAL_RANK": str(task.local_rank),
        "LOCAL_WORLD_SIZE": str(task.num_tasks // task.num_nodes),
        "MASTER_ADDR": task.hostnames[0],
        "MASTER_PORT": str(20000 + zlib.crc32(task.job_id.encode()) % 20000),  # the same for all tasks of the job
    }


def wait_for(command: list[str], environment: dict[str, str]) -> int:
    """Run a command and return its exit code. Ctrl-C also reaches the command, and SIGTERM is passed on: it saves and ends.

    Raises KeyboardInterrupt after the command has ended, also if it was done at this moment: no other run may begin.
    """
    process, interrupted = subprocess.Popen(command, env=environment), False

    def pass_on(*_: Any) -> None:
        process.terminate()
        raise KeyboardInterrupt

    # A launcher may have its own handler, or run this in a thread, which can have none.
    is_ours = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    )
    if is_ours:
        signal.signal(signal.SIGTERM, pass_on)
    while True:
        try:
            process.wait()
            break
        except KeyboardInterrupt:
            interrupted = True
    if is_ours:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if interrupted:
        raise KeyboardInterrupt
    return 128 - process.returncode if process.returncode < 0 else process.returncode


def as_text(value: Any) -> str:
    """Convert a value that Hydra has parsed to text for our own command line."""
    return json.dumps(value) if value is None or isinstance(value, (bool, list, dict)) else str(value)
