"""The keys of a configuration, and the YAML files of configs/ that hold their values.

Dotted keys (train.steps): their types, those that were removed, names in other programs. Groups (model): their choices, and
the values of each choice. The fingerprint of the keys that decide what a run learns.
"""

import dataclasses
import functools
import hashlib
import importlib.resources
import json
import os
import typing
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import andrea.config.schema as schema
from andrea.config.schema import ON_LARGE_TEXT, RunConfig, UserError

ANY = object()  # a removed key of what a run shows, not of what it learns
REMOVED: dict[Any, dict[str, Any]] = {  # dataclass -> {removed key: its only value, or that of each kind, or ANY}
    schema.HealthConfig: dict.fromkeys(
        """failing_share repetition variety loss_spike gradient_spike update_ratio unigram_steps overfit_nats epochs
        clipped_share head_share one_key_entropy uniform_entropy largest_logit closed_gate source_rise_nats leak_nats
        expected_bpb leak_errors samples""".split(),
        ANY,
    ),
    schema.DataConfig: {"shuffle_documents": True},
    schema.LoggerConfig: {"tags": [], "group": ANY},
    schema.ModelConfig: {"zero_init_projections": False, "stochastic_depth": 0.0},
    schema.OptimizerConfig: {
        "beta1": 0.9,
        "beta2": 0.95,
        "momentum": {"muon": 0.95, "adamw": None},
        "final_fraction": {"muon": 0.0, "adamw": 0.1},
    },
    schema.ParallelConfig: {"shard_ranks": None, "async_save": True, "cpu_offload": False},
    RunConfig: {"bf16_residual": False},
    schema.TrainConfig: {
        "teacher_share": 0.5,
        **dict.fromkeys(
            "attention_every sample_every sample_temperature sample_repetition_penalty lens_prompt".split(), ANY
        ),
    },
}

