"""What each option of attention does in a trained model: figures from held-out text, and the loss with the option switched off.

    python bench/options.py                      # trains andrea-nano with each option (280 steps), then measures it
    python bench/options.py --only gate sink     # the record keeps the others

Each model has one option more than andrea-nano without bigrams and MuonEq-R, and with rotary positions on the whole width (BASE),
seed 1337, Python's standard library. "off" is the same model, not trained again, with the option's learned part set to what
changes nothing: so a model that relies on the option loses much. Runs are kept in --place and not trained twice. L layers,
H heads, T tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, ROOT, write_record
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from andrea.api.loaded_model import LoadedModel, load
from andrea.attention import MultiHeadAttention, causal
from andrea.evaluation.evaluate import held_out_documents
from andrea.insight.lens.scores import names_of, probe_scores
from andrea.insight.lens.trace import LayerTrace, trace_layers
from andrea.model.gpt import GPT

STEPS = 280
BASE = ["model.rotary_share=1", "model.bigram_rows=null", "optimizer.muon_rows=none"]
WORDS = [*BASE, f"train.steps={STEPS}", "logger=none", "train.sample_tokens=0"]
N_WINDOW = 24
FAR = 128  # tokens
RARE = 20  # tokens that occur less often get no mean


@dataclass(frozen=True)
class Window:
    tokens: Tensor  # (1, T)
    layers: list[LayerTrace]
    position: Tensor  # (T,)


def stacked(of_layer: Callable[[LayerTrace], Tensor], window: Window) -> Tensor:
    """of_layer: (1, H, T) of a layer -> (L, H, T)."""
    return torch.stack([of_layer(layer)[0] for layer in window.layers])


def distance(layer: LayerTrace, position: Tensor) -> Tensor:
    """Tokens between a query and where it attends, (1, H, T)."""
    return (layer.weights * (position[:, None] - position)).sum(-1)


def far_weight(layer: LayerTrace, position: Tensor) -> Tensor:
    """Weight on keys at least FAR tokens before, (1, H, T)."""
    return (layer.weights * (position[:, None] - position >= FAR)).sum(-1)


def spread_share(part: Tensor, rest: Tensor, visible: Tensor) -> Tensor:
    """How much of the variance of a query's scores over the keys comes from `part`: (1, H, T)."""
    count = visible.sum(-1).clamp(min=1)[:, None]
    centred = [
        torch.where(visible[:, None], x - (x * visible[:, None]).sum(-1, keepdim=True) / count[..., None], 0)
        for x in (part, rest)
    ]
    one, two = (x.square().sum(-1) for x in centred)
    return one / (one + two).clamp(min=1e-9)


# ------------------------------------------------------------------------------------ figures (L, H, T) of each option


def of_all(model: GPT, window: Window) -> dict[str, Tensor]:
    return {
        "mean distance": stacked(lambda layer: distance(layer, window.position), window),
        f"weight at {FAR} tokens or more": stacked(lambda layer: far_weight(layer, window.position), window),
    }


def of_gate(model: GPT, window: Window) -> dict[str, Tensor]:
    found = {"gate": stacked(lambda layer: layer.gate.mean(-1), window)}
    if window.layers[0].gate.shape[-1] > 1:
        found["spread of the gates of a head's channels"] = stacked(lambda layer: layer.gate.std(-1), window)
    return found


def of_sink(model: GPT, window: Window) -> dict[str, Tensor]:
    return {"weight on the sink": stacked(lambda layer: 1 - layer.weights.sum(-1), window)}


def of_exclusive(model: GPT, window: Window) -> dict[str, Tensor]:
    return {
        "cosine of z and the own value, before": stacked(
            lambda layer: cosine_similarity(layer.retrieved, layer.value, dim=-1), window
        ),
        "and after": stacked(lambda layer: cosine_similarity(layer.written, layer.value, dim=-1), window),
    }


def of_value_embedding(model: GPT, window: Window) -> dict[str, Tensor]:
    """The embedding's share of the length of a value, before the convolution."""
    shares = []
    for block, layer in zip(model.blocks, window.layers, strict=True):
        attention = block.attention
        added = attention.heads(attention.value_embedding(layer.shared.value_source, torch.float32))
        whole = attention.mixed(attention.values(block.attention_norm(layer.before)), layer.shared)
        shares.append((added.norm(dim=-1) / (added.norm(dim=-1) + (whole - added).norm(dim=-1)))[0])
    return {"the embedding's share of a value's length": torch.stack(shares)}


