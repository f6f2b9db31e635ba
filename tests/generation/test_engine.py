"""The engine: cached equals uncached, the window slides as documented, text streams whole, samples are reproducible."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from head_options import ALL_OPTIONS, draw_what_starts_alike
from hypothesis import given, settings
from hypothesis import strategies as st

from andrea.config import AttentionConfig, ModelConfig, UserError
from andrea.generation import Engine, Request, Sampling, next_logits_uncached, window_start
from andrea.generation.engine import PromptLookup, TextStream, Window, longest_overlap, step
from andrea.model import GPT, initialise
from andrea.text.tokenizer import ByteTokenizer

CONFIG = ModelConfig(
    name="tiny", d_model=24, n_layer=2, n_head=3, d_mlp=29, sequence_length=11, position="rotary", rotary_base=10000.0,
    norm="rmsnorm", norm_epsilon=1e-6, mlp="relu2", bias=False, tied_head=False, qk_norm=True, logit_softcap=15.0,
    recipe_steps=1, recipe_tokens_per_step=11,
)  # fmt: skip
LIKE_GPT2 = dataclasses.replace(
    CONFIG,
    position="learned",
    norm="layernorm",
    mlp="gelu",
    bias=True,
    tied_head=True,
    qk_norm=False,
    logit_softcap=None,
)
CONVOLVED = dataclasses.replace(CONFIG, qkv_convolution=3, bigram_rows=41, value_residual=True, mlp="swiglu")
ATTENTION = AttentionConfig("scaled_dot", "auto")
TOKENIZER = ByteTokenizer()


def make_model(config: ModelConfig = CONFIG, attention: AttentionConfig = ATTENTION) -> GPT:
    model = GPT(config, attention, TOKENIZER.n_vocab)
    initialise(model, torch.Generator().manual_seed(7))
    draw_what_starts_alike(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(
                3.0 if parameter.dim() > 1 else 1.0
            )  # logits far enough apart that rounding changes no token
            if name.endswith(".taps"):
                parameter.normal_(generator=torch.Generator().manual_seed(8))
    return model


def favour(model: GPT, token: int) -> GPT:
    """The same model, certain that `token` comes next."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embedding.weight[:, 0] = 1.0
        model.final_norm.weight.fill_(1.0)
        model.head.weight[token, 0] = 3.0
    return model


