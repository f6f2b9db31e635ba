"""The command `export`: a checkpoint in another program's format, proven by that program before it gets its name.

With the model card, and the upload to Hugging Face's hub.
"""

import html
import os
import re
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from andrea.checkpoint import Checkpoint, locate
from andrea.checkpoint.folder import model_name, removed_on_failure
from andrea.checkpoint.model import configs_of, load_model
from andrea.config import ExportConfig, UserError, as_typed, to_plain
from andrea.interop.adapters import Peft
from andrea.interop.architectures import Trained
from andrea.interop.gguf import Gguf
from andrea.interop.hugging_face.target import HuggingFace, write_json
from andrea.interop.proof import MOST_TOKENS, ComparedText, Proof, Target, compared_text, prove, read_text
from andrea.runtime.files import StorageFailed, publish_folder, reading, staging_path, storing
from andrea.runtime.user_classes import is_own

PROOF_FAILED = 1  # exit code
TARGETS: dict[str, type[Target]] = {"hf": HuggingFace, "gguf": Gguf, "peft": Peft}


def export(config: ExportConfig) -> int:
    """Write config.out, and return the exit code: 1 if the other program computes something else, with nothing left."""
    checkpoint = locate(config.checkpoint, Path(config.runs_dir))
    folder = folder_of(config, checkpoint)
    text = Path(config.text).expanduser() if config.text else None
    read_text(text)  # raises before anything is computed
    if config.hub is not None:
        with suppress(ImportError):  # `upload` says so
            # This module reads HF_HUB_OFFLINE when it is imported, and the proof will set the variable.
            import huggingface_hub.constants  # noqa: F401
    trained = load_trained(checkpoint)
    target: Target = TARGETS[config.to](trained, config.dtype)
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
            shutil.rmtree(staging)
            message = f"{proof.program} computes something else: {'; '.join(proof.failures)}; {folder} was not written"
            print(f"error: {message}; please report this with the run's config.yaml", file=sys.stderr)
            return PROOF_FAILED
        with storing(folder, of_run=False):
            card = card_of(trained, target, config.dtype, folder.name, config.hub, proof, reason)
            (staging / "README.md").write_text(card, encoding="utf-8")
            publish(staging, folder, proof.as_json() if proof else {"proven": False, "reason": reason})
    report(folder, proof, reason)
    if config.hub is not None:
        if proof is None:
            raise not_uploaded(folder, f"it is not proven: {reason}", config.hub, config.private)
        print(upload(folder, config.hub, config.private, target.replaced))
    return 0


def publish(staging: Path, folder: Path, record: dict[str, Any]) -> None:
    """Add proof.json to the staging folder of an export or an import, and give it its name. Raises OSError."""
    write_json(staging / "proof.json", record)
    publish_folder(staging, folder)


def folder_of(config: ExportConfig, checkpoint: Checkpoint) -> Path:
    """The folder to write. Raises UserError if it exists."""
    name = f"{model_name(checkpoint.path.resolve())}-{config.to}"
    folder = Path(config.out).expanduser() if config.out else Path(config.runs_dir) / name
    if os.path.lexists(folder):
        raise UserError(f"{folder} exists; remove it, or name another folder with out=…")
    return folder


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
    return Trained(model_name(checkpoint.path.resolve()), checkpoint, gpt, attention, tokenizer)


def proof_of(trained: Trained, target: Target, folder: Path, text: ComparedText) -> tuple[Proof | None, str]:
    """The proof; or None, and the reason, if the package of the other program is missing or too old.

    Raises StorageFailed if that program cannot load what has just been written.
    """
    try:
        other = target.open(folder)
    except ImportError as error:
        return None, f"{target.package} cannot be imported ({error}); run: pip install {target.package}"
    except MemoryError:
        raise
    except Exception as error:  # of any type, for a file that cannot be read
        fault = str(error).strip().partition("\n")[0][:200]
        raise StorageFailed(
            f"{target.package} cannot load what was written for {folder}: {type(error).__name__}: {fault}",
            "check the disk, then try again; if it fails again, please report it with the run's config.yaml",
        ) from error
    with reading(folder):
        return prove(trained, target.rounded_gpt(), other, target.share, target.least, text), ""


def report(folder: Path, proof: Proof | None, reason: str) -> None:
    if proof is None:
        print(f"{folder} was written, but is not proven: {reason}")
        return
    print(f"proven by {proof.program}, which loaded the folder again:")
    for line in proof.lines:
        print(f"  {line}")
    print(f"{folder} was written; its README.md has the commands to use it")


# ------------------------------------------- the card: what the model is, how it was trained and is used, and the proof

CARD = Path(__file__).with_name("card.md")
ONE_DOCUMENT = """
In training, attention did not cross documents (`attention.across_documents=false`). The export equals the model on single
documents; in a text with several, each token also sees the documents before its own."""


