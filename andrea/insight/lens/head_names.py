"""Names heads by their scores on two fixed texts, so that a name does not depend on the prompt.

L layers, H heads. The texts are
  repeat   different tokens in random order, then the same tokens again: only the repetition makes a token predictable
  text     `PASSAGE`, a piece of prose and code
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from andrea.attention import Mask
from andrea.insight.lens.scores import score_model
from andrea.model.gpt import GPT
from andrea.text.tokenizer import Tokenizer

MOST_REPEATED_TOKENS = 64  # in one half of a repetition
N_REPETITION = 4  # sequences
REPETITION_SEED = 20220924

PASSAGE = '''The garden has three gates (north, west, south), and each of them "opens at dawn", the keeper said.
def water(plants, litres=2.5):
    """Water every plant that is dry."""
    done = {"fern": 0, "rose": 1}
    for plant in sorted(plants, key=lambda plant: plant.name):
        if plant.is_dry(since="yesterday", below=0.25):
            done[plant.name] = done.get(plant.name, 0) + litres
            print("watered", plant.name, [round(amount, 2) for amount in done.values()])
    return done
'''

# Thresholds of scores. Among about a hundred visible keys, one key has a hundredth of the weight by chance. ENOUGH is
# thirty times chance: no untrained head comes near it, but heads of small models, which share their work, can reach it.
# MOST: a first-token sink puts most of its weight on the first token.
ENOUGH, MOST = 0.3, 0.5


@dataclass(frozen=True)
class HeadName:
    score: str  # a key of scores.TARGETS
    title: str
    meaning: str  # continues "the head …"
    probe: str  # the fixed text: repeat or text
    threshold: float  # a head gets the name if its score on the fixed text is at least this


NAMES = (
    HeadName("previous_token", "previous-token", "attends to the token just before", "text", ENOUGH),
    HeadName("induction", "induction", "attends to the token after the previous copy of this token", "repeat", ENOUGH),
    HeadName("same_token", "same-token", "attends to earlier copies of this token", "repeat", ENOUGH),
    HeadName(
        "opener",
        "bracket/quote opener",
        "attends to the opening bracket or quote that is not yet closed",
        "text",
        ENOUGH,
    ),
    HeadName("first_token", "first-token sink", "attends mostly to the very first token", "text", MOST),
)


def repetition(model: GPT, tokenizer: Tokenizer) -> Tensor:
    """The text `repeat`, (N_REPETITION, 1 + 2 n) int64: end-of-text, n different shuffled tokens, the same n again.

    n is as large as the model's sequence length and its narrowest sliding window allow, up to MOST_REPEATED_TOKENS, so
    that every head sees the earlier copy of a token. The tokens come from `PASSAGE`, because its tokens are frequent in
    training. How a head treats rare tokens says little about ordinary text.
    """
    length = model.config.sequence_length
    n_visible = min(keys_seen_last(block.attention.mask, length) for block in model.blocks)
    ordinary = torch.tensor(tokenizer.encode(PASSAGE)).unique()
    n = min(MOST_REPEATED_TOKENS, (length - 1) // 2, n_visible, len(ordinary))
    generator = torch.Generator().manual_seed(REPETITION_SEED)
    half = torch.stack([ordinary[torch.randperm(len(ordinary), generator=generator)[:n]] for _ in range(N_REPETITION)])
    start = torch.full((N_REPETITION, 1), tokenizer.end_of_text)
    return torch.cat((start, half, half), 1).to(model.embedding.weight.device)


def keys_seen_last(mask: Mask, length: int) -> int:
    """The number of keys that the last of `length` positions sees."""
    first, stop = mask.interval(torch.tensor([length - 1]), length)
    return int((stop - first.clamp(min=0))[0])


def passage(model: GPT, tokenizer: Tokenizer) -> Tensor:
    """The text `text`, (1, T') int64: end-of-text and `PASSAGE`, cut to the model's sequence length."""
    tokens = [tokenizer.end_of_text, *tokenizer.encode(PASSAGE)][: model.config.sequence_length]
    return torch.tensor([tokens], device=model.embedding.weight.device)


def probe_scores(model: GPT, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """The scores (L, H) that decide the names of heads, each measured on its own fixed text."""
    table = tokenizer.token_bytes()
    texts = {"repeat": repetition(model, tokenizer), "text": passage(model, tokenizer)}
    found: dict[str, Tensor] = {}
    for probe, tokens in texts.items():
        wanted = [name.score for name in NAMES if name.probe == probe]
        scores = score_model(model, tokens, table, wanted)
        found |= {name: scores[name] for name in wanted}
    return found


def names_of(probed: dict[str, Tensor], layer: int, head: int) -> list[HeadName]:
    """The names that a head gets, in the order of NAMES: none, one or several. A NaN score gives no name."""
    return [name for name in NAMES if float(probed[name.score][layer, head]) >= name.threshold]
