"""Builds the documentation site with zensical, from a copy of docs/ whose configuration page has its tables.

    pip install -e ".[docs]" && python docs/build.py    # writes site/index.html
    python docs/build.py FOLDER                         # writes FOLDER/index.html

The tables come from the comments of configs/. They are filled in before the build, because zensical ignores the hooks of
mkdocs without a word. A broken link ends the build with exit code 1.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from andrea.cli.help import CommentedFile, Key, read_commented
from andrea.config.keys import choices

ROOT = Path(__file__).resolve().parent.parent
PLACEHOLDER = "<!-- configuration -->"
COMMANDS = {
    "train": "python train.py",
    "sample": "python sample.py",
    "lens": "python -m andrea lens",
    "serve": "python -m andrea serve",
    "runs": "python -m andrea runs",
    "compare": "python -m andrea compare",
    "consolidate": "python -m andrea consolidate",
    "export": "python -m andrea export",
    "import": "python -m andrea import",
    "evaluate": "python -m andrea evaluate",
    "dashboard": "python -m andrea dashboard",
}


def main() -> int:
    site = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site").resolve()
    with tempfile.TemporaryDirectory() as copied:
        root = Path(copied)
        shutil.copy(ROOT / "mkdocs.yml", root)
        shutil.copytree(ROOT / "docs", root / "docs", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        page = root / "docs" / "configuration.md"
        page.write_text(page.read_text(encoding="utf-8").replace(PLACEHOLDER, reference()), encoding="utf-8")
        code = subprocess.run(["zensical", "build", "--strict", "-f", "mkdocs.yml"], cwd=root).returncode
        if code == 0:
            shutil.copytree(root / "site", site, dirs_exist_ok=True)
    return code


def reference() -> str:
    """One section for each command, and one for each group of train.yaml's keys."""
    parts = []
    for name, command in COMMANDS.items():
        file = read_commented(name)
        parts += [f"## `{command}`", table(file.keys)]
        for group in file.groups:
            parts += group_section(group)
    return "\n\n".join(parts)


def group_section(group: Key) -> list[str]:
    files = {name: read_commented(f"{group.name}/{name}") for name in choices(group.name)}
    keys = files[group.value].keys
    return [
        f"### `{group.name}=`",
        "\n".join(choice_line(name, file, name == group.value) for name, file in files.items()),
        table([Key(f"{group.name}.{key.name}", key.value, key.comment) for key in keys]) if keys else "",
    ]


def choice_line(name: str, file: CommentedFile, is_default: bool) -> str:
    return f"- `{name}`{' (default)' if is_default else ''}: {file.description}"


def table(keys: list[Key]) -> str:
    rows = [f"| `{key.name}` | `{key.value}` | {key.comment.replace('|', chr(92) + '|')} |" for key in keys]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])


if __name__ == "__main__":
    sys.exit(main())
