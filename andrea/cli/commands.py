"""The commands: each reads its configuration and calls the package."""

import dataclasses
import os
from pathlib import Path

from andrea.api.command_line import SWITCHES, compose, configure, read
from andrea.api.run import train_one, with_init_from
from andrea.cli.sweep import sweep
from andrea.config import RunConfig, UserError, parse, schema
from andrea.runtime.program import typed_command, typed_words

CHAT_SAMPLING = {"temperature": 0.7, "repetition_penalty": 1.0}  # an answer repeats words of its question


def to_key_value(words: list[str], positional: str) -> list[str]:
    """Each word without '=', and each that names a file, a folder or a run, whose name may have '=', as a value of `positional`.

    The runs of a sweep have '=' in their names.
    """
    places = ["", *(word.removeprefix("runs_dir=") for word in words if word.startswith("runs_dir=")), "runs"]
    found = []
    for word in words:
        is_name = any(os.path.exists(os.path.join(place, word)) for place in places)
        is_value = is_name or ("=" not in word and not word.startswith("-"))
        found.append(f"{positional}={word}" if is_value else word)
    return found


def train(argv: list[str]) -> int:
    """Train a GPT, or resume a run; with -m, one run for each combination of values (seed=1,2)."""
    if set(SWITCHES) & set(argv):
        return sweep(argv)
    return train_one(argv).exit_code


def sample(argv: list[str]) -> int:
    """Generate text with a trained model."""
    config = configure(schema.SampleConfig, "sample", argv)
    if config.chat:
        typed = {word.partition("=")[0] for word in argv}
        config = dataclasses.replace(config, **{key: value for key, value in CHAT_SAMPLING.items() if key not in typed})

    from andrea.generation.chat_session import talk
    from andrea.generation.sample_command import sample
    from andrea.runtime.device import choose_device, choose_threads
    from andrea.runtime.shared_cores import sharing_cores

    device = choose_device(config.device)
    choose_threads(config.threads)
    with sharing_cores(device.type == "cpu"):
        return (talk if config.chat else sample)(config, device)


def prepare(argv: list[str]) -> int:
    """Write the token shards of data=… with tokenizer=…; `train` also does this when it first starts."""
    line = read(RunConfig, argv)
    config = parse(RunConfig, with_init_from(compose("train", line), line))
    if config.resume is not None:
        raise UserError(
            f"resume={config.resume}: prepare starts from data=… and tokenizer=…; train prepares a run's own text"
        )

    from andrea.text.corpus import open_corpus

    corpus = open_corpus(config.data, config.tokenizer, Path(config.data_dir), print, config.objective.kind == "dpo")
    for source in corpus.sources:
        held_out = f"{len(source.val):,} held out ({source.val_bytes:,} bytes)"
        print(f"{source.name}: {len(source.train):,} training tokens, {held_out}")
    print(f"tokenizer {corpus.tokenizer.identity}, fingerprint {corpus.fingerprint[:12]}")
    if config.tokenizer.kind == "bpe":
        names = {"tokenizer.path": corpus.sources[0].folder, "tokenizer.vocab_size": corpus.tokenizer.n_vocab}
        print(f"to use this vocabulary for another text, set {typed_words(**names)}")
    return 0


def consolidate(argv: list[str]) -> int:
    """Turn the many files of a sharded checkpoint into one file of weights and one of optimizer state."""
    config = configure(schema.ConsolidateConfig, "consolidate", argv)

    from andrea.checkpoint import consolidate, locate

    checkpoint = locate(config.checkpoint, Path(config.runs_dir), newest=True)
    consolidate(checkpoint.path)
    has = "now has" if checkpoint.is_sharded else "already had"
    print(f"{checkpoint.path} {has} one file of weights and one of optimizer state")
    return 0


def export(argv: list[str]) -> int:
    """Write a checkpoint in the format of another program, transformers or llama.cpp, and prove it equal."""
    config = configure(schema.ExportConfig, "export", argv)

    from andrea.interop.export import export

    return export(config)


