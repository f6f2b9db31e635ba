"""How often health cries wolf, and how often it sees one: real text, lists and tables, synthetic collapses, real models.

python bench/health.py                                      # text alone: the default data and its tokenizer
python bench/health.py --runs runs/a runs/b                 # besides, samples of every checkpoint of these runs
python bench/health.py --prose notes.txt                    # besides, windows of a text file
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import yaml
from common import RESULTS, ROOT, write_record

from andrea.attention import HeadStatistics
from andrea.checkpoint import checkpoints_of, read_checkpoint
from andrea.cli.command_line import configure
from andrea.config import HealthConfig, RunConfig, parse
from andrea.generation import Engine, Request, Sampling
from andrea.model.gpt import GPT
from andrea.text.corpus import Corpus, open_corpus
from andrea.text.loader import Loader
from andrea.text.tokenizer import ByteTokenizer, Tokenizer
from andrea.training.health.check import Evidence
from andrea.training.health.data import DataSummary
from andrea.training.health.health import Health
from andrea.training.health.reference_text import ReferenceText
from andrea.training.health.text import judge_texts
from andrea.training.records.run_folder import read_lines

WORDS = (ROOT / "README.md").read_text(encoding="utf-8").split()
MARKS = list("'\"-=*#.,;:!?()[]{}/\\|_~^&@$%+<>`") + ["'''''", "...", "--", "),", "==", "//", '"""']


# ------------------------------------------------------------------------------------------- what is legitimate


def lists(chance: random.Random) -> dict[str, str]:
    """One of each kind of list, table and ornament that real text is full of, about 600 characters long."""
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


# ---------------------------------------------------------------------------------------------- what has collapsed


