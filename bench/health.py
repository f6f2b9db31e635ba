"""How often the health checks are wrong: false alarms on real text, lists, tables and real models, and missed collapses.

python bench/health.py                                      # text only: the default data and its tokenizer
python bench/health.py --runs runs/a runs/b                 # also samples of every checkpoint of these healthy runs
python bench/health.py --prose notes.txt                    # also windows of a text file
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, ROOT, write_record

from andrea.api.command_line import configure
from andrea.attention import HeadStatistics
from andrea.checkpoint import checkpoints_of, read_checkpoint
from andrea.checkpoint.model import load_model
from andrea.config import RunConfig
from andrea.generation import Engine, Request, Sampling
from andrea.text.corpus import Corpus, open_corpus
from andrea.text.loader import Loader
from andrea.text.tokenizer import ByteTokenizer, Tokenizer
from andrea.training.evaluation import SAMPLE_TEMPERATURE
from andrea.training.health.health import DataSummary, Evidence, Health
from andrea.training.health.text_quality import ReferenceText, judge_texts
from andrea.training.records.run_folder import read_lines

WORDS = (ROOT / "README.md").read_text(encoding="utf-8").split()
MARKS = list("'\"-=*#.,;:!?()[]{}/\\|_~^&@$%+<>`") + ["'''''", "...", "--", "),", "==", "//", '"""']
TEXTS = 5  # of an evaluation, as in training
COLLAPSES_PER_TABLE = 4  # collapsed texts of each kind, for each list of a kind
HEALTHY_STARTS = 97  # different pieces of held-out text in front of the loops


# ------------------------------------------------------------------------------------------- text that is healthy


