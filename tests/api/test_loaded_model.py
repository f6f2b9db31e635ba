"""`andrea.load`: a trained model's text, logits, score and attention weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import run_script

import andrea
from andrea.config import DataConfig, TokenizerConfig, parse
from andrea.insight.lens.trace import trace_layers
from andrea.text.corpus import open_corpus


@pytest.fixture(scope="module")
def model(trained: Path) -> andrea.LoadedModel:
    return andrea.load(trained, device="cpu", precision="fp32")


def test_a_run_is_named_by_its_folder_its_checkpoint_or_its_name(trained: Path) -> None:
    newest = trained / "checkpoints" / "step-00000008"
    by_name = [andrea.load("first", runs_dir=trained.parent), andrea.load(runs_dir=trained.parent)]
    for loaded in (andrea.load(str(trained)), andrea.load(newest), *by_name):
        assert loaded.checkpoint.path == newest
    assert andrea.load(trained / "checkpoints" / "step-00000004").checkpoint.step == 4
    assert loaded.config["model"]["d_model"] == loaded.model.config.d_model == 32
    assert "step 8" in repr(loaded)


def test_generate_writes_what_sample_py_writes(model, trained: Path, script, capsys) -> None:
    prompt, words = "def main(", ["max_new_tokens=40", "seed=7", "top_k=20", "precision=fp32", "device=cpu"]
    code, out, _ = run_script(script("sample"), [f"checkpoint={trained}", f"prompt={prompt}", *words], capsys)
    text = model.generate(prompt, max_new_tokens=40, seed=7, top_k=20)
    assert code == 0 and out == f"{prompt}{text}\n" and len(text) > 10
    assert "".join(model.stream(prompt, max_new_tokens=40, seed=7, top_k="20")) == text
    ids = [model.tokenizer.end_of_text, *model.tokenizer.encode(prompt)]
    assert model.generate(torch.tensor(ids), max_new_tokens=40, seed=7, top_k=20) == text


def test_keywords_are_checked_as_the_keys_of_sample_yaml_are(model) -> None:
    wrong = {
        "max_new_token=": ({"max_new_token": 5}, "did you mean max_new_tokens"),
        "num_samples": ({"num_samples": 2}, "unknown keyword num_samples"),
        "temperature": ({"temperature": -1}, "temperature=-1"),
        "stop": ({"stop": ""}, "stop='' is empty"),
    }
    for keywords, message in wrong.values():
        with pytest.raises(andrea.UserError, match=message):
            model.stream("a", **keywords)  # before any piece is asked for
    assert model.generate("a", stop="e", max_new_tokens=30, temperature=1).count("e") == 0


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "top_k": 30, "lookahead": 3}])
def test_each_text_of_a_list_is_the_text_of_its_prompt_alone(model, sampling) -> None:
    prompts = ["def main(", "", [5, 6, 7], "import this and more than fits into the window", "x", np.array([9])]
    texts = model.generate(prompts, max_new_tokens=40, seed=3, **sampling)
    alone = [
        model.generate(prompt, max_new_tokens=40, seed=3 + index, **sampling) for index, prompt in enumerate(prompts)
    ]
    assert texts == alone and len(set(texts)) == len(prompts)


def test_a_prompt_longer_than_the_window_is_cut_as_sample_py_cuts_it(model, trained: Path, script, capsys) -> None:
    prompt, words = "never mind the beginning: def main(x", ["max_new_tokens=20", "precision=fp32", "device=cpu"]
    code, out, err = run_script(script("sample"), [f"checkpoint={trained}", f"prompt={prompt}", *words], capsys)
    text = model.generate(prompt, max_new_tokens=20)
    said = "prompt has 36 tokens: its beginning is cut, and the model reads the last 32"
    assert code == 0 and out == f"{prompt}{text}\n" and said in err and said in capsys.readouterr().err
    assert model.generate(list(prompt.encode()), max_new_tokens=20) == text
    assert model.generate([prompt], max_new_tokens=20) == [text]


def test_a_list_that_memory_does_not_hold_is_a_user_error(model) -> None:
    with pytest.raises(andrea.UserError, match="the list has 2000 prompts"):
        model.generate(["a"] * 2000, max_new_tokens=100000)


@pytest.mark.parametrize("ids", [[], [-1], [257], [0.5], 3, None], ids=str)
def test_ids_that_no_model_reads_are_user_errors(model, ids) -> None:
    for method in (model.generate, model.logits, model.attention, model.hidden_states):
        with pytest.raises(andrea.UserError):
            method(ids)


def test_text_longer_than_the_window_has_no_logits(model) -> None:
    for method in (model.logits, model.attention, model.hidden_states):
        with pytest.raises(andrea.UserError, match=r"the model sees at most model\.sequence_length=32"):
            method("x" * 33)
        with pytest.raises(andrea.UserError, match=r"from 1 to model\.sequence_length=32"):
            method([0] * 33)


def test_a_run_that_is_not_there_is_a_user_error(trained: Path) -> None:
    with pytest.raises(andrea.UserError, match="did you mean first"):
        andrea.load("frist", runs_dir=trained.parent)


def test_logits_are_the_model_s_own(model) -> None:
    text = "import this"
    logits = model.logits(text)
    tokens = torch.tensor([[model.tokenizer.end_of_text, *text.encode()]])
    assert logits.shape == (len(text) + 1, model.tokenizer.n_vocab) and not logits.requires_grad
    torch.testing.assert_close(logits, model.model.logits(model.model(tokens))[0])
    likeliest = model.generate(text, max_new_tokens=1, temperature=0, repetition_penalty=1)
    assert likeliest == model.tokenizer.decode([int(logits[-1].argmax())])


def test_attention_has_each_head_s_weights(model) -> None:
    weights = model.attention("import this")
    assert weights.shape == (2, 2, 12, 12)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 12))
    assert not weights.triu(1).any()  # causal


def test_hidden_states_are_what_layers_and_head_read(model) -> None:
    text = "import this"
    states = model.hidden_states(text)
    assert states.shape == (3, 12, 32) and not states.requires_grad
    torch.testing.assert_close(model.model.logits(model.model.final_norm(states[-1])), model.logits(text))
    traced = [layer.before[0] for layer in trace_layers(model.model, model.batch_of(text))]
    torch.testing.assert_close(states[:-1], torch.stack(traced))


def test_each_token_has_its_log_probability(model) -> None:
    text = "für immer"
    ids = list(text.encode())
    expected = model.logits(text).log_softmax(-1)[:-1].gather(-1, torch.tensor(ids)[:, None])[:, 0]
    torch.testing.assert_close(model.log_probabilities(text), expected)
    with_end = [model.tokenizer.end_of_text, *ids]
    torch.testing.assert_close(model.log_probabilities(with_end), expected)
    assert model.log_probabilities("").shape == model.log_probabilities([7]).shape == (0,)


@pytest.mark.parametrize("n", [31, 32, 33, 64, 65, 500])
def test_a_long_text_is_read_in_windows(model, n: int) -> None:
    ids = torch.randint(256, (n + 1,), generator=torch.Generator().manual_seed(n))
    windows = [model.logits(ids[start : start + 32]).log_softmax(-1) for start in range(0, n, 32)]
    expected = torch.cat(windows)[:n].gather(-1, ids[1:, None])[:, 0]
    torch.testing.assert_close(model.log_probabilities(ids), expected)
    assert model.log_probabilities(ids).shape == (n,)


def test_a_short_text_s_score_is_the_sum_of_its_log_probabilities(model) -> None:
    text = "für immer"
    log_probabilities = model.logits(text).log_softmax(-1)
    ids = list(text.encode())
    nats = -sum(float(log_probabilities[place, token]) for place, token in enumerate(ids))
    assert model.score(text) == pytest.approx(nats / np.log(2) / len(ids), rel=1e-5)
    with pytest.raises(andrea.UserError, match="at least one byte"):
        model.score("")


def test_a_long_text_s_score_is_the_evaluation_s(model, trained: Path) -> None:
    """The held-out tokens as ids, read over the same windows as the run's last evaluation."""
    config = model.config
    data, tokenizer = (
        parse(DataConfig, config["data"], "data"),
        parse(TokenizerConfig, config["tokenizer"], "tokenizer"),
    )
    corpus = open_corpus(data, tokenizer, Path(config["data_dir"]), print)
    records = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    evaluated = [record["val/bpb"] for record in records if "val/bpb" in record]
    assert model.score(np.asarray(corpus.sources[0].val[:])) == pytest.approx(evaluated[-1], rel=1e-5)
