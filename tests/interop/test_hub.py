"""`export hub=OWNER/NAME`: the library's real requests to a small server of ours, and every way in which they can fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, run_script
from exportable import BLOCKS_OF_32, NANO, make_trained, write_trained
from small_hub import READER, WRITER, Repository, SmallHub, small_hub

from andrea.__main__ import main
from andrea.interop import export as uploading
from andrea.interop import proof
from andrea.interop.hugging_face import target as folders
from andrea.text.tokenizer import train_bpe

pytest.importorskip("transformers", minversion="5.10")
pytest.importorskip("huggingface_hub")
NAME = "somebody/small-model"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    """The server, as the endpoint of huggingface_hub in this process, which has a token that may write."""
    with small_hub() as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", WRITER)
        yield server


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(proof, "N_FUZZ_TEXTS", 100)
    write_trained(tmp_path / "runs" / "default", make_trained(NANO))
    return tmp_path / "runs"


def export(runs: Path, capsys: pytest.CaptureFixture, *words: str) -> tuple[int, str, str]:
    return run_script(main, ["export", f"runs_dir={runs}", *words], capsys)


def kept(runs: Path, capsys: pytest.CaptureFixture, *words: str) -> str:
    """The one line of an upload that failed. The proven folder is there, and the line names it."""
    code, out, error = export(runs, capsys, "checkpoint=default", f"hub={NAME}", *words)
    last = error.strip().splitlines()[-1]
    assert code == 2 and last.startswith("error: ") and "Traceback" not in error and "uploaded to" not in out
    folder = runs / "default-hf"
    assert f"{folder} was written, but not uploaded to {NAME}" in last and (folder / "proof.json").exists()
    assert f"to upload it later: hf upload {NAME} {folder} --private" in last
    shutil.rmtree(folder)
    return last


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_proven_export_is_uploaded_whole(hub: SmallHub, runs: Path, capsys) -> None:
    code, out, error = export(runs, capsys, "checkpoint=default", f"hub={NAME}")
    assert code == 0, error
    assert out.splitlines()[-1] == f"uploaded to {hub.url}/{NAME}, which is private"
    assert hub.repositories[NAME].files == content_of(runs / "default-hf")
    assert hub.repositories[NAME].is_private and hub.repositories[NAME].n_commit == 1
    card = (runs / "default-hf" / "README.md").read_text(encoding="utf-8")
    assert f'AutoModelForCausalLM.from_pretrained("{NAME}", trust_remote_code=True)' in card


def test_a_new_repository_is_public_if_that_is_said(hub: SmallHub, runs: Path, capsys) -> None:
    code, out, _ = export(runs, capsys, "checkpoint=default", f"hub={NAME}", "private=false")
    assert code == 0 and out.endswith(f"{NAME}, which is public\n") and not hub.repositories[NAME].is_private


def test_a_second_upload_replaces_weights_that_would_be_loaded_instead(
    hub: SmallHub, runs: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """from_pretrained prefers model.safetensors to the files of an index; other files of the owner stay."""
    hub.repositories[NAME] = Repository(is_private=False, files={"model.safetensors": b"old", "notes.txt": b"mine"})
    monkeypatch.setattr(folders, "LARGEST_SHARD_BYTES", 40_000)
    code, out, _ = export(runs, capsys, "checkpoint=default", f"hub={NAME}")
    assert code == 0 and out.endswith("which is public\n")  # private=true is of new repositories
    sent = content_of(runs / "default-hf")
    assert "model.safetensors.index.json" in sent and "model.safetensors" not in sent
    assert hub.repositories[NAME].files == sent | {"notes.txt": b"mine"}


def test_a_gguf_file_is_uploaded(hub: SmallHub, runs: Path, capsys) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    bpe = train_bpe([Path(__file__).read_text(encoding="utf-8")], 400)
    write_trained(runs / "qwen3", make_trained(BLOCKS_OF_32 | {"qk_norm": True}, tokenizer=bpe))
    code, _, error = export(runs, capsys, "checkpoint=qwen3", "to=gguf", f"hub={NAME}")
    assert code == 0, error
    assert hub.repositories[NAME].files == content_of(runs / "qwen3-gguf")
    assert f"llama-cli -hf {NAME}" in (runs / "qwen3-gguf" / "README.md").read_text(encoding="utf-8")


def test_what_the_hub_refuses(hub: SmallHub, runs: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", READER)
    assert kept(runs, capsys).count("don't have the rights to create a model") == 1
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    assert "Invalid username or password" in kept(runs, capsys)
    assert not hub.repositories
    monkeypatch.setenv("HF_TOKEN", WRITER)
    hub.fails_at = "/storage/"
    assert "Error while uploading 'model.safetensors' to the Hub: " in (line := kept(runs, capsys))
    assert "no space is left for this account" in line
    assert hub.repositories[NAME].files == {}


def test_without_a_token_nothing_is_asked(
    hub: SmallHub, runs: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    assert "no token of the hub; run: hf auth login" in kept(runs, capsys) and not hub.asked


def test_without_the_package(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(uploading.UserError, match="pip install huggingface_hub"):
        uploading.upload(runs, NAME, True, ())


def test_without_a_network(hub: SmallHub, runs: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_hub() as closed:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", closed.url)
    assert "refused" in kept(runs, capsys).lower()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "offline" in kept(runs, capsys).lower()


def test_what_is_not_proven_is_not_uploaded(hub: SmallHub, runs: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    write = folders.write_weights
    with monkeypatch.context() as patched:
        patched.setattr(
            folders,
            "write_weights",
            lambda place, weights, dtype: write(place, {name: 1.01 * each for name, each in weights.items()}, dtype),
        )
        assert export(runs, capsys, "checkpoint=default", f"hub={NAME}")[0] == 1
    assert not (runs / "default-hf").exists()
    monkeypatch.setitem(sys.modules, "transformers", None)
    line = kept(runs, capsys)
    assert "(it is not proven: transformers cannot be imported" in line and "pip install transformers" in line
    assert not hub.asked


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["hub=small-model"], "hub=small-model is no name of a repository; write OWNER/NAME"),
        (["hub=a/b/c"], "write OWNER/NAME"),
        (["hub=a/b--c"], "write OWNER/NAME"),
        (["hub=a/-b"], "write OWNER/NAME"),
        (["hub=a/b.git"], "write OWNER/NAME"),
        (["private=false"], "hub is not set; set hub=OWNER/NAME too"),
    ],
)
def test_names_are_checked_before_anything_is_written(words: list[str], says: str, runs: Path, capsys) -> None:
    code, _, error = export(runs, capsys, "checkpoint=default", *words)
    assert code == 2 and says in error and error.count("\n") == 1 and not (runs / "default-hf").exists()


@pytest.mark.slow
def test_the_command_reads_the_library_s_own_settings(runs: Path, tmp_path: Path) -> None:
    """HF_ENDPOINT and HF_TOKEN, in a process of its own. The proof works without a network, and the upload after it does not."""
    usual = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    with small_hub() as server:
        settings = {"HF_ENDPOINT": server.url, "HF_TOKEN": WRITER, "HF_HUB_DISABLE_XET": "1"}
        words = [f"runs_dir={runs}", "checkpoint=default", f"hub={NAME}"]
        done = subprocess.run(
            [sys.executable, "-m", "andrea", "export", *words],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=usual | settings | {"HF_HOME": str(tmp_path / "home")},
        )
        assert done.returncode == 0, done.stderr
        assert server.repositories[NAME].files == content_of(runs / "default-hf")
