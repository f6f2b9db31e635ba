"""Many runs from one command line: `andrea train -m model=andrea-nano,andrea-12m seed=1,2`.

Hydra's sweeper lists the combinations and Hydra's launcher starts the runs, one after another on this machine or as
jobs of a cluster (hydra/launcher=submitit_slurm). Hydra receives only the values, under placeholder names; each run
checks its own values. Each run is a separate process, so a run that fails does not end the others.
"""

from __future__ import annotations

import glob
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andrea.cli.command_line import hydra_errors
from andrea.config import CONFIGS, RunConfig, UserError, folder_name, readable_path
from andrea.config.group_files import check_choice
from andrea.config.keys import not_key_value, type_of_key
from andrea.runtime.program import module_command, module_environment, typed_command

SWITCHES = ("-m", "--multirun")
INTERRUPTED = (129, 130, 143)
FULL_ERROR = "HYDRA_FULL_ERROR"
LONGEST_VALUE = 4096  # characters: Hydra's parser takes seconds for more


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: the words in which it differs from other runs, and the exit code of its process."""

    words: list[str]
    code: int


def sweep(argv: list[str]) -> int:
    """Train once for each combination of the values in argv. Returns 0, or the exit code of the first run that failed.

    The runs form one wandb group (logger.group, or one named by the time) and are named by size, tokens and seed. The
    last line counts the runs that are done and names the runs that failed.
    """
    typed, for_hydra = split(argv)
    group = typed.setdefault("logger.group", time.strftime("sweep-%Y%m%d-%H%M%S"))
    if "name" in typed:
        raise UserError(
            "name=… would give all runs of a sweep the same folder; leave it out: runs are named by the settings that differ"
        )
    folder_name("logger.group", group)  # it becomes part of a path whose old content is removed
    readable_path("runs_dir", typed.get("runs_dir", "runs"))
    values = read_values(typed)
    varied = [key for key, value in values.items() if value.is_sweep_override()]
    folder = Path(typed.get("runs_dir", "runs")) / "sweeps" / group
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    launch(typed, varied, group, folder, for_hydra)
    runs = [SweepRun(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.json"))]
    if not runs:
        raise UserError(f"the sweep makes no run: {' '.join(f'{key}={typed[key]}' for key in varied)} has no values")
    for line in result_lines(Path(typed.get("runs_dir", "runs")), group, varied):
        print(line)
    return report(runs)


def split(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the values of this package's keys, and the words for Hydra. Raises UserError for an unknown key."""
    typed: dict[str, str] = {}
    for_hydra = []
    for word in argv:
        key, equals, value = word.partition("=")
        if word in SWITCHES:
            continue
        if key.split(".")[0].split("/")[0] == "hydra":
            for_hydra.append(word)
            continue
        if not equals:
            raise not_key_value(RunConfig, word)
        type_of_key(RunConfig, key)
        typed[key] = value
    return typed, for_hydra


