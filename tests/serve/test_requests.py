"""Bodies of requests: each wrong one is refused with the name of its key, and none is half believed."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoint import CONFIG, make_model

from andrea.generation.engine import Engine
from andrea.serve.errors import RequestError
from andrea.serve.requests import Asked, read_json, read_request
from andrea.text.tokenizer import ByteTokenizer

ENGINE = Engine(make_model(), ByteTokenizer())
END = ENGINE.tokenizer.end_of_text
LIMITS = SimpleNamespace(max_tokens=100, max_waiting=8)  # of a ServeConfig


def read(is_chat: bool = False, **body) -> Asked:
    return read_request(read_json(json.dumps(body).encode()), ENGINE, "one", LIMITS, is_chat)


def refused(body: bytes | dict, is_chat: bool = False) -> RequestError:
    with pytest.raises(RequestError) as error:
        read_json(body) if isinstance(body, bytes) else read(is_chat, **body)
    return error.value


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"3", b'{"a":NaN}', b'{"a":-Infinity}', b'{"a":1,"a":2}', b'{"a":"\xff"}', b'{"a":"\\ud800"}', b'{"\\udc00":1}',
     b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"9" * 5000, b'{"a":1} x'],
)  # fmt: skip
def test_what_is_no_object_of_json_is_refused(body):
    assert refused(body).status == 400


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("prompt", [None, 3, [], [[]], ["a", 3], [1, "a"], [True], [-1], [257], [1.0], {"a": 1}, "a" * 24, [1] * 24]),
        ("max_tokens", [0, -1, 101, 1.5, True, "3", [3]]),
        ("n", [0, 9, True, 1.0]),
        ("temperature", [-0.1, 101, "1", True, 10**400]),
        ("top_p", [-0.1, 1.1]),
        ("top_k", [-2, 258, 1.5]),
        ("min_p", [2]),
        ("repetition_penalty", [0]),
        ("seed", [-1, 2**63, 1.0]),
        ("stop", ["", [""], [1], ["a"] * 17, "a" * 257, {}]),
        ("logprobs", [-1, 21, True]),
        ("echo", [1, "true"]),
        ("stream", [1]),
        ("best_of", [2, True]),
        ("suffix", ["x"]),
        ("frequency_penalty", [0.1, False]),
        ("logit_bias", [{"5": 1}]),
        ("anything", [1, "x", []]),
    ],
)
def test_a_wrong_value_is_refused_and_its_key_named(key, values):
    for value in values:
        error = refused({"prompt": "a"} | {key: value})
        assert (error.status, error.param) == (400, key), value
        assert key in error.message


@pytest.mark.parametrize("key", ["best_of", "suffix", "frequency_penalty", "presence_penalty", "logit_bias", "user"])
def test_what_changes_nothing_is_allowed(key):
    neutral = {
        "best_of": 1,
        "suffix": "",
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "logit_bias": {},
        "user": "me",
    }
    assert read(prompt="a", seed=1, **{key: neutral[key]}) == read(prompt="a", seed=1, **{key: None})


def test_another_model_is_not_found():
    assert refused({"prompt": "a", "model": "two"}).status == 404
    read(prompt="a", model="one")


def test_a_text_begins_a_document_and_ids_stay_as_they_are():
    assert [prompt.ids for prompt in read(prompt=["ab", ""]).prompts] == [[END, 97, 98], [END]]
    assert read(prompt=[97, 98]).prompts[0].ids == [97, 98]
    full = read(prompt="a" * CONFIG.sequence_length).prompts[0]
    assert full.ids == [97] * CONFIG.sequence_length and full.n_added == 0


def test_every_text_has_a_seed_of_its_own():
    asked = read(prompt=["a", "b"], n=2, seed=7)
    assert [(prompt.shown, request.seed) for prompt, request in asked.requests()] == [
        ("a", 7),
        ("a", 8),
        ("b", 9),
        ("b", 10),
    ]
    assert read(prompt="a").settings.seed != read(prompt="a").settings.seed


def test_the_number_of_texts_is_limited():
    assert refused({"prompt": ["a"] * 3, "n": 3}).param == "n"


def test_defaults_are_those_of_openai():
    asked = read(prompt="a")
    assert asked.settings.max_new_tokens == 16 and asked.settings.sampling.temperature == 1.0
    assert asked.settings.sampling.repetition_penalty == 1.0 and not asked.is_stream and asked.n_likeliest is None


def test_a_model_without_chat_tokens_refuses_a_chat():
    error = refused({"messages": [{"role": "user", "content": "hi"}]}, is_chat=True)
    assert (error.status, error.code) == (400, "no_chat_model") and "/v1/completions" in error.message


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
KEYS = st.sampled_from(
    "prompt model max_tokens n seed stop logprobs echo stream stream_options temperature top_p top_k".split()
)
VALUES = st.recursive(
    LEAVES, lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=3), each, max_size=3)
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(KEYS | st.text(max_size=5), VALUES, max_size=5), st.booleans())
def test_any_body_is_read_or_refused(body, is_chat):
    try:
        asked = read(is_chat, **{"prompt": "a"} | body)
    except RequestError as error:
        assert 400 <= error.status < 500 and error.message
    else:
        assert 0 <= asked.settings.max_new_tokens <= 100 and len(asked.requests()) <= 8
        assert math.isfinite(asked.settings.sampling.temperature)
