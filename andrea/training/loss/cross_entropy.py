"""Cross-entropy as a sum in nats: the caller divides once, by the number of targets over all micro-batches and ranks.

Shapes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from andrea.attention import HeadStatistics
from andrea.model.gpt import GPT
from andrea.runtime.device import weight_dtype
from andrea.text.loader import IGNORED_TARGET
from andrea.training.loss.fused import fused_cross_entropy


def loss_sum(
    model: GPT,
    tokens: Tensor,
    targets: Tensor,
    observed: list[HeadStatistics] | None = None,
    recompute: bool = False,
) -> Tensor:
    """Sum over all targets of -ln p(target), in nats, fp32 scalar; tokens and targets (B, T) int64.

    observed: a list to which each layer appends the statistics of its heads. recompute: activation checkpointing.
    """
    return loss_sum_from_hidden(model, model(tokens, observed=observed, recompute=recompute), targets)


def loss_sum_from_hidden(model: GPT, hidden: Tensor, targets: Tensor) -> Tensor:
    """The readable loss: sum over all targets (B, T) of -ln p(target), in nats, from hidden (B, T, d_model)."""
    logits = model.logits(hidden)  # (B, T, V)
    return functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum"
    )


def training_loss_sum(model: GPT, hidden: Tensor, targets: Tensor, precision: str) -> Tensor:
    """`loss_sum_from_hidden` as training computes it: without holding all logits, except in fp16.

    The small gradients of fp16 need the loss scale, which multiplies the loss after the fused path has computed its
    gradients.
    """
    if precision == "fp16":
        return loss_sum_from_hidden(model, hidden, targets)
    return fused_cross_entropy(hidden, model.head_weight, targets, model.config.logit_softcap, weight_dtype(precision))
