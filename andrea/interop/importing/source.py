"""The files of a model in the layout of Hugging Face: config.json, safetensors, tokenizer.json. No code in them is ever run.

Pickles are not read, with one exception: nanoGPT's ckpt.pt, through torch's `weights_only=True`, which refuses all but
tensors and plain containers.
"""

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from andrea.checkpoint.tensors import MOST_DIMENSIONS, TensorReader
from andrea.config import UserError
from andrea.runtime.files import from_json, read_plain_file

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
LARGEST_JSON_BYTES = 1 << 26
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
COMPILED = "_orig_mod."  # in front of the names of a compiled model of nanoGPT
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors")
PATTERNS = ["*.json", "*.safetensors"]  # what is fetched from a hub: no code, no pickles


def folder_of(named: str) -> Path:
    """The folder that `named` means: a path, or the id of a model on Hugging Face's hub. Raises UserError."""
    path = Path(named).expanduser()
    if path.is_dir() or is_ckpt(path):
        return path
    if os.path.lexists(path):
        raise UserError(f"from={named} is not a folder; name the folder that holds {CONFIG}, or a ckpt.pt of nanoGPT")
    if not HUB_ID.fullmatch(named):
        raise UserError(
            f"from={named} does not exist; name a folder with {CONFIG}, or a model on the hub as OWNER/NAME"
        )
    return fetched(named)


def is_ckpt(path: Path) -> bool:
    """Whether it is a file of nanoGPT."""
    return path.is_file() and path.suffix == ".pt"


def files_of(folder: Path) -> list[Path]:
    """The files of a folder, or the file of nanoGPT."""
    return [folder] if is_ckpt(folder) else [path for path in folder.iterdir() if path.is_file()]


def fetched(hub_id: str) -> Path:
    """The folder of a model in the hub's cache on this machine, fetched first if it is not there. Raises UserError."""
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(
            f"from={hub_id} needs huggingface_hub; run: pip install huggingface_hub, or name a folder"
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=PATTERNS))
    except Exception as error:  # it has many: no network, no such model, a licence to accept
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(f"from={hub_id} is no folder, and cannot be fetched from the hub ({first:.200})") from None


def read_object(path: Path, hint: str) -> dict[str, Any]:
    """The content of a JSON file. hint: what to do if it cannot be read. Raises UserError."""
    try:
        content = from_json(read_plain_file(path, LARGEST_JSON_BYTES))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {hint}") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); copy it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged (it holds no object); copy it again")
    return content


def open_weights(folder: Path) -> TensorReader:
    """The safetensors of the folder: one file, or those that the index names. Raises UserError or Damaged."""
    paths = [folder / name for name in file_names(folder)]
    if odd := [path.name for path in paths if path.exists() and not path.is_file()]:
        raise UserError(f"{folder / odd[0]} is not a regular file (a folder, a device or a pipe); copy it again")
    if missing := [path.name for path in paths if not path.is_file()]:
        raise UserError(f"{folder} lacks {', '.join(missing[:3])}, which {INDEX} names; is the download complete?")
    reader = TensorReader(paths)
    if twice := [name for name, parts in reader.parts.items() if len(parts) > 1]:
        raise UserError(f"{folder} holds {twice[0]} in more than one file; copy it again")
    return reader


def file_names(folder: Path) -> list[str]:
    if (folder / INDEX).exists():
        places = read_object(folder / INDEX, "copy it again").get("weight_map")
        names = sorted({str(name) for name in places.values()}) if isinstance(places, dict) else []
        if not names or not all(map(FILE_NAME.fullmatch, names)):
            raise UserError(
                f"{folder / INDEX} is damaged: its weight_map must name files of this folder; copy it again"
            )
        return names
    if (folder / WEIGHTS).exists():
        return [WEIGHTS]
    pickles = sorted(path.name for path in [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if pickles:
        raise UserError(
            f"{folder} holds {pickles[0]}, a pickle, which could run code when it is read, and no safetensors; convert it where "
            f"you trust it: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)"
        )
    raise UserError(f"{folder} holds no weights: neither {WEIGHTS} nor {INDEX}; is the download complete?")


def tensors_of(reader: TensorReader) -> dict[str, Tensor]:
    """Every tensor by name. They stay in the file until they are read. Raises Damaged."""
    return {name: reader.read(name) for name in reader.names}


def read_ckpt(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """model_args and weights. Raises UserError, also for a file with anything but tensors and plain containers."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        arguments, weights = dict(content["model_args"]), dict(content["model"])
    except Exception as error:  # torch raises many kinds for a damaged file
        if type(error).__name__ == "UnpicklingError":
            raise UserError(
                f"{path} holds more than tensors and plain values, so reading it could run code; it was not read"
            ) from None
        raise UserError(
            f"{path} is no checkpoint of nanoGPT, or damaged ({type(error).__name__}); copy it again"
        ) from None
    if not all(isinstance(name, str) and isinstance(weight, Tensor) for name, weight in weights.items()):
        raise UserError(f"{path} is no checkpoint of nanoGPT: its `model` holds more than tensors; copy it again")
    for name, weight in weights.items():
        if not is_plain(weight):
            raise UserError(f"{path} is damaged: {name:.80} is not an array of finite numbers; copy it again")
    return arguments, {name.removeprefix(COMPILED): weight for name, weight in weights.items()}


def is_plain(weight: Tensor) -> bool:
    """Whether it is an array of finite numbers, all of which are in the file. Other kinds of tensors fail in their own ways."""
    if weight.is_nested or weight.layout != torch.strided or weight.dtype not in FLOATS or weight.device.type != "cpu":
        return False
    is_whole = 0 < weight.ndim <= MOST_DIMENSIONS and weight.nbytes <= weight.untyped_storage().nbytes()
    return is_whole and bool(weight.isfinite().all())
