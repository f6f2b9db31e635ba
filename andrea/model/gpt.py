"""A decoder-only transformer: tokens to hidden vectors, and hidden vectors to logits.

B batch, T tokens, H heads, G key/value heads, D = d_head, V vocabulary.
Pre-norm blocks (Radford et al. 2019, GPT-2, section 2.3): x + attention(norm(x)), then x + mlp(norm(x)). With
model.parallel_residual both read the same x: x + attention(norm(x)) + mlp(norm(x)) (GPT-NeoX: Black et al. 2022, arXiv
2204.06745, section 2.1).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm
from torch.utils.checkpoint import checkpoint

from andrea.attention import (
    HeadStatistics,
    KeyValueCache,
    LayerCache,
    Mask,
    MultiHeadAttention,
    ScoreModifiers,
    SharedInputs,
    ValueEmbedding,
    causal,
    documents_of,
    make_compatibility,
    packed_documents,
    places_in_documents,
    sliding_window,
)
from andrea.config import AttentionConfig, ModelConfig, UserError
from andrea.model.bigram_embedding import BigramEmbedding, tokens_before
from andrea.model.dropout import BlockDropout, block_dropouts
from andrea.model.layers import make_mlp, make_norm, softcap
from andrea.model.positions import make_position

BlockResult = tuple[Tensor, HeadStatistics | None]  # x (B, T, d_model); statistics (B, H) or None


@functools.lru_cache(maxsize=64)
def make_mask(window: int | None) -> Mask:
    """The causal mask, limited to a sliding window if one is given.

    Layers of equal window share one mask, so that one compiled graph serves them all.
    """
    return causal() if window is None else sliding_window(window)


def make_modifiers(config: ModelConfig, attention: AttentionConfig) -> ScoreModifiers | None:
    """What changes the scores, if anything: a soft cap, and ALiBi if it gives the positions."""
    alibi = config.position == "alibi"
    return ScoreModifiers(attention.score_softcap, alibi) if alibi or attention.score_softcap is not None else None


class Block(nn.Module):
    """A pre-norm transformer block: attention and an MLP, one after the other or side by side."""

    def __init__(self, config: ModelConfig, attention: AttentionConfig, layer: int, n_vocab: int) -> None:
        """layer: the block's number, counted from 0."""
        super().__init__()
        compatibility = make_compatibility(attention.compatibility, config.n_head, config.head_width, config.n_kv_head)
        if config.position == "rotary" and not compatibility.lowers:
            raise UserError(
                f"attention.compatibility={attention.compatibility} has no method `lower`, which model.position=rotary needs; "
                f"write one, or set model.position=learned, alibi or none"
            )
        value_embedding = None
        if config.value_embedding is not None:
            width = (config.n_kv_head or config.n_head) * config.head_width
            value_embedding = ValueEmbedding(config.value_embedding, config.d_model, n_vocab, width)
        self.attention_norm = make_norm(config)
        self.attention = MultiHeadAttention(
            config.d_model,
            config.n_head,
            compatibility=compatibility,
            mask=make_mask(attention.window_of(layer)),
            n_kv_head=config.n_kv_head,
            d_head=config.d_head,
            bias=config.bias,
            qk_norm_epsilon=config.norm_epsilon if config.qk_norm else None,
            qk_norm_weights=config.qk_norm == "learned",
            value_residual=config.value_residual,
            value_embedding=value_embedding,
            convolution=config.qkv_convolution,
            gate=attention.gate,
            exclusive=attention.exclusive,
            modifiers=make_modifiers(config, attention),
            sink=attention.sink,
            implementation=attention.implementation,
        )
        self.mlp_norm = make_norm(config)
        self.mlp = make_mlp(config)
        self.parallel_residual = config.parallel_residual

    def forward(
        self,
        x: Tensor,
        shared: SharedInputs,
        cache: LayerCache | None = None,
        statistics: bool = False,
        dropout: BlockDropout | None = None,
    ) -> BlockResult:
        """x (B, T, d_model) -> x (B, T, d_model), and the heads' statistics (B, H), or None without `statistics`."""
        attended = self.attention(self.attention_norm(x), shared=shared, cache=cache, statistics=statistics)
        attended, measured = attended if statistics else (attended, None)
        before, x = x, x + (attended if dropout is None else dropout(attended, 0))
        output = self.mlp(self.mlp_norm(before if self.parallel_residual else x))
        return x + (output if dropout is None else dropout(output, 1)), measured

    def values(self, x: Tensor) -> Tensor:
        """x (B, T, d_model) -> the values that the block's attention computes from x, (B, G, T, D)."""
        return self.attention.values(self.attention_norm(x))


CallBlock = Callable[[Block, Tensor, SharedInputs, LayerCache | None, bool, BlockDropout | None], BlockResult]


def call_block(
    block: Block,
    x: Tensor,
    shared: SharedInputs,
    cache: LayerCache | None,
    statistics: bool,
    dropout: BlockDropout | None,
) -> BlockResult:
    """Call a block. Training may compile this function; one graph then serves all blocks of equal window."""
    return block(x, shared, cache, statistics, dropout)


def recomputed(call_block: CallBlock, *inputs: Any) -> BlockResult:
    """call_block(*inputs) with activation checkpointing (Chen et al. 2016, arXiv 1604.06174).

    Only the block's input is kept for the backward pass, which computes the block's activations again. The second
    computation's statistics are discarded.
    """
    # preserve_rng_state=False: a block draws no random numbers. Dropout is computed from its inputs.
    return checkpoint(call_block, *inputs, use_reentrant=False, preserve_rng_state=False)


