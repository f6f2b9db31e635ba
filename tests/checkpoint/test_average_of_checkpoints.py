"""The command `average`: the mean of the weights of several checkpoints, as a checkpoint of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_checkpoint import make_model, write_model

from andrea.__main__ import main
from andrea.checkpoint import newest_run, read_checkpoint
from andrea.checkpoint.model import load_model
from andrea.config import UserError

NAME = "blocks.0.mlp.down.weight"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with the run `one`: four checkpoints whose weights are multiples of the first's."""
    for step in (1, 2, 3, 4):
        tensors = {name: step * tensor for name, tensor in make_model().state_dict().items()}
        write_model(tmp_path, tensors, step=step, tokens=23 * step, best_bpb=1.25)
    return tmp_path


def test_the_mean_of_the_last_checkpoints_is_a_model_without_a_figure(runs: Path, capsys) -> None:
    assert main(["average", "one", "last=3", f"runs_dir={runs}"]) == 0
    out = capsys.readouterr().out
    assert "3 checkpoints (steps 2, 3, 4)" in out and "validation loss is not known" in out and "one-average" in out
    found = read_checkpoint(runs / "one-average")
    assert found.state["val_bpb"] is None and found.state["best_bpb"] is None and found.state["run"] is None
    mean = load_model(found, found.tokenizer()).get_parameter(NAME)
    torch.testing.assert_close(mean, 3 * make_model().get_parameter(NAME).detach())
    assert newest_run(runs) == runs / "one"  # resume=auto does not take the mean for a run
    with pytest.raises(UserError, match="weights only and cannot be resumed"):
        found.optimizer_tensors()
    with pytest.raises(UserError, match="one-average exists; remove it, or name another folder with out"):
        main(["average", "one", f"runs_dir={runs}"])


def test_named_checkpoints_are_averaged_and_a_running_average_goes_before_weights(runs: Path) -> None:
    folder = runs / "one" / "checkpoints"
    averages = {f"{name}/average": 9 * tensor for name, tensor in make_model().state_dict().items()}
    paths = [folder / "step-00000001", write_model(runs, make_model().state_dict(), step=5, optimizer=averages)]
    assert main(["average", *map(str, paths), f"out={runs / 'mean'}"]) == 0
    mean = read_checkpoint(runs / "mean").model_tensors()[NAME]
    torch.testing.assert_close(mean, (1 + 9) / 2 * make_model().get_parameter(NAME).detach())


def test_what_has_no_mean_is_refused(runs: Path) -> None:
    step = runs / "one" / "checkpoints" / "step-00000001"
    with pytest.raises(UserError, match="at least two checkpoints, found only .*step-00000001"):
        main(["average", str(step)])
    other = write_model(runs / "other", make_model().state_dict(), config={"attention": {"window": 3}})
    with pytest.raises(UserError, match="different models"):
        main(["average", str(step), str(other)])
    with pytest.raises(UserError, match="checkpoints=absent is neither a folder nor a run"):
        main(["average", "absent", f"runs_dir={runs}"])
