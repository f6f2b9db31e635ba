"""DPO: the model learns which of two answers is preferred, without a reward model and without sampling.

Rafailov et al. 2023, "Direct Preference Optimization: Your Language Model is Secretly a Reward Model", arXiv 2305.18290,
equation 7. For a prompt x with the chosen answer y_w and the rejected answer y_l, the model π and the frozen reference π_ref
(the model that the run began from):

    margin = β · [ ln π(y_w|x) - ln π_ref(y_w|x)  -  (ln π(y_l|x) - ln π_ref(y_l|x)) ]
    loss   = -ln σ(margin)

β · (ln π - ln π_ref) is an answer's implicit reward. A pair is right if its chosen answer has the larger one. An answer's
ln π is the sum over its tokens. Answers that both conversations of a pair begin with cancel out.

A window holds whole pairs: a chosen conversation, its rejected one, the next pair. All is therefore computed window by window.
B windows, T tokens.
"""

import math
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from andrea.model.gpt import GPT, CallBlock
from andrea.text.shards import IGNORED_TARGET
from andrea.text.tokenizer import Tokenizer
from andrea.training.objectives.objective import Objective, target_log_probabilities


@final
class DPO(Objective):
    def __init__(self, beta: float, reference: GPT, tokenizer: Tokenizer, device: torch.device) -> None:
        super().__init__(reference)
        self.beta, self.end_of_text = beta, tokenizer.end_of_text
        self.bytes_of_token = torch.from_numpy(tokenizer.byte_lengths()).to(device)  # (V,)
        self.lines = (
            f"objective: DPO, beta = {beta:g}; the loss is of pairs, and 0.693 = ln 2 where none is preferred",
        )

    def sums(
        self, model: GPT, call_block: CallBlock, hidden: Tensor, tokens: Tensor, targets: Tensor, weights: Tensor | None
    ) -> Tensor:
        """(6,): loss in nats, pairs, margins, right pairs; of the chosen answers their -ln π in nats, and their bytes."""
        ours = target_log_probabilities(model, hidden, targets)  # (B, T)
        theirs = self.reference_log_probabilities(call_block, tokens, targets)
        conversation = ((tokens == self.end_of_text).cumsum(1) - 1).clamp(min=0)  # (B, T): place in the window
        margins, is_pair = pair_margins(ours - theirs, targets, conversation)
        margins = self.beta * margins[is_pair]  # (pairs,)
        is_chosen = (targets != IGNORED_TARGET) & (conversation % 2 == 0)
        right = (margins > 0).sum() + 0.5 * (margins == 0).sum()  # the untrained model decides nothing: a half
        figures = (
            is_pair.sum(),
            margins.sum(),
            right,
            -ours[is_chosen].sum(),
            self.bytes_of_token[targets[is_chosen]].sum(),
        )
        return torch.stack([-logsigmoid(margins).sum(), *(each.detach().float() for each in figures)])

    def summary(self, sums: list[float]) -> dict[str, float]:
        """Means over the pairs. bpb: bits per byte of the chosen answers, which also tells whether they became unlikely."""
        loss, pairs, margin, right, nats, n_byte = sums
        pairs = max(pairs, 1)
        return {
            "loss": loss / pairs,
            "bpb": nats / math.log(2) / max(n_byte, 1),
            "compared": loss / pairs,
            "accuracy": right / pairs,
            "margin": margin / pairs,
        }


def pair_margins(gains: Tensor, targets: Tensor, conversation: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of `gains` over each chosen answer minus that over its rejected one, (B, T), and which of them are pairs.

    gains, targets (B, T). conversation (B, T): the place of a token's conversation in its window; 2p is the chosen one of
    pair p, 2p + 1 the rejected one.
    """
    pair, sign = conversation // 2, 1 - 2 * (conversation % 2)
    empty = torch.zeros_like(gains)
    is_pair = empty.scatter_add(1, pair, (targets != IGNORED_TARGET).to(gains.dtype)) > 0
    return empty.scatter_add(1, pair, sign * gains), is_pair
