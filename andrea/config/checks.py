"""Checks that span several keys: one function for each dataclass. path: the dotted key of its group. They raise UserError."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import andrea.config.schema as schema
from andrea.config.schema import MEASURES_HEADS, Between, UserError

# A repository on Hugging Face's hub: both parts begin and end with a letter, a digit or "_", without "--" and "..".
HUB_NAME = re.compile(r"(?!.*(--|\.\.|\.git$))\w([\w.-]{0,94}\w)?/\w([\w.-]{0,94}\w)?", re.ASCII)
LARGEST_WIDTH = 2**20  # of all heads together
LARGEST_ROTARY_TABLE = 2**25  # positions times head width
MOST_SAMPLED_TOKENS = 2**26  # held in memory at a time
LARGEST_VOCABULARY = 2**20  # a sanity limit: the largest in use have about a quarter of this


def check_model(model: schema.ModelConfig, path: str) -> None:
    if model.d_head is None and model.d_model % model.n_head:
        raise UserError(
            f"{path}.n_head={model.n_head} does not divide {path}.d_model={model.d_model}: the head width d_model / n_head "
            f"must be whole; try {path}.n_head={nearest_divisor(model.d_model, model.n_head)}, or set {path}.d_head"
        )
    if model.d_attended > LARGEST_WIDTH:
        raise UserError(
            f"{path}.n_head={model.n_head} heads of {path}.d_head={model.d_head} are {model.d_attended} wide together, above "
            f"the limit of {LARGEST_WIDTH}; lower one of them"
        )
    if model.n_kv_head is not None and (model.n_kv_head < 1 or model.n_head % model.n_kv_head):
        raise UserError(
            f"{path}.n_kv_head={model.n_kv_head} does not divide {path}.n_head={model.n_head}: each key/value head is shared "
            f"by equally many query heads; try {path}.n_kv_head={nearest_divisor(model.n_head, model.n_kv_head)}"
        )
    if model.position == "rotary" and model.sequence_length * model.head_width > LARGEST_ROTARY_TABLE:
        raise UserError(
            f"{path}.sequence_length={model.sequence_length} times the head width of {model.head_width} is "
            f"above the limit of {LARGEST_ROTARY_TABLE} for {path}.position=rotary; lower one of them"
        )
    if model.position == "rotary" and model.head_width % 2:
        raise UserError(
            f"{path}.position=rotary turns pairs of numbers and needs an even head width, got {model.head_width}; change "
            f"{'d_model / n_head' if model.d_head is None else f'{path}.d_head'}, or set {path}.position=learned"
        )
    if model.lora_rank and "." in model.mlp:
        raise UserError(
            f"{path}.lora_rank={model.lora_rank} has factors for the built-in MLPs only, and {path}.mlp={model.mlp} is a class of "
            f"your own; set {path}.lora_rank=0"
        )
    scaling = model.rotary_scaling
    if scaling is not None and len(scaling) != 1 and (len(scaling) != 4 or not scaling[1] < scaling[2]):
        raise UserError(
            f"{path}.rotary_scaling={list(scaling)} must be one number, [factor], or four, [factor, low, high, length] with low "
            f"below high, as in [8,1,4,8192] of Llama 3.1"
        )
    if model.position == "rotary" and 0 < model.rotary_share and model.n_rotated == 0:
        raise UserError(
            f"{path}.rotary_share={model.rotary_share:g} of a head width of {model.head_width} is less than one pair of "
            f"numbers; the smallest share is {2 / model.head_width:g}; for no positions set {path}.position=none"
        )


def as_text(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


def nearest_divisor(whole: int, wanted: int) -> int:
    return min((n for n in range(1, whole + 1) if whole % n == 0), key=lambda n: abs(n - wanted))


def check_attention(attention: schema.AttentionConfig, path: str) -> None:
    for key in ("score_softcap", "sink"):
        if getattr(attention, key) and attention.implementation.startswith("sdpa"):
            raise UserError(
                f"{path}.{key}={as_text(getattr(attention, key))} is not computed by torch's kernels, got "
                f"{path}.implementation={attention.implementation}; use auto, native, triton, flex or reference"
            )
    if attention.qk_clip is not None and attention.score_softcap is not None:
        raise UserError(
            f"{path}.qk_clip={attention.qk_clip:g} and {path}.score_softcap={attention.score_softcap:g} both limit the "
            f"logits; leave one out"
        )
    if attention.window == ():
        raise UserError(
            f"{path}.window=[] has no entry; write one for each layer, such as [64, 64, null], or {path}.window=null"
        )
    if attention.qk_clip is not None and attention.compatibility in ("cosine", "additive"):
        raise UserError(
            f"{path}.qk_clip={attention.qk_clip:g} rescales queries and keys; this does not bound the logits of "
            f"{path}.compatibility={attention.compatibility}; set {path}.qk_clip=null"
        )
    if attention.qk_clip is not None and "." in attention.compatibility:
        raise UserError(
            f"{path}.qk_clip={attention.qk_clip:g} rescales queries and keys; this may not bound the logits of a class of "
            f"your own, {path}.compatibility={attention.compatibility}; set {path}.qk_clip=null"
        )
    if attention.qk_clip is not None and attention.implementation not in MEASURES_HEADS:
        raise UserError(
            f"{path}.qk_clip={attention.qk_clip:g} needs each step's largest logits, which "
            f"{path}.implementation={attention.implementation} does not return; use auto, triton or reference"
        )
    if attention.compatibility == "additive" and attention.implementation not in ("auto", "reference", "chunked"):
        raise UserError(
            f"{path}.implementation={attention.implementation} needs a compatibility function that is a dot product, which "
            f"{path}.compatibility=additive is not; use auto, chunked or reference"
        )
    if attention.compatibility != "additive" and attention.implementation == "chunked":
        raise UserError(
            f"{path}.implementation=chunked serves only {path}.compatibility=additive, got {attention.compatibility}; "
            f"use auto"
        )


def check_source(source: schema.SourceConfig, path: str) -> None:
    if source.kind in ("text", "shards", "chat") and not source.path:
        raise UserError(
            f"{path}.path is missing: {path}.kind={source.kind} reads a file or a folder; set {path}.path=…"
        )
    check_selection(source, path)


def check_selection(source: schema.SourceConfig | schema.DataConfig, path: str) -> None:
    """Raise UserError if files or a field are selected for a source that is no text of the user's own."""
    for key in ("include", "exclude", "field"):
        value = getattr(source, key)
        if value and source.kind not in ("text", "chat"):
            advice = f"set {path}.sources.NAME.{key}" if source.kind == "mixture" else f"leave {path}.{key} out"
            raise UserError(
                f"{path}.{key}={value} is read by data=text and data=chat, got {path}.kind={source.kind}; {advice}"
            )


