"""Recognises errors that mean: memory ran out. Imports no torch.

torch has its own exception only for the memory of a GPU. On a CPU an allocation fails at a limit (`ulimit -v`), or on a
machine without swap. Then torch raises a RuntimeError, and Python and numpy raise a MemoryError.
"""

from __future__ import annotations

ALLOCATION_FAILED = ("can't allocate memory", "Cannot allocate memory", "std::bad_alloc", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` was raised because a GPU or this process has no memory left."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in ALLOCATION_FAILED)
