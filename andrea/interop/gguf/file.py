"""The GGUF file: what llama.cpp must know of the model, its tokenizer, and its weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from andrea.config import UserError
from andrea.interop.gguf.architectures import Architecture, weights_for
from andrea.interop.gguf.tokenizer import GgufTokenizer
from andrea.interop.hugging_face.classes import NO_ROTATION
from andrea.interop.settings import Trained
from andrea.model.gpt import GPT

BLOCK = 32  # numbers that share a factor in q8_0


def check_file(trained: Trained, dtype: str) -> None:
    """Raise UserError for a type that a GGUF file cannot hold."""
    model = trained.model
    odd = [f"model.{key}={n}" for key in ("d_model", "d_mlp") if (n := getattr(model, key)) % BLOCK]
    if model.d_head is not None and model.d_attended % BLOCK:
        odd.append(f"model.n_head={model.n_head} times model.d_head={model.d_head}")
    if dtype == "q8_0" and odd:
        raise UserError(f"dtype=q8_0 needs multiples of {BLOCK}, got {', '.join(odd)}; export with dtype=f16")


def write_file(path: Path, trained: Trained, architecture: Architecture, tokenizer: GgufTokenizer, dtype: str) -> None:
    """Write the file. dtype: f32, f16, bf16 or q8_0, of the matrices; vectors and learned positions stay fp32."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture.name)
    add_model(writer, trained, architecture.joins_qkv)
    add_tokenizer(writer, tokenizer, trained.tokenizer.end_of_text)
    writer.add_file_type(file_type(gguf, dtype))
    for name, weight in weights_for(trained, architecture).items():
        kind = kind_of(gguf, name, weight.ndim, dtype)
        data = gguf.quants.quantize(weight.float().contiguous().numpy(), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def file_type(gguf: Any, dtype: str) -> Any:
    kinds = gguf.LlamaFileType
    return {"f32": kinds.ALL_F32, "f16": kinds.MOSTLY_F16, "bf16": kinds.MOSTLY_BF16, "q8_0": kinds.MOSTLY_Q8_0}[dtype]


def kind_of(gguf: Any, name: str, n_dimension: int, dtype: str) -> Any:
    """The type in which a weight is stored."""
    is_rounded = n_dimension == 2 and not name.startswith("position")
    return getattr(gguf.GGMLQuantizationType, dtype.upper() if is_rounded else "F32")


def add_model(writer: Any, trained: Trained, joins_qkv: bool) -> None:
    import gguf

    model = trained.model
    writer.add_name(trained.name)
    writer.add_context_length(model.sequence_length)
    writer.add_embedding_length(model.d_model)
    writer.add_block_count(model.n_layer)
    writer.add_feed_forward_length(model.d_mlp)
    writer.add_head_count(model.n_head)
    writer.add_head_count_kv(model.n_head if joins_qkv else trained.n_kv_head)
    writer.add_vocab_size(trained.tokenizer.n_vocab)
    if model.norm == "rmsnorm":
        writer.add_layer_norm_rms_eps(model.norm_epsilon)
    else:
        writer.add_layer_norm_eps(model.norm_epsilon)
    if writer.arch == "gpt2":
        return
    writer.add_key_length(model.head_width)
    writer.add_value_length(model.head_width)
    writer.add_rope_dimension_count(model.n_rotated)
    writer.add_rope_freq_base(model.rotary_base)
    factor = NO_ROTATION if model.position == "none" else None
    if model.position == "rotary" and model.rotary_scaling is not None and len(model.rotary_scaling) == 1:
        (factor,) = model.rotary_scaling
    if factor is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(factor)


def add_tokenizer(writer: Any, written: GgufTokenizer, end_of_text: int) -> None:
    """GPT-2's kind of tokenizer, with the pattern of its pre-tokenizer, and end-of-text in front of a text."""
    import gguf

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(written.pre)
    writer.add_token_list(written.tokens)
    writer.add_token_types([gguf.TokenType[kind] for kind in written.kinds])
    writer.add_token_merges(written.merges)
    for add_id in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add_id(end_of_text)
    writer.add_add_bos_token(True)


@torch.no_grad()
def rounded_gpt(gpt: GPT, dtype: str) -> GPT:
    """The model in fp32 with the weights as a file of this type holds them."""
    if dtype == "f32":
        return gpt
    import gguf

    found = copy.deepcopy(gpt)
    for name, weight in found.named_parameters():
        kind = kind_of(gguf, name, weight.ndim, dtype)
        stored = gguf.quants.quantize(weight.numpy(), kind)
        weight.copy_(torch.from_numpy(gguf.quants.dequantize(stored, kind).reshape(weight.shape)))
    return found
