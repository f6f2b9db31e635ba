"""From what was measured to one file that shows it: data packed as base64 beside the page's own HTML, CSS and JavaScript.

T tokens, L layers, H heads, N width of a query or key as it is scored, D = d_head, V vocabulary. The page computes a
head's weights itself, in double precision, from the queries and keys given here in fp32.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from andrea.attention import Additive, Cosine
from andrea.attention.mask import visible_interval
from andrea.insight.lens.scores import NAMES, names_of, probe_scores, score_layer, stacked, targets_of
from andrea.insight.lens.trace import (
    LayerPass,
    next_log_probabilities,
    pushed_tokens,
    surroundings,
    walk,
    without_heads,
)
from andrea.model.gpt import GPT
from andrea.text.tokenizer import Tokenizer

FOLDER = Path(__file__).parent
MAP_SIDE = 32  # a head's small map has at most so many rows and columns
SHOWN_NEXT = 10  # likeliest next tokens of a position
SHOWN_WITHOUT = 5  # likeliest next tokens without a head
PUSHED = 3  # tokens a head pushes up, and as many down
LEAST_PROBABILITY = 1e-38  # below it fp32 holds no number to take the logarithm of
COMPONENTS = 4  # first numbers shown of what a head writes

Head = tuple[int, int]  # layer, head


@dataclass(frozen=True)
class Measured:
    """A prompt seen by every head. What is (T, T) for each head is reduced already: at T = 1024 all would be 600 MB."""

    tokens: Tensor  # (1, T)
    layers: list[LayerPass]  # scores and weights emptied
    maps: np.ndarray  # (L, H, side, side) uint8: 255 sqrt(largest weight of the tile)
    scores: dict[str, Tensor]  # (L, H) each, of this prompt
    probed: dict[str, Tensor]  # (L, H) each, of the fixed probes
    log_probabilities: Tensor  # (T, V): of the token after each position

    @property
    def named(self) -> dict[Head, list[str]]:
        n_layer, n_head = self.maps.shape[:2]
        everyone = [(layer, head) for layer in range(n_layer) for head in range(n_head)]
        names = {each: [name.score for name in names_of(self.probed, *each)] for each in everyone}
        return {each: found for each, found in names.items() if found}

    def by_interest(self) -> list[Head]:
        """Every head, named ones first, and each kind by how far its best score goes beyond its threshold."""
        n_layer, n_head = self.maps.shape[:2]

        def interest(each: Head) -> float:
            ratios = [float(self.probed[name.score][each]) / name.threshold for name in NAMES]
            return max((ratio for ratio in ratios if not math.isnan(ratio)), default=0.0)

        return sorted(((layer, head) for layer in range(n_layer) for head in range(n_head)), key=interest, reverse=True)


@torch.no_grad()
def measure(model: GPT, tokenizer: Tokenizer, tokens: list[int], map_side: int = MAP_SIDE) -> Measured:
    """Everything about a prompt's tokens (at least one) that the page shows of all heads."""
    given = torch.tensor([tokens], device=model.embedding.weight.device)
    targets = targets_of(given, tokenizer.token_bytes())
    kept, maps, scores = [], [], []
    for layer_pass in walk(model, given):
        maps.append(small_maps(layer_pass.weights[0], map_side))
        scores.append(score_layer(layer_pass, targets))
        nothing = layer_pass.scores.new_empty(0)
        kept.append(LayerPass(**(vars(layer_pass) | {"scores": nothing, "weights": nothing})))
    log_probabilities = next_log_probabilities(model, kept[-1].after)[0]
    return Measured(given, kept, np.stack(maps), stacked(scores), probe_scores(model, tokenizer), log_probabilities)


def small_maps(weights: Tensor, side: int) -> np.ndarray:
    """weights (H, T, T) -> (H, s, s) uint8, s = min(T, side): the largest weight of each tile, as 255 sqrt(weight)."""
    side = min(side, weights.shape[-1])
    pooled = functional.adaptive_max_pool2d(weights[None], side)[0]
    return (255 * pooled.clamp(0, 1).sqrt()).round().to(torch.uint8).cpu().numpy()


# ---------------------------------------------------------------------------------------------------- one head's data


def head_arrays(model: GPT, measured: Measured, each: Head, detail: bool) -> dict[str, np.ndarray]:
    """What the page needs to open a head, but for ablations: (T, …) arrays, float32 and uint16."""
    layer, head = each
    layer_pass = measured.layers[layer]
    value, retrieved = layer_pass.value[0, head], layer_pass.retrieved[0, head]  # (T, D)
    of_head = model.blocks[layer].attention.output_by_head[head]  # (d_model, D)
    arrays: dict[str, Tensor] = {
        "query": layer_pass.query[0, head],
        "key": layer_pass.key[0, head],
        "value": value,
    }
    for name, vectors in (("key", value), ("query", retrieved)):
        written = vectors @ of_head.T  # (T, d_model)
        arrays[f"{name}_write"] = torch.cat((written.norm(dim=-1, keepdim=True), written[:, :COMPONENTS]), -1)
        if detail:
            ids, changes = pushed_tokens(model, layer, head, vectors, PUSHED)
            arrays |= {f"{name}_push": changes, f"{name}_push_ids": ids}
    return {name: as_array(tensor) for name, tensor in arrays.items()}


