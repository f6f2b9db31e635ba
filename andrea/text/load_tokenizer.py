"""Tokenizers from files: of a checkpoint or prepared data, of GPT-2, and of other models (tokenizer.json).

Of other models only byte-level tokenizers are taken: those of GPT-2, Llama 3, Qwen, SmolLM, Pythia and their descendants.
Their tokens have known bytes, so bits per byte and text that is written token by token are exact.
"""

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

import numpy as np

from andrea.config import LARGEST_VOCABULARY, TokenizerConfig, UserError
from andrea.runtime.files import from_json, read_plain_file
from andrea.text.chat import SPECIAL, ChatTokenizer, without_special
from andrea.text.shards import token_type
from andrea.text.tokenizer import (
    DESCRIPTION,
    END_OF_TEXT,
    LARGEST_FILE_BYTES,
    RANKS,
    ByteTokenizer,
    RankTokenizer,
    Tokenizer,
    visible_bytes,
    without_surrogates,
)

CONFIGS = ("tokenizer_config.json", "generation_config.json", "config.json")  # beside a tokenizer.json elsewhere
USUAL_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
NORMALIZERS = frozenset(("NFC", "NFD", "NFKC", "NFKD", "Lowercase"))
PRE_TOKENIZERS = frozenset(("ByteLevel", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"))
MODEL_KEYS = ("type", "vocab", "merges", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges")
MOST_STEPS = 16
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
HF_FILE = "tokenizer.hf.json"  # the library's file in a folder of ours, whose tokenizer.json is our description
# GPT-2's merges: the published file, its name in tiktoken's cache (the sha1 of its address), and the sha256 of its content
GPT2_MERGES = "vocab.bpe"
GPT2_CACHED = "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"
GPT2_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `save` wrote to `folder`, or that of another model, by its tokenizer.json.

    Raises UserError if a file is missing or damaged.
    """
    path = folder / DESCRIPTION
    try:
        description = from_json(read_plain_file(path, LARGEST_FILE_BYTES))
        if isinstance(description, dict) and "model" in description:
            return load_hf_tokenizer(folder)
        identity, is_chat = description["identity"], "special" in description
        found = described_tokenizer(folder, description["base"] if is_chat else description)
        found = ChatTokenizer(found) if is_chat else found
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


def described_tokenizer(folder: Path, description: dict[str, Any]) -> Tokenizer:
    """The tokenizer without special tokens that `description` describes, with the files of `folder`."""
    kind = description["kind"]
    if kind in RankTokenizer.KINDS:
        return RankTokenizer(kind, read_ranks(folder / RANKS))
    if kind == "byte":
        return ByteTokenizer()
    if kind != "hf":
        raise ValueError(f"unknown kind {kind}")
    if type(description["end_of_text"]) is not int:
        raise ValueError("end_of_text is not a token")
    content = read_plain_file(folder / HF_FILE, LARGEST_FILE_BYTES)
    return HfTokenizer(content, description["end_of_text"], description["n_vocab"], folder / HF_FILE)


def read_ranks(path: Path) -> dict[bytes, int]:
    """The id of each token's bytes, by a rank file: lines of base64 and a number. Raises UserError and OSError."""
    try:
        fields = [line.split() for line in read_plain_file(path, LARGEST_FILE_BYTES).split(b"\n") if line.strip()]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in fields}
    except (ValueError, binascii.Error) as error:
        raise UserError(f"{path} is not a rank file (lines of base64 and a number); check tokenizer.path") from error
    n_single = sum(len(token) == 1 for token in ranks)
    if n_single != 256 or sorted(ranks.values()) != list(range(len(fields))):
        raise UserError(f"{path} is damaged: it must hold all 256 bytes, and each rank exactly once; copy it again")
    if len(ranks) >= LARGEST_VOCABULARY:
        raise UserError(f"{path} holds {len(ranks)} tokens, more than {LARGEST_VOCABULARY - 1}; check tokenizer.path")
    return ranks


def configured_tokenizer(config: TokenizerConfig) -> Tokenizer | None:
    """The tokenizer that `config` names; None if it must be trained on the corpus. Raises UserError if it is unusable."""
    if config.kind == "byte":
        return from_path(Path(config.path).expanduser(), "byte") if config.path else ByteTokenizer()
    if config.kind == "gpt2":
        return load_gpt2(config.path)
    path = Path(config.path or "").expanduser()
    if not config.path:
        return None
    found = from_path(path, config.kind)
    # A run that was tuned for chat keeps the size that it began with.
    if config.vocab_size not in (None, "auto", found.n_vocab, without_special(found).n_vocab):
        raise UserError(
            f"tokenizer.path={config.path} holds {found.n_vocab} tokens, not tokenizer.vocab_size={config.vocab_size}; "
            f"set tokenizer.vocab_size={found.n_vocab}"
        )
    return found


def from_path(path: Path, kind: str) -> Tokenizer:
    """The tokenizer at `path`: a rank file, a tokenizer.json or its folder, or GPT-2's list of merges. Raises UserError."""
    if not os.path.exists(path):
        raise UserError(f"tokenizer.path={path} does not exist; name a .tiktoken file or a folder with {DESCRIPTION}")
    path = path.parent if path.name == DESCRIPTION else path
    if os.path.isfile(path) and kind != "byte":
        return load_hf_tokenizer(path) if kind == "hf" else RankTokenizer(kind, read_ranks(path))
    if not os.path.exists(path / DESCRIPTION):
        if kind == "gpt2":
            return from_merges(path)
        raise UserError(f"tokenizer.path={path} has no {DESCRIPTION}; name a checkpoint, prepared data or a rank file")
    found = load_tokenizer(path)
    if found.kind != kind:
        raise UserError(f"tokenizer.path={path} holds {found.identity}; choose tokenizer={found.kind}, not {kind}")
    return found


def load_gpt2(path: str | None) -> Tokenizer:
    """GPT-2's tokenizer from `path`; if it is None, from tiktoken's cache or the network. Raises UserError."""
    if path is None:
        import tiktoken

        try:
            return RankTokenizer("gpt2", tiktoken.get_encoding("gpt2")._mergeable_ranks)
        except (OSError, ValueError) as error:  # of requests, too
            raise UserError(
                f"GPT-2's vocabulary is not in tiktoken's cache and cannot be downloaded ({type(error).__name__}); copy "
                f"{GPT2_MERGES} into a folder, under this name or under that of the cache ({GPT2_CACHED}), and set "
                f"tokenizer.path=FOLDER"
            ) from error
    found = from_path(Path(path).expanduser(), "gpt2")
    if without_special(found).n_vocab != 50257:
        raise UserError(f"tokenizer.path={path} holds {found.n_vocab} tokens, GPT-2 has 50257; choose tokenizer=bpe")
    return found


def from_merges(folder: Path) -> Tokenizer:
    """GPT-2's tokenizer from its list of merges, which has its published name or its name in tiktoken's cache."""
    found = next((folder / name for name in (GPT2_CACHED, GPT2_MERGES) if os.path.isfile(folder / name)), None)
    if found is None:
        raise UserError(f"tokenizer.path={folder} lacks {GPT2_MERGES} (or {GPT2_CACHED}, its name in tiktoken's cache)")
    content = found.read_bytes()
    if hashlib.sha256(content).hexdigest() != GPT2_SHA256:
        raise UserError(f"{found} is damaged: its sha256 differs from that of GPT-2's {GPT2_MERGES}; copy it again")
    byte_of = visible_bytes()
    merges = [line.split() for line in content.decode().split("\n")[1:-1]]
    tokens = [*byte_of, *(first + second for first, second in merges)]
    return RankTokenizer("gpt2", {bytes(byte_of[c] for c in token): rank for rank, token in enumerate(tokens)})


# ------------------------------------------------------------------------------------------------- of other models


@final
class HfTokenizer(Tokenizer):
    """content: of a tokenizer.json. n_vocab: rows of the model's embedding; rows without a token have no bytes.

    end_of_text: the id that stands in front of every document. Raises UserError for a tokenizer whose tokens have no known
    bytes, or that does not fit n_vocab.
    """

    def __init__(self, content: bytes, end_of_text: int, n_vocab: int, path: Path) -> None:
        import tokenizers

        plain = what_is_read(content, path)
        for each in plain["added_tokens"]:  # of which the library leaves the special ones alone
            each["special"] = each.get("special") or each["id"] == end_of_text
        with foreign_library(f"{path} cannot be read by the tokenizers library"):
            self.library = tokenizers.Tokenizer.from_str(json.dumps(plain))
        self.library.encode_special_tokens = True  # "<|endoftext|>" in a text is text
        ids = self.library.get_vocab(with_added_tokens=True).values()
        largest = max(ids, default=-1)
        if end_of_text not in ids or not largest < n_vocab <= LARGEST_VOCABULARY:
            raise UserError(
                f"{path} has token ids up to {largest}, and end-of-text is {end_of_text}, but the model has {n_vocab} tokens (at "
                f"most {LARGEST_VOCABULARY} are possible); name the tokenizer that belongs to the model"
            )
        self.kind, self.content, self.end_of_text, self.n_vocab = "hf", content, end_of_text, n_vocab
        self.ends = (end_of_text,)
        self.digest = hashlib.sha256(content).hexdigest()
        about = hashlib.sha256(f"{self.digest} {end_of_text}".encode()).hexdigest()
        self.identity = f"hf-{n_vocab}-{about[:8]}"
        self.table = [b""] * n_vocab
        byte_of, added = visible_bytes(), set(self.library.get_added_tokens_decoder())
        for token, number in self.library.get_vocab(with_added_tokens=True).items():
            self.table[number] = token.encode() if number in added else bytes(byte_of[each] for each in token)
        self.table[end_of_text] = b""
        self.end_name = self.library.id_to_token(end_of_text) or ""

    def encode_array(self, text: str) -> np.ndarray:
        with foreign_library("the tokenizer of the model cannot encode a text"):
            found = self.library.encode(without_surrogates(text), add_special_tokens=False)
        return np.array(found.ids, dtype=token_type(self.n_vocab))

    def token_bytes(self) -> list[bytes]:
        return self.table

    def save(self, folder: Path) -> None:
        (folder / HF_FILE).write_bytes(self.content)
        super().save(folder)

    def description(self) -> dict[str, Any]:
        return super().description() | {"sha256": self.digest}


@contextmanager
def foreign_library(what_fails: str) -> Iterator[None]:
    """Where another program's library reads somebody's file: whatever it raises becomes one line, a UserError."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, ImportError):
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        line = (str(error).strip() or type(error).__name__).partition("\n")[0]
        raise UserError(f"{what_fails} ({line:.200}); copy it again") from None


def what_is_read(content: bytes, path: Path) -> dict[str, Any]:
    """The parts of a tokenizer.json that decide a text's ids. Only kinds and settings listed here reach the library.

    Others can fill the memory (padding to 10^9 tokens, a normalizer that lets texts grow), abort the process, or differ at
    each call (dropout). Raises UserError.
    """
    try:
        plain = from_json(content)
        model, added = plain["model"], plain["added_tokens"]
        if not (plain["decoder"]["type"] == "ByteLevel" and is_visible(model["vocab"], added)):
            raise UserError(
                f"{path} has tokens whose bytes are not known: its decoder is not ByteLevel; only byte-level tokenizers, such as "
                f"those of GPT-2, Llama 3, Qwen and SmolLM, can be read"
            )
        unlike = [key for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
        if model.get("type", "BPE") != "BPE" or unlike:
            raise UserError(f"{path} has a model with {(*unlike, 'type')[0]}, which cannot be read; only plain BPE can")
        if not all(type(number) is int for number in (*model["vocab"].values(), *(each["id"] for each in added))):
            raise UserError(f"{path} has tokens whose ids are no numbers; copy it again")
        normalizer, pre_tokenizer = plain.get("normalizer"), plain.get("pre_tokenizer")
        kinds = [check_steps(normalizer, NORMALIZERS, path), check_steps(pre_tokenizer, PRE_TOKENIZERS, path)]
    except UserError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is not a tokenizer.json ({error!s:.200}); copy it again") from None
    if kinds[1].count("ByteLevel") > 1 or max(map(len, kinds)) > MOST_STEPS:  # each ByteLevel doubles a text
        raise UserError(f"{path} has too many steps before its model: {', '.join(kinds[1]):.200}; copy it again")
    kept = {"version": "1.0", "added_tokens": added, "decoder": BYTE_LEVEL, "normalizer": normalizer}
    return kept | {"pre_tokenizer": pre_tokenizer, "model": {key: model[key] for key in MODEL_KEYS if key in model}}


def is_visible(vocabulary: dict[str, int], added: list[dict[str, Any]]) -> bool:
    """Whether each token of the vocabulary is written with one visible character per byte."""
    known = visible_bytes().keys()
    return all(known >= set(token) for token in vocabulary.keys() - {each["content"] for each in added})


def check_steps(step: Any, known: frozenset[str], path: Path) -> list[str]:
    """The kinds of steps in a normalizer or a pre-tokenizer. Raises UserError for one that is not known."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        inner = [*step.get("normalizers", ()), *step.get("pretokenizers", ())]
        return [kind for each in inner for kind in check_steps(each, known, path)]
    if step["type"] not in known:
        raise UserError(f"{path} has the unknown step {step['type']!r:.60}; known: {', '.join(sorted(known))}")
    return [step["type"]]


def load_hf_tokenizer(path: Path, n_vocab: int | None = None) -> HfTokenizer | ChatTokenizer:
    """From a tokenizer.json, or a folder that holds one. n_vocab: rows of the model; by default one for each token.

    One whose last tokens are those of our conversations, as an export of a tuned model has them, becomes a tokenizer for chat.

    Raises UserError if it is missing or damaged, or if no token is known to end a text.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        content = read_plain_file(file, LARGEST_FILE_BYTES)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); name a tokenizer.json, or its folder") from None
    plain = what_is_read(content, file)
    ids = {**plain["model"]["vocab"], **{each["content"]: each["id"] for each in plain["added_tokens"]}}
    end = front_token(content)
    if end is None:
        end = named_end(file.parent, ids)
    if type(end) is not int:
        named = f"in {', '.join(CONFIGS)}, nor by a usual name ({', '.join(USUAL_ENDS)})"
        raise UserError(f"{file.parent} names no end-of-text token {named}; copy the files beside tokenizer.json too")
    n_vocab = n_vocab or max(ids.values(), default=0) + 1
    if [ids.get(name) for name in SPECIAL] != list(range(n_vocab - len(SPECIAL), n_vocab)):
        return HfTokenizer(content, end, n_vocab, file)
    whole = from_json(content)
    whole["added_tokens"] = [each for each in whole["added_tokens"] if each["content"] not in SPECIAL]
    vocabulary = whole["model"]["vocab"]  # as of an export
    whole["model"]["vocab"] = {token: number for token, number in vocabulary.items() if token not in SPECIAL}
    return ChatTokenizer(HfTokenizer(json.dumps(whole).encode(), end, n_vocab - len(SPECIAL), file))


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
