"""Weights & Biases: the same records as the run folder's, online or offline.

No run ends because of wandb. If its server cannot be reached at the start, the run is recorded offline. If wandb fails
later, one line says so and training continues without it: the run folder has every record.
"""

from __future__ import annotations

import html
import netrc
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from andrea.config import LoggerConfig, UserError
from andrea.text.tokenizer import without_surrogates
from andrea.training.records.heatmap import heatmap
from andrea.training.records.logger import AXES, Logger
from andrea.training.records.record_file import read_lines

TIMEOUTS_SECONDS = {"init_timeout": 30, "finish_timeout": 120}  # older versions of wandb lack the second
CONTINUES = "training continues without it"


@final
class Wandb(Logger):
    """One wandb run. All runs of a `runs_dir` keep their wandb files in its folder `wandb/`."""

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
        """mode: online or offline. run_id: the wandb run to continue, or None. facts: the run's config in wandb."""
        import wandb

        os.environ.setdefault("WANDB_SILENT", "true")
        self.run_id = run_id or uuid.uuid4().hex[:8]
        about = {
            "project": config.project, "group": config.group or group, "tags": config.tags, "name": replace_surrogates(name),
            "config": replace_surrogates(facts), "id": self.run_id, "resume": "allow", "dir": str(runs_dir),
        }  # fmt: skip
        timeouts = {key: seconds for key, seconds in TIMEOUTS_SECONDS.items() if key in wandb.Settings.model_fields}
        settings = wandb.Settings(console="off", silent=True, **timeouts)
        self.run: Any = None  # wandb's own run; None where wandb has failed
        for attempt in dict.fromkeys((mode, "offline")):
            offline_next = "the run is kept offline; `wandb sync` uploads it later"
            with TolerateWandbErrors(offline_next if attempt == "online" else CONTINUES):
                self.run = wandb.init(**about, mode=attempt, settings=settings)
                break
            self.disconnect()  # wandb's process has reserved the run's id: a second attempt would be rejected
        self.send(self.define_axes)

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
                os.replace(earlier, earlier.with_name(f"aside-{earlier.name}"))

    def define_axes(self) -> None:
        for axis in ("step", *AXES):
            self.run.define_metric(axis)
        self.run.define_metric("*", step_metric="tokens")

    def send(self, call: Callable[[], None]) -> None:
        """Make a call to wandb, unless wandb has failed before."""
        if self.run is None:
            return
        with TolerateWandbErrors(CONTINUES) as attempt:
            call()
        if attempt.failed:
            self.disconnect()

    def disconnect(self) -> None:
        """End wandb's process now. Otherwise it would fail again when Python exits, and print a traceback."""
        import wandb

        self.run = None
        with TolerateWandbErrors():
            wandb.teardown()

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
        self.send(lambda: self.run.log({**axes, name: wandb.Html(replace_surrogates(page), inject=False)}))

    def alert(self, alert: dict[str, Any]) -> None:
        import wandb

        if alert["begins"]:
            title = f"{alert['finding']} at step {alert['step']}"
            self.send(lambda: self.run.alert(title=title, text=alert["message"], level=wandb.AlertLevel.WARN))

    def finish(self, exit_code: int) -> None:
        self.send(lambda: self.run.finish(exit_code=exit_code))


@final
class TolerateWandbErrors:
    """A context manager that reports wandb's errors in one line and suppresses them; it lets all other errors pass.

    wandb's errors have no common base class, so they are recognised by the module that defines them. An OSError means
    that wandb's process is gone.
    """

    def __init__(self, consequence: str | None = None) -> None:
        """consequence: the second half of the line that reports the error, or None to print nothing."""
        self.consequence, self.failed = consequence, False

    def __enter__(self) -> TolerateWandbErrors:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> bool:
        self.failed = isinstance(error, OSError) or (kind is not None and kind.__module__.split(".")[0] == "wandb")
        if self.failed and self.consequence:
            print(f"wandb failed ({' '.join(str(error).split())[:200] or kind}); {self.consequence}", flush=True)
        return self.failed


def replace_surrogates(value: Any) -> Any:
    """Replace each lone surrogate in a text, list or mapping by U+FFFD, because wandb rejects lone surrogates."""
    if isinstance(value, dict):
        return {replace_surrogates(key): replace_surrogates(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [replace_surrogates(entry) for entry in value]
    return without_surrogates(value) if isinstance(value, str) else value


def figure_or_heatmap(name: str, value: Any) -> Any:
    """A number unchanged, or a table of layers × heads as an HTML page."""
    import wandb

    return wandb.Html(heatmap(name, value), inject=False) if isinstance(value, list) else value


def choose_wandb_mode(asked: str) -> tuple[str, str]:
    """(mode, a line that explains it) for logger.wandb=`asked`. `auto` is online when logged in, else offline.

    Never asks a question. Raises UserError for `online` without a login.
    """
    if asked == "disabled" or os.environ.get("WANDB_MODE") == "disabled":
        return "disabled", "wandb: off (logger=wandb turns it on)"
    if asked == "auto":
        mode = os.environ.get("WANDB_MODE") or ("online" if logged_in() else "offline")
        offline = "; run `wandb login` once to log later runs online, and `wandb sync` to upload this one"
        return mode, f"wandb: {mode}" + ("" if mode == "online" else offline)
    if asked == "online" and not logged_in():
        raise UserError("logger.wandb=online needs a login; run `wandb login` once, or set logger.wandb=offline")
    return asked, f"wandb: {asked}"


def logged_in() -> bool:
    """Whether an API key is in the environment or in the netrc file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].split("/")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
