"""What `sample.py` does: find the checkpoint, say what it is, write text to the terminal as it is made."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from andrea.checkpoint import Checkpoint, Damaged, locate
from andrea.config import MOST_SAMPLED_TOKENS, AttentionConfig, ModelConfig, SampleConfig, UserError, parse
from andrea.generation.engine import Engine, GeneratedToken, Request
from andrea.generation.kernels.native import library
from andrea.generation.sampling import Sampling
from andrea.model.gpt import GPT
from andrea.text.tokenizer import Tokenizer

WEIGHT_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def sample(run: SampleConfig, device: torch.device, dtype: torch.dtype) -> int:
    """Print what was loaded, then the samples; the exit code. Raises UserError."""
    prompt = read_prompt(run.prompt)
    checkpoint = locate(run.checkpoint, Path(run.runs_dir), report=lambda line: print(line, file=sys.stderr))
    tokenizer = checkpoint.tokenizer()
    model = load_model(checkpoint, tokenizer).to(device)
    int8 = run.precision == "int8"
    if int8 and device.type == "cpu" and library() is None:
        raise UserError("precision=int8 needs a C++ compiler on a CPU; install g++, or use precision=bf16")
    if int8 and device.type != "cpu" and run.compile == "off":
        raise UserError(f"precision=int8 gains nothing on {device} without compile=on; add it, or use precision=bf16")
    if run.compile == "on" and device.type != "cuda":
        raise UserError(
            f"compile=on is for a CUDA card, got device={device.type}, where it gains nothing; use compile=off"
        )
    engine = Engine(model, tokenizer, dtype=dtype, int8=int8, compiled=run.compile == "on")
    request = Request(
        max_new_tokens=run.max_new_tokens,
        num_samples=run.num_samples,
        seed=run.seed,
        stop=tuple(run.stop),
        guess=run.guess,
        sampling=Sampling(run.temperature, run.top_k, run.top_p, run.min_p, run.repetition_penalty),
    )
    prompts = [prompt] if run.prompts is None else read_lines(run.prompts)
    tokens = [engine.encode(each) for each in prompts]  # one that is too long is refused before anything is shown
    if len(prompts) * run.max_new_tokens > MOST_SAMPLED_TOKENS:
        raise UserError(
            f"prompts={run.prompts} has {len(prompts)} prompts, and {len(prompts)} times max_new_tokens="
            f"{run.max_new_tokens} is more than the {MOST_SAMPLED_TOKENS} tokens that are held at a time; lower one of them"
        )
    numbers = str(dtype).removeprefix("torch.") + (" with matrices in int8" if int8 else "")
    show(describe(checkpoint, model, tokenizer, f"{device}, {numbers}") + "\n\n")
    if run.prompts is not None:
        show_texts(prompts, engine.stream_all(tokens, request))
    elif run.interactive:
        converse(engine, prompt, request)
    else:
        show_samples(engine, prompt, tokens[0], request)
    return 0


def read_prompt(prompt: str) -> str:
    """The prompt itself, the content of FILE for @FILE, or standard input for -. Raises UserError."""
    if prompt == "-":
        content, origin = sys.stdin.buffer.read(), "standard input"
    elif prompt.startswith("@"):
        path = Path(prompt[1:])
        if not os.path.isfile(path):  # False, too, for what no file can be named
            raise UserError(
                f"prompt={prompt}: there is no file {str(path)!r}; @FILE reads one, and a text that begins with @ "
                f"comes through standard input with prompt=-"
            )
        content, origin = path.read_bytes(), str(path)
    else:
        return prompt
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"prompt={prompt}: {origin} is not UTF-8 text (byte {error.start}); convert it first") from None


def read_lines(file: str) -> list[str]:
    """The file's lines, but for empty ones. Raises UserError."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"prompts={file}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}") from None
    prompts = [line for line in lines if line]
    if not prompts:
        raise UserError(f"prompts={file}: there is no prompt in it; write one on each line")
    return prompts


