"""Saving a run that stands on one rank or on many: the checkpoint folder is the same, whoever writes it.

`WholeSaver` writes all of it on rank 0 while the run waits. `ShardSaver` lets every rank write what it keeps, in a thread
of its own, while the run goes on: the ranks copy their parts, which is all that a step waits for, and a checkpoint exists
when the last file of the last rank is on the disk and rank 0 renames the folder into place. A crash before that leaves the
checkpoint before it.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import hashlib
import json
import mmap
import os
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor, Replicate, Shard

from andrea.checkpoint import Checkpoint, Damaged, best_of, consolidate, write_checkpoint
from andrea.checkpoint.folder import SHARDS, make_staging_folder, publish
from andrea.checkpoint.keep import keep_newest, mark_best
from andrea.runtime.files import StorageFailed, storing
from andrea.text.tokenizer import Tokenizer
from andrea.training.optimizer.optimizer import Optimizer
from andrea.training.parallel.fsdp import FullySharded
from andrea.training.parallel.process_group import COLLECTIVE_TIMEOUT, raising_rank_lost

LOW_PRIORITY = 10  # a tenth of what a step gets where both want the processor; at 19 a save could take minutes
BUFFER_BYTES, BLOCK_BYTES = 1 << 22, 4096
TYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}  # safetensors'


class Saver(ABC):
    """folder: the run's; keep: how many of the newest checkpoints stay, besides the best."""

    def __init__(self, folder: Path, optimizer: Optimizer, tokenizer: Tokenizer, keep: int) -> None:
        self.folder, self.optimizer, self.tokenizer, self.keep = folder, optimizer, tokenizer, keep
        self.parallel = optimizer.parallel

    @abstractmethod
    def save(self, state: dict[str, Any], best: bool) -> None:
        """Write a checkpoint of `state` and of the weights and the optimizer as they are now; best: the best so far.

        Every rank must call. Raises StorageFailed, also for what an earlier call left to be written.
        """

    @abstractmethod
    def check(self) -> None:
        """Raises StorageFailed where what was left to be written has failed by now."""

    @abstractmethod
    def wait(self) -> None:
        """Return when everything that was to be saved is on the disk. Raises StorageFailed."""

    @abstractmethod
    def conclude(self) -> None:
        """`wait`, and leave the newest and the best checkpoint in the single-folder format."""

    @abstractmethod
    def restore(self, checkpoint: Checkpoint) -> None:
        """Put the checkpoint's weights and optimizer state in place, whoever wrote them."""

    def announce(self, path: Path, best: bool) -> None:
        if best or best_of(self.folder) is None:
            mark_best(self.folder, path.name)
        keep_newest(self.folder, self.keep)


class WholeSaver(Saver):
    def save(self, state: dict[str, Any], best: bool) -> None:
        if self.parallel.ranks.is_rank_0:
            weights, moments = self.parallel.model.state_dict(), self.optimizer.state_tensors()
            self.announce(write_checkpoint(self.folder / "checkpoints", state, weights, moments, self.tokenizer), best)

    def check(self) -> None:
        """Nothing is left to be written."""

    def wait(self) -> None:
        """Nothing is left to be written."""

    def conclude(self) -> None:
        """It is in that format."""

    def restore(self, checkpoint: Checkpoint) -> None:
        self.parallel.model.load_state_dict(checkpoint.model_tensors())
        self.optimizer.load_state_tensors(checkpoint.optimizer_tensors())


