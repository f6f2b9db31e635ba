"""Whole or not at all: what is written is believed, whatever is not whole is refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from andrea import checkpoint as module
from andrea.checkpoint import (
    Damaged,
    best_of,
    checkpoints_of,
    keep_newest,
    locate,
    newest_run,
    newest_whole,
    read_checkpoint,
    write_checkpoint,
)
from andrea.config import UserError
from andrea.runtime import files
from andrea.runtime.files import StorageFailed, file_sha256, remove_unfinished, replace_text
from andrea.text.shards import find_shards
from andrea.text.sources import Source
from andrea.text.tokenizer import ByteTokenizer, from_path, load_gpt2


def write(run: Path, step: int, **more: object) -> Path:
    state = {"step": step, "tokens": step * 100, "config": {"model": {"name": "m"}}, **more}
    weights = {"w": torch.arange(6.0).view(2, 3) + step, "v": torch.zeros(3).bfloat16()}
    return write_checkpoint(run / "checkpoints", state, weights, {"w/momentum": torch.ones(2, 3)}, ByteTokenizer())


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
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


def edit(path: Path, **changes: object) -> None:
    manifest = json.loads(path.read_text())
    manifest.update(changes)
    path.write_text(json.dumps(manifest))


def test_a_manifest_that_climbs_out_or_lies_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "run", 1)
    files = json.loads((path / "manifest.json").read_text())["files"]
    for wrong, said in [
        ({"../../state.json": files["state.json"], **files}, "plain file"),
        ({**files, "state.json": 3}, "plain file"),
        ({"state.json": files["state.json"]}, "does not list"),
        ([], "does not list"),
        ("x", "cannot be read"),
    ]:
        edit(path / "manifest.json", files=wrong)
        with pytest.raises(Damaged, match=said):
            read_checkpoint(path)
    edit(path / "manifest.json", files=files, format_version=99)
    with pytest.raises(Damaged, match="version 99"):
        read_checkpoint(path)


def test_a_foreign_folder_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(Damaged, match="other is not a whole checkpoint"):
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


def test_tensors_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "run", 1)
    (path / "model.safetensors").write_bytes(b"\xff" * 7 + b"\x7f" + b"{}")  # a header that claims 2^62 bytes
    with pytest.raises(Damaged, match="model.safetensors is damaged"):
        module.Checkpoint(path, {"step": 1}).model_tensors()


def test_weights_alone_cannot_be_resumed(tmp_path: Path) -> None:
    path = write(tmp_path / "run", 1)
    found = read_checkpoint(path)
    (path / "optimizer.safetensors").unlink()
    with pytest.raises(UserError, match="init_from"):
        found.optimizer_tensors()


def test_a_failed_write_leaves_what_was_there_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    write(run, 1)

    def disk_is_full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "flush_to_disk", disk_is_full)
    with pytest.raises(StorageFailed, match="No space"):
        write(run, 2)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000001"]
    assert newest_whole(run).step == 1


def test_finding_the_newest_passes_over_the_damaged(tmp_path: Path) -> None:
    run, said = tmp_path / "runs" / "a", []
    for step in (5, 9, 10):
        write(run, step)
    (run / "checkpoints" / "step-00000010" / "state.json").unlink()
    (run / "checkpoints" / ".writing-step-00000011-1").mkdir()
    assert newest_whole(run, said.append).step == 9 and "step-00000010" in said[0]
    assert [path.name for path in checkpoints_of(run)] == ["step-00000005", "step-00000009", "step-00000010"]
    remove_unfinished(run / "checkpoints")
    assert not list((run / "checkpoints").glob(".*"))
    for asked in (None, "a", str(run), str(run / "checkpoints" / "step-00000009")):
        assert locate(asked, tmp_path / "runs", report=said.append).step == 9
    assert newest_run(tmp_path / "runs") == run


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint under"):
        locate(None, tmp_path)
    write(tmp_path / "first", 1)
    with pytest.raises(UserError, match="did you mean first"):
        locate("frist", tmp_path)
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="no whole checkpoint"):
        locate("empty", tmp_path)


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        write(tmp_path, step)
    replace_text(tmp_path / "checkpoints" / "best", "step-00000002\n")
    keep_newest(tmp_path, 2)
    assert [path.name[-1] for path in checkpoints_of(tmp_path)] == ["2", "4", "5"]
    assert best_of(tmp_path) == "step-00000002"
    replace_text(tmp_path / "checkpoints" / "best", "../../etc")
    assert best_of(tmp_path) is None


def test_a_damaged_one_of_the_same_step_is_replaced(tmp_path: Path) -> None:
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
    ],
)
def test_a_state_of_wrong_types_is_refused(name: str, value: object, tmp_path: Path) -> None:
    path = write(tmp_path / "run", 1)
    state = json.loads((path / "state.json").read_text()) | {name: value}
    rewrite(path, "state.json", json.dumps(state).encode())
    with pytest.raises(Damaged, match=f"{name} in its state.json"):
        read_checkpoint(path)


def rewrite(path: Path, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint, and what the manifest says of it."""
    (path / name).write_bytes(content)
    files = json.loads((path / "manifest.json").read_text())["files"]
    edit(path / "manifest.json", files=files | {name: {"bytes": len(content), "sha256": file_sha256(path / name)}})


