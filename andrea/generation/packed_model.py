"""A GPT packed for decoding: packed layers (packed_layers.py), and our kernels for attention and whole blocks.

B texts, T new tokens, H query heads, G key/value heads, D = d_head.
"""

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from andrea.attention import (
    BUILT_IN,
    DotProduct,
    HeadStatistics,
    KeyValueCache,
    LayerCache,
    MultiHeadAttention,
    ScaledDotProduct,
    ScoreModifiers,
    SharedInputs,
    alibi_slopes,
)
from andrea.attention.mask import Causal, SlidingWindow
from andrea.attention.multihead import is_plain, one_product_is_faster
from andrea.config import UserError
from andrea.generation.packed_layers import (
    FEW_ROWS,
    BlockLinear,
    Int4Linear,
    Layer,
    NativeLinear,
    NativeRMSNorm,
    OneDNNLinear,
    Scoring,
    Shape,
    TorchInt8Linear,
    bytes_of,
    function,
    has_native,
    has_onednn,
    int8_linear,
)
from andrea.model.gpt import GPT, MLP, RMSNorm, SwiGLU, softcap
from andrea.model.positions import Position, RotaryPosition
from andrea.runtime.device import LargePages
from andrea.runtime.native import POINTER, address

ACTIVATIONS = ("gelu", "relu2", "swiglu", "gelu_exact")  # in the order of `Activation` in decode.cpp

MakeLinear = Callable[[Tensor, Tensor | None], nn.Module]  # weight (d_out, d_in) and bias (d_out,) -> a linear layer


class NativeAttention(nn.Module):
    """Causal attention of one new token: one matrix product for query, key and value, then one kernel.

    For any other call the replaced module runs. Its projections share the packed weights.
    """

    def __init__(self, attention: MultiHeadAttention, position: Position, make_linear: MakeLinear) -> None:
        super().__init__()
        self.n_head, self.n_kv_head = attention.n_head, attention.n_kv_head
        weight = attention.query.weight
        attention.put_side_by_side(make_linear)
        self.project = attention.side_by_side  # (..., d_model) -> (..., (H + 2G) D)
        attention.output = make_linear(attention.output.weight, attention.output.bias)
        self.attention = attention
        self.values = attention.values
        self.epsilon = -1.0 if attention.qk_norm_epsilon is None else attention.qk_norm_epsilon
        self.scale = attention.d_head**-0.5 if isinstance(attention.compatibility, ScaledDotProduct) else 1.0
        self.rotary_table = position.table_bits.view(torch.float32) if isinstance(position, RotaryPosition) else None
        modifiers = attention.modifiers or ScoreModifiers()
        self.slopes = alibi_slopes(self.n_head, weight.device) if modifiers.alibi else None
        self.sinks = None if attention.sink is None else attention.sink.detach().float().contiguous()
        self.norms = [
            None if each is None else each.detach().float().contiguous()
            for each in (attention.query_norm, attention.key_norm)
        ]
        self.scoring = Scoring(
            window=attention.mask.width if isinstance(attention.mask, SlidingWindow) else 0,
            slopes=None if self.slopes is None else address(self.slopes),
            sinks=None if self.sinks is None else address(self.sinks),
            cap=modifiers.softcap or 0.0,
            query_norm=address(self.norms[0]),
            key_norm=address(self.norms[1]),
        )
        self.taps = None if attention.taps is None else attention.taps.detach().float().contiguous()
        self.own_share = None  # (H,)
        if attention.is_exclusive:
            learned = attention.exclusive_share
            self.own_share = torch.ones(self.n_head) if learned is None else learned.detach().float()
        self.convolve = function("convolve", weight.dtype)
        self.kernel = function("attend", weight.dtype)

    @staticmethod
    def serves(attention: MultiHeadAttention) -> bool:
        """Whether the kernel computes this attention."""
        plain = type(attention.compatibility) in (DotProduct, ScaledDotProduct)
        plain = plain and isinstance(attention.mask, (Causal, SlidingWindow))
        return plain and attention.d_head % 2 == 0 and attention.implementation != "reference"

    def forward(
        self,
        x: Tensor,
        *,
        shared: SharedInputs,
        cache: LayerCache | None = None,
        statistics: bool = False,
    ) -> Tensor | tuple[Tensor, HeadStatistics]:
        """The same as MultiHeadAttention.forward."""
        one_new = x.shape[1] == 1 and cache is not None and isinstance(cache.length, int)
        if not one_new or statistics:
            return self.attention(x, shared=shared, cache=cache, statistics=statistics)
        n_batch, d_head, capacity = len(x), self.attention.d_head, cache.keys.shape[2]
        assert cache.length < capacity, f"{cache.length + 1} tokens do not fit a cache with a capacity of {capacity}"
        assert shared.packing is None and cache.keys.dtype == x.dtype, (shared.packing, cache.keys.dtype, x.dtype)
        assert cache.keys.is_contiguous() and cache.values.is_contiguous() and len(cache.keys) == n_batch
        x = x.contiguous()
        three, retrieved = self.project(x), x.new_empty(n_batch, 1, self.n_head * d_head)
        if shared.first_value is not None or shared.value_source is not None:
            value = three[..., -self.n_kv_head * d_head :]
            value.copy_(self.attention.merged(self.attention.mixed(self.attention.heads(value), shared)))
        if self.taps is not None:
            n_heads, n_mixed = self.taps.shape[0], self.taps.shape[2]
            rows = address(three), address(cache.projected), address(self.taps)
            self.convolve(*rows, n_batch, n_heads, d_head, capacity, cache.length, n_mixed)
        tensors = (address(each) for each in (three, cache.keys, cache.values, self.rotary_table, retrieved))
        shape = n_batch, self.n_head, self.n_kv_head, d_head, capacity, cache.length
        self.kernel(*tensors, *shape, self.epsilon, self.scale, self.scoring)
        own_value = three[..., -self.n_kv_head * d_head :]
        z, own_value = self.attention.heads(retrieved), self.attention.heads(own_value)
        return self.attention.output(
            self.attention.merged(self.attention.finish(z, own_value, self.attention.gates(x)))
        )


