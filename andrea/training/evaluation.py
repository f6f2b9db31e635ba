"""Everything that is measured on the model between training steps: validation, health, samples, heads, the lens page."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from andrea.attention import HeadStatistics
from andrea.attention.implementations.triton import kernel_errors
from andrea.config import AttentionConfig, RunConfig, UserError
from andrea.generation import Engine, Request, Sampling
from andrea.model.gpt import GPT
from andrea.model.lora import merge
from andrea.runtime.device import large_blocks_apart
from andrea.runtime.files import lines_of
from andrea.text.chat import USER, ChatTokenizer, Turn, fitting_prompt
from andrea.text.corpus import Corpus
from andrea.text.loader import validation_batches
from andrea.text.shards import IGNORED_TARGET
from andrea.text.tokenizer import Tokenizer
from andrea.training.expected.curves import ExpectedCurves, Standing
from andrea.training.health.health import Evidence, Health
from andrea.training.loss.loss import loss_sum_from_hidden
from andrea.training.parallel.ranks import reuses_training_graph
from andrea.training.planning.length import TimeBudget
from andrea.training.planning.memory import sequences_in_probe_pass
from andrea.training.records.records import Records
from andrea.training.step import TrainingStep

SAMPLE_TEMPERATURE = 1.0  # the model's own distribution
SAMPLE_PENALTY = 1.1  # of repetitions, as of `sample`: without it, a small model often writes loops (bench/README.md)
JUDGED_TEXTS = 5  # by the health checks of an evaluation: one text alone would often look like a failure
SECOND_SAMPLES = 4  # times as many texts are judged if the first ones suggest a failure
PACE_SHARE = 1 / 32  # of the held-out text, from which the pace of an evaluation is measured
CHOOSING_SHARE = 1 / 2  # of a small held-out text: chooses the best evaluation, which the rest judges
LENS_TOKENS = 40  # length of the default prompt, taken from held-out text
ScoreHeads = Callable[[GPT, Tokenizer], Mapping[str, Tensor]]  # name of a pattern -> score (L, H) of each head
DrawLens = Callable[[GPT, Tokenizer, str], str]  # model, tokenizer, prompt -> a page of HTML


class Lens(NamedTuple):
    """What training takes from insight, which it may not import: the page of a prompt, and the scores of each head."""

    draw: DrawLens
    score_heads: ScoreHeads


def on_averaged_weights(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method of `Evaluator`, run while the model has the running average of its weights, if the run keeps one."""

    @functools.wraps(method)
    def wrapped(self: Evaluator, *args: Any, **named: Any) -> Any:
        with self.step.optimizer.averaged_model():
            return method(self, *args, **named)

    return wrapped


