"""Saves a run of one rank or of many ranks. Checkpoints of both kinds are read in the same way.

`Saver`: rank 0 writes the whole model while the run waits. `ShardedSaver`: every rank writes its own rows in a
thread, while the run continues. A step waits only until the rows are copied. The checkpoint exists once all ranks have
written their files and rank 0 has renamed the folder. After a crash before that, the older checkpoints remain.
"""

import copy
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from andrea.checkpoint import Checkpoint, Damaged, best_of, checkpoints_of, consolidate, write_checkpoint
from andrea.checkpoint.find_and_prune import mark_and_prune
from andrea.checkpoint.folder import SHARDS, Files, flushed_files, make_staging_folder, publish
from andrea.checkpoint.tensors import TensorReader, write_shard
from andrea.runtime.files import RESUME, StorageFailed, storing
from andrea.text.tokenizer import Tokenizer
from andrea.training.optimizer import Optimizer
from andrea.training.parallel.fsdp import FullySharded
from andrea.training.parallel.ranks import COLLECTIVE_TIMEOUT, raising_rank_lost

# The thread's nice value. At 10 it gets about a tenth of a step's CPU time; at 19 a save could take minutes.
LOW_PRIORITY = 10
Result = TypeVar("Result")


class Saver:
    """Writes and restores checkpoints of a model that each rank has whole. folder: the run's folder.

    keep: how many of the newest checkpoints are kept. `save` returns when everything is written, in the single-file format, so
    that `check`, `wait` and `conclude` have nothing to do; `ShardedSaver` writes in the background.
    """

    def __init__(self, folder: Path, optimizer: Optimizer, tokenizer: Tokenizer, keep: int) -> None:
        import safetensors.torch  # noqa: F401 (here: with memory gone, a save could no longer load it)

        self.folder, self.optimizer, self.tokenizer, self.keep = folder, optimizer, tokenizer, keep
        self.parallel = optimizer.parallel

    def save(self, state: dict[str, Any]) -> None:
        """Write a checkpoint of `state` and of the current weights and optimizer state. Every rank must call this.

        Raises StorageFailed if this checkpoint, or an earlier one in the background, could not be written.
        """
        if self.parallel.ranks.is_rank_0:
            weights, moments = self.parallel.model.state_dict(), self.optimizer.state_tensors()
            write_checkpoint(self.folder / "checkpoints", state, weights, moments, self.tokenizer)
            mark_and_prune(self.folder, self.keep)

    def check(self) -> None:
        """Raises StorageFailed if an earlier checkpoint could not be written."""

    def wait(self) -> None:
        """Return when every checkpoint is on the disk. Raises StorageFailed."""

    def conclude(self) -> None:
        """Wait for the last checkpoint, then convert the newest and the best checkpoint to the single-file format."""

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load the checkpoint's weights and optimizer state, whole or sharded. Raises Damaged."""
        self.parallel.model.load_state_dict(checkpoint.model_tensors())
        self.optimizer.load_state_tensors(checkpoint.optimizer_tensors())


