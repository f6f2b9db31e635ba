"""Attention, usable alone: `from andrea.attention import attend, ScaledDotProduct, causal`."""

from andrea.attention.attend import IMPLEMENTATIONS, attend, attention_weights, choose, refusal
from andrea.attention.cache import KeyValueCache, LayerCache
from andrea.attention.compatibility import (
    BUILT_IN,
    COMPATIBILITIES,
    Additive,
    Bilinear,
    Case,
    Compatibility,
    Cosine,
    DotProduct,
    ScaledDotProduct,
    make_compatibility,
)
from andrea.attention.implementations.reference import Intermediates, attend_reference
from andrea.attention.mask import (
    Mask,
    causal,
    documents_of,
    key_padding,
    packed_documents,
    places_in_documents,
    sliding_window,
)
from andrea.attention.modifiers import ScoreModifiers, alibi_slopes
from andrea.attention.multihead import MultiHeadAttention, Place, Rotation, SharedInputs, ValueEmbedding
from andrea.attention.statistics import AttentionStatistics, HeadStatistics
