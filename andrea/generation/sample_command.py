"""The command `sample.py`: load a checkpoint, describe it, and show text in the terminal as it is generated.

Standard output receives the texts alone, each a prompt with its continuation. Everything else goes to standard error.
"""

import contextlib
import dataclasses
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from andrea.checkpoint import Checkpoint
from andrea.checkpoint.model import open_model
from andrea.config import MOST_SAMPLED_TOKENS, SampleConfig, UserError
from andrea.generation.engine import Engine, GeneratedToken, Request
from andrea.generation.packed_layers import SOURCE, bytes_of, library
from andrea.generation.packed_model import is_built_in, matrices
from andrea.generation.sampling import Sampling
from andrea.model.gpt import GPT
from andrea.runtime.device import WEIGHT_DTYPE, choose_precision, unused_gpu
from andrea.runtime.files import check_writable, lines_of, replace_text, storing
from andrea.runtime.free_and_peak_memory import free_host_bytes
from andrea.runtime.native import REASONS
from andrea.runtime.streams import at_words, raise_output_failure, tell, write
from andrea.text.tokenizer import Tokenizer

BITS = {"int8": 8, "int4": 4}  # of each weight of a matrix, by the key precision
PROMPT = "prompt> "  # of an interactive session


def sample(config: SampleConfig, device: torch.device) -> int:
    """Describe the checkpoint, print the texts, and return the exit code. Raises UserError for wrong input.

    Ctrl-C ends the text that is being written, and the command. An interactive session ends at a second Ctrl-C.
    """
    out = None if config.out is None else Path(config.out)
    if out is not None:
        check_writable(out)
    prompt = read_prompt(config.prompt)
    engine, about = open_engine(config, device)
    prompts = [prompt] if config.prompts is None else read_prompts(config.prompts, config.max_new_tokens)
    tokens = [last_tokens(engine, each) for each in prompts]
    tell(about)
    request = request_of(config)
    with contextlib.suppress(ReaderEnded):
        if config.prompts is not None:
            show_texts(prompts, stream_in_batches(engine, tokens, request), out)
        elif config.interactive:
            answer_lines(engine, prompt, request)
        else:
            n = request.num_samples
            show_texts(prompts * n, stream_in_batches(engine, tokens * n, request), out)
    return 0


def open_engine(
    config: SampleConfig, device: torch.device, check: Callable[[Tokenizer], None] = lambda tokenizer: None
) -> tuple[Engine, str]:
    """The engine of the checkpoint, and what is said of it before the first text. check: raises UserError, early."""
    checkpoint, model, tokenizer = open_model(config.checkpoint, config.runs_dir, device, config.trust)
    check(tokenizer)
    engine = make_engine(model, tokenizer, config.precision, config.compile, in_place=True)
    description = describe(checkpoint, model, tokenizer, f"{device}, {engine.numbers}")
    about = [description, *(unused_gpu() if config.device == "auto" else [])]
    return engine, at_words("\n".join(about)) + "\n\n"


def make_engine(
    model: GPT, tokenizer: Tokenizer, precision: str, compile_: str = "off", in_place: bool = False
) -> Engine:
    """The engine for the keys precision and compile on the model's device. Raises UserError if unsupported.

    in_place: convert the model itself, which the caller must not use afterwards.
    """
    dtype = decoding_dtype(precision, model)
    check_device_offers(precision, compile_, model.embedding.weight.device)
    bits = BITS.get(precision)
    return Engine(model, tokenizer, dtype=dtype, bits=bits, compiled=compile_ == "on", in_place=in_place)


def bytes_of_weights(model: GPT, precision: str) -> int:
    """The number of bytes of all weights as they are kept for generating with precision=`precision`."""
    n_weight = sum(weight.numel() for weight in model.parameters())
    if precision not in BITS:
        return n_weight * WEIGHT_DTYPE[precision].itemsize
    packed = matrices(model, BITS[precision])
    n_other = n_weight - sum(weight.numel() for weight, _ in packed)
    if model.head is None:  # the embedding, whose packed copy is the head, stays as it is
        n_other += model.head_weight.numel()
    n_packed_bytes = sum(n_byte for matrix in packed for n_byte in bytes_of(*matrix))
    return n_packed_bytes + n_other * decoding_dtype(precision, model).itemsize


def decoding_dtype(requested: str, model: GPT) -> torch.dtype:
    """The type of the weights for generating text with precision=`requested`.

    `auto` is bf16 on every CPU for which our kernels are compiled: they read half the bytes of fp32, also where the
    processor has no bf16 products. With int8 and int4, it is the type of all that is no matrix. Raises UserError.
    """
    device = model.embedding.weight.device
    if requested == "auto" and device.type == "cpu" and library() is not None and is_built_in(model):
        return torch.bfloat16
    return WEIGHT_DTYPE[choose_precision("auto" if requested in BITS else requested, device).value]


