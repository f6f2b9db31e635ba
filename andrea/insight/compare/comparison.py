"""Computes what the terminal and the page show about the compared runs."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from andrea.config import AttentionConfig, ModelConfig, as_typed, parse
from andrea.config.keys import flatten
from andrea.insight.compare.runs import Run
from andrea.insight.compare.scaling import CONFIDENCE, TESTED_FACTOR, Interval, NoFit, ScalingFit, count, fit_scaling
from andrea.runtime.streams import printable
from andrea.text.load_tokenizer import load_tokenizer
from andrea.training.records.console import format_duration, format_number

# ---------------------------------------------------------------------------------------------------------- differences

# Configuration keys that do not affect training.
NOT_COMPARED = ("name", "runs_dir", "data_dir", "resume", "init_from", "dry_run", "logger", "threads")
MISSING = "—"  # stands for the value of a key that a run's configuration lacks
NAMES_SHOWN = 3


def differences(runs: list[Run]) -> dict[str, list[Any]]:
    """Dotted configuration key -> its value in each run, for the keys whose values differ."""
    flat = [flatten(run.config) for run in runs]
    keys = list(dict.fromkeys(key for config in flat for key in config))
    rows = {key: [config.get(key, MISSING) for config in flat] for key in keys if key.split(".")[0] not in NOT_COMPARED}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def comparability_warnings(runs: list[Run]) -> list[str]:
    """One line for each difference that makes figures of these runs incomparable."""
    lines = []
    tokenizers = group_names(runs, lambda run: run.tokenizer)
    if len(tokenizers) > 1:
        lines.append(
            f"tokenizers differ ({name_groups(tokenizers)}): loss per token is not comparable; "
            f"compare bits per byte, on the same text"
        )
    if len({run.fingerprint for run in runs}) > 1:
        data = group_names(runs, lambda run: f"{data_name(run.config)} {run.fingerprint[:12]}")
        lines.append(
            f"data differ, and so do the validation sets ({name_groups(data)}): neither loss nor bits per byte is comparable"
        )
    evaluated = group_names(runs, lambda run: as_typed(run.config["train"].get("eval_tokens")))
    if len(evaluated) > 1:
        lines.append(
            f"train.eval_tokens differs ({name_groups(evaluated)}): evaluations during training used different parts of the "
            f"validation set; the last evaluation of a finished run used the whole set"
        )
    return lines


def data_name(config: dict[str, Any]) -> str:
    """The path of the run's text, the names of its sources, or the kind of its data."""
    data = config["data"]
    sources = data.get("sources")
    return str(data.get("path") or "+".join(map(str, sources if isinstance(sources, dict) else ())) or data.get("kind"))


