"""Words of a command line that are not written as key=value."""

from __future__ import annotations

from pathlib import Path

import pytest

from andrea.cli.commands import to_key_value
from andrea.config import UserError


def test_options_may_be_written_with_dashes() -> None:
    assert to_key_value(["--entity", "X", "--project=Y", "name=Z"]) == ["entity=X", "project=Y", "name=Z"]
    with pytest.raises(UserError, match="--project needs a value"):
        to_key_value(["--project"])


def test_without_a_positional_key_other_words_stay() -> None:
    assert to_key_value(["word", "key=value"]) == ["word", "key=value"]


def test_a_word_that_is_a_path_is_a_path_even_with_an_equals_sign(tmp_path: Path) -> None:
    folder = tmp_path / "rate=0.1"
    folder.mkdir()
    assert to_key_value([str(folder), "out=x.html", "runs", "--seed", "9"], positional="runs") == [
        f"runs={folder}",
        "out=x.html",
        "runs=runs",
        "seed=9",
    ]