class ShardedSaver(Saver):
    """Every rank writes its own rows, while the run continues."""

    parallel: FullySharded

    def __init__(self, folder: Path, optimizer: Optimizer, tokenizer: Tokenizer, keep: int) -> None:
        super().__init__(folder, optimizer, tokenizer, keep)
        # The thread's own process group, so that its collectives cannot interleave with those of a step.
        self.group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self.copies: dict[str, Tensor] = {}  # by name, on the CPU: the tensors that are being written
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None

    def save(self, state: dict[str, Any]) -> None:
        self.wait()  # one save at a time
        tensors = self.tensors_of_this_rank()
        if not self.copies:  # allocated once: allocating memory takes longer than copying
            on_gpu = {name: tensor for name, tensor in tensors.items() if tensor.is_cuda}
            others = tensors.keys() - on_gpu.keys()
            self.copies = empty_pinned(on_gpu) | {name: torch.empty_like(tensors[name]) for name in others}
        for name, tensor in tensors.items():
            self.copies[name].copy_(tensor.detach())
        state_now = copy.deepcopy(state)  # the run changes the objects in `state` while the thread writes
        card = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self.thread = threading.Thread(target=self.write_behind, args=(state_now, card), daemon=True)
        self.thread.start()

    def tensors_of_this_rank(self) -> dict[str, Tensor]:
        """The rows that this rank writes: its own. Every rank keeps the step counts; rank 0 writes them."""
        tensors = self.parallel.local_parameters | self.optimizer.state_tensors()
        is_first = self.parallel.ranks.is_rank_0
        return {
            name: tensors[name] for name in sorted(tensors) if (len(tensors[name]) if tensors[name].ndim else is_first)
        }

    def wait(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self.check()

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def conclude(self) -> None:
        self.wait()
        if self.parallel.ranks.is_rank_0:
            newest = [path.name for path in checkpoints_of(self.folder)[-1:]]
            for name in {best_of(self.folder), *newest} - {None}:
                consolidate(self.folder / "checkpoints" / name)

    def restore(self, checkpoint: Checkpoint) -> None:
        reader = checkpoint.open_tensors()
        with torch.no_grad():
            for name, parameter in self.parallel.local_parameters.items():
                parameter.copy_(self.read_rows(checkpoint, reader, name, parameter.shape))
        shapes = self.optimizer.state_shapes()
        self.optimizer.load_state_tensors(
            {name: self.read_rows(checkpoint, reader, name, shape) for name, shape in shapes.items()}
        )

    def read_rows(self, checkpoint: Checkpoint, reader: TensorReader, name: str, shape: tuple[int, ...]) -> Tensor:
        """This rank's rows of a weight or of a tensor of the optimizer's state. Raises Damaged."""
        tensor = reader.read(name, self.parallel.local_rows(name.split("/")[0]) if shape else None)
        if tensor.shape != shape:
            raise Damaged(f"{checkpoint.path} is damaged: {name} is {tuple(tensor.shape)} instead of {tuple(shape)}")
        return tensor

    # ---------------------------------------------------------------------------------------------- in the thread

    def write_behind(self, state: dict[str, Any], card: int | None) -> None:
        """Write with low priority, and keep an exception in `failure`, for the main thread to raise. card: this rank's GPU."""
        try:
            if sys.platform == "linux":  # elsewhere a thread has no priority of its own
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
            if card is not None:
                torch.cuda.set_device(card)  # a new thread starts with GPU 0
            with raising_rank_lost():
                self.write(state)
        except BaseException as failure:
            self.failure = failure

    def write(self, state: dict[str, Any]) -> None:
        """Every rank writes its files; then rank 0 adds the other files and renames the folder to its final name."""
        checkpoints = self.folder / "checkpoints"
        staging = self.on_rank_0(lambda: make_staging_folder(checkpoints, state["step"]))
        of_ranks: list[Files] = self.on_every_rank(lambda: self.write_files(staging))
        files = {name: about for files_of_rank in of_ranks for name, about in files_of_rank.items()}
        self.on_rank_0(lambda: self.complete(staging, state, files))

    def write_files(self, staging: Path) -> Files:
        """Write the files of this rank. Returns their sizes and hashes."""
        first_rows = {name: self.parallel.local_rows(name.split("/")[0]).start for name in self.copies}
        with storing(staging):
            (staging / SHARDS).mkdir(parents=True, exist_ok=True)
            return flushed_files(
                staging, write_shard(staging / SHARDS, self.parallel.ranks.rank, self.copies, first_rows)
            )

    def complete(self, staging: Path, state: dict[str, Any], files: Files) -> None:
        for name in files:
            if not (staging / name).exists():
                raise StorageFailed(
                    f"{staging / name}, which another rank wrote, is missing on this host",
                    f"all hosts must share runs_dir; set it to a folder that they share, then {RESUME}",
                )
        publish(self.folder / "checkpoints", staging, state, self.tokenizer, files)
        mark_and_prune(self.folder, self.keep)

    def on_every_rank(self, work: Callable[[], Result]) -> list[Result]:
        """The results of `work` on all ranks, in rank order. If `work` fails on one rank, all raise StorageFailed."""
        outcome: Result | StorageFailed
        try:
            outcome = work()
        except StorageFailed as failure:
            outcome = failure
        outcomes: list[Any] = [None] * self.parallel.ranks.size
        dist.all_gather_object(outcomes, outcome, group=self.group)
        for rank, each in enumerate(outcomes):
            if isinstance(each, StorageFailed):
                each.is_told_by_another_rank = rank != self.parallel.ranks.rank
                raise each
        return outcomes

    def on_rank_0(self, work: Callable[[], Result]) -> Result:
        """The result of `work` on rank 0. If `work` fails, all ranks raise StorageFailed."""
        return self.on_every_rank(work if self.parallel.ranks.is_rank_0 else lambda: None)[0]


# ------------------------------------------------------------------------------------------------ memory for the copies

ALIGNMENT_BYTES = 64  # of tensors in a block; more than any type needs
LARGEST_SHARED_BYTES = 2**28  # a larger block is opened for a larger tensor only


def empty_pinned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Uninitialised pinned memory of the shape and type of each tensor, by name.

    torch rounds each pinned allocation up to a power of two. Tensors therefore share blocks of such sizes.
    """
    sizes, places = blocks_for({name: tensor.nbytes for name, tensor in tensors.items()})
    blocks = [torch.empty(n_byte, dtype=torch.uint8, pin_memory=torch.cuda.is_available()) for n_byte in sizes]
    copies = {}
    for name, (block, offset) in places.items():
        tensor = tensors[name]
        copies[name] = blocks[block][offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return copies


def blocks_for(n_bytes: Mapping[str, int]) -> tuple[list[int], dict[str, tuple[int, int]]]:
    """The sizes of blocks in bytes, powers of two, and for each name its block and its offset there.

    Largest first, each in the first block that it fits into (first-fit decreasing). A block takes its first tensor, and is
    otherwise no larger than all that remains to be placed.
    """
    sizes: list[int] = []
    used: list[int] = []
    places = {}
    remaining = {name: -(-n_byte // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for name, n_byte in n_bytes.items()}
    left = sum(remaining.values())
    for name in sorted(remaining, key=lambda name: (-remaining[name], name)):
        needed = remaining[name]
        block = next((i for i, size in enumerate(sizes) if size - used[i] >= needed), len(sizes))
        if block == len(sizes):
            filled = 2 ** (min(left, LARGEST_SHARED_BYTES).bit_length() - 1)
            sizes.append(max(filled, 2 ** (needed - 1).bit_length()))
            used.append(0)
        places[name] = block, used[block]
        used[block] += needed
        left -= needed
    return sizes, places
