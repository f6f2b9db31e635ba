"""A checkpoint that two ranks wrote: read as a whole, verified, and consolidated into two files."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from andrea.checkpoint import Damaged, consolidate, folder, read_checkpoint
from andrea.checkpoint.folder import flushed_files, make_staging_folder, publish
from andrea.checkpoint.tensors import OFFSETS, TensorReader, write_shard, write_tensors
from andrea.runtime import files
from andrea.text.tokenizer import ByteTokenizer

WHOLE = {
    "a": torch.arange(12.0).view(4, 3),
    "b": torch.arange(3.0),  # two rows on the first rank, one on the second
    "c": torch.randn(5, 7).bfloat16(),
    "lone": torch.randn(1, 2),  # no row on the second rank
    "a/momentum": torch.arange(12.0).view(4, 3) / 7,
    "a/step": torch.tensor(3.0),  # no dimension
    "b/momentum": torch.randn(3),
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in WHOLE.items()}


def write_shards(folder: Path, whole: dict[str, torch.Tensor] = WHOLE, n_rank: int = 2) -> list[Path]:
    """The files of all ranks, rows divided as torch.chunk divides them."""
    folder.mkdir()
    paths = []
    for rank in range(n_rank):
        mine, first_rows = {}, {}
        for name, tensor in whole.items():
            most = -(-len(tensor) // n_rank) if tensor.ndim else 0
            rows = tensor[rank * most : (rank + 1) * most] if tensor.ndim else tensor
            if (tensor.ndim and len(rows)) or (not tensor.ndim and rank == 0):
                mine[name], first_rows[name] = rows, rank * most
        paths += write_shard(folder, rank, mine, first_rows)
    return paths


def sharded(checkpoints: Path, step: int = 7) -> Path:
    """A checkpoint as two ranks write it."""
    staging = make_staging_folder(checkpoints, step)
    files = flushed_files(staging, write_shards(staging / "shards"))
    return publish(checkpoints, staging, {"step": step, "tokens": 1, "config": {}}, ByteTokenizer(), files)


@pytest.mark.parametrize("n_rank", [1, 2, 5])
def test_the_rows_of_all_ranks_make_the_whole_tensors(n_rank: int, tmp_path: Path) -> None:
    reader = TensorReader(write_shards(tmp_path / "shards", n_rank=n_rank))
    assert reader.names == sorted(WHOLE)
    for name, tensor in WHOLE.items():
        assert torch.equal(reader.read(name), tensor)
    assert reader.shapes == SHAPES


def test_any_rows_can_be_read(tmp_path: Path) -> None:
    """As another number of ranks needs them: rows of one file, over several, at their borders, none."""
    reader = TensorReader(write_shards(tmp_path / "shards", n_rank=3))
    for first in range(6):
        for stop in range(first, 6):
            read = reader.read("c", slice(first, stop))
            assert torch.equal(read, WHOLE["c"][first:stop]) and read.shape == (stop - first, 7)


def test_rows_of_whole_files_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_tensors(path, WHOLE)
    reader = TensorReader([path])
    assert torch.equal(reader.read("c", slice(1, 3)), WHOLE["c"][1:3])
    assert reader.shapes == SHAPES
    assert torch.equal(reader.read("a/step"), WHOLE["a/step"])


def test_torch_reads_the_files_of_all_ranks(tmp_path: Path) -> None:
    """torch's reader, which shares no code with ours, finds every number in its place; no pickle lies next to them."""
    paths = write_shards(tmp_path / "shards")
    assert sorted((tmp_path / "shards").iterdir()) == sorted(paths)
    read = {name: torch.full_like(tensor, 9) for name, tensor in WHOLE.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "shards")), no_dist=True)
    assert all(torch.equal(tensor, read[name]) for name, tensor in WHOLE.items())


def test_files_that_torch_wrote_are_read(tmp_path: Path) -> None:
    """Checkpoints of earlier versions were written through torch's planner."""
    file_of = {name: 2 if "/" in name else 1 for name in WHOLE}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), file_of, save_distributed=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(WHOLE), storage_writer=writer, no_dist=True)
    reader = TensorReader(sorted(tmp_path.glob("*.safetensors")))
    assert reader.names == sorted(WHOLE)
    assert all(torch.equal(tensor, reader.read(name)) for name, tensor in WHOLE.items())