def check_data(data: schema.DataConfig, path: str) -> None:
    if data.kind in ("text", "shards", "chat") and not data.path:
        raise UserError(f"{path}.path is missing: data={data.kind} reads a file or a folder; set {path}.path=…")
    if data.kind == "mixture" and not data.sources:
        raise UserError(
            f"{path}.sources is empty: a mixture names its sources, e.g. "
            f"{path}.sources='{{code: {{kind: pystdlib}}, notes: {{kind: text, path: notes/, weight: 0.3}}}}'"
        )
    if data.kind != "mixture" and data.sources:
        raise UserError(f"{path}.sources is read by data=mixture only, got data={data.kind}; choose data=mixture")
    check_selection(data, path)


def check_tokenizer(tokenizer: schema.TokenizerConfig, path: str) -> None:
    if tokenizer.kind == "hf" and not tokenizer.path:
        raise UserError(f"{path}.path is missing: tokenizer=hf needs a tokenizer.json, or the folder that holds one")
    if tokenizer.kind != "bpe":
        return
    if tokenizer.vocab_size is None:
        raise UserError(
            f"{path}.vocab_size is missing: tokenizer=bpe needs auto, or a whole number from 257 to {LARGEST_VOCABULARY}"
        )
    if tokenizer.vocab_size != "auto" and not 257 <= tokenizer.vocab_size <= LARGEST_VOCABULARY:
        raise UserError(
            f"{path}.vocab_size={tokenizer.vocab_size} is out of range: it must be at least 257 (256 bytes and "
            f"end-of-text) and at most {LARGEST_VOCABULARY}"
        )


