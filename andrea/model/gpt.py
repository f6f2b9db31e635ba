"""A decoder-only transformer: tokens in, hidden vectors out, logits from those.

B batch, T tokens, V vocabulary. Pre-norm blocks: x + attention(norm(x)), then x + mlp(norm(x)).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from andrea.attention import (
    Compatibility,
    HeadStatistics,
    KeyValueCache,
    LayerCache,
    Mask,
    MultiHeadAttention,
    Place,
    causal,
    documents_of,
    make_compatibility,
    packed_documents,
    sliding_window,
)
from andrea.config import AttentionConfig, ModelConfig
from andrea.model.layers import make_mlp, make_norm, softcap
from andrea.model.positions import make_position
from andrea.model.transfer import WRITES_RESIDUAL, Transfer


def make_mask(attention: AttentionConfig) -> Mask:
    return causal() if attention.window is None else sliding_window(attention.window)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, attention: AttentionConfig) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = MultiHeadAttention(
            config.d_model,
            config.n_head,
            compatibility=make_compatibility(attention.compatibility, config.n_head, config.d_head),
            mask=make_mask(attention),
            n_kv_head=config.n_kv_head,
            bias=config.bias,
            qk_norm_epsilon=config.norm_epsilon if config.qk_norm else None,
            value_residual=config.value_residual,
            implementation=attention.implementation,
        )
        self.mlp_norm = make_norm(config)
        self.mlp = make_mlp(config)

    def forward(
        self,
        x: Tensor,
        first_value: Tensor | None,
        place: Place | None,
        packing: Mask | None,
        cache: LayerCache | None,
        observed: list[HeadStatistics] | None,
    ) -> Tensor:
        """x (B, T, d_model), and with value_residual the first layer's values (B, G, T, D) -> (B, T, d_model)."""
        how = {"first_value": first_value, "place": place, "packing": packing, "cache": cache, "observed": observed}
        x = x + self.attention(self.attention_norm(x), **how)
        return x + self.mlp(self.mlp_norm(x))

    def values(self, x: Tensor) -> Tensor:
        """x (B, T, d_model) -> its own values (B, G, T, D)."""
        return self.attention.values(self.attention_norm(x))


def call(
    block: Block,
    x: Tensor,
    first_value: Tensor | None,
    place: Place | None,
    packing: Mask | None,
    cache: LayerCache | None,
    observed: list[HeadStatistics] | None,
) -> Tensor:
    """block(x, …): what training may compile, once for all blocks."""
    return block(x, first_value, place, packing, cache, observed)


Run = Callable[..., Tensor]  # as `call`


def recomputed(
    run: Run,
    block: Block,
    x: Tensor,
    first_value: Tensor | None,
    place: Place | None,
    packing: Mask | None,
    observed: list[HeadStatistics] | None,
) -> Tensor:
    """run(block, x, …) that keeps x alone and computes the rest again in the backward pass (Chen et al. 2016, 1604.06174).

    Statistics leave as a result, which the second computation throws away: each layer is observed once.
    """

    def forward(x: Tensor, first_value: Tensor | None) -> tuple[Tensor, list[HeadStatistics] | None]:
        measured: list[HeadStatistics] | None = None if observed is None else []
        return run(block, x, first_value, place, packing, None, measured), measured

    # A block draws no random numbers, so that none need be drawn again alike.
    x, measured = checkpoint(forward, x, first_value, use_reentrant=False, preserve_rng_state=False)
    if observed is not None:
        observed.extend(measured)
    return x


