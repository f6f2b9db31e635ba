"""Why a head looked there: the parts of a score, of what a head reads from another, and of a logit.

A residual stream is a sum: the token's embedding, its pair's, its position's, and what each head and each MLP of the earlier
layers has written. If the scales of the norms are frozen at the values that they have on this prompt, queries and keys are linear
in the stream, and a score is a sum over pairs (part of the query's stream, part of the key's stream). The sum is exact
(Kamath et al. 2025, "Tracing Attention Computation Through Feature Interactions", transformer-circuits.pub).

One prompt: T tokens, H heads, G key/value heads, D = d_head, N width of a query or key from which a score is computed, P parts,
K tokens that a convolution mixes (1 without), R = P K + 1 rows: what a query or key has from one part and one token. The last
row is that of the biases. V vocabulary, C candidates for the next token. A model that was opened, or merged (model/lora.py),
has no low-rank factors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from andrea.attention import Cosine
from andrea.insight.lens.trace import LayerTrace, attend_as, block_outputs
from andrea.model.gpt import GPT
from andrea.model.positions import LearnedPosition

# ------------------------------------------------------------------------------------------------ parts of the stream


@dataclass(frozen=True)
class Part:
    """One summand of the residual stream."""

    kind: str  # token, pair (of tokens), position, head, mlp
    layer: int = 0  # of a head or an MLP
    head: int = 0


def parts_of(model: GPT) -> list[Part]:
    """The parts of the stream after the last layer, in the order in which they are written.

    The stream before layer l is the sum of those with `layer` below l, and of the biases of attention's output.
    """
    first = [Part("token")]
    first += [Part("pair")] if model.bigram_embedding is not None else []
    first += [Part("position")] if isinstance(model.position, LearnedPosition) else []
    layers = range(model.config.n_layer)
    heads = range(model.config.n_head)
    return first + [
        part for layer in layers for part in (*(Part("head", layer, head) for head in heads), Part("mlp", layer))
    ]


def written_parts(model: GPT, tokens: Tensor, layers: Sequence[LayerTrace]) -> Iterator[Tensor]:
    """The parts of the stream after `layers`, some at a time, (some of P, T, d_model), in the order of `parts_of`.

    tokens (1, T). layers: the traces of the first layers of the model.
    """
    alone = [model.embedding(tokens)]
    x = model.embed(tokens)
    position = model.position.add(torch.zeros_like(x), 0)
    if model.bigram_embedding is not None:
        alone.append(x - alone[0] - position)
    if isinstance(model.position, LearnedPosition):
        alone.append(position)
    yield torch.cat(alone)
    for block, trace in zip(model.blocks, layers, strict=False):
        heads = torch.einsum("hmd,htd->htm", block.attention.output_by_head, trace.written[0])
        _, of_mlp = block_outputs(block, trace.before, trace.written)
        yield torch.cat((heads, of_mlp))


def biases_written(model: GPT, n_layer: int) -> Tensor:
    """(d_model,): the biases of attention's output in the first n_layer layers. They are in the stream of every token."""
    biases = [block.attention.output.bias for block in model.blocks[:n_layer]]
    return sum((bias for bias in biases if bias is not None), torch.zeros_like(model.embedding.weight[0]))


