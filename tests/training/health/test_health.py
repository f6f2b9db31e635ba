"""A run with a problem names it: what each check finds, what it lets pass, and what training does about it."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, settings_in

from andrea.api.command_line import configure
from andrea.attention import HeadStatistics
from andrea.config import RunConfig, UserError, to_plain
from andrea.text.corpus import open_corpus
from andrea.text.loader import Loader
from andrea.training.expected.curves import Expected, Standing
from andrea.training.health.health import FINDINGS, DataSummary, Evidence, Health, line_end, optimizer_remedy
from andrea.training.health.text_quality import ReferenceText
from andrea.training.resume import flatten

N_VOCAB, UNIGRAM = 50, 3.0  # ln 50 = 3.91
DATA = DataSummary({"code": 0.75, "notes": 0.25}, {"code": 1000, "notes": 500}, UNIGRAM)


def configured(*words: str) -> RunConfig:
    """The run of these words, of which a later one replaces an earlier one."""
    typed = {word.partition("=")[0]: word for word in ("optimizer.warmup_steps=5", *words)}
    return configure(RunConfig, "train", list(typed.values()))


def make_health(*words: str) -> Health:
    run = configured(*words)
    return Health(run, N_VOCAB, DATA, None)


make = make_health


def heads(
    entropy_share: list[float], largest_logit: float = 5.0, gate_mean: list[float] | None = None
) -> HeadStatistics:
    """One layer whose heads have these entropies, as shares of the possible, and these gates."""
    rows = torch.full((1, len(entropy_share)), 10.0)
    parts = {"entropy": 10 * torch.tensor([entropy_share]), "largest_logit": torch.full_like(rows, largest_logit)}
    parts["gate"] = None if gate_mean is None else 10 * torch.tensor([gate_mean])
    return HeadStatistics(*(parts.get(name, rows) for name in HeadStatistics._fields))


def seen(step: int, val: dict[str, float] | None = None, **changed) -> Evidence:
    losses = val or {"code": 2.0, "notes": 2.0}
    parts = {name: {"loss": loss, "tokens": 100} for name, loss in losses.items()}
    return dataclasses.replace(Evidence(step, 0, [], heads([0.5] * 10), None, parts), **changed)


def noted(health: Health, losses: list[float], norms: list[float] | None = None) -> Health:
    for step, loss in enumerate(losses):
        health.note_step(step + 1, loss, norms[step] if norms else 0.5)
    return health


def steady(count: int, level: float = 2.0) -> list[float]:
    return (level + 0.1 * np.random.default_rng(1).standard_normal(count)).tolist()


def notes_reference(notes: Path, folder: Path) -> tuple[RunConfig, ReferenceText]:
    """A run's configuration whose data are the notes, and the figures of their held-out text in windows of 160 bytes."""
    words = ["data=text", f"data.path={notes}", "tokenizer=byte", "optimizer.warmup_steps=5"]
    run = configure(RunConfig, "train", words)
    corpus = open_corpus(run.data, run.tokenizer, folder / "reference", lambda line: None)
    return run, ReferenceText([corpus.sources[0].val], corpus.tokenizer, 160)


def found(health: Health, evidence: Evidence) -> dict[str, str]:
    return health.judge(evidence)[1]


# ------------------------------------------------------------------------------------------------- optimisation


def test_a_steady_run_has_no_findings() -> None:
    health = noted(make(), steady(200))
    figures, begun, ended = health.judge(seen(200))
    assert begun == {} and ended == {} and health.failed() == []
    assert {name: figures[f"health/findings/{name}"] for name in FINDINGS} == dict.fromkeys(FINDINGS, 0)
    assert all(isinstance(value, (int, float)) for value in figures.values())


def test_spikes_are_counted_since_the_last_evaluation() -> None:
    losses, norms = steady(60), [0.5] * 60
    losses[40], norms[50], norms[51] = 4.0, 2.6, 2.4
    health = noted(make("optimizer.clip_norm=1"), losses, norms)
    figures, begun, _ = health.judge(seen(60))
    assert set(begun) == {"loss_spikes", "gradient_spikes"}
    assert figures["health/loss_spikes"] == 1 and figures["health/gradient_spikes"] == 1  # 2.4 is under 5 · 0.5
    assert "step 41: 4 is above" in begun["loss_spikes"] and "step 51: 2.6 is above 2.5" in begun["gradient_spikes"]
    assert figures["health/clipped_share"] == pytest.approx(2 / 60)
    figures, _, ended = noted(health, steady(20)).judge(seen(80))
    assert figures["health/loss_spikes"] == 0 and ended == {"loss_spikes": 60, "gradient_spikes": 60}


