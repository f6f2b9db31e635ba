"""The commands of README.md and docs/, its notebook too, are accepted as they stand, and fit the default model."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from conftest import CONFIGS_OF_COMMANDS

from andrea.api.command_line import configure
from andrea.cli.commands import to_key_value, with_action
from andrea.cli.sweep import split
from andrea.config import (
    RunConfig,
    group_config,
)
from andrea.insight.lens.lens import choose_heads

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOK = ROOT / "docs" / "colab.ipynb"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), NOTEBOOK]
COMMAND = re.compile(
    r"(?:^    |`)(?:(?:torchrun|sbatch) .*?)?(?:python )?(?:(train|sample)\.py|-m andrea (\w+))\b(?!  )([^`\n]*)",
    re.MULTILINE,
)
KINDS = CONFIGS_OF_COMMANDS | {"prepare": RunConfig}

POSITIONAL = {"compare": "runs", "runs": "runs_dir", "dashboard": None}


def text_of(page: Path) -> str:
    """The page's text; of a notebook its cells, whose commands are indented as in the other pages."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return text
    cells = ("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return re.sub("^!", "    ", "\n".join(cells), flags=re.MULTILINE)


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """Each command of the page with its words; the shell's comments and what follows &&, > and | are left out."""
    found = []
    for script, command, rest in COMMAND.findall(text_of(page).replace("\\\n", "")):
        words = shlex.split(rest, comments=True)
        ends = [index for index, word in enumerate(words) if word in ("&&", ">", "|")]
        found.append((script or command, words[: min(ends, default=len(words))]))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_the_pages_are_accepted(page: Path) -> None:
    for name, words in commands(page):
        if "-m" in words:
            split(words)
        elif "--help" not in words and name in KINDS:
            words = with_action(words) if name == "runs" else words
            typed = to_key_value(words, POSITIONAL[name]) if name in POSITIONAL else words
            if any(word.startswith("objective=") for word in typed):
                typed = [*typed, "attention.across_documents=false"]  # as api/run.py sets it
            config = configure(KINDS[name], "train" if KINDS[name] is RunConfig else name, typed)
            model = group_config("model", "andrea-nano")
            if name == "lens":
                choose_heads(config.heads, model.n_layer, model.n_head)


def test_the_notebook_trains_and_samples() -> None:
    assert [name for name, _ in commands(NOTEBOOK)][-2:] == ["train", "sample"]


def test_the_heads_in_comments_and_messages_exist_in_the_default_model() -> None:
    model = group_config("model", "andrea-nano")
    comment = (ROOT / "configs" / "lens.yaml").read_text(encoding="utf-8")
    code = (ROOT / "andrea" / "insight" / "lens" / "lens.py").read_text(encoding="utf-8")
    shown = re.findall(r"\b\d+\.(?:\d+|\*)", re.search("^heads: .*", comment, re.MULTILINE)[0])
    shown += re.findall(r"(?<=[=,])\d+\.(?:\d+|\*)", code)
    assert len(shown) >= 5
    choose_heads(shown, model.n_layer, model.n_head)


def test_the_readme_names_every_command_of_the_lens() -> None:
    assert len([words for name, words in commands(ROOT / "README.md") if name == "lens"]) >= 3
