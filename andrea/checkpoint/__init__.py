"""Checkpoints: written completely or not at all, verified before use, and found by name."""

from andrea.checkpoint.errors import Damaged
from andrea.checkpoint.find import (
    best_of,
    checkpoints_of,
    is_best_so_far,
    locate,
    newest_run,
    newest_whole,
    result_of,
    result_path,
    step_of,
)
from andrea.checkpoint.folder import Checkpoint, read_checkpoint, step_name, write_checkpoint
from andrea.checkpoint.shards import consolidate

__all__ = [
    "Checkpoint",
    "Damaged",
    "best_of",
    "checkpoints_of",
    "consolidate",
    "is_best_so_far",
    "locate",
    "newest_run",
    "newest_whole",
    "read_checkpoint",
    "result_of",
    "result_path",
    "step_name",
    "step_of",
    "write_checkpoint",
]
