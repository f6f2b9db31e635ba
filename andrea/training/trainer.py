"""The trainer: one paragraph that trains, and the sentences it is made of.

N sequences in a step, T tokens each; a micro-batch is B of the N.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from andrea.attention import HeadStatistics
from andrea.checkpoint import checkpoints_of, step_name
from andrea.config import RunConfig, UserError
from andrea.model.gpt import GPT
from andrea.runtime.device import peak_memory_bytes
from andrea.text.corpus import Corpus
from andrea.text.loader import IGNORED_TARGET, Loader, validation_batches
from andrea.training.heads import heatmaps, probe, probe_batch, scalars
from andrea.training.health.check import Evidence
from andrea.training.health.health import Health
from andrea.training.loss.cross_entropy import evaluate, summary
from andrea.training.optimizer.loss_scale import LossScale
from andrea.training.optimizer.optimizer import Optimizer
from andrea.training.optimizer.qk_clip import clip_logits
from andrea.training.optimizer.schedule import rate_at
from andrea.training.optimizer.update_size import sampled_weights, update_ratios
from andrea.training.parallel.saver import Saver
from andrea.training.parallel.strategy import Parallel
from andrea.training.parallel.watchdog import Watchdog
from andrea.training.records.console import Console
from andrea.training.records.logger import Logger
from andrea.training.records.run_folder import RunFolder

SECOND_LOOK = 4  # times as many texts, where the first look ill


@dataclass
class Progress:
    """Where a run stands; the whole of it is in every checkpoint."""

    step: int = 0
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0  # of training steps alone: compiling, evaluating and saving stand outside the clock
    val_loss: float | None = None
    val_bpb: float | None = None
    best_bpb: float | None = None


@dataclass
class Trainer:
    """Everything a run needs, made by `andrea.training.start`; `train()` returns the exit code."""

    run: RunConfig
    folder: Path
    corpus: Corpus
    parallel: Parallel
    # tokens, targets (B, T) -> nats and, where every step measures them, the heads' statistics; compiled or not
    loss_sum: Callable[[Tensor, Tensor], tuple[Tensor, HeadStatistics | None]]
    optimizer: Optimizer
    scale: LossScale
    device: torch.device
    precision: str
    micro_batch: int
    flops_per_token: float
    peak_flops: float | None
    progress: Progress
    saver: Saver
    loggers: list[Logger]  # of rank 0; none on the others
    console: Console
    watchdog: Watchdog
    write_samples: Callable[[GPT, int, int], list[dict[str, str]]]  # model, seed, how many -> [{"prompt", "text"}]
    health: Health
    draw: Callable[[GPT], str] | None  # a page that shows what attention does with a fixed prompt; None: none is wanted
    facts: dict[str, Any]  # what a checkpoint says besides progress: configuration, fingerprint, wandb id

    def __post_init__(self) -> None:
        self.ranks = self.parallel.ranks
        self.loader = Loader(self.corpus.sources, self.run.model.sequence_length, self.run.seed)
        self.bytes_of_token = torch.from_numpy(self.corpus.tokenizer.byte_lengths())
        self.probe_tokens = probe_batch(self.corpus, self.run.model.sequence_length).to(self.device)
        self.heads: HeadStatistics | None = None  # of the step just made, where every step measures them
        self.clipped_heads = torch.zeros((), device=self.device)  # by QK-clip, since the last record
        self.probed: tuple[int, HeadStatistics] | None = None  # step, what each head did with the probe then
        self.written: tuple[int, list[dict[str, str]]] | None = None  # step, the samples written then
        self.update_ratios: Tensor | None = None  # (matrices,), of the step just made, where an evaluation follows
        self.evaluated: dict[str, dict[str, float]] = {}  # source -> what the last evaluation measured of it
        self.unread: list[tuple[int, Tensor, Tensor, Tensor, Tensor]] = []  # figures the host has not waited for yet
        self.last_figures: dict[str, float] = {}
        self.interval_steps, self.interval_seconds = 0, 0.0  # since the last record
        self.looked_at: tuple[int, GPT | None] | None = None  # step, the whole model as it was then
        self.signal: int | None = None  # that this process was sent
        self.saved_step = self.progress.step if checkpoints_of(self.folder) else None
        self.damaged = ""  # what of weights and optimizer state was found not finite when it came to saving them
        self.stop: str | None = None  # why all ranks stop after this step: "interrupted" or "stopped"
        self.started = time.monotonic()

    # ------------------------------------------------------------------------------------------------ the paragraph

    def train(self) -> int:
        """Train to the last step, to the time limit, to a signal or to a non-finite figure; returns the exit code."""
        run, progress = self.run, self.progress
        with self.signals_noted():
            self.console.start()
            while progress.step < run.steps and not self.stop:
                clock = time.perf_counter()
                self.unread.append((progress.step + 1, *self.update(*self.batch())))
                progress.step += 1
                progress.tokens += run.tokens_per_step
                progress.flops += run.tokens_per_step * self.flops_per_token
                record = self.due(run.train.log_every)
                evaluation = self.evaluates_at(progress.step)
                saving = self.due(run.train.save_every) or progress.step == run.steps
                if not self.read_figures(all_of_them=record or evaluation or saving):
                    return self.stop_not_finite()
                if (evaluation or saving) and not self.is_finite():
                    return self.stop_not_finite()
                self.saver.check()
                progress.seconds += time.perf_counter() - clock
                self.show_step(time.perf_counter() - clock)
                if self.due(run.train.attention_every):
                    self.log(self.observe())
                if record or evaluation:
                    self.log(self.training_figures() | (self.evaluate() | self.judge() if evaluation else {}))
                if evaluation:
                    self.show_attention()
                if self.due(run.train.sample_every) or progress.step == run.steps:
                    self.sample()
                self.looked_at = None
                if saving:
                    self.save()
                if evaluation and (failed := self.failed()):
                    return self.stop_failed(failed)
            if not self.read_figures(all_of_them=True) or (self.saved_step != progress.step and not self.is_finite()):
                return self.stop_not_finite()
            return self.conclude()

    def batch(self) -> tuple[Tensor, Tensor, int]:
        """This rank's rows of the step's (N, T) tokens and targets, and the targets in the rows of all ranks."""
        first_sample, n = self.progress.step * self.run.sequences_per_step, self.run.sequences_per_step
        first, count, _ = self.ranks.local_rows(n)
        tokens, targets = self.loader.batch(first_sample + first, count)
        if self.device.type == "cuda":  # from pinned memory the copy to the card waits for nothing
            tokens, targets = tokens.pin_memory(), targets.pin_memory()
        return tokens, targets, self.loader.count_targets(first_sample, n)

    def update(self, tokens: Tensor, targets: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One optimizer step: (loss in nats per token, gradient norm, finite, wishes to stop), on the device.

        The update happens where loss and gradient are finite on all ranks, and nothing changes where they are not.
        """
        self.watchdog.at(self.progress.step + 1, "forward and backward")
        nats, heads = self.accumulate(tokens, targets, count)
        self.watchdog.at(self.progress.step + 1, "update")
        nats, *wishes = self.ranks.sum(torch.stack([nats, *self.wishes_to_stop()])).unbind()
        self.heads = self.ranks.merge_head_statistics(heads) if heads else None
        self.parallel.set_local_gradients()
        self.scale.unscale(self.optimizer.parameters)
        norm = self.optimizer.clip()
        finite = torch.isfinite(norm) & torch.isfinite(nats)
        before = sampled_weights(self.parallel) if self.evaluates_at(self.progress.step + 1) else None
        self.optimizer.step(rate_at(self.progress.step, self.run.steps, self.run.optimizer), finite)
        if before is not None:
            self.update_ratios = update_ratios(before, sampled_weights(self.parallel), self.parallel.sum_over_shards)
        self.parallel.zero_gradients()
        self.scale.update(finite)
        if self.run.attention.qk_clip is not None:
            self.clipped_heads += clip_logits(
                self.parallel, self.heads.largest_logit, self.run.attention.qk_clip, finite
            )
        return nats / count, norm, finite, torch.stack(wishes)

    def accumulate(self, tokens: Tensor, targets: Tensor, count: int) -> tuple[Tensor, HeadStatistics | None]:
        """Forward and backward over this rank's micro-batches: the summed loss, 0-dim, and the heads' statistics (L, H).

        Gradients become sums over all ranks in the last one. Too little memory: halve the micro-batch, do it again.
        """
        rows = self.ranks.local_rows(self.run.sequences_per_step)[2]
        while True:
            try:
                nats, heads = torch.zeros((), device=self.device), None
                pieces = list(micro_batches(tokens, targets, self.micro_batch, rows))
                for index, (micro_tokens, micro_targets) in enumerate(pieces):
                    with self.parallel.sync_gradients(last=index == len(pieces) - 1):
                        micro_nats, measured = self.loss_sum(
                            *(each.to(self.device, non_blocking=True) for each in (micro_tokens, micro_targets))
                        )
                        # DDP and FSDP make means over ranks: of the sum, times their number
                        (micro_nats * self.scale.factor * self.ranks.size / count).backward()
                    nats += micro_nats.detach()
                    heads = measured.merged(heads) if measured and heads else measured
                return nats, heads
            except torch.OutOfMemoryError:
                if self.micro_batch == 1 or self.ranks.size > 1:  # the others are in the middle of theirs
                    raise UserError(
                        f"out of memory with train.micro_batch={self.micro_batch}; lower it, or turn on "
                        f"train.activation_checkpointing, or use parallel=fsdp on more ranks"
                    ) from None
                self.micro_batch = (self.micro_batch + 1) // 2
                self.parallel.zero_gradients()
            torch.cuda.empty_cache()
            self.console.say(f"out of memory: the step is done again with train.micro_batch={self.micro_batch}")

    # ------------------------------------------------------------------------------------------------ the sentences

    def due(self, every: int | str) -> bool:
        assert isinstance(every, int), "auto is settled before the trainer is made"
        return self.progress.step % every == 0

    def evaluates_at(self, step: int) -> bool:
        assert isinstance(self.run.train.eval_every, int), "auto is settled before the trainer is made"
        return step % self.run.train.eval_every == 0 or step == self.run.steps

    def out_of_time(self) -> bool:
        limit = self.run.train.max_minutes
        return limit is not None and time.monotonic() - self.started > 60 * limit

    def wishes_to_stop(self) -> tuple[Tensor, Tensor]:
        """What this rank would have all ranks do: 1 where it was sent a signal, 1 where its time is up."""
        wishes = self.signal is not None, self.out_of_time()
        return tuple(torch.full((), float(wish), device=self.device) for wish in wishes)  # no copy to wait for

    def read_figures(self, all_of_them: bool) -> bool:
        """Read losses and flags off the device, all but the newest where waiting would stall it; False: not finite.

        An fp16 step that only overshot its loss scale is no failure: the scale has backed off and the run goes on.
        """
        newest_may_wait = self.device.type != "cpu" and not all_of_them
        while len(self.unread) > int(newest_may_wait):
            step, loss, norm, finite, wishes = self.unread.pop(0)
            self.last_figures = {"step": step, "loss": float(loss), "norm": float(norm)}
            signalled, out_of_time = wishes.tolist()
            self.stop = self.stop or ("interrupted" if signalled else "stopped" if out_of_time else None)
            if bool(finite):
                self.health.note_step(step, self.last_figures["loss"], self.last_figures["norm"])
            elif not self.scale.may_back_off():
                return False
        return True

    def show_step(self, step_seconds: float) -> None:
        done, rate = self.progress.step, rate_at(self.progress.step - 1, self.run.steps, self.run.optimizer)
        self.interval_steps += 1
        self.interval_seconds += step_seconds
        pace = self.interval_seconds / self.interval_steps
        self.console.step(
            done, self.last_figures["loss"], rate, self.run.tokens_per_step / pace, (self.run.steps - done) * pace
        )

    def training_figures(self) -> dict[str, float]:
        """The figures of the step just made; speed is the mean since the last record."""
        pace = self.interval_seconds / self.interval_steps
        self.interval_steps, self.interval_seconds = 0, 0.0
        tokens_per_second = self.run.tokens_per_step / pace
        figures = {
            "train/loss": self.last_figures["loss"],
            "train/gradient_norm": self.last_figures["norm"],
            "train/rate": rate_at(self.progress.step - 1, self.run.steps, self.run.optimizer),
            "train/epoch": self.progress.tokens / self.loader.tokens_per_epoch,
            "train/tokens_per_second": tokens_per_second,
            "train/seconds_per_step": pace,
        }
        if self.heads is not None:
            figures |= scalars(self.heads, "attention/step")
        if self.run.attention.qk_clip is not None:
            figures["attention/step/clipped_heads"] = int(self.clipped_heads)
            self.clipped_heads = torch.zeros_like(self.clipped_heads)
        if self.peak_flops:
            figures["train/mfu"] = tokens_per_second * self.flops_per_token / (self.peak_flops * self.ranks.size)
        return figures

    def whole_model(self) -> GPT | None:
        """The model as it is, to look at, on rank 0; None on the others, which must ask too."""
        if self.looked_at is None or self.looked_at[0] != self.progress.step:
            self.looked_at = self.progress.step, self.parallel.gathered_model()
        return self.looked_at[1]

    def observe(self) -> dict[str, Any]:
        """What each head does with the held-out probe."""
        model = self.whole_model()
        if model is None:
            return {}
        heads = self.probed_heads(model)
        return scalars(heads) | heatmaps(heads)

    def probed_heads(self, model: GPT) -> HeadStatistics:
        """The heads' statistics (L, H) over the held-out probe, measured once a step."""
        if self.probed is None or self.probed[0] != self.progress.step:
            self.probed = self.progress.step, probe(model, self.probe_tokens.to(model.embedding.weight.device))
        return self.probed[1]

    def evaluate(self, whole: bool = False) -> dict[str, float]:
        """Validation loss and bits per byte over all sources and, where there are several, of each; ranks share the work."""
        most_tokens = None if whole or self.progress.step == self.run.steps else self.run.train.eval_tokens
        self.working("evaluating")
        parts = {}
        # Compiled code is made for one gradient mode: with gradients on, the training graph serves here too.
        with torch.set_grad_enabled(self.run.compile != "off"), self.parallel.sync_gradients(last=False):
            for source in self.corpus.sources:
                length, ranks = self.run.model.sequence_length, self.ranks
                batches = validation_batches(source.val, length, self.micro_batch, most_tokens, ranks.rank, ranks.size)
                here = evaluate(lambda *batch: self.loss_sum(*batch)[0], batches, self.bytes_of_token, self.device)
                sums = torch.tensor([here[key] for key in ("nats", "tokens", "bytes")], dtype=torch.float64)
                nats, tokens, bytes_ = self.ranks.sum(sums).tolist()
                parts[source.name] = summary(nats, int(tokens), int(bytes_))
        total = summary(*(sum(part[key] for part in parts.values()) for key in ("nats", "tokens", "bytes")))
        self.progress.val_loss, self.progress.val_bpb = total["loss"], total["bpb"]
        self.evaluated = parts
        figures = {"val/loss": total["loss"], "val/bpb": total["bpb"]}
        if len(parts) > 1:
            figures |= {f"val/{name}/{key}": part[key] for name, part in parts.items() for key in ("loss", "bpb")}
        return figures

    def judge(self) -> dict[str, Any]:
        """Health's figures of the evaluation just made; what begins or ends goes to the loggers as alerts."""
        model, ratios = self.whole_model(), self.update_ratios
        self.update_ratios = None
        if model is None:
            return {}
        texts = self.texts(model, self.run.health.samples)
        if self.health.needs_more_samples(texts, self.progress.step):
            texts = self.texts(model, SECOND_LOOK * self.run.health.samples)
        heads = self.probed_heads(model)
        evidence = Evidence(self.progress.step, self.progress.tokens, texts, heads, ratios, self.evaluated)
        figures, begun, ended = self.health.judge(evidence)
        alerts = [{"finding": name, "begins": True, "message": message} for name, message in begun.items()]
        alerts += [
            {"finding": name, "begins": False, "message": f"no longer found; it began at step {step}"}
            for name, step in ended.items()
        ]
        for alert in alerts:
            for logger in self.loggers:
                logger.alert(self.axes() | alert)
        return figures

    def failed(self) -> list[str]:
        """The failures that health, which judges on rank 0, stops all ranks for."""
        return self.ranks.from_rank_0(lambda: self.health.failed() if self.run.health.on_failure == "stop" else [])

    def samples(self, model: GPT, count: int) -> list[dict[str, str]]:
        """At least `count` samples of the model as it is, written once a step; none where their length is 0."""
        if not self.run.train.sample_tokens or not count:
            return []
        if self.written is None or self.written[0] != self.progress.step or len(self.written[1]) < count:
            self.working("writing samples")
            seed = self.run.seed + self.progress.step
            self.written = self.progress.step, self.write_samples(model, seed, count)
        return self.written[1]

    def texts(self, model: GPT, count: int) -> list[str]:
        return [sample["text"] for sample in self.samples(model, count)]

    def sample(self) -> None:
        model = self.whole_model()
        for written in self.samples(model, 1)[:1] if model else []:
            for logger in self.loggers:
                logger.sample(self.axes() | written)

    def show_attention(self) -> None:
        model = self.whole_model()
        if self.draw is None or model is None:
            return
        page = self.axes() | {"name": "lens", "html": self.draw(model)}
        for logger in self.loggers:
            logger.page(page)

    def working(self, doing: str) -> None:
        """What takes a while between steps: shown on a terminal, and told to the watchdog."""
        self.watchdog.at(self.progress.step, doing)
        self.console.waiting(f"step {self.progress.step}: {doing} …")

    def axes(self) -> dict[str, float]:
        progress = self.progress
        return {"step": progress.step, "tokens": progress.tokens, "flops": progress.flops, "seconds": progress.seconds}

    def log(self, figures: dict[str, Any]) -> None:
        record = self.axes() | figures
        for logger in self.loggers:
            logger.record(record)

    def is_finite(self) -> bool:
        """Whether weights and optimizer state are, on all ranks, which must all ask."""
        kept = self.parallel.local_parameters | self.optimizer.state_tensors()
        finite = torch.stack([tensor.detach().isfinite().all().to(self.device) for tensor in kept.values()])
        wrong = [name for name, fine in zip(kept, finite.tolist(), strict=True) if not fine]
        if bool(self.ranks.minimum(torch.tensor(float(not wrong), device=self.device))):
            return True
        self.damaged = f", but {wrong[0] if wrong else 'a tensor of another rank'} is not finite: not saved"
        return False

    def save(self) -> None:
        """Write a checkpoint, mark it if it is the best so far, drop the oldest."""
        progress = self.progress
        self.working("saving")
        for logger in self.loggers:
            if isinstance(logger, RunFolder):
                logger.flush()
        best = progress.val_bpb is not None and (progress.best_bpb is None or progress.val_bpb < progress.best_bpb)
        if best:
            progress.best_bpb = progress.val_bpb
        state = self.facts | vars(progress) | {"loss_scale": self.scale.state(), "health": self.health.state()}
        self.saver.save(state | {"torch_random": torch.get_rng_state().tolist()}, best)
        self.saved_step = progress.step

    # ---------------------------------------------------------------------------------------------------- the ends

    def conclude(self) -> int:
        """Done, out of time or interrupted: save, say so, and what to type next. Exit code 0, or 128 + the signal."""
        progress, done = self.progress, self.progress.step == self.run.steps
        path = self.folder / "checkpoints" / step_name(progress.step)
        if not done and self.stop == "stopped":
            self.log(self.evaluate(whole=True) | self.judge())
            self.sample()
        if self.saved_step != progress.step:
            self.save()
        self.watchdog.rest(progress.step, "bringing the last checkpoint to the disk")
        if done:
            self.saver.conclude()
        self.saver.wait()
        why = "done" if done else self.stop
        figures = {"val/loss": progress.val_loss, "val/bpb": progress.val_bpb}
        peak = torch.tensor(float(peak_memory_bytes(self.device)))
        figures["train/peak_memory_bytes"] = int(self.ranks.maximum(peak))
        self.log({"event": why, **figures, "checkpoint": str(path)})
        self.console.stop()
        bits = f" · {progress.val_bpb:.4f} bits/byte" if progress.val_bpb is not None else ""
        self.console.say(f"{why} at step {progress.step} of {self.run.steps}{bits} · {path}")
        program = "torchrun … train.py" if self.ranks.started_by_torchrun else "python train.py"
        resume = f"{program} name={self.folder.name} resume=auto"
        self.console.say(f"next: python sample.py checkpoint={path}" if done else f"go on with: {resume}")
        return 128 + (self.signal or signal.SIGTERM) if why == "interrupted" else 0

    def stop_not_finite(self) -> int:
        """Nothing non-finite has been saved; say where it is, and what to try. Exit code 3."""
        self.saver.wait()
        figures, saved = self.last_figures, checkpoints_of(self.folder)
        last = saved[-1] if saved else "none"
        rate = "matrix_learning_rate" if self.run.optimizer.kind == "muon" else "learning_rate"
        self.console.stop()
        self.console.say(
            f"error: step {figures['step']}: loss {figures['loss']:.4g}, gradient norm {figures['norm']:.4g}"
            f"{self.damaged or ': not finite, not applied'}. Last good checkpoint: {last}. "
            f"Try optimizer.{rate}={getattr(self.run.optimizer, rate) / 2:g} or precision=fp32"
        )
        return 3

    def stop_failed(self, failed: list[str]) -> int:
        """Health has found a failure, and is asked to stop: save, say so, and how to go on. Exit code 4."""
        progress = self.progress
        path = self.folder / "checkpoints" / step_name(progress.step)
        if self.saved_step != progress.step:
            self.save()
        self.saver.wait()
        words = ", ".join(failed)
        self.log({"event": "failed", "health/failed": words, "val/bpb": progress.val_bpb, "checkpoint": str(path)})
        self.console.stop()
        self.console.say(f"error: stopped at step {progress.step} of {self.run.steps}: {words} · {path}")
        self.console.say(
            f"go on all the same: python train.py name={self.folder.name} resume=auto health.on_failure=warn"
        )
        return 4

    @contextmanager
    def signals_noted(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM let the step finish and the run save; a second Ctrl-C ends it where it stands.

        A second SIGTERM is the same one: a cluster sends it to torchrun and to its ranks, and torchrun hands its own on.
        """

        def note(number: int, frame: Any) -> None:
            if self.signal and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal = self.signal or number
            self.console.waiting("interrupted: finishing the step and saving (once more to quit at once) …")

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self.console.stop()


def micro_batches(tokens: Tensor, targets: Tensor, size: int, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut (N, T) into pieces of exactly (size, T), as many as `rows` of them take; rows that predict nothing fill up."""
    for start in range(0, rows, size):
        micro_tokens, micro_targets = tokens[start : start + size], targets[start : start + size]
        missing = (size - len(micro_tokens), tokens.shape[1])
        if missing[0]:
            micro_tokens = torch.cat([micro_tokens, micro_tokens.new_zeros(missing)])
            micro_targets = torch.cat([micro_targets, micro_targets.new_full(missing, IGNORED_TARGET)])
        yield micro_tokens, micro_targets
