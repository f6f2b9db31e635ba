"""bench/gpu.sh without a GPU: its parts one by one, what it keeps when it is killed, and what its programs leave out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.untraced

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))


def run(*words: str, **environment: str) -> subprocess.CompletedProcess:
    given = os.environ | {"PYTHON": sys.executable} | environment
    return subprocess.run(words, cwd=ROOT, env=given, capture_output=True, text=True)


def test_a_contestant_that_is_lost_is_left_out_and_the_others_go_on(capsys: pytest.CaptureFixture) -> None:
    from common import ContestantLost, interleave, rows_of

    turns = {"first": iter([1.0, 2.0]), "second": iter([1.0, 1.0, 4.0])}

    def run_of(name: str):
        seconds = next(turns[name], None)
        if seconds is None:
            raise ContestantLost("its process ended with exit code -9")
        return 8, seconds

    saved: list[dict] = []
    names = {name: lambda name=name: run_of(name) for name in turns}
    speeds = interleave(names, 2, lambda speeds: saved.append(rows_of(speeds, "first")))
    assert speeds == {"first": [4.0], "second": [8.0, 2.0]}
    assert [row["rounds"] for row in (saved[0]["first"], saved[0]["second"], saved[1]["second"])] == [[4], [8], [8, 2]]
    assert saved[1]["second"]["ratio"] == 2.0  # of the one round in which both ran
    assert "LEFT OUT first from round 2 on: its process ended with exit code -9" in capsys.readouterr().out
    assert rows_of(speeds, "never started")["second"]["ratio"] is None


def test_by_address_holds_in_the_backward_pass_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """`described` decides how the kernels read; the forward pass asks it once and the backward pass twice."""
    pytest.importorskip("triton")
    import attention as bench

    from andrea.attention.kernels import attend_triton

    before, own, asked = attend_triton.DESCRIPTORS_FROM, attend_triton.described, []
    monkeypatch.setattr(
        attend_triton, "described", lambda *given: (asked.append(attend_triton.DESCRIPTORS_FROM), own(*given))[1]
    )
    leaves = [torch.randn(1, 2, 7, 16, requires_grad=True) for _ in range(3)]
    runs = bench.contenders()
    with bench.descriptors_for(bench.BY_ADDRESS):
        torch.autograd.grad(runs[bench.BY_ADDRESS](*leaves).sum(), leaves)
    assert asked == [10**6] * 3 and attend_triton.DESCRIPTORS_FROM == before
    with bench.descriptors_for("triton"):
        torch.autograd.grad(runs["triton"](*leaves).sum(), leaves)
    assert asked[3:] == [before] * 3


@pytest.mark.parametrize(("passes", "code"), [(True, None), (False, 1)])
def test_a_check_that_fails_makes_its_part_fail(passes, code, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import gpu_checks as bench

    monkeypatch.setattr(bench, "check_all", lambda *_: [{"check": "loss", "passes": passes}])
    monkeypatch.setattr(
        sys, "argv", ["gpu_checks.py", "--device", "cpu", "--small", "--output", str(tmp_path / "c.json")]
    )
    try:
        assert bench.main() is None and code is None
    except SystemExit as ended:
        assert ended.code == code


@pytest.mark.slow
@pytest.mark.long
def test_a_check_that_raises_and_one_whose_process_is_killed_are_rows_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import gpu_checks as bench

    own, killed = bench.Process.give, "andrea-nano"

    def give(process: bench.Process, index: int) -> None:
        own(process, index)
        if checks[index].name == killed:
            process.process.kill()

    monkeypatch.setattr(bench.Process, "give", give)
    chosen = Namespace(only=("loss", "model"), small=True, processes=1, seconds=300, device="no such device")
    checks, saved = bench.chosen_checks(chosen), []
    rows = bench.check_all(chosen, checks, lambda rows: saved.append(len(rows)))
    why = {row["check"]: row["why"] for row in rows if not row["passes"]}
    assert saved == [1, 2] and why.keys() == {killed, "loss"}
    assert why[killed] == "its process ended with exit code -9" and "no such device" in why["loss"]


def test_what_a_bare_machine_needs_is_listed_with_the_one_that_has_no_wheel() -> None:
    done = run("bash", "bench/gpu.sh", "--needs")
    assert done.returncode == 0, done.stderr
    assert "pip wheel --no-deps -w wheels antlr4-python3-runtime==" in done.stdout
    downloaded = next(line for line in done.stdout.splitlines() if line.lstrip().startswith("numpy==")).split()
    for name in ("hydra-core", "omegaconf", "safetensors", "transformers"):
        assert f"  {name} " in done.stdout and any(word.startswith(f"{name}==") for word in downloaded)
    assert not any(word.startswith(("antlr4", "triton")) for word in downloaded)  # no wheel; torch's own version


def test_without_a_gpu_it_says_so_and_an_unknown_part_is_named(tmp_path: Path) -> None:
    done = run("bash", "bench/gpu.sh", "--output", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and "torch finds no CUDA GPU" in done.stderr
    done = run("bash", "bench/gpu.sh", "--output", str(tmp_path), "atention")
    assert done.returncode == 2 and "unknown part atention; there are: step, resume, attention" in done.stderr


@pytest.mark.slow
@pytest.mark.long
def test_a_part_keeps_the_callers_python_path_and_what_it_leaves_out_is_named(tmp_path: Path) -> None:
    """A module of the caller's path is found; one that is hidden costs its part, with the reason, and not the others."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(
        "import importlib.util, os\n"
        "own = importlib.util.find_spec\n"
        "def find_spec(name, package=None):\n"
        "    return None if name == 'transformers' else own(name, package)\n"
        "importlib.util.find_spec = find_spec\n"
        "print('the path of the caller is kept, rank', os.environ.get('LOCAL_RANK'))\n"
    )
    words = ["bash", "bench/gpu.sh", "--rehearse", "--output", str(tmp_path / "results")]
    done = run(*words, "optimizer", "generate", "save", PYTHONPATH=str(tmp_path / "path"))
    assert "generate : skipped: transformers not installed (see --needs)" in done.stdout, done.stdout
    assert done.stdout.count("the path of the caller is kept") >= 2  # the driver's, and a part's
    assert "the path of the caller is kept, rank 0" in done.stdout  # that of a process which torchrun starts for a part
    files = list((tmp_path / "results").iterdir())
    assert len(files) == 2 and done.returncode == 1
    records = json.loads(next(path for path in files if path.suffix == ".json").read_text())
    assert len(records["optimizer"]["results"]["andrea, muon"]["rounds"]) == 2
    assert "torch, muon and adamw" in done.stdout.rpartition("== ")[2]  # in the table at the end


