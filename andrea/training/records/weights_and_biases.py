"""Weights & Biases: the same records as the run folder's, online or offline.

A run does not need wandb: the run folder has every record. If wandb's server cannot be reached at the start, the run is
recorded offline. Any other error of wandb is raised once, after wandb's process was ended; `Records` reports it in one
line, and training continues without wandb.
"""

import contextlib
import html
import logging
import netrc
import os
import shlex
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

from andrea.config import LoggerConfig, UserError, as_typed
from andrea.runtime.system import rename
from andrea.text.tokenizer import without_surrogates
from andrea.training.records import AXES, Logger
from andrea.training.records.run_folder import read_lines, with_texts

GROUP = "WANDB_RUN_GROUP"  # wandb's environment variable
TIMEOUTS_SECONDS = {"init_timeout": 30, "finish_timeout": 120}  # older versions of wandb lack the second


@final
class Wandb(Logger):
    """One wandb run. All runs of a `runs_dir` keep their wandb files in its folder `wandb/`."""

    def __init__(
        self,
        mode: str,
        config: LoggerConfig,
        runs_dir: Path,
        name: str,
        group: str,
        run_id: str | None,
        facts: dict[str, Any],
    ) -> None:
        """mode: online or offline. run_id: the wandb run to continue. facts: its config. Raises whatever wandb raises.

        wandb rejects lone surrogates in texts.
        """
        import wandb

        os.environ.setdefault("WANDB_SILENT", "true")
        # Of wandb's own figures: with Python 3.14 it warns at the end of the process that it was ended twice.
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        self.run: Any = None  # wandb's own run; None where wandb has failed
        self.run_id = run_id or uuid.uuid4().hex[:8]
        group = os.environ.get(GROUP) or (None if run_id else group)  # a run that goes on keeps the group that it has
        about = {
            "project": config.project, "group": group, "name": without_surrogates(name),
            "config": with_texts(facts, without_surrogates), "id": self.run_id, "resume": "allow", "dir": str(runs_dir),
        }  # fmt: skip
        timeouts = {key: seconds for key, seconds in TIMEOUTS_SECONDS.items() if key in wandb.Settings.model_fields}
        with self.disconnecting_on_error():  # wandb's process has reserved the run's id: the next attempt needs another
            settings = wandb.Settings(console="off", silent=True, **timeouts)
            self.run = wandb.init(**about, mode=mode, settings=settings)
            for axis in ("step", *AXES):
                self.run.define_metric(axis)
            self.run.define_metric("*", step_metric="tokens")

    @property
    def where(self) -> str:
        """A line that says where the run is recorded, and how an offline run is uploaded."""
        if not self.run.offline:
            return "wandb: online"
        # Not always in runs_dir: wandb chooses another place if it cannot write there.
        folder, here = Path(self.run.dir).parent, Path.cwd()
        shown = folder.relative_to(here) if folder.is_relative_to(here) else folder
        return f"wandb: offline; to upload this run: `wandb login` once, then `wandb sync {shlex.quote(str(shown))}`"

    def take_over(self, folder: Path) -> None:
        """Repeat the run folder's records in a resumed run that is kept offline, and set aside the files of earlier parts.

        wandb cannot append to the files of an offline run, so tools that read them would show one run for each part.
        """
        records = [record for record in read_lines(folder / "metrics.jsonl") if "event" not in record]
        if self.run is None or not self.run.offline or not records:
            return
        for record in records:
            self.record(record)
        axes = {record["step"]: record for record in records}
        for sample in read_lines(folder / "samples.jsonl"):
            self.sample(sample)
        for path in sorted((folder / "lens").glob("step-*.html")):
            step = path.stem.removeprefix("step-")
            if step.isdecimal() and (record := axes.get(int(step))) is not None:
                self.page(record | {"name": "lens", "html": path.read_text(encoding="utf-8")})
        own = Path(self.run.dir).parent
        for earlier in own.parent.glob(f"offline-run-*-{self.run_id}*"):  # -1 follows if two start within a second
            if earlier != own:
                rename(earlier, earlier.with_name(f"aside-{earlier.name}"))

    def send(self, call: Callable[[], None]) -> None:
        """Make a call to wandb, unless wandb has failed before. Raises whatever wandb raises."""
        if self.run is not None:
            with self.disconnecting_on_error():
                call()

    @contextlib.contextmanager
    def disconnecting_on_error(self) -> Iterator[None]:
        """Context in which an error ends wandb's process. It would fail again when Python exits, and print a traceback."""
        try:
            yield
        except Exception:  # whatever it is: it is raised again, and Records.guest turns it into one line
            import wandb

            self.run = None
            with contextlib.suppress(Exception):  # of a process that may be gone
                wandb.teardown()
            raise

    def record(self, record: dict[str, Any]) -> None:
        if "event" in record:
            ending = {key: value for key, value in record.items() if key not in ("step", *AXES)}
            self.send(lambda: self.run.summary.update(ending))
        else:
            self.send(lambda: self.run.log({key: figure_or_heatmap(key, value) for key, value in record.items()}))

    def sample(self, sample: dict[str, Any]) -> None:
        self.log_page(sample, "sample", f"<pre>{html.escape(sample['prompt'] + sample['text'])}</pre>")

    def page(self, page: dict[str, Any]) -> None:
        self.log_page(page, page["name"], page["html"])

    def log_page(self, source: dict[str, Any], name: str, page: str) -> None:
        """Log an HTML page under `name`, at the step and the axes of `source`."""
        import wandb

        axes = {axis: source[axis] for axis in ("step", *AXES)}
        self.send(lambda: self.run.log({**axes, name: wandb.Html(without_surrogates(page), inject=False)}))

    def alert(self, alert: dict[str, Any]) -> None:
        import wandb

        if alert["begins"]:
            title = f"{alert['finding']} at step {alert['step']}"
            self.send(lambda: self.run.alert(title=title, text=alert["message"], level=wandb.AlertLevel.WARN))

    def finish(self, exit_code: int) -> None:
        self.send(lambda: self.run.finish(exit_code=exit_code))


