"""The corpus of a run: prepared folders of token shards, with a hash of their input in the folder's name.

    data_dir/pystdlib-bpe-4096-1a2b3c4d/   train-000000.bin … val-000000.bin, tokenizer.json (and .tiktoken), meta.json,
                                           verified.json (may be deleted: the shards are then read and verified again)

The hash covers the names, sizes and times of the source's files, and the tokenizer's settings. To find prepared data, a
run therefore only lists the source's files.

A folder that does not exist is prepared: a vocabulary is trained if none exists, and the text is encoded. The files are
written to a folder `….partial`, which is renamed when it is complete. Its progress.json lists the finished shards. If the
process is killed, the next run continues after these shards, and the result has the same bytes.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from andrea.config import DataConfig, SourceConfig, TokenizerConfig, UserError
from andrea.runtime import files
from andrea.text.chat import ChatTokenizer, encode_conversation, for_chat
from andrea.text.download import FINEWEB_EDU, SHAKESPEARE, fetch
from andrea.text.load_tokenizer import configured_tokenizer, load_tokenizer
from andrea.text.python_chat import python_chat_in
from andrea.text.shards import (
    ShardSource,
    ShardWriter,
    TokenStream,
    digest_of,
    find_shards,
    in_blocks,
    split_shards,
    stamp,
)
from andrea.text.sources import Piece, Report, Source, Split
from andrea.text.tokenizer import Tokenizer, train_bpe, vocabulary_for

FORMAT_VERSION = 1
SHARD_TOKENS = 1 << 24  # a shard ends after the group of pieces that reaches this number; 32 MiB, or 64 with 32-bit ids
GROUP_BYTES = 1 << 22  # bytes of text that are encoded together on all cores
BPE_SAMPLE_BYTES = 1 << 26  # a vocabulary is trained on at most this many bytes of text
SPLITS: tuple[Split, ...] = ("train", "val")
FEW_CHARACTERS = 16  # of DNA or of digits: byte-pair encoding makes tokens of them, but without a meaning
REPORT_SECONDS = 2.0
SHARD_NAME = re.compile(r"(train|val)-\d{6,}\.bin")
LARGEST_JSON_BYTES = 1 << 26
TEXT_BYTES = ".text-bytes.json"  # of each source of text that was read, by a hash of its files
VERIFIED = "verified.json"  # size and times of each shard at its last successful sha256 check


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


@dataclass(frozen=True)
class PreparedSource:
    """One source of a corpus: the token streams of its two splits."""

    name: str
    weight: float | None  # share of the samples; None: in proportion to its size
    train: TokenStream
    val: TokenStream
    train_bytes: int  # bytes of training text
    val_bytes: int  # bytes of validation text
    folder: Path
    chat: ChatTokenizer | None = None  # the tokenizer of conversations; None: running text
    pairs: bool = False  # whether each two conversations are the chosen and the rejected one of a pair


@dataclass(frozen=True)
class Corpus:
    """The data of a run: a tokenizer, and the sources, encoded by this tokenizer."""

    tokenizer: Tokenizer
    sources: tuple[PreparedSource, ...]
    fingerprint: str  # sha256 of tokenizer, tokens and weights; the same on every machine


def open_corpus(
    data: DataConfig, tokenizer: TokenizerConfig, data_dir: Path, report: Report, pairs: bool = False
) -> Corpus:
    """The corpus that `data` and `tokenizer` describe. If it is not in `data_dir`, it is prepared there first.

    pairs: read preference pairs, in place of conversations.

    Raises UserError for a wrong path, a file that is neither text nor a complete shard, or a failed download.
    """
    data_dir = data_dir.expanduser()
    alone = SourceConfig(data.kind, data.path, None, data.include, data.exclude, data.field)
    # By name: a mapping has no order, and a checkpoint does not keep that in which it was typed.
    configs = dict(sorted(data.sources.items())) if data.kind == "mixture" else {data.kind: alone}
    keys = {name: f"data.sources.{name}" if data.kind == "mixture" else "data" for name in configs}
    check_weights(configs)
    check_vocabulary(tokenizer, configs, keys)
    sources = [find_source(name, config, keys[name], data_dir, report, pairs) for name, config in configs.items()]
    tokenizer = with_vocabulary_size(tokenizer, sources, data_dir, report)
    existing = configured_tokenizer(tokenizer) if tokenizer.path or tokenizer.kind == "byte" else None
    if existing is not None and any(source.is_chat for source in sources):
        existing = for_chat(existing)
    origin = tokenizer_origin(tokenizer, existing, sources)
    folders = [
        SourceFolder(source, config.weight, folder_of(source, tokenizer, origin, data_dir))
        for source, config in zip(sources, configs.values(), strict=True)
    ]
    if not all(folder.path.exists() for folder in folders):
        prepare(folders, tokenizer, existing, data_dir, report)
    else:
        for source in sources:
            for line in source.unmatched() if isinstance(source, Source) else ():
                report(f"{source.name}: {line}")
    loaded = load_tokenizer(folders[0].path)
    prepared = [read_folder(folder, loaded) for folder in folders]
    fingerprints = [[source.name, source.weight, fingerprint] for source, fingerprint in prepared]
    fingerprint = hash_of([loaded.identity, fingerprints])
    return Corpus(loaded, tuple(source for source, _ in prepared), fingerprint)


# ----------------------------------------------------------------------------------------------- the folders of a run


def find_source(
    name: str, config: SourceConfig, key: str, data_dir: Path, report: Report, pairs: bool
) -> Source | ShardSource:
    path = Path(config.path).expanduser() if config.path else None
    if config.kind == "python_chat":
        path = python_chat_in(data_dir)
    elif config.kind in ("shakespeare", "fineweb_edu") and path is None:
        path = downloaded(config.kind, data_dir, report)
    if config.kind in ("shards", "fineweb_edu"):
        assert path is not None, "the configuration's checks demand a path"
        return find_shards(name, path, f"{key}.path")
    kind = {"shakespeare": "text", "python_chat": "chat"}.get(config.kind, config.kind)
    kind = "pairs" if pairs and config.kind == "chat" else kind
    return Source(name, kind, path, f"{key}.path", config)


def downloaded(kind: str, data_dir: Path, report: Report) -> Path:
    """The path of a published source's file, or of the folder of its files. Missing files are downloaded."""
    remotes = SHAKESPEARE if kind == "shakespeare" else FINEWEB_EDU
    folder = data_dir / "downloads" / kind
    if not all((folder / remote.name).exists() for remote in remotes):
        with writing_to(data_dir, report):
            for remote in remotes:
                fetch(remote, folder, report)
    return folder / remotes[0].name if len(remotes) == 1 else folder


