"""Options of the heads, for tests of every path: changes of the model's and of the attention's configuration, by name."""

from __future__ import annotations

import torch
from torch import nn

from andrea.model.gpt import FIRST_VALUES

HEAD_OPTIONS: dict[str, tuple[dict, dict]] = {
    "scalar gates, fixed exclusion": ({}, {"gate": "scalar", "exclusive": "fixed"}),
    "elementwise gates, learned exclusion, value tables": (
        {"value_embedding": "table", "value_residual": True},
        {"gate": "elementwise", "exclusive": "learned"},
    ),
    "value projections": ({"value_embedding": "projection"}, {}),
    "wide heads, weighted QK-norm": ({"d_head": 22, "qk_norm": "learned"}, {}),  # together wider than d_model
    "side by side with the MLP": ({"parallel_residual": True}, {}),
}
ALL_KINDS = "elementwise gates, learned exclusion, value tables"  # one option that has something of each kind
SCORES = "ALiBi, cap and sinks"  # unlike the options above, these do something from the start
ALL_OPTIONS = HEAD_OPTIONS | {SCORES: ({"position": "alibi"}, {"score_softcap": 2.0, "sink": True})}
ALL_OPTIONS |= {"bigrams": ({"bigram_rows": 37}, {})}


def words_of(option: str) -> list[str]:
    """The words of a command line that set the option."""
    groups = zip(("model", "attention"), ALL_OPTIONS[option], strict=True)
    return [f"{group}.{key}={value}" for group, changes in groups for key, value in changes.items()]


@torch.no_grad()
def draw_what_starts_alike(model: nn.Module) -> None:
    """Draw the parameters of an option that all begin with one number, so that it does something, and differs by head."""
    generator = torch.Generator().manual_seed(11)
    for name, parameter in model.named_parameters():
        if name.endswith(tuple(FIRST_VALUES)):
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
