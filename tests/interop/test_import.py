"""`python -m andrea import`: what it reads, what it proves, and what it refuses."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from importable import FAMILIES, LINEAR, write_model, write_tokenizer

from andrea.__main__ import main
from andrea.checkpoint import read_checkpoint
from andrea.checkpoint.model import load_model
from andrea.config import UserError
from andrea.interop.importing import import_model as importing
from andrea.text.load_tokenizer import load_hf_tokenizer
from andrea.text.tokenizer import RankTokenizer

pytest.importorskip("transformers")
Folder = Callable[..., Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Folder:
    """The folder of a family's model, written once."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def folder_of(family: str) -> Path:
        if family not in made:
            made[family] = root / family.replace(", ", "-").replace(" ", "-")
            made[family].mkdir()
            write_model(made[family], family)
        return made[family]

    return folder_of


@pytest.fixture
def copied(models: Folder, tmp_path: Path) -> Folder:
    """A copy of a family's folder, to be damaged."""
    import shutil

    return lambda family="llama": Path(shutil.copytree(models(family), tmp_path / "model"))


@pytest.fixture(autouse=True)
def few_fuzz_texts(monkeypatch) -> None:
    monkeypatch.setattr("andrea.interop.proof.N_FUZZ_TEXTS", 200)
    monkeypatch.setattr(importing, "MOST_TOKENS", 400)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_proven_and_goes_out_again_unchanged(family: str, models: Folder, tmp_path: Path) -> None:
    source, first, exported, second = models(family), tmp_path / "first", tmp_path / "out", tmp_path / "second"
    assert main(["import", f"from={source}", f"out={first}"]) == 0
    proof = json.loads((first / "proof.json").read_text())
    assert proof["proven"] and proof["largest_difference"] <= 1e-5 * max(1, proof["largest_logit"])
    assert proof["n_texts_with_other_ids"] == 0 and proof["n_greedy_tokens"] > 32
    assert main(["export", f"checkpoint={first}", f"out={exported}"]) == 0
    assert main(["import", f"from={exported}", f"out={second}"]) == 0
    one, two = (read_checkpoint(folder).model_tensors() for folder in (first, second))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_logits_and_greedy_text_are_those_of_transformers(models: Folder, tmp_path: Path) -> None:
    """Compared here without the proof's own code."""
    import transformers

    source = models("qwen3")
    assert main(["import", f"from={source}", f"out={tmp_path / 'in'}"]) == 0
    checkpoint = read_checkpoint(tmp_path / "in")
    ours, theirs = (
        load_model(checkpoint, checkpoint.tokenizer()),
        transformers.AutoModelForCausalLM.from_pretrained(source).eval(),
    )
    tokens = torch.randint(400, (2, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        mine, other = ours.logits(ours(tokens)), theirs(tokens).logits
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5 * float(other.abs().max()))
        text = tokens[:1, :5]
        for _ in range(20):
            text = torch.cat((text, ours.logits(ours(text))[:, -1].argmax(-1, keepdim=True)), 1)
        greedy = theirs.generate(tokens[:1, :5], do_sample=False, max_new_tokens=20, eos_token_id=None)
    assert torch.equal(text, greedy)


def test_the_tokenizer_is_the_librarys(models: Folder) -> None:
    import tokenizers

    folder = models("llama")
    ours, library = load_hf_tokenizer(folder, 400), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("def main():\n\treturn 'é' + 日本", "", "   \n\n x", "🤖"):
        assert ours.encode(text) == library.encode(text).ids
        assert ours.decode(ours.encode(text)) == text
        assert int(ours.byte_lengths()[ours.encode(text)].sum()) == len(text.encode())
    assert ours.end_of_text == 0 and ours.n_vocab == 400 and ours.byte_lengths()[0] == 0
    assert ours.decode(ours.encode("<|endoftext|>")) == "<|endoftext|>" and 0 not in ours.encode("<|endoftext|>")


def test_a_run_begins_with_such_a_folder(models: Folder, tmp_path: Path, short_text: Path, capsys) -> None:
    words = [
        f"init_from={models('llama')}",
        f"data_dir={tmp_path / 'data'}",
        f"runs_dir={tmp_path / 'runs'}",
        "optimizer=adamw",
    ]
    words += [
        f"data.path={short_text}",
        "data=text",
        "train.tokens_per_step=192",
        "train.steps=8",
        "train.eval_every=4",
    ]
    words += ["device=cpu", "compile=off", "logger=none", "train.sample_tokens=0", "optimizer.warmup_steps=1"]
    assert main(["train", "name=tuned", *words]) == 0
    records = [
        json.loads(line) for line in (tmp_path / "runs" / "tuned" / "metrics.jsonl").read_text().split("\n") if line
    ]
    losses = [record["val/loss"] for record in records if "val/loss" in record]
    assert losses[-1] < losses[0]
    assert len(list((tmp_path / "data" / "imported").glob("llama-*"))) == 1
    assert main(["train", "name=again", *words]) == 0  # from the imported folder
    assert capsys.readouterr().out.count("parameters, tokenizer hf-400") == 1


def test_a_model_of_a_hub_comes_from_its_cache(models: Folder, tmp_path: Path, monkeypatch) -> None:
    """The cache as huggingface_hub lays it out; nothing is fetched."""
    import huggingface_hub

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", _with_cache(huggingface_hub.snapshot_download, tmp_path / "hub")
    )
    place = tmp_path / "hub" / "models--somebody--small-model"
    snapshot = place / "snapshots" / ("1" * 40)
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(models("llama"))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("1" * 40)
    assert main(["import", "somebody/small-model", f"runs_dir={tmp_path}"]) == 0
    assert (tmp_path / "small-model-imported" / "model.safetensors").exists()
    with pytest.raises(UserError, match="from=somebody/other is no folder, and cannot be fetched from the hub"):
        main(["import", "from=somebody/other", f"runs_dir={tmp_path}"])


