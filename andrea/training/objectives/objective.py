"""What an objective is: the loss of a micro-batch, the batch of a step, and what is measured on held-out data.

The rest of a run is the same for every objective: trainer, optimizer, ranks, checkpoints, records, health.

B sequences, T tokens, V vocabulary.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from andrea.model.gpt import GPT, CallBlock
from andrea.text.shards import IGNORED_TARGET


class Batch(NamedTuple):
    """This rank's share of a step's sequences; n_target counts the targets in the rows of all ranks."""

    tokens: Tensor  # (n, T) int64
    targets: Tensor  # (n, T) int64
    n_target: int
    dropout_seeds: Tensor  # (n,) int64
    most_rows: int  # the rows of the rank that has most: as many micro-batches run on every rank
    weights: Tensor | None = None  # (n, T) fp32, of the targets, if the objective draws its batches


class Objective(ABC):
    """An objective other than the next token. reference: the model that the run began from, frozen; None: not needed.

    draws: whether the batch of a step depends on the weights, so that none is read ahead. is_loss_comparable: whether the
    training loss and the validation loss are of one kind, so that the health checks may compare them.
    """

    draws = False
    is_loss_comparable = True
    lines: tuple[str, ...] = ()  # for the terminal, when the run begins

    def __init__(self, reference: GPT | None) -> None:
        self.reference = reference

    @abstractmethod
    def sums(
        self, model: GPT, call_block: CallBlock, hidden: Tensor, tokens: Tensor, targets: Tensor, weights: Tensor | None
    ) -> Tensor | None:
        """Sums over a micro-batch, (k,) or 0-dim, fp32; the first is the loss, which alone has a gradient.

        None: the next token's loss in nats. call_block: as of `GPT.forward`, for the reference.

        hidden (B, T, d_model): the model's, for tokens (B, T). targets (B, T): IGNORED_TARGET where nothing is learned.
        weights (B, T): of the batch; None in an evaluation, and for an objective that draws no batch.
        """

    def summary(self, sums: list[float]) -> dict[str, float] | None:
        """The figures of held-out data from the `sums` of all its batches; None: those of the next token."""
        return None

    def draw(self, step: int, model: GPT) -> Batch | None:
        """This rank's batch of the step that follows `step` earlier ones; None: the loader's. Every rank calls this."""
        return None

    def figures(self) -> dict[str, float]:
        """Figures of the last step for its record, over all ranks."""
        return {}

    def judge_answers(self, model: GPT) -> dict[str, Any]:
        """Figures of the model's own answers to held-out prompts, on rank 0; `compared`: the lower the better."""
        return {}

    def reference_log_probabilities(self, call_block: CallBlock, tokens: Tensor, targets: Tensor) -> Tensor:
        assert self.reference is not None, "make_objective demands a reference"
        with torch.no_grad():
            hidden = self.reference(tokens, call_block=call_block)
            return target_log_probabilities(self.reference, hidden, targets)


def target_log_probabilities(model: GPT, hidden: Tensor, targets: Tensor) -> Tensor:
    """ln p of each target, (B, T) fp32; 0 where nothing is a target. hidden (B, T, d_model).

    Logits are computed for the targets alone: in conversations, these are a part of the tokens.
    """
    places = targets != IGNORED_TARGET
    nats = cross_entropy(model.logits(hidden[places]).float(), targets[places], reduction="none")
    return torch.zeros_like(targets, dtype=torch.float32).masked_scatter(places, -nats)
