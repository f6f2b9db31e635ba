"""The class that exports bring along: equal to our model for every option, with cache, padding and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exportable import LAYERNORM, NANO, T, Trained, logits_of, make_trained, tokens_of

from andrea.interop.architectures import REMOTE_CODE, choose_class
from andrea.interop.hugging_face.target import write_folder

transformers = pytest.importorskip("transformers", minversion="5.10")

# Together they hold each value of each option at least once, most pairs of them, and the default model.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the default model": (NANO, {}),
    "learned positions, LayerNorm, GELU, one key/value head, scalar gates, bilinear": (
        LAYERNORM | {"position": "learned", "mlp": "gelu", "n_kv_head": 1},
        {"gate": "scalar", "exclusive": "learned", "compatibility": "bilinear"},
    ),
    "ALiBi, squared ReLU, its own head, value tables, sinks, capped scores, three windows": (
        {
            "position": "alibi",
            "mlp": "relu2",
            "tied_head": False,
            "value_embedding": "table",
            "qkv_convolution": 2,
            "bigram_rows": 64,
        },
        {"sink": True, "score_softcap": 2.0, "window": (7, None, 11)},
    ),
    "half of the width turns, attention and MLP side by side, value projections, elementwise gates, cosine, window": (
        {
            "value_embedding": "projection",
            "rotary_share": 0.5,
            "rotary_scaling": (4.0, 1.0, 2.0, 30.0),
            "value_residual": True,
            "parallel_residual": True,
            "n_kv_head": 2,
            "d_head": 6,
        },
        {"gate": "elementwise", "exclusive": "fixed", "compatibility": "cosine", "window": 9},
    ),
    "no positions, a convolution of one token, dot, sinks": (
        {"position": "none", "qkv_convolution": 1, "qk_norm": "learned", "n_kv_head": 3},
        {"compatibility": "dot", "sink": True},
    ),
    "ALiBi, LayerNorm without biases, all with the convolution": (
        NANO | LAYERNORM | {"bias": False, "position": "alibi", "value_embedding": "table", "mlp": "gelu_exact"},
        {"gate": "elementwise", "exclusive": "learned"},
    ),
    "biases, RMSNorm, learned positions, cosine with a cap and a window": (
        {"bias": True, "position": "learned", "mlp": "relu2", "logit_softcap": 5.0, "tied_head": False, "d_head": 9},
        {"compatibility": "cosine", "score_softcap": 3.0, "window": 5},
    ),
    "a long convolution with heads shared by groups, bilinear with QK-norm": (
        {"qkv_convolution": 5, "n_kv_head": 2, "qk_norm": True, "value_embedding": "projection", "d_head": 14},
        {"compatibility": "bilinear", "exclusive": "fixed", "window": (None, 6)},
    ),
}
WITHOUT_EAGER = [
    name
    for name, (model, attention) in CASES.items()
    if model.get("position") != "alibi" and not {"sink", "score_softcap"} & attention.keys()
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Trained, Path]]:
    """Each case's model, and the folder that it is exported to."""
    found = {}
    for number, (name, changes) in enumerate(CASES.items()):
        trained, folder = make_trained(*changes), tmp_path_factory.mktemp(f"case{number}")
        write_folder(folder, trained, REMOTE_CODE, "f32")
        found[name] = trained, folder
    return found


def load(folder: Path, implementation: str = "eager", kind: Any = None) -> Any:
    kind = kind or transformers.AutoModelForCausalLM
    loading = {"trust_remote_code": True, "attn_implementation": implementation}
    return kind.from_pretrained(folder, dtype=torch.float32, **loading).eval()


@torch.no_grad()
def cached_logits(model: Any, pieces: tuple[torch.Tensor, ...], **how: Any) -> torch.Tensor:
    """The logits of pieces (B, t), read one after another with a cache."""
    cache, found = None, []
    for piece in pieces:
        output = model(piece, past_key_values=cache, use_cache=True, **how)
        cache = output.past_key_values
        found.append(output.logits)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_ours_bit_for_bit(name: str, folders) -> None:
    trained, folder = folders[name]
    assert choose_class(trained)[0] is REMOTE_CODE
    tokens = tokens_of()
    with torch.no_grad():
        theirs = load(folder)(tokens).logits
    assert theirs.abs().max() > 0.5
    assert torch.equal(theirs, logits_of(trained, tokens))


