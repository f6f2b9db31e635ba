"""A function in a process of its own, within limits: for libraries that somebody's file can make abort, hang or fill the memory."""

import io
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from multiprocessing.connection import Connection
from typing import Any, final

from andrea.config import UserError
from andrea.runtime.files import StorageFailed, size_words
from andrea.runtime.free_and_peak_memory import is_out_of_memory
from andrea.runtime.system import resource

IS_LINUX = sys.platform == "linux"


def in_own_process(what: str, function: Callable[..., Any], *given: Any, busy_s: float, more_bytes: int) -> Any:
    """What `function(*given)` returns or raises; what it prints is printed here.

    what: it reads, for messages. busy_s: of processor time that it may take. more_bytes: of memory that it may take beyond
    that of this process (on Linux). Raises UserError if it takes more, or if its process dies.
    """
    context = multiprocessing.get_context("fork" if IS_LINUX else "spawn")
    here, there = context.Pipe(duplex=False)
    has_threads = IS_LINUX and len(os.listdir("/proc/self/task")) > 1  # of OpenMP, which a forked process waits for
    process = context.Process(
        target=answer, args=(there, function, given, busy_s, more_bytes, has_threads), daemon=True
    )
    process.start()
    there.close()
    try:
        while (message := here.recv())[0] == "printed":
            print(message[1], end="", flush=True)
    except EOFError:
        process.join()
        code = process.exitcode or 0
        reason = "it ended the process that read it" if code >= 0 else signal.Signals(-code).name
        if code == -getattr(signal, "SIGXCPU", 0):
            reason = f"it keeps the processor busy for more than {busy_s:.0f} s"
        raise UserError(f"{what} cannot be read ({reason}); copy it again") from None
    finally:
        process.kill()
        process.join()
        here.close()
    if message[0] == "no memory":
        raise UserError(f"{what} cannot be read in {size_words(more_bytes)} of memory; copy it again")
    if message[0] == "raised":
        raise message[1]
    return message[1]


@final
class Printed(io.TextIOBase):
    """Standard output whose text goes to the other end of a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def write(self, text: str) -> int:
        self.pipe.send(("printed", text))
        return len(text)


def answer(
    pipe: Connection, function: Callable[..., Any], given: Any, busy_s: float, more_bytes: int, has_threads: bool
) -> None:
    """Call the function within the limits, and send what comes of it."""
    if has_threads:
        import torch

        torch.set_num_threads(1)
    limit(busy_s, more_bytes)
    try:
        with redirect_stdout(Printed(pipe)):
            message = ("returned", function(*given))
    except (UserError, StorageFailed, OSError, ImportError, KeyboardInterrupt) as error:
        message = ("raised", error)
    except BaseException as error:  # a panic of Rust cannot be sent
        message = ("raised", RuntimeError(traceback.format_exc()))
        if is_out_of_memory(error):
            message = ("no memory", None)
    pipe.send(message)


def limit(busy_s: float, more_bytes: int) -> None:
    """Limit this process. Windows has no such limits, macOS none of memory."""
    if resource is None:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime + busy_s)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if IS_LINUX:
        with open("/proc/self/statm", encoding="ascii") as stream:
            pages = int(stream.read().split()[5])  # of data and stacks
        most = pages * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
