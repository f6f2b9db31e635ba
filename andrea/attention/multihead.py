"""Multi-head attention (Vaswani et al. 2017, arXiv 1706.03762, section 3.2.2).

The steps are: project x to heads, encode positions, attend, gate the heads, and merge them.

B batch, T queries, S keys, H heads, G key/value heads (G divides H), D = d_head, V vocabulary; x (B, T, d_model).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, rms_norm

from andrea.attention.attend import attend
from andrea.attention.cache import LayerCache
from andrea.attention.compatibility import Compatibility, DotProduct, ScaledDotProduct
from andrea.attention.grouped_query import repeated_for_query_heads
from andrea.attention.implementations import native
from andrea.attention.implementations.triton import DTYPES, HAS_TRITON, WIDEST_HEAD, runs_on
from andrea.attention.mask import Causal, Mask, SlidingWindow
from andrea.attention.modifiers import ScoreModifiers
from andrea.attention.statistics import HeadStatistics, head_statistics
from andrea.config import MEASURES_HEADS

# ---------------------------------------------------------------------------------------------------------- convolution
# A short convolution over the tokens, for the queries, keys and values of each head.
#
# A key that mixes the token before its own lets a single layer find what followed an earlier copy of the present token; an
# induction head otherwise needs two layers (KV shifting attention, Xu et al. 2024, arXiv 2411.19574). Here each channel of
# queries, keys and values has weights of its own, as in Primer's multi-dconv-head attention (So et al. 2021, arXiv
# 2109.08668, section 4.2). K tokens are mixed: a token and the K - 1 before it.


def convolve(x: Tensor, taps: Tensor, before: Tensor | None = None, place: Tensor | None = None) -> Tensor:
    """`convolve_readable`, or our kernel where it serves: bf16 on a CPU, from the first token on, in one document."""
    is_served = x.device.type == "cpu" and x.dtype == torch.bfloat16 and before is None and place is None
    is_served = is_served and not planned_for_card
    is_served = is_served and x.shape[-1] % native.D_STEP == 0 and taps.shape[-1] <= native.MOST_MIXED
    if is_served and native.reason_without_library() is None:
        return native.native_convolution(x, taps.float())
    return convolve_readable(x, taps, before, place)


def convolve_readable(x: Tensor, taps: Tensor, before: Tensor | None = None, place: Tensor | None = None) -> Tensor:
    """x (B, H, T, D), taps (H, D, K) -> (B, H, T, D): y_t = x_t + Σ_i taps[..., i] · x_{t-i}, over i = 0 … K - 1.

    Taps of zero change nothing. before: the K - 1 tokens in front of x, (B, H, K - 1, D); zeros if None. place: (B, T), the
    number of tokens between each token and the first of its document. A token mixes none of another document.

    >>> convolve_readable(torch.tensor([[[[1.0], [10.0], [100.0]]]]), torch.tensor([[[0.0, 0.5]]])).flatten()
    tensor([  1.0000,  10.5000, 105.0000])
    """
    n_token, n_mixed = x.shape[2], taps.shape[2]
    padded = pad(x, (0, 0, n_mixed - 1, 0)) if before is None else torch.cat([before, x], dim=2)
    weights = taps.to(x.dtype)[:, None].unbind(-1)  # K of (H, 1, D)
    y = x + x * weights[0]
    for distance in range(1, n_mixed):
        first = n_mixed - 1 - distance
        earlier = padded[:, :, first : first + n_token]
        if place is not None:
            earlier = earlier.masked_fill((place < distance)[:, None, :, None], 0.0)
        y = y + earlier * weights[distance]
    return y


# --------------------------------------------------------------------------------------------------------- head options
# What may happen to a head's vector z between the weighted sum of the values and W_O: first exclusion, then a gate.

GATES = ("scalar", "elementwise")
EXCLUSIVE = ("fixed", "learned")
# The share with which learned exclusion begins. andrea-nano at 280 steps ends at 1.362 bits per byte from one half, at 1.372
# from 0; with all of it fixed at 1.376, without exclusion at 1.405 (one seed each).
FIRST_SHARE = 0.5
OWN_VALUE_EPSILON = 1e-6  # added to v·v, so that a value of zeros excludes nothing


def without_own_value(retrieved: Tensor, own_value: Tensor, share: Tensor | None = None) -> Tensor:
    """Exclusive self-attention: z_t - a (z_t·v_t) / (v_t·v_t + ε) v_t (Zhai 2026, arXiv 2603.09078).

    The head's vector z_t loses a share a of its component along v_t, the token's own value. What the token says about
    itself then goes through the residual stream and the MLP, and the head is left to what other tokens say.
    retrieved (B, H, T, D): z. own_value (B, G, T, D): v. share (H,): a; all of it if None. Computed in fp32 or higher.

    >>> without_own_value(torch.tensor([[[[3.0, 5.0]]]]), torch.tensor([[[[2.0, 0.0]]]])).flatten().round(decimals=3)
    tensor([0., 5.])
    """
    dtype = torch.promote_types(retrieved.dtype, torch.float32)
    z, v = retrieved.to(dtype), repeated_for_query_heads(own_value, retrieved).to(dtype)
    along = (z * v).sum(-1, keepdim=True) / (v.square().sum(-1, keepdim=True) + OWN_VALUE_EPSILON)
    if share is not None:
        along = along * share.to(dtype)[:, None, None]
    return (z - along * v).to(retrieved.dtype)


def gate_of_logits(logits: Tensor, n_head: int) -> Tensor:
    """Head gates 2·sigmoid(logits): logits (B, T, H·E) -> gates (B, H, T, E) in 0 .. 2, which multiply z (B, H, T, D).

    E is 1 (scalar: one gate per head) or D (elementwise: one per channel of the head). A gate on the output of attention
    lets a head write nothing for a token, which softmax weights alone cannot say (Qiu et al. 2025, arXiv 2505.06708,
    section 2.2, position G1). The factor 2 is ours: logits of zero then leave z unchanged.

    >>> gate_of_logits(torch.zeros(1, 1, 2), n_head=2).flatten()
    tensor([1., 1.])
    """
    return 2 * torch.sigmoid(logits).unflatten(-1, (n_head, -1)).transpose(1, 2)


# ------------------------------------------------------------------------------------------------------------ the layer

PLAIN = DotProduct()
Place = Callable[[Tensor], Tensor]  # encodes positions in queries or keys (B, H, T, D)


class Rotation:
    """Rotary positions of T tokens: turns pairs of entries, p and p + D/2, of queries or keys (B, H, T, D).

    cosine, sine: (T, D) fp32, of the angle of each entry's pair; the first half of the sines is negative. Or (B, 1, T, D),
    where sequences have positions of their own.
    """

    def __init__(self, cosine: Tensor, sine: Tensor) -> None:
        self.cosine, self.sine = cosine, sine

    def __call__(self, x: Tensor) -> Tensor:
        # The halves exchanged, as by x.roll(D // 2), which torch does not compile to vector instructions on a CPU.
        partner = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
        return (x * self.cosine + partner * self.sine).to(x.dtype)


planned_for_card = False


@contextlib.contextmanager
def operators_of_a_card() -> Iterator[None]:
    """For a memory plan: fake tensors on the CPU go through the operators that a GPU has. (Autograd knows no other fake ones
    where torch is built without CUDA.)"""
    global planned_for_card
    planned_for_card = True
    try:
        yield
    finally:
        planned_for_card = False


def one_product_is_faster(x: Tensor) -> bool:
    """Whether to compute queries, keys and values by one product. On a CPU it gains nothing (bench/README.md)."""
    return x.is_cuda or planned_for_card


def one_pass_is_faster(x: Tensor) -> bool:
    """Whether our Triton kernels may prepare queries, keys and values."""
    return HAS_TRITON if planned_for_card else x.is_cuda and runs_on(x.device)


class FrozenLinear(nn.Linear):
    """A linear layer that holds these very tensors, without gradients."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(*weight.shape[::-1], device="meta", bias=False)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def rows(self, start: int, stop: int) -> FrozenLinear:
        """A layer for outputs start .. stop-1, which shares the memory of this layer's weights."""
        return FrozenLinear(self.weight[start:stop], None if self.bias is None else self.bias[start:stop])