class ShardSaver(Saver):
    """asynchronous: the run goes on while files are written; otherwise it waits for them."""

    parallel: FullySharded

    def __init__(self, folder: Path, optimizer: Optimizer, tokenizer: Tokenizer, keep: int, asynchronous: bool) -> None:
        super().__init__(folder, optimizer, tokenizer, keep)
        self.asynchronous = asynchronous
        self.mesh = self.parallel.cpu_mesh()
        self.group = dist.new_group(
            backend="gloo", timeout=COLLECTIVE_TIMEOUT
        )  # of the thread alone: its talk must not mix with the step's
        self.copies: dict[str, Tensor] = {}  # what is being written, by name
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None

    def save(self, state: dict[str, Any], best: bool) -> None:
        self.wait()  # one at a time
        now = self.parallel.local_parameters | self.optimizer.state_tensors()
        if not self.copies:  # made once: fresh memory takes the system longer than copying
            self.copies = laid_out(now)
        for name, tensor in now.items():
            self.copies[name].copy_(tensor.detach())
        tensors = self.described(self.copies)
        as_now = copy.deepcopy(state)  # the run goes on and changes what it holds
        work = self.noting_failure(lambda: self.write(tensors, as_now, best))
        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()
        if not self.asynchronous:
            self.wait()

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
            checkpoints = sorted((self.folder / "checkpoints").glob("step-*"))
            for name in {best_of(self.folder), checkpoints[-1].name if checkpoints else None} - {None}:
                consolidate(self.folder / "checkpoints" / name)

    def restore(self, checkpoint: Checkpoint) -> None:
        weights = {name: torch.empty_like(part, device="cpu") for name, part in self.parallel.local_parameters.items()}
        tensors = weights | self.optimizer.blank_state_tensors()
        checkpoint.read_into(self.described(tensors))
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise Damaged(f"{checkpoint.path} is damaged: {name} is not finite; use an older checkpoint")
        with torch.no_grad():
            for name, part in self.parallel.local_parameters.items():
                part.copy_(tensors.pop(name))
        self.optimizer.load_state_tensors(tensors)

    # ---------------------------------------------------------------------------------------------- in the thread

    def noting_failure(self, work: Callable[[], None]) -> Callable[[], None]:
        card = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def noted() -> None:
            try:
                if sys.platform == "linux":  # elsewhere a thread has no priority of its own
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)  # steps come first
                if card is not None:
                    torch.cuda.set_device(card)  # a new thread stands on card 0
                with raising_rank_lost():
                    work()
            except BaseException as failure:  # whatever it is: raised again where the run waits for this thread
                self.failure = failure

        return noted

    def write(self, tensors: dict[str, Tensor], state: dict[str, Any], best: bool) -> None:
        """Every rank its files; then rank 0 the rest, and the rename that makes them a checkpoint."""
        first, checkpoints = self.parallel.ranks.is_rank_0, self.folder / "checkpoints"
        places = [make_staging_folder(checkpoints, state["step"]) if first else None]
        dist.broadcast_object_list(places, group=self.group)
        beside = places[0]
        with storing(beside):
            # Names with a "/" are the optimizer's: in files of their own, so that weights can be read without them.
            file_of = {name: 2 if "/" in name else 1 for name in tensors}
            writer = StreamingWriter(str(beside / SHARDS), file_of, save_distributed=True)
            with warnings.catch_warnings(), failures_unwrapped():
                warnings.simplefilter("ignore")  # of DTensor's about what concerns its own authors
                dcp.save(tensors, storage_writer=writer, process_group=self.group)
            mine = {f"{SHARDS}/{name}": about for name, about in writer.written.items()}
        files: list[Any] = [None] * self.parallel.ranks.size
        dist.all_gather_object(files, mine, group=self.group)
        if first:
            shards = {name: about for of_rank in files for name, about in of_rank.items()}
            for name in shards:
                if not (beside / name).exists():
                    raise StorageFailed(
                        f"{beside / name}, which another rank wrote, is not here: all hosts must share runs_dir"
                    )
            self.announce(publish(checkpoints, beside, state, self.tokenizer, shards), best)
        dist.barrier(group=self.group)

    def described(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Parts as torch.distributed.checkpoint knows them: with the whole's shape, and where in it they belong."""
        placements = [Replicate()] * (self.mesh.ndim - 1) + [Shard(0)]
        described = {}
        for name, tensor in tensors.items():
            if name.endswith("/step"):  # a count, the same on every rank
                described[name] = tensor
                continue
            shape = self.parallel.shapes[name.split("/")[0]]
            stride = torch.empty(shape, device="meta").stride()
            described[name] = DTensor.from_local(
                tensor, self.mesh, placements, run_check=False, shape=shape, stride=stride
            )
        return described


class StreamingWriter(dcp.HuggingFaceStorageWriter):
    """torch's safetensors storage, its files written tensor by tensor from where the tensors lie, and hashed on the way.

    torch's own builds each file in memory, twice over: fresh memory, which takes the system longer to hand out than the
    disk takes to write it, and all of it is taken from the steps beside. written: size and sha256 of each file, by name.
    """

    def __init__(self, path: str, file_of: dict[str, int], save_distributed: bool) -> None:
        super().__init__(path, file_of, save_distributed=save_distributed)
        self.file_of = file_of
        self.written: dict[str, dict[str, Any]] = {}

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        results, last = [], max(self.file_of.values())
        all_tensors = [(item, planner.resolve_data(item).detach().contiguous()) for item in plan.items]
        all_tensors.sort(key=lambda pair: pair[1].data_ptr())  # neighbours in memory are neighbours in the file
        for number in sorted({self.file_of[item.index.fqn] for item in plan.items}):
            name = f"shard-{plan.storage_data['shard_index']:05d}-model-{number:05d}-of-{last:05d}.safetensors"
            items, tensors = zip(
                *(pair for pair in all_tensors if self.file_of[pair[0].index.fqn] == number), strict=True
            )
            self.written[name] = write_safetensors(Path(self.path) / name, items, tensors)
            results += [
                WriteResult(item.index, tensor.nbytes, name) for item, tensor in zip(items, tensors, strict=True)
            ]
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(results)
        return done


def laid_out(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Room for copies of `tensors`, one after the other as a file has them: such a file is written from where they lie.

    Weights and the optimizer's (with a "/" in the name) have files, and so places that begin at a page, of their own.
    """
    copies = {}
    for optimizers in (False, True):
        chosen = {name: tensor for name, tensor in tensors.items() if ("/" in name) == optimizers}
        n_byte = sum(tensor.nbytes for tensor in chosen.values())
        pinned = any(tensor.is_cuda for tensor in chosen.values())
        room = torch.empty(n_byte + BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned)
        end = -room.data_ptr() % BLOCK_BYTES
        for name, tensor in sorted(chosen.items(), key=lambda pair: -pair[1].itemsize):  # so that each is aligned
            place = room[end : (end := end + tensor.nbytes)]
            copies[name] = place.view(tensor.dtype).view(tensor.shape)
    return copies


def write_safetensors(path: Path, items: Sequence[WriteItem], tensors: Sequence[Tensor]) -> dict[str, Any]:
    """A file of parts, as torch's HuggingFaceStorageReader knows them by the place each has in its whole."""
    offsets = {item.index.fqn: {"saved_offsets": list(item.tensor_data.chunk.offsets)} for item in items}
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    }
    end = 0
    for item, tensor in zip(items, tensors, strict=True):
        place = [end, end := end + tensor.nbytes]
        header[item.index.fqn] = {"dtype": TYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % BLOCK_BYTES)  # the first tensor begins at a block
    with DirectFile(path) as stream:
        stream.write(np.frombuffer(len(text).to_bytes(8, "little") + text, dtype=np.uint8))
        for tensor in tensors:
            stream.write(tensor.reshape(-1).view(torch.uint8).numpy())
    return {"bytes": 8 + len(text) + end, "sha256": stream.digest.hexdigest()}


class DirectFile:
    """A file hashed on the way and written past the system's buffers, where the file system allows it: they would fill
    with what nobody reads again, and making room in them costs more than the writing itself.

    Such writing knows whole blocks only, in memory as in the file: what lies so is written from where it lies, the rest
    through a small buffer.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self.descriptor = os.open(path, flags | getattr(os, "O_DIRECT", 0))
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system without it
                raise
            self.descriptor = os.open(path, flags)
        self.buffer = np.frombuffer(mmap.mmap(-1, BUFFER_BYTES), dtype=np.uint8)  # begins at a page
        self.filled, self.total, self.digest = 0, 0, hashlib.sha256()

    def __enter__(self) -> DirectFile:
        return self

    def write(self, piece: NDArray[np.uint8]) -> None:
        self.total += len(piece)
        while len(piece):
            if self.filled == 0 and piece.ctypes.data % BLOCK_BYTES == 0 and len(piece) >= BLOCK_BYTES:
                taken = min(len(piece) // BLOCK_BYTES * BLOCK_BYTES, BUFFER_BYTES)
                self.digest.update(piece[:taken])
                self.hand_over(piece[:taken])
            else:
                lies_well = (piece.ctypes.data - self.filled) % BLOCK_BYTES == 0  # from the end of this block on
                room = BLOCK_BYTES - self.filled % BLOCK_BYTES if lies_well else BUFFER_BYTES - self.filled
                taken = min(len(piece), room)
                self.buffer[self.filled : self.filled + taken] = piece[:taken]
                self.digest.update(piece[:taken])
                self.filled += taken
                if self.filled == BUFFER_BYTES or (lies_well and self.filled % BLOCK_BYTES == 0):
                    self.hand_over(self.buffer[: self.filled])
                    self.filled = 0
            piece = piece[taken:]

    def hand_over(self, blocks: NDArray[np.uint8]) -> None:
        while len(blocks):
            blocks = blocks[os.write(self.descriptor, blocks) :]

    def __exit__(self, *error: Any) -> None:
        try:
            if error[0] is None:
                self.hand_over(self.buffer[: -(-self.filled // BLOCK_BYTES) * BLOCK_BYTES])  # too much is cut again
                os.ftruncate(self.descriptor, self.total)
                os.fsync(self.descriptor)
        finally:
            os.close(self.descriptor)


@contextlib.contextmanager
def failures_unwrapped() -> Iterator[None]:
    """Raises what a rank's disk said, which torch wraps and hands to all ranks."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            raise failure from error
        raise


def make_saver(folder: Path, optimizer: Optimizer, tokenizer: Tokenizer, keep: int, asynchronous: bool) -> Saver:
    if isinstance(optimizer.parallel, FullySharded):
        return ShardSaver(folder, optimizer, tokenizer, keep, asynchronous)
    return WholeSaver(folder, optimizer, tokenizer, keep)
