"""lm-eval's figures of our model are those of its own `hf` model on the export: remote code, and Qwen3's class."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "tests" / "interop"))
from exportable import BLOCKS_OF_32, NANO, make_trained, write_trained

from andrea.config import UserError
from andrea.evaluation.scoring import load_subject
from andrea.interop.architectures import choose_class
from andrea.interop.hugging_face.target import write_folder
from andrea.runtime.program import module_environment

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("lm_eval")
pytest.importorskip("transformers", minversion="5.10")

TEXTS = ["one two", "def f(x):\n    return x\n" * 5, "é" * 21, "a"]
PAIRS = [("one two", " three"), ("one two", " four five"), ("", "begin"), ("for key in", "\n"), ("x" * 90, " y z")]
PAIRS += [("while the context is long enough to be shared", f" {word}") for word in ("one", "three", "fifteen")]
CASES: dict[str, dict[str, Any]] = {"remote code": NANO, "Qwen3": BLOCKS_OF_32 | {"qk_norm": True}}


def requests_of(kind: str, arguments: list[tuple]) -> list:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


@pytest.fixture(scope="module", params=CASES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """Our model in lm-eval, and the export in lm-eval with end-of-text in front and without."""
    from lm_eval.models.huggingface import HFLM

    from andrea.evaluation.harness.model import AndreaLM

    folder = tmp_path_factory.mktemp("model")
    trained = make_trained(CASES[request.param])
    write_trained(folder / "one", trained)
    (folder / "hf").mkdir()
    write_folder(folder / "hf", trained, choose_class(trained)[0], "f32")
    how = {"pretrained": str(folder / "hf"), "trust_remote_code": True, "dtype": "float32", "device": "cpu"}
    how |= {"max_length": trained.model.sequence_length, "batch_size": 3}
    ours = AndreaLM(checkpoint="one", runs_dir=str(folder), batch_size=3)
    return ours, HFLM(**how), HFLM(**how, add_bos_token=False)


def test_log_likelihoods_are_those_of_the_export(both) -> None:
    ours, theirs, _ = both
    arguments = requests_of("loglikelihood", PAIRS)
    for (nats, greedy), (their_nats, their_greedy) in zip(
        ours.loglikelihood(arguments), theirs.loglikelihood(arguments), strict=True
    ):
        assert nats == pytest.approx(their_nats, abs=2e-4) and greedy == their_greedy and nats < -1


def test_rolling_log_likelihoods_are_those_of_the_export_without_a_second_end_of_text(both) -> None:
    ours, _, theirs = both
    arguments = requests_of("loglikelihood_rolling", [(text,) for text in TEXTS])
    assert ours.loglikelihood_rolling(arguments) == pytest.approx(theirs.loglikelihood_rolling(arguments), abs=5e-4)


def test_generated_texts_are_those_of_the_export(both) -> None:
    ours, theirs, _ = both
    settings = {"until": ["e"], "max_gen_toks": 13, "do_sample": False}
    others = {"until": [], "max_gen_toks": 7, "do_sample": False}
    arguments = [(context, settings) for context, _ in PAIRS if context] + [("one two", others)]
    written = ours.generate_until(requests_of("generate_until", arguments))
    assert written == theirs.generate_until(requests_of("generate_until", arguments))
    assert not any("e" in text for text in written[:-1])


def test_a_setting_of_generation_that_we_do_not_have_is_refused(both) -> None:
    with pytest.raises(UserError, match="num_beams, which this model does not know"):
        both[0].generate_until(requests_of("generate_until", [("a", {"num_beams": 3})]))


@pytest.mark.slow
def test_the_command_line_of_lm_eval_runs_our_tasks_and_our_text_offline(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_trained(runs / "one", make_trained(NANO))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    words = ["run", "--model", "andrea", "--model_args", f"checkpoint=one,runs_dir={runs}", "--batch_size", "4"]
    words += ["--tasks", "andrea_bpb", "andrea_brackets", "--limit", "4", "--metadata", f"text={tmp_path / 'a.jsonl'}"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-m", "andrea.evaluation.harness", *words, "--output_path", str(tmp_path / "out")],
        env=module_environment() | offline,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "out").rglob("results*.json")
    found = json.loads(path.read_text())["results"]
    assert found["andrea_brackets"]["acc,none"] in (0.0, 0.25, 0.5, 0.75, 1.0)
    from andrea.evaluation.scoring import bits_per_byte

    expected = bits_per_byte(load_subject("one", str(runs), "cpu", 4, False), TEXTS).value
    assert found["andrea_bpb"]["bits_per_byte,none"] == pytest.approx(expected, rel=1e-6)
