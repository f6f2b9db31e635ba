"""Tests in forks of a process that has loaded the packages but nothing of andrea, for bench/mutants.py."""

from __future__ import annotations

import contextlib
import ctypes
import filecmp
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
import zlib
from pathlib import Path
from typing import Any

import coverage
import hydra  # noqa: F401 (loaded once, for all forks)
import hypothesis  # noqa: F401
import numpy  # noqa: F401
import pytest
import safetensors.torch  # noqa: F401
import tiktoken  # noqa: F401
import tokenizers  # noqa: F401
import torch._dynamo  # noqa: F401
import torch.distributed.checkpoint  # noqa: F401
import torch.distributed.fsdp  # noqa: F401
from mutations import ROOT

PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
WAITING = 5
MEMORY_BYTES, FILE_BYTES = 12 << 30, 4 << 30  # of one process, which a mutant may ask for without end


class Tree:
    """A copy of the working tree, in which one file at a time is changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout.split("\0")  # fmt: skip
        wanted = {name for name in listed if name and (ROOT / name).exists()}
        for old in [each for each in path.rglob("*") if "__pycache__" not in each.parts]:
            if (old.is_symlink() or old.is_file()) and old.relative_to(path).as_posix() not in wanted:
                old.unlink()
        for name in wanted:
            source, copy = ROOT / name, path / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            if source.is_symlink() or not copy.exists() or not filecmp.cmp(source, copy, shallow=False):
                copy.unlink(missing_ok=True)
                shutil.copy2(source, copy, follow_symlinks=False)

    def put(self, file: str, source: str | None) -> None:
        """Change a file, or change it back. Its time depends on its content: Python's compiled files go by the time."""
        if source is None:
            shutil.copy2(ROOT / file, self.path / file)
        else:
            (self.path / file).write_text(source, encoding="utf-8")
            then = 10**9 + zlib.crc32(source.encode()) % 10**8
            os.utime(self.path / file, (then, then))


