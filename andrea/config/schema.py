"""The schema of the configuration: a frozen dataclass for each group of keys, with names, types and ranges.

The YAML files under configs/ hold the values and a comment for each key. Keys with a default here may be missing from
those files and from configurations saved by older versions.
"""

import dataclasses
import os
import re
from dataclasses import dataclass
from typing import Annotated, Literal

# --------------------------------------------------------------------------------------------------------------- limits
# Limits of single values: ranges, and the form of paths, folder names and devices. The types of keys carry them.
#
# Each limit is called with a key and its value, and raises UserError if the value is not allowed. `parse` calls it after
# converting the value to its type, so a limit on `int | None` never sees None.

# Sanity limits. Larger values are mistakes, and would make arithmetic, torch or the system fail with obscure errors.
LARGEST_INTEGER = 2**63 - 1
LARGEST_NUMBER = 1e30
LONGEST_NAME_BYTES = 200  # of a folder's name: disks take 255, and we append endings
LONGEST_PATH_BYTES = 2048
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # characters that a terminal obeys
LONGEST_PART_BYTES = 255  # of a path's part, between two slashes


class UserError(ValueError):
    """The user's input or configuration is wrong. Shown as one line with exit code 2, never with a traceback."""


class Text(str):
    """Type of a key whose value is taken from the command line byte for byte: a prompt, a path, a name."""


class PathText(Text):
    """Type of a key that names a file or a folder: taken byte for byte, and rejected if no disk could hold the name."""


class DottedPath(Text):
    """Type of a key that may name a user's own class: my_module.MyClass. runtime/user_classes.py imports the class."""


def is_dotted_path(value: str) -> bool:
    """Whether `value` consists of at least two identifiers, joined by dots."""
    parts = value.split(".")
    return len(parts) > 1 and len(value) <= LONGEST_NAME_BYTES and all(part.isidentifier() for part in parts)


@dataclass(frozen=True)
class Positive:
    def __call__(self, key: str, value: float) -> None:
        if not 0 < value <= LARGEST_NUMBER:
            raise UserError(f"{key}={value} must be greater than 0 and at most {LARGEST_NUMBER:g}")


@dataclass(frozen=True)
class AtLeast:
    least: float

    def __call__(self, key: str, value: float) -> None:
        if not self.least <= value <= LARGEST_NUMBER:
            raise UserError(f"{key}={value} must be at least {self.least} and at most {LARGEST_NUMBER:g}")


@dataclass(frozen=True)
class Between:
    """From `low` to `high`, both included; with `upper_open`, `high` is excluded."""

    low: float
    high: float
    upper_open: bool = False

    def __call__(self, key: str, value: float) -> None:
        if not (self.low <= value < self.high if self.upper_open else self.low <= value <= self.high):
            excluded = ", the upper end excluded" if self.upper_open else ""
            raise UserError(f"{key}={value} must be from {self.low} to {self.high}{excluded}")


def device_name(key: str, value: str) -> None:
    kind, _, index = value.partition(":")
    is_index = index.isascii() and index.isdigit() and len(index) <= 4
    if kind not in ("auto", "cpu", "cuda", "mps") or (index and not is_index) or (kind == "auto" and index):
        raise UserError(f"{key}={value} is not a device; allowed: auto, cpu, cuda, cuda:0, mps")


def folder_name(key: str, value: str) -> None:
    """A name for one folder, not a path."""
    if (
        value in ("", ".", "..")
        or "/" in value
        or CONTROL.search(value)
        or not can_be_path(value)
        or len(os.fsencode(value)) > LONGEST_NAME_BYTES
    ):
        raise UserError(
            f"{key}={value!r} is not a folder name: a name has at most {LONGEST_NAME_BYTES} bytes, no '/' and no control "
            f"character, and is not '.' or '..'; set the folder of all runs with runs_dir=…"
        )


def can_be_path(value: str) -> bool:
    """Whether a disk can hold a file of this name: no NUL, encodable as bytes, not too long."""
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
    """`value`, if it can name a file or a folder. Raises UserError.

    `~` becomes the home directory, because not every shell does that after `=`. In a key of a group, which checkpoints keep,
    it stays: it means the home directory of each machine.
    """
    if not can_be_path(value):
        raise UserError(
            f"{key}={value[:80]!r} is not a valid path: it must not contain NUL, a name may have at most "
            f"{LONGEST_PART_BYTES} bytes, and the whole path at most {LONGEST_PATH_BYTES}"
        )
    if value.startswith("~") and os.path.expanduser(value) == value:
        user = value[1:].partition("/")[0]
        raise UserError(f"{key}={value}: this machine has no user {user!r}; write ./{value} for a file of that name")
    return value if "." in key else os.path.expanduser(value)


