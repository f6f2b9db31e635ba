"""What Windows lacks or does differently, each in two forms. The form for Windows is tested by an emulation only.

`read_at`, in text/shards.py, has two forms too."""

import errno
import mmap
import os
import signal
import sys
import time
from pathlib import Path
from typing import TextIO

WINDOWS = sys.platform == "win32"
if WINDOWS:
    import msvcrt

    resource = None  # no limits, and no account of what is used
else:
    import fcntl
    import resource  # noqa: F401 (at the start: with memory gone it can no longer be loaded)

HANG_UP = () if WINDOWS else (signal.SIGHUP,)  # the terminal is gone
LOCKED_BYTE = 1 << 30  # Windows lets no other process read a locked byte; this one is beyond the file's end
POLL_S = 0.1
RENAMES = 30  # attempts: a program that looks at each new file closes it within a second or two


def user_id() -> int:
    """As in `st_uid` of this user's files, which is 0 on Windows."""
    return 0 if WINDOWS else os.geteuid()


def private_memory(n_bytes: int) -> mmap.mmap:
    """Raises MemoryError, which the commands turn into a line that says what to do."""
    try:
        return (
            mmap.mmap(-1, n_bytes) if WINDOWS else mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        )
    except OSError as error:
        raise MemoryError(f"{n_bytes} bytes: {error.strerror}") from error


def open_no_link(path: str, flags: int) -> int:
    """The `opener` of a file that others may have replaced by a link, or by a pipe that blocks. Raises OSError."""
    if not WINDOWS:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if os.path.islink(path):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    return os.open(path, flags, 0o666)


def flush_to_disk(path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to the disk. Raises OSError."""
    if WINDOWS and path.is_dir():
        return  # Windows opens no folder
    descriptor = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)  # Windows flushes only what may be written
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Give a file or folder the name `target`; a file there is replaced. Raises OSError.

    On Windows a file that any program has open cannot be renamed or replaced, nor can the folders above it be renamed.
    Virus scanners and indexers open new files for a moment, so the call is repeated there.
    """
    for _ in range(RENAMES if WINDOWS else 1):
        try:
            return os.replace(source, target)
        except PermissionError as error:
            refused = error
            if WINDOWS:
                time.sleep(POLL_S)
    raise refused


def lock(file: TextIO, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file until it is closed. Raises BlockingIOError if another process holds the lock, unless `wait`."""
    if not WINDOWS:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        return
    descriptor = file.fileno()
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    while True:
        os.lseek(descriptor, LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            return
        except PermissionError as error:
            if not wait:
                raise BlockingIOError(*error.args) from None
        finally:
            os.lseek(descriptor, position, os.SEEK_SET)
        time.sleep(POLL_S)


def close_before_rename(file: TextIO) -> None:
    """Close, and so unlock, a lock file that is about to be removed, or whose folder is about to be renamed: on Windows only."""
    if WINDOWS:
        file.close()
