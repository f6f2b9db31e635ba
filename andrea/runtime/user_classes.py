"""Imports a user's own classes, named by a dotted path in a configuration (my_module.MyMLP).

Importing a module runs its code. Therefore a path is imported only inside the context `allowing`, which a command
enters with the paths on its own command line. A path that comes only from a checkpoint is rejected, unless the command
line has trust=true.
"""

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from andrea.config import UserError
from andrea.runtime.files import file_sha256

ALLOWED: ContextVar[frozenset[str] | None] = ContextVar("ALLOWED", default=frozenset())  # dotted paths; None: all


@contextlib.contextmanager
def allowing(paths: Iterable[str], trust: bool = False) -> Iterator[None]:
    """Context in which `paths` may be imported, or every path with `trust`. The earlier permission returns on exit."""
    before = ALLOWED.set(None if trust else frozenset(paths))
    try:
        yield
    finally:
        ALLOWED.reset(before)


def is_own(name: str) -> bool:
    """Whether a configuration's value names a user's class, and not a part of this package."""
    return "." in name


def own_class(key: str, path: str, base: type) -> type:
    """The class at the dotted path, a subclass of `base`. Raises UserError, which names `key`; not for errors in the module."""
    found = own_object(key, path)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"{key}={path} is {found!r}; it must be a subclass of {base.__module__}.{base.__name__}")
    return found


def own_function(key: str, path: str) -> Callable[..., Any]:
    """The function at the dotted path, as `own_class`."""
    found = own_object(key, path)
    if not callable(found):
        raise UserError(f"{key}={path} is {found!r}; it must be a function")
    return found


def own_object(key: str, path: str) -> Any:
    allowed = ALLOWED.get()
    if allowed is not None and path not in allowed:
        raise UserError(
            f"{key}={path} comes from a checkpoint or a saved configuration and is not imported, because importing runs "
            f"its code; if you trust the code, add trust=true (for training, {key}={path} on the command line is enough)"
        )
    module_name, _, name = path.rpartition(".")
    found = getattr(imported(key, path, module_name), name, None)
    if found is None:
        raise UserError(f"{key}={path}: {name} is not in the module {module_name}")
    return found


def imported(key: str, path: str, module_name: str) -> ModuleType:
    """Import the module, also from the working directory, as `python -m` does. Raises UserError."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        places = f"the working directory {os.getcwd()} and where Python finds installed packages"
        raise UserError(f"{key}={path} cannot be imported: {error}; modules are searched in {places}") from None


def source_sha256(key: str, path: str) -> str | None:
    """sha256 of the source file of the class's module; None for a class without a file, as in a notebook."""
    try:
        file = inspect.getsourcefile(own_class(key, path, object))
    except (OSError, TypeError):
        file = None
    return file_sha256(Path(file)) if file and os.path.isfile(file) else None
