"""Checks of the attention heads. L layers, H heads.

In a healthy model some heads attend to one key (often the first token) or uniformly over all keys. If nearly all heads
behave in one of these two ways, the run has failed. A head whose gate is closed writes nothing, so it does not matter where
it attends: it is reported as closed, and the other checks leave it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar, final

import torch
from torch import Tensor

from andrea.attention import HeadStatistics, MultiHeadAttention
from andrea.attention.implementations.triton import kernel_errors
from andrea.config import MEASURES_HEADS, AttentionConfig
from andrea.model.gpt import GPT
from andrea.runtime.files import lines_of
from andrea.text.corpus import Corpus
from andrea.text.loader import validation_batches
from andrea.training.health.check import (
    OPTIMIZER_REMEDY,
    Check,
    Evidence,
    Finding,
    Judgement,
    optimizer_remedy,
    remedy_settings,
)

# ---------------------------------------------------------------------------------------------------------------- heads
# Measures the attention heads during training and computes the figures that are logged.
#
# L layers, H heads. The definitions of the figures are in andrea/attention/statistics.py. `attention/…` is measured on the
# probe, a fixed batch of held-out text, in fp32, so that runs on the same data can be compared even if they train with
# different implementations. `attention/step/…` is measured in the training step itself, if `measures_every_step` is true.

PROBE_TOKENS = 2048  # in the probe, at most; but at least one sequence of each source


def probe_batch(corpus: Corpus, sequence_length: int) -> Tensor:
    """The probe, B sequences of T tokens, (B, T) int64: the first held-out sequences of every source."""
    each = max(1, PROBE_TOKENS // sequence_length // len(corpus.sources))
    return torch.cat([next(validation_batches(source.val, sequence_length, each))[0] for source in corpus.sources])


@torch.no_grad()
def probe(model: GPT, tokens: Tensor, say: Callable[[str], None] | None = None) -> HeadStatistics:
    """The statistics (L, H) of the heads over tokens (B, T), in the precision of the weights: fp32 during training.

    Every run is measured, also one that trains with another implementation. A fused kernel that fails here must not end
    such a run: then the textbook formula measures, and `say` is told why. Without `say`, the error is raised.
    """
    try:
        return statistics_of(model, tokens)
    except (RuntimeError, *kernel_errors()) as error:
        if say is None or isinstance(error, torch.OutOfMemoryError):  # the textbook formula would need more memory
            raise
        say(f"the attention heads are measured by the textbook formula, because the kernel failed: {first_line(error)}")
    with implementation(model, "reference"):
        return statistics_of(model, tokens)


def statistics_of(model: GPT, tokens: Tensor) -> HeadStatistics:
    """Sequences are processed one at a time, because some implementations must materialise the scores (H, T, T)."""
    heads = None
    for sequence in tokens.split(1):
        _, layers = model(sequence, statistics=True)
        measured = HeadStatistics.of_layers(layers)
        heads = measured if heads is None else heads.merged(measured)
    return heads


@contextmanager
def implementation(model: GPT, name: str) -> Iterator[None]:
    """While this is open, all layers of the model use the named implementation of attention."""
    layers = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    before = [layer.implementation for layer in layers]
    for layer in layers:
        layer.implementation = name
    try:
        yield
    finally:
        for layer, its_own in zip(layers, before, strict=True):
            layer.implementation = its_own


def first_line(error: Exception) -> str:
    return lines_of(str(error).strip() or repr(error))[0]


def scalars(heads: HeadStatistics, group: str = "attention") -> dict[str, float | None]:
    """Figures over all layers and heads, named `group/…`: means, and extremes where a single head matters."""
    figures = heads.figures()
    mean = {name: value.nanmean() for name, value in figures.items() if name != "largest_logit"}
    extremes = {
        "largest_logit": figures["largest_logit"].amax(),
        "lowest_entropy_share": lowest(figures["entropy_share"]),
        "highest_first_token_mass": -lowest(-figures["first_token_mass"]),
        "highest_previous_token_mass": -lowest(-figures["previous_token_mass"]),
    }
    if "gate_mean" in figures:
        extremes["lowest_gate_mean"] = lowest(figures["gate_mean"])
    return {f"{group}/{name}": finite_or_none(float(value)) for name, value in (mean | extremes).items()}


def heatmaps(heads: HeadStatistics) -> dict[str, list[list[float | None]]]:
    """The figures of each head, named `attention/heads/…`: L rows of H numbers each."""
    return {
        f"attention/heads/{name}": [[finite_or_none(number) for number in row] for row in value.tolist()]
        for name, value in heads.figures().items()
    }


def lowest(values: Tensor) -> Tensor:
    """The smallest number that is not NaN, 0-dim."""
    return values.nan_to_num(nan=math.inf).amin()


def finite_or_none(number: float) -> float | None:
    """The number, or None (null in JSON) for the NaN of a head without counted queries."""
    return number if math.isfinite(number) else None


def measures_every_step(attention: AttentionConfig) -> bool:
    """Whether every training step measures the heads.

    The Triton kernel measures them without an extra pass. QK-clip needs each step's largest logits with any
    implementation.
    """
    return attention.implementation == "triton" or attention.qk_clip is not None


# ------------------------------------------------------------------------------------------------------ checks of heads

REMEDY = "set `model.qk_norm=true`, or `attention.qk_clip=100` with `model.qk_norm=false`"
HEAD_SHARE = 0.9  # of all heads must behave so: half of a healthy model's heads may attend to its first token
ONE_KEY_ENTROPY = 0.02  # a head attends to one key below this share of the largest possible entropy
UNIFORM_ENTROPY = 0.995  # a head attends uniformly above this share of the largest possible entropy
LARGEST_LOGIT = 1000.0  # nats: bf16 has steps of 4 there, so that softmax sees only 1 or 55 times as much
CLOSED_GATE = 0.05  # a head is closed if its gate, which starts at 1, has a mean below this
MOST_NAMED = 8  # closed heads that a message names


def share_of(flags: Tensor) -> float:
    """The share of true flags (n,); 0 for none."""
    return float(flags.double().mean()) if flags.numel() else 0.0


@final
class AttentionCheck(Check):
    FINDINGS: ClassVar = {
        "heads_on_one_key": Finding(
            "nearly all heads attend to one key",
            fails_run=True,
            remedy=f"{REMEDY}; {OPTIMIZER_REMEDY}",
        ),
        "heads_uniform": Finding(
            "nearly all heads attend uniformly over all keys",
            fails_run=True,
            remedy=OPTIMIZER_REMEDY,
        ),
        "large_logits": Finding(
            "attention logits grow so large that low precision loses the differences between them",
            fails_run=True,
            remedy=REMEDY,
        ),
        "heads_closed": Finding(
            "a head writes almost nothing, because its gate (`attention.gate`) is closed for nearly every token",
            fails_run=False,
            remedy=f"none if the loss is as low as without gates; else `attention.gate=null`, or {OPTIMIZER_REMEDY}",
        ),
    }

    def judge(self, evidence: Evidence) -> Judgement:
        findings = {}
        figures = evidence.heads.figures()
        # (L * H,); a head without counted queries (NaN) counts as neither on one key nor uniform
        entropy_share = figures["entropy_share"].flatten().nan_to_num(nan=0.5)
        is_closed = torch.zeros_like(entropy_share, dtype=torch.bool)
        if "gate_mean" in figures:
            is_closed = figures["gate_mean"].flatten() < CLOSED_GATE
            entropy_share = entropy_share[~is_closed]
        on_one_key = share_of(entropy_share < ONE_KEY_ENTROPY)
        uniform = share_of(entropy_share > UNIFORM_ENTROPY)
        largest_logit = float(figures["largest_logit"].amax())
        if on_one_key >= HEAD_SHARE:
            findings["heads_on_one_key"] = (
                f"{on_one_key:.0%} of the heads (limit: {HEAD_SHARE:.0%}) attend to one key (entropy below "
                f"{100 * ONE_KEY_ENTROPY:.3g}% of its maximum); {self.logits_remedy()}, and "
                f"{optimizer_remedy(self.run.optimizer)}"
            )
        if uniform >= HEAD_SHARE and not self.too_early(evidence.step):
            findings["heads_uniform"] = (
                f"{uniform:.0%} of the heads (limit: {HEAD_SHARE:.0%}) attend uniformly over all keys (entropy "
                f"above {100 * UNIFORM_ENTROPY:.4g}% of its maximum) at step {evidence.step}; "
                f"{optimizer_remedy(self.run.optimizer)}"
            )
        if largest_logit > LARGEST_LOGIT:
            findings["large_logits"] = (
                f"the largest attention logit is {largest_logit:.4g} (limit: {LARGEST_LOGIT:g}), where "
                f"{self.run.precision} loses the differences between logits; {self.logits_remedy()}"
            )
        measured = {"health/heads_on_one_key": on_one_key, "health/heads_uniform": uniform}
        if "gate_mean" in figures:
            measured["health/heads_closed"] = share_of(is_closed)
        if is_closed.any():
            findings["heads_closed"] = self.closed_message(is_closed.view_as(figures["gate_mean"]))
        return Judgement(measured, findings)

    def closed_message(self, is_closed: Tensor) -> str:
        """is_closed (L, H) bool -> the message that names the first closed heads."""
        heads = [f"{layer}.{head}" for layer, head in is_closed.nonzero().tolist()]
        named = ", ".join(heads[:MOST_NAMED]) + ", …" * (len(heads) > MOST_NAMED)
        return (
            f"{len(heads)} of {is_closed.numel()} heads write almost nothing: the mean of their gate over held-out text is "
            f"below {CLOSED_GATE:g} (layer.head: {named}); compare the loss with that of a run "
            f"with attention.gate=null, or {optimizer_remedy(self.run.optimizer)}"
        )

    def logits_remedy(self) -> str:
        """Settings for a new run that bound the logits, and that this run does not have."""
        model, attention = self.run.model, self.run.attention
        if attention.qk_clip is not None:
            return remedy_settings(f"attention.qk_clip={attention.qk_clip / 2:g}")
        if attention.score_softcap is not None:
            return remedy_settings(f"attention.score_softcap={attention.score_softcap / 2:g}")
        if not model.qk_norm:
            return remedy_settings("model.qk_norm=true")
        if attention.compatibility in ("cosine", "additive") or "." in attention.compatibility:
            return optimizer_remedy(self.run.optimizer)  # their logits are bounded, or unknown to QK-clip
        words = ["model.qk_norm=false", "attention.qk_clip=100"]
        return remedy_settings(
            *words, *["attention.implementation=auto"] * (attention.implementation not in MEASURES_HEADS)
        )
