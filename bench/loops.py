"""Why a model repeats itself: how sure it is that a phrase comes again, and how often that happens in real text.

    python bench/loops.py runs/NEW runs/OLD

For each run: the share of loops among texts that it writes, without a repetition penalty; and the mean probability of the right
token in a phrase that stands once, twice, … before, back to back. Phrases and the tokens before them are of held-out text. The
first row is the text itself: of its places where the last tokens repeat what stands just before, how many go on?
"""

from __future__ import annotations

import argparse
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, write_record

import andrea
from andrea.cli.command_line import configure
from andrea.config import RunConfig
from andrea.text import open_corpus

PERIODS = range(4, 33)  # tokens of a phrase in real text
PHRASE, BEFORE = 8, 64  # tokens of a phrase for the models, and of the text before it
TIMES = range(1, 7)  # how often it stands there
N_PHRASE, N_TEXT = 100, 40
LOOP = 0.3  # a text that compresses to less than this share of its size is a loop
TOKENS = 160


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders of runs on Python's standard library")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.8])
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--output", type=Path, default=RESULTS / "loops.json")
    chosen = parser.parse_args()
    config = configure(RunConfig, "train", [])
    source = open_corpus(config.data, config.tokenizer, chosen.data_dir, print).sources[0]
    train, held_out = (np.asarray(stream[: len(stream)]) for stream in (source.train, source.val))
    of_text = [goes_on(np.concatenate([train, held_out]), times) for times in TIMES]
    print("real text:", *(f"{share:.3f} of {count:,}" for share, count in of_text), sep="  ")
    rows: list[dict[str, Any]] = []
    for run in chosen.runs:
        model = andrea.load(run, device="cpu")
        row: dict[str, Any] = {"model": model.config["model"]["name"], "seed": model.config["seed"]}
        row["probability"] = sureness(model, held_out)
        row["loops"] = {str(each): loops(model, chosen.prompt, each) for each in chosen.temperatures}
        print(row, flush=True)
        rows.append(row)
        content = {"real_text": of_text, "phrase": PHRASE, "texts": N_TEXT, "prompt": chosen.prompt, "rows": rows}
        write_record(chosen.output, "loops", "cpu", content)


def goes_on(tokens: np.ndarray, times: int) -> tuple[float, int]:
    """The share of places, and their number, at which one more token repeats, after a phrase has come 1 + `times` times."""
    share, count = 0, 0
    for period in PERIODS:
        equal = tokens[period:] == tokens[:-period]
        sums = np.concatenate([[0], np.cumsum(equal)])
        needed = period * times
        before = sums[needed:-1] - sums[: -needed - 1] == needed  # the last `needed` tokens all repeat
        share, count = share + int(equal[needed:][before].sum()), count + int(before.sum())
    return share / max(count, 1), count


@torch.no_grad()
def sureness(model: andrea.LoadedModel, held_out: np.ndarray) -> list[float]:
    """The mean probability of a token of a phrase that has come 1, 2, … times before."""
    places = np.random.default_rng(1).integers(BEFORE, len(held_out) - PHRASE, N_PHRASE)
    sums = np.zeros(len(TIMES))
    for place in places:
        phrase = held_out[place : place + PHRASE]
        ids = np.concatenate([held_out[place - BEFORE : place], *[phrase] * (1 + len(TIMES))]).astype(np.int64)
        chances = model.logits(ids).softmax(-1)[:-1].gather(1, torch.from_numpy(ids[1:, None]))[:, 0]
        sums += chances[BEFORE - 1 + PHRASE :].view(len(TIMES), PHRASE).mean(1).numpy()
    return [round(float(each), 4) for each in sums / len(places)]


def loops(model: andrea.LoadedModel, prompt: str, temperature: float) -> int:
    """How many of N_TEXT texts are loops."""
    found = 0
    for seed in range(N_TEXT):
        text = model.generate(
            prompt, max_new_tokens=TOKENS, temperature=temperature, repetition_penalty=1.0, seed=seed
        ).encode()
        found += len(zlib.compress(text, 9)) < LOOP * len(text)
    return found


if __name__ == "__main__":
    main()
