"""Detects problems of a training run. Each step is noted; at each evaluation, all checks judge the measurements.

docs/health.md explains each finding. L layers, H heads, V vocabulary.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, final

import numpy as np
from torch import Tensor

from andrea.attention import HeadStatistics
from andrea.checkpoint import Checkpoint
from andrea.config import MEASURES_HEADS, RunConfig
from andrea.text.chat import ChatTokenizer
from andrea.text.corpus import Corpus
from andrea.text.loader import Loader
from andrea.training.expected.curves import Standing
from andrea.training.health.text_quality import Judgement, ReferenceText, judge_texts

# Finding -> whether it counts as a failure: then health.on_failure=stop ends the run.
FINDINGS = {
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
    "heads_closed": False,
    "source_rising": False,
    "leak": False,
    "overfitting": False,
    "many_epochs": False,
    "worse_than_expected": False,
}

# ------------------------------------------------------------------------------------- what is judged, and what is advised

RECENT_STEPS = 50  # losses and gradient norms of this many steps define the usual range
LATEST_STEPS = 10  # the median loss of this many steps is the current loss
FEWEST_STEPS = 20  # with fewer steps, the usual range is not known
LOSS_SPIKE = 8.0  # a step's training loss lies this many robust standard deviations above the median of the last steps
GRADIENT_SPIKE = 5.0  # a step's gradient norm is this many times the median of the last steps
MAD_TO_DEVIATION = 1.4826  # standard deviation / median absolute deviation of a normal distribution
EARLY_STEPS = 50  # after the warm-up: healthy small models have learned the token frequencies by then


@dataclass(frozen=True)
class Evidence:
    step: int
    tokens: int  # of the training text that were read so far
    texts: Sequence[str]  # samples, without their prompts
    heads: HeadStatistics  # (L, H), over the held-out probe
    update_ratios: Tensor | None  # (matrices,): norm of the last update over norm of the weights
    val: dict[str, dict[str, float]]  # source -> {"loss": nats per token, "tokens": number of scored tokens}
    standing: Standing | None = None  # against the expected curve; None without one


def is_early(run: RunConfig, step: int) -> bool:
    """Whether it is too early to expect that the model has learned the token frequencies."""
    return step < run.optimizer.warmup_steps + EARLY_STEPS


def advising(findings: dict[str, str], remedy: str) -> dict[str, str]:
    """The findings, each message with the remedy."""
    return {name: f"{message}; {remedy}" for name, message in findings.items()}


def remedy_settings(*words: str) -> str:
    """'set key=value …' for a message. The words are quoted, so that they can be copied to a shell."""
    return "set " + " ".join(map(shlex.quote, words))


def optimizer_remedy(run: RunConfig) -> str:
    """Settings for smaller or safer optimizer steps: the safeguards that are off now, and half the learning rate."""
    optimizer, is_muon = run.optimizer, run.optimizer.kind == "muon" and not run.model.lora_rank
    rate = "matrix_learning_rate" if is_muon else "learning_rate"  # AdamW trains the factors of LoRA
    words = []
    if optimizer.clip_norm is None:
        words.append("optimizer.clip_norm=1")
    if optimizer.warmup_steps == 0:
        words.append("optimizer.warmup_steps=100")
    if optimizer.decay == 0 and not run.model.lora_rank:  # factors do not decay
        words.append("optimizer.weight_decay=0.1")
    return remedy_settings(*words, f"optimizer.{rate}={getattr(optimizer, rate) / 2:g}")


# ------------------------------------------------------------------------------------------------ the training data

COUNTED_TOKENS = 1 << 22  # at most so many training tokens are counted for the unigram entropy
COUNTED_PIECES = 16  # evenly spaced pieces of each source that are counted


@dataclass(frozen=True)
class DataSummary:
    shares: dict[str, float]  # source -> its share of the tokens that training draws
    lengths: dict[str, int]  # source -> tokens that training reads of it in an epoch
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
            {source.name: windows.n_token for source, windows in zip(corpus.sources, loader.in_order, strict=True)},
            float(-(known * np.log(known)).sum()),
        )

    def epochs(self, tokens: int) -> dict[str, float]:
        """How often each source has been read after so many training tokens."""
        return {name: tokens * share / self.lengths[name] for name, share in self.shares.items()}

    def weighted_loss(self, val: dict[str, dict[str, float]]) -> float:
        """The sources' mean validation loss (nats per token) by their shares of training: comparable with the training loss."""
        return sum(self.shares[name] * part["loss"] for name, part in val.items())