def test_a_falling_loss_is_no_spike() -> None:
    assert not found(noted(make(), [4 * math.exp(-step / 30) + 1 for step in range(100)]), seen(100))


def test_clipping_at_nearly_every_step_is_named() -> None:
    norms = [3.0] * 56 + [0.5] * 4
    assert set(found(noted(make("optimizer.clip_norm=1"), steady(60), norms), seen(60))) == {"clipped_steps"}
    fewer = [3.0] * 54 + [0.5] * 6
    assert not found(noted(make("optimizer.clip_norm=1"), steady(60), fewer), seen(60))
    assert not found(noted(make("optimizer.clip_norm=null"), steady(60), norms), seen(60))
    assert not found(
        noted(make("optimizer.clip_norm=1"), steady(50), norms[:50]), seen(50)
    )  # early in training it is normal


def test_large_updates_of_the_median_matrix_are_named() -> None:
    health = noted(make(), steady(50))
    assert not found(health, seen(50, update_ratios=torch.tensor([0.01, 0.2, 9.0])))
    message = found(health, seen(60, update_ratios=torch.tensor([0.01, 0.3, 9.0])))["large_updates"]
    assert "0.3" in message and "limit: 0.25" in message


def test_a_loss_of_a_uniform_guess_is_named() -> None:
    high = {"code": 5.0, "notes": 5.0}
    assert set(found(noted(make(), steady(20, 4.2)), seen(20, {"code": 4.1, "notes": 4.5}))) == {"loss_above_uniform"}
    assert not found(
        noted(make(), steady(14, 4.2)), seen(14, high)
    )  # 5 steps of warm-up, and 10 steps for the current loss
    assert set(found(noted(make(), steady(20, 2.5)), seen(20, high))) == {"loss_above_uniform"}  # validation alone


def test_a_loss_of_token_frequencies_is_named_after_a_while() -> None:
    val = {"code": 3.3, "notes": 3.3}
    assert not found(noted(make(), steady(54, 3.3)), seen(54, val))
    assert set(found(noted(make(), steady(55, 3.3)), seen(55, val))) == {"loss_above_unigram"}
    fallen_back = noted(make(), steady(20, 2.5) + steady(20, 3.3))  # at once, where the loss has been below
    assert "loss_above_unigram" in found(fallen_back, seen(40))


def test_the_unigram_entropy_of_data_solved_by_hand(tmp_path: Path) -> None:
    """Three tokens in the shares 1/2, 1/4, 1/4: 1.5 bits."""

    class Source:
        chat, pairs = None, False

        def __init__(self, name: str, tokens: list[int], weight: float | None) -> None:
            self.name, self.train, self.weight = name, np.array(tokens * 64), weight
            self.chat, self.pairs = None, False

    class Corpus:
        sources = (Source("a", [0, 0, 1, 2], 0.5), Source("b", [0, 0, 1, 2, 0, 0, 2, 1], 0.5))
        tokenizer = type("Tokenizer", (), {"n_vocab": 5})

    data = DataSummary.of(Corpus, Loader(Corpus.sources, 4, 1))
    assert data.unigram_nats == pytest.approx(1.5 * math.log(2), rel=1e-3)
    assert data.shares == {"a": 0.5, "b": 0.5} and data.lengths == {"a": 255, "b": 511}


# ------------------------------------------------------------------------------------------------------ attention


def test_heads_are_named_only_where_nearly_all_do_the_same() -> None:
    health = noted(make(), steady(100))
    assert not found(health, seen(100, heads=heads([0.001] * 8 + [0.5] * 2)))  # attention sinks are normal
    assert set(found(health, seen(110, heads=heads([0.001] * 9 + [0.5])))) == {"heads_on_one_key"}
    assert set(found(health, seen(120, heads=heads([0.999] * 9 + [0.5])))) == {"heads_uniform"}
    assert not found(health, seen(130, heads=heads([0.99] * 10)))
    early = noted(make(), steady(20))
    assert not found(early, seen(20, heads=heads([0.999] * 10)))  # normal early in training


