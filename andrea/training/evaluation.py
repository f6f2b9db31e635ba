"""Everything that is measured on the model between training steps: validation, health, samples, heads, the lens page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from andrea.attention import HeadStatistics
from andrea.config import RunConfig
from andrea.generation import Engine, Request, Sampling
from andrea.model.gpt import GPT
from andrea.text.corpus import Corpus
from andrea.text.loader import IGNORED_TARGET, validation_batches
from andrea.text.tokenizer import Tokenizer
from andrea.training.heads import heatmaps, probe, probe_batch, scalars
from andrea.training.health.check import Evidence
from andrea.training.health.health import Health
from andrea.training.progress import Progress
from andrea.training.records.records import Records
from andrea.training.step import TrainingStep

SAMPLE_TEMPERATURE = 0.8
SECOND_SAMPLES = 4  # times as many texts are written before samples that seem to have failed are reported
LENS_TOKENS = 40  # of held-out text, shown where no prompt is given
DrawLens = Callable[[GPT, Tokenizer, str], str]  # model, tokenizer, prompt -> a page of HTML


@dataclass
class Evaluator:
    """Shares the training step's model and loss; every rank calls every method, rank 0 gets the answers.

    What is measured of the model is kept until the next step: the whole model gathered from all ranks, the samples, the
    heads. draw_lens: draws the page of a fixed prompt; None: no page is wanted.
    """

    config: RunConfig
    corpus: Corpus
    step: TrainingStep
    progress: Progress
    health: Health
    records: Records
    draw_lens: DrawLens | None

    def __post_init__(self) -> None:
        self.parallel, self.ranks = self.step.parallel, self.step.ranks
        self.bytes_of_token = torch.from_numpy(self.corpus.tokenizer.byte_lengths())  # (V,)
        self.probe_tokens = probe_batch(self.corpus, self.config.model.sequence_length).to(self.step.device)
        self.lens_prompt = lens_prompt(self.config, self.corpus)
        self.forget()

    def forget(self) -> None:
        """The model has changed: what was measured of it is of no more use."""
        self.gathered: tuple[GPT | None] | None = None
        self.heads: HeadStatistics | None = None
        self.samples: list[dict[str, str]] = []

    def evaluate(self, size_ratios: Tensor | None, whole: bool = False) -> dict[str, Any]:
        """Validation figures and health's; size_ratios: Update.size_ratios of the step just made.

        whole: over the whole held-out split, whatever train.eval_tokens says; so is the last evaluation of a run.
        """
        by_source = self.validate(whole)
        total = summary(*(sum(part[key] for part in by_source.values()) for key in ("nats", "tokens", "bytes")))
        self.progress.val_loss, self.progress.val_bpb = total["loss"], total["bpb"]
        figures = {"val/loss": total["loss"], "val/bpb": total["bpb"]}
        if len(by_source) > 1:
            figures |= {f"val/{name}/{key}": part[key] for name, part in by_source.items() for key in ("loss", "bpb")}
        return figures | self.judge(by_source, size_ratios)

    def validate(self, whole: bool) -> dict[str, dict[str, float]]:
        """The `summary` of each source; the ranks share its windows."""
        most_tokens = None if whole or self.progress.step == self.config.steps else self.config.train.eval_tokens
        self.records.working("evaluating")
        by_source = {}
        # Compiled code is specialised to one gradient mode: with gradients enabled, the training graph serves here too.
        with torch.set_grad_enabled(self.config.compile != "off"), self.parallel.sync_gradients(last=False):
            for source in self.corpus.sources:
                batches = validation_batches(
                    source.val,
                    self.config.model.sequence_length,
                    self.step.micro_batch,
                    most_tokens,
                    self.ranks.rank,
                    self.ranks.size,
                )
                sums = sums_over(
                    batches, lambda *batch: self.step.loss_sum(*batch)[0], self.bytes_of_token, self.step.device
                )
                nats, tokens, bytes_ = self.ranks.sum(torch.tensor(sums, dtype=torch.float64)).tolist()
                by_source[source.name] = summary(nats, int(tokens), int(bytes_))
        return by_source

    def judge(self, by_source: dict[str, dict[str, float]], size_ratios: Tensor | None) -> dict[str, Any]:
        """Health's figures; findings that begin or end are given to the loggers as alerts."""
        model = self.model()
        if model is None:
            return {}
        texts = self.texts(model, self.config.health.samples)
        if self.health.needs_more_samples(texts, self.progress.step):
            texts = self.texts(model, SECOND_SAMPLES * self.config.health.samples)
        heads = self.measured_heads(model)
        evidence = Evidence(self.progress.step, self.progress.tokens, texts, heads, size_ratios, by_source)
        figures, begun, ended = self.health.judge(evidence)
        for finding, message in begun.items():
            self.records.alert(finding, begins=True, message=message)
        for finding, first_step in ended.items():
            self.records.alert(finding, begins=False, message=f"no longer found; it began at step {first_step}")
        return figures

    def failed(self) -> list[str]:
        """The findings for which all ranks stop; health judges on rank 0."""
        stops = self.config.health.on_failure == "stop"
        return self.ranks.from_rank_0(lambda: self.health.failed() if stops else [])

    def measure_heads(self) -> dict[str, Any]:
        """What each head does on the held-out probe."""
        model = self.model()
        if model is None:
            return {}
        heads = self.measured_heads(model)
        return scalars(heads) | heatmaps(heads)

    def show_sample(self) -> None:
        model = self.model()
        for sample in self.written_samples(model, 1)[:1] if model else []:
            self.records.sample(sample)

    def draw_attention(self) -> None:
        model = self.model()
        if model is not None and self.draw_lens is not None and self.lens_prompt:
            self.records.page("lens", self.draw_lens(model, self.corpus.tokenizer, self.lens_prompt))

    # ------------------------------------------------------------------------------- kept until the next step

    def model(self) -> GPT | None:
        """The model with all its weights, on rank 0; None on the others."""
        if self.gathered is None:
            self.gathered = (self.parallel.gathered_model(),)
        return self.gathered[0]

    def measured_heads(self, model: GPT) -> HeadStatistics:
        """(L, H), over the held-out probe."""
        if self.heads is None:
            self.heads = probe(model, self.probe_tokens.to(model.embedding.weight.device))
        return self.heads

    def written_samples(self, model: GPT, count: int) -> list[dict[str, str]]:
        """At least `count` samples, {"prompt", "text"}; none where train.sample_tokens is 0."""
        if self.config.train.sample_tokens and len(self.samples) < count:
            self.records.working("writing samples")
            prompt = str(self.config.data.sample_prompt)
            sampling, seed = Sampling(temperature=SAMPLE_TEMPERATURE), self.config.seed + self.progress.step
            request = Request(self.config.train.sample_tokens, num_samples=count, seed=seed, sampling=sampling)
            texts = Engine(model, self.corpus.tokenizer).write(prompt, request)
            self.samples = [{"prompt": prompt, "text": text} for text in texts]
        return self.samples

    def texts(self, model: GPT, count: int) -> list[str]:
        return [sample["text"] for sample in self.written_samples(model, count)] if count else []


