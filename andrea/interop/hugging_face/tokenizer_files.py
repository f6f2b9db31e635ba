"""The tokenizer's files for transformers: tokenizer.json, which the tokenizers library reads, and its configuration.

The merges of byte-pair encoding come from the ranks of its tokens. Tokens are written as in GPT-2's files.
"""

import json
from pathlib import Path
from typing import Any

from andrea.config import UserError
from andrea.text.chat import CHAT_TEMPLATE, without_special
from andrea.text.load_tokenizer import BYTE_LEVEL, HF_FILE, HfTokenizer, what_is_read
from andrea.text.tokenizer import END_OF_TEXT, RankTokenizer, Tokenizer, visible_bytes

LARGEST_RANK = 1 << 62
CHARACTERS = {value: character for character, value in visible_bytes().items()}


def write_tokenizer(folder: Path, tokenizer: Tokenizer, sequence_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises UserError for a tokenizer that cannot be written.

    End-of-text is put in front of a text, as before each document.
    A tokenizer for chat gets the template of its conversations. Text that looks like a special token is then read as this
    token, as with other programs' chat models, unless they are asked for split_special_tokens=True.
    """
    base = without_special(tokenizer)
    is_read = isinstance(base, HfTokenizer)
    end_name = base.end_name if is_read else END_OF_TEXT
    content = what_is_read(base.content, Path(HF_FILE)) if is_read else tokenizer_json(base)
    content |= {"post_processor": in_front(end_name, base.end_of_text)}  # which the files of some models do not have
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_name,
        "eos_token": end_name,
        "pad_token": end_name,
        "model_max_length": sequence_length,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # "<|endoftext|>" in a text is text, as here, and not the token
        "add_prefix_space": False,
    }
    if tokenizer.special:
        added = [special_token(name, token) for name, token in tokenizer.special.items()]
        content |= {"added_tokens": [*content["added_tokens"], *added]}
        if is_read:  # the model may have rows without a token in front of them
            content |= {"model": with_ids(content["model"], content["added_tokens"])}
        settings |= {"chat_template": CHAT_TEMPLATE, "split_special_tokens": False}
    for name, plain in (("tokenizer.json", content), ("tokenizer_config.json", settings)):
        (folder / name).write_text(json.dumps(plain, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """Byte-level byte-pair encoding with GPT-2's pattern."""
    end, visible = tokenizer.end_of_text, visible_tokens(tokenizer)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special_token(END_OF_TEXT, end)],
        "normalizer": None,
        "pre_tokenizer": BYTE_LEVEL,
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(visible) if number != end},
            "merges": [list(pair) for pair in visible_merges(tokenizer)],
        },
    }


def with_ids(model: dict[str, Any], added: list[dict[str, Any]]) -> dict[str, Any]:
    """The model of a tokenizer.json, with added tokens in its vocabulary: the library numbers all others without a gap."""
    return model | {"vocab": model["vocab"] | {each["content"]: each["id"] for each in added}}


def special_token(name: str, token: int) -> dict[str, Any]:
    about = {"id": token, "content": name, "special": True, "normalized": False}
    return about | {"single_word": False, "lstrip": False, "rstrip": False}


def in_front(name: str, token: int) -> dict[str, Any]:
    """A post-processor that puts the token in front of a text, and of each text of a pair."""
    one, two = (
        [{"SpecialToken": {"id": name, "type_id": kind}}, {"Sequence": {"id": sequence, "type_id": kind}}]
        for kind, sequence in enumerate("AB")
    )
    special_tokens = {name: {"id": name, "ids": [token], "tokens": [name]}}
    return {"type": "TemplateProcessing", "single": one, "pair": one + two, "special_tokens": special_tokens}


def merges_of(tokenizer: Tokenizer) -> list[tuple[bytes, bytes]]:
    """The pair that makes each token of more than one byte, in the order of the ranks. A byte tokenizer has none.

    A token's pair is what remains of its bytes when all merges of lower ranks are done. Raises UserError if more than two
    parts remain: then no text is encoded as this token, and merges cannot say so.
    """
    if not isinstance(tokenizer, RankTokenizer):
        return []
    merges = []
    for token in tokenizer.table[:-1]:
        if len(token) == 1:
            continue
        parts = merged_below(token, tokenizer.ranks)
        if len(parts) != 2:
            raise UserError(
                f"the tokenizer {tokenizer.identity} cannot be exported: its token {token!r} is not made of two others; train "
                f"one with tokenizer=bpe"
            )
        merges.append((parts[0], parts[1]))
    return merges


def merged_below(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The parts of `token` after all merges whose rank is below its own, lowest rank first."""
    parts, limit = [token[i : i + 1] for i in range(len(token))], ranks[token]
    while len(parts) > 2:
        pairs = [ranks.get(first + second, LARGEST_RANK) for first, second in zip(parts, parts[1:], strict=False)]
        lowest = min(pairs)
        if lowest >= limit:
            break
        place = pairs.index(lowest)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def visible(token: bytes) -> str:
    return "".join(CHARACTERS[value] for value in token)


def visible_tokens(tokenizer: Tokenizer) -> list[str]:
    """Each of the V tokens as printable characters, one per byte, as in GPT-2's vocabulary; end-of-text by its name."""
    tokens = [visible(token) for token in tokenizer.token_bytes()]
    for name, token in {END_OF_TEXT: tokenizer.end_of_text, **tokenizer.special}.items():
        tokens[token] = name
    return tokens


def visible_merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """The pairs of `merges_of` as printable characters."""
    return [(visible(first), visible(second)) for first, second in merges_of(without_special(tokenizer))]