def check_optimizer(optimizer: schema.OptimizerConfig, path: str) -> None:
    if (optimizer.tuned_d_model is None) != (optimizer.tuned_n_layer is None):
        raise UserError(
            f"{path}.tuned_d_model={optimizer.tuned_d_model} and {path}.tuned_n_layer={optimizer.tuned_n_layer} belong "
            f"together: set both to the size of the model that the rates were tuned on, or both to null"
        )
    if optimizer.kind == "muon" and optimizer.matrix_learning_rate is None:
        raise UserError(f"{path}.matrix_learning_rate must be a number with optimizer=muon")
    if optimizer.kind != "muon" and optimizer.muon_rows != "none":
        raise UserError(
            f"{path}.muon_rows={optimizer.muon_rows} is read by optimizer=muon only; choose optimizer=muon, or set "
            f"{path}.muon_rows=none"
        )
    if optimizer.schedule == "constant_then_decay":
        if optimizer.decay_fraction is None:
            raise UserError(
                f"{path}.decay_fraction is missing: {path}.schedule=constant_then_decay needs a number in 0..1"
            )
        Between(0, 1)(f"{path}.decay_fraction", optimizer.decay_fraction)


CONVERSATIONS = {"dpo": ("chat",), "grpo": ("chat", "python_chat")}  # objective -> kinds of data that it learns from


def check_objective(config: schema.RunConfig) -> None:
    kind, data, teachers = config.objective.kind, config.data, config.train.teachers
    if kind == "next_token":
        return
    kinds = {source.kind for source in data.sources.values()} if data.kind == "mixture" else {data.kind}
    if other := kinds - set(CONVERSATIONS[kind]):
        what = "pairs of a chosen and a rejected answer" if kind == "dpo" else "conversations"
        raise UserError(
            f"objective={kind} learns from {what}, got data={min(other)}; set "
            f"{' or '.join(f'data={each}' for each in CONVERSATIONS[kind])}"
        )
    if not (config.init_from or config.resume):
        raise UserError(f"objective={kind} improves a model that answers already; set init_from=… to name it")
    if config.attention.across_documents:
        raise UserError(
            f"objective={kind} needs answers that do not see each other; set attention.across_documents=false"
        )
    if kind == "dpo" and config.objective.beta == 0:
        raise UserError("objective.beta=0 leaves objective=dpo nothing to learn; use a number above 0, such as 0.1")
    if len(teachers) > config.objective.has_reference:
        raise UserError(
            f"train.teachers has {len(teachers)} entries, but objective={kind} with objective.beta={config.objective.beta:g} "
            f"takes {'one, its reference' if config.objective.has_reference else 'none'}; leave train.teachers out"
        )


def check_run(config: schema.RunConfig, path: str) -> None:
    check_objective(config)
    if config.name == "wandb":
        raise UserError("name=wandb is the folder of wandb's own files; choose another name")
    if config.resume and config.init_from:
        raise UserError(
            "resume and init_from exclude each other: resume=… continues a run, init_from=… starts a new one"
        )
    if config.attention.compatibility == "additive" and config.model.position == "rotary":
        raise UserError(
            "attention.compatibility=additive has no dot product that model.position=rotary could act on; "
            "set model.position=learned, alibi or none"
        )
    if config.attention.qk_clip is not None and config.model.qk_norm:
        raise UserError(
            f"attention.qk_clip={config.attention.qk_clip:g} rescales queries and keys, which "
            f"model.qk_norm={str(config.model.qk_norm).lower()} normalises "
            f"again; set model.qk_norm=false or attention.qk_clip=null"
        )
    if config.attention.qk_clip is not None and config.model.lora_rank:
        raise UserError(
            f"attention.qk_clip={config.attention.qk_clip:g} rescales the matrices that model.lora_rank={config.model.lora_rank} "
            f"freezes; set attention.qk_clip=null or model.lora_rank=0"
        )
    train, length = config.train, config.model.sequence_length
    if train.tokens_per_parameter is not None and train.flops is not None:
        raise UserError(
            f"train.tokens_per_parameter={train.tokens_per_parameter:g} and train.flops={train.flops:g} both set the length of "
            f"training; leave one out"
        )
    if config.tokens_per_step < length:
        raise UserError(
            f"train.tokens_per_step={config.tokens_per_step} is less than one sequence of model.sequence_length={length} "
            f"tokens; raise the first or lower the second"
        )
    if config.tokens_per_step % length:
        near = max(1, round(config.tokens_per_step / length)) * length
        raise UserError(
            f"train.tokens_per_step={config.tokens_per_step} is not a multiple of model.sequence_length={length}; "
            f"try train.tokens_per_step={near}"
        )


