"""The command `export`: a checkpoint in another program's format, proven by that program before it gets its name."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from andrea.checkpoint import Checkpoint, locate
from andrea.checkpoint.folder import removed_on_failure
from andrea.checkpoint.model import configs_of, load_model
from andrea.config import ExportConfig, UserError
from andrea.interop.card import card_of
from andrea.interop.compared_text import ComparedText, compared_text, read_text
from andrea.interop.gguf.target import Gguf
from andrea.interop.hub import not_uploaded, upload
from andrea.interop.hugging_face.target import HuggingFace
from andrea.interop.proof import MOST_TOKENS, Proof, prove
from andrea.interop.settings import Trained
from andrea.interop.target import OtherProgram, Target
from andrea.runtime.files import StorageFailed, publish_folder, reading, staging_path, storing
from andrea.runtime.own_parts import is_own

PROOF_FAILED = 1  # exit code


def export(config: ExportConfig) -> int:
    """Write config.out, and return the exit code: 1 if the other program computes something else, with nothing left."""
    checkpoint = locate(config.checkpoint, Path(config.runs_dir))
    folder = folder_of(config, checkpoint)
    text = Path(config.text).expanduser() if config.text else None
    read_text(text)  # raises before anything is computed
    trained = load_trained(checkpoint)
    target: Target = (HuggingFace if config.to == "hf" else Gguf)(trained, config.dtype)
    print(f"{checkpoint.path} becomes {target.what}: {target.why}")
    if not trained.attention.across_documents:
        print("attention.across_documents=false is not exported: the export equals the model on single documents")
    compared = compared_text(trained, text, Path(config.data_dir), MOST_TOKENS + 1)
    staging = staging_path(folder)
    with removed_on_failure(staging):
        with storing(folder, of_run=False):
            staging.mkdir(parents=True)
            target.write(staging)
        proof, reason = proof_of(trained, target, staging, compared)
        if proof is not None and proof.failures:
            return failed(proof, folder, staging)
        with storing(folder, of_run=False):
            card = card_of(trained, target, config.dtype, folder.name, config.hub, proof, reason)
            publish(staging, folder, proof.as_json() if proof else {"proven": False, "reason": reason}, card)
    report(folder, proof, reason)
    if config.hub is not None:
        if proof is None:
            raise not_uploaded(folder, f"it is not proven: {reason}", config.hub, config.private)
        print(upload(folder, config.hub, config.private, target.replaced))
    return 0


def failed(proof: Proof, folder: Path, staging: Path) -> int:
    """Remove the staging folder, say what is beyond tolerance, and return the exit code."""
    shutil.rmtree(staging)
    failures = "; ".join(proof.failures)
    message = f"{proof.program} computes something else: {failures}; {folder} was not written"
    print(f"error: {message}; please report this with the run's config.yaml", file=sys.stderr)
    return PROOF_FAILED


def publish(staging: Path, folder: Path, record: dict[str, Any], card: str) -> None:
    """Add proof.json and README.md to the staging folder, and give it its name. Raises OSError."""
    (staging / "proof.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (staging / "README.md").write_text(card, encoding="utf-8")
    publish_folder(staging, folder)


def folder_of(config: ExportConfig, checkpoint: Checkpoint) -> Path:
    """The folder to write. Raises UserError if it exists."""
    name = f"{name_of(checkpoint)}-{config.to}"
    folder = Path(config.out).expanduser() if config.out else Path(config.runs_dir) / name
    if os.path.lexists(folder):
        raise UserError(f"{folder} exists; remove it, or name another folder with out=…")
    return folder


def name_of(checkpoint: Checkpoint) -> str:
    """The name of the run, or of a checkpoint's folder outside a run."""
    path = checkpoint.path.resolve()
    return path.parents[1].name if path.parent.name == "checkpoints" else path.name


def load_trained(checkpoint: Checkpoint) -> Trained:
    """The checkpoint's model. Its attention is computed by the readable formula, which is the judge of other programs.

    Raises UserError for a model with a class of the user's own, before the class is imported.
    """
    model, attention = configs_of(checkpoint)
    for key, value in (("attention.compatibility", attention.compatibility), ("model.mlp", model.mlp)):
        if is_own(value):
            raise UserError(
                f"{key}={value} is a class of your own, whose code no other program has, so it cannot be exported; train with a "
                f"built-in one"
            )
    tokenizer = checkpoint.tokenizer()
    gpt = load_model(checkpoint, tokenizer)
    for block in gpt.blocks:
        block.attention.implementation = "reference"
    gpt.end_of_text = None  # other programs, like generation here, read a text as one document
    return Trained(name_of(checkpoint), checkpoint, gpt, attention, tokenizer)


def proof_of(trained: Trained, target: Target, folder: Path, text: ComparedText) -> tuple[Proof | None, str]:
    """The proof; or None, and the reason, if the package of the other program is missing or too old.

    Raises StorageFailed if that program cannot load what has just been written.
    """
    try:
        other = loaded_by(target, folder)
        with reading(folder):
            return prove(trained, target.rounded_gpt(), other, target.share, target.least, text), ""
    except ImportError as error:
        return None, f"{target.package} cannot be imported ({error}); run: pip install {target.package}"


def loaded_by(target: Target, folder: Path) -> OtherProgram:
    """The export, loaded by the other program, whose errors of a file that cannot be read are of any type."""
    try:
        return target.open(folder)
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        fault = str(error).strip().partition("\n")[0][:200]
        raise StorageFailed(
            f"{target.package} cannot load what was written for {folder}: {type(error).__name__}: {fault}",
            "check the disk, then try again; if it fails again, please report it with the run's config.yaml",
        ) from error


def report(folder: Path, proof: Proof | None, reason: str) -> None:
    if proof is None:
        print(f"{folder} was written, but is not proven: {reason}")
        return
    print(f"proven by {proof.program}, which loaded the folder again:")
    for line in proof.lines:
        print(f"  {line}")
    print(f"{folder} was written; its README.md has the commands to use it")
