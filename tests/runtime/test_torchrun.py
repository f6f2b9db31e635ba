"""A final exit code is found by the next start of the same torchrun process, and by no later one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from andrea.runtime import torchrun


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes this process look like a rank of torchrun's n-th start."""

    def nth(number: int, rank: int = 0) -> None:
        error_file = tmp_path / "job" / f"attempt_{number}" / str(rank) / "error.json"
        error_file.parent.mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", str(rank))

    return nth


@pytest.mark.parametrize("code", [2, 3, 4, 129, 130, 143])
def test_a_final_exit_code_is_repeated_by_every_rank_of_every_further_start(start, code: int) -> None:
    start(0, rank=1)
    assert torchrun.recorded_exit_code() is None
    torchrun.record_exit_code(code)
    for number in (1, 2, 3):
        for rank in (0, 1):
            start(number, rank)
            assert torchrun.recorded_exit_code() == code


@pytest.mark.parametrize("code", [0, 1, 5, 6, 137])
def test_other_exit_codes_may_be_cured_by_a_restart(start, code: int) -> None:
    start(0)
    torchrun.record_exit_code(code)
    start(1)
    assert torchrun.is_restart() and torchrun.recorded_exit_code() is None


def test_a_note_from_before_the_last_start_is_forgotten(start) -> None:
    start(0)
    torchrun.record_exit_code(3)
    start(2)  # start 1 ran without finding the note: it was not made yet
    assert torchrun.recorded_exit_code() is None
    start(3)
    assert torchrun.recorded_exit_code() is None


def test_a_code_that_cannot_be_recorded_is_left_out(start, tmp_path: Path) -> None:
    """The disk of torchrun's folder may be full; the exit code of the rank must stay what it is."""
    start(0)
    (tmp_path / "job").rename(tmp_path / "elsewhere")
    (tmp_path / "job").write_text("not a folder")
    torchrun.record_exit_code(2)
    assert torchrun.recorded_exit_code() is None


def test_the_folder_of_the_run_is_found_again_also_if_its_name_is_not_utf_8(start) -> None:
    folder = Path(os.fsdecode(b"ru\xffns/a"))
    start(0)
    torchrun.record_run_folder(folder)
    assert torchrun.recorded_run_folder() is None
    start(1)
    assert torchrun.recorded_run_folder() == folder


def test_rank_0_alone_prints_without_a_prefix(start, monkeypatch: pytest.MonkeyPatch) -> None:
    start(0, rank=1)
    assert not torchrun.is_rank_0() and torchrun.rank_prefix() == "rank 1: " and torchrun.has_many_ranks()
    start(0, rank=0)
    assert torchrun.is_rank_0() and torchrun.rank_prefix() == ""
    for name in ("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name)
    torchrun.record_exit_code(2)
    assert torchrun.is_rank_0() and not torchrun.has_many_ranks() and torchrun.recorded_exit_code() is None
