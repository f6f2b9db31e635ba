"""Dropout: shares, independence, expectation, and that only the seeds decide.

B sequences, T tokens, L layers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from andrea.config import AttentionConfig, ModelConfig, group_config
from andrea.model import GPT, initialise
from andrea.model.gpt import block_dropouts, mixed
from andrea.text.loader import Loader

NANO = group_config("model", "andrea-nano", d_model=34, n_layer=3, n_head=1, d_mlp=44, sequence_length=23)
DROPPING = replace(NANO, dropout=0.3)


def seeds_of(count: int, seed: int = 5, first: int = 0) -> Tensor:
    loader = object.__new__(Loader)
    loader.seed = seed
    return loader.sample_seeds(first, count)


def make(config: ModelConfig) -> GPT:
    model = GPT(config, AttentionConfig("scaled_dot", "auto"), 37)
    initialise(model, torch.Generator().manual_seed(0))
    return model


def kept_shares(config: ModelConfig, ones: Tensor, seeds: Tensor) -> Tensor:
    """(L, 2, B, T, d_model): the outputs of all blocks if they were 1 before."""
    return torch.stack([torch.stack([drop(ones, which) for which in (0, 1)]) for drop in block_dropouts(seeds, config)])


def test_dropout_drops_its_share_and_keeps_the_expectation() -> None:
    dropped = kept_shares(replace(NANO, dropout=0.3), torch.ones(16, 23, 34), seeds_of(16))
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1 / 0.7).item()}
    n = dropped.numel()
    assert (dropped == 0).double().mean().item() == pytest.approx(0.3, abs=4 * (0.21 / n) ** 0.5)
    assert dropped.mean().item() == pytest.approx(1.0, abs=4 * (0.3 / 0.7 / n) ** 0.5)


@pytest.mark.parametrize("axis", range(5), ids=["layer", "output", "sequence", "token", "channel"])
def test_neighbours_are_dropped_independently(axis: int) -> None:
    dropped = (kept_shares(replace(NANO, dropout=0.5), torch.ones(16, 23, 34), seeds_of(16)) == 0).double() - 0.5
    n = dropped.shape[axis]
    first, second = dropped.narrow(axis, 0, n - 1), dropped.narrow(axis, 1, n - 1)
    assert abs((first * second).mean().item()) < 4 * 0.25 / first.numel() ** 0.5


def test_a_sequence_without_a_seed_keeps_everything_bit_for_bit() -> None:
    model, tokens = make(DROPPING), torch.randint(37, (3, 23))
    plain = make(NANO)(tokens)
    seeds = torch.tensor([7, -1, 8])
    dropped = model(tokens, dropout_seeds=seeds)
    assert torch.equal(model(tokens), plain) and torch.equal(dropped[1], plain[1])
    assert not torch.equal(dropped[0], plain[0]) and not torch.equal(dropped[2], plain[2])


def test_the_numbers_depend_on_the_sequence_alone_not_on_its_batch() -> None:
    model, tokens = make(DROPPING), torch.randint(37, (4, 23))
    seeds = seeds_of(4)
    whole = model(tokens, dropout_seeds=seeds)
    pieces = [
        model(part, dropout_seeds=part_seeds) for part, part_seeds in zip(tokens.split(2), seeds.split(2), strict=True)
    ]
    torch.testing.assert_close(torch.cat(pieces), whole)
    assert torch.equal(seeds_of(2, first=2), seeds[2:]) and (seeds >= 0).all()
    assert not torch.equal(seeds_of(4, seed=6), seeds)


def test_activation_checkpointing_computes_the_same_masks_again() -> None:
    model, tokens, gradients = make(DROPPING), torch.randint(37, (3, 23)), []
    for recompute in (False, True):
        hidden = model(tokens, recompute=recompute, dropout_seeds=seeds_of(3))
        model.zero_grad()
        hidden.square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_mixing_is_one_to_one_and_each_bit_changes_each_bit_of_the_upper_half() -> None:
    x = torch.arange(2**18, dtype=torch.int32)
    assert len(mixed(x).unique()) == len(x) and mixed(x).min() >= 0 and mixed(x).max() < 2**30
    x = torch.randint(2**30, (2**14,), dtype=torch.int32)
    bits = torch.arange(15, 30, dtype=torch.int32)  # which decide whether a number is below a limit
    for flipped in range(30):
        changed = ((mixed(x) ^ mixed(x ^ (1 << flipped)))[:, None] >> bits & 1).double().mean(0)
        assert (changed - 0.5).abs().max() < 0.03, flipped


@pytest.mark.slow
@pytest.mark.untraced
def test_compiled_code_drops_the_same_numbers() -> None:
    """Generated C++ too: an overflow of a product would be undefined there."""
    ones, seeds = torch.ones(2, 5, 34), seeds_of(2)
    compiled = torch.compile(lambda ones, seeds: kept_shares(replace(DROPPING, n_layer=1), ones, seeds), fullgraph=True)
    assert torch.equal(compiled(ones, seeds), kept_shares(replace(DROPPING, n_layer=1), ones, seeds))
