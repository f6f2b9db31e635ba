"""The ranks of a run: the processes that share it, how they share the model and the work of a step, and how they find each other.

A rank is one process of the run; most runs have one.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from andrea.attention import HeadStatistics
from andrea.config import UserError
from andrea.model.gpt import GPT
from andrea.runtime import torchrun
from andrea.runtime.compiling import compile_graph
from andrea.runtime.torchrun import ErrorOfRank0, RankLost
from andrea.training.loss.loss import MicroBatchLoss

# ---------------------------------------------------------------------------------------------------------------- ranks
# Rank 0 chooses names, prints, logs and writes the files that exist once. Figures are reduced over ranks: sums, minima and
# maxima are the same on every rank afterwards.

Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """This process's rank among the processes of the run. With one process, the collectives return their input."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the ranks on this machine
    local_size: int = 1

    @property
    def started_by_torchrun(self) -> bool:
        """Whether torchrun started this process: a process group then exists, even if the run has one process only."""
        return dist.is_available() and dist.is_initialized()

    @property
    def is_rank_0(self) -> bool:
        return self.rank == 0

    def from_rank_0(self, work: Callable[[], Result]) -> Result:
        """The result of `work`, done on rank 0 alone, or its UserError, on every rank. All ranks must call this."""
        if self.size == 1:
            return work()
        message: list[Any] = [None, None]  # result, text of the error
        if self.is_rank_0:
            try:
                message[0] = work()
            except UserError as error:
                message[1] = str(error)
        dist.broadcast_object_list(message)
        if message[1] is not None:
            raise ErrorOfRank0(message[1])
        return message[0]

    def rank_0_first(self, work: Callable[[], Result]) -> Result:
        """Do `work` on rank 0, then on all others, so that they find the files of rank 0. All ranks must call this."""
        if not self.is_rank_0:
            self.from_rank_0(lambda: None)
            return work()
        results: list[Result] = []
        self.from_rank_0(lambda: results.append(work()))
        return results[0]

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum over all ranks, element by element."""
        return self.reduce(numbers, dist.ReduceOp.SUM)

    def maximum(self, numbers: Tensor) -> Tensor:
        return self.reduce(numbers, dist.ReduceOp.MAX)

    def minimum(self, numbers: Tensor) -> Tensor:
        return self.reduce(numbers, dist.ReduceOp.MIN)

    def reduce(self, numbers: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size == 1:
            return numbers
        numbers = numbers.detach().clone()
        dist.all_reduce(numbers, operation)
        return numbers

    def merge_head_statistics(self, measured: HeadStatistics) -> HeadStatistics:
        """Statistics (L, H) over the sequences of all ranks: sums are added, the largest logit is the maximum."""
        if self.size == 1:
            return measured
        there = {name: part for name, part in measured._asdict().items() if part is not None}
        sums = self.sum(torch.stack(tuple(there.values()))).unbind()
        return HeadStatistics(**dict(zip(there, sums, strict=True)))._replace(
            largest_logit=self.maximum(measured.largest_logit)
        )

    def local_rows(self, count: int) -> tuple[int, int, int]:
        """This rank's part of `count` rows: the first one, their number, and the largest number on any rank.

        Parts are consecutive, and their sizes differ by at most one row. There may be fewer rows than ranks.
        """
        each, left = divmod(count, self.size)
        return self.rank * each + min(self.rank, left), each + (self.rank < left), each + (left > 0)


# ---------------------------------------------------------------------------------------------------- sharing the model
# Every rank computes gradients from its own rows of the step's batch. All subclasses of `Parallel` compute the same update.
# The optimizer works on plain tensors, `local_parameters`, whose gradients are already summed over ranks.
#
# n matrices of one shape, R rows and C columns each.


class Parallel:
    """One process with the whole model, and the base class of the ways in which ranks share it and the work of a step.

    local_parameters: name -> this rank's rows of the parameter, as a plain tensor. shapes: name -> shape of the whole
    parameter.
    """

    is_sharded = False  # whether a rank keeps only some rows of each parameter

    def __init__(self, model: GPT, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks()
        self.model = model
        self.local_parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def wrap(self, loss: MicroBatchLoss, compile_mode: str) -> nn.Module:
        """The module that training calls instead of `loss`, which is compiled in place.

        compile_mode: "on": forward and loss as one graph, which DDP splits at the boundaries of its gradient buckets.
        "blocks": one graph for all blocks, and one for the loss. Compiling takes a fraction of the time and does not
        depend on the number of blocks; a step takes a few percent longer. An objective other than the next token
        computes logits for the targets alone, whose number changes: "on" then acts like "blocks".
        """
        if compile_mode == "on" and loss.objective is None:
            loss.forward_in_precision = compile_graph(loss.forward_in_precision)
        elif compile_mode != "off":
            loss.call_block = compile_graph(loss.call_block)
            loss.head_loss = compile_graph(loss.head_loss)
        return loss

    def uncompile(self, loss: MicroBatchLoss) -> None:
        """Undo the compiling of `wrap`: delete the compiled functions, so that the class's methods are called again."""
        for module in (loss, *self.model.blocks):
            for name in ("forward", "forward_in_precision", "call_block", "head_loss"):
                vars(module).pop(name, None)

    def sync_gradients(self, last: bool) -> AbstractContextManager[None]:
        """Context of one micro-batch. Only the step's last micro-batch (`last`) sums the gradients over ranks."""
        return contextlib.nullcontext()

    def apply_to_full_matrices(
        self, local_matrices: Tensor, n_row: int, function: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """This rank's rows of function(matrices).

        local_matrices (n, rows on this rank, C): this rank's rows of n matrices with R = n_row rows. function: maps a
        stack (k, R, C) to a stack of the same shape, each matrix independently. The ranks divide the n matrices among
        themselves.
        """
        return function(local_matrices)

    def set_local_gradients(self) -> None:
        """After the step's last backward pass: give each local parameter its rows of the summed gradient."""

    def norm_over_shards(self, local_norm: Tensor) -> Tensor:
        """The norm over the whole model, 0-dim, from the norm over this rank's local parameters."""
        return local_norm

    def sum_over_shards(self, local_sums: Tensor) -> Tensor:
        """Sums over the whole model, from sums over this rank's local parameters."""
        return local_sums

    def local_rows(self, name: str) -> slice:
        """The rows of the parameter `name` that this rank keeps."""
        return slice(0, self.shapes[name][0])

    def drop_gathered(self) -> None:
        """Drop gathered copies of the parameters, because `local_parameters` have changed outside of a training step."""

    def gathered_model(self) -> GPT | None:
        """The model with all its weights on rank 0, None on the other ranks. All ranks must call this."""
        return self.model if self.ranks.is_rank_0 else None

    def zero_gradients(self) -> None:
        for parameter in self.local_parameters.values():
            parameter.grad = None


def reuses_training_graph(compile_: str, device: torch.device) -> bool:
    """Whether an evaluation runs with gradients enabled, as training does: torch.compile specialises code to that mode.

    On a GPU it has a graph of its own, which a few seconds of compiling make: in training's graph the loss has an
    approximate tanh, and the head's gradients are computed too.
    """
    return compile_ != "off" and device.type != "cuda"


# ------------------------------------------------------------------------------------------------------------------ ddp
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13


class DataParallel(Parallel):
    """The whole model on every rank (DDP; Li et al. 2020, arXiv 2006.15704).

    Gradients are summed over ranks while the backward pass still runs.
    """

    def wrap(self, loss: MicroBatchLoss, compile_mode: str) -> nn.Module:
        compiled_loss = super().wrap(loss, compile_mode)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames 2.11's broadcast_buffers
            self.wrapped = DistributedDataParallel(compiled_loss, broadcast_buffers=False, gradient_as_bucket_view=True)
        return self.wrapped

    def sync_gradients(self, last: bool) -> AbstractContextManager[None]:
        # DDP averages over ranks. The training step multiplies the loss by the number of ranks, so gradients are sums.
        return contextlib.nullcontext() if last else self.wrapped.no_sync()

    def apply_to_full_matrices(
        self, local_matrices: Tensor, n_row: int, function: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Each rank applies `function` to its share of the n matrices. Then every rank gathers all results."""
        n, size, rank = len(local_matrices), self.ranks.size, self.ranks.rank
        share = -(-n // size)  # matrices per rank; the stack is zero-padded to share * size
        padded = torch.cat([local_matrices, local_matrices.new_zeros(share * size - n, *local_matrices.shape[1:])])
        results_here = function(padded[rank * share : (rank + 1) * share]).contiguous()
        results = torch.empty_like(padded)
        all_gather(results, results_here)
        return results[:n]


# -------------------------------------------------------------------------------------------------------- process group
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
TORCHRUN_VARIABLES = (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT")  # set by torchrun, or by another launcher
RENDEZVOUS_TIMEOUT = datetime.timedelta(minutes=10)
# Very long: the watchdog ends a stuck run much earlier, and names the rank that the others wait for.
COLLECTIVE_TIMEOUT = datetime.timedelta(days=1)
ADDRESS_KEY = "andrea/rank-0-store"  # in torchrun's store: address of the store that rank 0 opened at the last start
LOST_CONTACT = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Timed out|remote process exited", re.IGNORECASE
)


@contextlib.contextmanager
def join_ranks(watchdog_minutes: float) -> Iterator[tuple[Ranks, Watchdog]]:
    """Join the process group that torchrun describes in the environment; yields this process's ranks and watchdog.

    A process that torchrun did not start gets one rank and a watchdog that does nothing. Raises RankLost if another
    rank is gone.
    """
    if not all(name in os.environ for name in TORCHRUN_VARIABLES):
        yield Ranks(), Watchdog()
        return
    ranks = Ranks(*(int(os.environ[name]) for name in RANK_VARIABLES))
    how = settings_of_group(ranks)
    if "device_id" in how:
        torch.cuda.set_device(how["device_id"])
        exit_as_rank_lost_on_abort()
    with raising_rank_lost():
        group_store, status_store = open_stores(ranks)
        dist.init_process_group(
            store=group_store, rank=ranks.rank, world_size=ranks.size, timeout=COLLECTIVE_TIMEOUT, **how
        )
    watchdog = Watchdog(ranks.rank, ranks.size, status_store, watchdog_minutes)
    sys.excepthook = print_traceback_and_exit
    with raising_rank_lost():
        yield ranks, watchdog
        dist.barrier()  # no rank leaves while another still writes or reads
    watchdog.finish()
    dist.destroy_process_group()  # not after an exception: it would wait for collectives that other ranks never start


def settings_of_group(ranks: Ranks) -> dict[str, Any]:
    """The backend of the process group, and on CUDA this rank's GPU.

    With a GPU, NCCL connects the ranks at once: a wrong set-up fails here and not in the first step. Without one, NCCL guesses
    the GPU in collectives that have no tensor, such as a barrier.
    """
    if not torch.cuda.is_available():
        return {"backend": "gloo"}
    index = ranks.local_rank % torch.cuda.device_count()
    return {"backend": "cpu:gloo,cuda:nccl", "device_id": torch.device("cuda", index)}


def exit_as_rank_lost_on_abort() -> None:
    """Let this process exit with RANK_LOST instead of being killed by SIGABRT. Linux only.

    When a peer dies, a thread of torch's NCCL backend throws an error that nobody can catch, and the C++ runtime aborts
    the process; torch has printed NCCL's error by then. The main thread may wait for the GPU and can run no Python code.
    Therefore the signal's handler is the C library's `_exit` itself. It gets the signal's number, which is RANK_LOST.
    """
    if sys.platform == "linux":
        assert signal.SIGABRT == torchrun.RANK_LOST
        library = ctypes.CDLL(None)
        library.signal.argtypes, library.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        library.signal(signal.SIGABRT, ctypes.cast(library._exit, ctypes.c_void_p))


def print_traceback_and_exit(*error: Any) -> None:
    """An excepthook that ends the process at once. A normal exit would wait for threads that wait for other ranks."""
    sys.__excepthook__(*error)
    sys.stderr.flush()
    os._exit(1)


def open_stores(ranks: Ranks) -> tuple[dist.Store, dist.Store]:
    """The store of the process group, and the store in which the watchdogs exchange their status.

    torchrun keeps one store over all restarts. With this store as the group's, ranks would take entries of an earlier
    start for new ones and wait for dead processes (pytorch issue 135712). Therefore rank 0 opens a new store at each
    start, and writes its address and a random word to torchrun's store. The other ranks try the address until the store
    that answers holds this random word. The watchdogs need a store that outlives rank 0: they use torchrun's store,
    with the random word as prefix of their keys.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # another launcher: rank 0 serves the only store
        store = dist.TCPStore(host, port, ranks.size, is_master=ranks.is_rank_0, timeout=RENDEZVOUS_TIMEOUT)
        # A client handles one request at a time, so the watchdog's thread needs its own client.
        second_client = dist.TCPStore(host, port, is_master=False, timeout=RENDEZVOUS_TIMEOUT)
        return dist.PrefixStore("group", store), dist.PrefixStore("status", second_client)
    torchrun_store = dist.TCPStore(host, port, is_master=False, timeout=RENDEZVOUS_TIMEOUT)
    if ranks.is_rank_0:
        address = own_address(host, port)
        server = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=RENDEZVOUS_TIMEOUT)
        start = secrets.token_hex(8)
        server.set(start, "here")
        torchrun_store.set(ADDRESS_KEY, json.dumps([address, server.port, start]))
        return dist.PrefixStore("group", server), dist.PrefixStore(start, torchrun_store)
    deadline = time.monotonic() + RENDEZVOUS_TIMEOUT.total_seconds()
    while time.monotonic() < deadline:
        address, rank_0_port, start = json.loads(torchrun_store.get(ADDRESS_KEY))
        try:
            socket.create_connection((address, rank_0_port), timeout=5).close()  # torch retries a closed port for long
            client = dist.TCPStore(address, rank_0_port, is_master=False, timeout=datetime.timedelta(seconds=20))
            if client.check([start]):
                client.set_timeout(RENDEZVOUS_TIMEOUT)
                return dist.PrefixStore("group", client), dist.PrefixStore(start, torchrun_store)
        except (OSError, dist.DistError):
            time.sleep(0.2)
    raise RankLost(f"rank 0 did not open its store within {RENDEZVOUS_TIMEOUT}")


def own_address(host: str, port: int) -> str:
    """The address of this machine's network interface that reaches `host`."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        probe.connect(address)
        return probe.getsockname()[0]


@contextlib.contextmanager
def raising_rank_lost() -> Iterator[None]:
    """Raises RankLost in place of the errors that torch raises when another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        is_distributed = isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError))
        if is_distributed or LOST_CONTACT.search(str(error)):
            message = re.sub(r"^\[\S+\] ", "", str(error).strip().partition("\n")[0])  # without torch's source location
            raise RankLost(message.partition(". This is typically")[0]) from error
        raise