def of_rotary_share(model: GPT, window: Window) -> dict[str, Tensor]:
    n = model.config.n_rotated

    def unturned(layer: LayerTrace) -> Tensor:
        parts = [
            q @ k.mT
            for q, k in ((layer.query[..., n:], layer.key[..., n:]), (layer.query[..., :n], layer.key[..., :n]))
        ]
        return spread_share(*parts, layer.visible)

    return {"share of the scores' variance from channels without position": stacked(unturned, window)}


def of_softcap(model: GPT, window: Window) -> dict[str, Tensor]:
    """A query's largest score before and after the cap."""

    def largest(layer: LayerTrace) -> Tensor:
        return (layer.query @ layer.key.mT).masked_fill(~layer.visible[:, None], 0).abs().amax(-1)

    def largest_capped(layer: LayerTrace) -> Tensor:
        return layer.scores.masked_fill(~layer.visible[:, None], 0).abs().amax(-1)

    return {
        "largest score of a query": stacked(largest, window),
        "largest capped score": stacked(largest_capped, window),
    }


def of_taps(model: GPT, window: Window) -> dict[str, Tensor]:
    """Shares of the mix of each head's query, key and value that come from tokens before, by the taps' sizes."""
    found = {}
    for index, kind in enumerate(("query", "key", "value")):
        rows = []
        for block in model.blocks:
            taps = block.attention.taps.split(block.attention.taps.shape[0] // 3)[index].clone()  # (H, D, K)
            taps[..., 0] += 1
            size = taps.abs().mean(1)
            rows.append(size[:, 1:].sum(-1) / size.sum(-1))
        found[f"share of the {kind} from earlier tokens"] = torch.stack(rows)[..., None].expand(
            -1, -1, len(window.position)
        )
    return found


# ------------------------------------------------------------------------------------------------- switching it off


def zeros(name: str, value: float = 0.0) -> Callable[[MultiHeadAttention], None]:
    """Sets the parameter of this name, in the attention of a layer, to one value."""

    def switch(attention: MultiHeadAttention) -> None:
        dict(attention.named_parameters())[name].fill_(value)

    return switch


def see_all(attention: MultiHeadAttention) -> None:
    attention.mask = causal()


def unmodified(attention: MultiHeadAttention) -> None:
    attention.modifiers = None


@dataclass(frozen=True)
class Option:
    words: list[str]
    figures: Callable[[GPT, Window], dict[str, Tensor]]
    off: Callable[[MultiHeadAttention], None] | None  # None: it cannot be switched off in a trained model


OPTIONS = {
    "convolution": Option([], of_taps, zeros("taps")),
    "gate": Option(["attention.gate=scalar"], of_gate, zeros("gate.weight")),
    "gate-elementwise": Option(["attention.gate=elementwise"], of_gate, zeros("gate.weight")),
    "sink": Option(["attention.sink=true"], of_sink, zeros("sink", -1e4)),
    "exclusive": Option(["attention.exclusive=learned"], of_exclusive, zeros("exclusive_share")),
    "value-embedding": Option(["model.value_embedding=projection"], of_value_embedding, zeros("value_embedding.mix")),
    "value-table": Option(["model.value_embedding=table"], of_value_embedding, zeros("value_embedding.mix")),
    "windows": Option(["attention.window=[128,128,128,null]"], of_all, see_all),
    "alibi": Option(["model.position=alibi"], of_all, unmodified),
    "partial-rotary": Option(["model.rotary_share=0.5"], of_rotary_share, None),
    "softcap": Option(["attention.score_softcap=20", "model.qk_norm=false"], of_softcap, unmodified),
}


# ------------------------------------------------------------------------------------------------------ measuring


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    parser.add_argument("--words", nargs="*", default=[], help="key=value for every run, such as threads=1")
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir()) / "andrea-options")
    parser.add_argument("--output", type=Path, default=RESULTS / "options-andrea-nano.json")
    chosen = parser.parse_args()
    rows: dict[str, Any] = {}
    if chosen.output.exists():
        rows = json.loads(chosen.output.read_text(encoding="utf-8"))["options"]
    for name in chosen.only:
        model = trained(name, chosen.place, chosen.words)
        rows[name] = measured(model, OPTIONS[name], chosen.place / "data")
        show(name, rows[name])
        write_record(
            chosen.output, "options", "cpu", {"words": [*WORDS, *chosen.words], "windows": N_WINDOW, "options": rows}
        )


def trained(name: str, place: Path, words: list[str]) -> LoadedModel:
    """The model with this option, trained unless its run is there."""
    if not (place / "runs" / name / "checkpoints" / f"step-{STEPS:08}").exists():
        places = [f"name={name}", "resume=auto", f"runs_dir={place / 'runs'}", f"data_dir={place / 'data'}"]
        subprocess.run(
            [sys.executable, str(ROOT / "train.py"), *places, *WORDS, *OPTIONS[name].words, *words], check=True
        )
    return load(name, runs_dir=place / "runs", device="cpu")


