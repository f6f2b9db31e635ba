"""What a user may configure: frozen dataclasses, one strict parse, every check that spans two keys.

The YAML files under `configs/` hold the values and a comment for each key; this file holds names, types and limits.
Configuration crosses the border here, once: `parse` turns plain mappings into the dataclasses below, and nothing
further inside reads a mapping. A wrong value raises `UserError` with one line: what came, what is allowed, which key.
Imports no torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal


class UserError(ValueError):
    """The user's input or configuration is wrong: shown as one line, exit code 2, never with a traceback."""


class Text(str):
    """Marks a key whose value is taken from the command line byte for byte: a prompt, a path, a name."""


class PathText(Text):
    """Marks a key that names a file or a folder: byte for byte too, and refused where no disk could hold such a name."""


# Beyond these nothing is meant, and arithmetic, torch or the system fail in ways of their own.
LARGEST_INTEGER = 2**63 - 1
LARGEST_NUMBER = 1e30
LARGEST_SEED = 2**62  # what is drawn from counts on from there
MOST_THREADS = 1024
LARGEST_SIZES = {"d_model": 2**17, "n_layer": 2**12, "n_head": 2**17, "d_mlp": 2**20, "sequence_length": 2**20}
LARGEST_ROTARY_TABLE = 2**25  # positions times head width
MOST_GUESSED = 64  # tokens ahead: more are never right, and each is read
MOST_SAMPLED_TOKENS = 2**26
LONGEST_NAME_BYTES = 200  # of a folder; disks take 255, and names get endings
LONGEST_PATH_BYTES = 2048
LONGEST_PART_BYTES = 255  # of a path, between two slashes


# --------------------------------------------------------------------------------------------------- the groups


@dataclass(frozen=True)
class ModelConfig:
    name: str
    d_model: int
    n_layer: int
    n_head: int
    d_mlp: int
    sequence_length: int
    position: Literal["rotary", "learned", "none"]
    rotary_base: float
    norm: Literal["rmsnorm", "layernorm"]
    norm_epsilon: float
    mlp: Literal["relu2", "gelu", "swiglu"]
    bias: bool
    tied_head: bool
    qk_norm: bool
    logit_softcap: float | None
    zero_init_projections: bool
    recipe_steps: int
    recipe_tokens_per_step: int
    n_kv_head: int | None = None
    value_residual: bool = False  # models of before had none

    def check(self, path: str) -> None:
        for key in ("recipe_steps", "recipe_tokens_per_step"):
            positive(f"{path}.{key}", getattr(self, key))
        folder_name(f"{path}.name", self.name)
        for key, largest in LARGEST_SIZES.items():
            between(f"{path}.{key}", getattr(self, key), 1, largest)
        positive(f"{path}.rotary_base", self.rotary_base)
        positive(f"{path}.norm_epsilon", self.norm_epsilon)
        if self.logit_softcap is not None:
            positive(f"{path}.logit_softcap", self.logit_softcap)
        if self.d_model % self.n_head:
            whole = [n for n in range(1, self.d_model + 1) if self.d_model % n == 0]
            near = min(whole, key=lambda n: abs(n - self.n_head))
            raise UserError(
                f"{path}.n_head={self.n_head} does not divide {path}.d_model={self.d_model}: the head width d_model / n_head "
                f"must be whole; try {path}.n_head={near}"
            )
        if self.n_kv_head is not None and (self.n_kv_head < 1 or self.n_head % self.n_kv_head):
            whole = [n for n in range(1, self.n_head + 1) if self.n_head % n == 0]
            near = min(whole, key=lambda n: abs(n - self.n_kv_head))
            raise UserError(
                f"{path}.n_kv_head={self.n_kv_head} does not divide {path}.n_head={self.n_head}: each key/value head is shared "
                f"by equally many query heads; try {path}.n_kv_head={near}"
            )
        if self.position == "rotary" and self.sequence_length * self.d_head > LARGEST_ROTARY_TABLE:
            raise UserError(
                f"{path}.sequence_length={self.sequence_length} times the head width d_model / n_head = {self.d_head} is more "
                f"than the {LARGEST_ROTARY_TABLE} angles that {path}.position=rotary keeps; lower one of them"
            )
        if self.position == "rotary" and self.d_head % 2:
            raise UserError(
                f"{path}.position=rotary turns pairs of numbers and needs an even head width, got d_model / n_head = "
                f"{self.d_head}; change {path}.n_head or set {path}.position=learned"
            )

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_head


