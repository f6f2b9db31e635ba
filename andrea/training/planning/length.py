"""The length of a run: as it is asked for, as its text is small, and as its time allows.

`with_length_and_name` computes the steps from train.flops or train.tokens_per_parameter, before any data is prepared. Once the
text is read, the second section plans the steps of a small text. `TimeBudget` keeps to train.max_minutes while the run trains.
"""

import dataclasses
import time
from bisect import bisect_right
from collections.abc import Callable
from typing import final

from andrea.config import ON_LARGE_TEXT, OptimizerConfig, RunConfig, Text, UserError
from andrea.config.schema import LARGEST_STEP, Between
from andrea.model.size import flops_per_token, parameters_without_bigrams
from andrea.text.corpus import Corpus
from andrea.text.load_tokenizer import configured_tokenizer
from andrea.training.health.health import MANY_EPOCHS
from andrea.training.optimizer import decay_start, may_change, shortest_length
from andrea.training.records import Progress
from andrea.training.records.console import format_number

GPT2_VOCABULARY = 50257  # tokens of tiktoken's gpt2, end-of-text included


def planned_vocabulary(config: RunConfig) -> int:
    """The vocabulary size of the configured tokenizer; for `auto` that of a large text: the text is not read yet."""
    if config.tokenizer.path:
        return configured_tokenizer(config.tokenizer).n_vocab
    if config.tokenizer.kind == "bpe":
        size = config.tokenizer.vocab_size
        assert size is not None
        return int(ON_LARGE_TEXT["tokenizer.vocab_size"]) if size == "auto" else size
    return 257 if config.tokenizer.kind == "byte" else GPT2_VOCABULARY


def with_length_and_name(config: RunConfig, resumed: bool = False) -> RunConfig:
    """Compute the steps from train.flops or train.tokens_per_parameter, and fill {model}, {tokens}, {seed} in the name.

    resumed: a number of steps is the one that was computed when the run began, and stays. It may differ from what would be
    computed now, because the text's vocabulary was not known then. Raises UserError if train.steps is given too and differs.
    """
    train = config.train
    has_length = resumed and train.steps != "auto"
    if not has_length and (train.tokens_per_parameter is not None or train.flops is not None):
        n_vocab = planned_vocabulary(config)
        if train.flops is not None:
            key = f"flops={train.flops:g}"
            tokens = train.flops / flops_per_token(config.model, config.attention, n_vocab)
        else:
            key = f"tokens_per_parameter={train.tokens_per_parameter:g}"
            tokens = train.tokens_per_parameter * parameters_without_bigrams(config.model, config.attention, n_vocab)
        steps = max(1, round(tokens / config.tokens_per_step))
        Between(1, LARGEST_STEP)(f"train.{key}: train.steps", steps)
        if train.steps not in ("auto", steps):
            raise UserError(
                f"train.steps={train.steps} and train.{key} (which gives {steps} steps) both set the length of training; "
                f"set train.steps=auto or leave one out"
            )
        config = dataclasses.replace(config, train=dataclasses.replace(train, steps=steps))
    if config.name is None:
        return config
    tokens = format_number(config.steps * config.tokens_per_step)
    name = str(config.name)
    for placeholder, value in {"{model}": config.model.name, "{tokens}": tokens, "{seed}": str(config.seed)}.items():
        name = name.replace(placeholder, value)
    return dataclasses.replace(config, name=Text(name))


# --------------------------------------------------------------------------------------------------------- a small text
# The length and the weight decay of a run on a text so small that the model's recipe would read it many times.
#
# The validation loss is lowest after some epochs; after more, the model memorises the text. A stronger weight decay lets it
# learn from more epochs. Both must be planned, because the learning rate has to fall before the validation loss rises: at a
# constant rate, the loss begins to rise later than the step at which the decay should begin. The numbers are fitted to runs of
# andrea-nano on 0.1 to 2 MB of text (bench/README.md, "Small texts"); how they depend on the model's size and on the tokens per
# step is an estimate.

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
    return steps * config.tokens_read_per_step / tokens_per_epoch(corpus)


def tokens_per_epoch(corpus: Corpus) -> int:
    return sum(len(source.train) - 1 for source in corpus.sources)


def n_parameter(config: RunConfig, corpus: Corpus) -> int:
    """Without a table of bigrams, for which the numbers above were not fitted."""
    return parameters_without_bigrams(config.model, config.attention, corpus.tokenizer.n_vocab)


def most_steps_for_text(config: RunConfig, corpus: Corpus) -> int:
    """The number of steps after which the validation loss is near its lowest; it may exceed the model's recipe."""
    epochs = EPOCHS * (tokens_per_epoch(corpus) / n_parameter(config, corpus)) ** GROWTH
    epochs *= max(1.0, config.tokens_per_step / MEASURED_TOKENS_PER_STEP) ** 0.5
    steps = int(epochs * tokens_per_epoch(corpus) / config.tokens_read_per_step)
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
    """Whether each of two parts of the held-out text is large enough. The first, which chooses, ends with a window."""
    held_out = sum(len(source.val) for source in corpus.sources)
    rounded = config.model.sequence_length * len(corpus.sources)  # tokens that the first part may have beyond its half
    return config.train.eval_tokens is None and held_out >= 2 * (FEWEST_JUDGED_TOKENS + rounded)