# Our key -> the names that users of nanoGPT, nanochat, Hugging Face and litgpt type for it, in any command. These names are not
# accepted, because units and meanings differ (steps, not epochs); a message suggests our key.
OTHER_NAMES = {
    "name": "run_name wandb_run_name",
    "runs_dir": "out_dir output_dir logging_dir runs",
    "seed": "random_seed",
    "device": "use_cpu no_cuda device_type gpu",
    "threads": "num_threads",
    "precision": "dtype torch_dtype bf16 fp16 quantize",
    "compile": "torch_compile",
    "resume": "resume_from resume_from_checkpoint checkpoint",
    "init_from": "checkpoint initial_checkpoint_dir model_name_or_path pretrained finetune fine_tune",
    "model": "model_name model_type config_name",
    "model.d_model": "n_embd hidden_size dim",
    "model.n_layer": "depth n_layers num_layers num_hidden_layers",
    "model.n_head": "n_heads num_heads num_attention_heads",
    "model.n_kv_head": "num_key_value_heads n_query_groups",
    "model.d_head": "head_dim head_size key_length",
    "model.d_mlp": "intermediate_size",
    "model.sequence_length": "block_size context_length max_length max_seq_len max_seq_length max_position_embeddings",
    "model.parallel_residual": "use_parallel_residual parallel_attn",
    "model.rotary_base": "rope_base rope_theta",
    "model.rotary_scaling": "rope_scaling rope_parameters",
    "model.rotary_share": "rotary_pct rotary_percentage partial_rotary_factor rotary_dim",
    "model.norm_epsilon": "norm_eps rms_norm_eps",
    "model.mlp": "hidden_act",
    "model.dropout": "resid_pdrop hidden_dropout hidden_dropout_prob",
    "model.tied_head": "tie_embeddings tie_word_embeddings",
    "attention.implementation": "attn_implementation flash_attn",
    "model.position": "alibi position_embedding_type",
    "attention.score_softcap": "attn_logit_softcapping attention_logit_softcapping",
    "attention.sink": "sinks attention_sink attn_sink",
    "attention.window": "sliding_window sliding_window_size window_pattern layer_types",
    "data": "dataset dataset_name",
    "data.path": "train_file train_data_path text_file input_file",
    "data.sample_prompt": "prompt",
    "tokenizer": "tokenizer_name",
    "tokenizer.path": "tokenizer_dir",
    "objective": "loss trainer loss_type",
    "objective.answers": "num_generations group_size",
    "objective.reward": "reward_funcs reward_model",
    "optimizer": "optim",
    "optimizer.learning_rate": "lr max_lr learning_rate",
    "optimizer.matrix_learning_rate": "lr max_lr learning_rate matrix_lr muon_lr",
    "optimizer.embedding_learning_rate": "embedding_lr",
    "optimizer.epsilon": "adam_epsilon eps",
    "optimizer.weight_decay": "wd",
    "optimizer.clip_norm": "grad_clip max_grad_norm max_norm gradient_clip_val",
    "optimizer.schedule": "decay_lr lr_scheduler_type",
    "optimizer.warmup_steps": "warmup warmup_iters warmup_ratio lr_warmup_steps",
    "optimizer.decay_fraction": "lr_decay_iters warmdown_ratio",
    "logger": "wandb_log report_to logger_name",
    "logger.project": "wandb_project",
    "parallel": "fsdp ddp strategy backend",
    "train.steps": "iters max_iters max_steps num_iterations epochs num_epochs num_train_epochs max_tokens",
    "train.tokens_per_parameter": "max_tokens",
    "train.tokens_per_step": "batch_size total_batch_size global_batch_size train_batch_size gradient_accumulation_steps",
    "train.micro_batch": "batch_size micro_batch_size device_batch_size per_device_train_batch_size",
    "train.activation_checkpointing": "gradient_checkpointing",
    "train.teachers": "teacher teacher_model distill_from",
    "train.max_minutes": "max_time minutes",
    "train.log_every": "log_interval logging_steps",
    "train.eval_every": "eval_interval eval_steps eval_strategy eval.interval",
    "train.eval_tokens": "eval_iters eval.max_iters",
    "train.save_every": "save_interval save_steps save_strategy checkpoint_interval",
    "train.keep": "save_total_limit",
    "train.patience": "early_stopping early_stopping_patience",
    "train.sample_tokens": "max_new_tokens",
    # Keys of other commands
    "checkpoint": "ckpt out_dir checkpoint_dir model model_name_or_path name run resume init_from",
    "prompt": "start text input",
    "out": "output out_file output_dir outfile file folder",
    "max_new_tokens": "max_tokens max_length n_tokens num_tokens length",
    "temperature": "temp do_sample greedy",
    "num_samples": "n num n_samples num_return_sequences batch_size",
    "repetition_penalty": "repeat_penalty",
    "stop": "stop_strings",
    "lookahead": "prompt_lookup_num_tokens",
    "heads": "head layer",
    "to": "format target",
    "dtype": "precision torch_dtype outtype quantize quantization",
    "text": "prompt prompts file data",
    "hub": "repo repo_id hub_id push_to_hub upload",
    "private": "public visibility",
    "source": "checkpoint model path folder init_from",
    "tasks": "task benchmark benchmarks",
    "limit": "num_samples max_samples n",
    "few_shot": "num_fewshot n_shot shots fewshot",
    "batch_size": "batch",
}
COMMANDS = {
    "train": RunConfig,
    "sample": schema.SampleConfig,
    "serve": schema.ServeConfig,
    "lens": schema.LensConfig,
    "export": schema.ExportConfig,
    "import": schema.ImportConfig,
    "evaluate": schema.EvaluateConfig,
}


@functools.cache
def key_types(kind: type) -> dict[str, Any]:
    """Each key of the dataclass `kind` with its type, limits included (Annotated)."""
    return typing.get_type_hints(kind, include_extras=True)


@functools.cache
def dotted_keys(kind: type) -> list[str]:
    """Every dotted key of the dataclass `kind`; a group comes before its keys."""
    found = []
    for name, hint in key_types(kind).items():
        found.append(name)
        if dataclasses.is_dataclass(hint):
            found += [f"{name}.{key}" for key in dotted_keys(hint)]
    return found


