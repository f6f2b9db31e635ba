"""Tuning on conversations: what comes with the checkpoint, what is chosen, exact resume, and the answers that are learned."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch
from conftest import tiny_words
from safetensors.torch import load_file

from andrea.__main__ import main
from andrea.checkpoint import read_checkpoint
from andrea.checkpoint.model import load_model
from andrea.config import UserError
from andrea.text.chat import SPECIAL, ChatTokenizer

ANSWERS = {"red": "apple", "blue": "sky", "green": "grass", "grey": "stone"}


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("conversations")
    lines = []
    for colour, thing in ANSWERS.items():
        for question in (f"What is {colour}?", f"Name a {colour} thing.", f"{colour}?"):
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": f"The {thing}."}]
            lines.append(json.dumps({"messages": turns}) + "\n")
    (folder / "train.jsonl").write_text("".join(lines))
    (folder / "held_out.jsonl").write_text("".join(lines[::3]))
    return folder


def tuning_words(base: Path, conversations: Path, place: Path, *words: str) -> list[str]:
    return [
        f"init_from={base}", "data=chat", f"data.path={conversations}", f"runs_dir={place / 'runs'}", "device=cpu",
        f"data_dir={place / 'data'}", "logger=none", "name=tuned", "precision=fp32", "compile=off", "threads=1",
        "train.tokens_per_step=256", "train.sample_tokens=8", *words,
    ]  # fmt: skip


def train(words: list[str]) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["train", *words]) == 0
    return said.getvalue()


@pytest.fixture(scope="module")
def tuned(trained: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of 80 steps at high rates, in which the tiny model learns the few answers; and what it printed."""
    place = tmp_path_factory.mktemp("tuned")
    rates = [
        "optimizer.learning_rate=0.01",
        "optimizer.embedding_learning_rate=0.05",
        "optimizer.matrix_learning_rate=0.02",
    ]
    said = train(tuning_words(trained, conversations, place, *rates, "train.steps=80", "train.save_every=40"))
    return place / "runs" / "tuned", said


def test_the_answers_are_learned_and_end(tuned: tuple[Path, str], monkeypatch, capsys) -> None:
    folder, said = tuned
    assert "weights: " in said and "(init_from)" in said
    assert said.splitlines()[-1].startswith("next: ") and said.splitlines()[-1].endswith(" chat=true")
    questions = "".join(f"What is {colour}?\n" for colour in ANSWERS)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(questions.encode())))
    words = [f"checkpoint={folder}", "chat=true", "temperature=0", "device=cpu", "precision=fp32", "threads=1"]
    assert main(["sample", *words]) == 0
    assert capsys.readouterr().out.splitlines() == [f"The {thing}." for thing in ANSWERS.values()]


def test_windows_that_conversations_do_not_fill_are_no_further_epoch(tuned: tuple[Path, str]) -> None:
    """Figures of the same step: of the record, and of the health checks."""
    records = [json.loads(line) for line in (tuned[0] / "metrics.jsonl").read_text().splitlines()]
    epochs = [(each["train/epoch"], each["health/epochs"]) for each in records if "health/epochs" in each]
    assert len(epochs) == 4 and all(ours == pytest.approx(theirs) for ours, theirs in epochs)


def test_rates_and_documents_are_chosen_for_tuning(trained: Path, conversations: Path, tmp_path: Path) -> None:
    said = train(tuning_words(trained, conversations, tmp_path, "train.steps=2", "optimizer.learning_rate=0.004"))
    state = read_checkpoint(tmp_path / "runs" / "tuned" / "checkpoints" / "step-00000002").state
    before = read_checkpoint(max((trained / "checkpoints").glob("step-*"))).state
    config, base = state["config"], before["config"]
    assert config["attention"]["across_documents"] is False and config["train"]["patience"] == 3
    assert config["optimizer"]["learning_rate"] == 0.004
    assert config["optimizer"]["matrix_learning_rate"] == pytest.approx(0.3 * 0.02)
    assert config["model"] == base["model"] and config["tokenizer"]["kind"] == base["tokenizer"]["kind"]
    assert "tokenizer" in said


def test_a_rate_that_is_no_number_is_one_line(trained: Path, conversations: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="optimizer.learning_rate=fast"):
        train(tuning_words(trained, conversations, tmp_path, "optimizer.learning_rate=fast"))


def test_the_rows_of_the_special_tokens_begin_as_the_mean(trained: Path, conversations: Path, tmp_path: Path) -> None:
    """At learning rates of almost nothing the other weights stay as they were."""
    kinds = ("", "embedding_", "matrix_", "convolution_")
    rates = [f"optimizer.{kind}learning_rate=1e-12" for kind in kinds]
    words = [*rates, "optimizer.weight_decay=0", "train.steps=1"]
    train(tuning_words(trained, conversations, tmp_path, *words))
    checkpoint = read_checkpoint(tmp_path / "runs" / "tuned" / "checkpoints" / "step-00000001")
    assert isinstance(checkpoint.tokenizer(), ChatTokenizer)
    model = load_model(checkpoint, checkpoint.tokenizer())
    source = read_checkpoint(max((trained / "checkpoints").glob("step-*")))
    base = load_model(source, source.tokenizer())
    n_vocab = base.n_vocab
    assert model.n_vocab == n_vocab + len(SPECIAL)
    for name, weight in model.state_dict().items():
        before = base.state_dict()[name]
        torch.testing.assert_close(weight[: len(before)], before, rtol=0, atol=1e-6)
        if len(weight) > len(before):
            torch.testing.assert_close(weight[n_vocab:], before.mean(0).expand(4, -1), rtol=0, atol=1e-6)


