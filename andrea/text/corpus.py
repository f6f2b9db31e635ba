"""The prepared folder: a source's tokens as shards, made once, found again by what they were made from.

    data_dir/pystdlib-bpe-4096-1a2b3c4d/   train-000000.bin … val-000000.bin, tokenizer.json (and .tiktoken), meta.json,
                                           verified.json (can be deleted: the shards are read and compared again)

The last part of the name is a hash of the files' names, sizes and times and of the tokenizer's settings, so a start
with prepared data costs a walk of the folders. What is not there, `andrea.text.prepare` makes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andrea.config import DataConfig, SourceConfig, TokenizerConfig, UserError
from andrea.runtime.files import replace_text
from andrea.text.download import FINEWEB_EDU, SHAKESPEARE, fetch
from andrea.text.prepare import FORMAT_VERSION, SPLITS, Job, fingerprint_of, locked, make, writing
from andrea.text.shards import ShardSource, TokenStream, digest_of, find_shards, split_shards, stamp
from andrea.text.sources import Report, Source
from andrea.text.tokenizer import Tokenizer, configured_tokenizer, load_tokenizer

SHARD_NAME = re.compile(r"(train|val)-\d{6,}\.bin")
VERIFIED = "verified.json"  # sizes and times of the shards that were read and found to be what meta.json says


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


# ------------------------------------------------------------------------------------------------------ opening it


def open_corpus(jobs: list[Job]) -> Corpus:
    sources, fingerprints = [], []
    tokenizer = load_tokenizer(jobs[0].folder)
    for job in jobs:
        source, fingerprint = open_prepared(job, tokenizer)
        sources.append(source)
        fingerprints.append([source.name, source.weight, fingerprint])
    content = json.dumps([tokenizer.identity, fingerprints])
    return Corpus(tokenizer, tuple(sources), hashlib.sha256(content.encode()).hexdigest())


def open_prepared(job: Job, tokenizer: Tokenizer) -> tuple[PreparedSource, str]:
    """A prepared folder and its fingerprint. Raises UserError where it is not whole, or not of this tokenizer."""
    remedy = "delete the folder to prepare it again"
    try:
        meta = json.loads((job.folder / "meta.json").read_bytes())
        splits, identity = meta["splits"], meta["tokenizer"]
        digests = {split: {str(s["file"]): str(s["sha256"]) for s in splits[split]["shards"]} for split in SPLITS}
        sizes = {split: splits[split]["bytes"] for split in SPLITS}
        fingerprint = fingerprint_of(identity, meta)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{job.folder} is damaged (meta.json: {error}); {remedy}") from error
    if identity != tokenizer.identity:
        raise UserError(f"{job.folder} was made with {identity}, not {tokenizer.identity}; {remedy}")
    named = [name for split in SPLITS for name in digests[split]]
    if fingerprint != meta.get("fingerprint") or not all(SHARD_NAME.fullmatch(name) for name in named):
        raise UserError(f"{job.folder} is damaged (meta.json is not as it was written); {remedy}")
    if not all(type(size) is int and size >= 0 for size in sizes.values()):
        raise UserError(f"{job.folder} is damaged (meta.json: bytes of text {sizes}); {remedy}")
    if isinstance(job.source, Source):
        verify(job.folder, digests["train"] | digests["val"], tokenizer.n_vocab)
        train, val = (TokenStream.open([job.folder / name for name in digests[split]]) for split in SPLITS)
    else:
        train, val = split_shards(job.source)
    if min(len(train), len(val)) < 2:
        raise UserError(f"{job.folder} is damaged: too few tokens to train and to validate on; {remedy}")
    source = PreparedSource(job.source.name, job.weight, train, val, sizes["train"], sizes["val"], job.folder)
    return source, fingerprint


def verify(folder: Path, digests: dict[str, str], n_vocab: int) -> None:
    """Read the shards that are not as they were when they were last read, and compare. Raises UserError."""
    noted = folder / VERIFIED
    try:
        known = json.loads(noted.read_bytes())
    except (OSError, ValueError, RecursionError):
        known = None  # none yet, or half of one
    known = known if isinstance(known, dict) else {}
    stamps = {}
    for name, digest in digests.items():
        path = folder / name
        stamps[name] = stamp_of(path)
        if known.get(name) != stamps[name] and digest_of(path, n_vocab) != digest:
            raise UserError(
                f"{path} was changed: its sha256 is not the one written; delete {folder} to prepare it again"
            )
    if stamps != known:
        with contextlib.suppress(OSError):  # where it cannot be noted they are read again the next time
            replace_text(noted, json.dumps(stamps, indent=1))


def stamp_of(path: Path) -> list[int]:
    try:
        return stamp(path.stat())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); delete its folder to prepare it again") from error