def nearest(word: str, allowed: Iterable[str]) -> str:
    """'; did you mean X?' for the allowed word with the nearest spelling, or '' if none is near."""
    return question(get_close_matches(word, list(allowed), n=1))


def question(words: Sequence[str]) -> str:
    """'; did you mean X or Y?', or '' without words."""
    return f"; did you mean {' or '.join(words)}?" if words else ""


def suggestion(kind: type, typed: str, allowed: Sequence[str] = ()) -> str:
    """'; did you mean X?' for a word that is no key of `kind`, or '' if none is near. allowed: suggest only these keys."""
    return question(meant_keys(kind, typed, allowed))


def not_key_value(kind: type, word: str, other_hint: str = "") -> UserError:
    """The error for a word without '='. It names the key that is meant; if no key is near, it ends with `other_hint`."""
    hint = question([f"{key}=…" for key in meant_keys(kind, word)]) or other_hint
    return UserError(f"{word!r} is not of the form key=value{hint or '; --help lists the keys'}")


def meant_keys(kind: type, typed: str, allowed: Sequence[str] = ()) -> list[str]:
    """The keys that are suggested for a typed word, best first; none if no key is near.

    They are the first keys found in this order: the key itself, the key that has this name in another program, the key
    with this name in some group, the key with the nearest spelling. allowed: as for `suggestion`.
    """
    word = typed.lstrip("-+~").replace("-", "_").lower()
    group, _, last = word.rpartition(".")
    keys = list(allowed) or dotted_keys(kind)
    others = {key: names for key, names in OTHER_NAMES.items() if key in keys}
    found = (
        [key for key in keys if key == word]
        or [key for key, names in others.items() if word in names.split()]
        or [key for key, names in others.items() if last in names.split()]
        or [key for key in keys if key.rpartition(".")[2] == last]
    )
    in_group = [key for key in keys if key.rpartition(".")[0] == group]
    return found or get_close_matches(word, in_group, n=1) or get_close_matches(word, keys, n=1)


def member_type(hint: Any, name: Any) -> Any:
    """The declared type of the member `name` of a dataclass or dict type `hint`; None if it has no such member."""
    if typing.get_origin(hint) is dict:
        return typing.get_args(hint)[1]
    return key_types(hint).get(name) if dataclasses.is_dataclass(hint) else None


def type_of_key(kind: type, key: str) -> Any:
    """The type of a dotted key. Raises UserError for an unknown key, with the nearest spelling."""
    hint: Any = kind
    for name in key.split("."):
        inner = member_type(hint, name)
        if inner is None:
            others = [name for name, other in COMMANDS.items() if other is not kind and key in dotted_keys(other)]
            belongs = f", which belongs to {' and '.join(others)}" if others else ""
            raise UserError(f"unknown key {key}{belongs}{suggestion(kind, key)}")
        hint = inner
    return hint


def with_current_keys(hint: Any, values: Any) -> Any:
    """`values`, of the type `hint`, without removed keys. One that changed something stays, and is refused as unknown."""
    if hint is None or not isinstance(values, dict):
        return values
    removed = REMOVED.get(hint, {})
    current = {
        key: value for key, value in values.items() if not is_only(value, removed.get(key, ...), values.get("kind"))
    }
    return {key: with_current_keys(member_type(hint, key), value) for key, value in current.items()}


def is_only(value: Any, only: Any, kind: Any) -> bool:
    if isinstance(only, dict):
        return isinstance(kind, str) and kind in only and value == only[kind]
    return only is ANY or value == only


def lay_over(plain: dict, values: dict[str, Any]) -> dict:
    """Set the values of dotted keys in nested mappings, in place; returns the mapping. Raises UserError."""
    for key, value in values.items():
        *groups, last = key.split(".")
        inner = plain
        for group in groups:
            inner = inner.setdefault(group, {})
            if not isinstance(inner, dict):  # typed before it, as in data.sources=code data.sources.code.kind=…
                raise UserError(f"{key} cannot be set: {group}={inner} is not a mapping")
        inner[last] = value
    return plain


