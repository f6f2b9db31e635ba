"""The lens: its numbers, the names it gives, and the files it writes."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from andrea.__main__ import main
from andrea.attention import attention_weights
from andrea.checkpoint import write_checkpoint
from andrea.config import AttentionConfig, LensConfig, ModelConfig, UserError, parse, to_plain
from andrea.insight.lens import lens as lens_module
from andrea.insight.lens.lens import chosen_heads, lens, small_lens
from andrea.insight.lens.page.page import Facts, Page, measure, small_maps, visible_text
from andrea.insight.lens.scores import (
    NAMES,
    PASSAGE,
    mass_on,
    names_of,
    open_at,
    probe_scores,
    repetition,
    score_layer,
    targets_of,
)
from andrea.insight.lens.trace import next_log_probabilities, pushed_tokens, walk, without_heads
from andrea.model.gpt import GPT, initialise
from andrea.text.tokenizer import ByteTokenizer
from andrea.training.heads import probe

TOKENIZER = ByteTokenizer()
CONFIG = ModelConfig(
    name="tiny", d_model=30, n_layer=3, n_head=5, d_mlp=37, sequence_length=41, position="rotary", rotary_base=10000.0,
    norm="rmsnorm", norm_epsilon=1e-6, mlp="relu2", bias=False, tied_head=False, qk_norm=True, logit_softcap=15.0,
    zero_init_projections=False, recipe_steps=1, recipe_tokens_per_step=41,
)  # fmt: skip
PROMPT = "say (abc, abc) twice"
CASES = {
    "scaled_dot": ({}, {}),
    "dot": ({}, {"compatibility": "dot"}),
    "bilinear": ({}, {"compatibility": "bilinear"}),
    "cosine": ({"qk_norm": False}, {"compatibility": "cosine"}),
    "additive": ({"position": "learned"}, {"compatibility": "additive"}),
    "fewer key/value heads, biases": ({"n_kv_head": 1, "bias": True, "norm": "layernorm"}, {}),
    "first layer's values": ({"n_kv_head": 1, "value_residual": True}, {}),
    "sliding window": ({}, {"window": 7}),
    "packed documents": ({}, {"across_documents": False}),
    "gpt2-like": ({"position": "learned", "tied_head": True, "mlp": "gelu", "logit_softcap": None}, {}),
}


def make(changes: dict | None = None, attention: dict | None = None, seed: int = 3) -> GPT:
    config = dataclasses.replace(CONFIG, **(changes or {}))
    chosen = AttentionConfig(**({"compatibility": "scaled_dot", "implementation": "auto"} | (attention or {})))
    model = GPT(config, chosen, TOKENIZER.n_vocab, TOKENIZER.end_of_text)
    initialise(model, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for block in model.blocks:  # sharper than at initialisation, so that heads differ visibly
            block.attention.query.weight.mul_(6)
    return model.eval().requires_grad_(False)


def prompt_tokens(text: str = PROMPT) -> torch.Tensor:
    return torch.tensor([[TOKENIZER.end_of_text, *TOKENIZER.encode(text)]])


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def model(request) -> GPT:
    return make(*request.param)


# --------------------------------------------------------------------------------------------------------- numbers


def test_the_walk_is_the_model(model: GPT) -> None:
    tokens = prompt_tokens()
    tokens[0, 9] = TOKENIZER.end_of_text  # a second document, where documents are told apart
    *_, last = walk(model, tokens)
    torch.testing.assert_close(model.logits(model.final_norm(last.after)), model.logits(model(tokens)))


def test_weights_are_attention_weights_and_rows_sum_to_one(model: GPT) -> None:
    tokens = prompt_tokens()
    x = model.embedding(tokens)
    x = model.position.add(x, 0)
    first = next(iter(walk(model, tokens)))
    attention = model.blocks[0].attention
    first_value = model.first_value(x)
    query, key, _, compatibility = attention.project(
        model.blocks[0].attention_norm(x), None, model.position.placer(tokens.shape[1], 0), first_value
    )
    expected = attention_weights(query, key, compatibility=compatibility, mask=attention.mask)
    torch.testing.assert_close(first.weights, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(first.weights.sum(-1), torch.ones_like(first.weights[..., 0]))


def test_a_head_switched_off_is_its_slice_of_the_output_set_to_zero(model: GPT) -> None:
    tokens = prompt_tokens()
    passes = list(walk(model, tokens))
    for layer in (0, 2):
        found = dict(without_heads(model, tokens, layer, passes[layer], [1, 4]))
        for head, without in found.items():
            weight = model.blocks[layer].attention.output.weight
            kept, d_head = weight.clone(), CONFIG.d_head
            weight[:, head * d_head : (head + 1) * d_head] = 0
            expected = model.logits(model(tokens)).float().log_softmax(-1)[0]
            weight.copy_(kept)
            torch.testing.assert_close(without, expected, atol=1e-5, rtol=1e-5)
        assert (found[1] - found[4]).abs().max() > 1e-3


def test_few_ablations_at_a_time_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make(), prompt_tokens()
    passes = list(walk(model, tokens))
    together = dict(without_heads(model, tokens, 1, passes[1], range(5)))
    monkeypatch.setattr("andrea.insight.lens.trace.LOGITS_AT_ONCE", 1)
    for head, without in without_heads(model, tokens, 1, passes[1], range(5)):
        torch.testing.assert_close(without, together[head], atol=1e-5, rtol=1e-5)


def test_pushed_tokens_are_the_largest_changes_of_logits() -> None:
    model = make()
    vectors = torch.randn(7, CONFIG.d_head)
    ids, changes = pushed_tokens(model, 1, 3, vectors, 2)
    full = model.head.weight @ (model.blocks[1].attention.output_by_head[3] @ vectors[4])
    order = full.argsort(descending=True)
    assert ids[4].tolist() == [*order[:2].tolist(), *order.flip(0)[:2].tolist()]
    torch.testing.assert_close(changes[4], full[ids[4]])


# ---------------------------------------------------------------------------------------------------------- scores


def test_masses_solved_by_hand() -> None:
    """Tokens a b a b: what each query looks for, with weights that are easily told apart."""
    tokens = torch.tensor([[0, 1, 0, 1]])
    weights = torch.tensor([[1.0, 0, 0, 0], [0.3, 0.7, 0, 0], [0.2, 0.5, 0.3, 0], [0.15, 0.2, 0.25, 0.4]])[None, None]
    visible = torch.ones(1, 4, 4, dtype=torch.bool).tril()
    targets = targets_of(tokens, [b"a", b"b"])
    found = {name: mass_on(weights, target, visible).item() for name, target in targets.items()}
    assert found["previous_token"] == pytest.approx((0.3 + 0.5 + 0.25) / 3)
    assert found["first_token"] == pytest.approx((0.3 + 0.2 + 0.15) / 3)
    assert found["same_token"] == pytest.approx((0.2 + 0.2) / 2)  # queries 2 and 3
    assert found["induction"] == pytest.approx(
        (0.5 + 0.25) / 2
    )  # after the first a came b at 1, after the first b a at 2
    assert math.isnan(found["opener"])


def test_the_window_hides_targets() -> None:
    weights = torch.full((1, 1, 4, 4), 0.25)
    near = (torch.arange(4)[:, None] - torch.arange(4) < 2).tril()[None]
    first = targets_of(torch.tensor([[5, 6, 7, 8]]), [b""] * 9)["first_token"]
    assert mass_on(weights, first, near).item() == 0.25  # only query 1 still sees the first token


def test_scores_agree_with_those_that_training_logs() -> None:
    model, tokens = make(attention={"window": 7}), prompt_tokens()
    logged = probe(model, tokens).figures()
    for layer, layer_pass in enumerate(walk(model, tokens)):
        scores = score_layer(layer_pass, targets_of(tokens, TOKENIZER.token_bytes()))
        for name, here in (("previous_token_mass", "previous_token"), ("first_token_mass", "first_token")):
            torch.testing.assert_close(scores[here], logged[name][layer])
        torch.testing.assert_close(scores["entropy_share"], logged["entropy_share"][layer])


def openers_of(text: str) -> str:
    """For each character the one that its innermost opener is, or '.'."""
    return "".join("." if key is None else text[key] for key in open_at([character.encode() for character in text]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a(b[c]d)e", ".(([[((.."),
        ("f('(')x", ".(''(.."),
        ("don't (x)", "......((."),
        ('"it\'s" b', '"""""...'),
        ('"a\nb(c', '""..(('),
        (")a]", "..."),
    ],
)
def test_openers(text: str, expected: str) -> None:
    assert openers_of(text) == expected


