"""Two texts, the logit lens, examples and a second checkpoint on the page, in a real browser, by mouse and by keyboard."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_interventions import AGAINST
from test_lens_page import Opened, browser, page_of  # noqa: F401
from tiny_models import CASES, PROMPT, TOKENIZER, make, prompt_tokens

from andrea.insight.lens import panels
from andrea.insight.lens.interventions import patch_all
from andrea.insight.lens.lens import small_lens
from andrea.insight.lens.page import LensPage, Source, measure, token_texts
from andrea.insight.lens.trace import trace_layers
from andrea.text.shards import TokenStream

pytestmark = pytest.mark.untraced
SECTIONS = ("#layers", "#two-prompts", "#other-box", "#examples-box")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page with all panels, of a model with sharp attention and of one with another seed."""
    model, other, tokens = make(), make(seed=4), prompt_tokens()[0].tolist()
    text = np.frombuffer((PROMPT * 40).encode(), np.uint8).astype(np.uint16)
    monkeypatch.setattr(panels, "held_out_of_run", lambda state, data_dir: TokenStream([text]))
    measured = measure(model, TOKENIZER, tokens)
    found = [
        panels.logit_lens_panel(model, measured),
        panels.patching_panel(model, measured, prompt_tokens(AGAINST)[0].tolist()),
        panels.examples_panel(model, TOKENIZER, SimpleNamespace(state={}), Path("data")),
        panels.checkpoint_panel(
            model, measure(other, TOKENIZER, tokens, 128), other, Source("tiny · step 30", None, "bytes")
        ),
    ]
    page = LensPage(model, TOKENIZER, measured, Source("tiny · step 60", None, "bytes"), panels=found)
    path = tmp_path / "lens.html"
    path.write_text(page.render(measured.by_interest()), encoding="utf-8")
    return path


def percent(text: str) -> float:
    return float(text.replace("−", "-").removesuffix(" %"))


def test_two_texts(browser, path: Path) -> None:  # noqa: F811
    opened = Opened(browser, path)
    page, model = opened.page, make()
    assert page.locator("#patched-texts .differs").all_inner_texts() == ["a", "c", "x", "z"]
    layers, others = (list(trace_layers(model, prompt_tokens(text))) for text in (PROMPT, AGAINST))
    names = [page.locator(f"#patched-{name} option:checked").inner_text() for name in ("toward", "away")]
    best = [model.logits(model.final_norm(run[-1].after[0, -1])) for run in (others, layers)]
    texts = token_texts(TOKENIZER)
    assert texts[int(best[1].argmax())] == names[1]
    pair = torch.tensor([texts.index(name) for name in names])
    found = {name: each[..., 0] - each[..., 1] for name, each in patch_all(model, layers, others, pair).items()}
    start, end = found["whole"]
    cells = page.locator("#patched-heads td").all_inner_texts()
    expected = (100 * (found["heads"] - start) / (end - start)).flatten().tolist()
    assert [percent(cell) for cell in cells] == pytest.approx(expected, abs=0.6)
    for part in ("stream", "attention", "mlp"):
        page.select_option("#patched-part", part)
        cells = page.locator("#patched-grid td").all_inner_texts()
        expected = (100 * (found[part] - start) / (end - start)).flatten().tolist()
        assert [percent(cell) for cell in cells] == pytest.approx(expected, abs=0.6)
    page.select_option("#patched-toward", page.locator("#patched-away").input_value())
    assert "do not differ" in opened.text("#patched-note") and not page.locator("#patched-tables").is_visible()
    assert opened.is_quiet(), (opened.messages, opened.requests)


