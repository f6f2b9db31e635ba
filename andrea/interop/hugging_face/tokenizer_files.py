"""The tokenizer's files for transformers: tokenizer.json, which the tokenizers library reads, and its configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from andrea.interop.merges import visible_merges, visible_tokens
from andrea.text.tokenizer import END_OF_TEXT, Tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer, sequence_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises UserError for a tokenizer that cannot be written."""
    for name, content in (
        ("tokenizer.json", tokenizer_json(tokenizer)),
        ("tokenizer_config.json", tokenizer_config(sequence_length)),
    ):
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """Byte-level byte-pair encoding with GPT-2's pattern. End-of-text is put in front of a text, as before each document."""
    end, visible = tokenizer.end_of_text, visible_tokens(tokenizer)
    special = {"id": end, "content": END_OF_TEXT, "special": True, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    template = [{"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    second = [{"SpecialToken": {"id": END_OF_TEXT, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special | {"single_word": False, "lstrip": False, "rstrip": False}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": template,
            "pair": template + second,
            "special_tokens": {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [end], "tokens": [END_OF_TEXT]}},
        },
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


def tokenizer_config(sequence_length: int) -> dict[str, Any]:
    """split_special_tokens: "<|endoftext|>" in a text is text, as here, and not the token."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": sequence_length,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        "add_prefix_space": False,
    }