# ------------------------------------------------------------------------------------------------------- groups of keys

LARGEST_SEED = 2**62  # random streams are numbered upwards from the seed
NOT_RUNS = ("wandb", "sweeps")  # folders of runs_dir that hold no run
LARGEST_STEP = 2**40  # of a run; a larger one in a checkpoint is a mistake
LARGEST_LOOKAHEAD = 64  # tokens: longer drafts are rarely accepted, and each of their tokens costs time

PositiveInteger = Annotated[int, Positive()]
NonNegativeInteger = Annotated[int, AtLeast(0)]
PositiveNumber = Annotated[float, Positive()]
NonNegativeNumber = Annotated[float, AtLeast(0)]
Share = Annotated[float, Between(0, 1)]
Steps = Annotated[int, Between(1, LARGEST_STEP)]
Seed = Annotated[int, Between(0, LARGEST_SEED)]
Threads = Annotated[int, Between(1, 1024)]
Device = Annotated[str, device_name]
FolderName = Annotated[Text, folder_name]
Auto = Literal["auto"]
# What `auto` of these keys stands for on a text of some megabytes or more; training chooses other values for a small text.
ON_LARGE_TEXT = {
    "optimizer.weight_decay": 0.1,
    "optimizer.muon_rows": "equal",
    "tokenizer.vocab_size": 4096,
    "model.bigram_rows": 32768,
}
DEFAULT_MINUTES = 6.0  # that `python train.py` may take on a slow machine


@dataclass(frozen=True)
class ModelConfig:
    name: Annotated[str, folder_name]
    d_model: Annotated[int, Between(1, 2**17)]
    n_layer: Annotated[int, Between(1, 2**12)]
    n_head: Annotated[int, Between(1, 2**17)]
    d_mlp: Annotated[int, Between(1, 2**20)]
    sequence_length: Annotated[int, Between(1, 2**20)]
    position: Literal["rotary", "learned", "alibi", "none"]
    rotary_base: PositiveNumber
    norm: Literal["rmsnorm", "layernorm"]
    norm_epsilon: PositiveNumber
    mlp: Literal["relu2", "gelu", "gelu_exact", "swiglu"] | DottedPath
    bias: bool
    tied_head: bool
    qk_norm: bool | Literal["learned"]
    logit_softcap: PositiveNumber | None
    recipe_steps: Steps
    recipe_tokens_per_step: PositiveInteger
    n_kv_head: int | None = None
    d_head: Annotated[int, Between(1, 2**17)] | None = None
    value_residual: bool = False
    value_embedding: Literal["projection", "table"] | None = None
    rotary_share: Share = 1.0
    rotary_scaling: tuple[PositiveNumber, ...] | None = None
    qkv_convolution: PositiveInteger | None = None
    bigram_rows: Annotated[int, Between(1, 2**24)] | Auto | None = None
    parallel_residual: bool = False
    dropout: Annotated[float, Between(0, 1, upper_open=True)] = 0.0
    lora_rank: Annotated[int, Between(0, 2**16)] = 0

    @property
    def head_width(self) -> int:
        """The width of a head's queries, keys and values: d_head, or d_model / n_head if it is None."""
        return self.d_model // self.n_head if self.d_head is None else self.d_head

    @property
    def n_key_head(self) -> int:
        """The heads of keys and values: n_kv_head, or n_head if it is None."""
        return self.n_kv_head or self.n_head

    @property
    def d_attended(self) -> int:
        """The width of all heads together: what the output projection of attention reads."""
        return self.n_head * self.head_width

    @property
    def n_rotated(self) -> int:
        """R: how many entries of a head rotary positions turn."""
        return 2 * round(self.rotary_share * self.head_width / 2)

    @property
    def n_bigram_row(self) -> int | None:
        """The rows of the table of bigrams, None without one; for `auto`, that of a large text."""
        return int(ON_LARGE_TEXT["model.bigram_rows"]) if self.bigram_rows == "auto" else self.bigram_rows


# Values of `AttentionConfig.implementation` with which statistics of the heads are returned; auto then chooses one of the rest.
MEASURES_HEADS = ("auto", "reference", "chunked", "triton")


@dataclass(frozen=True)
class AttentionConfig:
    compatibility: Literal["scaled_dot", "dot", "bilinear", "cosine", "additive"] | DottedPath
    implementation: Literal[
        "auto", "reference", "chunked", "native", "sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flex", "triton"
    ]
    window: PositiveInteger | None | tuple[PositiveInteger | None, ...] = None
    across_documents: bool = True
    qk_clip: PositiveNumber | None = None
    gate: Literal["scalar", "elementwise"] | None = None
    exclusive: Literal["fixed", "learned"] | None = None
    score_softcap: PositiveNumber | None = None
    sink: bool = False

    def window_of(self, layer: int) -> int | None:
        """The window of a layer, counted from 0. A list of windows repeats over the layers."""
        windows = self.window if isinstance(self.window, tuple) else (self.window,)
        return windows[layer % len(windows)]


