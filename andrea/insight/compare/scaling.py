"""The scaling law of a few finished runs, with intervals that are wide enough for so few runs.

    L(N, D) = E + A / N^alpha + B / D^beta      Hoffmann et al. 2022, arXiv 2203.15556, section 3.3
    L(C)    = E + K / C^gamma                   along the compute frontier

L is the loss in nats per token, N the parameters, D the training tokens, C the training FLOPs. Both laws are E plus a sum
of terms numerator_k / variable_k^exponent_k, so the same code evaluates and fits them.

With eight runs and the five parameters of L(N, D), three degrees of freedom remain. They are too few for a bootstrap
that resamples the runs, so the bootstrap is parametric. Each refit draws three things: (a) a noise level, which is
uncertain because the residuals have few degrees of freedom; (b) new losses: the fitted losses plus this noise; (c) new
centres of the prior. Without (c) a refit would treat the prior's centres as exact, and the intervals would be too
narrow. `bench/scaling_fit.py` measures how often the intervals contain the true loss.

Shapes: n runs, K terms, P = 1 + 2 K parameters of the law, R fits, or parameter sets that are evaluated at once.
"""

import math
from dataclasses import dataclass

import numpy as np

from andrea.config import UserError

# ------------------------------------------------------------------------------------------------------------- the law

CONFIDENCE = 0.90  # of every interval


@dataclass(frozen=True)
class Interval:
    """An estimate, and the ends of its confidence interval at the level CONFIDENCE."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """'3.14 (3.10 to 3.19)', rounded to the leading digit of half the interval's width."""
        ends = (self.value, self.low, self.high)
        assert self.low <= self.high and all(map(math.isfinite, ends))
        half = (self.high - self.low) / 2
        if half == 0:
            return f"{self.value:g}"
        place = math.floor(math.log10(half))
        if round(half / 10**place) == 10:  # 0.096 rounds to 0.1
            place += 1
        value, low, high = (f"{round(each / 10**place) * 10**place:,.{max(0, -place)}f}" for each in ends)
        return f"{value} ({low} to {high})"


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


# ------------------------------------------------------------------------------------------------------- least squares
# A penalised robust fit of the law: Huber loss and a Gaussian prior, minimised by Levenberg-Marquardt.
#
# Hundreds of fits of the bootstrap are solved at once as one batch. `scipy.optimize.least_squares`, called once for each
# fit, gives the same predictions to all digits shown but takes about thirty times as long.

HUBER = 0.01  # larger log residuals count linearly, not squared: two to three times the noise of one run
MOST_STEPS = 60  # ten are usual
LEAST_GAIN = 1e-3  # a fit has converged when a step would lower its cost by less; the cost is about 1 per run


@dataclass(frozen=True)
class Objective:
    """Huber loss of log residuals in units of `noise`, plus squared distances from `centre` in units of `spread`."""

    x: np.ndarray  # (n, K) centred log variables
    y: np.ndarray  # (n,) or (R, n) log losses
    centre: np.ndarray  # (P,) or (R, P) centre of the prior
    spread: np.ndarray  # (P,) standard deviation of the prior
    noise: np.ndarray  # (R, 1) standard deviation of a log loss

    def evaluate(self, parameters: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the cost (R,), half its Gauss-Newton Hessian (R, P, P) and half its negative gradient (R, P).

        The last two are computed as in iteratively reweighted least squares.
        """
        predicted, derivative = log_loss(parameters, self.x)  # (R, n) and (R, n, P)
        residual = self.y - predicted
        size, weight = np.abs(residual), huber_weight(residual) / self.noise**2
        data = np.where(size < HUBER, size**2, HUBER * (2 * size - HUBER)) / self.noise**2
        prior = ((parameters - self.centre) / self.spread) ** 2
        hessian = np.einsum("rni,rn,rnj->rij", derivative, weight, derivative) + np.diag(self.spread**-2)
        prior_pull = (self.centre - parameters) / self.spread**2
        downhill = np.einsum("rni,rn->ri", derivative, weight * residual) + prior_pull
        return data.sum(1) + prior.sum(1), hessian, downhill


def huber_weight(residual: np.ndarray) -> np.ndarray:
    """The weight that gives a squared residual the gradient of Huber's loss (iteratively reweighted least squares)."""
    return np.minimum(1.0, HUBER / np.maximum(np.abs(residual), 1e-12))


def minimise(objective: Objective, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Solve R fits from start (R, P). Returns parameters (R, P) and cost (R,).

    Each fit has its own damping: divided by 4 after a step that lowered the cost, multiplied by 5 after a rejected one.
    """
    parameters, damping = start, np.full((len(start), 1, 1), 1e-2)
    cost, hessian, downhill = objective.evaluate(parameters)
    identity = np.eye(start.shape[1])
    for _ in range(MOST_STEPS):
        damped = hessian + damping * hessian * identity
        step = np.clip(np.linalg.solve(damped, downhill[..., None])[..., 0], -1, 1)
        if (downhill * step).sum(1).max() < LEAST_GAIN:
            break
        new_cost, new_hessian, new_downhill = objective.evaluate(parameters + step)
        better = new_cost < cost
        parameters = np.where(better[:, None], parameters + step, parameters)
        hessian = np.where(better[:, None, None], new_hessian, hessian)
        downhill = np.where(better[:, None], new_downhill, downhill)
        cost = np.where(better, new_cost, cost)
        damping = np.where(better[:, None, None], damping / 4, damping * 5)
    return parameters, cost


# -------------------------------------------------------------------------------------------------------------- the fit

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