@dataclass(frozen=True)
class AttentionConfig:
    compatibility: Literal["scaled_dot", "dot", "bilinear", "cosine", "additive"]
    implementation: Literal[
        "auto", "reference", "chunked", "native", "sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flex", "triton"
    ]
    window: int | None = None
    across_documents: bool = True
    qk_clip: float | None = None

    def check(self, path: str) -> None:
        if self.window is not None:
            positive(f"{path}.window", self.window)
        if self.qk_clip is not None:
            positive(f"{path}.qk_clip", self.qk_clip)
            if self.compatibility in ("cosine", "additive"):
                raise UserError(
                    f"{path}.qk_clip={self.qk_clip:g} rescales queries and keys, which changes nothing that "
                    f"{path}.compatibility={self.compatibility} could blow up; set {path}.qk_clip=null"
                )
            if self.implementation not in ("auto", "reference", "triton"):
                raise UserError(
                    f"{path}.qk_clip={self.qk_clip:g} needs each step's largest logits, which "
                    f"{path}.implementation={self.implementation} does not return; use auto, triton or reference"
                )
        if self.compatibility == "additive" and self.implementation not in ("auto", "reference", "chunked"):
            raise UserError(
                f"{path}.implementation={self.implementation} needs a compatibility function that is a dot product, and "
                f"{path}.compatibility=additive is none; use auto, chunked or reference"
            )
        if self.compatibility != "additive" and self.implementation == "chunked":
            raise UserError(
                f"{path}.implementation=chunked serves {path}.compatibility=additive alone, got {self.compatibility}; use auto"
            )


@dataclass(frozen=True)
class SourceConfig:
    """One named source of a mixture."""

    kind: Literal["pystdlib", "text", "shards", "shakespeare", "fineweb_edu"]
    path: PathText | None = None
    weight: float | None = None

    def check(self, path: str) -> None:
        if self.weight is not None:
            positive(f"{path}.weight", self.weight)
        if self.kind in ("text", "shards") and not self.path:
            raise UserError(
                f"{path}.path is missing: {path}.kind={self.kind} reads a file or a folder; set {path}.path=…"
            )


@dataclass(frozen=True)
class DataConfig:
    kind: Literal["pystdlib", "text", "shards", "shakespeare", "fineweb_edu", "mixture"]
    path: PathText | None
    sources: dict[str, SourceConfig]
    sample_prompt: Text = Text("")

    def check(self, path: str) -> None:
        if self.kind in ("text", "shards") and not self.path:
            raise UserError(
                f"{path}.path is missing: data={self.kind} reads a file or a folder; name it with {path}.path=…"
            )
        if self.kind == "mixture" and not self.sources:
            raise UserError(
                f"{path}.sources is empty: a mixture names its sources, e.g. "
                f"{path}.sources='{{code: {{kind: pystdlib}}, notes: {{kind: text, path: notes/, weight: 0.3}}}}'"
            )
        if self.kind != "mixture" and self.sources:
            raise UserError(f"{path}.sources is read by data=mixture only, got data={self.kind}; choose data=mixture")


@dataclass(frozen=True)
class TokenizerConfig:
    kind: Literal["byte", "bpe", "gpt2"]
    vocab_size: int | None
    path: PathText | None

    def check(self, path: str) -> None:
        if self.kind == "bpe":
            if self.vocab_size is None:
                raise UserError(f"{path}.vocab_size is missing: tokenizer=bpe needs a whole number from 257 to 65536")
            if not 257 <= self.vocab_size <= 65536:
                raise UserError(
                    f"{path}.vocab_size={self.vocab_size} is out of range: 256 bytes and end-of-text need 257, "
                    f"two-byte token shards hold at most 65536"
                )


