"""PEFT's files of a LoRA adapter: `export to=peft` writes them, `import` and init_from read them over their base.

    adapter_config.json          rank, alpha, the modules, the name of the base
    adapter_model.safetensors    base_model.model.MODULE.lora_A.weight (r, n_in), MODULE.lora_B.weight (n_out, r)

MODULE is a module's name in the class of transformers. An adapter becomes part of the base's weights as it is read. Nothing of
a folder is executed, and nothing is fetched: only a base that lies on this machine is found.
"""

import copy
import dataclasses
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from andrea.checkpoint import Checkpoint
from andrea.checkpoint.folder import model_name, read_small_json
from andrea.checkpoint.model import load_final_weights
from andrea.checkpoint.tensors import TensorReader, write_tensors
from andrea.config import UserError, readable_path
from andrea.interop.architectures import TOLERANCE, Trained, renamed, repeated
from andrea.interop.hugging_face.target import HuggingFace, Transformers, quoted, write_json
from andrea.interop.importing.families import TRANSPOSED
from andrea.interop.importing.source import CONFIG, INDEX, WEIGHTS, read_object
from andrea.interop.proof import OtherProgram, Target
from andrea.model.lora import ALPHA, A, B
from andrea.runtime.program import typed_command, typed_words

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_RESUMED = 100  # runs, each of which goes on from another: against a circle
PREFIX, OF_A, OF_B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"

# ----------------------------------------------------------------------------------------------------------- the export

USAGE = """\
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = {base}  # the export of the model that was tuned: python -m andrea export checkpoint=… to=hf
    tokenizer = AutoTokenizer.from_pretrained(base{trust})
    model = AutoModelForCausalLM.from_pretrained(base{trust})
    model = PeftModel.from_pretrained(model, {folder})
    tokens = tokenizer("{prompt}", return_tensors="pt")
    print(tokenizer.decode(model.generate(**tokens, max_new_tokens=64, do_sample=True, temperature=0.8)[0]))
"""


@final
class Peft(Target):
    """The factors of a run with model.lora_rank, in fp32. PEFT proves them on an export of the base, made for the proof."""

    package = "peft"

    def __init__(self, trained: Trained, dtype: str) -> None:
        """dtype: f32. Raises UserError for a model without factors, and for one that trained more than factors."""
        reader, stored = trained.checkpoint.open_results()
        places = [name.removesuffix(A) for name in stored if name.endswith(A)]
        if not places:
            raise UserError(
                "to=peft writes the factors of a run with model.lora_rank, and this one has none; use to=hf"
            )
        if any(name.startswith("embedding.weight/") for name in reader.names):
            raise UserError("to=peft: the run also trained the embedding, which factors do not hold; use to=hf")
        self.layers = {place: (reader.read(stored[place + A]), reader.read(stored[place + B])) for place in places}
        gpt = copy.deepcopy(trained.gpt)
        load_final_weights(gpt, trained.checkpoint, merged=False)
        self.trained, self.base = trained, HuggingFace(dataclasses.replace(trained, gpt=gpt), dtype)
        self.base_name = base_name(trained.checkpoint)
        self.what, self.why, self.share = f"PEFT's adapter of {self.base.chosen.name}", self.base.why, TOLERANCE

    def write(self, folder: Path) -> None:
        is_gpt2 = self.base.chosen.model_type == "gpt2"
        layers = joined_factors(self.trained, self.layers) if is_gpt2 else self.layers
        rank = len(next(iter(self.layers.values()))[0])
        weights, patterns = {}, {}
        for layer, (a, b) in layers.items():
            module = renamed(f"{layer}.", self.base.chosen.names).removesuffix(".")
            weights |= {f"{PREFIX}{module}{OF_A}": a, f"{PREFIX}{module}{OF_B}": b}
            patterns[module.rpartition(".")[2]] = len(a)
        write_tensors(folder / ADAPTER_WEIGHTS, weights, {"format": "pt"})
        others = {module: own for module, own in patterns.items() if own != rank}
        content = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_name,
            "r": rank,
            "lora_alpha": ALPHA,
            "rank_pattern": others,
            "alpha_pattern": {module: ALPHA * own / rank for module, own in others.items()},
            "target_modules": sorted(patterns),
            "fan_in_fan_out": is_gpt2,
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": True,
        }
        write_json(folder / ADAPTER_CONFIG, content)
        os.chmod(folder / ADAPTER_WEIGHTS, (folder / ADAPTER_CONFIG).stat().st_mode)

    def open(self, folder: Path) -> OtherProgram:
        import peft

        with tempfile.TemporaryDirectory(prefix="andrea-base-") as place, warnings.catch_warnings():
            self.base.write(Path(place))
            program = Transformers(Path(place))
            warnings.simplefilter("ignore", FutureWarning)  # of names that PEFT uses of transformers
            program.model = peft.PeftModel.from_pretrained(program.model, folder).eval()
        program.name = f"peft {peft.__version__} with {program.name}"
        return program

    def usage(self, folder: str, hub: str | None, prompt: str) -> str:
        trust = ", trust_remote_code=True" if self.base.chosen.is_remote else ""
        return USAGE.format(folder=quoted(hub or folder), base=quoted(self.base_name), trust=trust, prompt=prompt)


