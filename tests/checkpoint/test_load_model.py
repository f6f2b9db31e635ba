"""A model is loaded from a checkpoint, or refused by name where configuration, weights and tokenizer disagree."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from andrea.checkpoint import read_checkpoint, write_checkpoint
from andrea.checkpoint.model import load_model
from andrea.config import AttentionConfig, ModelConfig, UserError, to_plain
from andrea.model import GPT, initialise
from andrea.text.tokenizer import ByteTokenizer

CONFIG = ModelConfig(
    name="tiny", d_model=10, n_layer=1, n_head=1, d_mlp=13, sequence_length=23, position="rotary", rotary_base=10000.0,
    norm="rmsnorm", norm_epsilon=1e-6, mlp="relu2", bias=False, tied_head=False, qk_norm=True, logit_softcap=15.0,
    zero_init_projections=False, recipe_steps=1, recipe_tokens_per_step=23,
)  # fmt: skip
ATTENTION = AttentionConfig("scaled_dot", "auto")


def make_model() -> GPT:
    model = GPT(CONFIG, ATTENTION, 257)
    initialise(model, torch.Generator().manual_seed(7))
    return model


def write(runs: Path, **changes) -> Path:
    """A checkpoint of that model, with other tensors, configuration groups or fields of its state where given."""
    tensors = changes.pop("tensors", None) or make_model().state_dict()
    config = {"model": to_plain(CONFIG), "attention": to_plain(ATTENTION)} | changes.pop("config", {})
    state = {"step": 60, "tokens": 1380, "config": config, "val_bpb": 1.25} | changes
    return write_checkpoint(runs / "one" / "checkpoints", state, tensors, {}, ByteTokenizer())


def test_a_loaded_model_computes_what_the_saved_one_computes(tmp_path):
    checkpoint = read_checkpoint(write(tmp_path))
    saved, loaded = make_model(), load_model(checkpoint, checkpoint.tokenizer())
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        assert torch.equal(saved.logits(saved(tokens)), loaded.logits(loaded(tokens)))
    assert not loaded.training and not any(parameter.requires_grad for parameter in loaded.parameters())


def refuse(folder: Path, match: str) -> None:
    checkpoint = read_checkpoint(folder)
    with pytest.raises(UserError, match=match) as refused:
        load_model(checkpoint, checkpoint.tokenizer())
    assert str(folder) in str(refused.value) and "\n" not in str(refused.value)


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path):
    refuse(write(tmp_path, tensors={"embedding.weight": torch.zeros(257, 9)}), "does not fit its configuration")


def test_configuration_of_another_version_is_refused(tmp_path):
    refuse(
        write(tmp_path, config={"model": {**to_plain(CONFIG), "d_modell": 3}}),
        "that this version of the program cannot read",
    )
    refuse(write(tmp_path, config={"attention": None}), "that this version of the program cannot read")


def test_tokenizer_of_another_checkpoint_is_refused(tmp_path):
    folder = write(tmp_path)
    checkpoint = read_checkpoint(folder)
    other = dataclasses.replace(
        checkpoint, state=json.loads(json.dumps({**checkpoint.state, "tokenizer": "bpe-999-0"}))
    )
    with pytest.raises(UserError, match="was trained with tokenizer bpe-999-0, but its folder holds byte-257"):
        load_model(other, other.tokenizer())


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(wrong: float, tmp_path):
    model = GPT(CONFIG, ATTENTION, 257)
    initialise(model, torch.Generator().manual_seed(7))
    tensors = model.state_dict()
    tensors["blocks.0.mlp.up.weight"][0, 0] = wrong
    path = write(tmp_path, tensors=tensors)
    with pytest.raises(UserError, match="blocks.0.mlp.up.weight holds numbers that are not finite"):
        load_model(read_checkpoint(path), ByteTokenizer())


def test_a_model_of_far_more_layers_than_its_file_is_refused_before_it_is_made(tmp_path):
    path = write(tmp_path, config={"model": to_plain(CONFIG) | {"n_layer": 4096}})
    with pytest.raises(UserError, match="too few for model.n_layer=4096"):
        load_model(read_checkpoint(path), ByteTokenizer())