@dataclass(frozen=True)
class OptimizerConfig:
    kind: Literal["muon", "adamw"]
    tuned_d_model: int | None
    tuned_n_layer: int | None
    learning_rate: float
    embedding_learning_rate: float | None
    matrix_learning_rate: float | None
    beta1: float
    beta2: float
    epsilon: float
    momentum: float | None
    weight_decay: float
    clip_norm: float | None
    schedule: Literal["constant_then_decay", "cosine"]
    warmup_steps: int
    decay_fraction: float | None
    final_fraction: float

    def check(self, path: str) -> None:
        if (self.tuned_d_model is None) != (self.tuned_n_layer is None):
            raise UserError(
                f"{path}.tuned_d_model={self.tuned_d_model} and {path}.tuned_n_layer={self.tuned_n_layer} belong together: "
                f"the size of the model that the rates were tuned on, or null and null"
            )
        for key in ("tuned_d_model", "tuned_n_layer"):
            if getattr(self, key) is not None:
                positive(f"{path}.{key}", getattr(self, key))
        for key in ("learning_rate", "epsilon"):
            positive(f"{path}.{key}", getattr(self, key))
        for key in ("embedding_learning_rate", "matrix_learning_rate", "clip_norm"):
            if getattr(self, key) is not None:
                positive(f"{path}.{key}", getattr(self, key))
        for key in ("beta1", "beta2", "momentum"):
            if getattr(self, key) is not None:
                between(f"{path}.{key}", getattr(self, key), 0.0, 1.0, upper_open=True)
        at_least(f"{path}.weight_decay", self.weight_decay, 0)
        at_least(f"{path}.warmup_steps", self.warmup_steps, 0)
        between(f"{path}.final_fraction", self.final_fraction, 0.0, 1.0)
        if self.kind == "muon" and (self.matrix_learning_rate is None or self.momentum is None):
            raise UserError(f"{path}.matrix_learning_rate and {path}.momentum must be numbers with optimizer=muon")
        if self.schedule == "constant_then_decay":
            if self.decay_fraction is None:
                raise UserError(
                    f"{path}.decay_fraction is missing: {path}.schedule=constant_then_decay needs a number in 0..1"
                )
            between(f"{path}.decay_fraction", self.decay_fraction, 0.0, 1.0)


@dataclass(frozen=True)
class LoggerConfig:
    wandb: Literal["auto", "online", "offline", "disabled"]
    project: str
    group: str | None
    tags: list[str]


@dataclass(frozen=True)
class TrainConfig:
    steps: int | Literal["auto"]
    tokens_per_step: int | Literal["auto"]
    micro_batch: int | Literal["auto"]
    log_every: int
    eval_every: int | Literal["auto"]
    eval_tokens: int | None
    save_every: int | Literal["auto"]
    keep: int
    sample_every: int | Literal["auto"]
    sample_tokens: int
    max_minutes: float | None
    attention_every: int | Literal["auto"] = "auto"
    tokens_per_parameter: float | None = None
    flops: float | None = None
    lens_prompt: Text | None = None
    activation_checkpointing: bool = False

    def check(self, path: str) -> None:
        for key in (
            "attention_every",
            "steps",
            "tokens_per_step",
            "micro_batch",
            "log_every",
            "eval_every",
            "save_every",
            "keep",
            "sample_every",
        ):
            if getattr(self, key) != "auto":
                positive(f"{path}.{key}", getattr(self, key))
        at_least(f"{path}.sample_tokens", self.sample_tokens, 0)
        for key in ("tokens_per_parameter", "flops"):
            if getattr(self, key) is not None:
                positive(f"{path}.{key}", getattr(self, key))
        if self.tokens_per_parameter is not None and self.flops is not None:
            raise UserError(
                f"{path}.tokens_per_parameter={self.tokens_per_parameter:g} and {path}.flops={self.flops:g} both say how long to "
                f"train; leave one out"
            )
        if self.eval_tokens is not None:
            positive(f"{path}.eval_tokens", self.eval_tokens)
        if self.max_minutes is not None:
            positive(f"{path}.max_minutes", self.max_minutes)


