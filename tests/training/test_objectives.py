"""DPO and GRPO: cases solved by hand, what is read as a pair, runs that learn, exact resume, ranks, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, tiny_words, torchrun
from safetensors.torch import load_file

from andrea.__main__ import main
from andrea.checkpoint import checkpoints_of, newest_whole
from andrea.config import UserError
from andrea.text.chat import ASSISTANT, USER, ConversationWindows, Turn, encode_conversation, for_chat
from andrea.text.formats import pair_of
from andrea.text.shards import IGNORED_TARGET, TokenStream
from andrea.text.tokenizer import ByteTokenizer
from andrea.training.objectives.dpo import DPO
from andrea.training.objectives.grpo import GRPO, Prompts, windows_of_answers
from andrea.training.objectives.objective import target_log_probabilities
from andrea.training.records.run_folder import read_lines

TOKENIZER = for_chat(ByteTokenizer())
END_OF_TEXT = 3  # of the cases solved by hand
LETTERS = "abcd"
RATES = [f"optimizer.{kind}learning_rate=0.01" for kind in ("", "embedding_", "matrix_")]
LENGTH = ["train.steps=24", "train.eval_every=8", "train.save_every=8", "train.keep=9", "train.log_every=1"]
REWARDED = ["objective.reward=rewards.likes_a", "train.patience=null", "optimizer.weight_decay=4"]  # the run `grpo`
TIMINGS = ("seconds", "tokens_per_second", "memory", "checkpoint")


# ------------------------------------------------------------------------------------------------------ solved by hand


class Table:
    """A model of two tokens, 0 and 1, whose logits are its `hidden`: what it computes can be checked by hand."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden

    def __call__(self, tokens: torch.Tensor, call_block: Any) -> torch.Tensor:
        return self.hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def dpo(beta: float, reference: Table) -> DPO:
    made = DPO.__new__(DPO)
    made.reference, made.beta, made.end_of_text = reference, beta, END_OF_TEXT
    made.bytes_of_token = torch.ones(2, dtype=torch.int64)
    return made


def test_the_loss_and_the_gradient_of_a_pair_are_those_of_equation_7() -> None:
    """The chosen answer is token 0 twice, the rejected one token 1 once: ln π of an answer is a sum over its tokens."""
    tokens = torch.tensor([[END_OF_TEXT, 0, 0, END_OF_TEXT, 1, 1]])
    targets = torch.tensor([[0, 0, IGNORED_TARGET, 1, IGNORED_TARGET, IGNORED_TARGET]])
    p, q = torch.tensor([0.8, 0.5, 0.5, 0.6, 0.5, 0.5]), torch.tensor([0.5, 0.25, 0.5, 0.5, 0.5, 0.5])  # of token 0
    logits = torch.stack([p, 1 - p], 1).log()[None].requires_grad_()
    objective = dpo(0.5, Table(torch.stack([q, 1 - q], 1).log()[None]))
    loss, *counts = objective.sums(Table(logits), None, logits, tokens, targets, None)
    pairs, margin, right, nats, n_byte = (each.item() for each in counts)
    by_hand = 0.5 * (math.log(0.8 / 0.5) + math.log(0.5 / 0.25) - math.log(0.4 / 0.5))
    assert margin == pytest.approx(by_hand)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-by_hand)))
    assert (pairs, right, n_byte) == (1, 1, 2)
    assert nats == pytest.approx(-math.log(0.8 * 0.5))
    loss.backward()
    weight = 0.5 / (1 + math.exp(by_hand))  # β σ(-margin), equation 7's gradient
    assert logits.grad[0, 0].tolist() == pytest.approx([-weight * 0.2, weight * 0.2])
    assert logits.grad[0, 3].tolist() == pytest.approx([-weight * 0.6, weight * 0.6])
    assert not logits.grad[0, [2, 4, 5]].any()
    summary = objective.summary([loss.item(), pairs, margin, right, nats, n_byte])
    assert summary["accuracy"] == 1 and summary["bpb"] == pytest.approx(-math.log2(0.4) / 2)


