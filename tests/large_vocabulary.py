"""A tokenizer of more than 65,536 tokens, and a text that has tokens beyond this number."""

from __future__ import annotations

import itertools
import string

from andrea.text.tokenizer import RankTokenizer

N_VOCAB = 70_001
FIRST_RARE = 69_000  # the id of the first token of `rare_text`


def large_tokenizer() -> RankTokenizer:
    """The 256 bytes, then words of four letters with a space before: id 256 is " aaaa", id 257 " aaab"."""
    ranks = {bytes([value]): value for value in range(256)}
    words = itertools.islice(itertools.product(string.ascii_lowercase, repeat=4), N_VOCAB - 257)
    ranks |= {b" " + "".join(word).encode(): 256 + number for number, word in enumerate(words)}
    return RankTokenizer("bpe", ranks)


def rare_text(n_word: int) -> str:
    """Words of the largest ids, one token each, in an order that repeats after 90."""
    table = large_tokenizer().token_bytes()
    return b"".join(table[FIRST_RARE + 11 * (word % 90)] for word in range(n_word)).decode()
