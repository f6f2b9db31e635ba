"""Fixtures and helpers of several test files: a small corpus of real text, and a model that trains in seconds."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.pop("COLUMNS", None)  # 80 in the workers of pytest-xdist, where no output goes to a terminal
os.environ.setdefault("OMP_NUM_THREADS", "1")  # pytest-xdist runs one process per core
os.environ.setdefault("TRITON_INTERPRET", "1")  # runs our kernels without a GPU; Triton reads it at import

import numpy as np
import pytest
import torch
from hypothesis import settings

from andrea.config import (
    CompareConfig,
    ConsolidateConfig,
    DashboardConfig,
    EvaluateConfig,
    ExportConfig,
    ImportConfig,
    LensConfig,
    RunConfig,
    RunsConfig,
    SampleConfig,
    ServeConfig,
)
from andrea.runtime.system import HANG_UP

try:
    import triton
    from triton.runtime import interpreter
except ImportError:  # no Triton for this system
    interpreter = None

# No deadline per example: other work on the machine would change the time of an example.
settings.register_profile("andrea", deadline=None)
settings.load_profile("andrea")

ROOT = Path(__file__).resolve().parent.parent

CHROMIUM = Path("/usr/bin/chromium")
SWITCHES = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip
BROWSER_MILLISECONDS = 120_000  # for its start, on a busy machine

CONFIGS_OF_COMMANDS = {  # name of a file in configs/ -> the dataclass that it is parsed into
    "train": RunConfig,
    "sample": SampleConfig,
    "lens": LensConfig,
    "runs": RunsConfig,
    "compare": CompareConfig,
    "consolidate": ConsolidateConfig,
    "export": ExportConfig,
    "import": ImportConfig,
    "evaluate": EvaluateConfig,
    "serve": ServeConfig,
    "dashboard": DashboardConfig,
}

# A model of this size learns something within twenty steps and a second or two.
TINY = [
    "model.d_model=32", "model.n_layer=2", "model.n_head=2", "model.d_mlp=64", "model.sequence_length=32",
    "tokenizer=byte", "logger=none", "compile=off", "threads=1",
    "train.steps=12", "train.tokens_per_step=256", "train.log_every=2", "train.eval_every=4", "train.save_every=4",
    "train.sample_tokens=8",
]  # fmt: skip


# Files whose tests use links, pipes, forks, limits, permissions or signals that Windows lacks. Not collected there.
NEEDS_POSIX = [
    "api/test_user_classes.py",
    "checkpoint/test_find.py",
    "checkpoint/test_folder.py",
    "checkpoint/test_sharded_checkpoint.py",
    "cli/test_command_line.py",
    "insight/compare/test_hostile_runs.py",
    "insight/lens/test_lens.py",
    "insight/test_manage_runs.py",
    "interop/test_import.py",
    "runtime/test_code_cache.py",
    "runtime/test_device.py",
    "runtime/test_files.py",
    "runtime/test_native.py",
    "runtime/test_program.py",
    "runtime/test_shared_cores.py",
    "system/test_hostile.py",
    "system/test_lost_terminal.py",
    "system/test_ranks.py",
    "system/test_trainer.py",
    "system/test_wrong_command_lines.py",
    "text/test_by_content.py",
    "text/test_corpus.py",
    "text/test_download.py",
    "text/test_shards.py",
    "text/test_sources.py",
    "training/planning/test_memory.py",
    "training/records/test_recognise.py",
    "training/records/test_run_folder.py",
    "training/records/test_tensorboard.py",
    "training/records/test_weights_and_biases.py",
    "training/test_stop_requests.py",
]
collect_ignore = NEEDS_POSIX if sys.platform == "win32" else []


def pytest_report_header() -> str:
    return f"not collected, because they need POSIX: {', '.join(collect_ignore)}" if collect_ignore else ""


@contextmanager
def launched_browser() -> Iterator[Any]:
    """A browser without a window. Skips the test where there is none, or where it does not start, and says why."""
    api = pytest.importorskip("playwright.sync_api", reason='needs playwright: pip install "andrea[dev]"')
    if not CHROMIUM.exists():
        pytest.skip(f"no browser at {CHROMIUM} (Debian: apt install chromium)")
    with api.sync_playwright() as playwright:
        try:
            how = {"executable_path": str(CHROMIUM), "args": SWITCHES, "timeout": BROWSER_MILLISECONDS}
            browser = playwright.chromium.launch(**how)
        except api.Error as error:
            pytest.skip(f"{CHROMIUM} does not start here: {' '.join(str(error).split())[:300]}")
        yield browser
        browser.close()


@contextmanager
def shut(path: Path) -> Iterator[None]:
    """`path` without permissions; root, whom permissions do not stop, becomes another user meanwhile."""
    user = os.geteuid()
    above = [each for each in path.parents if user == 0 and each.stat().st_mode & 0o011 != 0o011]
    rights = {each: each.stat().st_mode for each in (path, *above)}
    for each in above:
        each.chmod(rights[each] | 0o011)
    path.chmod(0)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        for each, mode in rights.items():
            each.chmod(mode)


@pytest.fixture(autouse=True, scope="session")
def interpreted_products_are_rounded_once():
    """Makes Triton's interpreter multiply fp32 matrices in float64, and round once.

    By default it calls numpy, whose BLAS rounds k qᵀ and q kᵀ differently on some processors (so does torch's). The
    forward kernel computes the log-sum-exp of q kᵀ; the backward kernel subtracts it from k qᵀ. With wide heads on such
    a processor, the gradient of the values then errs by more than the tests allow. With one rounding both products are
    equal on every processor. On a GPU, bench/gpu_checks.py measures the error against the same limit.
    """
    if interpreter is None:
        yield
        return
    by_numpy = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, d, *settings):
        if not a.data.dtype == b.data.dtype == d.data.dtype == np.float32:
            return by_numpy(self, a, b, d, *settings)
        product = (a.data.astype(np.float64) @ b.data.astype(np.float64)).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
    yield
    interpreter.InterpreterBuilder.create_dot = by_numpy


@pytest.fixture(autouse=True, scope="session")
def interpreted_numbers_are_indices():
    """Triton 3.6, which torch 2.11 brings, takes `int()` of an array with one number; numpy refuses that since 2.4."""
    if interpreter is None or not triton.__version__.startswith("3.6."):
        yield
        return
    by_triton = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        by_triton(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch
    yield
    interpreter._patch_lang_tensor = by_triton


@pytest.fixture(autouse=True, scope="session")
def signals_reach_processes():
    """A suite that a shell starts with & or nohup ignores Ctrl-C or a hang-up, and the processes it starts would too.

    A handler is not inherited by other programs, so they heed the signal again; the suite still ignores it.
    """
    for number in (signal.SIGINT, *HANG_UP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)


@pytest.fixture(autouse=True)
def settings_restored():
    """Training changes process-wide settings of torch. Each test starts with the defaults and with the same seed."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a dozen real text files, about 60 kB: modules of the standard library."""
    folder = tmp_path_factory.mktemp("notes")
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in (
        "abc",
        "bisect",
        "copy",
        "dis",
        "fnmatch",
        "glob",
        "heapq",
        "keyword",
        "queue",
        "sched",
        "stat",
        "types",
    ):
        (folder / f"{name}.py").write_bytes((library / f"{name}.py").read_bytes()[:5000])
    return folder


@pytest.fixture
def short_text(tmp_path: Path) -> Path:
    """A folder with 4 kB of text, for slow runs (milliseconds per token) whose validation must be short."""
    folder = tmp_path / "short-text"
    folder.mkdir()
    (folder / "counting.txt").write_text(" ".join(map(str, range(1000, 1800))))
    return folder


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[[list[str]], int]]:
    """`script("train")` returns the main function of train.py, which takes a command line and runs in this process."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(name).main


@pytest.fixture
def tiny_run(tmp_path: Path, notes: Path, script) -> Callable[..., int]:
    """Trains the tiny model on the notes under tmp_path/runs; more words override the defaults. Returns the exit code."""

    def trained(*words: str) -> int:
        code = script("train")(tiny_words(tmp_path, notes, *words))
        failed_extras = [log.read_text(encoding="utf-8") for log in tmp_path.glob("runs/*/run.log")]
        assert not failed_extras, failed_extras
        return code

    return trained


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, notes: Path) -> Path:
    """The folder of a finished run of the tiny model, in fp32, named `first`. Tests must not change it."""
    place = tmp_path_factory.mktemp("trained")
    words = [
        "name=first",
        "precision=fp32",
        "device=cpu",
        "train.steps=8",
        "train.sample_tokens=0",
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT))
        assert importlib.import_module("train").main(tiny_words(place, notes, *words)) == 0
    return place / "runs" / "first"


def tiny_words(place: Path, notes: Path, *words: str) -> list[str]:
    """The command line that trains the tiny model on the notes under `place`/runs; later `words` override earlier ones."""
    places = [f"runs_dir={place / 'runs'}", f"data_dir={place / 'data'}", "data=text", f"data.path={notes}"]
    listed = ("train.teachers=", "data.include=", "data.exclude=")  # keys whose words add up
    typed = {(word if word.startswith(listed) else word.partition("=")[0]): word for word in [*places, *TINY, *words]}
    return list(typed.values())


def tiny_command(place: Path, notes: Path, *words: str) -> list[str]:
    """The command that runs `tiny_words` in a separate process."""
    return [sys.executable, str(ROOT / "train.py"), *tiny_words(place, notes, *words)]


def settings_in(message: str) -> list[list[str]]:
    """The words of each "set key=value key=value" in a message."""
    found = re.findall(r"\bset ((?:'[^']+'|[\w.]+=[^\s,;)]+)(?: (?:'[^']+'|[\w.]+=[^\s,;)]+))*)", message)
    return [shlex.split(words) for words in found]


def torchrun(ranks: int, words: list[str], restarts: int = 0, **options: Any) -> subprocess.Popen:
    """Start train.py with `ranks` ranks on this machine. Standard output and error share one stream."""
    command = torchrun_command(ranks, words, restarts)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def torchrun_command(ranks: int, words: list[str], restarts: int = 0) -> list[str]:
    """The command that runs train.py with `ranks` ranks on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*command, f"--max-restarts={restarts}", str(ROOT / "train.py"), *words]