def test_a_closed_head_is_no_collapsed_one() -> None:
    health = noted(make(), steady(100))
    figures, begun, _ = health.judge(seen(100, heads=heads([0.001] * 10, gate_mean=[0.04, 0.06, 0.0] + [1.0] * 7)))
    assert set(begun) == {"heads_closed", "heads_on_one_key"} and figures["health/heads_closed"] == pytest.approx(0.2)
    assert "2 of 10 heads" in begun["heads_closed"] and "0.0, 0.2" in begun["heads_closed"]
    # eight of nine open heads attend to one key, which is less than nine tenths
    figures, begun, ended = health.judge(seen(110, heads=heads([0.001] * 9 + [0.5], gate_mean=[0.0] + [1.0] * 9)))
    assert not begun and set(ended) == {"heads_on_one_key"}
    figures, _, ended = health.judge(seen(120, heads=heads([0.001] * 10, gate_mean=[0.0] * 10)))
    assert figures["health/heads_closed"] == 1 and not ended
    assert "health/heads_closed" not in health.judge(seen(130))[0] and health.failed() == []


def test_growing_logits_are_named_before_they_overflow() -> None:
    health = noted(make(), steady(100))
    assert not found(health, seen(100, heads=heads([0.5], 900)))
    assert "limit: 1000" in found(health, seen(110, heads=heads([0.5], 1100)))["large_logits"]
    assert health.failed() == ["large_logits"]


# ----------------------------------------------------------------------------------------------------------- data


def test_the_end_of_a_fitted_line_is_the_current_loss() -> None:
    value, error = line_end([5 - 0.1 * step for step in range(30)])
    assert value == pytest.approx(5 - 2.9) and error == pytest.approx(0, abs=1e-9)
    draws = np.random.default_rng(3).standard_normal((400, 40)) * 0.2 - 0.05 * np.arange(40)
    values, errors = np.array([line_end(row) for row in draws]).T
    assert np.std(values) == pytest.approx(np.mean(errors), rel=0.15)  # the estimated error is right


def test_validation_below_training_is_a_leak_only_beyond_chance() -> None:
    losses = steady(60, 2.5)
    assert set(found(noted(make(), losses), seen(60))) == {"leak"}  # 2.0, far below
    assert not found(noted(make(), losses), seen(60, {"code": 2.45, "notes": 2.45}))
    assert not found(noted(make(), [loss + 9 * (loss - 2.5) for loss in losses]), seen(60))  # a noisy loss
    for word in ("model.dropout=0.1", "optimizer.average_half_life=100"):  # which part the two losses
        assert not found(noted(make(word), losses), seen(60))
    falling = [2.9 - 0.02 * step for step in range(40)]  # their mean, 2.5, is above 2.12; the last is not
    assert not found(noted(make(), falling), seen(40, {"code": 2.1, "notes": 2.15}))
    # An easy source that is a quarter of the training tokens is no leak.
    assert not found(noted(make(), losses), seen(60, {"code": 2.8, "notes": 1.5}))


def test_a_source_that_rises_while_the_others_fall_is_named() -> None:
    health = noted(make(), steady(60))
    assert not found(health, seen(60, {"code": 2.5, "notes": 2.5}))
    message = found(health, seen(70, {"code": 2.4, "notes": 2.6}))["source_rising"]
    assert "notes rose by 0.100" in message and "data.sources.notes.weight" in message
    assert not found(health, seen(80, {"code": 2.5, "notes": 2.7}))  # both rise: not this
    assert not found(health, seen(90, {"code": 2.4, "notes": 2.71}))  # by too little


@pytest.mark.parametrize(
    ("code", "notes", "proposed"),
    [
        (3.0, 1.0, 1.5),  # weights of any sum
        (None, 0.4, 0.6),  # what the weights leave belongs to the source without one: here 0.6, of which 0.2
        (None, 0.8, 0.9),  # half of what is left
    ],
)
def test_the_proposed_weight_gives_the_source_a_larger_share(code: float | None, notes: float, proposed: float) -> None:
    weight = "" if code is None else f", weight: {code}"
    sources = f"{{code: {{kind: pystdlib{weight}}}, notes: {{kind: text, path: notes/, weight: {notes}}}}}"
    health = noted(make("data=mixture", f"data.sources={sources}"), steady(60))
    found(health, seen(60, {"code": 2.5, "notes": 2.5}))
    message = found(health, seen(70, {"code": 2.4, "notes": 2.6}))["source_rising"]
    assert message.endswith(f"set data.sources.notes.weight={proposed:g}")