def with_vocabulary_size(
    config: TokenizerConfig, sources: list[Source | ShardSource], data_dir: Path, report: Report
) -> TokenizerConfig:
    """The configuration with a number for tokenizer.vocab_size=auto; none if the vocabulary exists already."""
    if config.vocab_size != "auto":
        return config
    if config.path or config.kind != "bpe":
        return dataclasses.replace(config, vocab_size=None)
    n_byte = sum(bytes_of_text(source, data_dir, report) for source in sources)
    return dataclasses.replace(config, vocab_size=vocabulary_for(n_byte))


def bytes_of_text(source: Source, data_dir: Path, report: Report) -> int:
    """The bytes of text that the source's files hold. They are read the first time; data_dir/.text-bytes.json remembers."""
    if source.kind == "pystdlib":
        return source.bytes  # all of each file
    facts = [FORMAT_VERSION, source.kind, str(source.root.resolve()), source.hashed]
    file, name = data_dir / TEXT_BYTES, hash_of(facts)[:8]
    known = remembered(file)
    if type(known.get(name)) is not int:
        known[name] = source.check(report)
        remember(file, known)
    return known[name]


def remembered(file: Path) -> dict[str, Any]:
    """What `remember` has written; nothing if the file is missing or incomplete."""
    try:
        known = files.from_json(files.read_plain_file(file, LARGEST_JSON_BYTES))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def remember(file: Path, known: dict[str, Any]) -> None:
    """Write what the next start need not read again. In a read-only folder each start reads it again."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(known, indent=1), encoding="utf-8")  # half of it, after a crash, is like none


def check_weights(configs: dict[str, SourceConfig]) -> None:
    """Raise UserError if the given weights sum to 1 or more although some sources have no weight."""
    given = [config.weight for config in configs.values() if config.weight is not None]
    unset = [name for name, config in configs.items() if config.weight is None]
    if given and unset and sum(given) >= 1:
        raise UserError(
            f"data.sources.{unset[0]}.weight is missing, and the others sum to {sum(given):g}; set it, or lower them"
        )


def check_vocabulary(tokenizer: TokenizerConfig, configs: dict[str, SourceConfig], keys: dict[str, str]) -> None:
    """Raise UserError if a vocabulary would be trained on shards, which hold no text. None is downloaded before."""
    shards = [name for name, config in configs.items() if config.kind in ("shards", "fineweb_edu")]
    if shards and tokenizer.kind == "bpe" and not tokenizer.path:
        raise UserError(
            f"tokenizer=bpe trains a vocabulary on text, but {keys[shards[0]]}.kind={configs[shards[0]].kind} holds tokens "
            f"already; choose the tokenizer they were made with: tokenizer=gpt2, or tokenizer.path=…"
        )


def tokenizer_origin(
    config: TokenizerConfig, existing: Tokenizer | None, sources: list[Source | ShardSource]
) -> list[Any]:
    """The tokenizer's entry in the list that `folder_of` hashes.

    An existing tokenizer is listed by its identity, a tokenizer to be trained by its settings and its training files.
    """
    if existing is not None:
        return [existing.identity]
    chat = ["chat"] if any(source.is_chat for source in sources) else []
    if config.kind == "gpt2":
        return ["gpt2", *chat]
    return [config.kind, config.vocab_size, [source.hashed for source in sources], *chat]


def folder_of(source: Source | ShardSource, tokenizer: TokenizerConfig, origin: list[Any], data_dir: Path) -> Path:
    """The path of the prepared folder of `source`. The folder's name ends with a hash of a list of facts on its input.

    A change of the list that is hashed would change all names, so existing folders would no longer be found.
    """
    digest = hash_of([FORMAT_VERSION, source.kind, source.hashed, origin])[:8]
    size = f"-{tokenizer.vocab_size}" if tokenizer.kind == "bpe" and tokenizer.vocab_size else ""
    return data_dir / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', source.name)}-{tokenizer.kind}{size}-{digest}"


def hash_of(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------- making the folders


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
            files.remove_unfinished(folder.partial)
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
        with contextlib.suppress(UserError):  # the folder has no complete tokenizer
            return load_tokenizer(path)
    sources = [folder.source for folder in folders]
    total_bytes = sum(source.usable_bytes or source.bytes for source in sources)
    assert isinstance(config.vocab_size, int), "auto is resolved before"
    sample_size = files.size_words(min(total_bytes, BPE_SAMPLE_BYTES))
    report(f"training a vocabulary of {config.vocab_size:,} tokens on {sample_size}")
    characters: set[str] = set()
    tokenizer = train_bpe(vocabulary_sample(sources, total_bytes, characters), config.vocab_size)
    if (n_vocab := tokenizer.n_vocab) < config.vocab_size:
        report(f"the text is too small for {config.vocab_size:,} tokens (tokenizer.vocab_size); using {n_vocab:,}")
    if len(characters) <= FEW_CHARACTERS:
        report(f"the text has only {len(characters)} different characters: consider tokenizer=byte, one token for each")
    return tokenizer


def vocabulary_sample(sources: list[Source], total_bytes: int, characters: set[str]) -> Iterator[str]:
    """All training text, or about BPE_SAMPLE_BYTES of it in evenly spaced pieces, whose characters `characters` gets."""
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
        pieces = itertools.islice(source.pieces(split), splits[split]["pieces"], None)
        while not splits[split]["done"]:
            for _ in write_shard(pieces, splits[split], tokenizer, folder, split, threads):
                if time.monotonic() - last_report >= REPORT_SECONDS:
                    last_report = time.monotonic()
                    encoded_bytes = sum(splits[each]["bytes"] for each in SPLITS)
                    report(
                        f"{source.name}: encoded {files.size_words(encoded_bytes)} of {files.size_words(total_bytes)}"
                    )
            files.flush_files_of(folder)  # first: what progress.json lists must survive a loss of power
            files.replace_text(progress_file, json.dumps(splits, indent=1))
    for split in SPLITS:
        if sum(shard["tokens"] for shard in splits[split]["shards"]) < 2:
            shutil.rmtree(folder)
            raise UserError(f"{source.key}={source.root} holds too little text to train and to validate on; add more")
    progress_file.unlink()
    return {"splits": splits}


def write_shard(
    pieces: Iterator[Piece], progress: dict[str, Any], tokenizer: Tokenizer, folder: Path, split: Split, threads: int
) -> Iterator[None]:
    """Encode the next of `pieces` as one shard. Yields after each group of pieces.

    The shard is added to `progress`, the split's entry in progress.json. The end of a shard depends on the text alone,
    not on the number of threads or on an earlier interruption.
    """
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
    """Read existing shards once, and return their part of meta.json. Raises UserError if they cannot be used."""
    if source.root.is_dir() and (source.root / "tokenizer.json").exists():
        made_with = load_tokenizer(source.root)
        if tokenizer.identity not in (made_with.identity, for_chat(made_with).identity):  # which adds tokens at its end
            raise UserError(
                f"{source.key}={source.root} was made with {made_with.identity}, not {tokenizer.identity}; set "
                f"tokenizer.path to this folder"
            )
    total_bytes = sum(size for _, size, *_ in source.hashed)
    shards = f"{len(source.files):,} shard{'s' * (len(source.files) != 1)}"
    report(f"{source.name}: checking {shards}, {files.size_words(total_bytes)}")
    digest, bytes_of_token = digest_of(source.files, tokenizer.n_vocab), tokenizer.byte_lengths()
    splits = {}
    for split, stream in zip(SPLITS, split_shards(source), strict=True):
        if len(stream) < 2:
            raise UserError(f"{source.key}={source.root} holds too few tokens to train and to validate on")
        counts = np.zeros(tokenizer.n_vocab, dtype=np.int64)  # (V,) occurrences of each token
        for tokens in in_blocks(stream):
            counts += np.bincount(tokens, minlength=tokenizer.n_vocab)
        n_document = int(counts[tokenizer.end_of_text])
        splits[split] = {"bytes": int(counts @ bytes_of_token), "documents": n_document, "shards": []}
    return {"splits": splits, "tokens_sha256": digest}


# ---------------------------------------------------------------------------------------------- completing the folder


def finish(folder: SourceFolder, tokenizer: Tokenizer, meta: dict[str, Any], report: Report) -> None:
    """Write meta.json, the last file of the folder, and rename the folder to its final name."""
    fingerprint = fingerprint_of(tokenizer.identity, meta)
    head = {"format_version": FORMAT_VERSION, "source": folder.source.name, "tokenizer": tokenizer.identity}
    files.replace_text(folder.partial / "meta.json", json.dumps(head | meta | {"fingerprint": fingerprint}, indent=1))
    files.publish_folder(folder.partial, folder.path)
    train, val = (files.size_words(meta["splits"][split]["bytes"]) for split in SPLITS)
    report(f"{folder.source.name}: prepared {train} of training text and {val} of validation text in {folder.path}")


def fingerprint_of(identity: str, meta: dict[str, Any]) -> str:
    """sha256 of the tokenizer's identity and of the tokens. Equal data have equal fingerprints on every machine."""
    shards = [[shard["sha256"] for shard in meta["splits"][split]["shards"]] for split in SPLITS]
    return hash_of([identity, meta.get("tokens_sha256"), *shards])


