"""Do other programs compute what we compute? The largest difference for each kind of model and each program.

    python bench/interop.py                  # measure the rows that are missing; each is written as soon as it is known
    python bench/interop.py --table          # print the table of bench/results/interop.json

Three groups of small models with random weights, 64 channels wide unless a row says more: every preset of configs/model with
all its options; rows that hold every pair of values of FACTORS (pairwise testing); and one model for each class of transformers and
architecture of llama.cpp. Each model is exported, read again from disk by transformers, llama.cpp, TransformerLens and
lm-eval, and compared on text that none of them was trained on.

Needs the packages of `pip install -e ".[interop,eval]"` and llama-cpp-python. Logits are compared as shares of the largest
logit; lm-eval by the bits per byte that it finds with our model and with the export.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, machine, version_of

sys.path.insert(0, str(ROOT / "tests" / "interop"))
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT))
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from exportable import BLOCKS_OF_32, LAYERNORM, make_trained

from andrea.api.command_line import configure
from andrea.checkpoint import Checkpoint
from andrea.config import RunConfig, UserError
from andrea.evaluation.harness.model import AndreaLM
from andrea.evaluation.scoring import Scorer, Subject
from andrea.interop import proof
from andrea.interop.architectures import Trained
from andrea.interop.gguf import Gguf, choose_architecture
from andrea.interop.hugging_face.target import HuggingFace
from andrea.interop.proof import compared_text
from andrea.text.tokenizer import Tokenizer, train_bpe
from bench.judges import by_lm_eval

OUTPUT = RESULTS / "interop.json"
N_TOKEN, N_FUZZ_TEXTS = 200, 200  # of a row's proof
BITS = "bits per byte"  # what lm-eval compares
PROGRAMS = ("transformers", "llama.cpp", "TransformerLens", "lm-eval")
# A factor: label of a value -> changes of the model's and of the attention's configuration.
FACTORS: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "position": {kind: ({"position": kind}, {}) for kind in ("rotary", "learned", "alibi", "none")},
    "norm": {kind: ({"norm": kind}, {}) for kind in ("rmsnorm", "layernorm")},
    "mlp": {kind: ({"mlp": kind}, {}) for kind in ("swiglu", "relu2", "gelu", "gelu_exact")},
    "head": {"tied": ({"tied_head": True}, {}), "its own": ({"tied_head": False}, {})},
    "key/value heads": {"4": ({}, {}), "2": ({"n_kv_head": 2}, {}), "1": ({"n_kv_head": 1}, {})},
    "bias": {"no": ({"bias": False}, {}), "yes": ({"bias": True}, {})},
    "QK-norm": {
        "no": ({"qk_norm": False}, {}),
        "yes": ({"qk_norm": True}, {}),
        "learned": ({"qk_norm": "learned"}, {}),
    },
    "window": {"no": ({}, {}), "9": ({}, {"window": 9}), "9, none": ({}, {"window": (9, None)})},
    "compatibility": {kind: ({}, {"compatibility": kind}) for kind in ("scaled_dot", "dot", "bilinear", "cosine")},
    "gate": {"no": ({}, {}), **{kind: ({}, {"gate": kind}) for kind in ("scalar", "elementwise")}},
    "residual": {
        "plain": ({}, {}),
        "of values": ({"value_residual": True}, {}),
        "value projection": ({"value_embedding": "projection"}, {}),
        "value table": ({"value_embedding": "table"}, {}),
        "parallel": ({"parallel_residual": True}, {}),
    },
    "convolution": {"no": ({}, {}), "3": ({"qkv_convolution": 3}, {})},
    "bigrams": {"no": ({}, {}), "64": ({"bigram_rows": 64}, {})},
    "rotated width": {"whole": ({}, {}), "half": ({"rotary_share": 0.5}, {})},
    "scores": {
        "plain": ({}, {}),
        "capped": ({}, {"score_softcap": 2.0}),
        "sinks": ({}, {"sink": True}),
        "exclusive": ({}, {"exclusive": "learned"}),
    },
}
ARCHITECTURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama": ({"n_kv_head": 2}, {}),
    "Llama with biases": ({"bias": True}, {}),
    "Llama 3.1's positions": ({"rotary_scaling": (8.0, 1.0, 4.0, 20.0)}, {}),
    "Llama, interpolated positions": ({"rotary_scaling": (2.5,)}, {}),
    "Qwen3, wide heads": ({"qk_norm": "learned", "d_head": 32, "n_kv_head": 2}, {}),
    "Qwen3 with windows": ({"qk_norm": True}, {"window": (9, None)}),
    "GPT-2": (LAYERNORM | {"position": "learned", "mlp": "gelu"}, {}),
}


@dataclass(frozen=True)
class Case:
    """A model to measure. options: what it has, for people."""

    group: str
    name: str
    options: str
    model: dict[str, Any]
    attention: dict[str, Any]


def cases() -> list[Case]:
    presets = sorted(path.stem for path in (ROOT / "configs" / "model").glob("*.yaml"))
    pairs = [Case("pairs", f"pairs {n}", of_row(row), *changes_of(row)) for n, row in enumerate(pairwise(FACTORS), 1)]
    others = [Case("architectures", name, "", *changes) for name, changes in ARCHITECTURES.items()]
    return [preset_case(name) for name in presets] + others + pairs


def preset_case(name: str) -> Case:
    """All options of the preset in a small model."""
    config = configure(RunConfig, "train", [f"model={name}"])
    small = BLOCKS_OF_32 | {"n_layer": 3, "sequence_length": 43, "d_head": None}
    small["bigram_rows"] = 64 if config.model.n_bigram_row else None
    small["n_kv_head"] = None if config.model.n_kv_head in (None, config.model.n_head) else 2
    fields = {field.name: getattr(config.model, field.name) for field in dataclasses.fields(config.model)}
    attention = {field.name: getattr(config.attention, field.name) for field in dataclasses.fields(config.attention)}
    attention["implementation"] = "reference"
    model = fields | small
    options = {**model, **attention}
    shown = [
        key for key in options if key not in ("name", "implementation", "lora_rank") and not key.startswith("recipe_")
    ]
    return Case("presets", name, ", ".join(f"{key} {options[key]}" for key in shown), model, attention)


def pairwise(factors: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """Rows, factor -> label, that hold each pair of labels of two factors at least once (Cohen et al. 1997, AETG).

    Each row begins with a pair that no row has, and then takes for factor after factor the label that adds the most pairs.
    """
    draw = random.Random(22)
    missing = {
        ((one, first), (other, second))
        for one, other in itertools.combinations(factors, 2)
        for first, second in itertools.product(factors[one], factors[other])
    }
    rows = []
    while missing:
        row = dict(draw.choice(sorted(missing)))
        left = [factor for factor in factors if factor not in row]
        draw.shuffle(left)
        for factor in left:
            added = {label: len(missing & pairs_of({**row, factor: label}, factors)) for label in factors[factor]}
            row[factor] = draw.choice([label for label in added if added[label] == max(added.values())])
        missing -= pairs_of(row, factors)
        rows.append({factor: row[factor] for factor in factors})
    return rows


def pairs_of(row: dict[str, str], factors: dict[str, dict[str, Any]]) -> set[tuple]:
    """The pairs of (factor, label) in a row, in the factors' order."""
    return set(itertools.combinations([(factor, row[factor]) for factor in factors if factor in row], 2))


