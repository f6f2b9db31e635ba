"""A checkpoint is written whole or not at all; a folder that is not whole is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from small_checkpoints import edit, rewrite, write

from andrea.checkpoint import Checkpoint, Damaged, folder, newest_whole, read_checkpoint
from andrea.config import UserError
from andrea.runtime.files import StorageFailed, file_sha256
from andrea.text.tokenizer import ByteTokenizer


def test_a_written_checkpoint_is_read_back(tmp_path: Path) -> None:
    path = write(tmp_path / "run", 60, note="é")
    assert path.name == "step-00000060"
    found = read_checkpoint(path)
    assert (found.step, found.state["note"]) == (60, "é")
    assert torch.equal(found.model_tensors()["w"], torch.arange(6.0).view(2, 3) + 60)
    assert found.model_tensors()["v"].dtype == torch.bfloat16
    assert torch.equal(found.optimizer_tensors()["w/momentum"], torch.ones(2, 3))
    assert found.tokenizer().identity == found.state["tokenizer"] == ByteTokenizer().identity


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json"])
def test_one_flipped_bit_is_noticed(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "run", 1)
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)
    with pytest.raises(Damaged, match="step-00000001"):
        read_checkpoint(path)


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json", "state.json"])
def test_a_truncated_or_missing_file_is_noticed(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "run", 1)
    (path / name).write_bytes((path / name).read_bytes()[:-7])
    with pytest.raises(Damaged):
        read_checkpoint(path)
    (path / name).unlink()
    with pytest.raises(Damaged):
        read_checkpoint(path)


def test_a_manifest_with_files_outside_the_folder_or_malformed_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "run", 1)
    files = json.loads((path / "manifest.json").read_text())["files"]
    for wrong, message in [
        ({"../../state.json": files["state.json"], **files}, "regular file"),
        ({**files, "state.json": 3}, "regular file"),
        ({"state.json": files["state.json"]}, "does not list"),
        ([], "does not list"),
        ("x", "cannot be read"),
    ]:
        edit(path / "manifest.json", files=wrong)
        with pytest.raises(Damaged, match=message):
            read_checkpoint(path)
    edit(path / "manifest.json", files=files, format_version=99)
    with pytest.raises(Damaged, match="version 99"):
        read_checkpoint(path)


def test_a_foreign_folder_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(Damaged, match="other is not a complete checkpoint"):
        read_checkpoint(tmp_path / "other")
    with pytest.raises(Damaged, match="no such folder"):
        read_checkpoint(tmp_path / "absent")


def test_a_state_without_its_figures_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "run", 1)
    (path / "state.json").write_text("[1]")
    content = {"bytes": 3, "sha256": file_sha256(path / "state.json")}
    edit(
        path / "manifest.json",
        files={**json.loads((path / "manifest.json").read_text())["files"], "state.json": content},
    )
    with pytest.raises(Damaged, match="lacks step"):
        read_checkpoint(path)


def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "run", 1)
    (path / "model.safetensors").write_bytes(b"\xff" * 7 + b"\x7f" + b"{}")  # a header that claims 2^62 bytes
    with pytest.raises(Damaged, match="model.safetensors is damaged"):
        Checkpoint(path, {"step": 1}).model_tensors()


def test_weights_alone_cannot_be_resumed(tmp_path: Path) -> None:
    path = write(tmp_path / "run", 1)
    found = read_checkpoint(path)
    (path / "optimizer.safetensors").unlink()
    with pytest.raises(UserError, match="init_from"):
        found.optimizer_tensors()


def test_a_failed_write_leaves_the_earlier_checkpoints_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    write(run, 1)

    def disk_is_full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "flush_to_disk", disk_is_full)
    with pytest.raises(StorageFailed, match="No space"):
        write(run, 2)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000001"]
    assert newest_whole(run).step == 1


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    (path / "state.json").unlink()
    assert read_checkpoint(write(tmp_path, 3)).step == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", "7"),
        ("step", True),
        ("step", None),
        ("tokens", 1.5),
        ("config", []),
        ("val_bpb", "low"),
        ("val_bpb", 10**400),
        ("wandb_id", "*"),  # it would name the files of other runs
        ("wandb_id", "../../x"),
    ],
)
def test_a_state_of_wrong_types_is_refused(name: str, value: object, tmp_path: Path) -> None:
    path = write(tmp_path / "run", 1)
    state = json.loads((path / "state.json").read_text()) | {name: value}
    rewrite(path, "state.json", json.dumps(state).encode())
    with pytest.raises(Damaged, match=f"its state.json has an impossible {name}"):
        read_checkpoint(path)


def test_a_file_that_the_manifest_does_not_list_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "run", 1)
    files = json.loads((path / "manifest.json").read_text())["files"]
    edit(
        path / "manifest.json", files={name: about for name, about in files.items() if name != "optimizer.safetensors"}
    )
    with pytest.raises(Damaged, match="optimizer.safetensors, which manifest.json does not list"):
        read_checkpoint(path)


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_a_link_to_an_endless_device_is_not_read(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "run", 1)
    (path / name).unlink()
    (path / name).symlink_to("/dev/zero")
    with pytest.raises(Damaged, match="cannot be read|not a regular file"):
        read_checkpoint(path)


def test_an_infinite_version_and_a_file_name_that_is_no_text_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "run", 1)
    manifest = (path / "manifest.json").read_text()
    for wrong in (
        manifest.replace('"format_version": 1', '"format_version": 1e999'),
        json.dumps(
            {
                "format_version": 1,
                "files": [[name, {}] for name in ("model.safetensors", "tokenizer.json", "state.json", 1)],
            }
        ),
    ):
        (path / "manifest.json").write_text(wrong)
        with pytest.raises(Damaged):
            read_checkpoint(path)
