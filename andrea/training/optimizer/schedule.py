"""The learning rate as a fraction of its peak: a function of only the step and the planned number of steps.

The planned number of steps may change during the run, until the decay begins, because the rates before the decay do not
depend on the length. All updates therefore have the same rates as in a run that had the final length from the start.
"""

from __future__ import annotations

import math
from bisect import bisect_left

from andrea.config import OptimizerConfig

# Final learning rate as a share of the peak. AdamW's is that of GPT-3 (Brown et al. 2020, appendix B); the rates of Muon were tuned
# with a rate that falls to 0.
FINAL_SHARES = {"muon": 0.0, "adamw": 0.1}


def rate_at(step: int, steps: int, config: OptimizerConfig) -> float:
    """The learning rate of the update that follows `step` earlier steps, as a fraction of its peak; 0 <= step < steps.

    Warm-up is linear: min(1, (step + 1) / warmup_steps). After it, the rate either follows the cosine of Loshchilov &
    Hutter (2017, arXiv 1608.03983, eq. 5), or stays at its peak and then falls linearly over the last `decay_fraction`
    of the run. Both end at the share of the peak in FINAL_SHARES.
    """
    warmup = min(config.warmup_steps, steps)
    rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
    if config.schedule == "cosine":
        done = min(1.0, max(0, step - warmup) / max(1, steps - 1 - warmup))
        fall = 0.5 * (1 + math.cos(math.pi * done))
    else:
        fall = min(1.0, (steps - step) / decay_steps(steps, config))
    final = FINAL_SHARES[config.kind]
    return rise * (final + (1 - final) * fall)


def decay_steps(steps: int, config: OptimizerConfig) -> int:
    """The number of updates over which the rate falls at the end of a constant_then_decay run."""
    return max(1, round((config.decay_fraction or 0.0) * steps))


def decay_start(steps: int, config: OptimizerConfig) -> int:
    """The last step whose rate does not depend on the length; the decay begins after this step. Grows with `steps`."""
    if steps < config.warmup_steps:  # the warm-up itself is shorter
        return 0
    return config.warmup_steps if config.schedule == "cosine" else steps - decay_steps(steps, config)


def may_change(step: int, steps: int, config: OptimizerConfig) -> bool:
    """Whether a run planned for `steps` steps may still get another length after `step` steps."""
    return step < steps and step <= decay_start(steps, config)


def shortest_length(step: int, steps: int, config: OptimizerConfig) -> int:
    """The smallest length whose decay begins at `step` or later; steps + 1 if that of `steps` steps begins earlier."""
    return bisect_left(range(steps + 1), step, key=lambda length: decay_start(length, config))


def relength(step: int, steps: int, wanted: int, config: OptimizerConfig) -> int:
    """The new length, after `step` steps, of a run that was planned for `steps` steps and should have `wanted` steps.

    Once the decay has begun, the length does not change. If the decay of a run of `wanted` steps would have begun
    before `step`, the result is the smallest length whose decay begins now. The rates of all updates before `step` are
    the same with the new length.
    """
    if not may_change(step, steps, config):
        return steps
    return max(wanted, shortest_length(step, steps, config), step + 1)
