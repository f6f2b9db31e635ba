"""The command `python -m andrea dashboard entity=me project=andrea`: a saved workspace in Weights & Biases.

The workspace groups the runs. It plots the losses of every run against tokens, FLOPs and seconds, and all other figures
against tokens. Without a login the command prints the specification that it would send.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from andrea.config import DashboardConfig, UserError
from andrea.training.records import AXES
from andrea.training.records.weights_and_biases import choose_wandb_mode

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

PANELS_ACROSS = 3
MOST_RUNS = 20  # lines in a panel

AXIS_TITLES = {"tokens": "tokens", "flops": "training FLOPs", "seconds": "seconds of training steps"}
SECTIONS = {  # key of a logged figure -> its title; in "Health" a pattern of keys, which come from andrea/training/health/
    "Loss": {"val/loss": "validation loss, nats", "val/bpb": "bits per byte", "train/loss": "training loss, nats"},
    "Speed": {"train/tokens_per_second": "tokens per second", "train/mfu": "MFU, share of the device's peak FLOPs"},
    "Attention": {
        "attention/entropy_nats": "entropy, nats",
        "attention/entropy_share": "entropy as a share of its maximum",
        "attention/lowest_entropy_share": "lowest entropy of a head, as a share of its maximum",
        "attention/largest_logit": "largest logit",
        "attention/first_token_mass": "weight on the first token",
        "attention/highest_first_token_mass": "largest weight of a head on the first token",
        "attention/previous_token_mass": "weight on the previous token",
        "attention/highest_previous_token_mass": "largest weight of a head on the previous token",
        "attention/highest_induction_score": "highest induction score of a head",
        "attention/in_context_nats": "in-context score, nats",
    },
    "Health": {
        "^health/findings/.*": "findings: 1 where a check failed",
        "^health/text/.*": "repetition and variety of generated text and of validation text",
        "^health/(loss|gradient)_spikes$|^health/clipped_share$|^health/update_ratio": "optimisation",
        "^health/heads_.*": "attention",
        "^health/(val_less_train|epochs).*": "data",
    },
    "Course of training": {
        "train/gradient_norm": "gradient norm",
        "train/rate": "learning rate, share of its peak",
        "train/epoch": "epochs",
    },
}


def dashboard(config: DashboardConfig) -> int:
    """Save the workspace and print its address; without a login print its specification. Returns the exit code.

    Raises UserError.
    """
    workspace = make_workspace(config)
    if choose_wandb_mode("auto") != "online":
        print(json.dumps(specification(workspace), indent=1))
        print(
            "workspace not saved: wandb is offline. Run `wandb login` once, then this command again",
            file=sys.stderr,
        )
        return 0
    if not config.entity:
        raise UserError("entity is missing; set entity=… to the wandb user or team that owns the project")
    workspace.save()
    print(f"saved: {workspace.url}")
    return 0


def make_workspace(config: DashboardConfig) -> Workspace:
    """The workspace with its sections, not yet sent. Raises UserError if wandb-workspaces is missing."""
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError:
        raise UserError(
            'the dashboard needs wandb-workspaces; install it with: pip install -e ".[dashboard]"'
        ) from None

    def panel(section: str, axis: str, metric: str, title: str) -> reports.LinePlot:
        if section == "Health":
            return reports.LinePlot(title=title, x=axis, metric_regex=metric, title_x=AXIS_TITLES[axis])
        title = f"{title} · {AXIS_TITLES[axis]}"
        return reports.LinePlot(title=title, x=axis, y=[metric], log_x=True, title_x=AXIS_TITLES[axis])

    def section(name: str) -> workspaces.Section:
        axes = AXES if name == "Loss" else ("tokens",)
        panels = [panel(name, axis, *each) for axis in axes for each in SECTIONS[name].items()]
        rows = -(-len(panels) // PANELS_ACROSS)
        layout = workspaces.SectionLayoutSettings(columns=PANELS_ACROSS, rows=rows)
        is_open = name in ("Loss", "Speed")
        return workspaces.Section(name=name, panels=panels, is_open=is_open, layout_settings=layout)

    return workspaces.Workspace(
        entity=config.entity or "",
        project=config.project,
        name=config.name,
        sections=[section(name) for name in SECTIONS],
        settings=workspaces.WorkspaceSettings(x_axis="tokens", max_runs=MOST_RUNS),
        # Grouped by name too, because otherwise wandb would draw one mean line over all model sizes of a sweep.
        runset_settings=workspaces.RunsetSettings(groupby=[workspaces.Metric("Group"), workspaces.Metric("Name")]),
    )


def specification(workspace: Workspace) -> dict[str, Any]:
    """The content that `workspace.save()` sends, as plain mappings."""
    view = workspace._to_model()  # the package has no public function for this
    return {
        "entity": view.entity,
        "project": view.project,
        "name": view.display_name,
        "spec": json.loads(view.spec.model_dump_json(by_alias=True, exclude_none=True)),
    }