def ablation_arrays(known: Tensor, without: Tensor) -> dict[str, np.ndarray]:
    """What becomes of the next token without a head. known (T, K) ids whose probabilities are kept, without (T, V) ln p."""
    top = without.topk(SHOWN_WITHOUT)
    arrays = {"off_known": without.gather(-1, known).exp(), "off_top": top.values.exp(), "off_top_ids": top.indices}
    return {name: as_array(tensor) for name, tensor in arrays.items()}


def as_array(tensor: Tensor) -> np.ndarray:
    kind = np.float32 if tensor.is_floating_point() else np.uint16  # token ids are below 65536: two-byte shards
    return tensor.cpu().numpy().astype(kind)


def known_tokens(measured: Measured) -> Tensor:
    """(T, SHOWN_NEXT + 1) ids: the likeliest next tokens of each position, and the one to watch there: the one that does
    come, at the end of the prompt the likeliest."""
    top = measured.log_probabilities.topk(SHOWN_NEXT).indices
    watched = torch.cat((measured.tokens[0, 1:], top[-1:, 0]))
    return torch.cat((top, watched[:, None]), -1)


def pack(arrays: dict[str, np.ndarray]) -> tuple[str, list[list[Any]]]:
    """Base64 of the arrays one after another, four-byte numbers first, and where each lies: [name, type, shape]."""
    ordered = sorted(arrays.items(), key=lambda item: -item[1].itemsize)
    layout = [[name, array.dtype.str.lstrip("<|"), list(array.shape)] for name, array in ordered]
    raw = b"".join(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes() for _, array in ordered)
    return base64.b64encode(raw).decode("ascii"), layout