@contextlib.contextmanager
def writing_to(data_dir: Path, report: Report) -> Iterator[None]:
    """Make `data_dir`, and let one process at a time write to it; others report that they wait.

    An OSError, here or in the `with` block, becomes a UserError that names `data_dir`.
    """
    message = f"another process is preparing data in {data_dir}; waiting for it"
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with files.exclusive_lock(data_dir / ".lock", on_wait=lambda: report(message)):
            yield
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}" if error.filename else error.strerror  # write() names no file
        raise UserError(
            f"data_dir={data_dir} cannot be used ({reason}); set data_dir=… to a writable folder on a disk with space"
        ) from error


# ---------------------------------------------------------------------------------------------- reading the folders


def read_folder(folder: SourceFolder, tokenizer: Tokenizer) -> tuple[PreparedSource, str]:
    """A prepared source and its fingerprint. Raises UserError if the folder is damaged or has another tokenizer."""
    path, remedy = folder.path, "delete the folder to prepare it again"
    try:
        meta, digests = read_meta(path)
        identity, sizes = meta["tokenizer"], {split: meta["splits"][split]["bytes"] for split in SPLITS}
        fingerprint = fingerprint_of(identity, meta)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged (meta.json: {error}); {remedy}") from error
    if identity != tokenizer.identity:
        raise UserError(f"{path} was made with tokenizer {identity}, not {tokenizer.identity}; {remedy}")
    names = [name for split in SPLITS for name in digests[split]]
    if fingerprint != meta.get("fingerprint") or not all(SHARD_NAME.fullmatch(name) for name in names):
        raise UserError(f"{path} is damaged (meta.json was changed); {remedy}")
    if not all(type(size) is int and size >= 0 for size in sizes.values()):
        raise UserError(f"{path} is damaged (meta.json has impossible byte counts: {sizes}); {remedy}")
    if isinstance(folder.source, Source):
        verify(path, digests["train"] | digests["val"], tokenizer.n_vocab)
        train, val = (TokenStream.open([path / name for name in digests[split]]) for split in SPLITS)
    else:
        train, val = split_shards(folder.source)
    if min(len(train), len(val)) < 2:
        raise UserError(f"{path} is damaged: too few tokens to train and to validate on; {remedy}")
    source = PreparedSource(folder.source.name, folder.weight, train, val, sizes["train"], sizes["val"], path)
    if folder.source.is_chat:
        assert isinstance(tokenizer, ChatTokenizer), tokenizer
        source = dataclasses.replace(source, chat=tokenizer, pairs=folder.source.kind == "pairs")
    return source, fingerprint