# ------------------------------------------------------------------------------------------------------------- watchdog
# A watchdog on each rank: when one rank stops making progress, the others report which one, and end.
#
# Without a watchdog, the other ranks would wait for a stuck rank without a message. A thread on each rank regularly
# writes the rank's status to torchrun's store: a heartbeat, the current step and the number of moves. A move is a call of
# `at` or `rest`. When a rank has made no move within the time limit, its watchdog reads the status of all ranks. A rank
# whose status no longer changes has died or was stopped. If there is no such rank, the others wait for the one with the
# fewest moves.


class Watchdog:
    """The trainer reports its progress here. With a store, this rank and the next one are watched.

    status_store: outlives the ranks, and holds no status of earlier starts; None for a single process.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, status_store: dist.Store | None = None, minutes: float = 0
    ) -> None:
        self.rank, self.size, self.status_store, self.limit_s = rank, size, status_store, 60 * minutes
        self.interval_s = min(2.0, self.limit_s / 8)
        self.moves, self.step, self.doing = 0, 0, "starting"
        self.moved_at: float | None = None  # time.monotonic(); None: no limit
        self.finished = threading.Event()
        if status_store is not None:
            status_store.set_timeout(datetime.timedelta(seconds=max(10, self.limit_s / 4)))
            self.thread = threading.Thread(target=self.watch, daemon=True)
            self.thread.start()

    def at(self, step: int, doing: str) -> None:
        """Report that the main thread begins `doing`. The time until the next call of `at` or `rest` is limited."""
        self.moves, self.step, self.doing, self.moved_at = self.moves + 1, step, doing, time.monotonic()

    def rest(self, step: int, doing: str) -> None:
        """Like `at`, but without a time limit until the next call."""
        self.moves, self.step, self.doing, self.moved_at = self.moves + 1, step, doing, None

    def finish(self) -> None:
        self.finished.set()

    # ---------------------------------------------------------------------------------------------- in the thread

    def watch(self) -> None:
        """Watch this rank and the next one only, so that the store can serve many ranks."""
        beats, neighbour = 0, (self.rank + 1) % self.size
        neighbour_status, neighbour_changed_at = None, time.monotonic()
        # The first status is written at once, because a rank may die early.
        while beats == 0 or not self.finished.wait(self.interval_s):
            beats += 1
            try:
                self.write_status(beats)
                status = self.read_status([neighbour])[0]
                if status != neighbour_status:
                    neighbour_status, neighbour_changed_at = status, time.monotonic()
                is_stuck = self.moved_at is not None and time.monotonic() - self.moved_at > self.limit_s
                if is_stuck or time.monotonic() - neighbour_changed_at > self.limit_s:
                    moves, diagnosis = self.moves, self.diagnose(beats)
                    if not is_stuck or self.moves == moves:  # the main thread may have moved on at the last moment
                        self.end(f"step {self.step}: {diagnosis}")
            except dist.DistError as error:  # torchrun, or the machine that it runs on, is gone
                if time.monotonic() - neighbour_changed_at > self.limit_s:
                    self.end(f"step {self.step}: torchrun's store does not answer: {error}")

    def write_status(self, beats: int) -> None:
        status = {"beats": beats, "moves": self.moves, "step": self.step, "doing": self.doing}
        self.status_store.set(f"rank {self.rank}", json.dumps(status))

    def read_status(self, ranks: Iterable[int]) -> list[dict[str, Any] | None]:
        keys = [f"rank {rank}" for rank in ranks]
        store = self.status_store
        return [json.loads(store.get(key)) if store.check([key]) else None for key in keys]

    def diagnose(self, beats: int) -> str:
        """Name the ranks that the others wait for, from two readings of every rank's status."""
        earlier = self.read_status(range(self.size))
        for beat in range(3):
            time.sleep(self.interval_s)
            self.write_status(beats + 1 + beat)
        now = self.read_status(range(self.size))
        silent = [r for r, (old, new) in enumerate(zip(earlier, now, strict=True)) if new is None or old == new]
        fewest_moves = min(status["moves"] for status in now if status is not None)
        behind = [r for r, status in enumerate(now) if status is not None and status["moves"] == fewest_moves]
        if silent:
            return "; ".join(f"rank {rank} does not answer, {last_seen(now[rank])}" for rank in silent)
        if len(behind) < self.size:
            return "; ".join(f"rank {rank} is stuck, {last_seen(now[rank])}" for rank in behind)
        return f"all ranks are stuck, {last_seen(now[self.rank])}: the network or a device hangs"

    def end(self, diagnosis: str) -> None:
        """Print the diagnosis on one rank only, and end the process, because nothing can wake the main thread."""
        if self.finished.is_set():
            return
        hint = "raise parallel.watchdog_minutes if the step is only slow"
        message = f"error: {diagnosis} (no progress for {self.limit_s:.0f} s); {hint}"
        try:
            is_first = self.status_store.add("printed", 1) == 1
        except dist.DistError:
            is_first = True
        self.leave(message if is_first else diagnosis)

    def leave(self, message: str) -> None:
        if message.startswith("error: "):
            print(message, file=sys.stderr, flush=True)
        os._exit(torchrun.RANK_LOST)


def last_seen(status: dict[str, Any] | None) -> str:
    return "and never has" if status is None else f"last seen in step {status['step']}: {status['doing']}"
