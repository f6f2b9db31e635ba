"""The lens: one prompt, every head of a model, as a page, as arrays or as a picture.

T tokens, L layers, H heads.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from andrea.checkpoint import locate
from andrea.checkpoint.model import load_model
from andrea.config import LensConfig, UserError
from andrea.generation.engine import Engine
from andrea.generation.session import read_prompt
from andrea.insight.lens.page.page import Facts, Head, Page, measure, visible_text
from andrea.insight.lens.scores import NAMES, probe_scores, score_layer, stacked, targets_of
from andrea.insight.lens.trace import walk
from andrea.model.gpt import GPT
from andrea.runtime.files import replacing
from andrea.text.tokenizer import Tokenizer

LARGEST_PAGE_BYTES = 30_000_000
LARGEST_SMALL_PAGE_BYTES = 300_000
SMALL_TOKENS = 32  # the small lens shows at most so many tokens: then even the smallest map is whole
SMALL_MAPS = 64_000  # numbers in all maps of a small lens
IN_FULL_TOKENS = 128  # up to so many tokens every head is shown in full
PICTURE_TOKENS = 96  # more are not labelled on a picture's axes


def lens(run: LensConfig, device: torch.device) -> int:
    """Write what `run.out` names and print what it is; the exit code. Raises UserError."""
    out = Path(run.out).expanduser()
    check_writable(out)
    prompt = read_prompt(run.prompt)
    if not prompt:
        raise UserError(
            'prompt is empty: the lens looks at a text; give it with prompt="the cat that …" or prompt=@FILE'
        )
    checkpoint = locate(run.checkpoint, Path(run.runs_dir))
    tokenizer = checkpoint.tokenizer()
    model = load_model(checkpoint, tokenizer).to(device)
    for block in model.blocks:
        block.attention.implementation = "auto"  # what trained it need not run on this device
    tokens = Engine(model, tokenizer).encode(prompt)
    print(checkpoint.path, flush=True)
    asked = chosen_heads(run.heads, model.config.n_layer, model.config.n_head)
    if out.suffix == ".npz":
        summary = write_arrays(out, model, tokenizer, tokens)
    elif out.suffix == ".png":
        summary = write_picture(out, model, tokenizer, tokens, asked)
    else:
        facts = Facts(
            f"{model.config.name} · step {checkpoint.step}", checkpoint.step, str(checkpoint.path), tokenizer.identity
        )
        summary = write_page(out, model, tokenizer, tokens, asked, facts)
    print(summary)
    return 0


def check_writable(out: Path) -> None:
    """Raises UserError before anything is computed."""
    folder = out.parent
    if not folder.is_dir():
        raise UserError(f"out={out}: there is no folder {str(folder)!r}; make it, or name another with out=…")
    if out.is_dir() or not os.access(out if out.exists() else folder, os.W_OK):
        raise UserError(f"out={out} cannot be written; name another file with out=…")


def chosen_heads(patterns: list[str], n_layer: int, n_head: int) -> list[Head]:
    """'3.7', '5.*' or several with commas, layer.head counted from 0 -> heads, without repetition. Raises UserError."""
    found: dict[Head, None] = {}
    for pattern in (part.strip() for text in patterns for part in text.strip("[]").split(",")):
        parts = pattern.split(".")
        if len(parts) != 2 or not all(part == "*" or part.isdecimal() for part in parts):
            raise UserError(f"heads={pattern} is not LAYER.HEAD; write heads=3.7, heads=5.* or heads=3.7,5.*")
        ranges = []
        for part, count, what in zip(parts, (n_layer, n_head), ("layer", "head"), strict=True):
            if part != "*" and int(part) >= count:
                raise UserError(
                    f"heads={pattern}: there is no {what} {part}; the model's {what}s are counted 0 … {count - 1}"
                )
            ranges.append(range(count) if part == "*" else [int(part)])
        found |= {(layer, head): None for layer in ranges[0] for head in ranges[1]}
    return list(found)


# ------------------------------------------------------------------------------------------------------ three forms


def write_page(out: Path, model: GPT, tokenizer: Tokenizer, tokens: list[int], asked: list[Head], facts: Facts) -> str:
    """The page. Heads that were asked for are shown in full, then named ones, then, of a short prompt, the others."""
    measured = measure(model, tokenizer, tokens)
    page = Page(model, tokenizer, measured, facts)
    room = page.room(LARGEST_PAGE_BYTES)
    if len(asked) > room:
        raise UserError(
            f"heads={','.join(f'{layer}.{head}' for layer, head in asked[:3])},… asks for {len(asked)} heads in full; "
            f"at {len(tokens)} tokens {room} fit into {LARGEST_PAGE_BYTES / 1e6:.0f} MB: ask for fewer with heads=…"
        )
    wanted = [each for each in measured.by_interest() if each in measured.named or len(tokens) <= IN_FULL_TOKENS]
    full = list(dict.fromkeys(asked + wanted))[:room]
    print(f"{len(tokens)} tokens; switching {len(full)} heads off, one at a time", flush=True)
    text = page.write(full)
    save(out, text.encode("utf-8"))
    titles = {name.score: name.title for name in NAMES}
    named = [f"{layer}.{head} {', '.join(map(titles.get, names))}" for (layer, head), names in measured.named.items()]
    return (
        f"named: {'; '.join(named) or 'no head'}\n"
        f"{out} · {len(text.encode()) / 1e6:.1f} MB · {len(full)} of {measured.maps.shape[0] * measured.maps.shape[1]} "
        f"heads in full; open it in a browser"
    )


def write_arrays(out: Path, model: GPT, tokenizer: Tokenizer, tokens: list[int]) -> str:
    """weights (L, H, T, T) float32, tokens (T,), token_texts (T,), and each score (L, H), of the prompt and the probes."""
    import io

    given = torch.tensor([tokens], device=model.embedding.weight.device)
    table = tokenizer.token_bytes()
    targets = targets_of(given, table)
    shape = (model.config.n_layer, model.config.n_head, len(tokens), len(tokens))
    weights = np.empty(shape, np.float32)
    scores = []
    for layer, layer_pass in enumerate(walk(model, given)):
        weights[layer] = layer_pass.weights[0].cpu().numpy()
        scores.append(score_layer(layer_pass, targets))
    arrays = {f"prompt_{name}": score.numpy() for name, score in stacked(scores).items()}
    arrays |= {f"probe_{name}": score.numpy() for name, score in probe_scores(model, tokenizer).items()}
    texts = np.array([table[token].decode("utf-8", "replace") for token in tokens])
    stream = io.BytesIO()
    np.savez(stream, weights=weights, tokens=np.array(tokens), token_texts=texts, **arrays)
    save(out, stream.getbuffer())
    return f"{out} · weights {' x '.join(map(str, shape))} float32, {len(arrays)} scores"


def write_picture(out: Path, model: GPT, tokenizer: Tokenizer, tokens: list[int], asked: list[Head]) -> str:
    """One head's map as a PNG, tokens on both axes. Raises UserError unless exactly one head was asked for."""
    if len(asked) != 1:
        raise UserError(f"out={out} shows one head, and {len(asked)} were asked for; name one with heads=LAYER.HEAD")
    ((layer, head),) = asked
    given = torch.tensor([tokens], device=model.embedding.weight.device)
    made = next(made for index, made in enumerate(walk(model, given)) if index == layer)
    weights = torch.where(made.visible[0], made.weights[0, head], torch.nan).cpu()
    table = tokenizer.token_bytes()
    labels = [visible_text(table[token]) or "⟨end-of-text⟩" for token in tokens]
    save(out, picture(weights.numpy(), labels, f"{model.config.name} · head {layer}.{head}"))
    return f"{out} · head {layer}.{head}"


