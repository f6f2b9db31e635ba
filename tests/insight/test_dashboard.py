"""The wandb workspace as it would be sent, without a network."""

from __future__ import annotations

import json
import sys

import pytest

from andrea.api.command_line import configure
from andrea.config import DashboardConfig, UserError
from andrea.insight.dashboard import dashboard, make_workspace, specification

OFFLINE = pytest.mark.usefixtures("offline")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    pytest.importorskip("wandb_workspaces", reason="wandb-workspaces is not installed: pip install -e '.[dashboard]'")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))


def config_of(*words: str) -> DashboardConfig:
    return configure(DashboardConfig, "dashboard", list(words))


def panels_of(spec: dict) -> dict[str, list[dict]]:
    """Name of a section -> the configurations of its panels."""
    sections = spec["spec"]["section"]["panelBankConfig"]["sections"]
    return {section["name"]: [panel["config"] for panel in section["panels"]] for section in sections}


@OFFLINE
def test_offline_the_specification_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert dashboard(config_of("entity=me", "project=mine")) == 0
    printed = capsys.readouterr()
    sent = json.loads(printed.out)
    assert (sent["entity"], sent["project"]) == ("me", "mine")
    assert "workspace not saved" in printed.err and "wandb login" in printed.err


@OFFLINE
def test_every_loss_has_a_panel_for_every_axis() -> None:
    panels = panels_of(specification(make_workspace(config_of("entity=me"))))
    pairs = {(panel["xAxis"], *panel["metrics"]) for panel in panels["Loss"]}
    axes, losses = ("tokens", "flops", "seconds"), ("val/loss", "val/bpb", "train/loss")
    assert pairs == {(axis, loss) for axis in axes for loss in losses}
    assert {"train/tokens_per_second", "train/mfu"} <= {panel["metrics"][0] for panel in panels["Speed"]}


@OFFLINE
def test_runs_are_grouped_by_group_and_keep_their_own_lines() -> None:
    spec = specification(make_workspace(config_of("entity=me")))
    grouping = [key["name"] for key in spec["spec"]["section"]["runSets"][0]["grouping"]]
    assert grouping == ["group", "displayName"]


@OFFLINE
def test_attention_panels_show_figures_that_training_logs() -> None:
    import torch

    from andrea.attention import HeadStatistics
    from andrea.training.evaluation import scalars, score_figures

    ones = torch.ones(2, 3)
    statistics = HeadStatistics(*(ones for _ in HeadStatistics._fields))
    named = {panel["metrics"][0] for panel in panels_of(specification(make_workspace(config_of())))["Attention"]}
    logged = scalars(statistics) | score_figures({"induction": ones}) | {"attention/in_context_nats": 0.0}
    assert named <= logged.keys()


@OFFLINE
def test_health_panels_match_every_check() -> None:
    import re

    from andrea.training.health.health import FINDINGS

    panels = panels_of(specification(make_workspace(config_of())))["Health"]
    patterns = [panel["metricRegex"] for panel in panels]
    for name in FINDINGS:
        assert any(re.search(pattern, f"health/findings/{name}") for pattern in patterns)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)
    with pytest.raises(UserError, match=r"pip install -e \"\.\[dashboard\]\""):
        make_workspace(config_of("entity=me"))


@OFFLINE
def test_online_without_an_entity_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with pytest.raises(UserError, match="entity is missing"):
        dashboard(config_of())
