"""Options of the heads, for tests of every path: changes of the model's and of the attention's configuration, by name."""

from __future__ import annotations

import torch
from torch import nn

from andrea.model.initialise import STARTS_AT_ZERO

HEAD_OPTIONS: dict[str, tuple[dict, dict]] = {
    "scalar gates": ({}, {"gate": "scalar"}),
    "elementwise gates": ({}, {"gate": "elementwise"}),
    "fixed exclusion": ({}, {"exclusive": "fixed"}),
    "learned exclusion, scalar gates": ({}, {"exclusive": "learned", "gate": "scalar"}),
}


def words_of(option: str) -> list[str]:
    """The words of a command line that set the option."""
    groups = zip(("model", "attention"), HEAD_OPTIONS[option], strict=True)
    return [f"{group}.{key}={value}" for group, changes in groups for key, value in changes.items()]


@torch.no_grad()
def draw_what_starts_at_zero(model: nn.Module) -> None:
    """Draw the parameters with which an option begins at nothing, so that it does something."""
    generator = torch.Generator().manual_seed(11)
    for name, parameter in model.named_parameters():
        if name.endswith(STARTS_AT_ZERO):
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
