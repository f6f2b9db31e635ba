"""Cross-entropy as a sum in nats. The caller divides once, by the number of targets over all micro-batches and ranks.

Shapes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from andrea.model.gpt import GPT
from andrea.text.loader import IGNORED_TARGET


def loss_sum(model: GPT, tokens: Tensor, targets: Tensor, recompute: bool = False) -> Tensor:
    """Sum over all targets of -ln p(target), in nats, fp32 scalar; tokens and targets (B, T) int64.

    recompute: activation checkpointing.
    """
    return loss_sum_from_hidden(model, model(tokens, recompute=recompute), targets)


def loss_sum_from_hidden(model: GPT, hidden: Tensor, targets: Tensor) -> Tensor:
    """The readable form of the loss: sum over all targets (B, T) of -ln p(target), in nats, from hidden (B, T, d_model)."""
    logits = model.logits(hidden)  # (B, T, V)
    return functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum"
    )
