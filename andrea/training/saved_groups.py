"""A group that is typed again by its name when a run is resumed: the run keeps its values, also if the file has changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from andrea.checkpoint import Checkpoint
from andrea.config import RunConfig, as_typed, chosen_groups, group_config, to_plain
from andrea.config.group_files import choices_named

RECIPE = ("model", "attention", "optimizer")  # groups whose values decide what is learned


def saved_choices(checkpoint: Checkpoint) -> Mapping[str, str]:
    """The choice of each group of the checkpoint's run; as far as it can be known for a run of an older version."""
    if (saved := checkpoint.state.get("groups")) is not None:
        return saved
    config = checkpoint.state["config"]
    found = {
        group: choices_named(group, config[group]) for group in chosen_groups({}) if isinstance(config.get(group), dict)
    }
    return {group: min(names) for group, names in found.items() if names}


def groups_to_replace(typed: Mapping[str, str], saved: Mapping[str, str]) -> dict[str, str]:
    """The typed groups without those that the run has already chosen by the same name. saved: see `saved_choices`."""
    return {group: choice for group, choice in typed.items() if saved.get(group) != choice}


def kept_values(
    typed: Mapping[str, str], saved: Mapping[str, str], values: Collection[str], run: RunConfig
) -> list[str]:
    """A line for each recipe group that was typed again by its name, if its file now has other values than the run.

    values: the typed keys, which are no values of the file. run: the resumed run's configuration.
    """
    lines = []
    for group in sorted((typed.keys() - groups_to_replace(typed, saved).keys()) & set(RECIPE)):
        ours, now = to_plain(run)[group], to_plain(group_config(group, typed[group]))
        other = {key: now[key] for key in now if now[key] not in ("auto", ours[key]) and f"{group}.{key}" not in values}
        if other:
            listed = ", ".join(f"{key}={as_typed(ours[key])} (the file has {as_typed(other[key])})" for key in other)
            lines.append(f"{group}={typed[group]} keeps the run's values: {listed}")
    return lines
