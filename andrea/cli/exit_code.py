"""Turns an exception of a command into one line and an exit code."""

import os
import sys
import time
from collections.abc import Callable

from andrea.config import UserError
from andrea.runtime import shared_cores, torchrun
from andrea.runtime.files import REMEDIES, StorageFailed
from andrea.runtime.free_and_peak_memory import is_out_of_memory
from andrea.runtime.streams import printable, unfailing_output

LONGEST_LINE = 2000  # characters of a message
MORE_MEMORY = (
    "free some memory, raise the limit of this process (ulimit -v), or use less: when training, train.micro_batch=1 "
    "and a smaller model=…; when sampling, a smaller num_samples=…; when serving, a smaller max_running=…"
)
TEMPORARY = "free some space on their disk, or set the environment variable TMPDIR to a writable folder"


def run(main: Callable[[list[str]], int], argv: list[str]) -> None:
    """Run `main(argv)` and exit with its exit code; a UserError becomes one line and exit code 2.

    An exit code that a restart cannot cure is recorded, so that ranks restarted by torchrun exit with it at once. A
    command continues if its output cannot be written.
    """
    shared_cores.limit_spins()
    with unfailing_output():
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may not be UTF-8
        if (code := torchrun.recorded_exit_code()) is not None:
            sys.exit(code)
        code = exit_code_of(main, argv)
        torchrun.record_exit_code(code)
        sys.stdout.flush()
        sys.stderr.flush()
        if code and torchrun.has_many_ranks():  # a normal exit would wait for threads and GPUs that wait for lost ranks
            os._exit(code)
        sys.exit(code)


def exit_code_of(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """The exit code of `main(argv)`. Only rank 0 prints an error that all ranks have in common."""
    try:
        return main(argv)
    except UserError as error:
        if not torchrun.is_rank_0():
            time.sleep(torchrun.GRACE_SECONDS)
        if not isinstance(error, torchrun.ErrorOfRank0) or torchrun.is_rank_0():
            print(f"error: {torchrun.rank_prefix()}{one_line(str(error))}", file=sys.stderr)
        return 2
    except StorageFailed as error:
        if error.is_told_by_another_rank:
            time.sleep(torchrun.GRACE_SECONDS)  # torchrun ends all ranks as soon as one has ended
        else:
            print(f"error: {torchrun.rank_prefix()}{one_line(str(error))}; {error.advice}", file=sys.stderr)
        return 5
    except OSError as error:
        is_temporary = "temporary directory" in str(error.strerror)  # of Python's tempfile, which torch uses
        if not is_temporary and error.errno not in REMEDIES:
            raise
        reason = error.strerror if is_temporary else f"{error.filename or 'a file'} cannot be used: {error.strerror}"
        remedy = TEMPORARY if is_temporary else REMEDIES[error.errno]
        print(f"error: {torchrun.rank_prefix()}{one_line(reason)}; {remedy}", file=sys.stderr)
        return 5
    except torchrun.RankLost as error:
        if torchrun.is_rank_0():
            hint = "if --max-restarts allows it, torchrun restarts all ranks, and resume=auto continues the run"
            print(f"error: another rank was lost: {one_line(str(error))}; {hint}", file=sys.stderr)
        return torchrun.RANK_LOST
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = one_line(str(error).partition("\n")[0])[:200]
        shown = f"out of memory ({reason})" if reason else "out of memory"  # Python's own MemoryError says nothing
        print(f"error: {torchrun.rank_prefix()}{shown}; {MORE_MEMORY}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def one_line(message: str) -> str:
    """The message on one line: unprintable characters are escaped, and a very long message loses its middle."""
    if len(message) > LONGEST_LINE:
        message = f"{message[: LONGEST_LINE // 2]} … {message[-LONGEST_LINE // 2 :]}"
    return printable(message)
