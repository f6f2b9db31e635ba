"""LoRA adapters of PEFT, out and in: the same function as by PEFT itself, and everything that is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run_script
from exportable import LAYERNORM, NANO, logits_of, make_trained, tokens_of, write_trained
from importable import write_model
from safetensors.torch import load_file, save_file

from andrea.__main__ import main
from andrea.checkpoint import newest_whole, read_checkpoint, write_checkpoint
from andrea.checkpoint.model import load_model
from andrea.config import UserError
from andrea.interop.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, base_name
from andrea.interop.architectures import Trained
from andrea.model import GPT
from andrea.model.lora import is_factor, merge

peft = pytest.importorskip("peft", reason='needs peft: pip install "andrea[dev]"')
transformers = pytest.importorskip("transformers", minversion="5.10")
RANK = 3


@pytest.fixture(autouse=True)
def few_fuzz_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("andrea.interop.proof.N_FUZZ_TEXTS", 200)
    monkeypatch.setattr("andrea.interop.importing.import_model.MOST_TOKENS", 400)


def without_factors(trained: Trained) -> Trained:
    """The base of the tuned model."""
    gpt = GPT(dataclasses.replace(trained.model, lora_rank=0), trained.attention, trained.tokenizer.n_vocab)
    gpt.load_state_dict({name: weight for name, weight in trained.gpt.state_dict().items() if not is_factor(name)})
    return dataclasses.replace(trained, gpt=gpt.eval().requires_grad_(False))


def write_tuned(runs: Path, model: dict, attention: dict | None = None) -> Trained:
    """The run `tuned`, which began from the run `base`; both are written."""
    trained = make_trained(model | {"lora_rank": RANK}, attention)
    for name, parameter in trained.gpt.named_parameters():
        if name.endswith(".lora_b"):  # as small as a run makes it: large logits of attention amplify rounding
            parameter.mul_(0.1)
    write_trained(runs / "base", without_factors(trained))
    tuned = write_trained(runs / "tuned", trained)
    (tuned.parent.parent / "run.json").write_text(json.dumps({"init_from": str(runs / "base" / "checkpoints" / "x")}))
    return trained


def run(*words: str) -> int:
    return main(list(words))


KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama, grouped queries": ("LlamaForCausalLM", {"n_kv_head": 2}, {}),
    "llama, biases, untied": ("LlamaForCausalLM", {"bias": True, "tied_head": False}, {}),
    "qwen3, wide heads": ("Qwen3ForCausalLM", {"qk_norm": "learned", "d_head": 14}, {}),
    "gpt2, grouped queries": (
        "GPT2LMHeadModel",
        LAYERNORM | {"position": "learned", "mlp": "gelu", "n_kv_head": 3},
        {},
    ),
    "ours, the default model": ("AndreaForCausalLM", NANO, {}),
    "ours, bilinear": ("AndreaForCausalLM", {"position": "none"}, {"compatibility": "bilinear", "gate": "scalar"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_peft_computes_the_same_over_the_export_of_the_base(kind: str, tmp_path: Path, capsys) -> None:
    name, model, attention = KINDS[kind]
    runs = tmp_path / "runs"
    trained = write_tuned(runs, model, attention)
    assert run("export", f"runs_dir={runs}", "checkpoint=base") == 0
    assert run("export", f"runs_dir={runs}", "checkpoint=tuned", "to=peft") == 0
    out = capsys.readouterr().out
    assert f"becomes PEFT's adapter of {name}" in out and "proven by peft " in out
    folder = runs / "tuned-peft"
    files = {ADAPTER_CONFIG, ADAPTER_WEIGHTS, "proof.json", "README.md"}
    assert {path.name for path in folder.iterdir()} == files
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    assert config["base_model_name_or_path"] == "base-hf" and config["r"] == RANK
    kind_of = transformers.AutoModelForCausalLM
    base = kind_of.from_pretrained(runs / "base-hf", trust_remote_code=True, attn_implementation="eager").eval()
    tuned = peft.PeftModel.from_pretrained(base, folder).eval()
    tokens = tokens_of()
    ours = logits_of(trained, tokens)
    with torch.no_grad():
        theirs = tuned(tokens, use_cache=False).logits
        assert float((ours - theirs).abs().max()) < 1e-5 * float(ours.abs().max())
        with tuned.disable_adapter():
            plain = tuned(tokens, use_cache=False).logits
    assert float((ours - plain).abs().max()) > 0.01 * float(ours.abs().max())  # the adapter does something

    assert run("import", f"from={folder}", f"out={tmp_path / 'in'}") == 0  # the base lies beside it
    assert "proven by transformers" in capsys.readouterr().out
    again = loaded(tmp_path / "in")
    merged = logits_of(dataclasses.replace(trained, gpt=merge(trained.gpt)), tokens)
    assert float((again.logits(again(tokens)) - merged).abs().max()) < 1e-5 * float(merged.abs().max())


def loaded(folder: Path) -> GPT:
    checkpoint = read_checkpoint(folder)
    return load_model(checkpoint, checkpoint.tokenizer())


def test_names_with_quotes_and_spaces(tmp_path: Path, capsys) -> None:
    """The adapter's base has the name that its export gets, and the code of both cards is Python."""
    runs, name = tmp_path / "runs", """my "base" it's {x}"""
    write_tuned(runs, {})
    (runs / "base").rename(runs / name)
    (runs / "tuned" / "run.json").write_text(json.dumps({"init_from": str(runs / name)}))
    assert run("export", f"runs_dir={runs}", f"checkpoint={name}") == 0
    assert run("export", f"runs_dir={runs}", "checkpoint=tuned", "to=peft") == 0
    for folder in (f"{name}-hf", "tuned-peft"):
        card = (runs / folder / "README.md").read_text(encoding="utf-8")
        code = [line[4:] for line in card.partition("## Training")[0].split("\n") if line.startswith("    ")]
        compile("\n".join(code), "card", "exec")
    assert run("import", f"from={runs / 'tuned-peft'}", f"out={tmp_path / 'in'}") == 0  # finds the base beside it
    assert "proven by transformers" in capsys.readouterr().out


