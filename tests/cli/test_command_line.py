"""The command line: text arrives byte for byte, an error is one line and exit code 2."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import run_script
from hypothesis import given
from hypothesis import strategies as st

from andrea.api.command_line import CommandLine, compose, configure, read
from andrea.cli.exit_code import exit_code_of, one_line, run
from andrea.config import LensConfig, RunConfig, SampleConfig, UserError, lay_over, parse

any_text = st.text(st.characters(exclude_categories=()), max_size=60)  # lone surrogates, controls and all
BASE = {kind: compose(name, CommandLine({}, {})) for kind, name in ((RunConfig, "train"), (SampleConfig, "sample"))}


def quick(kind: type, words: list[str]):
    """`configure` without composing the YAML files again each time."""
    return parse(kind, lay_over(copy.deepcopy(BASE[kind]), read(kind, words).values))


@given(any_text)
def test_a_prompt_arrives_as_it_was_typed(text: str) -> None:
    assert quick(SampleConfig, [f"prompt={text}"]).prompt == text


# What a terminal can pass: bytes without NUL. Those that are not UTF-8 arrive as halves of surrogate pairs.
path_text = st.binary(max_size=60).map(lambda typed: os.fsdecode(typed.replace(b"\0", b"")))


@given(path_text)
def test_paths_and_stops_arrive_as_they_were_typed(text: str) -> None:
    typed = quick(RunConfig, [f"data.path=x{text}", f"tokenizer.path=./{text}"])
    assert (typed.data.path, typed.tokenizer.path) == ("x" + text, "./" + text)
    assert quick(SampleConfig, [f"stop=a{text}", "stop=b"]).stop == ["a" + text, "b"]


def test_the_home_directory_is_meant_by_a_place_of_this_command_and_stays_in_what_a_run_keeps() -> None:
    typed = quick(RunConfig, ["runs_dir=~/runs", "data_dir=~", "data.path=~/notes", "name=~"])
    assert (typed.runs_dir, typed.data_dir) == (str(Path.home() / "runs"), str(Path.home()))
    assert (typed.data.path, typed.name) == ("~/notes", "~")


@pytest.mark.parametrize(
    "prompt", ["def main(", "привет", "it's", "a, b", "12", "null", "${x}", "{a: b", "🦊", "a\nb", "x" * 10_000, ""]
)
def test_prompts_that_hydra_s_grammar_would_refuse_or_change(prompt: str) -> None:
    assert configure(SampleConfig, "sample", [f"prompt={prompt}"]).prompt == prompt


def test_null_means_the_same_on_the_command_line_as_in_the_yaml() -> None:
    keys = ("resume", "init_from", "name", "train.patience", "train.max_minutes")
    config = configure(RunConfig, "train", [f"{key}=null" for key in keys])
    values = (config.resume, config.init_from, config.name, config.train.patience, config.train.max_minutes)
    assert values == (None,) * 5
    assert configure(RunConfig, "train", ["resume=None"]).resume == "None"


def test_a_user_error_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture) -> None:
    def main(words: list[str]) -> int:
        raise UserError("first\nsecond \ud800")

    code, out, err = run_script(main, [], capsys)
    assert (code, out, err) == (2, "", "error: first\\nsecond \\ud800\n")


def test_ctrl_c_before_training_is_quiet(capsys: pytest.CaptureFixture) -> None:
    def main(words: list[str]) -> int:
        raise KeyboardInterrupt

    assert run_script(main, [], capsys)[::2] == (130, "interrupted\n")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 9 GiB"),
        MemoryError(),
        RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.\nException raised from"
        ),
    ],
)
def test_running_out_of_memory_is_one_line(error: Exception, capsys: pytest.CaptureFixture) -> None:
    def main(words: list[str]) -> int:
        raise error

    code, _, err = run_script(main, [], capsys)
    beginning = f"error: out of memory ({str(error)[:20]}" if str(error) else "error: out of memory; "
    assert code == 2 and err.count("\n") == 1 and err.startswith(beginning)
    assert "ulimit -v" in err and "train.micro_batch=1" in err


def test_a_reader_that_ends_early_is_no_error() -> None:
    program = (
        "from andrea.cli.exit_code import run; run(lambda words: [print('x' * 99) for _ in range(9999)] and 0, [])"
    )
    writer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    writer.stdout.read(1)
    writer.stdout.close()
    assert (writer.wait(), writer.stderr.read()) == (0, b"")


def test_a_bug_keeps_its_traceback() -> None:
    def main(words: list[str]) -> int:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        run(main, [])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train", "not of the form key=value"),
        ("=3", "not of the form"),
        ("+train.steps=3", "cannot be added"),
        ("~data=x", "cannot be added"),
        ("data.sources={a", "cannot be read"),
        ("model.depth=3", "unknown key model.depth"),
        ("model=../gpt2", "not known"),
        ("train=5", "set one of them with train.KEY=…"),
        ("seed.x=3", "unknown key"),
        ("prompt=x", "unknown key prompt, which belongs to sample and lens; did you mean data.sample_prompt"),
        ("optimizer.lr=1", "unknown key optimizer.lr; did you mean optimizer.learning_rate"),
        ("--lr", r"key=value; did you mean optimizer.learning_rate=… or optimizer.matrix_learning_rate=…\?$"),
        ("batch_size", r"did you mean train.tokens_per_step=… or train.micro_batch=…\?$"),
        ("zzz", "key=value; --help lists the keys$"),
        (__file__, "your own text is given as data=text data.path=…"),
        (f"data={__file__}", "your own text is given as data=text data.path=…"),
    ],
)
def test_words_that_are_refused(word: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(RunConfig, [word])


@pytest.mark.parametrize(
    "value",
    ["&a [*a]", "[&a [x], &b [*a, *a], [*b, *b]]", "{<<: *a}", "2001-99-99", "!!bool x", "!!int ''", "!!timestamp x", "[" * 3000,
     "0x" + "f" * 5000, "9" * 5000, "{a: {weight: " + "9" * 400 + "}}", "[a, " * 20_000],
)  # fmt: skip
def test_hostile_yaml_is_refused_in_one_line(value: str) -> None:
    with pytest.raises(UserError, match="data.sources") as refused:
        quick(RunConfig, ["data=mixture", f"data.sources={value}"])
    assert len(one_line(str(refused.value))) < 2100


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ("train.steps=5", "train.steps=7"),
        ("data.field=a", "data.field=b"),
        ("model=gpt2", "model=andrea-nano"),
        ("data.sources.a.weight=2", "data.sources={a: {kind: pystdlib}}"),
    ],
)
def test_a_key_that_is_typed_twice_is_refused(earlier: str, later: str) -> None:
    with pytest.raises(UserError) as refused:
        read(RunConfig, [earlier, "seed=1", later])
    assert str(refused.value) == f"{earlier} and {later} both set {later.partition('=')[0]}; leave one out"


def test_each_word_of_a_list_is_one_entry() -> None:
    assert configure(RunConfig, "train", ["train.teachers=[a, b]", "train.teachers=c"]).train.teachers == [
        "[a, b]",
        "c",
    ]


def test_a_broken_yaml_file_is_named(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.yaml").write_text("defaults:\n  - model: [\n")
    monkeypatch.setattr("andrea.api.command_line.CONFIGS", tmp_path)
    with pytest.raises(UserError, match="train.yaml"):
        configure(RunConfig, "train", [])


@given(any_text)
def test_one_line_is_one_line(text: str) -> None:
    line = one_line(text)
    assert len(line.splitlines()) <= 1 and line.isprintable()


@pytest.mark.parametrize("word", ["prompt", "--prompt"])
def test_a_key_without_an_equals_sign_is_shown_with_it(word: str) -> None:
    with pytest.raises(UserError, match=rf"^'{word}' is not of the form key=value; did you mean prompt=…\?$"):
        read(LensConfig, [word, "def main("])


def test_a_key_of_another_command_is_named_with_it() -> None:
    with pytest.raises(UserError, match="^unknown key model.sequence_length, which belongs to train"):
        read(SampleConfig, ["model.sequence_length=256"])


def test_a_text_without_its_key_is_told_the_key() -> None:
    hint = "a text is given as prompt=…, a run as checkpoint=…"
    with pytest.raises(UserError, match=f"'once upon' is not of the form key=value; {hint}"):
        read(SampleConfig, ["once upon"])


def test_no_place_for_temporary_files_is_one_line(capsys: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/dev/full"])
    assert exit_code_of(lambda argv: bool(tempfile.gettempdir()), []) == 5
    said = capsys.readouterr().err
    assert said.startswith("error: No usable temporary directory found in ['/dev/full']; free some space")
    assert said.count("\n") == 1
    with pytest.raises(FileNotFoundError):
        exit_code_of(lambda argv: bool(open("/no/such/file")), [])


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_an_error_of_the_machine_is_one_line_wherever_it_comes_from(capsys: pytest.CaptureFixture) -> None:
    assert exit_code_of(lambda argv: bool(open("/proc/self/mem", "rb").read(1)), []) == 5  # noqa: SIM115
    assert capsys.readouterr().err == "error: a file cannot be used: Input/output error; check the disk\n"
