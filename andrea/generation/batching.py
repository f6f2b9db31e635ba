"""Continuous batching: texts of several requests are written in one batch, which they join and leave at any step.

A text is the same, bit for bit, as `Engine.stream` writes alone with the same seed, whatever the other texts are. A prompt is
read alone. Our CPU kernels then decode one token of every text in one pass, in which no row depends on the other rows.
Where these kernels do not serve (another device, no compiler), torch's products round a row differently in each size of
batch, so every text is decoded alone.

V: vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from andrea.generation.engine import Engine, GeneratedToken, GraphedStep, GrowingText, Request, Window, padded_history
from andrea.generation.packed_model import PackedGPT
from andrea.generation.sampling import choose_tokens

MOST_READS = 4  # windows that are read, one in a step, while the texts that need none wait
NO_TOKENS = torch.zeros(1, 0, dtype=torch.int64)


@dataclass(frozen=True)
class TokenScore:
    """nats: the log-probability of a token, before sampling rules. likeliest: the likeliest tokens with theirs."""

    nats: float
    likeliest: list[tuple[int, float]]


def token_score(log_probabilities: Tensor, token: int, n_likeliest: int) -> TokenScore:
    """The score of a token by the model's log-probabilities (V,)."""
    top = log_probabilities.topk(min(n_likeliest, len(log_probabilities)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return TokenScore(float(log_probabilities[token]), list(pairs))


class BatchedText(GrowingText):
    """A text of a batch. n_likeliest: the number of likeliest tokens in each token's score; None: no scores."""

    def __init__(self, engine: Engine, prompt: list[int], request: Request, n_likeliest: int | None = None) -> None:
        assert request.num_samples == 1 and request.lookahead == 0, request
        super().__init__(0, *engine.healing.heal(prompt), engine.tokenizer, request)
        self.sampling, self.n_likeliest = request.sampling, n_likeliest
        self.window: Window | None = None  # while the text is in the batch


@dataclass(frozen=True)
class BatchStep:
    """A token that a step of the batch added to a text. error: why the text cannot go on; it then has no token."""

    text: BatchedText
    token: GeneratedToken | None
    score: TokenScore | None = None
    error: str | None = None


class Batch:
    """The texts that are being written, at most n_text of them. The memory for their keys and values is taken at once."""

    def __init__(self, engine: Engine, n_text: int) -> None:
        self.engine = engine
        self.is_joint = isinstance(engine.model, PackedGPT) and engine.model.writes_texts_together
        # a graph serves one cache only
        step = engine.step.step if isinstance(engine.step, GraphedStep) else engine.step
        self.idle = [Window(engine.model, step, 1, engine.fixed_shapes, ragged=False) for _ in range(n_text)]
        self.texts: list[BatchedText] = []  # those that wait longest for a token come first
        self.n_read = 0  # windows that were read since the others had a token

    @property
    def n_cache_bytes(self) -> int:
        """The memory of the keys and values of all texts."""
        return sum(window.cache.n_bytes for window in (*self.idle, *(text.window for text in self.texts)))

    def join(self, text: BatchedText) -> None:
        """Add a text. Call this only if `idle` is not empty."""
        text.window = self.idle.pop()
        text.window.restart()
        self.texts.append(text)

    def leave(self, text: BatchedText) -> None:
        """Remove a text, if it is still in the batch."""
        if text.window is not None:
            self.texts.remove(text)
            self.idle.append(text.window)
            text.window = None

    def step(self) -> list[BatchStep]:
        """Add one token to one text whose window must be read, because it is new or its window slides, or to all others.

        Those that end leave the batch. Windows are read first, so that a new text has its first token soon, but the others
        never wait for more than MOST_READS of them.
        """
        decoding = [text for text in self.texts if text.window.continues(text.tokens)]
        reading = [text for text in self.texts if not text.window.continues(text.tokens)][:1]
        if not reading or (self.n_read >= MOST_READS and decoding):
            self.n_read = 0
            rows = self.decode(decoding) if self.is_joint and decoding else [self.read(text) for text in decoding]
            return self.add_tokens(decoding, rows)
        self.n_read += 1
        rows = [self.read(reading[0])]
        self.texts.remove(reading[0])
        self.texts.append(reading[0])
        return self.add_tokens(reading, rows)

    def read(self, text: BatchedText) -> Tensor:
        """The logits (1, V) after a text, computed as `Engine.stream` computes them."""
        return text.window.next_logits([text.tokens])[0][:, 0]

    @torch.inference_mode()
    def decode(self, texts: list[BatchedText]) -> list[Tensor]:
        """The logits (1, V) after each text, of which one token has not been read."""
        tokens = torch.tensor([text.tokens[-1:] for text in texts])
        rows = self.engine.model.next_logits(tokens, [text.window.cache for text in texts])
        for text in texts:
            text.window.read[0] += 1
        return rows

    @torch.inference_mode()
    def add_tokens(self, texts: list[BatchedText], rows: list[Tensor]) -> list[BatchStep]:
        """Choose a token for each text from its logits (1, V). Texts with the same sampling rules are chosen together."""
        chosen: dict[BatchedText, int] = {}
        logits, healing = dict(zip(texts, rows, strict=True)), self.engine.healing
        for sampling in dict.fromkeys(text.sampling for text in texts):
            alike = [text for text in texts if text.sampling == sampling]
            choices = [healing.allowed(logits[text]) if text.needs_space else logits[text] for text in alike]
            history = NO_TOKENS.expand(len(alike), 0)
            if sampling.repetition_penalty != 1.0:
                history = padded_history([text.tokens for text in alike], 0).to(self.engine.device)
            uniform = torch.stack([torch.rand((), generator=text.generator) for text in alike]).to(self.engine.device)
            chosen |= zip(alike, choose_tokens(torch.cat(choices), history, sampling, uniform).tolist(), strict=True)
        return [self.add(text, chosen[text], logits[text]) for text in texts]

    def add(self, text: BatchedText, token: int, logits: Tensor) -> BatchStep:
        """Add a chosen token to a text. logits (1, V): those it was chosen from."""
        if token >= self.engine.tokenizer.n_vocab:  # `draw` returns V if scores are not finite
            self.leave(text)
            return BatchStep(text, None, error="the model's scores of the next token are not finite")
        score = None
        if text.n_likeliest is not None:
            score = token_score(logits[0].float().log_softmax(-1), token, text.n_likeliest)
        generated = text.append(token)
        if text.has_ended:
            self.leave(text)
        return BatchStep(text, generated, score)
