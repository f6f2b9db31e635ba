"""Converts tokens to printable text, with visible spaces and line ends."""

from __future__ import annotations

from andrea.text.tokenizer import Tokenizer

END_OF_TEXT = "⟨end-of-text⟩"
MARKS = {" ": "␣", "\n": "↵", "\t": "→"}


def token_texts(tokenizer: Tokenizer) -> list[str]:
    """The text of each token id."""
    texts = [visible_text(piece) for piece in tokenizer.token_bytes()]
    texts[tokenizer.end_of_text] = END_OF_TEXT
    return texts


def visible_text(piece: bytes) -> str:
    """A token's bytes as text, with marks for space, newline and tab, and hexadecimal codes for unprintable bytes."""
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError:
        return "⟨" + piece.hex(" ").upper() + "⟩"
    for character, mark in MARKS.items():
        text = text.replace(character, mark)
    return "".join(character if character.isprintable() else f"⟨{ord(character):02X}⟩" for character in text)
