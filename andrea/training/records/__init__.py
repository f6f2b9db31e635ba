"""Where a run's figures are recorded: the run folder, the console, Weights & Biases."""
