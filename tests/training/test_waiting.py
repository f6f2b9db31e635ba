"""The host never waits for the step that it has queued last: figures are read one step late, behind an event.

There may be no GPU here. A run on the CPU therefore takes the way of a GPU, while each of torch's operations is counted as
work that is queued on a stream: an event marks a position in this queue, and whoever waits for it waits up to there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from andrea.text.shards import DataLost
from andrea.training import step as step_module
from andrea.training.records.run_folder import read_lines
from andrea.training.step import HostCopy, TrainingStep


class Queue(TorchDispatchMode):
    """Counts operations. marks: what happened, each with the position of the queue up to which it had to be done."""

    def __init__(self) -> None:
        super().__init__()
        self.position = 0
        self.marks: list[tuple[str, int]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.position += 1
        if operation is torch.ops.aten._local_scalar_dense.default:  # item, float, int, bool of a tensor
            self.marks.append(("wait", self.position))
        return operation(*args, **(kwargs or {}))

    def marking(self, name: str, method: Any) -> Any:
        def marked(*args: Any, **named: Any) -> Any:
            self.marks.append((f"{name} begins", self.position))
            result = method(*args, **named)
            self.marks.append((f"{name} ends", self.position))
            return result

        return marked


def test_between_steps_the_host_waits_for_no_more_than_the_step_before_the_last(
    tiny_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train.steps=9", "train.log_every=100", "train.eval_every=100", "train.save_every=100", "compile=off"]
    assert tiny_run("name=plain", *words) == 0
    queue = Queue()

    class Event:
        def record(self) -> None:
            self.position = queue.position

        def synchronize(self) -> None:
            queue.marks.append(("wait", self.position))

    monkeypatch.setattr(TrainingStep, "runs_ahead", True)
    monkeypatch.setattr(step_module, "copies_asynchronously", lambda device: True)
    monkeypatch.setattr(step_module, "pinned_like", torch.empty_like)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(TrainingStep, "run", queue.marking("update", TrainingStep.run))
    monkeypatch.setattr(TrainingStep, "read_batch", queue.marking("read", TrainingStep.read_batch))
    with queue:
        assert tiny_run("name=ahead", *words) == 0

    begins = [index for index, (name, _) in enumerate(queue.marks) if name == "update begins"]
    ends = [index for index, (name, _) in enumerate(queue.marks) if name == "update ends"]
    assert len(begins) == len(ends) == 9
    n_wait = 0
    for step in range(1, 8):  # before and after, the run is set up and evaluated
        before_its_work = queue.marks[begins[step]][1]
        inside, after = queue.marks[begins[step] : ends[step]], queue.marks[ends[step] : begins[step + 1]]
        assert "wait" not in [name for name, _ in inside]
        waits = [position for name, position in after if name == "wait"]
        assert all(position <= before_its_work for position in waits)
        n_wait += len(waits)
        names = [name for name, _ in after]  # the next batch is read before the host waits
        assert names.index("read begins") < names.index("wait") and names.count("read begins") == 1
    assert n_wait == 7  # the figures of each step, once

    plain, ahead = (read_lines(tmp_path / "runs" / name / "metrics.jsonl") for name in ("plain", "ahead"))
    figures = [
        [{k: v for k, v in row.items() if k.startswith(("train/loss", "train/g", "val"))} for row in rows]
        for rows in (plain, ahead)
    ]
    assert figures[0] == figures[1]


def test_data_that_cannot_be_read_ahead_are_reported_when_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        def batch(self, first: int, count: int) -> Any:
            raise DataLost("gone")

    step = object.__new__(TrainingStep)
    step.prefetched, step.device, step.loader = None, torch.device("cpu"), Lost()
    step.read_batch = lambda number: step.loader.batch(number, 1)
    monkeypatch.setattr(TrainingStep, "runs_ahead", True)
    step.prefetch(3)
    with pytest.raises(DataLost):
        step.batch(3)


def test_a_prefetched_batch_serves_its_own_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    step = object.__new__(TrainingStep)
    step.prefetched, step.device = None, torch.device("cpu")
    step.read_batch = lambda number: ("batch", number)
    monkeypatch.setattr(TrainingStep, "runs_ahead", True)
    step.prefetch(3)
    assert step.batch(5) == ("batch", 5) and step.batch(3) == ("batch", 3)


def test_numbers_of_any_type_are_read_as_they_are_on_the_host() -> None:
    numbers = [torch.tensor(1.1), torch.tensor(True), torch.tensor(7), torch.tensor(float("nan"))]
    first, *rest, last = HostCopy(numbers).read()
    assert first == float(torch.tensor(1.1)) and rest == [1.0, 7.0] and last != last