def picture(weights: np.ndarray, labels: list[str], title: str) -> bytes:
    """weights (T, T), NaN where masked -> PNG; queries down, keys across, what is masked left blank."""
    import io

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    n_token = len(labels)
    side_inches = min(14.0, 2.5 + 0.2 * n_token)
    figure = Figure(figsize=(side_inches, side_inches), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(np.ma.masked_invalid(weights), cmap="cividis", vmin=0.0, vmax=1.0, interpolation="nearest")
    if n_token <= PICTURE_TOKENS:
        plain = [label.replace("$", r"\$") for label in labels]
        axes.set_xticks(range(n_token), plain, rotation=90, fontsize=7, family="monospace")
        axes.set_yticks(range(n_token), plain, fontsize=7, family="monospace")
    axes.set_title(title)
    axes.set_xlabel("key: where it looks")
    axes.set_ylabel("query: who looks")
    figure.colorbar(image, label="weight", shrink=0.7)
    stream = io.BytesIO()
    FigureCanvasAgg(figure).print_png(stream)
    return stream.getvalue()


def save(out: Path, content: bytes | memoryview) -> None:
    """Write the file whole or not at all. Raises UserError where the disk refuses."""
    try:
        with replacing(out) as staging:
            staging.write_bytes(content)
    except OSError as error:
        raise UserError(f"out={out} cannot be written ({error.strerror}); name another with out=…") from None


# ---------------------------------------------------------------------------------------------------- while training


@torch.no_grad()
def small_lens(model: GPT, tokenizer: Tokenizer, prompt: str) -> str:
    """A small page of a fixed prompt's first tokens, without ablations: what training shows on the way.

    At most LARGEST_SMALL_PAGE_BYTES; as many heads in full as fit, named ones first. The model is left as it was.
    """
    tokens = [tokenizer.end_of_text, *tokenizer.encode(prompt)][: min(SMALL_TOKENS, model.config.sequence_length)]
    n_heads = model.config.n_layer * model.config.n_head
    with torch.autocast(model.embedding.weight.device.type, enabled=False):
        measured = measure(model, tokenizer, tokens, map_side=max(4, int((SMALL_MAPS / n_heads) ** 0.5)))
        page = Page(model, tokenizer, measured, Facts(model.config.name, None, None, tokenizer.identity), detail=False)
        return page.write(measured.by_interest()[: page.room(LARGEST_SMALL_PAGE_BYTES)])