def collapses(chance: random.Random, healthy: np.ndarray, tokenizer: Tokenizer) -> dict[str, str]:
    """The three collapses, by the name they must be given: after up to two fifths of healthy tokens, with stray words.

    And a text of three to six words in any order, which is no loop.
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


def named(reference: ReferenceText, config: HealthConfig, text: str) -> set[str]:
    """What is found where every sample looks like this one text."""
    return set(judge_texts([text], reference, config).findings)


def grouped(texts: list[str], size: int) -> list[list[str]]:
    return [texts[first : first + size] for first in range(0, len(texts), size)]


def samples(checkpoint: Path, count: int, n_token: int, prompt: str) -> tuple[int, list[str]]:
    saved = read_checkpoint(checkpoint)
    config, tokenizer = saved.state["config"], saved.tokenizer()
    run = configure(RunConfig, "train", ["logger=none"])
    keep = {name: config[name] for name in ("model", "attention")}
    model = GPT(parse(type(run.model), keep["model"]), parse(type(run.attention), keep["attention"]), tokenizer.n_vocab,
                tokenizer.end_of_text)  # fmt: skip
    model.load_state_dict(saved.model_tensors())
    request = Request(n_token, count, seed=saved.step, sampling=Sampling(temperature=0.8))
    return saved.step, Engine(model, tokenizer).write(prompt, request)


def replayed(folder: Path, run: RunConfig, corpus: Corpus) -> dict[str, list[str]]:
    """Step of each evaluation in the run's records -> what is found in its losses, gradients and heads, without text."""
    loader = Loader(corpus.sources, run.model.sequence_length, run.seed)
    health = Health(run, corpus.tokenizer.n_vocab, DataSummary.of(corpus, loader), None)
    records, heads, found = read_lines(folder / "metrics.jsonl"), None, {}
    last = max(record["step"] for record in records)
    for record in records:
        if "event" in record:
            continue
        if "attention/heads/entropy_share" in record:
            share = torch.tensor(record["attention/heads/entropy_share"])  # (L, H), of one row each
            largest = torch.tensor(record["attention/heads/largest_logit"])
            known = {"entropy": share, "largest_logit": largest}
            heads = HeadStatistics(*(known.get(name, torch.ones_like(share)) for name in HeadStatistics._fields))
        if "train/loss" in record:
            health.note_step(record["step"], record["train/loss"], record["train/gradient_norm"])
        if "val/loss" in record and heads is not None:
            # The last evaluation reads the whole held-out split, those before a part: not to be compared.
            val = {corpus.sources[0].name: {"loss": record["val/loss"], "tokens": float(record["step"] == last)}}
            evidence = Evidence(record["step"], record["tokens"], [], heads, None, val)
            found[str(record["step"])] = sorted(health.judge(evidence)[1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--windows", type=int, default=200, help="windows of each real text")
    parser.add_argument("--tables", type=int, default=50, help="lists of each kind, and collapses of each kind")
    parser.add_argument("--prose", type=Path, help="a text file whose windows must not be named")
    parser.add_argument(
        "--runs", type=Path, nargs="*", default=[], help="healthy runs whose checkpoints must not be named"
    )
    parser.add_argument(
        "--samples", type=int, default=20, help="of each checkpoint; judged health.samples at a time as in training"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "health.json")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    config = parse(HealthConfig, yaml.safe_load((ROOT / "configs/health/default.yaml").read_text(encoding="utf-8")))
    run = configure(RunConfig, "train", [f"data_dir={chosen.data_dir}"])
    corpus = open_corpus(run.data, run.tokenizer, Path(run.data_dir), print)
    held_out = corpus.sources[0].val
    text = corpus.tokenizer.decode(held_out[:])
    n_token, rows = run.train.sample_tokens, {}
    for tokenizer in (corpus.tokenizer, ByteTokenizer()):
        stream = held_out if tokenizer is corpus.tokenizer else tokenizer.encode_array(text)
        reference = ReferenceText.of([stream], tokenizer, n_token)
        chance = random.Random(1)
        legitimate = {"validation windows": windows(stream[:], tokenizer, n_token, chosen.windows)}
        for _ in range(chosen.tables):
            for kind, table in lists(chance).items():
                legitimate.setdefault(f"list: {kind}", []).append(cut(table, tokenizer, n_token))
        counts = ("false_alarms", "caught", "named_right", "evaluations_named_right")
        row = rows.setdefault(tokenizer.kind, {key: {} for key in counts})
        collapsed_texts: dict[str, list[str]] = {}
        for kind, texts in legitimate.items():
            alarms = [found for each in texts if (found := named(reference, config, each))]
            row["false_alarms"][kind] = [len(alarms), len(texts)]
        if chosen.prose:
            prose = tokenizer.encode_array(chosen.prose.read_text(encoding="utf-8"))
            own = ReferenceText.of([prose], tokenizer, n_token)
            texts = windows(prose, tokenizer, n_token, chosen.windows)
            row["false_alarms"]["prose"] = [sum(bool(named(own, config, each)) for each in texts), len(texts)]
        begins = np.linspace(0, len(stream) - n_token, 97).astype(int)
        for index in range(chosen.tables * 4):
            begin = begins[index % len(begins)]
            for kind, collapsed in collapses(chance, stream[begin : begin + n_token], tokenizer).items():
                found = named(reference, config, collapsed)
                collapsed_texts.setdefault(kind, []).append(collapsed)
                for key, hit in (("caught", bool(found)), ("named_right", kind in found)):
                    counted = row[key].setdefault(kind, [0, 0])
                    counted[0] += hit
                    counted[1] += 1
                if kind not in found:
                    print("missed", tokenizer.kind, kind, found, repr(collapsed))
        for kind, texts in collapsed_texts.items():  # as in training: several texts at an evaluation
            groups = grouped(texts, config.samples)
            right = sum(kind in judge_texts(group, reference, config).findings for group in groups)
            row["evaluations_named_right"][kind] = [right, len(groups)]
        lists_ = [value for kind, value in row["false_alarms"].items() if kind.startswith("list")]
        row["false_alarms"]["all lists"] = [sum(value[0] for value in lists_), sum(value[1] for value in lists_)]
        print(tokenizer.kind, *(f"\n  {key} {kind}: {a} of {b}" for key in row for kind, (a, b) in row[key].items()))
    models: dict[str, dict] = {}
    records = {folder.name: replayed(folder, run, corpus) for folder in chosen.runs}
    print(records)
    for folder in chosen.runs:
        reference = ReferenceText.of([held_out], corpus.tokenizer, n_token)
        for checkpoint in checkpoints_of(folder):
            step, texts = samples(checkpoint, chosen.samples, n_token, str(run.data.sample_prompt))
            alarms = [set(judge_texts(group, reference, config).findings) for group in grouped(texts, config.samples)]
            models[f"{folder.name} step {step}"] = {
                "evaluations": len(alarms), "named": sorted(name for names in alarms for name in names),
                "single_texts_named": sum(bool(named(reference, config, each)) for each in texts),
            }  # fmt: skip
            print(f"{folder.name} step {step}: {models[f'{folder.name} step {step}']}", flush=True)
    write_record(
        chosen.output, "health", "cpu", {"sample_tokens": n_token, "text": rows, "records": records, "models": models}
    )


if __name__ == "__main__":
    main()
