"""What a head does, in numbers, and when that earns it a name.

B sequences, T tokens, L layers, H heads. Every score but the entropy is one thing: the weight that a query puts on
certain keys, averaged over the queries that see such a key. Which keys, `TARGETS` says.

A name is earned on fixed texts, so that it doesn't change with the prompt:
  repeat   different tokens in random order, and then the same again: nothing but the repetition makes one expect another
  text     a piece of prose and code, `PASSAGE`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from andrea.attention.statistics import statistics_of_scores
from andrea.insight.lens.trace import LayerPass, walk
from andrea.model.gpt import GPT
from andrea.text.tokenizer import Tokenizer

REPEATED_TOKENS = 64  # at most, in one half of a repetition
REPETITIONS = 4  # sequences
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


# ------------------------------------------------------------------------------------------------- keys that count


def previous_token(tokens: Tensor, pieces: Sequence[Sequence[bytes]]) -> Tensor:
    """tokens (B, T) -> bool (B, T, T): the key right before the query."""
    position = torch.arange(tokens.shape[1], device=tokens.device)
    return (position[:, None] - 1 == position).expand(len(tokens), -1, -1)


def first_token(tokens: Tensor, pieces: Sequence[Sequence[bytes]]) -> Tensor:
    """Key 0, of every query but itself: where heads with nothing to say put their weight (Xiao et al. 2023, arXiv
    2309.17453)."""
    position = torch.arange(tokens.shape[1], device=tokens.device)
    return ((position[:, None] > 0) & (position == 0)).expand(len(tokens), -1, -1)


def same_token(tokens: Tensor, pieces: Sequence[Sequence[bytes]]) -> Tensor:
    """Earlier keys that hold the query's own token (duplicate-token heads: Wang et al. 2022, arXiv 2211.00593)."""
    return (tokens[:, :, None] == tokens[:, None, :]).tril(-1)


def induction(tokens: Tensor, pieces: Sequence[Sequence[bytes]]) -> Tensor:
    """Earlier keys whose preceding token is the query's: what came next last time (Olsson et al. 2022, arXiv
    2209.11895)."""
    preceding = tokens.roll(1, dims=1)
    found = (tokens[:, :, None] == preceding[:, None, :]).tril(-1)
    found[:, :, 0] = False  # nothing precedes key 0
    return found


def opener(tokens: Tensor, pieces: Sequence[Sequence[bytes]]) -> Tensor:
    """The token with the innermost bracket or quote that is open at the query; not where that is the token right
    before, which a previous-token head would find as well."""
    found = torch.zeros(*tokens.shape, tokens.shape[1], dtype=torch.bool)
    for row, texts in enumerate(pieces):
        for query, key in enumerate(open_at(texts)):
            if key is not None and key < query - 1:
                found[row, query, key] = True
    return found.to(tokens.device)


TARGETS: dict[str, Callable[[Tensor, Sequence[Sequence[bytes]]], Tensor]] = {
    target.__name__: target for target in (previous_token, first_token, same_token, induction, opener)
}

CLOSING = {ord("("): ord(")"), ord("["): ord("]"), ord("{"): ord("}")}
QUOTES = (ord("'"), ord('"'))


def open_at(pieces: Sequence[bytes]) -> list[int | None]:
    """For each token's bytes: the index of the token that holds the innermost opener still open after it.

    Within a quote brackets mean nothing, and a quote ends with its line; ' after a letter is an apostrophe.
    """
    awaited: list[tuple[int, int]] = []  # (the byte that closes, token of the opener), innermost last
    before, found = ord(" "), []
    for index, piece in enumerate(pieces):
        for byte in piece:
            in_quote = bool(awaited) and awaited[-1][0] in QUOTES
            if awaited and (byte == awaited[-1][0] or (in_quote and byte == ord("\n"))):
                awaited.pop()
            elif byte in CLOSING and not in_quote:
                awaited.append((CLOSING[byte], index))
            elif byte in QUOTES and not in_quote and not chr(before).isalnum():
                awaited.append((byte, index))
            before = byte
        found.append(awaited[-1][1] if awaited else None)
    return found


# ------------------------------------------------------------------------------------------------------- measuring


def mass_on(weights: Tensor, target: Tensor, visible: Tensor) -> Tensor:
    """weights (B, H, T, T), target and visible bool (B, T, T) -> (H,): the mean, over the queries that see a target, of
    the weight they put on targets; NaN where no query sees one."""
    target = target & visible
    counted = target.any(-1)  # (B, T)
    mass = torch.where(target[:, None], weights, 0).sum((0, 2, 3))
    return mass / counted.sum()