class NativeBlocks:
    """All blocks and the final norm in one call of our kernel, for one new token per text.

    The blocks of the packed model, called one after another, give the same result for texts of equal length. They are the
    readable form of this kernel, which reads their weights. A text's result does not depend on the other texts.
    """

    def __init__(self, model: GPT) -> None:
        first, config = model.blocks[0].attention, model.config
        self.model, self.rotary_table, self.final_norm = model, first.rotary_table, model.final_norm.weight_address
        self.kernel = function("decode", model.embedding.weight.dtype)
        self.shape = functools.partial(
            Shape,
            n_layer=len(model.blocks),
            d_model=config.d_model,
            d_mlp=config.d_mlp,
            n_head=first.n_head,
            n_kv_head=first.n_kv_head,
            d_head=config.head_width,
            activation=ACTIVATIONS.index("swiglu" if isinstance(model.blocks[0].mlp, SwiGLU) else config.mlp),
            value_residual=config.value_residual,
            n_mixed=config.qkv_convolution or 0,
            parallel_residual=config.parallel_residual,
            norm_epsilon=model.final_norm.epsilon,
            qk_epsilon=first.epsilon,
            scale=first.scale,
        )
        self.addresses: weakref.WeakKeyDictionary[KeyValueCache, list[list[int]]] = weakref.WeakKeyDictionary()
        self.layers = (Layer * len(model.blocks))()
        for layer, block in zip(self.layers, model.blocks, strict=True):
            layer.attention_norm, layer.mlp_norm = block.attention_norm.weight_address, block.mlp_norm.weight_address
            layer.project, layer.output = block.attention.project.matrix, block.attention.attention.output.matrix
            layer.up, layer.down = block.mlp.up.matrix, block.mlp.down.matrix
            layer.scoring = block.attention.scoring
            if config.value_residual:
                layer.first_share = float(torch.sigmoid(block.attention.attention.value_mix))
            if config.qkv_convolution:
                layer.taps = block.attention.taps.data_ptr()
            layer.own_share = address(block.attention.own_share)
            if block.attention.attention.gate is not None:
                layer.head_gate = block.attention.attention.gate.matrix
            if isinstance(block.mlp, SwiGLU):
                layer.gate = block.mlp.gate.matrix

    @staticmethod
    def serves(model: GPT) -> bool:
        """Whether the kernel computes every part of this packed model, whose blocks have parts of the same kinds."""
        kinds = NativeLinear, BlockLinear, TorchInt8Linear
        linears = [module for module in model.modules() if isinstance(module, kinds)]
        is_served = isinstance(model.blocks[0].attention, NativeAttention) and isinstance(
            model.final_norm, NativeRMSNorm
        )
        return is_served and all(linear.kernel is not None for linear in linears)

    def fits(self, tokens: Tensor, cache: KeyValueCache | None) -> bool:
        """Whether the kernel supports these new tokens (B, T) with this cache."""
        one_each = tokens.shape[1] == 1 and len(tokens) <= FEW_ROWS[self.model.embedding.weight.dtype]
        return one_each and cache is not None and isinstance(cache.length, int)

    def __call__(self, tokens: Tensor, caches: Sequence[KeyValueCache]) -> Tensor:
        """tokens (B, 1) -> hidden (B, 1, d_model). The tokens' keys and values are appended to the caches.

        caches: of the B texts, in their order; a cache may hold several texts of equal length.
        """
        sizes, n_row = [len(cache.keys[0]) for cache in caches], len(tokens)
        x = self.embed(tokens, caches, sizes).contiguous()
        added = None
        if self.model.config.value_embedding is not None:
            # (L, B, 1, G D): what value embeddings add to the values of each layer; by text, so that no text affects another
            embeddings = [block.attention.attention.value_embedding for block in self.model.blocks]
            sources = [self.model.value_source(*each) for each in zip(tokens.split(1), x.split(1), strict=True)]
            rows = [torch.stack([each(source, x.dtype) for each in embeddings]) for source in sources]
            added = torch.cat(rows, dim=1)
        hidden, capacity, length = torch.empty_like(x), caches[0].capacity, max(cache.length for cache in caches)
        assert length < capacity, f"{length + 1} tokens do not fit a cache with a capacity of {capacity}"
        assert all((cache.keys[0].dtype, cache.capacity) == (x.dtype, capacity) for cache in caches), x.dtype
        lengths = [cache.length for cache, size in zip(caches, sizes, strict=True) for _ in range(size)]
        lengths = (ctypes.c_int64 * n_row)(*lengths)
        keys, values, projected = self.places(caches)
        if projected:  # with a convolution
            for index, layer in enumerate(self.layers):
                layer.projected = ctypes.addressof(projected) + index * n_row * ctypes.sizeof(POINTER)
        shape = self.shape(n_row=n_row, capacity=capacity, lengths=ctypes.addressof(lengths))
        rows = address(self.rotary_table), address(added), x.data_ptr(), hidden.data_ptr()
        self.kernel(self.layers, self.final_norm, keys, values, *rows, shape)
        for cache in caches:
            cache.advance(1)
        return hidden

    def embed(self, tokens: Tensor, caches: Sequence[KeyValueCache], sizes: list[int]) -> Tensor:
        """What `GPT.embed` gives for each cache by itself, (B, 1, d_model); for several caches in few operations."""
        if len(caches) == 1:
            return self.model.embed(tokens, caches[0])
        x = self.model.embedding(tokens)
        if self.model.bigram_embedding is not None:
            parts = zip(tokens.split(sizes), caches, strict=True)
            before = torch.cat([cache.append_tokens(part) for part, cache in parts])
            x = x + self.model.bigram_embedding(before, tokens)
        starts = [cache.length for cache, size in zip(caches, sizes, strict=True) for _ in range(size)]
        return self.model.position.add(x, torch.tensor(starts))

    def places(self, caches: Sequence[KeyValueCache]) -> list[ctypes.Array]:
        """The addresses of keys, values and convolution's rows: of text b in layer l at l * B + b."""
        for cache in caches:
            if cache not in self.addresses:
                kinds = cache.keys, cache.values, cache.projected
                assert all(each.is_contiguous() for kind in kinds for each in kind)
                # A layer's tensor (B, …) is read text by text.
                self.addresses[cache] = [[[text.data_ptr() for text in each] for each in kind] for kind in kinds]
        found = [self.addresses[cache] for cache in caches]
        flat = [
            [place for of_layer in zip(*kind, strict=True) for of_cache in of_layer for place in of_cache]
            for kind in zip(*found, strict=True)
        ]
        return [(ctypes.c_void_p * len(each))(*each) for each in flat]


