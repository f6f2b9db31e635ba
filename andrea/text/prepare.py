"""From documents to shards: train a vocabulary if none exists, encode the text, and write a prepared folder.

The files are written to a folder `….partial`, which is renamed when it is complete. Its progress.json lists the
finished shards. If the process is killed, the next run continues after these shards, and the result has the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from andrea.config import TokenizerConfig, UserError
from andrea.runtime.files import (
    exclusive_lock,
    flush_files_of,
    publish_folder,
    remove_unfinished,
    replace_text,
    size_words,
)
from andrea.text.chat import ChatTokenizer, encode_conversation, for_chat
from andrea.text.load_tokenizer import configured_tokenizer, load_tokenizer
from andrea.text.shards import ShardSource, ShardWriter, in_blocks, open_shard, split_shards
from andrea.text.sources import Piece, Report, Source, Split
from andrea.text.tokenizer import Tokenizer, train_bpe

FORMAT_VERSION = 1
SHARD_TOKENS = 1 << 24  # a shard ends after the group of pieces that reaches this number; 32 MiB, or 64 with 32-bit ids
GROUP_BYTES = 1 << 22  # bytes of text that are encoded together on all cores
BPE_SAMPLE_BYTES = 1 << 26  # a vocabulary is trained on at most this many bytes of text
SPLITS: tuple[Split, ...] = ("train", "val")
FEW_CHARACTERS = 16  # of DNA or of digits: byte-pair encoding makes tokens of them, but without a meaning
REPORT_SECONDS = 2.0


@dataclass(frozen=True)
class SourceFolder:
    """A source and the path of its prepared folder. The folder need not exist yet."""

    source: Source | ShardSource
    weight: float | None  # share of the samples; None: in proportion to its size
    path: Path

    @property
    def partial(self) -> Path:
        """The temporary path of the folder until the folder is complete."""
        return self.path.with_name(self.path.name + ".partial")


def prepare(
    folders: list[SourceFolder], config: TokenizerConfig, existing: Tokenizer | None, data_dir: Path, report: Report
) -> None:
    """Make all `folders` that do not exist.

    existing: the tokenizer to use. If None, GPT-2's tokenizer is loaded or a new one is trained, according to `config`.
    Raises UserError if the input is unusable, before anything is written, or if `data_dir` cannot be written.
    """
    if existing is None and config.kind == "gpt2":
        existing = configured_tokenizer(config)
    meta_of_shards = {}
    for folder in folders:
        if isinstance(folder.source, ShardSource):
            assert existing is not None, "tokenizer_origin refuses to train a vocabulary on shards"
            meta_of_shards[folder.path] = verify_shards(folder.source, existing, report)
        elif not folder.path.exists():
            folder.source.check(report)
    with writing_to(data_dir, report):
        tokenizer = existing or find_or_train(folders, config, report)
        if any(folder.source.is_chat for folder in folders):
            tokenizer = for_chat(tokenizer)
        for folder in folders:
            if folder.path.exists():  # another process has made it, or it is that of another source of the same files
                continue
            folder.partial.mkdir(exist_ok=True)
            remove_unfinished(folder.partial)
            tokenizer.save(folder.partial)
            if isinstance(folder.source, Source):
                meta = encode_source(folder.source, tokenizer, folder.partial, report)
            else:
                meta = meta_of_shards[folder.path]
            finish(folder, tokenizer, meta, report)


# --------------------------------------------------------------------------------------------------- the vocabulary


def find_or_train(folders: list[SourceFolder], config: TokenizerConfig, report: Report) -> Tokenizer:
    """The vocabulary of these sources. It is trained if none of the folders, complete or not, has a tokenizer."""
    for path in [path for folder in folders for path in (folder.path, folder.partial)]:
        with suppress(UserError):  # the folder has no complete tokenizer
            return load_tokenizer(path)
    sources = [folder.source for folder in folders if isinstance(folder.source, Source)]
    total_bytes = sum(source.usable_bytes or source.bytes for source in sources)
    assert isinstance(config.vocab_size, int), "auto is resolved before"
    sample_size = size_words(min(total_bytes, BPE_SAMPLE_BYTES))
    report(f"training a vocabulary of {config.vocab_size:,} tokens on {sample_size}")
    characters: set[str] = set()
    tokenizer = train_bpe(vocabulary_sample(sources, total_bytes, characters), config.vocab_size)
    if (n_vocab := tokenizer.n_vocab) < config.vocab_size:
        report(f"the text is too small for {config.vocab_size:,} tokens (tokenizer.vocab_size); using {n_vocab:,}")
    if len(characters) <= FEW_CHARACTERS:
        report(f"the text has only {len(characters)} different characters: consider tokenizer=byte, one token for each")
    return tokenizer


def vocabulary_sample(sources: list[Source], total_bytes: int, characters: set[str]) -> Iterator[str]:
    """The text to train a vocabulary on: all training text, or about BPE_SAMPLE_BYTES in evenly spaced pieces.

    characters: gets the different characters of this text.
    """
    share, due = min(1.0, BPE_SAMPLE_BYTES / total_bytes), 0.0
    for source in sources:
        for piece in source.pieces("train"):
            due += share
            if due >= 1.0:
                due -= 1.0
                characters.update(piece.text)
                yield piece.text


# --------------------------------------------------------------------------------------------------------- encoding


def encode_source(source: Source, tokenizer: Tokenizer, folder: Path, report: Report) -> dict[str, Any]:
    """Write both splits into `folder` as shards, after the shards in its progress.json. Returns their part of meta.json."""
    progress_file, total_bytes = folder / "progress.json", source.check(report)
    if progress_file.exists():
        splits = json.loads(progress_file.read_bytes())
    else:
        splits = {s: {"pieces": 0, "documents": 0, "bytes": 0, "shards": [], "done": False} for s in SPLITS}
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    last_report = time.monotonic()
    for split in SPLITS:
        while not splits[split]["done"]:
            for _ in write_shard(source.pieces(split), splits[split], tokenizer, folder, split, threads):
                if time.monotonic() - last_report >= REPORT_SECONDS:
                    last_report = time.monotonic()
                    encoded_bytes = sum(splits[each]["bytes"] for each in SPLITS)
                    report(f"{source.name}: encoded {size_words(encoded_bytes)} of {size_words(total_bytes)}")
            flush_files_of(folder)  # first: what progress.json lists must survive a loss of power
            replace_text(progress_file, json.dumps(splits, indent=1))
    for split in SPLITS:
        if sum(shard["tokens"] for shard in splits[split]["shards"]) < 2:
            shutil.rmtree(folder)
            raise UserError(f"{source.key}={source.root} holds too little text to train and to validate on; add more")
    progress_file.unlink()
    return {"splits": splits}


def write_shard(
    pieces: Iterator[Piece], progress: dict[str, Any], tokenizer: Tokenizer, folder: Path, split: Split, threads: int
) -> Iterator[None]:
    """Encode one shard, beginning with piece number progress["pieces"]. Yields after each group of pieces.

    The shard is added to `progress`, the split's entry in progress.json. The end of a shard depends on the text alone,
    not on the number of threads or on an earlier interruption.
    """
    for _ in range(progress["pieces"]):
        next(pieces)
    name = f"{split}-{len(progress['shards']):06d}.bin"
    writer = ShardWriter(folder / name, tokenizer.n_vocab)
    while writer.count < SHARD_TOKENS and not progress["done"]:
        group = take(pieces, GROUP_BYTES)
        for tokens in encode_pieces(group, tokenizer, threads):
            writer.append(tokens)
        progress["pieces"] += len(group)
        progress["documents"] += sum(piece.begins_document for piece in group)
        progress["bytes"] += sum(len(piece.text.encode()) for piece in group)
        progress["done"] = not group
        yield
    n_token, digest = writer.close()
    if n_token:
        progress["shards"].append({"file": name, "tokens": n_token, "sha256": digest})
    else:
        writer.path.unlink()


def encode_pieces(group: list[Piece], tokenizer: Tokenizer, threads: int) -> Iterator[np.ndarray]:
    """The tokens of each piece, end_of_text first where a document begins."""
    if isinstance(tokenizer, ChatTokenizer) and any(piece.turns for piece in group):
        for piece in group:
            both = (piece.turns, piece.rejected) if piece.rejected else (piece.turns,)
            yield np.array([token for turns in both for token in encode_conversation(tokenizer, turns)])
        return
    for piece, tokens in zip(group, tokenizer.encode_batch([piece.text for piece in group], threads), strict=True):
        yield np.concatenate([[tokenizer.end_of_text], tokens]) if piece.begins_document else tokens


def take(pieces: Iterator[Piece], size: int) -> list[Piece]:
    """Take pieces until they have `size` characters in total, or no piece is left."""
    taken, n_character = [], 0
    for piece in pieces:
        taken.append(piece)
        n_character += len(piece.text)
        if n_character >= size:
            break
    return taken


# -------------------------------------------------------------------------------------------------- existing shards


def verify_shards(source: ShardSource, tokenizer: Tokenizer, report: Report) -> dict[str, Any]:
    """Read existing shards once. Returns their part of meta.json: the splits, and one sha256 of all tokens.

    Raises UserError if the folder names another tokenizer, a file is incomplete, a token is not in the vocabulary, or there
    are too few tokens.
    """
    if source.root.is_dir() and (source.root / "tokenizer.json").exists():
        made_with = load_tokenizer(source.root).identity
        if made_with != tokenizer.identity:
            raise UserError(
                f"{source.key}={source.root} was made with tokenizer {made_with}, but this run uses {tokenizer.identity}; "
                f"set tokenizer.path={source.root}"
            )
    total_bytes = sum(size for _, size, *_ in source.listing)
    shards = f"{len(source.files):,} shard{'s' * (len(source.files) != 1)}"
    report(f"{source.name}: checking {shards}, {size_words(total_bytes)}")
    bytes_of_token, digest = tokenizer.byte_lengths(), hashlib.sha256()
    for file in source.files:
        for tokens in in_blocks(open_shard(file)):
            digest.update(tokens.tobytes())
            if (largest := int(tokens.max())) >= tokenizer.n_vocab:
                raise UserError(
                    f"{file} holds the token {largest}, but {tokenizer.identity} has {tokenizer.n_vocab} tokens; "
                    f"choose the tokenizer that these shards were made with"
                )
    splits = {}
    for split, stream in zip(SPLITS, split_shards(source), strict=True):
        if len(stream) < 2:
            raise UserError(f"{source.key}={source.root} holds too few tokens to train and to validate on")
        counts = np.zeros(tokenizer.n_vocab, dtype=np.int64)  # (V,) occurrences of each token
        for tokens in in_blocks(stream):
            counts += np.bincount(tokens, minlength=tokenizer.n_vocab)
        n_document = int(counts[tokenizer.end_of_text])
        splits[split] = {"bytes": int(counts @ bytes_of_token), "documents": n_document, "shards": []}
    return {"splits": splits, "tokens_sha256": digest.hexdigest()}


# ---------------------------------------------------------------------------------------------- completing the folder


def finish(folder: SourceFolder, tokenizer: Tokenizer, meta: dict[str, Any], report: Report) -> None:
    """Write meta.json, the last file of the folder, and rename the folder to its final name."""
    fingerprint = fingerprint_of(tokenizer.identity, meta)
    head = {"format_version": FORMAT_VERSION, "source": folder.source.name, "tokenizer": tokenizer.identity}
    replace_text(folder.partial / "meta.json", json.dumps(head | meta | {"fingerprint": fingerprint}, indent=1))
    publish_folder(folder.partial, folder.path)
    train, val = (size_words(meta["splits"][split]["bytes"]) for split in SPLITS)
    report(f"{folder.source.name}: prepared {train} of training text and {val} of validation text in {folder.path}")


def fingerprint_of(identity: str, meta: dict[str, Any]) -> str:
    """sha256 of the tokenizer's identity and of the tokens. Equal data have equal fingerprints on every machine."""
    shards = [[shard["sha256"] for shard in meta["splits"][split]["shards"]] for split in SPLITS]
    return hashlib.sha256(json.dumps([identity, meta.get("tokens_sha256"), *shards]).encode()).hexdigest()


@contextmanager
def writing_to(data_dir: Path, report: Report) -> Iterator[None]:
    """Make `data_dir`, and let one process at a time write to it; others report that they wait.

    An OSError, here or in the `with` block, becomes a UserError that names `data_dir`.
    """
    message = f"another process is preparing data in {data_dir}; waiting for it"
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(data_dir / ".lock", on_wait=lambda: report(message)):
            yield
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}" if error.filename else error.strerror  # write() names no file
        raise UserError(
            f"data_dir={data_dir} cannot be used ({reason}); set data_dir=… to a folder that "
            f"you may write to, on a disk with free space"
        ) from error
