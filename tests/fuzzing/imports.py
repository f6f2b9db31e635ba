"""Folders as transformers writes them and files of nanoGPT, one part of which is hostile; code lies wherever a file can name it."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import strategies as st

from andrea.interop import proof
from andrea.interop.importing import families, import_model
from andrea.text.tokenizer import train_bpe
from fuzzing.checkpoints import safetensors_files
from fuzzing.raw_values import DEEP, NASTY, any_text, damaged, json_text, numbers, replaced, wild_json
from fuzzing.trial import Handler

CKPT = "ckpt.pt"
JSON_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "weights.index.json"]
CODE = ["evil.py", "sub/evil.py", "custom_generate/generate.py", "modeling_llama.py", "modeling_andrea.py"]
FEW = {"N_FUZZ_TEXTS": 20, "N_GREEDY": 4, "LONGEST_WINDOW": 32}

steps = st.recursive(
    st.one_of(
        st.fixed_dictionaries(
            {"type": st.sampled_from(["NFC", "NFKD", "Lowercase", "Replace", "Prepend", "ByteLevel", "Split", "Digits",
                                      "Metaspace", "Precompiled", "Strip", "Punctuation", "Whitespace", "BPE"])},
            optional={
                "pattern": st.one_of(
                    st.builds(lambda text: {"Regex": text}, st.sampled_from(["(a+)+$", "(", "", "(?:)", "a{999}{999}", ".*"])),
                    st.builds(lambda text: {"String": text}, any_text),
                ),
                "content": st.sampled_from(["", "a" * 9999]),
                "prepend": st.sampled_from(["", "a" * 9999]),
                "behavior": st.sampled_from(["Isolated", "Removed", "MergedWithNext", "Contiguous", "x"]),
                "invert": st.booleans(),
                "individual_digits": st.booleans(),
                "add_prefix_space": st.booleans(),
                "trim_offsets": st.booleans(),
                "use_regex": st.booleans(),
                "precompiled_charsmap": st.sampled_from(["", "AAAA"]),
            },
        ),
        wild_json,
    ),
    lambda inner: st.builds(
        lambda key, parts, times: {"type": "Sequence", key: parts * times},
        st.sampled_from(["normalizers", "pretokenizers", "decoders", "processors"]),
        st.lists(inner, max_size=3),
        st.sampled_from([1, 1, 1, 20]),
    ),
    max_leaves=4,
)  # fmt: skip
parts = st.one_of(
    st.tuples(st.sampled_from(["normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding"]), steps),
    st.tuples(st.just("padding"), st.builds(lambda n: {"strategy": {"Fixed": n}, "direction": "Right", "pad_to_multiple_of":
              None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}, st.sampled_from([1, 10**9, 2**63]))),
    st.tuples(st.sampled_from(["model.dropout", "model.unk_token", "model.continuing_subword_prefix", "model.merges",
                               "model.end_of_word_suffix", "model.fuse_unk", "model.type", "model.vocab"]),
              st.one_of(wild_json, st.sampled_from(["x" * 99, "é", "", 0.5, [["a", "b"]], ["a"], {"a": 2**32}]))),
    st.tuples(st.just("added"), st.fixed_dictionaries(
        {"id": numbers, "content": any_text, "special": st.booleans(), "normalized": st.booleans(), "lstrip": st.booleans(),
         "rstrip": st.booleans(), "single_word": st.booleans()})),
)  # fmt: skip
settings = st.sampled_from(
    "dtype pad_token_id eos_token_id architectures auto_map id2label num_labels repetition_penalty guidance_scale num_beams "
    "use_cache output_attentions is_decoder tie_encoder_decoder problem_type rope_parameters rope_scaling layer_types "
    "sliding_window head_dim n_inner quantization_config max_position_embeddings vocab_size initializer_range task_specific_params "
    "attn_implementation _attn_implementation experts_implementation generation_config torch_dtype name_or_path custom_generate "
    "tokenizer_class watermarking_config cache_implementation num_hidden_layers hidden_size model_type".split()
)
code_names = st.sampled_from(
    ["evil.Evil", "sub/evil.Evil", "sub.evil.Evil", "PLACE--evil.Evil", "modeling_andrea.Evil"]
)
odd_tensors = st.sampled_from(["float8", "nested", "sparse", "expanded", "complex", "bool", "empty", "number", "large", "meta",
                               "nan", "deep", "quantized"])  # fmt: skip
imports = st.one_of(
    st.tuples(st.just("tree"), st.sampled_from(JSON_FILES), wild_json | numbers, st.integers()),
    st.tuples(st.just("setting"), st.sampled_from(JSON_FILES[:2]),
              st.tuples(settings, wild_json | numbers | st.sampled_from(NASTY)), st.integers()),
    st.tuples(st.just("part"), st.just("tokenizer.json"), parts, st.integers()),
    st.tuples(st.just("code"), st.just("config.json"), code_names, st.integers()),
    st.tuples(st.just("tensors"), st.just("model.safetensors"), safetensors_files, st.integers()),
    st.tuples(st.just("header"), st.just("model.safetensors"), wild_json | st.just([1] * 100_000), st.integers()),
    st.tuples(st.just("bits"), st.sampled_from(["config.json", "tokenizer.json", "model.safetensors", CKPT]), st.none(),
              st.integers()),
    st.tuples(st.just("raw"), st.sampled_from([*JSON_FILES, "model.safetensors", CKPT]),
              st.binary(max_size=60) | st.sampled_from([DEEP.encode(), b"null", b"[]", b"{}", b"9" * 5000]), st.integers()),
    st.tuples(st.just("ckpt"), st.just(CKPT), st.one_of(wild_json, numbers, odd_tensors), st.integers()),
)  # fmt: skip


def odd_tensor(kind: Any) -> Any:
    """The tensor of a name in `odd_tensors`; what is no such name, as it is."""
    made = {
        "float8": lambda: torch.zeros(4, 4).to(torch.float8_e4m3fn),
        "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        "sparse": lambda: torch.eye(4).to_sparse(),
        "expanded": lambda: torch.zeros(1).expand(1 << 40),
        "complex": lambda: torch.zeros(4, dtype=torch.complex64),
        "bool": lambda: torch.ones(4, 4, dtype=torch.bool),
        "empty": lambda: torch.zeros(0, 5),
        "number": lambda: torch.tensor(3.0),
        "large": lambda: torch.zeros(1 << 18),
        "meta": lambda: torch.zeros(4, 4, device="meta"),
        "nan": lambda: torch.tensor([float("nan")] * 16),
        "deep": lambda: torch.zeros([1] * 60),
        "quantized": lambda: torch.quantize_per_tensor(torch.zeros(4), 1.0, 0, torch.qint8),
    }
    return made[kind]() if isinstance(kind, str) and kind in made else kind


def hostile_folder(content: dict[str, bytes], tried: tuple[str, str, Any, int], place: Path) -> dict[str, bytes]:
    """`content`, the files of a good folder by name, with one of them changed as `tried` says."""
    what, name, new, rng_seed = tried
    files, rng = dict(content), random.Random(rng_seed)
    if what in ("raw", "tensors"):
        files[name] = new
    elif what == "bits":
        files[name] = damaged(content[name], rng)
    elif what == "header":
        size = 8 + int.from_bytes(content[name][:8], "little")
        header = json_text(replaced(json.loads(content[name][8:size]), new, rng))
        files[name] = len(header).to_bytes(8, "little") + header + content[name][size:]
    elif what == "ckpt":
        tree = torch.load(io.BytesIO(content[name]), weights_only=True)
        group = tree[rng.choice(["model", "model_args"])]
        group[rng.choice([*group, "other"])] = odd_tensor(new)
        stream = io.BytesIO()
        torch.save(tree, stream)
        files[name] = stream.getvalue()
    else:
        tree = json.loads(content[name])
        if what == "tree":
            tree = replaced(tree, new, rng)
        elif what == "code":
            tree["auto_map"] = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), new.replace("PLACE", str(place)))
        elif new[0] == "added":
            tree["added_tokens"].append(new[1])
        else:
            group, _, key = new[0].rpartition(".")
            (tree[group] if group else tree)[key] = new[1]
        files[name] = json_text(tree)
    return files


def good_folders() -> Iterator[dict[str, bytes]]:
    """The files of small models by name: one of Llama, one of GPT-2, one of nanoGPT."""
    import tempfile

    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    from andrea.interop.hugging_face.tokenizer_files import tokenizer_json

    sizes = {"vocab_size": 270, "eos_token_id": 265, "bos_token_id": 265}
    llama = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    gpt2 = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 64}
    torch.manual_seed(0)
    models = [
        LlamaForCausalLM(LlamaConfig(**sizes, **llama, max_position_embeddings=64)),
        GPT2LMHeadModel(GPT2Config(**sizes, **gpt2)),
    ]
    tokenizer = json_text(tokenizer_json(small_tokenizer()))
    for model in models:
        with tempfile.TemporaryDirectory() as place:
            model.save_pretrained(place)
            files = {path.name: path.read_bytes() for path in Path(place).iterdir()}
        yield files | {"tokenizer.json": tokenizer, "tokenizer_config.json": b"{}", "weights.index.json": b"{}"}
    names = {name.removeprefix("x"): each for name, each in models[1].state_dict().items()}
    weights = {name: each.T if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else each
               for name, each in names.items()}  # fmt: skip
    weights = {name: each.contiguous() for name, each in weights.items()}
    weights["transformer.wte.weight"] = weights["lm_head.weight"] = torch.zeros(small_tokenizer().n_vocab, 8)
    arguments = {
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "block_size": 64,
        "bias": True,
        "vocab_size": small_tokenizer().n_vocab,
    }
    stream = io.BytesIO()
    torch.save({"model": weights, "model_args": arguments}, stream)
    yield {CKPT: stream.getvalue()}


def small_tokenizer() -> Any:
    return train_bpe(["aaaa bbbb abab the fox"] * 3, 266)


@contextmanager
def few_tokens() -> Iterator[None]:
    """A proof of few texts, and nanoGPT's files with a vocabulary that is smaller than GPT-2's."""
    tokenizer = small_tokenizer()
    with ExitStack() as stack:
        for name, value in FEW.items():
            stack.enter_context(patch.object(proof, name, value))
        stack.enter_context(patch.object(import_model, "MOST_TOKENS", 60))
        stack.enter_context(patch.object(proof, "read_text", lambda text: "the fox abab don't é 12\n" * 9))
        stack.enter_context(patch.object(families, "N_GPT2", tokenizer.n_vocab))
        stack.enter_context(patch.object(import_model, "load_gpt2", lambda path: tokenizer))
        yield


def make_imports(folder: Path) -> Handler:
    """In this process: an abort ends the fuzzing. The command itself reads in a process of its own."""
    *folders, ckpt = good_folders()
    place, out, mark = folder / "hostile", folder / "imported", folder / "code-was-run"

    def handle(tried: tuple[str, str, Any, int]) -> None:
        for each in (place, out):
            shutil.rmtree(each, ignore_errors=True)
        content = ckpt if tried[1] == CKPT else folders[tried[3] % len(folders)]
        for name in CODE:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(f"open({str(mark)!r}, 'w')\nclass Evil: pass\n")
        for name, data in hostile_folder(content, tried, place).items():
            (place / name).write_bytes(data)
        source = place / CKPT if tried[1] == CKPT else place
        try:
            with few_tokens(), redirect_stdout(io.StringIO()):
                import_model.written_and_proven(source, out, str(source), "hostile", None)
        finally:
            assert not mark.exists(), "code in the folder was run"

    return handle
