"""Checkpoints: written completely or not at all, verified before use, and found by name."""

from andrea.checkpoint.find_and_prune import (
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
from andrea.checkpoint.folder import Checkpoint, consolidate, read_checkpoint, step_name, write_checkpoint
from andrea.checkpoint.tensors import Damaged