@pytest.mark.parametrize("config", [CONFIG, LIKE_GPT2, CONVOLVED], ids=["plain", "like GPT-2", "convolved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_saves_the_copy_and_changes_no_text(config: ModelConfig, dtype: torch.dtype) -> None:
    request = Request(20, num_samples=2, seed=3)
    model = make_model(config)
    before = {name: each.clone() for name, each in model.named_parameters()}
    text = Engine(model, TOKENIZER, dtype=dtype).write("ab", request)
    assert all(torch.equal(each, before[name]) for name, each in model.named_parameters())  # a copy was converted
    converted = Engine(model, TOKENIZER, dtype=dtype, in_place=True)
    assert getattr(converted.model, "model", converted.model) is model
    assert converted.write("ab", request) == text


# ----------------------------------------------------------------------------------------------------- the window


@pytest.mark.parametrize("sequence_length", [1, 2, 7, 8])
def test_window_holds_some_tokens_and_never_too_many(sequence_length):
    starts = [window_start(n_token, sequence_length) for n_token in range(1, 5 * sequence_length + 3)]
    for n_token, start in enumerate(starts, start=1):
        assert 1 <= n_token - start <= sequence_length
    assert starts == sorted(starts) and set(starts[:sequence_length]) == {0}


def test_window_start_by_hand():
    assert [window_start(n_token, 4) for n_token in range(1, 10)] == [0, 0, 0, 0, 2, 2, 4, 4, 6]


@pytest.mark.parametrize("config", [CONFIG, LIKE_GPT2, CONVOLVED], ids=["andrea", "gpt2", "convolved"])
@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_cached_and_uncached_logits_are_equal_while_the_window_slides(config, fixed_shapes):
    model = make_model(config)
    tokens = torch.randint(0, 257, (2, 37), generator=torch.Generator().manual_seed(3))
    window = Window(model, step, 2, fixed_shapes, ragged=False)
    for n_token in range(5, 38):
        cached, _ = window.next_logits(tokens[:, :n_token].tolist())
        expected = next_logits_uncached(model, tokens[:, :n_token])
        torch.testing.assert_close(cached[:, 0], expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("option", ALL_OPTIONS)
def test_cached_logits_with_options_of_the_heads(option):
    of_model, of_attention = ALL_OPTIONS[option]
    model = make_model(dataclasses.replace(CONFIG, **of_model), dataclasses.replace(ATTENTION, **of_attention))
    tokens = torch.randint(0, 257, (3, 25), generator=torch.Generator().manual_seed(3))
    for fixed_shapes, ragged in ((False, False), (True, False), (False, True)):
        window = Window(model, step, 3, fixed_shapes, ragged)
        for n_token in range(5, 26):
            texts = [row[: n_token - i * ragged] for i, row in enumerate(tokens.tolist())]
            cached, _ = window.next_logits(texts)
            for logits, text in zip(cached[:, 0], texts, strict=True):
                expected = next_logits_uncached(model, torch.tensor([text]))[0]
                torch.testing.assert_close(logits, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("config", [CONFIG, LIKE_GPT2, CONVOLVED], ids=["andrea", "gpt2", "convolved"])
@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_texts_of_different_lengths_see_what_each_would_see_alone(config, fixed_shapes):
    """Also while windows slide at different times, and while right and wrong lookaheads are read."""
    model, generator = make_model(config), torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 257, (3, 50), generator=generator).tolist()
    lengths, window = [2, 9, 5], Window(model, step, 3, fixed_shapes, ragged=True, max_lookahead=3)
    while max(lengths) < 40:
        lookaheads = [
            row[n : n + torch.randint(4, (), generator=generator)] for row, n in zip(tokens, lengths, strict=True)
        ]
        for ahead in lookaheads[:1]:  # one row's lookahead is wrong at its end
            ahead[-1:] = [ahead[-1] ^ 1] if ahead else []
        texts = [row[:n] for row, n in zip(tokens, lengths, strict=True)]
        logits, kept = window.next_logits(texts, lookaheads)
        for index, (text, ahead) in enumerate(zip(texts, kept, strict=True)):
            for place in range(len(ahead) + 1):
                expected = next_logits_uncached(model, torch.tensor([text + ahead[:place]]))[0]
                torch.testing.assert_close(logits[index, place], expected, atol=2e-5, rtol=2e-5)
        right = [len(ahead) - (index == 0 and bool(ahead)) for index, ahead in enumerate(kept)]
        lengths = [n + 1 + more for n, more in zip(lengths, right, strict=True)]


@pytest.mark.parametrize("config", [CONFIG, LIKE_GPT2, CONVOLVED], ids=["andrea", "gpt2", "convolved"])
def test_a_short_lookahead_is_read_as_wide_as_the_longest_up_to_the_window_s_end(config):
    """One shape for a compiled step or a graph, also where the window has fewer places than the longest lookahead."""
    model = make_model(config)
    tokens = torch.randint(0, 257, (30,), generator=torch.Generator().manual_seed(3)).tolist()
    window = Window(model, step, 1, fixed_shapes=True, ragged=False, max_lookahead=4)
    for n_token in range(2, 26):
        logits, kept = window.next_logits([tokens[:n_token]], [tokens[n_token : n_token + 2]])
        for place in range(len(kept[0]) + 1):
            expected = next_logits_uncached(model, torch.tensor([tokens[:n_token] + kept[0][:place]]))[0]
            torch.testing.assert_close(logits[0, place], expected, atol=2e-5, rtol=2e-5)


def test_greedy_stream_equals_uncached_generation():
    model = make_model()
    request = Request(max_new_tokens=29, sampling=Sampling(temperature=0))
    tokens = [72, 101, 5]
    generated = [each.token for each in Engine(model, TOKENIZER).stream(tokens, request)]
    for _ in range(len(generated)):
        tokens.append(int(next_logits_uncached(model, torch.tensor([tokens])).argmax()))
    assert generated == tokens[3:] and len(generated) == 29


@pytest.mark.untraced
def test_compiled_step_equals_eager():
    model = make_model()
    request = Request(max_new_tokens=17, sampling=Sampling(temperature=0))
    eager, compiled = (Engine(model, TOKENIZER, compiled=on).stream([1, 2, 3], request) for on in (False, True))
    assert [each.token for each in eager] == [each.token for each in compiled]


@pytest.mark.parametrize("config", [CONFIG, LIKE_GPT2, CONVOLVED], ids=["andrea", "gpt2", "convolved"])
def test_converting_leaves_the_model_alone_and_stays_near(config):
    """At most twice the error of plain bf16, both against float64, plus one unit in the last place."""
    model = make_model(config)
    engine = Engine(model, TOKENIZER, dtype=torch.bfloat16)
    assert model.embedding.weight.dtype == torch.float32 and model.blocks[0].mlp.up.weight.dtype == torch.float32
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    exact = next_logits_uncached(make_model(config).double(), tokens)
    plain = next_logits_uncached(make_model(config).bfloat16(), tokens).double()
    ours = next_logits_uncached(engine.model, tokens).double()
    unit = exact.abs().max() * 2**-8
    assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max() + unit


# ---------------------------------------------------------------------------------------------------- the samples


SAMPLINGS = [Sampling(temperature=0), Sampling(0.9, top_k=40), Sampling(1.0, repetition_penalty=1.3)]


def texts_of(engine: Engine, prompts: list[list[int]], request: Request) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in prompts]
    for generated in engine.stream_all(prompts, request):
        tokens[generated.sample].append(generated.token)
    return tokens


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("lookahead", [0, 1, 4])
def test_texts_in_a_batch_with_lookahead_or_without_equal_each_text_alone(sampling, lookahead):
    """The strongest form of "the distribution is unchanged": with the same random numbers, the same tokens."""
    engine = Engine(make_model(), TOKENIZER)
    prompts = [[1, 2, 3], [7, 8, 7, 8, 7, 8, 7], [5]]
    request = Request(max_new_tokens=33, seed=3, sampling=sampling, lookahead=lookahead)
    alone = [
        texts_of(engine, [prompt], dataclasses.replace(request, seed=3 + index, lookahead=0))[0]
        for index, prompt in enumerate(prompts)
    ]
    assert texts_of(engine, prompts, request) == alone
    assert texts_of(engine, prompts[1:2], dataclasses.replace(request, seed=4)) == alone[1:2]


def test_a_text_that_repeats_itself_is_read_in_fewer_passes():
    model, passes = favour(make_model(dataclasses.replace(CONFIG, sequence_length=64)), 97), []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    for lookahead, expected in ((0, 25), (4, 5)):  # one token in each pass, or five
        passes.clear()
        request = Request(max_new_tokens=25, sampling=Sampling(temperature=0), lookahead=lookahead)
        assert Engine(model, TOKENIZER).write("aaaa", request) == ["a" * 25]
        assert len(passes) == expected


def test_the_lookahead_is_the_tokens_that_followed_the_longest_run_last():
    lookup = PromptLookup([1, 2, 3, 9, 2, 3, 8, 1, 2, 3])
    assert lookup.lookahead(2) == [9, 2]  # after 1 2 3, although the shorter 2 3 was followed by 8 since
    lookup.append(9)
    assert lookup.lookahead(3) == [2, 3, 8] and lookup.lookahead(0) == []
    assert PromptLookup([4, 5]).lookahead(3) == []
    assert PromptLookup([6, 4, 5, 4, 5]).lookahead(5) == [4, 5, 4, 5, 4]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_the_lookahead_is_copied_from_the_text(tokens):
    lookup = PromptLookup(tokens)
    assert lookup.tokens == tokens
    lookahead = lookup.lookahead(4)
    followed = [tokens[place : place + 4] for place in range(1, len(tokens)) if tokens[place - 1] == tokens[-1]]
    assert any(lookahead[: len(each)] == each for each in followed) if followed else lookahead == []


def test_a_sample_depends_on_its_own_seed_alone():
    engine = Engine(make_model(), TOKENIZER)
    three = engine.write("ab", Request(max_new_tokens=19, num_samples=3, seed=5))
    assert len(set(three)) == 3
    for index, text in enumerate(three):
        assert engine.write("ab", Request(max_new_tokens=19, seed=5 + index)) == [text]
    assert engine.write("ab", Request(max_new_tokens=19, num_samples=3, seed=5, lookahead=3)) == three
    repeating = [
        engine.write("ababab", Request(max_new_tokens=19, num_samples=2, lookahead=lookahead)) for lookahead in (0, 3)
    ]
    assert repeating[0] == repeating[1]


def test_texts_written_one_after_another_share_memory_and_nothing_else():
    """Also when a stream is abandoned half-way, and when two run at the same time."""
    engine, request = Engine(make_model(), TOKENIZER), Request(max_new_tokens=19, seed=5)
    texts = {prompt: Engine(make_model(), TOKENIZER).write(prompt, request) for prompt in ("abcdefg", "xy")}
    assert engine.write("abcdefg", request) == texts["abcdefg"]
    (window,) = engine.idle.values()
    assert engine.write("xy", request) == texts["xy"] and list(engine.idle.values()) == [window]
    left = engine.stream(engine.encode("abcdefg"), request)
    first = next(left).text
    assert engine.write("xy", request) == texts["xy"]
    assert first + "".join(each.text for each in left) == texts["abcdefg"][0]


def test_prompt_follows_end_of_text_where_the_window_has_a_place_for_it():
    engine = Engine(make_model(), TOKENIZER)
    assert engine.encode("") == [TOKENIZER.end_of_text]
    assert engine.encode("ab") == [TOKENIZER.end_of_text, 97, 98]
    assert engine.encode("x" * 11) == [120] * 11
    assert engine.write("x" * 11, Request(max_new_tokens=2, sampling=Sampling(temperature=0)))


def test_prompt_longer_than_the_window_is_refused_by_name():
    with pytest.raises(UserError, match=r"prompt has 12 tokens.*model\.sequence_length=11"):
        Engine(make_model(), TOKENIZER).encode("x" * 12)


def test_end_of_text_ends_a_sample():
    engine = Engine(favour(make_model(), TOKENIZER.end_of_text), TOKENIZER)
    generated = engine.stream([65], Request(max_new_tokens=5, num_samples=2, sampling=Sampling(temperature=0)))
    assert [(each.sample, each.text, each.ended) for each in generated] == [
        (0, "", "end_of_text"),
        (1, "", "end_of_text"),
    ]


def test_stop_string_ends_a_sample_and_is_not_shown():
    engine = Engine(favour(make_model(), ord("a")), TOKENIZER)
    request = Request(max_new_tokens=9, stop=("aaa",), sampling=Sampling(temperature=0))
    assert [(each.text, each.ended) for each in engine.stream([65], request)] == [("", None), ("", None), ("", "stop")]


def test_length_ends_a_sample_and_shows_what_waited():
    engine = Engine(favour(make_model(), ord("a")), TOKENIZER)
    request = Request(max_new_tokens=3, stop=("aaaa",), sampling=Sampling(temperature=0))
    generated = list(engine.stream([65], request))
    assert "".join(each.text for each in generated) == "aaa" and generated[-1].ended == "length"


def test_one_sample_may_end_before_another():
    engine = Engine(make_model(), TOKENIZER)
    plain = engine.write("ab", Request(max_new_tokens=13, num_samples=2, seed=2))
    stop = plain[0][2]
    cut = engine.write("ab", Request(max_new_tokens=13, num_samples=2, seed=2, stop=(stop,)))
    assert cut == [text.split(stop)[0] for text in plain]


# ------------------------------------------------------------------------------------------------------- the text


@settings(deadline=None, max_examples=100)
@given(
    text=st.text(alphabet="abé漢🙂", max_size=20),
    stop=st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=3), max_size=2),
)
def test_text_stream_is_the_text_up_to_the_first_stop(text, stop):
    stream = TextStream(TOKENIZER, stop)
    shown = ""
    for byte in text.encode():
        if not stream.stopped:
            shown += stream.push(byte)
            assert "\ufffd" not in shown and text.startswith(shown)
    assert stream.push(ord("a")) == "" if stream.stopped else True
    cut = min((text.find(word) for word in stop if word in text), default=len(text))
    if stream.stopped:
        # What stops first in time: the string completed first, not the one that begins first.
        ends = min(text.find(word) + len(word) for word in stop if word in text)
        cut = min(text[:ends].find(word) for word in stop if word in text[:ends])
        assert shown == text[:cut] and stream.finish() == ""
    else:
        assert shown + stream.finish() == text and cut == len(text)


def test_bytes_that_are_no_utf8_are_replaced_once_they_are_known_to_be_wrong():
    stream = TextStream(TOKENIZER)
    assert [stream.push(byte) for byte in b"\xf0\x9fa"] == ["", "", "\ufffda"]
    assert stream.push(0xE6) == "" and stream.finish() == "\ufffd"


def test_longest_overlap():
    assert [longest_overlap(text, "aab") for text in ("", "a", "xaa", "aab", "aaa")] == [0, 1, 2, 0, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_that_are_not_finite_are_a_user_s_error(temperature):
    model = make_model(dataclasses.replace(CONFIG, logit_softcap=None))
    with torch.no_grad():
        model.head.weight.fill_(3e38)
        model.final_norm.weight.fill_(3e38)
    with pytest.raises(UserError, match="not finite"):
        Engine(model, TOKENIZER).write("a", Request(3, sampling=Sampling(temperature)))
