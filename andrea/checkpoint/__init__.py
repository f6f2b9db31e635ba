"""Checkpoints: written whole or not at all, verified before they are used, found by name. Imports no torch.

A model is loaded by `andrea.checkpoint.model.load_model`, which does.
"""

from andrea.checkpoint.consolidation import consolidate
from andrea.checkpoint.find import best_of, checkpoints_of, locate, newest_run, newest_whole
from andrea.checkpoint.folder import Checkpoint, Damaged, read_checkpoint, step_name, write_checkpoint

__all__ = [
    "Checkpoint",
    "Damaged",
    "best_of",
    "checkpoints_of",
    "consolidate",
    "locate",
    "newest_run",
    "newest_whole",
    "read_checkpoint",
    "step_name",
    "write_checkpoint",
]