class GPT(nn.Module):
    """A GPT. Before its first use, call `initialise` or load the weights of a checkpoint.

    `model.logits(model(tokens))` scores the next token at every position.
    end_of_text: the token before every document. It is required if the config masks attention between documents.
    """

    def __init__(
        self, config: ModelConfig, attention: AttentionConfig, n_vocab: int, end_of_text: int | None = None
    ) -> None:
        super().__init__()
        assert attention.across_documents or end_of_text is not None, "an end-of-text token separates the documents"
        self.config = config
        self.end_of_text = None if attention.across_documents else end_of_text
        self.n_vocab = n_vocab
        self.embedding = nn.Embedding(n_vocab, config.d_model)
        n_row = config.n_bigram_row
        self.bigram_embedding = BigramEmbedding(n_row, config.d_model) if n_row else None
        self.position = make_position(config)
        self.blocks = nn.ModuleList(Block(config, attention, layer, n_vocab) for layer in range(config.n_layer))
        self.final_norm = make_norm(config)
        self.head = None if config.tied_head else nn.Linear(config.d_model, n_vocab, bias=False)

    def forward(
        self,
        tokens: Tensor,
        cache: KeyValueCache | None = None,
        *,
        statistics: bool = False,
        recompute: bool = False,
        dropout_seeds: Tensor | None = None,
        call_block: CallBlock = call_block,
    ) -> Tensor | tuple[Tensor, list[HeadStatistics]]:
        """tokens (B, T) int64 -> hidden (B, T, d_model), after the final norm.

        cache: the keys and values of earlier tokens. `tokens` are new, from position cache.length on; their keys and
        values are appended to the cache, in place.
        statistics: return (hidden, statistics of each layer's heads).
        recompute: use activation checkpointing for each block.
        dropout_seeds: (B,) int64, for training: see `block_dropouts`. Nothing is dropped without them.
        call_block: the function that calls a block: `call_block` itself, or its compiled form.
        """
        assert cache is None or not recompute, "generation has no backward pass"
        if recompute:
            call_block = functools.partial(recomputed, call_block)
        x, shared = self.block_inputs(tokens, cache)
        dropouts = [None] * len(self.blocks) if dropout_seeds is None else block_dropouts(dropout_seeds, self.config)
        layers = []
        for index, (block, dropout) in enumerate(zip(self.blocks, dropouts, strict=True)):
            layer_cache = None if cache is None else cache.layer(index)
            x, measured = call_block(block, x, shared, layer_cache, statistics, dropout)
            layers.append(measured)
        if cache is not None:
            cache.advance(tokens.shape[1])
        hidden = self.final_norm(x)
        return (hidden, layers) if statistics else hidden

    def block_inputs(self, tokens: Tensor, cache: KeyValueCache | None = None) -> tuple[Tensor, SharedInputs]:
        """The inputs of the first block for tokens (B, T): x (B, T, d_model), and the inputs that all blocks share."""
        start = 0 if cache is None else cache.length
        has_documents = self.end_of_text is not None and cache is None  # a generated text is one document
        x = self.embed(tokens, cache)
        return x, SharedInputs(
            place=self.position.placer(tokens.shape[1], start),
            packing=self.document_mask(tokens) if has_documents else None,
            document_place=places_in_documents(tokens, self.end_of_text)
            if has_documents and self.config.qkv_convolution
            else None,
            # The first block computes these values again and mixes them with themselves. All blocks then have equal
            # inputs, so one compiled graph serves all of them.
            first_value=self.blocks[0].values(x) if self.config.value_residual else None,
            value_source=self.value_source(tokens, x),
        )

    def embed(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """tokens (B, T) -> (B, T, d_model): the sum of their embeddings, of the pairs that they end, and of the positions."""
        x = self.embedding(tokens)
        if self.bigram_embedding is not None:
            if cache is not None:
                before = cache.append_tokens(tokens)
            else:
                before = tokens_before(tokens, None if self.end_of_text is None else tokens == self.end_of_text)
            x = x + self.bigram_embedding(before, tokens)
        return self.position.add(x, 0 if cache is None else cache.length)

    def value_source(self, tokens: Tensor, x: Tensor) -> Tensor | None:
        """What the value embeddings of all layers read: x (B, T, d_model), normed, or tokens (B, T); None without them."""
        if self.config.value_embedding is None:
            return None
        if self.config.value_embedding == "table":
            return tokens
        return rms_norm(x, (self.config.d_model,), eps=self.config.norm_epsilon)

    def document_mask(self, tokens: Tensor) -> Mask | None:
        """A mask against attention between the documents in tokens (B, T); None with attention.across_documents."""
        if self.end_of_text is None:
            return None
        return packed_documents(documents_of(tokens, self.end_of_text)[:, None])  # the same for all heads

    @property
    def head_weight(self) -> Tensor:
        """The weight (V, d_model) of the head; the embedding's weight if the two are tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., d_model) -> logits (..., V); in fp32 if the config caps them."""
        logits = linear(hidden, self.head_weight)
        return logits if self.config.logit_softcap is None else softcap(logits, self.config.logit_softcap)

    def make_cache(
        self, n_batch: int, capacity: int, *, fixed_shapes: bool = False, ragged: bool = False
    ) -> KeyValueCache:
        """An empty cache for n_batch sequences of at most `capacity` tokens. It has the weights' type and device.

        fixed_shapes, ragged: as in `KeyValueCache`.
        """
        weight, n_kv_head = self.embedding.weight, self.config.n_kv_head or self.config.n_head
        return KeyValueCache(
            self.config.n_layer,
            n_batch,
            n_kv_head,
            capacity,
            self.config.head_width,
            dtype=weight.dtype,
            device=weight.device,
            fixed_shapes=fixed_shapes,
            ragged=ragged,
            n_projected=self.config.n_head + 2 * n_kv_head if self.config.qkv_convolution else 0,
            keeps_tokens=self.bigram_embedding is not None,
        )
