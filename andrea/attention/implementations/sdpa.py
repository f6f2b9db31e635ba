"""Torch's own fused kernels on lowered queries and keys: scaled_dot_product_attention and FlexAttention.

H query heads, G key/value heads (G divides H), T queries, S keys.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from andrea.attention.mask import Causal, Mask, SlidingWindow, as_batch_of_heads, visible_interval, visible_keys
from andrea.runtime.compiling import compile_graph

SDPA_BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}


def attend_sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, start: int | Tensor, backend: str | None = None
) -> Tensor:
    """Plain dot-product attention by torch; backend: one of SDPA_BACKENDS, torch's own choice when left out."""
    n_query, n_key = query.shape[-2], key.shape[-2]
    options = {"scale": 1.0, "enable_gqa": query.ndim > 2 and query.shape[-3] != key.shape[-3]}
    if isinstance(mask, Causal) and isinstance(start, int):
        if start == 0 and n_query == n_key:
            return sdpa_by(backend)(query, key, value, is_causal=True, **options)
        if start >= n_key - 1:  # even the first query stands at or after the last key
            mask = None
    visible = None if mask is None else visible_keys(mask, n_query, n_key, start, query.device)
    return sdpa_by(backend)(query, key, value, attn_mask=visible, **options)


def sdpa_by(backend: str | None):
    if backend is None:
        return scaled_dot_product_attention

    def call(*inputs: Tensor, **options) -> Tensor:
        with sdpa_kernel(SDPA_BACKENDS[backend]):
            return scaled_dot_product_attention(*inputs, **options)

    return call


def attend_flex(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, start: int | Tensor) -> Tensor:
    """FlexAttention (He et al. 2024, arXiv 2412.05496): skips the blocks of a mask that nothing sees."""
    lead = query.shape[:-2]
    query, key, value = (as_batch_of_heads(tensor) for tensor in (query, key, value))
    n_head, n_query = query.shape[1:3]
    block_mask = None
    if mask is not None:
        where = (n_query, key.shape[2], start, query.device)
        by_position = isinstance(mask, (Causal, SlidingWindow)) and isinstance(start, int)
        block_mask = block_mask_of(mask, *where) if by_position else flex_mask(mask, lead, *where)
    flex = compiled_flex() if query.device.type == "cuda" else plain_flex()
    output = flex(query, key, value, block_mask=block_mask, scale=1.0, enable_gqa=n_head != key.shape[1])
    return output.reshape(*lead, *output.shape[-2:])


@functools.lru_cache(maxsize=64)
def block_mask_of(mask: Mask, n_query: int, n_key: int, start: int, device: torch.device):
    """The blocks of a mask that positions alone decide: one for all sequences and heads, made once."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(
        lambda b, h, i, j: mask.visible(i + start, j), None, None, n_query, n_key, device=str(device)
    )


def flex_mask(mask: Mask, lead: torch.Size, n_query: int, n_key: int, start: int | Tensor, device: torch.device):
    """The blocks of a mask that knows its sequences: for each of them and each head."""
    from torch.nn.attention.flex_attention import create_block_mask

    interval = visible_interval(mask, n_query, n_key, start, device)
    if interval is None:  # a mask of the user's own: looked up
        table = as_batch_of_heads(visible_keys(mask, n_query, n_key, start, device).expand(*lead, n_query, n_key))
        n_batch, n_head = table.shape[:2]
        sees = lambda b, h, i, j: table[b, h, i, j]  # noqa: E731
    else:
        first, stop = (as_batch_of_heads(end.expand(*lead, n_query)[..., None])[..., 0] for end in interval)
        n_batch, n_head = first.shape[:2]
        sees = lambda b, h, i, j: (first[b, h, i] <= j) & (j < stop[b, h, i])  # noqa: E731
    return create_block_mask(sees, n_batch, n_head, n_query, n_key, device=str(device))


def plain_flex():
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@functools.cache
def compiled_flex():
    return compile_graph(plain_flex(), fullgraph=False)
