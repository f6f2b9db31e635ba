"""The model that is judged: a checkpoint's weights in fp32, its tokenizer, and how many sequences are read at once."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from andrea.checkpoint import Checkpoint, locate
from andrea.checkpoint.model import load_model
from andrea.evaluation.scoring import Scorer
from andrea.model.gpt import GPT
from andrea.runtime.device import choose_device
from andrea.runtime.own_parts import allowing
from andrea.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Subject:
    checkpoint: Checkpoint
    gpt: GPT
    tokenizer: Tokenizer
    scorer: Scorer


def load_subject(checkpoint: str | None, runs_dir: str, device: str, batch_size: int, trust: bool) -> Subject:
    """The model of the checkpoint that a user names. Raises UserError or Damaged."""
    found = locate(checkpoint, Path(runs_dir), report=lambda line: print(line, file=sys.stderr))
    tokenizer = found.tokenizer()
    with allowing((), trust):
        gpt = load_model(found, tokenizer).to(choose_device(device))
    for block in gpt.blocks:
        block.attention.implementation = "auto"  # this device may lack the implementation that trained the model
    return Subject(found, gpt, tokenizer, Scorer(gpt, batch_size))
