"""How many tokens the default recipe needs for the loss of nanoGPT's, at equal shape; what each ingredient is worth.

    python bench/recipe.py --data pystdlib
    python bench/recipe.py --data shakespeare --path input.txt
    python bench/recipe.py --model andrea-12m --steps 500 --tokens-per-step 4096 --seeds 1337

The baseline is `model=gpt2 optimizer=adamw` at the shape of --model: GELU, learned positions, LayerNorm with biases, cosine
decay to a tenth, with a head of its own (no fewer parameters than ours). Its learning rate is tuned at the whole budget, in
steps of a factor of two, until the best has a worse one on either side; there it is run with a tied head too (as GPT-2 is),
and where that is better its rate is tuned in turn and it counts instead. The best counts over all seeds. Ours is trained at
growing shares of that budget, each run decayed to its own end, until it passes the baseline's loss; where its line crosses
that is read off between the last two shares (straight in the logarithm of tokens). Then one ingredient at a time is taken
out of ours, or put in, at --ablation-share of the budget; what the model has already is left out of the table.

Every figure is the whole held-out split's bits per byte at the end of a `train.py` run. Each finished run is written; a study
that was cut off goes on after it.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from common import RESULTS, ROOT, write_record

from andrea.config import group_values
from andrea.training.records.run_folder import read_lines

FIRST_RATES = (0.0012, 0.0024, 0.0048)
SHARES = (0.1, 0.15, 0.2, 0.3, 0.4, 0.55, 1.0)
QUIET = ["logger=none", "train.sample_tokens=0"]
SPARSE = ["train.eval_every=1000000", "train.save_every=1000000"]
ADAMW = ["optimizer.kind=adamw"]  # all other rates stay; decay then falls on the head too
ADAMW_RATES = (0.00075, 0.0015, 0.003)  # for matrices: tried on the first seed
INGREDIENTS = {
    "default": [],
    "learned positions instead of rotary": ["model.position=learned"],
    "without QK-norm": ["model.qk_norm=false"],
    "squared ReLU, equal parameters": ["model.mlp=relu2", "model.d_mlp={wide}"],
    "SwiGLU, equal parameters": ["model.mlp=swiglu", "model.d_mlp={narrow}"],
    "head of its own": ["model.tied_head=false"],
    "tied head": ["model.tied_head=true"],
    "without softcap": ["model.logit_softcap=null"],
    "without value residuals": ["model.value_residual=false"],
    "value residuals": ["model.value_residual=true"],
    "tied head and value residuals": ["model.tied_head=true", "model.value_residual=true"],
    "cosine schedule": ["optimizer.schedule=cosine"],
    "GELU, equal parameters": ["model.mlp=gelu", "model.d_mlp={wide}"],
    "LayerNorm": ["model.norm=layernorm"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="andrea-nano")
    parser.add_argument("--data", choices=("pystdlib", "shakespeare"), default="pystdlib")
    parser.add_argument("--path", help="the text of shakespeare")
    parser.add_argument("--steps", type=int, help="of the whole budget; default: the model's recipe")
    parser.add_argument("--tokens-per-step", type=int, help="default: the model's recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337, 1338, 1339])
    parser.add_argument("--ablation-share", type=float, default=0.4)
    parser.add_argument("--parts", nargs="+", choices=("compare", "ablate"), default=["compare", "ablate"])
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    study = Study(chosen)
    if "compare" in chosen.parts:
        study.compare()
    if "ablate" in chosen.parts:
        study.ablate()


class Study:
    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.shape = group_values("model", chosen.model)
        self.steps = chosen.steps or self.shape["recipe_steps"]
        self.tokens_per_step = chosen.tokens_per_step or self.shape["recipe_tokens_per_step"]
        self.output = chosen.output or RESULTS / f"recipe-{chosen.model}-{chosen.data}.json"
        budget = {"steps": self.steps, "tokens_per_step": self.tokens_per_step}
        self.record: dict = {**budget, "model": chosen.model, "data": chosen.data, "runs": {}}
        if self.output.exists():
            self.record = json.loads(self.output.read_text(encoding="utf-8"))
            assert self.record.items() >= budget.items(), f"{self.output} is of another budget than {budget}"
        self.place = Path(tempfile.gettempdir()) / f"andrea-recipe-{chosen.model}-{chosen.data}"

    def figure(self, name: str, words: list[str], steps: int, seed: int) -> float:
        """Bits per byte at the end of the run; of this study or of one that was cut off."""
        key = f"{name} | {steps} steps | seed {seed} | {' '.join(words)}"
        if key not in self.record["runs"]:
            shutil.rmtree(self.place / "runs", ignore_errors=True)
            data = (
                ["data=pystdlib"] if self.chosen.data == "pystdlib" else ["data=text", f"data.path={self.chosen.path}"]
            )
            data += [] if self.chosen.data == "pystdlib" else ["tokenizer=byte"]
            places = [f"runs_dir={self.place / 'runs'}", f"data_dir={self.place / 'data'}", "name=run"]
            command = [sys.executable, str(ROOT / "train.py"), "device=cpu", *data, *places, *QUIET, *SPARSE, *words]
            command += [f"train.steps={steps}", f"train.tokens_per_step={self.tokens_per_step}"]
            code = subprocess.run([*command, f"seed={seed}"], stdout=subprocess.DEVNULL).returncode
            assert code in (0, 3), f"exit code {code}: {key}"
            records = read_lines(self.place / "runs" / "run" / "metrics.jsonl")
            self.record["runs"][key] = math.inf if code else records[-1]["val/bpb"]  # 3: it diverged
            self.write()
            print(f"{self.record['runs'][key]:.4f}  {key}", flush=True)
        return self.record["runs"][key]

    def write(self) -> None:
        about = {key: value for key, value in self.record.items() if key not in ("bench", "date", "machine")}
        write_record(self.output, "recipe", "cpu", about)

    def mean(self, name: str, words: list[str], steps: int) -> tuple[float, float]:
        """Mean and spread (largest less smallest) over the seeds."""
        each = [self.figure(name, words, steps, seed) for seed in self.chosen.seeds]
        return statistics.mean(each), max(each) - min(each)

    def baseline(self, rate: float, tied: bool) -> list[str]:
        width = self.shape["d_model"]
        words = ["model=gpt2", *(f"model.{key}={self.shape[key]}" for key in ("d_model", "n_layer", "n_head"))]
        words += [f"model.d_mlp={4 * width}", f"model.sequence_length={self.shape['sequence_length']}"]
        words += ["optimizer=adamw", "optimizer.tuned_d_model=null", "optimizer.tuned_n_layer=null"]
        return [*words, f"model.tied_head={str(tied).lower()}", f"optimizer.learning_rate={rate}"]

    def compare(self) -> None:
        rate, tried = self.best_rate(False, FIRST_RATES)
        with_tied = self.figure(name_of(True, rate), self.baseline(rate, True), self.steps, self.chosen.seeds[0])
        tied = with_tied < tried[rate]
        if tied:
            rate, tried = self.best_rate(True, (rate / 2, rate, rate * 2))
        goal, goal_spread = self.mean(name_of(tied, rate), self.baseline(rate, tied), self.steps)
        print(f"\nbaseline: {name_of(tied, rate)}: {goal:.4f} bits per byte, spread {goal_spread:.4f}")
        ours: dict[float, tuple[float, float]] = {}
        for share in SHARES:
            mean, spread = self.mean("ours", [f"model={self.chosen.model}"], round(share * self.steps))
            ours[share] = mean, spread
            print(f"ours, {share:4.0%} of the tokens: {mean:.4f}, spread {spread:.4f}", flush=True)
            if mean <= goal:
                break
        self.record["baseline"] = {
            "rates": {str(each): figure for each, figure in sorted(tried.items())},
            "with_tied_head": with_tied,
            "chosen": name_of(tied, rate),
            "bpb": goal,
            "spread": goal_spread,
        }
        self.record["ours"] = {str(share): figures for share, figures in ours.items()}
        self.record["share_of_tokens"] = crossing({share: mean for share, (mean, _) in ours.items()}, goal)
        self.write()
        share = self.record["share_of_tokens"]
        print("ours does not reach it" if share is None else f"ours passes it at {share:.1%} of the tokens, or before")

    def best_rate(self, tied: bool, first: tuple[float, ...]) -> tuple[float, dict[float, float]]:
        """The rate with a worse one on either side, and the figure of each that was tried; on the first seed."""
        tried: dict[float, float] = {}
        wanted = list(first)
        while wanted:
            rate = wanted.pop(0)
            name = name_of(tied, rate)
            tried[rate] = self.figure(name, self.baseline(rate, tied), self.steps, self.chosen.seeds[0])
            best = min(tried, key=lambda each: tried[each])
            if not wanted and best in (min(tried), max(tried)):
                wanted = [best / 2 if best == min(tried) else best * 2]
        return best, tried

    def ablate(self) -> None:
        steps = round(self.chosen.ablation_share * self.steps)
        wide, narrow = (round(self.shape["d_mlp"] * (f if self.is_gated else g)) for f, g in ((1.5, 1), (1, 2 / 3)))
        rates = {
            f"AdamW for matrices, rate {rate}": [*ADAMW, f"optimizer.matrix_learning_rate={rate}"]
            for rate in ADAMW_RATES
        }
        model = f"model={self.chosen.model}"
        tried = {name: self.figure(name, [model, *words], steps, self.chosen.seeds[0]) for name, words in rates.items()}
        best = min(tried, key=lambda name: tried[name])
        rows = {}
        for name, words in (INGREDIENTS | {best: rates[best]}).items():
            filled = [word.format(wide=wide, narrow=narrow) for word in words]
            if words and all(map(self.has, filled)):
                continue
            rows[name] = self.mean(name, [model, *filled], steps)
            print(
                f"{name:38}{rows[name][0]:.4f} {rows[name][0] - rows['default'][0]:+.4f} spread {rows[name][1]:.4f}",
                flush=True,
            )
        self.record["ingredients"] = {"steps": steps, "adamw_rates": tried, "rows": rows}
        self.write()

    def has(self, word: str) -> bool:
        """Whether the model is so without being told."""
        key, _, value = word.removeprefix("model.").partition("=")
        return word.startswith("model.") and self.shape[key] == yaml.safe_load(value)

    @property
    def is_gated(self) -> bool:
        return self.shape["mlp"] == "swiglu"


def name_of(tied: bool, rate: float) -> str:
    return f"gpt2 + adamw, {'tied head' if tied else 'head of its own'}, rate {rate}"


def crossing(line: dict[float, float], goal: float) -> float | None:
    """The share of the tokens at which the line reaches the goal; the smallest tried where it has by then; None: never."""
    shares = sorted(line)
    if line[shares[0]] <= goal:
        return shares[0]
    for low, high in zip(shares, shares[1:], strict=False):
        if line[high] <= goal:
            part = (line[low] - goal) / (line[low] - line[high])
            return math.exp(math.log(low) + part * (math.log(high) - math.log(low)))
    return None


if __name__ == "__main__":
    main()
