"""A sharded checkpoint becomes one in the single-file format, in place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from andrea.checkpoint.folder import SHARDS, flushed_files, read_checkpoint, write_manifest, write_tensors
from andrea.runtime.files import flush_to_disk, remove_unfinished, replacing, storing


def consolidate(path: Path) -> None:
    """Replace the shards of a checkpoint by `model.safetensors` and `optimizer.safetensors`; others stay as they are.

    The checkpoint changes at one moment, when its new manifest is renamed: a crash before leaves the shards valid, a
    crash after it the two files. Needs memory for the larger of them. Raises Damaged and StorageFailed.
    """
    checkpoint = read_checkpoint(path)
    if not checkpoint.is_sharded:
        shutil.rmtree(path / SHARDS, ignore_errors=True)  # left by a crash after the new manifest
        return
    remove_unfinished(path)
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    other_files = {name: about for name, about in manifest["files"].items() if not name.startswith(f"{SHARDS}/")}
    with storing(path):
        for name, read in (
            ("optimizer.safetensors", checkpoint.optimizer_tensors),
            ("model.safetensors", checkpoint.model_tensors),
        ):
            with replacing(path / name) as staging:
                write_tensors(staging, read())
        write_manifest(path, other_files | flushed_files(path, path.glob("*.safetensors")))
        flush_to_disk(path)
        shutil.rmtree(path / SHARDS)
