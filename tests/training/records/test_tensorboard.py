"""TensorBoard's own reader finds every figure in the event files; a missing package is named with its remedy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from andrea.config import UserError, group_config
from andrea.training.records.records import TensorBoard, check_loggers

RECORD = {"step": 3, "tokens": 30, "flops": 1.0, "seconds": 0.5, "train/loss": 0.25, "train/mfu": None}


def read(folder: Path):
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="tensorboard is not installed: pip install -e '.[tensorboard]'",
    )
    found = reader.EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return found


def test_figures_heads_and_texts_are_found(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install -e '.[tensorboard]'")
    logger = TensorBoard(tmp_path, 0)
    logger.record({**RECORD, "attention/heads/entropy_nats": [[0.5, None], [1.5, 2.0]], "event": "done"})
    logger.sample({**RECORD, "prompt": "<b>\udcff", "text": "&\n# x"})
    logger.page({**RECORD, "name": "lens", "html": "<p>"})
    logger.alert({**RECORD, "finding": "loss_spikes", "begins": True, "message": "three"})
    logger.alert({**RECORD, "finding": "loss_spikes", "begins": False, "message": "over"})
    logger.finish(0)
    found = read(tmp_path)
    assert set(found.Tags()["scalars"]) == {"tokens", "flops", "seconds", "train/loss"}
    assert [(each.step, each.value) for each in found.Scalars("train/loss")] == [(3, 0.25)]
    (heads,) = found.Histograms("attention/heads/entropy_nats")
    assert (heads.histogram_value.num, heads.histogram_value.sum) == (3, 4.0)
    texts = {tag: [each.tensor_proto.string_val[0] for each in found.Tensors(tag)] for tag in found.Tags()["tensors"]}
    assert texts["sample/text_summary"] == ["    <b>\ufffd&\n    # x\n".encode()]
    assert texts["health/loss_spikes/text_summary"] == [b"three", b"ended: over"]
    assert texts["event/text_summary"] == [b"done"]


def test_a_resumed_run_replaces_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install -e '.[tensorboard]'")
    for first, steps in ((0, range(1, 6)), (4, range(4, 8))):
        logger = TensorBoard(tmp_path, first)
        for step in steps:
            logger.record({**RECORD, "step": step, "train/loss": float(10 * first + step)})
        logger.finish(0)
    values = [(each.step, each.value) for each in read(tmp_path).Scalars("train/loss")]
    assert values == [(1, 1), (2, 2), (3, 3), (4, 44), (5, 45), (6, 46), (7, 47)]


def test_a_missing_package_is_named_before_the_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # its import now fails
    check_loggers(group_config("logger", "none"))
    with pytest.raises(
        UserError, match=r"logger=tensorboard needs tensorboard; .*pip install -e \"\.\[tensorboard\]\""
    ):
        check_loggers(group_config("logger", "tensorboard"))


def test_event_files_that_cannot_be_written_are_one_line_without_a_traceback(tmp_path: Path) -> None:
    """TensorBoard writes in a thread of its own. A small limit of the size of files stands for a full disk."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install -e '.[tensorboard]'")
    program = f"""
import resource, time
from pathlib import Path
from andrea.training.parallel.ranks import Watchdog
from andrea.training.records import Progress
from andrea.training.records.console import Console
from andrea.training.records.records import Records
from andrea.training.records.records import TensorBoard

folder = Path({str(tmp_path)!r})
records = Records([TensorBoard(folder, 0)], Console(steps=9), folder, Progress(step=7), Watchdog())
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
for _ in range(20):
    records.log({{f"figure{{number}}": 1.0 for number in range(20)}})
    time.sleep(0.01)
records.finish(0)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0 and not ended.stderr
    assert ended.stdout.count("the logger TensorBoard failed (OSError") == ended.stdout.count("\n") == 1
