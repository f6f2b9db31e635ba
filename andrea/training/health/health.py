"""Detects problems of a training run. Each step is noted; at each evaluation, all checks judge the measurements.

Each check is a class in its own module, which also lists its findings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from andrea.checkpoint import Checkpoint
from andrea.config import RunConfig
from andrea.text.corpus import Corpus
from andrea.text.loader import Loader
from andrea.training.health.attention import AttentionCheck
from andrea.training.health.check import Evidence, Finding, StepHistory
from andrea.training.health.data import DataCheck, DataSummary
from andrea.training.health.optimisation import ExpectedCheck, LossCheck, OptimisationCheck
from andrea.training.health.text import ReferenceText, TextCheck

FINDINGS: dict[str, Finding] = {
    name: finding
    for check in (TextCheck, LossCheck, OptimisationCheck, AttentionCheck, DataCheck, ExpectedCheck)
    for name, finding in check.FINDINGS.items()
}


@final
class Health:
    """The health of one run. A checkpoint keeps `state()`, so a resumed run is judged like an uninterrupted one."""

    def __init__(
        self,
        run: RunConfig,
        n_vocab: int,
        data: DataSummary,
        reference: ReferenceText | None,
        planned_epochs: float = 0.0,
    ) -> None:
        """reference: figures of held-out text, or None if the run writes no samples.

        planned_epochs: the epochs that the program itself has planned. To read the text so often is no finding.
        """
        self.history = StepHistory(run, data.unigram_nats)
        self.text = TextCheck(run, self.history, reference)
        self.data = DataCheck(run, self.history, data, n_vocab, planned_epochs)
        self.checks = (
            self.text,
            OptimisationCheck(run, self.history),
            LossCheck(run, self.history, data, n_vocab),
            AttentionCheck(run, self.history),
            self.data,
            ExpectedCheck(run, self.history),
        )
        self.active: dict[str, int] = {}  # findings of the last evaluation -> the step at which each began

    def note_step(self, step: int, loss: float, norm: float) -> None:
        """Note a step's training loss (nats per token) and gradient norm before clipping, both finite."""
        self.history.note(step, loss, norm)

    def needs_more_samples(self, texts: Sequence[str], step: int) -> bool:
        """Whether these samples suggest a failure, which more samples must confirm.

        Even a healthy small model writes a loop in one sample of five.
        """
        return bool(self.text.judge_samples(texts, step).findings)

    def judge(self, evidence: Evidence) -> tuple[dict[str, float], dict[str, str], dict[str, int]]:
        """Returns figures to record, findings that begin (name -> message), findings that end (name -> first step)."""
        figures: dict[str, float] = {}
        findings: dict[str, str] = {}
        for check in self.checks:
            judgement = check.judge(evidence)
            figures |= judgement.figures
            findings |= judgement.findings
        self.history.begin_interval()
        begun = {name: message for name, message in findings.items() if name not in self.active}
        ended = {name: step for name, step in self.active.items() if name not in findings}
        self.active = {name: self.active.get(name, evidence.step) for name in findings}
        return figures | {f"health/findings/{name}": int(name in findings) for name in FINDINGS}, begun, ended

    def failed(self) -> list[str]:
        """The findings of the last evaluation that count as a failure."""
        return [name for name in self.active if FINDINGS[name].fails_run]

    def state(self) -> dict[str, Any]:
        """The state that checkpoints save. Its keys are part of the checkpoint format."""
        return self.history.state() | self.data.state() | {"active": self.active}

    def load_state(self, state: dict[str, Any]) -> None:
        self.history.load_state(state)
        self.data.load_state(state)
        self.active = {
            name: step for name, step in state["active"].items() if name in FINDINGS
        }  # a file may hold others


def make_health(
    run: RunConfig, corpus: Corpus, loader: Loader, checkpoint: Checkpoint | None, planned_epochs: float = 0.0
) -> Health:
    """The health of a run, with the state that `checkpoint` saved if one is given."""
    reference = None
    if run.train.sample_tokens:
        held_out = [source.val for source in corpus.sources]
        reference = ReferenceText.of(held_out, corpus.tokenizer, run.train.sample_tokens)
    health = Health(run, corpus.tokenizer.n_vocab, DataSummary.of(corpus, loader), reference, planned_epochs)
    if checkpoint is not None:
        health.load_state(checkpoint.state["health"])
    return health
