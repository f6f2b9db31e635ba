"""The strongest examples of each head: where, in held-out text, it writes most.

B windows, T tokens of a window, H heads, D = d_head. A cell is a query and a key; what it writes is its weight × the norm of the
value as it is written into the residual stream, W_O v.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from andrea.insight.lens.trace import LayerTrace, trace_layers
from andrea.model.gpt import GPT, Block
from andrea.text.shards import TokenStream

MOST_TOKENS = 8192  # that are read
MOST_FLOPS = 4e11  # a few seconds on one core: a large model reads fewer tokens
WINDOW_TOKENS = 128
WINDOWS_AT_ONCE = 8
SHOWN_EXAMPLES = 5  # of a head, each from another window


@dataclass(frozen=True)
class Examples:
    """The strongest cells of each of n heads, counted from layer 0."""

    windows: Tensor  # (windows, T) int64: the text that was read
    cells: Tensor  # (n, examples, 3) int64: window, query, key; the strongest first
    sizes: Tensor  # (n, examples, 2): the cell's weight, and what it writes


@torch.no_grad()
def strongest_examples(model: GPT, stream: TokenStream, end_of_text: int) -> Examples:
    """Read the beginning of a text. In each window of a text, only a head's strongest cell counts, so that examples differ.

    End-of-text begins each window, as it begins every prompt. The first query is left out: it sees nothing but itself.
    """
    tokens = windows_of(model, stream, end_of_text)
    sizes, cells = [], []
    for some in tokens.split(WINDOWS_AT_ONCE):
        traces = zip(model.blocks, trace_layers(model, some), strict=True)
        by_layer = [strongest_cells(block, trace) for block, trace in traces]
        sizes.append(torch.cat([size for size, _ in by_layer], 1))
        cells.append(torch.cat([cell for _, cell in by_layer], 1))
    all_sizes, all_cells = torch.cat(sizes), torch.cat(cells)  # (windows, n, 2) each
    best = all_sizes[..., 1].topk(min(SHOWN_EXAMPLES, len(tokens)), 0).indices  # (examples, n)
    found = [each.gather(0, best[..., None].expand(-1, -1, 2)) for each in (all_sizes, all_cells)]
    size, cell = (each.transpose(0, 1) for each in found)
    return Examples(tokens, torch.cat((best.T[..., None], cell), -1), size)


def windows_of(model: GPT, stream: TokenStream, end_of_text: int) -> Tensor:
    """The beginning of the text as windows (B, T) of equal length, at most MOST_TOKENS and MOST_FLOPS in all."""
    n_parameter = sum(parameter.numel() for parameter in model.blocks.parameters())
    n_token = min(len(stream), MOST_TOKENS, int(MOST_FLOPS / (2 * n_parameter)))
    length = min(WINDOW_TOKENS, model.config.sequence_length, n_token + 1) - 1  # besides end-of-text
    n_window = n_token // length
    text = torch.from_numpy(stream[: n_window * length]).view(n_window, length)
    return torch.cat((torch.full((n_window, 1), end_of_text), text), 1).to(model.embedding.weight.device)


def strongest_cells(block: Block, trace: LayerTrace) -> tuple[Tensor, Tensor]:
    """The strongest cell of each window and head: (weight, what it writes) and (query, key), (B, H, 2) each.

    A head's gate, the mean over its channels, counts as a part of the weight's effect.
    """
    weight = block.attention.output_by_head
    gram = weight.mT @ weight  # (H, D, D): |W_O v|² = vᵀ gram v
    squares = torch.einsum("bhtd,hde,bhte->bht", trace.value, gram, trace.value)
    sizes = trace.weights * squares.clamp(min=0).sqrt()[:, :, None]
    if trace.gate is not None:
        sizes = sizes * trace.gate.mean(-1, keepdim=True)
    sizes[:, :, 0] = 0
    largest, at = sizes.flatten(2).max(-1)
    weights = trace.weights.flatten(2).gather(-1, at[..., None])
    n_key = sizes.shape[-1]
    return torch.cat((weights, largest[..., None]), -1), torch.stack((at // n_key, at % n_key), -1)