def test_an_opener_right_before_does_not_count() -> None:
    tokens = torch.tensor([list(b"(ab)")])
    target = targets_of(tokens, TOKENIZER.token_bytes())["opener"]
    assert target.nonzero().tolist() == [[0, 2, 0]]


def test_repetitions_fit_the_model() -> None:
    ordinary = set(TOKENIZER.encode(PASSAGE))
    for changes, attention, half in (
        ({}, {}, 20),
        ({"sequence_length": 300}, {}, len(ordinary)),
        ({}, {"window": 7}, 7),
    ):
        tokens = repetition(make(changes, attention), TOKENIZER)
        assert tokens.shape[1] == 1 + 2 * half
        assert torch.equal(tokens[:, 1 : 1 + half], tokens[:, 1 + half :])
        assert all(len(set(row)) == half and set(row) <= ordinary for row in tokens[:, 1 : 1 + half].tolist())


# ----------------------------------------------------------------------------------------------------------- names


def hand_made() -> GPT:
    """Two layers that copy: head 0.0 looks one back and notes that token, head 1.0 looks where its own token was noted.

    The residual stream has a part for the token (V), one for the token before (V) and one for the position (S).
    """
    n_vocab, n_token = TOKENIZER.n_vocab, 41
    d_head = n_vocab
    d_model = 3 * d_head
    model = make({
        "d_model": d_model, "n_head": 3, "n_layer": 2, "position": "learned", "qk_norm": False, "d_mlp": 1,
    })  # fmt: skip
    for parameter in model.parameters():
        parameter.zero_()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
    token, before, place = (slice(part * d_head, (part + 1) * d_head) for part in range(3))
    identity = torch.eye(d_head)
    model.embedding.weight[:, token] = identity
    model.position.weight[:, place] = identity[:n_token]
    sharp = 40.0 / math.sqrt(d_model)
    zero, one = model.blocks[0].attention, model.blocks[1].attention
    first = slice(0, d_head)
    zero.query.weight[first, place] = sharp * identity.roll(-1, 0)  # position i asks for i - 1
    zero.key.weight[first, place] = identity
    zero.value.weight[first, token] = identity
    zero.output.weight[before, first] = identity
    one.query.weight[first, token] = sharp * identity
    one.key.weight[first, before] = identity
    return model


