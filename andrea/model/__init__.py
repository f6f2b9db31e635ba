"""The GPT and what counts it."""

from andrea.model.gpt import GPT, initialise
from andrea.model.size import (
    Memory,
    Parameters,
    count_parameters,
    flops_per_token,
    forward_flops_per_token,
    plan_memory,
)

__all__ = [
    "GPT",
    "Memory",
    "Parameters",
    "count_parameters",
    "flops_per_token",
    "forward_flops_per_token",
    "initialise",
    "plan_memory",
]
