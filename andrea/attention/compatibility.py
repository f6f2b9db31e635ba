"""Compatibility functions f(query, key) -> score, and `Case`: a function with its arguments, one call of attention.

The score says how well a key matches a query. T queries of width d_q, S keys of width d_k, H query heads, G key/value
heads (G divides H), values of width d_v, any leading dimensions in front.

A compatibility function is implemented twice. `scores` is the textbook formula, which the reference implementation
uses. `lower` rewrites query and key so that their plain dot product gives the same scores; one fused kernel therefore
serves every function with a `lower`. Rotary positions rotate the lowered query and key. If n_head is given, the
parameters are learned per head: their leading dimension H matches the head dimension of (..., H, T, d_q). Without
n_head all heads share the parameters.

The example defines a new function, the dot product divided by a learned temperature. The reference implementation needs
`scores` alone; the fused implementations need `lower` as well.

>>> import torch
>>> from andrea.attention import Compatibility, attend
>>> class Tempered(Compatibility):
...     def __init__(self):
...         super().__init__()
...         self.heat = torch.nn.Parameter(torch.tensor(2.0))
...
...     def scores(self, query, key):
...         return query @ key.mT / self.heat
...
...     def lower(self, query, key):
...         return query / self.heat, key
>>> query, key, value = torch.randn(3, 5, 4)
>>> readable = attend(query, key, value, compatibility=Tempered(), implementation="reference")
>>> fused = attend(query, key, value, compatibility=Tempered(), implementation="sdpa")
>>> torch.allclose(readable, fused, atol=1e-6)
True
"""

import functools
import inspect
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from andrea.attention.grouped_query import repeated_for_query_heads
from andrea.attention.mask import Mask
from andrea.attention.modifiers import ScoreModifiers
from andrea.attention.statistics import AttentionStatistics
from andrea.config import UserError
from andrea.runtime.device import AMPERE, capability_of
from andrea.runtime.user_classes import is_own, own_class


