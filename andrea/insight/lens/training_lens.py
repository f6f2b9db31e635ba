"""The lens page that training draws at each evaluation: a small page on a fixed prompt, without ablations."""

from __future__ import annotations

import torch

from andrea.insight.lens.page.page import LensPage, Source, measure
from andrea.model.gpt import GPT
from andrea.text.tokenizer import Tokenizer

LARGEST_SMALL_PAGE_BYTES = 300_000
MOST_TOKENS = 32  # few enough for a complete map of every head, even of many heads
MOST_MAP_CELLS = 64_000  # of all heads


@torch.no_grad()
def small_lens(model: GPT, tokenizer: Tokenizer, prompt: str) -> str:
    """The HTML text of a page on the prompt's first tokens, at most LARGEST_SMALL_PAGE_BYTES long.

    The page shows in full the most interesting heads that fit on it. The model is not changed.
    """
    tokens = [tokenizer.end_of_text, *tokenizer.encode(prompt)][: min(MOST_TOKENS, model.config.sequence_length)]
    n_head = model.config.n_layer * model.config.n_head
    map_side = max(4, int((MOST_MAP_CELLS / n_head) ** 0.5))
    with torch.autocast(model.embedding.weight.device.type, enabled=False):
        measurements = measure(model, tokenizer, tokens, map_side)
        source = Source(model.config.name, None, tokenizer.identity)
        page = LensPage(model, tokenizer, measurements, source, detail=False)
        return page.render(measurements.by_interest()[: page.most_full_heads(LARGEST_SMALL_PAGE_BYTES)])
