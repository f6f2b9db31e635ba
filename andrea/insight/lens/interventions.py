"""Interventions: the forward pass with one part changed, and the predictions that follow from it.

Ablation: a head writes zeros. Patching: a part is replaced by what it is in the run of another prompt. The pass restarts at the
changed layer, from the residual stream in a `LayerTrace`.

B sequences, T tokens, L layers, H heads, D = d_head, V vocabulary, n changed copies of one prompt, C compared next tokens.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from andrea.attention import KeyValueCache, LayerCache, Rotation, SharedInputs
from andrea.insight.lens.trace import LayerTrace, block_outputs, finish_block, next_log_probabilities
from andrea.model.gpt import GPT

# ------------------------------------------------------------------------------------------------------------- ablation

LOGITS_AT_ONCE = 1 << 26  # of ablations computed at once: a quarter of a GiB


@torch.no_grad()
def ablate_heads(
    model: GPT, tokens: Tensor, layer: int, trace: LayerTrace, heads: Sequence[int], last_only: bool = False
) -> Iterator[tuple[int, Tensor]]:
    """Ablate one of a layer's `heads` at a time: it writes zeros. Yields (head, ln p of the next token (T, V)).

    tokens (1, T). last_only: yield only ln p after the last token, (1, V). What the heads write is `LayerTrace.written`.
    The forward pass restarts at this layer, from the residual stream in `trace`.
    """
    n_token = tokens.shape[1]
    at_once = max(1, LOGITS_AT_ONCE // (n_token * model.n_vocab))
    for begin in range(0, len(heads), at_once):
        some = list(heads[begin : begin + at_once])
        written = trace.written.repeat(len(some), 1, 1, 1)  # (ablated heads, H, T, D)
        written[range(len(some)), some] = 0
        x = finish_block(model.blocks[layer], trace.before.expand(len(some), -1, -1), written)
        for block in model.blocks[layer + 1 :]:
            x, _ = block(x, trace.shared)  # all copies share the inputs of the one sequence
        x = x[:, -1:] if last_only else x
        yield from zip(some, next_log_probabilities(model, x), strict=True)


# ------------------------------------------------------------------------------------------------------------- patching
# Activation patching between two prompts of T tokens (Vig et al. 2020, arXiv 2004.12265; Zhang and Nanda 2024, arXiv
# 2309.16042). Prompt A runs, and one part of its run is replaced by that part of the run of prompt B. If the prediction then
# moves to that of B, this part carries what distinguishes the prompts. `one` and `other` are the traces of a layer in the runs
# of A and B. `places` says what is replaced in each of n copies.
# prefix: from `cache_of`. With it, positions before the first replaced one, which do not change, are not computed again.


@torch.no_grad()
def patch(
    kind: str,
    model: GPT,
    one: LayerTrace,
    other: LayerTrace,
    layer: int,
    places: Tensor,
    prefix: KeyValueCache | None = None,
) -> Tensor:
    """Replace one kind of part, in n copies, and return the logits after the last token, (n, V).

    kind: stream is all that `layer` reads at some positions, places bool (n, T): the residual stream, and what later layers
    read of the position besides, the first layer's values and the value embedding, in a model that has them. So with all
    positions replaced, the logits are those of prompt B. heads is what some heads write at some positions, places bool
    (n, H, T); attention the same with all heads. mlp is what the MLP writes, places bool (n, T).
    """
    block, following, shared = model.blocks[layer], layer + 1, one.shared
    if kind == "stream":
        following, shared = layer, patched_inputs(one.shared, other.shared, places)
        x = torch.where(places[..., None], other.before, one.before)
    elif kind == "mlp":
        attended, own = block_outputs(block, one.before, one.written)
        _, others = block_outputs(block, other.before, other.written)
        x = one.before + attended + torch.where(places[..., None], others, own)
    else:
        written = torch.where(places[..., None], other.written, one.written)
        x = finish_block(block, one.before.expand(len(places), -1, -1), written)
    return last_logits(model, following, x, shared, places, prefix)


def patched_inputs(one: SharedInputs, other: SharedInputs, places: Tensor) -> SharedInputs:
    """The inputs that all layers share, with those of the other run at places (n, T)."""
    values, source = one.first_value, one.value_source
    if values is not None:
        values = torch.where(places[:, None, :, None], other.first_value, values)
    if source is not None:  # (1, T) tokens, or (1, T, d_model)
        source = torch.where(places if source.ndim == 2 else places[..., None], other.value_source, source)
    return one._replace(first_value=values, value_source=source)


def last_logits(
    model: GPT, layer: int, x: Tensor, shared: SharedInputs, places: Tensor, prefix: KeyValueCache | None
) -> Tensor:
    """The input of `layer`, (n, T, d_model), replaced at places (n, …, T) -> the logits after the last token, (n, V)."""
    start = 0
    if prefix is not None and shared.packing is None:
        start = int(places.flatten(0, -2).any(0).int().argmax())
    x, shared = x[:, start:], inputs_from(shared, start)
    for index in range(layer, len(model.blocks)):
        kept = copies_of(prefix.layer(index), start, len(x)) if start else None
        x, _ = model.blocks[index](x, shared, kept)
    return model.logits(model.final_norm(x[:, -1])).float()


def cache_of(model: GPT, layers: Sequence[LayerTrace]) -> KeyValueCache:
    """The keys and values of a prompt, by the traces of all layers."""
    cache = model.make_cache(1, layers[0].before.shape[1])
    for index, (block, trace) in enumerate(zip(model.blocks, layers, strict=True)):
        block(trace.before, trace.shared, cache.layer(index))
    return cache


def copies_of(kept: LayerCache, start: int, n_copy: int) -> LayerCache:
    """The cache of a layer for n copies of the prompt, filled up to position `start`."""
    keys, values, projected = (
        None if each is None else each.repeat(n_copy, 1, 1, 1) for each in (kept.keys, kept.values, kept.projected)
    )
    return LayerCache(keys, values, start, projected=projected)


def inputs_from(shared: SharedInputs, start: int) -> SharedInputs:
    """The inputs that all layers share, for the positions from `start` on."""
    place, values, source = shared.place, shared.first_value, shared.value_source
    return shared._replace(
        place=None if place is None else Rotation(place.cosine[start:], place.sine[start:]),
        first_value=None if values is None else values[:, :, start:],
        value_source=None if source is None else source[:, start:],
    )


NUMBERS_AT_ONCE = 1 << 19  # of the residual streams of copies that run together: 2 MB
MOST_FLOPS = 5e12  # about a minute on one core; above it, `attention` and `mlp` are left out, two thirds of the copies


@torch.no_grad()
def patch_all(
    model: GPT, layers: Sequence[LayerTrace], others: Sequence[LayerTrace], compared: Tensor
) -> dict[str, Tensor]:
    """The logits of the compared tokens (C,) after the last token, with each part of run A replaced in turn.

    layers, others: the traces of all layers in the runs of A and B. Returns `stream`, `attention` and `mlp`, (L, T, C): at one
    position, all that a layer reads, what its attention writes, what its MLP writes. `heads`, (L, H, C): what one head writes, at
    all positions. `whole`, (2, C): the logits of A and of B. For a large model and a long prompt, `attention` and `mlp` are left
    out (MOST_FLOPS).
    """
    n_head, n_token = layers[0].written.shape[1:3]
    positions = torch.eye(n_token, dtype=torch.bool, device=compared.device)
    of_heads = torch.eye(n_head, dtype=torch.bool, device=compared.device)[..., None].expand(-1, -1, n_token)
    kinds = {
        "stream": positions,
        "attention": positions[:, None].expand(-1, n_head, -1),
        "mlp": positions,
        "heads": of_heads,
    }
    # On average, a copy runs through half of the layers, with 2 FLOPs for each weight and token.
    n_weight = sum(parameter.numel() for parameter in model.blocks.parameters())
    if 3 * len(layers) * n_token * n_token * n_weight > MOST_FLOPS:
        del kinds["attention"], kinds["mlp"]
    whole = model.logits(model.final_norm(torch.cat([run[-1].after[:, -1] for run in (layers, others)]))).float()
    found = {kind: whole[:1, compared].repeat(len(layers), len(places), 1) for kind, places in kinds.items()}
    prefix = cache_of(model, layers)
    at_once = max(1, NUMBERS_AT_ONCE // layers[0].before.numel())
    for layer, (one, other) in enumerate(zip(layers, others, strict=True)):
        for kind, places in kinds.items():
            changed = torch.arange(n_head) if kind == "heads" else changed_positions(kind, one, other)
            for some in changed.split(at_once):
                found[kind][layer, some] = patch(kind, model, one, other, layer, places[some], prefix)[:, compared]
    return found | {"whole": whole[:, compared]}


def changed_positions(kind: str, one: LayerTrace, other: LayerTrace) -> Tensor:
    """The positions at which the runs differ. To replace the others would change nothing, such as those before the first
    other token."""
    before, after = (getattr(one, end) != getattr(other, end) for end in ("before", "after"))
    return (before if kind == "stream" else before | after)[0].any(-1).nonzero()[:, 0]