@pytest.mark.parametrize(
    "info",
    [
        "[]",
        "{",
        "3",
        json.dumps({"c": {}}),
        json.dumps({"c": {"saved_offsets": []}}),
        json.dumps({"c": {"saved_offsets": ["x", 0]}}),
        json.dumps({"c": {"saved_offsets": [1, 0]}}),
        json.dumps({"c": {"saved_offsets": [10**30, 0]}}),
        '{"c": {"saved_offsets": [1e999, 0]}}',
        "[" * 100_000,
    ],
)
def test_a_wrong_header_is_refused(info: str, tmp_path: Path) -> None:
    path = tmp_path / "shard-00001-model-00001-of-00002.safetensors"
    write_tensors(path, {"c": WHOLE["c"]}, {OFFSETS: info})
    if info == "[]":  # no entry for the tensor: it is whole
        assert torch.equal(TensorReader([path]).read("c"), WHOLE["c"])
        return
    with pytest.raises(Damaged, match="shard-00001-model-00001"):
        TensorReader([path]).read("c")


def test_a_missing_part_and_a_missing_tensor_are_refused(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "shards", n_rank=3)
    reader = TensorReader(paths[:2] + paths[4:])  # without those of the second rank
    with pytest.raises(Damaged, match="rows 2 to 5 of c are in none of its files"):
        reader.read("c")
    with pytest.raises(Damaged, match="shards is damaged: it has no d"):
        reader.read("d")


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "shards", {"a": torch.tensor([1.0, float("nan")])})
    reader = TensorReader(paths)
    assert reader.read("a", slice(0, 1)) == 1
    with pytest.raises(Damaged, match="a holds numbers that are not finite"):
        reader.read("a")


def test_a_sharded_checkpoint_is_read_and_consolidated_into_two_files(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    before = read_checkpoint(path)
    assert before.is_sharded and before.model_tensors().keys() == {"a", "b", "c", "lone"}
    weights, moments = before.model_tensors(), before.optimizer_tensors()
    consolidate(path)
    after = read_checkpoint(path)
    assert not after.is_sharded and not (path / "shards").exists() and after.state == before.state
    assert all(torch.equal(tensor, after.model_tensors()[name]) for name, tensor in weights.items())
    assert torch.equal(moments["a/momentum"], after.optimizer_tensors()["a/momentum"])
    consolidate(path)  # nothing is left to do
    assert read_checkpoint(path).model_tensors().keys() == weights.keys()


@pytest.mark.parametrize("moment", range(1, 11))
def test_a_crash_while_consolidating_leaves_valid_shards_or_valid_files(tmp_path: Path, moment: int) -> None:
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
        flushes = [(module, "flush_to_disk") for module in (folder, files)]
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


def test_what_safetensors_leaves_in_a_crash_while_consolidating_is_removed_later(tmp_path: Path) -> None:
    """safetensors first writes a file of a random name beside the one it is given."""
    path = sharded(tmp_path)

    def killed(target: Path, tensors: dict) -> None:
        target.with_name(".tmpHGY9C2").write_bytes(b"half a model")
        os._exit(9)

    if (child := os.fork()) == 0:
        folder.write_tensors = killed
        consolidate(path)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9 and list(path.rglob(".tmp*"))
    consolidate(path)
    assert not list(path.rglob(".*")) and not read_checkpoint(path).is_sharded


def test_shards_that_differ_from_the_manifest_are_refused(tmp_path: Path) -> None:
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
    with pytest.raises(Damaged, match="shards/shard-00002.* has another sha256"):
        read_checkpoint(path)
    shard.unlink()
    with pytest.raises(Damaged, match="is missing"):
        read_checkpoint(path)
    elsewhere = tmp_path / "elsewhere"
    (path / "shards").rename(elsewhere)
    (path / "shards").symlink_to(elsewhere)
    with pytest.raises(Damaged):
        read_checkpoint(path)