# ---------------------------------------------------------------------------------------- the optimizer's steps

LARGEST_UPDATE_RATIO = 0.25  # of a weight matrix's norm, in one step
MOST_CLIPPED = 0.9  # share of the steps since the last evaluation
SPIKES = {
    "loss_spikes": ("training loss", f"the median plus {LOSS_SPIKE:g} robust standard deviations"),
    "gradient_spikes": ("gradient norm", f"{GRADIENT_SPIKE:g} times the median"),
}  # finding -> the figure that has the spikes, and their limit


# ------------------------------------------------------------------------------------------------------------- the loss
# Compared with two models that ignore the context, a uniform guess and the token frequencies, and with runs of the same recipe
# on the same text.

WORSE_BPB = 0.03  # bits per byte beyond the spread over seeds
# What the recipe does not decide, but may spoil a result: each is replaced by its slow, plain form.
PLAIN = {"precision": "fp32", "compile": "off", "attention.implementation": "reference"}


def judge_standing(run: RunConfig, standing: Standing | None) -> dict[str, str]:
    """Finds a validation figure that is worse than the expected curve by more than seeds explain."""
    if standing is None or standing.bpb - standing.expected.bpb <= standing.expected.spread + WORSE_BPB:
        return {}
    plain = [f"{key}={value}" for key, value in PLAIN.items() if attrgetter(key)(run) != value]
    return {
        "worse_than_expected": f"validation {standing.bpb:.3f} bits per byte is "
        f"{standing.bpb - standing.expected.bpb:.3f} worse than runs of the same recipe on the same kind of "
        f"text at this point ({standing.expected.bpb:.3f} ± {standing.expected.spread:.3f}; limit: "
        f"{WORSE_BPB:g} beyond that); likely causes: a text that was cut or damaged, "
        f"or a numerical fault of this machine's fast paths"
        + (f"; to rule the second out, {remedy_settings(*plain)}" if plain else "")
    }


# ------------------------------------------------------------------------------------------------------ attention heads
# In a healthy model some heads attend to one key (often the first token) or uniformly over all keys. If nearly all heads
# behave in one of these two ways, the run has failed. A head whose gate is closed writes nothing, so it does not matter where
# it attends: it is reported as closed, and the other checks leave it out.

HEAD_SHARE = 0.9  # of all heads must behave so: half of a healthy model's heads may attend to its first token
ONE_KEY_ENTROPY = 0.02  # a head attends to one key below this share of the largest possible entropy
UNIFORM_ENTROPY = 0.995  # a head attends uniformly above this share of the largest possible entropy
LARGEST_LOGIT = 1000.0  # nats: bf16 has steps of 4 there, so that softmax sees only 1 or 55 times as much
CLOSED_GATE = 0.05  # a head is closed if its gate, which starts at 1, has a mean below this
MOST_NAMED = 8  # closed heads that a message names


def share_of(flags: Tensor) -> float:
    """The share of true flags (n,); 0 for none."""
    return int(flags.sum()) / flags.numel() if flags.numel() else 0.0