def test_the_base_of_a_run_that_goes_on_from_another_is_that_of_the_other(tmp_path: Path) -> None:
    write_tuned(tmp_path, {})
    first = read_checkpoint(next((tmp_path / "tuned" / "checkpoints").iterdir()))
    shutil.copytree(tmp_path / "tuned", tmp_path / "longer")
    second = read_checkpoint(next((tmp_path / "longer" / "checkpoints").iterdir()))
    (tmp_path / "longer" / "run.json").write_text(json.dumps({"run": "x", "resume": str(first.path)}))
    assert base_name(second) == base_name(first) == "base-hf"
    (tmp_path / "tuned" / "run.json").write_text(json.dumps({"init_from": "runs/letters"}))
    assert base_name(second) == base_name(first) == "letters-hf"
    (tmp_path / "longer" / "run.json").write_text(json.dumps({"resume": str(second.path)}))  # a circle
    assert base_name(second) == "base-hf"


def test_the_other_exports_hold_the_merged_weights(tmp_path: Path, capsys) -> None:
    runs = tmp_path / "runs"
    trained = write_tuned(runs, {})
    assert run("export", f"runs_dir={runs}", "checkpoint=tuned") == 0
    assert "proven by transformers" in capsys.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained(runs / "tuned-hf").eval()
    ours = logits_of(trained, tokens_of())
    with torch.no_grad():
        assert float((model(tokens_of()).logits - ours).abs().max()) < 1e-5 * float(ours.abs().max())


def test_what_an_adapter_cannot_hold_is_refused(tmp_path: Path, capsys) -> None:
    runs = tmp_path / "runs"
    trained = write_tuned(runs, {})

    def refused(*words: str) -> str:
        code, _, error = run_script(main, ["export", f"runs_dir={runs}", "to=peft", *words], capsys)
        assert code == 2 and error.count("\n") == 1 and not list(runs.glob("*-peft"))
        return error

    assert "has none; use to=hf" in refused("checkpoint=base")
    assert "dtype=bf16: an adapter is small" in refused("checkpoint=tuned", "dtype=bf16")
    checkpoint = read_checkpoint(next((runs / "tuned" / "checkpoints").iterdir()))
    moments = {"embedding.weight/exp_avg": torch.zeros(257, 60)}
    write_checkpoint(
        runs / "vocabulary" / "checkpoints", checkpoint.state, checkpoint.model_tensors(), moments, trained.tokenizer
    )
    assert "also trained the embedding" in refused("checkpoint=vocabulary")


# ------------------------------------------------------------------------------------------ adapters that PEFT has written