def joined_factors(trained: Trained, layers: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    """The factors for GPT-2, whose queries, keys and values are one matrix: three ranks below each other, B in three blocks."""
    joined = dict(layers)
    for layer in range(trained.model.n_layer):
        place = f"blocks.{layer}.attention"
        three = [joined.pop(f"{place}.{each}") for each in ("query", "key", "value")]
        b = [three[0][1], *(repeated(rows, trained.model) for _, rows in three[1:])]
        joined[f"{place}.joined"] = torch.cat([a for a, _ in three]), torch.block_diag(*b)
    return joined


def base_name(checkpoint: Checkpoint) -> str:
    """The name that `export to=hf` gives the base by default. run.json of the run's folder names the base, or the checkpoint of
    another run that this one goes on from."""
    named, place = "base", checkpoint.path
    with suppress(OSError, ValueError, LookupError, TypeError):
        for _ in range(MOST_RESUMED):
            about = read_small_json(place.resolve().parent.parent / "run.json")
            if "init_from" in about:
                named = str(about["init_from"])
                break
            place = Path(about["resume"])
    return f"{model_name(Path(named))}-hf"


# ----------------------------------------------------------------------------------------------------------- the import

MOST_RANK, MOST_ALPHA = 1 << 16, 1e6  # against absurd values
PLAIN_NAME = re.compile(r"[\w.]+")  # PEFT also takes regular expressions, which are not run here
# Keys of adapter_config.json that are read here, or that change nothing of what a finished adapter computes.
READ = frozenset("base_model_name_or_path r lora_alpha use_rslora rank_pattern alpha_pattern".split())
INERT = frozenset(
    """
    auto_mapping ensure_weight_tying exclude_modules fan_in_fan_out inference_mode layers_pattern layers_to_transform loftq_config
    lora_dropout megatron_core modules_to_save peft_version qalora_group_size revision runtime_config target_modules
    """.split()
)
DEMANDED = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),  # others change the base
}


def refused(key: str, value: Any) -> UserError:
    return UserError(f"{key:.60}={value!r:.60} of {ADAPTER_CONFIG} has no counterpart here")


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds an adapter, and no model of its own."""
    has_model = (folder / WEIGHTS).exists() or (folder / INDEX).exists()
    return folder.is_dir() and os.path.lexists(folder / ADAPTER_CONFIG) and not has_model


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The content of adapter_config.json. Raises UserError for what has no counterpart here."""
    config = read_object(folder / ADAPTER_CONFIG, "copy it again")
    for key, allowed in DEMANDED.items():
        value = config.get(key, allowed[0])
        if isinstance(value, (list, dict)) or value not in allowed:
            raise refused(key, value)
    for key in sorted(config.keys() - READ - INERT - DEMANDED.keys()):
        if config[key]:
            raise refused(key, config[key])
    return config