def test_a_model_equal_to_its_reference_decides_half_of_the_pairs() -> None:
    tokens = torch.tensor([[END_OF_TEXT, 0, END_OF_TEXT, 1, END_OF_TEXT, 1, END_OF_TEXT, 0, 0]])
    targets = torch.tensor([[0, -100, 1, -100, 1, -100, 0, -100, -100]])
    logits = torch.randn(1, 9, 2)
    sums = dpo(0.1, Table(logits)).sums(Table(logits), None, logits, tokens, targets, None)
    assert sums[:4].tolist() == pytest.approx([2 * math.log(2), 2, 0, 1])


def grpo(beta: float = 0.0, reference: Table | None = None) -> GRPO:
    made = GRPO.__new__(GRPO)
    made.reference, made.config = reference, SimpleNamespace(beta=beta)
    return made


def test_the_gradient_of_two_answers_is_the_advantage_times_that_of_ln_p() -> None:
    """A right answer, token 0 with probability 1/4, and a wrong one: advantages of 1/2 and -1/2."""
    logits = torch.tensor([[0.25, 0.75]] * 2).log()[None].requires_grad_()
    targets, weights = torch.tensor([[0, 1]]), torch.tensor([[0.5, -0.5]])
    total = grpo().sums(Table(logits), None, logits, targets, targets, weights)
    assert float(total) == pytest.approx(-0.5 * math.log(0.25) + 0.5 * math.log(0.75))
    total.backward()
    by_hand = [-0.5 * 0.75, 0.5 * 0.75, -0.5 * 0.25, 0.5 * 0.25]  # both raise token 0 and lower token 1
    assert logits.grad.flatten().tolist() == pytest.approx(by_hand)


def test_the_divergence_is_added_for_each_token_of_an_answer() -> None:
    p, q = torch.tensor([0.25, 0.5, 0.5]), torch.tensor([0.5, 0.1, 0.5])
    logits, theirs = (torch.stack([each, 1 - each], 1).log()[None] for each in (p, q))
    targets, weights = torch.tensor([[0, IGNORED_TARGET, 1]]), torch.zeros(1, 3)
    total = grpo(0.3, Table(theirs)).sums(Table(logits), None, logits, targets, targets, weights)
    assert float(total) == pytest.approx(0.3 * (2 - math.log(2) - 1))  # ρ - ln ρ - 1 with ρ = 0.5 / 0.25; 0 where ρ = 1


def test_over_all_groups_the_gradient_is_that_of_the_mean_reward() -> None:
    """Of groups of G answers, each of one of two tokens, drawn by the model: (1 - 1/G) times the gradient of its reward."""
    logits, reward = torch.tensor([0.3, -0.5], requires_grad=True), torch.tensor([1.0, -2.0])
    (expected,) = torch.autograd.grad(-(logits.softmax(0) * reward).sum(), logits)
    total = torch.zeros(2)
    for group in itertools.product((0, 1), repeat=3):
        answers = torch.tensor([group])
        rewards = reward[answers]
        hidden = logits.expand(1, 3, 2)
        loss = grpo().sums(Table(hidden), None, hidden, answers, answers, rewards - rewards.mean())
        (gradient,) = torch.autograd.grad(loss / 3, logits)
        total += logits.detach().softmax(0)[answers].prod() * gradient
    torch.testing.assert_close(total, (1 - 1 / 3) * expected)


def test_log_probabilities_are_those_of_the_targets() -> None:
    logits = torch.randn(2, 3, 5)
    targets = torch.tensor([[4, IGNORED_TARGET, 0], [IGNORED_TARGET] * 3])
    found = target_log_probabilities(Table(logits), logits, targets)
    expected = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets >= 0)
    torch.testing.assert_close(found, expected)


