"""`python -m andrea`: the table of commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from andrea.__main__ import main
from andrea.config import UserError


def test_commands_are_listed_and_misspelt_ones_refused(capsys: pytest.CaptureFixture) -> None:
    assert main([]) == 0 and main(["prepare", "--help"]) == 0
    assert "prepare" in capsys.readouterr().out
    with pytest.raises(UserError, match="did you mean prepare"):
        main(["prepar"])


def test_prepare_writes_shards(notes: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["prepare", "data=text", f"data.path={notes}", "tokenizer=byte", f"data_dir={tmp_path}"]) == 0
    assert "training tokens" in capsys.readouterr().out and list(tmp_path.rglob("*.bin"))
