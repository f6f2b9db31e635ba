"""Generate a batch of texts: read the prompts (prefill), generate token after token (decode), and yield the text.

B texts, N tokens so far, T = sequence_length, V vocabulary, G tokens of lookahead.

The window. The model sees at most T tokens. When T tokens are read and another one is needed, the first half of them is
dropped, and the second half is read again from position 0. Positions therefore stay below T, and this second reading
occurs once every T / 2 tokens or so. `window_start` states this rule as a pure function.

Randomness. Each text has its own random generator, whose n-th number chooses the text's n-th token. A text is therefore
the same in any batch, with or without lookahead.

A prompt that ends with a space is continued by a token that begins with it: see `TokenHealing` in sampling.py.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from andrea.attention import KeyValueCache
from andrea.config import UserError
from andrea.generation.packed_model import PackedGPT, pack
from andrea.generation.sampling import SPACE, Sampling, TokenHealing, choose_tokens
from andrea.model.gpt import GPT
from andrea.model.lora import merge
from andrea.runtime.compiling import compile_graph

if TYPE_CHECKING:
    from andrea.text.tokenizer import Tokenizer


# ---------------------------------------------------------------------------------------------------------- text stream


class TextStream:
    """One sample's text. `push` returns the text that can be shown; `stopped` becomes true at a stop string.

    A token may end inside a character. The bytes of an incomplete character are held back, and so is text that may be
    the beginning of a stop string. Invalid UTF-8 becomes U+FFFD. n_skipped: bytes at the beginning that are not shown.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), n_skipped: int = 0) -> None:
        self.tokenizer = tokenizer
        self.n_skipped = n_skipped
        self.stop = tuple(stop)
        self.stopped = False
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.waiting = ""  # decoded, not shown yet

    def push(self, token: int) -> str:
        """Add one token; return the text that can now be shown."""
        new = self.tokenizer.decode_bytes([token])
        shown, self.n_skipped = new[self.n_skipped :], max(0, self.n_skipped - len(new))
        return self.release(self.decoder.decode(shown))

    def finish(self) -> str:
        """Return the text that is still held back. Call this method after the last token."""
        text = self.release(self.decoder.decode(b"", final=True)) + self.waiting
        self.waiting = ""
        return text

    def release(self, new_text: str) -> str:
        """The part of the held-back text and `new_text` that can be shown now. The rest is held back."""
        if self.stopped:
            return ""
        text = self.waiting + new_text
        found = [text.find(stop) for stop in self.stop if stop in text]
        if found:
            self.stopped, self.waiting = True, ""
            return text[: min(found)]
        n_waiting = max((longest_overlap(text, stop) for stop in self.stop), default=0)
        self.waiting = text[len(text) - n_waiting :]
        return text[: len(text) - n_waiting]