class PackedGPT:
    """The part of GPT that decoding uses. The constructor modifies `model`: it replaces all matrices by packed ones.

    bits: 8 or 4, of each weight of a matrix (the head's: `head_bits`), or None for the model's own type.
    """

    def __init__(self, model: GPT, bits: int | None, native: bool) -> None:
        pages = LargePages(bytes_of_matrices(model, bits)) if native else None
        make_linear: MakeLinear = functools.partial(NativeLinear, pages=pages) if native else OneDNNLinear
        in_8_bits = functools.partial(int8_linear, native=native, pages=pages)
        if bits == 8:
            make_linear = in_8_bits
        elif bits == 4:
            make_linear = functools.partial(Int4Linear, pages=pages)
        self.head = (in_8_bits if head_bits(bits) == 8 else make_linear)(model.head_weight, None)
        if model.head is None and isinstance(self.head, NativeLinear):
            # A tied head and the embedding still share their memory.
            model.embedding.weight = nn.Parameter(self.head.weight, requires_grad=False)
        model.head = None
        for block in model.blocks:
            if native and NativeAttention.serves(block.attention):
                block.attention = NativeAttention(block.attention, model.position, make_linear)
            elif bits and one_product_is_faster(block.attention.query.weight):
                block.attention.put_side_by_side(make_linear)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, make_linear(child.weight, child.bias))
                elif native and isinstance(child, RMSNorm):
                    setattr(module, name, NativeRMSNorm(child))
        self.blocks = NativeBlocks(model) if native and NativeBlocks.serves(model) else None
        self.model = model
        self.config = model.config
        self.make_cache = model.make_cache

    def __call__(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        if self.blocks is not None and self.blocks.fits(tokens, cache):
            return self.blocks(tokens, [cache])
        return self.model(tokens, cache)

    @property
    def writes_texts_together(self) -> bool:
        """Whether `next_logits` can be called: whether our kernels compute everything."""
        return self.blocks is not None and getattr(self.head, "kernel", None) is not None

    def next_logits(self, tokens: Tensor, caches: Sequence[KeyValueCache]) -> list[Tensor]:
        """The logits (1, V) after one new token (B, 1) of each text, which has a cache by itself and any length.

        They are, bit for bit, those of each text alone.
        """
        scores = self.head.by_kernel(self.blocks(tokens, caches)).unbind()  # each (1, V)
        cap = self.config.logit_softcap
        # each row by itself: torch computes the last numbers of a tensor in another way
        return list(scores) if cap is None else [softcap(each, cap) for each in scores]

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        return logits if self.config.logit_softcap is None else softcap(logits, self.config.logit_softcap)


def pack(model: GPT, bits: int | None, compiled: bool) -> GPT | PackedGPT:
    """The model in its fastest form for decoding; the model itself if no packed form exists.

    bits: as in `PackedGPT`; 4 needs our kernels. compiled: whether torch.compile generates the kernels. In this case 8 bits
    are the only packed form. Raises UserError for 8 or 4 bits if the model has a class of the user's own.
    """
    weight = model.embedding.weight
    if not is_built_in(model):
        if bits:
            raise UserError(
                f"precision=int{bits} serves only the built-in MLPs and compatibility functions, and this model has one of your "
                "own; use precision=bf16"
            )
        return model
    native = not compiled and has_native(weight)
    assert bits != 4 or native, (compiled, weight.device)
    if bits or native or (not compiled and has_onednn(weight)):
        return PackedGPT(model, bits, native)
    if one_product_is_faster(weight):
        for block in model.blocks:
            if all(map(is_plain, (block.attention.query, block.attention.key, block.attention.value))):
                block.attention.put_side_by_side()
    return model


def is_built_in(model: GPT) -> bool:
    """Whether the model has no class of the user's own. Packing does not know how such a class uses its layers."""
    block = model.blocks[0]
    is_mlp = isinstance(block.mlp, SwiGLU) or (type(block.mlp) is MLP and model.config.mlp in ACTIVATIONS)
    return is_mlp and type(block.attention.compatibility) in BUILT_IN.values()


def bytes_of_matrices(model: GPT, bits: int | None) -> int:
    """The number of bytes of all packed matrices, including the head's."""
    return sum(LargePages.aligned_bytes(n_byte) for matrix in matrices(model, bits) for n_byte in bytes_of(*matrix))


def matrices(model: GPT, bits: int | None) -> list[tuple[Tensor, int | None]]:
    """Each matrix, the head's last, and the bits of each of its weights."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not model.head]
    return [(linear.weight, bits) for linear in linears] + [(model.head_weight, head_bits(bits))]


def head_bits(bits: int | None) -> int | None:
    """8 in place of 4: a third of what 4 bits cost a trained andrea-nano was the head's (bench/README.md)."""
    return 8 if bits == 4 else bits