def test_heads_made_by_hand_are_named_and_others_are_not() -> None:
    model = hand_made()
    probed = probe_scores(model, TOKENIZER)
    named = {
        (layer, head): [name.title for name in names_of(probed, layer, head)] for layer in range(2) for head in range(3)
    }
    assert named.pop((0, 0)) == ["previous-token"]
    assert named.pop((1, 0)) == ["induction"]
    assert not any(named.values())


def test_random_heads_bear_no_name() -> None:
    for seed in range(5):
        probed = probe_scores(make({"sequence_length": 200}, seed=seed), TOKENIZER)
        assert not any(names_of(probed, layer, head) for layer in range(3) for head in range(5))


def test_a_score_that_cannot_be_measured_names_nothing() -> None:
    probed = {name.score: torch.full((1, 1), math.nan) for name in NAMES}
    assert names_of(probed, 0, 0) == []


# ----------------------------------------------------------------------------------------------------------- files


def write(folder: Path, model: GPT) -> Path:
    """A checkpoint of a scaled-dot model."""
    config = {"model": to_plain(model.config), "attention": to_plain(AttentionConfig("scaled_dot", "auto"))}
    state = {"step": 60, "tokens": 1380, "config": config}
    return write_checkpoint(folder / "runs" / "one" / "checkpoints", state, model.state_dict(), {}, TOKENIZER)


