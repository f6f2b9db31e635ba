"""torch's FlexAttention on lowered queries and keys (He et al. 2024, arXiv 2412.05496). It skips fully masked blocks.

H query heads, G key/value heads (G divides H), T queries, S keys.
"""

import functools

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from andrea.attention.compatibility import Case, Result, as_batch_of_heads, refusal_of_triton
from andrea.attention.mask import Causal, Mask, SlidingWindow, visible_interval, visible_keys
from andrea.attention.modifiers import ScoreModifiers, alibi_slopes, capped
from andrea.runtime.compiling import compile_graph


def refusal(case: Case) -> str | None:
    """Why FlexAttention cannot serve the case, or None. On a CPU it has no backward pass."""
    if case.query.device.type != "cuda":
        return f"it needs a CUDA GPU, got device={case.query.device.type}"
    return refusal_of_triton(case)


def run(case: Case) -> Result:
    query, key = case.lowered()
    mask, start = case.mask, case.first_position
    lead = query.shape[:-2]
    query, key, value = (as_batch_of_heads(tensor) for tensor in (query, key, case.value))
    n_head, n_query = query.shape[1:3]
    block_mask = None
    if mask is not None:
        where = (n_query, key.shape[2], start, query.device)
        by_position = isinstance(mask, (Causal, SlidingWindow)) and isinstance(start, int)
        block_mask = block_mask_of_positions(mask, *where) if by_position else block_mask_of_batch(mask, lead, *where)
    attend_by = compiled_flex() if query.device.type == "cuda" else flex_attention
    options = {"block_mask": block_mask, "scale": 1.0, "enable_gqa": n_head != key.shape[1]}
    if n_query > 1:  # torch's kernel for up to 127 queries does not compile for all shared heads (torch 2.11, H200)
        options["kernel_options"] = {"FORCE_USE_FLEX_ATTENTION": True}
    if case.modifiers is not None:
        options["score_mod"] = score_mod_of(case.modifiers, n_head, start, query.device)
    if case.sink is None:
        output = attend_by(query, key, value, **options)
    else:
        output, log_sum_exp = attend_by(query, key, value, **options, return_lse=True)
        # With the sink in the denominator, e^lse / (e^lse + e^sink) of the weight remains on the keys.
        kept = torch.sigmoid(log_sum_exp - case.sink.to(log_sum_exp.dtype)[..., None])
        output = (output * kept[..., None]).to(output.dtype)
    return output.reshape(*lead, *output.shape[-2:]), None


def score_mod_of(modifiers: ScoreModifiers, n_head: int, start: int, device: torch.device):
    """The modifiers as FlexAttention takes them: a function of one score, its sequence, head, query and key."""
    slopes = alibi_slopes(n_head, device)
    # A tensor: a number that changes is compiled as a symbol, which FlexAttention does not take (torch 2.15).
    cap = None if modifiers.softcap is None else torch.full((), modifiers.softcap, device=device)

    def modify(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        if cap is not None:
            score = capped(score, cap)
        return score - slopes[h] * (i + start - j).abs() if modifiers.alibi else score

    return modify


@functools.lru_cache(maxsize=64)
def block_mask_of_positions(mask: Mask, n_query: int, n_key: int, start: int, device: torch.device):
    """The BlockMask of a mask that depends on positions alone: the same for all sequences and heads, and cached."""
    return create_block_mask(
        lambda b, h, i, j: mask.visible(i + start, j), None, None, n_query, n_key, device=str(device)
    )


def block_mask_of_batch(
    mask: Mask, lead: torch.Size, n_query: int, n_key: int, start: int | torch.Tensor, device: torch.device
):
    """The BlockMask of a mask that may differ between sequences and heads. lead: (..., H) of the query."""
    interval = visible_interval(mask, n_query, n_key, start, device)
    if interval is None:  # the mask may leave gaps, so FlexAttention reads the full mask (B, H, T, S)
        table = as_batch_of_heads(visible_keys(mask, n_query, n_key, start, device).expand(*lead, n_query, n_key))
        n_batch, n_head = table.shape[:2]

        def sees(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return table[b, h, i, j]

    else:
        first, stop = (as_batch_of_heads(end.expand(*lead, n_query)[..., None])[..., 0] for end in interval)
        n_batch, n_head = first.shape[:2]

        def sees(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return (first[b, h, i] <= j) & (j < stop[b, h, i])

    return create_block_mask(sees, n_batch, n_head, n_query, n_key, device=str(device))


@functools.cache
def compiled_flex():
    return compile_graph(flex_attention, fullgraph=False)
