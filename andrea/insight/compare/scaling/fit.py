"""Fits a scaling law to a few finished runs, with intervals that are wide enough for so few runs.

With eight runs and the five parameters of L(N, D), three degrees of freedom remain. They are too few for a bootstrap
that resamples the runs, so the bootstrap is parametric. Each refit draws three things: (a) a noise level, which is
uncertain because the residuals have few degrees of freedom; (b) new losses: the fitted losses plus this noise; (c) new
centres of the prior. Without (c) a refit would treat the prior's centres as exact, and the intervals would be too
narrow. `bench/scaling_fit.py` measures how often the intervals contain the true loss.

Shapes as in law.py: n runs, K terms, P parameters.
"""

from __future__ import annotations

import math

import numpy as np

from andrea.config import UserError
from andrea.insight.compare.scaling.law import ScalingFit, log_loss
from andrea.insight.compare.scaling.least_squares import Objective, huber_weight, minimise

FEWEST_RUNS = 4  # one more than L(C) has parameters
FEWEST_RUNS_OF_FULL_LAW = 7  # two more than L(N, D) has parameters
LEAST_SPAN = 4.0  # an exponent needs at least this ratio between the largest and the smallest N (or D, or C)
FEWEST_VALUES = 3  # distinct N (or D) that distinguish a power law from a straight line
MOST_CORRELATION = 0.98  # between log N and log D; above it, the two terms cannot be separated
TESTED_FACTOR = 4.0  # bench/scaling_fit.py has tested the intervals up to this extrapolation in N and in D
REFITS = 500

# The prior: the median of each quantity, and the standard deviation of its logarithm. Published exponents of losses with
# an irreducible part lie between 0.2 and 0.6, most near a third. The noise is the relative standard deviation of the
# final loss over seeds. Five seeds of a model of a million parameters gave 0.16 %; the prior allows more.
PRIOR_EXPONENT, PRIOR_EXPONENT_SPREAD = 0.33, 0.45
PRIOR_PART_SPREAD = 1.5  # of E and of each term at the runs' mean size; the medians split the loss equally
PRIOR_NOISE, PRIOR_NOISE_FREEDOM = 0.003, 3.0  # the second: the prior's weight, in degrees of freedom


class NoFit(UserError):
    """The runs do not determine a law; the message says why."""


def fit_scaling(
    parameters: np.ndarray, tokens: np.ndarray, flops: np.ndarray, loss: np.ndarray, seed: int
) -> tuple[ScalingFit, str]:
    """Fits L(N, D) if the runs determine it, else L(C) along the compute frontier.

    parameters, tokens, flops, loss: (n,) each, for finished runs with the same data and tokenizer. Returns the fit, and
    a text that names the fitted law and the reason for the choice. Raises NoFit.
    """
    n_run = len(loss)
    if n_run < FEWEST_RUNS:
        raise NoFit(f"no scaling fit: {count(n_run, 'finished run')}, {FEWEST_RUNS} needed")
    obstacle = obstacle_to_full_law(parameters, tokens)
    if not obstacle:
        fit = fit_law(("N", "D"), np.stack([parameters, tokens], 1), loss, seed)
        return fit, f"the full law L(N, D), fitted to {n_run} runs"
    frontier = compute_frontier(flops, loss)
    if len(frontier) < FEWEST_RUNS:
        raise NoFit(
            f"no scaling fit: {count(len(frontier), 'run')} on the compute frontier, {FEWEST_RUNS} needed; {obstacle}"
        )
    if span(flops[frontier]) < LEAST_SPAN:
        raise NoFit(
            f"no scaling fit: FLOPs on the compute frontier span a factor of {span(flops[frontier]):.2g}, "
            f"at least {LEAST_SPAN:g} is needed; {obstacle}"
        )
    fit = fit_law(("C",), flops[frontier, None], loss[frontier], seed)
    return fit, f"L(C), fitted to the {len(frontier)} of {n_run} runs on the compute frontier; {obstacle}"


