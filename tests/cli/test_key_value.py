"""Words of a command line that are not written as key=value."""

from __future__ import annotations

from pathlib import Path

from andrea.cli.commands import to_key_value


def test_a_word_that_is_a_path_is_a_path_even_with_an_equals_sign(tmp_path: Path) -> None:
    folder = tmp_path / "rate=0.1"
    folder.mkdir()
    assert to_key_value([str(folder), "out=x.html", "runs", "--seed"], positional="runs") == [
        f"runs={folder}",
        "out=x.html",
        "runs=runs",
        "--seed",  # is refused as no key=value
    ]