def read_meta(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """The content of meta.json, and of each split the sha256 of its shards. Raises OSError or what the content provokes."""
    meta = files.from_json(files.read_plain_file(folder / "meta.json", LARGEST_JSON_BYTES))
    shards = {split: meta["splits"][split]["shards"] for split in SPLITS}
    return meta, {split: {str(s["file"]): str(s["sha256"]) for s in shards[split]} for split in SPLITS}


def find_held_out(data_dir: Path, fingerprint: str, name: str) -> TokenStream | None:
    """The held-out tokens of a corpus of one source, by the corpus' fingerprint; None if it is not prepared in data_dir.

    name: of the source. Nothing is prepared or downloaded. Raises UserError if the folder is damaged.
    """
    data_dir, names = data_dir.expanduser(), []
    with files.reading(data_dir), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = sorted(os.listdir(data_dir))
    for path in (data_dir / each for each in names if each.startswith(f"{name}-")):
        with files.reading(path):  # else another text would be taken in silence
            try:
                meta, digests = read_meta(path)
                found = hash_of([meta["tokenizer"], [[name, None, meta["fingerprint"]]]])
            except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
                continue  # not a folder of prepared text
        both = digests["train"] | digests["val"]
        if found == fingerprint and digests["val"] and all(SHARD_NAME.fullmatch(each) for each in both):
            verify(path, both, load_tokenizer(path).n_vocab)
            return TokenStream.open([path / each for each in digests["val"]])
    return None


def held_out_of_run(state: dict[str, Any], data_dir: Path) -> TokenStream | None:
    """The held-out tokens of a run, by its checkpoint's state; None if they are not in data_dir, or of several sources."""
    data = state["config"].get("data") or {}
    if data.get("kind") in ("chat", "python_chat"):  # `evaluate tasks=chat` judges answers
        return None
    return find_held_out(data_dir, state.get("data", ""), data.get("kind") or "")


def verify(folder: Path, digests: dict[str, str], n_vocab: int) -> None:
    """Compare the sha256 of each shard that has changed since its last check. Raises UserError if one differs."""
    known = remembered(folder / VERIFIED)
    stamps = {}
    for name, digest in digests.items():
        path = folder / name
        try:
            stamps[name] = stamp(path.stat())
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); delete {folder} to prepare it again") from error
        if known.get(name) != stamps[name] and digest_of([path], n_vocab) != digest:
            raise UserError(f"{path} was changed: meta.json has another sha256; delete {folder} to prepare it again")
    if stamps != known:
        remember(folder / VERIFIED, stamps)