def is_plain(layer: nn.Module) -> bool:
    """Whether a call of the layer is a product with its weight and nothing else: no adapter, no hook."""
    return type(layer) is nn.Linear and not layer._forward_hooks and not layer._forward_pre_hooks


def check_heads(d_model: int, n_head: int, n_kv_head: int, d_head: int | None) -> None:
    if d_head is None and d_model % n_head:
        raise ValueError(
            f"n_head={n_head} does not divide d_model={d_model}: the head width must be whole; or give d_head"
        )
    if n_head % n_kv_head:
        raise ValueError(f"n_kv_head={n_kv_head} does not divide n_head={n_head}: key/value heads are shared equally")


def check_known(option: str, name: str | None, known: tuple[str, ...]) -> None:
    if name not in (None, *known):
        raise ValueError(f"{option}={name!r} is unknown; allowed: None, {', '.join(known)}")


class SharedInputs(NamedTuple):
    """The inputs besides x that all layers of one forward pass share. A model makes them once per pass.

    This class is a NamedTuple because FSDP finds tensors inside tuples, but not inside dataclasses. FSDP needs a
    layer's input tensors: their gradients show that the layer's backward pass is done.
    """

    first_value: Tensor | None = None  # (B, G, S, D): the first layer's values, for value_residual
    value_source: Tensor | None = None  # (B, S, d_model) or (B, S) int64: what a value embedding reads
    place: Place | None = None  # encodes rotary positions in the lowered query and key
    packing: Mask | None = None  # a mask of this batch, combined with the module's own
    document_place: Tensor | None = None  # (B, T): each token's place in its document, for a convolution with `packing`