def lens_prompt(config: RunConfig, corpus: Corpus) -> str:
    """train.lens_prompt, or else the first held-out tokens."""
    if config.train.lens_prompt is not None:
        return config.train.lens_prompt
    tokens = corpus.sources[0].val[: min(LENS_TOKENS, config.model.sequence_length - 1)].tolist()
    return corpus.tokenizer.decode([token for token in tokens if token != corpus.tokenizer.end_of_text])


def sums_over(
    batches: Iterable[tuple[Tensor, Tensor]],
    nats_of: Callable[[Tensor, Tensor], Tensor],
    bytes_of_token: Tensor,
    device: torch.device,
) -> tuple[float, int, int]:
    """(nats, targets, bytes of the targets) over all batches of tokens and targets (B, T).

    bytes_of_token (V,) counts a token's UTF-8 bytes; end-of-text has none: it costs nats and adds no bytes.
    """
    nats, n_target, n_byte = [], 0, 0
    for tokens, targets in batches:
        scored = targets[targets != IGNORED_TARGET]
        nats.append(nats_of(tokens.to(device), targets.to(device)).detach())  # read at the end: no card is waited for
        n_target += scored.numel()
        n_byte += int(bytes_of_token[scored].sum())
    return sum(map(float, nats)), n_target, n_byte


def summary(nats: float, tokens: int, bytes_: int) -> dict[str, float]:
    """The loss in nats per token and in bits per byte; the second can be compared across tokenizers."""
    return {
        "loss": nats / max(tokens, 1),
        "bpb": nats / math.log(2) / max(bytes_, 1),
        "nats": nats,
        "tokens": tokens,
        "bytes": bytes_,
    }
