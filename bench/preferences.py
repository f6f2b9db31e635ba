"""Make preference pairs from the conversations about Python, for objective=dpo.

    python bench/preferences.py pairs
    python train.py init_from=tuned objective=dpo data=chat data.path=pairs

The chosen answer is the right one, the rejected one the answer to another question of the same kind. Held-out pairs are of
held-out questions.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from pathlib import Path

from andrea.text.python_chat import HELD_OUT, TRAIN, write_python_chat

MOST = {TRAIN: 6000, HELD_OUT: 400}  # pairs


def pairs_of(lines: list[str], chance: random.Random) -> list[dict]:
    """A pair for each question that stands alone, if another answer of its kind differs."""
    records = [record for record in map(json.loads, lines) if len(record["messages"]) == 2]
    answers = defaultdict(set)
    for record in records:
        answers[record["kind"]].add(record["messages"][1]["content"])
    pairs = []
    for record in records:
        question, chosen = record["messages"]
        if others := sorted(answers[record["kind"]] - {chosen["content"]}):
            rejected = chosen | {"content": chance.choice(others)}
            pairs.append({"prompt": [question], "chosen": [chosen], "rejected": [rejected]})
    return chance.sample(pairs, len(pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    chosen = parser.parse_args()
    conversations, chance = write_python_chat(chosen.data_dir / "python_chat"), random.Random(1)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    for name, most in MOST.items():
        pairs = pairs_of((conversations / name).read_text(encoding="utf-8").splitlines(), chance)[:most]
        (chosen.folder / name).write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
        print(f"{chosen.folder / name}: {len(pairs):,} pairs")


if __name__ == "__main__":
    main()