NOTHING_SHARED = SharedInputs()


class MultiHeadAttention(nn.Module):
    """Self-attention (no mask), causal self-attention (mask=causal()) or cross-attention (a context is given).

    A query describes the information that a position needs. A key describes the information that a position offers. A
    value is this information.
    d_context: width of the vectors that keys and values are computed from; d_model if None.
    n_kv_head: number of key/value heads, each shared by n_head / n_kv_head query heads (Ainslie et al. 2023, arXiv
    2305.13245); n_head if None.
    d_head: width of a head's queries, keys and values; d_model / n_head if None.
    qk_norm_epsilon: epsilon of an RMS norm over each head's queries and keys (Henry et al. 2020, arXiv 2010.04245); no
    norm if None. qk_norm_weights: each channel of the normed queries is then multiplied by a learned weight, and so are the
    keys (Qwen3: Yang et al. 2025, arXiv 2505.09388, section 2). The heads of a layer share these weights.
    value_residual: the layer mixes a learned share of the first layer's values into its own (Zhou et al. 2024, arXiv
    2410.17897). Pass these values as `layer(x, shared=SharedInputs(first_value=first_layer.values(x_of_first_layer)))`.
    value_embedding: adds its output to the values. Pass its input as `SharedInputs(value_source=…)`.
    convolution: the number of tokens that each query, key and value mixes; none if None.
    gate: multiply each head's retrieved vector by a gate computed from x: "scalar" is one gate per head
    and token, "elementwise" one per channel of the head; no gate if None.
    exclusive: each head's retrieved vector loses its component along the token's own value: "fixed" all
    of it, "learned" a learned share per head, which starts at one half; nothing if None. For self-attention only.
    modifiers: as in `attend`. sink: each head has a learned logit that takes part in the softmax's denominator alone.
    implementation: as in `attend`.
    Raises ValueError if d_head is None and n_head does not divide d_model, if n_kv_head does not divide n_head, or for an
    unknown name.
    """

    def __init__(
        self,
        d_model: int,
        n_head: int,
        *,
        compatibility: Compatibility,
        mask: Mask | None = None,
        d_context: int | None = None,
        n_kv_head: int | None = None,
        d_head: int | None = None,
        bias: bool = False,
        qk_norm_epsilon: float | None = None,
        qk_norm_weights: bool = False,
        value_residual: bool = False,
        value_embedding: ValueEmbedding | None = None,
        convolution: int | None = None,
        gate: str | None = None,
        exclusive: str | None = None,
        modifiers: ScoreModifiers | None = None,
        sink: bool = False,
        implementation: str = "auto",
    ) -> None:
        super().__init__()
        n_kv_head = n_head if n_kv_head is None else n_kv_head
        check_heads(d_model, n_head, n_kv_head, d_head)
        check_known("gate", gate, GATES)
        check_known("exclusive", exclusive, EXCLUSIVE)
        if qk_norm_weights and qk_norm_epsilon is None:
            raise ValueError("qk_norm_weights=True needs qk_norm_epsilon=…: these are weights of that norm")
        self.d_head = d_model // n_head if d_head is None else d_head
        self.n_head, self.n_kv_head = n_head, n_kv_head
        d_attended = n_head * self.d_head  # of all heads together
        self.query = nn.Linear(d_model, d_attended, bias)
        self.key = nn.Linear(d_context or d_model, n_kv_head * self.d_head, bias)
        self.value = nn.Linear(d_context or d_model, n_kv_head * self.d_head, bias)
        self.output = nn.Linear(d_attended, d_model, bias)
        # The logistic function of this number is the first layer's share. It starts at one half.
        self.value_mix = nn.Parameter(torch.zeros(1)) if value_residual else None
        self.value_embedding = value_embedding
        # For the heads of queries, keys and values, in this order. Zeros mix nothing.
        n_heads = n_head + 2 * n_kv_head
        self.taps = nn.Parameter(torch.zeros(n_heads, self.d_head, convolution)) if convolution else None
        n_gate = n_head if gate == "scalar" else d_attended
        self.gate = None if gate is None else nn.Linear(d_model, n_gate, bias=False)
        self.is_exclusive = exclusive is not None
        self.exclusive_share = nn.Parameter(torch.full((n_head,), FIRST_SHARE)) if exclusive == "learned" else None
        # With zeros, the softmax has a 1 + in its denominator.
        self.sink = nn.Parameter(torch.zeros(n_head)) if sink else None
        self.compatibility = compatibility
        self.modifiers = modifiers
        self.mask = mask
        self.qk_norm_epsilon = qk_norm_epsilon
        self.query_norm = nn.Parameter(torch.ones(self.d_head)) if qk_norm_weights else None
        self.key_norm = nn.Parameter(torch.ones(self.d_head)) if qk_norm_weights else None
        self.implementation = implementation
        self.side_by_side: nn.Module | None = None  # W_Q, W_K and W_V as one layer, after `put_side_by_side`

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        shared: SharedInputs = NOTHING_SHARED,
        cache: LayerCache | None = None,
        statistics: bool = False,
    ) -> Tensor | tuple[Tensor, HeadStatistics]:
        """Attend from x (B, T, d_model) to context (B, S, d_context), or to x if None. Returns (B, T, d_model).

        cache: the keys and values of earlier tokens. T and S then differ from step to step, so "auto" chooses the
        implementation, unless "reference" is named.
        statistics: return (output, HeadStatistics). If the named implementation returns no statistics, "auto"
        chooses the implementation.
        """
        retrieved = self.retrieve(x, context, shared=shared, cache=cache, statistics=statistics)
        if not statistics:
            return self.output(self.merged(retrieved))
        retrieved, measured = retrieved
        return self.output(self.merged(retrieved)), measured

    def retrieve(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        shared: SharedInputs = NOTHING_SHARED,
        cache: LayerCache | None = None,
        statistics: bool = False,
    ) -> Tensor | tuple[Tensor, HeadStatistics]:
        """What W_O is applied to, (B, H, T, D): the weighted sums of the values, after exclusion and gates.

        The arguments are those of `forward`. statistics: return the statistics of the heads as well.
        """
        if context is None and not statistics and self.is_decoded_in_one_pass(x, shared, cache):
            return self.finish(self.decoded(x, shared, cache), None, self.gates(x))
        query, key, value, compatibility = self.project(x, context, shared, cache)
        own_value, gate = value, self.gates(x)
        if self.is_exclusive and context is not None:
            raise ValueError(
                "exclusive attention needs self-attention: with a context, a token has no value of its own"
            )
        mask, start, implementation = self.mask_with(shared.packing), None, self.implementation
        if cache is not None:
            key, value, start = *cache.append(key, value), cache.length
            if isinstance(start, Tensor) and start.ndim == 1:
                start = start[:, None, None]  # (B, 1, 1), for heads and queries
            implementation = "reference" if implementation == "reference" else "auto"
        if statistics and implementation not in MEASURES_HEADS:
            implementation = "auto"
        how = {"compatibility": compatibility, "mask": mask, "start": start, "implementation": implementation}
        how |= {"modifiers": self.modifiers, "sink": self.sink}
        if not statistics:
            return self.finish(attend(query, key, value, **how), own_value, gate)
        retrieved, rows = attend(query, key, value, **how, statistics=True)
        start = key.shape[-2] - query.shape[-2] if start is None else start
        return self.finish(retrieved, own_value, gate), head_statistics(rows, mask, start, key.shape[-2], gate)

    def gates(self, x: Tensor) -> Tensor | None:
        """The heads' gates for x (B, T, d_model): (B, H, T, 1) or (B, H, T, D); None for a layer without gates."""
        return None if self.gate is None else gate_of_logits(self.gate(x), self.n_head)

    def finish(self, retrieved: Tensor, own_value: Tensor | None, gate: Tensor | None) -> Tensor:
        """The weighted sums (B, H, T, D) -> the vectors that W_O is applied to, (B, H, T, D): exclusion, then gates.

        own_value (B, G, T, D): the values of these T tokens, which exclusion needs. gate: from `gates`.
        """
        if self.is_exclusive:
            retrieved = without_own_value(retrieved, own_value, self.exclusive_share)
        return retrieved if gate is None else retrieved * gate

    def mask_with(self, packing: Mask | None) -> Mask | None:
        """The module's own mask combined with the batch's mask `packing`; either may be None."""
        if packing is None or self.mask is None:
            return packing if self.mask is None else self.mask
        return self.mask & packing

    def project(
        self,
        x: Tensor,
        context: Tensor | None = None,
        shared: SharedInputs = NOTHING_SHARED,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Compatibility]:
        """Query (B, H, T, D), key and value (B, G, S, D), and the function that scores query and key.

        If the layer's compatibility function has a method `lower`, query and key are its results, and the returned
        function is the plain dot product. Otherwise query and key are unchanged, and the returned function is the
        layer's own. Raises ValueError for rotary positions and a function without `lower`.
        """
        if context is None and cache is None and self.is_prepared_in_one_pass(x, shared):
            return *self.prepared(x, shared), PLAIN
        query, key, value = map(self.heads, self.projected(x, context))
        value = self.mixed(value, shared)
        if self.taps is not None:
            query, key, value = self.convolved(query, key, value, shared.document_place, cache)
        if self.qk_norm_epsilon is not None:
            query, key = self.normed(query, self.query_norm), self.normed(key, self.key_norm)
        place = shared.place
        if not self.compatibility.lowers:
            if place is not None:
                raise ValueError(
                    f"rotary positions need a compatibility function with a method `lower`, and "
                    f"{type(self.compatibility).__name__} has none: use learned positions or none"
                )
            return query, key, value, self.compatibility
        query, key = self.compatibility.lowered(query, key)
        if place is not None:
            query, key = place(query), place(key)
        return query, key, value, PLAIN

    def projected(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, ...]:
        """x (B, T, d_model) and context (B, S, d_context), or x if None -> query, key and value, (B, T or S, heads * D).

        In self-attention on a GPU, one product with the three weights side by side replaces three: it reads x once, and its
        backward pass adds no gradients of x. The weights stay three parameters, so checkpoints do not change.
        """
        if context is not None or not one_product_is_faster(x) or not self.has_one_product:
            context = x if context is None else context
            return self.query(x), self.key(context), self.value(context)
        widths = [self.n_head * self.d_head, *2 * (self.n_kv_head * self.d_head,)]
        return self.one_product(x).split(widths, dim=-1)

    @property
    def has_one_product(self) -> bool:
        return self.side_by_side is not None or all(map(is_plain, (self.query, self.key, self.value)))

    def one_product(self, x: Tensor) -> Tensor:
        """x (B, T, d_model) -> queries, keys and values side by side, (B, T, (H + 2 G) D)."""
        return linear(x, *self.joined_weights()) if self.side_by_side is None else self.side_by_side(x)

    def joined_weights(self) -> tuple[Tensor, Tensor | None]:
        layers = (self.query, self.key, self.value)
        bias = None if self.query.bias is None else torch.cat([layer.bias for layer in layers])
        return torch.cat([layer.weight for layer in layers]), bias

    @torch.no_grad()
    def put_side_by_side(self, make_linear: Callable[[Tensor, Tensor | None], nn.Module] = FrozenLinear) -> None:
        """For generation: keep the three weights as one matrix, which `one_product` then need not make for every token.

        make_linear: makes a layer of weight and bias. Its method `rows` gives a layer for some of the outputs.
        """
        ends = accumulate((layer.out_features for layer in (self.query, self.key, self.value)), initial=0)
        self.side_by_side = make_linear(*self.joined_weights())
        self.query, self.key, self.value = (self.side_by_side.rows(start, stop) for start, stop in pairwise(ends))

    def kernels_serve(self, x: Tensor, shared: SharedInputs) -> bool:
        """What the Triton kernels of `prepared` and `decoded` have in common."""
        d, lowering = self.d_head, type(self.compatibility)
        is_served = one_pass_is_faster(x) and self.implementation != "reference" and x.dtype in DTYPES
        is_served = is_served and 16 <= d <= WIDEST_HEAD and not d & (d - 1) and self.query_norm is None
        has_inputs = shared.document_place is None and self.value_embedding is None and shared.value_source is None
        has_inputs = has_inputs and (shared.first_value is None) == (self.value_mix is None)
        has_inputs = has_inputs and (shared.place is None or isinstance(shared.place, Rotation))
        return is_served and has_inputs and self.has_one_product and lowering in (ScaledDotProduct, DotProduct)

    def is_prepared_in_one_pass(self, x: Tensor, shared: SharedInputs) -> bool:
        """Whether `prepared` serves. It is worth its own operator where there is a convolution (bench/README.md)."""
        if self.taps is None or self.qk_norm_epsilon is None or not self.kernels_serve(x, shared):
            return False
        # the kernels count a sequence's elements in 32 bits, and fewer than 2^16 blocks of 16 tokens
        n_token = x.shape[1]
        fits = n_token * len(self.taps) * self.d_head < 2**31 and n_token < 2**20
        return fits and (shared.place is None or shared.place.cosine.ndim == 2)

    def prepared(self, x: Tensor, shared: SharedInputs) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors of `project`, by one Triton kernel each for queries, keys and values (kernels/heads_triton.py)."""
        from andrea.attention.kernels.heads_triton import prepared_heads

        first, share = None, None
        if shared.first_value is not None:
            first, share = shared.first_value.transpose(1, 2), torch.sigmoid(self.value_mix.float())
        *turn, scale = self.turn_and_scale(shared.place)
        parts = prepared_heads(
            self.one_product(x), self.taps.float(), first, share, *turn, self.n_head, self.qk_norm_epsilon, scale
        )
        return tuple(part.transpose(1, 2) for part in parts)

    def turn_and_scale(self, place: Rotation | None) -> tuple[Tensor | None, Tensor | None, float]:
        """Cosine and sine of the rotation, and the factor of the queries."""
        turn = (None, None) if place is None else (place.cosine, place.sine)
        return *turn, self.d_head**-0.5 if type(self.compatibility) is ScaledDotProduct else 1.0

    def is_decoded_in_one_pass(self, x: Tensor, shared: SharedInputs, cache: LayerCache | None) -> bool:
        """Whether `decoded` serves: one new token of each sequence, after as many as only the device knows."""
        if cache is None or x.shape[1] != 1 or not isinstance(cache.length, Tensor):
            return False
        if not self.kernels_serve(x, shared):
            return False
        if cache.keys.shape[2] * (self.n_head + 2 * self.n_kv_head) * self.d_head >= 2**31:
            return False  # the kernel counts a sequence's rows in 32 bits
        changes = self.modifiers is not None or self.sink is not None or self.is_exclusive or shared.packing is not None
        return not changes and type(self.mask) in (Causal, SlidingWindow)

    def decoded(self, x: Tensor, shared: SharedInputs, cache: LayerCache) -> Tensor:
        """The weighted sums (B, H, 1, D) for one new token, which the cache gets (kernels/decode_triton.py)."""
        from andrea.attention.kernels.decode_triton import decoded_heads

        window = self.mask.width if isinstance(self.mask, SlidingWindow) else cache.keys.shape[2]
        *turn, scale = self.turn_and_scale(shared.place)
        inputs = self.one_product(x), self.taps, shared.first_value, self.value_mix, *turn
        rows = cache.keys, cache.values, cache.projected, cache.length
        return decoded_heads(*inputs, *rows, self.n_head, window, self.qk_norm_epsilon, scale).transpose(1, 2)

    def normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """QK-norm of queries or keys (B, H, T, D). weight: (D,), or None."""
        weight = None if weight is None else weight.to(x.dtype)
        # under CUDA's autocast rms_norm returns fp32, which later operations would read
        return rms_norm(x, (self.d_head,), weight, self.qk_norm_epsilon).to(x.dtype)

    def values(self, context: Tensor) -> Tensor:
        """context (B, S, d_context) -> this layer's own values (B, G, S, D)."""
        return self.heads(self.value(context))

    def convolved(
        self, query: Tensor, key: Tensor, value: Tensor, document_place: Tensor | None, cache: LayerCache | None
    ) -> list[Tensor]:
        """query (B, H, T, D), key and value (B, G, S, D), each mixed with the tokens before it. A cache needs T = S."""
        n_heads, before = [each.shape[1] for each in (query, key, value)], (None, None, None)
        if cache is not None:
            n_before = self.taps.shape[-1] - 1
            before = cache.append_projected(torch.cat([query, key, value], dim=1), n_before).split(n_heads, dim=1)
        mixed = zip((query, key, value), self.taps.split(n_heads), before, strict=True)
        return [convolve(x, taps, earlier, document_place) for x, taps, earlier in mixed]

    def mixed(self, value: Tensor, shared: SharedInputs) -> Tensor:
        """Value (B, G, S, D), mixed with shared.first_value by value_residual, then added to by the value embedding."""
        first_value, source = shared.first_value, shared.value_source
        if (source is None) != (self.value_embedding is None):
            raise ValueError(
                "value_embedding needs SharedInputs(value_source=…), which value_embedding=None does not take"
            )
        if (first_value is None) != (self.value_mix is None):
            raise ValueError(
                "value_residual=True needs SharedInputs(first_value=…), the first layer's values; "
                "value_residual=False takes no first_value"
            )
        if first_value is not None:
            value = torch.lerp(value, first_value, torch.sigmoid(self.value_mix).to(value.dtype))
        if source is not None:
            value = value + self.heads(self.value_embedding(source, value.dtype))
        return value

    def heads(self, x: Tensor) -> Tensor:
        """(B, T, H*D) -> (B, H, T, D)."""
        return x.unflatten(-1, (-1, self.d_head)).transpose(1, 2)

    def merged(self, of_heads: Tensor) -> Tensor:
        """(B, H, T, D) -> (B, T, H*D)."""
        return of_heads.transpose(1, 2).flatten(2)

    @property
    def output_by_head(self) -> Tensor:
        """W_O of each head, a view (H, d_model, D) of the output's weight. Head h writes W_O^(h) z^(h).

        The sum over heads, plus the bias, equals the output of `forward`, which multiplies the concatenated heads by
        W_O.
        """
        return self.output.weight.unflatten(1, (-1, self.d_head)).transpose(0, 1)


