"""Where figures go: `metrics.jsonl` and `samples.jsonl` in the run folder always, Weights & Biases when it is wanted.

A record is one flat mapping of a step's figures. Each carries step, tokens, flops and seconds, so that runs of
different sizes compare on any of these axes.
"""

from __future__ import annotations

import json
import netrc
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from andrea.config import LoggerConfig, UserError
from andrea.runtime.files import flush_to_disk, replace_text, storing
from andrea.text.tokenizer import without_surrogates

AXES = ("tokens", "flops", "seconds")
WAITS_SECONDS = {"init_timeout": 30, "finish_timeout": 120}  # of wandb; the second is not known to its older versions
GOES_ON = "training goes on without it"


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
            with storing(path):
                replace_text(path, "".join(map(line_of, kept)))


def append_line(path: Path, record: dict[str, Any]) -> None:
    with storing(path), open(path, "a", encoding="utf-8") as stream:
        stream.write(line_of(record))


def line_of(record: dict[str, Any]) -> str:
    """One line of JSON. Half of a surrogate pair, from a prompt that was no UTF-8, has no bytes: it is written \\udc80."""
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace").decode() + "\n"


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
    """The same records in Weights & Biases; all runs of a runs_dir keep their files in its one `wandb/` folder.

    No run ends over wandb. Where its server cannot be reached at the start the run is kept offline; where wandb fails on
    the way, one line says so and training goes on without it: the run folder has everything.
    """

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
        self.run_id = run_id or uuid.uuid4().hex[:8]
        about = {
            "project": config.project, "group": config.group or group, "tags": config.tags, "name": whole_characters(name),
            "config": whole_characters(facts), "id": self.run_id, "resume": "allow", "dir": str(runs_dir),
        }  # fmt: skip
        known = {key: seconds for key, seconds in WAITS_SECONDS.items() if key in wandb.Settings.model_fields}
        settings = wandb.Settings(console="off", silent=True, **known)
        self.run: Any = None
        for attempt in dict.fromkeys((mode, "offline")):
            then = "the run is kept offline, `wandb sync` sends it later" if attempt == "online" else GOES_ON
            with Forgiving(then):
                self.run = wandb.init(**about, mode=attempt, settings=settings)
                break
            self.give_up()  # wandb's process has the run's id, and would not give it out a second time
        self.tell(self.define_axes)

    def define_axes(self) -> None:
        for axis in ("step", *AXES):
            self.run.define_metric(axis)
        self.run.define_metric("*", step_metric="tokens")

    def tell(self, call: Callable[[], None]) -> None:
        """`call` what tells wandb something; nothing is told to a wandb that has failed."""
        if self.run is None:
            return
        with Forgiving(GOES_ON) as told:
            call()
        if told.failed:
            self.give_up()

    def give_up(self) -> None:
        """End wandb's process now: what has failed would fail once more when ours ends, with a traceback."""
        import wandb

        self.run = None
        with Forgiving():
            wandb.teardown()

    def record(self, record: dict[str, Any]) -> None:
        if "event" in record:
            ending = {key: value for key, value in record.items() if key not in ("step", *AXES)}
            self.tell(lambda: self.run.summary.update(ending))
        else:
            self.tell(lambda: self.run.log({key: shown(key, value) for key, value in record.items()}))

    def sample(self, sample: dict[str, Any]) -> None:
        self.show(sample, "sample", f"<pre>{escape(sample['prompt'] + sample['text'])}</pre>")

    def page(self, page: dict[str, Any]) -> None:
        self.show(page, page["name"], page["html"])

    def show(self, of: dict[str, Any], name: str, html: str) -> None:
        import wandb

        axes = {axis: of[axis] for axis in ("step", *AXES)}
        self.tell(lambda: self.run.log({**axes, name: wandb.Html(whole_characters(html), inject=False)}))

    def alert(self, alert: dict[str, Any]) -> None:
        import wandb

        if alert["begins"]:
            title = f"{alert['finding']} at step {alert['step']}"
            self.tell(lambda: self.run.alert(title=title, text=alert["message"], level=wandb.AlertLevel.WARN))

    def finish(self, exit_code: int) -> None:
        self.tell(lambda: self.run.finish(exit_code=exit_code))


@final
class Forgiving:
    """`with` it, wandb's errors are said in one line and go no further; all others are errors as ever.

    wandb's have no common base: the module of the class tells them. That its process is gone is an OSError.
    """

    def __init__(self, then: str | None = None) -> None:
        """`then` is what happens next; without it, nothing is said."""
        self.then, self.failed = then, False

    def __enter__(self) -> Forgiving:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> bool:
        self.failed = isinstance(error, OSError) or (kind is not None and kind.__module__.split(".")[0] == "wandb")
        if self.failed and self.then:
            print(f"wandb failed ({' '.join(str(error).split())[:200] or kind}); {self.then}", flush=True)
        return self.failed


def whole_characters(value: Any) -> Any:
    """The same with half surrogate pairs, of which wandb takes none, as U+FFFD: in text, lists and mappings."""
    if isinstance(value, dict):
        return {whole_characters(key): whole_characters(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [whole_characters(entry) for entry in value]
    return without_surrogates(value) if isinstance(value, str) else value


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
