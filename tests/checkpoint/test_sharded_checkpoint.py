"""A checkpoint that two ranks wrote: read as a whole, verified, and consolidated into two files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from andrea.checkpoint import Damaged, consolidate, consolidation, folder, read_checkpoint
from andrea.checkpoint.folder import flushed_files, make_staging_folder, publish
from andrea.runtime import files
from andrea.text.tokenizer import ByteTokenizer


def sharded(checkpoints: Path, step: int = 7) -> Path:
    """A checkpoint as two ranks write it: two files each of weights and of optimizer state, rows cut in two."""
    from safetensors.torch import save_file

    staging = make_staging_folder(checkpoints, step)
    (staging / "shards").mkdir()
    whole = {
        "a": torch.arange(12.0).view(4, 3),
        "b": torch.arange(3.0),
        "a/momentum": torch.arange(12.0).view(4, 3) / 7,
    }
    for rank in range(2):
        for number, names in ((1, ["a", "b"]), (2, ["a/momentum"])):
            parts, where = {}, {}
            for name in names:
                rows = slice(2 * rank, 2 * rank + 2)
                parts[name] = whole[name][rows].clone()
                where[name] = {"saved_offsets": [2 * rank] + [0] * (whole[name].ndim - 1)}
            path = staging / "shards" / f"shard-{rank + 1:05d}-model-{number:05d}-of-00002.safetensors"
            save_file(parts, path, {"DCP_SHARDING_INFO": json.dumps(where), "DCP_VERSION": "1.0"})
    files = flushed_files(staging, (staging / "shards").iterdir())
    state = {"step": step, "tokens": 1, "config": {}}
    path = publish(checkpoints, staging, state, ByteTokenizer(), files)
    assert torch.equal(read_checkpoint(path).model_tensors()["a"], whole["a"])
    return path


def test_a_sharded_checkpoint_is_read_whole_and_becomes_two_files(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    before = read_checkpoint(path)
    assert before.is_sharded and before.model_tensors().keys() == {"a", "b"}
    weights, moments = before.model_tensors(), before.optimizer_tensors()
    consolidate(path)
    after = read_checkpoint(path)
    assert not after.is_sharded and not (path / "shards").exists() and after.state == before.state
    assert all(torch.equal(tensor, after.model_tensors()[name]) for name, tensor in weights.items())
    assert torch.equal(moments["a/momentum"], after.optimizer_tensors()["a/momentum"])
    consolidate(path)  # nothing is left to do
    assert read_checkpoint(path).model_tensors().keys() == weights.keys()


@pytest.mark.parametrize("moment", range(1, 11))
def test_a_crash_while_consolidating_leaves_the_one_form_or_the_other(tmp_path: Path, moment: int) -> None:
    """Cut off after each of its renames, flushes and removals in turn; afterwards it can be done again."""
    path = sharded(tmp_path)
    weights = read_checkpoint(path).model_tensors()
    calls = 0

    def counted(function):
        def cut_off(*given, **named):
            nonlocal calls
            calls += 1
            if calls == moment:
                raise KeyboardInterrupt
            return function(*given, **named)

        return cut_off

    with pytest.MonkeyPatch.context() as patch:
        flushes = [(module, "flush_to_disk") for module in (consolidation, folder, files)]
        for place, name in ((os, "replace"), *flushes, (shutil, "rmtree")):
            patch.setattr(place, name, counted(getattr(place, name)))
        try:
            consolidate(path)
        except KeyboardInterrupt:
            pass
    assert all(torch.equal(tensor, read_checkpoint(path).model_tensors()[name]) for name, tensor in weights.items())
    consolidate(path)
    assert not read_checkpoint(path).is_sharded and not (path / "shards").exists()
    assert all(torch.equal(tensor, read_checkpoint(path).model_tensors()[name]) for name, tensor in weights.items())


def test_a_sharded_checkpoint_that_is_not_what_it_says_is_not_believed(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    extra = path / "shards" / "shard-00003-model-00001-of-00002.safetensors"
    extra.write_bytes((path / "shards" / "shard-00001-model-00001-of-00002.safetensors").read_bytes())
    with pytest.raises(Damaged, match="does not list"):
        read_checkpoint(path)
    extra.unlink()
    shard = path / "shards" / "shard-00002-model-00001-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(Damaged, match="sha256 of shards/shard-00002"):
        read_checkpoint(path)
    shard.unlink()
    with pytest.raises(Damaged, match="is missing"):
        read_checkpoint(path)
    elsewhere = tmp_path / "elsewhere"
    (path / "shards").rename(elsewhere)
    (path / "shards").symlink_to(elsewhere)
    with pytest.raises(Damaged):
        read_checkpoint(path)
