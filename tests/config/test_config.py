"""The strict parse: names, types, limits, combinations; an error is one line that names the key and the remedy."""

from __future__ import annotations

import copy
import dataclasses
import re
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andrea.api.command_line import CommandLine, compose, configure, read
from andrea.config import OptimizerConfig, RunConfig, SampleConfig, UserError, as_typed, lay_over, parse, to_plain
from andrea.config.keys import dotted_keys
from andrea.config.parse import convert


def make(*words: str) -> RunConfig:
    return configure(RunConfig, "train", list(words))


def test_a_round_trip_through_plain_mappings_changes_nothing() -> None:
    config = make(
        "model=gpt2", "optimizer=adamw", "data=mixture", "data.sources={a: {kind: text, path: b, weight: 0.5}}"
    )
    assert parse(RunConfig, to_plain(config)) == config


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (int, "12", 12),
        (int, "1e3", 1000),
        (int, 5, 5),
        (float, "1e-3", 0.001),
        (float, 3, 3.0),
        (bool, "true", True),
        (int | typing.Literal["auto"], "auto", "auto"),
        (int | typing.Literal["auto"], "7", 7),
        (float | None, "null", None),
        (list[str], "a", ["a"]),
    ],
)
def test_values_of_the_right_type(hint: typing.Any, value: typing.Any, expected: typing.Any) -> None:
    assert convert(hint, value, "key") == expected


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (int, "1.5"),
        (int, True),
        (int, "inf"),
        (float, "x"),
        (float, True),
        (bool, 1),
        (int, None),
        (str, {}),
        (dict[str, str], 3),
    ],
)
def test_values_of_a_wrong_type_name_the_key(hint: typing.Any, value: typing.Any) -> None:
    with pytest.raises(UserError, match="some.key"):
        convert(hint, value, "some.key")


def test_the_nearest_spelling_is_suggested() -> None:
    with pytest.raises(UserError, match="did you mean train.steps"):
        make("train.setps=3")
    with pytest.raises(UserError, match="did you mean andrea-nano"):
        make("model=andrea-nnao")


def test_windows_by_layer_are_a_list_that_yaml_and_json_hold() -> None:
    config = make("attention.window=[64, 64, null]")
    assert config.attention.window == (64, 64, None)
    assert to_plain(config)["attention"]["window"] == [64, 64, None]
    assert parse(RunConfig, to_plain(config)) == config and hash(config.attention)
    assert as_typed(config.attention.window) == "[64, 64, null]"
    assert make("attention.window=64").attention.window == 64
    with pytest.raises(UserError, match=r"attention.window=\[\] has no entry; write one for each layer"):
        make("attention.window=[]")


def test_a_head_width_that_is_not_whole_suggests_a_number_of_heads() -> None:
    with pytest.raises(UserError, match="n_head=5 does not divide .*d_model=256.*n_head=4"):
        make("model.d_model=256", "model.n_head=5")


def test_qk_norm_is_true_false_or_learned() -> None:
    for typed, parsed in (("true", True), ("false", False), ("learned", "learned")):
        assert make(f"model.qk_norm={typed}").model.qk_norm == parsed
    with pytest.raises(
        UserError, match="model.qk_norm=lerned is not allowed; allowed: true or false or learned; did you"
    ):
        make("model.qk_norm=lerned")
    with pytest.raises(UserError, match="which model.qk_norm=learned normalises again; set model.qk_norm=false or"):
        make("attention.qk_clip=100", "model.qk_norm=learned")


def test_a_head_width_of_its_own_need_not_divide_anything() -> None:
    model = make("model.d_model=256", "model.n_head=5", "model.d_head=38").model
    assert (model.head_width, model.d_attended) == (38, 190)
    assert make("model.d_model=256", "model.n_head=8", "model.d_head=null").model.head_width == 32
    with pytest.raises(UserError, match="needs an even head width, got 37; change model.d_head, or set model.position"):
        make("model.d_head=37")
    with pytest.raises(UserError, match="model.d_head=131072 are 1179648 wide together, above the limit of 1048576"):
        make("model.n_head=9", "model.d_head=131072", "model.position=none")