@dataclass(frozen=True)
class FrozenNorm:
    """A norm of the stream x, with the scale that it has for this x. It is linear in each part of x, up to its bias."""

    scale: Tensor  # (T, 1): 1 / the root mean square of each token, or 1 / its standard deviation
    weight: Tensor  # (d_model,)
    bias: Tensor | None
    centres: bool  # a layer norm subtracts the mean over the channels, which is linear

    @staticmethod
    def at(norm: nn.Module, x: Tensor) -> FrozenNorm:
        """norm: of the model. x (T, d_model): the stream that it reads."""
        centres = isinstance(norm, nn.LayerNorm)
        x = x - x.mean(-1, keepdim=True) if centres else x
        scale = (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
        return FrozenNorm(scale, norm.weight, getattr(norm, "bias", None), centres)

    def __call__(self, part: Tensor) -> Tensor:
        """What is left of a part (…, T, d_model) of the stream, without the norm's bias."""
        part = part - part.mean(-1, keepdim=True) if self.centres else part
        return part * self.scale * self.weight

    def of_biases(self, stream: Tensor) -> Tensor:
        """(T, d_model): the norm's bias, and what is left of the biases (d_model,) in the stream."""
        normed = self(stream.expand(len(self.scale), -1))
        return normed if self.bias is None else normed + self.bias


# ---------------------------------------------------------------------------------------------------- parts of a score


@dataclass(frozen=True)
class ScoreParts:
    """The queries and keys of some heads of a layer as sums of rows; a score is the sum over all pairs of rows.

    Row p K + d is what part p of the stream gives, d tokens before. Row R - 1 holds the biases of norms and linear layers. A
    soft cap or ALiBi comes after the sum; an attention sink is no part of a score.
    """

    query: Tensor  # (R, heads, T, N)
    key: Tensor  # (R, heads, T, N)


def score_parts(
    model: GPT, layers: Sequence[LayerTrace], parts: Sequence[Tensor], layer: int, heads: Sequence[int]
) -> ScoreParts | None:
    """The parts of the scores of `heads` in a layer; None where scores are not bilinear in queries and keys.

    layers: the traces of all layers. parts: from `written_parts`.
    """
    projection = FrozenProjection(model, layers[layer], layer)
    if not projection.is_bilinear():
        return None
    groups = [head * projection.attention.n_kv_head // model.config.n_head for head in heads]
    heads = list(heads)
    rows = []
    for part in parts[: layer + 1]:
        query, key = projection.rows(projection.norm(part))
        rows.append((query[:, heads], key[:, groups]))  # copies: the rows of the other heads are freed
    query, key = (each.sum(0, keepdim=True) for each in projection.rows(projection.biases, has_bias=True))
    rows.append((query[:, heads], key[:, groups]))
    return ScoreParts(*(torch.cat(side) for side in zip(*rows, strict=True)))


class FrozenProjection:
    """`MultiHeadAttention.project` of one layer, without values. It is linear, because the scales of all norms are frozen."""

    def __init__(self, model: GPT, trace: LayerTrace, layer: int) -> None:
        block = model.blocks[layer]
        self.attention, self.shared = block.attention, trace.shared
        self.norm = FrozenNorm.at(block.attention_norm, trace.before[0])
        self.biases = self.norm.of_biases(biases_written(model, layer))[None]  # (1, T, d_model): also of earlier layers
        # What the frozen scales are computed from: the whole queries (1, H, T, D) and keys (1, G, T, D), before and after QK-norm.
        rows = self.convolved(block.attention_norm(trace.before), has_bias=True)
        self.projected = [each.sum(0, keepdim=True) for each in rows]
        self.normed = self.qk_normed(self.projected)

    def rows(self, x: Tensor, has_bias: bool = False) -> tuple[Tensor, Tensor]:
        """Normed parts x (P, T, d_model) -> rows of the queries (P K, H, T, N) and of the keys (P K, G, T, N)."""
        query, key = self.lowered(*self.qk_normed(self.convolved(x, has_bias)))
        place = self.shared.place
        return (query, key) if place is None else (place(query), place(key))

    def convolved(self, x: Tensor, has_bias: bool) -> list[Tensor]:
        """x (P, T, d_model) -> W_Q x (P K, H, T, D) and W_K x (P K, G, T, D), with the taps of a convolution.

        A row for each token that the convolution mixes, where `convolve_readable` has their sum.
        """
        attention, found = self.attention, []
        n_heads = [attention.n_head, attention.n_kv_head, attention.n_kv_head]
        taps = (None, None) if attention.taps is None else attention.taps.split(n_heads)[:2]
        for layer, its_taps in zip((attention.query, attention.key), taps, strict=True):
            projected = x @ layer.weight.T
            projected = attention.heads(projected if layer.bias is None or not has_bias else projected + layer.bias)
            if its_taps is not None:
                by_distance = [self.tapped(projected, its_taps, distance) for distance in range(its_taps.shape[-1])]
                projected = torch.stack(by_distance, 1).flatten(0, 1)
            found.append(projected)
        return found

    def tapped(self, x: Tensor, taps: Tensor, distance: int) -> Tensor:
        """What the token `distance` before gives to each, (P, heads, T, D). x (P, heads, T, D), taps (heads, D, K)."""
        earlier = pad(x, (0, 0, distance, 0))[:, :, : x.shape[2]]
        place = self.shared.document_place
        if place is not None:
            earlier = earlier.masked_fill((place < distance)[:, None, :, None], 0.0)
        weight = taps[..., distance].to(x.dtype)[:, None]  # (heads, 1, D)
        return earlier * (1 + weight if distance == 0 else weight)

    def qk_normed(self, sides: Sequence[Tensor]) -> list[Tensor]:
        """QK-norm of rows of the queries and of the keys, with the scales of the whole ones."""
        attention, epsilon = self.attention, self.attention.qk_norm_epsilon
        if epsilon is None:
            return list(sides)
        normed = []
        for rows, whole, weight in zip(sides, self.projected, (attention.query_norm, attention.key_norm), strict=True):
            scale = (whole.square().mean(-1, keepdim=True) + epsilon).rsqrt()
            normed.append(rows * scale if weight is None else rows * scale * weight.to(rows.dtype))
        return normed

    def lowered(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of queries and keys -> those whose dot products are the parts of the scores."""
        function = self.attention.compatibility
        if type(function) is Cosine:  # the lengths of the whole vectors are frozen, like the scale of a norm
            return function.sharpness(query) * query * one_over_length(self.normed[0]), key * one_over_length(
                self.normed[1]
            )
        return function.lowered(query, key)

    def is_bilinear(self) -> bool:
        """Whether `lowered` is linear. A user's function need not be: two parts of the whole vectors are tried."""
        function = self.attention.compatibility
        if not function.lowers:
            return False
        some = [0.5 * each.flip(-1) for each in self.normed]
        rest = [whole - part for whole, part in zip(self.normed, some, strict=True)]
        whole, some, rest = self.lowered(*self.normed), self.lowered(*some), self.lowered(*rest)
        tolerance = [LARGEST_ROUNDING * each.abs().max() for each in whole]
        return all(
            bool(((a + b - c).abs() <= most).all()) for a, b, c, most in zip(some, rest, whole, tolerance, strict=True)
        )


LARGEST_ROUNDING = 1e-4  # of a sum of two vectors in fp32, relative to the largest number


def one_over_length(vectors: Tensor) -> Tensor:
    """Vectors (…, D) -> 1 / length (…, 1), and 0 for a vector of zeros."""
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return 1 / torch.where(length > 0, length, torch.inf)


@dataclass(frozen=True)
class LargestPairs:
    """The pairs of rows that add most to the scores of some cells: n keys of each of T queries, the M largest pairs of each."""

    rows: Tensor  # (T, n, M, 2) int64: of the query and of the key
    values: Tensor  # (T, n, M): what each pair adds to the score, the largest in size first
    biases: Tensor  # (T, n): the sum of all pairs with the biases in them; they are not among the largest


PAIRS_AT_ONCE = 1 << 20  # numbers: 4 MB, which stay in the cache


def largest_pairs(query: Tensor, key: Tensor, keys: Tensor, count: int) -> LargestPairs:
    """The `count` largest pairs of cells. query, key (R, T, N): of one head, from `ScoreParts`. keys (T, n): of each query."""
    n_row = len(query) - 1
    count = min(count, n_row * n_row)
    of_queries, of_keys = (side[:-1].transpose(0, 1).contiguous() for side in (query, key))  # (T, R - 1, N)
    query_sum, key_sum = of_queries.sum(1), of_keys.sum(1)  # (T, N)
    with_biases = query_sum[:, None] * key[-1][keys] + query[-1][:, None] * (key_sum + key[-1])[keys]
    at_once = max(1, PAIRS_AT_ONCE // (keys.shape[1] * n_row * n_row))
    found = []
    for some, of_query in zip(keys.split(at_once), of_queries.split(at_once), strict=True):
        pairs = of_query @ of_keys[some].flatten(1, 2).mT  # one product for all keys of a query
        pairs = pairs.unflatten(-1, (-1, n_row)).transpose(1, 2)  # (some queries, n, R - 1, R - 1)
        # The largest `count` pairs stand in the `count` rows with the largest entries.
        sizes = torch.maximum(pairs.amax(-1), -pairs.amin(-1))  # without a copy of all pairs
        rows = sizes.topk(min(count, n_row)).indices  # (some queries, n, rows)
        of_rows = pairs.gather(-2, rows[..., None].expand(*rows.shape, n_row)).flatten(-2)
        at = of_rows.abs().topk(count).indices
        places = torch.stack((rows.gather(-1, at // n_row), at % n_row), -1)
        found.append((places, of_rows.gather(-1, at)))
    return LargestPairs(*map(torch.cat, zip(*found, strict=True)), with_biases.sum(-1))


# ---------------------------------------------------------------------------------------------------- parts of a logit


@torch.no_grad()
def logit_parts(model: GPT, last: LayerTrace, parts: Sequence[Tensor], candidates: Tensor) -> Tensor:
    """What each part adds directly to the logits of candidates (T, C) of each position: (P + 1, T, C).

    The scale of the final norm is frozen. The last row holds the biases. The sum over all rows is the logit, before a cap.
    last: the trace of the last layer. parts: from `written_parts`.
    """
    norm = FrozenNorm.at(model.final_norm, last.after[0])
    read_by = model.head_weight[candidates]  # (T, C, d_model)
    biases = norm.of_biases(biases_written(model, model.config.n_layer))[None]
    return torch.cat([torch.einsum("ptm,tcm->ptc", each, read_by) for each in (*map(norm, parts), biases)])


# ------------------------------------------------------------------------------------------------------- head to head

KINDS = ("query", "key", "value")  # what a head reads from another
CELLS_AT_ONCE = 1 << 22  # of the maps of all heads that are computed together


@torch.no_grad()
def head_effects(model: GPT, layers: Sequence[LayerTrace], parts: Sequence[Tensor], layer: int) -> Tensor:
    """How much each head of `layer` reads from each head before it: (3, earlier heads, H), for its query, key and value.

    Path patching (Wang et al. 2022, arXiv 2211.00593, section 3.1; Goldowsky-Dill et al. 2023, arXiv 2304.05969): what the earlier
    head writes is taken from the stream that the later head's queries alone read, or its keys, or its values. The norm of the
    stream keeps its scale: with a new one, a head that writes long vectors would seem to be read by all. What follows is
    computed as by the model. The effect is the length of the change of what the later head writes, over the length of what
    it writes, with the vectors of all positions as one. The gate of the later head stays as it is.
    """
    block, trace = model.blocks[layer], layers[layer]
    attention, shared = block.attention, trace.shared
    weight = attention.output_by_head
    gram = weight.mT @ weight  # (H, D, D): |W_O z|² = zᵀ gram z
    normed, norm = block.attention_norm(trace.before), FrozenNorm.at(block.attention_norm, trace.before[0])
    *whole, function = attention.project(normed, shared=shared)
    at_once = max(1, CELLS_AT_ONCE // (model.config.n_head * trace.before.shape[1] ** 2))
    effects = []
    for some in torch.cat([part[: model.config.n_head] for part in parts[1 : layer + 1]]).split(at_once):
        without = attention.project(normed - norm(some), shared=shared)[:3]
        for kind in range(len(KINDS)):
            patched = [without[each] if each == kind else whole[each].expand_as(without[each]) for each in range(3)]
            retrieved = attend_as(attention, *patched, function, shared).output
            change = attention.finish(retrieved, patched[2], trace.gate) - trace.written  # (some heads, H, T, D)
            effects.append(torch.einsum("shtd,hde,shte->sh", change, gram, change))
    by_kind = torch.stack([torch.cat(effects[kind :: len(KINDS)]) for kind in range(len(KINDS))])
    length = torch.einsum("bhtd,hde,bhte->h", trace.written, gram, trace.written)
    return (by_kind / length.clamp(min=torch.finfo(length.dtype).tiny)).clamp(min=0).sqrt()


# ----------------------------------------------------------------------------------------------------------- the page
# What the page stores. The numbers of one list are 16-bit shares of the largest of them: they err by 2e-5 of it.

SHOWN_PAIRS = 8  # of a cell
MOST_CELLS = 20_000  # whose pairs are in the file: of each query, those with the largest weights
FEWEST_KEYS = 3  # of a query
SHOWN_READS = 6  # earlier heads from which a head reads most, for its query, its key and its value


def keys_per_query(n_head: int, n_token: int) -> int:
    """The number of keys of each query whose pairs are in the file, for n_head heads in full."""
    return min(n_token, max(FEWEST_KEYS, MOST_CELLS // (n_head * n_token)))


def as_shares(numbers: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Numbers (…, n) -> shares (…, n) int16 of the largest in size, and this largest one (…,) fp32."""
    largest = numbers.abs().amax(-1)
    shares = 32767 * numbers / largest.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    return shares.round().to(torch.int16).cpu().numpy(), largest.float().cpu().numpy()


def pair_arrays(parts: ScoreParts, index: int, keys: Tensor, n_row: int) -> dict[str, np.ndarray]:
    """The arrays of head `index` of `parts`. keys (T, n): those with the largest weights. n_row: most rows of any layer."""
    found = largest_pairs(parts.query[:, index], parts.key[:, index], keys, SHOWN_PAIRS)
    missing = SHOWN_PAIRS - found.values.shape[-1]  # in a first layer of few parts
    shares, largest = as_shares(pad(found.values, (0, missing)))
    rows = pad(found.rows, (0, 0, 0, missing)).cpu().numpy()
    return {
        "pair_keys": keys.cpu().numpy().astype(np.uint16),
        "pair_rows": rows.astype(np.uint8 if n_row <= 1 << 8 else np.uint16),
        "pair_shares": shares,
        "pair_largest": largest,
        "pair_biases": found.biases.float().cpu().numpy(),
    }


def direct_arrays(logits: Tensor) -> dict[str, np.ndarray]:
    """logits (P + 1, T, C), from `logit_parts`: what each part adds to each candidate's logit."""
    shares, largest = as_shares(logits.permute(1, 2, 0))
    return {"direct_shares": shares, "direct_largest": largest}  # (T, C, P + 1), (T, C)


def read_arrays(effects: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """effects: of each layer after the first, from `head_effects`. The strongest first, (E,) each; heads count from layer 0."""
    sources, readers, kinds, sizes = [], [], [], []
    for effect in effects:
        n_kind, n_earlier, n_head = effect.shape
        top = effect.topk(min(SHOWN_READS, n_earlier), 1)  # (3, strongest, H)
        sources.append(top.indices.flatten())
        kinds.append(torch.arange(n_kind)[:, None, None].expand_as(top.indices).flatten())
        readers.append((n_earlier + torch.arange(n_head)).expand_as(top.indices).flatten())
        sizes.append(top.values.flatten())
    size, order = torch.cat(sizes).cpu().sort(descending=True)
    arrays = {"sources": (sources, np.uint16), "readers": (readers, np.uint16), "kinds": (kinds, np.uint8)}
    return {name: torch.cat(each).cpu()[order].numpy().astype(kind) for name, (each, kind) in arrays.items()} | {
        "effects": size.float().numpy()
    }
