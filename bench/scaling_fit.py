"""How often the scaling fit's 90 % intervals contain the true loss of a larger model, and how wide they are.

Each trial draws eight synthetic runs. The larger model has 4 times the parameters and 4 times the tokens of the largest
run. The true laws are two published fits, and steeper and flatter ones, so that the result depends on no single law.

    python bench/scaling_fit.py                  # about four minutes on one free core; writes bench/results/
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from common import RESULTS, write_record

from andrea.insight.compare import scaling

BEYOND = scaling.TESTED_FACTOR
SMALLEST, LARGEST = 3.3e6, 466e6  # parameters: of andrea-nano to andrea-480m, in November 2026
TRUTHS = {  # E, A, alpha, B, beta: nats per token, parameters, tokens
    "Hoffmann 2022": (1.69, 406.4, 0.34, 410.7, 0.28),
    "Besiroglu 2024": (1.82, 482.0, 0.35, 2085.4, 0.37),
    "slow in parameters": (1.5, 30.0, 0.22, 150.0, 0.28),
    "slow in both": (1.0, 18.0, 0.17, 25.0, 0.17),
    "fast in both": (1.5, 9000.0, 0.55, 30000.0, 0.55),
}
NOISES = (0.002, 0.003, 0.004, 0.005)  # relative standard deviation of a run's loss over seeds


def true_loss(truth: tuple[float, ...], parameters: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    irreducible, a, alpha, b, beta = truth
    return irreducible + a / parameters**alpha + b / tokens**beta


def sizes_by_budgets(draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Four nearly evenly spread sizes, each trained on about 5 and on about 100 tokens per parameter: (parameters, tokens)."""
    place = np.repeat(np.arange(4) + draw.uniform(-1, 1, 4) / 6, 2) / 3
    parameters = SMALLEST * (LARGEST / SMALLEST) ** place
    return parameters, parameters * np.tile([5.0, 100.0], 4) * 1.5 ** draw.uniform(-1, 1, 8)


def scattered(draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Eight sizes, each trained on its own number of tokens, between 5 and 100 per parameter, in random order."""
    place, ratio = ((order + draw.random(8)) / 8 for order in (np.arange(8), draw.permutation(8)))
    parameters = SMALLEST * (LARGEST / SMALLEST) ** place
    return parameters, parameters * 5 * 20**ratio


DESIGNS = {"four sizes, two budgets": sizes_by_budgets, "eight sizes, scattered budgets": scattered}


def study(truth: tuple[float, ...], design: str, noise: float, trials: int, seed: int) -> dict[str, float]:
    """Coverage in percent; median width of the interval and errors of the prediction in percent of the true loss."""
    draw = np.random.default_rng(seed)
    covered, widths, errors = [], [], []
    for trial in range(trials):
        parameters, tokens = DESIGNS[design](draw)
        loss = true_loss(truth, parameters, tokens) * np.exp(noise * draw.standard_normal(len(parameters)))
        largest = np.argmax(parameters * tokens)
        asked = (BEYOND * parameters[largest], BEYOND * tokens[largest])
        predicted = scaling.fit_law(("N", "D"), np.stack([parameters, tokens], 1), loss, trial).predict(*asked)
        truly = true_loss(truth, *asked)
        covered.append(predicted.low <= truly <= predicted.high)
        widths.append((predicted.high - predicted.low) / truly)
        errors.append(predicted.value / truly - 1)
    return {
        "covered_percent": 100 * float(np.mean(covered)),
        "median_width_percent": 100 * float(np.median(widths)),
        "mean_error_percent": 100 * float(np.mean(errors)),
        "rms_error_percent": 100 * float(np.sqrt(np.mean(np.square(errors)))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--output", type=Path, default=RESULTS / "scaling-fit-coverage.json")
    chosen = parser.parse_args()
    rows = []
    print(f"{'design':32}{'truth':20}{'noise':>7}{'covered':>9}{'width':>8}{'error':>8}")
    for design in DESIGNS:
        for name, truth in TRUTHS.items():
            for noise in NOISES:
                figures = study(truth, design, noise, chosen.trials, chosen.seed + len(rows))
                rows.append({"design": design, "truth": name, "constants": truth, "noise": noise, **figures})
                print(
                    f"{design:32}{name:20}{noise:7.1%}{figures['covered_percent']:8.0f}%"
                    f"{figures['median_width_percent']:7.2f}%{figures['rms_error_percent']:7.2f}%",
                    flush=True,
                )
    settings = {"trials": chosen.trials, "seed": chosen.seed, "runs": 8, "beyond": BEYOND, "refits": scaling.REFITS}
    prior = {
        "exponent": scaling.PRIOR_EXPONENT,
        "exponent_spread": scaling.PRIOR_EXPONENT_SPREAD,
        "part_spread": scaling.PRIOR_PART_SPREAD,
        "noise": scaling.PRIOR_NOISE,
        "noise_runs": scaling.PRIOR_NOISE_FREEDOM,
        "huber": scaling.HUBER,
    }
    write_record(
        chosen.output,
        "scaling_fit",
        "cpu",
        {"confidence": scaling.CONFIDENCE, **settings, "prior": prior, "rows": rows},
    )


if __name__ == "__main__":
    main()
