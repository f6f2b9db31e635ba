"""The command `export`: the whole folder, its proof and its card, and everything that it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run_script
from exportable import BLOCKS_OF_32, NANO, logits_of, make_trained, state_of, tokens_of, write_sharded, write_trained

from andrea.__main__ import main
from andrea.checkpoint import read_checkpoint, write_checkpoint
from andrea.interop import export as export_module
from andrea.interop import proof
from andrea.interop.architectures import weights_of
from andrea.interop.hugging_face.target import HuggingFace
from andrea.text.tokenizer import train_bpe


@pytest.fixture(autouse=True)
def fewer_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "N_FUZZ_TEXTS", 200)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with the runs `default` (the default model's layers, over bytes) and `qwen3` (over byte pairs)."""
    write_trained(tmp_path / "runs" / "default", make_trained(NANO))
    bpe = train_bpe([Path(__file__).read_text(encoding="utf-8")], 400)
    write_trained(tmp_path / "runs" / "qwen3", make_trained(BLOCKS_OF_32 | {"qk_norm": True}, tokenizer=bpe))
    return tmp_path / "runs"


def export(runs: Path, capsys: pytest.CaptureFixture, *words: str) -> tuple[int, str, str]:
    return run_script(main, ["export", f"runs_dir={runs}", *words], capsys)


def refused(runs: Path, capsys: pytest.CaptureFixture, *words: str) -> str:
    """The one line of a refusal; nothing is left behind."""
    before = set(runs.iterdir())
    code, _, error = export(runs, capsys, *words)
    assert code == 2 and error.startswith("error: ") and error.count("\n") == 1
    assert set(runs.iterdir()) == before
    return error


def write_with_data(run: Path, data: object) -> None:
    """A run's checkpoint whose configuration says this of its data."""
    trained = make_trained()
    state = state_of(trained, {})
    state["config"]["data"] = data
    write_checkpoint(run / "checkpoints", state, weights_of(trained), {}, trained.tokenizer)


@pytest.mark.parametrize("data", [[1], {"sources": 5}, {"sources": {"a": 1}}, {"kind": []}, {"sample_prompt": 3}])
def test_a_checkpoint_with_hostile_data_is_damaged(data, runs: Path, capsys) -> None:
    write_with_data(runs / "hostile", data)
    assert "no complete checkpoint" in refused(runs, capsys, "checkpoint=hostile")
    place = next((runs / "hostile" / "checkpoints").iterdir())
    assert "has an impossible config" in refused(runs, capsys, f"checkpoint={place}")
    code, _, error = run_script(main, ["evaluate", f"checkpoint={place}", "tasks=bpb"], capsys)
    assert code == 2 and "has an impossible config" in error


@pytest.mark.parametrize(
    "fault", [OSError("disk (os error 5)"), RuntimeError("disk (5)"), ValueError("disk")], ids=repr
)
@pytest.mark.parametrize("place", ["open", "prove"])
def test_an_export_that_the_other_program_cannot_read_is_one_line(
    place: str, fault: Exception, runs: Path, capsys, monkeypatch
) -> None:
    """Found by failing every call of `export`: while loading, the errors of other programs are of any type."""
    if place == "prove" and not isinstance(fault, OSError):
        pytest.skip("any other error of the comparison is a fault of ours")

    def fail(*inputs: object) -> None:
        raise fault

    monkeypatch.setattr(*((export_module, "prove") if place == "prove" else (HuggingFace, "open")), fail)
    before = set(runs.iterdir())
    code, _, error = export(runs, capsys, "checkpoint=default")
    assert code == 5 and error.count("\n") == 1 and f"{fault}; check the disk" in error
    assert set(runs.iterdir()) == before


def test_names_in_a_checkpoint_are_no_markup_in_the_card(runs: Path, capsys) -> None:
    name = "<script>alert(1)</script> [a](b) | `c`\n\n# d"
    write_with_data(runs / "marked", {"sources": {name: {}}, "sample_prompt": "Es war einmal"})
    assert export(runs, capsys, "checkpoint=marked")[0] == 0
    card = (runs / "marked-hf" / "README.md").read_text(encoding="utf-8")
    assert "<script>" not in card and "\n# d" not in card and "| data | &lt;script&gt;alert(1)" in card
    assert r"\[a\](b) \| \`c\` \# d |" in card
    assert 'tokenizer("Es war einmal"' in card and "def main" not in card


