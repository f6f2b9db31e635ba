"""Checks of the data: sources read too often, forgotten sources, leaked held-out text, overfitting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from andrea.config import RunConfig
from andrea.text.corpus import Corpus
from andrea.text.loader import Loader
from andrea.training.health.check import FEWEST_STEPS, Check, Evidence, Finding, Judgement, StepHistory, remedy_settings

SOURCE_RISE_NATS = 0.02  # rise of a source's validation loss per token, while all others fall
LEAK_NATS = 0.1  # training loss minus validation loss, per token; a leak exceeds both limits
LEAK_ERRORS = 4.0  # the same in standard errors of the training loss
OVERFIT_NATS = 0.05  # rise of the validation loss per token above its lowest
MANY_EPOCHS = 4.0  # read so often, text is worth nearly as much as new text (Muennighoff et al. 2023, arXiv 2305.16264)
COUNTED_TOKENS = 1 << 22  # at most so many training tokens are counted for the unigram entropy
COUNTED_PIECES = 16  # evenly spaced pieces of each source that are counted


@dataclass(frozen=True)
class DataSummary:
    """Facts about the training data, known before training."""

    shares: dict[str, float]  # source -> its share of the tokens that training draws
    lengths: dict[str, int]  # source -> number of its training tokens
    unigram_nats: float  # unigram entropy: the loss of a model that knows only the token frequencies

    @classmethod
    def of(cls, corpus: Corpus, loader: Loader) -> DataSummary:
        """Counts the tokens of evenly spaced pieces of each source."""
        shares, n_vocab = loader.source_shares(), corpus.tokenizer.n_vocab
        frequency = np.zeros(n_vocab)  # (V,), sums to 1
        for source, share in zip(corpus.sources, shares, strict=True):
            counts = np.zeros(n_vocab)
            counted = min(len(source.train), COUNTED_TOKENS // len(corpus.sources))
            length = counted // COUNTED_PIECES
            for start in np.linspace(0, len(source.train) - length, COUNTED_PIECES).astype(int):
                counts += np.bincount(source.train[start : start + length], minlength=n_vocab)[:n_vocab]
            frequency += share * counts / max(counts.sum(), 1)
        known = frequency[frequency > 0]
        return cls(
            {source.name: share for source, share in zip(corpus.sources, shares.tolist(), strict=True)},
            {source.name: len(source.train) for source in corpus.sources},
            float(-(known * np.log(known)).sum()),
        )

    def epochs(self, tokens: int) -> dict[str, float]:
        """How often each source has been read after so many training tokens."""
        return {name: tokens * share / self.lengths[name] for name, share in self.shares.items()}

    def weighted_loss(self, val: dict[str, dict[str, float]]) -> float:
        """The mean of the sources' validation losses (nats per token), weighted by their shares of the training tokens.

        Only this mean can be compared with the training loss.
        """
        return sum(self.shares[name] * part["loss"] for name, part in val.items())


@final
class DataCheck(Check):
    FINDINGS: ClassVar = {
        "source_rising": Finding(
            "one source's validation loss rose while the loss of every other source fell",
            fails_run=False,
            remedy="raise `data.sources.NAME.weight`",
        ),
        "leak": Finding(
            "the validation loss is below the training loss by more than chance explains",
            fails_run=False,
            remedy="search the text for duplicates of held-out text",
        ),
        "overfitting": Finding(
            "after a source was read once, the validation loss rose while the training loss fell, or only the training loss is "
            "below ln V",
            fails_run=False,
            remedy="add text, lower `train.steps`, or raise `optimizer.weight_decay`; `checkpoints/best` is the result of the run",
        ),
        "many_epochs": Finding(
            "a source was read more than four times",
            fails_run=False,
            remedy="add text, or lower `train.steps`, or for a mixture `data.sources.NAME.weight`",
        ),
    }

    def __init__(
        self, run: RunConfig, history: StepHistory, data: DataSummary, n_vocab: int, planned_epochs: float = 0.0
    ) -> None:
        super().__init__(run, history)
        self.data, self.n_vocab, self.most_epochs = data, n_vocab, max(MANY_EPOCHS, planned_epochs)
        self.val: dict[str, dict[str, float]] = {}  # `Evidence.val` of the last evaluation
        self.best: dict[str, float] | None = None  # the lowest validation loss, and the training loss at that step

    def judge(self, evidence: Evidence) -> Judgement:
        epochs = self.data.epochs(evidence.tokens)
        source = max(epochs, key=lambda name: epochs[name])
        figures = {"health/epochs": epochs[source]}
        findings = self.epochs(source, epochs[source], evidence.step) | self.rising_source(evidence)
        val = self.data.weighted_loss(evidence.val)
        if self.history.losses:
            findings |= self.overfitting(evidence, val, epochs[source])
        if len(self.history.losses) >= FEWEST_STEPS:
            train, error = line_end(list(self.history.losses))
            figures |= {
                "health/train_loss_now": train,
                "health/train_loss_error": error,
                "health/val_less_train": val - train,
            }
            findings |= self.leak(train, error, val)
        self.val = evidence.val
        return Judgement(figures, findings)

    def epochs(self, source: str, epochs: float, step: int) -> dict[str, str]:
        limit, share = self.most_epochs, self.data.shares[source]
        if epochs <= limit:
            return {}
        remedy = remedy_settings(f"train.steps={max(1, int(step * limit / epochs))}")
        if self.run.data.kind == "mixture" and len(self.data.shares) > 1:
            remedy += " or " + remedy_settings(f"data.sources.{source}.weight={share * limit / epochs:.2g}")
        return {
            "many_epochs": f"the data source {source} was read {epochs:.2f} times (limit: "
            f"{limit:g}): the model learns less from text that it has read before; add text, or {remedy}"
        }

    def rising_source(self, evidence: Evidence) -> dict[str, str]:
        """Finds a source whose validation loss rises while the loss of every other source falls."""
        comparable = len(evidence.val) > 1 and all(
            name in self.val and self.val[name]["tokens"] == part["tokens"] for name, part in evidence.val.items()
        )
        if not comparable:
            return {}
        rise = {name: part["loss"] - self.val[name]["loss"] for name, part in evidence.val.items()}
        source = max(rise, key=lambda name: rise[name])
        if rise[source] <= SOURCE_RISE_NATS or any(r >= 0 for n, r in rise.items() if n != source):
            return {}
        return {
            "source_rising": f"the validation loss of {source} rose by {rise[source]:.3f} since the last evaluation "
            f"(limit: {SOURCE_RISE_NATS:g}) while the loss of every other source fell; "
            + remedy_settings(f"data.sources.{source}.weight={self.raised_weight(source):.2g}")
        }

    def leak(self, train: float, error: float, val: float) -> dict[str, str]:
        if self.run.model.drops:  # in training only, which raises the training loss
            return {}
        if train - val <= max(LEAK_NATS, LEAK_ERRORS * error):
            return {}
        return {
            "leak": f"validation loss {val:.3f} is below the training loss {train:.3f} ± {error:.3f} (limits: "
            f"{LEAK_NATS:g}, and {LEAK_ERRORS:g} standard errors): the training data may "
            f"contain held-out text, or the held-out text is easier; search the text for duplicates"
        }

    def raised_weight(self, source: str) -> float:
        """A weight that gives the source a larger share. If a source has no weight, the weights sum to less than 1."""
        weights = {name: each.weight for name, each in self.run.data.sources.items()}
        now = weights.get(source) or self.data.shares[source]
        if not any(weight is None for name, weight in weights.items() if name != source):
            return 1.5 * now
        left = 1 - sum(weight for name, weight in weights.items() if name != source and weight is not None) - now
        return now + min(now, left) / 2

    def overfitting(self, evidence: Evidence, val: float, epochs: float) -> dict[str, str]:
        """Compares this evaluation with the best earlier one. Both must cover equally many held-out tokens."""
        tokens, best = sum(part["tokens"] for part in evidence.val.values()), self.best
        train, uniform = self.history.current_loss(), math.log(self.n_vocab)
        if best is None or best["tokens"] != tokens or val < best["val"]:
            self.best = best = {"val": val, "train": train, "tokens": tokens, "step": evidence.step}
        rises = val - best["val"] > OVERFIT_NATS and train < best["train"]
        if epochs <= 1 or not (rises or train < uniform <= val):
            return {}
        steps = best["step"] if rises else int(evidence.step * min(1, self.most_epochs / epochs))
        decay = 2 * self.run.optimizer.decay or 0.1
        # A run as short as its warm-up would end before it has learned anything.
        is_longer = steps > self.run.optimizer.warmup_steps
        shorter = remedy_settings(f"train.steps={steps}") + " or " if is_longer else ""
        found = f"rose from {best['val']:.3f} at step {best['step']} to" if rises else "is"
        limit = "" if rises else f", not below ln V = {uniform:.3f}, the loss of a uniform guess,"
        return {
            "overfitting": f"validation loss {found} {val:.3f}{limit} (limit: {OVERFIT_NATS:g} "
            f"above the lowest) while the training loss fell to {train:.3f}, after {epochs:.1f} "
            f"epochs; the best evaluation is the result of the run (checkpoints/best). To end near the best "
            f"evaluation, add text, or {shorter}{remedy_settings(f'optimizer.weight_decay={decay:g}')}"
        }

    def state(self) -> dict[str, Any]:
        """The state that checkpoints save. Its keys are part of the checkpoint format."""
        return {"val": self.val, "best": self.best}

    def load_state(self, state: dict[str, Any]) -> None:
        self.val, self.best = state["val"], state["best"]


def line_end(losses: Sequence[float]) -> tuple[float, float]:
    """The end of a straight line fitted to a series by least squares, and the standard error of this end value.

    A falling training loss has a mean above its newest value. Compared with this mean, a validation loss would look too
    low, as if held-out text had leaked into the training data.
    """
    time = np.arange(1 - len(losses), 1, dtype=np.float64)  # 0 is the newest
    spread = ((time - time.mean()) ** 2).sum()
    slope = ((time - time.mean()) * losses).sum() / spread
    value = np.mean(losses) - slope * time.mean()
    residual = np.asarray(losses) - value - slope * time
    variance = (residual**2).sum() / (len(losses) - 2)
    return float(value), float(np.sqrt(variance * (1 / len(losses) + time.mean() ** 2 / spread)))
