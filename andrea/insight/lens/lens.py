"""The command `python -m andrea lens [key=value …]`: shows every head on one prompt, as a page or as arrays.

T tokens, L layers, H heads.
"""

import io
from pathlib import Path

import numpy as np
import torch

from andrea.checkpoint import Checkpoint
from andrea.checkpoint.model import open_model
from andrea.config import LensConfig, UserError
from andrea.generation.engine import Engine
from andrea.generation.sample_command import last_tokens, read_prompt
from andrea.insight.lens.page import (
    MOST_TOKENS_PATCHED,
    Head,
    LensPage,
    Measurements,
    Panel,
    Source,
    measure,
    token_texts,
)
from andrea.insight.lens.panels import MOST_MAP_SIDE, checkpoint_panel, examples_panel, logit_lens_panel, patching_panel
from andrea.insight.lens.scores import NAMES
from andrea.model.gpt import GPT
from andrea.runtime.files import check_writable, replace_bytes
from andrea.runtime.streams import at_words
from andrea.text.tokenizer import Tokenizer

# -------------------------------------------------------------------------------------------------------- training lens
# The lens page that training draws at each evaluation: a small page on a fixed prompt, without ablations.

LARGEST_SMALL_PAGE_BYTES = 300_000
MOST_TOKENS = 32  # few enough for a complete map of every head, even of many heads
MOST_MAP_CELLS = 50_000  # of all heads


@torch.no_grad()
def small_lens(model: GPT, tokenizer: Tokenizer, prompt: str) -> str:
    """The HTML text of a page on the prompt's first tokens, at most LARGEST_SMALL_PAGE_BYTES long.

    The page shows in full the most interesting heads that fit on it. The model is not changed.
    """
    tokens = [tokenizer.end_of_text, *tokenizer.encode(prompt)][: min(MOST_TOKENS, model.config.sequence_length)]
    n_head = model.config.n_layer * model.config.n_head
    map_side = max(4, int((MOST_MAP_CELLS / n_head) ** 0.5))
    with torch.autocast(model.embedding.weight.device.type, enabled=False):
        measurements = measure(model, tokenizer, tokens, map_side)
        source = Source(model.config.name, None, tokenizer.identity)
        page = LensPage(model, tokenizer, measurements, source, detail=False)
        return page.render(measurements.by_interest()[: page.most_full_heads(LARGEST_SMALL_PAGE_BYTES)])


# ---------------------------------------------------------------------------------------------------------- the command

LARGEST_PAGE_BYTES = 30_000_000
MOST_TOKENS_ALL_FULL = 128  # for a prompt of at most this many tokens, every head is shown in full


def lens(config: LensConfig, device: torch.device) -> int:
    """Write the file config.out and print a summary. Returns the exit code. Raises UserError."""
    out = Path(config.out).expanduser()
    check_writable(out)
    prompt = read_prompt(config.prompt)
    if not prompt:
        raise UserError(
            'prompt is empty: the lens shows attention over a text; set prompt="the cat that …" or prompt=@FILE'
        )
    checkpoint, model, tokenizer = open_model(config.checkpoint, config.runs_dir, device, config.trust, print)
    tokens = last_tokens(Engine(model, tokenizer), prompt)
    print(checkpoint.path, flush=True)
    against = None if config.against is None else tokens_against(config.against, model, tokenizer, tokens)
    chosen = choose_heads(config.heads, model.config.n_layer, model.config.n_head)
    if out.suffix == ".npz":
        summary = write_arrays(out, model, tokenizer, tokens)
    else:
        measurements = measure(model, tokenizer, tokens)
        panels = [
            logit_lens_panel(model, measurements),
            examples_panel(model, tokenizer, checkpoint, Path(config.data_dir).expanduser()),
        ]
        if against is not None:
            print("running the prompt again for each layer, position and head that is patched", flush=True)
            panels.append(patching_panel(model, measurements, against))
        if config.against_checkpoint is not None:
            panels.append(second_checkpoint_panel(config, model, tokenizer, tokens, device))
        page = LensPage(model, tokenizer, measurements, source_of(checkpoint, model, tokenizer), panels=panels)
        summary = write_page(out, page, chosen)
    print(at_words(summary))
    return 0


def choose_heads(patterns: list[str], n_layer: int, n_head: int) -> list[Head]:
    """The heads that match patterns LAYER.HEAD, counted from 0, such as '2.1', '3.*' or '2.1,3.*'. Raises UserError."""
    found: dict[Head, None] = {}
    for pattern in (part.strip() for text in patterns for part in text.strip("[]").split(",")):
        parts = pattern.split(".")
        if len(parts) != 2 or not all(part == "*" or part.isdecimal() for part in parts):
            raise UserError(f"heads={pattern} is not LAYER.HEAD; write heads=2.1, heads=3.* or heads=2.1,3.*")
        ranges = []
        for part, count, kind in zip(parts, (n_layer, n_head), ("layer", "head"), strict=True):
            if part != "*" and int(part) >= count:
                raise UserError(f"heads={pattern}: there is no {kind} {part}; the model's {kind}s are 0 to {count - 1}")
            ranges.append(range(count) if part == "*" else [int(part)])
        found |= {(layer, head): None for layer in ranges[0] for head in ranges[1]}
    return list(found)


def source_of(checkpoint: Checkpoint, model: GPT, tokenizer: Tokenizer) -> Source:
    return Source(f"{model.config.name} · step {checkpoint.step}", str(checkpoint.path), tokenizer.identity)


