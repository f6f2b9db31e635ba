"""Making a prepared folder: a vocabulary where one is to be trained, the text in its tokens, whole or not at all.

Work goes on in `….partial`: each finished shard is noted in progress.json, the folder is renamed when whole. A killed
run goes on there and ends with the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from andrea.config import TokenizerConfig, UserError
from andrea.runtime.files import exclusive_lock, remove_unfinished, replace_text
from andrea.text.shards import ShardSource, ShardWriter, open_shard, split_shards
from andrea.text.sources import Piece, Report, Source, Split
from andrea.text.tokenizer import Tokenizer, configured_tokenizer, load_tokenizer, train_bpe

FORMAT_VERSION = 1
SHARD_TOKENS = 1 << 24  # a shard is closed at the first group of pieces that reaches this: 32 MiB
GROUP_BYTES = 1 << 22  # text encoded at a time, by all cores
BPE_SAMPLE_BYTES = 1 << 26  # text that a vocabulary is trained on, at most
SPLITS: tuple[Split, ...] = ("train", "val")
REPORT_SECONDS = 2.0


@dataclass(frozen=True)
class Job:
    """One source to be prepared into one folder."""

    source: Source | ShardSource
    weight: float | None
    folder: Path

    @property
    def partial(self) -> Path:
        return self.folder.with_name(self.folder.name + ".partial")


def make(jobs: list[Job], config: TokenizerConfig, given: Tokenizer | None, data_dir: Path, report: Report) -> None:
    if given is None and config.kind == "gpt2":
        given = configured_tokenizer(config)
    usable, verified = {}, {}  # whatever is wrong with the input shows here, before anything is written
    for job in jobs:
        if isinstance(job.source, ShardSource):
            assert given is not None, "describe_tokenizer refuses to train on shards"
            verified[job.folder] = verify_shards(job.source, given, report)
        elif not job.folder.exists():
            report(f"{job.source.name}: reading {len(job.source.files):,} files, {job.source.bytes / 1e6:.1f} MB")
            usable[job.folder] = job.source.check(report)
    with writing(data_dir), locked(data_dir, report):
        left = [job for job in jobs if not job.folder.exists()]  # another process may have made some meanwhile
        tokenizer = given or find_or_train(jobs, config, report)
        for job in left:
            job.partial.mkdir(exist_ok=True)
            remove_unfinished(job.partial)
            tokenizer.save(job.partial)
            if isinstance(job.source, Source):
                meta = encode_source(job.source, tokenizer, job.partial, usable[job.folder], report)
            else:
                meta = verified[job.folder]
            finish(job, tokenizer, meta, report)


def find_or_train(jobs: list[Job], config: TokenizerConfig, report: Report) -> Tokenizer:
    """The vocabulary of these sources: from a folder made before or left by a killed run, else trained."""
    for folder in [folder for job in jobs for folder in (job.folder, job.partial)]:
        try:
            return load_tokenizer(folder)
        except UserError:
            continue  # none there yet, or half of one
    sources = [job.source for job in jobs if isinstance(job.source, Source)]
    total = sum(source.bytes for source in sources)
    assert config.vocab_size is not None
    report(f"training a vocabulary of {config.vocab_size:,} tokens on {min(total, BPE_SAMPLE_BYTES) / 1e6:.1f} MB")
    tokenizer = train_bpe(sample(sources, total), config.vocab_size)
    if tokenizer.n_vocab < config.vocab_size:
        report(f"the text gives {tokenizer.n_vocab:,} tokens only, fewer than tokenizer.vocab_size={config.vocab_size}")
    return tokenizer


def sample(sources: list[Source], total_bytes: int) -> Iterator[str]:
    """Training text to learn a vocabulary from: all of it, or pieces evenly spread over it."""
    keep, seen = min(1.0, BPE_SAMPLE_BYTES / total_bytes), 0.0
    for source in sources:
        for piece in source.pieces("train"):
            seen += keep
            if seen >= 1.0:
                seen -= 1.0
                yield piece.text


def encode_source(
    source: Source, tokenizer: Tokenizer, folder: Path, total_bytes: int, report: Report
) -> dict[str, Any]:
    """Write both splits as shards into `folder`, going on after the last shard noted in its progress.json."""
    noted = folder / "progress.json"
    empty = {"pieces": 0, "documents": 0, "bytes": 0, "shards": [], "done": False}
    splits = json.loads(noted.read_bytes()) if noted.exists() else {split: dict(empty) for split in SPLITS}
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    told = time.monotonic()
    for split in SPLITS:
        while not splits[split]["done"]:
            for progress in write_shard(source.pieces(split), splits[split], tokenizer, folder, split, threads):
                if time.monotonic() - told >= REPORT_SECONDS:
                    told = time.monotonic()
                    done = progress + sum(splits[other]["bytes"] for other in SPLITS)
                    report(f"{source.name}: encoded {done / 1e6:.1f} of {total_bytes / 1e6:.1f} MB")
            replace_text(noted, json.dumps(splits, indent=1))
    for split in SPLITS:
        if sum(shard["tokens"] for shard in splits[split]["shards"]) < 2:
            shutil.rmtree(folder)
            raise UserError(f"{source.key}={source.root} holds too little text to train and to validate on; add some")
    noted.unlink()
    return {"splits": splits}


def write_shard(
    pieces: Iterator[Piece], state: dict[str, Any], tokenizer: Tokenizer, folder: Path, split: Split, threads: int
) -> Iterator[int]:
    """Encode the pieces that follow state["pieces"] into one shard and note it in `state`; yields bytes done in it.

    Where a shard ends depends on the text alone, neither on threads nor on where an earlier run was killed.
    """
    for _ in range(state["pieces"]):
        next(pieces)
    name = f"{split}-{len(state['shards']):06d}.bin"
    writer = ShardWriter(folder / name)
    piece_count = documents = bytes_done = 0
    finished = False
    end_of_text = np.array([tokenizer.end_of_text], dtype=np.uint16)
    while writer.count < SHARD_TOKENS:
        group = take(pieces, GROUP_BYTES)
        if not group:
            finished = True
            break
        for piece, tokens in zip(group, tokenizer.encode_batch([piece.text for piece in group], threads), strict=True):
            if piece.begins_document:
                writer.append(end_of_text)
            writer.append(tokens)
        piece_count += len(group)
        documents += sum(piece.begins_document for piece in group)
        bytes_done += sum(len(piece.text.encode()) for piece in group)
        yield bytes_done
    tokens, digest = writer.close()
    if tokens:
        state["shards"] = [*state["shards"], {"file": name, "tokens": tokens, "sha256": digest}]
    else:
        writer.path.unlink()
    state["pieces"] += piece_count
    state["documents"] += documents
    state["bytes"] += bytes_done
    state["done"] = finished


def take(pieces: Iterator[Piece], size: int) -> list[Piece]:
    """The next pieces, until they hold `size` characters; empty at the end."""
    taken, held = [], 0
    for piece in pieces:
        taken.append(piece)
        held += len(piece.text)
        if held >= size:
            break
    return taken


def verify_shards(source: ShardSource, tokenizer: Tokenizer, report: Report) -> dict[str, Any]:
    """Read existing shards once: are they whole, and does every token belong to the vocabulary?"""
    beside = source.root / "tokenizer.json"
    if source.root.is_dir() and beside.exists():
        made_with = load_tokenizer(source.root).identity
        if made_with != tokenizer.identity:
            raise UserError(f"{source.key}={source.root} was made with {made_with}, this run has {tokenizer.identity}; "
                            f"set tokenizer.path={source.root}")  # fmt: skip
    total = sum(size for _, size, *_ in source.listing)
    report(f"{source.name}: checking {len(source.files)} shards, {total / 1e6:.0f} MB")
    lengths, digest = tokenizer.byte_lengths(), hashlib.sha256()
    for file in source.files:
        shard = open_shard(file)
        for start in range(0, len(shard), SHARD_TOKENS):
            tokens = shard[start : start + SHARD_TOKENS]
            digest.update(tokens.tobytes())
            if (largest := int(tokens.max())) >= tokenizer.n_vocab:
                raise UserError(
                    f"{file} holds the token {largest}, but {tokenizer.identity} has {tokenizer.n_vocab}; "
                    f"choose the tokenizer these shards were made with"
                )
    splits = {}
    for split, stream in zip(SPLITS, split_shards(source), strict=True):
        if len(stream) < 2:
            raise UserError(f"{source.key}={source.root} holds too few tokens to train and to validate on")
        counts = np.zeros(tokenizer.n_vocab, dtype=np.int64)
        for start in range(0, len(stream), SHARD_TOKENS):
            counts += np.bincount(stream[start : start + SHARD_TOKENS], minlength=tokenizer.n_vocab)
        splits[split] = {"bytes": int(counts @ lengths), "documents": int(counts[tokenizer.end_of_text]), "shards": []}
    return {"splits": splits, "tokens_sha256": digest.hexdigest()}


def finish(job: Job, tokenizer: Tokenizer, meta: dict[str, Any], report: Report) -> None:
    """Write meta.json, which makes the folder whole, and rename it into place."""
    fingerprint = fingerprint_of(tokenizer.identity, meta)
    head = {"format_version": FORMAT_VERSION, "source": job.source.name, "tokenizer": tokenizer.identity}
    replace_text(job.partial / "meta.json", json.dumps(head | meta | {"fingerprint": fingerprint}, indent=1))
    os.replace(job.partial, job.folder)
    counts = ", ".join(
        f"{meta['splits'][s]['bytes'] / 1e6:.2f} MB {name}"
        for s, name in zip(SPLITS, ("training", "validation"), strict=True)
    )
    report(f"{job.source.name}: {counts} text prepared in {job.folder}")


def fingerprint_of(identity: str, meta: dict[str, Any]) -> str:
    """Of a source: equal tokens of an equal tokenizer, equal fingerprint."""
    shards = [[shard["sha256"] for shard in meta["splits"][split]["shards"]] for split in SPLITS]
    return hashlib.sha256(json.dumps([identity, meta.get("tokens_sha256"), *shards]).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------- where it is made


@contextmanager
def writing(data_dir: Path) -> Iterator[None]:
    """Turns a failure to write under `data_dir` into a UserError that names it."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"data_dir={data_dir} cannot be used ({error.strerror}: {error.filename}); set data_dir=… to a "
                        f"folder with room that you may write to") from error  # fmt: skip


def locked(data_dir: Path, report: Report) -> AbstractContextManager[None]:
    """One process at a time prepares in `data_dir`; the others wait."""
    message = f"another process prepares data in {data_dir}: waiting for it"
    return exclusive_lock(data_dir / ".lock", on_wait=lambda: report(message))
