"""Joins and leaves torch.distributed's process group, also after torchrun has restarted the ranks, and watches the ranks."""

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
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from andrea.runtime import torchrun
from andrea.runtime.torchrun import RankLost
from andrea.training.parallel.strategy import Ranks

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
    watchdog = StoreWatchdog(ranks.rank, ranks.size, status_store, watchdog_minutes)
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
    """The trainer reports its progress here. This base class, for a single process, does nothing."""

    def at(self, step: int, doing: str) -> None:
        """Report that the main thread begins `doing`. The time until the next call of `at` or `rest` is limited."""

    def rest(self, step: int, doing: str) -> None:
        """Like `at`, but without a time limit until the next call."""

    def finish(self) -> None:
        """Stop watching."""


class StoreWatchdog(Watchdog):
    """Watches this rank and the next one. status_store: outlives the ranks, and holds no status of earlier starts."""

    def __init__(self, rank: int, size: int, status_store: dist.Store, minutes: float) -> None:
        self.rank, self.size, self.status_store, self.limit_s = rank, size, status_store, 60 * minutes
        self.status_store.set_timeout(datetime.timedelta(seconds=max(10, self.limit_s / 4)))
        self.interval_s = min(2.0, self.limit_s / 8)
        self.moves, self.step, self.doing = 0, 0, "starting"
        self.moved_at: float | None = None  # time.monotonic(); None: no limit
        self.finished = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def at(self, step: int, doing: str) -> None:
        self.moves, self.step, self.doing, self.moved_at = self.moves + 1, step, doing, time.monotonic()

    def rest(self, step: int, doing: str) -> None:
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
        self.leave(message if self.is_first_to_print() else diagnosis)

    def leave(self, message: str) -> None:
        if message.startswith("error: "):
            print(message, file=sys.stderr, flush=True)
        os._exit(torchrun.RANK_LOST)

    def is_first_to_print(self) -> bool:
        try:
            return self.status_store.add("printed", 1) == 1
        except dist.DistError:
            return True


def last_seen(status: dict[str, Any] | None) -> str:
    return "and never has" if status is None else f"last seen in step {status['step']}: {status['doing']}"