def score_layer(layer_pass: LayerPass, targets: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each score of a layer's heads, (H,): `entropy_share` (of ln(visible keys), so that 1 is uniform) and the masses
    on `targets`, bool (B, T, T) each."""
    measured = statistics_of_scores(layer_pass.scores, layer_pass.weights, 0)
    scores = {"entropy_share": measured.per_head()["entropy_share"].mean(0)}
    for name, target in targets.items():
        scores[name] = mass_on(layer_pass.weights, target, layer_pass.visible)
    return scores


def stacked(layers: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Scores of layers, (H,) each -> scores of the model, (L, H) on the CPU."""
    layers = list(layers)
    return {name: torch.stack([layer[name] for layer in layers]).cpu() for name in layers[0]}


def score_model(model: GPT, tokens: Tensor, table: Sequence[bytes], names: Iterable[str]) -> dict[str, Tensor]:
    """Scores (L, H) of a model over tokens (B, T); table: the bytes of every token id."""
    targets = targets_of(tokens, table, names)
    return stacked(score_layer(layer_pass, targets) for layer_pass in walk(model, tokens))


def targets_of(tokens: Tensor, table: Sequence[bytes], names: Iterable[str] = tuple(TARGETS)) -> dict[str, Tensor]:
    pieces = [[table[token] for token in row] for row in tokens.tolist()]
    return {name: TARGETS[name](tokens, pieces) for name in names}


# ---------------------------------------------------------------------------------------------------------- naming


@dataclass(frozen=True)
class HeadName:
    score: str  # a key of TARGETS
    title: str
    meaning: str
    probe: str  # repeat or text
    threshold: float  # a head bears the name when its score on the probe is at least this


# Among about a hundred visible keys one has a hundredth of the weight by chance. Heads of small models share their work:
# 0.3 is thirty times that, and no untrained head comes near it. A sink is a head that does nothing else most of the time.
ENOUGH, MOST = 0.3, 0.5

NAMES = (
    HeadName("previous_token", "previous-token", "looks at the token right before", "text", ENOUGH),
    HeadName("induction", "induction", "looks at what followed this token the last time", "repeat", ENOUGH),
    HeadName("same_token", "same-token", "looks at earlier copies of this token", "repeat", ENOUGH),
    HeadName("opener", "bracket/quote opener", "looks back at the open bracket or quote", "text", ENOUGH),
    HeadName("first_token", "first-token sink", "rests on the very first token", "text", MOST),
)


def repetition(model: GPT, tokenizer: Tokenizer) -> Tensor:
    """(REPETITIONS, 1 + 2 n) int64: end-of-text, n different tokens in random order, and the same n again.

    n is as large as the model's sequence and its sliding window allow. The tokens are those of `PASSAGE`: ordinary ones,
    because what a head does between two that training hardly ever showed says little about what it does in a text.
    """
    reach = model.config.sequence_length
    first, stop = model.blocks[0].attention.mask.interval(torch.tensor([reach - 1]), reach)
    n_seen = int((stop - first.clamp(min=0))[0])  # keys that the last position sees
    ordinary = torch.tensor(tokenizer.encode(PASSAGE)).unique()
    n = min(REPEATED_TOKENS, (reach - 1) // 2, n_seen, len(ordinary))
    generator = torch.Generator().manual_seed(REPETITION_SEED)
    half = torch.stack([ordinary[torch.randperm(len(ordinary), generator=generator)[:n]] for _ in range(REPETITIONS)])
    start = torch.full((REPETITIONS, 1), tokenizer.end_of_text)
    return torch.cat((start, half, half), 1).to(model.embedding.weight.device)


def passage(model: GPT, tokenizer: Tokenizer) -> Tensor:
    """(1, T') int64: `PASSAGE` after an end-of-text, as much of it as the model's sequence holds."""
    tokens = [tokenizer.end_of_text, *tokenizer.encode(PASSAGE)][: model.config.sequence_length]
    return torch.tensor([tokens], device=model.embedding.weight.device)


def probe_scores(model: GPT, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """The scores (L, H) that names are given by, each on its own probe."""
    table = tokenizer.token_bytes()
    texts = {"repeat": repetition(model, tokenizer), "text": passage(model, tokenizer)}
    found: dict[str, Tensor] = {}
    for probe, tokens in texts.items():
        wanted = [name.score for name in NAMES if name.probe == probe]
        scores = score_model(model, tokens, table, wanted)
        found |= {name: scores[name] for name in wanted}
    return found


def names_of(probed: dict[str, Tensor], layer: int, head: int) -> list[HeadName]:
    """The names a head has earned, none or several, in the order of NAMES. A score that is NaN earns nothing."""
    return [name for name in NAMES if float(probed[name.score][layer, head]) >= name.threshold]