def tokens_against(prompt: str, model: GPT, tokenizer: Tokenizer, tokens: list[int]) -> list[int]:
    """The tokens of the second prompt. Raises UserError unless they can replace `tokens` position by position."""
    against = last_tokens(Engine(model, tokenizer), read_prompt(prompt, "against"))
    if len(tokens) > MOST_TOKENS_PATCHED:
        raise UserError(
            f"against=… replaces every position in turn, in prompts of at most {MOST_TOKENS_PATCHED} tokens, but prompt has "
            f"{len(tokens)}; shorten both"
        )
    if len(against) != len(tokens):
        texts = token_texts(tokenizer)
        both = [" ".join(texts[token] for token in each) for each in (tokens, against)]
        raise UserError(
            f"prompt has {len(tokens)} tokens and against {len(against)}, but a position can only be replaced by the same "
            f"position of a text with equally many tokens; change a word of one of them: prompt is {both[0]}; against is {both[1]}"
        )
    if against == tokens:
        raise UserError("against is the same text as prompt, so nothing can change; change a word of it")
    return against


def second_checkpoint_panel(
    config: LensConfig, model: GPT, tokenizer: Tokenizer, tokens: list[int], device: torch.device
) -> Panel:
    """The panel of the second checkpoint. Raises UserError unless it has the same tokens and as many heads."""
    checkpoint, other, its_tokenizer = open_model(
        config.against_checkpoint, config.runs_dir, device, config.trust, print
    )
    name = f"against_checkpoint={config.against_checkpoint}"
    if its_tokenizer.identity != tokenizer.identity:
        raise UserError(
            f"{name} has the tokenizer {its_tokenizer.identity}, but checkpoint has {tokenizer.identity}: the prompt has other "
            f"tokens there; name a checkpoint with the same tokenizer"
        )
    shapes = [(each.config.n_layer, each.config.n_head) for each in (model, other)]
    if shapes[0] != shapes[1]:
        raise UserError(
            f"{name} has {shapes[1][0]} layers of {shapes[1][1]} heads, but checkpoint has {shapes[0][0]} of {shapes[0][1]}: a "
            f"head is shown beside the same head; name a checkpoint of the same shape"
        )
    if len(tokens) > other.config.sequence_length:
        raise UserError(
            f"{name} sees {other.config.sequence_length} tokens, and the prompt has {len(tokens)}; shorten it"
        )
    print(checkpoint.path, flush=True)
    measurements = measure(other, tokenizer, tokens, MOST_MAP_SIDE)
    return checkpoint_panel(model, measurements, other, source_of(checkpoint, other, tokenizer))


def write_page(out: Path, page: LensPage, chosen: list[Head]) -> str:
    """Write the page and return a summary.

    The page shows the chosen and the named heads in full. If the prompt is short, it shows all heads in full.
    """
    measurements = page.measurements
    n_token = measurements.tokens.shape[1]
    most = page.most_full_heads(LARGEST_PAGE_BYTES)
    if len(chosen) > most:
        raise UserError(
            f"heads={','.join(f'{layer}.{head}' for layer, head in chosen[:3])},… asks for {len(chosen)} heads in full, "
            f"but at {n_token} tokens only {most} fit into a page of {LARGEST_PAGE_BYTES / 1e6:.0f} MB; ask for fewer"
        )
    all_full = n_token <= MOST_TOKENS_ALL_FULL
    others = [head for head in measurements.by_interest() if all_full or head in measurements.named]
    full = list(dict.fromkeys(chosen + others))[:most]
    print(f"{n_token} tokens; ablating {len(full)} heads, one at a time", flush=True)
    content = page.render(full).encode("utf-8")
    save(out, content)
    return (
        f"named heads: {named_heads(measurements)}\n"
        f"{out} · {len(content) / 1e6:.1f} MB · {len(full)} of {len(measurements.heads)} heads in full; "
        f"open it in a browser"
    )


def named_heads(measurements: Measurements) -> str:
    titles = {name.score: name.title for name in NAMES}
    heads = [
        f"{layer}.{head} {', '.join(titles[score] for score in scores)}"
        for (layer, head), scores in measurements.named.items()
    ]
    return "; ".join(heads) or "none reaches a threshold; the page shows the highest score of each pattern"


def write_arrays(out: Path, model: GPT, tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Write an .npz file and return a summary.

    The file's arrays are weights (L, H, T, T) float32, tokens (T,), token_texts (T,), and the scores (L, H) each. The
    scores named prompt_… are measured on the prompt, the scores named probe_… on the two fixed texts in scores.py.
    A model with head gates adds gates (L, H, T), the mean over a head's channels.
    """
    weights = np.empty((model.config.n_layer, model.config.n_head, len(tokens), len(tokens)), np.float32)
    found, table = measure(model, tokenizer, tokens, weights=weights), tokenizer.token_bytes()
    arrays = {f"prompt_{name}": score.numpy() for name, score in found.scores.items()}
    arrays |= {f"probe_{name}": score.numpy() for name, score in found.probed.items()}
    arrays |= {} if found.gates is None else {"gates": found.gates.cpu().numpy()}
    texts = np.array([table[token].decode("utf-8", "replace") for token in tokens])
    stream = io.BytesIO()
    np.savez(stream, weights=weights, tokens=np.array(tokens), token_texts=texts, **arrays)
    save(out, stream.getvalue())
    return (
        f"{out} · weights {' x '.join(map(str, weights.shape))} float32, {len(arrays)} arrays of figures of the heads"
    )


def save(out: Path, content: bytes) -> None:
    """Write the file completely or not at all. Raises UserError if writing fails."""
    try:
        replace_bytes(out, content)
    except OSError as error:
        raise UserError(f"out={out} cannot be written ({error.strerror}); name another with out=…") from None