def ranks_of(process: subprocess.Popen) -> list[int]:
    """The process numbers of torchrun's ranks, ordered by rank."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    environments = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in children}
    found = {int(v[5:]): int(pid) for pid, words in environments.items() for v in words if v.startswith(b"RANK=")}
    return [found[rank] for rank in sorted(found)]


def with_own_mounts(mount: str, folder: Path, command: list[str], after: str = "") -> subprocess.CompletedProcess:
    """Run `command` in its own mount namespace, after the shell command `mount` (with $0 = `folder`) has run there.

    `after`: a shell command that runs there last. Skips the test if mounting is not permitted.
    """
    shell = ["sh", "-c", f'{mount} && "$@"; code=$?; {after or ":"}; exit $code', str(folder), *command]
    tried = subprocess.run(["unshare", "--mount", *shell], capture_output=True, text=True)
    if "unshare" in tried.stderr or "mount:" in tried.stderr:
        pytest.skip(f"no mounts on this machine: {tried.stderr.strip()}")
    return tried


def run_script(
    main: Callable[[list[str]], int], words: list[str], capsys: pytest.CaptureFixture
) -> tuple[int, str, str]:
    """Run a script's main as the command does. Returns exit code, standard output and standard error."""
    from andrea.cli.exit_code import run

    with pytest.raises(SystemExit) as left:
        run(main, words)
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


sys.path.insert(0, str(Path(__file__).parent))
