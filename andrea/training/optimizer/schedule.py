"""The learning rate as a fraction of its peak: a function of the step and of the planned number of steps alone."""

from __future__ import annotations

import math

from andrea.config import OptimizerConfig
from andrea.training.progress import Progress


def rate_at(step: int, steps: int, config: OptimizerConfig) -> float:
    """The learning rate of the update that follows `step` earlier steps, as a fraction of its peak; 0 <= step < steps.

    Warm-up is linear: min(1, (step + 1) / warmup_steps). After it, the rate either follows the cosine of Loshchilov &
    Hutter (2017, arXiv 1608.03983, eq. 5), or stays at its peak and then falls linearly over the last `decay_fraction`
    of the run. Both end at `final_fraction`.
    """
    warmup = min(config.warmup_steps, steps)
    rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
    if config.schedule == "cosine":
        done = min(1.0, max(0, step - warmup) / max(1, steps - 1 - warmup))
        fall = 0.5 * (1 + math.cos(math.pi * done))
    else:
        decay_steps = max(1, round((config.decay_fraction or 0.0) * steps))
        fall = min(1.0, (steps - step) / decay_steps)
    return rise * (config.final_fraction + (1 - config.final_fraction) * fall)


def rewarmed(rate: float, step: int, progress: Progress, rewarm_steps: int) -> float:
    """`rate` in the update after `step` steps; after an extension, a linear rise from the rate before it leads there."""
    if progress.rewarm_step is None or not 0 <= step - progress.rewarm_step < rewarm_steps:
        return rate
    done = (step - progress.rewarm_step + 1) / rewarm_steps
    return progress.rewarm_rate + (rate - progress.rewarm_rate) * done
