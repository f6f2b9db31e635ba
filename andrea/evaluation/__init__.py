"""Judging a checkpoint: bits per byte of a text, and the tasks of EleutherAI's lm-evaluation-harness."""
