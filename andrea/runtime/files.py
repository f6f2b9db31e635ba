"""Atomic writes, file locks and sha256 hashes of files, for the whole package. Imports neither torch nor numpy.

A file or a folder is written under a staging name next to its final one, flushed to the disk, and renamed. A crash leaves
the old content or the new content. It may also leave a staging file, which no reader opens; `remove_unfinished` removes
it.
"""

import errno
import hashlib
import itertools
import json
import os
import platform
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG
from typing import Any, TextIO

from andrea.config import UserError
from andrea.runtime.system import WINDOWS, close_before_rename, flush_to_disk, lock, open_no_link, rename

UNFINISHED = ".writing-"  # the first characters of every staging name
# What a user can do when the machine refuses to read or write, by the error's number
REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or raise the quota",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it readable and writable"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
    **dict.fromkeys((errno.EIO, errno.ESTALE), "check the disk"),
}
RESUME = "continue with resume=auto"


class StorageFailed(Exception):
    """Reading or writing failed. The message names the path. Files that were complete before are still complete.

    advice: what the user can do now, for the end of the line. is_told_by_another_rank: whether it failed there, and this rank
    ends without a word.
    """

    is_told_by_another_rank = False

    def __init__(self, message: str, advice: str = f"check the disk, then {RESUME}") -> None:
        super().__init__(message)
        self.advice = advice


class Locked(Exception):
    """Another process holds the lock file. The message names the process, or is `unknown`."""


@contextmanager
def storing(path: Path, of_run: bool = True) -> Iterator[None]:
    """Context in which an OSError becomes StorageFailed, with `path` in its message. of_run: a run writes the file."""
    try:
        yield
    except OSError as error:
        message, remedy = f"{path} cannot be written: {error.strerror or error}", REMEDIES.get(error.errno or 0)
        missing = [folder for folder in path.absolute().parents if not folder.exists()]
        if missing:
            message += f": the folder {missing[-1]} was removed or renamed"
            advice = f"move it back and {RESUME}, or start a new run"
        else:
            advice = f"earlier checkpoints are intact; {remedy or 'check the disk'}, then {RESUME}"
        raise StorageFailed(message, advice if of_run else f"{remedy or 'choose another place'}") from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Context in which an OSError becomes StorageFailed: `path` exists, and cannot be read."""
    try:
        yield
    except OSError as error:
        is_denied = error.errno in (errno.EACCES, errno.EPERM)
        remedy = "make it readable" if is_denied else REMEDIES.get(error.errno or 0, "check the disk")
        raise StorageFailed(f"{path} cannot be read: {error.strerror or error}", f"{remedy}, then try again") from error


@contextmanager
def reporting_unusable(folder: Path) -> Iterator[None]:
    """Context in which an OSError becomes a UserError that names runs_dir."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"runs_dir: {folder} cannot be written ({error.strerror}); set runs_dir=… to a writable folder"
        ) from None


def staging_path(path: Path) -> Path:
    """A new random name next to `path`. A process id is not unique, because two containers may use the same one."""
    return path.with_name(f"{UNFINISHED}{path.name[:32]}-{secrets.token_hex(4)}")  # most systems allow 255 bytes


