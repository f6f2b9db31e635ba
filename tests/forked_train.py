"""train.py in a fork of this process, for programs that start it hundreds of times: torch is then loaded only once."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from typing import IO, Any

from andrea.cli.commands import train
from andrea.cli.exit_code import run
from andrea.insight.lens import lens  # noqa: F401 (loaded before the fork, with all that training needs)
from andrea.training import start  # noqa: F401 (likewise)


class ForkedTrain:
    """The process of `train.py WORDS`, in a session of its own, without the interpreter's start and end.

    The process that forks must run one thread only. The names are those of subprocess.Popen. stdout, stderr: open files
    or descriptors. environment: is added to that of this process. prepare: is called in the fork first.
    main: the command.
    """

    def __init__(
        self,
        words: list[str],
        stdout: int | IO[Any],
        stderr: int | IO[Any],
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
        main: Callable[[list[str]], int] = train,
    ) -> None:
        self.returncode: int | None = None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or the fork would write it again
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for descriptor, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, stdout), (2, stderr)):
                os.dup2(file if isinstance(file, int) else file.fileno(), descriptor)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            os.environ.update(environment or {})
            sys.argv, tempfile.tempdir = ["train.py", *words], None
            if prepare:
                prepare()
            run_and_leave(main, words)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def run_and_leave(main: Callable[[list[str]], int], words: list[str]) -> None:
    """What train.py does, in the fork, which must not go on with the program of its parent."""
    code: Any = 1
    try:
        run(main, words)
    except SystemExit as left:
        code = left.code
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code or 0)