@dataclass(frozen=True)
class SourceConfig:
    kind: Literal["pystdlib", "text", "shards", "shakespeare", "fineweb_edu", "chat", "python_chat"]
    path: PathText | None = None
    weight: PositiveNumber | None = None
    include: list[Text] = dataclasses.field(default_factory=list)
    exclude: list[Text] = dataclasses.field(default_factory=list)
    field: Text | None = None


@dataclass(frozen=True)
class DataConfig:
    kind: Literal["pystdlib", "text", "shards", "shakespeare", "fineweb_edu", "mixture", "chat", "python_chat"]
    path: PathText | None
    sources: dict[str, SourceConfig]
    sample_prompt: Text = Text("")
    include: list[Text] = dataclasses.field(default_factory=list)
    exclude: list[Text] = dataclasses.field(default_factory=list)
    field: Text | None = None


@dataclass(frozen=True)
class TokenizerConfig:
    kind: Literal["byte", "bpe", "gpt2", "hf"]
    vocab_size: int | Auto | None
    path: PathText | None


@dataclass(frozen=True)
class OptimizerConfig:
    kind: Literal["muon", "adamw"]
    tuned_d_model: PositiveInteger | None
    tuned_n_layer: PositiveInteger | None
    learning_rate: PositiveNumber
    embedding_learning_rate: PositiveNumber | None
    matrix_learning_rate: PositiveNumber | None
    epsilon: PositiveNumber
    weight_decay: NonNegativeNumber | Auto
    clip_norm: PositiveNumber | None
    schedule: Literal["constant_then_decay", "cosine"]
    warmup_steps: NonNegativeInteger
    decay_fraction: float | None
    muon_rows: Literal["none", "equal", "auto"] = "none"
    average_half_life: PositiveNumber | None = None
    convolution_learning_rate: PositiveNumber | None = None

    @property
    def rows(self) -> str:
        """muon_rows; for `auto`, that of a large text."""
        return str(ON_LARGE_TEXT["optimizer.muon_rows"]) if self.muon_rows == "auto" else self.muon_rows

    @property
    def decay(self) -> float:
        """The weight decay; for `auto`, that of a large text."""
        return ON_LARGE_TEXT["optimizer.weight_decay"] if self.weight_decay == "auto" else self.weight_decay


