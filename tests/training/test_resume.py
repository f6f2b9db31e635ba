"""What a resumed run keeps, what may change, and what may not."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from andrea.__main__ import main
from andrea.checkpoint import checkpoints_of
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


@pytest.mark.parametrize("groups", [{}, {"data": "mixture"}])  # {}: as the run has it already
def test_a_mixture_typed_again_is_no_change_but_for_what_differs(groups: dict) -> None:
    def mixture(include: list[str]) -> dict:
        source = {"kind": "text", "path": "notes", "weight": None, "include": include, "exclude": [], "field": None}
        return {"kind": "mixture", "path": None, "sample_prompt": "", "sources": {"a": source}}

    saved = SAVED | {"data": mixture([])}
    typed = groups, {"data.sources": mixture([])["sources"]}
    assert merge(saved, COMPOSED | {"data": mixture([])}, *typed)[1] == []
    with pytest.raises(UserError, match=r"data.sources.a.include=\[\*.md\] cannot replace"):
        merge(saved, COMPOSED | {"data": mixture(["*.md"])}, *typed)
    saved["data"]["sources"]["b"] = saved["data"]["sources"]["a"]
    with pytest.raises(UserError, match=r"data.sources.b.exclude=null cannot replace data.sources.b.exclude=\[\]"):
        merge(saved, COMPOSED | {"data": mixture([])}, *typed)


@pytest.mark.parametrize("key", ["model__d_model", "seed", "train__tokens_per_step", "optimizer__kind"])
def test_what_makes_the_run_cannot_change(key: str) -> None:
    with pytest.raises(UserError, match=key.replace("__", ".") + ".*init_from"):
        typed(**{key: "77"})


@pytest.mark.parametrize("value", [{"sink": True, "score_softcap": None}, {"sink": False, "score_softcap": 50.0}])
def test_what_becomes_of_scores_cannot_change(value: dict) -> None:
    (key,) = [key for key in value if value[key]]
    saved = {"sink": False, "score_softcap": None, "compatibility": "dot"}
    composed = COMPOSED | {"attention": {"compatibility": "dot"} | value}
    with pytest.raises(UserError, match=f"attention.{key}=.* cannot replace attention.{key}=(false|null)"):
        merge(SAVED | {"attention": saved}, composed, {}, {f"attention.{key}": value[key]})


def test_numbers_are_the_same_however_they_are_written() -> None:
    assert same("1e-3") == same(0.001) and same(None) != same(0) and same(True) != same(1)
    assert same(10**400) == same(10**400) != same(10**401)  # an edited state.json may hold such a number


# ------------------------------------------------------------------------- a state.json that its manifest agrees with


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of a run of 8 steps with checkpoints at 4 and 8, where `tiny_run` finds it."""
    return Path(shutil.copytree(trained, tmp_path / "runs" / "first"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit_state(checkpoint: Path, key: str, value: object) -> None:
    """Set a dotted key of state.json, or remove it (value ...), and make the manifest agree."""
    state = json.loads((checkpoint / "state.json").read_text())
    *groups, last = key.split(".")
    inner = state
    for group in groups:
        inner = inner[int(group)] if isinstance(inner, list) else inner[group]
    if value is ...:
        del inner[last]
    else:
        inner[int(last) if isinstance(inner, list) else last] = value
    (checkpoint / "state.json").write_text(json.dumps(state))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    content = (checkpoint / "state.json").read_bytes()
    manifest["files"]["state.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


EDITS = [
    ("step", 2), ("step", "4"), ("step", 4.0), ("step", True), ("step", -4), ("step", 2**70), ("tokens", 7),
    ("tokens", None), ("flops", "x"), ("flops", ...), ("flops", -1.0), ("seconds", None), ("val_loss", "x"),
    ("best_bpb", ...), ("best_bpb", [1.0]), ("data", None), ("data", ...), ("tokenizer", 3), ("ranks", 0), ("ranks", 2.5),
    ("wandb_id", 3), ("run", ["x"]), ("groups", []), ("groups", {"model": 3}), ("own_parts", None), ("own_parts", {"a.b": 3}),
    ("loss_scale", [1.0]), ("loss_scale", [0.0, 0.0]), ("loss_scale", [1e300, 0.0]), ("loss_scale.0", None),
    ("loss_scale.1", -1), ("torch_random", ...), ("torch_random", [1, 2]), ("torch_random.7", 256),
    ("torch_random.7", "x"), ("torch_random", {"a": 1}),
    ("health.active", ...), ("health.active", {"clipped_steps": "x"}), ("health.losses", None), ("health.losses.0", None),
    ("health.losses", [1.0]), ("health.norms.0", 10**400), ("health.learned", 1), ("health.val", []),
    ("health.interval.steps", ...), ("health.worst", {"loss_spikes": [1]}), ("health.best", {"val": 1.0}), ("health", []),
    ("config", []), ("config.model", None), ("config.model.d_mlp", 32), ("config.model.value_residual", ...),
    ("config.model.n_layer", 4096), ("config.model.strange", 1), ("config.optimizer.kind", "adamw"),
    ("config.optimizer.learning_rate", ...), ("config.train.tokens_per_step", 512), ("config.train", 3),
    ("config.data", None), ("config.logger", "x"), ("config.tokenizer", -1), ("config.seed", "many"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), EDITS, ids=lambda each: str(each)[:30])
def test_a_false_state_is_refused_before_anything_is_written_or_moved(
    key: str, value: object, run: Path, tmp_path: Path, tiny_run, capsys
) -> None:
    edit_state(run / "checkpoints" / "step-00000004", key, value)
    before = contents(tmp_path)
    with pytest.raises(UserError, match="step-00000004"):
        tiny_run(f"resume={run / 'checkpoints' / 'step-00000004'}", "name=first", "train.steps=6", "precision=fp32")
    assert contents(tmp_path) == before  # no data were prepared either
    assert "resuming" not in capsys.readouterr().out


def test_weights_that_are_not_finite_set_no_checkpoint_aside(run: Path, tmp_path: Path, tiny_run) -> None:
    checkpoint = run / "checkpoints" / "step-00000004"
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["embedding.weight"][0, 0] = float("nan")
    save_file(tensors, checkpoint / "model.safetensors")
    content = (checkpoint / "model.safetensors").read_bytes()
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    before = contents(run)
    with pytest.raises(UserError, match="not finite"):
        tiny_run(f"resume={checkpoint}", "name=first", "train.steps=6", "precision=fp32")
    assert contents(run) == before


def test_an_older_checkpoint_is_used_where_the_newest_has_a_false_state(run: Path, tiny_run, capsys) -> None:
    edit_state(run / "checkpoints" / "step-00000008", "seconds", None)
    assert tiny_run("name=first", "resume=auto", "train.steps=5", "precision=fp32") == 0
    out = capsys.readouterr().out
    assert "skipped: " in out and "impossible seconds" in out and "resuming" in out


def test_fields_of_other_versions_are_accepted(run: Path, tiny_run) -> None:
    checkpoint = run / "checkpoints" / "step-00000004"
    for key, value in (("new", [1]), ("val_loss", float("nan"))):
        edit_state(checkpoint, key, value)
    assert tiny_run(f"resume={checkpoint}", "name=first", "train.steps=6", "precision=fp32") == 0


def test_the_data_are_named_before_they_are_prepared(run: Path, tmp_path: Path, tiny_run, capsys) -> None:
    checkpoint = run / "checkpoints" / "step-00000004"
    elsewhere = tmp_path / "private"
    elsewhere.mkdir()
    (elsewhere / "a.txt").write_text("secret " * 500)
    edit_state(checkpoint, "config.data.path", str(elsewhere))
    with pytest.raises(UserError, match="data differ"):
        tiny_run(f"resume={checkpoint}", f"data.path={elsewhere}", "train.steps=6", "name=b")
    assert f"  data: text {elsewhere}\n" in capsys.readouterr().out


def test_a_run_continues_where_the_same_text_has_another_path(tmp_path: Path, notes: Path, tiny_run, capsys) -> None:
    """As on another machine: run folder, text and prepared tokens are all somewhere else."""
    here, there = tmp_path / "here", tmp_path / "there"
    shutil.copytree(notes, here)
    words = ["data=text", "train.steps=4"]
    assert tiny_run("name=a", f"data.path={here}", *words) == 0
    here.rename(there)
    assert tiny_run("name=a", "resume=auto", "train.steps=6", f"data.path={there}") == 0
    assert f"changed data.path: {here} → {there}" in capsys.readouterr().out
    (there / "more.txt").write_text("another text " * 500)
    with pytest.raises(UserError, match="the data differ"):
        tiny_run("name=a", "resume=auto", "train.steps=8", f"data.path={there}")


@pytest.mark.parametrize("groups", [{}, {"data": "mixture"}])
def test_the_paths_of_a_mixture_may_change_and_nothing_else_of_it(groups: dict) -> None:
    mixture = {"kind": "mixture", "path": None, "sources": {"a": {"kind": "text", "path": "old", "weight": 1}}}
    saved, moved = SAVED | {"data": mixture}, {"kind": "text", "path": "new", "weight": 1}
    composed = COMPOSED | {"data": mixture | {"sources": {"a": moved}}}
    assert merge(saved, composed, groups, {"data.sources": {"a": moved}})[1] == ["data.sources.a.path: old → new"]
    composed["data"]["sources"]["a"]["weight"] = 2
    with pytest.raises(UserError, match="data.sources.a.weight=2 cannot replace"):
        merge(saved, composed, groups, {"data.sources": {"a": moved}})


def test_a_finished_run_says_how_it_is_extended(tiny_run, capsys) -> None:
    assert tiny_run("name=a", "train.steps=4") == 0
    assert tiny_run("name=a", "resume=auto", "train.steps=4") == 0
    assert capsys.readouterr().out.endswith("is step 4 of 4; a larger train.steps=N extends the run\n")


@pytest.mark.parametrize("length", ["train.flops=2e9", "train.tokens_per_parameter=0.02"])
def test_a_length_by_flops_or_parameters_stays_where_the_text_has_fewer_tokens_than_planned(
    length: str, tmp_path: Path, tiny_run, script
) -> None:
    """It was computed for the vocabulary of a large text and with a table of bigrams; the run's text has got neither."""
    words = ["name=a", "tokenizer=bpe", "tokenizer.vocab_size=auto", "model.bigram_rows=auto", length]
    assert tiny_run(*words, "train.steps=auto", "train.save_every=2") == 0
    run = tmp_path / "runs" / "a"
    last = checkpoints_of(run)[-1].name
    shutil.rmtree(run / "checkpoints" / last)
    assert script("train")([f"resume={run}", length, f"runs_dir={run.parent}", f"data_dir={tmp_path / 'data'}"]) == 0
    assert checkpoints_of(run)[-1].name == last


# ------------------------------------------------------------------------- going on from an earlier step, or elsewhere


def test_an_earlier_step_is_refused_unless_a_run_is_named(run: Path, tmp_path: Path, tiny_run, capsys) -> None:
    before, named = contents(tmp_path), f"resume={run / 'checkpoints' / 'step-00000004'}"
    with pytest.raises(
        UserError, match="is step 4, but the run went on to step 8; add name=NEW .* or add name=first to "
    ):
        tiny_run(named, "train.steps=9")
    with pytest.raises(UserError, match=f"or add name=first runs_dir={run.parent} to "):
        tiny_run(named, "runs_dir=elsewhere")
    with pytest.raises(UserError, match="name=other: .* exists and is not a run folder"):
        (run.parent / "other" / "mine").mkdir(parents=True)
        tiny_run(named, "name=other", "train.steps=6")
    shutil.rmtree(run.parent / "other")
    assert contents(tmp_path) == before
    assert tiny_run(named, "name=second", "train.steps=6", "precision=fp32") == 0
    assert contents(run) == {name: before[f"runs/first/{name}"] for name in contents(run)}
    assert [path.name for path in checkpoints_of(run.parent / "second")] == ["step-00000006"]
    assert tiny_run(named, "name=first", "train.steps=6", "precision=fp32") == 0
    assert [path.name for path in checkpoints_of(run)] == ["step-00000004", "step-00000006"]
    assert [path.name[:19] for path in run.glob("checkpoints/aside-*")] == ["aside-step-00000008"]
    one, other = ((run.parent / name / "checkpoints" / "step-00000006") for name in ("first", "second"))
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def test_a_run_that_goes_on_from_another_and_has_no_checkpoint_yet_is_begun_again_from_the_same_step(
    run: Path, tiny_run
) -> None:
    named, other = f"resume={run / 'checkpoints' / 'step-00000004'}", run.parent / "other"
    words = [named, "name=other", "train.steps=6", "precision=fp32"]
    assert tiny_run(*words) == 0
    (made,) = checkpoints_of(other)
    weights = (made / "model.safetensors").read_bytes()
    shutil.rmtree(made)  # as if it had been killed before
    with pytest.raises(
        UserError, match=f"has no checkpoint yet; type the command .* with {named} in place of resume=auto"
    ):
        tiny_run("name=other", "resume=auto")
    with pytest.raises(UserError, match="name=other: .* exists"):
        tiny_run(f"resume={run / 'checkpoints' / 'step-00000008'}", "name=other", "train.steps=9")
    assert tiny_run(*words) == 0
    assert (made / "model.safetensors").read_bytes() == weights


def test_typed_values_are_checked_with_those_of_the_run(tmp_path: Path, tiny_run, script) -> None:
    """The default model has longer sequences than one step of this run has tokens, and a width that 7 does not divide."""
    shape = ["model.d_model=28", "model.n_head=7", "model.sequence_length=16", "train.tokens_per_step=64"]
    assert tiny_run("name=a", *shape, "train.steps=2", "train.sample_tokens=0") == 0
    places = [f"resume={tmp_path / 'runs' / 'a'}", f"data_dir={tmp_path / 'data'}", "dry_run=true"]
    assert script("train")([*places, "train.tokens_per_step=64", "model.n_head=7"]) == 0
    with pytest.raises(UserError, match="train.tokens_per_step=128 cannot replace train.tokens_per_step=64 of the run"):
        script("train")([*places, "train.tokens_per_step=128"])
    with pytest.raises(UserError, match="less than one sequence"):
        script("train")(["name=new", f"runs_dir={tmp_path}", "resume=auto", "train.tokens_per_step=64"])


def test_a_relative_path_is_found_from_another_folder(
    tmp_path: Path, notes: Path, tiny_run, monkeypatch, capsys
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    shutil.copytree(notes, tmp_path / "here" / "text")
    monkeypatch.chdir(tmp_path / "here")
    assert tiny_run("name=a", "data.path=text", "train.steps=2", "train.sample_tokens=0") == 0
    monkeypatch.chdir(tmp_path / "there")
    again = [f"runs_dir={tmp_path / 'runs'}", f"data_dir={tmp_path / 'data'}", "resume=a"]
    assert main(["train", *again, "train.steps=4"]) == 0
    out = capsys.readouterr().out
    assert f"  data: text {tmp_path / 'here' / 'text'}\n" in out and "changed data.path" not in out
    (tmp_path / "here").rename(tmp_path / "moved")  # from now on paths mean the working folder again
    monkeypatch.chdir(tmp_path / "moved")
    assert main(["train", *again, "train.steps=6", "data.path=text"]) == 0


# -------------------------------------------------------------------------------------------- restarts by torchrun


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes this process look like one of torchrun's n-th start."""

    def nth(number: int) -> None:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "job" / f"attempt_{number}" / "0" / "error.json"))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))

    (tmp_path / "job").mkdir()
    return nth


