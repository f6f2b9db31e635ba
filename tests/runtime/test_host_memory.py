"""What this process may still allocate: the machine's free memory, control groups, ulimit, SLURM."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from andrea.runtime import free_and_peak_memory as host_memory
from andrea.runtime.free_and_peak_memory import free_host_bytes, held_bytes

GIB = 1 << 30
NO_LIMIT = str(2**63 - 4096)  # as version 1 writes it
ENVIRONMENT: dict[str, str] = {}


def lay(root: Path, files: dict[str, str]) -> Path:
    """`files` in `root`, beside a machine with 17 GiB free and a process of 1,000 pages in memory."""
    usual = {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:  {17 << 20} kB\n", "proc/self/statm": "5000 1000 0 0"}
    for name, content in {**usual, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def group(folder: str, version: int, limit: str, used: int, cached: int = 0) -> dict[str, str]:
    top = "sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory"
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    place = f"{top}/{folder}".rstrip("/")
    stat = f"anon 7\n{'' if version == 2 else 'total_'}inactive_file {cached}\n"
    return {f"{place}/{names[0]}": limit, f"{place}/{names[1]}": str(used), f"{place}/memory.stat": stat}


def test_without_a_limit_it_is_what_the_machine_has_left(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "4:memory:/a\n0::/a\n", **group("a", 1, NO_LIMIT, GIB), **group("a", 2, "max\n", GIB)}
    assert free_host_bytes(lay(tmp_path, files), ENVIRONMENT) == 17 * GIB
    assert free_host_bytes(lay(tmp_path / "bare", {}), ENVIRONMENT) == 17 * GIB  # no control groups at all


@pytest.mark.parametrize(
    ("version", "membership"), [(2, "0::/job/step\n"), (1, "9:name=systemd:/x\n4:cpu,memory:/job/step\n0::/x\n")]
)
def test_each_control_group_above_the_process_counts(tmp_path: Path, version: int, membership: str) -> None:
    no_limit = "max" if version == 2 else NO_LIMIT
    inner, outer = group("job/step", version, no_limit, GIB), group("job", version, f"{2 * GIB}\n", GIB, GIB // 4)
    assert free_host_bytes(lay(tmp_path, {"proc/self/cgroup": membership, **inner, **outer}), {}) == GIB + GIB // 4
    top = group("", version, str(GIB), GIB // 2)  # a container, which sees its own group as the top
    assert free_host_bytes(lay(tmp_path / "in", {"proc/self/cgroup": membership, **top}), {}) == GIB // 2
    full = group("", version, str(GIB), GIB + 5)
    assert free_host_bytes(lay(tmp_path / "full", {"proc/self/cgroup": membership, **full}), {}) == 0


def test_ulimit_and_slurm_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, page = lay(tmp_path, {}), os.sysconf("SC_PAGE_SIZE")
    assert free_host_bytes(root, {"SLURM_MEM_PER_NODE": "2048"}) == 2 * GIB - held_bytes(root) == 2 * GIB - 1000 * page
    assert free_host_bytes(root, {"SLURM_MEM_PER_NODE": "0"}) == 17 * GIB
    assert free_host_bytes(root, {"SLURM_MEM_PER_NODE": "2G"}) == 17 * GIB
    monkeypatch.setattr(host_memory.resource, "getrlimit", lambda which: (3 * GIB, 3 * GIB))
    assert free_host_bytes(root, {}) == 3 * GIB - 5000 * page


def test_without_proc_half_of_all_memory_is_taken_to_be_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert free_host_bytes(tmp_path, {}) == pytest.approx(physical / 2, abs=1)
    assert 0 < free_host_bytes() <= physical
    monkeypatch.setattr(host_memory, "resource", None)  # as on Windows
    monkeypatch.delattr(os, "sysconf")
    assert free_host_bytes(tmp_path, {}) == host_memory.UNKNOWN_BYTES


def test_in_a_real_control_group() -> None:
    place = Path("/sys/fs/cgroup/memory/andrea-test")
    try:
        place.mkdir()
    except OSError:
        pytest.skip("no control group can be made here")
    script = (
        f"import os; open('{place}/cgroup.procs', 'w').write(str(os.getpid()));"
        "from andrea.runtime.free_and_peak_memory import free_host_bytes; print(free_host_bytes())"
    )
    try:
        (place / "memory.limit_in_bytes").write_text(str(256 << 20))
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    finally:
        place.rmdir()
    assert 0 < int(done.stdout) <= 256 << 20
