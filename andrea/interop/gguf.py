"""Export to a GGUF file, which llama.cpp and the programs built on it load.

D = d_head. llama.cpp turns neighbouring entries of a query in the architecture llama, and entries D/2 apart, as we do,
in the others. The rows of the matrices of queries and keys are reordered for the first kind.
"""

import copy
import importlib.util
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from andrea.config import UserError
from andrea.interop.architectures import (
    GGUF_NAMES,
    NO_ROTATION,
    ODD,
    TOLERANCE,
    Architecture,
    Trained,
    anything,
    fewest_differences,
    joined_weights,
    normed_weights,
    weights_of,
)
from andrea.interop.hugging_face.target import quoted
from andrea.interop.hugging_face.tokenizer_files import visible_merges, visible_tokens
from andrea.interop.proof import LONGEST_WINDOW, OtherProgram, Target
from andrea.model.gpt import GPT
from andrea.model.positions import scaled
from andrea.text.chat import CHAT_TEMPLATE, END
from andrea.text.tokenizer import Tokenizer

# ---------------------------------------------------------------------------------------------------- the architectures


def reordered_weights(trained: Trained) -> dict[str, Tensor]:
    """Our weights, with the rows of queries and keys reordered."""
    return {
        name: neighbours_first(each, trained.model.head_width) if ".query." in name or ".key." in name else each
        for name, each in weights_of(trained).items()
    }