# ------------------------------------------------------------------------------------------------ pairs and prompts


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED, GOOD, BAD = message(USER, "q"), message(ASSISTANT, "good"), message(ASSISTANT, "bad")


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        {"prompt": "q", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        {"prompt": [ASKED], "chosen": "good", "rejected": "bad", "messages": [ASKED, GOOD]},
    ],
)
def test_the_forms_of_a_pair(record: dict[str, Any]) -> None:
    expected = [[Turn(USER, "q"), Turn(ASSISTANT, answer)] for answer in ("good", "bad")]
    assert list(pair_of(record)) == expected


@pytest.mark.parametrize(
    "record",
    [
        {"chosen": "good", "rejected": "bad"},
        {"prompt": "q", "chosen": "good", "rejected": "good"},
        {"prompt": "q", "chosen": "good", "rejected": ""},
        {"prompt": "q", "chosen": "good", "rejected": None},
        {"chosen": [ASKED, GOOD], "rejected": [message(USER, "other"), BAD]},
        {"chosen": [ASKED, GOOD], "rejected": [ASKED]},
        {"prompt": 3, "chosen": [3], "rejected": {}},
    ],
)
def test_what_is_no_pair(record: dict[str, Any]) -> None:
    assert pair_of(record) is None


def stream_of(*conversations: list[Turn]) -> TokenStream:
    tokens = [token for turns in conversations for token in encode_conversation(TOKENIZER, turns)]
    return TokenStream([np.array(tokens, dtype=np.uint16)])


def test_a_pair_stays_in_one_window() -> None:
    pairs = [("a" * n, "b" * (n % 5 + 1)) for n in (1, 7, 3, 40, 2, 9, 4, 4)]
    stream = stream_of(*([Turn(USER, "q"), Turn(ASSISTANT, answer)] for pair in pairs for answer in pair))
    windows = ConversationWindows(stream, 50, TOKENIZER, pairs=True)
    read = [windows.read(window) for window in range(len(windows))]
    found = []
    for tokens, _ in read:
        conversations = TOKENIZER.base.decode([t for t in tokens.tolist() if t < 256]).split("q")[1:]
        found += list(zip(conversations[::2], conversations[1::2], strict=True))
    assert found == [pair for pair in pairs if len(pair[0]) < 40] and windows.n_left_out == 1
    assert windows.n_target.sum() == len(pairs) - 1
    assert "1 pairs of conversations are longer" in windows.describe()


def test_prompts_end_before_each_answer() -> None:
    turns = [Turn("system", "s"), Turn(USER, "one"), Turn(ASSISTANT, "1"), Turn(USER, "two"), Turn(ASSISTANT, "22")]
    stream = stream_of(turns, turns[1:3])
    prompts = Prompts([stream, stream], TOKENIZER)
    assert len(prompts.places) == 6
    for shift in (0, 3):
        assert prompts.words(shift) == (turns[:2], "1")
        assert prompts.words(shift + 1) == (turns[:4], "22")
        assert prompts.words(shift + 2) == (turns[1:2], "1")
        assert prompts.prompt(shift + 1) == [*encode_conversation(TOKENIZER, turns[:4]), TOKENIZER.assistant]
    assert prompts.lengths()[:3, 1].tolist() == [2, 3, 2]


def test_answers_fill_windows_and_are_alone_the_targets() -> None:
    texts = [([1, 2], [3, 4], 0.5), ([5], [6], -1.0), ([7, 8, 9], [10], 2.0)]
    tokens, targets, weights = windows_of_answers(texts, 7)
    assert tokens.tolist() == [[1, 2, 3, 4, 5, 6, 0], [7, 8, 9, 10, 0, 0, 0]]
    assert targets.tolist() == [[-100, 3, 4, -100, 6, -100, -100], [-100, -100, 10, -100, -100, -100, -100]]
    assert weights.tolist() == [[0, 0.5, 0.5, 0, -1, 0, 0], [0, 0, 2, 0, 0, 0, 0]]
    assert [len(each) for each in windows_of_answers([], 7)] == [0, 0, 0]