@pytest.mark.slow
@pytest.mark.long
def test_a_part_that_is_out_of_time_is_ended_and_the_table_comes(tmp_path: Path) -> None:
    done = run("bash", "bench/gpu.sh", "--rehearse", "--seconds", "5", "--output", str(tmp_path), "optimizer", "loss")
    assert "out of time" in done.stdout or "the part's time is over" in done.stdout, done.stdout
    outcomes = json.loads(next(tmp_path.glob("*.json")).read_text())["outcomes"]
    assert len(outcomes["parts"]) == 2
    assert outcomes["versions"]["torch"] == version("torch") and outcomes["versions"]["numpy"] == version("numpy")


@pytest.mark.slow
@pytest.mark.long
def test_what_was_measured_before_a_kill_is_in_the_result_files(tmp_path: Path) -> None:
    record = tmp_path / "kill.json"
    words = [
        "--kills",
        "2",
        "--parts",
        "optimizer",
        "--at-once",
        "1",
        "--measured-first",
        "--earliest",
        "0",
        "--seconds",
        "0.5",
    ]
    done = run(sys.executable, "bench/gpu_kill.py", *words, "--output", str(record))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["said"] > 0 for row in json.loads(record.read_text())["rows"]] == [True, True]


def test_the_judge_of_kills_finds_a_measurement_that_was_said_and_is_not_held(tmp_path: Path) -> None:
    from gpu_kill import findings, has_run_all

    log = ["== optimizer: bench/optimizer.py --output records/optimizer.json (80 s at most)"]
    log += [f"round {index}: muon: 10.0 tokens/s" for index in (1, 2)]
    (tmp_path / "gpu.log").write_text("\n".join(log))
    held = {"optimizer": {"results": {"muon": {"rounds": [10.0]}}}, "outcomes": {"parts": [{"part": "optimizer"}]}}
    (tmp_path / "gpu-1.json").write_text(json.dumps(held))
    assert findings(tmp_path, tmp_path / "scratch", signal.SIGKILL, -9) == ([], 1)
    assert has_run_all(tmp_path, ["optimizer"]) and not has_run_all(tmp_path, ["optimizer", "loss"])

    assert findings(tmp_path, tmp_path / "scratch", signal.SIGTERM, 0)[0] == ["exit code 0", "no table"]
    (tmp_path / "gpu-1.json").write_text("{}")
    assert "said but not held" in findings(tmp_path, tmp_path / "scratch", signal.SIGKILL, -9)[0][0]


def test_the_judge_of_kills_compares_tuned_tiles_and_the_copied_metrics(tmp_path: Path) -> None:
    from gpu_kill import findings

    results, run_folder = tmp_path / "results", tmp_path / "scratch" / "runs" / "run"
    results.mkdir()
    run_folder.mkdir(parents=True)
    tile = {"kernel": "keys", "width": 64, "length": 11, "m": 32, "n": 64, "warps": 4, "stages": 2, "ms": 1.0}
    lines = ["== tune: bench/attention.py --output records/tune.json (80 s at most)", f"tuned d 64 T 11 keys: {tile}"]
    (results / "gpu.log").write_text("\n".join(lines))
    (results / "gpu-1.json").write_text(json.dumps({"tune": {"rows": [tile]}}))
    (run_folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    copied = results / "gpu-1-metrics.jsonl"
    copied.write_text('{"step": 1}\n')
    assert findings(results, tmp_path / "scratch", signal.SIGKILL, -9) == ([], 1)
    assert "of 2 lines of metrics, 1 were copied" in findings(results, tmp_path / "scratch", signal.SIGTERM, 143)[0][0]
    copied.write_text('{"step": 1}\n{"st')  # torn
    assert "of metrics" in findings(results, tmp_path / "scratch", signal.SIGKILL, -9)[0][0]
    (results / "gpu-1.json").write_text(json.dumps({"tune": {"rows": [tile | {"m": 64}]}}))
    assert "said but not held" in findings(results, tmp_path / "scratch", signal.SIGKILL, -9)[0][0]
