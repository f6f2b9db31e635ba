"""The lens that training draws at each evaluation: small, without ablations, of a fixed prompt."""

from __future__ import annotations

import torch

from andrea.insight.lens.page.facts import Source
from andrea.insight.lens.page.measurements import measure
from andrea.insight.lens.page.page import LensPage
from andrea.model.gpt import GPT
from andrea.text.tokenizer import Tokenizer

LARGEST_SMALL_PAGE_BYTES = 300_000
MOST_TOKENS = 32  # with so few, the map of every head is complete even for many heads
MOST_MAP_CELLS = 64_000  # of all heads


@torch.no_grad()
def small_lens(model: GPT, tokenizer: Tokenizer, prompt: str) -> str:
    """The HTML text of a page of at most LARGEST_SMALL_PAGE_BYTES, of the prompt's first tokens.

    As many heads as fit are in full, the most interesting first. The model is left as it was.
    """
    tokens = [tokenizer.end_of_text, *tokenizer.encode(prompt)][: min(MOST_TOKENS, model.config.sequence_length)]
    n_head = model.config.n_layer * model.config.n_head
    map_side = max(4, int((MOST_MAP_CELLS / n_head) ** 0.5))
    with torch.autocast(model.embedding.weight.device.type, enabled=False):
        measurements = measure(model, tokenizer, tokens, map_side)
        source = Source(model.config.name, None, tokenizer.identity)
        page = LensPage(model, tokenizer, measurements, source, detail=False)
        return page.render(measurements.by_interest()[: page.most_full_heads(LARGEST_SMALL_PAGE_BYTES)])
