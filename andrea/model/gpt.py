"""A decoder-only transformer: tokens to hidden vectors, and hidden vectors to logits. `initialise` sets its first weights.

B batch, T tokens, S = sequence_length, L layers, H heads, G key/value heads, D = d_head, V vocabulary, R rows of a table.
Pre-norm blocks (Radford et al. 2019, GPT-2, section 2.3): x + attention(norm(x)), then x + mlp(norm(x)). With
model.parallel_residual both read the same x: x + attention(norm(x)) + mlp(norm(x)) (GPT-NeoX: Black et al. 2022, arXiv
2204.06745, section 2.1).
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import linear, pad, rms_norm
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
from andrea.attention.multihead import FIRST_SHARE
from andrea.config import AttentionConfig, ModelConfig, UserError
from andrea.model.lora import add_factors
from andrea.model.positions import make_position
from andrea.model.transfer import WRITES_RESIDUAL, Transfer
from andrea.runtime.user_classes import is_own, own_class

# -------------------------------------------------------------------------------------------------------------- dropout
# Dropout of what the blocks add to x. The random numbers are a function of a seed per sequence. A block adds two
# outputs to x: that of its attention (0) and that of its MLP (1). Each random number is computed from (seed of the
# sequence, layer, output, token, channel); it is not the next number of a generator. So neither the micro-batch, nor
# the number of ranks, nor a resume, nor activation checkpointing changes it.

HALF = 2**15 - 1
ROUND_FACTORS = (46501, 40503, 49843, 53669)  # odd numbers of 16 bits; with one round less, the last bits are not mixed


class BlockDropout(NamedTuple):
    """What is dropped from the two outputs of one block. (A NamedTuple, because FSDP finds tensors inside tuples.)"""

    keys: Tensor  # (2, B) int32, of the random numbers
    limit: Tensor  # (B,) int32: an output's number is dropped if its random number is below the limit
    scale: Tensor  # (B,): the factor that keeps the expectation unchanged

    def __call__(self, output: Tensor, which: int) -> Tensor:
        """Drop from output (B, T, d_model) of the attention (which=0) or of the MLP (which=1)."""
        tokens, channels = (torch.arange(n, dtype=torch.int32, device=output.device) for n in output.shape[1:])
        random = mixed(mixed(self.keys[which][:, None] ^ tokens)[..., None] ^ channels)  # (B, T, d_model)
        return torch.where(random >= self.limit[:, None, None], output, 0.0) * self.scale[:, None, None]


def block_dropouts(seeds: Tensor, config: ModelConfig) -> list[BlockDropout]:
    """The `BlockDropout` of each layer for B sequences with seeds (B,) int64. Nothing is dropped where a seed is -1.

    Each number of an output becomes 0 with probability config.dropout (Srivastava et al. 2014, JMLR 15). What remains is
    divided by the probability of being kept, so that evaluation needs no change.
    """
    n_layer, device, drops = config.n_layer, seeds.device, seeds >= 0
    streams = torch.arange(2 * n_layer, dtype=torch.int32, device=device).view(n_layer, 2, 1)
    keys = mixed(mixed(streams) ^ seeds.clamp(min=0).to(torch.int32))  # (L, 2, B)
    limit = torch.where(drops, int(config.dropout * 2**30), 0).to(torch.int32)  # of numbers of 30 bits
    scale = torch.where(drops, 1 / (1 - config.dropout), 1.0)
    return [BlockDropout(layer_keys, limit, scale) for layer_keys in keys]


def mixed(x: Tensor) -> Tensor:
    """A permutation of the int32 numbers from 0 to 2^30 - 1: every bit of the result depends on every bit of x.

    It is a Feistel network (Luby and Rackoff 1988) on two halves of 15 bits. No product exceeds an int32: the result of an
    overflow is undefined in C++, and compiled code would drop other numbers than eager code.
    """
    left, right = x >> 15, x & HALF
    for factor in ROUND_FACTORS:
        left, right = right, left ^ (right * factor >> 7 & HALF)
    return right << 15 | left


# --------------------------------------------------------------------------------------------------------------- layers
# Norms, MLPs and the cap on logits. x is (B, T, d_model).


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rmsnorm":  # Zhang and Sennrich 2019, arXiv 1910.07467
        return RMSNorm(config.d_model, config.norm_epsilon)
    return nn.LayerNorm(config.d_model, config.norm_epsilon, bias=config.bias)


def make_mlp(config: ModelConfig) -> nn.Module:
    """The MLP that config.mlp names: a built-in one, or a class of the user's own by its dotted path.

    A class of the user's own is built with (d_model, d_mlp, bias). Raises UserError if it may not be imported, if a
    checkpoint could not store it, or if its result has another shape than its input.
    """
    if is_own(config.mlp):
        mlp = own_class("model.mlp", config.mlp, nn.Module)(config.d_model, config.d_mlp, config.bias)
        if kept := mlp.state_dict().keys() - dict(mlp.named_parameters()).keys():
            raise UserError(
                f"model.mlp={config.mlp} has the buffer {min(kept)}, but a checkpoint holds parameters only; register it "
                f"with persistent=False, or make it a parameter"
            )
        check_shape(config, mlp)
        return mlp
    if config.mlp == "swiglu":
        return SwiGLU(config.d_model, config.d_mlp, config.bias)
    return MLP(config.d_model, config.d_mlp, config.bias, ACTIVATIONS[config.mlp])


def check_shape(config: ModelConfig, mlp: nn.Module) -> None:
    """Raises UserError unless a user's MLP gives x (B, T, d_model) for such an x."""
    x = torch.zeros(2, 3, config.d_model)
    if x.is_meta:  # a model that is only counted; an operation of the user's may know no such tensors
        return
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        y = mlp.eval()(x)
    mlp.train()
    shape = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
    if shape != tuple(x.shape):
        raise UserError(
            f"model.mlp={config.mlp}: for x {tuple(x.shape)} its result must have this shape, but it is {shape}"
        )


