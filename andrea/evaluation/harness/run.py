"""Runs tasks of lm-eval on a model, and turns its results into figures."""

import logging
from collections.abc import Sequence
from typing import Any

from andrea.config import UserError, nearest
from andrea.evaluation.results import Figure
from andrea.evaluation.scoring import Subject
from andrea.evaluation.tasks import TASKS

GUESSED = ("acc", "acc_norm", "acc_mutual_info", "exact_match")  # metrics of a choice, of which chance gives a share


def run_tasks(
    subject: Subject, names: Sequence[str], limit: int | None, few_shot: int | None
) -> tuple[list[Figure], str]:
    """The figures of the tasks, and the version of lm-eval. limit: the most questions of each task; None for all.

    few_shot: the examples in front of each question; None for what the task says. Raises UserError if lm-eval is missing
    or does not know a task.
    """
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError(
            f"tasks={','.join(names)} needs the package lm-eval, which cannot be imported ({error}); run: pip install "
            f"lm-eval (tasks=bpb needs no other package)"
        ) from None
    from andrea.evaluation.harness.model import AndreaLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of how our own tasks are written

    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    if not set(names) <= set(manager.all_tasks):  # thousands of files are read only if one of them is named
        manager = TaskManager(include_path=str(TASKS))
    for name in names:
        if name not in manager.all_tasks:
            raise UserError(
                f"lm-eval has no task {name}{nearest(name, manager.all_tasks)}; `lm-eval ls tasks` lists them"
            )
    results = lm_eval.simple_evaluate(
        model=AndreaLM(subject=subject, batch_size=subject.scorer.batch_size),
        tasks=list(names),
        num_fewshot=few_shot,
        limit=limit,
        task_manager=manager,
        log_samples=True,
    )
    return figures_of(results), lm_eval.__version__


def figures_of(results: dict[str, Any]) -> list[Figure]:
    """The figures of all tasks in lm-eval's results, in its order."""
    found = []
    for task, values in results["results"].items():
        samples = results["samples"].get(task)
        if samples is None:  # the mean of a group, whose tasks follow
            continue
        n_sample = results["n-samples"][task]["effective"]
        for key, value in values.items():
            metric, _, filter_ = key.partition(",")
            if not filter_ or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{filter_}")
            error = float(error) if isinstance(error, int | float) else None
            chance = chance_of(samples) if metric in GUESSED else None
            name = metric if filter_ == "none" else f"{metric},{filter_}"
            found.append(Figure(task, name, float(value), error, chance, n_sample, ""))
    return found


def chance_of(samples: Sequence[dict[str, Any]]) -> float | None:
    """The share of right answers if each question's choices are equally likely; None if the questions have no choices."""
    counts = {sample["doc_id"]: len(sample["arguments"]) for sample in samples}
    if not counts or max(counts.values()) < 2:
        return None
    return sum(1 / count for count in counts.values()) / len(counts)
