"""Prefill, decode, stream: tokens written one after another, several samples at once.

B samples, N tokens so far, T = sequence_length, V vocabulary.

The window. The model sees at most T tokens. When T are seen and one more is needed, the first half of them is
forgotten and the rest is read again from position 0: positions are never beyond T, and a window is read again once in
about T / 2 tokens. `window_start` states this as a pure function, and the uncached twin uses the same one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from andrea.config import UserError
from andrea.generation.packing import PackedGPT, can_pack
from andrea.generation.sampling import Sampling, choose
from andrea.generation.text_stream import TextStream
from andrea.model.gpt import GPT

if TYPE_CHECKING:
    from andrea.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Request:
    """What to write: sample i draws its random numbers from seed + i, whatever the number of samples."""

    max_new_tokens: int
    num_samples: int = 1
    seed: int = 0
    stop: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True)
class Piece:
    """New text of one sample (it may be empty while a character is unfinished); `ended` says why it is the last."""

    sample: int
    token: int
    text: str
    ended: Literal["end_of_text", "stop", "length"] | None


class Engine:
    """Writes text with a model.

    dtype: None writes with the model itself, which may go on training. Else its weights are converted once, into a copy
    that is laid out for decoding where the device has a layout for it.
    compiled: the decoding step runs through torch.compile with its weights frozen in: slower to start, faster after.
    """

    def __init__(
        self, model: GPT, tokenizer: Tokenizer, *, dtype: torch.dtype | None = None, compiled: bool = False
    ) -> None:
        assert model.n_vocab == tokenizer.n_vocab, (model.n_vocab, tokenizer.n_vocab)
        self.tokenizer = tokenizer
        self.device = model.embedding.weight.device
        self.model: GPT | PackedGPT = model if dtype is None else copy.deepcopy(model).to(dtype).requires_grad_(False)
        self.step = step
        self.compiled = compiled
        if compiled:
            self.step = torch.compile(step, fullgraph=True, dynamic=False, options={"freezing": True})
        elif dtype is not None and can_pack(self.model):
            self.model = PackedGPT(self.model)

    def encode(self, prompt: str) -> list[int]:
        """The prompt's tokens, after the end-of-text that precedes every document, where there is room for it.

        Raises UserError when the prompt is longer than the model's window.
        """
        tokens = self.tokenizer.encode(prompt)
        n_window = self.model.config.sequence_length
        if len(tokens) > n_window:
            raise UserError(
                f"prompt has {len(tokens)} tokens, the model sees at most model.sequence_length={n_window}; shorten "
                f"prompt=…, or train a model with a larger model.sequence_length"
            )
        return tokens if len(tokens) == n_window else [self.tokenizer.end_of_text, *tokens]

    def write(self, prompt: str, request: Request) -> list[str]:
        """The samples' texts, without the prompt."""
        texts = [""] * request.num_samples
        for piece in self.stream(self.encode(prompt), request):
            texts[piece.sample] += piece.text
        return texts

    def stream(self, prompt: list[int], request: Request) -> Iterator[Piece]:
        """Go on from the prompt's tokens (at least one); yields every sample's piece of each step as it is made."""
        n_sample, n_prompt = request.num_samples, len(prompt)
        tokens = torch.empty(n_sample, n_prompt + request.max_new_tokens, dtype=torch.int64, device=self.device)
        tokens[:, :n_prompt] = torch.tensor(prompt, device=self.device)
        texts = [TextStream(self.tokenizer, request.stop) for _ in range(n_sample)]
        generators = [torch.Generator().manual_seed(request.seed + sample) for sample in range(n_sample)]
        window = Window(self.model, self.step, n_sample, fixed_shapes=self.compiled)
        writing = list(range(n_sample))
        for n_token in range(n_prompt, tokens.shape[1]):
            logits = window.next_logits(tokens[:, :n_token])  # (B, V)
            uniform = torch.cat([torch.rand(1, generator=generator) for generator in generators])
            tokens[:, n_token] = choose(logits, tokens[:, :n_token], request.sampling, uniform.to(self.device))
            chosen = tokens[:, n_token].tolist()
            if max(chosen) >= self.tokenizer.n_vocab:  # nothing is likelier than anything: `draw` finds no place
                raise UserError(
                    "the model's scores of the next token are not finite: its weights are too large or damaged"
                )
            is_last = n_token == tokens.shape[1] - 1
            for sample in list(writing):
                piece = self._piece(sample, chosen[sample], texts[sample], is_last)
                if piece.ended:
                    writing.remove(sample)
                yield piece
            if not writing:
                return

    def _piece(self, sample: int, token: int, text: TextStream, is_last: bool) -> Piece:
        if token == self.tokenizer.end_of_text:
            return Piece(sample, token, text.finish(), "end_of_text")
        new_text = text.push(token)
        if is_last and not text.stopped:
            new_text += text.finish()
        return Piece(sample, token, new_text, "stop" if text.stopped else "length" if is_last else None)


class Window:
    """The model's view of growing sequences: what the cache holds, and where it begins."""

    def __init__(self, model: GPT | PackedGPT, step, n_sample: int, *, fixed_shapes: bool) -> None:
        self.model = model
        self.step = step
        self.cache = model.make_cache(n_sample, model.config.sequence_length, fixed_shapes=fixed_shapes)
        self.start = 0
        self.stop = 0  # the cache holds the tokens start .. stop - 1

    @torch.inference_mode()
    def next_logits(self, tokens: Tensor) -> Tensor:
        """tokens (B, N), the same ones as in the call before and at least one more -> logits (B, V) of token N."""
        n_token = tokens.shape[1]
        start = window_start(n_token, self.model.config.sequence_length)
        if start != self.start:
            self.cache.clear()
            self.start = self.stop = start
        new = tokens[:, self.stop : n_token]
        self.stop = n_token
        if new.shape[1] == 1:
            return self.step(self.model, new, self.cache)
        return step(self.model, new, self.cache)


def step(model: GPT | PackedGPT, tokens: Tensor, cache) -> Tensor:
    """New tokens (B, T) and the cache of those before -> logits (B, V) of the token after them."""
    return model.logits(model(tokens, cache)[:, -1])


@torch.inference_mode()
def next_logits_uncached(model: GPT, tokens: Tensor) -> Tensor:
    """The readable twin of `Window.next_logits`: tokens (B, N) -> logits (B, V), everything computed again."""
    start = window_start(tokens.shape[1], model.config.sequence_length)
    return model.logits(model(tokens[:, start:])[:, -1])


def window_start(n_token: int, sequence_length: int) -> int:
    """Where the window begins that predicts token n_token: 0 while all fit, then in hops of half a window."""
    hop = (sequence_length + 1) // 2
    return hop * -(-max(0, n_token - sequence_length) // hop)
