"""Run folders like those of training, written without training."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
import yaml

from andrea.api.command_line import configure
from andrea.checkpoint import write_checkpoint
from andrea.config import RunConfig, to_plain
from andrea.text.tokenizer import ByteTokenizer
from andrea.training.records.run_folder import mark, with_texts

CONFIG = with_texts(to_plain(configure(RunConfig, "train", ["logger=none", "tokenizer=byte", "train.steps=100"])), str)


def loss_of(parameters: float, tokens: float) -> float:
    return 1.2 + 9 / parameters**0.3 + 12 / tokens**0.25


def make_run(
    folder: Path,
    parameters: int = 1000,
    tokens: int = 10_000,
    step: int = 100,
    saved: bool = True,
    data: str = "aa",
    **keys,
) -> Path:
    """A run folder evaluated at each quarter of the schedule, with a checkpoint of `parameters` numbers."""
    folder.mkdir(parents=True)
    config = copy.deepcopy(CONFIG)
    for key, value in keys.items():
        group, _, last = key.partition("__")
        config[group][last] = value
    run_id = mark(folder, None)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = []
    for done in range(5, step + 1, 5):
        seen = tokens * done // 100
        record = {"step": done, "tokens": seen, "flops": 6.0 * parameters * seen, "seconds": done / 10}
        record |= {"train/loss": loss_of(parameters, seen) + 0.1, "train/tokens_per_second": 1000.0 + done}
        if done % 25 == 0:
            record |= {"val/loss": loss_of(parameters, seen), "val/bpb": loss_of(parameters, seen) / 2}
        lines.append(json.dumps(record))
    if step == 100:
        event = {key: value for key, value in json.loads(lines[-1]).items() if not key.startswith("train/")}
        lines.append(json.dumps(event | {"event": "done"}))
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    if saved:
        state = {"step": step, "tokens": tokens, "config": config, "data": data * 32, "run": run_id}
        write_checkpoint(
            folder / "checkpoints", state, {"w": torch.zeros(parameters - 3), "v": torch.zeros(3)}, {}, ByteTokenizer()
        )
    return folder


def make_eight_runs(folder: Path) -> Path:
    """Eight finished runs of four sizes and two budgets, one of them with a hostile name."""
    for size in (1000, 4000, 16000, 64000):
        for budget in (5, 100):
            name = "a<b>&</script>" if (size, budget) == (1000, 5) else f"n{size}-r{budget}"
            make_run(folder / name.replace("/", "∕"), size, size * budget)
    return folder
