"""The model of an ANDREA checkpoint for Hugging Face transformers: configuration, layers, cache and language model.

This file travels with the exported weights and needs torch and transformers only, not ANDREA. Load the folder with
`AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`. MIT licence.

Shapes: B sequences, T new tokens, S tokens with those of the cache, H query heads, G key/value heads (G divides H),
D = head_dim, C = hidden_size, K tokens that the convolution mixes.
Pre-norm blocks (Radford et al. 2019, GPT-2, section 2.3): x + attention(norm(x)), then x + mlp(norm(x)).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad, relu, rms_norm, silu
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, sliding_window_overlay
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple

OWN_VALUE_EPSILON = 1e-6  # added to v·v, so that a value of zeros excludes nothing
LayerOutput = tuple[Tensor, Tensor | None, Tensor]  # x (B, T, C), attention weights or None, first values (B, G, T, D)
# transformers renamed the cache in version 5.24, in the arguments of models and in their outputs. Both names are taken here.
CACHE = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"
CROPPED_TOKENS = 128  # at most: speculative decoding removes rejected tokens from the cache


class AndreaConfig(PreTrainedConfig):
    """The options of the model. In brackets: the key of ANDREA's configuration, where it has another name.

    position: rotary, learned, alibi or none. windows: for each layer the number of tokens that a token sees, or None for
    all (attention.window). qk_norm: False, True, or learned: with a weight per channel. qkv_convolution: K, or None.
    bigram_rows: rows of the table of token pairs, or None.
    value_embedding: projection, table or None. compatibility: scaled_dot, dot, bilinear or cosine. gate: scalar, elementwise
    or None. exclusive: fixed, learned or None. final_logit_softcapping (logit_softcap), attn_logit_softcapping
    (attention.score_softcap): the cap, or None.
    """

    model_type = "andrea"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    defaults = {
        "vocab_size": 4097,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": None,  # None: num_attention_heads
        "head_dim": None,  # None: hidden_size / num_attention_heads
        "max_position_embeddings": 512,
        "position": "rotary",
        "rotary_base": 10000.0,
        "rotary_share": 1.0,
        "rotary_scaling": None,
        "norm": "rmsnorm",
        "norm_epsilon": 1e-6,
        "mlp": "swiglu",
        "bias": False,
        "qk_norm": False,
        "value_residual": False,
        "value_embedding": None,
        "qkv_convolution": None,
        "bigram_rows": None,
        "parallel_residual": False,
        "compatibility": "scaled_dot",
        "windows": None,  # None: no layer has one
        "gate": None,
        "exclusive": None,
        "sink": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "initializer_range": 0.02,
        "use_cache": True,
    }

    def __init__(self, tie_word_embeddings: bool = True, **values: Any) -> None:
        for name, default in self.defaults.items():
            setattr(self, name, values.pop(name, default))
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.windows = self.windows or [None] * self.num_hidden_layers
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        super().__init__(tie_word_embeddings=tie_word_embeddings, **values)

    @property
    def needs_eager(self) -> bool:
        """Whether scores are changed, or have a sink, so that only the attention in this file computes them."""
        return self.position == "alibi" or self.sink or self.attn_logit_softcapping is not None


# ------------------------------------------------------------------------------------------------------ small parts


class AndreaRMSNorm(nn.RMSNorm):
    """RMS norm, computed in the type of its input (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def make_norm(config: AndreaConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return AndreaRMSNorm(config.hidden_size, config.norm_epsilon)
    return nn.LayerNorm(config.hidden_size, config.norm_epsilon, bias=config.bias)


class AndreaMLP(nn.Module):
    """down(silu(gate(x)) · up(x)) (SwiGLU), or down(activation(up(x))) with squared ReLU, or GELU by tanh or exactly."""

    def __init__(self, config: AndreaConfig) -> None:
        super().__init__()
        self.kind = config.mlp
        width, inner, bias = config.hidden_size, config.intermediate_size, config.bias
        if self.kind == "swiglu":
            self.gate_proj = nn.Linear(width, inner, bias)
        self.up_proj = nn.Linear(width, inner, bias)
        self.down_proj = nn.Linear(inner, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "swiglu":
            return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        up = self.up_proj(x)
        if self.kind == "relu2":
            return self.down_proj(relu(up).square())
        return self.down_proj(gelu(up, approximate="tanh" if self.kind == "gelu" else "none"))


class AndreaValueEmbedding(nn.Module):
    """mix · E(source) (B, T, G D), added to a layer's values: E is a matrix on the first layer's normed input (B, T, C), or
    a table on the token ids (B, T)."""

    def __init__(self, config: AndreaConfig) -> None:
        super().__init__()
        width = config.num_key_value_heads * config.head_dim
        is_table = config.value_embedding == "table"
        self.table = nn.Embedding(config.vocab_size, width) if is_table else None
        self.projection = None if is_table else nn.Linear(config.hidden_size, width, bias=False)
        self.mix = nn.Parameter(torch.ones(1))

    def forward(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        embedded = self.projection(source) if self.table is None else self.table(source)
        return self.mix.to(dtype) * embedded.to(dtype)


class AndreaBigramEmbedding(nn.Module):
    """± E[hash(token before, token)], (B, T, C), added to the embedding of the token; zero for a text's first token."""

    def __init__(self, config: AndreaConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.bigram_rows, config.hidden_size)

    def forward(self, before: Tensor, input_ids: Tensor, is_first: Tensor) -> Tensor:
        mixed = (before * 0x4F1BBCDD + input_ids * 0x2545F491) & 0x7FFFFFFF
        for factor in (0x2C1B3C6D, 0x297A2D39):
            mixed = ((mixed ^ (mixed >> 15)) * factor) & 0x7FFFFFFF
        mixed = mixed ^ (mixed >> 15)
        rows, signs = (mixed >> 1) % self.table.num_embeddings, ((mixed & 1) * 2 - 1).masked_fill(is_first, 0)
        return signs[..., None].to(self.table.weight.dtype) * self.table(rows)


class AndreaCompatibility(nn.Module):
    """Rewrites queries and keys so that their plain dot product is the score f(q, k) of `config.compatibility`.

    scaled_dot: q·k / √D. dot: q·k. bilinear: qᵀ M k with M (D, D) per head. cosine: s q·k / (|q||k|) with s per head.
    """

    def __init__(self, config: AndreaConfig) -> None:
        super().__init__()
        self.kind, n_head, width = config.compatibility, config.num_attention_heads, config.head_dim
        self.matrix = nn.Parameter(torch.empty(n_head, width, width)) if self.kind == "bilinear" else None
        self.log_sharpness = nn.Parameter(torch.empty(n_head)) if self.kind == "cosine" else None

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind == "dot":
            return query, key
        if self.kind == "scaled_dot":
            return query * (1 / math.sqrt(query.shape[-1])), key
        precise, dtype = torch.promote_types(query.dtype, torch.float32), query.dtype
        query, key = query.to(precise), key.to(precise)
        if self.kind == "bilinear":
            query = query @ self.matrix.to(precise)
        else:
            query = self.log_sharpness.to(precise).exp()[..., None, None] * unit(query)
            key = unit(key)
        return query.to(dtype), key.to(dtype)


def unit(vectors: Tensor) -> Tensor:
    """Vectors (..., D) scaled to length 1; a zero vector stays zero."""
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / torch.where(length > 0, length, torch.inf)


def rotary_tables(config: AndreaConfig, position_ids: Tensor) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines (B, 1, T, D) for position_ids (B, T), fp32; None unless positions are rotary.

    Pair p is entries p and p + D/2. The first `rotary_share` of the pairs turn by position · base^(-2p / R), where R is the
    number of entries that turn (Su et al. 2021, arXiv 2104.09864, eq. 34). The angles are computed in fp64, as in ANDREA.
    """
    if config.position != "rotary":
        return None
    n_rotated = 2 * round(config.rotary_share * config.head_dim / 2)  # R
    dtype = torch.float32 if position_ids.device.type == "mps" else torch.float64  # mps has no fp64
    pair = torch.arange(0, n_rotated, 2, dtype=dtype, device=position_ids.device) / max(1, n_rotated)
    frequency = config.rotary_base**-pair
    if config.rotary_scaling is not None and len(config.rotary_scaling) == 1:  # position interpolation
        frequency = frequency / config.rotary_scaling[0]
    elif config.rotary_scaling is not None:  # Llama 3.1's
        factor, low, high, length = config.rotary_scaling
        unchanged = ((length * frequency / (2 * torch.pi) - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (unchanged + (1 - unchanged) / factor)
    angle = position_ids[..., None].to(dtype) * frequency
    angle = pad(angle, (0, (config.head_dim - n_rotated) // 2))[:, None]  # (B, 1, T, D/2)
    cosine, sine = angle.cos(), angle.sin()
    return torch.cat((cosine, cosine), dim=-1).float(), torch.cat((-sine, sine), dim=-1).float()


def turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate x (B, H, T, D) by the tables of `rotary_tables`."""
    return (x * cosine + x.roll(x.shape[-1] // 2, dims=-1) * sine).to(x.dtype)


def alibi_slopes(n_head: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The slope of each head (Press et al. 2022, arXiv 2108.12409, section 3), (H,)."""
    power = 1 << (n_head.bit_length() - 1)
    head = torch.arange(1, n_head + 1, device=device, dtype=dtype)
    return torch.exp2(-8 * torch.where(head <= power, head / power, (2 * (head - power) - 1) / (2 * power)))


def without_own_value(retrieved: Tensor, own_value: Tensor, share: Tensor | None) -> Tensor:
    """retrieved (B, H, T, D) without `share` (H,) of its component along own_value (B, H, T, D); all of it if None."""
    dtype = torch.promote_types(retrieved.dtype, torch.float32)
    z, v = retrieved.to(dtype), own_value.to(dtype)
    along = (z * v).sum(-1, keepdim=True) / (v.square().sum(-1, keepdim=True) + OWN_VALUE_EPSILON)
    if share is not None:
        along = along * share.to(dtype)[:, None, None]
    return (z - along * v).to(retrieved.dtype)


# ------------------------------------------------------------------------------------------------------------ cache


class AndreaCacheLayer(DynamicLayer):
    """Keys and values of all tokens, and of the last ones queries, keys and values before the convolution.

    The first layer also keeps the last tokens of a model with bigrams, as rows of width 1.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: dict[str, Tensor] = {}  # "projected" (B, H + 2G, R, D), "tokens" (B, 1, R, 1): of the last R tokens

    def with_earlier(self, name: str, rows: Tensor, n_earlier: int) -> Tensor:
        """Keep rows (B, H, T, D) of the new tokens; return them after the n_earlier before them, zeros before a text."""
        known = torch.cat((self.kept.get(name, rows[:, :, :0]), rows), dim=2)
        self.kept[name] = known[:, :, -(n_earlier + CROPPED_TOKENS) :]
        n_wanted, n_known = n_earlier + rows.shape[2], known.shape[2]
        if n_known < n_wanted:
            return pad(known, (0, 0, n_wanted - n_known, 0))
        return known[:, :, n_known - n_wanted :]

    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.kept = {name: change(rows) for name, rows in self.kept.items()}

    def crop(self, length: int) -> None:
        """Remove the last -length tokens; a positive number is the length that remains, as in earlier versions."""
        before = self.get_seq_length()
        super().crop(length)
        n_removed = before - self.get_seq_length()
        if n_removed and self.kept:
            if n_removed > CROPPED_TOKENS:
                raise ValueError(f"at most {CROPPED_TOKENS} tokens can be removed from the cache, not {n_removed}")
            self.change(lambda rows: rows[:, :, :-n_removed])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.change(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.change(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.change(lambda rows: rows[indices])

    def reset(self) -> None:
        super().reset()
        self.kept = {}


def with_rows(cache: Cache | None, config: AndreaConfig) -> Cache | None:
    """An empty cache whose layers also keep what a convolution or bigrams need, if the model has them; a filled one as it is."""
    if (
        (config.qkv_convolution is None and config.bigram_rows is None)
        or cache is None
        or any(isinstance(layer, AndreaCacheLayer) for layer in cache.layers)
    ):
        return cache
    if not isinstance(cache, DynamicCache) or cache.get_seq_length():
        raise ValueError(
            f"this model keeps more than keys and values, so it needs an empty DynamicCache, got {type(cache).__name__}; "
            f"leave it out"
        )
    cache.layers = [AndreaCacheLayer() for _ in range(config.num_hidden_layers)]
    return cache


# -------------------------------------------------------------------------------------------------------- attention


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    first_slot: int | Tensor = 0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The formula, written out: query (B, H, T, D), key and value (B, G, S, D) -> (B, T, H, D), and weights (B, H, T, S).

    attention_mask: (B, 1, T, S), 0 where a key is visible and a very negative number elsewhere. first_slot: the place of the
    first query among the keys.
    """
    config, repeats = module.config, module.num_key_value_groups
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = query @ key.mT
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if config.attn_logit_softcapping is not None:
        scores = config.attn_logit_softcapping * torch.tanh(scores / config.attn_logit_softcapping)
    if config.position == "alibi":
        of_query, of_key = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
        distance = (first_slot + of_query[:, None] - of_key).abs().to(scores.dtype)
        scores = scores - alibi_slopes(scores.shape[1], scores.device, scores.dtype)[:, None, None] * distance
    if attention_mask is not None:
        scores = scores + attention_mask
    if module.sink is not None:
        column = module.sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    weights = weights.to(value.dtype)
    return (weights @ value).transpose(1, 2), weights


class AndreaAttention(nn.Module):
    """Causal self-attention with every option of ANDREA's, in this order: project, mix values, convolve, normalise, score,
    rotate, attend, exclude, gate, and merge."""

    def __init__(self, config: AndreaConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim, n_head, n_kv_head = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        self.num_key_value_groups = n_head // n_kv_head
        self.window = config.windows[layer_idx]
        self.is_causal = True
        width, of_q, of_kv = config.hidden_size, n_head * config.head_dim, n_kv_head * config.head_dim
        self.q_proj = nn.Linear(width, of_q, config.bias)
        self.k_proj = nn.Linear(width, of_kv, config.bias)
        self.v_proj = nn.Linear(width, of_kv, config.bias)
        self.o_proj = nn.Linear(of_q, width, config.bias)
        self.compatibility = AndreaCompatibility(config)
        self.value_mix = nn.Parameter(torch.zeros(1)) if config.value_residual else None
        self.value_embedding = AndreaValueEmbedding(config) if config.value_embedding else None
        taps = torch.zeros(n_head + 2 * n_kv_head, config.head_dim, config.qkv_convolution or 0)
        self.taps = nn.Parameter(taps) if config.qkv_convolution else None
        n_gate = {None: 0, "scalar": n_head, "elementwise": of_q}[config.gate]
        self.gate = nn.Linear(width, n_gate, bias=False) if config.gate else None
        self.exclusive_share = nn.Parameter(torch.full((n_head,), 0.5)) if config.exclusive == "learned" else None
        self.sink = nn.Parameter(torch.zeros(n_head)) if config.sink else None
        self.q_norm, self.k_norm = (
            AndreaRMSNorm(self.head_dim, config.norm_epsilon) if config.qk_norm == "learned" else None for _ in "qk"
        )

    def forward(
        self,
        x: Tensor,
        first_value: Tensor | None,
        value_source: Tensor | None,
        tables: tuple[Tensor, Tensor] | None,
        position_ids: Tensor,
        attention_mask: Any = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> LayerOutput:
        """x (B, T, C) -> output (B, T, C), attention weights or None, and the first layer's values (B, G, T, D).

        first_value: the values that layer 0 has returned; None in layer 0. value_source: as in AndreaValueEmbedding.
        tables: from `rotary_tables`.
        """
        query, key, value = (self.heads(each(x)) for each in (self.q_proj, self.k_proj, self.v_proj))
        first_value = value if first_value is None else first_value
        if self.value_mix is not None:
            value = torch.lerp(value, first_value, torch.sigmoid(self.value_mix).to(value.dtype))
        if self.value_embedding is not None:
            value = value + self.heads(self.value_embedding(value_source, value.dtype))
        if self.taps is not None:
            query, key, value = self.convolved(query, key, value, position_ids, cache)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        elif self.config.qk_norm:
            query, key = (rms_norm(each, (self.head_dim,), eps=self.config.norm_epsilon) for each in (query, key))
        query, key = self.compatibility(query, key)
        if tables is not None:
            query, key = turn(query, *tables), turn(key, *tables)
        own_value = value
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        kwargs |= {"scaling": 1.0, "dropout": 0.0, "sliding_window": self.window}
        retrieved, weights = attend(self, query, key, value, attention_mask, **kwargs)  # (B, T, H, D)
        retrieved = self.finished(retrieved.reshape(*x.shape[:2], -1, self.head_dim).transpose(1, 2), own_value, x)
        return self.o_proj(retrieved.transpose(1, 2).flatten(2)), weights, first_value

    def heads(self, x: Tensor) -> Tensor:
        """(B, T, H D) -> (B, H, T, D)."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def convolved(
        self, query: Tensor, key: Tensor, value: Tensor, position_ids: Tensor, cache: Cache | None
    ) -> tuple[Tensor, ...]:
        """y_t = x_t + Σ_i taps_i · x_{t-i} for i = 0 … K - 1, for queries, keys and values of every head.

        position_ids (B, T): a token at position p mixes none from further back than p, so neither padding in front of a
        text nor a text that is packed in front of it.
        """
        n_heads, n_mixed, n_token = [each.shape[1] for each in (query, key, value)], self.taps.shape[-1], query.shape[2]
        x = torch.cat((query, key, value), dim=1)  # (B, H + 2G, T, D)
        if cache is None:
            padded = pad(x, (0, 0, n_mixed - 1, 0))
        else:
            padded = cache.layers[self.layer_idx].with_earlier("projected", x, n_mixed - 1)
        taps = self.taps.to(x.dtype)[:, None].unbind(-1)  # K of (H + 2G, 1, D)
        y = x + x * taps[0]
        for distance in range(1, n_mixed):
            first = n_mixed - 1 - distance
            earlier = padded[:, :, first : first + n_token]
            earlier = earlier.masked_fill((position_ids < distance)[:, None, :, None], 0.0)
            y = y + earlier * taps[distance]
        return y.split(n_heads, dim=1)

    def finished(self, retrieved: Tensor, own_value: Tensor, x: Tensor) -> Tensor:
        """Exclusion and gates on retrieved (B, H, T, D), for own_value (B, G, T, D) and x (B, T, C)."""
        if self.config.exclusive is not None:
            own_value = own_value.repeat_interleave(self.num_key_value_groups, dim=1)
            retrieved = without_own_value(retrieved, own_value, self.exclusive_share)
        if self.gate is None:
            return retrieved
        gate = 2 * torch.sigmoid(self.gate(x))
        return retrieved * gate.unflatten(-1, (retrieved.shape[1], -1)).transpose(1, 2)


# ------------------------------------------------------------------------------------------------------------ model


class AndreaDecoderLayer(GradientCheckpointingLayer):
    """A block: attention and an MLP, one after the other, or side by side (parallel_residual)."""

    def __init__(self, config: AndreaConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config)
        self.self_attn = AndreaAttention(config, layer_idx)
        self.post_attention_layernorm = make_norm(config)
        self.mlp = AndreaMLP(config)
        self.parallel_residual = config.parallel_residual

    def forward(self, x: Tensor, first_value: Tensor | None, value_source: Tensor | None, **kwargs: Any) -> LayerOutput:
        """x (B, T, C) -> x (B, T, C), attention weights or None, and the first layer's values (B, G, T, D)."""
        attended, weights, first_value = self.self_attn(self.input_layernorm(x), first_value, value_source, **kwargs)
        before, x = x, x + attended
        output = self.mlp(self.post_attention_layernorm(before if self.parallel_residual else x))
        return x + output, weights, first_value


class AndreaPreTrainedModel(PreTrainedModel):
    config_class = AndreaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["AndreaDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values", "cache"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def get_correct_attn_implementation(self, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if not self.config.needs_eager:
            return super().get_correct_attn_implementation(requested_attention, *args, **kwargs)
        if requested_attention not in (None, "eager"):
            raise ValueError(
                f"attn_implementation={requested_attention} computes neither capped scores nor ALiBi nor sinks, which this "
                f"model has; leave it out, or use attn_implementation=eager"
            )
        return "eager"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initial values of a new model from a configuration; a loaded model has those of its file."""
        super()._init_weights(module)
        if isinstance(module, AndreaCompatibility):
            if module.matrix is not None:
                width = module.matrix.shape[-1]
                module.matrix.copy_(torch.eye(width).expand_as(module.matrix) / math.sqrt(width))
            if module.log_sharpness is not None:
                module.log_sharpness.fill_(math.log(10.0))
        elif isinstance(module, AndreaValueEmbedding):
            module.mix.fill_(1.0)
        elif isinstance(module, AndreaAttention):
            for parameter in (module.value_mix, module.taps, module.sink):
                if parameter is not None:
                    parameter.zero_()
            if module.exclusive_share is not None:
                module.exclusive_share.fill_(0.5)


class AndreaModel(AndreaPreTrainedModel):
    """Tokens to hidden vectors."""

    def __init__(self, config: AndreaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        is_learned = config.position == "learned"
        self.bigram_embedding = AndreaBigramEmbedding(config) if config.bigram_rows else None
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size) if is_learned else None
        self.layers = nn.ModuleList(AndreaDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = make_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        config = self.config
        if input_ids is None and (config.bigram_rows or config.value_embedding == "table"):
            raise ValueError("this model also looks token ids up in other tables: give input_ids, not inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = config.use_cache if use_cache is None else use_cache
        if self.gradient_checkpointing and self.training:
            use_cache, past_key_values, cache = False, None, None
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            cache = DynamicCache(config=config)
        cache = with_rows(cache, config)
        start = 0 if cache is None else cache.get_seq_length()
        start = start.clone() if isinstance(start, torch.Tensor) else start  # a cache of fixed size changes it in place
        position_ids = self.positions(x, attention_mask, position_ids, start)
        if self.bigram_embedding is not None:
            x = x + self.bigrams(input_ids, position_ids, cache)
        if self.embed_positions is not None:
            x = x + self.embed_positions(position_ids)
        shared = {"tables": rotary_tables(config, position_ids), "position_ids": position_ids, **kwargs}
        shared |= {"cache": cache, "first_slot": start}
        value_source, first_value = self.value_source(x, input_ids), None
        masks = self.masks(x, attention_mask, cache, position_ids)
        hidden_states, attentions = (x,), ()
        for layer in self.layers:
            mask = masks[layer.self_attn.window]
            x, weights, first_value = layer(x, first_value, value_source, attention_mask=mask, **shared)
            hidden_states, attentions = (*hidden_states, x), (*attentions, weights)
        x = self.norm(x)
        shown = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        weighed = config.output_attentions if output_attentions is None else output_attentions
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            **{CACHE: cache if use_cache else None},
            hidden_states=(*hidden_states[:-1], x) if shown else None,
            attentions=attentions if weighed else None,
        )

    def positions(
        self, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, start: int | Tensor
    ) -> Tensor:
        """The position of each new token in its text, (B, T): given, counted by a mask (B, S), or one after another."""
        if position_ids is not None:
            return position_ids.expand(len(x), -1)
        if attention_mask is not None and attention_mask.ndim == 2:
            counted = attention_mask.long().cumsum(-1)[:, -x.shape[1] :] - 1
            return counted.clamp(min=0)
        return (torch.arange(x.shape[1], device=x.device) + start).expand(len(x), -1)

    def masks(
        self, x: Tensor, attention_mask: Tensor | None, cache: Cache | None, position_ids: Tensor
    ) -> dict[int | None, Any]:
        """The mask of each window that a layer has, in the form that the attention implementation wants."""
        how = {"config": self.config, "inputs_embeds": x, "attention_mask": attention_mask}
        how |= {CACHE: cache, "position_ids": position_ids}
        return {
            window: create_causal_mask(
                **how, and_mask_function=None if window is None else sliding_window_overlay(window)
            )
            for window in dict.fromkeys(self.config.windows)
        }

    def bigrams(self, input_ids: Tensor, position_ids: Tensor, cache: Cache | None) -> Tensor:
        """The embeddings of the pairs of tokens that the new tokens (B, T) end, (B, T, C)."""
        rows = input_ids[:, None, :, None]
        known = pad(rows, (0, 0, 1, 0)) if cache is None else cache.layers[0].with_earlier("tokens", rows, 1)
        return self.bigram_embedding(known[:, 0, :-1, 0], input_ids, is_first=position_ids == 0)

    def value_source(self, x: Tensor, input_ids: Tensor | None) -> Tensor | None:
        """What the value embeddings of all layers read: x (B, T, C), normed, or the ids (B, T); None without them."""
        if self.config.value_embedding == "projection":
            return rms_norm(x, (x.shape[-1],), eps=self.config.norm_epsilon)
        return input_ids if self.config.value_embedding == "table" else None


class AndreaForCausalLM(AndreaPreTrainedModel, GenerationMixin):
    """Tokens to logits, with the loss of the next token if labels are given."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: AndreaConfig) -> None:
        super().__init__(config)
        self.model = AndreaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """logits_to_keep: compute logits of the last so many tokens only; 0 for all. labels (B, T): -100 is not scored."""
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=past_key_values if cache is None else cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else logits_to_keep
        kept = slice(None) if isinstance(kept, int) else kept
        logits, cap = self.lm_head(output.last_hidden_state[:, kept]), self.config.final_logit_softcapping
        if cap is not None:
            logits = cap * torch.tanh(logits.float() / cap)
        loss = None
        if labels is not None:
            how = {"vocab_size": self.vocab_size, "num_items_in_batch": num_items_in_batch}
            loss = self.loss_function(logits=logits, labels=labels, **how)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE: output[CACHE] if CACHE in output else None},
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None, **kwargs: Any) -> Tensor | None:
        """generate() would prepare masks for caches of fixed size. The model makes its own, one for each window."""
        return attention_mask