def load_model(checkpoint: Checkpoint, tokenizer: Tokenizer) -> GPT:
    """The checkpoint's model, fp32, on the CPU. Raises Damaged when configuration, weights and tokenizer disagree."""
    config = checkpoint.state["config"]
    try:
        model_config = parse(ModelConfig, config.get("model"), "model")
        attention_config = parse(AttentionConfig, config.get("attention"), "attention")
    except UserError as error:
        raise Damaged(f"{checkpoint.path} is of a version this program does not read: {error}") from None
    written = checkpoint.state.get("tokenizer", tokenizer.identity)
    if written != tokenizer.identity:
        raise Damaged(f"{checkpoint.path} was trained with tokenizer {written}, its folder holds {tokenizer.identity}")
    tensors = checkpoint.model_tensors()
    if model_config.n_layer > len(tensors):  # said before so many layers are made
        raise Damaged(f"{checkpoint.path} has {len(tensors)} tensors, too few for model.n_layer={model_config.n_layer}")
    with torch.device("meta"):
        model = GPT(model_config, attention_config, tokenizer.n_vocab, tokenizer.end_of_text)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise Damaged(
                f"{checkpoint.path} does not fit its configuration and its tokenizer {tokenizer.identity}: {name} is "
                f"{found.get(name, 'absent')} in the file, {expected.get(name, 'absent')} in the model"
            )
    for name, tensor in tensors.items():
        if tensor.dtype not in WEIGHT_TYPES:
            raise Damaged(f"{checkpoint.path} is damaged: {name} is {tensor.dtype}, no type of weights")
    model = GPT(
        model_config, attention_config, tokenizer.n_vocab, tokenizer.end_of_text
    )  # buffers (rotary tables) are computed, not stored
    model.load_state_dict(tensors)
    return model.eval().requires_grad_(False)


def describe(checkpoint: Checkpoint, model: GPT, tokenizer: Tokenizer, where: str) -> str:
    """Model, step, validation figure, tokenizer and where it runs, in two lines."""
    n_parameter = sum(parameter.numel() for parameter in model.parameters())
    bits_per_byte = checkpoint.state.get("val_bpb")
    quality = "not validated yet" if bits_per_byte is None else f"validation {bits_per_byte:.4f} bits per byte"
    return (
        f"{checkpoint.path}\n"
        f"{model.config.name}, {n_parameter / 1e6:.1f}M parameters · step {checkpoint.step} · {quality} · "
        f"tokenizer {tokenizer.identity} · {where}"
    )


def show_samples(engine: Engine, prompt: str, tokens: list[int], request: Request) -> None:
    show_texts([prompt] * request.num_samples, engine.stream(tokens, request))


def show_texts(prompts: list[str], pieces: Iterator[GeneratedToken]) -> None:
    """The first text appears as it is written; the others, made in the same batch, follow it."""
    is_labelled = len(prompts) > 1
    waiting = [""] * len(prompts)
    show((label(0) if is_labelled else "") + prompts[0])
    for piece in pieces:
        if piece.sample == 0:
            show(piece.text)
        else:
            waiting[piece.sample] += piece.text
    show("\n")
    for index in range(1, len(prompts)):
        show(label(index) + prompts[index] + waiting[index] + "\n")


def label(sample_index: int) -> str:
    return f"--- sample {sample_index + 1} ---\n"


def converse(engine: Engine, prompt: str, request: Request) -> None:
    """One prompt a line until the input ends (Ctrl-D); each starts afresh. A prompt given with prompt= goes first."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (its presence gives input() line editing and a history)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is no UTF-8 is a prompt like any other
    show("each line is a prompt of its own; Ctrl-D ends\n")
    if prompt:
        show_samples(engine, prompt, engine.encode(prompt), request)
    while True:
        try:
            line = input("prompt> ")
        except EOFError:
            show("\n")
            return
        try:
            tokens = engine.encode(line)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            continue
        show_samples(engine, line, tokens, request)


def show(text: str) -> None:
    """Write to standard output now; what its encoding cannot say becomes '?'."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
