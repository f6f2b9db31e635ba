"""A space at the end of a prompt is taken back, and the first new token must begin with it ("token healing").

Byte-pair encodings join a space to the word after it: " main" is one token. After the prompt "def ", whose last token is
the space alone, a word without a space would have to follow. No text that the model was trained on has these tokens, so it
would write nonsense. The name and the idea are from Guidance (Lundberg 2023, "The Art of Prompt Design: Prompt Boundaries
and Token Healing").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from andrea.text.tokenizer import Tokenizer

SPACE = b" "


class TokenHealing:
    """Token healing with the vocabulary of a tokenizer. V: its size."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.table = tokenizer.token_bytes()
        self.begins_with_space = torch.tensor([token.startswith(SPACE) for token in self.table])  # (V,)
        self.is_white = [token.isspace() for token in self.table]
        self.joins = any(token.startswith(SPACE) and token.strip(SPACE) for token in self.table)

    def heal(self, prompt: list[int]) -> tuple[list[int], bool]:
        """The prompt without the space at its end, and whether one was taken back.

        What else of white space is at the end (a line break, an indentation) is encoded again, as before a word. Nothing
        changes if the prompt is white space alone, or if no token of the vocabulary joins a space to a word.
        """
        n_kept = len(prompt)
        while n_kept and self.is_white[prompt[n_kept - 1]]:
            n_kept -= 1
        white = b"".join(self.table[token] for token in prompt[n_kept:])
        if not (self.joins and n_kept and white.endswith(SPACE)):
            return prompt, False
        return [*prompt[:n_kept], *self.tokenizer.encode(white[: -len(SPACE)].decode())], True

    def allowed(self, logits: Tensor) -> Tensor:
        """logits (V,) of the next token, -inf for the tokens that do not begin with a space."""
        return logits.masked_fill(~self.begins_with_space.to(logits.device), -torch.inf)
