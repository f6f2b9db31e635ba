"""`sample.py`: the output, the prompts from every origin, the checkpoints that are refused."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import CONFIG, make_model, write_model

from andrea.config import SampleConfig, Text, UserError, parse, to_plain
from andrea.generation.engine import Engine
from andrea.generation.packed_layers import library
from andrea.generation.sample_command import check_device_offers, decoding_dtype, read_prompt, sample
from andrea.runtime.native import compiled_library
from andrea.text.tokenizer import ByteTokenizer

ROOT = Path(__file__).resolve().parent.parent.parent


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
        top_p=None, min_p=None, repetition_penalty=1.0, prompts=None, out=None, lookahead=0, num_samples=1, seed=1, stop=[],
        interactive=False, device="cpu",
        threads=1, precision="fp32", compile="off",
    )  # fmt: skip
    return dataclasses.replace(defaults, **changes)


def output(config: SampleConfig, capsys) -> tuple[str, str]:
    """What is written to standard output, the texts alone, and to standard error."""
    assert sample(config, torch.device("cpu")) == 0
    return tuple(capsys.readouterr())


def stdin(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def test_the_checkpoint_is_described_before_the_text(tmp_path, capsys):
    write(tmp_path)
    text, head = output(config_of(tmp_path), capsys)
    for fact in ("step-00000060", "tiny", "step 60", "validation 1.2500 bits per byte", "byte-257-", "cpu, float32"):
        assert fact in head
    assert text == "def aaaaa\n"


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize(("multiplies", "dtype"), [(False, "float32"), (True, "bfloat16")])
def test_the_description_names_matrices_in_few_bits(tmp_path, capsys, monkeypatch, multiplies, dtype, precision):
    monkeypatch.setattr("andrea.runtime.device.cpu_multiplies_bf16", lambda: multiplies)
    write(tmp_path)
    text, head = output(config_of(tmp_path, precision=precision), capsys)
    assert head.endswith(f"cpu, {dtype} with matrices in {precision}\n\n") and text == "def aaaaa\n"


def test_4_bits_are_for_a_cpu():
    with pytest.raises(
        UserError, match="precision=int4 is for a CPU, got device=cuda; use precision=bf16, or device=cpu"
    ):
        check_device_offers("int4", "on", torch.device("cuda"))


def test_8_bits_on_a_gpu_need_a_key_that_other_commands_lack():
    """`serve`, `evaluate` and `andrea.load` have the key precision, and no key compile."""
    with pytest.raises(UserError, match="on cuda only with compile=on, a key of sample.py alone; use precision=bf16"):
        check_device_offers("int8", "off", torch.device("cuda"))
    check_device_offers("int8", "on", torch.device("cuda"))


def test_compiling_is_refused_where_it_gains_nothing(tmp_path):
    write(tmp_path)
    with pytest.raises(UserError, match="compile=on needs a CUDA GPU, got device=cpu"):
        sample(config_of(tmp_path, compile="on"), torch.device("cpu"))


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("/no/such/compiler", "no C.. compiler is found .*; install g"), ("false", "false ended with exit code 1;")],
)
@pytest.mark.filterwarnings("ignore:decode.cpp was not compiled")
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_few_bits_without_compiled_kernels_are_refused_with_the_reason(
    tmp_path, monkeypatch, compiler, reason, precision
):
    write(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", compiler)
    caches = (library, compiled_library)
    try:
        for cache in caches:
            cache.cache_clear()
        with pytest.raises(
            UserError, match=f"precision={precision} needs our C.. kernel on a CPU, and there is none: {reason}"
        ):
            sample(config_of(tmp_path, precision=precision), torch.device("cpu"))
    finally:
        for cache in caches:
            cache.cache_clear()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_samples_are_labelled_and_follow_each_other(tmp_path, capsys, precision):
    write(tmp_path, val_bpb=None)
    text, told = output(config_of(tmp_path, num_samples=3, precision=precision), capsys)
    assert "not validated yet" in told and text == "def aaaaa\n" * 3
    assert told.split("\n\n", 1)[1] == "".join(f"--- sample {number} ---\n" for number in (1, 2, 3))


def test_each_line_of_a_file_is_a_prompt_of_one_batch(tmp_path, capsys):
    write(tmp_path)
    (tmp_path / "prompts").write_text("def \n\nclass A:\n")
    config = config_of(tmp_path, prompt=Text(""), prompts=Text(tmp_path / "prompts"))
    for lookahead in (0, 3):
        text, told = output(dataclasses.replace(config, lookahead=lookahead), capsys)
        assert text == "def aaaaa\nclass A:aaaaa\n" and told.endswith("\n\n--- sample 1 ---\n--- sample 2 ---\n")


@pytest.mark.parametrize("given", ["prompts", "samples"])
def test_texts_whose_keys_and_values_memory_does_not_hold_are_written_in_several_batches(
    tmp_path, capsys, monkeypatch, given
):
    write_model(tmp_path, make_model().state_dict())
    (tmp_path / "prompts").write_text("a\nbc\nd\nefg\nh\n")
    more = {"prompts": Text(tmp_path / "prompts"), "prompt": Text("")} if given == "prompts" else {"num_samples": 5}
    config = config_of(tmp_path, temperature=1.0, **more)
    expected, _ = output(config, capsys)
    stream, sizes = Engine.stream_all, []
    monkeypatch.setattr(
        Engine, "stream_all", lambda self, texts, of: (sizes.append(len(texts)), stream(self, texts, of))[1]
    )
    one = make_model().make_cache(1, CONFIG.sequence_length).n_bytes
    monkeypatch.setattr("andrea.generation.sample_command.free_host_bytes", lambda: 5 * one)
    assert output(config, capsys)[0] == expected and sizes == [2, 2, 1]


@pytest.mark.parametrize("given", ["prompts", "samples"])
def test_the_texts_are_also_written_to_a_file(tmp_path, capsys, given):
    """Each text stands apart there, also one of several lines."""
    write(tmp_path)
    (tmp_path / "prompts.txt").write_text("one\nzwölf\n")
    out = tmp_path / "texts.jsonl"
    more = {"prompts": Text(tmp_path / "prompts.txt"), "prompt": Text("")} if given == "prompts" else {"num_samples": 2}
    shown, _ = output(config_of(tmp_path, out=Text(out), max_new_tokens=3, **more), capsys)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    begun = ["one", "zwölf"] if given == "prompts" else ["def ", "def "]
    assert records == [{"prompt": prompt, "text": "aaa"} for prompt in begun]
    assert shown == "".join(prompt + "aaa\n" for prompt in begun)


def test_the_file_is_whole_though_nobody_reads_the_output_any_more(tmp_path, capsys, monkeypatch):
    """As after `| head -1`. Without a file nobody needs the texts, and the command ends early."""

    def fail() -> None:
        raise BrokenPipeError

    write(tmp_path)
    monkeypatch.setattr("andrea.generation.sample_command.raise_output_failure", fail)
    out = tmp_path / "texts.jsonl"
    output(config_of(tmp_path, out=Text(out), num_samples=2), capsys)
    assert [json.loads(line)["text"] for line in out.read_text().splitlines()] == ["aaaaa"] * 2
    assert "sample 2" not in output(config_of(tmp_path, num_samples=2), capsys)[1]


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(UserError, match="out=.*there is no folder"):
        sample(
            config_of(tmp_path / "no-runs", out=Text(tmp_path / "absent" / "x.jsonl")),
            torch.device("cpu"),
        )
    with pytest.raises(UserError, match="out=FILE.*leave out interactive"):
        parse(SampleConfig, to_plain(config_of(tmp_path, out=Text("x"), interactive=True)))


def test_a_prompt_ends_at_a_newline_alone(tmp_path, capsys, monkeypatch):
    write(tmp_path)
    lines = "a\u2028b\u0085c\r\nd\re\r\n".encode()
    (tmp_path / "prompts").write_bytes(lines)
    expected = "a\u2028b\u0085caaaaa\nd\reaaaaa\n"
    assert output(config_of(tmp_path, prompt=Text(""), prompts=Text(tmp_path / "prompts")), capsys)[0] == expected
    stdin(monkeypatch, lines)
    assert output(config_of(tmp_path, prompt=Text(""), interactive=True), capsys)[0] == expected


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
        sample(config, torch.device("cpu"))


def test_a_file_of_prompts_excludes_another_prompt(tmp_path):
    with pytest.raises(UserError, match="leave out prompt"):
        parse(SampleConfig, to_plain(config_of(tmp_path, prompts=Text("file"))))


def test_stop_strings_reach_the_engine(tmp_path, capsys):
    write(tmp_path)
    assert output(config_of(tmp_path, stop=[Text("aaa")]), capsys)[0] == "def \n"


@pytest.mark.parametrize("prompt", ["", "привет", "it's", "a, b", "🙂", "a\nb", "\udcff"])
def test_prompts_arrive_as_they_are(tmp_path, capsys, prompt):
    write(tmp_path)
    shown = prompt.encode("utf-8", "replace").decode()
    assert output(config_of(tmp_path, prompt=Text(prompt)), capsys)[0] == f"{shown}aaaaa\n"


def test_prompt_from_a_file_or_standard_input(tmp_path, monkeypatch):
    path = tmp_path / "prompt.txt"
    path.write_bytes("déf\r\n".encode())
    assert read_prompt(f"@{path}") == "déf\r\n"
    path.write_bytes("\ufeffdéf\r\n".encode())  # with a byte order mark, as a file of prompts may have one
    assert read_prompt(f"@{path}") == "déf\r\n"
    stdin(monkeypatch, "déf\r\n".encode())
    assert read_prompt("-") == "déf\r\n"


@pytest.mark.skipif(not os.path.exists("/dev/fd"), reason="the shell writes prompt=@<(command) with /dev/fd")
def test_prompt_from_a_pipe():
    reader, writer = os.pipe()
    os.write(writer, b"abc")
    os.close(writer)
    assert read_prompt(f"@/dev/fd/{reader}") == "abc"
    os.close(reader)


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


@pytest.mark.parametrize(("n_prompt", "n_cut"), [(22, 0), (23, 0), (24, 1), (99, 76)])
def test_a_prompt_longer_than_the_window_is_cut_at_its_beginning_and_this_is_said(tmp_path, capsys, n_prompt, n_cut):
    write(tmp_path)
    prompt = "".join(chr(ord("a") + place % 23) for place in range(n_prompt))
    text, told = output(config_of(tmp_path, prompt=Text(prompt)), capsys)
    line = (
        f"prompt has {n_prompt} tokens: its beginning is cut, and the model reads the last 23 (model.sequence_length)\n"
    )
    assert text == prompt + "aaaaa\n" and ("cut" in told) == (line in told) == bool(n_cut)


def test_the_end_of_a_long_prompt_is_what_the_model_reads():
    engine = Engine(make_model(), ByteTokenizer())
    long = bytes(range(97, 122)).decode() * 2
    assert engine.encode_end(long) == (list(long[-23:].encode()), 27)
    assert engine.encode_end("abc") == (engine.encode("abc"), 0) == ([engine.tokenizer.end_of_text, *b"abc"], 0)


def test_interactive_answers_line_by_line_and_cuts_a_long_one(tmp_path, capsys, monkeypatch):
    write(tmp_path)
    stdin(monkeypatch, b"one\n" + b"x" * 99 + b"\ntwo\n")
    text, told = output(config_of(tmp_path, interactive=True, prompt=Text("zero")), capsys)
    assert text == "zeroaaaaa\noneaaaaa\n" + "x" * 99 + "aaaaa\ntwoaaaaa\n"
    assert told.split("\n\n", 1)[1] == (
        "each line is a separate prompt; Ctrl-C ends a text, Ctrl-D the session\nprompt> prompt> prompt has 99 tokens: its "
        "beginning is cut, and the model reads the last 23 (model.sequence_length)\nprompt> prompt> \n"
    )


def started(runs: Path, *words: str) -> subprocess.Popen:
    """A process of sample.py that writes without an end."""
    words = ("prompt=def ", "max_new_tokens=1000000", "temperature=0", "device=cpu", "threads=1", *words)
    command = [sys.executable, "-m", "andrea", "sample", f"runs_dir={runs}", *words]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, cwd=ROOT)


@pytest.mark.parametrize("others", [0, 2])
def test_ctrl_c_ends_the_text_and_the_command(tmp_path, others):
    write(tmp_path)
    process = started(tmp_path, f"num_samples={1 + others}")
    begun = process.stdout.read(10)
    process.send_signal(signal.SIGINT)
    rest, told = process.communicate(timeout=60)
    texts = (begun + rest).decode().split("\n")
    assert len(texts) == 2 + others and all(re.fullmatch("def a+", text) for text in texts[:-1]) and texts[-1] == ""
    assert process.returncode == 130 and told.endswith(b"interrupted\n") and b"Traceback" not in told


@pytest.mark.slow
def test_ctrl_c_twice_ends_an_interactive_session(tmp_path):
    write(tmp_path)
    process = started(tmp_path, "interactive=true")
    assert process.stdout.read(10) == b"def aaaaaa"
    process.send_signal(signal.SIGINT)
    assert b"Ctrl-C again ends the session" in read_until(process.stderr, b"session\nprompt> ")
    process.stdin.write(b"next \n")
    process.stdin.flush()
    assert b"\nnext aaa" in read_until(process.stdout, b"next aaa")
    process.send_signal(signal.SIGINT)
    read_until(process.stderr, b"prompt> ")
    process.send_signal(signal.SIGINT)
    rest, told = process.communicate(timeout=60)
    assert (process.returncode, told) == (130, b"\ninterrupted\n") and re.fullmatch(b"a*\n", rest)


def read_until(stream, end: bytes) -> bytes:
    found = b""
    while end not in found:
        piece = stream.read1(1 << 16)
        assert piece, found
        found += piece
    return found


def test_a_prompt_file_of_an_impossible_name_is_refused():
    with pytest.raises(UserError, match="there is no file"):
        read_prompt("@" + "a" * 5000)


def test_a_line_that_is_not_utf_8_is_a_prompt_as_well(tmp_path, capsys, monkeypatch):
    write(tmp_path)
    stdin(monkeypatch, b"a\xff\nb\n")
    assert output(config_of(tmp_path, prompt=Text(""), interactive=True), capsys)[0].count("aaaaa") == 2


def test_a_cpu_decodes_in_bf16_where_our_kernels_serve_the_model(monkeypatch):
    """Also without bf16 products: a token's time is that of reading the weights."""
    monkeypatch.setattr("andrea.runtime.device.cpu_multiplies_bf16", lambda: False)
    model = make_model()
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.float32, "int4": torch.float32}
    assert {asked: decoding_dtype(asked, model) for asked in kinds} == kinds
    monkeypatch.setattr("andrea.generation.sample_command.library", object)
    assert decoding_dtype("auto", model) == torch.bfloat16
    monkeypatch.setattr("andrea.generation.sample_command.is_built_in", lambda model: False)
    assert decoding_dtype("auto", model) == torch.float32
    monkeypatch.undo()
    monkeypatch.setattr("andrea.runtime.device.cpu_multiplies_bf16", lambda: False)
    monkeypatch.setattr("andrea.generation.sample_command.library", lambda: None)
    assert decoding_dtype("auto", model) == torch.float32
