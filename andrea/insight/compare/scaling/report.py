"""The scaling fit of the compared runs as lines of text, with the predicted loss of a larger model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from andrea.config import AttentionConfig, ModelConfig, parse
from andrea.insight.compare.differences import differences
from andrea.insight.compare.runs import Run
from andrea.insight.compare.scaling.fit import TESTED_FACTOR, NoFit, fit_scaling
from andrea.insight.compare.scaling.law import CONFIDENCE, Interval, ScalingFit
from andrea.text.load_tokenizer import load_tokenizer
from andrea.training.records.format import format_number

# Configuration keys, besides train.*, that may differ between the runs of one scaling law. All other keys are the
# recipe.
SIZE_KEYS = "name d_model n_layer n_head n_kv_head d_head d_mlp recipe_steps recipe_tokens_per_step".split()
MAY_DIFFER = {
    *(f"model.{key}" for key in SIZE_KEYS),
    "seed",
    "device",
    "precision",
    "compile",
    "deterministic",
    "attention.implementation",
}
TERMS = {"N": ("A", "alpha", "parameters"), "D": ("B", "beta", "tokens"), "C": ("K", "gamma", "FLOPs")}


@dataclass(frozen=True)
class Target:
    """The model whose loss the scaling law predicts."""

    name: str
    parameters: int
    tokens: int
    flops: float


def target_of(model: ModelConfig, tokens: int | None, largest: Run) -> Target:
    """The model of predict=…, trained on `tokens`; by default on the largest run's tokens per parameter."""
    from andrea.model.size import count_parameters, flops_per_token

    attention = parse(AttentionConfig, largest.config.get("attention"), "attention")
    n_vocab = load_tokenizer(largest.checkpoint.path).n_vocab
    parameters = count_parameters(model, attention, n_vocab).total
    tokens = tokens or round(parameters * largest.tokens / largest.parameters)
    return Target(model.name, parameters, tokens, float(tokens * flops_per_token(model, attention, n_vocab)))


def scaling_lines(runs: list[Run], target: Target | None, seed: int) -> list[str]:
    """The scaling law of the finished runs as lines of text, or one line that says why no law can be fitted."""
    finished = [run for run in runs if run.finished]
    if len({run.checkpoint.fingerprint for run in finished}) > 1:
        return ["no scaling fit: the runs were trained on different data or with different tokenizers"]
    parameters, tokens, flops, loss = (
        np.array([getattr(run, name) for run in finished], dtype=float)
        for name in ("parameters", "tokens", "flops", "loss")
    )
    try:
        fit, kind = fit_scaling(parameters, tokens, flops, loss, seed)
    except NoFit as reason:
        return [str(reason)]
    lines = [f"scaling fit: {kind}", law_line(fit)]
    if len(finished) < len(runs):
        unfinished = ", ".join(run.name for run in runs if not run.finished)
        lines.append(f"left out of the fit, because unfinished: {unfinished}")
    other = [key for key in differences(finished) if key not in MAY_DIFFER and not key.startswith("train.")]
    if other:
        lines.append(f"caution: a scaling law assumes runs with equal settings, but these differ in {', '.join(other)}")
    if target:
        lines.append(prediction_line(fit, target, finished[-1]))
    return lines


def law_line(fit: ScalingFit) -> str:
    """The fitted law with its figures."""
    terms, meanings, figures = ["E"], [], [f"E = {fit.irreducible} nats per token"]
    for name in fit.variables:
        numerator, exponent, meaning = TERMS[name]
        terms.append(f"{numerator}/{name}^{exponent}")
        meanings.append(f"{name} {meaning}")
        scale = format_number(float(f"{fit.numerator(name):.0e}"))
        figures.append(f"{exponent} = {fit.exponent(name)} with {numerator} = {scale}")
    return (
        f"loss = {' + '.join(terms)} ({', '.join(meanings)}): {', '.join(figures)}; {CONFIDENCE:.0%} intervals; "
        f"noise of one run's loss {fit.noise:.1%}"
    )


def prediction_line(fit: ScalingFit, target: Target, run: Run) -> str:
    """The predicted loss with its interval, in nats per token and bits per byte, and the factor of extrapolation."""
    values = (target.parameters, target.tokens) if fit.variables == ("N", "D") else (target.flops,)
    nats = fit.predict(*values)
    per_nat = run.bpb / run.loss  # bits per byte for one nat per token, the same for all runs on these data
    bits = Interval(*(per_nat * number for number in (nats.value, nats.low, nats.high)))
    factors = fit.extrapolation(*values)
    reach = " and ".join(f"{factor:.3g} times the {TERMS[name][2]}" for name, factor in factors.items())
    tested = TESTED_FACTOR if fit.variables == ("N", "D") else TESTED_FACTOR**2
    untested = max(factors.values()) > 1.01 * tested
    return (
        f"predicted for {target.name} with {target.parameters:,} parameters on {format_number(target.tokens)} tokens: "
        f"loss {nats} nats per token, {bits} bits per byte ({CONFIDENCE:.0%} interval of the mean over seeds); "
        f"the model has {reach} of the largest run"
        + (
            f"; the intervals were tested only up to a factor of {tested:g}: take this as a rough estimate"
            if untested
            else ""
        )
    )