def test_the_default_model_becomes_a_folder_with_its_own_code(runs: Path, capsys) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.10")
    code, out, _ = export(runs, capsys, "checkpoint=default")
    assert code == 0 and "becomes AndreaForCausalLM: no class of transformers computes this function" in out
    assert "logits: largest difference 0 of" in out and "proven by transformers" in out
    folder = runs / "default-hf"
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        *("modeling_andrea.py", "proof.json", "README.md"),
    }
    found = json.loads((folder / "proof.json").read_text())
    assert found["proven"] and found["largest_difference"] == 0 and found["n_texts_with_other_ids"] == 0
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "trust_remote_code=True" in card and "| bits per byte of held-out text | 1.2500 |" in card
    assert "model.qkv_convolution=3" in card and str(runs) not in card
    loaded = transformers.pipeline("text-generation", str(folder), trust_remote_code=True)
    assert loaded("def ", max_new_tokens=5, do_sample=False)[0]["generated_text"].startswith("def ")


def test_the_exported_folder_needs_nothing_of_this_package(runs: Path, tmp_path: Path, capsys) -> None:
    pytest.importorskip("transformers", minversion="5.10")
    assert export(runs, capsys, "checkpoint=default", f"out={tmp_path / 'out'}")[0] == 0
    program = (
        "import sys; sys.modules['andrea'] = None\n"
        "from transformers import AutoModelForCausalLM as A, AutoTokenizer as T\n"
        f"f = {str(tmp_path / 'out')!r}; m = A.from_pretrained(f, trust_remote_code=True)\n"
        "print(m.generate(**T.from_pretrained(f)('def', return_tensors='pt'), max_new_tokens=3).shape)"
    )
    environment = {"HF_MODULES_CACHE": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0 and "torch.Size([1, 7])" in done.stdout, done.stderr


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_fewer_bits_have_a_cost_that_is_said(dtype: str, runs: Path, capsys) -> None:
    pytest.importorskip("transformers", minversion="5.10")
    code, out, _ = export(runs, capsys, "checkpoint=qwen3", f"dtype={dtype}")
    assert code == 0 and "becomes Qwen3ForCausalLM" in out and ", in fp32 " in out
    found = json.loads((runs / "qwen3-hf" / "proof.json").read_text())
    assert (
        found["bits_per_byte"]
        != found["bits_per_byte_rounded"]
        == pytest.approx(found["bits_per_byte_other"], rel=1e-4)
    )


def test_a_model_becomes_a_gguf_file(runs: Path, capsys) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    code, out, _ = export(runs, capsys, "checkpoint=qwen3", "to=gguf", "dtype=q8_0")
    assert code == 0 and "becomes qwen3" in out and "proven by llama-cpp-python" in out
    assert {path.name for path in (runs / "qwen3-gguf").iterdir()} == {"model.gguf", "proof.json", "README.md"}


@pytest.mark.parametrize(
    ("to", "package", "module"), [("hf", "transformers", "transformers"), ("gguf", "llama-cpp", "llama_cpp")]
)
def test_without_the_other_program_the_export_is_not_proven(
    to: str, package: str, module: str, runs: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    if to == "gguf":
        pytest.importorskip("gguf")
    monkeypatch.setitem(sys.modules, module, None)  # an import now fails
    code, out, _ = export(runs, capsys, "checkpoint=qwen3", f"to={to}")
    assert code == 0 and "is not proven" in out and f"pip install {package}" in out
    found = json.loads((runs / f"qwen3-{to}" / "proof.json").read_text())
    assert not found["proven"] and package in found["reason"]
    assert "Not proven: " in (runs / f"qwen3-{to}" / "README.md").read_text(encoding="utf-8")


def test_an_export_that_computes_something_else_leaves_nothing(
    runs: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", minversion="5.10")
    from andrea.interop.hugging_face import target as folder

    def one_weight_off(place: Path, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
        weights["model.norm.weight"] = weights["model.norm.weight"] * 1.01
        write(place, weights, dtype)

    write = folder.write_weights
    monkeypatch.setattr(folder, "write_weights", one_weight_off)
    before = set(runs.iterdir())
    code, out, error = export(runs, capsys, "checkpoint=default")
    assert code == 1 and "logits differ by" in error and "was not written" in error
    assert set(runs.iterdir()) == before


def test_a_text_to_compare_on(runs: Path, tmp_path: Path, capsys) -> None:
    pytest.importorskip("transformers", minversion="5.10")
    (tmp_path / "a.txt").write_text("One two three, four five. " * 100)
    code, out, _ = export(runs, capsys, "checkpoint=qwen3", f"text={tmp_path / 'a.txt'}")
    assert code == 0 and "bits per byte of a.txt" in out


def test_the_run_s_held_out_text_is_compared_where_it_is_prepared(
    trained: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits per byte of the whole held-out text are those of the run's last evaluation."""
    pytest.importorskip("transformers", minversion="5.10")
    monkeypatch.setattr("andrea.interop.export.MOST_TOKENS", 10_000)  # more than there are
    data = trained.parent.parent / "data"
    words = [f"checkpoint={trained}", f"out={tmp_path / 'out'}", f"data_dir={data}"]
    assert export(trained.parent, capsys, *words)[0] == 0
    found = json.loads((tmp_path / "out" / "proof.json").read_text())
    state = read_checkpoint(trained / "checkpoints" / "step-00000008").state
    assert found["text"] == "the run's held-out text" and 1000 < found["n_token"] < 10_000
    assert found["bits_per_byte_other"] == pytest.approx(state["val_bpb"], abs=1e-5)


def test_a_run_with_packed_documents_is_compared_as_one_document(trained: Path, tmp_path: Path, capsys) -> None:
    """Its held-out text has several documents in a window, which the other program does not keep apart."""
    pytest.importorskip("transformers", minversion="5.10")
    state = read_checkpoint(trained / "checkpoints" / "step-00000008").state
    packed = make_trained(NANO, {"across_documents": False})
    path = write_trained(tmp_path / "runs" / "packed", packed, data=state["data"])
    words = [f"checkpoint={path}", f"data_dir={trained.parent.parent / 'data'}"]
    code, out, _ = export(tmp_path / "runs", capsys, *words)
    assert code == 0 and "the export equals the model on single documents" in out and "held-out text" in out
    assert "attention did not cross documents" in (tmp_path / "runs" / "packed-hf" / "README.md").read_text("utf-8")


def test_a_sharded_checkpoint_is_exported(tmp_path: Path, capsys) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.10")
    trained = make_trained(NANO)
    path = write_sharded(tmp_path / "runs" / "parts", trained)
    code, _, error = export(tmp_path / "runs", capsys, f"checkpoint={path}", f"out={tmp_path / 'out'}")
    assert code == 0, error
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager", trust_remote_code=True
    )
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens_of()).logits, logits_of(trained, tokens_of()))


def test_what_is_refused(runs: Path, tmp_path: Path, capsys) -> None:
    write_trained(runs / "additive", make_trained({"position": "learned"}, {"compatibility": "additive"}))
    assert "additive cannot be exported" in refused(runs, capsys, "checkpoint=additive")
    assert "model.position=learned" in refused(runs, capsys, "checkpoint=additive", "to=gguf")
    assert "model=nano-qwen3" in refused(runs, capsys, "checkpoint=default", "to=gguf")
    for kind in ("q8_0", "q4_0"):
        why = refused(runs, capsys, "checkpoint=qwen3", f"dtype={kind}")
        assert f"dtype={kind} is a type of GGUF files, got to=hf" in why
    (runs / "qwen3-hf").mkdir()
    assert "qwen3-hf exists" in refused(runs, capsys, "checkpoint=qwen3")
    assert "exists; remove it, or name another" in refused(runs, capsys, "checkpoint=qwen3", f"out={runs}")
    assert "did you mean qwen3" in refused(runs, capsys, "checkpoint=qwen")
    assert "did you mean f32" in refused(runs, capsys, "checkpoint=qwen3", "dtype=fp32")
    assert "allowed: hf, gguf" in refused(runs, capsys, "checkpoint=qwen3", "to=onnx")
    assert "did you mean to" in refused(runs, capsys, "format=hf")
    assert "text=absent.txt does not exist" in refused(runs, capsys, "checkpoint=default", "text=absent.txt")
    (tmp_path / "short.txt").write_text("short")
    assert "5 characters, too few" in refused(runs, capsys, "checkpoint=default", f"text={tmp_path / 'short.txt'}")


def test_a_class_of_the_user_s_own_is_refused_before_it_is_imported(runs: Path, capsys) -> None:
    write_trained(runs / "own", make_trained(), compatibility="my_own_module.Mine")
    assert "my_own_module.Mine is a class of your own" in refused(runs, capsys, "checkpoint=own")


def test_a_damaged_checkpoint_is_refused(runs: Path, capsys) -> None:
    path = runs / "default" / "checkpoints" / "step-00000007" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "damaged" in refused(runs, capsys, f"checkpoint={path.parent}")


def test_a_place_that_cannot_be_written_is_exit_code_5(runs: Path, capsys) -> None:
    (runs / "file").write_text("")
    code, _, error = export(runs, capsys, "checkpoint=qwen3", f"out={runs / 'file' / 'out'}")
    assert code == 5 and "cannot be written" in error


def test_importing_the_package_imports_no_other_program() -> None:
    program = "import sys, andrea.interop.export; print({'transformers', 'gguf', 'llama_cpp'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "set()\n", done.stderr