def _with_cache(download: Callable, cache: Path) -> Callable:
    return lambda *given, **how: download(*given, cache_dir=cache, local_files_only=True, **how)


# ------------------------------------------------------------------------------------------------------- refusals


def edited(**changes) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        plain = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(plain | changes))

    return edit


def without_a_bias(folder: Path) -> None:
    """One layer has the bias that all should have."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
    save_file(weights, folder / "model.safetensors")
    edited(attention_bias=True)(folder)


def with_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))


class Bomb:
    def __reduce__(self):
        return (print, ("a pickle was run",))


def with_index(*names: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        places = {f"model.{index}": name for index, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    return write


def truncated(name: str, share: float) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(share * len(content))])

    return cut


def without_decoder(folder: Path) -> None:
    plain = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(plain | {"decoder": {"type": "Fuse"}}))


WINDOWS = {"model_type": "qwen3", "use_sliding_window": True}
HOSTILE = {
    "a pickle": (with_pickle, "pytorch_model.bin, a pickle, which could run code"),
    "half of the weights": (truncated("model.safetensors", 0.5), "model.safetensors is damaged"),
    "half a header": (truncated("model.safetensors", 0.001), "model.safetensors is damaged"),
    "half a config": (truncated("config.json", 0.5), "config.json is damaged"),
    "half a tokenizer": (truncated("tokenizer.json", 0.5), "tokenizer.json"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json cannot be read"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json cannot be read"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights"),
    "a missing shard": (with_index("model-00001-of-00002.safetensors"), "is the download complete"),
    "a shard elsewhere": (with_index("../model.safetensors"), "must name files of this folder"),
    "an index of numbers": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("[1]"),
        "holds no object",
    ),
    "other shapes": (edited(hidden_size=56, head_dim=14), "by config.json; copy both again"),
    "fewer layers": (edited(num_hidden_layers=2), "weights that such a model does not have"),
    "many layers": (edited(num_hidden_layers=4000), "too few for"),
    "layers without end": (edited(num_hidden_layers=10**9), "model.n_layer"),
    "a width without end": (edited(hidden_size=10**9), "model.d_model"),
    "positions without end": (edited(max_position_embeddings=10**9), "model.sequence_length"),
    "no heads": (edited(num_attention_heads=0), "n_head"),
    "a negative width": (edited(hidden_size=-1), "model.d_model"),
    "a width in words": (edited(hidden_size="many"), "model.d_model"),
    "a list for a number": (edited(intermediate_size=[[1]]), "model.d_mlp"),
    "a heads list": (edited(num_attention_heads=[4], head_dim=12), "n_head"),
    "a head width in words": (edited(head_dim="12"), "d_head"),
    "no vocabulary": (edited(vocab_size=None), "vocab_size"),
    "a vocabulary without end": (edited(vocab_size=2**60), "tokens"),
    "another tokenizer": (lambda folder: write_tokenizer(folder, 500), "name the tokenizer that belongs to the model"),
    "a tokenizer without bytes": (without_decoder, "its decoder is not ByteLevel"),
    "an unknown model": (edited(model_type="mamba"), "model_type='mamba' of config.json cannot be imported"),
    "a list as model": (edited(model_type=["llama"]), "cannot be imported"),
    "another activation": (edited(hidden_act="gelu"), "hidden_act='gelu' of config.json has no counterpart"),
    "other positions": (edited(rope_parameters={"rope_type": "yarn", "factor": 4.0}), "rope_type='yarn'"),
    "positions in words": (edited(rope_parameters="far"), "rope_parameters='far'"),
    "a window in a list": (
        edited(**WINDOWS, sliding_window=[4], layer_types=["full_attention", "sliding_attention"] * 2),
        "layer_types",
    ),
    "windows in lists": (
        edited(**WINDOWS, sliding_window=[4], layer_types=["full_attention"] + ["sliding_attention"] * 2),
        "window",
    ),
    "weights in 4 bits": (edited(quantization_config={"bits": 4}), "quantization_config of config.json has no"),
    "capped logits": (edited(final_logit_softcapping=30.0), "final_logit_softcapping=30.0"),
    "biases of one layer": (without_a_bias, "k_proj.bias is absent in the file"),
    "no biases in attention": (edited(attention_bias=True), "q_proj.bias is absent in the file"),
    "a biased MLP without biases": (edited(mlp_bias=True), "gate_proj.bias is absent in the file"),
    "window layers in words": (
        edited(**WINDOWS, max_window_layers="a", sliding_window=3),
        "max_window_layers='a'",
    ),
    "layer types of too few": (edited(**WINDOWS, layer_types=["full_attention"], sliding_window=4), "layer_types"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_folders_end_in_one_line_and_leave_nothing(name: str, copied: Folder, tmp_path: Path, capsys) -> None:
    damage, message = HOSTILE[name]
    folder = copied()
    damage(folder)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError) as refused:
        main(["import", f"from={folder}", f"out={tmp_path / 'in'}"])
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert sorted(tmp_path.iterdir()) == before
    assert "a pickle was run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"hidden_size": "48"},
        {"head_dim": [12]},
        {"windows": 7},
        {"windows": [[1], None, None]},
    ],
)
def test_hostile_exports_of_ours_end_in_one_line(changes, models: Folder, tmp_path: Path) -> None:
    first, exported = tmp_path / "in", tmp_path / "out"
    assert main(["import", f"from={models('mistral')}", f"out={first}"]) == 0
    assert main(["export", f"checkpoint={first}", f"out={exported}"]) == 0
    edited(**changes)(exported)
    with pytest.raises(UserError):
        main(["import", f"from={exported}", f"out={tmp_path / 'again'}"])
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"partial_rotary_factor": 0.1}}, "rotary_pct=0.1 of config.json does not turn"),
        ({"rope_parameters": {"partial_rotary_factor": "all"}}, "rotary_pct='all'"),
        ({"rope_parameters": LINEAR | {"factor": "far"}}, "no number factor"),
        ({"hidden_size": 50}, "hidden_size=50 of config.json is not divided by"),
        ({"hidden_size": 64}, "by config.json; copy both again"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"attention_bias": False}, "dense.bias, which such a model does not have"),
        ({"hidden_act": "silu"}, "hidden_act='silu'"),
        ({"use_parallel_residual": "yes"}, "parallel_residual"),
    ],
)
def test_hostile_folders_of_gpt_neox_end_in_one_line(changes, message: str, copied: Folder, tmp_path: Path) -> None:
    folder = copied("gpt_neox")
    edited(**changes)(folder)
    with pytest.raises(UserError) as refused:
        main(["import", f"from={folder}", f"out={tmp_path / 'in'}"])
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "in").exists()


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.weight"),
        ("qwen2", "model.layers.0.self_attn.o_proj.weight"),
    ],
)
def test_a_number_in_place_of_a_matrix_ends_in_one_line(family: str, name: str, copied: Folder, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = copied(family)
    save_file(load_file(folder / "model.safetensors") | {name: torch.tensor(1.0)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"is \(\) in the file"):
        main(["import", f"from={folder}", f"out={tmp_path / 'in'}"])


def with_parts(**parts) -> Callable[[Path], None]:
    """Replaces parts of tokenizer.json; those of `model` are added to it."""

    def edit(folder: Path) -> None:
        plain = json.loads((folder / "tokenizer.json").read_text())
        parts["model"] = plain["model"] | parts.get("model", {})
        (folder / "tokenizer.json").write_text(json.dumps(plain | parts))

    return edit


GROWING = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [GROWING] * 9}}, "the unknown step 'Replace'"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [], "pretokenizers": [GROWING]}},
            "the unknown step 'Replace'",
        ),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 9}}, "too many steps"),
        ({"model": {"continuing_subword_prefix": "éé"}}, "a model with continuing_subword_prefix"),
        ({"model": {"dropout": 0.5}}, "a model with dropout"),
        ({"pre_tokenizer": {"type": "Digits"}}, "cannot be read by the tokenizers library"),
        ({"added_tokens": [{"content": []}]}, "is not a tokenizer.json"),
        ({"added_tokens": [{"content": "a"}]}, "is not a tokenizer.json"),
        ({"added_tokens": [{"content": "a", "id": 1.5}]}, "ids are no numbers"),
    ],
)
def test_parts_of_a_tokenizer_that_could_do_harm_are_refused(parts: dict, message: str, copied: Folder) -> None:
    folder = copied()
    with_parts(**parts)(folder)
    with pytest.raises(UserError) as refused:
        load_hf_tokenizer(folder)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_parts_of_a_tokenizer_that_decide_no_id_are_left_out(models: Folder, copied: Folder, tmp_path: Path) -> None:
    """Padding to 10^9 tokens would take 24 GB."""
    folder = copied()
    padding = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    with_parts(
        padding=padding | {"strategy": {"Fixed": 10**9}}, truncation={"max_length": 1}, decoder={"type": "ByteLevel"}
    )(folder)
    assert load_hf_tokenizer(folder).encode("def main") == load_hf_tokenizer(models("llama")).encode("def main")
    assert main(["import", f"from={folder}", f"out={tmp_path / 'in'}"]) == 0
    assert main(["export", f"checkpoint={tmp_path / 'in'}", f"out={tmp_path / 'out'}"]) == 0
    assert "10000000" not in (tmp_path / "out" / "tokenizer.json").read_text()


def test_settings_that_compute_nothing_may_have_any_type(copied: Folder, tmp_path: Path) -> None:
    folder = copied()
    edited(dtype=[1], pad_token_id={}, architectures=7, id2label="x", use_cache=[], repetition_penalty="no")(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [[]], "num_beams": {}}')
    assert main(["import", f"from={folder}", f"out={tmp_path / 'in'}"]) == 0


def test_two_values_of_one_setting_are_refused_before_a_model_is_built(copied: Folder, tmp_path: Path) -> None:
    folder = copied("gpt2")
    edited(num_hidden_layers=1 << 29)(folder)  # transformers takes it for n_layer
    with pytest.raises(UserError, match="num_hidden_layers=536870912 and n_layer=3 of config.json are one setting"):
        main(["import", f"from={folder}", f"out={tmp_path / 'in'}"])
    assert not (tmp_path / "in").exists()


def test_a_tensor_of_many_dimensions_is_refused_by_its_header(copied: Folder, tmp_path: Path) -> None:
    folder = copied()
    header = json.dumps({"x": {"dtype": "F32", "shape": [1] * 100_000, "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(UserError, match="x has 100,000 dimensions"):
        main(["import", f"from={folder}", f"out={tmp_path / 'in'}"])


def test_weights_that_are_a_device_are_named(copied: Folder, tmp_path: Path) -> None:
    folder = copied()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/dev/zero")
    with pytest.raises(UserError, match="model.safetensors is not a regular file"):
        main(["import", f"from={folder}", f"out={tmp_path / 'in'}"])


def test_a_library_that_aborts_leaves_one_line_and_no_folder(copied: Folder, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(importing, "load_hf_tokenizer", lambda folder, n_vocab: os.abort())
    with pytest.raises(UserError, match=r"cannot be read \(SIGABRT\)"):
        main(["import", f"from={copied()}", f"out={tmp_path / 'in'}"])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("by_command", [True, False])
def test_a_process_that_dies_while_it_writes_leaves_no_folder(
    by_command: bool, copied: Folder, tmp_path: Path, monkeypatch
) -> None:
    """As by Ctrl-C, which ends the process that reads the folder at once."""
    monkeypatch.setattr("andrea.checkpoint.folder.complete_files", lambda *given: os.abort())  # the weights are written
    folder, place = copied(), tmp_path / "place"
    with pytest.raises(UserError, match=r"cannot be read \(SIGABRT\)"):
        if by_command:
            main(["import", f"from={folder}", f"out={place / 'imported' / 'in'}"])
        else:
            importing.imported_if_foreign(folder, place)
    assert {path.name for path in (place / "imported").iterdir()} <= {"lock"}


def test_a_tied_head_that_differs_is_refused(copied: Folder, tmp_path: Path) -> None:
    folder = copied("llama, untied, biases")
    edited(tie_word_embeddings=True)(folder)
    with pytest.raises(UserError, match=r"lm_head.weight differs from the embedding"):
        main(["import", f"from={folder}", f"out={tmp_path / 'in'}"])


def test_a_model_that_computes_something_else_is_not_written(
    models: Folder, tmp_path: Path, monkeypatch, capsys
) -> None:
    write = importing.write_weights

    def write_wrong(out, state, weights, tokenizer):
        weights["blocks.1.attention.query.weight"] += 0.01
        write(out, state, weights, tokenizer)

    monkeypatch.setattr(importing, "write_weights", write_wrong)
    assert main(["import", f"from={models('llama')}", f"out={tmp_path / 'in'}"]) == 1
    assert "transformers computes something else: logits differ" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# Settings as the hub's files of these models have them, besides sizes.
PUBLISHED = {
    "SmolLM2": ("llama", {"is_llama_config": True, "rope_interleaved": False, "rope_scaling": None}),
    "GPT-2": (
        "gpt2",
        {"n_ctx": 96, "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}},
    ),
    "Pythia": ("gpt_neox, one after the other", {"rotary_emb_base": 10000, "torch_dtype": "float16"}),
    "Qwen2.5": ("qwen2", {"use_mrope": False, "sliding_window": 32768, "max_window_layers": 24}),
    "Qwen3": ("qwen3", {"max_window_layers": 28, "rope_scaling": None, "use_sliding_window": False}),
    "Mistral": ("mistral", {"torch_dtype": "bfloat16", "attention_dropout": 0.0}),
}


@pytest.mark.parametrize("name", [*FAMILIES, *PUBLISHED])
def test_what_transformers_and_published_files_hold_is_known(name: str, copied: Folder, tmp_path: Path) -> None:
    family, changes = PUBLISHED.get(name, (name, {}))
    folder = copied(family)
    edited(**changes)(folder)
    assert importing.write_imported(folder, tmp_path / "in", str(folder), "model")[1] == []
    assert main(["export", f"checkpoint={tmp_path / 'in'}", f"out={tmp_path / 'out'}"]) == 0
    assert importing.write_imported(tmp_path / "out", tmp_path / "again", "out", "model")[1] == []


@pytest.mark.parametrize(
    ("family", "changes", "removed", "window"),
    [
        ("mistral", {"use_sliding_window": False}, "", 7),
        ("qwen2, windows", {}, "layer_types use_sliding_window", None),
        ("qwen2, windows", {}, "layer_types max_window_layers", None),  # it has fewer than 28 layers
    ],
)
def test_windows_are_those_that_transformers_reads(
    family: str, changes: dict, removed: str, window: int | None, copied: Folder, tmp_path: Path
) -> None:
    folder = copied(family)
    plain = json.loads((folder / "config.json").read_text())
    for key in removed.split():
        del plain[key]
    (folder / "config.json").write_text(json.dumps(plain | changes))
    assert main(["import", f"from={folder}", f"out={tmp_path / 'in'}"]) == 0
    assert read_checkpoint(tmp_path / "in").state["config"]["attention"]["window"] == window


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "qwen3"])
def test_an_unknown_setting_needs_a_proof(family: str, copied: Folder, tmp_path: Path, monkeypatch) -> None:
    folder = copied(family)
    edited(head_mixing=2)(folder)
    with pytest.raises(UserError, match=r"\(head_mixing\); import the model first.* from="):
        importing.imported_if_foreign(folder, tmp_path / "data")
    assert not list((tmp_path / "data" / "imported").iterdir())
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        with pytest.raises(UserError, match=r"\(head_mixing\), and nothing shows what it changes"):
            main(["import", f"from={folder}", f"out={tmp_path / 'in'}"])
    assert not (tmp_path / "in").exists()
    assert main(["import", f"from={folder}", f"out={tmp_path / 'in'}"]) == 0  # transformers ignores it too
    assert importing.imported_if_foreign(tmp_path / "in", tmp_path / "data") == tmp_path / "in"


@pytest.fixture
def with_evil_code(tmp_path: Path) -> Callable[[Path], None]:
    """Puts code that leaves a mark when it is imported wherever a file of transformers can name code."""

    def put(folder: Path) -> None:
        code = f"open({str(tmp_path / 'run')!r}, 'w')\nclass Evil: pass\n"
        for place in ("evil.py", "sub/evil.py", "custom_generate/generate.py", "modeling_llama.py", "tokenization.py"):
            (folder / place).parent.mkdir(exist_ok=True)
            (folder / place).write_text(code)
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"})
        )
        (folder / "generation_config.json").write_text(json.dumps({"custom_generate": str(folder)}))
        (folder / "adapter_config.json").write_text(json.dumps({"auto_mapping": {"base_model_class": "evil.Evil"}}))

    return put


@pytest.mark.parametrize("named", ["evil.Evil", "sub/evil.Evil", "sub.evil.Evil", "FOLDER--evil.Evil"])
@pytest.mark.parametrize("family", ["llama", "ours"])
def test_code_in_the_folder_is_not_run(
    family: str, named: str, models: Folder, copied: Folder, with_evil_code, tmp_path: Path
) -> None:
    """Our own modeling_andrea.py lies beside it unchanged."""
    folder = copied("gpt2")
    if family == "ours":
        assert main(["import", f"from={models('gpt_neox')}", f"out={tmp_path / 'first'}"]) == 0
        folder = tmp_path / "ours"
        assert main(["export", f"checkpoint={tmp_path / 'first'}", f"out={folder}"]) == 0
        assert (folder / "modeling_andrea.py").exists()
    with_evil_code(folder)
    named = named.replace("FOLDER", str(folder))
    edited(auto_map={kind: named for kind in ("AutoConfig", "AutoModel", "AutoModelForCausalLM")})(folder)
    assert main(["import", f"from={folder}", f"out={tmp_path / 'in'}"]) == 0
    assert json.loads((tmp_path / "in" / "proof.json").read_text())["proven"]
    assert not (tmp_path / "run").exists()


def test_the_proof_does_not_obey_how_the_folder_chooses_tokens(copied: Folder, tmp_path: Path) -> None:
    folder = copied()
    choosing = {"repetition_penalty": 1.5, "guidance_scale": 2.0, "num_beams": 3, "no_repeat_ngram_size": 1}
    (folder / "generation_config.json").write_text(json.dumps(choosing | {"do_sample": True, "temperature": 0.01}))
    edited(**choosing)(folder)
    assert main(["import", f"from={folder}", f"out={tmp_path / 'in'}"]) == 0
    assert json.loads((tmp_path / "in" / "proof.json").read_text())["n_greedy_tokens"] == 64


def test_without_transformers_it_says_that_it_is_not_proven(
    models: Folder, tmp_path: Path, monkeypatch, capsys
) -> None:
    def missing(*given):
        raise ImportError("No module named 'transformers'")

    monkeypatch.setattr(importing, "ImportedByTransformers", missing)
    assert main(["import", f"from={models('gpt2')}", f"out={tmp_path / 'in'}"]) == 0
    assert "not proven: transformers cannot be imported" in capsys.readouterr().out
    assert json.loads((tmp_path / "in" / "proof.json").read_text())["proven"] is False


# -------------------------------------------------------------------------------------------------------- nanoGPT


def nanogpt_weights(config: dict) -> dict[str, torch.Tensor]:
    """As nanoGPT's GPT.state_dict() names them, drawn at random."""
    width, draw = config["n_embd"], torch.Generator().manual_seed(0)
    shapes = {
        "transformer.wte.weight": (config["vocab_size"], width),
        "transformer.wpe.weight": (config["block_size"], width),
    }
    for layer in range(config["n_layer"]):
        block = f"transformer.h.{layer}."
        shapes |= {block + "ln_1.weight": (width,), block + "ln_2.weight": (width,)}
        shapes |= {block + "attn.c_attn.weight": (3 * width, width), block + "attn.c_proj.weight": (width, width)}
        shapes |= {block + "mlp.c_fc.weight": (4 * width, width), block + "mlp.c_proj.weight": (width, 4 * width)}
    shapes["transformer.ln_f.weight"] = (width,)
    if config["bias"]:
        shapes |= {
            name.replace("weight", "bias"): shape[:1]
            for name, shape in shapes.items()
            if ".h." in name or "ln_f" in name
        }
    weights = {f"_orig_mod.{name}": torch.randn(shape, generator=draw) * 0.3 for name, shape in shapes.items()}
    return weights | {"_orig_mod.lm_head.weight": weights["_orig_mod.transformer.wte.weight"]}


