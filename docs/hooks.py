"""mkdocs hook: the configuration page's tables, made from the comments of configs/ when the site is built."""

from __future__ import annotations

from andrea.cli.help import CommentedFile, Key, read_commented
from andrea.config import group_files

PLACEHOLDER = "<!-- configuration -->"
COMMANDS = {
    "train": "python train.py",
    "sample": "python sample.py",
    "lens": "python -m andrea lens",
    "runs": "python -m andrea runs",
    "compare": "python -m andrea compare",
    "consolidate": "python -m andrea consolidate",
    "export": "python -m andrea export",
    "import": "python -m andrea import",
    "evaluate": "python -m andrea evaluate",
    "dashboard": "python -m andrea dashboard",
}


def on_page_markdown(markdown: str, **_: object) -> str:
    return markdown.replace(PLACEHOLDER, reference()) if PLACEHOLDER in markdown else markdown


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
    choices = {name: read_commented(f"{group.name}/{name}") for name in group_files.choices(group.name)}
    keys = choices[group.value].keys
    return [
        f"### `{group.name}=`",
        "\n".join(choice_line(name, file, name == group.value) for name, file in choices.items()),
        table([Key(f"{group.name}.{key.name}", key.value, key.comment) for key in keys]) if keys else "",
    ]


def choice_line(name: str, file: CommentedFile, is_default: bool) -> str:
    return f"- `{name}`{' (default)' if is_default else ''}: {file.description}"


def table(keys: list[Key]) -> str:
    rows = [f"| `{key.name}` | `{key.value}` | {key.comment.replace('|', chr(92) + '|')} |" for key in keys]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])