def test_a_file_that_the_manifest_does_not_list_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "run", 1)
    files = json.loads((path / "manifest.json").read_text())["files"]
    edit(
        path / "manifest.json", files={name: about for name, about in files.items() if name != "optimizer.safetensors"}
    )
    with pytest.raises(Damaged, match="optimizer.safetensors, which manifest.json does not list"):
        read_checkpoint(path)


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_a_link_to_something_without_an_end_is_not_read(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "run", 1)
    (path / name).unlink()
    (path / name).symlink_to("/dev/zero")
    with pytest.raises(Damaged, match="cannot be read"):
        read_checkpoint(path)


def test_a_version_beyond_numbers_and_names_that_are_none_are_refused(tmp_path: Path) -> None:
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


@contextmanager
def shut(folder: Path) -> Iterator[None]:
    """`folder` without rights on it; root, whom no rights stop, is nobody meanwhile."""
    rights, user = folder.stat().st_mode, os.geteuid()
    folder.chmod(0)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        folder.chmod(rights)


def test_folders_of_someone_else_are_passed_over_or_refused(tmp_path: Path) -> None:
    write(tmp_path / "theirs", 1)
    with shut(tmp_path / "theirs"):
        assert checkpoints_of(tmp_path / "theirs") == []
        for refused in (
            lambda: locate(str(tmp_path / "theirs" / "checkpoints"), tmp_path),
            lambda: locate("theirs", tmp_path),
            lambda: read_checkpoint(tmp_path / "theirs"),
            lambda: find_shards("a", tmp_path / "theirs" / "a.bin", "data.path"),
            lambda: Source("a", "text", tmp_path / "theirs" / "a.txt"),
            lambda: from_path(tmp_path / "theirs", "bpe"),
            lambda: load_gpt2(str(tmp_path / "theirs" / "a")),
            lambda: load_gpt2(str(tmp_path / "theirs")),
        ):
            with pytest.raises(UserError):
                refused()


def sharded(folder: Path, step: int = 7) -> Path:
    """A checkpoint as two ranks write it: two files each of weights and of optimizer state, rows cut in two."""
    from safetensors.torch import save_file

    beside = module.folder_beside(folder, step)
    (beside / "shards").mkdir()
    whole = {
        "a": torch.arange(12.0).view(4, 3),
        "b": torch.arange(3.0),
        "a/momentum": torch.arange(12.0).view(4, 3) / 7,
    }
    for rank in range(2):
        for number, names in ((1, ["a", "b"]), (2, ["a/momentum"])):
            parts, where = {}, {}
            for name in names:
                rows = slice(2 * rank, 2 * rank + 2)
                parts[name] = whole[name][rows].clone()
                where[name] = {"saved_offsets": [2 * rank] + [0] * (whole[name].ndim - 1)}
            path = beside / "shards" / f"shard-{rank + 1:05d}-model-{number:05d}-of-00002.safetensors"
            save_file(parts, path, {"DCP_SHARDING_INFO": json.dumps(where), "DCP_VERSION": "1.0"})
    files = module.describe_files(beside, (beside / "shards").iterdir())
    state = {"step": step, "tokens": 1, "config": {}}
    path = module.finished_folder(folder, beside, state, ByteTokenizer(), files)
    assert torch.equal(read_checkpoint(path).model_tensors()["a"], whole["a"])
    return path