@torch.no_grad()
def measured(loaded: LoadedModel, option: Option, data_dir: Path) -> dict[str, Any]:
    model, tokenizer = loaded.model, loaded.tokenizer
    windows = windows_of(loaded, data_dir)
    row: dict[str, Any] = {"words": option.words, "bits_per_byte": bits_per_byte(loaded, windows)}
    sums: dict[str, list[Tensor]] = {}
    for tokens in windows:
        window = Window(tokens, list(trace_layers(model, tokens)), torch.arange(tokens.shape[1]))
        for key, value in option.figures(model, window).items():
            sums.setdefault(key, []).append(value)
    figures = {key: torch.cat(values, -1) for key, values in sums.items()}  # (L, H, all tokens)
    row["figures"] = {key: rounded(value.mean(-1)) for key, value in figures.items()}
    row["parameters"] = learned_numbers(model)
    first = next(iter(figures.values()))
    row["by_token"] = by_token(first, torch.cat(windows, 1)[0], tokenizer.token_bytes())
    row["named_heads"], probed = {}, probe_scores(model, tokenizer)
    for layer, head in itertools.product(range(len(model.blocks)), range(model.config.n_head)):
        if names := [each.title for each in names_of(probed, layer, head)]:
            row["named_heads"][f"{layer}.{head}"] = names
    if option.off is not None:
        for block in model.blocks:
            option.off(block.attention)
        row["bits_per_byte_off"] = bits_per_byte(loaded, windows)
    return row


def windows_of(loaded: LoadedModel, data_dir: Path) -> list[Tensor]:
    """N_WINDOW windows (1, T) of held-out documents, each from a document's beginning."""
    length, found = loaded.model.config.sequence_length, []
    for text in held_out_documents(loaded.checkpoint, loaded.tokenizer, data_dir):
        ids = [loaded.tokenizer.end_of_text, *loaded.tokenizer.encode(text)]
        if len(ids) >= length:
            found.append(torch.tensor([ids[:length]]))
    return found[:N_WINDOW]


def bits_per_byte(loaded: LoadedModel, windows: list[Tensor]) -> float:
    lengths = torch.from_numpy(loaded.tokenizer.byte_lengths())
    nats = n_byte = 0.0
    for tokens in windows:
        logits = loaded.model.logits(loaded.model(tokens))[0, :-1]
        nats += float(cross_entropy(logits.float(), tokens[0, 1:], reduction="sum"))
        n_byte += int(lengths[tokens[0, 1:]].sum())
    return round(nats / math.log(2) / n_byte, 4)


def learned_numbers(model: GPT) -> dict[str, list]:
    """The option's small parameters, by layer."""
    names = ("sink", "exclusive_share", "value_embedding.mix", "value_mix")
    found: dict[str, list] = {}
    for block in model.blocks:
        for name, value in block.attention.named_parameters():
            if name in names:
                found.setdefault(name, []).append(rounded(value))
    return found


def by_token(figure: Tensor, tokens: Tensor, table: list[bytes]) -> dict[str, Any] | None:
    """Where a figure (L, H, N) depends most on the token: the head, and the tokens with the lowest and the highest mean.

    None for a figure that does not depend on the token.
    """
    count = torch.bincount(tokens, minlength=len(table))
    often = (count >= RARE).nonzero()[:, 0]
    sums = torch.zeros(*figure.shape[:2], len(table)).index_add_(2, tokens, figure)
    means = sums[..., often] / count[often]
    spread = means.var(-1)
    if spread.max() < 1e-8:  # rounding
        return None
    layer, head = divmod(int(spread.argmax()), spread.shape[1])
    order = means[layer, head].argsort()
    named = [
        (table[int(often[each])].decode("utf-8", "replace"), round(float(means[layer, head, each]), 3))
        for each in order
    ]
    return {"head": f"{layer}.{head}", "lowest": named[:8], "highest": named[-8:]}


def rounded(value: Tensor) -> Any:
    return [rounded(each) for each in value] if value.ndim else round(float(value), 4)


def show(name: str, row: dict[str, Any]) -> None:
    off = f", off {row['bits_per_byte_off']:.4f}" if "bits_per_byte_off" in row else ""
    print(f"{name}: {row['bits_per_byte']:.4f} bits per byte{off}; named heads: {row['named_heads']}")
    for key, value in row["figures"].items():
        print(f"  {key}, by layer and head: {value}")
    for key, value in row["parameters"].items():
        print(f"  {key}: {value}")
    if tokens := row["by_token"]:
        print(f"  by token, head {tokens['head']}: {tokens['lowest']} … {tokens['highest']}", flush=True)


if __name__ == "__main__":
    main()
