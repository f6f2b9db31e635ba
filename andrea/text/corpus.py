"""The corpus of a run: prepared folders of token shards, with a hash of their input in the folder's name.

    data_dir/pystdlib-bpe-4096-1a2b3c4d/   train-000000.bin … val-000000.bin, tokenizer.json (and .tiktoken), meta.json,
                                           verified.json (may be deleted: the shards are then read and verified again)

The hash covers the names, sizes and times of the source's files, and the tokenizer's settings. To find prepared data, a
run therefore only lists the source's files. `andrea.text.prepare` makes a folder that does not exist.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andrea.config import DataConfig, SourceConfig, TokenizerConfig, UserError
from andrea.runtime.files import from_json, read_plain_file, reading
from andrea.text.chat import ChatTokenizer, for_chat
from andrea.text.download import FINEWEB_EDU, SHAKESPEARE, fetch
from andrea.text.listing import Selection
from andrea.text.load_tokenizer import configured_tokenizer, load_tokenizer
from andrea.text.prepare import FORMAT_VERSION, SPLITS, SourceFolder, fingerprint_of, prepare, writing_to
from andrea.text.python_chat import python_chat_in
from andrea.text.shards import ShardSource, TokenStream, digest_of, find_shards, split_shards, stamp
from andrea.text.sources import Report, Source
from andrea.text.tokenizer import Tokenizer, vocabulary_for

SHARD_NAME = re.compile(r"(train|val)-\d{6,}\.bin")
LARGEST_JSON_BYTES = 1 << 26
TEXT_BYTES = ".text-bytes.json"  # of each source of text that was read, by a hash of its files
VERIFIED = "verified.json"  # size and times of each shard at its last successful sha256 check


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
    configs = data.sources if data.kind == "mixture" else {data.kind: alone}
    keys = {name: f"data.sources.{name}" if data.kind == "mixture" else "data" for name in configs}
    sources = [find_source(name, config, keys[name], data_dir, report, pairs) for name, config in configs.items()]
    check_weights(configs)
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
    fingerprint = corpus_fingerprint(loaded.identity, fingerprints)
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
    selection = Selection(tuple(config.include), tuple(config.exclude), config.field)
    return Source(name, kind, path, f"{key}.path", selection)


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
    n_byte = sum(bytes_of_text(source, data_dir, report) for source in sources if isinstance(source, Source))
    return dataclasses.replace(config, vocab_size=vocabulary_for(n_byte))


def bytes_of_text(source: Source, data_dir: Path, report: Report) -> int:
    """The bytes of text that the source's files hold. They are read the first time; data_dir/.text-bytes.json remembers."""
    if source.kind == "pystdlib":
        return source.bytes  # all of each file
    file, name = data_dir / TEXT_BYTES, hash_of([FORMAT_VERSION, str(source.root.resolve()), source.hashed])
    known = remembered(file)
    if type(known.get(name)) is not int:
        known[name] = source.check(report)
        remember(file, known)
    return known[name]


def remembered(file: Path) -> dict[str, Any]:
    """What `remember` has written; nothing if the file is missing or incomplete."""
    try:
        known = from_json(read_plain_file(file, LARGEST_JSON_BYTES))
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
            f"data.sources.{unset[0]}.weight is missing, and the other weights already sum to {sum(given):g}; set "
            f"this weight, or lower the other weights to a sum below 1"
        )


def tokenizer_origin(
    config: TokenizerConfig, existing: Tokenizer | None, sources: list[Source | ShardSource]
) -> list[Any]:
    """The tokenizer's entry in the list that `folder_of` hashes.

    An existing tokenizer is listed by its identity, a tokenizer to be trained by its settings and its training files.
    Raises UserError if the tokenizer would have to be trained on shards, because shards contain no text.
    """
    if existing is not None:
        return [existing.identity]
    chat = ["chat"] if any(source.is_chat for source in sources) else []
    if config.kind == "gpt2":
        return ["gpt2", *chat]
    shards = [source for source in sources if isinstance(source, ShardSource)]
    if shards:
        raise UserError(
            f"tokenizer=bpe trains a vocabulary on text, but {shards[0].key}={shards[0].root} holds tokens already; "
            f"choose the tokenizer they were made with: tokenizer=gpt2, or tokenizer.path=…"
        )
    return [config.kind, config.vocab_size, [source.hashed for source in sources], *chat]


def folder_of(source: Source | ShardSource, tokenizer: TokenizerConfig, origin: list[Any], data_dir: Path) -> Path:
    """The path of the prepared folder of `source`. The folder's name ends with a hash of a list of facts on its input.

    A change of the list that is hashed would change all names, so existing folders would no longer be found.
    """
    digest = hash_of([FORMAT_VERSION, source.kind, source.hashed, origin])
    size = f"-{tokenizer.vocab_size}" if tokenizer.kind == "bpe" and tokenizer.vocab_size else ""
    return data_dir / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', source.name)}-{tokenizer.kind}{size}-{digest}"


def hash_of(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode("utf-8", "surrogatepass")).hexdigest()[:8]


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
    meta = from_json(read_plain_file(folder / "meta.json", LARGEST_JSON_BYTES))
    shards = {split: meta["splits"][split]["shards"] for split in SPLITS}
    return meta, {split: {str(s["file"]): str(s["sha256"]) for s in shards[split]} for split in SPLITS}


def find_held_out(data_dir: Path, fingerprint: str, name: str) -> TokenStream | None:
    """The held-out tokens of a corpus of one source, by the corpus' fingerprint; None if it is not prepared in data_dir.

    name: of the source. Nothing is prepared or downloaded. Raises UserError if the folder is damaged.
    """
    data_dir, names = data_dir.expanduser(), []
    with reading(data_dir), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = sorted(os.listdir(data_dir))
    for path in (data_dir / each for each in names if each.startswith(f"{name}-")):
        with reading(path):  # else another text would be taken in silence
            try:
                meta, digests = read_meta(path)
                found = corpus_fingerprint(meta["tokenizer"], [[name, None, meta["fingerprint"]]])
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


def corpus_fingerprint(identity: str, sources: list[list[Any]]) -> str:
    """The sha256 of the tokenizer's identity, and of each source's name, weight and fingerprint."""
    return hashlib.sha256(json.dumps([identity, sources]).encode()).hexdigest()


def verify(folder: Path, digests: dict[str, str], n_vocab: int) -> None:
    """Compare the sha256 of each shard that has changed since its last check. Raises UserError if one differs."""
    known = remembered(folder / VERIFIED)
    stamps = {}
    for name, digest in digests.items():
        path = folder / name
        try:
            stamps[name] = stamp(path.stat())
        except OSError as error:
            why = f"{path} cannot be read ({error.strerror})"
            raise UserError(f"{why}; delete its folder to prepare it again") from error
        if known.get(name) != stamps[name] and digest_of(path, n_vocab) != digest:
            raise UserError(
                f"{path} was changed: its sha256 is not the one in meta.json; delete {folder} to prepare it again"
            )
    if stamps != known:
        remember(folder / VERIFIED, stamps)
