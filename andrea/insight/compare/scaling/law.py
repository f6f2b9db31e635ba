"""The scaling law, a law fitted to runs, and figures with their intervals.

    L(N, D) = E + A / N^alpha + B / D^beta      Hoffmann et al. 2022, arXiv 2203.15556, section 3.3
    L(C)    = E + K / C^gamma                   along the compute frontier

L is the loss in nats per token, N the parameters, D the training tokens, C the training FLOPs. Both laws are E plus a sum
of terms numerator_k / variable_k^exponent_k, so the same code evaluates and fits them.

Shapes: n runs, K terms, P = 1 + 2 K parameters of the law, R parameter sets that are evaluated at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.90  # of every interval


@dataclass(frozen=True)
class Interval:
    """An estimate, and the ends of its confidence interval at the level CONFIDENCE."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return format_interval(self.value, self.low, self.high)


@dataclass(frozen=True)
class ScalingFit:
    """A fitted law. `variables` names the variable of each term: ('N', 'D') or ('C',)."""

    variables: tuple[str, ...]
    middle: np.ndarray  # (K,) log of each variable's geometric mean over the runs
    largest: np.ndarray  # (K,) largest value of each variable among the runs
    parameters: np.ndarray  # (P,) logarithms of E, of each term at `middle`, of each exponent
    refits: np.ndarray  # (R, P) the same parameters, one row for each refit of the bootstrap
    noise: float  # relative standard deviation of one run's loss

    def predict(self, *values: float) -> Interval:
        """The expected loss in nats per token at N and D (or at C), with an interval for the mean loss over seeds."""
        x = np.log(np.array([values])) - self.middle
        refits = np.exp(log_loss(self.refits, x)[0][:, 0])
        return interval(float(np.exp(log_loss(self.parameters[None], x)[0][0, 0])), refits)

    @property
    def irreducible(self) -> Interval:
        """E: the loss in nats per token that remains for infinitely many parameters and tokens."""
        return interval(float(np.exp(self.parameters[0])), np.exp(self.refits[:, 0]))

    def exponent(self, variable: str) -> Interval:
        column = 1 + len(self.variables) + self.variables.index(variable)
        return interval(float(np.exp(self.parameters[column])), np.exp(self.refits[:, column]))

    def numerator(self, variable: str) -> float:
        """A, B or K. It gets no interval, because its value depends almost entirely on the exponent."""
        index = self.variables.index(variable)
        term, exponent = np.exp(self.parameters[[1 + index, 1 + len(self.variables) + index]])
        return float(term * math.exp(exponent * self.middle[index]))

    def extrapolation(self, *values: float) -> dict[str, float]:
        """How far N and D (or C) lie beyond the runs: each value as a multiple of the largest one among the runs."""
        return {name: value / most for name, value, most in zip(self.variables, values, self.largest, strict=True)}


def log_loss(parameters: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Parameters (R, P), centred log variables x (n, K) -> log loss (R, n), and its derivative (R, n, P)."""
    n_term = x.shape[1]
    irreducible = np.exp(parameters[:, None, :1])
    exponents = np.exp(parameters[:, None, 1 + n_term :])
    terms = np.exp(parameters[:, None, 1 : 1 + n_term] - exponents * x)  # (R, n, K)
    total = irreducible + terms.sum(-1, keepdims=True)
    derivatives = [np.broadcast_to(irreducible, total.shape), terms, -terms * exponents * x]
    return np.log(total[..., 0]), np.concatenate(derivatives, -1) / total


def interval(value: float, refits: np.ndarray) -> Interval:
    """`value` with the quantiles of the refits (R,) that enclose the share CONFIDENCE of them."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(refits, [tail, 1 - tail])
    return Interval(value, float(low), float(high))


def format_interval(value: float, low: float, high: float) -> str:
    """'3.14 (3.10 to 3.19)', rounded to the leading digit of half the interval's width."""
    assert low <= high and all(map(math.isfinite, (value, low, high)))
    half = (high - low) / 2
    if half == 0:
        return f"{value:g}"
    place = math.floor(math.log10(half))
    if round(half / 10**place) == 10:  # 0.096 rounds to 0.1
        place += 1
    decimals = max(0, -place)
    value, low, high = (round(number / 10**place) * 10**place for number in (value, low, high))
    return f"{value:,.{decimals}f} ({low:,.{decimals}f} to {high:,.{decimals}f})"
