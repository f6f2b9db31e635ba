"""A scaling law from a handful of finished runs, with intervals that say how little a handful knows.

    L(N, D) = E + A / N^alpha + B / D^beta           (Hoffmann et al. 2022, arXiv 2203.15556, section 3.3)
    L(C)    = E + K / C^gamma                        the envelope over FLOPs, where runs are too few for the above

L nats a token, N parameters, D tokens, C FLOPs. Both are E + sum over terms k of scale_k / x_k^exponent_k, and one code
fits both: Huber loss on log residuals, as there, by damped Gauss-Newton from many starts.

Eight runs leave three degrees of freedom to five parameters, which is why resampling the runs is no option here. Instead
each refit of the bootstrap draws (a) a noise level from its distribution given the residuals' degrees of freedom,
(b) new losses around the fitted ones with that noise, (c) new prior centres. (c) is there because the fit is penalised:
exponents and the noise of a seed are known beforehand to some extent, and a refit that held these pseudo-observations
fixed would understate what they leave open. `bench/scaling_fit.py` measures how often the intervals cover.

Shapes: n runs, K terms, P = 1 + 2 K parameters, R refits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from andrea.config import UserError

FEWEST_RUNS = 4  # three parameters of the envelope, and one run left to disagree with it
FEWEST_FOR_FULL = 7  # five parameters, and two runs left to judge the noise by
LEAST_SPAN = 4.0  # factor between the largest and the smallest N (or D, or C) below which its exponent is a guess
LEAST_VALUES = 3  # distinct N (or D): fewer cannot tell a power from a straight line
MOST_CORRELATION = 0.98  # of log N and log D: beyond, the two terms are one
TESTED_FACTOR = 4.0  # how far beyond the largest run bench/scaling_fit.py checked the intervals
CONFIDENCE = 0.90
REFITS = 500
MOST_STEPS = 60  # of Gauss-Newton; ten are usual

# What is known before the first run, each as a median and a spread of the logarithm. Exponents: published fits of losses
# with an irreducible part lie between 0.2 and 0.6, mostly about a third. Noise: relative spread of the final loss over
# seeds; five seeds of a model of a million parameters spread by 0.16 % here, and the prior errs to the wide side.
EXPONENT, EXPONENT_SPREAD = 0.33, 0.45
PART_SPREAD = 1.5  # of E and of each term at the middle of the runs, around equal parts of the loss
NOISE, NOISE_RUNS = 0.003, 3.0  # the prior weighs as much as so many degrees of freedom
HUBER = 0.01  # log residual beyond which a run pulls with constant force: two to three times a seed's noise


class NoFit(UserError):
    """These runs do not carry a law, and the message says why."""


@dataclass(frozen=True)
class Interval:
    """A figure, with the ends between which it lies with 90 % confidence."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return written(self.value, self.low, self.high)


@dataclass(frozen=True)
class ScalingFit:
    """A fitted law. `names` are the K terms' variables, ('N', 'D') or ('C',)."""

    names: tuple[str, ...]
    middle: np.ndarray  # (K,) log of the variables' geometric means over the runs
    largest: np.ndarray  # (K,) largest value of each variable among the runs
    parameters: np.ndarray  # (P,) log of: E, each term at the middle, each exponent
    refits: np.ndarray  # (R, P), the same of each refit of the bootstrap
    noise: float  # relative spread of one run's loss
    n_run: int

    def predict(self, *values: float) -> Interval:
        """The expected loss, in nats a token, at N and D (or at C); the mean over seeds, not one run's."""
        x = np.log(np.array([values])) - self.middle
        refits = np.exp(law(self.refits, x)[0][:, 0])
        return interval(float(np.exp(law(self.parameters[None], x)[0][0, 0])), refits)

    @property
    def irreducible(self) -> Interval:
        """E: the loss that neither size nor data would take away, in nats a token."""
        return interval(float(np.exp(self.parameters[0])), np.exp(self.refits[:, 0]))

    def exponent(self, name: str) -> Interval:
        column = 1 + len(self.names) + self.names.index(name)
        return interval(float(np.exp(self.parameters[column])), np.exp(self.refits[:, column]))

    def scale(self, name: str) -> float:
        """A, B or K: the numerator. It belongs to its exponent and has no meaning without it."""
        index = self.names.index(name)
        term, exponent = np.exp(self.parameters[[1 + index, 1 + len(self.names) + index]])
        return float(term * math.exp(exponent * self.middle[index]))

    def extrapolation(self, *values: float) -> dict[str, float]:
        """How many times the largest run's N and D (or C) the values are."""
        return {name: value / most for name, value, most in zip(self.names, values, self.largest, strict=True)}


