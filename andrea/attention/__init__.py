"""Attention, usable alone: `from andrea.attention import attend, ScaledDotProduct, causal`."""

from andrea.attention.attend import attend, attention_weights, choose
from andrea.attention.cache import KeyValueCache, LayerCache
from andrea.attention.compatibility import COMPATIBILITIES, Compatibility, DotProduct, ScaledDotProduct
from andrea.attention.mask import Mask, causal, key_padding
from andrea.attention.multihead import MultiHeadAttention, Place
from andrea.attention.reference import Intermediates, attend_reference

__all__ = [
    "COMPATIBILITIES",
    "Compatibility",
    "DotProduct",
    "Intermediates",
    "KeyValueCache",
    "LayerCache",
    "Mask",
    "MultiHeadAttention",
    "Place",
    "ScaledDotProduct",
    "attend",
    "attend_reference",
    "attention_weights",
    "causal",
    "choose",
    "key_padding",
]
