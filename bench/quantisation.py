"""What fewer bits a weight cost a trained model: validation bits per byte of its checkpoint as sample.py would run it.

    python bench/quantisation.py runs/NAME/checkpoints/step-00000700 --data-dir data

The whole held-out split, each token after the first of a window a target once. bf16 rounds weights and activations; int8
rounds the matrices further, to 255 steps a row, head included, under the same bf16 activations; int4 to 16 steps for 32
weights of a row, the head's as int8 does, and activations to 8 bits.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from common import RESULTS, write_record
from torch.nn.functional import cross_entropy

from andrea.checkpoint import read_checkpoint
from andrea.checkpoint.model import load_model
from andrea.config import DataConfig, TokenizerConfig, parse
from andrea.generation import Engine
from andrea.text.corpus import open_corpus
from andrea.text.loader import validation_batches
from andrea.text.shards import IGNORED_TARGET

WAYS = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "int8": (torch.bfloat16, 8),
    "int4": (torch.bfloat16, 4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--most-tokens", type=int, help="of the split; default: all")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    checkpoint = read_checkpoint(chosen.checkpoint)
    config, tokenizer = checkpoint.state["config"], checkpoint.tokenizer()
    data, of_tokens = (
        parse(kind, config[key], key) for kind, key in ((DataConfig, "data"), (TokenizerConfig, "tokenizer"))
    )
    corpus = open_corpus(data, of_tokens, chosen.data_dir, print)
    assert corpus.fingerprint == checkpoint.state["data"], "these are not the data that the checkpoint was trained on"
    model, lengths = load_model(checkpoint, tokenizer), torch.from_numpy(tokenizer.byte_lengths())
    rows = {}
    for name, (dtype, bits) in WAYS.items():
        engine = Engine(model, tokenizer, dtype=dtype, bits=bits)
        nats, n_byte = 0.0, 0
        for source in corpus.sources:
            for tokens, targets in validation_batches(source.val, model.config.sequence_length, 16, chosen.most_tokens):
                with torch.inference_mode():
                    logits = engine.model.logits(engine.model(tokens)).float()
                nats += float(
                    cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")
                )
                n_byte += int(lengths[targets[targets != IGNORED_TARGET]].sum())
        rows[name] = nats / math.log(2) / n_byte
        change = rows[name] / rows["fp32"] - 1
        print(f"{name}: {rows[name]:.5f} bits per byte, {change:+.3%}", flush=True)
    about = {"model": model.config.name, "step": checkpoint.step, "bits_per_byte": rows}
    write_record(chosen.output or RESULTS / f"quantisation-{model.config.name}.json", "quantisation", "cpu", about)


if __name__ == "__main__":
    main()
