"""Many ranks save: each row is written once, a failure of one rank reaches all, and what was saved is restored."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from andrea.checkpoint import Damaged, best_of, checkpoints_of, read_checkpoint
from andrea.runtime.files import StorageFailed
from andrea.text.tokenizer import ByteTokenizer
from andrea.training.parallel.ranks import Ranks
from andrea.training.parallel.saver import ShardedSaver

WHOLE = {"a": torch.arange(35.0).view(7, 5), "b": torch.arange(3.0), "one": torch.ones(1, 2)}
STATE = {
    "a/momentum": torch.arange(35.0).view(7, 5) / 3,
    "b/exp_avg": torch.arange(3.0) / 7,
    "b/step": torch.tensor(4.0),
}


class Rows:
    """Stands in for a FullySharded model and its optimizer: the rows that one rank keeps of WHOLE and STATE."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.parallel, self.ranks = self, Ranks(rank, size)
        self.local_parameters = {name: self.local(name, tensor) for name, tensor in WHOLE.items()}
        self.state = {name: self.local(name, tensor) for name, tensor in STATE.items()}

    def local_rows(self, name: str) -> slice:
        n_row, rank = len(WHOLE[name]), self.ranks.rank
        most = -(-n_row // self.ranks.size)
        return slice(min(n_row, rank * most), min(n_row, (rank + 1) * most))

    def local(self, name: str, tensor: Tensor) -> Tensor:
        return tensor[self.local_rows(name.split("/")[0])].clone() if tensor.ndim else tensor.clone()

    def state_tensors(self) -> dict[str, Tensor]:
        return self.state

    def state_shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self.state.items()}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        self.state = tensors


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def saver_of(folder: Path, rows: Rows) -> ShardedSaver:
    return ShardedSaver(folder, rows, ByteTokenizer(), 2)


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "tokens": 1, "config": {}}


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_each_row_is_written_by_one_rank(one_rank, tmp_path: Path, size: int) -> None:
    """Also where a rank keeps no row of a tensor."""
    for name, whole in (WHOLE | STATE).items():
        written = [
            tensor
            for rank in range(size)
            for own, tensor in saver_of(tmp_path, Rows(rank, size)).tensors_of_this_rank().items()
            if own == name
        ]
        assert all(tensor.numel() for tensor in written)
        assert torch.equal(torch.cat(written) if whole.ndim else torch.stack(written)[0], whole)
        assert whole.ndim or len(written) == 1


def test_a_save_holds_the_values_of_its_moment_and_is_restored(one_rank, tmp_path: Path) -> None:
    rows = Rows()
    saver = saver_of(tmp_path, rows)
    state = state_of(3) | {"note": [1]}
    saver.save(state)
    state["note"].append(2)
    for tensor in (rows.local_parameters | rows.state).values():
        tensor.mul_(-1)
    saver.wait()
    (path,) = checkpoints_of(tmp_path)
    checkpoint = read_checkpoint(path)
    assert checkpoint.is_sharded and checkpoint.state["note"] == [1] and best_of(tmp_path) == path.name
    saver.restore(checkpoint)
    assert all(torch.equal(rows.local_parameters[name], tensor) for name, tensor in WHOLE.items())
    assert all(torch.equal(rows.state[name], tensor) for name, tensor in STATE.items())
    saver.conclude()
    assert not read_checkpoint(path).is_sharded
    saver.restore(read_checkpoint(path))
    assert all(torch.equal(rows.local_parameters[name], tensor) for name, tensor in WHOLE.items())


def test_another_number_of_ranks_restores_its_rows(one_rank, tmp_path: Path) -> None:
    saver = saver_of(tmp_path, Rows())
    saver.save(state_of(1))
    saver.wait()
    checkpoint = read_checkpoint(checkpoints_of(tmp_path)[0])
    for rank in range(3):
        rows = Rows(rank, 3)
        expected = Rows(rank, 3)
        for tensor in (rows.local_parameters | rows.state).values():
            tensor.zero_()
        saver_of(tmp_path, rows).restore(checkpoint)
        assert all(
            torch.equal(rows.local_parameters[name], tensor) for name, tensor in expected.local_parameters.items()
        )
        assert all(torch.equal(rows.state[name], tensor) for name, tensor in expected.state.items())


def test_a_checkpoint_of_another_shape_is_refused(one_rank, tmp_path: Path) -> None:
    saver = saver_of(tmp_path, Rows())
    saver.save(state_of(1))
    saver.wait()
    rows = Rows()
    rows.local_parameters["a"] = torch.zeros(7, 1)  # which the saved (7, 5) could be broadcast to, the other way round
    with pytest.raises(Damaged, match=r"step-00000001 is damaged: a is \(7, 5\) instead of \(7, 1\)"):
        saver_of(tmp_path, rows).restore(read_checkpoint(checkpoints_of(tmp_path)[0]))


@pytest.mark.parametrize("what", ["write_shard", "make_staging_folder", "publish"])
def test_a_failed_write_is_raised_at_the_next_check(
    one_rank, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = saver_of(tmp_path, Rows())
    saver.save(state_of(1))
    saver.wait()

    def disk_is_full(*given: object) -> None:
        error = OSError(28, "No space left on device")
        raise error if what == "write_shard" else StorageFailed("No space left on device")

    monkeypatch.setattr(f"andrea.training.parallel.saver.{what}", disk_is_full)
    saver.save(state_of(2))
    saver.thread.join()
    for raising in (saver.check, saver.wait, lambda: saver.save(state_of(3)), saver.conclude):
        with pytest.raises(StorageFailed, match="No space left"):
            raising()
    assert [path.name for path in checkpoints_of(tmp_path)] == ["step-00000001"]


def test_a_failure_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    """Two ranks as threads: the second's disk refuses, the first has nothing to complain of."""
    raised: dict[int, str] = {}

    def rank(number: int) -> None:
        saver = ShardedSaver.__new__(ShardedSaver)
        saver.parallel, saver.group = SimpleNamespace(ranks=Ranks(number, 2)), None

        def work() -> int:
            if number == 1:
                raise StorageFailed("its disk is full")
            return number

        try:
            saver.on_every_rank(work)
        except StorageFailed as failure:
            raised[number] = str(failure)

    barrier, outcomes = threading.Barrier(2), [None, None]

    def all_gather_object(into: list, outcome: object, group: object) -> None:
        outcomes[int(isinstance(outcome, StorageFailed))] = outcome
        barrier.wait()
        into[:] = outcomes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_object", all_gather_object)
        threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert raised == {0: "its disk is full", 1: "its disk is full"}