def unused_path(path: Path) -> Path:
    """`path`, or if it exists, the first of path-2, path-3, … that does not. For names that hold the time in seconds."""
    names = (path.with_name(f"{path.name}-{number}") if number > 1 else path for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def remove_unfinished(folder: Path) -> None:
    """Remove the staging files and folders that a crash left in `folder`. No other process may be writing there."""
    for path in folder.glob(f"{UNFINISHED}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a staging path, then flushes the file and renames it to `path`, unless the block raises. Raises OSError."""
    if path.exists() and not path.is_file():  # such as /dev/null, in whose place root would put a file
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    staging = staging_path(path)
    try:
        yield staging
        flush_to_disk(staging)
        rename(staging, path)
        flush_to_disk(path.parent)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Replace the content of `path` atomically by `text` in UTF-8. Raises OSError."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Replace the content of `path` atomically. Raises OSError."""
    with replacing(path) as staging:
        staging.write_bytes(content)


def make_folder(folder: Path) -> None:
    """Make the folder and those above it, where they are missing, and flush their names to the disk. Raises OSError."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        flush_to_disk(made.parent)


def check_writable(out: Path) -> None:
    """Raises UserError if `out` cannot be written. Called before anything is computed."""
    folder = out.parent
    if not folder.is_dir():
        raise UserError(f"out={out}: there is no folder {str(folder)!r}; create it, or name another file with out=…")
    if (out.exists() and not out.is_file()) or not os.access(out if out.exists() else folder, os.W_OK):
        raise UserError(f"out={out} cannot be written; name another file with out=…")


def flush_files_of(folder: Path) -> None:
    """Flush the files in `folder`, which has no folders in it, and the list of their names. Raises OSError."""
    for path in (*folder.iterdir(), folder):
        flush_to_disk(path)


def publish_folder(staging: Path, folder: Path) -> None:
    """Give a folder of files its final name, when both would outlast a loss of power. Raises OSError."""
    flush_files_of(staging)
    rename(staging, folder)
    flush_to_disk(folder.parent)


def read_plain_file(path: Path, most_bytes: int) -> bytes:
    """The content of a file that may be somebody else's. Raises OSError, also if it is larger, or a pipe or a device."""
    about = path.stat()
    if not S_ISREG(about.st_mode) or about.st_size > most_bytes:
        raise OSError(errno.EINVAL, f"it is not a regular file of at most {size_words(most_bytes)}", str(path))
    return path.read_bytes()


def from_json(content: bytes | str) -> Any:
    """The value of JSON. Raises ValueError, also if it is nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def lines_of(text: str) -> list[str]:
    r"""The lines of `text`. Only "\n" ends a line; a "\r" before it is dropped. A last empty line is not counted.

    str.splitlines and text-mode files also end a line at U+0085, U+2028, a lone "\r" and others, which a user's text
    may hold within a line.
    """
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def size_words(n_byte: float) -> str:
    """A number of bytes for people: 312 bytes, 5.6 kB, 20 kB, 1.2 MB."""
    if n_byte < 1000:
        return f"{n_byte:.0f} byte{'s' * (n_byte != 1)}"
    scale, unit = next(((s, u) for s, u in ((1e3, "kB"), (1e6, "MB")) if n_byte < 999.5 * s), (1e9, "GB"))
    number = n_byte / scale
    return f"{number:.1f} {unit}" if number < 9.95 else f"{number:,.0f} {unit}"


def file_sha256(path: Path) -> str:
    """The sha256 of the file's content as 64 hexadecimal digits."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock file `path` with `exclusive_lock`. False if the file is missing or unreadable."""
    try:
        with open(path, encoding="utf-8", opener=open_no_link) as file:
            lock(file, shared=True)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@contextmanager
def exclusive_lock(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[TextIO]:
    """Lock the file `path`, and write into it which process holds it. The system frees the lock when the process dies.

    Yields the open file, for `close_before_rename`.

    on_wait: called before waiting for another holder. Without on_wait, raises Locked instead of waiting. Raises OSError
    if the file is a link or cannot be written.
    """
    while True:
        with open(path, "a+", encoding="utf-8", opener=open_no_link) as file:
            try:
                lock(file)
            except BlockingIOError:
                if on_wait is None:
                    file.seek(0)
                    raise Locked(file.read().strip() or "unknown") from None
                on_wait()
                lock(file, wait=True)
            try:
                is_current = WINDOWS or os.path.samestat(os.fstat(file.fileno()), path.stat())
            except FileNotFoundError:
                is_current = False
            if not is_current:
                continue  # the last holder has removed the file: a lock on it would exclude nobody
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}\n")
            file.flush()
            try:
                yield file
            finally:
                close_before_rename(file)
                with suppress(OSError):  # an error here would hide the error of the block
                    path.unlink(missing_ok=True)
            return
