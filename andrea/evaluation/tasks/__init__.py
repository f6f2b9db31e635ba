"""Three small tasks from Python's standard library, for lm-eval: YAML files, their data, and the program that made the data."""

from pathlib import Path

TASKS = Path(__file__).resolve().parent
