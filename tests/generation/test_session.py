"""`sample.py`: the output, the prompts from every origin, the checkpoints that are refused."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import make_model, write_model

from andrea.config import SampleConfig, Text, UserError, parse, to_plain
from andrea.generation.session import read_prompt, sample


def write(runs: Path, **state) -> Path:
    """A checkpoint of a model that always writes 'a'; returns its folder."""
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embedding.weight[:, 0] = 1.0
        model.final_norm.weight.fill_(1.0)
        model.head.weight[ord("a"), 0] = 3.0
    return write_model(runs, model.state_dict(), **state)


def config_of(runs: Path, **changes) -> SampleConfig:
    defaults = SampleConfig(
        checkpoint=None, runs_dir=Text(runs), prompt=Text("def "), max_new_tokens=5, temperature=0.0, top_k=None,
        top_p=None, min_p=None, repetition_penalty=1.0, prompts=None, lookahead=0, num_samples=1, seed=1, stop=[],
        interactive=False, device="cpu",
        threads=1, precision="fp32", compile="off",
    )  # fmt: skip
    return dataclasses.replace(defaults, **changes)


def output(config: SampleConfig, capsys, dtype=torch.float32) -> str:
    assert sample(config, torch.device("cpu"), dtype) == 0
    return capsys.readouterr().out


def stdin(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def test_the_checkpoint_is_described_before_the_text(tmp_path, capsys):
    write(tmp_path)
    head, text = output(config_of(tmp_path), capsys).split("\n\n", 1)
    for fact in ("step-00000060", "tiny", "step 60", "validation 1.2500 bits per byte", "byte-257-", "cpu, float32"):
        assert fact in head
    assert text == "def aaaaa\n"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_description_names_matrices_in_8_bits(tmp_path, capsys, dtype):
    write(tmp_path)
    head, text = output(config_of(tmp_path, precision="int8"), capsys, dtype).split("\n\n", 1)
    assert head.endswith(f"cpu, {str(dtype).removeprefix('torch.')} with matrices in int8") and text == "def aaaaa\n"


def test_compiling_is_refused_where_it_gains_nothing(tmp_path):
    write(tmp_path)
    with pytest.raises(UserError, match="compile=on needs a CUDA card, got device=cpu"):
        sample(config_of(tmp_path, compile="on"), torch.device("cpu"), torch.float32)


def test_8_bits_without_a_compiler_are_refused(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setattr("andrea.generation.session.library", lambda: None)
    with pytest.raises(UserError, match="precision=int8 needs a C.. compiler on a CPU; install g"):
        sample(config_of(tmp_path, precision="int8"), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_are_labelled_and_follow_each_other(tmp_path, capsys, dtype):
    write(tmp_path, val_bpb=None)
    text = output(config_of(tmp_path, num_samples=3), capsys, dtype)
    assert "not validated yet" in text
    body = text.split("\n\n", 1)[1]
    assert body == "".join(f"--- sample {number} ---\ndef aaaaa\n" for number in (1, 2, 3))


def test_each_line_of_a_file_is_a_prompt_of_one_batch(tmp_path, capsys):
    write(tmp_path)
    (tmp_path / "prompts").write_text("def \n\nclass A:\n")
    config = config_of(tmp_path, prompt=Text(""), prompts=Text(tmp_path / "prompts"))
    expected = "--- sample 1 ---\ndef aaaaa\n--- sample 2 ---\nclass A:aaaaa\n"
    for lookahead in (0, 3):
        assert output(dataclasses.replace(config, lookahead=lookahead), capsys).split("\n\n", 1)[1] == expected


def test_a_prompt_ends_at_a_newline_alone(tmp_path, capsys, monkeypatch):
    write(tmp_path)
    lines = "a\u2028b\u0085c\r\nd\re\r\n".encode()
    (tmp_path / "prompts").write_bytes(lines)
    out = output(config_of(tmp_path, prompt=Text(""), prompts=Text(tmp_path / "prompts")), capsys)
    assert out.endswith("--- sample 1 ---\na\u2028b\u0085caaaaa\n--- sample 2 ---\nd\reaaaaa\n")
    stdin(monkeypatch, lines)
    out = output(config_of(tmp_path, prompt=Text(""), interactive=True), capsys)
    assert out.endswith("prompt> a\u2028b\u0085caaaaa\nprompt> d\reaaaaa\nprompt> \n")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"\n\n", "the file holds no prompt"),
        (b"\xff\xfe", "not UTF-8"),
        (b"a\nb\nc\n", "lower one"),
    ],
)
def test_a_file_of_prompts_that_cannot_be_used_is_named(tmp_path, content, said):
    write(tmp_path)
    if content is not None:
        (tmp_path / "prompts").write_bytes(content)
    config = config_of(tmp_path, prompt=Text(""), prompts=Text(tmp_path / "prompts"), max_new_tokens=2**25)
    with pytest.raises(UserError, match=f"prompts=.*{said}"):
        sample(config, torch.device("cpu"), torch.float32)


def test_a_file_of_prompts_excludes_another_prompt(tmp_path):
    with pytest.raises(UserError, match="leave out prompt"):
        parse(SampleConfig, to_plain(config_of(tmp_path, prompts=Text("file"))))


def test_stop_strings_reach_the_engine(tmp_path, capsys):
    write(tmp_path)
    assert output(config_of(tmp_path, stop=[Text("aaa")]), capsys).endswith("\n\ndef \n")


@pytest.mark.parametrize("prompt", ["", "привет", "it's", "a, b", "🙂", "a\nb", "\udcff"])
def test_prompts_arrive_as_they_are(tmp_path, capsys, prompt):
    write(tmp_path)
    shown = prompt.encode("utf-8", "replace").decode()
    assert output(config_of(tmp_path, prompt=Text(prompt)), capsys).endswith(f"\n\n{shown}aaaaa\n")


def test_prompt_from_a_file_or_standard_input(tmp_path, monkeypatch):
    path = tmp_path / "prompt.txt"
    path.write_bytes("déf\r\n".encode())
    assert read_prompt(f"@{path}") == "déf\r\n"
    stdin(monkeypatch, "déf\r\n".encode())
    assert read_prompt("-") == "déf\r\n"


def test_unreadable_prompts_are_refused(tmp_path, monkeypatch):
    (tmp_path / "binary").write_bytes(b"ab\xff")
    with pytest.raises(UserError, match=r"prompt=@.*is not UTF-8 text \(byte 2\)"):
        read_prompt(f"@{tmp_path / 'binary'}")
    with pytest.raises(UserError, match="there is no file"):
        read_prompt("@" + str(tmp_path / "absent"))
    with pytest.raises(UserError, match="there is no file"):
        read_prompt(f"@{tmp_path}")
    stdin(monkeypatch, b"\xff")
    with pytest.raises(UserError, match="standard input is not UTF-8"):
        read_prompt("-")


def test_prompt_too_long_is_refused_before_anything_is_shown(tmp_path, capsys):
    write(tmp_path)
    with pytest.raises(UserError, match="prompt has 24 tokens"):
        sample(config_of(tmp_path, prompt=Text("x" * 24)), torch.device("cpu"), torch.float32)
    assert capsys.readouterr().out == ""


def test_interactive_answers_line_by_line_and_survives_a_long_one(tmp_path, capsys, monkeypatch):
    write(tmp_path)
    stdin(monkeypatch, b"one\n" + b"x" * 99 + b"\ntwo\n")
    assert sample(config_of(tmp_path, interactive=True, prompt=Text("zero")), torch.device("cpu"), torch.float32) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith(
        "\n\neach line is a separate prompt; Ctrl-D ends\nzeroaaaaa\nprompt> oneaaaaa\nprompt> prompt> twoaaaaa\nprompt> \n"
    )
    assert captured.err.startswith("error: prompt has 99 tokens")


def test_a_prompt_file_of_an_impossible_name_is_refused():
    with pytest.raises(UserError, match="there is no file"):
        read_prompt("@" + "a" * 5000)


def test_a_line_that_is_not_utf_8_is_a_prompt_as_well(tmp_path, capsys, monkeypatch):
    write(tmp_path)
    stdin(monkeypatch, b"a\xff\nb\n")
    assert output(config_of(tmp_path, prompt=Text(""), interactive=True), capsys).count("aaaaa") == 2
