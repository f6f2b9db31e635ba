"""Learning rates that transfer: `python bench/transfer.py` sweeps the rate at three widths, with and without transfer.

Each run trains a small model (byte tokens, head width 16) on the default data for a few hundred steps and is scored on
held-out text. The rate climbs and falls in steps of √2 around the start until both ends are worse than the best by more
than 0.05 nats. With transfer all widths share one `optimizer.learning_rate`, given for the middle width; without, every
model takes the rate as it stands. Every run is appended to the output, so that a study cut off goes on where it was.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path

import numpy as np
import torch
from common import ROOT, machine
from torch import Tensor

from andrea.api.command_line import configure
from andrea.config import RunConfig
from andrea.model import GPT, initialise
from andrea.model.transfer import Transfer
from andrea.text.corpus import Corpus, open_corpus
from andrea.text.loader import Loader, validation_batches
from andrea.training.evaluation import summary, sums_over
from andrea.training.loss.loss import loss_sum_from_hidden
from andrea.training.optimizer import Optimizer, rate_at
from andrea.training.parallel.ranks import Parallel

WIDTHS = (32, 80, 192)
D_HEAD = 16
TUNED_WIDTH, N_LAYER = 80, 2
SEQUENCE_LENGTH, SEQUENCES_PER_STEP, STEPS = 64, 16, 150
VALIDATION_TOKENS = 32768
SEEDS = (0, 1)
ENDS_WORSE_BY = 0.05  # nats
LEAST_RANGE = 16  # highest rate tried over the lowest
# Where a sweep begins: of learning_rate (adamw), of all three rates (muon), of AdamW's two under Muon (muon-adamw-part),
# whose matrices keep the best rate of the sweep before.
START = {"adamw": 0.004, "muon": 0.02, "muon-adamw-part": 0.01}
MATRIX_RATE = 0.05


def configured(optimizer: str, width: int, transfer: bool, rate: float) -> RunConfig:
    words = [
        f"optimizer={optimizer.partition('-')[0]}", "tokenizer=byte", f"model.d_model={width}", f"model.n_head={width // D_HEAD}",
        f"model.n_layer={N_LAYER}", f"model.d_mlp={3 * width}", f"model.sequence_length={SEQUENCE_LENGTH}",
        f"train.tokens_per_step={SEQUENCES_PER_STEP * SEQUENCE_LENGTH}", f"train.steps={STEPS}", "optimizer.warmup_steps=10",
        f"optimizer.tuned_d_model={TUNED_WIDTH if transfer else 'null'}",
        f"optimizer.tuned_n_layer={N_LAYER if transfer else 'null'}",
    ]  # fmt: skip
    if optimizer == "adamw":
        words += [f"optimizer.learning_rate={rate}"]
    elif optimizer == "muon":  # the three rates keep the recipe's proportions
        words += [
            f"optimizer.matrix_learning_rate={rate}",
            f"optimizer.learning_rate={rate / 2}",
            f"optimizer.embedding_learning_rate={rate * 2.5}",
        ]
    else:
        words += [
            f"optimizer.matrix_learning_rate={MATRIX_RATE}",
            f"optimizer.learning_rate={rate}",
            f"optimizer.embedding_learning_rate={rate * 5}",
        ]
    return configure(RunConfig, "train", words)


def train(run: RunConfig, corpus: Corpus, seed: int) -> float:
    """Nats per token on held-out text after the run; infinite where it diverged."""
    torch.manual_seed(seed)
    model = GPT(run.model, run.attention, corpus.tokenizer.n_vocab)
    initialise(model, torch.Generator().manual_seed(seed), Transfer.of(run.model, run.optimizer))
    optimizer = Optimizer(Parallel(model), run.optimizer, bf16=False)
    loader = Loader(corpus.sources, SEQUENCE_LENGTH, seed)
    for step in range(STEPS):
        tokens, targets = loader.batch(step * SEQUENCES_PER_STEP, SEQUENCES_PER_STEP)
        loss = loss_sum_from_hidden(model, model(tokens), targets) / tokens.numel()
        loss.backward()
        finite = torch.isfinite(optimizer.clip()) & torch.isfinite(loss)
        if not finite:
            return math.inf
        optimizer.step(rate_at(step, STEPS, run.optimizer), finite)
        optimizer.parallel.zero_gradients()
    batches = validation_batches(corpus.sources[0].val, SEQUENCE_LENGTH, 64, VALIDATION_TOKENS)
    bytes_of_token = torch.from_numpy(corpus.tokenizer.byte_lengths())
    with torch.no_grad():

        def loss_sum(tokens: Tensor, targets: Tensor) -> Tensor:
            return loss_sum_from_hidden(model, model(tokens), targets)

        sums = sums_over(batches, loss_sum, bytes_of_token, torch.device("cpu"))
    return summary(*sums)["loss"]


class Study:
    """The runs done so far, by (optimizer, transfer, width, exponent, seed); rate = start · 2^(exponent / 2)."""

    def __init__(self, output: Path, corpus: Corpus) -> None:
        self.output, self.corpus = output, corpus
        known = json.loads(output.read_text(encoding="utf-8"))["runs"] if output.exists() else []
        self.runs = {
            (r["optimizer"], r["transfer"], r["width"], r["exponent"], r["seed"]): r["loss"] or math.inf for r in known
        }

    def loss(self, optimizer: str, transfer: bool, width: int, exponent: int) -> float:
        """The mean over the seeds."""
        losses = []
        for seed in SEEDS:
            key = (optimizer, transfer, width, exponent, seed)
            if key not in self.runs:
                rate = START[optimizer] * 2 ** (exponent / 2)
                self.runs[key] = train(configured(optimizer, width, transfer, rate), self.corpus, seed)
                print(
                    f"{optimizer} transfer={transfer} width {width} rate {rate:.4g}: {self.runs[key]:.4f}", flush=True
                )
                self.write()
            losses.append(self.runs[key])
        return sum(losses) / len(losses)

    def sweep(self, optimizer: str, transfer: bool, width: int) -> dict[int, float]:
        """Exponents to losses, outwards from the start until both ends are clearly worse than the best between them."""
        found = {0: self.loss(optimizer, transfer, width, 0)}
        while True:
            best = min(found.values())
            for end, step in ((max(found), 1), (min(found), -1)):
                narrow = max(found) - min(found) < 2 * math.log2(LEAST_RANGE)
                if (
                    narrow
                    and found[end] <= min(found[max(found)], found[min(found)])
                    or found[end] < best + ENDS_WORSE_BY
                ):
                    found[end + step] = self.loss(optimizer, transfer, width, end + step)
                    break
            else:
                return dict(sorted(found.items()))

    def write(self) -> None:
        facts = {"machine": machine("cpu"), "widths": WIDTHS, "steps": STEPS, "start": START}
        names = ("optimizer", "transfer", "width", "exponent", "seed")
        runs = [
            dict(zip(names, key, strict=True)) | {"loss": loss if math.isfinite(loss) else None}
            for key, loss in sorted(self.runs.items())
        ]
        self.output.write_text(json.dumps(facts | {"runs": runs}, indent=1) + "\n", encoding="utf-8")


def optimum(sweep: dict[int, float]) -> float:
    """The exponent at the lowest point of a parabola through the rates near the best: single losses are noisy."""
    best = min(sweep, key=sweep.get)
    near = [exponent for exponent in sweep if abs(exponent - best) <= 3 and math.isfinite(sweep[exponent])]
    bend, slope, _ = np.polyfit(near, [sweep[exponent] for exponent in near], 2)
    return float(np.clip(-slope / (2 * bend), min(near), max(near))) if bend > 0 else best


def draw(sweeps: dict[tuple[str, bool, int], dict[int, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    optimizers = list(dict.fromkeys(optimizer for optimizer, _, _ in sweeps))
    figure, grid = plt.subplots(len(optimizers), 2, figsize=(10, 4 * len(optimizers)), squeeze=False, sharey="row")
    colours = dict(zip(WIDTHS, plt.get_cmap("viridis")([0.75, 0.4, 0.0]), strict=True))
    for (optimizer, transfer, width), sweep in sweeps.items():
        axis = grid[optimizers.index(optimizer)][0 if transfer else 1]
        rates = [START[optimizer] * 2 ** (exponent / 2) for exponent in sweep]
        axis.plot(rates, list(sweep.values()), "o-", color=colours[width], label=f"d_model {width}", markersize=4)
        axis.axvline(START[optimizer] * 2 ** (optimum(sweep) / 2), color=colours[width], linestyle=":")
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda rate, _: f"{rate:.3g}")
        axis.set_title(
            f"{optimizer}, {'transferred from d_model ' + str(TUNED_WIDTH) if transfer else 'not transferred'}"
        )
        axis.set_xlabel("matrix learning rate" if optimizer == "muon" else "learning rate")
        axis.set_ylabel("validation loss, nats per byte")
        axis.legend()
    for row in grid:
        lows = [min(line.get_ydata()) for axis in row for line in axis.get_lines() if line.get_label()[0] != "_"]
        row[0].set_ylim(min(lows) - 0.05, max(lows) + 0.6)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=list(START), nargs="+", default=list(START))
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "transfer-cpu.json")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    base = configured("adamw", WIDTHS[0], True, START["adamw"])
    study = Study(chosen.output, open_corpus(base.data, base.tokenizer, Path(chosen.data_dir), print))
    sweeps = {
        (optimizer, transfer, width): study.sweep(optimizer, transfer, width)
        for optimizer, width, transfer in itertools.product(chosen.optimizer, WIDTHS, (True, False))
    }
    draw(sweeps, chosen.output.with_suffix(".png"))
    print(
        f"{'optimizer':<10} {'transfer':<9} {'width':>5} {'best rate':>10} {'loss':>8} {'tried':>17} {'ends worse by':>14}"
    )
    for (optimizer, transfer, width), sweep in sweeps.items():
        low, high = (START[optimizer] * 2 ** (end / 2) for end in (min(sweep), max(sweep)))
        best, best_rate = min(sweep.values()), START[optimizer] * 2 ** (optimum(sweep) / 2)
        ends = f"{sweep[min(sweep)] - best:.2f} {sweep[max(sweep)] - best:.2f}"
        print(
            f"{optimizer:<10} {transfer!s:<9} {width:>5} {best_rate:>10.4g} {best:>8.4f} {low:>8.3g}–{high:<8.3g} {ends:>14}"
        )
    for optimizer, transfer in itertools.product(chosen.optimizer, (True, False)):
        optima = [optimum(sweeps[optimizer, transfer, width]) for width in WIDTHS]
        print(
            f"{optimizer}, transfer={transfer}: optima within a factor of {2 ** ((max(optima) - min(optima)) / 2):.2f}"
        )


if __name__ == "__main__":
    main()
