"""Parts of the page beside the heads: the logit lens, two prompts, strongest examples, a second checkpoint.

T tokens, L layers, H heads, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from andrea.checkpoint import Checkpoint
from andrea.insight.lens.examples import strongest_examples
from andrea.insight.lens.interventions import patch_all
from andrea.insight.lens.page import Measurements, Panel, Source, as_arrays, json_number
from andrea.insight.lens.scores import names_of
from andrea.insight.lens.trace import logit_lens, trace_layers
from andrea.model.gpt import GPT
from andrea.text.corpus import held_out_of_run
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


def examples_panel(model: GPT, tokenizer: Tokenizer, checkpoint: Checkpoint, data_dir: Path) -> Panel:
    """Where each head writes most in the checkpoint's held-out text; a note where that text is not in data_dir."""
    stream = held_out_of_run(checkpoint.state, data_dir)
    if stream is None or len(stream) < 2:
        note = (
            f"No examples: the held-out text of this checkpoint is not in data_dir={data_dir}, has several sources, or is "
            f"made of conversations."
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


# ---------------------------------------------------------------------------------------------------- a second checkpoint

MOST_MAP_SIDE = 128  # rows and columns of a map of the second checkpoint


def checkpoint_panel(model: GPT, other: Measurements, model_of_other: GPT, source: Source) -> Panel:
    """The maps and scores of the heads of another model, on the same prompt. other: with maps of MOST_MAP_SIDE."""
    distances = map_distances(model, model_of_other, other.tokens)
    heads = [
        {
            "prompt": {name: json_number(score[head]) for name, score in other.scores.items()},
            "probe": {name: json_number(score[head]) for name, score in other.probed.items()},
            "names": [name.score for name in names_of(other.probed, *head)],
            "distance": json_number(distances[head]),
        }
        for head in other.heads
    ]
    facts = {"other": {"title": source.title, "checkpoint": source.checkpoint, "heads": heads}}
    return Panel("other", {"maps": other.maps}, facts)


@torch.no_grad()
def map_distances(one: GPT, other: GPT, tokens: Tensor) -> Tensor:
    """(L, H): half the sum of |weight - weight of the other model| over the keys, the mean over the queries; 0 to 1.

    It is the share of the weight that stands on other keys (total variation distance). tokens (1, T).
    """
    pairs = zip(trace_layers(one, tokens), trace_layers(other, tokens), strict=True)
    return torch.stack([0.5 * (a.weights - b.weights).abs().sum(-1).mean((0, 2)) for a, b in pairs]).cpu()