def neighbours_first(rows: Tensor, d_head: int) -> Tensor:
    """Rows (H D, …) of each head in the order 0, D/2, 1, D/2 + 1, …: pairs that turn together become neighbours."""
    return rows.unflatten(0, (-1, 2, d_head // 2)).transpose(1, 2).flatten(0, 2)


def is_interpolation(scaling: tuple[float, ...] | None) -> bool:
    """Whether rotary_scaling is none, or the factor alone."""
    return scaling is None or len(scaling) == 1


ARCHITECTURES = (
    Architecture("llama", {"model.rotary_scaling": anything}, reordered_weights, GGUF_NAMES),
    Architecture(
        "qwen3",
        {
            "model.n_head": anything,
            "model.qk_norm": {True, "learned"},
            "model.rotary_scaling": is_interpolation,
        },
        normed_weights,
        GGUF_NAMES,
    ),
    Architecture(
        "gpt2",
        {
            "model.d_head": {None},  # llama.cpp reads matrices of d_model rows in this architecture
            "model.norm": {"layernorm"},
            "model.mlp": {"gelu", "gelu_exact"},  # both by the table
            "model.bias": {False, True},
            "model.position": {"learned", "none", ODD},
        },
        joined_weights,
        GGUF_NAMES,
    ),
)


def choose_architecture(trained: Trained) -> Architecture:
    """The architecture that computes the same function. Raises UserError if none does."""
    nearest, lacking = fewest_differences(trained, ARCHITECTURES)
    if lacking:
        raise UserError(
            f"to=gguf: no architecture of llama.cpp holds this model; the nearest, {nearest.name}, lacks {', '.join(lacking)}; "
            f"train with model=nano-qwen3, which every program reads, or export with to=hf"
        )
    return nearest


def weights_for(trained: Trained, architecture: Architecture) -> dict[str, Tensor]:
    """The weights, and how many times slower each pair of a head turns by model.rotary_scaling, (R/2,) fp32, if it does."""
    weights, model = architecture.weights(trained), trained.model
    if model.position == "rotary" and not is_interpolation(model.rotary_scaling):
        pair = torch.arange(0, model.n_rotated, 2, dtype=torch.float64) / model.n_rotated
        frequency = model.rotary_base**-pair
        weights["rope_freqs.weight"] = (frequency / scaled(frequency, *model.rotary_scaling)).float()
    return weights


# ------------------------------------------------------------------------------------------------------------- the file

BLOCK = 32  # numbers that share a factor in IN_BLOCKS
IN_BLOCKS = ("q8_0", "q4_0")


def check_file(trained: Trained, dtype: str) -> None:
    """Raise UserError for a tokenizer or a type that a GGUF file cannot hold."""
    model, kind = trained.model, trained.tokenizer.kind
    if kind == "byte":
        raise UserError(
            "to=gguf: llama.cpp has no tokenizer of single bytes; train with tokenizer=bpe, or export with to=hf"
        )
    if kind == "hf":
        raise UserError("to=gguf: the tokenizer of another model is not written to a GGUF file; export with to=hf")
    odd = [f"model.{key}={n}" for key in ("d_model", "d_mlp") if (n := getattr(model, key)) % BLOCK]
    if model.d_head is not None and model.d_attended % BLOCK:
        odd.append(f"model.n_head={model.n_head} times model.d_head={model.d_head}")
    if dtype in IN_BLOCKS and odd:
        raise UserError(f"dtype={dtype} needs multiples of {BLOCK}, got {', '.join(odd)}; export with dtype=f16")


def kind_of(gguf: Any, name: str, n_dimension: int, dtype: str) -> Any:
    """The type in which a weight is stored."""
    is_rounded = n_dimension == 2 and not name.startswith("position")
    return getattr(gguf.GGMLQuantizationType, dtype.upper() if is_rounded else "F32")


def add_model(writer: Any, trained: Trained) -> None:
    import gguf

    model = trained.model
    writer.add_name(trained.name)
    writer.add_context_length(model.sequence_length)
    writer.add_embedding_length(model.d_model)
    writer.add_block_count(model.n_layer)
    writer.add_feed_forward_length(model.d_mlp)
    writer.add_head_count(model.n_head)
    writer.add_head_count_kv(model.n_head if writer.arch == "gpt2" else trained.model.n_key_head)
    writer.add_vocab_size(trained.tokenizer.n_vocab)
    if model.norm == "rmsnorm":
        writer.add_layer_norm_rms_eps(model.norm_epsilon)
    else:
        writer.add_layer_norm_eps(model.norm_epsilon)
    if writer.arch == "gpt2":
        return
    writer.add_key_length(model.head_width)
    writer.add_value_length(model.head_width)
    writer.add_rope_dimension_count(model.n_rotated)
    writer.add_rope_freq_base(model.rotary_base)
    factor = NO_ROTATION if model.position == "none" else None
    if model.position == "rotary" and model.rotary_scaling is not None and len(model.rotary_scaling) == 1:
        (factor,) = model.rotary_scaling
    if factor is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(factor)


def add_tokenizer(writer: Any, tokenizer: Tokenizer) -> None:
    """GPT-2's kind of tokenizer, with GPT-2's pattern, and end-of-text in front of a text.

    llama.cpp does not read patterns from the file: it knows some by name.
    """
    import gguf

    end = tokenizer.end_of_text
    kinds = [gguf.TokenType.NORMAL] * tokenizer.n_vocab
    for token in (end, *tokenizer.special.values()):
        kinds[token] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(visible_tokens(tokenizer))
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{first} {second}" for first, second in visible_merges(tokenizer)])
    for add_id in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add_id(end)
    if tokenizer.special:
        writer.add_eot_token_id(tokenizer.special[END])
        writer.add_chat_template(CHAT_TEMPLATE)
    writer.add_add_bos_token(True)


# -------------------------------------------------------------------------------------------------------------- program
# llama.cpp as the other program of a proof, through llama-cpp-python.

GGML_F32 = 0  # ggml's number of the type of fp32


@final
class LlamaCpp(OtherProgram):
    """The model of a GGUF file, with a cache in fp32. Raises ImportError without llama-cpp-python."""

    def __init__(self, path: Path, n_token: int) -> None:
        """n_token: the largest number of tokens that it is asked to read."""
        import llama_cpp

        self.name = f"llama-cpp-python {llama_cpp.__version__}"
        self.model = llama_cpp.Llama(
            str(path),
            n_ctx=n_token,
            n_batch=n_token,
            n_threads=torch.get_num_threads(),
            n_threads_batch=torch.get_num_threads(),
            logits_all=True,
            type_k=GGML_F32,
            type_v=GGML_F32,
            verbose=False,
        )

    def logits(self, tokens: Sequence[int]) -> Tensor:
        self.model.reset()
        self.model.eval(list(tokens))
        return torch.from_numpy(self.model.scores[: len(tokens)].copy())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.model.tokenize(text.encode(), add_bos=True, special=False) for text in texts]

    def greedy(self, tokens: Sequence[int], n_new: int) -> list[int]:
        chosen: list[int] = []
        self.model.reset()
        self.model.eval(list(tokens))
        while len(chosen) < n_new:
            chosen.append(int(self.model.scores[self.model.n_tokens - 1].argmax()))
            if chosen[-1] == self.model.token_eos():
                break
            self.model.eval(chosen[-1:])
        return chosen


# ----------------------------------------------------------------------------------------------------------- the target

# Tolerances as shares of the largest logit, about five times what was measured: llama.cpp rounds activations too.
GELU = 1e-3  # llama.cpp's is a table of fp16 numbers
ROUNDED = {"f16": 2e-3, "bf16": 1e-2, "q8_0": 3e-2, "q4_0": 3e-2}
LEAST = 1e-4

USAGE = """\
    llama-cli -m {file} -p "{prompt}" -n 64            # a program of llama.cpp
    llama-server -m {file}                              # the same, with a web page

    from llama_cpp import Llama                                      # pip install llama-cpp-python
    print(Llama({quoted_file})("{prompt}", max_tokens=64)["choices"][0]["text"])
"""

HUB_USAGE = """\
    llama-cli -hf {hub} -p "{prompt}" -n 64                         # a program of llama.cpp
    llama-server -hf {hub}                                           # the same, with a web page

    from llama_cpp import Llama                                      # pip install llama-cpp-python huggingface_hub
    model = Llama.from_pretrained("{hub}", "model.gguf")
    print(model("{prompt}", max_tokens=64)["choices"][0]["text"])
"""


@final
class Gguf(Target):
    package = "llama-cpp-python"
    least = LEAST

    def __init__(self, trained: Trained, dtype: str) -> None:
        """dtype: f32, f16, bf16, q8_0 or q4_0, of the matrices; vectors and learned positions stay fp32.

        Raises UserError for a model, a tokenizer or a type that the file cannot hold, and without the package gguf.
        """
        self.trained, self.dtype = trained, dtype
        self.architecture = choose_architecture(trained)
        check_file(trained, dtype)
        if importlib.util.find_spec("gguf") is None:
            raise UserError('to=gguf needs the package gguf; run: pip install gguf (or pip install -e ".[interop]")')
        self.what = self.architecture.name
        self.why = f"llama.cpp's architecture {self.what} computes the same function"
        self.share = max(GELU if self.what == "gpt2" else TOLERANCE, ROUNDED.get(dtype, 0.0))

    def write(self, folder: Path) -> None:
        import gguf

        writer = gguf.GGUFWriter(folder / "model.gguf", self.architecture.name)
        add_model(writer, self.trained)
        add_tokenizer(writer, self.trained.tokenizer)
        writer.add_file_type(gguf.LlamaFileType["ALL_F32" if self.dtype == "f32" else f"MOSTLY_{self.dtype.upper()}"])
        for name, weight in weights_for(self.trained, self.architecture).items():
            kind = kind_of(gguf, name, weight.ndim, self.dtype)
            data = gguf.quants.quantize(weight.float().contiguous().numpy(), kind)
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    @torch.no_grad()
    def rounded_gpt(self) -> GPT:
        if self.dtype == "f32":
            return super().rounded_gpt()
        import gguf

        found = copy.deepcopy(self.trained.gpt)
        for name, weight in found.named_parameters():
            kind = kind_of(gguf, name, weight.ndim, self.dtype)
            stored = gguf.quants.quantize(weight.numpy(), kind)
            weight.copy_(torch.from_numpy(gguf.quants.dequantize(stored, kind).reshape(weight.shape)))
        return found

    def open(self, folder: Path) -> LlamaCpp:
        return LlamaCpp(folder / "model.gguf", min(self.trained.model.sequence_length, LONGEST_WINDOW))

    def usage(self, folder: str, hub: str | None, prompt: str) -> str:
        if hub:
            return HUB_USAGE.format(hub=hub, prompt=prompt)
        file = f"{folder}/model.gguf"
        return USAGE.format(file=shlex.quote(file), quoted_file=quoted(file), prompt=prompt)