def card_of(
    trained: Trained, target: Target, dtype: str, folder: str, hub: str | None, proof: Proof | None, reason: str
) -> str:
    """The card as Markdown. hub: the repository that it is uploaded to. reason: why there is no proof, if there is none."""
    return CARD.read_text(encoding="utf-8").format(
        name=escaped(trained.name),
        n_parameter=sum(parameter.numel() for parameter in trained.gpt.parameters()),
        what=target.what,
        dtype=dtype,
        why=target.why,
        usage=target.usage(folder, hub, prompt_of(trained)),
        sequence_length=trained.model.sequence_length,
        documents="" if trained.attention.across_documents else ONE_DOCUMENT,
        facts="\n".join(f"| {name} | {value} |" for name, value in facts(trained).items()),
        proof="\n".join(f"- {line}" for line in [f"by {proof.program}", *proof.lines])
        if proof
        else f"Not proven: {reason}.",
        configuration="\n".join(f"    {line}" for line in configuration(trained)),
    )


def facts(trained: Trained) -> dict[str, Any]:
    """Figures of the training. Paths of the data are left out: they say more about a machine than about a model."""
    state = trained.checkpoint.state
    data = state["config"].get("data") or {}
    sources = ", ".join(data.get("sources") or {}) or data.get("kind") or "unknown"
    return {
        "data": escaped(sources),
        "tokens read": f"{state['tokens']:,}",
        "steps": f"{state['step']:,}",
        "FLOPs": f"{state['flops']:.3g}" if state.get("flops") else "unknown",
        "bits per byte of held-out text": f"{state['val_bpb']:.4f}" if state.get("val_bpb") else "unknown",
        "tokenizer": trained.tokenizer.identity,
    }


def escaped(text: str) -> str:
    """A name that somebody has chosen, as it is written in Markdown and HTML, in one line."""
    return re.sub(r"([\\`*_\[\]|!#<>~])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def prompt_of(trained: Trained) -> str:
    """The prompt of the run's own samples, for commands; empty (a new document) if it has none that every shell reads alike."""
    prompt = (trained.checkpoint.state["config"].get("data") or {}).get("sample_prompt") or ""
    return prompt if re.fullmatch(r"[^\W\d_][\w .,;:()-]{0,60}", prompt) else ""


def configuration(trained: Trained) -> list[str]:
    """Every key of the model and of its attention, as typed."""
    groups = {"model": trained.model, "attention": trained.attention}
    return [
        " ".join(f"{group}.{key}={as_typed(value)}".split())
        for group, config in groups.items()
        for key, value in to_plain(config).items()
    ]


# ---------------------------------------------------- the upload; what fails leaves the folder on this machine as it is

LONGEST_REASON = 300  # characters of an error


def upload(folder: Path, repository: str, is_private: bool, replaced: tuple[str, ...]) -> str:
    """Upload the files of `folder` to OWNER/NAME, which is made if it does not exist. Returns a line for people.

    is_private: of a new repository; the hub leaves an existing one as it is. replaced: patterns of files that an earlier
    upload may have left; those that this folder lacks are deleted in the same commit. Raises UserError.
    """
    try:
        import huggingface_hub
    except ImportError:
        reason = "huggingface_hub cannot be imported; run: pip install huggingface_hub"
        raise not_uploaded(folder, reason, repository, is_private) from None
    try:
        if huggingface_hub.get_token() is None:
            reason = "this machine has no token of the hub; run: hf auth login, or set HF_TOKEN"
            raise not_uploaded(folder, reason, repository, is_private)
        api = huggingface_hub.HfApi()
        url = api.create_repo(repository, private=is_private, exist_ok=True)
        visibility = "private" if api.model_info(repository).private else "public"
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Export by ANDREA",
            delete_patterns=list(replaced) or None,
        )
    except UserError:
        raise
    except Exception as error:  # it has many: no network, a token that may not write, a name that is not allowed
        raise not_uploaded(folder, reason_of(error), repository, is_private) from None
    return f"uploaded to {url}, which is {visibility}"


def not_uploaded(folder: Path, reason: str, repository: str, is_private: bool) -> UserError:
    by_hand = shlex.join(["hf", "upload", repository, str(folder), *(["--private"] if is_private else [])])
    return UserError(
        f"{folder} was written, but not uploaded to {repository} ({reason}); to upload it later: {by_hand}"
    )


def reason_of(error: BaseException) -> str:
    """What failed, in one line: the first line of the error and of what caused it, and the words of the hub if it answered."""
    found: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        first_line = str(cause).strip().partition("\n")[0] or type(cause).__name__
        for words in (first_line, getattr(cause, "server_message", None)):
            line = " ".join((words or "").split()).rstrip(".")
            if line and not any(line in each for each in found):
                found.append(line)
        cause = cause.__cause__
    return ": ".join(found)[:LONGEST_REASON]