def changes_of(row: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    model, attention = {}, {}
    for factor, label in row.items():
        of_model, of_attention = FACTORS[factor][label]
        model |= of_model
        attention |= of_attention
    return model, attention


def of_row(row: dict[str, str]) -> str:
    return ", ".join(f"{factor} {label}" for factor, label in row.items())


# ------------------------------------------------------------------------------------------------------- measurements


def measure(case: Case, tokenizer: Tokenizer) -> dict[str, Any]:
    """A row: for each program what the model is there, and the largest difference; or why there is none."""
    trained = make_trained(BLOCKS_OF_32 | case.model, case.attention, tokenizer)
    row: dict[str, Any] = {"group": case.group, "name": case.name, "options": case.options}
    with tempfile.TemporaryDirectory() as place:
        folder, file = Path(place) / "hf", Path(place) / "gguf"
        folder.mkdir()
        file.mkdir()
        row["transformers"] = proven(HuggingFace(trained, "f32"), trained, folder)
        row["llama.cpp"] = by_llama_cpp(trained, file)
        row["TransformerLens"] = by_transformer_lens(trained, folder)
        row["lm-eval"] = by_both_of_lm_eval(trained, folder, Path(place) / "documents.jsonl")
    return row


def proven(target: HuggingFace | Gguf, trained: Trained, folder: Path) -> dict[str, Any]:
    """The export's own proof, on fewer texts."""
    target.write(folder)
    text = compared_text(trained, None, folder, N_TOKEN)
    found = proof.prove(trained, target.rounded_gpt(), target.open(folder), target.share, target.least, text)
    return {
        "as": target.what,
        "difference": found.largest_difference / found.largest_logit,
        "allowed": found.tolerance / found.largest_logit,
        "failures": found.failures,
    }


def by_llama_cpp(trained: Trained, folder: Path) -> dict[str, Any]:
    try:
        choose_architecture(trained)
    except UserError as refused:
        return {"as": None, "why": str(refused).partition("the nearest, ")[2].partition(";")[0]}
    return proven(Gguf(trained, "f32"), trained, folder)


def by_transformer_lens(trained: Trained, folder: Path) -> dict[str, Any]:
    from andrea.interop.transformer_lens.adapter import load_bridge

    tokens = torch.randint(trained.tokenizer.n_vocab, (2, 40), generator=torch.Generator().manual_seed(3))
    try:
        bridge = load_bridge(folder, device="cpu")
    except Exception as error:  # TransformerLens has no one error for a class that it does not know
        return {"as": None, "why": f"{type(error).__name__}: {error}"[:200]}
    with torch.no_grad():
        theirs, ours = bridge(tokens), trained.gpt.logits(trained.gpt(tokens))
    return {"as": type(bridge.original_model).__name__, **compared(theirs, ours)}


def by_both_of_lm_eval(trained: Trained, folder: Path, text: Path) -> dict[str, Any]:
    """The difference of the bits per byte that lm-eval finds with our model and with the export, as a share of them."""
    from lm_eval.models.huggingface import HFLM

    content = Path(argparse.__file__).read_text(encoding="utf-8")
    text.write_text("".join(json.dumps({"text": content[start : start + 150]}) + "\n" for start in (0, 5000, 9000)))
    checkpoint = Checkpoint(Path("nowhere"), {"step": 0, "config": {}})
    ours = by_lm_eval(
        AndreaLM(subject=Subject(checkpoint, trained.gpt, trained.tokenizer, Scorer(trained.gpt, 4))), text
    )
    how = {"trust_remote_code": True, "dtype": "float32", "device": "cpu", "batch_size": 4, "add_bos_token": False}
    theirs = by_lm_eval(HFLM(pretrained=str(folder), **how), text)
    return {
        "as": BITS,
        "ours": ours,
        "theirs": theirs,
        "difference": abs(ours - theirs) / ours,
        "allowed": 1e-5,
    }


def compared(theirs: torch.Tensor, ours: torch.Tensor) -> dict[str, float]:
    largest = float(ours.abs().max())
    return {"difference": float((theirs - ours).abs().max()) / largest, "allowed": 1e-5}


# -------------------------------------------------------------------------------------------------------------- table


def table(record: dict[str, Any]) -> str:
    """Markdown. The rows of pairs together are one row, with the largest differences; the record has each."""
    lines = [f"| model | {' | '.join(PROGRAMS)} |", "|---" * (1 + len(PROGRAMS)) + "|"]
    pairs = [row for row in record["rows"] if row["group"] == "pairs"]
    for row in record["rows"]:
        if row["group"] != "pairs":
            lines.append(line_of(row["name"], [row]))
    if pairs:
        lines.append(line_of(f"every pair of options, {len(pairs)} models", pairs))
    return "\n".join(lines)


def line_of(name: str, rows: list[dict[str, Any]]) -> str:
    return f"| {name} | {' | '.join(cell([row[program] for row in rows]) for program in PROGRAMS)} |"


def cell(found: list[dict[str, Any]]) -> str:
    """The largest difference in these rows, and what the models are in the program."""
    served = [each for each in found if each["as"] is not None]
    if not served:
        return "no"
    kinds = sorted({each["as"] for each in served} - {BITS})
    bad = "" if all(map(is_good, served)) else " **beyond the limit**"
    largest = max(each["difference"] for each in served)
    return f"{format(largest, '.0e') if largest else '0'} {' '.join(kinds)}".rstrip() + bad


def is_good(found: dict[str, Any]) -> bool:
    """Whether a program computes what we compute, or is not served."""
    return found["as"] is None or (found["difference"] <= found["allowed"] and not found.get("failures"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="print the table, and stop")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows")
    parser.add_argument("--again", action="store_true", help="measure also rows that are known")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    chosen = parser.parse_args()
    record = json.loads(chosen.output.read_text()) if chosen.output.exists() else {"bench": "interop", "rows": []}
    if not chosen.table:
        proof.N_FUZZ_TEXTS = N_FUZZ_TEXTS
        tokenizer = train_bpe([Path(__file__).read_text(encoding="utf-8")], 400)
        known = {row["name"]: row for row in record["rows"]}
        before = record.get("machine", {})  # most rows are measured without llama-cpp-python: llama.cpp refuses them
        programs = ("llama-cpp-python", "transformer-lens", "lm-eval", "gguf")
        record["machine"] = machine("cpu") | {name: version_of(name) or before.get(name) for name in programs}
        every = cases()
        for case in every:
            if (chosen.only is None or case.name in chosen.only) and (chosen.again or case.name not in known):
                known[case.name] = measure(case, tokenizer)
                record["rows"] = [known[each.name] for each in every if each.name in known]
                chosen.output.write_text(json.dumps(record, indent=1) + "\n")
                print(line_of(case.name, [known[case.name]]), flush=True)
    print(table(record))


if __name__ == "__main__":
    main()
