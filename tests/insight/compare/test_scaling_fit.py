"""The scaling fit: laws it recovers, coverage of its intervals, runs it refuses, and the form of its figures."""

from __future__ import annotations

import re

import numpy as np
import pytest

from andrea.insight.compare.scaling import (
    FEWEST_RUNS_OF_FULL_LAW,
    Interval,
    NoFit,
    Objective,
    compute_frontier,
    fit_scaling,
    log_loss,
    minimise,
)

TRUTH = (1.69, 406.4, 0.34, 410.7, 0.28)  # E, A, alpha, B, beta of Hoffmann et al. 2022
SIZES = np.array([3.3e6, 17e6, 91e6, 466e6])


def true_loss(parameters: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    irreducible, a, alpha, b, beta = TRUTH
    return irreducible + a / parameters**alpha + b / tokens**beta


def design() -> tuple[np.ndarray, np.ndarray]:
    parameters = np.repeat(SIZES, 2)
    return parameters, parameters * np.tile([5.0, 100.0], 4)


def fit(parameters, tokens, loss):
    return fit_scaling(parameters, tokens, 6 * parameters * tokens, loss, seed=3)


def test_the_law_of_noiseless_runs_is_recovered() -> None:
    parameters, tokens = design()
    found, why = fit(parameters, tokens, true_loss(parameters, tokens))
    asked = (4 * 466e6, 4 * 466e8)
    assert "the full law L(N, D), fitted to 8 runs" in why
    assert found.predict(*asked).value == pytest.approx(true_loss(*map(np.array, asked)), rel=2e-3)
    for interval, truth in ((found.irreducible, 1.69), (found.exponent("N"), 0.34), (found.exponent("D"), 0.28)):
        assert interval.low < truth < interval.high
        assert interval.value == pytest.approx(truth, rel=0.1)
    assert found.extrapolation(*asked) == pytest.approx({"N": 4, "D": 4})


def test_the_numerator_belongs_to_its_exponent() -> None:
    """E + A/N^alpha + B/D^beta, computed from the reported figures, is the predicted loss."""
    parameters, tokens = design()
    found, _ = fit(parameters, tokens, true_loss(parameters, tokens))
    n, d = 50e6, 1e9
    terms = (
        found.numerator("N") / n ** found.exponent("N").value + found.numerator("D") / d ** found.exponent("D").value
    )
    assert found.irreducible.value + terms == pytest.approx(found.predict(n, d).value)


def test_intervals_cover_the_loss_of_a_larger_size_and_are_narrow() -> None:
    """bench/scaling_fit.py in small: with 40 trials the coverage of a correct 90 % interval lies between 78 and 100 %."""
    draw = np.random.default_rng(11)
    parameters, tokens = design()
    asked = (4 * parameters.max(), 4 * tokens.max())
    truly = true_loss(*map(np.array, asked))
    covered, widths = [], []
    for _ in range(40):
        loss = true_loss(parameters, tokens) * np.exp(0.003 * draw.standard_normal(8))
        predicted = fit(parameters, tokens, loss)[0].predict(*asked)
        covered.append(predicted.low <= truly <= predicted.high)
        widths.append((predicted.high - predicted.low) / truly)
    assert 0.78 <= np.mean(covered)
    assert 0.008 < np.median(widths) < 0.025


def test_more_noise_is_measured_and_widens_the_interval() -> None:
    draw = np.random.default_rng(5)
    parameters, tokens = design()
    shape = draw.standard_normal(8)
    quiet, loud = (fit(parameters, tokens, true_loss(parameters, tokens) * np.exp(n * shape))[0] for n in (0.001, 0.02))
    assert loud.noise > 2 * quiet.noise
    widths = [interval.high - interval.low for interval in (each.predict(2e9, 4e10) for each in (quiet, loud))]
    assert widths[1] > 2 * widths[0]


def test_one_failed_run_does_not_dominate_the_fit() -> None:
    """Huber's loss: a run 20 % too high pulls the prediction by no more than a fifth of that."""
    draw = np.random.default_rng(6)
    parameters = np.geomspace(3e6, 5e8, 12)
    tokens = parameters * draw.permutation(np.geomspace(5, 100, 12))
    loss = true_loss(parameters, tokens)
    loss[4] *= 1.2
    found, _ = fit(parameters, tokens, loss)
    assert found.predict(1e9, 2e10).value == pytest.approx(true_loss(np.array(1e9), np.array(2e10)), rel=0.04)


def test_the_same_seed_gives_the_same_interval() -> None:
    parameters, tokens = design()
    loss = true_loss(parameters, tokens)
    assert fit(parameters, tokens, loss)[0].predict(1e9, 1e10) == fit(parameters, tokens, loss)[0].predict(1e9, 1e10)


def test_fewer_than_four_runs_are_no_fit() -> None:
    with pytest.raises(NoFit, match="no scaling fit: 3 finished runs"):
        fit(SIZES[:3], 20 * SIZES[:3], true_loss(SIZES[:3], 20 * SIZES[:3]))


def test_four_runs_give_a_fit_of_the_compute_frontier() -> None:
    tokens = 20 * SIZES
    found, why = fit(SIZES, tokens, true_loss(SIZES, tokens))
    assert found.variables == ("C",) and f"needs {FEWEST_RUNS_OF_FULL_LAW} runs" in why
    asked = (4 * SIZES[-1], 4 * tokens[-1])
    predicted = found.predict(6 * asked[0] * asked[1])
    assert predicted.low <= true_loss(*map(np.array, asked)) <= predicted.high


@pytest.mark.parametrize(
    ("parameters", "tokens", "reason"),
    [
        (np.geomspace(3e6, 4e6, 8), np.geomspace(1e8, 1e10, 8), "A/N.alpha cannot be determined"),
        (np.geomspace(3e6, 4e8, 8), np.full(8, 1e9), "B/D.beta cannot be determined"),
        (np.geomspace(3e6, 4e8, 8), 20 * np.geomspace(3e6, 4e8, 8), "cannot be separated"),
    ],
)
def test_a_term_that_cannot_be_determined_is_named(parameters, tokens, reason) -> None:
    found, why = fit(parameters, tokens, true_loss(parameters, tokens))
    assert found.variables == ("C",)
    assert re.search(reason, why)


def test_runs_of_equal_cost_are_no_fit() -> None:
    parameters = np.full(5, 1e7)
    with pytest.raises(NoFit, match="no scaling fit: 1 run on the compute frontier, 4 needed"):
        fit(parameters, np.full(5, 1e8), np.array([3.0, 3.1, 3.2, 3.3, 3.4]))


def test_the_compute_frontier_keeps_runs_that_no_cheaper_run_beats() -> None:
    flops = np.array([4.0, 1.0, 2.0, 3.0, 1.0])
    loss = np.array([2.0, 5.0, 3.0, 4.0, 4.5])
    assert compute_frontier(flops, loss).tolist() == [4, 2, 0]


def test_the_derivative_is_right() -> None:
    draw = np.random.default_rng(2)
    parameters, x = draw.standard_normal((3, 5)) * 0.3, draw.standard_normal((7, 2))
    _, derivative = log_loss(parameters, x)
    for column in range(5):
        nudge = np.zeros(5)
        nudge[column] = 1e-6
        measured = (log_loss(parameters + nudge, x)[0] - log_loss(parameters - nudge, x)[0]) / 2e-6
        np.testing.assert_allclose(derivative[..., column], measured, atol=1e-8)


def test_the_minimum_is_lower_than_its_neighbours() -> None:
    draw = np.random.default_rng(4)
    x = draw.standard_normal((8, 2))
    centre, spread, noise = np.zeros(5), np.ones(5), np.full((1, 1), 0.01)
    y = log_loss(np.array([[0.1, 0.2, -0.3, -0.8, -1.2]]), x)[0][0] + 0.004 * draw.standard_normal(8)
    best, _ = minimise(Objective(x, y, centre, spread, noise), np.zeros((1, 5)))

    def cost(parameters: np.ndarray) -> float:
        residual = np.abs(y - log_loss(parameters, x)[0][0])
        huber = np.where(residual < 0.01, residual**2, 0.01 * (2 * residual - 0.01))
        return (huber / 0.01**2).sum() + (parameters**2).sum()

    for _ in range(50):
        assert cost(best) <= cost(best + 0.05 * draw.standard_normal(5)) + 1e-6


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        ((3.14159, 3.10, 3.19), "3.14 (3.10 to 3.19)"),
        ((3.14159, 3.0, 3.3), "3.1 (3.0 to 3.3)"),
        ((0.34, 0.2, 0.6), "0.3 (0.2 to 0.6)"),
        ((2.5, 2.4999, 2.5001), "2.5000 (2.4999 to 2.5001)"),
        ((406.4, 120, 2900), "0 (0 to 3,000)"),
        ((5.0, 4.904, 5.096), "5.0 (4.9 to 5.1)"),
        ((2.0, 2.0, 2.0), "2"),
    ],
)
def test_figures_are_rounded_to_their_interval(figures, text) -> None:
    assert str(Interval(*figures)) == text