def check_device_offers(precision: str, compile_: str, device: torch.device) -> None:
    """Raise UserError if precision=int8, precision=int4 or compile=on is impossible or useless on this device."""
    if precision in BITS and device.type == "cpu" and library() is None:
        raise UserError(
            f"precision={precision} needs our C++ kernel on a CPU, and there is none: {REASONS[SOURCE]}; or use "
            f"precision=bf16"
        )
    if precision == "int4" and device.type != "cpu":
        raise UserError(f"precision=int4 is for a CPU, got device={device}; use precision=bf16, or device=cpu")
    if precision == "int8" and device.type != "cpu" and compile_ == "off":
        raise UserError(
            f"precision=int8 is faster on {device} only with compile=on, a key of sample.py alone; use precision=bf16"
        )
    if compile_ == "on" and device.type != "cuda":
        raise UserError(f"compile=on needs a CUDA GPU, got device={device.type}; use compile=off")


def request_of(config: SampleConfig) -> Request:
    sampling = Sampling(config.temperature, config.top_k, config.top_p, config.min_p, config.repetition_penalty)
    stop = tuple(config.stop)
    return Request(config.max_new_tokens, config.num_samples, config.seed, stop, sampling, config.lookahead)


def describe(checkpoint: Checkpoint, model: GPT, tokenizer: Tokenizer, where: str) -> str:
    """Two lines: the checkpoint's path, then model, step, validation result, tokenizer, and `where` the model runs."""
    n_parameter = sum(parameter.numel() for parameter in model.parameters())
    bits_per_byte = checkpoint.state.get("val_bpb")
    quality = "not validated yet" if bits_per_byte is None else f"validation {bits_per_byte:.4f} bits per byte"
    return (
        f"{checkpoint.path}\n"
        f"{model.config.name}, {n_parameter:,} parameters · step {checkpoint.step} · {quality} · "
        f"tokenizer {tokenizer.identity} · {where}"
    )


# -------------------------------------------------------------------------------------------------------------- prompts


def read_prompt(prompt: str, name: str = "prompt") -> str:
    """The prompt itself; if it is @FILE, the file's content; if it is -, the text of standard input.

    name: of the key. Raises UserError if the text cannot be read.
    """
    if prompt == "-":
        content, origin = sys.stdin.buffer.read(), "standard input"
    elif prompt.startswith("@"):
        path = Path(prompt[1:])
        if not os.path.exists(path) or os.path.isdir(path):  # exists is False even for names that no file can have
            raise UserError(
                f"{name}={prompt}: there is no file {str(path)!r} to read (@FILE); to begin a prompt with @, write "
                f"the prompt to standard input and set {name}=-"
            )
        content, origin = path.read_bytes(), str(path)
    else:
        return prompt
    try:
        return content.decode("utf-8-sig")  # without the mark that some editors write in front
    except UnicodeDecodeError as error:
        raise UserError(f"{name}={prompt}: {origin} is not UTF-8 text (byte {error.start}); convert it first") from None


