"""A model of one small block over bytes, and its checkpoint: for tests of loading and of sampling."""

from __future__ import annotations

from pathlib import Path

import torch

from andrea.checkpoint import write_checkpoint
from andrea.config import AttentionConfig, ModelConfig, to_plain
from andrea.model import GPT, initialise
from andrea.text.tokenizer import ByteTokenizer

CONFIG = ModelConfig(
    name="tiny", d_model=10, n_layer=1, n_head=1, d_mlp=13, sequence_length=23, position="rotary", rotary_base=10000.0,
    norm="rmsnorm", norm_epsilon=1e-6, mlp="relu2", bias=False, tied_head=False, qk_norm=True, logit_softcap=15.0,
    recipe_steps=1, recipe_tokens_per_step=23,
)  # fmt: skip


def make_model() -> GPT:
    model = GPT(CONFIG, AttentionConfig("scaled_dot", "auto"), ByteTokenizer().n_vocab)
    initialise(model, torch.Generator().manual_seed(7))
    return model


def write_model(
    runs: Path, tensors: dict[str, torch.Tensor], config: dict | None = None, optimizer: dict | None = None, **state
) -> Path:
    """A checkpoint of the run `one`: with other groups of the configuration or fields of the state where given."""
    groups = {"model": to_plain(CONFIG), "attention": to_plain(AttentionConfig("scaled_dot", "auto"))} | (config or {})
    state = {"step": 60, "tokens": 1380, "config": groups, "val_bpb": 1.25} | state
    return write_checkpoint(runs / "one" / "checkpoints", state, tensors, optimizer or {}, ByteTokenizer())
