"""Checks that span several keys: one function for each dataclass, which yields what is wrong with its values.

path: the dotted key of the group. `parse.check_combinations` raises the first message as a UserError.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import andrea.config.schema as schema
from andrea.config.schema import MEASURES_HEADS, Between

# A repository on Hugging Face's hub: both parts begin and end with a letter, a digit or "_", without "--" and "..".
HUB_NAME = re.compile(r"(?!.*(--|\.\.|\.git$))\w([\w.-]{0,94}\w)?/\w([\w.-]{0,94}\w)?", re.ASCII)
LARGEST_WIDTH = 2**20  # of all heads together
LARGEST_ROTARY_TABLE = 2**25  # positions times head width
MOST_SAMPLED_TOKENS = 2**26  # held in memory at a time
LARGEST_VOCABULARY = 2**20  # a sanity limit: the largest in use have about a quarter of this


def check_model(model: schema.ModelConfig, path: str) -> Iterator[str]:
    if model.d_head is None and model.d_model % model.n_head:
        near = nearest_divisor(model.d_model, model.n_head)
        yield (
            f"{path}.n_head={model.n_head} does not divide {path}.d_model={model.d_model}, so the head width is not whole; "
            f"try {path}.n_head={near}, or set {path}.d_head"
        )
    if model.d_attended > LARGEST_WIDTH:
        yield (
            f"{path}.n_head={model.n_head} heads of {path}.d_head={model.d_head} are {model.d_attended} wide together, above "
            f"the limit of {LARGEST_WIDTH}; lower one of them"
        )
    if model.n_kv_head is not None and (model.n_kv_head < 1 or model.n_head % model.n_kv_head):
        near = nearest_divisor(model.n_head, model.n_kv_head)
        yield (
            f"{path}.n_kv_head={model.n_kv_head} does not divide {path}.n_head={model.n_head}: equally many query heads share "
            f"each key/value head; try {path}.n_kv_head={near}"
        )
    if model.position == "rotary" and model.sequence_length * model.head_width > LARGEST_ROTARY_TABLE:
        yield (
            f"{path}.sequence_length={model.sequence_length} times the head width of {model.head_width} is "
            f"above the limit of {LARGEST_ROTARY_TABLE} for {path}.position=rotary; lower one of them"
        )
    if model.position == "rotary" and model.head_width % 2:
        width = "d_model / n_head" if model.d_head is None else f"{path}.d_head"
        wanted = f"needs an even head width, got {model.head_width}"
        yield f"{path}.position=rotary {wanted}; change {width}, or set {path}.position=learned"
    if model.lora_rank and "." in model.mlp:
        yield f"{path}.lora_rank={model.lora_rank} has no factors for {path}.mlp={model.mlp}; set {path}.lora_rank=0"
    scaling = model.rotary_scaling
    if scaling is not None and len(scaling) != 1 and (len(scaling) != 4 or not scaling[1] < scaling[2]):
        yield (
            f"{path}.rotary_scaling={list(scaling)} must be one number, [factor], or four, [factor, low, high, length] with low "
            f"below high, as in [8,1,4,8192] of Llama 3.1"
        )
    if model.position == "rotary" and 0 < model.rotary_share and model.n_rotated == 0:
        yield (
            f"{path}.rotary_share={model.rotary_share:g} of a head width of {model.head_width} is less than one pair of "
            f"numbers; the smallest share is {2 / model.head_width:g}; for no positions set {path}.position=none"
        )


def nearest_divisor(whole: int, wanted: int) -> int:
    return min((n for n in range(1, whole + 1) if whole % n == 0), key=lambda n: abs(n - wanted))


def check_attention(attention: schema.AttentionConfig, path: str) -> Iterator[str]:
    implementation = f"{path}.implementation={attention.implementation}"
    compatibility = f"{path}.compatibility={attention.compatibility}"
    is_additive = attention.compatibility == "additive"
    if attention.implementation.startswith("sdpa"):
        for key in ("score_softcap", "sink"):
            if getattr(attention, key):
                yield f"{implementation} does not compute {path}.{key}; use auto, native, triton, flex or reference"
    if attention.window == ():
        yield f"{path}.window=[] has no entry; write one for each layer, such as [64, 64, null], or {path}.window=null"
    if attention.qk_clip is not None:
        clip = f"{path}.qk_clip={attention.qk_clip:g}"
        if attention.score_softcap is not None:
            yield f"{clip} and {path}.score_softcap={attention.score_softcap:g} both limit the logits; leave one out"
        if attention.compatibility in ("cosine", "additive") or "." in attention.compatibility:
            yield f"{clip} scales queries and keys, which may not bound {compatibility}; set {path}.qk_clip=null"
        if attention.implementation not in MEASURES_HEADS:
            yield f"{clip} needs the largest logits, which {implementation} does not return; use auto, triton or reference"
    if is_additive and attention.implementation not in ("auto", "reference", "chunked"):
        yield f"{implementation} needs a dot product, which {compatibility} is not; use auto, chunked or reference"
    if not is_additive and attention.implementation == "chunked":
        yield f"{implementation} serves only {path}.compatibility=additive, got {attention.compatibility}; use auto"


def check_source(source: schema.SourceConfig | schema.DataConfig, path: str) -> Iterator[str]:
    if source.kind in ("text", "shards", "chat") and not source.path:
        yield f"{path}.path is missing: {path}.kind={source.kind} reads a file or a folder; set {path}.path=…"
    for key in ("include", "exclude", "field"):
        value = getattr(source, key)
        if value and source.kind not in ("text", "chat"):
            advice = f"set {path}.sources.NAME.{key}" if source.kind == "mixture" else f"leave {path}.{key} out"
            yield f"{path}.{key}={value} is read by data=text and data=chat, got {path}.kind={source.kind}; {advice}"


def check_data(data: schema.DataConfig, path: str) -> Iterator[str]:
    yield from check_source(data, path)
    if data.kind == "mixture" and not data.sources:
        example = "{code: {kind: pystdlib}, notes: {kind: text, path: notes/, weight: 0.3}}"
        yield f"{path}.sources is empty: a mixture names its sources, e.g. {path}.sources='{example}'"
    for name in data.sources:
        if "." in name:  # a resumed run could not read the dotted keys of its checkpoint
            yield f"{path}.sources has the name {name!r}: a name has no dot, which separates the parts of a key; rename it"
    if data.kind != "mixture" and data.sources:
        yield f"{path}.sources is read by data=mixture only, got data={data.kind}; choose data=mixture"


def check_tokenizer(tokenizer: schema.TokenizerConfig, path: str) -> Iterator[str]:
    if tokenizer.kind == "hf" and not tokenizer.path:
        yield f"{path}.path is missing: tokenizer=hf needs a tokenizer.json, or the folder that holds one"
    size = tokenizer.vocab_size
    if tokenizer.kind == "bpe" and size != "auto" and (size is None or not 257 <= size <= LARGEST_VOCABULARY):
        yield (
            f"{path}.vocab_size={'null' if size is None else size} is not allowed with tokenizer=bpe; allowed: auto, and "
            f"whole numbers from 257 (256 bytes and end-of-text) to {LARGEST_VOCABULARY}"
        )


def check_optimizer(optimizer: schema.OptimizerConfig, path: str) -> Iterator[str]:
    if (optimizer.tuned_d_model is None) != (optimizer.tuned_n_layer is None):
        yield (
            f"{path}.tuned_d_model={optimizer.tuned_d_model} and {path}.tuned_n_layer={optimizer.tuned_n_layer} belong "
            f"together: set both to the size of the model that the rates were tuned on, or both to null"
        )
    if optimizer.kind == "muon" and optimizer.matrix_learning_rate is None:
        yield f"{path}.matrix_learning_rate must be a number with optimizer=muon"
    if optimizer.kind != "muon" and optimizer.muon_rows != "none":
        yield f"{path}.muon_rows={optimizer.muon_rows} is read by optimizer=muon only; choose it, or set muon_rows=none"
    if optimizer.schedule == "constant_then_decay":
        if optimizer.decay_fraction is None:
            yield f"{path}.decay_fraction is missing: {path}.schedule=constant_then_decay needs a number in 0..1"
        else:
            Between(0, 1)(f"{path}.decay_fraction", optimizer.decay_fraction)


CONVERSATIONS = {"dpo": ("chat",), "grpo": ("chat", "python_chat")}  # objective -> kinds of data that it learns from


def check_objective(config: schema.RunConfig) -> Iterator[str]:
    kind, data, teachers = config.objective.kind, config.data, config.train.teachers
    if kind == "next_token":
        return
    kinds = {source.kind for source in data.sources.values()} if data.kind == "mixture" else {data.kind}
    if other := kinds - set(CONVERSATIONS[kind]):
        what = "pairs of a chosen and a rejected answer" if kind == "dpo" else "conversations"
        remedy = " or ".join(f"data={each}" for each in CONVERSATIONS[kind])
        yield f"objective={kind} learns from {what}, got data={min(other)}; set {remedy}"
    if not (config.init_from or config.resume):
        yield f"objective={kind} improves a model that answers already; set init_from=… to name it"
    if config.attention.across_documents:
        yield f"objective={kind} needs answers that do not see each other; set attention.across_documents=false"
    if kind == "dpo" and config.objective.beta == 0:
        yield "objective.beta=0 leaves objective=dpo nothing to learn; use a number above 0, such as 0.1"
    weights = {name: source.weight for name, source in data.sources.items() if source.weight is not None}
    if kind == "grpo" and weights:
        name = min(weights)
        yield (
            f"data.sources.{name}.weight={weights[name]:g} is not read by objective=grpo, which asks all prompts equally often; "
            f"leave it out"
        )
    if len(teachers) > config.objective.has_reference:
        taken = "one, its reference" if config.objective.has_reference else "none"
        yield (
            f"train.teachers has {len(teachers)} entries, but objective={kind} with objective.beta={config.objective.beta:g} "
            f"takes {taken}; leave train.teachers out"
        )


def check_run(config: schema.RunConfig, path: str) -> Iterator[str]:
    yield from check_objective(config)
    if config.attention.compatibility == "additive" and config.model.position == "rotary":
        yield "attention.compatibility=additive has no dot product to rotate; set model.position=learned, alibi or none"
    if config.attention.qk_clip is not None:
        clip = f"attention.qk_clip={config.attention.qk_clip:g}"
        if norm := config.model.qk_norm:
            yield (
                f"{clip} rescales queries and keys, which model.qk_norm={str(norm).lower()} normalises again; "
                f"set model.qk_norm=false or attention.qk_clip=null"
            )
        if rank := config.model.lora_rank:
            yield f"{clip} rescales what model.lora_rank={rank} freezes; set attention.qk_clip=null or model.lora_rank=0"
    train, length = config.train, config.model.sequence_length
    if train.tokens_per_parameter is not None and train.flops is not None:
        per_parameter = f"train.tokens_per_parameter={train.tokens_per_parameter:g}"
        yield f"{per_parameter} and train.flops={train.flops:g} both set the length of training; leave one out"
    per_step = f"train.tokens_per_step={config.tokens_per_step}"
    if config.tokens_per_step < length:
        yield f"{per_step} is less than one sequence of model.sequence_length={length}; raise it or lower the second"
    if config.tokens_per_step % length:
        near = max(1, round(config.tokens_per_step / length)) * length
        yield f"{per_step} is not a multiple of model.sequence_length={length}; try train.tokens_per_step={near}"


def check_sample(config: schema.SampleConfig, path: str) -> Iterator[str]:
    if config.max_new_tokens * config.num_samples > MOST_SAMPLED_TOKENS:
        yield (
            f"max_new_tokens={config.max_new_tokens} times num_samples={config.num_samples} is more than the "
            f"{MOST_SAMPLED_TOKENS} tokens that one command may hold; lower one of them"
        )
    if config.prompts is not None and (config.prompt or config.num_samples != 1 or config.interactive):
        yield "prompts=FILE writes one text for each line of the file; leave out prompt, num_samples and interactive"
    if config.out is not None and config.interactive:
        yield "out=FILE holds the texts of prompt or prompts; leave out interactive, or redirect its output: > FILE"
    has_other_form = config.prompts is not None or config.interactive or config.out is not None
    if config.chat and (has_other_form or config.num_samples > 1):
        yield "chat=true is a conversation in the terminal; leave out prompts, interactive, out and num_samples"
    if config.top_p == 0:
        yield "top_p=0 leaves no token to choose; use a number above 0, or temperature=0 for the likeliest token"
    if "" in config.stop:
        yield "stop='' is empty and would stop at once; give a text, or leave stop out"


def check_lens(config: schema.LensConfig, path: str) -> Iterator[str]:
    if not config.out.endswith((".html", ".npz")):
        yield f"out={config.out} must end in .html (a page) or .npz (arrays)"
    if config.against == "":
        yield "against is empty: it is the text to compare prompt with; write one, or leave against out"
    for name in ("against", "against_checkpoint"):
        if getattr(config, name) is not None and not config.out.endswith(".html"):
            yield f"{name}=… is a part of the page, but out={config.out} holds arrays only; set out=….html"


def check_compare(config: schema.CompareConfig, path: str) -> Iterator[str]:
    if not config.runs:
        yield "no run given; name runs, or a folder that contains runs, such as runs/"
    if not config.out.endswith(".html"):
        yield f"out={config.out} must end in .html: it is a page"
    if config.predict_tokens is not None and config.predict is None:
        yield "predict_tokens=… needs predict=…, the model size to predict; set it too, e.g. predict=andrea-480m"


def check_export(config: schema.ExportConfig, path: str) -> Iterator[str]:
    if config.dtype in ("q8_0", "q4_0") and config.to != "gguf":
        yield f"dtype={config.dtype} is a type of GGUF files, got to={config.to}; use f32, f16 or bf16, or set to=gguf"
    if config.to == "peft" and config.dtype != "f32":
        yield f"dtype={config.dtype}: an adapter is small and is written in f32; leave dtype out"
    if config.hub is not None and not HUB_NAME.fullmatch(config.hub):
        yield f"hub={config.hub} is no name of a repository; write OWNER/NAME, with letters, digits, '-', '_' and '.'"
    if not config.private and config.hub is None:
        yield "private=false says who may read an upload, but hub is not set; set hub=OWNER/NAME too"


CHECKS: dict[type, Callable[[Any, str], Iterator[str]]] = {
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
