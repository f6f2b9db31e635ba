"""Small models to export, with weights that all differ and logits far from zero, and checkpoints of them."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from head_options import draw_what_starts_alike

from andrea.checkpoint import Checkpoint, write_checkpoint
from andrea.checkpoint.folder import flushed_files, make_staging_folder, publish
from andrea.checkpoint.tensors import write_shard
from andrea.config import AttentionConfig, ModelConfig, to_plain
from andrea.interop.architectures import Trained, weights_of
from andrea.interop.hugging_face.target import code_cache
from andrea.model import GPT, initialise
from andrea.text.tokenizer import ByteTokenizer, Tokenizer

os.environ.setdefault("HF_MODULES_CACHE", code_cache().name)  # before transformers is imported: not the user's cache
T = 43  # sequence_length
MODEL = ModelConfig(
    name="small", d_model=60, n_layer=3, n_head=6, d_mlp=77, sequence_length=T, position="rotary", rotary_base=10000.0,
    norm="rmsnorm", norm_epsilon=1e-6, mlp="swiglu", bias=False, tied_head=True, qk_norm=False, logit_softcap=None,
    recipe_steps=1, recipe_tokens_per_step=T,
)  # fmt: skip
PLAIN_ATTENTION = AttentionConfig("scaled_dot", "reference")
LAYERNORM: dict[str, Any] = {"norm": "layernorm", "bias": True}
# Changes of MODEL and of PLAIN_ATTENTION that the default model has.
NANO = {"value_residual": True, "qkv_convolution": 3, "bigram_rows": 53, "logit_softcap": 15.0, "qk_norm": True}
BLOCKS_OF_32 = {"d_model": 64, "n_head": 4, "d_mlp": 96}  # widths that q8_0 takes


def make_trained(
    model: dict | None = None, attention: dict | None = None, tokenizer: Tokenizer | None = None
) -> Trained:
    """A model with random weights; `model` and `attention` change MODEL and PLAIN_ATTENTION."""
    tokenizer = tokenizer or ByteTokenizer()
    model_config = dataclasses.replace(MODEL, **(model or {}))
    attention_config = dataclasses.replace(PLAIN_ATTENTION, **(attention or {}))
    gpt = GPT(model_config, attention_config, tokenizer.n_vocab, tokenizer.end_of_text)
    generator = torch.Generator().manual_seed(5)
    initialise(gpt, generator)
    draw_what_starts_alike(gpt)
    with torch.no_grad():
        for parameter in gpt.parameters():
            if parameter.dim() <= 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        for table in {gpt.embedding.weight, gpt.head_weight}:
            table.mul_(15)
    gpt.eval().requires_grad_(False)
    return Trained("small", Checkpoint(Path("nowhere"), {"config": {}}), gpt, attention_config, tokenizer)


def write_trained(run: Path, trained: Trained, data: str | None = None, **attention: Any) -> Path:
    """The model as a checkpoint of a run.

    data: the fingerprint of the text that it says it was trained on. `attention` changes what its configuration says.
    """
    state = state_of(trained, attention) | ({"data": data} if data else {})
    return write_checkpoint(run / "checkpoints", state, weights_of(trained), {}, trained.tokenizer)


def write_sharded(run: Path, trained: Trained) -> Path:
    """The model as a checkpoint that two ranks wrote: half of the rows of each weight in each file."""
    staging = make_staging_folder(run / "checkpoints", 7)
    (staging / "shards").mkdir()
    paths = []
    for rank in (0, 1):
        rows, first_rows = {}, {}
        for name, weight in weights_of(trained).items():
            half = -(-len(weight) // 2)
            if len(part := weight[rank * half : (rank + 1) * half]):
                rows[name], first_rows[name] = part, rank * half
        paths += write_shard(staging / "shards", rank, rows, first_rows)
    return publish(
        run / "checkpoints", staging, state_of(trained, {}), trained.tokenizer, flushed_files(staging, paths)
    )


def state_of(trained: Trained, attention: dict[str, Any]) -> dict[str, Any]:
    groups = {"model": to_plain(trained.model), "attention": to_plain(trained.attention) | attention}
    return {"step": 7, "tokens": 7 * T, "config": groups | {"data": {"kind": "text"}}, "val_bpb": 1.25}


def tokens_of(n_batch: int = 2, n_token: int = 40, n_vocab: int = 257) -> torch.Tensor:
    return torch.randint(0, n_vocab, (n_batch, n_token), generator=torch.Generator().manual_seed(3))


def logits_of(trained: Trained, tokens: torch.Tensor) -> torch.Tensor:
    """tokens (B, T) -> logits (B, T, V) of our own model."""
    with torch.no_grad():
        return trained.gpt.logits(trained.gpt(tokens))