# --------------------------------------------------------------------------------------------------------------- runs


def write(folder: Path, records: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    for name, lines in (("train", records), ("held_out", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and the run `talker`, which has learned to answer with any of four letters."""
    place = tmp_path_factory.mktemp("objectives")
    talk = [
        {"messages": [message(USER, f"{n}?"), message(ASSISTANT, LETTERS[n * 7 % 11 % 4])]} for n in range(100, 180)
    ]
    write(place / "talk", talk[:64], talk[64:])
    pairs = [{"prompt": f"{n}?", "chosen": "a", "rejected": LETTERS[1 + n % 3]} for n in range(100, 180)]
    write(place / "pairs", pairs[:64], pairs[64:])
    long = [{"messages": [message(USER, "x" * 40), message(ASSISTANT, "a")]}]
    write(place / "long", long, long)
    (place / "rewards.py").write_text(
        "import math\n"
        "def likes_a(turns, answer, reference):\n"
        "    assert turns[-1].role == 'user' and reference in 'abcd'\n"
        "    return float(answer == 'a')\n"
        "def raises(turns, answer, reference):\n    raise KeyError('no such thing')\n"
        "def is_nan(turns, answer, reference):\n    return math.nan\n"
        "not_a_function = 3\n"
    )
    more = [
        "name=talker",
        "precision=fp32",
        "device=cpu",
        "train.steps=60",
        "train.eval_every=60",
        "train.save_every=60",
    ]
    assert main(["train", *tiny_words(place, place / "talk", "data=chat", *RATES, *more)]) == 0
    return place


def words(place: Path, kind: str, *more: str) -> list[str]:
    data = place / ("pairs" if kind == "dpo" else "talk")
    given = [f"init_from={place / 'runs' / 'talker'}", "data=chat", f"objective={kind}", "precision=fp32", "device=cpu"]
    typed = tiny_words(place, data, *given, *RATES, "train.tokens_per_step=512", "train.sample_tokens=0", *more)
    return [word for word in typed if word in more or not word.startswith(("model.", "tokenizer="))]


def records_of(place: Path, name: str) -> list[dict[str, Any]]:
    rows = read_lines(place / "runs" / name / "metrics.jsonl")
    return [{key: row[key] for key in row if not any(word in key for word in TIMINGS)} for row in rows]


def assert_equal(place: Path, *names: str) -> None:
    """The last weights of two runs are equal, bit for bit."""
    one, other = (load_file(checkpoints_of(place / "runs" / name)[-1] / "model.safetensors") for name in names)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def figures(place: Path, name: str, key: str) -> list[float]:
    return [row[key] for row in records_of(place, name) if key in row]


@pytest.fixture(scope="module")
def learned(place: Path) -> Path:
    """The runs `dpo` and `grpo`, whose first evaluation comes after a step at a rate of almost nothing."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(place))
        assert main(["train", *words(place, "dpo", "name=dpo", *LENGTH)]) == 0
        assert main(["train", *words(place, "grpo", "name=grpo", *LENGTH, *REWARDED)]) == 0
    return place


def test_dpo_learns_what_is_preferred(learned: Path) -> None:
    assert figures(learned, "dpo", "train/loss")[0] == pytest.approx(math.log(2), abs=1e-6)  # equal to its reference
    accuracy, margin = (figures(learned, "dpo", f"val/{name}") for name in ("accuracy", "margin"))
    assert accuracy[-1] >= 0.9 and 0 < margin[0] < margin[-1], (accuracy, margin)
    state = newest_whole(learned / "runs" / "dpo").state
    assert state["best_bpb"] == min(figures(learned, "dpo", "val/loss"))
    assert state["config"]["train"]["teachers"] == [str(checkpoints_of(learned / "runs" / "talker")[-1])]


def test_grpo_learns_what_is_rewarded(learned: Path) -> None:
    drawn, equal = (figures(learned, "grpo", f"train/{name}") for name in ("reward", "equal_groups"))
    assert drawn[0] < 0.6 and drawn[-1] > 0.9, drawn
    assert min(equal) < 0.5 and equal[-1] == 1  # in the end, nothing is left to learn
    assert figures(learned, "grpo", "val/reward")[-1] == 1
    assert newest_whole(learned / "runs" / "grpo").state["best_bpb"] == 0  # 1 - reward


def test_an_epoch_of_rewarded_answers_is_that_of_their_prompts(learned: Path, monkeypatch) -> None:
    """A step has 6 of 64 prompts: 8 answers to each, with 10 tokens each time, are the 512 tokens of a step."""
    monkeypatch.syspath_prepend(str(learned))
    reward = "objective.reward=rewards.likes_a"
    assert main(["train", *words(learned, "grpo", "name=epochs", *LENGTH, reward)]) == 0
    assert figures(learned, "epochs", "train/epoch")[-1] == pytest.approx(24 * 6 / 64, rel=0.1)
    assert figures(learned, "epochs", "health/epochs")[-1] == pytest.approx(24 * 6 / 64, rel=0.1)
    assert not any(figures(learned, "epochs", "health/findings/many_epochs"))
    # By hand: 0.06 for each epoch after the first, times (parameters / tokens)^0.7. Each token was taken to be read 19 times.
    assert newest_whole(learned / "runs" / "epochs").state["config"]["optimizer"]["weight_decay"] < 2


@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_a_resumed_run_equals_an_uninterrupted_one(kind: str, learned: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(learned))
    step_8 = learned / "runs" / kind / "checkpoints" / "step-00000008"
    places = [f"runs_dir={learned / 'runs'}", f"data_dir={learned / 'data'}", f"name={kind}-again"]
    reward = ["objective.reward=rewards.likes_a"] if kind == "grpo" else []
    assert main(["train", f"resume={step_8}", *places, *reward]) == 0
    assert_equal(learned, kind, f"{kind}-again")
    after = [row for row in records_of(learned, kind) if row["step"] > 8]
    assert [row for row in records_of(learned, f"{kind}-again") if row["step"] > 8] == after


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_only_factors_of_low_rank_are_trained_if_asked(kind: str, place: Path) -> None:
    more = ["model.lora_rank=2", "train.steps=2", "objective.beta=0.1", f"name=lora-{kind}"]
    assert main(["train", *words(place, kind, *more)]) == 0
    before, after = (
        load_file(checkpoints_of(place / "runs" / name)[-1] / "model.safetensors")
        for name in ("talker", f"lora-{kind}")
    )
    frozen = [name for name in before if name.startswith("blocks.") and name.endswith("weight")]
    assert frozen and all(torch.equal(before[name], after[name]) for name in frozen)
    assert any(name.endswith("lora_b") and after[name].any() for name in after)


def test_the_chosen_answers_of_pairs_are_conversations(place: Path, capsys) -> None:
    kept = [word for word in words(place, "dpo", "train.steps=1", "name=chosen") if not word.startswith("objective")]
    assert main(["train", *kept]) == 0
    assert "read the chosen answers alone of 80 pairs; objective=dpo learns from both" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sharing"), [pytest.param("dpo", "ddp", marks=pytest.mark.long), ("dpo", "fsdp"), ("grpo", "ddp")]
)
def test_two_ranks_equal_one(kind: str, sharing: str, place: Path) -> None:
    more = ["train.steps=6", "train.eval_every=3", "train.save_every=6", "objective.beta=0.1", "train.log_every=1"]
    more += [f"train.tokens_per_step={5 * 512}"]
    names = [f"{kind}-{sharing}-{ranks}" for ranks in (1, 2)]
    assert main(["train", *words(place, kind, *more, f"name={names[0]}")]) == 0
    process = torchrun(2, words(place, kind, *more, f"name={names[1]}", f"parallel={sharing}"))
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    # A change that makes both answers of a pair likelier has no gradient but the rounding of sums, which Adam amplifies: it
    # shows in the bits per byte of the chosen answers and in the heads, and not in the loss.
    for row, its in zip(*(records_of(place, name) for name in names), strict=True):
        for key, value in row.items():
            if isinstance(value, float):
                is_of_loss = key.startswith(("train/", "val/")) and key != "val/bpb"
                # A head's score is written with three digits.
                written = 1.5e-3 if key.startswith("attention/") else 1e-5
                close = pytest.approx(its[key], rel=1e-4 if is_of_loss else 2e-2, abs=written)
                assert value == close, (key, row["step"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(kind: str, learned: Path) -> None:
    """SIGKILL three times, at other moments of a step each time; `learned` has the uninterrupted run."""
    name, run = f"name={kind}-killed", learned / "runs" / f"{kind}-killed"
    settings = REWARDED if kind == "grpo" else []
    places = [f"runs_dir={learned / 'runs'}", f"data_dir={learned / 'data'}"]
    given = words(learned, kind, *LENGTH, *settings, name)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(learned)))}
    for last, delay_s in ((8, 0.05), (8, 0.4), (16, 0.2)):
        process = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *given], env=environment)
        limit = time.monotonic() + 300
        while process.poll() is None and not (run / "checkpoints" / f"step-{last:08}").exists():
            assert time.monotonic() < limit
            time.sleep(0.01)
        time.sleep(delay_s)
        process.kill()
        process.wait()
        given = ["resume=auto", name, *places, *settings[:1]]  # the reward
    assert subprocess.run([sys.executable, str(ROOT / "train.py"), *given], env=environment).returncode == 0
    assert_equal(learned, kind, f"{kind}-killed")
    assert records_of(learned, kind) == records_of(learned, f"{kind}-killed")