@pytest.mark.parametrize("name", CASES)
def test_a_cache_changes_nothing_whatever_the_pieces(name: str, folders) -> None:
    trained, folder = folders[name]
    tokens = tokens_of()
    expected, model = logits_of(trained, tokens), load(folder)
    for sizes in ([40], [1] * 40, [2, 1, 1, 7, 1, 28], [39, 1]):
        found = cached_logits(model, tokens.split(sizes, dim=1))
        torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_padding_in_front_changes_nothing(name: str, folders) -> None:
    trained, folder = folders[name]
    tokens, model = tokens_of(1, 20), load(folder)
    expected = logits_of(trained, tokens)
    padded = torch.cat([torch.full((1, 5), 9), tokens], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :5] = 0
    with torch.no_grad():
        whole = model(padded, attention_mask=mask).logits[:, 5:]
        first = model(padded[:, :12], attention_mask=mask[:, :12], use_cache=True)
        second = model(padded[:, 12:], attention_mask=mask, past_key_values=first.past_key_values)
    for found in (whole, torch.cat([first.logits, second.logits], dim=1)[:, 5:]):
        torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("name", WITHOUT_EAGER)
def test_torch_s_attention_gives_the_same(name: str, folders) -> None:
    check_implementation(folders[name], "sdpa")


@pytest.mark.slow
@pytest.mark.untraced
def test_flex_attention_gives_the_same(folders) -> None:
    check_implementation(folders["the default model"], "flex_attention")


def check_implementation(found: tuple[Trained, Path], implementation: str) -> None:
    trained, folder = found
    tokens = tokens_of()
    with torch.no_grad():
        theirs = load(folder, implementation)(tokens).logits
    expected = logits_of(trained, tokens)
    torch.testing.assert_close(theirs, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


def test_models_with_changed_scores_choose_eager_and_refuse_others(folders) -> None:
    name = next(name for name in CASES if name not in WITHOUT_EAGER)
    folder = folders[name][1]
    found = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert found.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="use attn_implementation=eager"):
        load(folder, "sdpa")


@pytest.mark.parametrize("name", list(CASES)[:3])
def test_generation_with_and_without_a_cache_in_a_padded_batch(name: str, folders) -> None:
    trained, folder = folders[name]
    model, prompts = load(folder), [tokens_of(1, 4)[0], tokens_of(1, 11)[0]]
    padded, mask = torch.full((2, 11), 256), torch.zeros(2, 11, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        padded[row, 11 - len(prompt) :], mask[row, 11 - len(prompt) :] = prompt, 1
    how = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 256}
    cached = model.generate(padded, attention_mask=mask, **how)
    assert torch.equal(cached, model.generate(padded, attention_mask=mask, use_cache=False, **how))
    for row, prompt in zip(cached, prompts, strict=True):
        text = row[11 - len(prompt) :]
        chosen = logits_of(trained, text[None])[0, len(prompt) - 1 : -1].argmax(-1)
        assert torch.equal(chosen, text[len(prompt) :])
    one = {"input_ids": padded[1:], "attention_mask": mask[1:]} | how | {"eos_token_id": 257}
    looked_up = model.generate(**one, prompt_lookup_num_tokens=3)
    assert torch.equal(looked_up[:, : cached.shape[1]], cached[1:])  # some versions write one token more
    if not trained.model.qkv_convolution and not trained.model.bigram_rows:
        assert torch.equal(model.generate(padded, attention_mask=mask, cache_implementation="static", **how), cached)
    beams = model.generate(padded, attention_mask=mask, num_beams=3, **how)
    assert beams.shape == cached.shape


@pytest.mark.parametrize("name", list(CASES)[:4])
def test_gradients_are_ours_with_and_without_checkpointing(name: str, folders) -> None:
    trained, folder = folders[name]
    tokens = tokens_of(2, 17)
    ours = make_trained(*CASES[name]).gpt.requires_grad_(True)
    logits = ours.logits(ours(tokens))[:, :-1].flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
    for checkpointing in (False, True):
        model = load(folder).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        for one, two in (
            ("blocks.0.attention.query.weight", "model.layers.0.self_attn.q_proj.weight"),
            ("blocks.0.attention.value.weight", "model.layers.0.self_attn.v_proj.weight"),
            ("embedding.weight", "model.embed_tokens.weight"),
        ):
            torch.testing.assert_close(
                model.get_parameter(two).grad, ours.get_parameter(one).grad, atol=1e-5, rtol=1e-4
            )
        assert all(each.grad is not None for each in model.parameters())