def import_(argv: list[str]) -> int:
    """Read a model of Hugging Face's layout (GPT-2, Llama, Qwen3, …) into a checkpoint, and prove it equal."""
    config = configure(schema.ImportConfig, "import", to_key_value(argv, positional="source"))

    from andrea.interop.importing.import_model import import_model

    return import_model(config)


def evaluate(argv: list[str]) -> int:
    """Judge a checkpoint: bits per byte of a text, and tasks of the lm-evaluation-harness."""
    config = configure(schema.EvaluateConfig, "evaluate", argv)

    from andrea.evaluation.evaluate import evaluate

    return evaluate(config)


def lens(argv: list[str]) -> int:
    """Write a page that shows what every attention head does with prompt=…, and the arithmetic behind it."""
    config = configure(schema.LensConfig, "lens", argv)

    from andrea.insight.lens.lens import lens
    from andrea.runtime.device import choose_device, choose_threads

    device = choose_device(config.device)
    choose_threads(config.threads)
    return lens(config, device)


def serve(argv: list[str]) -> int:
    """Answer requests over HTTP in OpenAI's form: completions and chats of a trained model."""
    config = configure(schema.ServeConfig, "serve", argv)

    from andrea.runtime.device import choose_device, choose_threads
    from andrea.runtime.shared_cores import sharing_cores

    try:
        from andrea.serve.server import serve
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise UserError(f"serve needs the package {error.name}: pip install starlette uvicorn") from None

    device = choose_device(config.device)
    choose_threads(config.threads)
    with sharing_cores(device.type == "cpu"):
        return serve(config, device)


def runs(argv: list[str]) -> int:
    """List the runs of a folder; with disk, delete NAME or rename NAME NEW: show their sizes, delete or rename a run."""
    config = configure(schema.RunsConfig, "runs", to_key_value(with_action(argv), positional="runs_dir"))

    from andrea.insight.runs import delete_run, rename_run, show_disk, show_runs

    if config.delete is not None:
        return delete_run(config)
    if config.rename is not None:
        return rename_run(config)
    return (show_disk if config.disk else show_runs)(config)


def with_action(words: list[str]) -> list[str]:
    """The words of `runs` with an action at the beginning, such as `rename NAME NEW`, as rename=NAME to=NEW."""
    actions = {"disk": [], "delete": ["delete"], "rename": ["rename", "to"]}
    if not words or words[0] not in actions:
        return words
    action, needed = words[0], actions[words[0]]
    names, keys = words[1 : 1 + len(needed)], [f"{field.name}=" for field in dataclasses.fields(schema.RunsConfig)]
    if len(names) < len(needed) or any(name.startswith(tuple(keys)) for name in names):
        usage = {"delete": "delete NAME confirm=true", "rename": "rename NAME NEW"}[action]
        raise UserError(
            f"`runs {action}` needs {len(needed)} name{'s' * (len(needed) > 1)}: {typed_command('runs')} {usage}"
        )
    found = [f"{key}={name}" for key, name in zip(needed, names, strict=True)] or ["disk=true"]
    return found + words[1 + len(needed) :]


def compare(argv: list[str]) -> int:
    """Compare run folders: a table, a page, and a scaling fit if there are enough runs."""
    config = configure(schema.CompareConfig, "compare", to_key_value(argv, positional="runs"))
    predicted = configure(RunConfig, "train", [f"model={config.predict}"]).model if config.predict else None

    from andrea.insight.compare.page import compare

    return compare(config, predicted)


def dashboard(argv: list[str]) -> int:
    """Save a wandb workspace that shows the runs of project=… side by side; offline, print the workspace instead."""
    config = configure(schema.DashboardConfig, "dashboard", argv)

    from andrea.insight.dashboard import dashboard

    return dashboard(config)
