"""The arrays that the page needs to show a head in full, and their encoding in the file.

T tokens, N width of a query or key from which a score is computed, D = d_head, V vocabulary, C candidates for the next
token.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch
from torch import Tensor

from andrea.insight.lens.effects import logit_attribution
from andrea.insight.lens.page.measurements import Head, Measurements
from andrea.model.gpt import GPT

LIKELIEST = 10  # next tokens shown at each position, with their probabilities with and without a head
LIKELIEST_ABLATED = 5  # next tokens shown at each position after the ablation of a head
ATTRIBUTED = 3  # number of tokens whose logits a vector raises most, and of those that it lowers most
COMPONENTS = 4  # number of a residual-stream vector's first components that are shown

Layout = list[list[Any]]  # [name, type, shape] of each array of a block


def candidate_tokens(measurements: Measurements) -> Tensor:
    """Token ids (T, C): the likeliest next tokens of each position, then the position's target.

    The target is the prompt's next token. The prompt's last position has none: its target is the likeliest token.
    """
    likeliest = measurements.log_probabilities.topk(LIKELIEST).indices
    targets = torch.cat((measurements.tokens[0, 1:], likeliest[-1:, 0]))
    return torch.cat((likeliest, targets[:, None]), -1)


def head_arrays(model: GPT, measurements: Measurements, head: Head, detail: bool) -> dict[str, np.ndarray]:
    """Arrays (T, …) of one head, without its ablation. detail: include direct logit attribution."""
    layer, index = head
    trace = measurements.layers[layer]
    value, written = trace.value[0, index], trace.written[0, index]  # (T, D)
    of_head = model.blocks[layer].attention.output_by_head[index]  # (d_model, D)
    arrays: dict[str, Tensor] = {"query": trace.query[0, index], "key": trace.key[0, index], "value": value}
    if len(trace.value_parts) > 1:
        norms = [part[0, index].norm(dim=-1) for part in trace.value_parts.values()]
        arrays["value_parts"] = torch.stack(norms, dim=-1)  # (T, parts)
    if trace.gate is not None:
        arrays["gate"] = trace.gate[0, index]  # (T, 1 or D)
    for name, vectors in (("key", value), ("query", written)):
        added = vectors @ of_head.T  # (T, d_model)
        arrays[f"{name}_write"] = torch.cat((added.norm(dim=-1, keepdim=True), added[:, :COMPONENTS]), -1)
        if detail:
            ids, changes = logit_attribution(model, layer, index, vectors, ATTRIBUTED)
            arrays |= {f"{name}_logits": changes, f"{name}_logits_ids": ids}
    return {name: as_array(tensor, model.n_vocab) for name, tensor in arrays.items()}


def ablation_arrays(candidates: Tensor, ablated: Tensor) -> dict[str, np.ndarray]:
    """Arrays of the predicted next tokens without a head. candidates (T, C): ids. ablated (T, V): ln p without it."""
    top = ablated.topk(LIKELIEST_ABLATED)
    arrays = {
        "ablated_candidates": ablated.gather(-1, candidates).exp(),
        "ablated_top": top.values.exp(),
        "ablated_top_ids": top.indices,
    }
    return {name: as_array(tensor, ablated.shape[-1]) for name, tensor in arrays.items()}


def as_array(tensor: Tensor, n_vocab: int) -> np.ndarray:
    """Numbers as fp32; token ids below n_vocab in two bytes, or in four for a larger vocabulary."""
    return tensor.cpu().numpy().astype(np.float32 if tensor.is_floating_point() else id_type(n_vocab))


def id_type(n_vocab: int) -> type[np.unsignedinteger]:
    return np.uint16 if n_vocab <= 1 << 16 else np.uint32


def pack(arrays: dict[str, np.ndarray]) -> tuple[str, Layout]:
    """Returns the base64 of all arrays, and their layout. Arrays of larger types come first, for alignment."""
    ordered = sorted(arrays.items(), key=lambda item: -item[1].itemsize)
    layout = [[name, array.dtype.str.lstrip("<|"), list(array.shape)] for name, array in ordered]
    raw = b"".join(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes() for _, array in ordered)
    return base64.b64encode(raw).decode("ascii"), layout


def packed_head_bytes(measurements: Measurements, detail: bool) -> int:
    """The length in bytes of one head's base64 text."""
    trace = measurements.layers[0]
    n_token, n_vocab = measurements.tokens.shape[1], measurements.log_probabilities.shape[-1]
    n_candidate = LIKELIEST + 1
    numbers = 2 * trace.query.shape[-1] + trace.value.shape[-1] + 2 * (1 + COMPONENTS)
    numbers += len(trace.value_parts) if len(trace.value_parts) > 1 else 0
    numbers += 0 if trace.gate is None else trace.gate.shape[-1]
    ids = 0
    if detail:
        in_effects = 1  # in the block with the effects of all heads
        numbers += 2 * 2 * ATTRIBUTED + n_candidate + LIKELIEST_ABLATED + in_effects
        ids = 2 * 2 * ATTRIBUTED + LIKELIEST_ABLATED
    return -(-n_token * (4 * numbers + np.dtype(id_type(n_vocab)).itemsize * ids) // 3) * 4