@dataclass(frozen=True)
class HealthConfig:
    on_failure: Literal["warn", "stop"]
    samples: int
    showing: float
    repetition: float
    variety: float
    loss_spike: float
    gradient_spike: float
    clipped_share: float
    update_ratio: float
    unigram_steps: int
    head_share: float
    one_key_entropy: float
    uniform_entropy: float
    largest_logit: float
    source_rise_nats: float
    leak_nats: float
    leak_errors: float
    overfit_nats: float
    epochs: float

    def check(self, path: str) -> None:
        for key in ("samples", "unigram_steps"):
            at_least(f"{path}.{key}", getattr(self, key), 0)
        for key in (
            "showing",
            "repetition",
            "variety",
            "clipped_share",
            "head_share",
            "one_key_entropy",
            "uniform_entropy",
        ):
            between(f"{path}.{key}", getattr(self, key), 0.0, 1.0)
        for key in ("loss_spike", "gradient_spike", "update_ratio", "largest_logit", "epochs"):
            positive(f"{path}.{key}", getattr(self, key))
        for key in ("source_rise_nats", "leak_nats", "leak_errors", "overfit_nats"):
            at_least(f"{path}.{key}", getattr(self, key), 0)


@dataclass(frozen=True)
class ParallelConfig:
    """How the ranks that torchrun starts share the work; one process reads the watchdog's limit alone."""

    kind: Literal["auto", "ddp", "fsdp"]
    shard_ranks: int | None
    cpu_offload: bool
    async_save: bool
    watchdog_minutes: float

    def check(self, path: str) -> None:
        if self.shard_ranks is not None:
            positive(f"{path}.shard_ranks", self.shard_ranks)
        positive(f"{path}.watchdog_minutes", self.watchdog_minutes)
        for key in ("shard_ranks", "cpu_offload"):
            if getattr(self, key) and self.kind != "fsdp":
                raise UserError(
                    f"{path}.{key}={getattr(self, key)} is read by parallel=fsdp only, got {path}.kind={self.kind}; "
                    f"choose parallel=fsdp"
                )


@dataclass(frozen=True)
class RunConfig:
    """Everything `train.py` needs (configs/train.yaml)."""

    name: Text | None
    runs_dir: PathText
    data_dir: PathText
    seed: int
    device: str
    threads: int | Literal["auto"]
    precision: Literal["auto", "bf16", "fp16", "fp32"]
    compile: Literal["auto", "on", "blocks", "off"]
    deterministic: bool | Literal["auto"]
    resume: PathText | None
    init_from: PathText | None
    dry_run: bool
    model: ModelConfig
    attention: AttentionConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    optimizer: OptimizerConfig
    logger: LoggerConfig
    health: HealthConfig
    parallel: ParallelConfig
    train: TrainConfig
    float8: bool = False  # runs of before had none

    def check(self, path: str) -> None:
        between("seed", self.seed, 0, LARGEST_SEED)
        device_name("device", self.device)
        if self.threads != "auto":
            between("threads", self.threads, 1, MOST_THREADS)
        if self.name is not None:
            folder_name("name", self.name)
            if self.name == "wandb":
                raise UserError("name=wandb is where wandb keeps its own files; choose another name")
        if self.resume and self.init_from:
            raise UserError(
                "resume and init_from exclude each other: resume=… goes on with a run, init_from=… starts a new one"
            )
        if self.attention.compatibility == "additive" and self.model.position == "rotary":
            raise UserError(
                "attention.compatibility=additive has no dot product that model.position=rotary could turn; "
                "set model.position=learned or none"
            )
        if self.attention.qk_clip is not None and self.model.qk_norm:
            raise UserError(
                f"attention.qk_clip={self.attention.qk_clip:g} rescales queries and keys, which model.qk_norm=true normalises "
                f"again; set model.qk_norm=false or attention.qk_clip=null"
            )
        if self.tokens_per_step < self.model.sequence_length:
            raise UserError(
                f"train.tokens_per_step={self.tokens_per_step} is less than one sequence of "
                f"model.sequence_length={self.model.sequence_length} tokens; raise the first or lower the second"
            )
        if self.tokens_per_step % self.model.sequence_length:
            near = max(1, round(self.tokens_per_step / self.model.sequence_length)) * self.model.sequence_length
            raise UserError(
                f"train.tokens_per_step={self.tokens_per_step} is not a multiple of "
                f"model.sequence_length={self.model.sequence_length}; try train.tokens_per_step={near}"
            )

    @property
    def steps(self) -> int:
        return self.model.recipe_steps if self.train.steps == "auto" else self.train.steps

    @property
    def tokens_per_step(self) -> int:
        return self.model.recipe_tokens_per_step if self.train.tokens_per_step == "auto" else self.train.tokens_per_step

    @property
    def sequences_per_step(self) -> int:
        return self.tokens_per_step // self.model.sequence_length