def test_a_resumed_run_equals_an_uninterrupted_one(trained: Path, conversations: Path, tmp_path: Path) -> None:
    finals = []
    for place, parts in ((tmp_path / "whole", [6]), (tmp_path / "parts", [3, 6])):
        words = tuning_words(trained, conversations, place, "train.save_every=3", "train.eval_every=3")
        train([*words, "train.steps=6", *([] if len(parts) == 1 else ["train.keep=9"])])
        if len(parts) == 2:
            folder = place / "runs" / "tuned" / "checkpoints"
            step_3 = folder / "step-00000003"
            train([f"resume={step_3}", f"runs_dir={place / 'runs'}", f"data_dir={place / 'data'}", "name=again"])
            finals.append(place / "runs" / "again" / "checkpoints" / "step-00000006")
        else:
            finals.append(place / "runs" / "tuned" / "checkpoints" / "step-00000006")
    one, other = (load_file(path / "model.safetensors") for path in finals)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_tuned_model_is_tuned_again_from_the_newest_run(
    tuned: tuple[Path, str], conversations: Path, tmp_path: Path
) -> None:
    runs = tuned[0].parent
    words = tuning_words(Path("auto"), conversations, tmp_path, "train.steps=1")
    said = train(
        [*[word for word in words if not word.startswith(("runs_dir=", "name="))], f"runs_dir={runs}", "name=twice"]
    )
    assert f"weights: {tuned[0]}" in said
    tokenizer = read_checkpoint(runs / "twice" / "checkpoints" / "step-00000001").tokenizer()
    assert isinstance(tokenizer, ChatTokenizer) and tokenizer.n_vocab == tokenizer.base.n_vocab + len(SPECIAL)


def test_a_mixture_with_conversations_keeps_them_apart(
    trained: Path, conversations: Path, notes: Path, tmp_path: Path
) -> None:
    sources = f"{{notes: {{kind: text, path: {notes}}}, talk: {{kind: chat, path: {conversations}, weight: 0.5}}}}"
    words = tuning_words(trained, conversations, tmp_path, "data=mixture", f"data.sources={sources}", "train.steps=1")
    train([word for word in words if word != "data=chat" and not word.startswith("data.path=")])
    config = read_checkpoint(tmp_path / "runs" / "tuned" / "checkpoints" / "step-00000001").state["config"]
    assert config["attention"]["across_documents"] is False and config["train"]["patience"] == 3


def test_bits_per_byte_of_conversations_are_refused(tuned: tuple[Path, str]) -> None:
    with pytest.raises(UserError, match="was tuned on conversations, which tasks=bpb does not judge"):
        main(["evaluate", f"checkpoint={tuned[0]}", "tasks=bpb", "device=cpu"])


def test_an_exported_chat_model_comes_back_as_one(tuned: tuple[Path, str], tmp_path: Path, monkeypatch, capsys) -> None:
    pytest.importorskip("transformers")
    main(["export", f"checkpoint={tuned[0]}", "to=hf", f"out={tmp_path / 'hf'}", f"data_dir={tmp_path / 'data'}"])
    assert main(["import", str(tmp_path / "hf"), f"out={tmp_path / 'back'}"]) == 0
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"What is red?\n")))
    words = [
        f"checkpoint={tmp_path / 'back'}",
        "chat=true",
        "temperature=0",
        "device=cpu",
        "precision=fp32",
        "threads=1",
    ]
    assert main(["sample", *words]) == 0
    assert capsys.readouterr().out == "The apple.\n"


def test_a_base_model_does_not_chat(trained: Path) -> None:
    with pytest.raises(UserError, match="chat=true needs a model that was tuned on conversations"):
        main(["sample", f"checkpoint={trained}", "chat=true"])


def test_conversations_can_be_learned_from_random_weights(conversations: Path, tmp_path: Path) -> None:
    said = train(tiny_words(tmp_path, conversations, "data=chat", "train.steps=2", "name=new"))
    state = read_checkpoint(tmp_path / "runs" / "new" / "checkpoints" / "step-00000002").state
    assert state["config"]["attention"]["across_documents"] is False and state["config"]["train"]["patience"] is None
    assert "done at step 2" in said


def test_factors_are_tuned_with_the_vocabulary(trained: Path, conversations: Path, tmp_path: Path) -> None:
    """With LoRA, the rows of the added tokens are trained too, and the matrices are not; the run resumes."""
    words = tuning_words(trained, conversations, tmp_path, "model.lora_rank=2", "train.steps=2", "train.save_every=1")
    train(words)
    train(
        [f"runs_dir={tmp_path / 'runs'}", f"data_dir={tmp_path / 'data'}", "name=tuned", "resume=auto", "train.steps=3"]
    )
    folder = tmp_path / "runs" / "tuned" / "checkpoints"
    assert read_checkpoint(folder / "step-00000003").state["config"]["optimizer"]["learning_rate"] == 0.01
    one, other = (load_file(folder / f"step-0000000{step}" / "model.safetensors") for step in (2, 3))
    changed = {name for name in one if not torch.equal(one[name], other[name])}
    assert "embedding.weight" in changed
    assert {name.rpartition(".")[2] for name in changed - {"embedding.weight", "head.weight"}} == {"lora_a", "lora_b"}