def test_overfitting_is_validation_up_training_down_after_an_epoch() -> None:
    late = 1500  # tokens: code is three quarters of them, and has 1000
    health = noted(make(), steady(50, 2.5))
    assert not found(health, seen(50, {"code": 2.6, "notes": 2.6}, tokens=late))
    noted(health, steady(50, 1.9))
    up = {"code": 2.7, "notes": 2.7}
    message = found(health, seen(100, up, tokens=late))["overfitting"]
    assert "from 2.600 at step 50 to 2.700" in message and "checkpoints/best" in message and "train.steps=50" in message
    assert "overfitting" in health.active and not health.failed()  # a warning
    early = noted(make(), steady(50, 2.5))
    found(early, seen(50, {"code": 2.6, "notes": 2.6}))
    assert "overfitting" not in found(noted(early, steady(50, 1.9)), seen(100, up, tokens=1000))


def test_memorised_text_is_overfitting_and_not_a_loss_above_a_uniform_guess() -> None:
    """ln 50 = 3.91: the training loss is far below, and the only evaluation finds the validation loss above."""
    high = {"code": 5.0, "notes": 5.0}
    health = noted(make(), steady(50, 0.2))
    message = found(health, seen(100, high, tokens=5000))["overfitting"]  # code was read 3.75 times
    assert "is 5.000, not below ln V = 3.912" in message and "3.8 epochs" in message and "train.steps=100" in message
    assert not health.failed()
    assert "train.steps=53" in found(noted(make(), steady(50, 0.2)), seen(100, high, tokens=10_000))["overfitting"]
    assert set(found(noted(make(), steady(50, 0.2)), seen(100, high, tokens=1000))) == {"loss_above_uniform"}
    both = found(noted(make(), steady(50, 4.2)), seen(100, high, tokens=5000))
    assert set(both) == {"loss_above_uniform"}


def test_overfitting_is_seen_from_the_first_steps() -> None:
    """A small text is memorised within a few steps, while the training loss falls ever more slowly."""
    losses = [4.0 * math.exp(-step / 8) + 0.2 for step in range(60)]
    health = noted(make(), losses[:12])
    assert not found(health, seen(12, {"code": 3.0, "notes": 3.0}, tokens=1400))
    assert "overfitting" in found(noted(health, losses[12:24]), seen(24, {"code": 3.3, "notes": 3.3}, tokens=2800))


def test_no_remedy_is_a_run_as_short_as_its_warm_up() -> None:
    losses = [4.0 * math.exp(-step / 8) + 0.2 for step in range(60)]
    health = noted(make("optimizer.warmup_steps=12"), losses[:12])
    found(health, seen(12, {"code": 3.0, "notes": 3.0}, tokens=1400))
    message = found(noted(health, losses[12:24]), seen(24, {"code": 3.3, "notes": 3.3}, tokens=2800))["overfitting"]
    assert "train.steps" not in message and "optimizer.weight_decay=" in message


def test_the_most_read_source_counts_for_epochs() -> None:
    health = noted(make(), steady(60))
    figures, begun, _ = health.judge(seen(60, tokens=4000))
    assert figures["health/epochs"] == pytest.approx(3.0) and not begun  # 4000 · 0.75 / 1000
    assert set(found(health, seen(70, tokens=5400))) == {"many_epochs"} and not health.failed()


# ------------------------------------------------------------------------------------------------- every finding


def test_the_page_of_findings_is_the_table_in_the_code() -> None:
    rows = re.findall(r"^\| `(.*)` \| (.*) \| (yes|no) \| (.*) \|$", (ROOT / "docs/health.md").read_text(), re.M)
    assert {name: fails == "yes" for name, _, fails, _ in rows} == FINDINGS


def every_message(notes: Path, folder: Path, *words: str) -> dict[str, str]:
    """A message of each finding of a run with these settings. The run reads the notes as its second source."""
    messages: dict[str, str] = {}
    make = partial(make_health, *words)
    spikes = noted(make("optimizer.clip_norm=9"), [*steady(60), 9.0], [0.5] * 60 + [6.0])
    messages |= found(spikes, seen(61, update_ratios=torch.tensor([0.3])))
    on_one_key = heads([0.001] * 10, largest_logit=1100, gate_mean=[1.0] * 9 + [0.0])
    clipped = noted(make("optimizer.clip_norm=1"), steady(60, 2.5), [3.0] * 60)
    messages |= found(clipped, seen(60, {"code": 2.2, "notes": 2.2}, tokens=5400, heads=on_one_key))
    later = {"code": 2.1, "notes": 2.9}
    messages |= found(noted(clipped, steady(50, 1.9)), seen(110, later, tokens=5400, heads=heads([0.999] * 10)))
    messages |= found(noted(make(), steady(20, 4.2)), seen(20)) | found(noted(make(), steady(60, 3.3)), seen(60))
    reference = notes_reference(notes, folder)[1]
    run = configured("name=a b", *words)
    for text in ("region ", "games, ", "''''' ", None):
        drawn = np.random.default_rng(1).choice(["to", "of", "and", "it"], 80)
        sample = text * 30 if text else " ".join(drawn)
        messages |= found(noted(Health(run, N_VOCAB, DATA, reference), steady(20)), seen(20, texts=[sample] * 5))
    far = Standing(1.3, Expected(1.2, 0.01))
    messages |= found(make(), seen(60, standing=far))
    assert messages.keys() == FINDINGS.keys()
    return messages