class GPT(nn.Module):
    """Build, then `initialise` or load weights; `logits(model(tokens))` scores the next token at every position.

    end_of_text: the token before every document, which attention does not cross where the config says so.
    """

    def __init__(
        self, config: ModelConfig, attention: AttentionConfig, n_vocab: int, end_of_text: int | None = None
    ) -> None:
        super().__init__()
        assert attention.across_documents or end_of_text is not None, "documents are told apart by their end-of-text"
        self.config = config
        self.end_of_text = None if attention.across_documents else end_of_text
        self.n_vocab = n_vocab
        self.embedding = nn.Embedding(n_vocab, config.d_model)
        self.position = make_position(config)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.n_layer))
        self.final_norm = make_norm(config)
        self.head = None if config.tied_head else nn.Linear(config.d_model, n_vocab, bias=False)

    def forward(
        self,
        tokens: Tensor,
        cache: KeyValueCache | None = None,
        observed: list[HeadStatistics] | None = None,
        recompute: bool = False,
        run: Run = call,
    ) -> Tensor:
        """tokens (B, T) int64 -> hidden (B, T, d_model), after the final norm.

        With a cache the tokens are new ones that stand at cache.length and after; their keys and values are appended
        to it, in place. observed: a list to which each layer appends the statistics of its heads. recompute: each block
        keeps its input alone for the backward pass, which computes the block's activations again.
        run: how a block is called; `call` itself, or that compiled.
        """
        assert cache is None or not recompute, "what is generated has no backward pass"
        n_token = tokens.shape[1]
        start = 0 if cache is None else cache.length
        x = self.position.add(self.embedding(tokens), start)
        place = self.position.placer(n_token, start)
        packing = None
        if self.end_of_text is not None and cache is None:  # what is being generated is one document
            packing = packed_documents(documents_of(tokens, self.end_of_text)[:, None])  # the same for all heads
        first_value = self.first_value(x)
        for index, block in enumerate(self.blocks):
            if recompute:
                x = recomputed(run, block, x, first_value, place, packing, observed)
            else:
                # A list of its own: alike for all, where a block is compiled.
                measured = None if observed is None else []
                layer_cache = None if cache is None else cache.layer(index)
                x = run(block, x, first_value, place, packing, layer_cache, measured)
                if observed is not None:
                    observed.extend(measured)
        if cache is not None:
            cache.advance(n_token)
        return self.final_norm(x)

    def first_value(self, x: Tensor) -> Tensor | None:
        """The embedded tokens x (B, T, d_model) -> the first layer's values (B, G, T, D), where later layers mix them in.

        The first block computes them again for itself, and mixes them with themselves, so that all blocks are alike.
        """
        return self.blocks[0].values(x) if self.config.value_residual else None

    @property
    def head_weight(self) -> Tensor:
        """(V, d_model)"""
        return self.embedding.weight if self.head is None else self.head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., d_model) -> logits (..., V); fp32 where the config caps them."""
        logits = linear(hidden, self.head_weight)
        return logits if self.config.logit_softcap is None else softcap(logits, self.config.logit_softcap)

    def make_cache(
        self, n_batch: int, n_room: int, *, fixed_shapes: bool = False, ragged: bool = False
    ) -> KeyValueCache:
        """An empty cache for n_batch sequences of up to n_room tokens, of the weights' own type and device."""
        weight = self.embedding.weight
        return KeyValueCache(
            self.config.n_layer,
            n_batch,
            self.config.n_kv_head or self.config.n_head,
            n_room,
            self.config.d_head,
            dtype=weight.dtype,
            device=weight.device,
            fixed_shapes=fixed_shapes,
            ragged=ragged,
        )


@torch.no_grad()
def initialise(model: GPT, generator: torch.Generator, transfer: Transfer | None = None) -> None:
    """Draw every weight, in one place and in the order of `named_parameters`.

    | parameter                                | value                                                             |
    |------------------------------------------|-------------------------------------------------------------------|
    | embedding with a head of its own         | normal, deviation 0.1: measured best on the default data          |
    | tied embedding, learned position, head   | normal, deviation 0.02                                            |
    | matrices                                 | normal, deviation 0.5 / sqrt(d_in): GPT-2's 0.02 at width 768     |
    | those that write into the residual       | the same / sqrt(2 n_layer), so that depth does not swell x        |
    | the latter and an untied head            | zero, with zero_init_projections: each block starts as identity   |
    | norm weights, biases                     | one, zero                                                         |
    | share of the first layer's values        | zero, which is a half                                             |
    | of a compatibility function              | what the function says: `Compatibility.initialise`                |

    Each times what `transfer` says where the rates were tuned at another width or depth (andrea/model/transfer.py).
    Numbers come from a CPU generator in fp32, so that a seed means the same model on every device.
    """
    transfer = transfer or Transfer()
    for module in model.modules():
        if isinstance(module, Compatibility):
            module.initialise(generator)
    for name, parameter in model.named_parameters():
        if ".compatibility." in name:
            continue
        if parameter.dim() == 1:
            parameter.fill_(transfer.factors(name).initial if name.endswith("norm.weight") else 0.0)
            continue
        deviation = 0.1 if name == "embedding.weight" and model.head is not None else 0.02
        if name.startswith("blocks."):
            deviation = 0.5 / math.sqrt(parameter.shape[1])
        if name.endswith(WRITES_RESIDUAL):
            deviation /= math.sqrt(2 * model.config.n_layer)
        if model.config.zero_init_projections and name.endswith((*WRITES_RESIDUAL, "head.weight")):
            deviation = 0.0
        deviation *= transfer.factors(name).initial
        parameter.copy_(deviation * torch.randn(parameter.shape, generator=generator))
