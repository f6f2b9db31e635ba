"""Where a run's figures go: run folder, wandb, console."""
