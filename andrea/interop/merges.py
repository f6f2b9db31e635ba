"""The merges of byte-pair encoding, from the ranks of its tokens, and tokens as GPT-2's files write them."""

from __future__ import annotations

from andrea.config import UserError
from andrea.text.tokenizer import END_OF_TEXT, RankTokenizer, Tokenizer, visible_bytes

LARGEST_RANK = 1 << 62


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


def visible_tokens(tokenizer: Tokenizer) -> list[str]:
    """Each of the V tokens as printable characters, one per byte, as in GPT-2's vocabulary; end-of-text by its name."""
    characters = {value: character for character, value in visible_bytes().items()}
    tokens = ["".join(characters[value] for value in token) for token in tokenizer.token_bytes()]
    tokens[tokenizer.end_of_text] = END_OF_TEXT
    return tokens


def visible_merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """The pairs of `merges_of` as printable characters."""
    characters = {value: character for character, value in visible_bytes().items()}
    return [
        ("".join(characters[value] for value in first), "".join(characters[value] for value in second))
        for first, second in merges_of(tokenizer)
    ]
