"""Files: the only atomic writers, file locks and sha256 hashes of files in the package. Imports neither torch nor numpy.

A file or a folder is written under a staging name next to its final one, flushed to the disk, and renamed. A crash leaves
the old content or the new one, and perhaps a staging name, which no reader opens and `remove_unfinished` removes.
"""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNFINISHED = ".writing-"  # the first characters of every staging name


class StorageFailed(Exception):
    """The disk refused a write; the message names the path. Files that were complete before are still complete."""


class Locked(Exception):
    """Another process holds the lock file; the message says which, as far as the file tells."""


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Raises StorageFailed, with `path` in its message, where the block raises OSError."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(f"{path} cannot be written: {error.strerror or error}") from error


def staging_path(path: Path) -> Path:
    """A new name next to `path`, on the same file system. Random: processes of two containers may have equal ids."""
    return path.with_name(f"{UNFINISHED}{path.name[:32]}-{secrets.token_hex(4)}")  # most systems allow 255 bytes


def remove_unfinished(folder: Path) -> None:
    """Remove the staging files and folders that a crash left in `folder`, which nobody else may be writing to."""
    for path in folder.glob(f"{UNFINISHED}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a staging path for the block to write; then flushes the file and renames it to `path`. Raises OSError.

    Where the block raises, the staging file is removed and `path` is as before.
    """
    staging = staging_path(path)
    try:
        yield staging
        flush_to_disk(staging)
        os.replace(staging, path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Replace the content of `path` as a whole by `text` in UTF-8. Raises OSError."""
    with replacing(path) as staging:
        staging.write_text(text, encoding="utf-8")


def flush_to_disk(path: Path) -> None:
    """Return when the file's content, or the folder's list of names, is on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """The sha256 of the file's content as 64 hexadecimal digits."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def exclusive_lock(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold `path`, a small file that names the holder, for one process at a time; the system frees it when that one dies.

    on_wait: called before waiting for another holder. Without it, raises Locked. Raises OSError where the file cannot be
    written.
    """
    import fcntl  # not on Windows

    while True:
        with open(path, "a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if on_wait is None:
                    file.seek(0)
                    raise Locked(file.read().strip() or "unknown") from None
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            if not (path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())):
                continue  # the last holder has removed the file: a lock on it would exclude nobody
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}\n")
            file.flush()
            try:
                yield
            finally:
                with suppress(OSError):  # an error here would hide the error of the block
                    path.unlink(missing_ok=True)
            return