def group_names(runs: list[Run], key: Callable[[Run], str]) -> dict[str, list[str]]:
    """Group runs by the value of `key`: value -> names of the runs."""
    found: dict[str, list[str]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(run.name)
    return found


def name_groups(groups: dict[str, list[str]]) -> str:
    """'value: run, run; value: run', with at most NAMES_SHOWN names for each value."""

    def shortened(names: list[str]) -> str:
        hidden = len(names) - NAMES_SHOWN
        return ", ".join(names[:NAMES_SHOWN]) + (f" and {hidden} more" if hidden > 0 else "")

    return "; ".join(f"{value}: {shortened(names)}" for value, names in groups.items())


def difference_lines(differing: dict[str, list[Any]]) -> list[str]:
    """One line for each key, with the number of runs that have each value."""
    lines = []
    for key, values in differing.items():
        counts = Counter(map(as_typed, values)).items()
        lines.append(f"{key}: " + ", ".join(text + (f" (×{n})" if n > 1 else "") for text, n in counts))
    return lines


# --------------------------------------------------------------------------------------------------------------- report

# Configuration keys, besides train.*, that may differ between the runs of one scaling law. All other keys are the
# recipe.
SIZE_KEYS = "name d_model n_layer n_head n_kv_head d_head d_mlp recipe_steps recipe_tokens_per_step".split()
MAY_DIFFER = {
    *(f"model.{key}" for key in SIZE_KEYS),
    "seed",
    "device",
    "precision",
    "compile",
    "deterministic",
    "attention.implementation",
}
TERMS = {"N": ("A", "alpha", "parameters"), "D": ("B", "beta", "tokens"), "C": ("K", "gamma", "FLOPs")}


def size_of(model: ModelConfig, tokens: int | None, largest: Run) -> tuple[int, int, float]:
    """Parameters, tokens and FLOPs of a model trained on `tokens`; by default on the largest run's tokens per parameter."""
    from andrea.model.size import count_parameters, flops_per_token

    attention = parse(AttentionConfig, largest.config.get("attention"), "attention")
    n_vocab = load_tokenizer(largest.checkpoint).n_vocab
    parameters = count_parameters(model, attention, n_vocab).total
    tokens = tokens or round(parameters * largest.tokens / largest.parameters)
    return parameters, tokens, float(tokens * flops_per_token(model, attention, n_vocab))


def scaling_lines(runs: list[Run], predicted: ModelConfig | None, predict_tokens: int | None, seed: int) -> list[str]:
    """The scaling law of the finished runs as lines of text, or one line that says why no law can be fitted.

    runs: smallest model first; one run alone has no law. predicted: a model whose loss the law predicts; see `size_of`.
    """
    if len(runs) == 1 and predicted is None:
        return []
    size = size_of(predicted, predict_tokens, runs[-1]) if predicted else None  # raises before anything is fitted
    finished = [run for run in runs if run.finished and run.is_of_whole_text]
    if len({run.fingerprint for run in finished}) > 1:
        return ["no scaling fit: the runs were trained on different data or with different tokenizers"]
    parameters, tokens, flops, loss = (
        np.array([getattr(run, name) for run in finished], dtype=float)
        for name in ("parameters", "tokens", "flops", "loss")
    )
    try:
        fit, kind = fit_scaling(parameters, tokens, flops, loss, seed)
    except NoFit as reason:
        return [str(reason)]
    lines = [f"scaling fit: {kind}", law_line(fit)]
    if len(finished) < len(runs):
        others = ", ".join(run.name for run in runs if run not in finished)
        lines.append(f"left out of the fit, because unfinished, or judged on a part of the held-out text: {others}")
    other = [key for key in differences(finished) if key not in MAY_DIFFER and not key.startswith("train.")]
    if other:
        lines.append(f"caution: a scaling law assumes runs with equal settings, but these differ in {', '.join(other)}")
    if predicted:
        lines.append(prediction_line(fit, predicted.name, size, finished[-1]))
    return lines


def law_line(fit: ScalingFit) -> str:
    """The fitted law with its figures."""
    terms, meanings, figures = ["E"], [], [f"E = {fit.irreducible} nats per token"]
    for name in fit.variables:
        numerator, exponent, meaning = TERMS[name]
        terms.append(f"{numerator}/{name}^{exponent}")
        meanings.append(f"{name} {meaning}")
        scale = format_number(float(f"{fit.numerator(name):.0e}"))
        figures.append(f"{exponent} = {fit.exponent(name)} with {numerator} = {scale}")
    return (
        f"loss = {' + '.join(terms)} ({', '.join(meanings)}): {', '.join(figures)}; {CONFIDENCE:.0%} intervals; "
        f"noise of one run's loss {fit.noise:.1%}"
    )


def prediction_line(fit: ScalingFit, name: str, size: tuple[int, int, float], run: Run) -> str:
    """The predicted loss with its interval, in nats per token and bits per byte, and the factor of extrapolation.

    name, size: of the model, the latter from `size_of`. run: a finished one.
    """
    parameters, tokens, flops = size
    values = (parameters, tokens) if fit.variables == ("N", "D") else (flops,)
    nats = fit.predict(*values)
    per_nat = run.bpb / run.loss  # bits per byte for one nat per token, the same for all runs on these data
    bits = Interval(*(per_nat * number for number in (nats.value, nats.low, nats.high)))
    factors = fit.extrapolation(*values)
    reach = " and ".join(f"{factor:.3g} times the {TERMS[variable][2]}" for variable, factor in factors.items())
    tested = TESTED_FACTOR if fit.variables == ("N", "D") else TESTED_FACTOR**2
    caution = f"; the intervals were tested only up to a factor of {tested:g}: take this as a rough estimate"
    return (
        f"predicted for {name} with {parameters:,} parameters on {format_number(tokens)} tokens: "
        f"loss {nats} nats per token, {bits} bits per byte ({CONFIDENCE:.0%} interval of the mean over seeds); "
        f"the model has {reach} of the largest run{caution if max(factors.values()) > 1.01 * tested else ''}"
    )


# ---------------------------------------------------------------------------------------------------------- line styles

DASHES = ("", "7 3", "2 3", "9 3 2 3")  # lengths of dash and gap in pixels; '' is a solid line
MARKERS = ("circle", "square", "triangle", "diamond")


def line_style(runs: list[Run], index: int) -> dict[str, str]:
    """How runs[index] is drawn: its colours on a light and a dark background, dash and marker. The runs come smallest first.

    Each run has a colour of its own. Colours are ordered by the model's size; runs of one size also differ in dash and marker.
    """
    place = index / max(1, len(runs) - 1)
    among_equals = sum(other.parameters == runs[index].parameters for other in runs[:index])
    colours = {"light": colour_at(place, 0.28, 0.68), "dark": colour_at(place, 0.52, 0.93)}
    return colours | {"dash": DASHES[among_equals % len(DASHES)], "marker": MARKERS[among_equals % len(MARKERS)]}


def colour_at(place: float, darkest: float, lightest: float) -> str:
    """The colour at `place` (0 to 1) of a scale from dark blue over green to light ochre, for CSS.

    The lightness rises evenly, so the order is visible in greyscale and with any colour blindness (OKLCH: Ottosson 2020,
    A perceptual color space for image processing).
    """
    lightness, hue = darkest + place * (lightest - darkest), 275 - 195 * place
    return f"oklch({lightness:.4f} 0.12 {hue:.2f})"


# ---------------------------------------------------------------------------------------------------------------- table

NO_FIGURE = "–"  # in the cell of a run that did not record the column's figure


@dataclass(frozen=True)
class Column:
    title: str
    unit: str
    figure: str  # an attribute of Run, which is None if the run did not record it
    shown: Callable[[Any], str]


COLUMNS = (
    Column("params", "", "parameters", format_number),
    Column("tokens", "trained on", "tokens", format_number),
    Column("FLOPs", "of training", "flops", "{:.2e}".format),
    Column("val loss", "nats per token, best evaluation", "loss", "{:.4f}".format),
    Column("bpb", "bits per byte, best evaluation", "bpb", "{:.4f}".format),
    Column("tok/s", "tokens per second, median", "tokens_per_second", "{:,.0f}".format),
    Column("MFU", "share of the device's peak FLOPs, median", "mfu", "{:.1%}".format),
    Column("memory", "peak", "peak_memory_bytes", lambda n_byte: f"{n_byte / 2**30:.2f} GiB"),
    Column("time", "of training steps, without evaluation, saving, compilation", "seconds", format_duration),
)


def make_table(runs: list[Run]) -> tuple[list[Column], list[list[str]]]:
    """The columns for which at least one run has a figure, and the cells of each run, its name first."""
    columns = [column for column in COLUMNS if any(getattr(run, column.figure) is not None for run in runs)]
    rows = []
    for run in runs:
        figures = [(column, getattr(run, column.figure)) for column in columns]
        cells = [NO_FIGURE if figure is None else column.shown(figure) for column, figure in figures]
        rows.append([run.name + ("" if run.finished else " *"), *cells])
    return columns, rows


def terminal_table(heads: list[str], rows: list[list[str]], width: int) -> str:
    """Format aligned columns. The first column is left-aligned, and shortened if a line would exceed `width`."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    widths[0] = max(12, min(widths[0], width - sum(widths[1:]) - 2 * (len(heads) - 1)))

    names = shorten_names([row[0] for row in rows], widths[0])
    widths[0] = max([widths[0], *map(len, names)])
    rows = [[name, *row[1:]] for name, row in zip(names, rows, strict=True)]

    def line(cells: list[str]) -> str:
        first = f"{cells[0]:<{widths[0]}}"
        rest = [f"{cell:>{size}}" for cell, size in zip(cells[1:], widths[1:], strict=True)]
        return "  ".join([first, *rest]).rstrip()

    return "\n".join([line(heads), *(line(row) for row in rows)])


def shorten_names(names: list[str], width: int) -> list[str]:
    """The names in at most `width` characters each. Names that would then look alike stay whole."""
    shown = [shorten_in_middle(name, width) for name in names]
    return [name if shown.count(short) > names.count(name) else short for name, short in zip(names, shown, strict=True)]


def shorten_in_middle(text: str, width: int) -> str:
    """The text in at most `width` characters. Most of them are from its end, where names of runs usually differ."""
    if len(text) <= width:
        return text
    head = (width - 1) // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


# ---------------------------------------------------------------------------------------------------------------- notes


def summary_of(runs: list[Run]) -> str:
    """What is compared, in one line. runs: smallest model first."""
    if len(runs) == 1:
        run = runs[0]
        state = "finished" if run.finished else run.progress
        return (
            f"{run.config['model']['name']}, {format_number(run.parameters)} parameters, {format_number(run.tokens)} tokens of "
            f"{data_name(run.config)} · {state}"
        )
    smallest, largest = (format_number(run.parameters) for run in (runs[0], runs[-1]))
    sizes = f"of {smallest}" if smallest == largest else f"from {smallest} to {largest}"
    return f"{count(len(runs), 'run')}, {sizes} parameters"


def notes_on(runs: list[Run]) -> list[str]:
    """Lines on unfinished runs, which the table marks with '*', on runs whose best evaluation is not the last or is of a part
    of the held-out text, and on the figures of `andrea evaluate`. One names the run with the fewest bits per byte, if several
    runs have the same text."""
    lines = [f"* {run.name}: {run.progress}" for run in runs if not run.finished]
    lines += [
        f"{run.name}: the figures are of step {run.result['step']:,}, the best evaluation; the last evaluation, at "
        f"step {run.validation[-1]['step']:,}, has {run.validation[-1]['val/bpb']:.4f} bits per byte"
        for run in runs
        if run.result["step"] != run.validation[-1]["step"]
    ]
    lines += [
        f"{run.name}: the figures are of {run.result['val/tokens']:,} held-out tokens only; do not compare them"
        for run in runs
        if not run.is_of_whole_text
    ]
    compared = [run for run in runs if run.is_of_whole_text]
    if len(compared) > 1 and len({run.fingerprint for run in runs}) == 1:
        best = min(compared, key=lambda run: run.bpb)
        lines.append(f"fewest bits per byte: {best.name}, {best.bpb:.4f}")
    return lines + judged_lines(runs)


def judged_lines(runs: list[Run]) -> list[str]:
    """One line for each figure of `andrea evaluate`, with its value in each run that was judged in this way."""
    found: dict[str, list[str]] = {}
    for run in runs:
        for step, figure in run.judged.values():
            other_step = "" if step == run.result["step"] else f" at step {step:,}"
            guessed = "" if figure.chance is None else f", chance {figure.chance:.3f}"
            rounded = "" if figure.precision == "fp32" else f", weights in {figure.precision}"
            what = f"{figure.task} {figure.metric} ({figure.about or f'{figure.n:,} questions'}{guessed}{rounded})"
            found.setdefault(what, []).append(f"{run.name} {figure.text}{other_step}")
    return [f"{what}: {'; '.join(values)}" for what, values in sorted(found.items())]
