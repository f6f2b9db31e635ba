"""lm-eval over HTTP (`local-completions`) gives what lm-eval gives with our model in its own process."""

from __future__ import annotations

import os
import sys

import pytest
from conftest import ROOT
from served import config_of, serving

sys.path.append(str(ROOT / "tests" / "interop"))
from exportable import NANO, make_trained, write_trained

from andrea.interop.hugging_face.tokenizer_files import write_tokenizer

os.environ.setdefault("HF_HUB_OFFLINE", "1")
for package in ("lm_eval", "transformers", "tenacity", "aiohttp"):
    pytest.importorskip(package)
pytestmark = pytest.mark.slow

PAIRS = [("one two", " three"), ("one two", " four five"), ("", "begin"), ("for key in", "\n"), ("x" * 30, " y z")]
PAIRS += [("while the context is shared", f" {word}") for word in ("one", "three", "fifteen")]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_log_likelihoods_and_texts_are_those_in_process(tmp_path, precision):
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from andrea.evaluation.harness.model import AndreaLM

    trained = make_trained(NANO)
    write_trained(tmp_path / "one", trained)
    (tmp_path / "tokenizer").mkdir()
    write_tokenizer(tmp_path / "tokenizer", trained.tokenizer, trained.model.sequence_length)
    ours = AndreaLM(checkpoint="one", runs_dir=str(tmp_path), batch_size=3)
    pairs = [Instance("loglikelihood", {}, each, index) for index, each in enumerate(PAIRS)]
    until = {"until": ["e"], "max_gen_toks": 6, "temperature": 0.0}
    written = [Instance("generate_until", {}, (text, until), index) for index, (text, _) in enumerate(PAIRS) if text]
    with serving(config_of(tmp_path, checkpoint="one", served_name="one", precision=precision)) as (url, _):
        theirs = LocalCompletionsAPI(
            base_url=f"{url}/v1/completions",
            model="one",
            tokenizer_backend="huggingface",
            tokenizer=str(tmp_path / "tokenizer"),
            add_bos_token=True,
            batch_size=3,
            max_length=trained.model.sequence_length,
            max_retries=1,
        )
        for one, other in zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True):
            assert other[0] == pytest.approx(one[0], abs=1e-4) and other[1] == one[1]
        if precision == "fp32":
            assert theirs.generate_until(written) == ours.generate_until(written)
