"""The training loss, as (sum of nats, number of tokens): divided once, by whoever knows the global count.

Shapes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from andrea.attention import HeadStatistics
from andrea.model.gpt import GPT, call
from andrea.runtime.device import autocast, weight_dtype
from andrea.text.loader import IGNORED_TARGET
from andrea.training.loss.fused import fused_nats


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
    return score(model, model(tokens, observed=observed, recompute=recompute), targets)


def score(model: GPT, hidden: Tensor, targets: Tensor) -> Tensor:
    """Sum over all targets of -ln p(target), in nats, from hidden (B, T, d_model)."""
    logits = model.logits(hidden)  # (B, T, V)
    return functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum"
    )


def nats_of(model: GPT, hidden: Tensor, targets: Tensor, precision: str) -> Tensor:
    """`score` as training computes it: without ever holding all logits, where the precision allows it."""
    if precision == "fp16":  # its small gradients need the loss scale, which multiplies only what comes after
        return score(model, hidden, targets)
    return fused_nats(hidden, model.head_weight, targets, model.config.logit_softcap, weight_dtype(precision))


class MicroLoss(nn.Module):
    """The loss of a micro-batch in the run's precision, with its heads' statistics where each step measures them.

    This is the module that DDP or FSDP wraps. Compiled is `in_precision`, or `run_block` and `score`: autocast is entered
    outside, because torch keeps no code between starts in which it is.
    """

    def __init__(self, model: GPT, device: torch.device, precision: str, observing: bool, recompute: bool) -> None:
        super().__init__()
        self.model = model
        self.device, self.precision, self.observing, self.recompute = device, precision, observing, recompute

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, HeadStatistics | None]:
        """tokens, targets (B, T) int64 -> nats, fp32 scalar, and (L, H) statistics of the rows that have a target."""
        with autocast(self.device, self.precision):
            return self.in_precision(tokens, targets)

    def in_precision(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, HeadStatistics | None]:
        observed: list[HeadStatistics] | None = [] if self.observing else None
        hidden = self.model(tokens, observed=observed, recompute=self.recompute, run=self.run_block)
        nats = self.score(hidden, targets)
        counted = (targets != IGNORED_TARGET).any(1)
        return nats, HeadStatistics.of_layers(observed, counted) if observed else None

    run_block = staticmethod(call)

    def score(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return nats_of(self.model, hidden, targets, self.precision)


def evaluate(
    loss_sum: Callable[[Tensor, Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    bytes_of_token: Tensor,
    device: torch.device,
) -> dict[str, float]:
    """Score every target of `batches` once: {"loss": nats per token, "bpb": bits per byte, "nats", "tokens", "bytes"}.

    bytes_of_token (V,) int64 counts a token's UTF-8 bytes, 0 for end-of-text, which therefore costs nats and adds no
    bytes.
    """
    nats, tokens_scored, bytes_scored = [], 0, 0
    for tokens, targets in batches:
        scored = targets[targets != IGNORED_TARGET]
        nats.append(loss_sum(tokens.to(device), targets.to(device)).detach())  # read at the end: no card is waited for
        tokens_scored += scored.numel()
        bytes_scored += int(bytes_of_token[scored].sum())
    return summary(sum(map(float, nats)), tokens_scored, bytes_scored)


def summary(nats: float, tokens: int, bytes_: int) -> dict[str, float]:
    """Loss in nats per token and in bits per byte; the second compares across tokenizers."""
    return {
        "loss": nats / max(tokens, 1),
        "bpb": nats / math.log(2) / max(bytes_, 1),
        "nats": nats,
        "tokens": tokens,
        "bytes": bytes_,
    }
