"""The command `import`: another program's checkpoint as one of ours, compared with that program before it gets its name."""

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from andrea.checkpoint import read_checkpoint
from andrea.checkpoint.folder import write_weights
from andrea.config import ImportConfig, UserError, to_plain
from andrea.interop.adapters import base_of, is_adapter, with_adapter
from andrea.interop.architectures import GPT2_NAMES, TOLERANCE
from andrea.interop.export import PROOF_FAILED, load_trained, publish
from andrea.interop.hugging_face.target import LoadedByTransformers
from andrea.interop.importing.config_json import Settings, under_our_names, with_zero_biases
from andrea.interop.importing.families import Configs, family_of, nanogpt_configs, nanogpt_weights
from andrea.interop.importing.source import (
    CONFIG,
    files_of,
    folder_of,
    is_ckpt,
    open_weights,
    read_ckpt,
    read_object,
    tensors_of,
)
from andrea.interop.proof import MOST_TOKENS, compared_text, prove, read_text
from andrea.runtime.files import exclusive_lock, remove_unfinished, staging_path, storing
from andrea.runtime.own_process import in_own_process
from andrea.runtime.program import typed_command, typed_words
from andrea.text.chat import without_special
from andrea.text.load_tokenizer import foreign_library, load_gpt2, load_hf_tokenizer
from andrea.text.tokenizer import Tokenizer

# -------------------------------------------------------------------------------------------------------------- program
# transformers as the other program of an import's proof: its own class, with the settings and weights of the source folder.

REFUSED = "transformers refuses the model"


@final
class ImportedByTransformers(LoadedByTransformers):
    """A model of transformers' own class or of ours, and the tokenizer.

    transformers gets values and tensors, never the folder: nothing in a folder can name code that runs, and no
    generation_config.json changes which token is chosen.

    settings: of config.json that may change what the model computes, with model_type. weights: as in the folder.
    """

    def __init__(self, settings: Mapping[str, Any], weights: Mapping[str, Tensor], tokenizer: Tokenizer) -> None:
        super().__init__()
        values = dict(settings)
        self.end_of_text = tokenizer.end_of_text
        with foreign_library(REFUSED):
            kind, config = self.class_and_config(values.pop("model_type"), values)
            self.model = kind.from_pretrained(None, config=config, state_dict=dict(weights), **self.LOADING).eval()
            self.model.generation_config = self.transformers.GenerationConfig()
            self.tokenizer = self.transformers.PreTrainedTokenizerFast(
                tokenizer_object=without_special(tokenizer).library
            )

    def class_and_config(self, model_type: str, values: Mapping[str, Any]) -> tuple[Any, Any]:
        if model_type == "andrea":
            from andrea.interop.hugging_face.modeling_andrea import AndreaConfig, AndreaForCausalLM

            return AndreaForCausalLM, AndreaConfig(**values)
        config = self.transformers.AutoConfig.for_model(model_type, **values)
        for alias, key in config.attribute_map.items():
            if alias in values and values[alias] != values.get(key):
                raise UserError(
                    f"{alias}={values[alias]!r:.60} and {key}={values.get(key)!r:.60} of config.json are one setting; copy it again"
                )
        with torch.device("meta"):
            return type(self.transformers.AutoModelForCausalLM.from_config(config)), config

    def logits(self, tokens: Sequence[int]) -> Tensor:
        with foreign_library(REFUSED):
            return super().logits(tokens)

    def greedy(self, tokens: Sequence[int], n_new: int) -> list[int]:
        with foreign_library(REFUSED):
            return super().greedy(tokens, n_new)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """With end-of-text in front, which some models have in front of every text, and others between texts."""
        with foreign_library(REFUSED):
            found = self.tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [[self.end_of_text, *ids] for ids in found]


# ---------------------------------------------------------------------------------------------------------- the command

LEAST_TOLERANCE = 1e-5  # of logits
# What reading a folder and proving it may take, far above what sound ones need: two cores take 30 s for SmolLM2-135M.
LEAST_BUSY_S, BUSY_S_PER_BYTE = 60.0, 1e-5
LEAST_MEMORY_BYTES, MEMORY_BY_FILES = 1 << 32, 16


