"""Finds the data of a task beside its YAML file, from any working directory. lm-eval calls `questions` and `documents`."""

import json
from pathlib import Path
from typing import Any


def questions(data_files: str, **settings: Any) -> Any:
    """The questions of a task in this folder, as `dataset_path: json` would load them from the working directory."""
    return load(Path(__file__).with_name(data_files))


def documents(text: str | None = None, **settings: Any) -> Any:
    """The documents of a .jsonl file with a "text" in each line. text: its path (`--metadata text=FILE`)."""
    if text is None:
        raise ValueError('andrea_bpb needs a text: add --metadata text=FILE.jsonl, a file with a "text" in each line')
    return load(Path(text).expanduser().resolve())


def load(path: Path) -> Any:
    """A data set with one split, `test`, in memory: nothing is written to a cache."""
    from datasets import Dataset, DatasetDict

    lines = path.read_text(encoding="utf-8-sig").split("\n")
    return DatasetDict({"test": Dataset.from_list([json.loads(line) for line in lines if line])})