@dataclass
class Evaluator:
    """Measures the model of the training step. Every rank calls every method; only rank 0 gets all results.

    Results are cached until the next step: the gathered model, the samples and the measured heads.
    lens: draws the lens page of a fixed prompt, and scores the heads. expected: the curves of the run's recipe and text.
    chooses: whether the best evaluation is chosen on the first half of the held-out text, so that the rest judges it.
    budget: the time of train.max_minutes; None if it is not set.
    """

    corpus: Corpus
    step: TrainingStep
    health: Health
    records: Records
    lens: Lens
    expected: ExpectedCurves
    chooses: bool = False
    budget: TimeBudget | None = None

    def __post_init__(self) -> None:
        self.config, self.progress = self.step.config, self.records.progress
        self.parallel, self.ranks = self.step.parallel, self.step.ranks
        self.bytes_of_token = torch.from_numpy(self.corpus.tokenizer.byte_lengths())  # (V,)
        self.probe_batch = probe_batch(self.corpus, self.config.model.sequence_length)  # tokens and targets (B, T)
        self.lens_prompt = lens_prompt(self.config, self.corpus)
        self.forget()

    def forget(self) -> None:
        """Drop the cached results, because the model has changed."""
        self.gathered: tuple[GPT | None] | None = None
        self.probed: Probed | None = None
        self.judged_texts: list[str] = []

    @on_averaged_weights
    def evaluate(self, size_ratios: Tensor | None, whole: bool = False) -> dict[str, Any]:
        """Validation losses and health figures.

        size_ratios: `Update.size_ratios` of the last step. whole: evaluate the whole held-out split instead of
        train.eval_tokens tokens. The last evaluation of a run always evaluates the whole split.
        """
        train, progress = self.config.train, self.progress
        whole = whole or progress.step == progress.planned_steps or train.eval_tokens is None
        share = self.readable_share() if whole else 1.0
        by_source = self.validate(None if whole else train.eval_tokens, share)
        total, answers = self.total_of(by_source), {}
        model, objective = self.model(), self.step.objective
        if objective is not None:
            answers = self.ranks.from_rank_0(lambda: objective.judge_answers(model))
        progress.val_loss, progress.val_bpb, progress.evaluated_step = total["loss"], total["bpb"], progress.step
        figures = {"val/loss": total["loss"], "val/bpb": total["bpb"]}
        figures |= {f"val/{name}": total[name] for name in ("accuracy", "margin") if name in total}
        figures |= {name: value for name, value in answers.items() if name != "compared"}
        # Than earlier evaluations, whose figures it is compared with:
        read_more = whole and train.eval_tokens is not None
        progress.val_tokens = total["tokens"] if share < 1 else None
        if share < 1:  # on other text than earlier figures: no best, no patience, nothing that is expected
            progress.compared_bpb, figures["val/tokens"] = None, total["tokens"]
            return figures | self.judge(by_source, size_ratios, None)
        chosen = total
        if read_more or self.chooses:
            chosen = self.total_of(self.validate(train.eval_tokens, CHOOSING_SHARE if self.chooses else 1.0))
        progress.compared_bpb = answers.pop("compared", chosen.get("compared", chosen["bpb"]))
        if chosen is not total or objective is not None:
            figures["val/compared_bpb"] = progress.compared_bpb
        if self.chooses:
            judged = self.summary_of([all_ - part for all_, part in zip(total["sums"], chosen["sums"], strict=True)])
            figures["val/judged_bpb"] = judged["bpb"]
        if len(by_source) > 1:
            figures |= {f"val/{name}/{key}": part[key] for name, part in by_source.items() for key in ("loss", "bpb")}
        standing = self.standing(total["bpb"], whole)
        if standing is not None:
            figures |= {"expected/bpb": standing.expected.bpb, "expected/spread_bpb": standing.expected.spread}
        return figures | self.judge(by_source, size_ratios, standing)

    def standing(self, bpb: float, whole: bool) -> Standing | None:
        """`bpb` of the whole split against the expected curve; at the end only with train.max_minutes: its length is open."""
        is_last = self.progress.step == self.progress.planned_steps
        return self.expected.standing(bpb, self.progress) if whole and (is_last or not self.budget) else None

    def readable_share(self) -> float:
        """The share of the held-out text that can be read by train.max_minutes, at the pace of its first part just now."""
        begun, rows_in_round = time.monotonic(), self.step.micro_batch * self.ranks.size

        def n_round(share: float) -> int:
            lengths = (max(1, int(share * len(source.val))) for source in self.corpus.sources)
            return sum(-(-n // (self.config.model.sequence_length * rows_in_round)) for n in lengths)

        if self.budget is None or n_round(PACE_SHARE) == n_round(1.0):
            return 1.0
        self.validate(None, PACE_SHARE)
        seconds = (time.monotonic() - begun) * n_round(1.0) / n_round(PACE_SHARE)
        return self.ranks.from_rank_0(lambda: max(PACE_SHARE, self.budget.readable_share(seconds)))

    def summary_of(self, sums: list[float]) -> dict[str, Any]:
        """The figures of held-out text from the sums of `sums_over`, which are kept as `sums`."""
        objective, (*of_loss, n_token, n_byte) = self.step.objective, sums
        of_objective = objective.summary(of_loss) if objective is not None else None
        return summary(of_loss[0], int(n_token), int(n_byte)) | (of_objective or {}) | {"sums": sums}

    def total_of(self, by_source: dict[str, dict[str, Any]]) -> dict[str, Any]:
        return self.summary_of(
            [sum(of_all) for of_all in zip(*(part["sums"] for part in by_source.values()), strict=True)]
        )

    def validate(self, most_tokens: int | None, share: float = 1.0) -> dict[str, dict[str, Any]]:
        """The `summary_of` each source, on its first `most_tokens` held-out tokens; all of them if None.

        share: of each source's held-out tokens, the first of which are read; below 1, most_tokens is ignored.
        The ranks divide the windows of a source among themselves.
        """
        self.records.working("evaluating")
        by_source, length, n_row = {}, self.config.model.sequence_length, self.step.micro_batch
        enabled = reuses_training_graph(self.config.compile, self.step.device)
        with torch.set_grad_enabled(enabled), self.parallel.sync_gradients(last=False):
            for source in self.corpus.sources:
                most = max(1, int(share * len(source.val))) if share < 1 else most_tokens
                rank, n_rank = self.ranks.rank, self.ranks.size
                batches = validation_batches(source.val, length, n_row, most, rank, n_rank, source.chat, source.pairs)
                sums = sums_over(
                    batches, lambda *batch: self.step.loss_sum(*batch)[0], self.bytes_of_token, self.step.device
                )
                by_source[source.name] = self.summary_of(
                    self.ranks.sum(torch.tensor(sums, dtype=torch.float64)).tolist()
                )
        return by_source

    def judge(
        self, by_source: dict[str, dict[str, float]], size_ratios: Tensor | None, standing: Standing | None
    ) -> dict[str, Any]:
        """The health figures. Findings that begin or end are sent to the loggers as alerts."""
        model = self.model()
        if model is None:
            return {}
        with self.records.extra("computing the health checks"):
            texts = self.texts(model, JUDGED_TEXTS)
            if self.health.judge_text(texts, self.progress.step).findings:
                texts = self.texts(model, SECOND_SAMPLES * JUDGED_TEXTS)
            heads = self.measured_heads(model).heads
            by_source = {name: {key: part[key] for key in part if key != "sums"} for name, part in by_source.items()}
            step = self.progress.step
            tokens = step * self.config.tokens_read_per_step
            evidence = Evidence(step, tokens, texts, heads, size_ratios, by_source, standing)
            figures, begun, ended = self.health.judge(evidence)
            for finding, message in begun.items():
                self.records.alert(finding, begins=True, message=message)
            for finding, first_step in ended.items():
                self.records.alert(finding, begins=False, message=f"ended; it began at step {first_step}")
            return figures
        return {}

    def failed(self) -> list[str]:
        """The findings that stop the run, judged on rank 0. Empty unless health.on_failure=stop."""
        stops = self.config.health.on_failure == "stop"
        return self.ranks.from_rank_0(lambda: self.health.failed() if stops else [])

    @on_averaged_weights
    def measure_heads(self) -> dict[str, Any]:
        """The attention figures, over all heads and of each head, on held-out text and on the fixed texts of the scores."""
        model, figures = self.model(), {}
        if model is not None:
            with self.records.extra("measuring the attention heads"):
                heads, hidden = self.measured_heads(model)
                figures |= scalars(heads) | heatmaps(heads)
                batch = (each.to(hidden.device) for each in self.probe_batch)
                in_context = finite_or_none(round(in_context_nats(model, *batch, hidden), 4))
                figures["attention/in_context_nats"] = in_context
            with self.records.extra("scoring the attention heads"):
                figures |= score_figures(self.lens.score_heads(model, self.corpus.tokenizer))
        return figures

    @on_averaged_weights
    def show_sample(self) -> None:
        """A text for the reader, with SAMPLE_PENALTY, which the texts for the health checks do not have."""
        model = self.model()
        if model is not None:
            prompt = str(self.config.data.sample_prompt)
            if isinstance(self.corpus.tokenizer, ChatTokenizer):
                prompt += "\n"  # the answer is a turn of its own
            for text in self.written(model, 1, SAMPLE_PENALTY):
                self.records.sample({"prompt": prompt, "text": text})

    def make_up(self) -> None:
        """Make the lens page and the sample of the checkpoint's step, which was evaluated, where the run folder lacks them."""
        has_page, has_sample = self.ranks.from_rank_0(lambda: self.records.has_extras("lens", self.progress.step))
        if not has_page:
            self.draw_attention()
        if not has_sample:
            self.show_sample()
        self.forget()

    @on_averaged_weights
    def draw_attention(self) -> None:
        model = self.model()
        if model is not None and self.lens_prompt:
            with self.records.extra("writing the lens page"):
                self.records.page("lens", self.lens.draw(model, self.corpus.tokenizer, self.lens_prompt))

    # ------------------------------------------------------------------------------- cached until the next step

    def model(self) -> GPT | None:
        """The model with all its weights on rank 0, LoRA's factors merged; None on the other ranks."""
        if self.gathered is None:
            gathered = self.parallel.gathered_model()
            self.gathered = (None if gathered is None else merge(gathered),)
        return self.gathered[0]

    def measured_heads(self, model: GPT) -> Probed:
        """The statistics (L, H) of H heads in each of L layers, and the hidden states, on the fixed `probe_batch`."""
        if self.probed is None:
            device = model.embedding.weight.device
            with large_blocks_apart() if device.type == "cpu" else contextlib.nullcontext():
                self.probed = probe(model, self.probe_batch[0].to(device), self.records.console.say)
        return self.probed

    def texts(self, model: GPT, count: int) -> list[str]:
        """At least `count` texts without a repetition penalty; none of a chat model, and none if train.sample_tokens is 0."""
        if isinstance(self.corpus.tokenizer, ChatTokenizer):
            return []
        if len(self.judged_texts) < count:
            self.judged_texts = self.written(model, count, repetition_penalty=1.0)
        return self.judged_texts

    def written(self, model: GPT, count: int, repetition_penalty: float) -> list[str]:
        """`count` texts; none if train.sample_tokens is 0 or writing fails."""
        train, texts = self.config.train, []
        if train.sample_tokens and count:
            self.records.working("writing samples")
            sampling = Sampling(SAMPLE_TEMPERATURE, repetition_penalty=repetition_penalty)
            seed = self.config.seed + self.progress.step
            request = Request(train.sample_tokens, num_samples=count, seed=seed, sampling=sampling)
            with self.records.extra("writing samples"):
                prompt = sample_tokens(self.config, self.corpus.tokenizer)
                texts = Engine(model, self.corpus.tokenizer).write(prompt, request)
        return texts


def sample_tokens(config: RunConfig, tokenizer: Tokenizer) -> list[int]:
    """The tokens that a sample continues: end_of_text and data.sample_prompt, of a chat model as the user's message."""
    prompt = str(config.data.sample_prompt)
    if isinstance(tokenizer, ChatTokenizer):
        return fitting_prompt(tokenizer, [Turn(USER, prompt)], config.model.sequence_length)[0]
    return [tokenizer.end_of_text, *tokenizer.encode(prompt)][-config.model.sequence_length :]


def check_sample_prompt(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raise UserError for a prompt of the samples that is longer than the model's window, before training begins."""
    n_token, n_window = len(tokenizer.encode(str(config.data.sample_prompt))), config.model.sequence_length
    if config.train.sample_tokens and n_token > n_window:
        raise UserError(
            f"data.sample_prompt has {n_token} tokens, but the model sees at most model.sequence_length={n_window}; shorten "
            f"data.sample_prompt, or write no samples with train.sample_tokens=0"
        )


def lens_prompt(config: RunConfig, corpus: Corpus) -> str:
    """The prompt of the lens page, the first held-out tokens; empty, which makes no page, if train.sample_tokens is 0."""
    if not config.train.sample_tokens:
        return ""
    tokens = corpus.sources[0].val[: min(LENS_TOKENS, config.model.sequence_length - 1)].tolist()
    return corpus.tokenizer.decode([token for token in tokens if token != corpus.tokenizer.end_of_text])


def sums_over(
    batches: Iterable[tuple[Tensor, Tensor]],
    nats_of: Callable[[Tensor, Tensor], Tensor],
    bytes_of_token: Tensor,
    device: torch.device,
) -> tuple[float, ...]:
    """Sums over all batches: loss in nats (or the sums of an objective), number of targets, UTF-8 bytes of the targets.

    batches: pairs of tokens and targets, B sequences of T tokens each, (B, T). bytes_of_token (V,): UTF-8 bytes of each
    of the V tokens in the vocabulary. The end-of-text token adds to the loss but has no bytes.
    """
    nats, n_target, n_byte = [], 0, 0
    for tokens, targets in batches:
        scored = targets[targets != IGNORED_TARGET]
        nats.append(nats_of(tokens.to(device), targets.to(device)).detach())  # read at the end: no wait for the GPU
        n_target += scored.numel()
        n_byte += int(bytes_of_token[scored].sum())
    sums = [sum(of_all) for of_all in zip(*(each.flatten().tolist() for each in nats), strict=True)]
    return *(sums or [0.0]), n_target, n_byte


def summary(nats: float, tokens: int, bytes_: int) -> dict[str, float]:
    """The loss in nats per token and in bits per byte. Only bits per byte can be compared across tokenizers."""
    return {
        "loss": nats / max(tokens, 1),
        "bpb": nats / math.log(2) / max(bytes_, 1),
        "nats": nats,
        "tokens": tokens,
        "bytes": bytes_,
    }


# ------------------------------------------------------------------------------------------------------ attention heads
# The definitions of the figures are in andrea/attention/statistics.py. `attention/…` is measured on the probe, a fixed batch of
# held-out text, in fp32, so that runs on the same data can be compared even if they train with different implementations.
# `attention/step/…` is measured in the training step itself, if `measures_every_step` is true. L layers, H heads.

PROBE_TOKENS = 2048  # in the probe, at most; but at least one sequence of each source
LATE_PART = 10  # the last tenth of each sequence is late in its context


def probe_batch(corpus: Corpus, sequence_length: int) -> tuple[Tensor, Tensor]:
    """The probe: tokens and targets of B sequences, (B, T) int64 each, the first held-out ones of every source."""
    each = max(1, PROBE_TOKENS // sequence_length // len(corpus.sources))
    batches = [
        next(validation_batches(source.val, sequence_length, each, chat=source.chat)) for source in corpus.sources
    ]
    tokens, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    is_text = (targets != IGNORED_TARGET).any(1)  # a short held-out text leaves rows free
    return tokens[is_text], targets[is_text]


class Probed(NamedTuple):
    heads: HeadStatistics  # (L, H)
    hidden: Tensor  # (B, T, d_model), after the final norm


@torch.no_grad()
def probe(model: GPT, tokens: Tensor, say: Callable[[str], None] | None = None) -> Probed:
    """Runs the model over tokens (B, T) and measures its heads, in the precision of the weights: fp32 during training.

    Every run is measured, also one that trains with another implementation. A fused kernel that fails here must not end
    such a run: then the textbook formula measures, and `say` is told why. Without `say`, the error is raised.
    """
    try:
        return statistics_of(model, tokens)
    except (RuntimeError, *kernel_errors()) as error:
        if say is None or isinstance(error, torch.OutOfMemoryError):  # the textbook formula would need more memory
            raise
        why = lines_of(str(error).strip() or repr(error))[0]
        say(f"the attention heads are measured by the textbook formula, because the kernel failed: {why}")
    layers = [block.attention for block in model.blocks]
    before = [layer.implementation for layer in layers]
    try:
        for layer in layers:
            layer.implementation = "reference"
        return statistics_of(model, tokens)
    finally:
        for layer, its_own in zip(layers, before, strict=True):
            layer.implementation = its_own


def statistics_of(model: GPT, tokens: Tensor) -> Probed:
    heads, hidden = None, []
    for sequences in in_passes(model, tokens):
        of_sequences, layers = model(sequences, statistics=True)
        measured = HeadStatistics.of_layers(layers)
        heads = measured if heads is None else heads.merged(measured)
        hidden.append(of_sequences)
    return Probed(heads, torch.cat(hidden))


def in_passes(model: GPT, sequences: Tensor) -> tuple[Tensor, ...]:
    return sequences.split(sequences_in_probe_pass(model.config.sequence_length))


@torch.no_grad()
def in_context_nats(model: GPT, tokens: Tensor, targets: Tensor, hidden: Tensor) -> float:
    """How much a long context helps, in nats per token: negative if it helps, 0 for a model that uses none of it.

    This is the loss of the targets in the last tenth of each sequence, minus the loss of the same targets at the end of a
    sequence a fifth as long. tokens, targets (B, T); hidden (B, T, d_model): of the probe. NaN if there are no targets.

    Source: the in-context score of Olsson et al. 2022, arXiv 2209.11895: the loss of the 500th token of a context minus
    that of the 50th. Here both losses are of the same tokens, so that the figure does not depend on which text is where.
    """
    n_late = max(1, tokens.shape[1] // LATE_PART)
    targets = targets[:, -n_late:]
    early_hidden = probe(model, tokens[:, -2 * n_late :]).hidden
    parts = in_passes(model, targets)  # logits (B, n_late, V) of all would be large
    late, early = (
        sum(map(loss_sum_from_hidden, [model] * len(parts), in_passes(model, each[:, -n_late:]), parts))
        for each in (hidden, early_hidden)
    )
    return float((late - early) / (targets != IGNORED_TARGET).sum())


def score_figures(scores: Mapping[str, Tensor]) -> dict[str, float | None | list[list[float | None]]]:
    """The recorded figures of the scores (L, H) of each pattern: `attention/heads/NAME_score`, and the highest one.

    A score is a share of a head's weight. Three digits keep the records small.
    """
    figures = {}
    for name, score in scores.items():
        rows = [[finite_or_none(round(number, 3)) for number in row] for row in score.tolist()]
        figures[f"attention/heads/{name}_score"] = rows
        figures[f"attention/highest_{name}_score"] = max(
            (number for row in rows for number in row if number is not None), default=None
        )
    return figures


def scalars(heads: HeadStatistics, group: str = "attention") -> dict[str, float | None]:
    """Figures over all layers and heads, named `group/…`: means, and extremes where a single head matters."""
    figures = heads.figures()
    mean = {name: value.nanmean() for name, value in figures.items() if name != "largest_logit"}
    extremes = {
        "largest_logit": figures["largest_logit"].amax(),
        "lowest_entropy_share": lowest(figures["entropy_share"]),
        "highest_first_token_mass": -lowest(-figures["first_token_mass"]),
        "highest_previous_token_mass": -lowest(-figures["previous_token_mass"]),
    }
    if "gate_mean" in figures:
        extremes["lowest_gate_mean"] = lowest(figures["gate_mean"])
    return {f"{group}/{name}": finite_or_none(float(value)) for name, value in (mean | extremes).items()}


def heatmaps(heads: HeadStatistics) -> dict[str, list[list[float | None]]]:
    """The figures of each head, named `attention/heads/…`: L rows of H numbers each."""
    return {
        f"attention/heads/{name}": [[finite_or_none(number) for number in row] for row in value.tolist()]
        for name, value in heads.figures().items()
    }


def lowest(values: Tensor) -> Tensor:
    """The smallest number that is not NaN, 0-dim."""
    return values.nan_to_num(nan=math.inf).amin()


def finite_or_none(number: float) -> float | None:
    """The number, or None (null in JSON) for the NaN of a head without counted queries."""
    return number if math.isfinite(number) else None


def measures_every_step(attention: AttentionConfig) -> bool:
    """Whether every training step measures the heads: Triton's kernel without an extra pass, and any other for QK-clip."""
    return attention.implementation == "triton" or attention.qk_clip is not None
