"""Checkpoints to test with: small ones written by the package, and changed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from andrea.checkpoint import write_checkpoint
from andrea.runtime.files import file_sha256
from andrea.text.tokenizer import ByteTokenizer


def write(run: Path, step: int, **more: object) -> Path:
    state = {"step": step, "tokens": step * 100, "config": {"model": {"name": "m"}}, **more}
    weights = {"w": torch.arange(6.0).view(2, 3) + step, "v": torch.zeros(3).bfloat16()}
    return write_checkpoint(run / "checkpoints", state, weights, {"w/momentum": torch.ones(2, 3)}, ByteTokenizer())


def edit(path: Path, **changes: object) -> None:
    manifest = json.loads(path.read_text())
    manifest.update(changes)
    path.write_text(json.dumps(manifest))


def rewrite(path: Path, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint and its entry in the manifest."""
    (path / name).write_bytes(content)
    files = json.loads((path / "manifest.json").read_text())["files"]
    edit(path / "manifest.json", files=files | {name: {"bytes": len(content), "sha256": file_sha256(path / name)}})
