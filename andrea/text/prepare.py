"""The prepared folder: a source's tokens as shards, made once, found again by what they were made from.

    data_dir/pystdlib-bpe-4096-1a2b3c4d/   train-000000.bin … val-000000.bin, tokenizer.json (and .tiktoken), meta.json

The last part of the name is a hash of the files' names, sizes and times and of the tokenizer's settings, so a start
with prepared data costs a walk of the folders. Work goes on in `….partial`: each finished shard is noted in
progress.json, the folder is renamed when whole. A killed run goes on there and ends with the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from andrea.config import DataConfig, SourceConfig, TokenizerConfig, UserError
from andrea.text.corpus import Piece, Report, Source, Split
from andrea.text.download import FINEWEB_EDU, SHAKESPEARE, fetch
from andrea.text.shards import ShardWriter, TokenStream, open_shard
from andrea.text.tokenizer import Tokenizer, configured_tokenizer, load_tokenizer, train_bpe

FORMAT_VERSION = 1
SHARD_TOKENS = 1 << 24  # a shard is closed at the first group of pieces that reaches this: 32 MiB
GROUP_BYTES = 1 << 22  # text encoded at a time, by all cores
BPE_SAMPLE_BYTES = 1 << 26  # text that a vocabulary is trained on, at most
SPLITS: tuple[Split, ...] = ("train", "val")
REPORT_SECONDS = 2.0


@dataclass(frozen=True)
class PreparedSource:
    name: str
    weight: float | None  # share of the samples; None: by size
    train: TokenStream
    val: TokenStream
    train_bytes: int
    val_bytes: int
    folder: Path


@dataclass(frozen=True)
class Corpus:
    tokenizer: Tokenizer
    sources: tuple[PreparedSource, ...]
    fingerprint: str  # sha256 of tokenizer, tokens and weights: equal data, equal fingerprint, on any machine


@dataclass(frozen=True)
class ShardSource:
    """Existing shards; those with 'val' in their name are held out, else the last hundredth of the tokens."""

    name: str
    key: str
    root: Path
    files: list[Path]
    listing: list[list[Any]]


@dataclass(frozen=True)
class Job:
    """One source to be prepared into one folder."""

    source: Source | ShardSource
    weight: float | None
    folder: Path

    @property
    def partial(self) -> Path:
        return self.folder.with_name(self.folder.name + ".partial")


def prepare(data: DataConfig, tokenizer: TokenizerConfig, data_dir: Path, report: Report) -> Corpus:
    """The corpus that `data` names in tokens of `tokenizer`: found in `data_dir`, or made there.

    Raises UserError for what the user can mend: a path, a file that is no text or no whole shard, a missing network.
    """
    data_dir = data_dir.expanduser()
    configs = data.sources if data.kind == "mixture" else {data.kind: SourceConfig(data.kind, data.path)}
    keys = {name: f"data.sources.{name}" if data.kind == "mixture" else "data" for name in configs}
    sources = [open_source(name, config, keys[name], data_dir, report) for name, config in configs.items()]
    check_weights(configs)
    given = configured_tokenizer(tokenizer) if tokenizer.path or tokenizer.kind == "byte" else None
    made_from = describe_tokenizer(tokenizer, given, sources)
    jobs = [
        Job(source, config.weight, folder_of(source, tokenizer, made_from, data_dir))
        for source, config in zip(sources, configs.values(), strict=True)
    ]
    if not all(job.folder.exists() for job in jobs):
        make(jobs, tokenizer, given, data_dir, report)
    return open_corpus(jobs)


# --------------------------------------------------------------------------------------------- what is to be made


def open_source(name: str, config: SourceConfig, key: str, data_dir: Path, report: Report) -> Source | ShardSource:
    path = Path(config.path).expanduser() if config.path else None
    if config.kind in ("pystdlib", "text"):
        return Source(name, config.kind, path, f"{key}.path")
    if config.kind in ("shakespeare", "fineweb_edu") and path is None:
        path = downloaded(config.kind, data_dir, report)
    assert path is not None, "config.py asks for a path"
    if config.kind == "shakespeare":
        return Source(name, "text", path, f"{key}.path")
    return find_shards(name, path, f"{key}.path")


def downloaded(kind: str, data_dir: Path, report: Report) -> Path:
    """The file or folder that a published source is kept in, fetched where it is not there."""
    remotes = SHAKESPEARE if kind == "shakespeare" else FINEWEB_EDU
    folder = data_dir / "downloads" / kind
    if not all((folder / remote.name).exists() for remote in remotes):
        with writing(data_dir), locked(data_dir, report):
            for remote in remotes:
                fetch(remote, folder, report)
    return folder / remotes[0].name if len(remotes) == 1 else folder


def find_shards(name: str, path: Path, key: str) -> ShardSource:
    if not path.exists():
        raise UserError(f"{key}={path} does not exist; name a .bin file or a folder of them")
    files = [path] if path.is_file() else sorted(path.glob("*.bin"))
    if not files:
        raise UserError(f"{key}={path} holds no .bin file; name token shards, or choose data=text for text")
    stats = [file.stat() for file in files]
    listing = [[str(f.resolve()), s.st_size, s.st_mtime_ns] for f, s in zip(files, stats, strict=True)]
    return ShardSource(name, key, path, files, listing)


def check_weights(configs: dict[str, SourceConfig]) -> None:
    given = [config.weight for config in configs.values() if config.weight is not None]
    unset = [name for name, config in configs.items() if config.weight is None]
    if given and unset and sum(given) >= 1:
        raise UserError(
            f"data.sources.{unset[0]}.weight is missing: the other weights sum to {sum(given):g} and leave it nothing; "
            f"set it, or lower the others below 1"
        )


def describe_tokenizer(
    config: TokenizerConfig, given: Tokenizer | None, sources: list[Source | ShardSource]
) -> list[Any]:
    """What the tokenizer is made from, for the folder's name."""
    if given is not None:
        return [given.identity]
    if config.kind == "gpt2":
        return ["gpt2"]
    foreign = [source for source in sources if isinstance(source, ShardSource)]
    if foreign:
        raise UserError(
            f"tokenizer=bpe would be trained anew, but {foreign[0].key}={foreign[0].root} holds tokens already; "
            f"choose the tokenizer they were made with: tokenizer=gpt2, or tokenizer.path=…"
        )
    return [config.kind, config.vocab_size, [source.listing for source in sources]]