@dataclass(frozen=True)
class SampleConfig:
    """Everything `sample.py` needs (configs/sample.yaml)."""

    checkpoint: PathText | None
    runs_dir: PathText
    prompt: Text
    prompts: PathText | None
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    guess: int
    num_samples: int
    seed: int
    stop: list[Text]
    interactive: bool
    device: str
    threads: int | Literal["auto"]
    precision: Literal["auto", "bf16", "fp16", "fp32", "int8"]
    compile: Literal["on", "off"]

    def check(self, path: str) -> None:
        positive("max_new_tokens", self.max_new_tokens)
        positive("num_samples", self.num_samples)
        if self.max_new_tokens * self.num_samples > MOST_SAMPLED_TOKENS:
            raise UserError(
                f"max_new_tokens={self.max_new_tokens} times num_samples={self.num_samples} is more than the "
                f"{MOST_SAMPLED_TOKENS} tokens that are held at a time; lower one of them"
            )
        positive("repetition_penalty", self.repetition_penalty)
        between("guess", self.guess, 0, MOST_GUESSED)
        if self.prompts is not None and (self.prompt or self.num_samples != 1 or self.interactive):
            raise UserError(
                "prompts=FILE writes one text for each line of the file; leave out prompt, num_samples and interactive"
            )
        at_least("temperature", self.temperature, 0)
        between("seed", self.seed, 0, LARGEST_SEED)
        device_name("device", self.device)
        if self.threads != "auto":
            between("threads", self.threads, 1, MOST_THREADS)
        if self.top_k is not None:
            positive("top_k", self.top_k)
        for key in ("top_p", "min_p"):
            if getattr(self, key) is not None:
                between(key, getattr(self, key), 0.0, 1.0)
        if self.top_p == 0:
            raise UserError(
                "top_p=0 leaves no token to choose; use a number above 0, or temperature=0 for the likeliest"
            )
        if any(not stop for stop in self.stop):
            raise UserError("stop='' is empty and would stop at once; name a text, or leave stop out")


@dataclass(frozen=True)
class ConsolidateConfig:
    """Everything `python -m andrea consolidate` needs (configs/consolidate.yaml)."""

    checkpoint: PathText | None
    runs_dir: PathText


@dataclass(frozen=True)
class LensConfig:
    """Everything `python -m andrea lens` needs (configs/lens.yaml)."""

    checkpoint: PathText | None
    runs_dir: PathText
    prompt: Text
    out: PathText
    heads: list[Text]
    device: str
    threads: int | Literal["auto"]

    def check(self, path: str) -> None:
        if not self.out.endswith((".html", ".npz", ".png")):
            raise UserError(
                f"out={self.out} is of no kind the lens writes; allowed: a page .html, arrays .npz, one head's picture .png"
            )
        device_name("device", self.device)
        if self.threads != "auto":
            between("threads", self.threads, 1, MOST_THREADS)


@dataclass(frozen=True)
class CompareConfig:
    """Everything `python -m andrea compare` needs (configs/compare.yaml)."""

    runs: list[PathText]
    out: PathText
    size: str
    predict: str | None
    predict_tokens: int | None
    seed: int

    def check(self, path: str) -> None:
        if not self.runs:
            raise UserError(
                "no run named; name run folders, or a folder that holds some: python -m andrea compare runs/"
            )
        if not self.out.endswith(".html"):
            raise UserError(f"out={self.out} must end in .html: it is a page, and the picture goes beside it as .png")
        width, cross, height = self.size.partition("x")
        if not (
            cross and all(side.isascii() and side.isdigit() and len(side) <= 4 for side in (width, height))
        ) or not (400 <= int(width) <= 8000 and 300 <= int(height) <= 8000):
            raise UserError(
                f"size={self.size} is not a picture's size; write 1600x1000, from 400x300 to 8000x8000 pixels"
            )
        if self.predict_tokens is not None:
            positive("predict_tokens", self.predict_tokens)
            if self.predict is None:
                raise UserError("predict_tokens is of the size that predict=… names; set predict=andrea-480m, say")
        between("seed", self.seed, 0, LARGEST_SEED)

    @property
    def size_pixels(self) -> tuple[int, int]:
        width, _, height = self.size.partition("x")
        return int(width), int(height)