def small_text_lines(asked: RunConfig, config: RunConfig, corpus: Corpus) -> list[str]:
    """What the terminal shows of choices for a small text. asked: the configuration with `auto` still in it."""
    epochs, n_token = epochs_of(config.steps, config, corpus), tokens_per_epoch(corpus)
    recipe, planned, lines = config.model.recipe_steps, steps_for_text(config, corpus), []
    if asked.train.steps == "auto" and is_small(config, corpus):
        lines.append(
            f"small text: {n_token:,} training tokens, which the {recipe} steps of {config.model.name} would read "
            f"{epochs_of(recipe, config, corpus):,.0f} times; planned {config.steps} steps, {epochs:.2f} epochs; the best "
            f"evaluation is the result (train.steps=N sets another length)"
        )
    elif epochs > MANY_EPOCHS and config.steps > planned:
        lines.append(
            f"small text: {config.steps} steps read its {n_token:,} training tokens {epochs:,.0f} times, and the model may "
            f"memorise it; train.steps=auto would plan {planned} steps"
        )
    why, of_large = (
        f"because the text is read {epochs:.1f} times",
        "that of a large text, would let the model memorise it",
    )
    decay = asked.optimizer.decay
    if asked.optimizer.weight_decay == "auto" and config.optimizer.decay > decay:
        chosen = f"{config.optimizer.decay:g}, {why}"
        lines.append(f"weight decay: {chosen} (optimizer.weight_decay={decay:g}, {of_large})")
    if asked.model.bigram_rows == "auto" and config.model.bigram_rows is None:
        lines.append(f"bigrams: no table, {why} (model.bigram_rows={asked.model.n_bigram_row}, {of_large})")
    if asked.optimizer.muon_rows == "auto" and config.optimizer.muon_rows == "none":
        lines.append(
            f"rows of Muon's updates: as they are, {why} (optimizer.muon_rows={asked.optimizer.rows} learns less here)"
        )
    return lines


# ---------------------------------------------------------------------------------------------------- train.max_minutes
# The time that `train.max_minutes` gives a process, and when the learning rate must begin to fall for the run to end in time.
#
# A run with this key is planned for as many steps as its text or train.steps allows; if the time is `auto`, for those of its
# recipe. At a constant rate the decay may begin at any step: rank 0 measures the steps and what follows them, and asks for
# the decay as soon as the time left is what it takes. The length is then fixed. With a cosine it is fixed once, after the
# warm-up or the first measured steps.

RESERVE = 0.02  # of the time that is left: the pace may drop a little while the learning rate falls
OVERRUN = 0.05  # of the whole time: the last evaluation may end so much later rather than leave out held-out text
LONGEST_EVALUATION = 1 / 3  # of the whole time: if the held-out text takes longer, a part of it is evaluated
FORWARD_SHARE = 1 / 3  # of a training step's time, for as many tokens
FEWEST_MEASURED = 4  # steps, the slow first one included, before the decay may begin
RECENT_STEPS = 8  # at least, of which the pace is the mean
MEASURED_SHARE = 0.05  # of the time that is left: steps are measured for so long before the decay may begin
FIRST_SHARE = 1 / 50  # of a run, in which a cosine falls by a thousandth
NOTICE = 2  # steps after which all ranks know what rank 0 asks for: on a GPU, flags are read one step later
QUARTERS = 4  # evaluations and checkpoints of a run, if the time allows them
STEPS_PER_EVALUATION = 10  # at least, in the time of an evaluation: more evaluations would take too much of the time


