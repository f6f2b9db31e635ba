"""Joining a process group on GPUs, as far as it can be seen without one. tests/system/test_ranks.py has gloo."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from andrea.runtime.torchrun import RANK_LOST
from andrea.training.parallel.ranks import Ranks, settings_of_group

ABORTS = """
import ctypes, sys, threading, time
from andrea.training.parallel.ranks import exit_as_rank_lost_on_abort
if sys.argv[1] == "handled":
    exit_as_rank_lost_on_abort()
threading.Thread(target=ctypes.CDLL(None).abort).start()  # as torch's NCCL thread does
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the handler is for Linux")
@pytest.mark.parametrize(("how", "code"), [("handled", RANK_LOST), ("not handled", -RANK_LOST)])
def test_an_abort_in_another_thread_ends_the_process_with_the_code_of_a_lost_rank(how: str, code: int) -> None:
    assert subprocess.run([sys.executable, "-c", ABORTS, how], timeout=60).returncode == code


@pytest.mark.parametrize(("local_rank", "index"), [(0, 0), (2, 2), (4, 1)])
def test_a_rank_names_its_gpu(local_rank: int, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(local_rank, 5, local_rank, 5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert settings_of_group(ranks) == {"backend": "gloo"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    how = settings_of_group(ranks)
    assert how["device_id"] == torch.device("cuda", index)
    assert dist.BackendConfig(dist.Backend(how["backend"])).get_device_backend_map() == {"cpu": "gloo", "cuda": "nccl"}