def import_model(config: ImportConfig) -> int:
    """Write config.out, and return the exit code: 1 if the other program computes something else, with nothing left."""
    if config.source is None:
        raise UserError("from=… is missing; name the folder of a model, or its id on Hugging Face's hub (OWNER/NAME)")
    folder = folder_of(config.source)
    name = name_of(folder, config.source)
    out = Path(config.out).expanduser() if config.out else Path(config.runs_dir) / f"{name}-imported"
    if os.path.lexists(out):
        raise UserError(f"{out} exists; remove it, or name another folder with out=…")
    text = Path(config.text).expanduser() if config.text else None
    read_text(text)  # raises before anything is computed
    staging = staging_path(out)  # holds all that a process writes that may be killed
    try:
        made = staging / "checkpoint"
        unknown, record = within_limits(folder, written_and_proven, folder, made, config.source, name, text)
        if record["proven"] is False and "failures" in record:
            print(
                f"error: transformers computes something else: {'; '.join(record['failures'])}; {out} was not written; please "
                f"report this with the model's config.json",
                file=sys.stderr,
            )
            return PROOF_FAILED
        if unknown and not record["proven"]:
            raise UserError(f"{in_words(unknown)}, and nothing shows what it changes; run: pip install transformers")
        with storing(out, of_run=False):
            publish(made, out, record)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    print(f"{out} was written; next: {typed_command('sample')} {typed_words(checkpoint=out)}")
    return 0


def within_limits(folder: Path, function: Callable[..., Any], *given: Any) -> Any:
    """The function, which reads the folder, in a process of its own, with time and memory by the size of the folder's files."""
    n_byte = sum(path.stat().st_size for path in files_with_base(folder))
    busy_s, more_bytes = LEAST_BUSY_S + BUSY_S_PER_BYTE * n_byte, LEAST_MEMORY_BYTES + MEMORY_BY_FILES * n_byte
    return in_own_process(str(folder), function, *given, busy_s=busy_s, more_bytes=more_bytes)


def files_with_base(folder: Path) -> list[Path]:
    """The files of the folder and, of an adapter, those of its base. Raises UserError."""
    return files_of(folder) + (files_of(base_of(folder)) if is_adapter(folder) else [])


def weights_in(folder: Path) -> dict[str, Tensor]:
    """Every weight by its name in the folder; of an adapter, those of its base with the adapter in them."""
    if is_adapter(folder):
        return with_adapter(tensors_of(open_weights(base_of(folder))), folder)
    return tensors_of(open_weights(folder))


def written_and_proven(
    folder: Path, staging: Path, named: str, name: str, text: Path | None
) -> tuple[list[str], dict[str, Any]]:
    """The keys of config.json that are not known here, and the record of the proof."""
    settings, unknown = write_imported(folder, staging, named, name)
    return unknown, proof_of(folder, settings, staging, text)


def imported_if_foreign(named: Any, data_dir: Any) -> Any:
    """init_from=…: if it names a model of Hugging Face's layout, the checkpoint that it becomes; else `named` itself.

    The checkpoint is kept in data_dir/imported, and made again if the source's files have changed. It is not proven: the
    command `import` does that. Raises UserError, also for settings that only a proof could show to be harmless.
    """
    folder = Path(str(named)).expanduser()
    is_foreign = is_ckpt(folder) or (folder / CONFIG).is_file() or is_adapter(folder)
    if not is_foreign or (folder / "manifest.json").exists():
        return named
    stamps = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files_with_base(folder))
    about = hashlib.sha256(f"{folder.resolve()} {stamps}".encode()).hexdigest()[:12]
    name = name_of(folder, str(named))
    place = Path(str(data_dir)).expanduser() / "imported"
    with storing(place, of_run=False):
        place.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(
            place / "lock", on_wait=lambda: print(f"waiting for another process that imports into {place}")
        ):
            out = place / f"{name}-{about}"
            try:
                if not out.exists():
                    within_limits(folder, write_imported, folder, out, str(named), name, False)
            finally:
                remove_unfinished(place)  # of a process that was killed
    return str(out)


def in_words(unknown: list[str]) -> str:
    """unknown: keys of config.json."""
    return f"config.json has settings that are not known here ({', '.join(unknown):.200})"


