"""From logits to the next token. Each rule is a pure function, so that it can be read and tested by itself. Below them, how a
prompt that ends with a space is continued.

B samples, V vocabulary, N tokens so far. A token that a rule excludes gets the logit -inf.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from andrea.runtime.device import has_fp64
from andrea.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sampling:
    """The rules for choosing a token. None or 1.0 switches a rule off. `config.SampleConfig` checks the ranges."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0


def choose_tokens(logits: Tensor, history: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """The next token of each sample: logits (B, V), history (B, N) int64, uniform (B,) in [0, 1) -> (B,) int64.

    The rules apply in this order: repetition penalty, temperature, top-k, top-p, min-p. Temperature 0 chooses the
    likeliest token after the repetition penalty; the other rules then have no effect. `uniform` is the only source of
    randomness: the same numbers choose the same tokens on every device. The choice is made on the CPU for a device without
    fp64, and for CUDA in torch's deterministic mode (a sample of a run with deterministic=true), where CUDA has no
    cumulated sum. If logits are not finite, the result is V, which is not a token.
    """
    device = logits.device
    if not has_fp64(device) or (device.type == "cuda" and torch.are_deterministic_algorithms_enabled()):
        return choose_tokens(logits.cpu(), history.cpu(), sampling, uniform.cpu()).to(device)
    logits = penalise_repetition(logits.float(), history, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return torch.where(logits.amax(dim=-1).isfinite(), logits.argmax(dim=-1), logits.shape[-1])
    # The maximum is subtracted first, because division by a tiny temperature could otherwise give inf - inf. In fp64 a
    # tiny temperature does not round to 0.
    logits = (logits - logits.amax(dim=-1, keepdim=True)).double() / sampling.temperature
    logits = keep_top_k(logits, sampling.top_k)
    logits = keep_top_p(logits, sampling.top_p)
    logits = keep_min_p(logits, sampling.min_p)
    return draw(logits, uniform)


def penalise_repetition(logits: Tensor, history: Tensor, penalty: float) -> Tensor:
    """Make the tokens of history (B, N) less likely (Keskar et al. 2019, arXiv 1909.05858, section 4.1).

    Their positive logits are divided by the penalty, and their negative logits are multiplied by it, as in Hugging Face
    transformers.
    """
    if penalty == 1.0 or history.shape[1] == 0:
        return logits
    present = logits.gather(1, history)
    penalised = torch.where(present > 0, present / penalty, present * penalty)
    largest = torch.finfo(logits.dtype).max  # logits stay finite even with an extreme penalty
    return logits.scatter(1, history, penalised.clamp(-largest, largest))


def keep_top_k(logits: Tensor, top_k: int | None) -> Tensor:
    """Keep the k likeliest tokens and all tokens as likely as the k-th (Fan et al. 2018, arXiv 1805.04833)."""
    if top_k is None or top_k >= logits.shape[-1]:
        return logits
    least = logits.topk(top_k, dim=-1).values[:, -1:]  # (B, 1)
    return logits.masked_fill(logits < least, -torch.inf)


def keep_top_p(logits: Tensor, top_p: float | None) -> Tensor:
    """Keep the smallest set of likeliest tokens whose total probability reaches top_p (Holtzman et al. 2019, arXiv
    1904.09751)."""
    if top_p is None or top_p >= 1:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probability = ordered.softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability  # total probability of the likelier tokens
    dropped = (before >= top_p).scatter(1, order, before >= top_p)
    dropped.scatter_(1, order[:, :1], False)  # the likeliest always stays
    return logits.masked_fill(dropped, -torch.inf)


def keep_min_p(logits: Tensor, min_p: float | None) -> Tensor:
    """Keep tokens at least min_p times as likely as the likeliest (Nguyen et al. 2024, arXiv 2407.01082)."""
    if not min_p:
        return logits
    probability = logits.softmax(dim=-1)
    return logits.masked_fill(probability < min_p * probability.amax(dim=-1, keepdim=True), -torch.inf)


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """The token (B,) int64 at which the cumulative probability first exceeds `uniform`.

    A token of probability 0 is never chosen.

    If logits are not finite, the result is V, which is not a token.
    """
    cumulated = logits.double().softmax(dim=-1).cumsum(dim=-1)  # (B, V)
    threshold = uniform.to(cumulated)[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, threshold, right=True).squeeze(1)


# -------------------------------------------------------------------------------------------------------- token healing
# A space at the end of a prompt is taken back, and the first new token must begin with it ("token healing").
#
# Byte-pair encodings join a space to the word after it: " main" is one token. After the prompt "def ", whose last token is
# the space alone, a word without a space would have to follow. No text that the model was trained on has these tokens, so it
# would write nonsense. The name and the idea are from Guidance (Lundberg 2023, "The Art of Prompt Design: Prompt Boundaries
# and Token Healing").

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
