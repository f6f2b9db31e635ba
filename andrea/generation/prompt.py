"""Prompts: read from the command line, a file or standard input, and cut to what the model sees."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from andrea.config import MOST_SAMPLED_TOKENS, UserError
from andrea.generation.engine import Engine
from andrea.runtime.files import lines_of
from andrea.runtime.streams import tell


def read_prompt(prompt: str, name: str = "prompt") -> str:
    """The prompt itself; if it is @FILE, the file's content; if it is -, the text of standard input.

    name: of the key. Raises UserError if the text cannot be read.
    """
    if prompt == "-":
        content, origin = sys.stdin.buffer.read(), "standard input"
    elif prompt.startswith("@"):
        path = Path(prompt[1:])
        if not os.path.isfile(path):  # isfile is False even for names that no file can have
            raise UserError(
                f"{name}={prompt}: there is no file {str(path)!r} to read (@FILE); to begin a prompt with @, write "
                f"the prompt to standard input and set {name}=-"
            )
        content, origin = path.read_bytes(), str(path)
    else:
        return prompt
    try:
        return content.decode("utf-8")
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
