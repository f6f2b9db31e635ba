"""A saved workspace in Weights & Biases in which runs of all sizes compare without clicking.

    python -m andrea dashboard entity=me project=andrea

Panels are of the figures that every run logs (andrea/training/trainer.py, telemetry.py), each axis once, grouped as the
runs are. Without a login the specification is printed that would be sent.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from andrea.config import DashboardConfig, UserError
from andrea.training.records.logger import AXES
from andrea.training.records.weights_and_biases import choose_wandb_mode

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

COLUMNS = 3  # panels side by side: the three losses of an axis
RUNS_SHOWN = 20  # lines in a panel

AXIS_WORDS = {"tokens": "tokens", "flops": "FLOPs", "seconds": "seconds of training steps"}
LOSSES = {"val/loss": "validation loss, nats", "val/bpb": "bits per byte", "train/loss": "training loss, nats"}
SPEED = {"train/tokens_per_second": "tokens a second", "train/mfu": "MFU, share of the device's peak"}
COURSE = {
    "train/gradient_norm": "gradient norm",
    "train/rate": "learning rate, share of its peak",
    "train/epoch": "epochs",
}
ATTENTION = {
    "attention/entropy_nats": "entropy, nats",
    "attention/entropy_share": "entropy, share of uniform",
    "attention/lowest_entropy_share": "entropy share of the most concentrated head",
    "attention/largest_logit": "largest logit",
    "attention/first_token_mass": "weight on the first token",
    "attention/highest_first_token_mass": "weight on the first token, highest head",
    "attention/previous_token_mass": "weight on the token before",
    "attention/highest_previous_token_mass": "weight on the token before, highest head",
}
HEALTH = {  # a pattern a panel: which checks exist is the business of andrea/training/health/health.py
    "^health/findings/.*": "findings: 1 where a check failed",
    "^health/text/.*": "samples, beside the same figures of validation text",
    "^health/(loss|gradient)_spikes$|^health/clipped_share$|^health/update_ratio": "optimisation",
    "^health/heads_.*": "attention",
    "^health/(val_less_train|epochs).*": "data",
}


def option_words(words: list[str]) -> list[str]:
    """The command line with `--entity X` and `--entity=X` read as entity=X."""
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        if word.startswith("--"):
            word = word[2:]
            if "=" not in word:
                value = next(rest, None)
                if value is None:
                    raise UserError(f"--{word} needs a value; write --{word} VALUE or {word}=VALUE")
                word = f"{word}={value}"
        found.append(word)
    return found


def dashboard(config: DashboardConfig) -> int:
    """Save the workspace and print where it is; without a login print what would be sent. Returns the exit code."""
    workspace = make_workspace(config)
    if choose_wandb_mode("auto")[0] != "online":
        print(json.dumps(specification(workspace), indent=1))
        print(
            "not sent: wandb is offline here. `wandb login` once, then the same command saves this workspace",
            file=sys.stderr,
        )
        return 0
    if not config.entity:
        raise UserError("entity is missing; set entity=… to the wandb user or team whose project this is")
    workspace.save()
    print(f"saved: {workspace.url}")
    return 0


def make_workspace(config: DashboardConfig) -> Workspace:
    """The workspace with its sections, not yet sent. Raises UserError where the package is missing."""
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError:
        raise UserError(
            'the dashboard needs wandb-workspaces; install it with: pip install -e ".[dashboard]"'
        ) from None

    def lines(metrics: dict[str, str], axis: str) -> list:
        return [
            reports.LinePlot(
                title=f"{words} · {AXIS_WORDS[axis]}", x=axis, y=[metric], log_x=True, title_x=AXIS_WORDS[axis]
            )
            for metric, words in metrics.items()
        ]

    def section(name: str, panels: list, is_open: bool = False) -> workspaces.Section:
        rows = -(-len(panels) // COLUMNS)
        layout = workspaces.SectionLayoutSettings(columns=COLUMNS, rows=rows)
        return workspaces.Section(name=name, panels=panels, is_open=is_open, layout_settings=layout)

    health = [
        reports.LinePlot(title=words, x="tokens", metric_regex=pattern, title_x=AXIS_WORDS["tokens"])
        for pattern, words in HEALTH.items()
    ]
    return workspaces.Workspace(
        entity=config.entity or "",
        project=config.project,
        name=config.name,
        sections=[
            section("Loss", [panel for axis in AXES for panel in lines(LOSSES, axis)], is_open=True),
            section("Speed", lines(SPEED, "tokens"), is_open=True),
            section("Attention", lines(ATTENTION, "tokens")),
            section("Health", health),
            section("Course of training", lines(COURSE, "tokens")),
        ],
        settings=workspaces.WorkspaceSettings(x_axis="tokens", max_runs=RUNS_SHOWN),
        # By group, and by name within it: by group alone, wandb draws one mean line for a sweep's different sizes.
        runset_settings=workspaces.RunsetSettings(groupby=[workspaces.Metric("Group"), workspaces.Metric("Name")]),
    )


def specification(workspace: Workspace) -> dict[str, Any]:
    """What `workspace.save()` would send, as plain mappings."""
    view = workspace._to_model()  # the package has no public way to see it
    return {
        "entity": view.entity,
        "project": view.project,
        "name": view.display_name,
        "spec": json.loads(view.spec.model_dump_json(by_alias=True, exclude_none=True)),
    }