class RMSNorm(nn.RMSNorm):
    """RMS norm, computed in the type of its input.

    The weight is cast to this type, because torch's fused kernel requires equal types, and FSDP may gather the weight
    in bf16.
    """

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class MLP(nn.Module):
    """down(activation(up(x))): from d_model to d_mlp and back (Vaswani et al. 2017, arXiv 1706.03762, section 3.3)."""

    def __init__(self, d_model: int, d_mlp: int, bias: bool, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_mlp, bias)
        self.down = nn.Linear(d_mlp, d_model, bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202, eq. 6)."""

    def __init__(self, d_model: int, d_mlp: int, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_mlp, bias)
        self.up = nn.Linear(d_model, d_mlp, bias)
        self.down = nn.Linear(d_mlp, d_model, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al. 2021, arXiv 2109.08668)."""
    return functional.relu(x).square()


def gelu(x: Tensor) -> Tensor:
    """The tanh approximation of GELU, which GPT-2 uses (Hendrycks and Gimpel 2016, arXiv 1606.08415, section 2)."""
    return functional.gelu(x, approximate="tanh")


# Of MLP, by model.mlp. The exact GELU is x · Φ(x), where Φ is the normal distribution function.
ACTIVATIONS = {"relu2": relu_squared, "gelu": gelu, "gelu_exact": functional.gelu}


def softcap(logits: Tensor, cap: float) -> Tensor:
    """cap · tanh(logits / cap), in fp32: limits logits of any shape smoothly to -cap .. cap (Gemma 2, arXiv 2408.00118,
    section 2)."""
    return cap * torch.tanh(logits.float() / cap)


# ----------------------------------------------------------------------------------------------------- bigram embedding
# Hashed bigrams: an embedding of each pair of neighbouring tokens is added to the embedding of the token.

NO_TOKEN = -1  # before the first token of a text


def tokens_before(tokens: Tensor, starts_text: Tensor | None = None) -> Tensor:
    """The token before each one, (B, T); NO_TOKEN before a sequence's first, and where `starts_text` (B, T) is true."""
    before = pad(tokens[:, :-1], (1, 0), value=NO_TOKEN)
    return before if starts_text is None else before.masked_fill(starts_text, NO_TOKEN)


def row_and_sign(before: Tensor, tokens: Tensor, n_row: int) -> tuple[Tensor, Tensor]:
    """The row of each pair of tokens, in 0..n_row - 1, and its sign, 1 or -1: one hash of the pair, (B, T) int64 each.

    31 bits are mixed by multiplications and shifts (as in the finaliser of MurmurHash3), so that no product overflows.
    """
    mixed = (before * 0x4F1BBCDD + tokens * 0x2545F491) & 0x7FFFFFFF
    for factor in (0x2C1B3C6D, 0x297A2D39):
        mixed = ((mixed ^ (mixed >> 15)) * factor) & 0x7FFFFFFF
    mixed = mixed ^ (mixed >> 15)
    return (mixed >> 1) % n_row, (mixed & 1) * 2 - 1


class BigramEmbedding(nn.Module):
    """± E[hash(token before, token)], (B, T, d_model): zero at first, and for a token with none before it.

    Many pairs share a row. The sign, a second hash (feature hashing: Weinberger et al. 2009, arXiv 0902.2206, section 2),
    makes what they add to each other's row cancel in the mean. From modded-nanogpt; measured here in bench/README.md.
    """

    def __init__(self, n_row: int, d_model: int) -> None:
        super().__init__()
        self.table = nn.Embedding(n_row, d_model)
        nn.init.zeros_(self.table.weight)

    def forward(self, before: Tensor, tokens: Tensor) -> Tensor:
        """before, tokens (B, T) int64; before: NO_TOKEN where there is none."""
        rows, signs = row_and_sign(before, tokens, self.table.num_embeddings)
        signs = signs.masked_fill(before == NO_TOKEN, 0)
        return signs[..., None].to(self.table.weight.dtype) * self.table(rows)


