"""Parts of the page beside the heads: the logit lens, two prompts, strongest examples, a second checkpoint.

B windows of held-out text, T tokens, L layers, H heads, D = d_head, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from andrea.checkpoint import Checkpoint
from andrea.insight.lens.interventions import patch_all
from andrea.insight.lens.page import Measurements, Panel, Source, as_arrays, json_number
from andrea.insight.lens.trace import LayerTrace, logit_lens, trace_layers
from andrea.model.gpt import GPT, Block
from andrea.text.corpus import held_out_of_run
from andrea.text.shards import TokenStream
from andrea.text.tokenizer import Tokenizer


def logit_lens_panel(model: GPT, measurements: Measurements) -> Panel:
    """The likeliest next token and its probability at each stage of each position: `stage_ids`, `stages`, (2 L + 1, T)."""
    best = [stage.max(-1) for stage in logit_lens(model, measurements.layers)]
    ids, probabilities = (torch.stack(each) for each in ([top.indices for top in best], [top.values for top in best]))
    return Panel("stages", as_arrays({"stages": probabilities.exp(), "stage_ids": ids}, model.n_vocab))


# ---------------------------------------------------------------------------------------------------------- two prompts

COMPARED = 5  # likeliest next tokens of each prompt whose logits are in the file


@torch.no_grad()
def patching_panel(model: GPT, measurements: Measurements, tokens: list[int]) -> Panel:
    """What moves the prediction of the prompt to that of a second one of equal length. tokens: of the second one."""
    other = torch.tensor([tokens], device=measurements.tokens.device)
    others = list(trace_layers(model, other))
    predictions = [measurements.layers[-1].after, others[-1].after]
    likeliest = [model.logits(model.final_norm(after[0, -1])).topk(COMPARED).indices for after in predictions]
    compared = torch.cat((likeliest[0], likeliest[1][~torch.isin(likeliest[1], likeliest[0])]))
    arrays = patch_all(model, measurements.layers, others, compared)
    arrays |= {"compared_ids": compared, "against_ids": other[0]}
    return Panel("patched", as_arrays(arrays, model.n_vocab))


# ------------------------------------------------------------------------------------------------------------- examples
# Where, in held-out text, a head writes most. A cell is a query and a key; what it writes is its weight × the norm of the value as
# it is written into the residual stream, W_O v.

MOST_TOKENS = 8192  # that are read
MOST_FLOPS = 4e11  # a few seconds on one core: a large model reads fewer tokens
WINDOW_TOKENS = 128
WINDOWS_AT_ONCE = 8
SHOWN_EXAMPLES = 5  # of a head, each from another window


def examples_panel(model: GPT, tokenizer: Tokenizer, checkpoint: Checkpoint, data_dir: Path) -> Panel:
    """Where each head writes most in the checkpoint's held-out text; a note where that text is not in data_dir."""
    stream = held_out_of_run(checkpoint.state, data_dir)
    if stream is None or len(stream) < 2 or model.config.sequence_length == 1:
        note = (
            f"No examples: the held-out text of this checkpoint is not in data_dir={data_dir}, has several sources, or is "
            f"made of conversations; or the model reads one token alone."
        )
        return Panel("examples", {}, {"examples_note": note})
    found = strongest_examples(model, stream, tokenizer.end_of_text)
    used = found.cells[..., 0].unique()  # windows
    cells = found.cells.clone()
    cells[..., 0] = torch.searchsorted(used, cells[..., 0].contiguous())
    arrays = as_arrays({"example_ids": found.windows[used]}, model.n_vocab)
    arrays |= as_arrays({"example_cells": cells, "example_sizes": found.sizes}, 0)
    note = f"Read: the first {found.windows[:, 1:].numel():,} tokens of the held-out text."
    return Panel("examples", arrays, {"examples_note": note})


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


# ---------------------------------------------------------------------------------------------------- a second checkpoint

MOST_MAP_SIDE = 128  # rows and columns of a map of the second checkpoint


def checkpoint_panel(model: GPT, other: Measurements, model_of_other: GPT, source: Source) -> Panel:
    """The maps and scores of the heads of another model, on the same prompt. other: with maps of MOST_MAP_SIDE."""
    distances = map_distances(model, model_of_other, other.tokens)
    heads = [other.facts_of(head) | {"distance": json_number(distances[head])} for head in other.heads]
    facts = {"other": {"title": source.title, "checkpoint": source.checkpoint, "heads": heads}}
    return Panel("other", {"maps": other.maps}, facts)


@torch.no_grad()
def map_distances(one: GPT, other: GPT, tokens: Tensor) -> Tensor:
    """(L, H): half the sum of |weight - weight of the other model| over the keys, the mean over the queries; 0 to 1.

    It is the share of the weight that stands on other keys (total variation distance). tokens (1, T).
    """
    pairs = zip(trace_layers(one, tokens), trace_layers(other, tokens), strict=True)
    return torch.stack([0.5 * (a.weights - b.weights).abs().sum(-1).mean((0, 2)) for a, b in pairs]).cpu()
