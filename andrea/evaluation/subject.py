"""The model that is judged: a checkpoint's weights in fp32, its tokenizer, and how many sequences are read at once."""

from __future__ import annotations

from dataclasses import dataclass

from andrea.checkpoint import Checkpoint
from andrea.checkpoint.model import open_model
from andrea.evaluation.scoring import Scorer
from andrea.model.gpt import GPT
from andrea.runtime.device import choose_device
from andrea.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Subject:
    checkpoint: Checkpoint
    gpt: GPT
    tokenizer: Tokenizer
    scorer: Scorer


def load_subject(checkpoint: str | None, runs_dir: str, device: str, batch_size: int, trust: bool) -> Subject:
    """The model of the checkpoint that a user names. Raises UserError or Damaged."""
    found, gpt, tokenizer = open_model(checkpoint, runs_dir, choose_device(device), trust)
    return Subject(found, gpt, tokenizer, Scorer(gpt, batch_size))
