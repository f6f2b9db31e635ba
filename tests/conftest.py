"""What several test files share: a small corpus of real text, and a model that trains in seconds."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # pytest-xdist runs one process a core
os.environ.setdefault("TRITON_INTERPRET", "1")  # our kernels run here without a card; read when they are imported

import numpy as np
import pytest
import torch
from hypothesis import settings

try:
    from triton.runtime import interpreter
except ImportError:  # no Triton for this system
    interpreter = None

# How long an example takes says nothing about it on a machine that does other things too.
settings.register_profile("andrea", deadline=None)
settings.load_profile("andrea")

ROOT = Path(__file__).resolve().parent.parent

# A model of this size learns something within twenty steps and a second or two.
TINY = [
    "model.d_model=32", "model.n_layer=2", "model.n_head=2", "model.d_mlp=64", "model.sequence_length=32",
    "tokenizer=byte", "logger=none", "compile=off", "threads=1",
    "train.steps=12", "train.tokens_per_step=256", "train.log_every=2", "train.eval_every=4", "train.save_every=4",
    "train.sample_tokens=8", "train.attention_every=4",
]  # fmt: skip


@pytest.fixture(autouse=True, scope="session")
def interpreted_products_are_rounded_once():
    """Triton's interpreter multiplies fp32 in float64 here, and rounds once.

    By itself it calls numpy, whose BLAS rounds k qᵀ and q kᵀ differently on some processors (so does torch's). The
    backward kernel makes k qᵀ and compares it with the log-sum-exp of the forward pass, which made q kᵀ: with wide heads
    the gradient of the values then errs by more than the two-times rule allows, on these processors and no others. With
    one rounding both products are the same anywhere. How a card rounds is measured by bench/gpu_checks.py, by the same rule.
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


@pytest.fixture(autouse=True)
def settings_restored():
    """Training settles process-wide switches of torch; each test starts from the defaults, and from one seed."""
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
    """A folder with 4 kB of text: for runs whose validation must be short, because a token takes milliseconds."""
    folder = tmp_path / "short-text"
    folder.mkdir()
    (folder / "counting.txt").write_text(" ".join(map(str, range(1000, 1800))))
    return folder


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[[list[str]], int]]:
    """`script("train")` is train.py's main, to be called with a command line, in this process."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(name).main


@pytest.fixture
def tiny_run(tmp_path: Path, notes: Path, script) -> Callable[..., int]:
    """Trains the tiny model on the notes under tmp_path/runs; more words override the defaults. Returns the exit code."""

    return lambda *words: script("train")(tiny_words(tmp_path, notes, *words))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, notes: Path) -> Path:
    """The folder of a finished run of the tiny model, in fp32, named `first`. Tests leave it as it is."""
    place = tmp_path_factory.mktemp("trained")
    words = [
        "name=first",
        "precision=fp32",
        "device=cpu",
        "train.steps=8",
        "train.lens_prompt=",
        "train.sample_tokens=0",
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT))
        assert importlib.import_module("train").main(tiny_words(place, notes, *words)) == 0
    return place / "runs" / "first"


def tiny_words(place: Path, notes: Path, *words: str) -> list[str]:
    """The command line that trains the tiny model on the notes under `place`/runs; `words` override the defaults."""
    places = [f"runs_dir={place / 'runs'}", f"data_dir={place / 'data'}", "data=text", f"data.path={notes}"]
    given = {word.split("=")[0] for word in words}
    return [*(word for word in places + TINY if word.split("=")[0] not in given), *words]


def tiny_command(place: Path, notes: Path, *words: str) -> list[str]:
    """The same as a process of its own."""
    return [sys.executable, str(ROOT / "train.py"), *tiny_words(place, notes, *words)]


def torchrun(ranks: int, words: list[str], restarts: int = 0, **options: Any) -> subprocess.Popen:
    """Start train.py's command line on so many ranks of this machine; standard output and error in one stream."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={restarts}", str(ROOT / "train.py"), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def with_own_mounts(mount: str, folder: Path, command: list[str], after: str = "") -> subprocess.CompletedProcess:
    """Run `command` where the shell words `mount` (with $0 = `folder`) hold, in a mount namespace that ends by itself.

    `after` runs there when the command has ended. Skips where the machine, or a user who is not root, may not mount.
    """
    shell = ["sh", "-c", f'{mount} && "$@"; code=$?; {after or ":"}; exit $code', str(folder), *command]
    tried = subprocess.run(["unshare", "--mount", *shell], capture_output=True, text=True)
    if "unshare" in tried.stderr or "mount:" in tried.stderr:
        pytest.skip(f"no mounts on this machine: {tried.stderr.strip()}")
    return tried


def run_script(
    main: Callable[[list[str]], int], words: list[str], capsys: pytest.CaptureFixture
) -> tuple[int, str, str]:
    """Run a script's main behind the border: exit code, standard output, standard error."""
    from andrea.cli.command_line import run

    with pytest.raises(SystemExit) as left:
        run(main, words)
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


sys.path.insert(0, str(Path(__file__).parent))