class Compatibility(nn.Module, ABC):
    """Base class of compatibility functions. It is a module, because it owns its learned parameters.

    A subclass implements `scores`. It also implements `lower` if its scores can be written as a plain dot product.
    """

    equal_widths = True  # whether d_q = d_k is required
    lower_upcasts = True  # whether `lower` is computed in fp32; False for a `lower` that rounds at most once

    @abstractmethod
    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """query (..., T, d_q), key (..., S, d_k) -> scores (..., T, S)."""

    def lower(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return query' (..., T, d) and key' (..., S, d), with query'·key' = scores(query, key)."""
        raise NotImplementedError(f"{type(self).__name__} has no method `lower`")

    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Set the parameters to their initial values. A function without parameters need not override this method."""

    @property
    def lowers(self) -> bool:
        """Whether the function has `lower`, which makes its scores a plain dot product."""
        return type(self).lower is not Compatibility.lower

    def lowered(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """The result of `lower` in the input's type, computed in at least fp32 if `lower_upcasts`."""
        if not self.lower_upcasts:
            return self.lower(query, key)
        precise = torch.promote_types(query.dtype, torch.float32)
        with torch.autocast(query.device.type, enabled=False):
            lowered_query, lowered_key = self.lower(query.to(precise), key.to(precise))
        return lowered_query.to(query.dtype), lowered_key.to(key.dtype)


class DotProduct(Compatibility):
    """f(q, k) = q·k (Luong et al. 2015, arXiv 1508.04025, eq. 8, "dot")."""

    lower_upcasts = False

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT

    def lower(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query, key


class ScaledDotProduct(Compatibility):
    """f(q, k) = q·k / sqrt(d_k) (Vaswani et al. 2017, arXiv 1706.03762, eq. 1).

    If the entries of q and k are independent and N(0, 1), q·k has variance d_k. After division by sqrt(d_k) the
    variance is 1 at every width. The softmax therefore does not saturate as d_k grows, and keeps its gradient.
    """

    lower_upcasts = False

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT / math.sqrt(query.shape[-1])

    def lower(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query * (1 / math.sqrt(query.shape[-1])), key


class Bilinear(Compatibility):
    """f(q, k) = qᵀ M k, M (d_q, d_k) learned per head (Luong et al. 2015, arXiv 1508.04025, eq. 8, "general").

    M starts as an identity matrix (d_q, d_k) divided by sqrt(d_k), so that training starts from the scaled dot product.
    """

    equal_widths = False

    def __init__(self, d_query: int, d_key: int, n_head: int | None = None) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.empty(per_head(n_head, d_query, d_key)))  # M
        self.initialise()

    @torch.no_grad()
    def initialise(self, generator: torch.Generator | None = None) -> None:
        d_query, d_key = self.matrix.shape[-2:]
        self.matrix.copy_(torch.eye(d_query, d_key) / math.sqrt(d_key))

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ self.matrix.to(query.dtype) @ key.mT

    def lower(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query @ self.matrix.to(query.dtype), key


class Cosine(Compatibility):
    """f(q, k) = s q·k / (|q||k|), and 0 if q or k is zero. The logarithm of the sharpness s > 0 is learned per head.

    The formula is eq. 5 of Henry et al. 2020, arXiv 2010.04245, where all heads share one number g in place of s.
    """

    def __init__(self, n_head: int | None = None, sharpness: float = 10.0) -> None:
        super().__init__()
        self.start = math.log(sharpness)
        self.log_sharpness = nn.Parameter(torch.empty(per_head(n_head)))  # ln s
        self.initialise()

    @torch.no_grad()
    def initialise(self, generator: torch.Generator | None = None) -> None:
        self.log_sharpness.fill_(self.start)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return self.sharpness(query) * (unit(query) @ unit(key).mT)

    def lower(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self.sharpness(query) * unit(query), unit(key)

    def sharpness(self, query: Tensor) -> Tensor:
        return self.log_sharpness.to(query.dtype).exp()[..., None, None]


class Additive(Compatibility):
    """f(q, k) = w·tanh(A q + B k), with A (n, d_q), B (n, d_k) and w (n) learned per head.

    The formula is from Bahdanau et al. 2015, arXiv 1409.0473, appendix A.1.2. It has no method `lower`, because the
    tanh of a sum is not the dot product of a vector made from q and a vector made from k.
    """

    equal_widths = False

    def __init__(self, d_query: int, d_key: int, n_hidden: int, n_head: int | None = None) -> None:
        super().__init__()
        self.of_query = nn.Parameter(torch.empty(per_head(n_head, n_hidden, d_query)))  # A
        self.of_key = nn.Parameter(torch.empty(per_head(n_head, n_hidden, d_key)))  # B
        self.weight = nn.Parameter(torch.empty(per_head(n_head, n_hidden)))  # w
        self.initialise()

    @torch.no_grad()
    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Draw A, B and w. If queries and keys have variance 1, the inputs of tanh then have variance 1 too."""
        for parameter, width in ((self.of_query, 2), (self.of_key, 2), (self.weight, 1)):
            deviation = 1 / math.sqrt(width * parameter.shape[-1])
            parameter.copy_(deviation * torch.randn(parameter.shape, generator=generator))

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        query, key = self.transformed(query, key)
        hidden = torch.tanh(query[..., :, None, :] + key[..., None, :, :])  # (..., T, S, n)
        return (hidden * self.weight[..., None, None, :]).sum(-1)

    def transformed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """A q (..., T, n) and B k (..., S, n)."""
        return query @ self.of_query.mT.to(query.dtype), key @ self.of_key.mT.to(key.dtype)


def per_head(n_head: int | None, *shape: int) -> tuple[int, ...]:
    return shape if n_head is None else (n_head, *shape)


def unit(vectors: Tensor) -> Tensor:
    """Vectors (..., d) scaled to length 1. A zero vector stays zero, and its gradient is zero."""
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / torch.where(length > 0, length, torch.inf)


BUILT_IN = {
    "scaled_dot": ScaledDotProduct,
    "dot": DotProduct,
    "bilinear": Bilinear,
    "cosine": Cosine,
    "additive": Additive,
}
COMPATIBILITIES = tuple(BUILT_IN)
KEY = "attention.compatibility"
LARGEST_ROUNDING = 1e-3  # of a score computed in two ways in fp32, relative to the largest score


def make_compatibility(name: str, n_head: int, d_head: int, n_kv_head: int | None = None) -> Compatibility:
    """Build the function `name`: one of COMPATIBILITIES, or the dotted path of a class of the user's own.

    It is built for n_head heads whose queries and keys have width d_head. Its constructor may have any of the
    parameters n_head, d_head, d_query, d_key and n_hidden; the last four are set to d_head. n_kv_head: the heads of the
    keys; n_head if None. Raises UserError if the class may not be imported, has no `scores`, requires other arguments, or
    fails `check_own`.
    """
    kind = own_class(KEY, name, Compatibility) if is_own(name) else BUILT_IN[name]
    offered = {"n_head": n_head, "d_head": d_head, "d_query": d_head, "d_key": d_head, "n_hidden": d_head}
    constructor = inspect.signature(kind)
    arguments = {argument: offered[argument] for argument in constructor.parameters if argument in offered}
    if inspect.isabstract(kind):
        raise UserError(f"{KEY}={name} cannot be made: it has no method `scores`")
    try:
        constructor.bind(**arguments)
    except TypeError as error:
        raise UserError(
            f"{KEY}={name} cannot be made: {error}; its constructor may have the arguments {', '.join(offered)}"
        ) from None
    if is_own(name):
        check_own(name, kind, tuple(arguments.items()), n_head, d_head, n_kv_head or n_head)
    return kind(**arguments)


@functools.lru_cache
def check_own(name: str, kind: type[Compatibility], arguments: tuple, n_head: int, d_head: int, n_kv_head: int) -> None:
    """Try a user's function on random queries and keys, once for each class and shape.

    Raises UserError if its results have wrong shapes, or if `lower` does not give `scores`: training computes `lower`
    alone, so a mistake there would never show. Parameters often start at 0 or 1, where a forgotten one does not show
    either; therefore they are compared as they start, and again after a random change.
    """
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        query = torch.randn(2, n_head, 3, d_head, generator=generator)
        key = torch.randn(2, n_kv_head, 5, d_head, generator=generator)
        function = kind(**dict(arguments)).eval()
        function.initialise(generator)
        for _ in range(2):
            scores = function.scores(query, repeated_for_query_heads(key, query))
            check_shape(name, "scores", scores, (2, n_head, 3, 5), f"(…, {n_head} heads, queries, keys)")
            if function.lowers:
                check_same(name, scores, dot_products(name, function.lower(query, key), query, key))
            for parameter in function.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def dot_products(name: str, lowered: tuple[Tensor, Tensor], query: Tensor, key: Tensor) -> Tensor:
    """The scores (B, H, T, S) that `lower` stands for. Raises UserError for another result than two fitting tensors."""
    if not (isinstance(lowered, tuple) and len(lowered) == 2):
        raise UserError(f"{KEY}={name}: `lower` must return a query and a key, got {type(lowered).__name__}")
    width = getattr(lowered[0], "shape", (0,))[-1]
    for part, result, given in zip(("query", "key"), lowered, (query, key), strict=True):
        *leading, n_row, _ = given.shape
        check_shape(name, f"lower's {part}", result, (*leading, n_row, width), f"those of its {part}, of one width")
    return lowered[0] @ repeated_for_query_heads(lowered[1], query).mT


def check_shape(name: str, what: str, result: object, expected: tuple[int, ...], words: str) -> None:
    shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
    if shape != expected:
        raise UserError(f"{KEY}={name}: the shape of {what} must be {expected}, {words}, but it is {shape}")


def check_same(name: str, scores: Tensor, lowered: Tensor) -> None:
    """Raises UserError, with the cell that differs most, unless both (B, H, T, S) are the same but for rounding."""
    finite = scores[scores.isfinite()].abs()
    tolerance = LARGEST_ROUNDING * (finite.max().item() if len(finite) else 1.0)
    same = torch.isclose(scores, lowered, rtol=0, atol=tolerance, equal_nan=True)
    if not same.all():
        difference = (scores - lowered).abs().nan_to_num(torch.inf).masked_fill(same, -1)
        cell = tuple(map(int, torch.unravel_index(difference.argmax(), scores.shape)))
        _, head, i, j = cell
        raise UserError(
            f"{KEY}={name}: `lower` and `scores` differ: for query {i}, key {j}, head {head}, `scores` gives "
            f"{scores[cell]:.5g}, and the dot product of what `lower` returns is {lowered[cell]:.5g}; correct one of them, "
            f"or remove `lower`"
        )


# ------------------------------------------------------------------------------------------------- one call of attention

Result = tuple[Tensor, AttentionStatistics | None]  # output (..., H, T, d_v); no statistics if Case.statistics is False


@dataclass(frozen=True)
class Case:
    """The arguments of one call of attention. They decide which implementations can compute the call.

    query (..., H, T, d_q), key (..., G, S, d_k), value (..., G, S, d_v).
    start: position of the first query among the keys; S - T if None.
    modifiers: what changes the scores before the mask, if anything.
    sink: a logit per query head, (H,), or 0-dim without heads, that takes part in the softmax's denominator alone.
    statistics: whether to return statistics of the heads as well.
    compiled: whether torch.compile compiles the call; if None, `choose` asks torch whether it is tracing now.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    compatibility: Compatibility  # without a default: torch.compile cannot trace a module that is a field's default
    mask: Mask | None = None
    start: int | Tensor | None = None
    statistics: bool = False
    compiled: bool | None = None
    modifiers: ScoreModifiers | None = None
    sink: Tensor | None = None

    @property
    def first_position(self) -> int | Tensor:
        """Position of the first query among the keys."""
        return self.key.shape[-2] - self.query.shape[-2] if self.start is None else self.start

    @property
    def softcap(self) -> float | None:
        """The cap on the scores, if there is one."""
        return None if self.modifiers is None else self.modifiers.softcap

    @property
    def alibi(self) -> bool:
        return self.modifiers is not None and self.modifiers.alibi

    @property
    def product_dtype(self) -> torch.dtype:
        """The type in which our kernels multiply: autocast's type if autocast is on, else the query's.

        torch's attention follows the same rule.
        """
        kind = self.query.device.type
        if torch.is_autocast_enabled(kind) and self.query.dtype != torch.float64:
            return torch.get_autocast_dtype(kind)
        return self.query.dtype

    def lowered(self) -> tuple[Tensor, Tensor]:
        """query' (..., H, T, d) and key' (..., G, S, d), whose plain dot product is the score."""
        return self.compatibility.lowered(self.query, self.key)


def refusal_of_triton(case: Case) -> str | None:
    """Why neither our Triton kernel nor FlexAttention, which torch compiles with Triton, can serve the case, or None."""
    capability = capability_of(case.query.device)
    if capability < AMPERE:
        return f"Triton needs a GPU of compute capability {AMPERE / 10}, got {capability / 10}"
    if case.alibi and not isinstance(case.first_position, int):
        return "ALiBi's distances need the position of the first query as an int, and it is a tensor here"
    return None


# --------------------------------------------------------------------------------------------------------------- heads
# The layouts that our kernels in Triton and C++ read and write. B batch, H heads, T queries, D head width.


def as_batch_of_heads(tensor: Tensor) -> Tensor:
    """(..., H, T, d) -> (B, H, T, d). A missing head or batch dimension becomes a dimension of size 1."""
    while tensor.ndim < 4:
        tensor = tensor[None]
    return tensor.flatten(0, -4)


def in_rows(x: Tensor) -> Tensor:
    """The tensor with contiguous rows, which the kernels require: a last stride of 1. The other strides may be any."""
    return x if x.stride(-1) == 1 else x.contiguous()


def like_heads(x: Tensor, width: int | None = None) -> Tensor:
    """An empty tensor (B, H, T, D) with the memory layout (B, T, H, D), which the output projection reads without a copy.

    x: (B, H, T, any width), of the same type. width: D; that of x if None.
    """
    n_batch, n_head, n_token, d_head = x.shape
    return x.new_empty(n_batch, n_token, n_head, d_head if width is None else width).transpose(1, 2)