ALL = "all-linear"
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"r": 5, "lora_alpha": 7, "target_modules": ALL}),
    "llama, patterns, rslora": (
        "llama, untied, biases",
        {"r": 4, "target_modules": ["q_proj", "down_proj", "v_proj"], "use_rslora": True, "lora_alpha": 3}
        | {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.down_proj": 11}},
    ),
    "llama, a trained head": ("llama, untied, biases", {"target_modules": ["o_proj"], "modules_to_save": ["lm_head"]}),
    "qwen3, one layer": ("qwen3", {"target_modules": ["k_proj"], "layers_to_transform": [1]}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "gpt_neox": ("gpt_neox", {"target_modules": ["query_key_value", "dense"], "init_lora_weights": "gaussian"}),
}
Adapter = Callable[..., tuple[Path, Any]]


@pytest.fixture
def made(tmp_path: Path) -> Adapter:
    """A function: writes an adapter of MADE by PEFT, and returns its folder and the model. Its base is beside it."""

    def written(kind: str = "llama") -> tuple[Path, Any]:
        family, settings = MADE[kind]
        (tmp_path / "the-base").mkdir()
        write_model(tmp_path / "the-base", family)
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "the-base")
        torch.manual_seed(1)
        model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.2 * torch.randn(parameter.shape))
        model.save_pretrained(tmp_path / "adapter")
        return tmp_path / "adapter", model.eval()

    return written


@pytest.mark.parametrize("kind", MADE)
def test_an_adapter_of_peft_is_read_over_its_base(kind: str, made: Adapter, tmp_path: Path, capsys) -> None:
    folder, theirs = made(kind)
    assert run("import", f"from={folder}", f"out={tmp_path / 'in'}") == 0
    assert "proven by transformers" in capsys.readouterr().out
    ours, tokens = loaded(tmp_path / "in"), tokens_of(n_vocab=397)
    with torch.no_grad():
        expected = theirs(tokens).logits
        with theirs.disable_adapter():
            plain = theirs(tokens).logits
    largest = float(expected.abs().max())
    assert float((ours.logits(ours(tokens)) - expected).abs().max()) < 1e-5 * largest
    assert float((plain - expected).abs().max()) > 0.01 * largest


def test_a_run_begins_with_an_adapter_and_notices_another_base(
    made: Adapter, tmp_path: Path, short_text: Path, capsys
) -> None:
    folder, theirs = made()
    words = [f"init_from={folder}", f"data_dir={tmp_path / 'data'}", f"runs_dir={tmp_path / 'runs'}", "device=cpu"]
    words += ["data=text", f"data.path={short_text}", "logger=none", "compile=off", "precision=fp32", "threads=1"]
    words += ["train.steps=1", "train.tokens_per_step=96", "train.sample_tokens=0"]
    assert run("train", *words, "name=tuned", "model.lora_rank=2") == 0
    assert "LoRA: " in capsys.readouterr().out
    tensors = newest_whole(tmp_path / "runs" / "tuned").model_tensors()
    merged = theirs.merge_and_unload().state_dict()["model.layers.0.mlp.up_proj.weight"]
    torch.testing.assert_close(tensors["blocks.0.mlp.up.weight"], merged, rtol=0, atol=1e-6)
    place = tmp_path / "data" / "imported"
    assert len(list(place.glob("adapter-*"))) == 1
    stamp = (tmp_path / "the-base" / "model.safetensors").stat()
    os.utime(tmp_path / "the-base" / "model.safetensors", ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 10**9))
    assert run("train", *words, "name=again") == 0
    assert len(list(place.glob("adapter-*"))) == 2


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / ADAPTER_CONFIG).read_text()) | values
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = A.replace("lora_A", "lora_B")
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"peft_type": "IA3"}, "peft_type='IA3'"),
    "a list for a word": ({"peft_type": ["LORA"]}, "peft_type="),
    "DoRA": ({"use_dora": True}, "use_dora=True"),
    "biases": ({"bias": "all"}, "bias='all'"),
    "PiSSA, which changes the base": ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    "a setting of the future": ({"exec": "rm"}, "exec='rm'"),
    "no rank": ({"r": None}, "r=None"),
    "a rank of words": ({"r": "5"}, "r='5'"),
    "a true rank": ({"r": True}, "r=True"),
    "a rank of zero": ({"r": 0}, "r=0"),
    "another rank": ({"r": 6}, "says rank 6"),
    "an endless alpha": ({"lora_alpha": 1e300}, "lora_alpha=1e+300"),
    "a regular expression": ({"rank_pattern": {"(a+)+$": 3}}, "rank_pattern="),
    "patterns of another type": ({"alpha_pattern": [1]}, "alpha_pattern="),
    "no base": ({"base_model_name_or_path": None}, "base_model_name_or_path=None"),
    "a base of bytes": ({"base_model_name_or_path": "a\0b"}, "is not a valid path"),
    "a base on a hub": ({"base_model_name_or_path": "owner/name"}, "hf download owner/name"),
    "a base that is an adapter": ({"base_model_name_or_path": "adapter"}, "is not the folder of a model"),
    "a base that is a device": ({"base_model_name_or_path": "/dev/null"}, "is not the folder of a model"),
}