@pytest.mark.parametrize("kind", ["next_token", "dpo"])
def test_a_run_without_a_checkpoint_begins_again_from_its_model_and_never_from_random_weights(
    kind: str, place: Path
) -> None:
    name, run = f"name=early-{kind}", place / "runs" / f"early-{kind}"
    given, places = words(place, kind, "train.steps=2", name), [f"{of}_dir={place / of}" for of in ("runs", "data")]
    assert main(["train", *given]) == 0
    before, records = load_file(checkpoints_of(run)[-1] / "model.safetensors"), records_of(place, run.name)
    shutil.rmtree(run / "checkpoints")  # what is there if it is killed early
    with pytest.raises(
        UserError, match=r"has no checkpoint yet; type the command .* with init_from=.*talker.*step-00000060"
    ):
        main(["train", name, "resume=auto", *places])
    shutil.copytree(place / "runs" / "talker", place / "runs" / f"other-{kind}")
    other = [word for word in given if not word.startswith("init_from=")]
    with pytest.raises(UserError, match="exists; continue it with resume=auto"):
        main(["train", *other, f"init_from={place / 'runs' / f'other-{kind}'}"])
    assert main(["train", *given]) == 0
    after = load_file(checkpoints_of(run)[-1] / "model.safetensors")
    assert all(torch.equal(before[key], after[key]) for key in before) and records == records_of(place, run.name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("dpo", marks=pytest.mark.long), "grpo"])