def run_of(folder: Path, **changes) -> LensConfig:
    values = {
        "checkpoint": None, "runs_dir": str(folder / "runs"), "prompt": PROMPT, "out": str(folder / "lens.html"),
        "heads": [], "device": "cpu", "threads": 1,
    }  # fmt: skip
    return parse(LensConfig, values | changes)


def test_the_page_is_written_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write(tmp_path, make())
    out = tmp_path / "page.html"
    assert (
        main(["lens", f"runs_dir={tmp_path / 'runs'}", f"prompt={PROMPT}", f"out={out}", "device=cpu", "threads=1"])
        == 0
    )
    assert "15 of 15 heads in full" in capsys.readouterr().out
    page = out.read_text(encoding="utf-8")
    assert "{{" not in page and not re.search(r"https?://", page)
    assert main(["lens", "--help"]) == 0 and "heads:" in capsys.readouterr().out


def test_a_prompt_cannot_leave_its_place_in_the_page(tmp_path: Path) -> None:
    write(tmp_path, make())
    lens(run_of(tmp_path, prompt="</script><b>{{PROGRAM}}"), torch.device("cpu"))
    page = (tmp_path / "lens.html").read_text(encoding="utf-8")
    assert "</script><b>" not in page and page.count('"use strict"') == 1


def test_arrays(tmp_path: Path) -> None:
    model = make()
    write(tmp_path, model)
    lens(run_of(tmp_path, out=str(tmp_path / "attention.npz")), torch.device("cpu"))
    arrays = np.load(tmp_path / "attention.npz")
    tokens = prompt_tokens()
    n = tokens.shape[1]
    assert arrays["weights"].shape == (3, 5, n, n) and arrays["weights"].dtype == np.float32
    expected = torch.stack([made.weights[0] for made in walk(model, tokens)])
    np.testing.assert_allclose(arrays["weights"], expected.numpy(), atol=1e-6)
    assert arrays["tokens"].tolist() == tokens[0].tolist()
    assert "".join(arrays["token_texts"]) == PROMPT
    assert arrays["prompt_induction"].shape == arrays["probe_induction"].shape == (3, 5)


def test_a_picture_shows_one_head(tmp_path: Path) -> None:
    write(tmp_path, make())
    out = str(tmp_path / "head.png")
    lens(run_of(tmp_path, out=out, heads=["2.4"], prompt="$a_b$ \n"), torch.device("cpu"))
    assert Path(out).read_bytes().startswith(b"\x89PNG")
    for heads in ([], ["1.*"]):
        with pytest.raises(UserError, match="shows one head"):
            lens(run_of(tmp_path, out=out, heads=heads), torch.device("cpu"))


def test_long_prompts_show_named_and_asked_heads_in_full(tmp_path: Path, monkeypatch, capsys) -> None:
    write(tmp_path, hand_made())
    monkeypatch.setattr(lens_module, "IN_FULL_TOKENS", 5)
    lens(run_of(tmp_path, heads=["1.2"]), torch.device("cpu"))
    assert "3 of 6 heads in full" in capsys.readouterr().out
    page = (tmp_path / "lens.html").read_text(encoding="utf-8")
    assert {name for name in re.findall(r'id="data-(\d+\.\d+)"', page)} == {"0.0", "1.0", "1.2"}


