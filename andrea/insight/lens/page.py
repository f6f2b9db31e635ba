"""The lens as one HTML file: a small map of every head, and all vectors of the heads that are shown in full.

For a head in full, the page computes the weights in double precision, from the fp32 scores in the file; for a long prompt, from
the fp32 queries and keys, which are then smaller. Of other long vectors, the file holds the first numbers, which the page shows.

T tokens, L layers, H heads, D = d_head, N width of a query or key from which a score is computed, V vocabulary, C candidates
for the next token.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from andrea.attention import BUILT_IN, Additive, Cosine, MultiHeadAttention, ScoreModifiers, alibi_slopes
from andrea.attention.mask import Mask, visible_interval
from andrea.attention.multihead import OWN_VALUE_EPSILON
from andrea.insight.html import fill_template, json_for_script
from andrea.insight.lens.attribution import (
    direct_arrays,
    head_effects,
    keys_per_query,
    logit_parts,
    pair_arrays,
    parts_of,
    read_arrays,
    score_parts,
    written_parts,
)
from andrea.insight.lens.interventions import ablate_heads
from andrea.insight.lens.scores import NAMES, names_of, probe_scores, score_layer, stack_layers, targets_of
from andrea.insight.lens.trace import LayerTrace, logit_attribution, next_log_probabilities, trace_layers
from andrea.model.gpt import GPT, Block
from andrea.text.tokenizer import Tokenizer

# ---------------------------------------------------------------------------------------------------------------- facts


@dataclass(frozen=True)
class Source:
    """The origin of the model, for the page's title and footer."""

    title: str
    checkpoint: str | None  # its path
    tokenizer: str  # its identity


def model_facts(model: GPT, tokens: Tensor) -> dict[str, Any]:
    """Facts about the model, and about the prompt's tokens (1, T)."""
    config = model.config
    attention = model.blocks[0].attention
    function = type(attention.compatibility)
    name = function.__name__ if function in BUILT_IN.values() else f"{function.__module__}.{function.__name__}"
    modifiers = attention.modifiers or ScoreModifiers()
    functions = [block.attention.compatibility for block in model.blocks]
    # (L, H): the share of its component along the token's own value that each head's vector loses.
    shares = [block.attention.exclusive_share for block in model.blocks if block.attention.is_exclusive]
    visible = [visible_keys(block, model.document_mask(tokens), tokens) for block in model.blocks]
    distinct = list(dict.fromkeys(visible))
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": config.n_layer,
        "heads_per_layer": config.n_head,
        "d_head": config.head_width,
        "kv_heads": config.n_key_head,
        "sequence_length": config.sequence_length,
        "compatibility": name,
        "lowers": attention.compatibility.lowers,
        "qk_norm": config.qk_norm,
        "position": config.position,
        "rotary_share": config.rotary_share,
        "softcap": modifiers.softcap,
        "slopes": alibi_slopes(config.n_head).tolist() if modifiers.alibi else None,
        "sinks": None if attention.sink is None else [block.attention.sink.tolist() for block in model.blocks],
        "sharpness": [each.log_sharpness.exp().tolist() for each in functions] if function is Cosine else None,
        "mixing": [each.weight.tolist() for each in functions] if function is Additive else None,
        "convolution": [mixture(block.attention) for block in model.blocks] if config.qkv_convolution else None,
        "own_shares": [[1.0] * config.n_head if each is None else each.tolist() for each in shares] or None,
        "tokens": tokens[0].tolist(),
        "visible": [{"first": first, "stop": stop} for first, stop in distinct],
        "visible_of_layer": [distinct.index(each) for each in visible],
        "names": [vars(name) for name in NAMES],
        "components": COMPONENTS,
    }


