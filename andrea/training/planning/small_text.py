"""The length and the weight decay of a run on a text so small that the model's recipe would read it many times.

The validation loss is lowest after some epochs; after more, the model memorises the text. A stronger weight decay lets it
learn from more epochs. Both must be planned, because the learning rate has to fall before the validation loss rises: at a
constant rate, the loss begins to rise later than the step at which the decay should begin. The numbers are fitted to runs of
andrea-nano on 0.1 to 2 MB of text (bench/README.md, "Small texts"); how they depend on the model's size and on the tokens per
step is an estimate.
"""

from __future__ import annotations

from andrea.config import ON_LARGE_TEXT, RunConfig
from andrea.model.size import parameters_without_bigrams
from andrea.text.corpus import Corpus
from andrea.training.health.health import MANY_EPOCHS

EPOCHS = 75.0  # after which validation is near its best, for a text of as many tokens as the model has parameters
GROWTH = 0.75  # of the epochs with tokens per parameter, as a power
DECAY_PER_EPOCH = 0.06  # weight decay for each epoch after the first, for such a text
DECAY_GROWTH = 0.7  # of the weight decay with parameters per token, as a power
MOST_DECAY = 4.0  # the strongest that was measured
MEASURED_TOKENS_PER_STEP = 4096  # larger steps learn less from a token: epochs grow with the root of their size
LEAST_WARMUPS = 2  # a run lasts at least so many times its warm-up
EVALUATIONS = 10  # of a run whose length is planned for the text: the best of them is its result
MOST_EPOCHS = 2.0  # of a text that is not read often: a table of bigrams memorises it, and MuonEq-R learns less from it
FEWEST_JUDGED_TOKENS = 2000  # held-out tokens in each of the two parts, of which one chooses and the other judges


def epochs_of(steps: int, config: RunConfig, corpus: Corpus) -> float:
    """How often `steps` steps read the training text."""
    return steps * config.tokens_per_step / tokens_per_epoch(corpus)


def tokens_per_epoch(corpus: Corpus) -> int:
    return sum(len(source.train) - 1 for source in corpus.sources)


def n_parameter(config: RunConfig, corpus: Corpus) -> int:
    """Without a table of bigrams, for which the numbers above were not fitted."""
    return parameters_without_bigrams(config.model, config.attention, corpus.tokenizer.n_vocab)


def most_steps_for_text(config: RunConfig, corpus: Corpus) -> int:
    """The number of steps after which the validation loss is near its lowest; it may exceed the model's recipe."""
    epochs = EPOCHS * (tokens_per_epoch(corpus) / n_parameter(config, corpus)) ** GROWTH
    epochs *= max(1.0, config.tokens_per_step / MEASURED_TOKENS_PER_STEP) ** 0.5
    steps = int(epochs * tokens_per_epoch(corpus) / config.tokens_per_step)
    return max(steps, LEAST_WARMUPS * config.optimizer.warmup_steps, 1)


def steps_for_text(config: RunConfig, corpus: Corpus) -> int:
    """The length that suits the text: at most that of the model's recipe."""
    return min(config.model.recipe_steps, most_steps_for_text(config, corpus))


def weight_decay_for_text(config: RunConfig, corpus: Corpus) -> float:
    """The weight decay of a run of `config.steps` steps: the more often it reads its text, the stronger."""
    parameters_per_token = n_parameter(config, corpus) / tokens_per_epoch(corpus)
    epochs_more = epochs_of(config.steps, config, corpus) - 1
    decay = DECAY_PER_EPOCH * epochs_more * parameters_per_token**DECAY_GROWTH
    return round(max(ON_LARGE_TEXT["optimizer.weight_decay"], min(decay, MOST_DECAY)), 2)


def is_small(config: RunConfig, corpus: Corpus) -> bool:
    """Whether the run's length is the one for a small text."""
    return config.steps == most_steps_for_text(config, corpus) < config.model.recipe_steps


def is_judged_on_a_part(config: RunConfig, corpus: Corpus) -> bool:
    """Whether each of two parts of the held-out text is large enough."""
    held_out = sum(len(source.val) for source in corpus.sources)
    return config.train.eval_tokens is None and held_out >= 2 * FEWEST_JUDGED_TOKENS


def small_text_lines(asked: RunConfig, config: RunConfig, corpus: Corpus) -> list[str]:
    """What the terminal shows of choices for a small text. asked: the configuration with `auto` still in it."""
    return [
        *length_lines(asked, config, corpus),
        *decay_lines(asked, config, corpus),
        *part_lines(asked, config, corpus),
    ]


def length_lines(asked: RunConfig, config: RunConfig, corpus: Corpus) -> list[str]:
    """The lines on the run's length that are printed at its start. asked: the configuration with `auto` still in it."""
    epochs, n_token = epochs_of(config.steps, config, corpus), tokens_per_epoch(corpus)
    recipe = config.model.recipe_steps
    if asked.train.steps == "auto" and is_small(config, corpus):
        return [
            f"small text: {n_token:,} training tokens, which the {recipe} steps of {config.model.name} would read "
            f"{epochs_of(recipe, config, corpus):,.0f} times; planned {config.steps} steps, {epochs:.2f} epochs; the best "
            f"evaluation is the result (train.steps=N sets another length)"
        ]
    if epochs > MANY_EPOCHS and config.steps > (planned := steps_for_text(config, corpus)):
        return [
            f"small text: {config.steps} steps read its {n_token:,} training tokens {epochs:,.0f} times, and the model may "
            f"memorise it; train.steps=auto would plan {planned} steps"
        ]
    return []


def part_lines(asked: RunConfig, config: RunConfig, corpus: Corpus) -> list[str]:
    """Lines on what was left out for a small text. asked: the configuration with `auto` still in it."""
    why, lines = f"because the text is read {epochs_of(config.steps, config, corpus):.1f} times", []
    if asked.model.bigram_rows == "auto" and config.model.bigram_rows is None:
        rows = f"model.bigram_rows={asked.model.n_bigram_row}"
        lines.append(f"bigrams: no table, {why} ({rows}, that of a large text, would let the model memorise it)")
    if asked.optimizer.muon_rows == "auto" and config.optimizer.muon_rows == "none":
        lines.append(
            f"rows of Muon's updates: as they are, {why} (optimizer.muon_rows={asked.optimizer.rows} learns less here)"
        )
    return lines


def decay_lines(asked: RunConfig, config: RunConfig, corpus: Corpus) -> list[str]:
    """A line on the weight decay, if it was chosen for a small text. asked: the configuration with `auto` still in it."""
    if asked.optimizer.weight_decay != "auto" or config.optimizer.decay <= asked.optimizer.decay:
        return []
    return [
        f"weight decay: {config.optimizer.decay:g}, because the text is read {epochs_of(config.steps, config, corpus):.1f} times "
        f"(optimizer.weight_decay={asked.optimizer.decay:g}, that of a large text, would let the model memorise it)"
    ]
