"""The programs of bench/ that need a card still start and end here, under the interpreter; and bench/kill.py."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.untraced

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.long
def test_the_attention_bench_measures_what_can_run(tmp_path):
    pytest.importorskip("triton")
    words = [
        "--device",
        "cpu",
        "--dtype",
        "fp32",
        "--widths",
        "128",
        "--lengths",
        "16",
        "--tokens",
        "16",
        "--repeats",
        "1",
    ]
    command = [sys.executable, "bench/attention.py", *words, "--output", str(tmp_path / "a.json")]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["implementation"] for row in rows] == [
        "triton", "triton + statistics", "triton by address", "triton as it trains",
    ]  # fmt: skip
    assert all(max(row["error_over_readable"]) < 3 and row["both_ms"] > 0 for row in rows)
    assert "sdpa_flash left out: implementation='sdpa_flash' cannot be used here: it needs a CUDA GPU" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "train.py --batch 1 --sequence-length 32 --compile off",
        "generate.py --ours fp32 int8 --prompt-tokens 4 --long-prompt-tokens 16 --new-tokens 3",
    ],
)
def test_the_speed_benches_measure_this_project(words, tmp_path):
    output = tmp_path / "speeds.json"
    more = ["--model", "andrea-nano", "--vocabulary", "512", "--device", "cpu", "--pairs", "1", "--peers"]
    name, *rest = words.split()
    command = [sys.executable, f"bench/{name}", *rest, *more, "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "LEFT OUT" not in done.stdout + done.stderr, done.stderr
    results = json.loads(output.read_text())["results"]
    assert len(results) == words.count("fp32 int8") + 1
    assert all(result["tokens_per_second"] > 0 for result in results.values())


@pytest.mark.parametrize("mode", [[], ["--tune"]])
def test_the_attention_bench_fails_where_none_of_our_kernels_can_run(mode, tmp_path):
    words = "--device cpu --widths 64 --lengths 8 --tokens 8 --repeats 1 --most-tiles 1".split()
    command = [sys.executable, "bench/attention.py", *mode, *words, "--output", str(tmp_path / "a.json")]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "none of our kernels could be measured" in done.stderr


@pytest.mark.slow
@pytest.mark.long
def test_commands_that_are_ended_anywhere_end_as_the_uninterrupted_run_and_a_second_call_goes_on(tmp_path):
    record = tmp_path / "kill.json"
    command = [sys.executable, "bench/kill.py", "--warm", "--output", str(record), "--lives", "4"]
    lives = []
    for more in (["--at-most", "2"], []):
        done = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        lives.append(json.loads(record.read_text()))
    first, second = lives
    assert first["lives"] >= 2 and second["lives"] >= 4 and second["rows"][: first["runs"]] == first["rows"]
    assert second["equal"] == second["runs"] and second["findings"] == second["lost"] == 0


def test_power_loss_leaves_what_was_synced_and_any_part_of_the_rest(tmp_path):
    sys.path.insert(0, str(ROOT / "bench"))
    from crash_states import Disk
    from traced import Call

    (tmp_path / "a").write_bytes(b"old")
    disk = Disk(tmp_path)
    create = Call("open", "w", flags=os.O_CREAT)
    for call in (create, Call("write", "w", data=b"newer"), Call("rename", "w", "a")):
        disk.apply(call)
    assert disk.as_it_is() == {"a": b"newer"}
    lost = [state["a"] for state in disk.after_power_loss()]
    assert set(lost) == {b"old", b"", b"ne", bytes(5)}
    disk.apply(Call("fsync", "a"))
    assert [state["a"] for state in disk.after_power_loss()] == [b"old"]
    disk.apply(Call("fsync", "."))
    assert not list(disk.after_power_loss())


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="the calls' numbers")
def test_a_run_goes_on_from_each_crash_state_and_after_each_failed_call(tmp_path):
    record = tmp_path / "crash-states.json"
    command = [sys.executable, "bench/crash_states.py", "--only", "run", "--at-most", "16", "--output", str(record)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(record.read_text())["rows"]["run"]
    assert counts["distinct"] > 100 and counts["resumed"]["commands"] == counts["failed"]["commands"] == 16
