"""Tokenizers from files: of a checkpoint or prepared data, of GPT-2, and of other models (tokenizer.json)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from andrea.config import LARGEST_VOCABULARY, TokenizerConfig, UserError
from andrea.runtime.files import from_json, read_plain_file
from andrea.text.hf_tokenizer import HF_FILE, HfTokenizer, what_is_read
from andrea.text.tokenizer import (
    DESCRIPTION,
    END_OF_TEXT,
    LARGEST_FILE_BYTES,
    RANKS,
    ByteTokenizer,
    RankTokenizer,
    Tokenizer,
    visible_bytes,
)

CONFIGS = ("tokenizer_config.json", "generation_config.json", "config.json")  # beside a tokenizer.json elsewhere
USUAL_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
GPT2_FILES = {  # name: (file name in tiktoken's cache = sha1 of its address, sha256 of its content)
    "vocab.bpe": (
        "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    ),
    "encoder.json": (
        "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    ),
}


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `save` wrote to `folder`. Raises UserError if a file is missing or damaged."""
    path = folder / DESCRIPTION
    try:
        description = from_json(read_plain_file(path, LARGEST_FILE_BYTES))
        kind, identity = description["kind"], description["identity"]
        if kind in RankTokenizer.KINDS:
            found: Tokenizer = RankTokenizer(kind, read_ranks(folder / RANKS))
        elif kind == "byte":
            found = ByteTokenizer()
        elif kind == "hf":
            found = saved_hf_tokenizer(folder, description)
        else:
            raise ValueError(f"unknown kind {kind}")
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}): {folder} holds no tokenizer") from error
    except UserError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); copy it again, or prepare the data again") from error
    if found.description() != description:
        raise UserError(
            f"{path} says that the tokenizer is {identity}, but the files of this folder hold {found.identity}: one of "
            f"them was changed; copy {DESCRIPTION} and {RANKS} again, or prepare the data again"
        )
    return found


def read_ranks(path: Path) -> dict[bytes, int]:
    """bytes -> id of each token, from a rank file. Each line of the file has a token's bytes in base64 and its id.

    Raises UserError if the file is not a valid rank file, and OSError if it cannot be read.
    """
    try:
        fields = [line.split() for line in read_plain_file(path, LARGEST_FILE_BYTES).split(b"\n") if line.strip()]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in fields}
    except (ValueError, binascii.Error) as error:
        raise UserError(f"{path} is not a rank file (lines of base64 and a number); check tokenizer.path") from error
    n_single = sum(len(token) == 1 for token in ranks)
    if n_single != 256 or sorted(ranks.values()) != list(range(len(fields))):
        raise UserError(
            f"{path} is damaged: it must contain all 256 single bytes, and each rank exactly once; copy it again"
        )
    if len(ranks) >= LARGEST_VOCABULARY:
        raise UserError(
            f"{path} holds {len(ranks)} tokens, but at most {LARGEST_VOCABULARY - 1} are possible, and end-of-text; check "
            f"tokenizer.path"
        )
    return ranks


def configured_tokenizer(config: TokenizerConfig) -> Tokenizer | None:
    """The tokenizer that `config` names; None if it must be trained on the corpus. Raises UserError if it is unusable."""
    if config.kind == "byte":
        return ByteTokenizer()
    if config.kind == "gpt2":
        return load_gpt2(config.path)
    if config.kind == "hf":
        return hf_from_path(Path(config.path or "").expanduser())
    if not config.path:
        return None
    found = from_path(Path(config.path).expanduser(), "bpe")
    if config.vocab_size not in (None, "auto", found.n_vocab):
        raise UserError(
            f"tokenizer.path={config.path} holds {found.n_vocab} tokens, not tokenizer.vocab_size={config.vocab_size}; "
            f"set tokenizer.vocab_size={found.n_vocab}"
        )
    return found


def from_path(path: Path, kind: str) -> Tokenizer:
    """The tokenizer in a rank file, a checkpoint or a folder of prepared data. Raises UserError if it is unusable."""
    if not os.path.exists(path):
        raise UserError(
            f"tokenizer.path={path} does not exist; name a .tiktoken rank file or a folder with {DESCRIPTION}"
        )
    if os.path.isfile(path):
        return RankTokenizer(kind, read_ranks(path))
    if not os.path.exists(path / DESCRIPTION):
        raise UserError(
            f"tokenizer.path={path} holds no {DESCRIPTION}; name a checkpoint, prepared data or a rank file"
        )
    found = load_tokenizer(path)
    if found.kind != kind:
        raise UserError(
            f"tokenizer.path={path} holds {found.identity}; choose tokenizer={found.kind} instead of {kind}"
        )
    return found


