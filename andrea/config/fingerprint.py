"""The fingerprint of a recipe: equal for two configurations if they learn the same from the same tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from andrea.config.schema import ON_LARGE_TEXT, RunConfig

# Keys that name or place a part, or that change its speed or what is recorded, but not what is learned. Of `train`, the
# length of the run is left out too: it is compared separately.
NOT_LEARNED = {
    "model": "name recipe_steps recipe_tokens_per_step",
    "attention": "implementation",
    "optimizer": "",
    "tokenizer": "",
    "objective": "",
    "train": """steps tokens_per_parameter flops tokens_per_step max_minutes micro_batch activation_checkpointing keep
        log_every eval_every eval_tokens save_every sample_tokens""",
}


def recipe_values(config: RunConfig) -> dict[str, Any]:
    """The dotted keys, with their values, that decide what a run learns from its tokens.

    A key with the value that schema.py has as its default is left out. So the fingerprint of an old recipe stays the
    same when a key is added whose default is the old behaviour.
    """
    values: dict[str, Any] = {"train.tokens_per_step": config.tokens_per_step}
    for group, left_out in NOT_LEARNED.items():
        part = getattr(config, group)
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if value == "auto":
                value = ON_LARGE_TEXT.get(f"{group}.{field.name}", value)
            has_factory = field.default_factory is not dataclasses.MISSING
            default = field.default_factory() if has_factory else field.default
            if field.name not in left_out.split() and value != default:
                values[f"{group}.{field.name}"] = value
    return values


def recipe_fingerprint(config: RunConfig) -> str:
    """Twelve hexadecimal digits of `recipe_values`. The seed, the text and the number of steps do not change it."""
    return digest(recipe_values(config))


def digest(values: Any) -> str:
    """Twelve hexadecimal digits of plain values; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:12]