def judge_heads(run: RunConfig, evidence: Evidence) -> Judgement:
    findings, figures = {}, evidence.heads.figures()
    # (L * H,); a head without counted queries (NaN) counts as neither on one key nor uniform
    entropy_share = figures["entropy_share"].flatten().nan_to_num(nan=0.5)
    is_closed = figures["gate_mean"] < CLOSED_GATE if "gate_mean" in figures else None  # (L, H)
    if is_closed is not None:
        entropy_share = entropy_share[~is_closed.flatten()]
    on_one_key = share_of(entropy_share < ONE_KEY_ENTROPY)
    uniform = share_of(entropy_share > UNIFORM_ENTROPY)
    largest_logit, smaller_steps = float(figures["largest_logit"].amax()), optimizer_remedy(run)
    if on_one_key >= HEAD_SHARE:
        findings["heads_on_one_key"] = (
            f"{on_one_key:.0%} of the heads (limit: {HEAD_SHARE:.0%}) attend to one key (entropy below "
            f"{100 * ONE_KEY_ENTROPY:.3g}% of its maximum); {logits_remedy(run)}, and {smaller_steps}"
        )
    if uniform >= HEAD_SHARE and not is_early(run, evidence.step):
        findings["heads_uniform"] = (
            f"{uniform:.0%} of the heads (limit: {HEAD_SHARE:.0%}) attend uniformly over all keys (entropy "
            f"above {100 * UNIFORM_ENTROPY:.4g}% of its maximum) at step {evidence.step}; {smaller_steps}"
        )
    if largest_logit > LARGEST_LOGIT:
        findings["large_logits"] = (
            f"the largest attention logit is {largest_logit:.4g} (limit: {LARGEST_LOGIT:g}), where "
            f"{run.precision} loses the differences between logits; {logits_remedy(run)}"
        )
    measured = {"health/heads_on_one_key": on_one_key, "health/heads_uniform": uniform}
    if is_closed is not None:
        measured["health/heads_closed"] = share_of(is_closed)
        closed = [f"{layer}.{head}" for layer, head in is_closed.nonzero().tolist()]
        if closed:
            named = ", ".join(closed[:MOST_NAMED]) + ", …" * (len(closed) > MOST_NAMED)
            findings["heads_closed"] = (
                f"{len(closed)} of {is_closed.numel()} heads write almost nothing: the mean of their gate over held-out "
                f"text is below {CLOSED_GATE:g} (layer.head: {named}); compare the loss with that of a run "
                f"with attention.gate=null, or {smaller_steps}"
            )
    return Judgement(measured, findings)


def logits_remedy(run: RunConfig) -> str:
    """Settings for a new run that bound the logits, and that this run does not have."""
    attention = run.attention
    if attention.qk_clip is not None:
        return remedy_settings(f"attention.qk_clip={attention.qk_clip / 2:g}")
    if attention.score_softcap is not None:
        return remedy_settings(f"attention.score_softcap={attention.score_softcap / 2:g}")
    if not run.model.qk_norm:
        return remedy_settings("model.qk_norm=true")
    if attention.compatibility in ("cosine", "additive") or "." in attention.compatibility:
        return optimizer_remedy(run)  # their logits are bounded, or unknown to QK-clip
    words = ["model.qk_norm=false", "attention.qk_clip=100"]
    if attention.implementation not in MEASURES_HEADS:
        words.append("attention.implementation=auto")
    return remedy_settings(*words)


# ------------------------------------------------------------------------------------------------- the use of the data

SOURCE_RISE_NATS = 0.02  # rise of a source's validation loss per token, while all others fall
LEAK_NATS = 0.1  # training loss minus validation loss, per token; a leak exceeds both limits
LEAK_ERRORS = 4.0  # the same in standard errors of the training loss
OVERFIT_NATS = 0.05  # rise of the validation loss per token above its lowest
MANY_EPOCHS = 4.0  # read so often, text is worth nearly as much as new text (Muennighoff et al. 2023, arXiv 2305.16264)


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


# ----------------------------------------------------------------------------------------------------- the whole run


