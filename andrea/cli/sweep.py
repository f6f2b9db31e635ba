"""Many runs from one command line: `python train.py -m model=andrea-nano,andrea-12m seed=1,2`.

Hydra's sweeper spells out the combinations and Hydra's launcher starts them, one after another here or as jobs of a
cluster (hydra/launcher=submitit_slurm). Hydra sees the values alone, under names of its own: what they mean is checked
by the run itself, a process like any other, and one that fails does not end the others.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andrea.cli.command_line import check_choice, hydra_errors, with_current_names
from andrea.config import CONFIGS, RunConfig, UserError, folder_name, nearest, readable_path
from andrea.config.keys import dotted_keys, type_of_key

SWITCHES = ("-m", "--multirun")
INTERRUPTED = (130, 143)
FULL_ERROR = "HYDRA_FULL_ERROR"
LONGEST_VALUE = 4096  # characters: Hydra's parser takes seconds for more


@dataclass(frozen=True)
class Job:
    """One run of a sweep: the words that set it apart, and the exit code of its process."""

    words: list[str]
    code: int


def sweep(script: Path, argv: list[str]) -> int:
    """Run `script` once for each combination of the values in argv; returns 0, or the first failure's exit code.

    The runs are one wandb group (logger.group, or one named by the time) and are named by size, tokens and seed. The
    last line says how many are done and names those that failed.
    """
    typed, of_hydra = split(argv)
    group = typed.setdefault("logger.group", time.strftime("sweep-%Y%m%d-%H%M%S"))
    if "name" in typed:
        raise UserError(
            "name=… would be one folder for all runs of a sweep; leave it out: they are named by what differs"
        )
    folder_name("logger.group", group)  # it becomes one, and what it held before is taken away
    readable_path("runs_dir", typed.get("runs_dir", "runs"))
    values = read_values(typed)
    varied = [key for key, value in values.items() if value.is_sweep_override()]
    folder = Path(typed.get("runs_dir", "runs")) / "sweeps" / group
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    launch(script, typed, varied, group, folder, of_hydra)
    jobs = [Job(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.json"))]
    if not jobs:
        raise UserError(f"the sweep makes no run: {' '.join(f'{key}={typed[key]}' for key in varied)} has no values")
    return report(jobs)


def split(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Our own words by key, their spelling checked, and those meant for Hydra. Raises UserError."""
    typed: dict[str, str] = {}
    of_hydra = []
    for word in with_current_names(RunConfig, argv):
        key, equals, value = word.partition("=")
        if word in SWITCHES:
            continue
        if key.split(".")[0].split("/")[0] == "hydra":
            of_hydra.append(word)
            continue
        if not equals:
            raise UserError(f"{word!r} is not of the form key=value{nearest(key, dotted_keys(RunConfig))}")
        type_of_key(RunConfig, key)
        typed[key] = value
    return typed, of_hydra


def read_values(typed: dict[str, str]) -> dict[str, Any]:
    """Hydra's overrides by key, the choices of groups checked. Raises UserError."""
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
                f"{key}={value} is not in the grammar that -m reads values with: a,b or range(1,4) for several, and "
                f"quotes of its own around text with spaces or brackets: {key}=\"'…'\""
            ) from None
        if (CONFIGS / key).is_dir():
            many = values[key].is_sweep_override()
            for choice in values[key].sweep_iterator() if many else [values[key].value()]:
                check_choice(key, str(choice))
    return values


def launch(
    script: Path, typed: dict[str, str], varied: list[str], group: str, folder: Path, of_hydra: list[str]
) -> None:
    """Hand all jobs to Hydra; each leaves its words and exit code in `folder`."""
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
        task = place_of_task()
        code = patient_call([sys.executable, str(script), *words, f"name={run_name(own, group)}"], task)
        if task.get("RANK", "0") == "0":
            (folder / f"{job.job.num:04d}.json").write_text(json.dumps({"words": own, "code": code}), encoding="utf-8")
        if code in INTERRUPTED:
            raise KeyboardInterrupt

    numbered = [f"+value{number}={value}" for number, value in enumerate(typed.values())]
    quiet = ["hydra/job_logging=disabled", "hydra/hydra_logging=disabled", "hydra.output_subdir=null"]
    place = [f"hydra.sweep.dir={folder.resolve()}", "hydra.sweep.subdir=."]
    words, full = sys.argv, os.environ.get(FULL_ERROR)
    sys.argv = [str(script), "--multirun", *quiet, *place, *of_hydra, *numbered]
    os.environ[FULL_ERROR] = "1"  # or Hydra prints what is wrong in lines of its own, and leaves with exit code 1
    try:
        hydra.main(config_path=None, config_name=None, version_base="1.3")(run_job)()
    except hydra_errors() as error:
        said = " ".join(str(error).split())[:200]
        raise UserError(f"{' '.join(of_hydra) or 'the sweep'} is not something Hydra can do: {said}") from None
    finally:
        sys.argv = words
        os.environ.pop(FULL_ERROR)
        if full is not None:
            os.environ[FULL_ERROR] = full


def run_name(own: list[str], group: str) -> str:
    """What differs between the runs: size, tokens and seed (filled in by the run itself), then whatever else was varied."""
    parts = [word.partition("=") for word in own]
    others = [f"{key.rpartition('.')[2]}={value}" for key, _, value in parts if key not in ("model", "seed")]
    return "-".join(["{model}", "{tokens}", "seed{seed}", *others, group]).replace("/", "_")


def report(jobs: list[Job]) -> int:
    """The sweep's last line, which names what failed; the first failure's exit code, or 0."""
    failed = [job for job in jobs if job.code]
    line = f"sweep: {len(jobs) - len(failed)} of {len(jobs)} runs done"
    if failed:
        line += "; failed: " + ", ".join(f"{' '.join(job.words)} (exit code {job.code})" for job in failed)
    print(line)
    return failed[0].code if failed else 0


def place_of_task() -> dict[str, str]:
    """Where a cluster's job has several tasks, the environment that makes each of them a rank of one run."""
    if "submitit" not in sys.modules:  # its launcher has not started this process
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


def patient_call(command: list[str], environment: dict[str, str]) -> int:
    """The process's exit code. Ctrl-C reaches the process too, which saves and ends by itself: it is waited for."""
    process = subprocess.Popen(command, env=os.environ | environment)
    while True:
        try:
            code = process.wait()
            return 128 - code if code < 0 else code
        except KeyboardInterrupt:
            continue


def as_text(value: Any) -> str:
    """A value that Hydra has read, as it is typed on our own command line."""
    return json.dumps(value) if value is None or isinstance(value, (bool, list, dict)) else str(value)
