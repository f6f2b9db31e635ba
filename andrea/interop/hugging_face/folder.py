"""The exported folder for transformers: weights, configuration, tokenizer, and the code of the model where it needs any."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from andrea.checkpoint.tensors import write_tensors
from andrea.interop.hugging_face.classes import HuggingFaceClass
from andrea.interop.hugging_face.tokenizer_files import write_tokenizer
from andrea.interop.settings import Trained

MODEL_CODE, WEIGHTS, INDEX = "modeling_andrea.py", "model.safetensors", "model.safetensors.index.json"
LARGEST_SHARD_BYTES = 5 * 10**9
SAMPLING = {"do_sample": True, "temperature": 1.0}  # the likeliest tokens of a small model repeat themselves
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def write_folder(folder: Path, trained: Trained, chosen: HuggingFaceClass, dtype: str) -> None:
    """Write all files but the proof and the card to an existing folder. dtype: one of DTYPES. Raises OSError, UserError."""
    end = trained.tokenizer.end_of_text
    special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    write_json(folder / "config.json", config_json(trained, chosen, dtype) | special)
    write_json(folder / "generation_config.json", special | SAMPLING)
    write_tokenizer(folder, trained.tokenizer, trained.model.sequence_length)
    if chosen.is_remote:
        (folder / MODEL_CODE).write_bytes(Path(__file__).with_name(MODEL_CODE).read_bytes())
    write_weights(folder, chosen.weights(trained), DTYPES[dtype])


def config_json(trained: Trained, chosen: HuggingFaceClass, dtype: str) -> dict[str, Any]:
    return {
        "architectures": [chosen.name],
        "model_type": chosen.model_type,
        "dtype": str(DTYPES[dtype]).removeprefix("torch."),
        "tie_word_embeddings": trained.gpt.head is None,
        **chosen.own_config(trained),
    }


def write_weights(folder: Path, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Write the weights to one safetensors file, or to several with an index if they are large. Raises OSError."""
    shards = list(shards_of(weights, dtype.itemsize))
    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
        file_of = {weight: name for name, shard in zip(names, shards, strict=True) for weight in shard}
        size = dtype.itemsize * sum(weight.numel() for weight in weights.values())
        index = {"metadata": {"total_size": size}, "weight_map": file_of}
        write_json(folder / INDEX, index)
    for name, shard in zip(names, shards, strict=True):
        write_tensors(folder / name, {weight: weights[weight].to(dtype) for weight in shard}, {"format": "pt"})
        os.chmod(folder / name, (folder / "config.json").stat().st_mode)  # it may be readable by its owner alone


def shards_of(weights: dict[str, Tensor], itemsize: int) -> Iterator[list[str]]:
    """The names of the weights in each file, of at most LARGEST_SHARD_BYTES unless one weight is larger."""
    shard: list[str] = []
    filled = 0
    for name, weight in weights.items():
        size = weight.numel() * itemsize
        if shard and filled + size > LARGEST_SHARD_BYTES:
            yield shard
            shard, filled = [], 0
        shard.append(name)
        filled += size
    yield shard


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
