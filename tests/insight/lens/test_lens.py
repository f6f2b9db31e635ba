"""The command: the page and the arrays that it writes, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import PROMPT, TOKENIZER, hand_made, make, prompt_tokens

from andrea.__main__ import main
from andrea.checkpoint import write_checkpoint
from andrea.config import AttentionConfig, LensConfig, UserError, parse, to_plain
from andrea.insight.lens import lens as lens_module
from andrea.insight.lens import panels
from andrea.insight.lens.lens import choose_heads, lens
from andrea.insight.lens.trace import trace_layers
from andrea.model.gpt import GPT
from andrea.model.lora import merge
from andrea.text.shards import TokenStream


def write(folder: Path, model: GPT) -> Path:
    """Write a checkpoint of a model with scaled dot products."""
    config = {"model": to_plain(model.config), "attention": to_plain(AttentionConfig("scaled_dot", "auto"))}
    state = {"step": 60, "tokens": 1380, "config": config}
    return write_checkpoint(folder / "runs" / "one" / "checkpoints", state, model.state_dict(), {}, TOKENIZER)


def run_of(folder: Path, **changes) -> LensConfig:
    values = {
        "checkpoint": None, "runs_dir": str(folder / "runs"), "prompt": PROMPT, "out": str(folder / "lens.html"),
        "heads": [], "device": "cpu", "threads": 1,
    }  # fmt: skip
    return parse(LensConfig, values | changes)


def test_the_page_is_written_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write(tmp_path, make())
    out = tmp_path / "page.html"
    assert (
        main(["lens", f"runs_dir={tmp_path / 'runs'}", f"prompt={PROMPT}", f"out={out}", "device=cpu", "threads=1"])
        == 0
    )
    assert "15 of 15 heads in full" in capsys.readouterr().out
    page = out.read_text(encoding="utf-8")
    assert "{{" not in page and not re.search(r"https?://", page)
    assert main(["lens", "--help"]) == 0 and "heads=" in capsys.readouterr().out


def test_a_prompt_cannot_end_its_element_or_fill_the_template(tmp_path: Path) -> None:
    write(tmp_path, make())
    lens(run_of(tmp_path, prompt="</script><b>{{TITLE}}{{style.css}}"), torch.device("cpu"))
    page = (tmp_path / "lens.html").read_text(encoding="utf-8")
    assert "</script><b>" not in page and page.count('"use strict"') == 1


def test_arrays(tmp_path: Path) -> None:
    model = make()
    write(tmp_path, model)
    lens(run_of(tmp_path, out=str(tmp_path / "attention.npz")), torch.device("cpu"))
    arrays = np.load(tmp_path / "attention.npz")
    tokens = prompt_tokens()
    n = tokens.shape[1]
    assert arrays["weights"].shape == (3, 5, n, n) and arrays["weights"].dtype == np.float32
    expected = torch.stack([made.weights[0] for made in trace_layers(model, tokens)])
    np.testing.assert_allclose(arrays["weights"], expected.numpy(), atol=1e-6)
    assert arrays["tokens"].tolist() == tokens[0].tolist()
    assert "".join(arrays["token_texts"]) == PROMPT
    assert arrays["prompt_induction"].shape == arrays["probe_induction"].shape == (3, 5)


def test_a_model_with_low_rank_factors_is_shown_as_with_its_changed_matrices(tmp_path: Path) -> None:
    """The page multiplies by matrices themselves, such as W_O of one head."""
    model = make({"lora_rank": 2, "bias": True})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter.fill_(0.3)
    pages = []
    for each, folder in ((model, tmp_path / "factors"), (merge(model), tmp_path / "merged")):
        write(folder, each)
        lens(run_of(folder), torch.device("cpu"))
        pages.append((folder / "lens.html").read_text(encoding="utf-8").replace(str(folder), ""))
    assert pages[0] == pages[1]


def test_long_prompts_show_named_and_chosen_heads_in_full(tmp_path: Path, monkeypatch, capsys) -> None:
    write(tmp_path, hand_made())
    monkeypatch.setattr(lens_module, "MOST_TOKENS_ALL_FULL", 5)
    lens(run_of(tmp_path, heads=["1.2"]), torch.device("cpu"))
    assert "3 of 6 heads in full" in capsys.readouterr().out
    page = (tmp_path / "lens.html").read_text(encoding="utf-8")
    assert {name for name in re.findall(r'id="data-(\d+\.\d+)"', page)} == {"0.0", "1.0", "1.2"}


def test_the_file_stays_within_its_limit(tmp_path: Path, monkeypatch) -> None:
    write(tmp_path, make())
    for limit in (180_000, 230_000, 280_000):
        monkeypatch.setattr(lens_module, "LARGEST_PAGE_BYTES", limit)
        lens(run_of(tmp_path), torch.device("cpu"))
        written = (tmp_path / "lens.html").stat().st_size
        assert limit - 50_000 < written <= limit
    with pytest.raises(UserError, match=r"asks for 15 heads in full, but at 21 tokens only \d+ fit"):
        lens(run_of(tmp_path, heads=["*.*"]), torch.device("cpu"))


def test_a_prompt_longer_than_the_window_is_cut_at_its_beginning(tmp_path: Path, capsys) -> None:
    write(tmp_path, make())
    out = tmp_path / "lens.npz"
    lens(run_of(tmp_path, out=str(out), prompt="ab" + "x" * 40), torch.device("cpu"))
    assert "prompt has 42 tokens: its beginning is cut, and the model reads the last 41" in capsys.readouterr().err
    assert "".join(np.load(out)["token_texts"]) == "b" + "x" * 40


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"heads": ["3.0"]}, "there is no layer 3; the model's layers are 0 to 2"),
        ({"heads": ["0.1,2.5"]}, "there is no head 5"),
        ({"heads": ["7"]}, "not LAYER.HEAD"),
        ({"heads": ["-1.0"]}, "not LAYER.HEAD"),
        ({"out": "nowhere/at/all.html"}, "no folder 'nowhere/at'"),
        ({"out": "lens.pdf"}, "must end in .html (a page) or .npz (arrays)"),
        ({"out": "/proc/lens.html"}, "out=/proc/lens.html cannot be written"),
        ({"device": "tpu"}, "not a device"),
        ({"threads": 0}, "from 1 to 1024"),
    ],
)
def test_wrong_input_is_one_line(tmp_path: Path, changes: dict, words: str) -> None:
    write(tmp_path, make())
    with pytest.raises(UserError, match=re.escape(words)) as raised:
        lens(run_of(tmp_path, **changes), torch.device("cpu"))
    assert "\n" not in str(raised.value)


def test_a_second_text_and_a_second_checkpoint(tmp_path: Path, monkeypatch, capsys) -> None:
    write(tmp_path, make())
    other = write(tmp_path / "other", make(seed=4))
    seen = []
    text = TokenStream([np.frombuffer((PROMPT * 9).encode(), np.uint8).astype(np.uint16)])
    monkeypatch.setattr(panels, "held_out_of_run", lambda state, data_dir: seen.append(data_dir) or text)
    (tmp_path / "b.txt").write_text(PROMPT.replace("b", "x"))
    changes = {"against": f"@{tmp_path / 'b.txt'}", "against_checkpoint": str(other), "data_dir": "somewhere"}
    assert lens(run_of(tmp_path, **changes), torch.device("cpu")) == 0
    page = (tmp_path / "lens.html").read_text(encoding="utf-8")
    assert {"stages", "patched", "examples", "other"} <= set(re.findall(r'id="data-(\w+)"', page))
    assert seen == [Path("somewhere")] and str(other) in capsys.readouterr().out
    assert "the first 160 tokens of the held-out text" in page


def test_without_held_out_text_the_page_says_so(tmp_path: Path) -> None:
    write(tmp_path, make())
    lens(run_of(tmp_path, data_dir=str(tmp_path)), torch.device("cpu"))
    assert (
        "No examples: the held-out text of this checkpoint is not in data_dir=" in (tmp_path / "lens.html").read_text()
    )


def test_a_model_of_one_token_has_no_examples(tmp_path: Path, monkeypatch) -> None:
    """A query sees nothing but itself."""
    write(tmp_path, make({"sequence_length": 1}))
    text = TokenStream([np.frombuffer(PROMPT.encode(), np.uint8).astype(np.uint16)])
    monkeypatch.setattr(panels, "held_out_of_run", lambda state, data_dir: text)
    assert lens(run_of(tmp_path, prompt="b"), torch.device("cpu")) == 0
    assert "or the model reads one token alone" in (tmp_path / "lens.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"against": ""}, "against is empty"),
        ({"against": PROMPT}, "against is the same text as prompt"),
        ({"against": PROMPT + "!"}, "prompt has 21 tokens and against 22"),
        ({"prompt": "0123456789" * 5, "against": "x"}, "prompt is 9 0 1"),  # cut to the 41 tokens that the model sees
        ({"prompt": "0", "against": "xy"}, "prompt is ⟨end-of-text⟩ 0; against is ⟨end-of-text⟩ x y"),
        ({"against": "@no such file"}, "against=@no such file: there is no file"),
        ({"against": "x" * len(PROMPT), "out": "a.npz"}, "against=… is a part of the page, but out=a.npz holds arrays"),
        ({"against_checkpoint": "one", "out": "a.npz"}, "against_checkpoint=… is a part of the page"),
        ({"against_checkpoint": "wide"}, "has 3 layers of 3 heads, but checkpoint has 3 of 5"),
        ({"against_checkpoint": "short"}, "sees 20 tokens, and the prompt has 21"),
    ],
)
def test_what_cannot_be_compared_is_one_line(tmp_path: Path, changes: dict, words: str) -> None:
    for name, model in (("wide", make({"n_head": 3})), ("short", make({"sequence_length": 20})), ("one", make())):
        write(tmp_path / name, model)
    if changes.get("against_checkpoint") in ("wide", "short"):
        changes = {"against_checkpoint": str(tmp_path / changes["against_checkpoint"] / "runs" / "one")}
    with pytest.raises(UserError, match=re.escape(words)) as raised:
        lens(run_of(tmp_path / "one", **changes), torch.device("cpu"))
    assert "\n" not in str(raised.value)


def test_a_folder_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path, make())
    (tmp_path / "lens.html").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        lens(run_of(tmp_path), torch.device("cpu"))


def test_heads_are_read_as_layer_and_head() -> None:
    assert choose_heads(["1.10", "0.*", "1.10,1.2"], 2, 11) == [(1, 10), *((0, head) for head in range(11)), (1, 2)]
    assert choose_heads([], 2, 3) == []
