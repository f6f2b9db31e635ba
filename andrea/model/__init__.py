"""The GPT model, its initial weights and its size."""

from andrea.model.gpt import GPT, initialise
from andrea.model.size import (
    Parameters,
    count_parameters,
    flops_per_token,
    forward_flops_per_token,
)
