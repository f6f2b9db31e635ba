"""Measurements of the attention heads during training: which figures are logged, when, and that they are right."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_words

from andrea.api.command_line import configure
from andrea.attention import COMPATIBILITIES, HeadStatistics, attention_weights
from andrea.attention.attend import IMPLEMENTATIONS
from andrea.checkpoint import newest_whole
from andrea.config import AttentionConfig, RunConfig, group_config, parse
from andrea.model import GPT, initialise
from andrea.text.corpus import open_corpus
from andrea.text.shards import IGNORED_TARGET
from andrea.training import evaluation
from andrea.training.evaluation import heatmaps, in_context_nats, probe, probe_batch, scalars, score_figures
from andrea.training.records.run_folder import read_lines

SCALARS = {
    "attention/entropy_nats", "attention/entropy_share", "attention/lowest_entropy_share", "attention/largest_logit",
    "attention/first_token_mass", "attention/highest_first_token_mass",
    "attention/previous_token_mass", "attention/highest_previous_token_mass",
}  # fmt: skip
HEATMAPS = {
    f"attention/heads/{name}"
    for name in ("entropy_nats", "entropy_share", "largest_logit", "first_token_mass", "previous_token_mass")
}


def records_of(tmp_path: Path, name: str) -> list[dict]:
    return read_lines(tmp_path / "runs" / name / "metrics.jsonl")


def test_a_probe_every_so_often_gives_scalars_and_heatmaps(tiny_run, tmp_path):
    assert tiny_run("name=a", "train.steps=10", "train.eval_every=30") == 0
    probed = [record for record in records_of(tmp_path, "a") if "attention/entropy_nats" in record]
    assert [record["step"] for record in probed] == [5, 10]
    for record in probed:
        assert record.keys() >= SCALARS | HEATMAPS
        for name in HEATMAPS:
            assert [len(row) for row in record[name]] == [2, 2]  # layers, heads
        shares = [share for row in record["attention/heads/entropy_share"] for share in row]
        assert all(0 < share <= 1 for share in shares)
        assert record["attention/entropy_share"] == pytest.approx(sum(shares) / 4, rel=1e-5)
        assert record["attention/lowest_entropy_share"] == min(shares)


def test_the_heads_are_probed_twenty_times_a_run(tiny_run, tmp_path, notes):
    words = ["train.steps=40", "train.eval_every=10", "train.save_every=40"]
    tiny_run("name=a", "train.sample_tokens=0", f"data.path={notes / 'abc.py'}", *words)
    probed = [record["step"] for record in records_of(tmp_path, "a") if "attention/entropy_nats" in record]
    assert probed == list(range(2, 41, 2))


def test_the_probe_is_the_weights_of_the_model_in_fp32(tiny_run, tmp_path):
    """Recomputed from the checkpoint, layer by layer, with the public attention_weights."""
    from andrea.text.loader import validation_batches

    tiny_run("name=a", "model.n_kv_head=1")
    checkpoint = newest_whole(tmp_path / "runs" / "a")
    run = parse(RunConfig, checkpoint.state["config"])
    model = GPT(run.model, run.attention, 257)
    model.load_state_dict(checkpoint.model_tensors())
    corpus = open_corpus(run.data, run.tokenizer, tmp_path / "data", lambda line: None)
    (tokens, _) = next(validation_batches(corpus.sources[0].val, 32, 2048 // 32))
    largest, entropy = [], []
    with torch.no_grad():
        x, shared = model.block_inputs(tokens)
        for block in model.blocks:
            query, key, _, function = block.attention.project(block.attention_norm(x), shared=shared)
            weights = attention_weights(query, key, compatibility=function, mask=block.attention.mask)
            scores = function.scores(query, key.expand_as(query)).masked_fill(weights == 0, -math.inf)
            largest.append(scores.amax((0, 2, 3)).tolist())
            entropy.append(-torch.special.xlogy(weights, weights).sum(-1).mean((0, 2)))
            x, _ = block(x, shared)
    *_, record = (record for record in records_of(tmp_path, "a") if "attention/entropy_nats" in record)
    for row, expected in zip(record["attention/heads/largest_logit"], largest, strict=True):
        assert row == pytest.approx(expected, rel=1e-4)
    for row, expected in zip(record["attention/heads/entropy_nats"], entropy, strict=True):
        assert row == pytest.approx(expected.tolist(), rel=1e-4)


def test_the_probe_of_a_short_held_out_text_is_this_text_alone(short_text: Path, tmp_path: Path) -> None:
    """401 tokens are 13 windows of 32, of which the last is not full; the probe could take 64."""
    run = configure(RunConfig, "train", tiny_words(tmp_path, short_text))
    corpus = open_corpus(run.data, run.tokenizer, tmp_path / "data", lambda line: None)
    tokens, targets = probe_batch(corpus, 32)
    val = corpus.sources[0].val[:]
    assert tokens.shape == targets.shape == (13, 32) and len(val) == 401
    assert tokens.flatten()[:400].tolist() == val[:-1].tolist()
    assert targets.flatten()[:400].tolist() == val[1:].tolist()


@pytest.mark.untraced
def test_our_kernel_measures_the_heads_of_every_training_step(tiny_run, tmp_path, notes):
    words = ("precision=fp32", "train.steps=2", "train.log_every=1")
    words += ("train.tokens_per_step=128", "train.micro_batch=3", "train.sample_tokens=0")
    words += ("model.n_layer=1", "model.n_head=1", f"data.path={notes / 'abc.py'}")  # the interpreter is slow
    assert tiny_run("name=fused", "attention.implementation=triton", *words) == 0
    assert tiny_run("name=readable", "attention.implementation=reference", *words) == 0
    fused, readable = (records_of(tmp_path, name) for name in ("fused", "readable"))
    trained = [record for record in fused if "train/loss" in record]
    of_step = {name.replace("attention/", "attention/step/") for name in SCALARS}
    assert len(trained) == 2 and all(record.keys() >= of_step for record in trained)
    ours, theirs = (
        [record["attention/entropy_nats"] for record in records if "attention/entropy_nats" in record]
        for records in (fused, readable)
    )
    assert ours == pytest.approx(theirs, rel=1e-3)  # the probe gives the same figures whatever implementation trains
    assert [record["step"] for record in fused if record.keys() >= HEATMAPS] == [1, 2]
    losses = [[record["train/loss"] for record in records if "train/loss" in record] for records in (fused, readable)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert not any(record.keys() & of_step for record in readable)


@pytest.mark.untraced
@pytest.mark.parametrize("name", [*COMPATIBILITIES, "sliding_window", "packed_documents"])
def test_each_compatibility_function_trains_until_the_loss_falls(name, tiny_run, tmp_path):
    words = ["train.steps=30", "train.log_every=1", "train.sample_tokens=0"]
    words += ["train.eval_every=30", "train.save_every=30"]
    words += {"additive": ["model.position=learned"], "sliding_window": ["attention.window=5"]}.get(name, [])
    assert tiny_run("name=a", f"attention={name}", *words) == 0
    losses = [record["train/loss"] for record in records_of(tmp_path, "a") if "train/loss" in record]
    assert losses[0] > 5 and losses[-1] < 4
    tensors = newest_whole(tmp_path / "runs" / "a").model_tensors()
    learned = [tensor for tensor in tensors if ".compatibility." in tensor]
    assert len(learned) == 2 * {"bilinear": 1, "cosine": 1, "additive": 3}.get(name, 0)
    if name == "cosine":  # what a function learns moves; how far depends on rounding
        sharpness = tensors["blocks.0.attention.compatibility.log_sharpness"]
        assert sharpness.shape == (2,) and ((sharpness - math.log(10)).abs() > 1e-5).all()


def heads_of(**parts) -> HeadStatistics:
    """Two layers, two heads; ten queries each unless `parts` has another number."""
    ten = torch.full((2, 2), 10.0)
    return HeadStatistics(*(parts.get(name, ten) for name in HeadStatistics._fields))


def test_a_head_no_query_counted_for_is_null_and_left_out_of_means():
    heads = heads_of(
        rows=torch.tensor([[10.0, 10.0], [10.0, 0.0]]),
        entropy=torch.tensor([[10.0, 20.0], [30.0, 0.0]]),
        largest_logit=torch.tensor([[1.0, 2.0], [3.0, -math.inf]]),
    )
    assert heatmaps(heads)["attention/heads/entropy_nats"] == [[1.0, 2.0], [3.0, None]]
    figures = scalars(heads)
    assert figures["attention/entropy_nats"] == 2.0
    assert figures["attention/largest_logit"] == 3.0


def test_where_the_kernel_fails_the_textbook_formula_measures_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's failure is one that Triton raises on a GPU for a tile that does not fit."""
    triton = pytest.importorskip("triton")
    model = make_andrea_of_tests()
    tokens = torch.randint(301, (2, 13))
    truth = probe(model, tokens).heads
    for block in model.blocks:
        block.attention.implementation = "triton"

    def fails(case):
        raise triton.errors.TritonError("out of resource: shared memory\nsecond line")

    monkeypatch.setitem(IMPLEMENTATIONS, "triton", IMPLEMENTATIONS["triton"]._replace(run=fails))
    said: list[str] = []
    measured = probe(model, tokens, said.append).heads
    assert torch.equal(measured.entropy, truth.entropy) and torch.equal(measured.largest_logit, truth.largest_logit)
    assert len(said) == 1 and said[0].endswith("out of resource: shared memory")
    assert all(block.attention.implementation == "triton" for block in model.blocks)
    with pytest.raises(triton.errors.TritonError):
        probe(model, tokens)