def test_compiled_blocks_give_the_same_loss(kind: str, place: Path) -> None:
    more = ["train.steps=2", "objective.beta=0.1", "train.log_every=1"]
    for mode in ("off", "on"):
        assert main(["train", *words(place, kind, *more, f"compile={mode}", f"name={kind}-{mode}")]) == 0
    losses = [figures(place, f"{kind}-{mode}", "train/loss") for mode in ("off", "on")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.slow
def test_grpo_with_sharded_weights_is_refused(place: Path) -> None:
    process = torchrun(2, words(place, "grpo", "name=sharded", "parallel=fsdp"))
    out, _ = process.communicate(timeout=300)
    assert (
        process.returncode and "objective=grpo draws answers with the whole model on each rank; set parallel=ddp" in out
    )


# ------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("kind", "more", "named"),
    [
        ("grpo", ["data=text"], "objective=grpo learns from conversations, got data=text; set data=chat or data=python_chat"),
        ("dpo", ["data=python_chat", "data.path=null"], "objective=dpo learns from pairs of a chosen and a rejected answer"),
        ("dpo", ["attention.across_documents=true"], "set attention.across_documents=false"),
        ("dpo", ["objective.beta=0"], "objective.beta=0 leaves objective=dpo nothing to learn"),
        ("grpo", ["train.teachers=talker"], "takes none; leave train.teachers out"),
        ("grpo", ["objective.answers=1"], "objective.answers=1 must be from 2"),
        ("grpo", ["data=mixture", "data.path=null", "data.sources={{a: {{kind: chat, path: {place}/talk, weight: 0.5}}}}"],
         "data.sources.a.weight=0.5 is not read by objective=grpo, which asks all prompts equally often"),
        ("dpo", ["data.path={place}/talk"], 'without the fields "chosen" and "rejected"'),
        ("grpo", ["data.path={place}/long"], "no prompt and its answer fit into model.sequence_length=32 together"),
        ("grpo", ["objective.reward=rewards.raises"], "objective.reward=rewards.raises raised KeyError: 'no such thing'"),
        ("grpo", ["objective.reward=rewards.is_nan"], "objective.reward=rewards.is_nan returned nan for the answer"),
        ("grpo", ["objective.reward=rewards.not_a_function"], "is 3; it must be a function"),
        ("grpo", ["objective.reward=rewards.absent"], "absent is not in the module rewards"),
        ("grpo", ["objective.reward=exact"], "did you mean exact_match?"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_named(
    kind: str, more: list[str], named: str, place: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.syspath_prepend(str(place))
    more = [word.format(place=place) for word in more]
    with pytest.raises(UserError) as refused:
        main(["train", *words(place, kind, f"name={tmp_path.name}", *more)])
    assert named in str(refused.value) and "\n" not in str(refused.value)


def test_a_reward_that_fails_late_costs_no_step(place: Path, monkeypatch) -> None:
    draw = GRPO.draw

    def fails_at_step_4(objective: GRPO, step: int, model: Any) -> Any:
        if step == 3:
            objective.reward = lambda *given: 1 / 0
        return draw(objective, step, model)

    monkeypatch.setattr(GRPO, "draw", fails_at_step_4)
    with pytest.raises(UserError, match="objective.reward=exact_match raised ZeroDivisionError"):
        main(["train", *words(place, "grpo", "name=late", "train.eval_every=12", "train.save_every=12")])
    assert newest_whole(place / "runs" / "late").step == 3


def test_a_model_that_does_not_answer_is_refused(place: Path, trained: Path) -> None:
    given = [word for word in words(place, "grpo") if not word.startswith("init_from")]
    with pytest.raises(UserError, match="objective=grpo improves a model that answers already; set init_from=…"):
        main(["train", *given])
    with pytest.raises(UserError, match="has no tokens for turns; tune it on conversations first"):
        main(["train", *given, f"init_from={trained}"])


def test_the_objective_of_a_run_stays(learned: Path) -> None:
    place = [f"runs_dir={learned / 'runs'}", f"data_dir={learned / 'data'}"]
    with pytest.raises(UserError, match="objective.beta=0.2 cannot replace objective.beta=0.1 of the run to resume"):
        main(["train", "resume=dpo", *place, "train.steps=30", "objective.beta=0.2"])
    with pytest.raises(UserError, match="add trust=true"):  # the reward's code is named by the checkpoint alone
        main(["train", "resume=grpo", *place, "train.steps=30"])
