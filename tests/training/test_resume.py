"""What a resumed run keeps, what may change, and what may not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andrea.config import UserError, lay_over
from andrea.training.resume import flatten, merge, same

names = st.text("abc", min_size=1, max_size=3)
nested = st.recursive(
    st.integers() | st.none() | st.booleans() | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(names, nested, max_size=3))
def test_flattening_and_back_changes_nothing(mapping: dict) -> None:
    assert lay_over({}, flatten(mapping)) == mapping


SAVED = {
    "model": {"name": "m", "d_model": 8}, "optimizer": {"kind": "muon", "learning_rate": 0.001}, "seed": 1, "name": "a",
    "train": {"steps": 10, "micro_batch": 4, "tokens_per_step": 64, "max_minutes": None}, "precision": "bf16", "resume": None,
}  # fmt: skip
COMPOSED = {
    "model": {"name": "m", "d_model": 8}, "optimizer": {"kind": "muon", "learning_rate": 0.004}, "seed": 1, "name": None,
    "train": {"steps": "auto", "micro_batch": "auto", "tokens_per_step": "auto", "max_minutes": None}, "precision": "auto",
    "resume": "auto",
}  # fmt: skip


def typed(**values: object) -> tuple[dict, list[str]]:
    composed = lay_over({}, flatten(COMPOSED) | {key.replace("__", "."): value for key, value in values.items()})
    return merge(SAVED, composed, {}, {key.replace("__", "."): value for key, value in values.items()})


def test_what_was_not_typed_is_as_it_was_saved() -> None:
    merged, changes = typed()
    assert merged["optimizer"] == SAVED["optimizer"] and merged["train"] == SAVED["train"]
    assert merged["precision"] == "bf16" and changes == []
    assert merged["resume"] == "auto" and merged["name"] is None


def test_what_was_typed_is_laid_over_and_told() -> None:
    merged, changes = typed(train__steps="20", optimizer__learning_rate="1e-3", precision="auto")
    assert merged["train"]["steps"] == "20" and merged["precision"] == "auto"
    assert changes == ["precision: bf16 → auto", "train.steps: 10 → 20"]


def test_a_group_typed_again_is_no_change_but_for_what_differs() -> None:
    merged, changes = merge(SAVED, COMPOSED, {"model": "m", "optimizer": "muon"}, {})
    assert changes == ["optimizer.learning_rate: 0.001 → 0.004"] and merged["train"] == SAVED["train"]


def test_a_key_that_the_saved_configuration_lacks_keeps_its_meaning_if_the_group_is_typed_again() -> None:
    """A run that an earlier version began chose files by their endings; data=text now chooses them by content."""
    text = {"kind": "text", "path": "notes", "sources": {}, "sample_prompt": ""}
    composed = COMPOSED | {"data": text | {"files": "by_content", "include": [], "exclude": [], "field": None}}
    merged, changes = merge(SAVED | {"data": text}, composed, {"data": "text"}, {"data.path": "notes"})
    assert merged["data"] == text and changes == []  # the parser adds files=by_ending
    with pytest.raises(UserError, match="data.files=by_content cannot replace data.files=by_ending"):
        merge(SAVED | {"data": text}, composed, {"data": "text"}, {"data.files": "by_content"})
    now = SAVED | {"data": composed["data"]}
    assert merge(now, composed, {"data": "text"}, {})[0]["data"]["files"] == "by_content"


def test_a_mixture_typed_again_is_no_change_but_for_what_differs() -> None:
    mixture = {"kind": "mixture", "path": None, "sample_prompt": ""}
    saved = SAVED | {"data": mixture | {"sources": {"a": {"kind": "text", "path": "notes", "weight": None}}}}
    for include, changed in (([], False), (["*.md"], True)):
        source = {"kind": "text", "path": "notes", "weight": None, "include": include, "exclude": [], "field": None}
        composed = COMPOSED | {"data": mixture | {"sources": {"a": source}}}
        typed = {"data": "mixture"}, {"data.sources": {"a": source}}
        if changed:
            with pytest.raises(UserError, match=r"data.sources.a.include=\['\*.md'\] cannot replace"):
                merge(saved, composed, *typed)
        else:
            assert merge(saved, composed, *typed)[1] == []


@pytest.mark.parametrize("key", ["model__d_model", "seed", "train__tokens_per_step", "optimizer__kind"])
def test_what_makes_the_run_cannot_change(key: str) -> None:
    with pytest.raises(UserError, match=key.replace("__", ".") + ".*init_from"):
        typed(**{key: "77"})


def test_numbers_are_the_same_however_they_are_written() -> None:
    assert same("1e-3") == same(0.001) and same(None) != same(0) and same(True) != same(1)