@dataclass(frozen=True)
class DashboardConfig:
    """Everything `python -m andrea dashboard` needs (configs/dashboard.yaml)."""

    entity: str | None
    project: str
    name: Text


# --------------------------------------------------------------------------------------------------- the checks


def positive(key: str, value: float) -> None:
    if not 0 < value <= LARGEST_NUMBER:
        raise UserError(f"{key}={value} must be greater than 0 and at most {LARGEST_NUMBER:g}")


def at_least(key: str, value: float, least: float) -> None:
    if not least <= value <= LARGEST_NUMBER:
        raise UserError(f"{key}={value} must be at least {least} and at most {LARGEST_NUMBER:g}")


def between(key: str, value: float, low: float, high: float, upper_open: bool = False) -> None:
    if not (low <= value < high if upper_open else low <= value <= high):
        ends = " to ".join(str(end) if isinstance(end, int) else f"{end:g}" for end in (low, high))
        raise UserError(f"{key}={value} must be from {ends}{', the upper end left out' if upper_open else ''}")


def device_name(key: str, value: str) -> None:
    kind, _, index = value.partition(":")
    is_index = index.isascii() and index.isdigit() and len(index) <= 4
    if kind not in ("auto", "cpu", "cuda", "mps") or (index and not is_index) or (kind == "auto" and index):
        raise UserError(f"{key}={value} is not a device; allowed: auto, cpu, cuda, cuda:0, mps")


def folder_name(key: str, value: str) -> None:
    """A name that becomes a folder's, and nothing but one folder's."""
    if (
        value in ("", ".", "..")
        or "/" in value
        or not can_be_path(value)
        or len(os.fsencode(value)) > LONGEST_NAME_BYTES
    ):
        raise UserError(
            f"{key}={value!r} is not a folder name: at most {LONGEST_NAME_BYTES} bytes, no '/', not '.' or '..'; folders go to "
            f"runs_dir=…"
        )


def can_be_path(value: str) -> bool:
    """Whether the system could name a file so: no NUL, no character that has no bytes, no part longer than disks take."""
    try:
        parts = os.fsencode(value).split(b"/")
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return (
        "\0" not in value
        and max(map(len, parts)) <= LONGEST_PART_BYTES
        and sum(map(len, parts)) + len(parts) <= LONGEST_PATH_BYTES
    )


def readable_path(key: str, value: str) -> str:
    """`value` where it can name a file or a folder. Raises UserError."""
    if not can_be_path(value):
        raise UserError(
            f"{key}={value[:80]!r} cannot be the name of a file or a folder: no NUL, at most {LONGEST_PART_BYTES} bytes between "
            f"two slashes and {LONGEST_PATH_BYTES} in all"
        )
    if value.startswith("~") and os.path.expanduser(value) == value:
        user = value[1:].partition("/")[0]
        raise UserError(f"{key}={value}: no user here is named {user!r}; write ./{value} for a file of that name")
    return value


# --------------------------------------------------------------------------------------------------- the parse


def nearest(word: str, allowed: typing.Iterable[str]) -> str:
    """' — did you mean X?' for the nearest right spelling, or '' when nothing is near."""
    found = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def parse(kind: type, values: Any, path: str = "") -> Any:
    """Turn a plain mapping into the frozen dataclass `kind`, checking names, types and limits.

    `path` is the dotted key of `values` ('' at the top), used in messages. Raises UserError.
    """
    if not isinstance(values, dict):
        raise UserError(
            f"{path}={values!r} is not a set of keys: {path} is a group; choose one with {path}=NAME or set {path}.KEY=…"
        )
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in hints:
            where = f"{path}.{key}" if path else str(key)
            prefix = f"{path}." if path else ""
            raise UserError(f"unknown key {where}{nearest(where, [prefix + name for name in hints])}")
    parsed = {}
    for item in dataclasses.fields(kind):
        where = f"{path}.{item.name}" if path else item.name
        if item.name in values:
            parsed[item.name] = convert(hints[item.name], values[item.name], where)
        elif item.default is dataclasses.MISSING:
            raise UserError(f"{where} is missing; set {where}=…")
    made = kind(**parsed)
    if hasattr(made, "check"):
        made.check(path)
    return made


