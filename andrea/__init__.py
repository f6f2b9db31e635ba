"""ANDREA: a mini GPT training framework built around attention. docs/python-api.md shows how each name here is used."""

import importlib
from typing import Any

__version__ = "0.2.0"

# Public name -> the module that has it, imported when the name is first used: `import andrea` itself loads nothing.
MODULE_OF_NAME = {
    "Compatibility": "andrea.attention",
    "LoadedModel": "andrea.api.loaded_model",
    "TrainedRun": "andrea.api.train",
    "UserError": "andrea.config",
    "attend": "andrea.attention",
    "load": "andrea.api.loaded_model",
    "train": "andrea.api.train",
}
__all__ = [*MODULE_OF_NAME]


def __getattr__(name: str) -> Any:
    if name not in MODULE_OF_NAME:
        raise AttributeError(f"module 'andrea' has no attribute {name!r}; public names: {', '.join(MODULE_OF_NAME)}")
    value = getattr(importlib.import_module(MODULE_OF_NAME[name]), name)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *MODULE_OF_NAME])