def nanogpt_logits(weights: dict[str, torch.Tensor], config: dict, tokens: torch.Tensor) -> torch.Tensor:
    """nanoGPT's formulas written out, for tokens (T,)."""
    from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

    width, head = config["n_embd"], config["n_head"]
    of = {name.removeprefix("_orig_mod.transformer."): weight for name, weight in weights.items()}
    x = of["wte.weight"][tokens] + of["wpe.weight"][: len(tokens)]
    for layer in range(config["n_layer"]):
        at = lambda name, layer=layer: (of[f"h.{layer}.{name}.weight"], of.get(f"h.{layer}.{name}.bias"))  # noqa: E731
        q, k, v = linear(layer_norm(x, (width,), *at("ln_1"), 1e-5), *at("attn.c_attn")).split(width, dim=-1)
        q, k, v = (each.view(len(tokens), head, -1).transpose(0, 1)[None] for each in (q, k, v))
        retrieved = scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1).reshape(len(tokens), width)
        x = x + linear(retrieved, *at("attn.c_proj"))
        x = x + linear(gelu(linear(layer_norm(x, (width,), *at("ln_2"), 1e-5), *at("mlp.c_fc"))), *at("mlp.c_proj"))
    return linear(layer_norm(x, (width,), of["ln_f.weight"], of.get("ln_f.bias"), 1e-5), of["wte.weight"])[:, :50257]


