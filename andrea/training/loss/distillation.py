"""Distillation: a model learns from its text, and from what other trained models expect at each position.

Hinton, Vinyals and Dean 2015, "Distilling the knowledge in a neural network", arXiv 1503.02531, section 2, at temperature 1,
with the mean of the teachers' probabilities (an ensemble). Measured on a small text: bench/README.md, "Small texts".

Shapes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from andrea.checkpoint import read_checkpoint
from andrea.checkpoint.model import load_model
from andrea.config import RunConfig, UserError
from andrea.model.gpt import GPT, CallBlock
from andrea.text.loader import IGNORED_TARGET
from andrea.text.tokenizer import Tokenizer

SHARE = 0.5  # of the teachers' probabilities in each target; the rest is the token of the text


@dataclass(frozen=True)
class Teachers:
    """The trained models of train.teachers."""

    models: Sequence[GPT]

    @torch.no_grad()
    def probabilities(self, tokens: Tensor, call_block: CallBlock) -> Tensor:
        """tokens (B, T) -> the mean of the teachers' next-token probabilities, (B, T, V) fp32."""
        all_logits = (model.logits(model(tokens, call_block=call_block)) for model in self.models)
        return sum(logits.float().softmax(-1) for logits in all_logits) / len(self.models)


def distilled_loss_sum(model: GPT, hidden: Tensor, targets: Tensor, taught: Tensor) -> Tensor:
    """Cross-entropy against (1 - SHARE) · the target + SHARE · `taught`, summed, in nats: hidden (B, T, d_model).

    That is the function of the gradient. The number itself is the cross-entropy against the targets alone, so that the
    training loss of a distilled run means what it means in every other run.
    """
    log_probabilities = model.logits(hidden).float().log_softmax(-1).flatten(0, 1)  # (B T, V)
    hard = cross_entropy(log_probabilities, targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")
    has_target = (targets != IGNORED_TARGET).flatten()
    soft = -((taught.flatten(0, 1) * log_probabilities).sum(-1) * has_target).sum()
    mixed = (1 - SHARE) * hard + SHARE * soft
    return mixed + (hard - mixed).detach()


def load_teachers(config: RunConfig, tokenizer: Tokenizer, device: torch.device) -> Teachers | None:
    """The models of train.teachers, whole on every rank; None without. Raises UserError if they cannot teach this run."""
    if not config.train.teachers:
        return None
    models = []
    for path in config.train.teachers:
        checkpoint = read_checkpoint(Path(path))
        theirs = checkpoint.tokenizer()
        if theirs.identity != tokenizer.identity:
            raise UserError(
                f"train.teachers: {path} was trained with the tokenizer {theirs.identity}, but this run uses "
                f"{tokenizer.identity}; tokenizer.path={path} takes the teacher's"
            )
        model = load_model(checkpoint, theirs)
        if model.config.sequence_length < config.model.sequence_length:
            raise UserError(
                f"train.teachers: {path} was trained on {model.config.sequence_length} tokens at once, but this run reads "
                f"{config.model.sequence_length}; set model.sequence_length={model.config.sequence_length}"
            )
        models.append(model.to(device))
    return Teachers(models)
