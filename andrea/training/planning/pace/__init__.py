"""The time of a run: the pace of earlier runs, and the budget of train.max_minutes."""
