"""The command `evaluate`: bits per byte and tasks of lm-eval for a checkpoint, printed and added to the run's records."""

from __future__ import annotations

from pathlib import Path

from andrea.config import EvaluateConfig
from andrea.evaluation.bits_per_byte import bits_per_byte
from andrea.evaluation.documents import read_documents
from andrea.evaluation.harness.run import run_tasks
from andrea.evaluation.results import TEXT_METRIC, Figure, append_figures, run_of, table_lines
from andrea.evaluation.subject import Subject, load_subject
from andrea.runtime.device import choose_threads
from andrea.runtime.program import typed_command, typed_words

TEXT_TASK = "bpb"  # the task that needs no lm-eval


def evaluate(config: EvaluateConfig) -> int:
    """Print the figures, and return the exit code. Raises UserError for a task or a text that does not exist."""
    choose_threads(config.threads)
    names = task_names(config.tasks)
    subject = load_subject(config.checkpoint, config.runs_dir, config.device, config.batch_size, config.trust)
    print(f"{subject.checkpoint.path}, computed in fp32")
    figures, versions = [], {}
    if TEXT_TASK in names:
        figures.append(text_figure(config, subject))
    harness_names = [name for name in names if name != TEXT_TASK]
    if harness_names:
        found, version = run_tasks(subject, harness_names, config.limit, config.few_shot)
        figures += found
        versions["lm_eval"] = version
    if subject.scorer.n_cut:
        print(
            f"{subject.scorer.n_cut:,} contexts were longer than model.sequence_length={subject.gpt.config.sequence_length} "
            f"with their answer, and lost their first tokens"
        )
    for line in table_lines(figures):
        print(line)
    run = run_of(subject.checkpoint)
    if run is None:
        print("the checkpoint is not in a run's folder, so the figures are not recorded")
        return 0
    print(f"added to {append_figures(run, subject.checkpoint, figures, versions)}; to see them beside other runs:")
    print(f"  {typed_command('compare')} {typed_words(runs=run)}")
    return 0


def task_names(typed: list[str]) -> list[str]:
    """The names in tasks=A tasks=B,C, each once."""
    return list(dict.fromkeys(name.strip() for entry in typed for name in entry.split(",") if name.strip()))


def text_figure(config: EvaluateConfig, subject: Subject) -> Figure:
    documents = read_documents(config.text, config.field, subject.checkpoint, subject.tokenizer, Path(config.data_dir))
    texts = documents.texts[: config.limit]
    found = bits_per_byte(subject, texts)
    about = f"{documents.name}: {found.n_token:,} tokens, {found.n_byte:,} bytes"
    return Figure(TEXT_TASK, TEXT_METRIC, found.value, found.standard_error, None, found.n_document, about)