def longest_overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a prefix of `stop`, but shorter than `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


# ---------------------------------------------------------------------------------------------------------- speculation
# Speculative decoding by prompt lookup (Saxena 2023, "Prompt Lookup Decoding"). If the last few tokens have occurred
# earlier in the text, the tokens after that occurrence are likely to follow again. These tokens are the lookahead.
# The engine reads the lookahead in one pass of the model, and keeps its tokens up to the first one that the model
# does not choose. One pass over several tokens is cheaper than one pass for each token.

LONGEST_RUN = 3  # length of the longest sequence that is looked up; if it did not occur before, shorter ones are tried


class PromptLookup:
    """A growing text with an index of all its runs: sequences of at most LONGEST_RUN consecutive tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens: list[int] = []
        self.follows: dict[tuple[int, ...], int] = {}  # run -> index of the token after its latest occurrence
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        place = len(self.tokens)
        for size in range(1, min(LONGEST_RUN, place) + 1):
            self.follows[tuple(self.tokens[place - size :])] = place
        self.tokens.append(token)

    def lookahead(self, most: int) -> list[int]:
        """Propose `most` next tokens; [] if the text's last token did not occur before.

        The method looks for the longest run at the text's end that also occurred earlier. The proposal is the tokens
        after the latest earlier occurrence. If these tokens reach the end of the text, the proposal goes on by
        repeating them.
        """
        for size in range(min(LONGEST_RUN, len(self.tokens)), 0, -1):
            place = self.follows.get(tuple(self.tokens[-size:]))
            if place is not None:
                lookahead = self.tokens[place : place + most]
                while len(lookahead) < most:
                    lookahead.append(lookahead[place + len(lookahead) - len(self.tokens)])
                return lookahead
        return []


# ---------------------------------------------------------------------------------------------------------------- graph
# A decoding step recorded as a CUDA graph. Each token then needs one launch instead of several hundred.


class GraphedStep:
    """`step` of engine.py as a CUDA graph.

    The second call with the same cache and shapes records the graph, and later calls replay it. The first call is not
    recorded, because it compiles, chooses kernels and allocates memory. The cache must have fixed shapes. The graph
    itself reads and increases the cache's length, which is a tensor.
    """

    def __init__(self, step) -> None:
        self.step = step
        self.cache: KeyValueCache | None = None
        # By input shapes: the graph, its inputs (new tokens, and the indices whose logits are needed), and its output, the
        # logits; None between the first and the second call.
        self.recorded: dict[tuple, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor] | None] = {}

    def forget(self) -> None:
        """Release the recorded graphs, and with them the memory of their cache."""
        self.cache, self.recorded = None, {}

    def __call__(self, model, tokens: Tensor, cache: KeyValueCache, at: Tensor | None = None) -> Tensor:
        if cache is not self.cache:
            self.cache, self.recorded = cache, {}
        inputs = (tokens,) if at is None else (tokens, at)
        shapes = tuple(each.shape for each in inputs)
        if shapes not in self.recorded:
            self.recorded[shapes] = None
            return self.step(model, tokens, cache, at)
        if self.recorded[shapes] is None:
            kept = tuple(each.clone() for each in inputs)
            graph, logits = recorded(lambda: self.step(model, kept[0], cache, *kept[1:]), tokens.device)
            self.recorded[shapes] = graph, kept, logits
        graph, kept, logits = self.recorded[shapes]
        for kept_input, each in zip(kept, inputs, strict=True):
            kept_input.copy_(each)
        graph.replay()
        return logits


def recorded(function: Callable[[], Tensor], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """What the function launches, as a CUDA graph, and the memory of its result. Nothing is computed yet."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: other threads, such as one that writes a checkpoint, may use the GPU during the recording.
    with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = function()
    return graph, result


WIDTH_STEP = 1024  # texts of similar length have one graph


class FedBackSteps:
    """Decoding steps that choose their tokens on the GPU and feed them back: one CUDA graph for all of them.

    The host launches each step before it reads the token of the step before, so the GPU does not wait for it. For B texts of
    equal length. The readable twin is `Window.next_logits` and `Engine.choose_next`.
    """

    def __init__(
        self, model: GPT | PackedGPT, step: Callable, cache: KeyValueCache, width: int, sampling: Sampling
    ) -> None:
        """width: the most tokens of a text."""
        n_text, device = len(cache.keys[0]), cache.keys[0].device
        self.model, self.step, self.cache, self.sampling = model, step, cache, sampling
        self.history = torch.zeros(n_text, width, dtype=torch.int64, device=device)
        self.uniform = torch.zeros(n_text, width, device=device)  # number i chooses token i
        self.tokens = torch.zeros(n_text, 1, dtype=torch.int64, device=device)  # the last ones
        self.place = torch.zeros(1, dtype=torch.int64, device=device)  # of the next token
        self.on_host = [torch.zeros(n_text, dtype=torch.int64, pin_memory=device.type == "cuda") for _ in range(2)]
        self.n_launch, self.graph = 0, None

    def begin(self, history: Tensor, uniform: Tensor, n_token: int) -> None:
        """Continue texts of n_token tokens, history (B, N), whose cache has all but the last. uniform (B, n): of the next n."""
        self.history.copy_(history[:, :1].expand_as(self.history))  # padding: a token that is in the text
        self.history[:, :n_token] = history[:, :n_token]
        self.uniform[:, n_token : n_token + uniform.shape[1]] = uniform.to(self.uniform.device)
        self.tokens.copy_(history[:, n_token - 1 : n_token])
        self.place.fill_(n_token)

    def advance(self) -> Tensor:
        """One step: the chosen tokens (B,), V where the scores are not finite."""
        logits = self.step(self.model, self.tokens, self.cache)[:, -1]
        uniform = self.uniform.index_select(1, self.place)[:, 0]
        chosen = choose_tokens(logits, self.history, self.sampling, uniform)
        self.tokens.copy_(chosen.clamp(max=logits.shape[1] - 1)[:, None])
        self.history.index_copy_(1, self.place, self.tokens)
        self.place += 1
        return chosen

    @torch.inference_mode()
    def launch(self) -> tuple[Tensor, torch.cuda.Event]:
        """Start a step. Its tokens (B,) are on the host after the event, until the launch after the next one.

        As in GraphedStep, the first step is not recorded, and the second one is.
        """
        if self.n_launch == 0:
            chosen = self.advance()
        else:
            self.graph = self.graph or recorded(self.advance, self.tokens.device)
            graph, chosen = self.graph
            graph.replay()
        on_host, arrived = self.on_host[self.n_launch % 2], torch.cuda.Event()
        on_host.copy_(chosen, non_blocking=True)
        arrived.record()
        self.n_launch += 1
        return on_host, arrived


# ----------------------------------------------------------------------------------------------------------- the engine


@dataclass(frozen=True)
class Request:
    """How many texts to generate, and how. The random generator of text i has the seed `seed + i`.

    lookahead: the largest number of tokens that `PromptLookup` proposes for one pass of the model. 0
    switches prompt lookup off. Except for rounding, the texts do not depend on `lookahead`.
    """

    max_new_tokens: int
    num_samples: int = 1
    seed: int = 0
    stop: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    lookahead: int = 0


@dataclass(frozen=True)
class GeneratedToken:
    """One new token of one sample, and the new text that can be shown. `text` is empty while a character is incomplete."""

    sample: int
    token: int
    text: str
    ended: Literal["end_of_text", "stop", "length"] | None  # why the sample ends here; None if it goes on


class GrowingText:
    """One text of a batch during generation. prompt, is_healed: from `TokenHealing.heal`."""

    def __init__(self, sample: int, prompt: list[int], is_healed: bool, tokenizer: Tokenizer, request: Request) -> None:
        self.sample = sample
        self.needs_space = is_healed  # the next token must begin with the space that was taken from the prompt
        self.lookup = PromptLookup(prompt)
        self.tokens = self.lookup.tokens  # the tokens of the prompt and the new ones
        self.generator = torch.Generator().manual_seed(request.seed + sample)
        self.stream = TextStream(tokenizer, request.stop, n_skipped=len(SPACE) if is_healed else 0)
        self.ends = tokenizer.ends
        self.tokens_left = request.max_new_tokens
        self.has_ended = False

    def lookahead(self, most: int) -> list[int]:
        """The proposed next tokens: at most `most`, and fewer than remain to be generated."""
        return [] if self.has_ended else self.lookup.lookahead(min(most, self.tokens_left - 1))

    def append(self, token: int) -> GeneratedToken:
        """Add a chosen token to the text, and decide whether the text ends with it."""
        self.lookup.append(token)
        self.needs_space = False
        self.tokens_left -= 1
        if token in self.ends:
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
    """Generate text with a model.

    dtype: if None, use the model itself, which may be in training. Otherwise use a copy with weights in this type. The
    copy is packed for fast decoding if a packed form exists for the device (packed_model.py).
    in_place: convert the model itself instead of a copy; the caller must not use it afterwards. Saves the copy's memory.
    bits: 8 or 4 to store the matrices of the copy in so many bits. The embedding and all activations keep the type `dtype`.
    compiled: run the decoding step through torch.compile. The start is slower, but on a GPU each token is faster. On a
    GPU the decoding step of a copy is recorded as a CUDA graph, compiled or not.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        *,
        dtype: torch.dtype | None = None,
        bits: int | None = None,
        compiled: bool = False,
        in_place: bool = False,
    ) -> None:
        assert model.n_vocab == tokenizer.n_vocab, (model.n_vocab, tokenizer.n_vocab)
        model = merge(model)  # packing reads the matrices themselves
        self.tokenizer = tokenizer
        self.healing = TokenHealing(tokenizer)
        self.device = model.embedding.weight.device
        self.model: GPT | PackedGPT = model
        if dtype is not None:
            self.model = (model if in_place else copy.deepcopy(model)).to(dtype).requires_grad_(False)
        self.fixed_shapes = compiled or self.device.type == "cuda"
        self.step = compile_graph(step) if compiled else step
        if self.device.type == "cuda" and dtype is not None:  # graphs would take memory from training
            self.step = GraphedStep(self.step)
        self.numbers = str(dtype).removeprefix("torch.") + (
            f" with matrices in int{bits}" if bits else ""
        )  # for people
        self.idle: dict[tuple, Window] = {}  # the window of the last texts, by shape, for reuse
        if dtype is not None:
            self.model = pack(self.model, bits, compiled)

    def encode(self, prompt: str) -> list[int]:
        """The prompt's tokens. end_of_text is put first, as before every document, unless the prompt fills the window.

        Raises UserError if the prompt is longer than the model's window.
        """
        tokens, n_cut = self.encode_end(prompt)
        n_window = self.model.config.sequence_length
        if n_cut:
            raise UserError(
                f"prompt has {n_window + n_cut} tokens, but the model sees at most model.sequence_length={n_window}; shorten "
                f"prompt=…, or train a model with a larger model.sequence_length"
            )
        return tokens

    def encode_end(self, prompt: str) -> tuple[list[int], int]:
        """Like `encode`, but a prompt that is too long loses its first tokens. Also returns their number."""
        tokens = self.tokenizer.encode(prompt)
        n_window = self.model.config.sequence_length
        n_cut = max(0, len(tokens) - n_window)
        return tokens[n_cut:] if len(tokens) >= n_window else [self.tokenizer.end_of_text, *tokens], n_cut

    def write(self, prompt: str | list[int], request: Request) -> list[str]:
        """Generate the texts of `request.num_samples` samples; the prompt, a text or tokens, is not included."""
        texts = [""] * request.num_samples
        for generated in self.stream(self.encode(prompt) if isinstance(prompt, str) else prompt, request):
            texts[generated.sample] += generated.text
        return texts

    def stream(self, prompt: list[int], request: Request) -> Iterator[GeneratedToken]:
        """Continue the prompt, of at least one token, `num_samples` times. Yields each token as soon as it is chosen."""
        return self.stream_all([prompt] * request.num_samples, request)

    def stream_all(self, prompts: list[list[int]], request: Request) -> Iterator[GeneratedToken]:
        """Continue all prompts in one batch; sample i continues prompt i. Prompts may differ in length.

        Yields each token as soon as it is chosen. Raises UserError if the model's scores are not finite.
        """
        healed = [self.healing.heal(prompt) for prompt in prompts]
        prompts = [prompt for prompt, _ in healed]
        texts = [GrowingText(sample, *of_one, self.tokenizer, request) for sample, of_one in enumerate(healed)]
        history = padded_history(prompts, request.max_new_tokens).to(self.device)
        ragged = len(texts) > 1 and (request.lookahead > 0 or len(set(map(len, prompts))) > 1)
        shape = len(texts), ragged, request.lookahead
        window = self.take_window(*shape)
        while not all(text.has_ended for text in texts):
            if self.feeds_back(window, texts, request):
                yield from self.fed_back(window, texts, history, request.sampling)
                continue
            logits, lookaheads = window.next_logits(
                [text.tokens for text in texts], [text.lookahead(request.lookahead) for text in texts]
            )
            growing = [text for text in texts if not text.has_ended]
            ended = [text for text in texts if text.has_ended]
            place = 0  # logits[:, place] follow a text and the first `place` tokens of its lookahead
            while growing:
                tokens = self.choose_next(logits[:, place], history, texts, growing, request.sampling)
                if not ragged:
                    for text in ended:
                        text.tokens.append(tokens[text.sample])  # never shown; all texts keep one length
                for text in growing:
                    yield text.append(tokens[text.sample])
                # If the lookahead proposed the chosen token, the logits after this token are valid, and are used next.
                right = [text for text in growing if lookaheads[text.sample][place : place + 1] == text.tokens[-1:]]
                growing = [text for text in right if not text.has_ended]
                place += 1
        self.idle[shape] = window

    def feeds_back(self, window: Window, texts: list[GrowingText], request: Request) -> bool:
        """Whether `fed_back` serves: on a GPU, for texts of equal length that need one token each and have no lookahead."""
        is_served = isinstance(self.step, GraphedStep) and not window.ragged and request.lookahead == 0
        is_served = is_served and not torch.are_deterministic_algorithms_enabled()  # which choose on the CPU
        return is_served and window.continues(texts[0].tokens) and not any(text.needs_space for text in texts)

    def fed_back(
        self, window: Window, texts: list[GrowingText], history: Tensor, sampling: Sampling
    ) -> Iterator[GeneratedToken]:
        """The next tokens of all texts, until all have ended or the window slides. They are written into history (B, N) too."""
        n_token = len(texts[0].tokens)
        in_window = window.model.config.sequence_length - (n_token - window.starts[0]) + 1
        n_step = min(in_window, max(text.tokens_left for text in texts if not text.has_ended))
        steps = window.fed_back_steps(self.step.step, history.shape[1], sampling)
        steps.begin(history, torch.stack([torch.rand(n_step, generator=text.generator) for text in texts]), n_token)
        window.cache.set_lengths([n_token - 1 - window.starts[0]] * len(texts))
        following = steps.launch()
        for left in range(n_step - 1, -1, -1):
            (on_host, arrived), following = following, steps.launch() if left else None
            arrived.synchronize()
            tokens = on_host.tolist()
            growing = [text for text in texts if not text.has_ended]
            self.check_finite([tokens[text.sample] for text in growing])
            for text in texts:
                if text.has_ended:
                    text.tokens.append(tokens[text.sample])  # never shown; all texts keep one length
            for text in growing:
                yield text.append(tokens[text.sample])
            if all(text.has_ended for text in texts):
                break
        window.read = [len(text.tokens) - 1 for text in texts]
        history[:, n_token:] = steps.history[:, n_token : history.shape[1]]

    def check_finite(self, tokens: list[int]) -> None:
        if max(tokens) >= self.tokenizer.n_vocab:  # `draw` returns V if scores are not finite
            raise UserError("the model's scores of the next token are not finite: its weights are too large or damaged")

    def take_window(self, n_text: int, ragged: bool, max_lookahead: int) -> Window:
        """A window for new texts. The idle window is reused if it was made with the same arguments, else released."""
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
        """Choose one token for each of the B texts from logits (B, V).

        The chosen tokens of the texts in `growing` are also written into history (B, N).
        """
        uniform = torch.zeros(len(texts))
        for text in growing:
            uniform[text.sample] = torch.rand((), generator=text.generator)
            if text.needs_space:
                logits = logits.index_put((torch.tensor(text.sample),), self.healing.allowed(logits[text.sample]))
        seen = history[:, : max(len(text.tokens) for text in texts)]
        chosen = choose_tokens(logits, seen, sampling, uniform.to(self.device))
        tokens, rows = chosen.tolist(), [text.sample for text in growing]
        self.check_finite([tokens[row] for row in rows])
        history[rows, [len(text.tokens) for text in growing]] = chosen[rows]
        return tokens


def padded_history(prompts: list[list[int]], n_new: int) -> Tensor:
    """The prompts (B, longest prompt + n_new) int64, each padded with its own first token.

    The repetition penalty applies to all tokens of a row, so padding must not contain a token that is not in the text.
    """
    history = torch.tensor([[prompt[0]] for prompt in prompts]).repeat(1, max(map(len, prompts)) + n_new)
    for row, prompt in zip(history, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    return history


class Window:
    """The part of each text that the model sees, with its keys and values in a cache.

    ragged: whether texts may differ in length. max_lookahead: the largest number of tokens in a lookahead.
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
        # The additional capacity is for padding: a short lookahead is padded to the width of the longest.
        capacity = model.config.sequence_length + max_lookahead * (ragged or fixed_shapes)
        self.cache = model.make_cache(n_text, capacity, fixed_shapes=fixed_shapes, ragged=ragged)
        self.device = self.cache.keys[0].device
        self.n_text = n_text
        self.steps: FedBackSteps | None = None  # of the last texts, whose graph is reused
        self.restart()

    def restart(self) -> None:
        """Begin new texts. They overwrite the old texts in the cache."""
        # The cache holds tokens starts[i] .. read[i] - 1 of text i.
        self.starts, self.read = [0] * self.n_text, [0] * self.n_text

    @torch.inference_mode()
    def next_logits(
        self, texts: list[list[int]], lookaheads: list[list[int]] | None = None
    ) -> tuple[Tensor, list[list[int]]]:
        """Logits (B, 1 + G, V) after each text and after each token of its lookahead, and the lookaheads that were read.

        A lookahead is shortened if it does not fit the window. G is the length of the longest lookahead that was read.
        Each text must continue the text of the last call by at least one token, or equal it if the text has ended.
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

    def fed_back_steps(self, step: Callable, n_token: int, sampling: Sampling) -> FedBackSteps:
        """For texts of at most n_token tokens."""
        if self.steps is None or self.steps.sampling != sampling or self.steps.history.shape[1] < n_token:
            width = -(-n_token // WIDTH_STEP) * WIDTH_STEP
            self.steps = FedBackSteps(self.model, step, self.cache, width, sampling)
        return self.steps

    def continues(self, text: list[int]) -> bool:
        """Whether one token of the window's only text is unread, and the window does not slide for it."""
        stays = window_start(len(text), self.model.config.sequence_length) == self.starts[0]
        return stays and self.read[0] == len(text) - 1 > self.starts[0]

    def slide(self, texts: list[list[int]]) -> None:
        """Move the start of each text's window if necessary, and discard rejected lookahead tokens from the cache."""
        for index, text in enumerate(texts):
            start = window_start(len(text), self.model.config.sequence_length)
            if start != self.starts[index]:
                self.starts[index] = self.read[index] = start
                if self.ragged and len(text) - start > 1:  # read separately: the other texts need one token
                    again = torch.tensor([text[start:-1]], device=self.device)
                    self.model(again, self.cache.of_sequence(index))
                    self.read[index] = len(text) - 1
            self.read[index] = min(self.read[index], len(text) - 1)

    def read_once(self, prompt: list[int]) -> Tensor:
        """Logits (1, 1, V) after a prompt that all texts share.

        The prompt is read for one text. Its keys and values are then copied to the caches of the other texts.
        """
        logits = step(self.model, torch.tensor([prompt], device=self.device), self.cache.of_sequence(0))
        self.cache.copy_sequence(0, len(prompt))
        self.read = [len(prompt)] * len(self.read)
        return logits


def step(model: GPT | PackedGPT, tokens: Tensor, cache: KeyValueCache, at: Tensor | None = None) -> Tensor:
    """Read new tokens (B, N_new) after the tokens in the cache, and append their keys and values to the cache.

    Returns the logits (B, J, V) after the tokens with indices `at` (B, J), or after the last token (J = 1) if `at` is
    None.
    """
    hidden = model(tokens, cache)
    if at is None:
        return model.logits(hidden[:, -1:])
    return model.logits(hidden[torch.arange(len(hidden), device=hidden.device)[:, None], at])


@torch.inference_mode()
def next_logits_uncached(model: GPT, tokens: Tensor) -> Tensor:
    """The readable form of `Window.next_logits`, without a cache: tokens (B, N) -> logits (B, V)."""
    start = window_start(tokens.shape[1], model.config.sequence_length)
    return model.logits(model(tokens[:, start:])[:, -1])


def window_start(n_token: int, sequence_length: int) -> int:
    """Index of the first token in the window that predicts token `n_token`.

    The index is 0 while all tokens fit the window. After that it is a multiple of half the window's length.
    """
    hop = (sequence_length + 1) // 2
    return hop * -(-max(0, n_token - sequence_length) // hop)
