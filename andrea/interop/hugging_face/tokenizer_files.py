"""The tokenizer's files for transformers: tokenizer.json, which the tokenizers library reads, and its configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from andrea.interop.merges import visible_merges, visible_tokens
from andrea.text.load_tokenizer import HfTokenizer
from andrea.text.tokenizer import END_OF_TEXT, Tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer, sequence_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises UserError for a tokenizer that cannot be written."""
    is_read = isinstance(tokenizer, HfTokenizer)
    for name, content in (
        ("tokenizer.json", with_front_token(tokenizer) if is_read else tokenizer_json(tokenizer)),
        ("tokenizer_config.json", tokenizer_config(sequence_length, tokenizer.end_name if is_read else END_OF_TEXT)),
    ):
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """Byte-level byte-pair encoding with GPT-2's pattern. End-of-text is put in front of a text, as before each document."""
    end, visible = tokenizer.end_of_text, visible_tokens(tokenizer)
    special = {"id": end, "content": END_OF_TEXT, "special": True, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special | {"single_word": False, "lstrip": False, "rstrip": False}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": in_front(END_OF_TEXT, end),
        "decoder": byte_level,
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


def with_front_token(tokenizer: HfTokenizer) -> dict[str, Any]:
    """What was read of a tokenizer.json, which now puts end-of-text in front of a text; some models' files do not."""
    return tokenizer.as_read() | {"post_processor": in_front(tokenizer.end_name, tokenizer.end_of_text)}


def in_front(name: str, token: int) -> dict[str, Any]:
    """A post-processor that puts the token in front of a text, and of each text of a pair."""
    one, two = (
        [{"SpecialToken": {"id": name, "type_id": kind}}, {"Sequence": {"id": sequence, "type_id": kind}}]
        for kind, sequence in enumerate("AB")
    )
    special_tokens = {name: {"id": name, "ids": [token], "tokens": [name]}}
    return {"type": "TemplateProcessing", "single": one, "pair": one + two, "special_tokens": special_tokens}


def tokenizer_config(sequence_length: int, end_name: str) -> dict[str, Any]:
    """end_name: of the end-of-text token. split_special_tokens: "<|endoftext|>" in a text is text, as here, and not the token."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_name,
        "eos_token": end_name,
        "pad_token": end_name,
        "model_max_length": sequence_length,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        "add_prefix_space": False,
    }