def test_the_strongest_head_and_position_are_reached_by_keyboard(browser, path: Path) -> None:  # noqa: F811
    opened = Opened(browser, path)
    page = opened.page
    page.locator("#patched-away").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "patched-part"
    page.keyboard.press("ArrowDown")  # the next part of the list
    assert page.locator("#patched-part").input_value() == "attention"
    for _ in range(3):  # over the two tables, which scroll, to the first button of the lists
        page.keyboard.press("Tab")
    label = page.evaluate("document.activeElement.textContent")
    assert label.startswith("head ")
    page.keyboard.press("Enter")
    assert opened.text("#chosen").startswith(label)
    button = page.locator("#patched-strongest-places button").first
    position = button.inner_text().split()[0]
    button.focus()
    page.keyboard.press("Enter")
    assert f"· {position} " in opened.text("#chosen")
    assert opened.text("#patched-grid th.query").split()[0] == position  # both tables follow the selection
    assert opened.text("#layers-grid th.query").split()[0] == position
    page.locator("#tokens").focus()
    page.keyboard.press("ArrowLeft")
    assert opened.text("#layers-grid th.query").split()[0] == str(int(position) - 1)
    assert opened.is_quiet(), (opened.messages, opened.requests)


def test_the_prediction_layer_by_layer(browser, path: Path) -> None:  # noqa: F811
    opened = Opened(browser, path, "#h=1.2&q=6&k=2")
    rows = opened.page.locator("#layers-grid tbody tr")
    assert rows.count() == 7 and rows.first.inner_text().startswith("embedding")
    model, texts = make(), token_texts(TOKENIZER)
    top = model.logits(model(prompt_tokens())).softmax(-1)[0].max(-1)
    token, probability = rows.last.locator("td").nth(6).inner_text().split("\n")
    assert token == texts[int(top.indices[6])]
    assert percent(probability) == pytest.approx(100 * top.values[6].item(), abs=0.006)
    rows.nth(3).locator("td").nth(9).click()
    assert "· 9 " in opened.text("#chosen")
    assert opened.is_quiet(), (opened.messages, opened.requests)


def test_examples_and_the_other_checkpoint_follow_the_head(browser, path: Path) -> None:  # noqa: F811
    opened = Opened(browser, path, "#h=1.2&q=6&k=2")
    page = opened.page
    assert page.locator("#examples li").count() == 5
    assert page.locator("#examples li").first.locator("mark.query").count() == 1
    first = opened.text("#examples")
    weights = [
        list(trace_layers(each, prompt_tokens()))[1].weights[0, 2, 6, 2].item() for each in (make(), make(seed=4))
    ]
    here, there = opened.text("#other-cell").split("weight ")[1].split(" here, about ")
    assert float(here) == pytest.approx(weights[0], rel=1e-2)
    assert float(there.split()[0]) == pytest.approx(weights[1], abs=0.01)
    page.select_option("#sort", "distance")
    shown = [float(text) for text in page.locator("#maps .card .id span").all_inner_texts()]
    assert shown == sorted(shown, reverse=True) and shown[0] > shown[-1]
    page.locator("#head-on").click()
    assert opened.text("#examples") != first
    assert opened.is_quiet(), (opened.messages, opened.requests)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_without_scrolling_sideways(browser, path: Path, scheme: str) -> None:  # noqa: F811
    opened = Opened(browser, path, viewport={"width": 390, "height": 800}, color_scheme=scheme)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert all(opened.page.locator(section).is_visible() for section in SECTIONS)
    assert opened.is_quiet(), (opened.messages, opened.requests)


def test_a_page_without_them_has_no_empty_sections(browser, tmp_path: Path) -> None:  # noqa: F811
    opened = Opened(browser, page_of(make(), tmp_path / "lens.html"))
    assert not any(opened.page.locator(section).is_visible() for section in (*SECTIONS, "#two-prompts-link"))
    small = tmp_path / "small.html"
    small.write_text(small_lens(make(*CASES["gpt2-like"]), TOKENIZER, PROMPT), encoding="utf-8")
    opened = Opened(browser, small)
    assert not any(opened.page.locator(section).is_visible() for section in SECTIONS) and opened.is_quiet()
