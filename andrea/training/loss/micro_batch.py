"""The loss of one micro-batch: the module that is compiled, and that DDP or FSDP2 wraps.

Shapes: B sequences, T tokens, V vocabulary, L layers, H heads. A loss is a sum in nats: the caller divides once, by the
number of targets over all micro-batches and ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from andrea.attention import HeadStatistics
from andrea.model.gpt import GPT, call_block
from andrea.runtime.device import WEIGHT_DTYPE, autocast
from andrea.text.loader import IGNORED_TARGET
from andrea.training.loss.distillation import Teachers, distilled_loss_sum
from andrea.training.loss.fused import fused_cross_entropy


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


def training_loss_sum(model: GPT, hidden: Tensor, targets: Tensor, precision: str) -> Tensor:
    """The same sum as `loss_sum_from_hidden`, computed without holding all logits, except in fp16.

    In fp16 small gradients need the loss scale. The fused path would apply the scale after computing the gradients.
    """
    if precision == "fp16":
        return loss_sum_from_hidden(model, hidden, targets)
    return fused_cross_entropy(hidden, model.head_weight, targets, model.config.logit_softcap, WEIGHT_DTYPE[precision])


class MicroBatchLoss(nn.Module):
    """Forward pass and loss in the run's precision, with the heads' statistics if `observing`.

    torch.compile compiles either `forward_in_precision`, or both `call_block` and `head_loss`. Autocast is entered
    outside the compiled code, because torch does not cache compiled code that enters autocast.
    """

    def __init__(
        self,
        model: GPT,
        device: torch.device,
        precision: str,
        observing: bool,
        recompute: bool,
        teachers: Teachers | None = None,
    ) -> None:
        """observing: measure the heads' statistics. recompute: activation checkpointing. teachers: for distillation."""
        super().__init__()
        self.model = model
        self.teachers = teachers
        self.precision, self.observing, self.recompute = precision, observing, recompute
        self.autocast = autocast(device, precision)

    def forward(
        self, tokens: Tensor, targets: Tensor, dropout_seeds: Tensor | None = None
    ) -> tuple[Tensor, HeadStatistics | None]:
        """tokens, targets (B, T) int64 -> sum of nats, fp32 scalar, and statistics (L, H) of the rows that have a target.

        dropout_seeds: (B,) int64 in training; nothing is dropped without them.
        """
        if not self.model.config.drops:
            dropout_seeds = None
        elif dropout_seeds is None:  # an evaluation, which reuses the compiled code of training
            dropout_seeds = torch.full_like(tokens[:, 0], -1)
        with self.autocast:
            return self.forward_in_precision(tokens, targets, dropout_seeds)

    def forward_in_precision(
        self, tokens: Tensor, targets: Tensor, dropout_seeds: Tensor | None
    ) -> tuple[Tensor, HeadStatistics | None]:
        how = {"recompute": self.recompute, "dropout_seeds": dropout_seeds, "call_block": self.call_block}
        taught = None
        if self.teachers is not None and torch.is_grad_enabled():  # an evaluation measures the text alone
            taught = self.teachers.probabilities(tokens, self.call_block)
        if not self.observing:
            return self.head_loss(self.model(tokens, **how), targets, taught), None
        hidden, layers = self.model(tokens, **how, statistics=True)
        has_target = (targets != IGNORED_TARGET).any(1)
        return self.head_loss(hidden, targets, taught), HeadStatistics.of_layers(layers, has_target)

    call_block = staticmethod(call_block)

    def head_loss(self, hidden: Tensor, targets: Tensor, taught: Tensor | None = None) -> Tensor:
        """taught: the teachers' probabilities (B, T, V)."""
        if taught is not None:
            return distilled_loss_sum(self.model, hidden, targets, taught)
        return training_loss_sum(self.model, hidden, targets, self.precision)
