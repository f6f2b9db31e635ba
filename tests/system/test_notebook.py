"""The notebook for Colab: its cells run in order, in an empty folder, with this checkout in place of the clone's address."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY

pytestmark = pytest.mark.slow
NOTEBOOK = json.loads((ROOT / "docs" / "colab.ipynb").read_text(encoding="utf-8"))


def test_the_cells_run_in_order(notes: Path, tmp_path: Path) -> None:
    """In a shell, which knows a notebook's `!` and `%cd` by other names. pip installs nothing: it only plans to."""
    cells = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert len(cells) == 3
    script = re.sub("^!|^%(?=cd )", "", "\n".join(cells), flags=re.MULTILINE)
    script, replaced = re.subn('^REPOSITORY = "[^"]+"', f'REPOSITORY="file://{ROOT}"', script, flags=re.MULTILINE)
    tiny = " ".join(["data=text", f"data.path={notes}", *TINY])
    script, shortened = re.subn("^python train.py .*", rf"\g<0> {tiny}", script, flags=re.MULTILINE)
    assert (replaced, shortened) == (1, 1)
    script = script.replace("{REPOSITORY}", "$REPOSITORY")
    pip = {"PIP_DRY_RUN": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "false", "PIP_CONSTRAINT": ""}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | pip | {"PATH": path, "PYTHONPATH": str(tmp_path / "andrea")}
    done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "done at step 12 of 12" in done.stdout and done.stdout.count("def main(") == 2
    assert (tmp_path / "andrea" / "torch.txt").read_text().startswith("torch==")