def make_andrea_of_tests() -> GPT:
    config = group_config("model", "andrea-nano", d_model=48, n_layer=2, n_head=3, d_mlp=64)
    model = GPT(config, AttentionConfig("scaled_dot", "auto"), 301)
    initialise(model, torch.Generator().manual_seed(0))
    return model


# ------------------------------------------------------------------------------------------------------ births of heads


def test_the_recorded_scores_are_those_by_which_the_lens_names_heads(tiny_run, tmp_path, notes):
    from andrea.checkpoint.model import open_model
    from andrea.insight.lens.scores import NAMES, probe_scores

    words = ("train.steps=4", "train.eval_every=2", "train.save_every=2", f"data.path={notes / 'abc.py'}")
    assert tiny_run("name=a", "attention.window=7", *words) == 0
    *_, record = (record for record in records_of(tmp_path, "a") if "attention/entropy_nats" in record)
    newest = str(newest_whole(tmp_path / "runs" / "a").path)
    _, model, tokenizer = open_model(newest, str(tmp_path / "runs"), torch.device("cpu"), False, print)
    for name, scores in probe_scores(model, tokenizer).items():
        recorded = [number for row in record[f"attention/heads/{name}_score"] for number in row]
        expected = [
            None if math.isnan(score) else pytest.approx(score, abs=6e-4) for score in scores.flatten().tolist()
        ]
        assert recorded == expected
        assert record[f"attention/highest_{name}_score"] == (max(recorded) if recorded[0] is not None else None)
    assert record["attention/highest_induction_score"] > 0
    assert {f"attention/heads/{name.score}_score" for name in NAMES} <= record.keys()
    assert math.isfinite(record["attention/in_context_nats"])