def mixture(attention: MultiHeadAttention) -> list[dict[str, list[float]]]:
    """For each head, the shares of a token itself, of the one before, … in its query, key and value.

    A share is that of the weights' sizes, summed over the head's channels. Heads that share keys and values have the same
    numbers there.
    """
    weights = attention.taps.detach().float()  # (H + 2G, D, K)
    weights = torch.cat([1 + weights[..., :1], weights[..., 1:]], dim=-1).abs().sum(1)
    shares = (weights / weights.sum(-1, keepdim=True)).tolist()
    n_head, n_kv_head = attention.n_head, attention.n_kv_head
    groups = [n_head + head // (n_head // n_kv_head) for head in range(n_head)]
    return [
        {"query": shares[head], "key": shares[group], "value": shares[group + n_kv_head]}
        for head, group in enumerate(groups)
    ]


def visible_keys(block: Block, packing: Mask | None, tokens: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """tokens (1, T) -> for each query of the block, the index of the first visible key, and one past the last."""
    n_token = tokens.shape[1]
    first, stop = visible_interval(block.attention.mask_with(packing), n_token, n_token, 0, tokens.device)
    return tuple(first.flatten().tolist()), tuple(stop.flatten().tolist())


def json_number(number: float | Tensor | None) -> float | None:
    """The number with six significant digits, or None for NaN and infinity, which JSON lacks."""
    return None if number is None or not math.isfinite(float(number)) else float(f"{float(number):.6g}")


# ------------------------------------------------------------------------------------------------------------ head data
# The arrays that the page needs to show a head in full, and their encoding in the file.

LIKELIEST = 10  # next tokens shown at each position, with their probabilities with and without a head
LIKELIEST_ABLATED = 5  # next tokens shown at each position after the ablation of a head
ATTRIBUTED = 3  # number of tokens whose logits a vector raises most, and of those that it lowers most
COMPONENTS = 4  # number of a residual-stream vector's first components that are shown
SHOWN_NUMBERS = 6  # number of a query's, key's or value's first components that are shown

Layout = list[list[Any]]  # [name, type, shape] of each array of a block


def head_arrays(model: GPT, measurements: Measurements, head: Head, detail: bool) -> dict[str, np.ndarray]:
    """Arrays (T, …) of one head, without its ablation. detail: include direct logit attribution."""
    layer, index = head
    trace = measurements.layers[layer]
    value, written = trace.value[0, index], trace.written[0, index]  # (T, D)
    of_head = model.blocks[layer].attention.output_by_head[index]  # (d_model, D)
    compatibility = model.blocks[layer].attention.compatibility
    query, key = trace.query[0, index], trace.key[0, index]  # (T, N)
    n_token, width = query.shape
    arrays: dict[str, Tensor] = {
        "query": query,
        "key": key,
        "value": torch.cat((value.norm(dim=-1, keepdim=True), value[:, :SHOWN_NUMBERS]), -1),
    }
    if n_token * (n_token + 1) / 2 < 2 * n_token * width:
        scores = scores_of(query, key, compatibility.weight[index] if type(compatibility) is Additive else None)
        arrays |= {
            "scores": scores[tuple(torch.tril_indices(n_token, n_token))],  # row i has the keys 0 to i
            "query": query[:, :SHOWN_NUMBERS],
            "key": key[:, :SHOWN_NUMBERS],
        }
    if model.blocks[layer].attention.is_exclusive:
        arrays["own_value"] = along_own_value(trace.retrieved[0, index], value)
    if len(trace.value_parts) > 1:
        norms = [part[0, index].norm(dim=-1) for part in trace.value_parts.values()]
        arrays["value_parts"] = torch.stack(norms, dim=-1)  # (T, parts)
    if trace.gate is not None:
        arrays["gate"] = trace.gate[0, index, :, :SHOWN_NUMBERS]  # (T, 1) or (T, shown numbers)
    vectors = torch.cat((value, written))  # (2 T, D): of each key, of each query
    added = vectors @ of_head.T
    added = {"write": torch.cat((added.norm(dim=-1, keepdim=True), added[:, :COMPONENTS]), -1)}
    if detail:
        added["logits_ids"], added["logits"] = logit_attribution(model, layer, index, vectors, ATTRIBUTED)
    for name, both in added.items():
        arrays[f"key_{name}"], arrays[f"query_{name}"] = both.chunk(2)
    return as_arrays(arrays, model.n_vocab)


def scores_of(query: Tensor, key: Tensor, mixing: Tensor | None) -> Tensor:
    """query, key (T, N) as in `LayerTrace` -> what the compatibility function says, (T, T), in double precision.

    mixing: w (N,) of the additive function, whose scores are no dot products.
    """
    query, key = query.cpu().double(), key.cpu().double()  # not every device has fp64
    if mixing is None:
        return query @ key.T
    return torch.stack([torch.tanh(row + key) @ mixing.cpu().double() for row in query])


def along_own_value(retrieved: Tensor, value: Tensor) -> Tensor:
    """For exclusive attention: z and the own values, (T, D) each -> (T, 2): z·v / (v·v + ε), and the cosine of z and v."""
    z, v = retrieved.cpu().double(), value.cpu().double()
    along = (z * v).sum(-1) / (v.square().sum(-1) + OWN_VALUE_EPSILON)
    return torch.stack((along, functional.cosine_similarity(z, v, dim=-1, eps=1e-30)), -1)


def ablation_arrays(candidates: Tensor, ablated: Tensor) -> dict[str, np.ndarray]:
    """Arrays of the predicted next tokens without a head. candidates (T, C): ids. ablated (T, V): ln p without it."""
    top = ablated.topk(LIKELIEST_ABLATED)
    left = {"ablated_candidates": ablated.gather(-1, candidates), "ablated_top": top.values}
    arrays = {name: each.exp() for name, each in left.items()} | {"ablated_top_ids": top.indices}
    return as_arrays(arrays, ablated.shape[-1])


def as_arrays(tensors: dict[str, Tensor], n_vocab: int) -> dict[str, np.ndarray]:
    """Numbers as fp32; token ids below n_vocab in two bytes, or in four for a larger vocabulary."""
    id_type = np.uint16 if n_vocab <= 1 << 16 else np.uint32
    return {
        name: each.cpu().numpy().astype(np.float32 if each.is_floating_point() else id_type)
        for name, each in tensors.items()
    }


def ids_in(arrays: dict[str, np.ndarray]) -> set[int]:
    """The token ids in the arrays that hold such."""
    return {token for name, array in arrays.items() if name.endswith("_ids") for token in array.flatten().tolist()}


def pack(arrays: dict[str, np.ndarray]) -> tuple[str, Layout]:
    """Returns the base64 of all arrays, and their layout. Arrays of larger types come first, for alignment."""
    ordered = sorted(arrays.items(), key=lambda item: -item[1].itemsize)
    layout = [[name, array.dtype.str.lstrip("<|"), list(array.shape)] for name, array in ordered]
    raw = b"".join(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes() for _, array in ordered)
    return base64.b64encode(raw).decode("ascii"), layout


# --------------------------------------------------------------------------------------------------------- measurements

MAP_SIDE = 32  # most rows and columns of a head's small map

Head = tuple[int, int]  # layer, head


@dataclass(frozen=True)
class Measurements:
    """Measurements on one prompt. Only small maps are kept: full maps (T, T) would need 600 MB at T = 1024."""

    tokens: Tensor  # (1, T)
    layers: list[LayerTrace]  # with empty scores and weights
    maps: np.ndarray  # (L, H, side, side) uint8: 255 times the square root of the largest weight of a tile
    strongest: list[Tensor]  # of each layer: the keys of each query with the largest weights, (H, T, n)
    scores: dict[str, Tensor]  # (L, H) each, on the prompt
    probed: dict[str, Tensor]  # (L, H) each, on the fixed texts that decide the names
    log_probabilities: Tensor  # (T, V): ln p of the next token at each position

    @property
    def heads(self) -> list[Head]:
        n_layer, n_head = self.maps.shape[:2]
        return [(layer, head) for layer in range(n_layer) for head in range(n_head)]

    @property
    def gates(self) -> Tensor | None:
        """The gate of every head for every token, (L, H, T), the mean over a head's channels; None without gates."""
        if self.layers[0].gate is None:
            return None
        return torch.stack([layer.gate[0].mean(-1) for layer in self.layers])

    @property
    def named(self) -> dict[Head, list[str]]:
        """The heads that have a name, with the scores that gave them their names."""
        names = {head: [name.score for name in names_of(self.probed, *head)] for head in self.heads}
        return {head: found for head, found in names.items() if found}

    def facts_of(self, head: Head) -> dict[str, Any]:
        """The head's scores and names, as the page's script reads them."""
        return {
            "prompt": {name: json_number(score[head]) for name, score in self.scores.items()},
            "probe": {name: json_number(score[head]) for name, score in self.probed.items()},
            "names": [name.score for name in names_of(self.probed, *head)],
        }

    def by_interest(self) -> list[Head]:
        """All heads, most interesting first.

        The interest of a head is the largest ratio between one of its scores and the threshold of the score's name.
        """

        def interest(head: Head) -> float:
            factors = [float(self.probed[name.score][head]) / name.threshold for name in NAMES]
            return max((factor for factor in factors if not math.isnan(factor)), default=0.0)

        return sorted(self.heads, key=interest, reverse=True)


@torch.no_grad()
def measure(
    model: GPT, tokenizer: Tokenizer, tokens: list[int], map_side: int = MAP_SIDE, weights: np.ndarray | None = None
) -> Measurements:
    """Measure every head on a prompt of at least one token. weights (L, H, T, T) float32: is filled, if it is given."""
    prompt = torch.tensor([tokens], device=model.embedding.weight.device)
    targets = targets_of(prompt, tokenizer.token_bytes())
    layers, maps, strongest, scores = [], [], [], []
    n_key = keys_per_query(model.config.n_layer * model.config.n_head, len(tokens))
    for index, layer in enumerate(trace_layers(model, prompt)):
        if weights is not None:
            weights[index] = layer.weights[0].cpu().numpy()
        maps.append(small_maps(layer.weights[0], map_side))
        strongest.append(layer.weights[0].topk(n_key).indices)
        scores.append(score_layer(layer, targets))
        empty = layer.scores.new_empty(0)
        layers.append(dataclasses.replace(layer, scores=empty, weights=empty))
    return Measurements(
        tokens=prompt,
        layers=layers,
        maps=np.stack(maps),
        strongest=strongest,
        scores=stack_layers(scores),
        probed=probe_scores(model, tokenizer),
        log_probabilities=next_log_probabilities(model, layers[-1].after)[0],
    )


def small_maps(weights: Tensor, side: int) -> np.ndarray:
    """weights (H, T, T) -> maps (H, s, s) uint8, s = min(T, side): 255 · sqrt(largest weight in each tile)."""
    side = min(side, weights.shape[-1])
    largest = functional.adaptive_max_pool2d(weights[None], side)[0]
    return (255 * largest.clamp(0, 1).sqrt()).round().to(torch.uint8).cpu().numpy()


# ------------------------------------------------------------------------------------------------------------- the page

TEMPLATE = Path(__file__).parent / "web" / "template.html"
LEAST_PROBABILITY = 1e-38  # fp32 rounds smaller ones to zero, which has no logarithm
FACTS_BYTES = 200  # extra bytes in the page's facts for a head in full
MOST_TOKENS_PATCHED = 128  # of a prompt for which heads are patched: the time grows with the square of the length
ELEMENT_BYTES = 100  # of the HTML element around a head's arrays


@dataclass(frozen=True)
class Panel:
    """The data of a section of the page that stands beside the heads."""

    name: str  # of its block in the file
    arrays: dict[str, np.ndarray]  # token ids in arrays whose names end with _ids
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


class LensPage:
    """The page of one prompt. `most_full_heads` returns how many heads fit in full; `render` returns the HTML text.

    detail: include ablations and direct logit attribution, which take most of the time. panels: further sections.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        measurements: Measurements,
        source: Source,
        *,
        detail: bool = True,
        panels: Sequence[Panel] = (),
    ) -> None:
        self.model, self.measurements, self.source, self.detail = model, measurements, source, detail
        self.panels = panels
        self.texts = token_texts(tokenizer)
        # Token ids (T, C): the likeliest next tokens of each position, and the prompt's next token, the target. The prompt's
        # last position has none: its target is the likeliest token.
        likeliest = measurements.log_probabilities.topk(LIKELIEST).indices
        targets = torch.cat((measurements.tokens[0, 1:], likeliest[-1:, 0]))
        self.candidates = torch.cat((likeliest, targets[:, None]), -1)
        probabilities = measurements.log_probabilities.gather(-1, self.candidates).exp()
        predicted = {"candidates": probabilities, "candidate_ids": self.candidates}
        self.blocks = {"maps": pack({"maps": measurements.maps}), "next": pack(as_arrays(predicted, model.n_vocab))}
        if measurements.gates is not None:
            self.blocks["gates"] = pack(as_arrays({"gates": measurements.gates}, model.n_vocab))
        self.blocks |= {panel.name: pack(panel.arrays) for panel in panels if panel.arrays}
        if detail:
            self.explain()

    @torch.no_grad()
    def explain(self) -> None:
        """Find what each part adds to the candidates' logits, and what each head reads from the heads before it."""
        model, layers = self.model, self.measurements.layers
        self.parts = list(written_parts(model, self.measurements.tokens, layers))
        self.blocks["direct"] = pack(direct_arrays(logit_parts(model, layers[-1], self.parts, self.candidates)))
        if 1 < len(layers) and self.measurements.tokens.shape[1] <= MOST_TOKENS_PATCHED:
            effects = [head_effects(model, layers, self.parts, layer) for layer in range(1, len(layers))]
            self.blocks["reads"] = pack(read_arrays(effects))

    def pairs_of(self, layer: int, heads: list[int]) -> dict[int, dict[str, np.ndarray]]:
        """The arrays of the pairs of parts of each of these heads of a layer; empty if scores are not bilinear."""
        measurements = self.measurements
        scores = score_parts(self.model, measurements.layers, self.parts, layer, heads)
        if scores is None:
            return {head: {} for head in heads}
        n_row = len(parts_of(self.model)) * (self.model.config.qkv_convolution or 1)
        keys = measurements.strongest[layer]
        return {head: pair_arrays(scores, index, keys[head], n_row) for index, head in enumerate(heads)}

    def most_full_heads(self, limit_bytes: int) -> int:
        """The number of heads that can be shown in full on a page of at most limit_bytes."""
        n_head = len(self.measurements.heads)
        texts = dict(enumerate(self.texts)) if self.detail else self.texts_of(set())
        fixed = len(self.assemble({}, {}, texts)) + FACTS_BYTES * n_head
        arrays = head_arrays(self.model, self.measurements, (0, 0), self.detail)  # as large as any other head's
        if self.detail:
            arrays |= ablation_arrays(self.candidates, self.measurements.log_probabilities)
            arrays |= self.pairs_of(0, [0])[0]
            arrays["effect"] = arrays["ablated_candidates"][:, -1]  # its part of the block with all effects
        each = len(pack(arrays)[0]) + ELEMENT_BYTES
        return max(0, min(n_head, (limit_bytes - fixed) // each))

    def render(self, full: list[Head]) -> str:
        """The HTML text of the page that shows the heads `full` in full."""
        packed, effects, token_ids = {}, {}, set()
        for head, arrays in self.arrays_of(full):
            packed[head] = pack(arrays)
            token_ids |= ids_in(arrays)
            if self.detail:
                effects[head] = arrays["ablated_candidates"][:, -1]
        return self.assemble(packed, effects, self.texts_of(token_ids))

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
                pairs = self.pairs_of(layer, indices)
                arrays = {index: each | pairs[index] for index, each in arrays.items()}
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
        """The texts of the prompt's tokens, the candidates, the tokens of panels, and the tokens `used`."""
        of_panels = [ids_in(panel.arrays) for panel in self.panels]
        shown = (
            used.union(*of_panels) | set(self.candidates.flatten().tolist()) | set(self.measurements.tokens[0].tolist())
        )
        return {token: self.texts[token] for token in sorted(shown)}

    def assemble(
        self, packed: dict[Head, tuple[str, Layout]], effects: dict[Head, np.ndarray], texts: dict[int, str]
    ) -> str:
        """The template filled with all data. packed: the heads that are shown in full. texts: token id -> text.

        effects: (T,) of each of these heads, the target's probability without the head; empty without ablations.
        """
        blocks = dict(self.blocks)
        if effects:
            blocks["effects"] = pack({"ablated": np.stack([effects[head] for head in packed])})
        layouts = {name: layout for name, (_, layout) in blocks.items()}
        for (layer, index), (encoded, layout) in packed.items():
            blocks[f"{layer}.{index}"] = (encoded, layout)
            layouts["head"] = layout
        facts = {
            **vars(self.source),
            **model_facts(self.model, self.measurements.tokens),
            "score_width": self.measurements.layers[0].query.shape[-1],
            "value_parts": list(self.measurements.layers[0].value_parts),
            "detail": self.detail,
            **{name: fact for panel in self.panels for name, fact in panel.facts.items()},
            "logit_softcap": self.model.config.logit_softcap,
            "parts": [[part.kind, part.layer, part.head] for part in parts_of(self.model)],
            "mixed": self.model.config.qkv_convolution or 1,
            "layouts": layouts,
            "texts": texts,
            "heads": [self.facts_of_head(head, head in packed, effects) for head in self.measurements.heads],
        }
        elements = [f'<script type="application/json" id="facts">{json_for_script(facts)}</script>']
        for name, (encoded, _) in blocks.items():
            elements.append(f'<script type="text/plain" id="data-{name}">{encoded}</script>')
        return fill_template(TEMPLATE, {"TITLE": html.escape(self.source.title), "DATA": "\n".join(elements)})

    def facts_of_head(self, head: Head, is_full: bool, effects: dict[Head, np.ndarray]) -> dict[str, Any]:
        """The head's scores and names, whether it is shown in full, and the change of the loss by its ablation."""
        change = json_number(self.loss_change(effects[head])) if head in effects else None
        return self.measurements.facts_of(head) | {"full": is_full, "loss_change": change}


END_OF_TEXT = "⟨end-of-text⟩"
MARKS = {" ": "␣", "\n": "↵", "\t": "→"}


def token_texts(tokenizer: Tokenizer) -> list[str]:
    """The text of each token id."""
    texts = [visible_text(piece) for piece in tokenizer.token_bytes()]
    for name, token in {END_OF_TEXT: tokenizer.end_of_text, **tokenizer.special}.items():
        texts[token] = name
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