def refused(folder: Path, out: Path, capsys) -> str:
    capsys.readouterr()  # progress bars of transformers
    code, _, error = run_script(main, ["import", f"from={folder}", f"out={out}"], capsys)
    assert code == 2 and error.startswith("error: ") and error.count("\n") == 1 and not out.exists(), error
    return error


def test_hostile_settings_are_refused(made: Adapter, tmp_path: Path, capsys) -> None:
    folder, _ = made()
    good = (folder / ADAPTER_CONFIG).read_bytes()
    for name, (values, reason) in CONFIGS.items():
        (folder / ADAPTER_CONFIG).write_bytes(good)
        change_config(folder, **values)
        assert reason in refused(folder, tmp_path / "in", capsys), name
    for content in (b"", b"[]", b"{", b'{"r": NaN}', b"[" * 100_000):
        (folder / ADAPTER_CONFIG).write_bytes(content)
        assert ADAPTER_CONFIG in refused(folder, tmp_path / "in", capsys)
    if hasattr(os, "mkfifo"):
        (folder / ADAPTER_CONFIG).unlink()
        os.mkfifo(folder / ADAPTER_CONFIG)
        assert ADAPTER_CONFIG in refused(folder, tmp_path / "in", capsys)


WEIGHTS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "A alone": (lambda them: them.pop(B), "no counterpart in the base"),
    "B alone": (lambda them: them.pop(A), "no counterpart in the base"),
    "no number": (lambda them: them[A].fill_(float("nan")), "not finite"),
    "an overflow": (lambda them: (them[A].fill_(1e30), them[B].fill_(1e30)), "not finite"),
    "another width": (lambda them: them.update({A: them[A][:, :-1].clone()}), "makes a change of (48, 47)"),
    "another rank": (lambda them: them.update({A: them[A][:-1].clone()}), "says rank 5"),
    "a vector": (lambda them: them.update({A: them[A][0].clone()}), "says rank 5"),
    "a layer too many": (lambda them: them.update({A.replace("s.0", "s.9"): them[A], B.replace("s.0", "s.9"): them[B]}),
                         "no counterpart in the base"),
    "an embedding": (lambda them: them.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(5, 9)}),
                     "no counterpart in the base"),
    "a matrix of another shape": (lambda them: them.update({"base_model.model.model.norm.weight": torch.ones(3)}),
                                  "makes a change of (3,)"),
    "another name": (lambda them: them.update({"x": torch.ones(3)}), "no counterpart in the base"),
}  # fmt: skip


def test_hostile_weights_are_refused(made: Adapter, tmp_path: Path, capsys) -> None:
    folder, _ = made()
    good = load_file(folder / ADAPTER_WEIGHTS)
    for name, (damage, reason) in WEIGHTS.items():
        weights = {each: weight.clone() for each, weight in good.items()}
        damage(weights)
        save_file({each: weight.clone() for each, weight in weights.items()}, folder / ADAPTER_WEIGHTS)
        assert reason in refused(folder, tmp_path / "in", capsys), name
    (folder / ADAPTER_WEIGHTS).write_bytes(b"\xff" * 100)
    assert "is damaged" in refused(folder, tmp_path / "in", capsys)
    (folder / ADAPTER_WEIGHTS).unlink()
    assert "the file is missing" in refused(folder, tmp_path / "in", capsys)
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")
    assert "is a pickle" in refused(folder, tmp_path / "in", capsys)
    shutil.rmtree(tmp_path / "the-base")
    assert "is not the folder of a model" in refused(folder, tmp_path / "in", capsys)


@pytest.mark.parametrize(
    ("named", "remedy"),
    [
        ("mine-hf", "export checkpoint=mine\n"),
        ("theirs-hf", "export checkpoint=data/imported/theirs\n"),
        ("org/mine-hf", "hf download org/mine-hf"),
        ("gpt2", "hf download gpt2"),
    ],
)
def test_a_base_that_is_not_there_is_named_with_the_command_that_makes_it(
    made: Adapter, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, named: str, remedy: str
) -> None:
    folder, _ = made()
    (tmp_path / "data" / "imported" / "theirs").mkdir(parents=True)  # as init_from=theirs makes it
    monkeypatch.chdir(tmp_path)
    change_config(folder, base_model_name_or_path=named)
    assert remedy in refused(folder, tmp_path / "in", capsys)


def test_init_from_refuses_them_too(made: Adapter, tiny_run) -> None:
    folder, _ = made()
    change_config(folder, use_dora=True)
    with pytest.raises(UserError, match="use_dora=True"):
        tiny_run(f"init_from={folder}", "model.lora_rank=2")
