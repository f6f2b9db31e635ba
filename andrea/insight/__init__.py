"""Tools that show what runs have learned: the lens, the comparison of runs, the wandb dashboard."""
