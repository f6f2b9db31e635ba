"""The command `evaluate`: bits per byte and tasks of lm-eval for a checkpoint, printed and added to the run's records."""

import dataclasses
from pathlib import Path

import numpy as np

from andrea.checkpoint import Checkpoint
from andrea.config import EvaluateConfig, UserError
from andrea.evaluation.chat import chat_figures
from andrea.evaluation.harness.run import run_tasks
from andrea.evaluation.results import TEXT_METRIC, Figure, append_figures, run_of, table_lines
from andrea.evaluation.scoring import Subject, bits_per_byte, load_subject
from andrea.generation.sample_command import bytes_of_weights
from andrea.runtime.device import choose_threads
from andrea.runtime.program import typed_command, typed_words
from andrea.text.corpus import held_out_of_run
from andrea.text.held_out import HELD_OUT_FILE
from andrea.text.python_chat import python_chat_in
from andrea.text.sources import texts_at
from andrea.text.tokenizer import Tokenizer

TEXT_TASK, CHAT_TASKS = "bpb", ("chat", "python_chat")  # the tasks that need no lm-eval


def evaluate(config: EvaluateConfig) -> int:
    """Print the figures, and return the exit code. Raises UserError for a task or a text that does not exist."""
    choose_threads(config.threads)
    typed = [name.strip() for entry in config.tasks for name in entry.split(",")]  # tasks=A tasks=B,C
    names = [name for name in dict.fromkeys(typed) if name]
    if not names:
        raise UserError("tasks is empty; name one, such as tasks=bpb")
    where = config.checkpoint, config.runs_dir, config.device
    subject = load_subject(*where, config.batch_size, config.trust, config.precision)
    n_byte = bytes_of_weights(subject.gpt, config.precision)
    print(f"{subject.checkpoint.path}, weights in {config.precision}: {n_byte / 1e6:,.1f} MB")
    figures, versions = [], {}
    if TEXT_TASK in names:
        figures.append(text_figure(config, subject))
    for name in CHAT_TASKS:
        if name in names:
            figures += chat_figures(name, subject, conversations_of(name, config), config.limit)
    harness_names = [name for name in names if name not in (TEXT_TASK, *CHAT_TASKS)]
    if harness_names:
        found, version = run_tasks(subject, harness_names, config.limit, config.few_shot)
        figures += found
        versions["lm_eval"] = version
    if subject.scorer.n_cut:
        print(
            f"{subject.scorer.n_cut:,} contexts were longer than model.sequence_length={subject.gpt.config.sequence_length} "
            f"with their answer, and lost their first tokens"
        )
    figures = [dataclasses.replace(each, precision=config.precision, n_byte=n_byte) for each in figures]
    for line in table_lines(figures):
        print(line)
    run = run_of(subject.checkpoint)
    if run is None:
        print("the checkpoint is not in a run's folder, so the figures are not recorded")
        return 0
    print(f"added to {append_figures(run, subject.checkpoint, figures, versions)}; to see them beside other runs:")
    print(f"  {typed_command('compare')} {typed_words(runs=run)}")
    return 0


def conversations_of(task: str, config: EvaluateConfig) -> Path:
    """The file of conversations of a task. Raises UserError if tasks=chat has no text."""
    if task == "python_chat":
        return python_chat_in(Path(config.data_dir).expanduser()) / HELD_OUT_FILE
    if config.text is None:
        raise UserError("tasks=chat asks the questions of a file of conversations, and text is not set; set text=FILE")
    return Path(config.text).expanduser()


def text_figure(config: EvaluateConfig, subject: Subject) -> Figure:
    """Bits per byte of the file or folder config.text, read as in training; without one, of the run's held-out text.

    Raises UserError if there is no such text.
    """
    if config.text is not None:
        name, texts = Path(config.text).name, texts_at(Path(config.text).expanduser(), "text", config.field, print)
    elif config.field is not None:
        raise UserError(f"field={config.field} chooses a field of the records of a text; name the text with text=…")
    else:
        name = "the run's held-out text"
        texts = held_out_documents(subject.checkpoint, subject.tokenizer, Path(config.data_dir))
    found = bits_per_byte(subject, texts[: config.limit])
    about = f"{name}: {found.n_token:,} tokens, {found.n_byte:,} bytes"
    return Figure(TEXT_TASK, TEXT_METRIC, found.value, found.standard_error, None, found.n_document, about)


def held_out_documents(checkpoint: Checkpoint, tokenizer: Tokenizer, data_dir: Path) -> list[str]:
    """The documents of the run's held-out text. Raises UserError if it is not prepared in data_dir, or has several sources."""
    stream = held_out_of_run(checkpoint.state, data_dir)
    if stream is None and tokenizer.special:
        raise UserError(
            f"{checkpoint.path} was tuned on conversations, which tasks=bpb does not judge; use tasks=chat text=FILE or "
            f"tasks=python_chat, or name a text with text=…"
        )
    if stream is None:
        raise UserError(
            f"the held-out text of {checkpoint.path} is not in data_dir={data_dir}, or has several sources; name a file with "
            f"text=…, or the folder of prepared texts with data_dir=…"
        )
    ids = np.asarray(stream[:], dtype=np.int64)
    parts = np.split(ids, np.flatnonzero(ids == tokenizer.end_of_text))
    texts = [tokenizer.decode(part[part != tokenizer.end_of_text].tolist()) for part in parts]
    return [text for text in texts if text]