def obstacle_to_full_law(parameters: np.ndarray, tokens: np.ndarray) -> str:
    """The reason why these runs do not determine the five parameters of L(N, D); '' if they do."""
    if len(parameters) < FEWEST_RUNS_OF_FULL_LAW:
        return f"the full law L(N, D) has 5 constants and needs {FEWEST_RUNS_OF_FULL_LAW} runs to estimate them and the noise"
    for values, term, name in ((parameters, "A/N^alpha", "parameter"), (tokens, "B/D^beta", "token")):
        if span(values) < LEAST_SPAN or distinct(values) < FEWEST_VALUES:
            return (
                f"the full law's {term} cannot be determined: the runs have {count(distinct(values), f'distinct {name} count')} "
                f"spanning a factor of {span(values):.2g}; needed: at least {FEWEST_VALUES}, spanning a factor of "
                f"{LEAST_SPAN:g}"
            )
    if abs(np.corrcoef(np.log(parameters), np.log(tokens))[0, 1]) > MOST_CORRELATION:
        return "the full law's A/N^alpha and B/D^beta cannot be separated: tokens grow in step with parameters"
    return ""


def span(values: np.ndarray) -> float:
    return float(values.max() / values.min())


def distinct(values: np.ndarray) -> int:
    """The number of different values. A value at most 20 % above the next smaller one counts as equal to it."""
    steps = np.diff(np.sort(np.log(values)))
    return 1 + int((steps > math.log(1.2)).sum())


def compute_frontier(flops: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """Indices, by rising FLOPs, of the runs with a lower loss than every other run that used no more FLOPs."""
    kept: list[int] = []
    for index in np.lexsort((loss, flops)):
        if not kept or loss[index] < loss[kept[-1]]:
            kept.append(int(index))
    return np.array(kept)


def fit_law(variables: tuple[str, ...], values: np.ndarray, loss: np.ndarray, seed: int) -> ScalingFit:
    """Fit a law to values (n, K) and loss (n,), and refit it REFITS times for the intervals."""
    n_run, n_term = values.shape
    middle = np.log(values).mean(0)
    x, y = np.log(values) - middle, np.log(loss)
    equal_part = y.mean() - math.log(1 + n_term)
    centre = np.array([equal_part] * (1 + n_term) + [math.log(PRIOR_EXPONENT)] * n_term)
    spread = np.array([PRIOR_PART_SPREAD] * (1 + n_term) + [PRIOR_EXPONENT_SPREAD] * n_term)

    best, variance, freedom = fit_with_noise(x, y, centre, spread)
    draw = np.random.default_rng(seed)
    noise = np.sqrt(freedom * variance / draw.chisquare(freedom, (REFITS, 1)))
    losses = log_loss(best, x)[0] + noise * draw.standard_normal((REFITS, n_run))
    centres = best + spread * draw.standard_normal((REFITS, len(spread)))
    refits, _ = minimise(Objective(x, losses, centres, spread, noise), np.repeat(best, REFITS, 0))
    return ScalingFit(variables, middle, values.max(0), best[0], refits, math.sqrt(variance))


def fit_with_noise(
    x: np.ndarray, y: np.ndarray, centre: np.ndarray, spread: np.ndarray
) -> tuple[np.ndarray, float, float]:
    """Returns parameters (1, P), variance of a log loss, and its degrees of freedom. Starts from a grid of exponents.

    The fit depends on the noise, which weighs the data against the prior. The noise depends on the fit's residuals.
    Therefore fit and noise are computed in turn.
    """
    n_run, n_term = x.shape
    grid = np.array(np.meshgrid(*[[0.15, 0.3, 0.6, 1.2]] * n_term)).reshape(n_term, -1).T
    starts = np.concatenate([np.full((len(grid), 1 + n_term), centre[0]), np.log(grid)], 1)  # (starts, P)
    variance = PRIOR_NOISE**2
    for _ in range(5):
        noise = np.full((len(starts), 1), math.sqrt(variance))
        found, costs = minimise(Objective(x, y, centre, spread, noise), starts)
        best = found[[costs.argmin()]]
        predicted, derivative = log_loss(best, x)
        residual, information = y - predicted[0], derivative[0].T @ derivative[0] / variance
        # effective number of parameters: how many the data determine, not the prior
        used = np.trace(np.linalg.solve(information + np.diag(spread**-2), information))
        freedom = PRIOR_NOISE_FREEDOM + n_run - used
        squares = PRIOR_NOISE_FREEDOM * PRIOR_NOISE**2 + (huber_weight(residual) * residual**2).sum()
        variance = squares / freedom
        starts = best
    return best, variance, freedom


def count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
