"""The proof of an export: the other program loads the folder from disk, and its results are compared with our model's.

T tokens, V vocabulary. The judge is our model in fp32, with the weights rounded as the export holds them. So a type of fewer
bits changes nothing of what is demanded of logits, and its cost in bits per byte is given apart.
"""

import argparse
import functools
import math
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from andrea.config import UserError
from andrea.interop.architectures import Trained
from andrea.model.gpt import GPT
from andrea.text.corpus import held_out_of_run
from andrea.text.loader import validation_batches
from andrea.text.shards import IGNORED_TARGET
from andrea.text.sources import texts_at
from andrea.text.tokenizer import END_OF_TEXT

# ----------------------------------------------------------------------------------------------------- what is compared


class OtherProgram(ABC):
    """name: of the program, with its version."""

    name: str

    @abstractmethod
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits (T, V) fp32 for T token ids."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, with end-of-text in front."""

    @abstractmethod
    def greedy(self, tokens: Sequence[int], n_new: int) -> list[int]:
        """At most n_new ids that follow, each the likeliest, generated with the program's own cache."""


class Target(ABC):
    """One model in one format and type of numbers.

    what: the class or architecture that the model becomes. why: a sentence. package: of the program that proves it.
    share, least: the tolerance of the proof, as a share of the largest logit, and at least so much.
    replaced: patterns of files in a repository that an earlier upload may have left, and that would be loaded in place of these.
    """

    trained: Trained
    what: str
    why: str
    package: str
    share: float
    least: float = 0.0
    replaced: tuple[str, ...] = ()

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write the files to an existing folder. Raises OSError, and UserError for what the format cannot hold."""

    def rounded_gpt(self) -> GPT:
        """Our model in fp32, with the weights as the files hold them: here in fp32."""
        return self.trained.gpt

    @abstractmethod
    def open(self, folder: Path) -> OtherProgram:
        """Load the files by the other program. Raises ImportError if its package is missing."""

    @abstractmethod
    def usage(self, folder: str, hub: str | None, prompt: str) -> str:
        """Commands that write text with the files in `folder`, or in the repository `hub` (OWNER/NAME): Markdown.

        prompt: of the text.
        """


FEWEST_CHARACTERS = 1000
LONGEST_TOKEN = 64  # characters: of a text whose tokens are longer, fewer are compared


@dataclass(frozen=True)
class ComparedText:
    """name: for people. ids (n,) int64: its tokens, with end-of-text in front. content: its characters."""

    name: str
    ids: np.ndarray
    content: str


def compared_text(trained: Trained, text: Path | None, data_dir: Path, n_token: int) -> ComparedText:
    """The first n_token tokens of the file `text`; if it is None, of the run's held-out text, or else of a module of Python's."""
    tokenizer = trained.tokenizer
    if text is None and (stream := held_out_of_run(trained.checkpoint.state, data_dir)) is not None:
        held_out = np.asarray(stream[:n_token], dtype=np.int64)
        return ComparedText("the run's held-out text", held_out, tokenizer.decode(held_out.tolist()))
    name = text.name if text else f"{Path(argparse.__file__).name} of Python's library"
    content = read_text(text)
    enough = content[: n_token * LONGEST_TOKEN]  # a large text takes minutes and gigabytes to encode
    ids = np.array([tokenizer.end_of_text, *tokenizer.encode(enough)], dtype=np.int64)[:n_token]
    return ComparedText(name, ids, content)


@functools.cache  # it is read once, and once is said what is left out
def read_text(text: Path | None) -> str:
    """The content of the file or folder, as training reads it, or of a module of Python's standard library.

    Raises UserError if it is unusable.
    """
    path = text or Path(argparse.__file__)
    content = "\n".join(texts_at(path, "text", None, print if text else lambda line: None))
    if len(content) < FEWEST_CHARACTERS:
        raise UserError(
            f"text={path} has {len(content)} characters, too few to compare on; name a file with {FEWEST_CHARACTERS} or more"
        )
    return content


# ------------------------------------------------------------------------------------------------------------ the proof

MOST_TOKENS, LONGEST_WINDOW = 4096, 512  # of the text that logits are compared on
N_FUZZ_TEXTS, N_GREEDY = 10_000, 64
PROMPT_TOKENS = 8  # of the text, in front of the greedy tokens
MOST_PIECES = 12  # of a fuzz text
PIECES = [
    *" \t\n\r\f\v\u00a0\u3000\u2028", "  ", "   ", "\r\n", "'s", "'LL", "'re ", "don't", END_OF_TEXT, "_", "#", "0", "12", "345",
    "½", "²", "٣", "é", "e\u0301", "ß", "日本語", "한국", "ไทย", "अ", "🤖", "\U0001f469\u200d\U0001f467", "\u200b",
    "\x00", "\ufffd",
]  # fmt: skip


@dataclass(frozen=True)
class Proof:
    """What was measured. `tolerance` is the largest difference of logits that is accepted."""

    program: str
    text: str
    n_token: int
    largest_logit: float
    largest_difference: float
    tolerance: float
    bits_per_byte: float  # of our model with the weights in fp32
    bits_per_byte_rounded: float  # of our model with the weights as the export holds them
    bits_per_byte_other: float  # of the other program
    n_fuzz_texts: int
    n_texts_with_other_ids: int
    n_greedy_tokens: int
    n_other_greedy_tokens: int

    @property
    def failures(self) -> list[str]:
        """What is beyond tolerance, as parts of a sentence; empty for a proof that holds."""
        found = []
        if not self.largest_difference <= self.tolerance:  # also if it is not a number
            found.append(f"logits differ by {self.largest_difference:.3g}, more than {self.tolerance:.3g}")
        if self.n_texts_with_other_ids:
            found.append(f"{self.n_texts_with_other_ids} of {self.n_fuzz_texts} texts get other token ids")
        if self.n_other_greedy_tokens:
            found.append(
                f"{self.n_other_greedy_tokens} of {self.n_greedy_tokens} greedy tokens are not the likeliest here"
            )
        return found

    def as_json(self) -> dict[str, Any]:
        return {"proven": not self.failures} | asdict(self)

    @property
    def lines(self) -> list[str]:
        """The figures for people."""
        bits = f"{self.bits_per_byte_other:.4f}, here {self.bits_per_byte_rounded:.4f}"
        if self.bits_per_byte_rounded != self.bits_per_byte:
            bits += f", in fp32 {self.bits_per_byte:.4f}"
        return [
            f"logits: largest difference {self.largest_difference:.3g} of {self.largest_logit:.3g}, over {self.n_token} tokens",
            f"bits per byte of {self.text}: {bits}",
            f"token ids: equal for {self.n_fuzz_texts - self.n_texts_with_other_ids:,} of {self.n_fuzz_texts:,} texts",
            f"greedy tokens: {self.n_greedy_tokens}, each the likeliest here too",
        ]


def prove(trained: Trained, rounded: GPT, other: OtherProgram, share: float, least: float, text: ComparedText) -> Proof:
    """Compare the other program with our model.

    rounded: our model with the weights as the export holds them. share, least: the tolerance, as a share of the largest
    logit, and at least so much.
    """
    length = min(trained.model.sequence_length, LONGEST_WINDOW)
    windows = [(tokens[0], targets[0]) for tokens, targets in validation_batches(text.ids, length, 1)]  # each (T,)
    measured = [measured_window(trained, rounded, other, *window) for window in windows]  # one's logits at a time
    # np.max of numbers with a nan is nan; Python's max may be another.
    largest, difference = (float(np.max([each[key] for each in measured])) for key in ("largest", "difference"))
    nats = np.sum([each["nats"] for each in measured], axis=0)
    n_byte = sum(each["n_byte"] for each in measured)
    bits = [float(each) / math.log(2) / max(n_byte, 1) for each in nats]
    tolerance = max(least, share * largest)
    fuzz = list(fuzz_texts(text.content))
    expected = [[trained.tokenizer.end_of_text, *trained.tokenizer.encode(each)] for each in fuzz]
    wrong = sum(one != two for one, two in zip(expected, other.encode(fuzz), strict=True))
    n_greedy, n_other = greedy_tokens(rounded, other, windows[0][0], tolerance)
    return Proof(
        program=other.name,
        text=text.name,
        n_token=sum(int((targets != IGNORED_TARGET).sum()) for _, targets in windows),
        largest_logit=largest,
        largest_difference=difference,
        tolerance=tolerance,
        bits_per_byte=bits[0],
        bits_per_byte_rounded=bits[1],
        bits_per_byte_other=bits[2],
        n_fuzz_texts=len(fuzz),
        n_texts_with_other_ids=wrong,
        n_greedy_tokens=n_greedy,
        n_other_greedy_tokens=n_other,
    )


@torch.no_grad()
def logits_of(gpt: GPT, tokens: Tensor) -> Tensor:
    """tokens (T,) -> logits (T, V) fp32."""
    return gpt.logits(gpt(tokens[None]))[0].float()


def measured_window(
    trained: Trained, rounded: GPT, other: OtherProgram, tokens: Tensor, targets: Tensor
) -> dict[str, Any]:
    """largest logit of `rounded` and largest difference from the other program's, as numbers; n_byte of the targets' UTF-8;
    nats: -ln of their probability by trained.gpt, `rounded` and the other program. tokens, targets: (T,)."""
    exact = logits_of(trained.gpt, tokens)
    ours = exact if rounded is trained.gpt else logits_of(rounded, tokens)
    theirs = other.logits(tokens.tolist())
    lengths = torch.from_numpy(trained.tokenizer.byte_lengths())
    return {
        "largest": float(ours.abs().max()),
        "difference": float((ours - theirs).abs().max()),
        "n_byte": int(lengths[targets[targets != IGNORED_TARGET]].sum()),
        "nats": [
            float(cross_entropy(logits.double(), targets, ignore_index=IGNORED_TARGET, reduction="sum"))
            for logits in (exact, ours, theirs)
        ],
    }


def greedy_tokens(gpt: GPT, other: OtherProgram, tokens: Tensor, tolerance: float) -> tuple[int, int]:
    """The number of greedy tokens of the other program, and how many of them are not the likeliest here.

    Two tokens whose logits differ by less than both programs may err are equally likely.
    """
    length = gpt.config.sequence_length
    prompt = tokens[: max(1, min(PROMPT_TOKENS, length // 2))].tolist()
    n_new = min(N_GREEDY, length - len(prompt))
    if not n_new:
        return 0, 0
    chosen = other.greedy(prompt, n_new)
    logits = logits_of(gpt, torch.tensor(prompt + chosen))[len(prompt) - 1 : -1]  # (n, V)
    behind = logits.max(-1).values - logits.gather(-1, torch.tensor(chosen)[:, None])[:, 0]
    return len(chosen), int((behind > 2 * tolerance).sum())


def fuzz_texts(content: str) -> Iterator[str]:
    """Short texts that tokenizers cut differently: spaces, contractions, digits, scripts, emoji, parts of `content`.

    Lone surrogates are left out, because other programs refuse them. So are code points that Python's Unicode has not assigned:
    programs with tables of other versions of Unicode cut them differently, as letters or not.
    """
    random = np.random.default_rng(0)
    for _ in range(N_FUZZ_TEXTS):
        text = ""
        for _ in range(random.integers(1, MOST_PIECES)):
            kind = random.integers(4)
            if kind == 0:
                start = int(random.integers(len(content)))
                text += content[start : start + int(random.integers(1, 20))]
            elif kind == 1:
                point = int(random.integers(0x11_0000 if random.integers(2) else 0x3000))
                text += "" if unicodedata.category(chr(point)) in ("Cs", "Cn") else chr(point)
            else:
                text += PIECES[random.integers(len(PIECES))]
        yield text