def test_the_file_stays_within_its_limit(tmp_path: Path, monkeypatch) -> None:
    write(tmp_path, make())
    for limit in (110_000, 130_000, 150_000):
        monkeypatch.setattr(lens_module, "LARGEST_PAGE_BYTES", limit)
        lens(run_of(tmp_path), torch.device("cpu"))
        written = (tmp_path / "lens.html").stat().st_size
        assert limit - 20_000 < written <= limit
    with pytest.raises(UserError, match=r"asks for 15 heads in full; at 21 tokens \d+ fit"):
        lens(run_of(tmp_path, heads=["*.*"]), torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": "x" * 42}, "at most model.sequence_length=41"),
        ({"heads": ["3.0"]}, "there is no layer 3; the model's layers are counted 0 … 2"),
        ({"heads": ["0.1,2.5"]}, "there is no head 5"),
        ({"heads": ["7"]}, "not LAYER.HEAD"),
        ({"heads": ["-1.0"]}, "not LAYER.HEAD"),
        ({"out": "nowhere/at/all.html"}, "no folder 'nowhere/at'"),
        ({"out": "lens.pdf"}, "allowed: a page .html, arrays .npz, one head's picture .png"),
        ({"out": "/proc/lens.html"}, "out=/proc/lens.html cannot be written"),
        ({"device": "tpu"}, "not a device"),
        ({"threads": 0}, "from 1 to 1024"),
    ],
)
def test_wrong_input_is_one_line(tmp_path: Path, changes: dict, words: str) -> None:
    write(tmp_path, make())
    with pytest.raises(UserError, match=re.escape(words)) as raised:
        lens(run_of(tmp_path, **changes), torch.device("cpu"))
    assert "\n" not in str(raised.value)


def test_a_folder_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path, make())
    (tmp_path / "lens.html").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        lens(run_of(tmp_path), torch.device("cpu"))


def test_heads_are_read_as_layer_and_head() -> None:
    assert chosen_heads(["1.10", "0.*", "1.10,1.2"], 2, 11) == [(1, 10), *((0, head) for head in range(11)), (1, 2)]
    assert chosen_heads([], 2, 3) == []


def test_small_maps_keep_the_strongest_cell() -> None:
    weights = torch.zeros(1, 9, 9)
    weights[0, 7, 2] = 0.25
    reduced = small_maps(weights, 3)
    assert reduced.shape == (1, 3, 3) and reduced[0, 2, 0] == round(255 * 0.5) and reduced.sum() == reduced[0, 2, 0]


def test_hidden_characters_are_shown() -> None:
    assert (
        visible_text(b" a\n\tb") == "␣a↵→b"
        and visible_text(b"\xe2\x80") == "⟨E2 80⟩"
        and visible_text(b"\x00") == "⟨00⟩"
    )


# -------------------------------------------------------------------------------------------------- while training


def test_the_small_lens_leaves_the_model_as_it_was() -> None:
    model = make({"position": "learned"}).train().requires_grad_(True)
    model.embedding.weight.grad = torch.ones_like(model.embedding.weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        page = small_lens(model, TOKENIZER, "def main(argv):\n    return main(argv)")
    assert model.training and torch.is_grad_enabled() and torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(model.embedding.weight.grad, torch.ones_like(model.embedding.weight))
    assert len(page.encode()) <= 300_000 and page.count('id="data-') == 2 + 15
    assert page == small_lens(model, TOKENIZER, "def main(argv):\n    return main(argv)")


def test_the_small_lens_of_many_heads_stays_small() -> None:
    model = make({"d_model": 480, "n_head": 24, "n_layer": 16, "d_mlp": 8})
    page = small_lens(model, TOKENIZER, "x" * 100)
    assert len(page.encode()) <= 300_000


def test_the_loss_change_is_that_of_the_prompt() -> None:
    model, tokens = make(), prompt_tokens()
    measured = measure(model, TOKENIZER, tokens[0].tolist())
    page = Page(model, TOKENIZER, measured, Facts("tiny", 1, None, TOKENIZER.identity))
    arrays = dict(page.arrays_of([(1, 2)]))[1, 2]
    ((_, without),) = without_heads(model, tokens, 1, list(walk(model, tokens))[1], [2])
    *_, last = walk(model, tokens)
    actual = tokens[0, 1:, None]
    expected = (next_log_probabilities(model, last.after)[0, :-1] - without[:-1]).gather(-1, actual).mean()
    assert page.loss_change(arrays["off_known"][:, -1]) == pytest.approx(expected.item(), abs=1e-5)
