"""Checks of the attention heads. L layers, H heads.

In a healthy model some heads attend to one key (often the first token) or uniformly over all keys. If nearly all heads
behave in one of these two ways, the run has failed. A head whose gate is closed writes nothing, so it does not matter where
it attends: it is reported as closed, and the other checks leave it out.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from andrea.training.health.check import (
    OPTIMIZER_REMEDY,
    Check,
    Evidence,
    Finding,
    Judgement,
    optimizer_remedy,
    remedy_settings,
)

REMEDY = "set `model.qk_norm=true`, or `attention.qk_clip=100` with `model.qk_norm=false`"
HEAD_SHARE = 0.9  # of all heads must behave so: half of a healthy model's heads may attend to its first token
ONE_KEY_ENTROPY = 0.02  # a head attends to one key below this share of the largest possible entropy
UNIFORM_ENTROPY = 0.995  # a head attends uniformly above this share of the largest possible entropy
LARGEST_LOGIT = 1000.0  # nats: bf16 has steps of 4 there, so that softmax sees only 1 or 55 times as much
CLOSED_GATE = 0.05  # a head is closed if its gate, which starts at 1, has a mean below this
MOST_NAMED = 8  # closed heads that a message names
MEASURES_LOGITS = ("auto", "reference", "triton")  # implementations that attention.qk_clip accepts


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
            *words, *["attention.implementation=auto"] * (attention.implementation not in MEASURES_LOGITS)
        )