def open_wandb(mode: str, say: Callable[[str], None], *arguments: Any) -> Wandb:
    """The wandb run; offline if its server refuses or cannot be reached. arguments: those of Wandb, but for `mode`."""
    try:
        return Wandb(mode, *arguments)
    except Exception as error:
        if mode != "online":
            raise
        say(f"wandb failed ({reason(error)}); the run is kept offline")
        return Wandb("offline", *arguments)


def check_settings(config: LoggerConfig) -> None:
    """Raises UserError for a project that wandb refuses. Settings of the environment are not read here."""
    try:
        import wandb
    except Exception:  # a broken installation, which is reported when the run opens its loggers
        return
    try:
        wandb.Settings(project=config.project)
    except (ValueError, wandb.errors.UsageError) as error:
        raise UserError(f"logger.project={as_typed(config.project)} is refused by wandb: {reason(error)}") from None


def reason(error: Exception) -> str:
    """The message of wandb's or pydantic's error, on one line."""
    said = " ".join(str(error).split()).split(" [type=")[0].split("Value error, ")[-1]
    return said[:200] or type(error).__name__


def figure_or_heatmap(name: str, value: Any) -> Any:
    """A number unchanged, or a table of layers × heads as an HTML page."""
    import wandb

    return wandb.Html(heatmap(name, value), inject=False) if isinstance(value, list) else value


def choose_wandb_mode(asked: str) -> str:
    """online, offline or disabled, for logger.wandb=`asked`. `auto` is online when logged in, else offline.

    Never asks a question. Raises UserError for `online` without a login.
    """
    if asked == "disabled" or os.environ.get("WANDB_MODE") == "disabled":
        return "disabled"
    if asked == "auto":
        return os.environ.get("WANDB_MODE") or ("online" if logged_in() else "offline")
    if asked == "online" and not logged_in():
        raise UserError("logger.wandb=online needs a login; run `wandb login` once, or set logger.wandb=offline")
    return asked


def logged_in() -> bool:
    """Whether an API key is in the environment or in the netrc file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].split("/")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def heatmap(name: str, rows: list[list[float | None]]) -> str:
    """HTML of L rows (layers) of H figures (heads), shaded from lowest to highest. None stands for a missing figure."""
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
    caption = f"<caption>{html.escape(name)}: layers down, heads across</caption>"
    return f'<table style="{style}">{caption}<tr><th></th>{heads}</tr>{lines}</table>'