def base_of(folder: Path) -> Path:
    """The folder of the adapter's base: the path in adapter_config.json, or such a name beside the adapter. Raises UserError."""
    named = read_adapter_config(folder).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise refused("base_model_name_or_path", named)
    path = Path(readable_path("base_model_name_or_path", named)).expanduser()
    found = next((each for each in (path, folder.resolve().parent / path.name) if (each / CONFIG).is_file()), None)
    if found is None or is_adapter(found):
        ours = named.removesuffix("-hf")  # of `base_name`
        imported = Path("data", "imported", ours)  # by init_from=FOLDER
        makes = f"{typed_command('export')} {typed_words(checkpoint=imported if imported.exists() else ours)}"
        fetches = f"hf download {named} --local-dir {named}"
        raise UserError(
            f"base_model_name_or_path={named} of {folder / ADAPTER_CONFIG} is not the folder of a model; write the path of the "
            f"base's export there, or {f'make it: {makes}' if ours != named and '/' not in named else f'fetch it: {fetches}'}"
        )
    return found


def with_adapter(theirs: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The base's weights by their names there, with the adapter in them, in fp32 where it changes them.

    Raises UserError or Damaged.
    """
    config, weights, changed = read_adapter_config(folder), dict(theirs), set()
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        why = "the file is missing"
        if (folder / "adapter_model.bin").exists():
            why = "adapter_model.bin is a pickle, which could run code when it is read; save it with safe_serialization=True"
        raise UserError(f"{path} cannot be read: {why}")
    reader = TensorReader([path])
    for name in reader.names:
        module = name.removeprefix(PREFIX).removesuffix(OF_A).removesuffix(OF_B)
        if name.endswith(OF_B) and name.removesuffix(OF_B) + OF_A in reader.parts:
            continue
        is_a = name.endswith(OF_A) and name.removesuffix(OF_A) + OF_B in reader.parts
        target = f"{module}.weight" if is_a else module
        target = target if target in weights else target.removeprefix("transformer.")  # old files of GPT-2
        is_known = name.startswith(PREFIX) and (is_a or "lora" not in name)
        if not is_known or target not in weights or target in changed:
            raise UserError(f"{path} holds {name:.80}, which has no counterpart in the base")
        added = change(config, module, reader, name, target) if is_a else reader.read(name).float()
        if added.shape != weights[target].shape:
            raise UserError(
                f"{name:.80} makes a change of {tuple(added.shape)}, but the base's {target:.80} is {tuple(weights[target].shape)}"
            )
        weights[target] = weights[target].float() + added if is_a else added
        changed.add(target)
        if not bool(weights[target].isfinite().all()):
            raise UserError(f"{path}: with {name:.80} the weights are not finite; copy it again")
    return weights


def change(config: dict[str, Any], module: str, reader: TensorReader, name: str, target: str) -> Tensor:
    """scale · B A in the layout of the weight `target`. name: of A in the file. Raises UserError."""
    a, b = reader.read(name).float(), reader.read(name.removesuffix(OF_A) + OF_B).float()
    rank = int(number(config, "r", "rank_pattern", module, MOST_RANK))
    if a.ndim != 2 or b.ndim != 2 or len(a) != rank or b.shape[1] != rank:
        raise UserError(
            f"{name:.80} is {tuple(a.shape)}, and its B {tuple(b.shape)}, but {ADAPTER_CONFIG} says rank {rank}; copy both again"
        )
    alpha = number(config, "lora_alpha", "alpha_pattern", module, MOST_ALPHA)
    # rsLoRA: Kalajdzievski 2023, arXiv 2312.03732
    product = alpha / (rank**0.5 if config.get("use_rslora") else rank) * (b @ a)
    return product.T if target.endswith(TRANSPOSED) else product


def number(config: dict[str, Any], key: str, pattern: str, module: str, most: float) -> float:
    """config[key], or what config[pattern] has for the module: the first name in it that ends the module's."""
    patterns = config.get(pattern) or {}
    if not isinstance(patterns, dict) or not all(map(PLAIN_NAME.fullmatch, patterns)):
        raise refused(pattern, patterns)
    own = next((value for name, value in patterns.items() if f".{module}".endswith(f".{name}")), config.get(key))
    is_whole = key != "r" or type(own) is int
    if type(own) not in (int, float) or not is_whole or not 0 < own <= most:
        raise refused(key, own)
    return own