@final
class Health:
    """The health of one run. A checkpoint keeps `state()`, so a resumed run is judged like an uninterrupted one."""

    def __init__(
        self,
        run: RunConfig,
        n_vocab: int,
        data: DataSummary,
        reference: ReferenceText | None,
        planned_epochs: float = 0.0,
    ) -> None:
        """reference: figures of held-out text; None without samples. planned_epochs: that the program itself has planned."""
        self.run, self.n_vocab, self.data, self.reference = run, n_vocab, data, reference
        self.most_epochs = max(MANY_EPOCHS, planned_epochs)
        self.losses: deque[float] = deque(maxlen=RECENT_STEPS)  # nats per token, newest last
        self.norms: deque[float] = deque(maxlen=RECENT_STEPS)  # of the gradient before clipping, newest last
        self.interval = {"steps": 0, "loss_spikes": 0, "gradient_spikes": 0, "clipped": 0}  # since the last evaluation
        self.worst: dict[str, list[float]] = {}  # kind of spike -> [step, value, limit] of the highest since then
        self.learned = False  # whether the current loss has ever been below the unigram entropy
        self.val: dict[str, dict[str, float]] = {}  # `Evidence.val` of the last evaluation
        self.best: dict[str, float] | None = None  # the lowest validation loss, and the training loss at that step
        self.active: dict[str, int] = {}  # findings of the last evaluation -> the step at which each began

    def note_step(self, step: int, loss: float, norm: float) -> None:
        """Note a step's training loss (nats per token) and gradient norm before clipping, both finite."""
        clip_norm = self.run.optimizer.clip_norm
        self.interval["steps"] += 1
        if len(self.losses) >= FEWEST_STEPS:
            middle = statistics.median(self.losses)
            deviation = MAD_TO_DEVIATION * statistics.median(abs(each - middle) for each in self.losses)
            self.note_spike("loss_spikes", step, loss, middle + LOSS_SPIKE * deviation)
            self.note_spike("gradient_spikes", step, norm, GRADIENT_SPIKE * statistics.median(self.norms))
        self.interval["clipped"] += int(clip_norm is not None and norm > clip_norm)
        self.losses.append(loss)
        self.norms.append(norm)
        if len(self.losses) >= LATEST_STEPS and self.current_loss() < self.data.unigram_nats:
            self.learned = True

    def note_spike(self, kind: str, step: int, value: float, limit: float) -> None:
        if value > limit > 0:
            self.interval[kind] += 1
            if kind not in self.worst or value > self.worst[kind][1]:
                self.worst[kind] = [step, value, limit]

    def current_loss(self) -> float:
        """The median training loss of the last LATEST_STEPS steps, nats per token."""
        return statistics.median(list(self.losses)[-LATEST_STEPS:])

    def judge_text(self, texts: Sequence[str], step: int) -> Judgement:
        """The judgement without remedies. No findings before the model has learned more than token frequencies.

        More samples must confirm a finding: even a healthy small model writes a loop in one sample of five.
        """
        if self.reference is None:
            return Judgement({}, {})
        judgement = judge_texts(texts, self.reference)
        if is_early(self.run, step) and not self.learned:
            return judgement._replace(findings={})
        return judgement

    def judge(self, evidence: Evidence) -> tuple[dict[str, float], dict[str, str], dict[str, int]]:
        """Returns figures to record, findings that begin (name -> message), findings that end (name -> first step)."""
        run = self.run
        text = self.judge_text(evidence.texts, evidence.step)
        again = f"start again from the best checkpoint ({remedy_settings(f'init_from={run.name}')})"
        steps = self.judge_steps(evidence)
        heads, data = judge_heads(run, evidence), self.judge_data(evidence)
        figures = text.figures | steps.figures | heads.figures | data.figures
        findings = {
            **advising(text.findings, f"{again}, and {optimizer_remedy(run)}"),
            **steps.findings,
            **self.judge_loss(evidence),
            **heads.findings,
            **data.findings,
            **judge_standing(run, evidence.standing),
        }
        self.interval, self.worst = dict.fromkeys(self.interval, 0), {}
        begun = {name: message for name, message in findings.items() if name not in self.active}
        ended = {name: step for name, step in self.active.items() if name not in findings}
        self.active = {name: self.active.get(name, evidence.step) for name in findings}
        return figures | {f"health/findings/{name}": int(name in findings) for name in FINDINGS}, begun, ended

    def failed(self) -> list[str]:
        """The findings of the last evaluation that count as a failure."""
        return [name for name in self.active if FINDINGS[name]]

    def state(self) -> dict[str, Any]:
        """The state that checkpoints save. Its keys are part of the checkpoint format."""
        steps = {"interval": self.interval, "worst": self.worst, "learned": self.learned}
        series = {"losses": list(self.losses), "norms": list(self.norms)}
        return steps | series | {"val": self.val, "best": self.best, "active": self.active}

    def load_state(self, state: dict[str, Any]) -> None:
        self.interval, self.worst, self.learned = state["interval"], state["worst"], state["learned"]
        self.losses.extend(state["losses"])
        self.norms.extend(state["norms"])
        self.val, self.best = state["val"], state["best"]
        # A file may hold others.
        self.active = {name: step for name, step in state["active"].items() if name in FINDINGS}

    # ------------------------------------------------------------------------------- the loss and the optimizer's steps

    def judge_steps(self, evidence: Evidence) -> Judgement:
        steps, findings = self.interval["steps"], {}
        clipped_share = self.interval["clipped"] / max(1, steps)
        figures = {
            "health/loss_spikes": self.interval["loss_spikes"],
            "health/gradient_spikes": self.interval["gradient_spikes"],
            "health/clipped_share": clipped_share,
            "health/unigram_nats": self.data.unigram_nats,
        }
        for name, (figure, words) in SPIKES.items():
            if n_spike := self.interval[name]:
                step, value, limit = self.worst[name]
                findings[name] = (
                    f"the {figure} has a spike at {n_spike} of {steps} steps, the highest at step "
                    f"{step:.0f}: {value:.4g} is above {limit:.4g}, {words}"
                )
        if clipped_share > MOST_CLIPPED and steps >= FEWEST_STEPS and not is_early(self.run, evidence.step):
            findings["clipped_steps"] = (
                f"the gradient was clipped in {clipped_share:.0%} of {steps} steps (limit: "
                f"{MOST_CLIPPED:.0%}): the step size is set by gradient clipping "
                f"(optimizer.clip_norm={self.run.optimizer.clip_norm:g}), not by the learning rate"
            )
        if evidence.update_ratios is not None:
            ratio = figures["health/update_ratio"] = float(evidence.update_ratios.median())
            if ratio > LARGEST_UPDATE_RATIO:
                findings["large_updates"] = (
                    f"one step changes the median weight matrix by {ratio:.2g} of its norm (limit: {LARGEST_UPDATE_RATIO:g})"
                )
        return Judgement(figures, advising(findings, optimizer_remedy(self.run)))

    def judge_loss(self, evidence: Evidence) -> dict[str, str]:
        """Finds a loss that is not below the loss of a uniform guess or of the token frequencies."""
        step, warmup_steps = evidence.step, self.run.optimizer.warmup_steps
        if len(self.losses) < LATEST_STEPS or step < warmup_steps + LATEST_STEPS:
            return {}
        train, val = self.current_loss(), self.data.weighted_loss(evidence.val)
        memorises = max(self.data.epochs(evidence.tokens).values()) > 1  # then a high validation loss is overfitting
        uniform, unigram = math.log(self.n_vocab), self.data.unigram_nats
        findings = {}
        if max(train, train if memorises else val) >= uniform:
            findings["loss_above_uniform"] = (
                f"the larger of training loss {train:.3f} and validation loss {val:.3f} is not below ln V = {uniform:.3f}, "
                f"the loss of a uniform guess"
            )
        elif train >= unigram and (self.learned or not is_early(self.run, step)):
            findings["loss_above_unigram"] = (
                f"{step - warmup_steps} steps after the warm-up, training loss {train:.3f} is not "
                f"below {unigram:.3f}, the loss of a model that knows only the frequency of each token"
            )
        return advising(findings, optimizer_remedy(self.run))

    # ------------------------------------------------------------------------------------------ the use of the data

    def judge_data(self, evidence: Evidence) -> Judgement:
        """Finds sources read too often, forgotten sources, leaked held-out text and overfitting."""
        epochs = self.data.epochs(evidence.tokens)
        source = max(epochs, key=lambda name: epochs[name])
        figures = {"health/epochs": epochs[source]}
        findings = self.many_epochs(source, epochs[source], evidence.step) | self.rising_source(evidence)
        val = self.data.weighted_loss(evidence.val)
        if self.losses:
            findings |= self.overfitting(evidence, val, epochs[source])
        if len(self.losses) >= FEWEST_STEPS:
            train, error = line_end(list(self.losses))
            figures |= {
                "health/train_loss_now": train,
                "health/train_loss_error": error,
                "health/val_less_train": val - train,
            }
            findings |= self.leak(train, error, val)
        self.val = evidence.val
        return Judgement(figures, findings)

    def many_epochs(self, source: str, epochs: float, step: int) -> dict[str, str]:
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
        # Dropout raises the training loss alone; an average of the weights lowers the validation loss alone.
        if self.run.model.dropout or self.run.optimizer.average_half_life:
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
        train, uniform = self.current_loss(), math.log(self.n_vocab)
        if best is None or best["tokens"] != tokens or val < best["val"]:
            self.best = best = {"val": val, "train": train, "tokens": tokens, "step": evidence.step}
        rises = val - best["val"] > OVERFIT_NATS and train < best["train"]
        if epochs <= 1 or not (rises or train < uniform <= val):
            return {}
        steps = best["step"] if rises else int(evidence.step * min(1, self.most_epochs / epochs))
        decay = 2 * self.run.optimizer.decay or 0.1
        remedies = ["add text"]
        if steps > self.run.optimizer.warmup_steps:  # a shorter run would end before it has learned anything
            remedies.append(remedy_settings(f"train.steps={steps}"))
        if not self.run.model.lora_rank:  # whose factors do not decay
            remedies.append(remedy_settings(f"optimizer.weight_decay={decay:g}"))
        found = f"rose from {best['val']:.3f} at step {best['step']} to" if rises else "is"
        limit = "" if rises else f", not below ln V = {uniform:.3f}, the loss of a uniform guess,"
        return {
            "overfitting": f"validation loss {found} {val:.3f}{limit} (limit: {OVERFIT_NATS:g} "
            f"above the lowest) while the training loss fell to {train:.3f}, after {epochs:.1f} "
            f"epochs; the best evaluation is the result of the run (checkpoints/best). To end near the best "
            f"evaluation, {' or '.join(remedies)}"
        }


def make_health(
    run: RunConfig, corpus: Corpus, loader: Loader, checkpoint: Checkpoint | None, planned_epochs: float = 0.0
) -> Health:
    """The health of a run, with the state that `checkpoint` saved if one is given."""
    reference = None
    if run.train.sample_tokens and not isinstance(corpus.tokenizer, ChatTokenizer):
        held_out = [source.val for source in corpus.sources]
        reference = ReferenceText(held_out, corpus.tokenizer, run.train.sample_tokens)
    health = Health(run, corpus.tokenizer.n_vocab, DataSummary.of(corpus, loader), reference, planned_epochs)
    if checkpoint is not None:
        health.load_state(checkpoint.state["health"])
    return health
