"""Export to a folder that transformers loads: weights, configuration, tokenizer, and the model's code where it needs any."""

import copy
import functools
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from andrea.checkpoint.tensors import write_tensors
from andrea.interop.architectures import TOLERANCE, HuggingFaceClass, Trained, choose_class
from andrea.interop.hugging_face.tokenizer_files import write_tokenizer
from andrea.interop.importing.source import INDEX, WEIGHTS
from andrea.interop.proof import OtherProgram, Target
from andrea.model.gpt import GPT

# -------------------------------------------------------------------------------------------------------------- program
# transformers as the other program of a proof: loads an exported folder, and gives logits, token ids and greedy tokens.


@functools.cache
def code_cache() -> tempfile.TemporaryDirectory:
    """The folder to which transformers copies the code of exported folders, in place of the user's cache.

    It is removed when the program ends.
    """
    return tempfile.TemporaryDirectory(prefix="andrea-export-", ignore_cleanup_errors=True)


class LoadedByTransformers(OtherProgram):
    """A model in fp32 with eager attention, which a subclass loads. Raises ImportError without transformers."""

    LOADING: ClassVar[dict[str, Any]] = {"dtype": torch.float32, "attn_implementation": "eager"}
    model: Any

    def __init__(self) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import transformers

        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()  # it warns of texts that are longer than a window
        self.name, self.transformers = f"transformers {transformers.__version__}", transformers

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        return self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()

    def greedy(self, tokens: Sequence[int], n_new: int) -> list[int]:
        prompt = torch.tensor([list(tokens)])
        how = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": n_new}
        return self.model.generate(prompt, **how)[0, len(tokens) :].tolist()


@final
class Transformers(LoadedByTransformers):
    """A model of an exported folder, and its tokenizer. The folder's code is a copy of ours."""

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("HF_MODULES_CACHE", code_cache().name)
        super().__init__()
        kind = self.transformers.AutoModelForCausalLM
        self.model = kind.from_pretrained(folder, trust_remote_code=True, **self.LOADING).eval()
        self.tokenizer = self.transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self.tokenizer(list(texts), split_special_tokens=True)["input_ids"]


# ----------------------------------------------------------------------------------------------------------- the folder

MODEL_CODE = "modeling_andrea.py"
LARGEST_SHARD_BYTES = 5 * 10**9
SAMPLING = {"do_sample": True, "temperature": 1.0}  # the likeliest tokens of a small model repeat themselves
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def write_folder(folder: Path, trained: Trained, chosen: HuggingFaceClass, dtype: str) -> None:
    """Write all files but the proof and the card to an existing folder. dtype: one of DTYPES. Raises OSError, UserError."""
    end = trained.tokenizer.end_of_text
    special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    config = {
        "architectures": [chosen.name],
        "model_type": chosen.model_type,
        "dtype": str(DTYPES[dtype]).removeprefix("torch."),
        "tie_word_embeddings": trained.gpt.head is None,
        **chosen.own_config(trained),
    }
    write_json(folder / "config.json", config | special)
    ends = {"eos_token_id": list(trained.tokenizer.ends)} if trained.tokenizer.special else {}
    write_json(folder / "generation_config.json", special | ends | SAMPLING)
    write_tokenizer(folder, trained.tokenizer, trained.model.sequence_length)
    if chosen.is_remote:
        (folder / MODEL_CODE).write_bytes(Path(__file__).with_name(MODEL_CODE).read_bytes())
    write_weights(folder, chosen.weights(trained), DTYPES[dtype])


def write_weights(folder: Path, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Write the weights to one safetensors file, or to several with an index if they are large. Raises OSError."""
    shards = list(shards_of(weights, dtype.itemsize))
    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
        file_of = {weight: name for name, shard in zip(names, shards, strict=True) for weight in shard}
        size = dtype.itemsize * sum(weight.numel() for weight in weights.values())
        index = {"metadata": {"total_size": size}, "weight_map": file_of}
        write_json(folder / INDEX, index)
    for name, shard in zip(names, shards, strict=True):
        write_tensors(folder / name, {weight: weights[weight].to(dtype) for weight in shard}, {"format": "pt"})
        os.chmod(folder / name, (folder / "config.json").stat().st_mode)  # it may be readable by its owner alone


def shards_of(weights: dict[str, Tensor], itemsize: int) -> Iterator[list[str]]:
    """The names of the weights in each file, of at most LARGEST_SHARD_BYTES unless one weight is larger."""
    shard: list[str] = []
    filled = 0
    for name, weight in weights.items():
        size = weight.numel() * itemsize
        if shard and filled + size > LARGEST_SHARD_BYTES:
            yield shard
            shard, filled = [], 0
        shard.append(name)
        filled += size
    yield shard


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


# ----------------------------------------------------------------------------------------------------------- the target

USAGE = """\
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained({folder}{trust})
    model = AutoModelForCausalLM.from_pretrained({folder}{trust})
    tokens = tokenizer("{prompt}", return_tensors="pt")
    print(tokenizer.decode(model.generate(**tokens, max_new_tokens=64, do_sample=True, temperature=0.8)[0]))
"""


@final
class HuggingFace(Target):
    package = "transformers"
    replaced = (WEIGHTS, "model-*-of-*.safetensors", INDEX)

    def __init__(self, trained: Trained, dtype: str) -> None:
        """dtype: one of DTYPES. Raises UserError for a model that transformers cannot hold."""
        self.trained, self.dtype = trained, dtype
        self.chosen, self.why = choose_class(trained)
        self.what, self.share = self.chosen.name, TOLERANCE

    def write(self, folder: Path) -> None:
        write_folder(folder, self.trained, self.chosen, self.dtype)

    def rounded_gpt(self) -> GPT:
        kind = DTYPES[self.dtype]
        if kind == torch.float32:
            return self.trained.gpt
        return copy.deepcopy(self.trained.gpt).to(kind).float()

    def open(self, folder: Path) -> Transformers:
        return Transformers(folder)

    def usage(self, folder: str, hub: str | None, prompt: str) -> str:
        trust = ", trust_remote_code=True" if self.chosen.is_remote else ""
        return USAGE.format(folder=quoted(hub or folder), trust=trust, prompt=prompt)


def quoted(text: str) -> str:
    """A string of Python's, for a line of code."""
    return json.dumps(text, ensure_ascii=False)