def folder_of(source: Source | ShardSource, tokenizer: TokenizerConfig, made_from: list[Any], data_dir: Path) -> Path:
    kind = source.kind if isinstance(source, Source) else "shards"
    content = json.dumps([FORMAT_VERSION, kind, source.listing, made_from])
    hashed = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    size = f"-{tokenizer.vocab_size}" if tokenizer.kind == "bpe" and tokenizer.vocab_size else ""
    return data_dir / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', source.name)}-{tokenizer.kind}{size}-{hashed}"


# ------------------------------------------------------------------------------------------------------ making it


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
            write_whole(noted, splits)
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
    total = sum(size for _, size, _ in source.listing)
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


def split_shards(source: ShardSource) -> tuple[TokenStream, TokenStream]:
    held_out = [file for file in source.files if "val" in file.name]
    if held_out:
        return TokenStream.open([file for file in source.files if file not in held_out]), TokenStream.open(held_out)
    everything = TokenStream.open(source.files)
    middle = len(everything) - max(2, len(everything) // 100)
    return everything.part(0, max(0, middle)), everything.part(max(0, middle), len(everything))


def finish(job: Job, tokenizer: Tokenizer, meta: dict[str, Any], report: Report) -> None:
    """Write meta.json, which makes the folder whole, and rename it into place."""
    content = [
        tokenizer.identity,
        meta.get("tokens_sha256"),
        *([s["sha256"] for s in meta["splits"][k]["shards"]] for k in SPLITS),
    ]
    fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    head = {"format_version": FORMAT_VERSION, "source": job.source.name, "tokenizer": tokenizer.identity}
    write_whole(job.partial / "meta.json", head | meta | {"fingerprint": fingerprint})
    os.replace(job.partial, job.folder)
    counts = ", ".join(
        f"{meta['splits'][s]['bytes'] / 1e6:.2f} MB {name}"
        for s, name in zip(SPLITS, ("training", "validation"), strict=True)
    )
    report(f"{job.source.name}: {counts} text prepared in {job.folder}")


def write_whole(path: Path, content: Any) -> None:
    """JSON on the disk before the name points to it."""
    beside = path.with_suffix(".new")
    with open(beside, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


# ------------------------------------------------------------------------------------------------------ opening it


def open_corpus(jobs: list[Job]) -> Corpus:
    sources, fingerprints = [], []
    tokenizer = load_tokenizer(jobs[0].folder)
    for job in jobs:
        source, fingerprint, identity = open_prepared(job)
        if identity != tokenizer.identity:
            raise UserError(
                f"{job.folder} was made with {identity}, not {tokenizer.identity}; delete it to make it again"
            )
        sources.append(source)
        fingerprints.append([source.name, source.weight, fingerprint])
    content = json.dumps([tokenizer.identity, fingerprints])
    return Corpus(tokenizer, tuple(sources), hashlib.sha256(content.encode()).hexdigest())


def open_prepared(job: Job) -> tuple[PreparedSource, str, str]:
    """A prepared folder, its fingerprint and its tokenizer's identity. Raises UserError where it is not whole."""
    try:
        meta = json.loads((job.folder / "meta.json").read_bytes())
        splits, identity, fingerprint = meta["splits"], meta["tokenizer"], meta["fingerprint"]
        files = {split: [job.folder / shard["file"] for shard in splits[split]["shards"]] for split in SPLITS}
        sizes = {split: splits[split]["bytes"] for split in SPLITS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{job.folder} is damaged (meta.json: {error}); delete the folder to prepare it again"
        ) from error
    if isinstance(job.source, Source):
        train, val = (TokenStream.open(files[split]) for split in SPLITS)
    else:
        train, val = split_shards(job.source)
    source = PreparedSource(job.source.name, job.weight, train, val, sizes["train"], sizes["val"], job.folder)
    return source, fingerprint, identity


@contextmanager
def writing(data_dir: Path) -> Iterator[None]:
    """Turns a failure to write under `data_dir` into a UserError that names it."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"data_dir={data_dir} cannot be used ({error.strerror}: {error.filename}); set data_dir=… to a "
                        f"folder with room that you may write to") from error  # fmt: skip


@contextmanager
def locked(data_dir: Path, report: Report) -> Iterator[None]:
    """One process at a time prepares in `data_dir`; the system drops the lock of a killed one."""
    import fcntl

    with open(data_dir / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"another process prepares data in {data_dir}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
