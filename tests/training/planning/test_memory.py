"""The memory plan's parts, against cases solved by hand, and the free memory that it is compared with."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from andrea.api.command_line import configure
from andrea.config import RunConfig
from andrea.model.gpt import GPT
from andrea.training.parallel.ranks import Ranks
from andrea.training.planning import memory as machine
from andrea.training.planning.memory import (
    LiveBytes,
    Machine,
    evaluation_bytes,
    gathered_bytes,
    optimizer_step_bytes,
)

V = 31
CPU = torch.device("cpu")


def tiny_run(*words: str) -> RunConfig:
    tiny = ["model.d_model=24", "model.n_layer=3", "model.n_head=3", "model.d_mlp=40"]
    length = [] if words else ["model.sequence_length=11", "train.tokens_per_step=11"]
    return configure(RunConfig, "train", [*tiny, *length, *words])


@pytest.mark.parametrize(
    ("precision", "ranks", "expected"),
    [
        # Three matrices of 5 × 7, so 105 numbers; each has a Gram matrix of 5 × 5, so 75 numbers.
        ("bf16", 1, 4 * 105 + 2 * (3 * 105 + 2 * 75)),
        ("fp32", 1, 4 * 105 + 4 * (2 * 105 + 2 * 75)),
        # Two ranks keep 52 numbers each and work on two matrices, one of them padding on the second rank: 70 and 50.
        ("bf16", 2, 4 * 52 + 2 * (7 * 70 + 2 * 50)),
        ("fp32", 2, 4 * 52 + 4 * (6 * 70 + 2 * 50)),
    ],
)
def test_the_memory_of_a_muon_step_is_that_of_its_largest_stack(precision: str, ranks: int, expected: int) -> None:
    assert optimizer_step_bytes(Counter({(5, 7): 3}), precision, ranks) == expected
    assert optimizer_step_bytes(Counter({(7, 5): 3}), precision, ranks) == expected
    assert optimizer_step_bytes(Counter({(2, 3): 3, (5, 7): 3, (3, 2): 1}), precision, ranks) == expected
    assert optimizer_step_bytes(Counter(), precision, ranks) == 0


@pytest.mark.parametrize(("precision", "bytes_of_a_number"), [("fp32", 4), ("bf16", 2)])
def test_sharded_ranks_gather_three_blocks_and_all_that_is_outside(precision: str, bytes_of_a_number: int) -> None:
    run = tiny_run()
    model = GPT(run.model, run.attention, V)
    block = sum(parameter.numel() for parameter in model.blocks[1].parameters())
    outside = sum(each.numel() for name, each in model.named_parameters() if not name.startswith("blocks."))
    expected = (3 * bytes_of_a_number + 4) * block + 8 * outside
    assert gathered_bytes(model, run.model.n_layer, precision) == expected


def test_the_bytes_alive_at_once_are_counted_and_views_are_not() -> None:
    existing = torch.zeros(5)
    with LiveBytes([existing]) as live:
        existing.add_(1)
        assert live.most == 0
        first = existing + 1  # 20 bytes
        view = first[:3]
        assert live.most == 20
        values, indices = existing.max(0)  # 4 and 8 bytes, from one operation
        assert live.most == 32
        del values, indices
        second = torch.zeros(4, dtype=torch.int64)  # 32 bytes, and 20 of the first
        assert live.most == 52
        del first
        assert live.now == 52  # the view keeps it alive
        del view, second
        assert live.now == 0 and live.most == 52


def test_measuring_the_heads_holds_at_least_one_sequence_of_scores() -> None:
    """And the more, the longer the sequence: scores (1, H, T, T) in fp32."""
    measured = []
    for length in (256, 512):  # shorter ones are read together
        run = tiny_run(f"model.sequence_length={length}", f"train.tokens_per_step={length}")
        measured.append(evaluation_bytes(run.model, run.attention, V))
        assert measured[-1] > 4 * 3 * length**2
    assert 2 < measured[1] / measured[0] < 5


# ------------------------------------------------------------------------------------------------------- free memory


def test_ranks_of_one_machine_share_its_memory_but_not_a_card(monkeypatch) -> None:
    ranks = Ranks(local_size=3)
    monkeypatch.setattr(machine, "free_bytes", lambda device: 3 << 20)
    assert Machine.of_rank("cpu", ranks).free_bytes == 1 << 20
    monkeypatch.setattr(machine, "device_of_rank", lambda asked, ranks: torch.device("cuda"))
    assert Machine.of_rank("cuda", ranks).free_bytes == 3 << 20