def fit_scaling(
    parameters: np.ndarray, tokens: np.ndarray, flops: np.ndarray, loss: np.ndarray, seed: int
) -> tuple[ScalingFit, str]:
    """(fit, why): the full law where the runs carry it, else the envelope over FLOPs, and a line that says which and why.

    parameters, tokens, flops, loss: (n,) of finished runs on the same data with the same tokenizer. Raises NoFit.
    """
    n_run = len(loss)
    if n_run < FEWEST_RUNS:
        raise NoFit(f"no fit: {count(n_run, 'finished run')}, and the simplest law needs {FEWEST_RUNS}")
    obstacle = obstacle_to_full(parameters, tokens)
    if not obstacle:
        return fit_law(("N", "D"), np.stack([parameters, tokens], 1), loss, seed), f"full law from {n_run} runs"
    front = envelope(flops, loss)
    if len(front) < FEWEST_RUNS:
        raise NoFit(
            f"no fit: {obstacle}; and the envelope over FLOPs has {count(len(front), 'run')} that no cheaper run beats, "
            f"and needs {FEWEST_RUNS}"
        )
    if span(flops[front]) < LEAST_SPAN:
        raise NoFit(
            f"no fit: {obstacle}; and FLOPs span a factor of {span(flops[front]):.2g}, less than {LEAST_SPAN:g}"
        )
    fit = fit_law(("C",), flops[front, None], loss[front], seed)
    return fit, f"envelope over FLOPs from {len(front)} of {n_run} runs: {obstacle}"


def obstacle_to_full(parameters: np.ndarray, tokens: np.ndarray) -> str:
    """Why the five parameters of the full law cannot be told from these runs; '' where they can."""
    if len(parameters) < FEWEST_FOR_FULL:
        return f"the full law has 5 parameters and needs {FEWEST_FOR_FULL} runs, two more, to judge the noise by"
    for values, term, words in ((parameters, "A/N^alpha", "parameters"), (tokens, "B/D^beta", "tokens")):
        if span(values) < LEAST_SPAN or distinct(values) < LEAST_VALUES:
            return (
                f"{term} cannot be identified: {words} take {count(distinct(values), 'value')} over a factor of "
                f"{span(values):.2g}, and need {LEAST_VALUES} over {LEAST_SPAN:g}"
            )
    if abs(np.corrcoef(np.log(parameters), np.log(tokens))[0, 1]) > MOST_CORRELATION:
        return "A/N^alpha and B/D^beta cannot be told apart: tokens rise in step with parameters"
    return ""


def span(values: np.ndarray) -> float:
    return float(values.max() / values.min())


def distinct(values: np.ndarray) -> int:
    """How many values there are, those within a fifth of each other counted once."""
    steps = np.diff(np.sort(np.log(values)))
    return 1 + int((steps > math.log(1.2)).sum())


