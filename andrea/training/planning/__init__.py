"""Plans a run: its time and memory, and the value of each `auto`."""
