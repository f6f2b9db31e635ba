"""A vocabulary of more than 65,536 tokens: prepared, trained on, resumed, sampled, and seen through the lens."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import run_script
from large_vocabulary import FIRST_RARE, N_VOCAB, large_tokenizer, rare_text

from andrea.__main__ import main
from andrea.checkpoint import newest_whole
from andrea.checkpoint.model import load_model
from andrea.text.shards import open_shard
from andrea.training.records.run_folder import read_lines


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the tokenizer and a text of its last tokens."""
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "rare.txt").write_text(rare_text(6000))
    (tmp_path / "tokenizer").mkdir()
    large_tokenizer().save(tmp_path / "tokenizer")
    return tmp_path


def words_of(place: Path, *more: str) -> tuple[str, ...]:
    tokenizer = ("tokenizer=bpe", "tokenizer.vocab_size=auto", f"tokenizer.path={place / 'tokenizer'}")
    return (f"data.path={place / 'words'}", *tokenizer, "model.d_model=16", "train.tokens_per_step=128", *more)


@pytest.mark.slow
def test_every_command_serves_a_large_vocabulary(place: Path, tiny_run, script, capsys) -> None:
    assert tiny_run(*words_of(place, "name=a", "train.steps=20", "optimizer=adamw")) == 0
    (prepared,) = (place / "data").glob("text-bpe-*")
    tokens = open_shard(prepared / "train-000000.bin")[0:100]
    assert tokens.dtype == np.uint32 and tokens.max() >= FIRST_RARE
    losses = [
        record["train/loss"] for record in read_lines(place / "runs" / "a" / "metrics.jsonl") if "train/loss" in record
    ]
    assert losses[-1] < losses[0] - 3

    again = [f"resume={place / 'runs' / 'a'}", f"data_dir={place / 'data'}", "train.steps=24", "logger=none"]
    assert script("train")(again) == 0
    checkpoint = newest_whole(place / "runs" / "a")
    tokenizer = checkpoint.tokenizer()
    assert checkpoint.step == 24 and tokenizer.n_vocab == load_model(checkpoint, tokenizer).n_vocab == N_VOCAB

    prompt = rare_text(3)
    asked = [f"checkpoint={checkpoint.path}", f"prompt={prompt}", "max_new_tokens=5", "temperature=0", "threads=1"]
    code, out, _ = run_script(script("sample"), asked, capsys)
    assert code == 0 and max(tokenizer.encode(out)) >= FIRST_RARE

    page = place / "lens.html"
    asked = ["lens", f"checkpoint={checkpoint.path}", f"prompt={prompt}", f"out={page}", "threads=1"]
    assert run_script(main, asked, capsys)[0] == 0
    facts, ids = ids_in(page)
    assert facts["tokens"][1:] == tokenizer.encode(prompt) and ids.dtype == np.uint32
    assert ids.max() >= FIRST_RARE and {str(token) for token in ids.flatten().tolist()} <= facts["texts"].keys()


def ids_in(page: Path) -> tuple[dict, np.ndarray]:
    """The facts of a page of the lens, and the ids of the likeliest next tokens, (T, C)."""
    text = page.read_text(encoding="utf-8")
    facts = json.loads(re.search(r'id="facts">(.*?)</script>', text, re.DOTALL)[1])
    data = base64.b64decode(re.search(r'id="data-next">(.*?)</script>', text, re.DOTALL)[1])
    offset = 0
    for name, kind, shape in facts["layouts"]["next"]:
        array = np.frombuffer(data, dtype=f"<{kind}", count=int(np.prod(shape)), offset=offset).reshape(shape)
        offset += array.nbytes
        if name == "candidate_ids":
            return facts, array
    raise AssertionError("the page has no ids")
