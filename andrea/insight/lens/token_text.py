"""Tokens as text that can be shown, with spaces and line ends made visible."""

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
    """A token's bytes as text: marks for space, newline and tab, hexadecimal digits for what cannot be printed."""
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError:
        return "⟨" + piece.hex(" ").upper() + "⟩"
    for character, mark in MARKS.items():
        text = text.replace(character, mark)
    return "".join(character if character.isprintable() else f"⟨{ord(character):02X}⟩" for character in text)
