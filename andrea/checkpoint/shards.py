"""The checkpoint files of a sharded run: each rank writes its own rows, and `consolidate` puts them together.

    shards/shard-00001-model-00001-of-00002.safetensors     the rows of the weights that rank 0 keeps
    shards/shard-00001-model-00002-of-00002.safetensors     the optimizer's state of these rows

A file's header gives, for each tensor, the row of the whole tensor at which the file's part begins. This is the layout
of torch.distributed.checkpoint, whose HuggingFaceStorageReader can read the files too.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from torch import Tensor

from andrea.checkpoint.folder import SHARDS, flushed_files, read_checkpoint, write_manifest
from andrea.checkpoint.tensors import OFFSETS, write_tensors
from andrea.runtime.files import flush_to_disk, remove_unfinished, replacing, storing


def write_shard(folder: Path, rank: int, tensors: dict[str, Tensor], first_rows: dict[str, int]) -> list[Path]:
    """Write the rows of one rank in two files: weights, and optimizer state (names with a "/"). Returns both paths.

    first_rows: tensor name -> first row of this rank in the whole tensor. Raises OSError.
    """
    paths = []
    for number, of_optimizer in ((1, False), (2, True)):
        chosen = {name: tensor for name, tensor in tensors.items() if ("/" in name) == of_optimizer}
        offsets = {name: [first_rows[name], *[0] * tensor.ndim][: tensor.ndim] for name, tensor in chosen.items()}
        info = json.dumps({name: {"saved_offsets": offset} for name, offset in offsets.items()})
        paths.append(folder / f"shard-{rank + 1:05d}-model-{number:05d}-of-00002.safetensors")
        write_tensors(paths[-1], chosen, {"format": "pt", "DCP_VERSION": "1.0", OFFSETS: info})
    return paths


def consolidate(path: Path) -> None:
    """Replace a checkpoint's shards by `model.safetensors` and `optimizer.safetensors`. Without shards, do nothing.

    The change takes effect when the new manifest is renamed: before it the shards are valid, after it the two files.
    The conversion needs memory for the larger of the two files. Raises Damaged and StorageFailed.
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
