"""HTML pages that hold their style, script and data in one file and load nothing from a network."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def fill_template(template: Path, values: Mapping[str, str]) -> str:
    """The template with {{NAME}} replaced by values[NAME], {{path.ext}} by the content of that file.

    The path is relative to the folder of the template.
    """

    def replacement(place: re.Match[str]) -> str:
        name = place[1]
        return without_comments(template.parent / name) if "." in name else values[name]

    # In one pass, so that a {{NAME}} in a value, such as a prompt, stays as it is.
    return re.sub(r"\{\{([\w./]+)\}\}", replacement, template.read_text(encoding="utf-8"))


def without_comments(path: Path) -> str:
    """A script or style without comment lines and indentation, because the pages of training are limited in size."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").split("\n"))
    return "\n".join(line for line in lines if line and not line.startswith("//"))


def json_for_script(data: Any) -> str:
    """JSON as the content of a script element: every '<' is escaped, so no text in it can end the element.

    A lone surrogate, which UTF-8 cannot encode, is escaped as well.
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return text.encode("utf-8", "backslashreplace").decode()
