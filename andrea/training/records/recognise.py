"""Recognises run folders: only a folder that this program made may be written to.

A run folder has a mark, `run.json`, with a random id. Each checkpoint of the run holds the same id, so a copy of a
checkpoint in another folder is recognised as a copy.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from pathlib import Path
from typing import Any

from andrea.checkpoint import Checkpoint, step_name
from andrea.config.parse import plain_yaml
from andrea.runtime.files import from_json, read_plain_file, replace_text, storing

MARK = "run.json"
CONFIG = "config.yaml"
LARGEST_CONFIG_BYTES = 1 << 18
RUN_ID = re.compile("[0-9a-f]{16}")


def run_folder_of(checkpoint: Checkpoint) -> Path | None:
    """The run folder that holds the checkpoint; None if the checkpoint is not in the folder of its run."""
    folder, real = checkpoint.path.parent.parent, checkpoint.path.resolve()
    if real.parent.name != "checkpoints" or real.name != step_name(checkpoint.step):
        return None
    if folder.resolve() != real.parent.parent:  # the path goes through a link, or is relative to the run folder
        folder = real.parent.parent
    found = run_id_of(folder)
    return folder if found is not None and found == checkpoint.state.get("run") else None


def mark(folder: Path, run_id: str | None, parent: str | None = None) -> str:
    """The id of the run in `folder`. A folder without an id gets `run_id`, or a new id. Raises StorageFailed.

    parent: the checkpoint from whose weights the run begins. The mark keeps it, because a resumed run has no init_from.
    """
    found = run_id_of(folder)
    if found is None:
        found = run_id or secrets.token_hex(8)
        with storing(folder / MARK):
            about = {"run": found} | ({"init_from": str(parent)} if parent else {})
            replace_text(folder / MARK, json.dumps(about) + "\n")
    return found


def mark_of(folder: Path) -> dict[str, Any]:
    """The content of the folder's mark; empty without a readable mark."""
    try:
        found = from_json(read_plain_file(folder / MARK, LARGEST_CONFIG_BYTES))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def run_id_of(folder: Path) -> str | None:
    """The id in the folder's mark; None without a readable mark."""
    run_id = mark_of(folder).get("run")
    return run_id if isinstance(run_id, str) and RUN_ID.fullmatch(run_id) else None


def is_run_folder(folder: Path) -> bool:
    """Whether this program made the folder for a run, which may not have a checkpoint yet."""
    return run_id_of(folder) is not None


def is_free(folder: Path) -> bool:
    """Whether a new run may use `folder`: it does not exist, or holds only files of a run that was killed at its start.

    Raises OSError if the folder cannot be read.
    """
    if not os.path.lexists(folder):
        return True
    names = {name for name in os.listdir(folder) if not name.startswith(".writing-")}
    started = names <= {MARK, ".lock", "checkpoints"}
    return started and not ("checkpoints" in names and os.listdir(folder / "checkpoints"))


def config_of(folder: Path) -> dict[str, Any]:
    """The content of the folder's config.yaml; empty if it is missing or cannot be read as a mapping."""
    try:
        return load_config(folder)
    except (OSError, ValueError):
        return {}


def load_config(folder: Path) -> dict[str, Any]:
    """The content of the folder's config.yaml. Raises OSError, or ValueError if it is not the YAML that this program writes."""
    found = plain_yaml(read_plain_file(folder / CONFIG, LARGEST_CONFIG_BYTES).decode("utf-8"))
    if not isinstance(found, dict):
        raise ValueError("it is not a mapping")
    return found
