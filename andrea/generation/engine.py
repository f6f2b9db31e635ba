"""Prefill, decode, stream: tokens written one after another, several texts at once.

B texts, N tokens so far, T = sequence_length, V vocabulary.

The window. The model sees at most T tokens. When T are seen and one more is needed, the first half of them is
forgotten and the rest is read again from position 0: positions are never beyond T, and a window is read again once in
about T / 2 tokens. `window_start` states this as a pure function, and the uncached twin uses the same one.

Chance. Token n of text i is chosen by the n-th random number of its own generator, whatever is computed beside it: texts
in one batch, whole or guessed ahead, are those that each would be alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from andrea.attention import KeyValueCache
from andrea.config import UserError
from andrea.generation.graph import GraphedStep
from andrea.generation.packing import PackedGPT, pack
from andrea.generation.sampling import Sampling, choose
from andrea.generation.speculation import Repetition
from andrea.generation.text_stream import TextStream
from andrea.model.gpt import GPT

if TYPE_CHECKING:
    from andrea.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Request:
    """What to write: text i draws its random numbers from seed + i, whatever the number of texts.

    guess: tokens that are guessed ahead from repetitions in the text, and read in one pass (speculation.py); 0: none. The
    text stays the same.
    """

    max_new_tokens: int
    num_samples: int = 1
    seed: int = 0
    stop: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    guess: int = 0


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
    int8: of that copy the matrices are in 8 bits, the embedding and all that is computed in `dtype`.
    compiled: the decoding step runs through torch.compile: slower to start, faster after on a card. There it is a CUDA
    graph, compiled or not.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        *,
        dtype: torch.dtype | None = None,
        int8: bool = False,
        compiled: bool = False,
    ) -> None:
        assert model.n_vocab == tokenizer.n_vocab, (model.n_vocab, tokenizer.n_vocab)
        self.tokenizer = tokenizer
        self.device = model.embedding.weight.device
        self.model: GPT | PackedGPT = model if dtype is None else copy.deepcopy(model).to(dtype).requires_grad_(False)
        self.fixed_shapes = compiled or self.device.type == "cuda"
        self.step = torch.compile(step, fullgraph=True, dynamic=False) if compiled else step
        if self.device.type == "cuda" and dtype is not None:  # what trains keeps its memory for training
            self.step = GraphedStep(self.step)
        self.idle: dict[tuple, Window] = {}  # the window of the texts written last, whose memory the next may take over
        if dtype is not None:
            self.model = pack(self.model, int8, compiled)

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
        """Go on from the prompt's tokens (at least one); yields every sample's pieces of each step as they are made."""
        return self.stream_all([prompt] * request.num_samples, request)

    def stream_all(self, prompts: list[list[int]], request: Request) -> Iterator[Piece]:
        """Go on from each of the prompts, which may differ in length, in one batch; sample i goes on from prompt i."""
        n_text = len(prompts)
        repetitions = [Repetition(prompt) for prompt in prompts]
        written = [repetition.tokens for repetition in repetitions]
        # What lies behind a text is its first token, so that all of a row is in the text: the repetition penalty reads it.
        history = torch.tensor([[prompt[0]] for prompt in prompts]).repeat(
            1, max(map(len, prompts)) + request.max_new_tokens
        )
        for row, prompt in zip(history, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        history = history.to(self.device)
        left = [request.max_new_tokens] * n_text
        texts = [TextStream(self.tokenizer, request.stop) for _ in prompts]
        generators = [torch.Generator().manual_seed(request.seed + index) for index in range(n_text)]
        ragged = n_text > 1 and (request.guess > 0 or len(set(map(len, prompts))) > 1)
        of_one_kind = n_text, ragged, request.guess
        window = self.idle.pop(of_one_kind, None)
        self.idle.clear()
        if window is not None:
            window.restart()
        else:
            if isinstance(self.step, GraphedStep):
                self.step.forget()  # the memory of the texts before, which the new ones need
            window = Window(self.model, self.step, n_text, self.fixed_shapes, ragged, request.guess)
        ended = [False] * n_text
        while not all(ended):
            guesses = [
                [] if ended[index] else repetitions[index].guess(min(request.guess, left[index] - 1))
                for index in range(n_text)
            ]
            logits, guesses = window.next_logits(written, guesses)  # (B, 1 + longest guess, V)
            deciding = [index for index in range(n_text) if not ended[index]]
            for place in range(logits.shape[1]):
                if not deciding:
                    break
                uniform = torch.zeros(n_text)
                for index in deciding:
                    uniform[index] = torch.rand((), generator=generators[index])
                seen = history[:, : max(map(len, written))]
                tokens = choose(logits[:, place], seen, request.sampling, uniform.to(self.device))
                chosen = tokens.tolist()
                if max(chosen[index] for index in deciding) >= self.tokenizer.n_vocab:  # `draw` finds no place
                    raise UserError(
                        "the model's scores of the next token are not finite: its weights are too large or damaged"
                    )
                history[deciding, [len(written[index]) for index in deciding]] = tokens[deciding]
                if not ragged:
                    for index in range(n_text):  # texts that have ended go on, unseen: all keep one length
                        if ended[index]:
                            written[index].append(chosen[index])
                for index in list(deciding):
                    repetitions[index].push(chosen[index])
                    left[index] -= 1
                    piece = self._piece(index, chosen[index], texts[index], is_last=left[index] == 0)
                    ended[index] = piece.ended is not None
                    guessed_right = place < len(guesses[index]) and guesses[index][place] == chosen[index]
                    if ended[index] or not guessed_right:
                        deciding.remove(index)
                    yield piece
        self.idle[of_one_kind] = window

    def _piece(self, sample: int, token: int, text: TextStream, is_last: bool) -> Piece:
        if token == self.tokenizer.end_of_text:
            return Piece(sample, token, text.finish(), "end_of_text")
        new_text = text.push(token)
        if is_last and not text.stopped:
            new_text += text.finish()
        return Piece(sample, token, new_text, "stop" if text.stopped else "length" if is_last else None)


class Window:
    """The model's view of growing texts: what the cache holds of each, and where it begins.

    ragged: texts may differ in length. most_guessed: the tokens a guess has at the most.
    """

    def __init__(
        self,
        model: GPT | PackedGPT,
        step: Callable,
        n_text: int,
        fixed_shapes: bool,
        ragged: bool,
        most_guessed: int = 0,
    ) -> None:
        self.model, self.step = model, step
        self.fixed_shapes, self.ragged, self.most_guessed = fixed_shapes, ragged, most_guessed
        # A short guess may be read as wide as a long one.
        n_room = model.config.sequence_length + most_guessed * (ragged or fixed_shapes)
        self.cache = model.make_cache(n_text, n_room, fixed_shapes=fixed_shapes, ragged=ragged)
        self.n_text = n_text
        self.restart()

    def restart(self) -> None:
        """Other texts begin; what the cache holds of the ones before is written over."""
        self.starts, self.read = [0] * self.n_text, [0] * self.n_text  # it holds tokens start .. read - 1 of each text

    @torch.inference_mode()
    def next_logits(
        self, texts: list[list[int]], guesses: list[list[int]] | None = None
    ) -> tuple[Tensor, list[list[int]]]:
        """logits (B, 1 + G, V) of the token after each text, and after each token of its guess; and the guesses as far as
        the window has room for them, the longest of G tokens.

        Texts are those of the call before and at least one token more, or the same where a text has ended.
        """
        model, n_text, n_window = self.model, len(texts), self.model.config.sequence_length
        if n_text > 1 and not any(self.read) and len(texts[0]) <= n_window and all(text == texts[0] for text in texts):
            return self.read_once(texts[0]).expand(n_text, -1, -1), [[] for _ in texts]
        guesses = guesses or [[] for _ in texts]
        for index, text in enumerate(texts):
            start = window_start(len(text), n_window)
            if start != self.starts[index]:
                self.starts[index] = self.read[index] = start
                if self.ragged and len(text) - start > 1:  # by itself: the others need one token each
                    again = torch.tensor([text[start:-1]], device=self.device)
                    model(again, self.cache.of_sequence(index))
                    self.read[index] = len(text) - 1
            self.read[index] = min(self.read[index], len(text) - 1)  # what was guessed wrong is written over
            room = n_window - (len(text) - start)
            guesses[index] = guesses[index][:room]
        self.cache.set_lengths([read - start for read, start in zip(self.read, self.starts, strict=True)])
        new = [text[read:] + guess for text, read, guess in zip(texts, self.read, guesses, strict=True)]
        n_guess, width = max(map(len, guesses)), max(map(len, new))
        decoding = width <= 1 + self.most_guessed
        if decoding and self.fixed_shapes and n_guess:
            width, n_guess = 1 + self.most_guessed, self.most_guessed  # of one shape for the compiled step
        batch = torch.tensor([row + row[-1:] * (width - len(row)) for row in new], device=self.device)
        at = None
        if n_guess or self.ragged and width > 1:
            last = torch.tensor([len(row) - 1 - len(guess) for row, guess in zip(new, guesses, strict=True)])
            at = (last[:, None] + torch.arange(n_guess + 1)).clamp(max=width - 1).to(self.device)
        logits = (self.step if decoding else step)(model, batch, self.cache, at)
        self.read = [read + len(row) for read, row in zip(self.read, new, strict=True)]
        return logits, guesses

    def read_once(self, prompt: list[int]) -> Tensor:
        """All texts begin alike: read the prompt for one of them, and copy."""
        logits = step(self.model, torch.tensor([prompt], device=self.device), self.cache.of_sequence(0))
        self.cache.copy_sequence(0, len(prompt))
        self.read = [len(prompt)] * len(self.read)
        return logits

    @property
    def device(self) -> torch.device:
        return self.cache.keys[0].device


def step(model: GPT | PackedGPT, tokens: Tensor, cache: KeyValueCache, at: Tensor | None = None) -> Tensor:
    """New tokens (B, T) and the cache of those before -> logits (B, J, V) after the tokens `at` (B, J), or the last (J = 1)."""
    hidden = model(tokens, cache)
    if at is None:
        return model.logits(hidden[:, -1:])
    return model.logits(hidden[torch.arange(len(hidden), device=hidden.device)[:, None], at])


@torch.inference_mode()
def next_logits_uncached(model: GPT, tokens: Tensor) -> Tensor:
    """The readable twin of `Window.next_logits`: tokens (B, N) -> logits (B, V), everything computed again."""
    start = window_start(tokens.shape[1], model.config.sequence_length)
    return model.logits(model(tokens[:, start:])[:, -1])


def window_start(n_token: int, sequence_length: int) -> int:
    """Where the window begins that predicts token n_token: 0 while all fit, then in hops of half a window."""
    hop = (sequence_length + 1) // 2
    return hop * -(-max(0, n_token - sequence_length) // hop)
