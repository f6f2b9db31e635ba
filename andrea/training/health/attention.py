"""Checks of the attention heads. L layers, H heads.

In a healthy model some heads attend to one key (often the first token) or uniformly over all keys. If nearly all heads
behave in one of these two ways, the run has failed.
"""

from __future__ import annotations

from typing import ClassVar, final

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
MEASURES_LOGITS = ("auto", "reference", "triton")  # implementations that attention.qk_clip accepts


@final
class AttentionCheck(Check):
    FINDINGS: ClassVar = {
        "heads_on_one_key": Finding(
            "nearly all heads attend to one key",
            fails_run=True,
            keys=("head_share", "one_key_entropy"),
            remedy=f"{REMEDY}; {OPTIMIZER_REMEDY}",
        ),
        "heads_uniform": Finding(
            "nearly all heads attend uniformly over all keys",
            fails_run=True,
            keys=("head_share", "uniform_entropy"),
            remedy=OPTIMIZER_REMEDY,
        ),
        "large_logits": Finding(
            "attention logits grow so large that low precision loses the differences between them",
            fails_run=True,
            keys=("largest_logit",),
            remedy=REMEDY,
        ),
    }

    def judge(self, evidence: Evidence) -> Judgement:
        config, findings = self.config, {}
        figures = evidence.heads.figures()
        # (L * H,); a head without counted queries (NaN) counts as neither on one key nor uniform
        entropy_share = figures["entropy_share"].flatten().nan_to_num(nan=0.5)
        on_one_key = float((entropy_share < config.one_key_entropy).double().mean())
        uniform = float((entropy_share > config.uniform_entropy).double().mean())
        largest_logit = float(figures["largest_logit"].amax())
        if on_one_key >= config.head_share:
            findings["heads_on_one_key"] = (
                f"{on_one_key:.0%} of the heads (limit: health.head_share={config.head_share:g}) attend to one key "
                f"(entropy below {100 * config.one_key_entropy:.3g}% of its maximum; health.one_key_entropy="
                f"{config.one_key_entropy:g}); {self.logits_remedy()}, and {optimizer_remedy(self.run.optimizer)}"
            )
        if uniform >= config.head_share and not self.too_early(evidence.step):
            findings["heads_uniform"] = (
                f"{uniform:.0%} of the heads (limit: health.head_share={config.head_share:g}) attend uniformly over "
                f"all keys (entropy above {100 * config.uniform_entropy:.4g}% of its maximum; health.uniform_entropy="
                f"{config.uniform_entropy:g}) at step {evidence.step}; {optimizer_remedy(self.run.optimizer)}"
            )
        if largest_logit > config.largest_logit:
            findings["large_logits"] = (
                f"the largest attention logit is {largest_logit:.4g} (limit: health.largest_logit="
                f"{config.largest_logit:g}), where {self.run.precision} loses the differences between logits; "
                f"{self.logits_remedy()}"
            )
        return Judgement({"health/heads_on_one_key": on_one_key, "health/heads_uniform": uniform}, findings)

    def logits_remedy(self) -> str:
        """Settings for a new run that bound the logits, and that this run does not have."""
        model, attention = self.run.model, self.run.attention
        if attention.qk_clip is not None:
            return remedy_settings(f"attention.qk_clip={attention.qk_clip / 2:g}")
        if not model.qk_norm:
            return remedy_settings("model.qk_norm=true")
        if attention.compatibility in ("cosine", "additive") or "." in attention.compatibility:
            return optimizer_remedy(self.run.optimizer)  # their logits are bounded, or unknown to QK-clip
        words = ["model.qk_norm=false", "attention.qk_clip=100"]
        return remedy_settings(
            *words, *["attention.implementation=auto"] * (attention.implementation not in MEASURES_LOGITS)
        )
