"""FSDP2 on one rank. tests/system/test_ranks.py has whole runs of several ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from andrea.config import group_config
from andrea.model import GPT
from andrea.training.loss.loss import MicroBatchLoss
from andrea.training.parallel import fsdp
from andrea.training.parallel.fsdp import FullySharded
from andrea.training.parallel.ranks import Ranks
from andrea.training.planning.memory import gathered_model_bytes

V = 31


@pytest.fixture
def one_rank() -> Iterator[Ranks]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Ranks(0, 1, 0, 1)
    dist.destroy_process_group()


def sharded_loss(n_layer: int, ranks: Ranks, compile_mode: str) -> tuple[FullySharded, torch.nn.Module]:
    sizes = {"d_model": 16, "n_layer": n_layer, "n_head": 2, "d_mlp": 16, "sequence_length": 8}
    config, attention = group_config("model", "andrea-120m", **sizes), group_config("attention", "scaled_dot")
    model, cpu = GPT(config, attention, V), torch.device("cpu")
    parallel = FullySharded(
        model, ranks, group_config("parallel", "fsdp"), cpu, torch.bfloat16, lambda: GPT(config, attention, V)
    )
    return parallel, parallel.wrap(MicroBatchLoss(model, cpu, "bf16", False, False), compile_mode)


@pytest.mark.slow
def test_blocks_are_compiled_once_for_any_number_of_them(one_rank: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of torch on recompilations must not depend on the depth. Which graphs are equal is decided before the compiler's
    backend runs; a backend that does nothing is the fastest."""
    graphs: list[torch.fx.GraphModule] = []

    def counted(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = lambda function: torch.compile(function, dynamic=False, fullgraph=True, backend=counted)  # noqa: E731
    monkeypatch.setattr(fsdp, "compile_graph", compiled)
    numbers = {}
    for n_layer in (2, 12, 16, 24):
        torch._dynamo.reset()
        graphs.clear()
        parallel, loss = sharded_loss(n_layer, one_rank, "blocks")
        for _ in range(2):
            with parallel.sync_gradients(last=True):
                loss(torch.zeros(3, 8, dtype=torch.int64), torch.ones(3, 8, dtype=torch.int64))[0].backward()
            parallel.set_local_gradients()
            parallel.zero_gradients()
        numbers[n_layer] = len(graphs)
    assert len(set(numbers.values())) == 1 and numbers[24] < torch._dynamo.config.recompile_limit


def test_the_plan_counts_what_rank_0_gathers(one_rank: Ranks) -> None:
    parallel, _ = sharded_loss(2, one_rank, "off")
    gathered = parallel.gathered_model()
    assert gathered is not None
    n_byte = sum(parameter.untyped_storage().nbytes() for parameter in gathered.parameters())
    assert n_byte == 4 * sum(parameter.numel() for parameter in gathered.parameters())
    largest = max(parameter.numel() for parameter in gathered.parameters())
    assert gathered_model_bytes(gathered) == n_byte + 4 * largest