def convert(hint: Any, value: Any, where: str) -> Any:
    """Check one value against a type hint of the dataclasses above; numbers may come as text. Raises UserError."""
    if dataclasses.is_dataclass(hint):
        return parse(hint, value, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return convert_union(hint, arguments, value, where)
    if origin is Literal:
        if value in arguments and not isinstance(value, bool):
            return value
        shown = ", ".join(map(str, arguments))
        raise UserError(f"{where}={value} is not allowed; allowed: {shown}{nearest(str(value), map(str, arguments))}")
    if origin is list:
        if not isinstance(value, (list, tuple)):
            value = [value]
        return [convert(arguments[0], entry, where) for entry in value]
    if origin is dict:
        if not isinstance(value, dict):
            raise UserError(f"{where}={value!r} is not a mapping; write {where}='{{NAME: {{…}}}}'")
        return {str(key): convert(arguments[1], entry, f"{where}.{key}") for key, entry in value.items()}
    return convert_scalar(hint, value, where)


def convert_union(hint: Any, arguments: tuple, value: Any, where: str) -> Any:
    # What the YAML writes, the command line may; `none` and `None` may be somebody's file.
    nothing = ("null",) if is_text(arguments) else ("null", "none", "None")
    if type(None) in arguments and (value is None or type(value) is str and value in nothing):
        return None
    choices = [choice for choice in arguments if choice is not type(None)]
    if choices == [PathText]:
        return convert(PathText, value, where)  # its error says what is wrong with the path
    for choice in choices:
        try:
            return convert(choice, value, where)
        except UserError:
            continue
    raise UserError(f"{where}={value} is not allowed; allowed: {describe(hint)}")


def is_text(hints: typing.Iterable[Any]) -> bool:
    return any(isinstance(hint, type) and issubclass(hint, Text) for hint in hints)


def convert_scalar(hint: Any, value: Any, where: str) -> Any:
    wrong = UserError(f"{where}={value} is not allowed; allowed: {describe(hint)}")
    if isinstance(value, (dict, list)) or value is None:
        raise wrong
    if hint is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise wrong
    if hint is int:
        try:
            number = float(value) if not isinstance(value, int) else value
            if isinstance(value, bool) or number != int(number):
                raise wrong
            whole = int(value) if isinstance(value, (int, str)) and str(value).lstrip("+-").isdigit() else int(number)
        except (ValueError, OverflowError):
            raise wrong from None
        if abs(whole) > LARGEST_INTEGER:
            raise UserError(f"{where}={value} is too large; allowed: whole numbers up to {LARGEST_INTEGER}")
        return whole
    if hint is float:
        try:
            if isinstance(value, bool):
                raise wrong
            return float(value)
        except (ValueError, OverflowError):
            raise wrong from None
    if hint is str and any("\ud800" <= character <= "\udfff" for character in str(value)):
        raise UserError(f"{where}={value!r} is not text in UTF-8")
    if hint in (str, Text):
        return str(value)
    if hint is PathText:
        return readable_path(where, str(value))
    raise AssertionError(f"config.py has a type that parse does not know: {hint}")


def describe(hint: Any) -> str:
    """A type hint in a user's words: 'a whole number or auto'."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(choice) for choice in arguments)
    if origin is Literal:
        return ", ".join(map(str, arguments))
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        Text: "text",
        PathText: "a path",
        type(None): "null",
    }
    return names.get(hint, "a group of keys" if dataclasses.is_dataclass(hint) else "a list")


def to_plain(config: Any) -> dict:
    """The dataclass as plain mappings, lists and numbers: what config.yaml and wandb are given."""
    return dataclasses.asdict(config)
