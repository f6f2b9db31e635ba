"""Where figures go: `metrics.jsonl` and `samples.jsonl` in the run folder always, Weights & Biases when it is wanted.

A record is one flat mapping of a step's figures. Each carries step, tokens, flops and seconds, so that runs of
different sizes compare on any of these axes.
"""

from __future__ import annotations

import json
import netrc
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from andrea.checkpoint import flush_to_disk, replace_text, storing
from andrea.config import LoggerConfig, UserError

AXES = ("tokens", "flops", "seconds")


class Logger(ABC):
    @abstractmethod
    def record(self, record: dict[str, Any]) -> None:
        """Take one step's figures."""

    @abstractmethod
    def sample(self, sample: dict[str, Any]) -> None:
        """Take one text the model wrote: step, tokens, prompt, text."""

    @abstractmethod
    def page(self, page: dict[str, Any]) -> None:
        """Take a page: step, its name, its html."""

    @abstractmethod
    def alert(self, alert: dict[str, Any]) -> None:
        """Take what health has found, or what is over: step, finding (its name), begins (true, false), message."""

    @abstractmethod
    def finish(self, exit_code: int) -> None:
        """The run is over; nothing comes after."""


class RunFolder(Logger):
    """`metrics.jsonl`, `samples.jsonl` and `health.jsonl`: appended a line at a time, cut back on resume; and pages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics = folder / "metrics.jsonl"
        self.samples = folder / "samples.jsonl"
        self.alerts = folder / "health.jsonl"

    def record(self, record: dict[str, Any]) -> None:
        append_line(self.metrics, record)

    def sample(self, sample: dict[str, Any]) -> None:
        append_line(self.samples, sample)

    def page(self, page: dict[str, Any]) -> None:
        path = self.folder / page["name"] / f"step-{page['step']:08d}.html"
        with storing(path):
            path.parent.mkdir(exist_ok=True)
        replace_text(path, page["html"])

    def alert(self, alert: dict[str, Any]) -> None:
        append_line(self.alerts, alert)

    def finish(self, exit_code: int) -> None:
        self.flush()

    def flush(self) -> None:
        """On the disk now: a checkpoint must not outlive the records that led to it."""
        for path in (self.metrics, self.samples, self.alerts):
            if path.exists():
                with storing(path):
                    flush_to_disk(path)

    def cut_after(self, step: int) -> None:
        """Drop what lies beyond a checkpoint's step, and the line of a run that had stopped there."""
        for path in (self.metrics, self.samples, self.alerts):
            kept = [record for record in read_lines(path) if record["step"] <= step and "event" not in record]
            replace_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))


def append_line(path: Path, record: dict[str, Any]) -> None:
    with storing(path), open(path, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(record, ensure_ascii=False) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file, oldest first; a torn last line is left out, a missing file is empty."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


class Wandb(Logger):
    """The same records in Weights & Biases; all runs of a runs_dir keep their files in its one `wandb/` folder."""

    def __init__(
        self,
        config: LoggerConfig,
        mode: str,
        runs_dir: Path,
        name: str,
        group: str,
        run_id: str | None,
        facts: dict[str, Any],
    ) -> None:
        import wandb

        os.environ.setdefault("WANDB_SILENT", "true")
        self.run = wandb.init(
            project=config.project,
            group=config.group or group,
            tags=config.tags,
            name=name,
            id=run_id,
            resume="allow",
            dir=str(runs_dir),
            mode=mode,
            config=facts,
            settings=wandb.Settings(init_timeout=30, console="off", silent=True),
        )
        for axis in ("step", *AXES):
            self.run.define_metric(axis)
        self.run.define_metric("*", step_metric="tokens")

    @property
    def run_id(self) -> str:
        return self.run.id

    def record(self, record: dict[str, Any]) -> None:
        event = record.get("event")
        if event is None:
            self.run.log({key: shown(key, value) for key, value in record.items()})
        else:
            self.run.summary.update({key: value for key, value in record.items() if key not in ("step", *AXES)})

    def sample(self, sample: dict[str, Any]) -> None:
        import wandb

        axes = {axis: sample[axis] for axis in ("step", *AXES)}
        self.run.log(
            {**axes, "sample": wandb.Html(f"<pre>{escape(sample['prompt'] + sample['text'])}</pre>", inject=False)}
        )

    def page(self, page: dict[str, Any]) -> None:
        import wandb

        axes = {axis: page[axis] for axis in ("step", *AXES)}
        self.run.log({**axes, page["name"]: wandb.Html(page["html"], inject=False)})

    def alert(self, alert: dict[str, Any]) -> None:
        import wandb

        if alert["begins"]:
            self.run.alert(
                title=f"{alert['finding']} at step {alert['step']}",
                text=alert["message"],
                level=wandb.AlertLevel.WARN,
            )

    def finish(self, exit_code: int) -> None:
        self.run.finish(exit_code=exit_code)


def shown(name: str, value: Any) -> Any:
    """A figure as wandb takes it: numbers as they are, layers × heads as a page."""
    import wandb

    return wandb.Html(heatmap(name, value), inject=False) if isinstance(value, list) else value


def heatmap(name: str, rows: list[list[float | None]]) -> str:
    """Layers × heads as an HTML table whose cells are shaded from the lowest figure to the highest, numbers in them."""
    known = [number for row in rows for number in row if number is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)

    def cell(number: float | None) -> str:
        if number is None:
            return "<td>–</td>"
        share = (number - low) / (high - low) if high > low else 0.0
        ink = "#fff" if share > 0.5 else "#000"
        return f'<td style="background:hsl(215 70% {95 - 65 * share:.0f}%);color:{ink}">{number:.3g}</td>'

    lines = "".join(f"<tr><th>{layer}</th>{''.join(map(cell, row))}</tr>" for layer, row in enumerate(rows))
    heads = "".join(f"<th>{head}</th>" for head in range(len(rows[0])))
    style = "font:12px sans-serif;text-align:center;border-spacing:2px"
    caption = f"<caption>{escape(name)}: layers down, heads across</caption>"
    return f'<table style="{style}">{caption}<tr><th></th>{heads}</tr>{lines}</table>'


def escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def choose_wandb_mode(asked: str) -> tuple[str, str]:
    """(mode, the line that says so). `auto` is online when logged in, else offline; it never asks a question."""
    if asked == "disabled" or os.environ.get("WANDB_MODE") == "disabled":
        return "disabled", "wandb: off (logger=wandb turns it on)"
    if asked == "auto":
        mode = os.environ.get("WANDB_MODE") or ("online" if logged_in() else "offline")
        why = "" if mode == "online" else "; `wandb login` once, and runs go online; `wandb sync` sends this one later"
        return mode, f"wandb: {mode}{why}"
    if asked == "online" and not logged_in():
        raise UserError("logger.wandb=online needs a login; run `wandb login` once, or set logger.wandb=offline")
    return asked, f"wandb: {asked}"


def logged_in() -> bool:
    """An API key is in the environment or in the netrc file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].split("/")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