@pytest.mark.parametrize("bias", [False, True])
def test_a_file_of_nanogpt(bias: bool, tmp_path: Path, monkeypatch) -> None:
    pairs = itertools.islice((bytes(pair) for pair in itertools.product(range(256), repeat=2)), 50_000)
    ranks = {token: rank for rank, token in enumerate([*(bytes([value]) for value in range(256)), *pairs])}
    monkeypatch.setattr(importing, "load_gpt2", lambda path: RankTokenizer("gpt2", ranks))  # as large as GPT-2's
    config = {
        "n_layer": 2,
        "n_head": 3,
        "n_embd": 24,
        "block_size": 32,
        "bias": bias,
        "vocab_size": 50304,
        "dropout": 0.0,
    }
    weights = nanogpt_weights(config)
    torch.save(
        {"model": weights, "model_args": config, "iter_num": 7, "config": {"device": "cpu"}}, tmp_path / "ckpt.pt"
    )
    assert main(["import", f"from={tmp_path / 'ckpt.pt'}", f"out={tmp_path / 'in'}"]) == 0
    checkpoint = read_checkpoint(tmp_path / "in")
    assert checkpoint.tokenizer().kind == "gpt2"
    model, tokens = load_model(checkpoint, checkpoint.tokenizer()), torch.randint(50257, (30,))
    expected = nanogpt_logits(weights, config, tokens)
    torch.testing.assert_close(
        model.logits(model(tokens[None]))[0], expected, rtol=0, atol=1e-5 * float(expected.abs().max())
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": Bomb(), "model_args": {}}, "holds more than tensors and plain values"),
        ({"model": {}}, "is no checkpoint of nanoGPT"),
        ([1, 2], "is no checkpoint of nanoGPT"),
        ({"model": {"a": 1}, "model_args": {}}, "holds more than tensors"),
        ({"model": {}, "model_args": {"n_layer": 2}}, "model_args lack"),
        (
            {
                "model": {},
                "model_args": dict.fromkeys("n_layer n_head n_embd block_size bias".split(), 2)
                | {"vocab_size": torch.ones(3)},
            },
            "vocab_size of the checkpoint's model_args is not a number",
        ),
        (
            {
                "model": {},
                "model_args": dict.fromkeys("n_layer n_head n_embd block_size bias".split(), 2) | {"vocab_size": 65},
            },
            "65",
        ),
        (
            {
                "model": {"a": torch.ones(2)},
                "model_args": {
                    "n_layer": 275,
                    "n_head": 2,
                    "n_embd": 8,
                    "block_size": 8,
                    "bias": True,
                    "vocab_size": 50257,
                },
            },
            "holds 1 weights, too few for its 275 layers",
        ),
    ],
)
def test_hostile_files_of_nanogpt(content, message: str, tmp_path: Path, capsys) -> None:
    torch.save(content, tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match=message):
        main(["import", f"from={tmp_path / 'ckpt.pt'}", f"out={tmp_path / 'in'}"])
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt.pt"]
    assert "a pickle was run" not in capsys.readouterr().out


