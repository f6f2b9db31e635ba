"""The settings that decide whether another program's architecture can hold a model, and the model that is exported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from andrea.checkpoint import Checkpoint
from andrea.config import AttentionConfig, ModelConfig, as_typed
from andrea.model.gpt import GPT
from andrea.text.tokenizer import Tokenizer

Allowed = set | Callable[[Any], bool]


@dataclass(frozen=True)
class Trained:
    """A model from a checkpoint: its weights (`gpt`, fp32), its configuration and its tokenizer. name: of its run."""

    name: str
    checkpoint: Checkpoint
    gpt: GPT
    attention: AttentionConfig
    tokenizer: Tokenizer

    @property
    def model(self) -> ModelConfig:
        return self.gpt.config

    @property
    def n_kv_head(self) -> int:
        return self.model.n_kv_head or self.model.n_head

    def setting(self, key: str) -> Any:
        """The value of a key, such as model.norm or attention.gate."""
        group, name = key.split(".")
        return getattr(self.model if group == "model" else self.attention, name)

    @property
    def windows(self) -> list[int | None]:
        """Each layer's window: the number of tokens that a token sees; None for all."""
        return [self.attention.window_of(layer) for layer in range(self.model.n_layer)]


def anything(value: Any) -> bool:
    return True


# What a transformer has that most programs know. An architecture names only where it allows other values.
PLAIN: dict[str, Allowed] = {
    "model.d_head": anything,
    "model.n_head": {None},  # None: a number that divides d_model
    "model.position": {"rotary", "none"},
    "model.rotary_share": {1.0},
    "model.rotary_scaling": {None},
    "model.norm": {"rmsnorm"},
    "model.mlp": {"swiglu"},
    "model.bias": {False},
    "model.qk_norm": {False},
    "model.logit_softcap": {None},
    "model.value_residual": {False},
    "model.value_embedding": {None},
    "model.qkv_convolution": {None},
    "model.bigram_rows": {None},
    "model.parallel_residual": {False},
    "attention.compatibility": {"scaled_dot"},
    "attention.window": {None},
    "attention.gate": {None},
    "attention.exclusive": {None},
    "attention.score_softcap": {None},
    "attention.sink": {False},
}


def differences(trained: Trained, allowed: dict[str, Allowed]) -> list[str]:
    """The settings, as `key=value`, that an architecture cannot hold. allowed: where it differs from PLAIN.

    A key that has no effect is taken for that of a plain transformer.
    """
    values = {key: trained.setting(key) for key in PLAIN}
    if trained.model.d_attended == trained.model.d_model:
        values["model.d_head"] = None
    if trained.model.d_model % trained.model.n_head == 0:
        values["model.n_head"] = None
    if trained.model.position != "rotary":
        values["model.rotary_share"] = 1.0
        values["model.rotary_scaling"] = None
    if not any(trained.windows):
        values["attention.window"] = None
    found = []
    for key, value in values.items():
        fits = allowed.get(key, PLAIN[key])
        if not (fits(value) if callable(fits) else value in fits):
            found.append(f"{key}={as_typed(value)}")
    return found


def fewest_differences(trained: Trained, programs: Sequence[Any]) -> tuple[Any, list[str]]:
    """Of classes or architectures, each with `allowed`: the first with the fewest differences, and these."""
    found = [differences(trained, program.allowed) for program in programs]
    fewest = min(found, key=len)
    return programs[found.index(fewest)], fewest


def is_one_width(window: Any) -> bool:
    """Whether all layers with a window have the same."""
    widths = window if isinstance(window, tuple) else (window,)
    return len({width for width in widths if width is not None}) <= 1
