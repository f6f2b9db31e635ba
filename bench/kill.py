"""End training commands at random moments, start them again until the run is done, compare with the uninterrupted run.

    python bench/kill.py --lives 300
    python bench/kill.py --lives 300 --warm
    python bench/kill.py --lives 10 --cold compile=on
    python bench/kill.py --lives 60 --ranks 2 --warm parallel=fsdp precision=fp32
    python bench/kill.py --lives 30 --warm --from-base dpo

A life is one command that something ends, at a moment drawn over the whole processor time of the uninterrupted
command: SIGKILL, SIGTERM, SIGHUP, a standard output whose reader ends, or a full disk. Half of the lives wait for a short
part of the command instead, in which few moments would fall by chance: text being prepared, a save, or what follows the
last checkpoint. Each run prepares its text, trains a vocabulary, trains the model, evaluates and saves; with FSDP it also
consolidates. It is started again with the same command until it is done, and must then be equal, bit for bit, to the
uninterrupted run: text, weights, optimizer state, records but for timings, samples. With several ranks, a process
drawn from the ranks and torchrun gets the signal, and torchrun may restart its ranks. With --warm, the commands are
forks of a process that has loaded torch: they take a fifth of the time, but none of them ends during the imports.

With --from-base, a base model is trained first, and the run begins from its weights, on conversations (chat), on pairs (dpo) or
with rewards (grpo). Until it has a checkpoint it is started with init_from, and then with `name=a resume=auto` alone.

The words after the options go to train.py. The record holds the state: a command with --at-most ends after so many
lives, and the same command goes on. The disk is a small tmpfs, which needs the right to mount; without it no disk gets
full. Exit code 1 if any run ends differently, prints a traceback, exits with a code that does not belong to its end, or
loses or damages a checkpoint that it had.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from common import ROOT, write_record
from lives import ENDINGS, Command, Setting, live

from andrea.checkpoint import checkpoints_of
from andrea.runtime.files import file_sha256
from andrea.training.records.run_folder import read_lines

TINY = [
    "data=text", "tokenizer=bpe", "tokenizer.vocab_size=300", "model.d_model=16", "model.n_layer=2", "model.n_head=2",
    "model.d_mlp=32", "model.sequence_length=32", "logger=none", "threads=1", "device=cpu", "train.tokens_per_step=64",
    "train.micro_batch=2", "train.steps=16", "train.log_every=1", "train.eval_every=4", "train.save_every=2",
    "train.sample_tokens=8", "train.keep=100", "compile=off", "name=a", "resume=auto",
]  # fmt: skip
RATES = [f"optimizer.{kind}learning_rate=0.01" for kind in ("", "embedding_", "matrix_")]
TUNED = {  # by --from-base: what the base model learns, and what the run that begins from it learns
    "chat": (["data=text"], ["data=chat"]),
    "dpo": (["data=chat"], ["data=chat", "objective=dpo"]),
    "grpo": (["data=chat"], ["data=chat", "objective=grpo"]),
}
TIMINGS = {"seconds", "train/tokens_per_second", "train/seconds_per_step", "train/peak_memory_bytes", "checkpoint"}
DISK_BYTES = {"eager": 64 << 20, "compiled": 1 << 30}  # the precompiled headers of torch.compile take 156 MB each
MOST_LIVES = 8  # of one run; its next command is left alone
ENDLESS_S = 1e9


def outcome(setting: Setting) -> dict[str, Any]:
    """What must be equal: the prepared text, the last weights and optimizer state, the state, records and samples."""
    run = setting.run
    (prepared,) = (path.parent for path in (setting.disk / "data").glob("*/meta.json"))
    last = checkpoints_of(run)[-1]
    state = json.loads((last / "state.json").read_text())
    config = {group: value for group, value in state["config"].items() if group not in ("runs_dir", "data_dir")}
    config["data"] = config["data"] | {"path": None}
    if setting.later:  # what the first command types and the later ones do not belongs to the command, not to the run
        config = json.loads(json.dumps(config | {"init_from": None, "resume": None}).replace(str(setting.disk), "DISK"))
        state["left_auto"] = [key for key in state["left_auto"] if key != "resume"]
    return {
        "text": {path.name: file_sha256(path) for path in sorted(prepared.iterdir()) if path.suffix != ".json"},
        "files": {path.name: file_sha256(path) for path in sorted(last.glob("*.safetensors"))},
        "state": {
            key: digest(value)
            for key, value in state.items()
            if key not in ("seconds", "run", "config", "working_folder")
        },
        "config": digest(config),
        "best": (run / "checkpoints" / "best").read_text(),
        **{name: records_of(run / f"{name}.jsonl") for name in ("metrics", "samples", "health")},
    }


def records_of(path: Path) -> list[str]:
    """The digests of the records without their timings."""
    return [digest({key: value for key, value in record.items() if key not in TIMINGS}) for record in read_lines(path)]


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def make_disk(setting: Setting, cold: bool) -> None:
    """An empty disk for a run but for the text to train on and, unless `cold`, the caches of earlier runs."""
    for name in ("runs", "data", *(["cache"] if cold else [])):
        shutil.rmtree(setting.disk / name, ignore_errors=True)
    (setting.disk / "cache").mkdir(exist_ok=True)
    text = setting.disk / "text"
    if not text.exists():
        text.mkdir()
        for name in ("bisect.py", "heapq.py", "copy.py"):
            (text / name).write_bytes((Path(sysconfig.get_paths()["stdlib"]) / name).read_bytes()[:7000])
            os.utime(text / name, (0, 0))  # the time is part of the prepared folder's name
        write_conversations(setting.disk)


def write_conversations(disk: Path) -> None:
    """The folders `talk` and `pairs`: questions that are answered with a letter, and pairs of which `a` is the better answer."""
    letters = "abcd"
    for n in range(100, 180):
        asked, answer = {"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": letters[n * 7 % 11 % 4]}
        pair = {"prompt": f"{n}?", "chosen": "a", "rejected": letters[1 + n % 3]}
        for folder, record in (("talk", {"messages": [asked, answer]}), ("pairs", pair)):
            (disk / folder).mkdir(exist_ok=True)
            with open(disk / folder / ("train.jsonl" if n < 164 else "held_out.jsonl"), "a") as file:
                file.write(json.dumps(record) + "\n")
    for path in disk.glob("*/*.jsonl"):
        os.utime(path, (0, 0))


def make_base(setting: Setting, kind: str) -> None:
    """The model that the runs begin from. Nothing ends its run."""
    make_disk(setting, cold=False)
    places = [f"runs_dir={setting.disk}/base", f"data_dir={setting.disk}/base-data"]
    data = f"data.path={setting.disk}/{'text' if kind == 'chat' else 'talk'}"
    own = [*TUNED[kind][0], *RATES, data, "name=base", "train.steps=60", "train.save_every=60", "train.eval_every=60"]
    words = [*places, *own, *without(TINY, [*own, "resume="])]
    command = Command(dataclasses.replace(setting, words=words, later=()), has_reader=False)
    if code := command.ended():
        raise SystemExit(f"the base model's run exits with {code}: {setting.errors.read_text()}")


def without(words: list[str], given: list[str]) -> list[str]:
    """The words of which no key is in `given`."""
    keys = {word.split("=")[0] for word in given}
    return [word for word in words if word.split("=")[0] not in keys]


def uninterrupted(setting: Setting, cold: bool) -> dict[str, Any]:
    """The length and the outcome of the command that nothing ends. Unless `cold`, a first one fills the caches."""
    for _ in range(1 if cold else 2):
        make_disk(setting, cold)
        command = Command(setting, has_reader=False)
        if code := command.ended():
            raise SystemExit(f"the uninterrupted run exits with {code}: {setting.errors.read_text()}")
    return {"length_s": command.most_busy_s, "outcome": outcome(setting)}


def lived_run(setting: Setting, cold: bool, reference: dict[str, Any], moment: random.Random) -> dict[str, Any]:
    """A run that is started again until it is done. different: what differs from the reference."""
    make_disk(setting, cold)
    lives: list[dict[str, Any]] = []
    while not (lives and lives[-1]["exit_code"] == 0):
        if len(lives) > MOST_LIVES:
            return {"lives": lives, "different": ["not done"]}
        lives.append(live(setting, reference["length_s"] if len(lives) < MOST_LIVES else ENDLESS_S, moment))
    ours, theirs = outcome(setting), reference["outcome"]
    return {"lives": lives, "different": [key for key in theirs if ours[key] != theirs[key]]}


def summary_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    commands = [life for run in runs for life in run["lives"]]
    lives = [life for life in commands if life["kind"]]
    return {
        "lives": len(lives),
        "runs": len(runs),
        "equal": sum(not run["different"] for run in runs),
        "findings": sum("finding" in life for life in commands),
        **{key: sum(life[key] for life in commands) for key in ("believed_wrongly", "lost", "left_over")},
        **{key: dict(Counter(str(life[key]) for life in lives)) for key in ("kind", "phase", "waited_for", "target")},
    }


def show(number: int, run: dict[str, Any]) -> None:
    for life in run["lives"]:
        words = f"{life['kind'] or '-':14} {life['target'] or '-':8} {life['phase']:24}"
        print(f"{number:4} {words} {life['at_s']:6.2f} s, exit code {life['exit_code']}")
        if "finding" in life:
            print(life["finding"])
    print(f"{number:4} {run['different'] or 'equal'}", flush=True)


def with_own_disk() -> None:
    """Start this program again in a mount namespace, in which it may mount its disk. Without the right, go on here."""
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    if (
        "ANDREA_OWN_DISK" not in os.environ
        and not subprocess.run([*unshare, "true"], stderr=subprocess.DEVNULL).returncode
    ):
        os.environ["ANDREA_OWN_DISK"] = "1"
        os.execvp(unshare[0], [*unshare, sys.executable, *sys.argv])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lives", type=int, default=20)
    parser.add_argument("--at-most", type=int, default=1 << 30, help="lives of this call; the same command goes on")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cold", action="store_true", help="each run begins with empty caches of compiled code")
    parser.add_argument("--warm", action="store_true", help="commands are forks of one process, without torchrun")
    parser.add_argument("--from-base", choices=TUNED, help="begin from a trained model, and learn this")
    parser.add_argument("--output", type=Path, help="default: bench/results/kill.json, kill-ranks, kill-objectives")
    parser.add_argument("words", nargs="*", help="key=value for train.py")
    return parser.parse_args()


def make_setting(disk: Path, chosen: argparse.Namespace) -> Setting:
    """Mount the disk, if this process may, and assemble the command."""
    disk.mkdir()
    size = DISK_BYTES["compiled" if any(word.startswith("compile=") for word in chosen.words) else "eager"]
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(disk)]
    is_own = "ANDREA_OWN_DISK" in os.environ and not subprocess.run(mount, stderr=subprocess.DEVNULL).returncode
    kinds = [kind for kind in ENDINGS if is_own or kind != "full disk"]
    places, kind = [f"runs_dir={disk}/runs", f"data_dir={disk}/data"], chosen.from_base
    if kind is None:
        words = [*places, f"data.path={disk}/text", *without(TINY, chosen.words), *chosen.words]
        return Setting(words, disk, kinds, chosen.ranks, chosen.warm)
    data = f"data.path={disk}/{'pairs' if kind == 'dpo' else 'talk'}"
    own = [*TUNED[kind][1], *without([*RATES, "train.tokens_per_step=256"], chosen.words), *chosen.words]
    others = without([word for word in TINY if not word.startswith(("model.", "tokenizer"))], [*own, "resume="])
    words = [*places, f"init_from={disk}/base/base", data, *others, *own]
    return Setting(
        words, disk, kinds, chosen.ranks, chosen.warm, later=(*places, "name=a", "resume=auto", "compile=off")
    )


def main() -> None:
    chosen = arguments()
    with_own_disk()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the commands inherit it, and nohup would have it ignored
    base = chosen.from_base
    name = "kill-objectives" if base else "kill" if chosen.ranks == 1 else "kill-ranks"
    output = chosen.output or ROOT / "bench" / "results" / f"{name}.json"
    about = {key: getattr(chosen, key) for key in ("words", "ranks", "seed", "cold", "warm")}
    record = json.loads(output.read_text()) if output.exists() else {}
    others = {kind: record[kind] for kind in TUNED if base and kind in record}  # one record holds all of --from-base
    earlier = others.get(base, {}) if base else record
    if any(earlier.get(key) != value for key, value in about.items()):
        earlier = {}
    runs: list[dict[str, Any]] = earlier.get("rows", [])
    most = min(chosen.lives, summary_of(runs)["lives"] + chosen.at_most)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        setting = make_setting(Path(folder) / "disk", chosen)
        if base:
            make_base(setting, base)
        reference = earlier.get("reference") or uninterrupted(setting, chosen.cold)
        while summary_of(runs)["lives"] < most:
            run = lived_run(setting, chosen.cold, reference, random.Random(f"{chosen.seed} {len(runs)}"))
            show(len(runs), run)
            runs.append(run)
            told = {**about, **summary_of(runs), "reference": reference, "rows": runs}
            write_record(output, name, "cpu", {**others, base: told} if base else told)
        subprocess.run(["umount", "--lazy", str(setting.disk)], stderr=subprocess.DEVNULL)
    summary = summary_of(runs)
    print(json.dumps(summary))
    bad = summary["findings"] or summary["believed_wrongly"] or summary["lost"] or summary["equal"] < len(runs)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
