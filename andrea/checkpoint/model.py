"""A GPT from a checkpoint, for inference."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from andrea.checkpoint.find_and_prune import locate
from andrea.checkpoint.folder import Checkpoint
from andrea.checkpoint.tensors import Damaged
from andrea.config import AttentionConfig, ModelConfig, UserError, parse
from andrea.model.gpt import GPT
from andrea.model.lora import A, B, is_factor, merged_weight
from andrea.runtime.user_classes import allowing, is_own, source_sha256
from andrea.text.tokenizer import Tokenizer

WEIGHT_TYPES = {"F32", "BF16", "F16", "F64"}  # as safetensors calls them
VOCABULARY_ROWS = ("embedding.weight", "head.weight", "value_embedding.table.weight")  # one row for each token
N_PORTION = 8  # a reader keeps the pages of its files in memory, and is closed after each such share of the weights


def open_model(
    requested: str | None,
    runs_dir: str,
    device: torch.device,
    trust: bool,
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> tuple[Checkpoint, GPT, Tokenizer]:
    """The model that a user names, for use on `device`. requested, report: see `locate`. Raises UserError or Damaged.

    trust: the classes of their own that the checkpoint names may be imported, which runs their code.
    """
    checkpoint = locate(requested, Path(runs_dir), report=report)
    tokenizer = checkpoint.tokenizer()
    with allowing((), trust):
        model = load_model(checkpoint, tokenizer).to(device)
    for block in model.blocks:
        block.attention.implementation = "auto"  # this device may lack the implementation that trained the model
    return checkpoint, model, tokenizer


def load_model(checkpoint: Checkpoint, tokenizer: Tokenizer) -> GPT:
    """The checkpoint's model in fp32 on the CPU, in evaluation mode and without gradients. Factors of LoRA are merged.

    Raises Damaged when configuration, weights and tokenizer disagree. Memory for the model is allocated only after the
    names and shapes of all weights have been compared.
    If the source file of a user's own class has changed since the training, a line on standard error says so.
    """
    model_config, attention_config = configs_of(checkpoint)
    reader, stored = checkpoint.open_results()
    in_files = reader.shapes
    shapes = {name: in_files[place] for name, place in stored.items()}
    check_shapes(checkpoint, shapes, tokenizer, model_config, attention_config)
    for name, place in stored.items():
        if wrong := reader.dtypes(place) - WEIGHT_TYPES:
            raise Damaged(f"{checkpoint.path} is damaged: {name} has type {min(wrong)}, which weights cannot have")
    plain = dataclasses.replace(model_config, lora_rank=0)
    model = GPT(plain, attention_config, tokenizer.n_vocab, tokenizer.end_of_text)  # its buffers are computed
    load_final_weights(model, checkpoint)
    for change in changed_own_parts(checkpoint, model_config, attention_config):
        print(f"changed since training: {change}", file=sys.stderr)
    return model.eval().requires_grad_(False)


def load_final_weights(model: GPT, checkpoint: Checkpoint, merged: bool = True, n_added: int = 0) -> None:
    """Copy the weights that are the result of the checkpoint's run into the model.

    merged: factors of LoRA in the checkpoint are added to their matrices. The model's own factors stay as they are.
    n_added: tokens that the model has in addition, at the end of its vocabulary; their rows become the mean of the others.
    Raises Damaged, or RuntimeError if names or shapes are not the model's.
    """
    reader, stored = checkpoint.open_results()
    in_files = reader.shapes
    weights = {name: weight for name, weight in model.state_dict().items() if not is_factor(name)}
    found = {name: in_files[place] for name, place in stored.items() if not is_factor(name)}
    expected = {name: tuple(weight.shape) for name, weight in weights.items()}
    if n_added:
        rows = {name: shape[0] for name, shape in found.items() if name.endswith(VOCABULARY_ROWS)}
        found |= {name: (n_row + n_added, *found[name][1:]) for name, n_row in rows.items()}
    if found != expected:
        differ = found.items() ^ expected.items()
        raise RuntimeError(f"the weights of {checkpoint.path} differ from the model's: {differ}")
    most, n_read = sum(map(torch.numel, weights.values())) / N_PORTION, 0
    for name in found:
        n_read += weights[name].numel()
        if n_read > most:
            (reader, _), n_read = checkpoint.open_results(), weights[name].numel()
        weight, layer = reader.read(stored[name]), name.removesuffix(".weight")
        if merged and layer + A in stored:
            weight = merged_weight(weight, *(reader.read(stored[layer + factor]) for factor in (A, B)))
        if n_added and name in rows:
            weights[name][: rows[name]].copy_(weight)
            weights[name][rows[name] :] = weight.float().mean(0)
        else:
            weights[name].copy_(weight)


def configs_of(checkpoint: Checkpoint) -> tuple[ModelConfig, AttentionConfig]:
    """The configuration of the model and of its attention. Raises Damaged if this version cannot read them."""
    config = checkpoint.state["config"]
    try:
        return (
            parse(ModelConfig, config.get("model"), "model"),
            parse(AttentionConfig, config.get("attention"), "attention"),
        )
    except UserError as error:
        raise Damaged(f"{checkpoint.path} has a configuration that this version cannot read: {error}") from None


def check_shapes(
    checkpoint: Checkpoint,
    found: dict[str, tuple[int, ...]],
    tokenizer: Tokenizer,
    model_config: ModelConfig,
    attention_config: AttentionConfig,
) -> GPT:
    """Raises Damaged if the tokenizer, or the weights' names and shapes, differ from the configured model's.

    found: the shape of each weight in the checkpoint. Returns the model on the meta device: no memory is allocated.
    """
    written = checkpoint.state.get("tokenizer", tokenizer.identity)
    if written != tokenizer.identity:
        raise Damaged(f"{checkpoint.path} was trained with tokenizer {written}, not with its {tokenizer.identity}")
    if model_config.n_layer > len(found):  # checked before so many layers are built
        raise Damaged(f"{checkpoint.path} has {len(found)} tensors, too few for model.n_layer={model_config.n_layer}")
    with torch.device("meta"):
        model = GPT(model_config, attention_config, tokenizer.n_vocab, tokenizer.end_of_text)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise Damaged(
                f"{checkpoint.path} does not fit its configuration and its tokenizer {tokenizer.identity}: {name} is "
                f"{found.get(name, 'absent')} in the file, {expected.get(name, 'absent')} in the model"
            )
    return model


def own_parts(model: ModelConfig, attention: AttentionConfig) -> dict[str, str | None]:
    """The user's own classes: dotted path -> sha256 of the source file; None without a source file."""
    named = {"attention.compatibility": attention.compatibility, "model.mlp": model.mlp}
    return {path: source_sha256(key, path) for key, path in named.items() if is_own(path)}


def changed_own_parts(checkpoint: Checkpoint, model: ModelConfig, attention: AttentionConfig) -> list[str]:
    """One line for each of the user's own classes whose source file has changed since the checkpoint was written."""
    before, now = checkpoint.state.get("own_parts", {}), own_parts(model, attention)
    return [
        f"{path}: its source file (sha256 {str(before[path])[:12]} → {str(sha256)[:12]})"
        for path, sha256 in now.items()
        if path in before and before[path] != sha256
    ]