def test_a_cache_that_cannot_hold_the_convolution_is_refused(folders) -> None:
    model = load(folders["the default model"][1])
    with pytest.raises(ValueError, match="needs an empty DynamicCache, got StaticCache"):
        model.generate(tokens_of(1, 5), max_new_tokens=3, cache_implementation="static")


def test_tokens_removed_from_the_cache_leave_no_trace(folders) -> None:
    trained, folder = folders["the default model"]
    model, tokens = load(folder), tokens_of(1, 30)
    with torch.no_grad():
        cache = model(torch.cat([tokens[:, :20], tokens_of(1, 7)], dim=1), use_cache=True).past_key_values
        cache.crop(-7)
        found = model(tokens[:, 20:], past_key_values=cache).logits
        cache.crop(-30)
        again = model(tokens, past_key_values=cache).logits
    expected = logits_of(trained, tokens)
    torch.testing.assert_close(found, expected[:, 20:], atol=2e-4, rtol=0)
    torch.testing.assert_close(again, expected, atol=2e-4, rtol=0)


def test_the_cache_has_the_name_of_older_and_of_newer_transformers(folders) -> None:
    trained, folder = folders["the default model"]
    model, tokens = load(folder), tokens_of(1, 30)
    expected = logits_of(trained, tokens)[:, 20:]
    for name in ("past_key_values", "cache"):
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            first = model(tokens[:, :20], **{name: cache}, use_cache=True)
            found = model(tokens[:, 20:], **{name: cache}, use_cache=True).logits
        assert first.past_key_values is cache and cache.get_seq_length() == 30
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_packed_texts_are_apart_by_their_positions(folders) -> None:
    """Without a mask, positions that begin again separate texts, in attention and in the convolution."""
    trained, folder = folders["the default model"]
    one, two = tokens_of(1, 12), tokens_of(1, 20)[:, 4:]
    position = torch.cat([torch.arange(12), torch.arange(16)])[None]
    with torch.no_grad():
        found = load(folder)(torch.cat([one, two], dim=1), position_ids=position, use_cache=False).logits
    expected = torch.cat([logits_of(trained, one), logits_of(trained, two)], dim=1)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_the_auto_classes_and_what_programs_ask_of_a_model(folders) -> None:
    trained, folder = folders["the default model"]
    model, body = load(folder), load(folder, kind=transformers.AutoModel)
    tokens = tokens_of()
    with torch.no_grad():
        output = model(tokens, output_hidden_states=True, output_attentions=True, logits_to_keep=3)
        hidden = body(tokens).last_hidden_state
    assert torch.equal(hidden, trained.gpt(tokens)) and torch.equal(output.hidden_states[-1], hidden)
    assert output.logits.shape == (2, 3, 257) and len(output.hidden_states) == 4
    assert [each.shape for each in output.attentions] == 3 * [(2, 6, 40, 40)]
    assert type(model).is_backend_compatible() and model.config.tie_word_embeddings
    assert transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True).final_logit_softcapping == 15.0
    assert isinstance(model(tokens, return_dict=False), tuple)


def test_saved_again_it_is_the_same_and_a_new_one_has_finite_logits(folders, tmp_path: Path) -> None:
    trained, folder = folders["a long convolution with heads shared by groups, bilinear with QK-norm"]
    model, tokens = load(folder), tokens_of()
    model.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "again")(tokens).logits, logits_of(trained, tokens))
        new = transformers.AutoModelForCausalLM.from_config(model.config, trust_remote_code=True)
        assert new(tokens).logits.isfinite().all() and new.model.layers[0].self_attn.taps.eq(0).all()


def test_half_precision(folders) -> None:
    trained, folder = folders["the default model"]
    tokens = tokens_of()
    with torch.no_grad():
        found = load(folder).to(torch.bfloat16)(tokens).logits
    assert found.dtype == torch.float32  # capped in fp32
    assert (found - logits_of(trained, tokens)).abs().mean() < 0.1


def test_a_text_may_be_longer_than_in_training_where_positions_allow_it(folders) -> None:
    model = load(folders["the default model"][1])
    with torch.no_grad():
        assert model(tokens_of(1, 3 * T)).logits.isfinite().all()
