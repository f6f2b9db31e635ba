"""Wrong command lines: one line that names the key and the remedy, exit code 2, and no file left half-written.
And prompts that must work, whatever characters they contain.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY, run_script, tiny_command, with_own_mounts

from andrea.checkpoint import checkpoints_of


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, notes: Path) -> Path:
    """A folder with a trained run, `runs/good`, and one example of every kind of broken input."""
    place = tmp_path_factory.mktemp("place")
    command = tiny_command(place, notes, "name=good", "train.steps=4")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    good = checkpoints_of(place / "runs" / "good")[-1]
    for name in ("truncated", "foreign"):
        shutil.copytree(good, place / name)
    weights = place / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (place / "foreign" / "manifest.json").write_text("{}")
    (place / "empty").mkdir()
    (place / "file").write_text("a file in place of a folder")
    (place / "binary").mkdir()
    (place / "binary" / "picture.txt").write_bytes(bytes(range(256)) * 40)
    (place / "blank").mkdir()
    (place / "blank" / "blank.txt").write_text("")
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, 9999
    (place / "short.bin").write_bytes(header.tobytes() + b"\1\0" * 50)
    header[0] = 7
    (place / "magic.bin").write_bytes(header.tobytes() + b"\1\0" * 9999)
    (place / "no_ranks").mkdir()
    return place


def files_under(place: Path) -> set[Path]:
    """All files and folders, except whole prepared data, which the next run uses."""
    whole = {meta.parent for meta in (place / "data").glob("*/meta.json")}
    return {path for path in place.rglob("*") if not whole & {path, path.parent}}


TEXT = ["data=text", "data.path={notes}"]
# (typed words, what the line must name: the key to change, or the broken folder)
TRAIN_WRONG = [
    (["train.setps=3"], "train.steps"),
    (["modle=gpt2"], "model"),
    (["model=andrea-120"], "andrea-120m"),
    (["optimiser=muon"], "optimizer"),
    (["optimizer=moun"], "muon"),
    (["model.d_modle=64"], "model.d_model"),
    (["train"], "key=value"),
    (["train.steps=many"], "train.steps"),
    (["train.steps=1.5"], "train.steps"),
    (["seed=1e400"], "seed"),
    (["precision=bf61"], "bf16"),
    (["deterministic=perhaps"], "deterministic"),
    (["optimizer.learning_rate=fast"], "optimizer.learning_rate"),
    (["model.n_head=5", "model.d_model=64"], "model.n_head"),
    (["model.n_kv_head=3"], "model.n_kv_head"),
    (["attention=additve"], "additive"),
    (["attention=additive"], "model.position"),
    (["attention=additive", "model.position=none", "attention.implementation=sdpa"], "attention.implementation"),
    (["attention.implementation=chunked"], "attention.implementation"),
    (["attention.implementation=flex"], "attention.implementation"),
    (["attention.implementation=triton", "precision=bf16"], "attention.implementation"),
    (["attention.implementation=trition"], "triton"),
    (["attention.window=0"], "attention.window"),
    (["attention.qk_clip=100"], "model.qk_norm"),
    (["attention.qk_clip=0", "model.qk_norm=false"], "attention.qk_clip"),
    (["attention=cosine", "attention.qk_clip=100", "model.qk_norm=false"], "attention.compatibility"),
    (["attention.implementation=sdpa", "attention.qk_clip=100", "model.qk_norm=false"], "attention.implementation"),
    (["train.steps=0"], "train.steps"),
    (["train.tokens_per_step=-256"], "train.tokens_per_step"),
    (["model.sequence_length=0"], "model.sequence_length"),
    (["train.micro_batch=0"], "train.micro_batch"),
    (["optimizer.learning_rate=nan"], "optimizer.learning_rate"),
    (["train.tokens_per_step=100"], "train.tokens_per_step"),
    (["data=text", "data.path="], "data.path"),
    (["data=text", "data.path={place}/absent"], "data.path"),
    (["data=text", "data.path={place}/empty"], "data.path"),
    (["data=text", "data.path={place}/blank"], "data.path"),
    (["data=text", "data.path={place}/binary"], "data.path"),
    (["data=shards", "data.path={place}/short.bin", "tokenizer=byte"], "short.bin"),
    (["data=shards", "data.path={place}/magic.bin", "tokenizer=byte"], "magic.bin"),
    (["data=shards", "data.path={place}/empty", "tokenizer=byte"], "data.path"),
    ([*TEXT, "tokenizer=gpt2", "tokenizer.path={place}/no_ranks"], "tokenizer.path"),
    ([*TEXT, "tokenizer=bpe", "tokenizer.path={place}/absent"], "tokenizer.path"),
    ([*TEXT, "name=good"], "name"),
    ([*TEXT, "name=good", "resume=auto", "train.steps=9", "model.d_mlp=32"], "model.d_mlp"),
    ([*TEXT, "name=good", "resume=auto", "train.steps=9", "tokenizer.kind=bpe"], "tokenizer.kind"),
    ([*TEXT, "resume={place}/absent"], "resume"),
    ([*TEXT, "resume={place}/truncated"], "truncated"),
    ([*TEXT, "init_from={place}/foreign"], "foreign"),
    ([*TEXT, "init_from={place}/runs/good", "resume=auto"], "resume and init_from exclude each other"),
    ([*TEXT, "name=wandb", "resume=auto"], "name=wandb is the folder"),
    ([*TEXT, "name=sweeps"], "name=sweeps is the folder"),
    ([*TEXT, "name={{model}}", "resume=auto", "train.flops=1e15", "model.n_kv_head=3"], "model.n_kv_head"),
    ([*TEXT, "name=good", "resume=auto", "train.steps=9", "train.flops=1e15"], "both set the length"),
    ([*TEXT, "tokenizer=bpe", "tokenizer.vocab_size=300", "init_from={good}"], "tokenizer"),
    ([*TEXT, "runs_dir={place}/file"], "runs_dir"),
    ([*TEXT, "data_dir={place}/file"], "data_dir"),
    ([*TEXT, "device=cuda:99"], "device"),
]  # fmt: skip
SAMPLE_WRONG = [
    (["tempreature=1"], "temperature"),
    (["temperature=hot"], "temperature"),
    (["num_samples=0"], "num_samples"),
    (["top_p=1.5"], "top_p"),
    (["checkpoint={place}/absent"], "checkpoint"),
    (["checkpoint={place}/truncated"], "truncated"),
    (["checkpoint={place}/foreign"], "foreign"),
    (["checkpoint={place}/empty"], "empty"),
    (["runs_dir={place}/empty"], "runs_dir"),
    (["prompt=@{place}/absent"], "prompt"),
]


@pytest.mark.parametrize(
    ("name", "typed", "named"), [("train", *case) for case in TRAIN_WRONG] + [("sample", *c) for c in SAMPLE_WRONG]
)
def test_one_line_and_exit_code_2(
    name: str, typed: list[str], named: str, place: Path, notes: Path, script, capsys, tmp_path
) -> None:
    good = checkpoints_of(place / "runs" / "good")[-1]
    words = [word.format(place=place, notes=notes, good=good) for word in typed]
    defaults = [f"runs_dir={place / 'runs'}"]
    if name == "train":
        defaults += [*TINY, f"data_dir={place / 'data'}"]
    given = {word.split("=")[0] for word in words}
    before = files_under(place)
    code, _, err = run_script(
        script(name), [word for word in defaults if word.split("=")[0] not in given] + words, capsys
    )
    assert code == 2
    assert err.startswith("error: ") and err.count("\n") == 1 and named in err, err
    assert files_under(place) - before == set()


@pytest.mark.parametrize("key", ["runs_dir", "data_dir"])
def test_a_path_that_cannot_be_written_is_named(key: str, tmp_path: Path, notes: Path) -> None:
    """chmod does not stop root, but a read-only mount does. In a mount namespace of its own, it ends by itself."""
    locked = tmp_path / "locked"
    locked.mkdir()
    command = tiny_command(tmp_path, notes, f"{key}={locked / 'below'}")
    tried = with_own_mounts('mount --bind "$0" "$0" && mount -o remount,ro,bind "$0"', locked, command)
    assert tried.returncode == 2 and tried.stderr.count("\n") == 1 and key in tried.stderr, tried.stderr
    assert list(locked.iterdir()) == []


@pytest.mark.parametrize(
    "prompt",
    ["def main(", "привет", "it's", "a, b", "12", "🦊", "a\nb", "null", "${x}", "=", ""],
    ids=lambda prompt: repr(prompt),
)
def test_prompts_that_must_work(prompt: str, place: Path, script, capsys) -> None:
    words = [f"runs_dir={place / 'runs'}", f"prompt={prompt}", "max_new_tokens=3", "device=cpu"]
    code, out, err = run_script(script("sample"), words, capsys)
    assert code == 0 and out.startswith(prompt) and err.endswith("\n\n") and err.count("\n") == 3


@pytest.mark.slow
def test_a_prompt_of_ten_kilobytes_works_where_the_model_is_long_enough(
    place: Path, tmp_path: Path, tiny_run, script, capsys
) -> None:
    tiny_run(
        "name=long", "model.sequence_length=10496", "train.tokens_per_step=10496", "train.steps=1", "model.n_layer=1"
    )
    prompt = "0123456789" * 1024
    code, out, _ = run_script(
        script("sample"), [f"runs_dir={tmp_path / 'runs'}", f"prompt={prompt}", "max_new_tokens=2"], capsys
    )
    assert code == 0 and prompt in out