@dataclass(frozen=True)
class ObjectiveConfig:
    kind: Literal["next_token", "dpo", "grpo"] = "next_token"
    beta: NonNegativeNumber = 0.0
    answers: Annotated[int, Between(2, 2**12)] = 8
    reward: Literal["exact_match"] | DottedPath = "exact_match"

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the model with the model that it began from."""
        return self.kind == "dpo" or (self.kind == "grpo" and self.beta > 0)


@dataclass(frozen=True)
class LoggerConfig:
    wandb: Literal["auto", "online", "offline", "disabled"]
    project: str
    tensorboard: bool = False


@dataclass(frozen=True)
class TrainConfig:
    steps: Steps | Auto
    tokens_per_step: PositiveInteger | Auto
    micro_batch: PositiveInteger | Auto
    log_every: PositiveInteger
    eval_every: PositiveInteger | Auto
    eval_tokens: PositiveInteger | None
    save_every: PositiveInteger | Auto
    keep: PositiveInteger
    sample_tokens: NonNegativeInteger
    max_minutes: PositiveNumber | Auto | None
    tokens_per_parameter: PositiveNumber | None = None
    flops: PositiveNumber | None = None
    activation_checkpointing: bool = False
    patience: PositiveInteger | None = None
    teachers: list[PathText] = dataclasses.field(default_factory=list)


@dataclass(frozen=True)
class HealthConfig:
    on_failure: Literal["warn", "stop"]


@dataclass(frozen=True)
class ParallelConfig:
    """How the ranks that torchrun starts share the work. A single process reads only `watchdog_minutes`."""

    kind: Literal["auto", "ddp", "fsdp", "fsdp_offload"]
    watchdog_minutes: PositiveNumber


@dataclass(frozen=True)
class RunConfig:
    """Everything that training needs (configs/train.yaml)."""

    name: FolderName | None
    runs_dir: PathText
    data_dir: PathText
    seed: Seed
    device: Device
    threads: Threads | Auto
    precision: Literal["auto", "bf16", "fp16", "fp32"]
    compile: Literal["auto", "on", "blocks", "off"]
    deterministic: bool | Auto
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
    trust: bool = False
    objective: ObjectiveConfig = ObjectiveConfig()  # noqa: RUF009 (frozen)

    @property
    def steps(self) -> int:
        return self.model.recipe_steps if self.train.steps == "auto" else self.train.steps

    @property
    def tokens_per_step(self) -> int:
        return self.model.recipe_tokens_per_step if self.train.tokens_per_step == "auto" else self.train.tokens_per_step

    @property
    def tokens_read_per_step(self) -> int:
        """Tokens of the text in a step: GRPO answers each prompt several times."""
        return self.tokens_per_step // (self.objective.answers if self.objective.kind == "grpo" else 1)

    @property
    def max_minutes(self) -> float | None:
        """train.max_minutes; for `auto`, DEFAULT_MINUTES for a new andrea-nano on the default text without a length."""
        if self.train.max_minutes != "auto":
            return self.train.max_minutes
        has_default_text = self.data.kind == "pystdlib" and self.data.path is None
        is_new = self.train.steps == "auto" and self.init_from is None and not self.train.teachers
        return DEFAULT_MINUTES if self.model.name == "andrea-nano" and has_default_text and is_new else None

    @property
    def sequences_per_step(self) -> int:
        return self.tokens_per_step // self.model.sequence_length


# For each other command, everything that it needs: configs/COMMAND.yaml.


@dataclass(frozen=True)
class SampleConfig:
    checkpoint: PathText | None
    runs_dir: PathText
    prompt: Text
    prompts: PathText | None
    out: PathText | None
    max_new_tokens: PositiveInteger
    temperature: NonNegativeNumber
    top_k: PositiveInteger | None
    top_p: Share | None
    min_p: Share | None
    repetition_penalty: PositiveNumber
    lookahead: Annotated[int, Between(0, LARGEST_LOOKAHEAD)]
    num_samples: PositiveInteger
    seed: Seed
    stop: list[Text]
    interactive: bool
    device: Device
    threads: Threads | Auto
    precision: Literal["auto", "bf16", "fp16", "fp32", "int8", "int4"]
    compile: Literal["on", "off"]
    trust: bool = False
    chat: bool = False


@dataclass(frozen=True)
class ServeConfig:
    checkpoint: PathText | None
    beside: PathText | None
    runs_dir: PathText
    served_name: Text | None
    host: Text
    port: Annotated[int, Between(0, 65535)]
    api_key: Text | None
    allow_hosts: list[Text]
    allow_origin: Text | None
    max_running: Annotated[int, Between(1, 1024)]
    max_waiting: Annotated[int, Between(1, 65536)]
    max_tokens: PositiveInteger
    max_body_bytes: PositiveInteger
    timeout_s: PositiveNumber
    device: Device
    threads: Threads | Auto
    precision: Literal["auto", "bf16", "fp16", "fp32", "int8", "int4"]
    trust: bool = False


@dataclass(frozen=True)
class ConsolidateConfig:
    checkpoint: PathText | None
    runs_dir: PathText


@dataclass(frozen=True)
class ExportConfig:
    checkpoint: PathText | None
    runs_dir: PathText
    to: Literal["hf", "gguf", "peft"]
    out: PathText | None
    dtype: Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
    text: PathText | None
    data_dir: PathText
    hub: str | None
    private: bool


@dataclass(frozen=True)
class ImportConfig:
    source: PathText | None
    runs_dir: PathText
    out: PathText | None
    text: PathText | None


@dataclass(frozen=True)
class EvaluateConfig:
    checkpoint: PathText | None
    runs_dir: PathText
    tasks: list[Text]
    text: PathText | None
    data_dir: PathText
    limit: PositiveInteger | None
    few_shot: NonNegativeInteger | None
    batch_size: PositiveInteger
    device: Device
    threads: Threads | Auto
    precision: Literal["fp32", "bf16", "int8", "int4"] = "fp32"
    trust: bool = False
    field: Text | None = None


@dataclass(frozen=True)
class LensConfig:
    checkpoint: PathText | None
    runs_dir: PathText
    prompt: Text
    out: PathText
    heads: list[Text]
    device: Device
    threads: Threads | Auto
    trust: bool = False
    against: Text | None = None
    against_checkpoint: PathText | None = None
    data_dir: PathText = "data"


@dataclass(frozen=True)
class CompareConfig:
    runs: list[PathText]
    runs_dir: PathText
    out: PathText
    predict: str | None
    predict_tokens: PositiveInteger | None
    seed: Seed
    trust: bool = False


@dataclass(frozen=True)
class RunsConfig:
    runs_dir: PathText
    data_dir: PathText
    disk: bool
    delete: FolderName | None
    confirm: bool
    rename: FolderName | None
    to: FolderName | None


@dataclass(frozen=True)
class DashboardConfig:
    entity: str | None
    project: str
    name: Text