def write_imported(
    folder: Path, out: Path, named: str, name: str, with_unknown: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """Write the folder's model as a checkpoint without training state. Raises UserError, Damaged or StorageFailed.

    Returns the settings of config.json that may change what the model computes, and the keys among them that are not known
    here: the checkpoint may compute something else, unless it is proven.
    with_unknown: if False, such keys are refused before anything is written.
    """
    if is_ckpt(folder):
        write_nanogpt(folder, out, named, name)
        return {}, []
    place = base_of(folder) if is_adapter(folder) else folder
    settings = Settings(read_object(place / CONFIG, "is this the folder of a model of transformers?"))
    family = family_of(settings)
    model, attention = family.configs(settings, name)
    n_vocab = settings.get("vocab_size")
    if type(n_vocab) is not int or n_vocab < 1:
        raise UserError(f"vocab_size={n_vocab!r:.60} of config.json is not a number of tokens; copy it again")
    tokenizer = load_hf_tokenizer(place, n_vocab)
    reader = open_weights(place)
    check_layers(place, model.n_layer, len(reader.names))
    unbiased, unknown = family.unbiased(settings), settings.unknown()  # in this order: the first asks for keys
    if unknown and not with_unknown:
        raise UserError(
            f"{in_words(unknown)}; import the model first, which compares it with transformers: "
            f"{typed_command('import')} {typed_words(**{'from': named})}"
        )
    theirs = family.weights(with_zero_biases(weights_in(folder), unbiased), model)
    weights = under_our_names(theirs, family.names, model, attention, n_vocab)
    write_converted(out, named, settings["model_type"], (model, attention), weights, tokenizer)
    return settings.effective(), unknown


def check_layers(source: Path, n_layer: int, n_weight: int) -> None:
    """Raises UserError for more layers than weights, before so many layers are built."""
    if n_layer > n_weight:
        raise UserError(f"{source} holds {n_weight} weights, too few for its {n_layer} layers; copy it again")


def write_nanogpt(path: Path, out: Path, named: str, name: str) -> None:
    """Write nanoGPT's checkpoint as ours. Raises UserError or StorageFailed."""
    arguments, theirs = read_ckpt(path)
    model, attention = nanogpt_configs(arguments, name)
    check_layers(path, model.n_layer, len(theirs))
    tokenizer = load_gpt2(None)
    weights = under_our_names(nanogpt_weights(theirs, model), GPT2_NAMES, model, attention, tokenizer.n_vocab)
    write_converted(out, named, "nanogpt", (model, attention), weights, tokenizer)


def write_converted(
    out: Path, named: str, kind: str, configs: Configs, weights: dict[str, Tensor], tokenizer: Tokenizer
) -> None:
    """Write weights under our names as a checkpoint in fp32. kind: of the model, for people. Raises StorageFailed."""
    n_parameter = sum(weight.numel() for weight in weights.values())
    print(f"{named}: {kind}, {n_parameter:,} parameters, tokenizer {tokenizer.identity}")
    state = {
        "step": 0,
        "tokens": 0,
        "config": {"model": to_plain(configs[0]), "attention": to_plain(configs[1])},
        "imported_from": {"source": named, "model_type": kind},
    }
    write_weights(out, state, {name: weight.to(torch.float32) for name, weight in weights.items()}, tokenizer)


def proof_of(folder: Path, settings: dict[str, Any], imported: Path, text: Path | None) -> dict[str, Any]:
    """What transformers computes for the same text with the folder's settings and weights, as a record for people and programs."""
    if is_ckpt(folder):
        print(
            "not proven: transformers does not read files of nanoGPT; an export of the new checkpoint is proven (to=hf)"
        )
        return {"proven": False, "reason": "transformers does not read files of nanoGPT"}
    trained = load_trained(read_checkpoint(imported))
    try:
        other = ImportedByTransformers(settings, weights_in(folder), trained.tokenizer)
    except ImportError as error:
        print(f"not proven: transformers cannot be imported ({error}); run: pip install transformers")
        return {"proven": False, "reason": f"transformers cannot be imported ({error})"}
    compared = compared_text(trained, text, Path("data"), MOST_TOKENS + 1)
    proof = prove(trained, trained.gpt, other, TOLERANCE, LEAST_TOLERANCE, compared)
    if proof.failures:
        return proof.as_json() | {"failures": proof.failures}
    print(f"proven by {proof.program}, with the same settings and weights:")
    for line in proof.lines:
        print(f"  {line}")
    return proof.as_json()


def name_of(folder: Path, named: str) -> str:
    """The model's name: its name on the hub, or the source folder's."""
    path = folder.resolve()
    is_path = Path(named).expanduser().exists()
    last = named.rpartition("/")[2] if not is_path else path.stem if is_ckpt(path) else path.name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip(".-") or "imported"
