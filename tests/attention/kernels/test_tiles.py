"""Tiles that were measured on a GPU are used on that GPU, for that kind of input, and nowhere else."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from andrea.attention.kernels import tiles
from andrea.attention.kernels.tiles import Blocks, Tuning, measured_tiles, predicted, remember, tiles_file

SMALL = Tuning(Blocks(32, 16, 4, 1), Blocks(16, 32, 4, 1), Blocks(32, 16, 4, 2))
LARGE = Tuning(Blocks(128, 64, 8, 3), Blocks(64, 64, 8, 2), Blocks(128, 32, 8, 2))
CARD = "a card, triton 3.6.0"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiles.remembered.cache_clear()
    yield
    tiles.remembered.cache_clear()


def test_the_nearest_measured_length_serves():
    remember(CARD, 64, torch.bfloat16, 1024, SMALL)
    remember(CARD, 64, torch.bfloat16, 8192, LARGE)
    chosen = {n_key: measured_tiles(CARD, 64, torch.bfloat16, n_key) for n_key in (0, 1, 1024, 2800, 3000, 100_000)}
    assert chosen == {0: SMALL, 1: SMALL, 1024: SMALL, 2800: SMALL, 3000: LARGE, 100_000: LARGE}


def test_other_cards_widths_and_types_keep_the_predicted_tiles():
    remember(CARD, 64, torch.bfloat16, 1024, SMALL)
    assert measured_tiles("another card, triton 3.6.0", 64, torch.bfloat16, 1024) is None
    assert measured_tiles(CARD, 128, torch.bfloat16, 1024) is None
    assert measured_tiles(CARD, 64, torch.float16, 1024) is None
    assert measured_tiles(None, 64, torch.bfloat16, 1024) is None


def test_a_second_measurement_replaces_the_first_and_keeps_the_others():
    remember(CARD, 64, torch.bfloat16, 1024, SMALL)
    remember(CARD, 128, torch.float16, 512, SMALL)
    remember(CARD, 64, torch.bfloat16, 1024, LARGE)
    assert measured_tiles(CARD, 64, torch.bfloat16, 1024) == LARGE
    assert measured_tiles(CARD, 128, torch.float16, 512) == SMALL


@pytest.mark.parametrize(
    "damage",
    [
        lambda plain: "not json",
        lambda plain: json.dumps([plain]),
        lambda plain: json.dumps({CARD: {"64, bfloat16": {"many": plain}}}),
        lambda plain: json.dumps({CARD: {"64, bfloat16": {"1024": {**plain, "keys": {**plain["keys"], "m": 48}}}}}),
        lambda plain: json.dumps(
            {CARD: {"64, bfloat16": {"1024": {**plain, "keys": {**plain["keys"], "warps": 1e9}}}}}
        ),
        lambda plain: json.dumps({CARD: {"64, bfloat16": {"1024": {"forward": plain["forward"]}}}}),
    ],
)
def test_a_damaged_file_changes_nothing(damage):
    tiles_file().write_text(damage(dataclasses.asdict(SMALL)), encoding="utf-8")
    assert measured_tiles(CARD, 64, torch.bfloat16, 1024) is None


def test_tensors_off_the_gpu_have_the_predicted_tiles():
    query = torch.empty(1, 2, 5, 48)
    assert tiles.card_of(query) is None
    assert tiles.tuning(query, query, query) == predicted(64, torch.float32, 80)


@pytest.mark.untraced
def test_the_kernels_are_launched_with_the_measured_tiles(monkeypatch):
    fused = pytest.importorskip("andrea.attention.kernels.attend_triton", reason="triton is not installed")
    if not fused.triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is not 1")
    monkeypatch.setattr(tiles, "card_of", lambda tensor: CARD)
    remember(CARD, 16, torch.float32, 37, SMALL)
    launched, launch = {}, fused.launch
    monkeypatch.setattr(
        fused,
        "launch",
        lambda kernel, *given, **how: launched.update({kernel.fn.__name__: how}) or launch(kernel, *given, **how),
    )
    leaves = [torch.randn(1, 2, 37, 16, requires_grad=True) for _ in range(3)]
    output = fused.fused_attention(*leaves, None, None, True, 0, 0.0, None, None, False)[0]
    torch.autograd.grad(output.square().sum(), leaves)
    assert (launched["forward_kernel"]["BLOCK_M"], launched["forward_kernel"]["BLOCK_N"]) == (32, 16)
    assert (launched["keys_kernel"]["BLOCK_M"], launched["keys_kernel"]["BLOCK_N"]) == (16, 32)
    assert (launched["queries_kernel"]["BLOCK_M"], launched["queries_kernel"]["BLOCK_N"]) == (32, 16)
