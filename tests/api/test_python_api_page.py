"""Every example of docs/python-api.md runs, one after another, in an empty folder."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT

import andrea


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    names: dict = {}
    try:
        for number, block in enumerate(blocks):
            exec(compile(block, f"docs/python-api.md, example {number + 1}", "exec"), names)
    finally:
        sys.modules.pop("my_module", None)
    out = capsys.readouterr().out
    assert "did you mean temperature?" in out and "comes from a checkpoint" in out
    assert names["run"].exit_code == 0 and names["model"].checkpoint.step == 20
    assert andrea.load("own", trust=True).checkpoint.step == 25
    sys.modules.pop("my_module", None)


def test_the_page_names_every_public_name_that_is_called() -> None:
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    assert all(f"andrea.{name}" in page for name in andrea.__all__ if name not in ("LoadedModel", "TrainedRun"))