VALUE_EMBEDDINGS = ("projection", "table")


class ValueEmbedding(nn.Module):
    """λ E(source), (B, T, G D), which one layer adds to its values. λ is one learned number of the layer.

    kind "projection": E is a matrix, and the source is the normed input of the first layer, (B, T, d_model): a later layer
    can hand over the token as it was read (a value residual without the first layer's own matrix: Zhou et al. 2024, arXiv
    2410.17897, and the projections of NanoGPT Slowrun). kind "table": E is an embedding of its own, and the source is the
    token ids, (B, T) int64 (value embeddings of modded-nanogpt; Jordan et al. 2024). A table costs no product, but V G D
    parameters.
    """

    def __init__(self, kind: str, d_model: int, n_vocab: int, width: int) -> None:
        """width: G D. Raises ValueError for an unknown kind."""
        super().__init__()
        if kind not in VALUE_EMBEDDINGS:
            raise ValueError(f"kind={kind!r} is unknown; allowed: {', '.join(VALUE_EMBEDDINGS)}")
        self.projection = nn.Linear(d_model, width, bias=False) if kind == "projection" else None
        self.table = nn.Embedding(n_vocab, width) if kind == "table" else None
        self.mix = nn.Parameter(torch.ones(1))
        # Zeros add nothing at first. andrea-nano (140 steps, one seed, bits per byte) ends from zeros and λ = 1 at 1.604 with
        # projections and 1.606 with tables, from drawn weights and λ = 1/2 at 1.601 and 1.618, from these and λ = 0 at 1.631
        # and 1.621; without value embeddings at 1.632.
        nn.init.zeros_((self.projection or self.table).weight)

    def forward(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """source (B, T, d_model) or (B, T) -> (B, T, G D) of type `dtype`."""
        return self.mix.to(dtype) * (self.projection or self.table)(source).to(dtype)
