"""What docs/security.md says of the code holds, and its numbers are those of the code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from conftest import CONFIGS_OF_COMMANDS

from andrea.config.keys import key_types
from andrea.runtime.files import size_words
from andrea.text.formats import LARGEST_NOTEBOOK_BYTES, LARGEST_RATIO

ROOT = Path(__file__).resolve().parent.parent
PAGE = " ".join((ROOT / "docs" / "security.md").read_text(encoding="utf-8").split())
MODULES = [*sorted((ROOT / "andrea").rglob("*.py")), ROOT / "train.py", ROOT / "sample.py"]
# Calls that run what they read, or give it to a shell. torch.load is allowed with weights_only=True.
FORBIDDEN = {"eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def calls_of(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]


def keywords(call: ast.Call) -> dict[str | None, str]:
    return {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_in_a_file_is_run(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not {name.split(".")[0] for name in names} & PICKLES
    for call in calls_of(path):
        name = ast.unparse(call.func)
        assert name not in FORBIDDEN and "shell" not in keywords(call), f"{path}:{call.lineno}"
        assert name != "torch.load" or keywords(call).get("weights_only") == "True", f"{path}:{call.lineno}"
        assert not name.endswith("np.load") or keywords(call).get("allow_pickle", "False") == "False"


@pytest.mark.parametrize("path", sorted((ROOT / "andrea").rglob("*.html")), ids=lambda path: path.parent.parent.name)
def test_pages_load_nothing(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "default-src 'none'" in text and "innerHTML" not in text
    for script in path.parent.rglob("*.js"):
        code = script.read_text(encoding="utf-8")
        assert not any(
            word in code for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(")
        )


def test_the_page_names_the_commands_that_take_trust_and_the_limits_of_the_code() -> None:
    trusting = [f"`{name}`" for name, config in CONFIGS_OF_COMMANDS.items() if "trust" in key_types(config)]
    assert f"**`trust=true`** of {', '.join(trusting[:-1])} and {trusting[-1]}:" in PAGE
    assert f"more than {LARGEST_RATIO} times" in PAGE
    assert f"notebook of more than {size_words(LARGEST_NOTEBOOK_BYTES)}" in PAGE