@pytest.mark.parametrize("share", [0.0, 0.01, 0.9])
def test_half_a_file_of_nanogpt(share: float, tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.zeros(1000)}, "model_args": {}}, tmp_path / "ckpt.pt")
    truncated("ckpt.pt", share)(tmp_path)
    with pytest.raises(UserError, match=r"is no checkpoint of nanoGPT, or damaged|holds more than tensors"):
        main(["import", f"from={tmp_path / 'ckpt.pt'}", f"out={tmp_path / 'in'}"])


@pytest.mark.parametrize(
    "weight",
    [
        torch.tensor(1.0),
        torch.ones(2, dtype=torch.int64),
        torch.ones(2).to_sparse(),
        torch.tensor([float("nan")]),
        torch.ones(2).to(torch.float8_e4m3fn),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.ones(1).expand(1 << 40),
    ],
    ids=["a number", "whole numbers", "sparse", "not finite", "float8", "nested", "more than the file holds"],
)
def test_a_file_of_nanogpt_holds_arrays_of_finite_numbers(weight: torch.Tensor, tmp_path: Path) -> None:
    torch.save({"model_args": {}, "model": {"transformer.wte.weight": weight}}, tmp_path / "ckpt.pt")
    words = "transformer.wte.weight is not an array of finite numbers"
    if weight.is_nested:  # torch 2.15 does not open it
        words += "|holds more than tensors"
    with pytest.raises(UserError, match=words):
        main(["import", f"from={tmp_path / 'ckpt.pt'}", f"out={tmp_path / 'in'}"])