def test_the_scores_do_not_change_what_is_learned(tiny_run, tmp_path, notes, monkeypatch):
    words = ("train.steps=6", "train.eval_every=3", "train.log_every=1", f"data.path={notes / 'abc.py'}")
    tiny_run("name=with", *words)
    monkeypatch.setattr(evaluation, "in_context_nats", lambda *_: math.nan)
    monkeypatch.setattr(evaluation, "score_figures", lambda _: {})
    monkeypatch.setattr("andrea.insight.lens.scores.probe_scores", lambda *_: {})
    tiny_run("name=without", *words)
    losses = [[record.get(key) for record in records_of(tmp_path, name) for key in ("train/loss", "val/loss")]
              for name in ("with", "without")]  # fmt: skip
    assert losses[0] == losses[1] and any(losses[0])


class CopiesFromFarBack(torch.nn.Module):
    """A model of two tokens that is sure to see the token `reach` places back again, and knows nothing without it."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.blocks, self.reach, self.config = [], reach, SimpleNamespace(sequence_length=30)

    def forward(self, tokens, statistics):
        hidden = torch.zeros(*tokens.shape, 2)
        hidden[:, self.reach :] = 50 * torch.nn.functional.one_hot(tokens, 2)[:, : -self.reach]
        return hidden, [HeadStatistics(*(torch.ones(1, 1) for _ in range(8)))]

    def logits(self, hidden):
        return hidden


@pytest.mark.parametrize(("reach", "expected"), [(1, 0.0), (13, -math.log(2)), (40, 0.0)])
def test_the_in_context_score_is_what_a_long_context_gains(reach, expected):
    """Solved by hand: windows of 30 tokens, whose last 3 have a context of 28 to 30 tokens, or of 4 to 6 in a short window.

    Both show the token just before; only the long one shows the token 13 places back, which gains ln 2, and neither the 40th.
    """
    tokens = torch.randint(2, (5, 30), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(reach, dims=1)
    targets[0, -2] = IGNORED_TARGET
    model = CopiesFromFarBack(reach)
    hidden = probe(model, tokens).hidden
    assert in_context_nats(model, tokens, targets, hidden) == pytest.approx(expected, abs=1e-6)


def test_there_is_no_in_context_score_without_targets():
    model, tokens = make_andrea_of_tests(), torch.randint(301, (2, 13))
    hidden = probe(model, tokens).hidden
    assert math.isnan(in_context_nats(model, tokens, torch.full_like(tokens, IGNORED_TARGET), hidden))


def test_scores_are_recorded_with_three_digits_and_null_where_no_query_sees_a_target():
    figures = score_figures({"induction": torch.tensor([[0.12345, math.nan], [0.9, 0.3]])})
    assert figures["attention/heads/induction_score"] == [[0.123, None], [0.9, 0.3]]
    assert figures["attention/highest_induction_score"] == 0.9
    assert score_figures({"opener": torch.full((2, 2), math.nan)})["attention/highest_opener_score"] is None
