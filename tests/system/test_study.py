"""bench/study.py: which runs it wants, how it brackets a rate, and the figures of its table."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

pytestmark = pytest.mark.untraced

BENCH = Path(__file__).resolve().parents[2] / "bench"
TINY = """model.d_model=16 model.n_layer=1 model.n_head=2 model.d_mlp=32 model.sequence_length=16 train.tokens_per_step=64
    compile=off attention.implementation=sdpa tokenizer=byte data=text""".split()
VARIANTS = {
    "base": {},
    "tuned": {"tune": "rates"},
    "decay": {"tune": "optimizer.weight_decay", "factors": [1, 2, 4]},
    "half": {"words": ["train.tokens_per_step=32"]},
    "gelu": {"words": ["model.mlp=gelu"], "shapes": ["other"]},
    "union": {"with": ["half", "gelu"]},
    "rest": {"with": ["union"], "without": ["half", "union"]},
}


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    import study

    return study


@pytest.fixture
def make(study: ModuleType, tmp_path: Path):
    def made(*only: str, **chosen):
        path = tmp_path / "variants.yaml"
        shape = {"words": ["model=andrea-nano", "optimizer.weight_decay=0.1", *TINY], "steps": 12}
        path.write_text(yaml.safe_dump({"shapes": {"tiny": shape}, "variants": VARIANTS}, sort_keys=False))
        defaults = {"variants": path, "shape": "tiny", "only": list(only) or None, "base": "base", "seeds": [3, 5],
                    "equal_time": False, "words": ["data.path=x"], "output": tmp_path / "study.json"}  # fmt: skip
        return study.Study(argparse.Namespace(**defaults | chosen), yaml.safe_load(path.read_text()))

    return made


def finish(made, bpb) -> list[str]:
    """Give every wanted run the figure `bpb(about)`, until none is wanted; returns their titles."""
    titles = []
    while jobs := made.wanted():
        for job in jobs:
            titles.append(job.title)
            made.runs[job.key] = {"bpb": bpb(job.about)} | job.about
    return titles


def test_a_run_of_equal_values_is_not_wanted_twice_and_all_variants_have_as_many_tokens(make) -> None:
    made = make("half")
    assert finish(made, lambda about: 1.0) == [
        "base, 12 steps, seed 3",
        "base, 12 steps, seed 5",
        "half, 24 steps, seed 3",
        "half, 24 steps, seed 5",
    ]


def test_a_rate_is_tried_until_the_best_has_a_worse_one_on_either_side(make) -> None:
    titles = finish(make("tuned"), lambda about: abs(math.log(about["factor"] / 2.7)))
    tried = ["0.71", "1.41", "1.986", "2.797", "3.939"]  # 1 is the base's run
    assert [title for title in titles if "tuned" in title and "seed 3" in title] == [
        f"tuned, factor {factor}, 12 steps, seed 3" for factor in tried
    ]
    assert titles[-1] == "tuned, factor 2.797, 12 steps, seed 5"
    titles = finish(make("decay"), lambda about: about["factor"])
    assert any("factor 0.5," in title for title in titles) and not any("factor 8," in title for title in titles)
    assert len(titles) < 13  # the search ends, even though each smaller one is better


def test_a_rate_that_diverges_is_the_worst(make) -> None:
    made = make("tuned")
    finish(made, lambda about: None if about["factor"] > 1 else 1 / about["factor"])
    assert made.best_factor(made.variants["tuned"]) == 1.0


def test_the_factor_multiplies_the_three_rates(make) -> None:
    made = make("tuned")
    assert made.words(made.variants["tuned"], 1.41)[-3:] == (
        "optimizer.learning_rate=0.0141",
        "optimizer.embedding_learning_rate=0.0705",
        "optimizer.matrix_learning_rate=0.0282",
    )


def test_at_equal_time_a_variant_trains_for_the_steps_of_its_speed(make) -> None:
    made = make("half", equal_time=True)
    half = made.variants["half"]
    assert not any("18" in title for title in finish(made, lambda about: 1.0))  # the speed is not known
    made.speeds[made.speed_key(half)] = {"ratio": 0.75}
    assert finish(made, lambda about: 1.0) == ["half, 18 steps, seed 3", "half, 18 steps, seed 5"]
    made.speeds[made.speed_key(half)] = {"ratio": 1.009}
    assert made.equal_time_steps(half) == 24


def test_variants_are_made_of_others(make, study: ModuleType) -> None:
    assert list(make().variants) == ["base", "tuned", "decay", "half", "union", "rest"]  # gelu is of another shape
    words = {name: variant.words for name, variant in make().variants.items()}
    assert words["union"] == ("train.tokens_per_step=32", "model.mlp=gelu") and words["rest"] == ("model.mlp=gelu",)
    with pytest.raises(study.UserError, match="no variant 'x'; known variants: base, tuned"):
        make("x")
    for about, message in (
        ({"word": []}, "unknown keys: word"),
        ({"without": ["a"]}, "without: a is not in it"),
        ({"tune": "rates", "factors": [1, 2]}, "at least three"),
    ):
        with pytest.raises(study.UserError, match=message):
            study.make_variant({"v": about}, "v")


def test_the_table_compares_runs_of_the_same_seeds(make, study: ModuleType, capsys: pytest.CaptureFixture) -> None:
    made = make("half")
    finish(made, lambda about: about["seed"] / 10 + (about["variant"] == "half") * about["seed"] / 100)
    study.show_table(made)
    row = "| half |  | 0.4400 | 0.2200 | +0.0400 ± 0.0100 (2 seeds) |  |  |  |"
    assert row in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.long
def test_the_variants_of_the_study_are_valid(study: ModuleType) -> None:
    path = BENCH / "variants.yaml"
    described = yaml.safe_load(path.read_text())
    for shape in described["shapes"]:
        chosen = {"variants": path, "shape": shape, "only": None, "base": "base", "seeds": [1], "words": []}
        study.Study(argparse.Namespace(**chosen, equal_time=False, output=None), described).check()


@pytest.mark.slow
@pytest.mark.long
def test_a_study_trains_records_and_does_not_train_again(make, tmp_path: Path, notes: Path) -> None:
    make()  # writes the variants
    words = ["--variants", "variants.yaml", "--shape", "tiny", "--only", "half", "--seeds", "3", "--parallel", "2"]
    command = [sys.executable, str(BENCH / "study.py"), *words, "--threads", "1", "--output", "study.json"]
    command += ["--words", f"data.path={notes}"]
    environment = os.environ | {"PYTHONPATH": str(BENCH.parent)}
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "seed 3" not in done.stdout.partition("\n\n")[0]  # nothing was trained the second time
    runs = json.loads((tmp_path / "study.json").read_text())["runs"].values()
    # The two runs train side by side: either may end, and be written, first.
    assert sorted((run["steps"], run["tokens"], run["curve"][-1][0]) for run in runs if run["bpb"] > 0) == [
        (12, 768, 768),
        (24, 768, 768),
    ]
