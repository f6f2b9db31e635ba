"""A model is loaded from a checkpoint, or refused by name where configuration, weights and tokenizer disagree."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import CONFIG, make_model, write_model

from andrea.checkpoint import read_checkpoint
from andrea.checkpoint.model import load_model
from andrea.config import UserError, to_plain
from andrea.text.tokenizer import ByteTokenizer


def write(runs: Path, tensors: dict[str, torch.Tensor] | None = None, **changes) -> Path:
    return write_model(runs, tensors or make_model().state_dict(), **changes)


def test_a_loaded_model_computes_what_the_saved_one_computes(tmp_path):
    checkpoint = read_checkpoint(write(tmp_path))
    saved, loaded = make_model(), load_model(checkpoint, checkpoint.tokenizer())
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        assert torch.equal(saved.logits(saved(tokens)), loaded.logits(loaded(tokens)))
    assert not loaded.training and not any(parameter.requires_grad for parameter in loaded.parameters())


def test_weights_of_a_type_that_no_weight_has_are_refused(tmp_path):
    whole_numbers = {name: tensor.long() for name, tensor in make_model().state_dict().items()}
    refuse(write(tmp_path, tensors=whole_numbers), "has type I64, which weights cannot have")


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
        "that this version cannot read",
    )
    refuse(write(tmp_path, config={"attention": None}), "that this version cannot read")


def test_tokenizer_of_another_checkpoint_is_refused(tmp_path):
    folder = write(tmp_path)
    checkpoint = read_checkpoint(folder)
    other = dataclasses.replace(
        checkpoint, state=json.loads(json.dumps({**checkpoint.state, "tokenizer": "bpe-999-0"}))
    )
    with pytest.raises(UserError, match="was trained with tokenizer bpe-999-0, not with its byte-257"):
        load_model(other, other.tokenizer())


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(wrong: float, tmp_path):
    tensors = make_model().state_dict()
    tensors["blocks.0.mlp.up.weight"][0, 0] = wrong
    path = write(tmp_path, tensors=tensors)
    with pytest.raises(UserError, match="blocks.0.mlp.up.weight holds numbers that are not finite"):
        load_model(read_checkpoint(path), ByteTokenizer())


def test_a_model_of_far_more_layers_than_its_file_is_refused_before_it_is_made(tmp_path):
    path = write(tmp_path, config={"model": to_plain(CONFIG) | {"n_layer": 4096}})
    with pytest.raises(UserError, match="too few for model.n_layer=4096"):
        load_model(read_checkpoint(path), ByteTokenizer())