def envelope(flops: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """Indices of the runs that no run of as many or fewer FLOPs beats, by rising FLOPs."""
    kept: list[int] = []
    for index in np.lexsort((loss, flops)):
        if not kept or loss[index] < loss[kept[-1]]:
            kept.append(int(index))
    return np.array(kept)


# ---------------------------------------------------------------------------------------------------- the fit


def fit_law(names: tuple[str, ...], values: np.ndarray, loss: np.ndarray, seed: int) -> ScalingFit:
    """Fit E + sum of terms to `values` (n, K) and `loss` (n,), and refit it REFITS times."""
    n_run, n_term = values.shape
    middle = np.log(values).mean(0)
    x, y = np.log(values) - middle, np.log(loss)
    part = y.mean() - math.log(1 + n_term)
    centre = np.array([part] * (1 + n_term) + [math.log(EXPONENT)] * n_term)
    spread = np.array([PART_SPREAD] * (1 + n_term) + [EXPONENT_SPREAD] * n_term)

    grid = np.array(np.meshgrid(*[[0.15, 0.3, 0.6, 1.2]] * n_term)).reshape(n_term, -1).T
    starts = np.concatenate([np.full((len(grid), 1 + n_term), part), np.log(grid)], 1)  # (starts, P)
    variance = NOISE**2
    for _ in range(5):  # noise and fit depend on each other: the penalty's weight is the noise
        noise = np.full((len(starts), 1), math.sqrt(variance))
        found, costs = minimise(starts, y, x, centre, spread, noise)
        best = found[[costs.argmin()]]
        predicted, slope = law(best, x)
        residual, information = y - predicted[0], slope[0].T @ slope[0] / variance
        used = np.trace(np.linalg.solve(information + np.diag(spread**-2), information))  # parameters the data decided
        freedom = NOISE_RUNS + n_run - used
        variance = (NOISE_RUNS * NOISE**2 + (huber_weight(residual) * residual**2).sum()) / freedom
        starts = best

    draw = np.random.default_rng(seed)
    noise = np.sqrt(freedom * variance / draw.chisquare(freedom, (REFITS, 1)))
    losses = predicted + noise * draw.standard_normal((REFITS, n_run))
    centres = best + spread * draw.standard_normal((REFITS, len(spread)))
    refits, _ = minimise(np.repeat(best, REFITS, 0), losses, x, centres, spread, noise)
    return ScalingFit(names, middle, values.max(0), best[0], refits, math.sqrt(variance), n_run)


def law(parameters: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log loss (R, n) of `parameters` (R, P) at centred log variables `x` (n, K), and its derivative (R, n, P)."""
    n_term = x.shape[1]
    irreducible = np.exp(parameters[:, None, :1])
    exponents = np.exp(parameters[:, None, 1 + n_term :])
    terms = np.exp(parameters[:, None, 1 : 1 + n_term] - exponents * x)  # (R, n, K)
    total = irreducible + terms.sum(-1, keepdims=True)
    parts = [np.broadcast_to(irreducible, total.shape), terms, -terms * exponents * x]
    return np.log(total[..., 0]), np.concatenate(parts, -1) / total


def huber_weight(residual: np.ndarray) -> np.ndarray:
    return np.minimum(1.0, HUBER / np.maximum(np.abs(residual), 1e-12))


def minimise(
    start: np.ndarray, y: np.ndarray, x: np.ndarray, centre: np.ndarray, spread: np.ndarray, noise: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(parameters (R, P), cost (R,)) of R fits at once, by Levenberg-Marquardt on reweighted squares.

    Cost: Huber's of log residuals in units of `noise` (R, 1), plus squared distances from `centre` in units of `spread`.
    """

    def look(parameters: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        predicted, slope = law(parameters, x)
        residual = y - predicted
        size = np.abs(residual)
        data = np.where(size < HUBER, size**2, HUBER * (2 * size - HUBER)) / noise**2
        return residual, slope, data.sum(1) + (((parameters - centre) / spread) ** 2).sum(1)

    parameters, damping = start, np.full((len(start), 1, 1), 1e-2)
    residual, slope, cost = look(parameters)
    identity = np.eye(start.shape[1])
    for _ in range(MOST_STEPS):
        weight = huber_weight(residual) / noise**2  # (R, n)
        curvature = np.einsum("rni,rn,rnj->rij", slope, weight, slope) + np.diag(spread**-2)
        downhill = np.einsum("rni,rn->ri", slope, weight * residual) + (centre - parameters) / spread**2
        damped = curvature + damping * curvature * identity
        step = np.clip(np.linalg.solve(damped, downhill[..., None])[..., 0], -1, 1)
        if (downhill * step).sum(1).max() < 1e-3:  # what a step could still gain, against a cost of about one a run
            break
        tried = parameters + step
        tried_residual, tried_slope, tried_cost = look(tried)
        better = tried_cost < cost
        parameters = np.where(better[:, None], tried, parameters)
        residual = np.where(better[:, None], tried_residual, residual)
        slope = np.where(better[:, None, None], tried_slope, slope)
        cost = np.where(better, tried_cost, cost)
        damping = np.where(better[:, None, None], damping / 4, damping * 5)
    return parameters, cost


def interval(value: float, refits: np.ndarray) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(refits, [tail, 1 - tail])
    return Interval(value, float(low), float(high))


# -------------------------------------------------------------------------------------------------- in words


def written(value: float, low: float, high: float) -> str:
    """'3.14 (3.10 to 3.19)': rounded to the first digit of half the interval's width, for the next says nothing."""
    assert low <= high and all(map(math.isfinite, (value, low, high)))
    half = (high - low) / 2
    if half == 0:
        return f"{value:g}"
    place = math.floor(math.log10(half))
    if round(half / 10**place) == 10:  # 0.096 is 0.1
        place += 1
    decimals = max(0, -place)
    value, low, high = (round(number / 10**place) * 10**place for number in (value, low, high))
    return f"{value:,.{decimals}f} ({low:,.{decimals}f} to {high:,.{decimals}f})"


def count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
