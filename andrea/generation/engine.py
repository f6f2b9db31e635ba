"""Several texts at once: read the prompts (prefill), write them token after token (decode), stream them as text.

B texts, N tokens so far, T = sequence_length, V vocabulary, G tokens of lookahead.

The window. The model sees at most T tokens. When it has seen T and needs one more, the first half of them is dropped
and the rest is read again from position 0. Positions therefore stay below T, and a window is read again after every
T / 2 tokens or so. `window_start` states the rule as a pure function; the uncached twin uses the same one.

Randomness. Token n of text i is chosen by the n-th random number of its own generator, whatever else is computed with
it. So each text of a batch, with lookahead or without, equals the text that would be written alone.
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
from andrea.generation.sampling import Sampling, choose_tokens
from andrea.generation.speculation import PromptLookup
from andrea.generation.text_stream import TextStream
from andrea.model.gpt import GPT
from andrea.runtime.compiling import compile_graph

if TYPE_CHECKING:
    from andrea.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Request:
    """The texts to write. Text i draws its random numbers from seed + i, whatever the number of texts.

    lookahead: tokens proposed by prompt lookup (speculation.py) and checked in one pass of the model; 0: none.
    The texts are the same with and without, except for rounding.
    """

    max_new_tokens: int
    num_samples: int = 1
    seed: int = 0
    stop: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    lookahead: int = 0


@dataclass(frozen=True)
class GeneratedToken:
    """One new token of one sample, and the text that can be shown since: empty while a character is unfinished."""

    sample: int
    token: int
    text: str
    ended: Literal["end_of_text", "stop", "length"] | None  # why this token is the sample's last; None: more follow


class GrowingText:
    """One text of a batch while it is being written."""

    def __init__(self, sample: int, prompt: list[int], tokenizer: Tokenizer, request: Request) -> None:
        self.sample = sample
        self.lookup = PromptLookup(prompt)
        self.tokens = self.lookup.tokens  # the prompt's and the new ones
        self.generator = torch.Generator().manual_seed(request.seed + sample)
        self.stream = TextStream(tokenizer, request.stop)
        self.end_of_text = tokenizer.end_of_text
        self.tokens_left = request.max_new_tokens
        self.has_ended = False

    def lookahead(self, most: int) -> list[int]:
        """At most `most` tokens that may come next, always fewer than may still be written."""
        return [] if self.has_ended else self.lookup.lookahead(min(most, self.tokens_left - 1))

    def append(self, token: int) -> GeneratedToken:
        self.lookup.append(token)
        self.tokens_left -= 1
        if token == self.end_of_text:
            text, ended = self.stream.finish(), "end_of_text"
        else:
            is_last = self.tokens_left == 0
            text = self.stream.push(token)
            if is_last and not self.stream.stopped:
                text += self.stream.finish()
            ended = "stop" if self.stream.stopped else "length" if is_last else None
        self.has_ended = ended is not None
        return GeneratedToken(self.sample, token, text, ended)


class Engine:
    """Writes text with a model.

    dtype: None writes with the model itself, which may be in training. Otherwise its weights are converted once, into a
    copy that is laid out for decoding where the device has such a layout.
    int8: the copy's matrices are in 8 bits; the embedding and every activation are in `dtype`.
    compiled: the decoding step runs through torch.compile: slower to start, faster afterwards on a card. On a card the
    step is recorded as a CUDA graph, compiled or not.
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
        self.step = compile_graph(step) if compiled else step
        if self.device.type == "cuda" and dtype is not None:  # a model in training keeps the memory for its training
            self.step = GraphedStep(self.step)
        self.idle: dict[tuple, Window] = {}  # the last texts' window by shape: the next texts may reuse its memory
        if dtype is not None:
            self.model = pack(self.model, int8, compiled)

    def encode(self, prompt: str) -> list[int]:
        """The prompt's tokens. Where the window has one more place, end-of-text stands first, as before every document.

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
        for generated in self.stream(self.encode(prompt), request):
            texts[generated.sample] += generated.text
        return texts

    def stream(self, prompt: list[int], request: Request) -> Iterator[GeneratedToken]:
        """Continue the prompt, at least one token, `num_samples` times; yields each token as soon as it is chosen."""
        return self.stream_all([prompt] * request.num_samples, request)

    def stream_all(self, prompts: list[list[int]], request: Request) -> Iterator[GeneratedToken]:
        """Continue each of the prompts, which may differ in length, in one batch: sample i continues prompt i.

        Raises UserError when the model's scores are not finite.
        """
        texts = [GrowingText(sample, prompt, self.tokenizer, request) for sample, prompt in enumerate(prompts)]
        history = padded_history(prompts, request.max_new_tokens).to(self.device)
        ragged = len(texts) > 1 and (request.lookahead > 0 or len(set(map(len, prompts))) > 1)
        shape = len(texts), ragged, request.lookahead
        window = self.take_window(*shape)
        while not all(text.has_ended for text in texts):
            logits, lookaheads = window.next_logits(
                [text.tokens for text in texts], [text.lookahead(request.lookahead) for text in texts]
            )
            growing = [text for text in texts if not text.has_ended]
            ended = [text for text in texts if text.has_ended]
            place = 0  # logits[:, place] are those after a text and `place` tokens of its lookahead
            while growing:
                tokens = self.choose_next(logits[:, place], history, texts, growing, request.sampling)
                if not ragged:
                    for text in ended:
                        text.tokens.append(tokens[text.sample])  # never shown; all texts keep one length
                for text in growing:
                    yield text.append(tokens[text.sample])
                # Where the lookahead holds the chosen token, the logits after it are the text's next.
                right = [text for text in growing if lookaheads[text.sample][place : place + 1] == text.tokens[-1:]]
                growing = [text for text in right if not text.has_ended]
                place += 1
        self.idle[shape] = window

    def take_window(self, n_text: int, ragged: bool, max_lookahead: int) -> Window:
        """A window for new texts: the idle one if it has this shape, else a new one, after the idle one is dropped."""
        window = self.idle.pop((n_text, ragged, max_lookahead), None)
        self.idle.clear()
        if window is not None:
            window.restart()
            return window
        if isinstance(self.step, GraphedStep):
            self.step.forget()  # frees the graphs' memory for the new texts
        return Window(self.model, self.step, n_text, self.fixed_shapes, ragged, max_lookahead)

    def choose_next(
        self,
        logits: Tensor,
        history: Tensor,
        texts: list[GrowingText],
        growing: list[GrowingText],
        sampling: Sampling,
    ) -> list[int]:
        """One token for each of the B texts, from logits (B, V). Those of `growing` texts enter history (B, N)."""
        uniform = torch.zeros(len(texts))
        for text in growing:
            uniform[text.sample] = torch.rand((), generator=text.generator)
        seen = history[:, : max(len(text.tokens) for text in texts)]
        chosen = choose_tokens(logits, seen, sampling, uniform.to(self.device))
        tokens, rows = chosen.tolist(), [text.sample for text in growing]
        if max(tokens[row] for row in rows) >= self.tokenizer.n_vocab:  # how `draw` answers scores that are not finite
            raise UserError("the model's scores of the next token are not finite: its weights are too large or damaged")
        history[rows, [len(text.tokens) for text in growing]] = chosen[rows]
        return tokens


def padded_history(prompts: list[list[int]], n_new: int) -> Tensor:
    """(B, longest prompt + n_new) int64: each prompt, padded with its own first token.

    The repetition penalty reads whole rows, so padding must not add a token that the text does not have.
    """
    history = torch.tensor([[prompt[0]] for prompt in prompts]).repeat(1, max(map(len, prompts)) + n_new)
    for row, prompt in zip(history, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    return history


class Window:
    """The model's view of growing texts: the part of each that its key-value cache holds.

    ragged: texts may differ in length. max_lookahead: the most tokens that a text's lookahead may have.
    """

    def __init__(
        self,
        model: GPT | PackedGPT,
        step: Callable,
        n_text: int,
        fixed_shapes: bool,
        ragged: bool,
        max_lookahead: int = 0,
    ) -> None:
        self.model, self.step = model, step
        self.fixed_shapes, self.ragged, self.max_lookahead = fixed_shapes, ragged, max_lookahead
        # A short lookahead may be padded to the width of the longest.
        capacity = model.config.sequence_length + max_lookahead * (ragged or fixed_shapes)
        self.cache = model.make_cache(n_text, capacity, fixed_shapes=fixed_shapes, ragged=ragged)
        self.n_text = n_text
        self.restart()

    def restart(self) -> None:
        """Begin other texts; they overwrite what the cache holds of the last ones."""
        # The cache holds tokens starts[i] .. read[i] - 1 of text i.
        self.starts, self.read = [0] * self.n_text, [0] * self.n_text

    @torch.inference_mode()
    def next_logits(
        self, texts: list[list[int]], lookaheads: list[list[int]] | None = None
    ) -> tuple[Tensor, list[list[int]]]:
        """logits (B, 1 + G, V) after each text and after each token of its lookahead; and the lookaheads.

        Lookaheads come back shortened to what the window has places for; the longest has G tokens. Each text is the one
        of the last call and at least one token more, or the same where the text has ended.
        """
        n_text, n_window = len(texts), self.model.config.sequence_length
        if n_text > 1 and not any(self.read) and len(texts[0]) <= n_window and all(text == texts[0] for text in texts):
            return self.read_once(texts[0]).expand(n_text, -1, -1), [[] for _ in texts]
        self.slide(texts)
        places = [n_window - (len(text) - start) for text, start in zip(texts, self.starts, strict=True)]
        lookaheads = [tokens[:n] for tokens, n in zip(lookaheads or [[] for _ in texts], places, strict=True)]
        self.cache.set_lengths([read - start for read, start in zip(self.read, self.starts, strict=True)])
        new = [text[read:] + tokens for text, read, tokens in zip(texts, self.read, lookaheads, strict=True)]
        n_ahead, width = max(map(len, lookaheads)), max(map(len, new))
        is_decoding = width <= 1 + self.max_lookahead
        if is_decoding and self.fixed_shapes and n_ahead:
            width, n_ahead = 1 + self.max_lookahead, self.max_lookahead  # one shape for the compiled step
        batch = torch.tensor([row + row[-1:] * (width - len(row)) for row in new], device=self.device)
        at = None
        if n_ahead or self.ragged and width > 1:
            last = torch.tensor([len(row) - 1 - len(tokens) for row, tokens in zip(new, lookaheads, strict=True)])
            at = (last[:, None] + torch.arange(n_ahead + 1)).clamp(max=width - 1).to(self.device)
        logits = (self.step if is_decoding else step)(self.model, batch, self.cache, at)
        self.read = [read + len(row) for read, row in zip(self.read, new, strict=True)]
        return logits, lookaheads

    def slide(self, texts: list[list[int]]) -> None:
        """Move each text's start to where its window begins now, and forget the lookahead tokens that were wrong."""
        for index, text in enumerate(texts):
            start = window_start(len(text), self.model.config.sequence_length)
            if start != self.starts[index]:
                self.starts[index] = self.read[index] = start
                if self.ragged and len(text) - start > 1:  # read again apart: the other texts need one token each
                    again = torch.tensor([text[start:-1]], device=self.device)
                    self.model(again, self.cache.of_sequence(index))
                    self.read[index] = len(text) - 1
            self.read[index] = min(self.read[index], len(text) - 1)

    def read_once(self, prompt: list[int]) -> Tensor:
        """logits (1, 1, V) after a prompt that all texts share: read for the first of them, its cache copied to all."""
        logits = step(self.model, torch.tensor([prompt], device=self.device), self.cache.of_sequence(0))
        self.cache.copy_sequence(0, len(prompt))
        self.read = [len(prompt)] * len(self.read)
        return logits

    @property
    def device(self) -> torch.device:
        return self.cache.keys[0].device


def step(model: GPT | PackedGPT, tokens: Tensor, cache: KeyValueCache, at: Tensor | None = None) -> Tensor:
    """logits (B, J, V) after the tokens at positions `at` (B, J) of `tokens` (B, N_new), or after the last (J = 1).

    The cache holds the keys and values of the tokens before, and those of `tokens` are appended to it.
    """
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
    """The first token of the window that predicts token n_token: 0 while all fit, then a multiple of half a window."""
    hop = (sequence_length + 1) // 2
    return hop * -(-max(0, n_token - sequence_length) // hop)