@pytest.mark.parametrize(
    "words",
    [
        ["model.d_model=6", "model.n_head=2"],
        ["model.d_head=0"],
        ["model.d_head=65538"],
        ["train.tokens_per_step=100"],
        ["train.tokens_per_step=1000"],
        ["model.logit_softcap=-1"],
        ["data=text"],
        ["data=mixture"],
        ["data.sources={a: {kind: pystdlib}}"],
        ["data=mixture", "data.sources={a: {kind: text}}"],
        ["data=mixture", "data.sources={a: {kind: pystdlib, weight: 0}}"],
        ["data=mixture", "data.sources={a.b: {kind: pystdlib}}"],
        ["data=mixture", "data.sources={a: {kind: pystdlib, include: ['*.py']}}"],
        ["data=mixture", "data.sources={a: {kind: pystdlib}}", "data.field=body"],
        ["data=mixture", "data.sources=a", "data.sources.a.kind=pystdlib"],
        ["data=mixture", "data.sources={a: 3}", "data.sources.a.kind=pystdlib"],
        ["data.include=*.py"],
        ["data=shakespeare", "data.exclude=*.py"],
        ["tokenizer.vocab_size=256"],
        ["tokenizer.vocab_size=null"],
        ["optimizer.matrix_learning_rate=null"],
        ["optimizer.decay_fraction=null"],
        ["optimizer.decay_fraction=2"],
        ["optimizer.weight_decay=-1"],
        ["optimizer=adamw", "optimizer.muon_rows=equal"],
        ["model.dropout=1"],
        ["train.max_minutes=0"],
        ["train.max_minutes=inf"],
        ["name=a/b"],
        ["device=gpu"],
        ["device=auto:1"],
        ["threads=0"],
        ["train.eval_tokens=0"],
        ["attention.window=[]"],
        ["attention.window=[64, 0]"],
        ["attention.window=[64, wide]"],
        ["attention.window=[[64], null]"],
        ["model.rotary_scaling=[8,1,4]"],
        ["model.rotary_scaling=[8,4,1,40]"],
        ["model.rotary_scaling=[8,1,4,-40]"],
        ["model.rotary_share=1.5"],
        ["model.rotary_share=0.01"],
        ["attention.score_softcap=0"],
        ["attention.score_softcap=50", "attention.implementation=sdpa"],
        ["attention.sink=true", "attention.implementation=sdpa_flash"],
        ["attention.score_softcap=50", "attention.qk_clip=100", "model.qk_norm=false"],
    ],
)
def test_impossible_combinations_are_refused(words: list[str]) -> None:
    with pytest.raises(UserError):
        make(*words)


@pytest.mark.parametrize(
    "words", [["top_p=0"], ["top_p=2"], ["stop="], ["num_samples=0"], ["temperature=-1"], ["top_k=0"]]
)
def test_impossible_sampling_is_refused(words: list[str]) -> None:
    with pytest.raises(UserError):
        configure(SampleConfig, "sample", words)


def test_a_missing_key_and_a_group_that_is_not_a_mapping() -> None:
    with pytest.raises(UserError, match="optimizer.kind is missing"):
        parse(OptimizerConfig, {}, "optimizer")
    with pytest.raises(UserError, match="optimizer is a group of keys; set one of them with optimizer.KEY="):
        parse(OptimizerConfig, "adam", "optimizer")
    with pytest.raises(UserError, match="unknown key optimizer.lr"):
        parse(OptimizerConfig, {"lr": 1}, "optimizer")


BASE = compose("train", CommandLine({}, {}))


@given(st.sampled_from([key for key in dotted_keys(RunConfig)]), st.text(max_size=20))
def test_any_value_is_accepted_or_refused_in_words(key: str, value: str) -> None:
    try:
        config = parse(RunConfig, lay_over(copy.deepcopy(BASE), read(RunConfig, [f"{key}={value}"]).values))
    except UserError as error:
        assert str(error)
    else:
        assert dataclasses.is_dataclass(config)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.d_model=10000000000000", "model.d_model=10000000000000 must be from 1 to 131072"),
        ("model.n_layer=1000000", "must be from 1 to 4096"),
        ("model.sequence_length=1048576", "above the limit of 33554432 for model.position=rotary"),
        ("seed=18446744073709551616", "too large"),
        ("seed=9223372036854775807", "must be from 0"),
        ("threads=1000000", "must be from 1 to 1024"),
        ("train.steps=1" + "0" * 300, "train.steps"),
        (
            "train.steps=1e13",
            "train.steps=10000000000000 must be from 1 to 1099511627776",
        ),  # what a checkpoint may hold
        ("train.flops=1e300", "at most 1e+30"),
        ("device=cuda:²", "not a device"),
        ("name=../x", "not a folder name"),
        ("name=a\x1b[2J", "no control character"),
        ("name=" + "x" * 201, "not a folder name"),
        ("model.name=../../x", "model.name='../../x' is not a folder name"),
        ("data.path=" + "x" * 256, "is not a valid path"),
        ("data.path=" + "x/" * 1100, "is not a valid path"),
        ("data.path=\0", "is not a valid path"),
        ("data.path=\ud800", "is not a valid path"),
        ("model.name=a\udcff", "is not text in UTF-8"),
        ("data.path=~nobody-of-this-name/x", "this machine has no user 'nobody-of-this-name'"),
        ('data.sources={a: {kind: text, path: "\\0"}}', "data.sources.a.path"),
    ],
)
def test_values_that_no_machine_supports_are_refused(word: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        path = [] if word.startswith("data.path=") else ["data.path=x"]
        make("data=mixture" if "sources" in word else "data=text", *path, word)


@pytest.mark.parametrize(
    ("word", "message"),
    [("max_new_tokens=1000000000000", "one command may hold"), ("seed=18446744073709551615", "too large")],
)
def test_samples_that_no_memory_can_hold_are_refused(word: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        configure(SampleConfig, "sample", [word])
