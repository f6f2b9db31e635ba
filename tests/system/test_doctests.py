"""The examples in the docstrings of the heart run as they stand, and so does its README."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = [path.stem for path in sorted((ROOT / "andrea" / "attention").glob("*.py")) if path.stem != "__init__"]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name):
    failed, _ = doctest.testmod(importlib.import_module(f"andrea.attention.{name}"))
    assert not failed


def test_examples_of_the_attention_readme():
    failed, tried = doctest.testfile(str(ROOT / "andrea" / "attention" / "README.md"), module_relative=False)
    assert tried > 10 and not failed


def test_the_code_beside_the_mathematics_is_the_code():
    """Every snippet in a column headed "code" stands in a source file of the heart, to the letter."""
    sources = "".join(path.read_text() for path in (ROOT / "andrea" / "attention").rglob("*.py"))
    snippets, column = [], None
    for line in (ROOT / "andrea" / "attention" / "README.md").read_text().splitlines():
        cells = re.split(r"(?<!\\)\|", line)
        if len(cells) < 3:
            column = None
        elif column is None:
            column = next((i for i, cell in enumerate(cells) if cell.strip().startswith("code")), -1)
        elif column > 0:
            snippets += re.findall(r"`([^`]+)`", cells[column])
    assert len(snippets) > 12
    assert [snippet for snippet in snippets if snippet not in sources] == []