class Fork:
    """Tests that run in a fork, in a tree. names: files or tests, in order.

    limit_s: the fork is ended after so many seconds of processor time, or WAITING times as long.
    stop: at the first failure. marks: pytest's -m.
    ended: "passed", "failed", "time", or what else ended the process. report: passed (seconds of each test), failed,
    error, and with `trace` lines (by file of andrea, then line: the tests that execute it).
    """

    def __init__(
        self, tree: Tree, names: list[str], limit_s: float, stop: bool = True, marks: str = "", trace: bool = False
    ) -> None:
        self.tree, self.limit_s, self.ended, self.seconds = tree, limit_s, "", 0.0
        self.place = tree.path.with_name(f"{tree.path.name}-run")
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir(parents=True)
        self.report: dict[str, Any] = {"passed": {}, "failed": [], "error": ""}
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what tests leave behind becomes our child
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.started = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            code: Any = 99
            try:
                os.setsid()
                code = self.run(names, [*(["-x"] if stop and not trace else []), "-m", marks], trace)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(int(code))

    def run(self, names: list[str], options: list[str], trace: bool) -> int:
        log = os.open(self.place / "log", os.O_WRONLY | os.O_CREAT)
        for descriptor, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
            os.dup2(file, descriptor)
        root = self.tree.path
        os.chdir(root)
        os.environ["PYTHONPATH"] = str(root)
        sys.path[:] = [str(root), *(each for each in sys.path if each not in ("", str(ROOT), str(ROOT / "bench")))]
        sys.argv[:] = ["pytest"]
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        files = list(dict.fromkeys(name.partition("::")[0] for name in names))
        chosen = {name: index for index, name in enumerate(names)}
        reporter = Reporter(self.place, chosen, self.tracer() if trace else None)
        words = ["-o", "addopts=", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        words += [f"--basetemp={self.place / 'tmp'}", "--rootdir", str(root), *options]
        code = pytest.main([*words, *files], plugins=[reporter])
        reporter.save()
        return int(code)

    def tracer(self) -> coverage.Coverage:
        settings = self.place / "coveragerc"
        settings.write_text(
            f"[run]\nsource = {self.tree.path}/andrea\nparallel = true\npatch =\n  subprocess\n  _exit\n"
        )
        followed = coverage.Coverage(data_file=str(self.place / "coverage"), config_file=str(settings))
        followed.start()
        return followed

    def has_ended(self) -> bool:
        """Whether the fork is over; then all that it started is ended too."""
        self.seconds = time.monotonic() - self.started
        busy_s = busy_seconds(self.pid)
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        is_late = not pid and (busy_s > self.limit_s or self.seconds > WAITING * self.limit_s)
        if not (pid or is_late):
            return False
        code = os.waitstatus_to_exitcode(status) if pid else None
        if is_late:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        with contextlib.suppress(FileNotFoundError):
            self.report = json.loads((self.place / "report.json").read_text())
        self.ended = {0: "passed", 1: "failed", 5: "passed", None: "time"}.get(code, f"exit code {code}")
        if self.ended.startswith("exit"):
            self.report["error"] = (self.place / "log").read_text(errors="replace")[-2000:].strip().split("\n")[-1]
        return True


class Reporter:
    """A pytest plugin that orders the tests, follows the lines that each executes, and writes down what passed."""

    def __init__(self, place: Path, chosen: dict[str, int], followed: coverage.Coverage | None) -> None:
        self.place, self.chosen, self.followed = place, chosen, followed
        self.report: dict[str, Any] = {"passed": {}, "failed": [], "error": ""}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        def place(item: pytest.Item) -> int:
            names = (item.nodeid, item.nodeid.partition("[")[0], item.nodeid.partition("::")[0])
            return next((self.chosen[name] for name in names if name in self.chosen), -1)

        items[:] = sorted((item for item in items if place(item) >= 0), key=place)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        """Lines outside of a test's call belong to a fixture or to loading: to all tests of the file, the context ""."""
        if self.followed:
            self.followed.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            if self.followed:
                self.followed.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.report["failed"].append(report.nodeid)
            crash = getattr(report.longrepr, "reprcrash", None)
            self.report["error"] = (crash.message if crash else str(report.longrepr)).split("\n")[0][:200]
            self.report["passed"].pop(report.nodeid, None)
        elif not report.skipped and (report.when == "call" or report.nodeid in self.report["passed"]):
            self.report["passed"][report.nodeid] = self.report["passed"].get(report.nodeid, 0.0) + report.duration
        elif report.when == "setup":
            self.report["passed"][report.nodeid] = report.duration
        if report.skipped:
            self.report["passed"].pop(report.nodeid, None)
        self.save()

    def pytest_sessionfinish(self) -> None:
        if self.followed:
            self.followed.stop()
            self.followed.save()
            self.followed.combine()
            self.report["lines"] = self.lines()

    def lines(self) -> dict[str, dict[int, list[str]]]:
        assert self.followed is not None
        data = self.followed.get_data()
        root = Path.cwd().as_posix() + "/"
        return {
            file.removeprefix(root): {line: tests for line, tests in data.contexts_by_lineno(file).items() if line > 0}
            for file in data.measured_files()
        }

    def save(self) -> None:
        (self.place / "report.json").write_text(json.dumps(self.report))


def busy_seconds(pid: int) -> float:
    """Processor time of a process and of the children that it has waited for. Other load doesn't change it."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def unit_of(test_file: str, kind: str) -> str:
    return test_file.replace("/", "-").removesuffix(".py") + f"-{kind}.json"


def wait_for_one(running: list[Fork]) -> Fork:
    """The first fork that ends. Once none runs, whatever tests left behind is ended."""
    while True:
        for fork in running:
            if fork.has_ended():
                if len(running) == 1:
                    end_children()
                return fork
        time.sleep(0.02)


def end_children() -> None:
    """End and collect every child of this process."""
    me = os.getpid()
    while children := Path(f"/proc/{me}/task/{me}/children").read_text().split():
        for pid in map(int, children):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
