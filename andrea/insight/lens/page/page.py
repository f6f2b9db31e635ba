"""The lens as one HTML file: a small map of every head, and all vectors of the heads that are shown in full.

For a head in full, the page computes the weights in double precision, from the fp32 queries and keys in the file.

T tokens, C candidates for the next token, V vocabulary.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import Tensor

from andrea.insight.html import fill_template, json_for_script
from andrea.insight.lens.effects import ablate_heads
from andrea.insight.lens.page.facts import Source, head_facts, json_number, model_facts
from andrea.insight.lens.page.head_data import (
    Layout,
    ablation_arrays,
    as_array,
    candidate_tokens,
    head_arrays,
    pack,
    packed_head_bytes,
)
from andrea.insight.lens.page.measurements import Head, Measurements
from andrea.model.gpt import GPT
from andrea.text.tokenizer import Tokenizer

TEMPLATE = Path(__file__).parent / "template.html"
LEAST_PROBABILITY = 1e-38  # fp32 rounds smaller ones to zero, which has no logarithm
FACTS_BYTES = 200  # extra bytes in the page's facts for a head in full
ELEMENT_BYTES = 100  # of the HTML element around a head's arrays


@dataclass
class FullHeads:
    """The heads that are shown in full, packed for the file."""

    packed: dict[Head, tuple[str, Layout]] = field(default_factory=dict)
    effects: dict[Head, np.ndarray] = field(default_factory=dict)  # (T,): the target's probability without the head
    token_ids: set[int] = field(default_factory=set)  # all tokens that occur in the arrays


class LensPage:
    """The page of one prompt. `most_full_heads` returns how many heads fit in full; `render` returns the HTML text.

    detail: include ablations and direct logit attribution, which take most of the time.
    """

    def __init__(
        self, model: GPT, tokenizer: Tokenizer, measurements: Measurements, source: Source, *, detail: bool = True
    ) -> None:
        self.model, self.measurements, self.source, self.detail = model, measurements, source, detail
        self.texts = token_texts(tokenizer)
        self.candidates = candidate_tokens(measurements)  # (T, C)
        probabilities = measurements.log_probabilities.gather(-1, self.candidates).exp()
        self.blocks = {
            "maps": pack({"maps": measurements.maps}),
            "next": pack(
                {
                    "candidates": as_array(probabilities, model.n_vocab),
                    "candidate_ids": as_array(self.candidates, model.n_vocab),
                }
            ),
        }
        if measurements.gates is not None:
            self.blocks["gates"] = pack({"gates": as_array(measurements.gates, model.n_vocab)})

    def most_full_heads(self, limit_bytes: int) -> int:
        """The number of heads that can be shown in full on a page of at most limit_bytes."""
        n_head = len(self.measurements.heads)
        texts = dict(enumerate(self.texts)) if self.detail else self.texts_of(set())
        fixed = len(self.assemble(FullHeads(), texts)) + FACTS_BYTES * n_head
        each = packed_head_bytes(self.measurements, self.detail) + ELEMENT_BYTES
        return max(0, min(n_head, (limit_bytes - fixed) // each))

    def render(self, full: list[Head]) -> str:
        """The HTML text of the page that shows the heads `full` in full."""
        heads = FullHeads()
        for head, arrays in self.arrays_of(full):
            heads.packed[head] = pack(arrays)
            for name, array in arrays.items():
                if name.endswith("_ids"):
                    heads.token_ids |= set(array.flatten().tolist())
            if self.detail:
                heads.effects[head] = arrays["ablated_candidates"][:, -1]
        return self.assemble(heads, self.texts_of(heads.token_ids))

    def arrays_of(self, full: list[Head]) -> Iterator[tuple[Head, dict[str, np.ndarray]]]:
        """The arrays of each head, layer by layer."""
        for layer in sorted({layer for layer, _ in full}):
            indices = sorted(index for each, index in full if each == layer)
            arrays = {
                index: head_arrays(self.model, self.measurements, (layer, index), self.detail) for index in indices
            }
            if self.detail:
                trace = self.measurements.layers[layer]
                for index, ablated in ablate_heads(self.model, self.measurements.tokens, layer, trace, indices):
                    arrays[index] |= ablation_arrays(self.candidates, ablated)
            for index in indices:
                yield (layer, index), arrays[index]

    def loss_change(self, ablated: np.ndarray) -> float | None:
        """The change of the prompt's mean loss by an ablation, in nats per token; None for a prompt of one token.

        ablated (T,): the probability of each position's next token of the prompt, computed without the head.
        """
        if len(ablated) == 1:
            return None
        log_probabilities: Tensor = self.measurements.log_probabilities.gather(-1, self.candidates[:, -1:])[:-1, 0]
        with_head = log_probabilities.cpu().double().numpy()
        without = np.log(np.maximum(ablated[:-1].astype(np.float64), LEAST_PROBABILITY))
        return float((with_head - without).mean())

    def texts_of(self, used: set[int]) -> dict[int, str]:
        """The texts of the prompt's tokens, the candidates, and the tokens `used`."""
        shown = used | set(self.candidates.flatten().tolist()) | set(self.measurements.tokens[0].tolist())
        return {token: self.texts[token] for token in sorted(shown)}

    def assemble(self, heads: FullHeads, texts: dict[int, str]) -> str:
        """The template filled with all data. texts: token id -> text."""
        blocks = dict(self.blocks)
        if heads.effects:
            blocks["effects"] = pack({"ablated": np.stack([heads.effects[head] for head in heads.packed])})
        layouts = {name: layout for name, (_, layout) in blocks.items()}
        for (layer, index), (encoded, layout) in heads.packed.items():
            blocks[f"{layer}.{index}"] = (encoded, layout)
            layouts["head"] = layout
        facts = {
            **vars(self.source),
            **model_facts(self.model, self.measurements.tokens),
            "value_parts": list(self.measurements.layers[0].value_parts),
            "detail": self.detail,
            "layouts": layouts,
            "texts": texts,
            "heads": self.facts_of_heads(heads),
        }
        elements = [f'<script type="application/json" id="facts">{json_for_script(facts)}</script>']
        for name, (encoded, _) in blocks.items():
            elements.append(f'<script type="text/plain" id="data-{name}">{encoded}</script>')
        return fill_template(TEMPLATE, {"TITLE": html.escape(self.source.title), "DATA": "\n".join(elements)})

    def facts_of_heads(self, heads: FullHeads) -> list[dict]:
        """The facts of every head, whether it is shown in full, and the change of the loss by its ablation."""
        found = []
        for head, facts in zip(self.measurements.heads, head_facts(self.measurements), strict=True):
            effect = heads.effects.get(head)
            change = None if effect is None else json_number(self.loss_change(effect))
            found.append({**facts, "full": head in heads.packed, "loss_change": change})
        return found


END_OF_TEXT = "⟨end-of-text⟩"
MARKS = {" ": "␣", "\n": "↵", "\t": "→"}


def token_texts(tokenizer: Tokenizer) -> list[str]:
    """The text of each token id."""
    texts = [visible_text(piece) for piece in tokenizer.token_bytes()]
    texts[tokenizer.end_of_text] = END_OF_TEXT
    return texts


def visible_text(piece: bytes) -> str:
    """A token's bytes as text, with marks for space, newline and tab, and hexadecimal codes for unprintable bytes."""
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError:
        return "⟨" + piece.hex(" ").upper() + "⟩"
    for character, mark in MARKS.items():
        text = text.replace(character, mark)
    return "".join(character if character.isprintable() else f"⟨{ord(character):02X}⟩" for character in text)
