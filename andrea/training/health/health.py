"""A run that fails says so by name: what is judged at each evaluation, and what was noted on the way to it.

Every figure here is a host number that the trainer had read anyway, or is read at an evaluation: no step waits for it.
L layers, H heads.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from andrea.attention import HeadStatistics
from andrea.config import RunConfig
from andrea.text.corpus import Corpus
from andrea.text.loader import Loader
from andrea.training.health.text import ReferenceText
from andrea.training.parallel.strategy import Parallel

RECENT_STEPS = 50  # whose losses and gradient norms say what is usual
LATEST_STEPS = 10  # whose median says where the loss is now
FEWEST_STEPS = 20  # with fewer there is no usual
MAD_TO_DEVIATION = 1.4826  # a normal distribution's standard deviation over its median absolute deviation
COUNTED_TOKENS = 1 << 22  # of the training data at most, for the entropy of single tokens
SAMPLED_WEIGHTS = 1 << 14  # of each matrix at most, whose change is measured
# Each check's name, and whether the run has failed when it is found: those alone stop a run.
CHECKS = {
    "repeated_word": True,
    "repeated_phrase": True,
    "repeated_punctuation": True,
    "poor_text": False,
    "loss_above_uniform": True,
    "loss_above_unigram": True,
    "loss_spikes": False,
    "gradient_spikes": False,
    "clipped_steps": False,
    "large_updates": False,
    "heads_on_one_key": True,
    "heads_uniform": True,
    "large_logits": True,
    "source_rising": False,
    "leak": False,
    "overfitting": False,
    "many_epochs": False,
}


@dataclass(frozen=True)
class Evaluation:
    """What the trainer hands over at an evaluation."""

    step: int
    tokens: int  # seen in training
    texts: Sequence[str]  # samples, without their prompts
    heads: HeadStatistics  # (L, H), of the held-out probe
    update_ratios: Tensor | None  # (matrices,): of the step just made, size of the update over size of the weights
    val: dict[str, dict[str, float]]  # source -> {"loss": nats per token, "tokens": scored}


@dataclass(frozen=True)
class Data:
    """What the data say before training."""

    shares: dict[str, float]  # source -> its share of the training tokens
    lengths: dict[str, int]  # source -> its training tokens
    unigram_nats: float  # entropy of single training tokens: the loss of a model that knows their frequencies alone

    @classmethod
    def of(cls, corpus: Corpus, loader: Loader) -> Data:
        share = loader.source_shares()
        names = [source.name for source in corpus.sources]
        frequency = np.zeros(corpus.tokenizer.n_vocab)
        for source, weight in zip(corpus.sources, share, strict=True):
            counts = np.zeros(corpus.tokenizer.n_vocab)
            length = min(len(source.train), COUNTED_TOKENS // len(names))
            for start in np.linspace(0, len(source.train) - length // 16, 16).astype(int):
                counts += np.bincount(source.train[start : start + length // 16], minlength=len(counts))[: len(counts)]
            frequency += weight * counts / max(counts.sum(), 1)
        known = frequency[frequency > 0]
        return cls(
            dict(zip(names, share.tolist(), strict=True)),
            {source.name: len(source.train) for source in corpus.sources},
            float(-(known * np.log(known)).sum()),
        )


class Health:
    """The judgement of one run. `state` is part of every checkpoint: a resumed run judges as an undisturbed one."""

    def __init__(self, run: RunConfig, n_vocab: int, data: Data, reference: ReferenceText | None) -> None:
        self.run, self.config, self.n_vocab, self.data, self.reference = run, run.health, n_vocab, data, reference
        self.losses: deque[float] = deque(maxlen=RECENT_STEPS)  # nats per token, newest last
        self.norms: deque[float] = deque(maxlen=RECENT_STEPS)  # of the gradient, before clipping
        self.interval = {"steps": 0, "loss_spikes": 0, "gradient_spikes": 0, "clipped": 0}  # since the last evaluation
        self.worst: dict[str, list[float]] = {}  # spike -> [step, value, limit] of the worst since then
        self.learned = False  # the loss has been below what single tokens' frequencies give
        self.val: dict[str, dict[str, float]] = {}  # at the evaluation before
        self.best: dict[str, float] | None = None  # the lowest validation loss, and the training loss then
        self.active: dict[str, int] = {}  # finding -> the step at which it began

    def state(self) -> dict[str, Any]:
        return {
            "losses": list(self.losses),
            "norms": list(self.norms),
            **{key: getattr(self, key) for key in ("interval", "worst", "learned", "val", "best", "active")},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.losses.extend(state["losses"])
        self.norms.extend(state["norms"])
        for key in ("interval", "worst", "learned", "val", "best", "active"):
            setattr(self, key, state[key])

    # ------------------------------------------------------------------------------------------------- every step

    def note_step(self, step: int, loss: float, norm: float) -> None:
        """A step's training loss (nats per token) and gradient norm, both finite."""
        self.interval["steps"] += 1
        if len(self.losses) >= FEWEST_STEPS:
            middle = statistics.median(self.losses)
            deviation = MAD_TO_DEVIATION * statistics.median(abs(each - middle) for each in self.losses)
            self.note_spike("loss_spikes", step, loss, middle + self.config.loss_spike * deviation)
            self.note_spike("gradient_spikes", step, norm, self.config.gradient_spike * statistics.median(self.norms))
        clip_norm = self.run.optimizer.clip_norm
        self.interval["clipped"] += int(clip_norm is not None and norm > clip_norm)
        self.losses.append(loss)
        self.norms.append(norm)
        if len(self.losses) >= LATEST_STEPS and self.latest_loss() < self.data.unigram_nats:
            self.learned = True

    def note_spike(self, kind: str, step: int, value: float, limit: float) -> None:
        if value > limit > 0:
            self.interval[kind] += 1
            if kind not in self.worst or value > self.worst[kind][1]:
                self.worst[kind] = [step, value, limit]

    def latest_loss(self) -> float:
        return statistics.median(list(self.losses)[-LATEST_STEPS:])

    # ------------------------------------------------------------------------------------------ every evaluation

    def judge(self, seen: Evaluation) -> tuple[dict[str, float | None], dict[str, str], dict[str, int]]:
        """(figures for the record, findings that begin here: name -> message, those that ended: name -> first step)."""
        figures: dict[str, float | None] = {}
        findings: dict[str, str] = {}
        for check in (self.judge_text, self.judge_optimisation, self.judge_attention, self.judge_data):
            some_figures, some_findings = check(seen)
            figures |= some_figures
            findings |= some_findings
        begun = {name: message for name, message in findings.items() if name not in self.active}
        ended = {name: step for name, step in self.active.items() if name not in findings}
        self.active = {name: self.active.get(name, seen.step) for name in findings}
        self.interval = dict.fromkeys(self.interval, 0)
        self.worst = {}
        self.val = seen.val
        return figures | {f"health/findings/{name}": int(name in findings) for name in CHECKS}, begun, ended

    def failed(self) -> list[str]:
        """What has failed, of what the last evaluation found."""
        return [name for name in self.active if CHECKS[name]]

    def judge_text(self, seen: Evaluation) -> tuple[dict[str, float], dict[str, str]]:
        figures, found = self.read(seen.texts, seen.step)
        before = "start again from a checkpoint before it (init_from=…)"
        return figures, {name: f"{message}; {before}, and {self.remedy()}" for name, message in found.items()}

    def suspects(self, texts: Sequence[str], step: int) -> bool:
        """Whether they look ill. One text in five of a small healthy model is a loop: before it is said, more are read."""
        return bool(self.read(texts, step)[1])

    def read(self, texts: Sequence[str], step: int) -> tuple[dict[str, float], dict[str, str]]:
        """(figures, findings) of samples; no findings while the model knows no more than the frequencies of tokens."""
        if self.reference is None:
            return {}, {}
        figures, found = self.reference.judge(texts, self.config)
        return figures, {} if self.too_early(step) and not self.learned else found

    def judge_optimisation(self, seen: Evaluation) -> tuple[dict[str, float | None], dict[str, str]]:
        config, steps, found = self.config, max(1, self.interval["steps"]), {}
        figures: dict[str, float | None] = {
            "health/loss_spikes": self.interval["loss_spikes"],
            "health/gradient_spikes": self.interval["gradient_spikes"],
            "health/clipped_share": self.interval["clipped"] / steps,
            "health/unigram_nats": self.data.unigram_nats,
        }
        spikes = {
            "loss_spikes": f"median + {config.loss_spike:g} robust deviations (health.loss_spike)",
            "gradient_spikes": f"{config.gradient_spike:g} medians (health.gradient_spike)",
        }
        for name, limit in spikes.items():
            if self.interval[name]:
                step, value, most = self.worst[name]
                found[name] = (
                    f"{self.interval[name]} of {steps} steps, the worst at step {step:.0f}: {value:.4g} is above "
                    f"{most:.4g}, {limit}; {self.remedy()}"
                )
        if (
            figures["health/clipped_share"] > config.clipped_share
            and steps >= FEWEST_STEPS
            and not self.too_early(seen.step)
        ):
            found["clipped_steps"] = (
                f"{figures['health/clipped_share']:.0%} of {steps} steps were clipped (health.clipped_share="
                f"{config.clipped_share:g}): optimizer.clip_norm={self.run.optimizer.clip_norm:g} sets the pace, not the "
                f"rate; {self.remedy()}"
            )
        if seen.update_ratios is not None:
            ratio = float(seen.update_ratios.median())
            figures["health/update_ratio"] = ratio
            if ratio > config.update_ratio:
                found["large_updates"] = (
                    f"a step changes the median matrix by {ratio:.2g} of its size (health.update_ratio="
                    f"{config.update_ratio:g}); {self.remedy()}"
                )
        return figures, found | self.judge_loss(seen)

    def judge_loss(self, seen: Evaluation) -> dict[str, str]:
        """The loss against models that know nothing, or single tokens' frequencies and nothing else."""
        step, warm = seen.step, self.run.optimizer.warmup_steps
        if len(self.losses) < LATEST_STEPS or step < warm + LATEST_STEPS:
            return {}
        loss, uniform, unigram = self.latest_loss(), math.log(self.n_vocab), self.data.unigram_nats
        val = self.weighted(seen.val)
        if max(loss, val) >= uniform:
            return {
                "loss_above_uniform": f"the larger of training loss {loss:.3f} and validation loss {val:.3f} is not below "
                f"ln V = {uniform:.3f}, that of knowing nothing; {self.remedy()}"
            }
        if loss >= unigram and (self.learned or not self.too_early(step)):
            return {
                "loss_above_unigram": f"training loss {loss:.3f} is not below {unigram:.3f}, that of knowing how frequent "
                f"each token is and no more, {step - warm} steps after the warm-up (health.unigram_steps="
                f"{self.config.unigram_steps}); {self.remedy()}"
            }
        return {}

    def judge_attention(self, seen: Evaluation) -> tuple[dict[str, float | None], dict[str, str]]:
        """A head may well look at one key (the first token, often) or at all alike: nearly all heads may not."""
        config, found = self.config, {}
        figures = seen.heads.figures()
        entropy_share = (
            figures["entropy_share"].flatten().nan_to_num(nan=0.5)
        )  # (L * H,); a head without queries: neither
        on_one_key = float((entropy_share < config.one_key_entropy).double().mean())
        uniform = float((entropy_share > config.uniform_entropy).double().mean())
        largest = float(figures["largest_logit"].amax())
        if on_one_key >= config.head_share:
            found["heads_on_one_key"] = (
                f"{on_one_key:.0%} of the heads look at one key (entropy below health.one_key_entropy="
                f"{config.one_key_entropy:g} of the possible); set model.qk_norm=true or attention=qk_clip, {self.remedy()}"
            )
        if uniform >= config.head_share and not self.too_early(seen.step):
            found["heads_uniform"] = (
                f"{uniform:.0%} of the heads look at all keys alike (entropy above health.uniform_entropy="
                f"{config.uniform_entropy:g} of the possible), step {seen.step}; {self.remedy()}"
            )
        if largest > config.largest_logit:
            found["large_logits"] = (
                f"the largest attention logit is {largest:.4g} (health.largest_logit={config.largest_logit:g}), on the way "
                f"to what {self.run.precision} can't hold apart; set model.qk_norm=true or attention=qk_clip"
            )
        return {"health/heads_on_one_key": on_one_key, "health/heads_uniform": uniform}, found

    def judge_data(self, seen: Evaluation) -> tuple[dict[str, float | None], dict[str, str]]:
        config, found = self.config, {}
        epochs = {name: seen.tokens * share / self.data.lengths[name] for name, share in self.data.shares.items()}
        source = max(epochs, key=lambda name: epochs[name])
        figures: dict[str, float | None] = {"health/epochs": epochs[source]}
        if epochs[source] > config.epochs:
            found["many_epochs"] = (
                f"{source} has been read {epochs[source]:.2f} times (health.epochs={config.epochs:g}): what comes now "
                f"teaches less; add text, or lower data.sources.{source}.weight or train.steps"
            )
        found |= self.judge_sources(seen)
        if len(self.losses) < FEWEST_STEPS:
            return figures, found
        train, error = now_of(list(self.losses))
        val = self.weighted(seen.val)
        tokens = sum(part["tokens"] for part in seen.val.values())
        figures |= {
            "health/train_loss_now": train,
            "health/train_loss_error": error,
            "health/val_less_train": val - train,
        }
        if train - val > max(config.leak_nats, config.leak_errors * error):
            found["leak"] = (
                f"validation loss {val:.3f} is below the training loss {train:.3f} ± {error:.3f} (health.leak_nats="
                f"{config.leak_nats:g}, health.leak_errors={config.leak_errors:g}): held-out text may be in the training "
                f"data, or is easier; look for duplicates in data.path"
            )
        best = self.best
        if best is None or best["tokens"] != tokens or val < best["val"]:
            self.best = {"val": val, "train": train, "tokens": tokens, "step": seen.step}
        elif val - best["val"] > config.overfit_nats and train < best["train"] and epochs[source] > 1:
            found["overfitting"] = (
                f"validation loss rose from {best['val']:.3f} at step {best['step']} to {val:.3f} (health.overfit_nats="
                f"{config.overfit_nats:g}) while the training loss fell; stop at checkpoints/best, add text, or raise "
                f"optimizer.weight_decay={self.run.optimizer.weight_decay:g}"
            )
        return figures, found

    def judge_sources(self, seen: Evaluation) -> dict[str, str]:
        """A source whose loss rises while that of every other falls: the others are learned at its cost."""
        same = len(seen.val) > 1 and all(
            name in self.val and self.val[name]["tokens"] == part["tokens"] for name, part in seen.val.items()
        )
        if not same:
            return {}
        rise = {name: part["loss"] - self.val[name]["loss"] for name, part in seen.val.items()}
        source = max(rise, key=lambda name: rise[name])
        if rise[source] <= self.config.source_rise_nats or any(r >= 0 for n, r in rise.items() if n != source):
            return {}
        return {
            "source_rising": f"the validation loss of {source} rose by {rise[source]:.3f} since the last evaluation "
            f"(health.source_rise_nats={self.config.source_rise_nats:g}), all others fell; raise "
            f"data.sources.{source}.weight"
        }

    def too_early(self, step: int) -> bool:
        """Before a model can be expected to know the frequencies of tokens."""
        return step < self.run.optimizer.warmup_steps + self.config.unigram_steps

    def weighted(self, val: dict[str, dict[str, float]]) -> float:
        """The validation loss of the sources in their shares of the training tokens, to hold the training loss against."""
        return sum(self.data.shares[name] * part["loss"] for name, part in val.items())

    def remedy(self) -> str:
        """What makes this run's optimizer remedy: what it lacks first, then half the rate."""
        optimizer = self.run.optimizer
        rate = "matrix_learning_rate" if optimizer.kind == "muon" else "learning_rate"
        lacking = [
            words
            for words, lacks in (
                ("optimizer.clip_norm=1", optimizer.clip_norm is None),
                ("optimizer.warmup_steps=100", optimizer.warmup_steps == 0),
                ("optimizer.weight_decay=0.1", optimizer.weight_decay == 0),
            )
            if lacks
        ]
        return "set " + ", ".join([*lacking, f"optimizer.{rate}={getattr(optimizer, rate) / 2:g}"])