def read_values(typed: dict[str, str]) -> dict[str, Any]:
    """Parse each value into an override object of Hydra. Group choices are checked. Raises UserError."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, values = OverridesParser.create(), {}
    for key, value in typed.items():
        if len(value) > LONGEST_VALUE:
            raise UserError(f"{key} is {len(value)} characters long; -m reads at most {LONGEST_VALUE}")
        try:
            values[key] = parser.parse_override(f"value={value}")
        except (HydraException, RecursionError):
            raise UserError(
                f"{key}={value} cannot be read by -m: write a,b or range(1,4) for several values; for text with spaces "
                f"or brackets, add a second pair of quotes: {key}=\"'…'\""
            ) from None
        if (CONFIGS / key).is_dir():
            is_varied = values[key].is_sweep_override()
            for choice in values[key].sweep_iterator() if is_varied else [values[key].value()]:
                check_choice(key, str(choice))
    return values


def launch(typed: dict[str, str], varied: list[str], group: str, folder: Path, for_hydra: list[str]) -> None:
    """Let Hydra start all runs. Each run writes its words and its exit code to a file in `folder`."""
    import hydra

    names = list(typed)

    def run_job(_: Any) -> None:
        from hydra.core.hydra_config import HydraConfig
        from hydra.core.override_parser.overrides_parser import OverridesParser

        job = HydraConfig.get()
        overrides = OverridesParser.create().parse_overrides(list(job.overrides.task))
        given = {names[int(override.key_or_group.removeprefix("value"))]: override.value() for override in overrides}
        words = [f"{key}={as_text(value)}" for key, value in given.items()]
        own = [word for word in words if word.partition("=")[0] in varied]
        print(f"sweep: run {job.job.num + 1}: {' '.join(own)}", flush=True)
        task = cluster_task()
        command = module_command("andrea", ["train", *words, f"name={run_name(own, group)}"])
        code = wait_for(command, module_environment() | task)
        if task.get("RANK", "0") == "0":
            (folder / f"{job.job.num:04d}.json").write_text(json.dumps({"words": own, "code": code}), encoding="utf-8")
        if code in INTERRUPTED:
            raise KeyboardInterrupt

    numbered = [f"+value{number}={value}" for number, value in enumerate(typed.values())]
    quiet = ["hydra/job_logging=disabled", "hydra/hydra_logging=disabled", "hydra.output_subdir=null"]
    place = [f"hydra.sweep.dir={folder.resolve()}", "hydra.sweep.subdir=."]
    argv, full_error = sys.argv, os.environ.get(FULL_ERROR)
    sys.argv = [sys.argv[0], "--multirun", *quiet, *place, *for_hydra, *numbered]
    os.environ[FULL_ERROR] = "1"  # otherwise Hydra prints its errors itself and exits with code 1
    try:
        hydra.main(config_path=None, config_name=None, version_base="1.3")(run_job)()
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


def result_lines(runs_dir: Path, group: str, varied: list[str]) -> list[str]:
    """The best run of a sweep, if all runs were judged on the same text, and the command that compares the runs."""
    from andrea.insight.runs import read_row
    from andrea.training.records.recognise import is_run_folder

    folders = sorted(runs_dir.glob(f"*-{glob.escape(group)}"))  # run_name ends every name so
    rows = [read_row(folder) for folder in folders if is_run_folder(folder)]
    figures = {row.name: row.bits_per_byte for row in rows if row.bits_per_byte is not None}
    if len(figures) < 2:
        return []
    lines = []
    if not any(key.split(".")[0] in ("data", "tokenizer") for key in varied):
        best = min(figures, key=lambda name: figures[name])
        lines.append(f"sweep: fewest bits per byte: {best}, {figures[best]:.4f}")
    place = f"{shlex.quote(str(runs_dir))}/*-{shlex.quote(group)}"
    return [*lines, f"sweep: compare the runs: {typed_command('compare')} {place}"]


def report(runs: list[SweepRun]) -> int:
    """Print the sweep's last line. Returns the exit code of the first run that failed, or 0."""
    failed = [run for run in runs if run.code]
    line = f"sweep: {len(runs) - len(failed)} of {len(runs)} runs done"
    if failed:
        line += "; failed: " + ", ".join(f"{' '.join(run.words)} (exit code {run.code})" for run in failed)
    print(line)
    return failed[0].code if failed else 0


def cluster_task() -> dict[str, str]:
    """The environment variables with which each task of a cluster job joins one run as a rank.

    {} if the job has only one task, or outside a job.
    """
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
    """Run a command and return its exit code. Ctrl-C also reaches the command, which then saves and ends by itself."""
    process = subprocess.Popen(command, env=environment)
    while True:
        try:
            code = process.wait()
            return 128 - code if code < 0 else code
        except KeyboardInterrupt:
            continue


def as_text(value: Any) -> str:
    """Convert a value that Hydra has parsed to text for our own command line."""
    return json.dumps(value) if value is None or isinstance(value, (bool, list, dict)) else str(value)
