"""GRPO: the model draws several answers to a prompt, and those with more than the mean reward become likelier.

Shao et al. 2024, "DeepSeekMath", arXiv 2402.03300, equations 3 and 21, in the form of Liu et al. 2025, "Understanding
R1-Zero-Like Training", arXiv 2503.20783 (Dr. GRPO). For a prompt x with answers y_1 … y_G from the model π itself, and their
rewards r_i:

    advantage_i = r_i - mean(r)
    loss        = - mean over all answers of  Σ_t [ advantage_i · ln π(y_it | x, y_i<t) - β · KL_t ]

Each answer is learned once, by the weights that drew it: the ratio of new to old probabilities is 1, and its clipping does
nothing. Dr. GRPO leaves out two factors of the first paper: 1 / standard deviation of r, which weighs prompts that are almost
always or almost never solved more than others, and 1 / |y_i|, which makes long wrong answers cheap. A group whose rewards are
all equal has no advantage and no gradient; it is counted. With β > 0, KL_t = ρ - ln ρ - 1 with ρ = π_ref / π (equation 4; the
estimator k3 of Schulman 2020) holds the model near the reference; 0 was enough for rewards that can be checked.

Prompts are the conversations of data=chat up to each answer of the assistant. Their order and each answer's random numbers
depend on the seed and the prompt's number alone, so that a resumed run draws the same answers.

P prompts of a step on all ranks, G answers each, T tokens in a window.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from andrea.config import RunConfig, UserError
from andrea.generation import Engine, Request, Sampling
from andrea.model.gpt import GPT, CallBlock
from andrea.model.lora import merge
from andrea.runtime.device import WEIGHT_DTYPE
from andrea.runtime.user_classes import is_own, own_function
from andrea.text.chat import ROLES, ChatTokenizer, Turn
from andrea.text.corpus import Corpus
from andrea.text.loader import permute
from andrea.text.shards import IGNORED_TARGET, TokenStream, document_begins, in_blocks
from andrea.training.objectives.objective import Batch, Objective, target_log_probabilities
from andrea.training.parallel.ranks import Ranks

Reward = Callable[[list[Turn], str, str], float]  # turns of the prompt, the model's answer, the answer of the data
MOST_AT_ONCE = 256  # answers that a GPU writes in one batch
JUDGED_PROMPTS = 256  # held-out prompts that are answered at each evaluation


def exact_match(turns: list[Turn], answer: str, reference: str) -> float:
    return float(answer.strip() == reference.strip())


@dataclass(frozen=True)
class Answer:
    place: int  # of its prompt
    tokens: list[int]
    text: str


@final
class GRPO(Objective):
    draws = True
    is_loss_comparable = False

    def __init__(self, config: RunConfig, corpus: Corpus, ranks: Ranks, reference: GPT | None) -> None:
        super().__init__(reference)
        assert isinstance(corpus.tokenizer, ChatTokenizer), "the configuration's checks demand conversations"
        self.config, self.tokenizer, self.ranks = config.objective, corpus.tokenizer, ranks
        self.seed, self.n_window, self.dtype = config.seed, config.model.sequence_length, WEIGHT_DTYPE[config.precision]
        name = str(config.objective.reward)
        self.reward: Reward = own_function("objective.reward", name) if is_own(name) else exact_match
        self.train = Prompts([source.train for source in corpus.sources], self.tokenizer)
        self.held_out = Prompts([source.val for source in corpus.sources], self.tokenizer)
        self.most_new = int(min(self.train.lengths()[:, 1].max(), self.n_window // 2))
        n_asked = len(self.train.places)
        for prompts in (self.train, self.held_out):
            prompts.places = prompts.places[prompts.lengths()[:, 0] + self.most_new <= self.n_window]
        if not (len(self.train.places) and len(self.held_out.places)):
            raise UserError(
                f"no prompt and its answer fit into model.sequence_length={self.n_window} together; raise it, or shorten the "
                f"conversations"
            )
        usual = float(self.train.lengths().sum(1).mean())
        self.n_prompt = max(1, int(config.tokens_per_step / (config.objective.answers * usual)))
        self.last: dict[str, float] = {}
        n_long = n_asked - len(self.train.places)
        self.lines = (
            f"objective: GRPO, {self.n_prompt} prompts in a step (train.tokens_per_step), {config.objective.answers} answers to "
            f"each, of at most {self.most_new} tokens, reward: {name}",
            *([f"{n_long:,} of {n_asked:,} prompts are left out: too long to be answered"] if n_long else []),
        )

    def sums(
        self, model: GPT, call_block: CallBlock, hidden: Tensor, tokens: Tensor, targets: Tensor, weights: Tensor | None
    ) -> Tensor | None:
        """The loss of answers that were drawn, 0-dim. weights: their advantages. Of held-out text, the next token's."""
        if weights is None:
            return None
        ours = target_log_probabilities(model, hidden, targets)  # (B, T)
        total = -(weights * ours).sum()
        if self.reference is not None:
            log_ratio = self.reference_log_probabilities(call_block, tokens, targets) - ours
            total = total + self.config.beta * (log_ratio.exp() - log_ratio - 1).sum()
        return total

    def draw(self, step: int, model: GPT) -> Batch:
        """The answers to this rank's prompts of a step, each with its advantage as the weight of its tokens."""
        n_answer, n_all = self.config.answers, len(self.train.places)
        first, count, _ = self.ranks.local_rows(self.n_prompt)
        numbers = np.arange(count) + step * self.n_prompt + first  # of prompts since the run began
        places = [permute(np.array([n % n_all]), n_all, f"{self.seed} prompts {n // n_all}")[0] for n in numbers]
        digest = hashlib.sha512(f"{self.seed} answers of step {step}".encode()).digest()
        seed = int.from_bytes(digest[:7], "little") + first * n_answer  # that of each answer is one more than the last
        answers = self.write(model, self.train, places, n_answer, 1.0, seed)
        judged = [self.judge(self.train, each) for each in answers]
        rewards = torch.tensor(judged, dtype=torch.float64).view(count, n_answer)
        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten().tolist()
        is_equal = (rewards == rewards[:, :1]).all(1)  # (prompts of this rank,): without an advantage
        is_learned = ~is_equal.repeat_interleave(n_answer) | (self.reference is not None)
        texts = [
            (self.train.prompt(answer.place), answer.tokens, advantage)
            for answer, advantage, learned in zip(answers, advantages, is_learned.tolist(), strict=True)
            if learned
        ]
        tokens, targets, weights = windows_of_answers(texts, self.n_window)
        counts = [float(rewards.sum()), float(is_equal.sum()), float(sum(len(answer.tokens) for answer in answers))]
        reward, n_equal, n_token = self.ranks.sum(torch.tensor(counts, dtype=torch.float64)).tolist()
        n_text = self.n_prompt * n_answer
        self.last = {
            "train/reward": reward / n_text,
            "train/equal_groups": n_equal / self.n_prompt,
            "train/answer_tokens": n_token / n_text,
        }
        most_rows = max(1, int(self.ranks.maximum(torch.tensor(float(len(tokens))))))
        return Batch(tokens, targets, n_text, torch.full((len(tokens),), -1), most_rows, weights)

    def write(
        self, model: GPT, prompts: Prompts, places: Sequence[int], n_answer: int, temperature: float, seed: int
    ) -> list[Answer]:
        """n_answer answers to each of the prompts; answer i of all depends on `seed + i`.

        A CPU answers one prompt at a time, which is then read once, with weights that are packed for it. A GPU has no time
        for small batches.
        """
        on_cpu = model.embedding.weight.device.type == "cpu"
        engine = Engine(merge(model), self.tokenizer, dtype=self.dtype if on_cpu else None)
        n_prompt, written = 1 if on_cpu else max(1, MOST_AT_ONCE // n_answer), []
        for first in range(0, len(places), n_prompt):
            asked = [int(place) for place in places[first : first + n_prompt] for _ in range(n_answer)]
            request = Request(self.most_new, seed=seed + first * n_answer, sampling=Sampling(temperature))
            tokens, texts = [[] for _ in asked], [""] * len(asked)
            for new in engine.stream_all([prompts.prompt(place) for place in asked], request):
                tokens[new.sample].append(new.token)
                texts[new.sample] += new.text
            written += map(Answer, asked, tokens, texts)
        return written

    def judge(self, prompts: Prompts, answer: Answer) -> float:
        """The reward of an answer. Raises UserError if a function of the user's own raises, or returns no finite number."""
        key = f"objective.reward={self.config.reward}"
        turns, reference = prompts.words(answer.place)
        try:
            reward = float(self.reward(turns, answer.text, reference))
        except Exception as error:  # the user's own code may raise anything
            raise UserError(
                f"{key} raised {type(error).__name__}: {error}; the answer was {answer.text[:80]!r}"
            ) from error
        if not math.isfinite(reward):
            raise UserError(f"{key} returned {reward} for the answer {answer.text[:80]!r}; a reward is a finite number")
        return reward

    def figures(self) -> dict[str, float]:
        return self.last

    def judge_answers(self, model: GPT) -> dict[str, Any]:
        """The mean reward of the likeliest answers to JUDGED_PROMPTS held-out prompts, evenly spaced."""
        n = len(self.held_out.places)
        places = np.unique(np.linspace(0, n - 1, min(n, JUDGED_PROMPTS)).astype(int))
        rewards = [self.judge(self.held_out, each) for each in self.write(model, self.held_out, places, 1, 0.0, 0)]
        reward = sum(rewards) / len(rewards)
        return {"val/reward": reward, "compared": 1 - reward}


# -------------------------------------------------------------------------------------------------------------- prompts


@final
class Prompts:
    """The prompts of a split: each conversation up to an answer of the assistant, and this answer, which is the reference."""

    def __init__(self, streams: Sequence[TokenStream], tokenizer: ChatTokenizer) -> None:
        self.tokenizer, tokens, places, n_before = tokenizer, [], [], 0
        for stream in streams:
            text = np.concatenate(list(in_blocks(stream)))
            asks, ends = (np.flatnonzero(text == each) for each in (tokenizer.assistant, tokenizer.end))
            begins = document_begins(stream, tokenizer.end_of_text)
            first = begins[np.searchsorted(begins, asks, side="right") - 1]
            places.append(n_before + np.stack([first, asks + 1, ends[np.searchsorted(ends, asks)] + 1], 1))
            tokens.append(text)
            n_before += len(text)
        self.tokens, self.places = np.concatenate(tokens), np.concatenate(places)  # (n, 3): begin, answer, end

    def lengths(self) -> np.ndarray:
        """(n, 2): tokens of each prompt, and of its reference with the <|end|>."""
        return np.diff(self.places, axis=1)

    def prompt(self, place: int) -> list[int]:
        begin, answer, _ = self.places[place]
        return self.tokens[begin:answer].tolist()

    def words(self, place: int) -> tuple[list[Turn], str]:
        """The turns of a prompt, and the text of its reference."""
        begin, answer, end = self.places[place]
        roles = {self.tokenizer.role_token(role): role for role in ROLES}
        text = self.tokens[begin + 1 : answer - 1]  # without end_of_text and <|assistant|>
        turns = [
            Turn(roles[int(part[0])], self.tokenizer.decode(part[1:].tolist()))
            for part in np.split(text, np.flatnonzero(text == self.tokenizer.end) + 1)[:-1]
        ]
        return turns, self.tokenizer.decode(self.tokens[answer : end - 1].tolist())


def windows_of_answers(
    texts: Sequence[tuple[list[int], list[int], float]], n_token: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and weights (n, T) of texts, as many after each other as fit into a window of T = n_token tokens.

    texts: the tokens of a prompt, those of its answer, and the weight of each of the latter, which alone are targets.
    """
    rows: list[list[tuple[list[int], list[int], float]]] = []
    n_left = 0
    for prompt, answer, weight in texts:
        if len(prompt) + len(answer) > n_left:
            rows.append([])
            n_left = n_token + 1
        rows[-1].append((prompt, answer, weight))
        n_left -= len(prompt) + len(answer)
    tokens = torch.zeros(len(rows), n_token + 1, dtype=torch.int64)
    targets, weights = torch.full_like(tokens, IGNORED_TARGET), torch.zeros(tokens.shape)
    for row, entries in enumerate(rows):
        end = 0
        for prompt, answer, weight in entries:
            begin, asked, end = end, end + len(prompt), end + len(prompt) + len(answer)
            tokens[row, begin:end] = torch.tensor(prompt + answer)
            targets[row, asked:end], weights[row, asked:end] = tokens[row, asked:end], weight
    return tokens[:, :-1], targets[:, 1:], weights[:, 1:]
