"""Recognises errors that mean: memory ran out. Imports no torch.

torch has a class of its own for a GPU's memory only. On a CPU, where a limit (`ulimit -v`) or a machine without swap makes
an allocation fail, torch raises a RuntimeError, and Python and numpy raise a MemoryError.
"""

from __future__ import annotations

ALLOCATION_FAILED = ("can't allocate memory", "Cannot allocate memory", "std::bad_alloc", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` was raised because a GPU or this process has no memory left."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in ALLOCATION_FAILED)