def read_prompts(file: str, max_new_tokens: int) -> list[str]:
    """The lines of the file that are not empty. Raises UserError if the file is unreadable or has too many lines."""
    try:
        lines = lines_of(Path(file).read_bytes().decode("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise UserError(f"prompts={file}: {getattr(error, 'strerror', None) or 'the file is not UTF-8 text'}") from None
    prompts = [line for line in lines if line]
    if not prompts:
        raise UserError(f"prompts={file}: the file holds no prompt; write one prompt on each line")
    check_batch(len(prompts), max_new_tokens, f"prompts={file}")
    return prompts


def check_batch(n_prompt: int, max_new_tokens: int, origin: str) -> None:
    """Raises UserError if a batch of so many prompts may write more tokens than memory holds."""
    if n_prompt * max_new_tokens > MOST_SAMPLED_TOKENS:
        raise UserError(
            f"{origin} has {n_prompt} prompts, and {n_prompt} times max_new_tokens={max_new_tokens} is "
            f"more than the {MOST_SAMPLED_TOKENS} tokens that one batch may write; lower one of them"
        )


def stream_in_batches(engine: Engine, prompts: list[list[int]], request: Request) -> Iterator[GeneratedToken]:
    """As `Engine.stream_all`, but only as many texts at a time as half of the free memory holds keys and values of.

    Each text takes those of a whole window. Otherwise the system would end the process, and all texts would be lost.
    """
    if len(prompts) == 1:
        yield from engine.stream_all(prompts, request)
        return
    device, window = engine.device, engine.model.make_cache(1, engine.model.config.sequence_length)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()
    n_at_once = max(1, free // 2 // window.n_bytes)
    for first in range(0, len(prompts), n_at_once):
        part = dataclasses.replace(request, seed=request.seed + first)
        for token in engine.stream_all(prompts[first : first + n_at_once], part):
            yield dataclasses.replace(token, sample=first + token.sample)


def last_tokens(engine: Engine, prompt: str | list[int]) -> list[int]:
    """The last tokens of the prompt that the model can see. If the prompt is cut, a line on standard error says so.

    Token ids are used unchanged, but for the cut.
    """
    if isinstance(prompt, str):
        tokens, n_cut = engine.encode_end(prompt)
    else:
        n_cut = max(0, len(prompt) - engine.model.config.sequence_length)
        tokens = prompt[n_cut:]
    if n_cut:
        tell(
            f"prompt has {len(tokens) + n_cut} tokens: its beginning is cut, and the model reads the last {len(tokens)} "
            f"(model.sequence_length)\n"
        )
    return tokens


# ---------------------------------------------------------------------------------------------------------------- texts


def show_texts(prompts: list[str], tokens: Iterator[GeneratedToken], out: Path | None = None) -> None:
    """Show the first text as it is generated. Then show the other texts.

    After Ctrl-C, the generated part of every text is shown. Then KeyboardInterrupt is raised again.
    out: a file that receives the texts too, whole also if nobody reads standard output any more.
    """

    def show_here(text: str) -> None:
        try:
            show(text)
        except ReaderEnded:
            if out is None:
                raise

    label = "--- sample {} ---\n"
    texts = [""] * len(prompts)
    interrupt = None
    tell(label.format(1) if len(prompts) > 1 else "")
    show_here(prompts[0])
    try:
        for token in tokens:
            texts[token.sample] += token.text
            if token.sample == 0:
                show_here(token.text)
    except KeyboardInterrupt as raised:
        interrupt = raised
    show_here("\n")
    for index in range(1, len(prompts)):
        tell(label.format(index + 1))
        show_here(prompts[index] + texts[index] + "\n")
    if out is not None:
        records = [json.dumps({"prompt": prompt, "text": text}) for prompt, text in zip(prompts, texts, strict=True)]
        with storing(out, of_run=False):
            replace_text(out, "".join(record + "\n" for record in records))
        tell(f"written: {out}\n")
    if interrupt is not None:
        raise interrupt


def answer_lines(engine: Engine, prompt: str, request: Request) -> None:
    """Continue each line of standard input. Earlier lines do not affect later ones. A prompt given with prompt= comes first."""

    def answer(line: str) -> None:
        n = request.num_samples
        show_texts([line] * n, stream_in_batches(engine, [last_tokens(engine, line)] * n, request))

    tell("each line is a separate prompt; Ctrl-C ends a text, Ctrl-D the session\n")
    take_lines(prompt, answer, ask, errors="surrogateescape")


def take_lines(first: str, take: Callable[[str], None], ask: Callable[[bool], str], errors: str) -> None:
    """Call `take` with `first`, unless it is empty, and with each line of `ask` until the input ends (Ctrl-D).

    Ctrl-C ends a call of `take`; a second Ctrl-C before the next line raises KeyboardInterrupt. errors: what happens to a
    line that is not UTF-8, as in bytes.decode.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (importing it gives input() line editing and a history)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors=errors, newline="\n")  # a line ends at "\n" alone
    line: str | None = first or None
    while True:
        is_interrupted = False
        try:
            if line is not None:
                take(line)
        except KeyboardInterrupt:
            is_interrupted = True
        try:
            line = ask(is_interrupted)
        except EOFError:
            tell("\n")
            return


def ask(is_interrupted: bool, prompt: str = PROMPT) -> str:
    """The next line of standard input. Raises KeyboardInterrupt at the second Ctrl-C, EOFError at the input's end.

    is_interrupted: whether the last text was already ended by Ctrl-C.
    """
    if is_interrupted:
        tell("Ctrl-C again ends the session\n")
    # in a terminal, input() edits the line, and must know its beginning
    in_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    try:
        tell("" if in_terminal else prompt)
        return input(prompt if in_terminal else "").removesuffix("\r")
    except KeyboardInterrupt:
        tell("\n")
        if is_interrupted:
            raise
        return ask(True, prompt)


class ReaderEnded(Exception):
    """The program that reads the texts (`| head`) has ended, so that no more are needed."""


def show(text: str) -> None:
    """Write to standard output and flush. Characters that its encoding lacks are written as '?'.

    Raises ReaderEnded if nobody reads the output any more, and UserError if it cannot be written.
    """
    write(sys.stdout, text)
    try:
        raise_output_failure()
    except BrokenPipeError:
        raise ReaderEnded from None
    except OSError as error:
        raise UserError(f"standard output cannot be written ({error.strerror}); send it to another file") from None
