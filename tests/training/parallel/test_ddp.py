"""DDP: what one rank does of the work that ranks divide. tests/system/test_ranks.py has whole runs of several ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from andrea.training.parallel.ranks import DataParallel, Ranks


@pytest.fixture(params=[0, 2])
def rank(request: pytest.FixtureRequest):
    """The number of this rank of three, in a process group of torch's own that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=3)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize(("n", "share"), [(6, 2), (7, 3), (2, 1)])
def test_each_rank_works_on_its_share_of_the_matrices(n: int, share: int, rank: int) -> None:
    """And on padding where the shares are not equal; the results of all ranks have the shape of the matrices."""
    matrices, given = torch.arange(1.0, n + 1)[:, None, None].expand(n, 4, 5), []

    def doubled(part: Tensor) -> Tensor:
        given.append(part)
        return 2 * part

    parallel = DataParallel(nn.Linear(4, 5), Ranks(rank, 3, rank, 3))
    assert parallel.apply_to_full_matrices(matrices, 4, doubled).shape == matrices.shape
    padded = torch.cat([matrices, torch.zeros(3 * share - n, 4, 5)])
    assert len(given) == 1 and torch.equal(given[0], padded[rank * share : (rank + 1) * share])