def test_a_restart_goes_on_in_the_folder_that_a_copied_checkpoint_began(
    run: Path, tmp_path: Path, tiny_run, start
) -> None:
    copy = Path(shutil.copytree(run / "checkpoints" / "step-00000004", tmp_path / "copy"))
    words = [f"resume={copy}", "train.save_every=1", "train.keep=100"]
    start(0)
    assert tiny_run(*words, "train.steps=6") == 0
    (begun,) = set(run.parent.iterdir()) - {run}
    start(1)
    assert tiny_run(*words, "train.steps=8") == 0
    assert set(run.parent.iterdir()) == {run, begun}
    assert [path.name for path in checkpoints_of(begun)] == [f"step-0000000{step}" for step in (5, 6, 7, 8)]
    shutil.rmtree(begun / "checkpoints")  # as if it had been killed before its first one
    start(2)
    assert tiny_run(*words, "train.steps=6") == 0
    assert set(run.parent.iterdir()) == {run, begun} and len(checkpoints_of(begun)) == 2


def test_a_restart_before_the_run_has_begun_goes_back_to_the_named_checkpoint(
    run: Path, tiny_run, start, capsys
) -> None:
    """Not on from the newest one, which the user wants to abandon."""
    start(1)
    named = run / "checkpoints" / "step-00000004"
    assert tiny_run(f"resume={named}", "name=first", "train.steps=9") == 0
    assert f"resuming {named}: step 4" in capsys.readouterr().out


def test_a_resumed_run_says_that_a_setting_left_auto_was_chosen_before(
    tmp_path: Path, tiny_run, script, capsys
) -> None:
    assert tiny_run("name=a", "compile=auto", "train.steps=4", "train.save_every=2") == 0
    assert "(chosen when the run began)" not in capsys.readouterr().out
    run = tmp_path / "runs" / "a"
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    assert script("train")([f"resume={run}", f"runs_dir={run.parent}", f"data_dir={tmp_path / 'data'}"]) == 0
    assert "torch.compile: off (chosen when the run began)" in capsys.readouterr().out