def hf_from_path(path: Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json of the tokenizers library, or in a checkpoint or prepared data. Raises UserError."""
    if not os.path.exists(path):
        raise UserError(f"tokenizer.path={path} does not exist; name a tokenizer.json, or the folder that holds one")
    return load_tokenizer(path) if os.path.exists(path / HF_FILE) else load_hf_tokenizer(path)


def load_gpt2(path: str | None) -> Tokenizer:
    """GPT-2's tokenizer from `path`. If `path` is None, it comes from tiktoken's cache or the network.

    Raises UserError if the tokenizer cannot be read or downloaded.
    """
    if path is None:
        return download_gpt2()
    folder = Path(path).expanduser()
    if os.path.isfile(folder) or os.path.exists(folder / DESCRIPTION) or not os.path.exists(folder):
        found = from_path(folder, "gpt2")
    else:
        found = from_pair(folder)
    if found.n_vocab != 50257:
        raise UserError(
            f"tokenizer.path={path} holds {found.n_vocab} tokens, but GPT-2 has 50257; choose tokenizer=bpe for it"
        )
    return found


def from_pair(folder: Path) -> Tokenizer:
    """GPT-2's tokenizer from its two files, which have their published names or their names in tiktoken's cache."""
    contents = {}
    for name, (cached_name, sha256) in GPT2_FILES.items():
        found = [folder / choice for choice in (cached_name, name) if os.path.isfile(folder / choice)]
        if not found:
            raise UserError(f"tokenizer.path={folder} lacks {name} (or {cached_name}, its name in tiktoken's cache)")
        contents[name] = found[0].read_bytes()
        if hashlib.sha256(contents[name]).hexdigest() != sha256:
            raise UserError(f"{found[0]} is damaged: its sha256 differs from that of GPT-2's {name}; copy it again")
    byte_of = visible_bytes()
    merges = [line.split() for line in contents["vocab.bpe"].decode().split("\n")[1:-1]]
    tokens = [*byte_of, *(first + second for first, second in merges)]
    return RankTokenizer("gpt2", {bytes(byte_of[c] for c in token): rank for rank, token in enumerate(tokens)})


def download_gpt2() -> Tokenizer:
    import requests
    import tiktoken

    try:
        ranks = tiktoken.get_encoding("gpt2")._mergeable_ranks
    except (OSError, ValueError, requests.RequestException) as error:
        names = " and ".join(cached for cached, _ in GPT2_FILES.values())
        raise UserError(
            f"GPT-2's vocabulary is not in tiktoken's cache and cannot be downloaded ({type(error).__name__}); copy "
            f"vocab.bpe and encoder.json into a folder, under these names or under those of the cache ({names}), and set "
            f"tokenizer.path=FOLDER"
        ) from error
    return RankTokenizer("gpt2", ranks)


# ------------------------------------------------------------------------- of other models


def load_hf_tokenizer(path: Path, n_vocab: int | None = None) -> HfTokenizer:
    """From a tokenizer.json, or a folder that holds one. n_vocab: rows of the model; by default one for each token.

    Raises UserError if it is missing or damaged, or if no token is known to end a text.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        content = read_plain_file(file, LARGEST_FILE_BYTES)
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({error.strerror}); name a tokenizer.json, or the folder that holds one"
        ) from None
    plain = what_is_read(content, file)
    ids = {**plain["model"]["vocab"], **{each["content"]: each["id"] for each in plain["added_tokens"]}}
    if not all(type(number) is int for number in ids.values()):
        raise UserError(f"{file} has tokens whose ids are no numbers; copy it again")
    end = front_token(content)
    if end is None:
        end = named_end(file.parent, ids)
    if type(end) is not int:
        raise UserError(
            f"{file.parent} names no end-of-text token: neither {', '.join(CONFIGS)} nor a token {', '.join(USUAL_ENDS)}; copy "
            f"the files beside tokenizer.json too"
        )
    return HfTokenizer(content, end, n_vocab or max(ids.values(), default=0) + 1, file)


def front_token(content: bytes) -> int | None:
    """The id that the tokenizer puts in front of a text, as the model saw it in training; None if it puts none."""
    found = from_json(content).get("post_processor")
    steps = found.get("processors") if isinstance(found, dict) and found.get("type") == "Sequence" else [found]
    for step in steps if isinstance(steps, list) else []:
        with suppress(LookupError, TypeError, AttributeError):
            return step["special_tokens"][step["single"][0]["SpecialToken"]["id"]]["ids"][0]
    return None


def named_end(folder: Path, ids: dict[str, int]) -> int | None:
    """The end-of-text token by the files beside tokenizer.json, or one with a usual name."""
    for name in CONFIGS:
        try:
            about = from_json(read_plain_file(folder / name, LARGEST_FILE_BYTES))
            end = about.get("eos_token_id", about.get("eos_token"))
        except (OSError, ValueError, AttributeError):
            continue
        end = end[0] if isinstance(end, list) and end else end
        end = end.get("content") if isinstance(end, dict) else end
        end = ids.get(end) if isinstance(end, str) else end
        if type(end) is int and end in ids.values():  # config.json may have the default of another vocabulary
            return end
    return next((ids[name] for name in USUAL_ENDS if name in ids), None)


def saved_hf_tokenizer(folder: Path, description: dict[str, Any]) -> HfTokenizer:
    """The tokenizer that `HfTokenizer.save` wrote. Raises OSError, UserError, KeyError or TypeError."""
    content = read_plain_file(folder / HF_FILE, LARGEST_FILE_BYTES)
    end, n_vocab = description["end_of_text"], description["n_vocab"]
    if type(end) is not int or type(n_vocab) is not int or not 0 <= end < n_vocab <= LARGEST_VOCABULARY:
        raise UserError(f"{folder / DESCRIPTION} is damaged (end_of_text={end}, n_vocab={n_vocab}); copy it again")
    return HfTokenizer(content, end, n_vocab, folder / HF_FILE)
