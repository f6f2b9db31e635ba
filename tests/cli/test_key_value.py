"""Words of a command line that are not written as key=value."""

from __future__ import annotations

from pathlib import Path

import pytest

from andrea.cli.commands import to_key_value, with_action


def test_a_word_that_is_a_path_is_a_path_even_with_an_equals_sign(tmp_path: Path) -> None:
    folder = tmp_path / "rate=0.1"
    folder.mkdir()
    assert to_key_value([str(folder), "out=x.html", "runs", "--seed"], positional="runs") == [
        f"runs={folder}",
        "out=x.html",
        "runs=runs",
        "--seed",  # is refused as no key=value
    ]


def test_a_run_of_a_sweep_has_an_equals_sign_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("runs", "kept"):
        (tmp_path / place / f"{place}-rate=0.1").mkdir(parents=True)
    assert to_key_value(["runs-rate=0.1", "seed=1"], "runs") == ["runs=runs-rate=0.1", "seed=1"]
    assert to_key_value(["kept-rate=0.1", "runs_dir=kept"], "runs") == ["runs=kept-rate=0.1", "runs_dir=kept"]
    assert with_action(["delete", "a-rate=0.1", "confirm=true"]) == ["delete=a-rate=0.1", "confirm=true"]
    assert with_action(["rename", "a-rate=0.1", "b=1"]) == ["rename=a-rate=0.1", "to=b=1"]