def flatten(nested: dict, prefix: str = "") -> dict[str, Any]:
    """The values of nested mappings by dotted key: the inverse of `lay_over`. An empty mapping is a value."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


# ------------------------------------------------------------------------------------------------ the files of configs/
# The default choice of each group, named in configs/train.yaml, holds every key of the group with a comment. The other
# choices inherit its values (`defaults: [NAME, _self_]`) and hold only what differs.

# The build copies configs/ into the package (shipped.py). A clone, also an editable install, has it beside the package.
PACKAGE = Path(str(importlib.resources.files("andrea")))
CONFIGS = (PACKAGE if (PACKAGE / "configs").is_dir() else PACKAGE.parent) / "configs"


def choices(group: str) -> list[str]:
    """The names that GROUP=NAME accepts."""
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def check_choice(group: str, choice: str) -> None:
    """Raises UserError if GROUP=CHOICE names no file."""
    names = choices(group)
    if not names:  # train, which has no files to choose from
        raise UserError(f"{group}={choice}: {group} is a group of keys; set one of them with {group}.KEY=…")
    if choice not in names:
        own = "; your own text is given as data=text data.path=…" if group == "data" and os.path.exists(choice) else ""
        raise UserError(f"{group}={choice} is not known; allowed: {', '.join(names)}{own or nearest(choice, names)}")


def own_values(name: str) -> dict[str, Any]:
    """The content of configs/NAME.yaml, for train or GROUP/CHOICE. `defaults` names the choices that it inherits from."""
    import yaml

    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))


def group_values(group: str, choice: str) -> dict[str, Any]:
    """The values that GROUP=CHOICE stands for, inherited values included, as Hydra would compose them."""
    values: dict[str, Any] = {}
    own = own_values(f"{group}/{choice}")
    for parent in own.pop("defaults", ["_self_"]):
        values |= own if parent == "_self_" else group_values(group, parent)
    return values


def chosen_groups(typed: Mapping[str, str]) -> dict[str, str]:
    """The choice of each group of configs/train.yaml, where the groups `typed` are typed: {"model": "andrea-nano", …}."""
    listed = own_values("train")["defaults"]
    defaults = {group: choice for entry in listed if isinstance(entry, dict) for group, choice in entry.items()}
    return defaults | dict(typed)


# ------------------------------------------------------------------------------------------ the fingerprint of a recipe
# Equal for two configurations if they learn the same from the same tokens.

# Keys that name or place a part, or that change its speed or what is recorded, but not what is learned. Of `train`, the
# length of the run is left out too: it is compared separately.
NOT_LEARNED = {
    "model": "name recipe_steps recipe_tokens_per_step",
    "attention": "implementation",
    "optimizer": "",
    "tokenizer": "",
    "objective": "",
    "train": """steps tokens_per_parameter flops tokens_per_step max_minutes micro_batch activation_checkpointing keep
        log_every eval_every eval_tokens save_every sample_tokens""",
}


def recipe_values(config: RunConfig) -> dict[str, Any]:
    """The dotted keys, with their values, that decide what a run learns from its tokens.

    A key with the value that schema.py has as its default is left out. So the fingerprint of an old recipe stays the
    same when a key is added whose default is the old behaviour.
    """
    values: dict[str, Any] = {"train.tokens_per_step": config.tokens_per_step}
    for group, left_out in NOT_LEARNED.items():
        part = getattr(config, group)
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if value == "auto":
                value = ON_LARGE_TEXT.get(f"{group}.{field.name}", value)
            has_factory = field.default_factory is not dataclasses.MISSING
            default = field.default_factory() if has_factory else field.default
            if field.name not in left_out.split() and value != default:
                values[f"{group}.{field.name}"] = value
    return values


def recipe_fingerprint(config: RunConfig) -> str:
    """Twelve hexadecimal digits of `recipe_values`. The seed, the text and the number of steps do not change it."""
    return digest(recipe_values(config))


def digest(values: Any) -> str:
    """Twelve hexadecimal digits of plain values; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:12]