def test_a_sharded_checkpoint_is_read_whole_and_becomes_two_files(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    before = read_checkpoint(path)
    assert before.is_sharded and before.model_tensors().keys() == {"a", "b"}
    weights, moments = before.model_tensors(), before.optimizer_tensors()
    module.consolidate(path)
    after = read_checkpoint(path)
    assert not after.is_sharded and not (path / "shards").exists() and after.state == before.state
    assert all(torch.equal(tensor, after.model_tensors()[name]) for name, tensor in weights.items())
    assert torch.equal(moments["a/momentum"], after.optimizer_tensors()["a/momentum"])
    module.consolidate(path)  # nothing is left to do
    assert read_checkpoint(path).model_tensors().keys() == weights.keys()


@pytest.mark.parametrize("moment", range(1, 10))
def test_a_crash_while_consolidating_leaves_the_one_form_or_the_other(tmp_path: Path, moment: int) -> None:
    """Cut off after each of its renames, flushes and removals in turn; afterwards it can be done again."""
    path = sharded(tmp_path)
    weights = read_checkpoint(path).model_tensors()
    calls = 0

    def counted(function):
        def cut_off(*given, **named):
            nonlocal calls
            calls += 1
            if calls == moment:
                raise KeyboardInterrupt
            return function(*given, **named)

        return cut_off

    with pytest.MonkeyPatch.context() as patch:
        flushes = ((module, "flush_to_disk"), (files, "flush_to_disk"))
        for place, name in ((module.os, "replace"), *flushes, (module.shutil, "rmtree")):
            patch.setattr(place, name, counted(getattr(place, name)))
        try:
            module.consolidate(path)
        except KeyboardInterrupt:
            pass
    assert all(torch.equal(tensor, read_checkpoint(path).model_tensors()[name]) for name, tensor in weights.items())
    module.consolidate(path)
    assert not read_checkpoint(path).is_sharded and not (path / "shards").exists()
    assert all(torch.equal(tensor, read_checkpoint(path).model_tensors()[name]) for name, tensor in weights.items())


def test_a_sharded_checkpoint_that_is_not_what_it_says_is_not_believed(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    extra = path / "shards" / "shard-00003-model-00001-of-00002.safetensors"
    extra.write_bytes((path / "shards" / "shard-00001-model-00001-of-00002.safetensors").read_bytes())
    with pytest.raises(Damaged, match="does not list"):
        read_checkpoint(path)
    extra.unlink()
    shard = path / "shards" / "shard-00002-model-00001-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(Damaged, match="sha256 of shards/shard-00002"):
        read_checkpoint(path)
    shard.unlink()
    with pytest.raises(Damaged, match="is missing"):
        read_checkpoint(path)
    elsewhere = tmp_path / "elsewhere"
    (path / "shards").rename(elsewhere)
    (path / "shards").symlink_to(elsewhere)
    with pytest.raises(Damaged):
        read_checkpoint(path)


def test_going_back_sets_aside_what_lies_beyond(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3):
        write(run, step)
    replace_text(run / "checkpoints" / "best", "step-00000003\n")
    aside = module.set_aside_after(run, 1)
    assert [path.name for path in checkpoints_of(run)] == ["step-00000001"] and best_of(run) is None
    assert len(aside) == 2 and all(read_checkpoint(path).step > 1 for path in aside)  # whole, under another name
    assert newest_whole(run).step == 1
