"""Scores that measure where a head attends, and the names that heads get by them.

B sequences, T tokens, L layers, H heads. Except for the entropy, each score defines target keys for every query
(`TARGETS`). The score is the weight on the targets, averaged over the queries that see at least one target.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from andrea.attention import Mask
from andrea.attention.statistics import statistics_of_scores
from andrea.insight.lens.trace import LayerTrace, trace_layers
from andrea.model.gpt import GPT
from andrea.text.tokenizer import Tokenizer

# -------------------------------------------------------------------------------------------------------- targets


def previous_token(tokens: Tensor, pieces: Sequence[Sequence[bytes]]) -> Tensor:
    """Targets bool (B, T, T): the key just before the query. tokens (B, T); pieces: the bytes of each token."""
    position = torch.arange(tokens.shape[1], device=tokens.device)
    return (position[:, None] - 1 == position).expand(len(tokens), -1, -1)


def first_token(tokens: Tensor, pieces: Sequence[Sequence[bytes]]) -> Tensor:
    """Targets: key 0, except for query 0 (attention sinks: Xiao et al. 2023, arXiv 2309.17453)."""
    position = torch.arange(tokens.shape[1], device=tokens.device)
    return ((position[:, None] > 0) & (position == 0)).expand(len(tokens), -1, -1)


def same_token(tokens: Tensor, pieces: Sequence[Sequence[bytes]]) -> Tensor:
    """Targets: earlier copies of the query's token (duplicate-token heads: Wang et al. 2022, arXiv 2211.00593)."""
    return (tokens[:, :, None] == tokens[:, None, :]).tril(-1)


def induction(tokens: Tensor, pieces: Sequence[Sequence[bytes]]) -> Tensor:
    """Targets: earlier keys just after a copy of the query's token.

    Source: Olsson et al. 2022, arXiv 2209.11895 (induction heads).
    """
    preceding = tokens.roll(1, dims=1)
    found = (tokens[:, :, None] == preceding[:, None, :]).tril(-1)
    found[:, :, 0] = False  # nothing precedes key 0
    return found


def opener(tokens: Tensor, pieces: Sequence[Sequence[bytes]]) -> Tensor:
    """Target: the token with the innermost bracket or quote that is open at the query.

    The token just before the query is not a target, because a previous-token head attends to it too.
    """
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
    """For each token t: the index of the token with the innermost bracket or quote that is open after t, or None.

    Brackets inside a quote do not count. The end of a line closes a quote. ' after a letter or digit is an apostrophe.
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


def targets_of(tokens: Tensor, table: Sequence[bytes], names: Iterable[str] = tuple(TARGETS)) -> dict[str, Tensor]:
    """tokens (B, T) -> the target keys of every query, bool (B, T, T), for each named score. table: the bytes of each token id."""
    pieces = [[table[token] for token in row] for row in tokens.tolist()]
    return {name: TARGETS[name](tokens, pieces) for name in names}


# --------------------------------------------------------------------------------------------------------- scores


def mass_on(weights: Tensor, target: Tensor, visible: Tensor) -> Tensor:
    """weights (B, H, T, T), target and visible bool (B, T, T) -> (H,): mean weight on the targets.

    The mean is over the queries that see a target; NaN if there are none.
    """
    target = target & visible
    return torch.where(target[:, None], weights, 0).sum((0, 2, 3)) / target.any(-1).sum()


def score_layer(layer: LayerTrace, targets: dict[str, Tensor]) -> dict[str, Tensor]:
    """The scores of a layer's heads, (H,) each: `entropy_share`, and the weight on each of the targets, bool (B, T, T).

    `entropy_share` is the entropy divided by ln(visible keys), so that 1 means uniform attention. A layer with attention
    sinks also has `sink_mass`, the mean weight on the sink.
    """
    measured = statistics_of_scores(layer.scores, layer.weights, 0, layer.sink)
    per_head = measured.per_head()
    scores = {name: per_head[name].mean(0) for name in ("entropy_share", "sink_mass") if name in per_head}
    for name, target in targets.items():
        scores[name] = mass_on(layer.weights, target, layer.visible)
    return scores


def stack_layers(layers: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Scores (H,) of each layer -> scores (L, H) of the model, on the CPU."""
    layers = list(layers)
    return {name: torch.stack([layer[name] for layer in layers]).cpu() for name in layers[0]}


# ---------------------------------------------------------------------------------------------------------- head names
# Heads get their names by their scores on two fixed texts, so that a name does not depend on the prompt. The texts are
#   repeat   different tokens in random order, then the same tokens again: only the repetition makes a token predictable
#   text     `PASSAGE`, a piece of prose and code

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
    score: str  # a key of TARGETS
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


def probe_scores(model: GPT, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """The scores (L, H) that decide the names of heads, each measured on its own fixed text."""
    passage = [tokenizer.end_of_text, *tokenizer.encode(PASSAGE)][: model.config.sequence_length]
    passage = torch.tensor([passage], device=model.embedding.weight.device)  # (1, T')
    found: dict[str, Tensor] = {}
    for probe, tokens in (("repeat", repetition(model, tokenizer)), ("text", passage)):
        wanted = [name.score for name in NAMES if name.probe == probe]
        targets = targets_of(tokens, tokenizer.token_bytes(), wanted)
        scores = stack_layers(score_layer(layer, targets) for layer in trace_layers(model, tokens))
        found |= {name: scores[name] for name in wanted}
    return found


def names_of(probed: dict[str, Tensor], layer: int, head: int) -> list[HeadName]:
    """The names that a head gets, in the order of NAMES: none, one or several. A NaN score gives no name."""
    return [name for name in NAMES if float(probed[name.score][layer, head]) >= name.threshold]
