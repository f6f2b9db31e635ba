"""The tokenizer of a GGUF file. llama.cpp does not read patterns from the file: it knows some pre-tokenizers by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from andrea.config import UserError
from andrea.interop.merges import visible_merges, visible_tokens
from andrea.text.load_tokenizer import HfTokenizer
from andrea.text.tokenizer import Tokenizer

# The patterns of Llama 3 and of Qwen2 and 3, as tokenizer.json writes them. They differ in how many digits stay together.
LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
# Steps of a pre-tokenizer, and model.ignore_merges -> llama.cpp's name.
NAMES: dict[tuple[tuple[tuple[str, Any], ...], bool], str] = {
    ((("ByteLevel", True),), False): "gpt-2",
    ((("Split", QWEN_2), ("ByteLevel", False)), False): "qwen2",
    ((("Split", LLAMA_3), ("ByteLevel", False)), True): "llama-bpe",
}
NFC = {"type": "NFC"}
HINT = "export with to=hf"


@dataclass(frozen=True)
class GgufTokenizer:
    """pre: llama.cpp's name of the pre-tokenizer. tokens: the V tokens; kinds: of each, a name of gguf.TokenType.

    merges: two tokens with a space between. normalised: what must be done to a text before llama.cpp reads it.
    """

    pre: str
    tokens: list[str]
    kinds: list[str]
    merges: list[str]
    normalised: Callable[[str], str] | None = None


def gguf_tokenizer(tokenizer: Tokenizer) -> GgufTokenizer:
    """Raises UserError for a tokenizer that llama.cpp has no counterpart of."""
    if isinstance(tokenizer, HfTokenizer):
        return of_tokenizer_json(tokenizer)
    if tokenizer.kind == "byte":
        raise UserError(f"to=gguf: llama.cpp has no tokenizer of single bytes; train with tokenizer=bpe, or {HINT}")
    kinds = ["NORMAL"] * tokenizer.n_vocab
    kinds[tokenizer.end_of_text] = "CONTROL"
    merges = [f"{first} {second}" for first, second in visible_merges(tokenizer)]
    return GgufTokenizer("gpt-2", visible_tokens(tokenizer), kinds, merges)


def of_tokenizer_json(tokenizer: HfTokenizer) -> GgufTokenizer:
    """The tokens, kinds and merges of a tokenizer.json; rows of the embedding without a token are unused."""
    plain = tokenizer.as_read()
    model = plain["model"]
    pre = pre_name(plain)
    tokens, kinds = [f"[PAD{number}]" for number in range(tokenizer.n_vocab)], ["UNUSED"] * tokenizer.n_vocab
    for token, number in model["vocab"].items():
        tokens[number], kinds[number] = token, "NORMAL"
    for added in plain["added_tokens"]:
        if not added.get("special") and (
            flags := [key for key in ("lstrip", "rstrip", "single_word") if added.get(key)]
        ):
            raise UserError(
                f"to=gguf: the token {added['content']!r:.60} of tokenizer.json has {flags[0]}=true, which a GGUF file cannot say; "
                f"{HINT}"
            )
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = "CONTROL" if added.get("special") else "USER_DEFINED"
    kinds[tokenizer.end_of_text] = "CONTROL"
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    normaliser = tokenizer.library.normalizer
    return GgufTokenizer(pre, tokens, kinds, merges, None if normaliser is None else normaliser.normalize_str)


def pre_name(plain: dict[str, Any]) -> str:
    """llama.cpp's name of what a tokenizer.json does before its merges. Raises UserError if it has none."""
    model, normalizer = plain["model"], plain.get("normalizer")
    if unlike := [key for key in ("unk_token", "byte_fallback") if model.get(key)]:
        raise UserError(
            f"to=gguf: {unlike[0]}={model[unlike[0]]!r:.60} of tokenizer.json is unknown to llama.cpp; {HINT}"
        )
    if normalizer not in (None, NFC):
        raise UserError(
            f"to=gguf: llama.cpp does not normalise text, as this tokenizer.json does ({normalizer.get('type')}); {HINT}"
        )
    steps = tuple(map(step_of, steps_in(plain.get("pre_tokenizer"))))
    name = NAMES.get((steps, bool(model.get("ignore_merges"))))
    if name is None:
        listed = ", ".join(f"{kind} {what}" for kind, what in steps) or "none"
        raise UserError(
            f"to=gguf: llama.cpp has no pre-tokenizer like that of this tokenizer.json ({listed:.200}); known are those of GPT-2, "
            f"Llama 3 and Qwen2; {HINT}"
        )
    return name


def steps_in(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    return pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]


def step_of(step: dict[str, Any]) -> tuple[str, Any]:
    """The kind of a step and what it does. A step with unusual settings gets all of them, which no known one has."""
    kind = step.get("type")
    if kind == "ByteLevel" and not step.get("add_prefix_space", True):
        return kind, step.get("use_regex", True)
    if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        return kind, step.get("pattern", {}).get("Regex")
    return str(kind), repr({key: value for key, value in step.items() if key != "type"})
