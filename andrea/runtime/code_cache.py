"""Folders of compiled code that only this user can write to. Whoever can write to such a folder runs code as this user."""

import atexit
import contextlib
import getpass
import os
import re
import shutil
import tempfile
from pathlib import Path
from stat import S_ISVTX

from andrea.runtime.system import WINDOWS, user_id

TORCH_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def cache_folder() -> Path | None:
    """This user's folder for our compiled libraries. None without a home directory, or if another user can write there."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "andrea"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        if cache.is_absolute() and about.st_uid == user_id() and about.st_mode & 0o022:  # made by an earlier version
            folder.chmod(0o700)
        return folder if cache.is_absolute() and is_private(folder) else None
    except (OSError, RuntimeError):  # RuntimeError: neither HOME nor an entry in the system's list of users
        return None


def is_private(folder: Path) -> bool:
    """Whether no other user (besides root) can write to `folder`, or put another one in its place. Raises OSError."""
    if WINDOWS:  # where modes say nothing; these folders are in the user's profile, which others cannot write to
        return True
    real = folder.resolve()
    about = real.stat()
    if {folder.lstat().st_uid, about.st_uid} != {user_id()} or about.st_mode & 0o022:
        return False
    modes = [parent.stat().st_mode for parent in {*folder.absolute().parents, *real.parents}]
    return all(mode & S_ISVTX or not mode & 0o002 for mode in modes)


def use_private_torch_cache() -> None:
    """Make torch.compile keep its code and its pickles in a folder of this user alone.

    torch's default is a folder with a predictable name in the shared temporary folder. Another user may have made it
    first, and torch would load what that user has put there. A folder that the user has chosen with
    TORCHINDUCTOR_CACHE_DIR stays.
    """
    if os.environ.get(TORCH_VARIABLE) in (None, str(default_torch_folder())):  # torch sets the variable when imported
        os.environ[TORCH_VARIABLE] = str(torch_cache_folder() or temporary_folder())


def torch_cache_folder() -> Path | None:
    """torch's default folder, or if that one is not private, a folder in `cache_folder`; None if neither is."""
    own = cache_folder()
    for folder in [default_torch_folder(), *([own / "torchinductor"] if own else [])]:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            if is_private(folder):
                return folder
    return None


def default_torch_folder() -> Path:
    """The folder that torch would use, as named in torch/_inductor/runtime/cache_dir_utils.py."""
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):  # no entry in the system's list of users
        user = f"uid_{user_id()}"
    return Path(tempfile.gettempdir()) / ("torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def temporary_folder() -> Path:
    """A new folder for this process, removed at its end."""
    folder = tempfile.mkdtemp(prefix="torchinductor-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
