"""Finished and unfinished runs made visible: the lens, the comparison of runs, the wandb dashboard."""
