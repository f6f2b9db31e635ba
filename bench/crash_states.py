"""Every crash state of a command, and each of its file-system calls failing once: is the end as if nothing had happened?

    python bench/crash_states.py
    python bench/crash_states.py --only run-2-ranks --at-most 200
    python bench/crash_states.py --only run --no-failures

A supervisor sees all calls of a whole command (`traced.py`) and notes those that change something. From these notes a
model of the disk is led from call to call. Before each call, it yields the folder as it is, and as power loss may leave
it: a file may lack what was not synced, have half of it, or zeros in its place; what was created, renamed or removed in a
folder that was not synced may be undone. Where at most MOST_UNSYNCED files and names are not synced, these are all
subsets; else none, all, each alone, and all but each. States that differ only in files that no reader opens
(`.writing-…`) count once. In each distinct state the same command is started again. It must end without an error, and
all files must equal those of the uninterrupted command, byte for byte but for times and the random id of the run.

Then the command is repeated for each call and each error that the call may give, with this one call failing. The command
must end as before, or with one line and exit code 2 or 5; after the same command without a failure, all files must be
as if nothing had failed. An optional part (a page) may be missing if a line said so.

Commands are forks of a process that has loaded torch. Exit code 1 if there is any difference, traceback, or wrong end.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import importlib
import itertools
import json
import multiprocessing
import os
import pkgutil
import random
import shutil
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import ROOT, write_record
from kill import TIMINGS
from lives import ForkedRanks, ForkedTrain
from traced import Call, supervise

import andrea
from andrea.__main__ import main as andrea_main
from andrea.api.command_line import compose, read
from andrea.cli.commands import train
from andrea.config import RunConfig
from andrea.runtime.files import UNFINISHED

TEXT = ["data=text", "data.path=text", "data_dir=data", "tokenizer=bpe", "tokenizer.vocab_size=300"]
RUN = [
    *TEXT, "runs_dir=runs", "model.d_model=16", "model.n_layer=1", "model.n_head=2", "model.d_mlp=32",
    "model.bigram_rows=64", "model.sequence_length=128", "logger=none", "threads=1", "device=cpu", "compile=off",
    "train.tokens_per_step=128", "train.micro_batch=1", "train.steps=4", "train.log_every=1", "train.eval_every=2",
    "train.save_every=1", "train.sample_tokens=4", "train.keep=1",
    "train.eval_tokens=256", "name=a", "resume=auto",
]  # fmt: skip
MOST_UNSYNCED = 8
OPTIONAL = ("runs/a/lens", "runs/a/run.html", "runs/a/run.log")  # a run goes on without them, and says so
NO_RESULT = (".lock", "run.log", "verified.json")  # verified.json: times at which the shards were read
State = dict[str, bytes | None]  # path -> content; None for a folder


# ------------------------------------------------------------------------------------------- a disk that may lose power


@dataclass(eq=False)
class File:
    content: bytes = b""
    synced: bytes = b""


@dataclass(eq=False)
class Folder:
    """entries: by name. synced: those of the last sync. changed: the names of each change since then."""

    entries: dict[str, File | Folder] = field(default_factory=dict)
    synced: dict[str, File | Folder] = field(default_factory=dict)
    changed: list[set[str]] = field(default_factory=list)

    def put(self, name: str, node: File | Folder | None) -> None:
        self.changed.append({name})
        self.entries.pop(name, None)
        if node is not None:
            self.entries[name] = node

    def unsynced_groups(self) -> list[frozenset[str]]:
        """Names whose change can be lost. The two names of a rename are lost or kept together."""
        groups: list[set[str]] = []
        for names in self.changed:
            touched = [group for group in groups if group & names]
            groups = [group for group in groups if not group & names] + [names.union(*touched)]
        lost = [g for g in groups if any(self.synced.get(name) is not self.entries.get(name) for name in g)]
        return [frozenset(group) for group in lost]


class Disk:
    """The folder at `root`, of which everything is synced at first."""

    def __init__(self, root: Path) -> None:
        self.top = Folder()
        for path in sorted(root.rglob("*")):
            self.folder_of(str(path.relative_to(root))).entries[path.name] = (
                Folder() if path.is_dir() else File(path.read_bytes(), path.read_bytes())
            )
        for folder in self.nodes(Folder):
            folder.synced = dict(folder.entries)

    def find(self, path: str) -> Any:
        node: Any = self.top
        for name in Path(path).parts:
            node = node.entries.get(name) if isinstance(node, Folder) else None
        return node

    def folder_of(self, path: str) -> Folder:
        return self.find(str(Path(path).parent))

    def nodes(self, kind: type) -> list[Any]:
        found: list[Any] = [self.top]
        for node in found:  # the list grows during the loop
            found += node.entries.values() if isinstance(node, Folder) else []
        return [node for node in found if isinstance(node, kind)]

    def apply(self, call: Call) -> None:
        """Do the call, if it succeeds."""
        node, folder, name = self.find(call.path), self.folder_of(call.path), Path(call.path).name
        if call.name == "open" and folder is not None:
            if node is None and call.flags & os.O_CREAT:
                folder.put(name, node := File())
            if isinstance(node, File) and call.flags & os.O_TRUNC and not call.flags & os.O_EXCL:
                node.content = b""
        elif call.name == "mkdir" and node is None and folder is not None:
            folder.put(name, Folder())
        elif node is None:
            return
        elif call.name == "write":
            at = len(node.content) if call.at is None else call.at
            node.content = node.content[:at].ljust(at, b"\0") + call.data + node.content[at + len(call.data) :]
        elif call.name == "truncate":
            node.content = node.content[: call.at].ljust(call.at, b"\0")
        elif call.name == "fsync" and isinstance(node, File):
            node.synced = node.content
        elif call.name == "fsync":
            node.synced, node.changed = dict(node.entries), []
        elif call.name == "unlink" and isinstance(node, File) or call.name == "rmdir" and not node.entries:
            folder.put(name, None)
        elif call.name == "rename":
            target = self.find(call.to)
            if not (isinstance(target, Folder) and target.entries):
                folder.put(name, None)
                self.folder_of(call.to).put(Path(call.to).name, node)
                if self.folder_of(call.to) is folder:  # else one of the two names may be lost without the other
                    folder.changed.append({name, Path(call.to).name})

    def as_it_is(self) -> State:
        return dict(walk(self.top, {}, frozenset()))

    def after_power_loss(self) -> Iterator[State]:
        """All states of `as_it_is` without something that was not synced. One state may come several times."""
        unsynced: list[Any] = [node for node in self.nodes(File) if node.content != node.synced]
        unsynced += [(folder, group) for folder in self.nodes(Folder) for group in folder.unsynced_groups()]
        n = len(unsynced)
        if n <= MOST_UNSYNCED:
            choices = list(itertools.product((False, True), repeat=n))[1:]
        else:
            choices = [(True,) * n, *(tuple((i == k) == alone for i in range(n)) for k in range(n) for alone in (0, 1))]
        for choice in choices:
            lost = [each for each, is_lost in zip(unsynced, choice, strict=True) if is_lost]
            names = frozenset(each for each in lost if isinstance(each, tuple))
            files = [each for each in lost if isinstance(each, File)]
            for remains in (missing, half, zeros) if files else (missing,):
                yield dict(walk(self.top, {file: remains(file) for file in files}, names))


def missing(file: File) -> bytes:
    return file.synced


def half(file: File) -> bytes:
    kept = len(os.path.commonprefix([file.synced, file.content]))
    return file.content[: kept + (len(file.content) - kept) // 2]


def zeros(file: File) -> bytes:
    return file.content[: len(os.path.commonprefix([file.synced, file.content]))].ljust(len(file.content), b"\0")


def walk(folder: Folder, contents: dict[File, bytes], lost: frozenset, at: str = "") -> Iterator[tuple[str, Any]]:
    """Paths and contents below `folder`. contents: of files that differ. lost: folders with names, as they were synced."""
    entries = dict(folder.entries)
    for name in itertools.chain.from_iterable(names for owner, names in lost if owner is folder):
        entries.pop(name, None)
        if name in folder.synced:
            entries[name] = folder.synced[name]
    for name, node in entries.items():
        if isinstance(node, File):
            yield at + name, contents.get(node, node.content)
        else:
            yield at + name, None
            yield from walk(node, contents, lost, f"{at}{name}/")


def key_of(state: State) -> frozenset:
    """Equal for states that no reader can tell apart."""
    return frozenset(
        (path, None if is_unfinished(Path(path)) else content)
        for path, content in state.items()
        if not is_unfinished(Path(path).parent)
    )


def is_unfinished(path: Path) -> bool:
    return any(part.startswith(UNFINISHED) for part in path.parts)


# ------------------------------------------------------------------------------------------------------- the commands


@dataclass
class Setting:
    """A command, and the disk on which it begins. done: words of its error when there is nothing left to do."""

    name: str
    words: list[str]
    before: State
    main: Callable[[list[str]], int] = train
    ranks: int = 1
    done: str = ""
    reference: dict[str, Any] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)

    def start(self, disk: Path, prepare: Callable[[], None]) -> Any:
        def prepared() -> None:
            os.chdir(disk)
            multiprocessing.current_process()._config["daemon"] = False  # else an import cannot start its own process
            prepare()

        with open(disk.with_name("output"), "w") as output, open(disk.with_name("errors"), "w") as errors:
            if self.ranks > 1:
                return ForkedRanks(self.ranks, self.words, output, errors, {}, prepared)
            return ForkedTrain(self.words, output, errors, {}, prepared, self.main)

    def run(self, disk: Path, answer: Callable[[Call], int] | None = None) -> tuple[int | None, str, str]:
        """Exit code (None: it hangs), standard output and standard error of the command on this disk."""
        code = supervise(lambda prepare: self.start(disk, prepare), str(disk), answer)
        return code, *(disk.with_name(name).read_text(errors="replace") for name in ("output", "errors"))


def write_state(state: State, disk: Path) -> None:
    shutil.rmtree(disk, ignore_errors=True)
    disk.mkdir(parents=True)
    for path, content in state.items():
        if content is None:
            (disk / path).mkdir()
        else:
            (disk / path).write_bytes(content)
            if path.startswith("text/"):
                os.utime(disk / path, (0, 0))  # the time is part of the prepared folder's name


def read_state(disk: Path) -> State:
    return {str(path.relative_to(disk)): path.read_bytes() if path.is_file() else None
            for path in sorted(disk.rglob("*"))}  # fmt: skip


def outcome(state: State) -> dict[str, Any]:
    """What must be equal: all files, without times, the random id of the run, and files that no reader opens."""
    return {path: without_times(Path(path), content) for path, content in state.items()
            if content is not None and Path(path).name not in NO_RESULT and not is_unfinished(Path(path))}  # fmt: skip


def without_times(path: Path, content: bytes) -> Any:
    if path.suffix == ".jsonl":
        return [
            {k: v for k, v in json.loads(line).items() if k not in TIMINGS - {"checkpoint"}}
            for line in content.splitlines()
        ]
    if path.name == "run.html":
        head, tail = content.decode().split('{"title"', 1)
        data, end = json.JSONDecoder().raw_decode('{"title"' + tail)
        rows = [row[:6] + row[9:] for row in data["rows"]]  # without speed, memory and time
        return [head, without_keys(data | {"rows": rows}, {"seconds"}), ('{"title"' + tail)[end:]]
    if path.name in ("state.json", "manifest.json", "run.json"):
        with contextlib.suppress(ValueError):
            loaded = json.loads(content)
            return without_keys(
                loaded, {"seconds", "run", "working_folder"} if path.name != "manifest.json" else {"state.json"}
            )
    return content


def without_keys(value: Any, keys: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: without_keys(entry, keys) for key, entry in value.items() if key not in keys}
    return [without_keys(entry, keys) for entry in value] if isinstance(value, list) else value


def differing(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return sorted(path for path in ours.keys() | theirs.keys() if path not in ours or ours[path] != theirs.get(path))


def outcome_on(disk: Path) -> dict[str, Any]:
    try:
        return outcome(read_state(disk))
    except (ValueError, AttributeError, KeyError) as fault:
        return {f"unreadable: {fault!r:.200}": None}


def enumerated(setting: Setting, disk: Path) -> None:
    """Fill in the outcome and the calls of the uninterrupted command, and check the notes of its calls against the disk."""
    write_state(setting.before, disk)
    code, _, errors = setting.run(disk)
    assert code == 0, f"{setting.name}: the uninterrupted command exits with {code}: {errors}"
    setting.reference = outcome_on(disk)
    write_state(setting.before, disk)
    setting.run(disk, lambda call: setting.calls.append(call) or 0)
    assert not (found := differing(outcome_on(disk), setting.reference)), f"{setting.name}: runs differ in {found}"
    model, real = list(disks_of(setting))[-1].as_it_is(), read_state(disk)
    assert model == real, f"{setting.name}: calls were missed, which changed {differing(model, real)}"


def disks_of(setting: Setting) -> Iterator[Disk]:
    """The disk before each call that changes it, and at the end."""
    with tempfile.TemporaryDirectory() as folder:
        write_state(setting.before, Path(folder) / "disk")
        disk = Disk(Path(folder) / "disk")
    for call in setting.calls:
        if call.changes:
            yield disk
            disk.apply(call)
    yield disk


# ------------------------------------------------------------------------------------------------------ crash states


def crash_states(setting: Setting) -> tuple[list[tuple[str, State]], int]:
    """The distinct states, each with the call that it precedes, and how many were found. The first ones are a fair sample."""
    seen: set[frozenset] = set()
    kept: list[tuple[str, State]] = []
    lossy: list[tuple[str, State]] = []
    found = 0
    names = [f"{call.name} {call.path} {call.to}".strip() for call in setting.calls if call.changes]
    for name, disk in zip([*names, "end"], disks_of(setting), strict=True):
        for place, state in enumerate(itertools.chain([disk.as_it_is()], disk.after_power_loss())):
            found += 1
            if (key := key_of(state)) not in seen:
                seen.add(key)
                (lossy if place else kept).append((("power loss, " if place else "") + f"before {name}", state))
    for states in (kept, lossy):
        random.Random(1).shuffle(states)
    both = itertools.zip_longest(kept, lossy)
    return [state for pair in both for state in pair if state], found


def resumed(setting: Setting, name: str, state: State, disk: Path) -> dict[str, Any]:
    write_state(state, disk)
    code, _, errors = setting.run(disk)
    row: dict[str, Any] = {"state": name, "exit_code": code}
    if any(is_unfinished(path) for path in disk.rglob("*")):
        row["left_over"] = True
    if not (code == 0 or (code == 2 and setting.done and setting.done in errors)):
        row["ended"] = f"exit code {code}: {errors[-600:]}"
    if different := differing(outcome_on(disk), setting.reference):
        row["different"] = different
    return row


# ------------------------------------------------------------------------------------------------------ failed calls


def errors_of(call: Call) -> list[int]:
    """The errors that a call may give."""
    if call.name == "open":
        return [errno.EACCES, errno.EMFILE, errno.EIO] + ([errno.ENOSPC] if call.flags & os.O_CREAT else [])
    if call.name in ("write", "truncate", "fsync"):
        return [errno.ENOSPC, errno.EIO]
    if call.name in ("mkdir", "rename"):
        return [errno.ENOSPC, errno.EACCES, errno.EIO]
    return [errno.EIO] if call.name in ("read", "pread64", "readv", "fstat", "flock") else [errno.EACCES, errno.EIO]


def failures_of(setting: Setting) -> list[tuple[int, int]]:
    """Number of a call and errno. Those of different places come first: the first ones are then a fair sample."""
    turns: Counter[tuple] = Counter()
    found = []
    for number, call in enumerate(setting.calls):
        for error in errors_of(call):
            kind = (call.name, "".join(c for c in call.path if not c.isdigit())[:24], Path(call.path).suffix, error)
            turns[kind] += 1
            found.append((turns[kind], random.Random(f"{number} {error}").random(), number, error))
    return [(number, error) for *_, number, error in sorted(found)]


def failed(setting: Setting, number: int, error: int, disk: Path) -> dict[str, Any]:
    """One call of the command fails; then the same command again, without a failure."""
    count, hit = itertools.count(), []

    def answer(call: Call) -> int:
        if next(count) == number:
            hit.append(call)
            return error
        return 0

    write_state(setting.before, disk)
    code, output, errors = setting.run(disk, answer)
    if not hit:
        return {"call": f"number {number} did not come", "errno": errno.errorcode[error], "exit_code": code}
    call = hit[0]
    row: dict[str, Any] = {"call": f"{call.name} {call.path} {call.to}".strip(), "errno": errno.errorcode[error]}
    row |= {"number": number, "exit_code": code}
    # Another program that looks for a file, and cannot, goes on without it: then its proof fails, with exit code 1.
    proof_failed = code == 1 and errors.startswith("error: transformers") and "computes something else" in errors
    if not proof_failed and (code not in (0, 2, 5) or "Traceback" in errors):
        row["ended"] = f"exit code {code}: {errors[-1500:]}"
    elif code and (len(errors.strip().splitlines()) != 1 or not errors.startswith("error: ")):
        row["ended"] = f"exit code {code}, not one line: {errors[-1500:]}"
    elif call.changes and call.path.startswith("runs/a/") and code == 2 and "runs_dir" not in errors:
        row["ended"] = f"exit code 2 in place of 5: {errors[-600:]}"
    row["said"] = (errors.strip().splitlines() or [""])[-1][:300]
    said = output + errors
    again, _, errors = setting.run(disk)
    if again != 0 and not (again == 2 and setting.done and setting.done in errors):
        row["resumed"] = f"exit code {again}: {errors[-600:]}"
    different = differing(outcome_on(disk), setting.reference)
    # What is missing or more, if a line said so: an optional part; a newer checkpoint that could not be read, and is kept
    # under another name when the run goes on from an older one; shards of the texts that could be read. One that could
    # not be read when the old ones were removed stays, without a word: it may have been the best.
    has_said = " failed (" in said or "unreadable" in said
    allowed = {
        path
        for path in different
        if (path.startswith((*OPTIONAL, "data/")) and has_said)
        or ("/aside-" in path and "aside-" in said)
        or (path.startswith("runs/a/checkpoints/step-") and path not in setting.reference)
    }
    if different and (set(different) <= allowed or (has_said and code == 0 and call.path.startswith("text"))):
        row["without"] = different
    elif different:
        row["different"] = different
    return row


# -------------------------------------------------------------------------------------------------------- the program


def text_state() -> State:
    stdlib, state = Path(sysconfig.get_paths()["stdlib"]), {"text": None}
    return state | {
        f"text/{name}": (stdlib / name).read_bytes()[:1500] for name in ("bisect.py", "heapq.py", "copy.py")
    }


def settings(disk: Path, only: list[str]) -> Iterator[Setting]:
    """The commands, each enumerated. A later one may begin with what an earlier one left."""
    run = Setting("run", RUN, text_state())
    enumerated(run, disk)
    names = [f"{call.name} {call.to}" for call in run.calls if call.changes]
    last = names.index("rename runs/a/checkpoints/step-00000004")  # before it: the third checkpoint, later records
    killed = next(itertools.islice(disks_of(run), last, None)).as_it_is()
    finished = list(disks_of(run))[-1].as_it_is()
    export = ["export", "runs_dir=runs", "data_dir=data", "checkpoint=a", "out=exported"]
    others = [
        Setting("resume", RUN, killed),
        Setting("run-2-ranks", [*RUN, "parallel=fsdp", "precision=fp32"], text_state(), ranks=2),
        Setting("prepare", ["prepare", *TEXT], text_state(), andrea_main),
        Setting("export", export, finished, andrea_main, done="exists"),
        Setting("import", ["import", "from=exported", "runs_dir=runs", "out=imported"], {}, andrea_main, done="exists"),
    ]
    for setting in [run, *others]:
        if only and setting.name not in only:
            continue
        if setting.name == "import":
            write_state(finished, disk)
            Setting("", export, {}, andrea_main).run(disk)
            setting.before = {
                path: content for path, content in read_state(disk).items() if path.startswith("exported")
            }
        if setting is not run:
            enumerated(setting, disk)
        yield setting


def load_everything() -> None:
    """Load all that a command may load, and read its configuration files, so that the forks need not."""
    import hydra

    torch.set_num_threads(1)
    for module in pkgutil.walk_packages(andrea.__path__, "andrea."):
        if "kernels" not in module.name and not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    composed = functools.cache(lambda name, overrides: compose_again(name, overrides=list(overrides)))
    compose_again = hydra.compose
    hydra.compose = lambda name, overrides=(): composed(name, tuple(overrides))
    compose("train", read(RunConfig, RUN))


def judged(job: tuple[Callable, tuple]) -> dict[str, Any]:
    work, arguments = job
    return work(*arguments, Path(tempfile.gettempdir()) / f"crash-states-{os.getpid()}" / "disk")


def all_of(jobs: list[tuple[Callable, tuple]], processes: int) -> list[dict[str, Any]]:
    global JOBS
    JOBS = jobs  # the forks of the pool have them without copying
    rows = []
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for row in pool.imap_unordered(judged_number, range(len(jobs))):
            rows.append(row)
            if len(rows) % 100 == 0:
                print(f"{len(rows)} of {len(jobs)}", flush=True)
            if {"ended", "different", "resumed"} & row.keys():
                print(json.dumps(row, ensure_ascii=False)[:300], flush=True)
        pool.close()
        pool.join()
    return rows


JOBS: list[tuple[Callable, tuple]] = []


def judged_number(number: int) -> dict[str, Any]:
    return judged(JOBS[number])


def counts_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    counts = {key: sum(key in row for row in rows) for key in ("ended", "different", "resumed", "without", "left_over")}
    counts["tracebacks"] = sum("Traceback" in row.get("ended", "") for row in rows)
    return {"commands": len(rows), **counts, "exit_codes": dict(Counter(str(row.get("exit_code")) for row in rows))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="run, resume, run-2-ranks, prepare, export, import")
    parser.add_argument("--at-most", type=int, default=1 << 30, help="states, and failed calls, of each command")
    parser.add_argument("--skip", type=int, default=0, help="so many first: to go on where an earlier call was ended")
    parser.add_argument("--no-failures", action="store_true")
    parser.add_argument("--no-states", action="store_true")
    parser.add_argument("--jobs", type=int, default=2, help="commands at once")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "crash-states.json")
    chosen = parser.parse_args()
    load_everything()
    records = {}
    with tempfile.TemporaryDirectory(prefix="crash-states") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        for setting in settings(Path(folder) / "disk", chosen.only):
            states, found = crash_states(setting)
            failures = failures_of(setting)
            record: dict[str, Any] = {"calls": len(setting.calls), "changing": sum(c.changes for c in setting.calls)}
            record |= {"states": found, "distinct": len(states), "possible_failures": len(failures)}
            print(setting.name, json.dumps(record), flush=True)
            records[setting.name] = record
            if not chosen.no_states:
                jobs = [(resumed, (setting, *each)) for each in states[chosen.skip :][: chosen.at_most]]
                rows = all_of(jobs, chosen.jobs)
                record["resumed"] = counts_of(rows) | {
                    "findings": [row for row in rows if {"ended", "different"} & row.keys()]
                }
            write_record(chosen.output, "crash-states", "cpu", {"rows": records})
            if not chosen.no_failures:
                jobs = [(failed, (setting, *each)) for each in failures[chosen.skip :][: chosen.at_most]]
                rows = all_of(jobs, chosen.jobs)
                bad = [row for row in rows if {"ended", "different", "resumed"} & row.keys()]
                record["failed"] = counts_of(rows) | {
                    "errnos": dict(Counter(row["errno"] for row in rows)),
                    "findings": bad,
                }
            write_record(chosen.output, "crash-states", "cpu", {"rows": records})
            print(setting.name, json.dumps({k: {a: b for a, b in v.items() if a != "findings"} if isinstance(v, dict) else v
                                            for k, v in record.items()}), flush=True)  # fmt: skip
    parts = [part for record in records.values() for part in record.values() if isinstance(part, dict)]
    sys.exit(1 if any(part["ended"] or part["different"] or part.get("resumed") for part in parts) else 0)


if __name__ == "__main__":
    main()