def head_bytes(measured: Measured, detail: bool) -> int:
    """How long one head's base64 is."""
    layer = measured.layers[0]
    n_token = measured.tokens.shape[1]
    numbers = 2 * layer.query.shape[-1] + layer.value.shape[-1] + 2 * (1 + COMPONENTS)
    ids = 0
    if detail:
        numbers += 2 * 2 * PUSHED + SHOWN_NEXT + 1 + SHOWN_WITHOUT + 1  # the last in the block of all effects
        ids = 2 * 2 * PUSHED + SHOWN_WITHOUT
    return -(-n_token * (4 * numbers + 2 * ids) // 3) * 4


# ---------------------------------------------------------------------------------------------------------- the file


@dataclass(frozen=True)
class Facts:
    """What the page says about where it comes from."""

    title: str
    step: int | None
    checkpoint: str | None
    tokenizer: str


class Page:
    """The page with every head's small map; `room` says how many heads fit in full, `write` puts them in.

    detail: with ablations and the tokens that heads push, which take most of the time.
    """

    def __init__(
        self, model: GPT, tokenizer: Tokenizer, measured: Measured, facts: Facts, *, detail: bool = True
    ) -> None:
        self.model, self.measured, self.facts, self.detail = model, measured, facts, detail
        self.texts = [visible_text(piece) for piece in tokenizer.token_bytes()]
        self.texts[tokenizer.end_of_text] = "⟨end-of-text⟩"
        self.known = known_tokens(measured)  # (T, K)
        known_ln = measured.log_probabilities.gather(-1, self.known)
        self.blocks = {
            "maps": pack({"maps": measured.maps}),
            "next": pack({"known": as_array(known_ln.exp()), "known_ids": as_array(self.known)}),
        }

    def room(self, limit_bytes: int) -> int:
        """How many heads the page holds in full, at most limit_bytes long."""
        n_layer, n_head = self.measured.maps.shape[:2]
        everything = self.texts if self.detail else self.texts_of(set())
        fixed = len(self.render({}, everything)) + 200 * n_layer * n_head
        return max(0, min(n_layer * n_head, (limit_bytes - fixed) // (head_bytes(self.measured, self.detail) + 100)))

    def write(self, full: list[Head]) -> str:
        """The file, with the heads of `full` in full."""
        packed: dict[Head, tuple[str, list]] = {}
        used: set[int] = set()
        effects: dict[Head, np.ndarray] = {}  # (T,): the probability of the watched token without the head
        for each, arrays in self.arrays_of(full):
            packed[each] = pack(arrays)
            for name, array in arrays.items():
                if name.endswith("_ids"):
                    used |= set(array.flatten().tolist())
            if self.detail:
                effects[each] = arrays["off_known"][:, -1]
        return self.render(packed, self.texts_of(used), effects)

    def arrays_of(self, full: list[Head]) -> Iterator[tuple[Head, dict[str, np.ndarray]]]:
        for layer in sorted({layer for layer, _ in full}):
            heads = sorted(head for each, head in full if each == layer)
            arrays = {head: head_arrays(self.model, self.measured, (layer, head), self.detail) for head in heads}
            if self.detail:
                switched_off = without_heads(
                    self.model, self.measured.tokens, layer, self.measured.layers[layer], heads
                )
                for head, without in switched_off:
                    arrays[head] |= ablation_arrays(self.known, without)
            for head in heads:
                yield (layer, head), arrays[head]

    def loss_change(self, without: np.ndarray) -> float | None:
        """Mean over the prompt of ln p - ln p without the head, of the token that does come: nats. without (T,)."""
        if len(without) == 1:
            return None
        watched = self.measured.log_probabilities.gather(-1, self.known[:, -1:])[:-1, 0].cpu().double().numpy()
        return float((watched - np.log(np.maximum(without[:-1].astype(np.float64), LEAST_PROBABILITY))).mean())

    def texts_of(self, used: set[int]) -> dict[int, str]:
        shown = used | set(self.known.flatten().tolist()) | set(self.measured.tokens[0].tolist())
        return {token: self.texts[token] for token in sorted(shown)}

    def render(
        self,
        packed: dict[Head, tuple[str, list]],
        texts: dict[int, str] | list[str],
        effects: dict[Head, np.ndarray] | None = None,
    ) -> str:
        blocks = dict(self.blocks)
        if effects:
            blocks["effects"] = pack({"off": np.stack([effects[each] for each in packed])})  # (full heads, T)
        layouts = {name: layout for name, (_, layout) in blocks.items()}
        for (layer, head), (encoded, layout) in packed.items():
            blocks[f"{layer}.{head}"] = (encoded, layout)
            layouts["head"] = layout
        data = self.facts_of_model() | {
            "layouts": layouts,
            "texts": texts if isinstance(texts, dict) else dict(enumerate(texts)),
            "heads": self.facts_of_heads(packed, effects or {}),
        }
        scripts = [f'<script type="application/json" id="facts">{as_json(data)}</script>']
        scripts += [
            f'<script type="text/plain" id="data-{name}">{encoded}</script>' for name, (encoded, _) in blocks.items()
        ]
        parts = {
            "TITLE": self.facts.title.replace("&", "&amp;").replace("<", "&lt;"),
            "STYLE": (FOLDER / "style.css").read_text(encoding="utf-8"),
            "DATA": "\n".join(scripts),
            "PROGRAM": (FOLDER / "script.js").read_text(encoding="utf-8"),
        }
        page = (FOLDER / "template.html").read_text(encoding="utf-8")
        return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], page)  # in one pass: a prompt may hold {{DATA}}

    def facts_of_model(self) -> dict[str, Any]:
        model, config = self.model, self.model.config
        attention = model.blocks[0].attention
        tokens = self.measured.tokens
        _, packing = surroundings(model, tokens)
        mask = attention.mask if packing is None else attention.mask & packing
        first, stop = visible_interval(mask, tokens.shape[1], tokens.shape[1], 0, tokens.device)
        function = type(attention.compatibility).__name__
        mixing = [block.attention.compatibility for block in model.blocks]
        return {
            **vars(self.facts),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "layers": config.n_layer,
            "heads_per_layer": config.n_head,
            "d_model": config.d_model,
            "d_head": config.d_head,
            "kv_heads": config.n_kv_head or config.n_head,
            "sequence_length": config.sequence_length,
            "compatibility": function,
            "qk_norm": config.qk_norm,
            "position": config.position,
            "softcap": config.logit_softcap,
            "sharpness": [each.log_sharpness.exp().tolist() for each in mixing]
            if function == Cosine.__name__
            else None,
            "mixing": [each.weight.tolist() for each in mixing] if function == Additive.__name__ else None,
            "tokens": tokens[0].tolist(),
            "visible_first": first.flatten().tolist(),
            "visible_stop": stop.flatten().tolist(),
            "detail": self.detail,
            "names": [vars(name) for name in NAMES],
            "components": COMPONENTS,
        }

    def facts_of_heads(self, full: dict[Head, Any], effects: dict[Head, np.ndarray]) -> list[dict[str, Any]]:
        n_layer, n_head = self.measured.maps.shape[:2]
        named = self.measured.named
        return [
            {
                "prompt": {name: short(score[layer, head]) for name, score in self.measured.scores.items()},
                "probe": {name: short(score[layer, head]) for name, score in self.measured.probed.items()},
                "names": named.get((layer, head), []),
                "full": (layer, head) in full,
                "loss_change": short(self.loss_change(effects[layer, head])) if (layer, head) in effects else None,
            }
            for layer in range(n_layer)
            for head in range(n_head)
        ]


def short(number: float | Tensor | None) -> float | None:
    """Six significant digits, null where there is no number."""
    return None if number is None or not math.isfinite(float(number)) else float(f"{float(number):.6g}")


def as_json(data: Any) -> str:
    """JSON that may stand within a script element: no '<' that could end it."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def visible_text(piece: bytes) -> str:
    """A token's bytes as they are shown: blanks, line ends and tabs made visible, what is no text as its hex digits."""
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError:
        return "⟨" + piece.hex(" ").upper() + "⟩"
    for hidden, shown in ((" ", "␣"), ("\n", "↵"), ("\t", "→")):
        text = text.replace(hidden, shown)
    return "".join(character if character.isprintable() else f"⟨{ord(character):02X}⟩" for character in text)