@functools.cache  # many messages have the same remedies
def settings_of(*words: str) -> dict[str, object]:
    return flatten(to_plain(configure(RunConfig, "train", list(words))))


MIXTURE = "data.sources={code: {kind: pystdlib}, notes: {kind: text, path: notes/, weight: 0.3}}"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["optimizer=adamw"],
        ["optimizer.weight_decay=0", "optimizer.clip_norm=null"],
        ["model.qk_norm=false"],
        ["attention.implementation=native"],
        ["attention=cosine"],
        ["attention=qk_clip", "model.qk_norm=false"],
        ["data=mixture", MIXTURE],
        ["data=mixture", MIXTURE.replace("pystdlib", "pystdlib, weight: 0.9")],
    ],
)
def test_every_remedy_is_words_of_a_command_line(words: list[str], notes: Path, tmp_path: Path) -> None:
    for name, message in every_message(notes, tmp_path, *words).items():
        if name == "source_rising" and "data=mixture" not in words:
            continue  # a run of one source has no such finding
        remedies = settings_in(message)
        assert remedies or name == "leak", message  # whose remedy is to look at the text
        for remedy in remedies:
            keys = {word.partition("=")[0] for word in remedy}
            kept = [word for word in words if word.partition("=")[0] not in keys]
            before, after = settings_of(*words), settings_of(*kept, *remedy)
            assert {key for key in after if before.get(key) != after[key]} == keys, message
        assert "data.sources" not in message or "data=mixture" in words


# ------------------------------------------------------------------------------------------------ behaviour over a run


def test_a_resumed_run_is_judged_like_an_uninterrupted_one() -> None:
    losses = steady(90)
    losses[70] = 4.0
    whole, first, second = make(), make(), make()
    for health in (whole, first):
        noted(health, losses[:45])
        health.judge(seen(45, {"code": 2.2, "notes": 2.2}))
        noted(health, losses[45:75])
    second.load_state(json.loads(json.dumps(first.state())))
    judged = [noted(health, losses[75:]).judge(seen(90, {"code": 2.1, "notes": 2.3})) for health in (whole, second)]
    assert judged[0] == judged[1] and {"loss_spikes", "source_rising"} <= set(judged[0][1])
    assert whole.state() == second.state()


def test_a_remedy_names_what_is_switched_off_first() -> None:
    def remedy(*words: str) -> str:
        return optimizer_remedy(configure(RunConfig, "train", [*words]))

    off = ("optimizer.clip_norm=null", "optimizer.warmup_steps=0", "optimizer.weight_decay=0")
    assert remedy(*off).startswith("set optimizer.clip_norm=1 optimizer.warmup_steps=100 optimizer.weight_decay=")
    assert remedy("optimizer.matrix_learning_rate=0.03") == "set optimizer.matrix_learning_rate=0.015"
    assert remedy("optimizer=adamw", "optimizer.learning_rate=0.002") == "set optimizer.learning_rate=0.001"
    assert remedy("model.lora_rank=2", "optimizer.learning_rate=0.002", "optimizer.weight_decay=0") == (
        "set optimizer.learning_rate=0.001"  # the only one of these keys that LoRA's factors heed
    )


def test_an_impossible_setting_is_refused() -> None:
    with pytest.raises(UserError, match="health.on_failure"):
        make("health.on_failure=ignore")


def test_text_is_judged_once_the_model_knows_more_than_token_frequencies(tmp_path: Path, notes: Path) -> None:
    run, reference = notes_reference(notes, tmp_path)

    def findings_at(step: int, loss: float) -> set[str]:
        health = noted(Health(run, N_VOCAB, DATA, reference), steady(20, loss))
        figures, found, _ = health.judge(seen(step, {"code": loss, "notes": loss}, texts=["region " * 60] * 5))
        assert figures["health/text/loop_share"] == 1
        return set(found)

    assert not findings_at(54, 3.3)
    assert findings_at(54, 2.5) == {"repeated_word"}
    assert findings_at(55, 3.3) == {"repeated_word", "loss_above_unigram"}
