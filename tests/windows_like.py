"""`python windows_like.py '[["train", …], ["sample", …]]'` runs commands in a Python that lacks what Windows lacks.

It also refuses what Windows refuses: opening a folder, flushing a file that is open for reading only, making links, and
renaming, replacing or removing what this process has open or mapped. Mandatory locks, backslashes in paths, "\r\n" and the
processes of Windows are not imitated.
"""

from __future__ import annotations

# All that looks at the system when it is imported is imported before the system changes.
import asyncio  # noqa: F401
import ctypes
import errno
import fcntl
import json
import mmap
import multiprocessing.popen_spawn_posix
import multiprocessing.resource_tracker  # noqa: F401
import os
import platform
import shutil
import signal
import struct
import subprocess  # noqa: F401
import sys
import types
from pathlib import Path

import hydra  # noqa: F401
import rich.console  # noqa: F401
import tokenizers  # noqa: F401
import torch._dynamo  # noqa: F401
import torch._inductor.config  # noqa: F401
import transformers.models.auto.modeling_auto  # noqa: F401

platform.uname()
real_open, real_fsync, F_OFD_SETLK = os.open, os.fsync, 37


def locking(descriptor: int, mode: int, n_bytes: int) -> None:
    """msvcrt's, for an unblocking lock: it belongs to the open file."""
    kind = fcntl.F_RDLCK if access(descriptor) == os.O_RDONLY else fcntl.F_WRLCK
    try:
        fcntl.fcntl(descriptor, F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_CUR, 0, n_bytes, 0))
    except OSError as error:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from error


def access(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE


def open_file(path, flags, mode=0o777, *, dir_fd=None):
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return real_open(path, flags, mode, dir_fd=dir_fd)


def fsync(descriptor) -> None:
    if access(descriptor if isinstance(descriptor, int) else descriptor.fileno()) == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    real_fsync(descriptor)


def held_open() -> set[str]:
    """The paths of files that this process has open or mapped."""
    found = {line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if " /" in line}
    for each in os.listdir("/proc/self/fd"):
        if os.path.lexists(link := f"/proc/self/fd/{each}"):
            found.add(os.readlink(link))
    return found


def refusing(call, replaces: bool = False):
    def wrapped(*paths, **options):
        real = [os.path.realpath(path) for path in paths]
        is_folder = os.path.isdir(real[-1])
        taken = [held for held in held_open() for path in real if held == path or held.startswith(path + os.sep)]
        if taken or (len(real) == 2 and os.path.lexists(real[1]) and (is_folder or not replaces)):
            raise PermissionError(errno.EACCES, f"open or existing: {taken or real[1]}", real[0])
        return call(*paths, **options)

    return wrapped


def no_links(*given, **options) -> None:
    raise OSError(errno.EPERM, "a required privilege is not held by the client")


class Library(ctypes.CDLL):
    def __init__(self, name, *given, **options) -> None:
        if name is None:
            raise TypeError("bad argument type for built-in operation")
        super().__init__(name, *given, **options)


MISSING = {
    os: "fork geteuid getuid getgid setsid killpg getpgid sysconf sched_getaffinity sched_setaffinity pread pwrite mkfifo "
    "O_NOFOLLOW O_NONBLOCK O_DIRECTORY O_CLOEXEC uname statvfs fchmod chown getloadavg",
    signal: "SIGHUP SIGUSR1 SIGUSR2 SIGALRM SIGXCPU SIGSTOP SIGCONT SIGPIPE SIGCHLD",
    mmap: "MAP_PRIVATE MAP_ANONYMOUS MAP_SHARED PROT_READ PROT_WRITE MADV_HUGEPAGE",
}
for module, names in MISSING.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
os.open, os.fsync, os.symlink, ctypes.CDLL = open_file, fsync, no_links, Library
os.rename, os.replace = refusing(os.rename), refusing(os.replace, replaces=True)
os.unlink, os.remove = refusing(os.unlink), refusing(os.remove)
shutil._use_fd_functions = False  # rmtree opens no folder on Windows
sys.platform = "win32"

from andrea import __main__ as andrea  # noqa: E402
from andrea.cli.exit_code import run  # noqa: E402

if __name__ == "__main__":
    for words in json.loads(sys.argv[1]):
        try:
            run(andrea.main, words)
        except SystemExit as end:
            if end.code:
                raise
