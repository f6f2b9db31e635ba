"""The error of a checkpoint that cannot be used."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from andrea.config import UserError
from andrea.runtime.files import reading

OF_THE_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # with these errors every checkpoint looks damaged


class Damaged(UserError):
    """The folder is not a complete checkpoint of this project. The message names the folder or file and the fault."""

    @property
    def may_be_whole(self) -> bool:
        """Whether it could only not be read now: it may be readable the next time."""
        cause = self.__cause__
        return isinstance(cause, OSError) and not isinstance(cause, (FileNotFoundError, NotADirectoryError))


@contextmanager
def opening(path: Path) -> Iterator[None]:
    """Context in which the checkpoint at `path` is read: an OSError becomes Damaged, with its reason.

    Raises StorageFailed if this process can open no more files, which is not a fault of the checkpoint.
    """
    try:
        yield
    except OSError as error:
        if error.errno in OF_THE_PROCESS:
            with reading(path):
                raise
        name = f"{Path(error.filename).name}: " if error.filename else ""
        raise Damaged(
            f"{path} is not a complete checkpoint of this project, or cannot be read: {name}{error.strerror or error}; "
            f"name another with checkpoint=…"
        ) from error
