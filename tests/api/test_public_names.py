"""The names that `import andrea` offers, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT

import andrea

PUBLIC = ["Compatibility", "LoadedModel", "TrainedRun", "UserError", "attend", "load", "train"]


def test_these_are_the_public_names() -> None:
    assert sorted(andrea.__all__) == PUBLIC
    assert set(PUBLIC) <= set(dir(andrea))
    assert all(getattr(andrea, name).__name__ == name for name in PUBLIC)


def test_another_name_is_an_attribute_error_that_lists_them() -> None:
    with pytest.raises(AttributeError, match="no attribute 'laod'; public names: .*load"):
        andrea.laod  # noqa: B018 (the access itself raises)


def test_importing_the_package_loads_nothing_else() -> None:
    program = (
        "import sys, andrea; print([name for name in sys.modules if name.startswith(('andrea.', 'torch', 'hydra'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr


def test_the_package_states_its_version_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "andrea.__version__"