@final
class TimeBudget:
    """The time of one process: how much of it is left, and how long the rest of the run takes.

    minutes: train.max_minutes. started: the time at which the process began, by `clock` (in seconds).
    evaluation_steps: the time of an evaluation over the whole held-out text, in training steps, until one is measured.
    most_steps: upper limit of the run's length, even if more steps fit into the time.
    is_limit: whether the run must end in time. False if nobody set the time: it then sets the length, and no more.
    """

    def __init__(
        self,
        minutes: float,
        started: float,
        evaluation_steps: float,
        most_steps: int,
        is_limit: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.minutes, self.started, self.is_limit, self.clock = minutes, started, is_limit, clock
        self.evaluation_steps, self.most_steps = evaluation_steps, most_steps
        self.elapsed = [0.0]  # seconds after each step, without evaluations
        self.evaluation_seconds = 0.0  # of the last evaluation, with the samples and the save that follow it
        self.whole_seconds: float | None = None  # of reading the whole held-out text, as last measured
        self.is_estimated = False  # whether the length was estimated once, for the intervals
        self.lap_started = started

    def seconds_left(self) -> float:
        return 60 * self.minutes - (self.clock() - self.started)

    def evaluations(self, length: int) -> int:
        """The number of evaluations in a run of `length` steps whose train.eval_every was left `auto`."""
        return max(1, min(QUARTERS, int(length / (STEPS_PER_EVALUATION * max(self.evaluation_steps, 1e-9)))))

    def is_over(self) -> bool:
        """Whether the run must stop now: the rest of the time, and OVERRUN, is what the last evaluation takes."""
        left = self.seconds_left()
        return self.is_limit and (left + OVERRUN * 60 * self.minutes < self.last_seconds() or left < 0)

    def lap(self) -> float:
        """Seconds since the last call."""
        before, self.lap_started = self.lap_started, self.clock()
        return self.lap_started - before

    def note_step(self) -> None:
        """Count the seconds since the last call: a training step, and what followed the step before it."""
        self.elapsed.append(self.elapsed[-1] + self.lap())

    def note_evaluation(self) -> None:
        self.evaluation_seconds = self.lap()

    @property
    def step_seconds(self) -> float:
        """The mean of the newest quarter of the steps, or of RECENT_STEPS: the machine may have become busy."""
        n_step = len(self.elapsed) - 1
        first = min(n_step, max(1, min(n_step * 3 // 4, n_step - RECENT_STEPS)))  # the first step is slower
        return (self.elapsed[-1] - self.elapsed[first]) / max(1, n_step - first)

    def last_seconds(self) -> float:
        """The time of the last evaluation and of what follows it."""
        whole = self.evaluation_steps * self.step_seconds if self.whole_seconds is None else self.whole_seconds
        return max(self.evaluation_seconds, min(whole, LONGEST_EVALUATION * 60 * self.minutes))

    def readable_share(self, whole_seconds: float) -> float:
        """The share of the held-out text that an evaluation may read now. whole_seconds: of all of it, at the pace of now."""
        after = max(0.0, self.evaluation_seconds - (self.whole_seconds or 0.0))  # samples, saving
        self.whole_seconds = whole_seconds
        allowed = self.seconds_left() + OVERRUN * 60 * self.minutes - after
        allowed = max(0.0, min(allowed, LONGEST_EVALUATION * 60 * self.minutes))
        return 1.0 if whole_seconds <= allowed or not self.is_limit else allowed / whole_seconds

    def seconds(self, step: int, length: int, eval_every: int) -> float:
        """The time from `step` to the end of a run of `length` steps."""
        evaluations = (length - 1) // eval_every - step // eval_every
        evaluation = self.evaluation_seconds or self.last_seconds()
        return (length - step) * self.step_seconds + evaluations * evaluation + self.last_seconds()

    def wanted_steps(self, step: int, config: OptimizerConfig, eval_every: Callable[[int], int]) -> int:
        """The length to ask for after `step` steps: that of a run whose decay begins now, or an estimate; 0: none.

        eval_every: the length of a run -> the steps between its evaluations.
        """
        n_step = len(self.elapsed) - 1
        left = (1 - RESERVE) * self.seconds_left()
        if n_step < FEWEST_MEASURED or self.elapsed[-1] - self.elapsed[1] < MEASURED_SHARE * left:
            return 0

        def seconds(length: int) -> float:
            return self.seconds(step, length, eval_every(length))

        def begun_at(later: int) -> int:
            return min(self.most_steps, max(step + 1, shortest_length(later, self.most_steps, config)))

        if config.schedule == "cosine":
            is_asked = step + NOTICE >= config.warmup_steps
        elif seconds(begun_at(step + NOTICE + 1)) > left:
            return begun_at(step + NOTICE)
        else:
            is_asked = not self.is_estimated
        self.is_estimated |= is_asked
        return bisect_right(range(self.most_steps + 1), left, lo=step + 2, key=seconds) - 1 if is_asked else 0


def fixes_length(wanted: int, step: int, config: OptimizerConfig) -> bool:
    """Whether the length `wanted`, which rank 0 asked for, is that of the run, and no estimate; known after `step` steps."""
    return config.schedule == "cosine" or decay_start(wanted, config) <= step + NOTICE


def is_open(step: int, steps: int, config: OptimizerConfig) -> bool:
    """Whether train.max_minutes may set the length of a run planned for `steps` steps: its rate has not begun to fall."""
    return may_change(step, steps, config) or (config.schedule == "cosine" and step < FIRST_SHARE * steps)


def describe_length(progress: Progress, config: RunConfig, budget: TimeBudget | None) -> str | None:
    """A line on a length that train.max_minutes sets, or has set in an earlier process; None for any other run."""
    steps = progress.planned_steps
    if budget is None:
        line = f"length: {steps} steps, as planned before; train.steps=N sets another length"
        return line if steps != config.steps else None
    if not is_open(progress.step, steps, config.optimizer):
        may_end = f"; train.max_minutes={budget.minutes:g} may end the run earlier" if budget.is_limit else ""
        return f"length: {steps} steps, fixed before{may_end}"
    return (
        f"length: the steps that fit into train.max_minutes={budget.minutes:g}, at most {budget.most_steps}; fixed as soon as the "
        f"learning rate begins to fall"
    )