def now_of(losses: Sequence[float]) -> tuple[float, float]:
    """Where a falling series stands at its end, by a straight line through it: (value, its standard error).

    A mean over steps would lag behind a loss that falls, and look like a leak.
    """
    time = np.arange(1 - len(losses), 1, dtype=np.float64)  # 0 is the newest
    spread = ((time - time.mean()) ** 2).sum()
    slope = ((time - time.mean()) * losses).sum() / spread
    value = np.mean(losses) - slope * time.mean()
    residual = np.asarray(losses) - value - slope * time
    variance = (residual**2).sum() / (len(losses) - 2)
    return float(value), float(np.sqrt(variance * (1 / len(losses) + time.mean() ** 2 / spread)))


@torch.no_grad()
def sampled_weights(parallel: Parallel) -> list[Tensor]:
    """Copies of at most SAMPLED_WEIGHTS numbers of each matrix, spread evenly over it, of those that this rank keeps."""
    sampled = []
    for name, part in parallel.local_parameters.items():
        shape = parallel.shapes[name]
        if len(shape) == 2:
            stride, before = -(-shape.numel() // SAMPLED_WEIGHTS), parallel.local_rows(name).start * shape[1]
            sampled.append(part.flatten()[-before % stride :: stride].clone())
    return sampled


def update_ratios(before: list[Tensor], after: list[Tensor], added: Callable[[Tensor], Tensor]) -> Tensor:
    """(matrices,): the size of a step's change over the size of what it changed, on the device.

    added: adds up what the ranks have of a matrix.
    """
    changed = [(new - old).square().sum() for old, new in zip(before, after, strict=True)]
    sizes = added(torch.stack([torch.stack(changed), torch.stack([old.square().sum() for old in before])])).sqrt()
    return sizes[0] / sizes[1].clamp(min=1e-30)