def check_sample(config: schema.SampleConfig, path: str) -> None:
    if config.max_new_tokens * config.num_samples > MOST_SAMPLED_TOKENS:
        raise UserError(
            f"max_new_tokens={config.max_new_tokens} times num_samples={config.num_samples} is more than the "
            f"{MOST_SAMPLED_TOKENS} tokens that one command may hold; lower one of them"
        )
    if config.prompts is not None and (config.prompt or config.num_samples != 1 or config.interactive):
        raise UserError(
            "prompts=FILE writes one text for each line of the file; leave out prompt, num_samples and interactive"
        )
    if config.out is not None and config.interactive:
        raise UserError(
            "out=FILE holds the texts of prompt or prompts; leave out interactive, or redirect its output: > FILE"
        )
    if config.chat and (
        config.prompts is not None or config.interactive or config.out is not None or config.num_samples > 1
    ):
        raise UserError(
            "chat=true is a conversation in the terminal; leave out prompts, interactive, out and num_samples"
        )
    if config.top_p == 0:
        raise UserError(
            "top_p=0 leaves no token to choose; use a number above 0, or temperature=0 for the likeliest token"
        )
    if "" in config.stop:
        raise UserError("stop='' is empty and would stop at once; give a text, or leave stop out")


def check_lens(config: schema.LensConfig, path: str) -> None:
    if not config.out.endswith((".html", ".npz")):
        raise UserError(
            f"out={config.out} is not a format that the lens writes; allowed endings: .html (a page), .npz (arrays)"
        )
    if config.against == "":
        raise UserError("against is empty: it is the text to compare prompt with; write one, or leave against out")
    for name in ("against", "against_checkpoint"):
        if getattr(config, name) is not None and not config.out.endswith(".html"):
            raise UserError(f"{name}=… is a part of the page, but out={config.out} holds arrays only; set out=….html")


def check_compare(config: schema.CompareConfig, path: str) -> None:
    if not config.runs:
        raise UserError("no run given; name runs, or a folder that contains runs, such as runs/")
    if not config.out.endswith(".html"):
        raise UserError(f"out={config.out} must end in .html: it is a page")
    if config.predict_tokens is not None and config.predict is None:
        raise UserError(
            "predict_tokens=… needs predict=…, the model size to predict; set predict too, e.g. predict=andrea-480m"
        )


def check_export(config: schema.ExportConfig, path: str) -> None:
    if config.dtype in ("q8_0", "q4_0") and config.to != "gguf":
        raise UserError(
            f"dtype={config.dtype} is a type of GGUF files, got to={config.to}; use f32, f16 or bf16, or set to=gguf"
        )
    if config.to == "peft" and config.dtype != "f32":
        raise UserError(f"dtype={config.dtype}: an adapter is small and is written in f32; leave dtype out")
    if config.hub is not None and not HUB_NAME.fullmatch(config.hub):
        raise UserError(
            f"hub={config.hub} is not a repository of Hugging Face's hub; write OWNER/NAME, with letters, digits, '-', '_' and '.'"
        )
    if not config.private and config.hub is None:
        raise UserError("private=false says who may read an upload, but hub is not set; set hub=OWNER/NAME too")


CHECKS: dict[type, Callable[[Any, str], None]] = {
    schema.ModelConfig: check_model,
    schema.AttentionConfig: check_attention,
    schema.SourceConfig: check_source,
    schema.DataConfig: check_data,
    schema.TokenizerConfig: check_tokenizer,
    schema.OptimizerConfig: check_optimizer,
    schema.RunConfig: check_run,
    schema.SampleConfig: check_sample,
    schema.LensConfig: check_lens,
    schema.CompareConfig: check_compare,
    schema.ExportConfig: check_export,
}