def lists(chance: random.Random) -> dict[str, str]:
    """One example of each kind of list, table and ornament that real text contains, about 600 characters long."""
    names = [word.strip("`.,:()*").lower() or "x" for word in WORDS]
    some = [chance.choice(names) for _ in range(60)]
    numbers = [chance.randrange(10 ** chance.randint(1, 4)) for _ in range(120)]
    title = " ".join(some[:3]).title()
    rows = "\n".join(f"| {a} | {b} | {c} |" for a, b, c in zip(some, some[20:], numbers, strict=False))
    return {
        "numbers": f"TABLE = {numbers}\n",
        "numbers a line": "values = [\n" + "".join(f"    {number},\n" for number in numbers) + "]\n",
        "small numbers": f"bits = {[number % 2 for number in numbers]}\n",
        "range": f"{list(range(numbers[0], numbers[0] + 120))}\n",
        "hexadecimal": ", ".join(f"0x{number:02x}" for number in numbers) + "\n",
        "zeros in code": f"def {some[0]}():\n    {some[1]} = {[0] * 30}\n    return {', '.join(some[2:24])}\n",
        "matrix": "\n".join(f"    [{', '.join(str(int(i == j)) for j in range(9))}]," for i in range(9)),
        "strings": f"__all__ = {some}\n",
        "strings a line": "__all__ = [\n" + "".join(f'    "{name}",\n' for name in some) + "]\n",
        "dictionary": "{\n" + "".join(f"    '{a}': {b},\n" for a, b in zip(some, numbers, strict=False)) + "}\n",
        "dictionary of zeros": "counts = {" + ", ".join(f"'{name}': 0" for name in some) + "}\n",
        "assignments": "".join(f"    self.{name} = None\n" for name in some[:30]),
        "imports": "".join(f"from {some[0]}.{name} import {name}\n" for name in some[:25]),
        "asserts": "".join(f"        self.assertEqual(f({number}), {number + 1})\n" for number in numbers[:20]),
        "markdown table": f"| {some[0]} | {some[1]} | {some[2]} |\n|---|---|---|\n{rows}\n",
        "aligned table": "\n".join(f"{a:<20}{b:>10}" for a, b in zip(some, numbers, strict=False)),
        "grid": "\n".join(f"+{'-' * 18}+{'-' * 12}+\n| {a:<16} | {b:>10} |" for a, b in zip(some[:9], numbers, strict=False)),
        "underlines": "\n\n".join(
            f"{t}\n{chance.choice('=-~^') * len(t)}\n\n{' '.join(some[i:i + 8])}." for i, t in enumerate([title] * 8)
        ),
        "banner": f"# {'=' * 76}\n# {title}\n# {'=' * 76}\n\nimport {some[4]}\n\n{some[5]} = {' + '.join(some[6:30])}\n",
        "ruler": f"{'----+----' * 8}\n{''.join(f'{i:>9}' for i in range(1, 9))}\n" + " ".join(some[:50]),
        "booleans": f"flags = {[number % 2 == 0 for number in numbers]}\n",
        "empty strings": f"def {some[0]}({some[1]}):\n    {some[1]} = {[''] * 20}\n    return {', '.join(some[2:24])}\n",
        "nested": "".join(f"{'    ' * depth}if {name}:\n" for depth, name in enumerate(some[:12])) + " ".join(some[12:40]),
        "comments": "".join(f"    # {' '.join(chance.sample(some, 6))}\n" for _ in range(14)),
        "ordered": "".join(f"{i}. {' '.join(chance.sample(some, 4))}\n" for i in range(1, 20)),
        "bullets": "".join(f"- {' '.join(chance.sample(some, 3))}\n" for _ in range(22)),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------- text that has collapsed


def collapses(chance: random.Random, healthy: np.ndarray, tokenizer: Tokenizer) -> dict[str, str]:
    """A collapsed text for each finding about text, by the finding's name.

    The loops begin after up to two fifths of the `healthy` tokens and have stray words. The poor text is three to six
    words in any order, which is no loop.
    """

    def loop(unit: Callable[[], str], joint: str) -> str:
        noise, start = chance.choice([0.0, 0.02, 0.05]), int(chance.choice([0.0, 0.2, 0.4]) * len(healthy))
        units = [chance.choice(WORDS) if chance.random() < noise else unit() for _ in range(len(healthy))]
        looping = tokenizer.encode_array("\n" + joint.join(units))
        return tokenizer.decode(np.concatenate([healthy[:start], looping])[: len(healthy)])

    word = chance.choice([word for word in WORDS if word.isalpha()])
    mark, longest = chance.choice(MARKS), chance.randint(1, 5)
    phrase = " ".join(chance.choice([w for w in WORDS if w.isalpha()]) for _ in range(chance.randint(1, 6)))
    few = chance.sample([word for word in WORDS if word.isalpha()], chance.randint(3, 6))
    return {
        "repeated_word": loop(lambda: word, chance.choice([" ", "\n", "  "])),
        "repeated_punctuation": loop(lambda: mark * chance.randint(1, longest), " "),
        "repeated_phrase": loop(lambda: phrase, chance.choice([", ", ",", ",\n"])),
        "poor_text": tokenizer.decode(
            tokenizer.encode_array(" ".join(chance.choices(few, k=len(healthy))))[: len(healthy)]
        ),
    }


# -------------------------------------------------------------------------------------------------- the measurement


def cut(text: str, tokenizer: Tokenizer, n_token: int) -> str:
    return tokenizer.decode(tokenizer.encode_array(text)[:n_token])


def windows(tokens: np.ndarray, tokenizer: Tokenizer, n_token: int, count: int) -> list[str]:
    starts = np.linspace(0, len(tokens) - n_token, count).astype(int)
    return [tokenizer.decode(tokens[start : start + n_token]) for start in starts]


def findings_of(reference: ReferenceText, texts: list[str]) -> set[str]:
    """The names of the findings in these samples."""
    return set(judge_texts(texts, reference).findings)


def grouped(texts: list[str], size: int) -> list[list[str]]:
    """The samples of one evaluation each."""
    return [texts[first : first + size] for first in range(0, len(texts), size)]


def count_alarms(reference: ReferenceText, healthy: dict[str, list[str]]) -> dict[str, tuple[int, int]]:
    """Kind of healthy text -> (texts with a finding, texts)."""
    return {
        kind: (sum(bool(findings_of(reference, [text])) for text in texts), len(texts))
        for kind, texts in healthy.items()
    }


def count_caught(reference: ReferenceText, collapsed: dict[str, list[str]]) -> dict[str, dict[str, tuple[int, int]]]:
    """How many collapsed texts give any finding and the right one; and the right one in a whole evaluation's samples."""
    counts: dict[str, dict[str, tuple[int, int]]] = {"caught": {}, "named_right": {}, "evaluations_named_right": {}}
    for kind, texts in collapsed.items():
        found = [findings_of(reference, [text]) for text in texts]
        for text, names in zip(texts, found, strict=True):
            if kind not in names:
                print("missed", reference.tokenizer.kind, kind, names, repr(text))
        groups = grouped(texts, TEXTS)
        right = sum(kind in findings_of(reference, group) for group in groups)
        counts["caught"][kind] = sum(map(bool, found)), len(found)
        counts["named_right"][kind] = sum(kind in names for names in found), len(found)
        counts["evaluations_named_right"][kind] = right, len(groups)
    return counts


def measure_text(
    stream: np.ndarray, tokenizer: Tokenizer, n_token: int, chosen: argparse.Namespace
) -> dict[str, dict[str, tuple[int, int]]]:
    """False alarms and caught collapses with one tokenizer; stream: the held-out tokens (N,)."""
    reference, chance = ReferenceText([stream], tokenizer, n_token), random.Random(1)
    tables: dict[str, list[str]] = {}
    for _ in range(chosen.tables):
        for kind, table in lists(chance).items():
            tables.setdefault(f"list: {kind}", []).append(cut(table, tokenizer, n_token))
    real = {"validation windows": windows(stream, tokenizer, n_token, chosen.windows)}
    alarms = count_alarms(reference, real | tables)
    if chosen.prose:
        prose = tokenizer.encode_array(chosen.prose.read_text(encoding="utf-8"))
        texts = {"prose": windows(prose, tokenizer, n_token, chosen.windows)}
        alarms |= count_alarms(ReferenceText([prose], tokenizer, n_token), texts)
    alarms["all lists"] = tuple(sum(alarms[kind][i] for kind in tables) for i in range(2))
    collapsed: dict[str, list[str]] = {}
    begins = np.linspace(0, len(stream) - n_token, HEALTHY_STARTS).astype(int)
    for index in range(chosen.tables * COLLAPSES_PER_TABLE):
        begin = begins[index % len(begins)]
        for kind, text in collapses(chance, stream[begin : begin + n_token], tokenizer).items():
            collapsed.setdefault(kind, []).append(text)
    counts = {"false_alarms": alarms} | count_caught(reference, collapsed)
    print(tokenizer.kind, *(f"\n  {key} {kind}: {a} of {b}" for key in counts for kind, (a, b) in counts[key].items()))
    return counts


def findings_of_records(folder: Path, run: RunConfig, corpus: Corpus) -> dict[str, list[str]]:
    """Step of each evaluation in a run's records -> the findings in its losses, gradients and heads, without text."""
    loader = Loader(corpus.sources, run.model.sequence_length, run.seed)
    health = Health(run, corpus.tokenizer.n_vocab, DataSummary.of(corpus, loader), None)
    records, heads, found = read_lines(folder / "metrics.jsonl"), None, {}
    last = max(record["step"] for record in records)
    for record in records:
        if "event" in record:
            continue
        if "attention/heads/entropy_share" in record:
            share = torch.tensor(record["attention/heads/entropy_share"])  # (L, H), of one query each
            largest = torch.tensor(record["attention/heads/largest_logit"])
            known = {"entropy": share, "largest_logit": largest}
            heads = HeadStatistics(*(known.get(name, torch.ones_like(share)) for name in HeadStatistics._fields))
        if "train/loss" in record:
            health.note_step(record["step"], record["train/loss"], record["train/gradient_norm"])
        if "val/loss" in record and heads is not None:
            # The last evaluation scores the whole held-out split, the others a part of it: they do not compare.
            val = {corpus.sources[0].name: {"loss": record["val/loss"], "tokens": float(record["step"] == last)}}
            evidence = Evidence(record["step"], record["tokens"], [], heads, None, val)
            found[str(record["step"])] = sorted(health.judge(evidence)[1])
    return found


def measure_models(folder: Path, reference: ReferenceText, run: RunConfig, samples: int) -> dict[str, dict[str, Any]]:
    """For each checkpoint of a healthy run: the findings in samples that its model writes."""
    rows = {}
    for path in checkpoints_of(folder):
        checkpoint = read_checkpoint(path)
        tokenizer = checkpoint.tokenizer()
        sampling = Sampling(SAMPLE_TEMPERATURE)
        request = Request(run.train.sample_tokens, samples, seed=checkpoint.step, sampling=sampling)
        texts = Engine(load_model(checkpoint, tokenizer), tokenizer).write(str(run.data.sample_prompt), request)
        evaluations = [findings_of(reference, group) for group in grouped(texts, TEXTS)]
        name = f"{folder.name} step {checkpoint.step}"
        rows[name] = {
            "evaluations": len(evaluations),
            "named": sorted(finding for found in evaluations for finding in found),
            "single_texts_named": sum(bool(findings_of(reference, [text])) for text in texts),
        }
        print(f"{name}: {rows[name]}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--windows", type=int, default=200, help="windows of each real text")
    parser.add_argument(
        "--tables", type=int, default=50, help="lists of each kind; four times as many collapses of each"
    )
    parser.add_argument("--prose", type=Path, help="a text file whose windows must give no finding")
    parser.add_argument("--runs", type=Path, nargs="*", default=[], help="healthy runs that must give no finding")
    parser.add_argument(
        "--samples", type=int, default=20, help="of each checkpoint; judged five at a time, as in training"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "health.json")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    run = configure(RunConfig, "train", [f"data_dir={chosen.data_dir}"])
    corpus = open_corpus(run.data, run.tokenizer, Path(run.data_dir), print)
    held_out, n_token, bytes_ = corpus.sources[0].val[:], run.train.sample_tokens, ByteTokenizer()
    streams = (
        (held_out, corpus.tokenizer),
        (bytes_.encode_array(corpus.tokenizer.decode(held_out)), bytes_),
    )
    text = {tokenizer.kind: measure_text(stream, tokenizer, n_token, chosen) for stream, tokenizer in streams}
    records = {folder.name: findings_of_records(folder, run, corpus) for folder in chosen.runs}
    print(records)
    models: dict[str, dict[str, Any]] = {}
    for folder in chosen.runs:
        reference = ReferenceText([held_out], corpus.tokenizer, n_token)
        models |= measure_models(folder, reference, run, chosen.samples)
    figures = {"sample_tokens": n_token, "text": text, "records": records, "models": models}
    write_record(chosen.output, "health", "cpu", figures)


if __name__ == "__main__":
    main()