# ------------------------------------------------------------------------------------------------------------ the model

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
            width = config.n_key_head * config.head_width
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
        if config.lora_rank:
            add_factors(self, config.lora_rank)

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
        recompute: use activation checkpointing (Chen et al. 2016, arXiv 1604.06174): only a block's input is kept for the
        backward pass, which computes the block's activations again.
        dropout_seeds: (B,) int64, for training: see `block_dropouts`. Nothing is dropped without them.
        call_block: the function that calls a block: `call_block` itself, or its compiled form.
        """
        assert cache is None or not recompute, "generation has no backward pass"
        if recompute:  # a block draws no random numbers: dropout is computed from its inputs
            call_block = functools.partial(checkpoint, call_block, use_reentrant=False, preserve_rng_state=False)
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
        packing = self.document_mask(tokens) if cache is None else None  # a generated text is one document
        needs_place = packing is not None and self.config.qkv_convolution
        x = self.embed(tokens, cache)
        return x, SharedInputs(
            place=self.position.placer(tokens.shape[1], start),
            packing=packing,
            document_place=places_in_documents(tokens, self.end_of_text) if needs_place else None,
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
        weight, n_kv_head = self.embedding.weight, self.config.n_key_head
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


# ------------------------------------------------------------------------------------------------------- initial values

# Parameters that begin with one number, by the end of their names.
FIRST_VALUES = {
    ".attention.gate.weight": 0.0,
    ".attention.sink": 0.0,
    ".attention.query_norm": 1.0,
    ".attention.key_norm": 1.0,
    ".exclusive_share": FIRST_SHARE,
    ".taps": 0.0,
    ".value_embedding.projection.weight": 0.0,
    ".value_embedding.table.weight": 0.0,
    ".value_embedding.mix": 1.0,
    "bigram_embedding.table.weight": 0.0,
}


@torch.no_grad()
def initialise(model: GPT, generator: torch.Generator, transfer: Transfer | None = None) -> None:
    """Set the initial value of every weight, in the order of `named_parameters`.

    | parameter                                | value                                                             |
    |------------------------------------------|-------------------------------------------------------------------|
    | embedding of a model with an untied head | normal, deviation 0.1, the best in tests on the default data      |
    | tied embedding, learned position, head   | normal, deviation 0.02, as in GPT-2                               |
    | matrices                                 | normal, deviation 0.5 / sqrt(d_in): GPT-2's 0.02 at width 768     |
    | matrices that write into the residual    | the same / sqrt(2 n_layer), so that x does not grow with depth    |
    | norm weights (QK-norm's too), biases     | one, zero                                                         |
    | share of the first layer's values        | zero: the logistic function makes it one half                     |
    | logits of attention sinks                | zero: a 1 + in the softmax's denominator (softmax-off-by-one)     |
    | taps of a convolution                    | zero: queries, keys and values begin unmixed                      |
    | head gates                               | zero: every gate is one                                           |
    | shares of exclusive attention            | one half, the best in tests on the default data                   |
    | value embeddings, their factor           | zero, one: nothing is added; better than drawn weights and zero   |
    | bigrams                                  | zero: nothing is added                                            |
    | compatibility function                   | by its own `Compatibility.initialise`                             |
    | MLP of the user's own                    | by its `initialise(generator)` if it has one, else as above       |

    Each value is multiplied by the factor in `transfer` for another width or depth (andrea/model/transfer.py). The
    numbers are drawn in fp32 on the CPU, so that a seed gives the same model on every device.
    """
    transfer = transfer or Transfer()
    draws_itself = hasattr(model.blocks[0].mlp, "initialise")
    for block in model.blocks:
        block.attention.compatibility.initialise(generator)
        if draws_itself:
            block.mlp.initialise(generator)
    for name, parameter in model.named_parameters():
        if ".compatibility." in name or (draws_itself and ".mlp." in name):
            continue
        first = next((value for end, value in FIRST_VALUES.items() if name.endswith(end)), None)
        if first is not None:
            parameter.fill_(first)
            continue
        if parameter.dim() <= 1:
            parameter.fill_(transfer.factors(name).initial if name.endswith("norm.weight") else 0.0)
            continue
        deviation = 0.1 if name == "embedding.weight" and model.head is not None else 0.02
        if name.startswith("blocks."):
            deviation = 0.5 / math.sqrt(parameter.shape[1])
        if name.endswith(WRITES_RESIDUAL):
            deviation /= math.sqrt(2 * model.config.n_layer)
        deviation *= transfer.factors(name).initial
        parameter.copy_(deviation * torch.randn(parameter.shape, generator=generator))
