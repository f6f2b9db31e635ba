"""The page of the lens in a real browser: clicks, keys and hovering, and the numbers it shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import launched_browser
from tiny_models import CASES, CONFIG, PROMPT, TOKENIZER, hand_made, make, prompt_tokens

from andrea.attention import Cosine, ScaledDotProduct, alibi_slopes, attention_weights
from andrea.insight.lens.interventions import ablate_heads
from andrea.insight.lens.lens import small_lens
from andrea.insight.lens.page import LensPage, Source, measure
from andrea.insight.lens.trace import trace_layers
from andrea.model.gpt import GPT

pytestmark = pytest.mark.untraced


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with launched_browser() as launched:
        yield launched


class Opened:
    """A page opened from disk, with the messages it logs and the addresses it requests."""

    def __init__(self, browser, path: Path, address: str = "", **context) -> None:
        self.page = browser.new_page(**context)
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri() + address)
        self.page.wait_for_selector("html[data-ready=yes]")

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text().replace("−", "-")

    def is_quiet(self) -> bool:
        return not self.messages and all(url.startswith("file:") for url in self.requests)


def page_of(model: GPT, path: Path, text: str = PROMPT, detail: bool = True, full: int = 99) -> Path:
    measured = measure(model, TOKENIZER, prompt_tokens(text)[0].tolist())
    source = Source("tiny · step 60", "runs/one", TOKENIZER.identity)
    page = LensPage(model, TOKENIZER, measured, source, detail=detail)
    path.write_text(page.render(measured.by_interest()[:full]), encoding="utf-8")
    return path


def weights_of(model: GPT, layer: int, text: str = PROMPT) -> torch.Tensor:
    """(H, T, T) by the public function, from the input of the layer."""
    tokens = prompt_tokens(text)
    block, before = model.blocks[layer], list(trace_layers(model, tokens))[layer].before
    _, shared = model.block_inputs(tokens)
    query, key, _, compatibility = block.attention.project(block.attention_norm(before), shared=shared)
    scoring = {"modifiers": block.attention.modifiers, "sink": block.attention.sink}
    return attention_weights(query, key, compatibility=compatibility, mask=block.attention.mask, **scoring)[0]


def assert_shown(text: str, expected: float) -> None:
    """The number differs by at most half a unit of its last digit and the error of fp32."""
    mantissa, _, exponent = text.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    assert abs(float(text) - expected) <= 0.5 * unit + 4e-6 * abs(expected), (text, expected)


@pytest.mark.parametrize("case", CASES)
def test_three_random_cells_show_the_attention_weights(browser, tmp_path: Path, case: str) -> None:
    model = make(*CASES[case])
    path = page_of(model, tmp_path / "lens.html")
    n_token = prompt_tokens().shape[1]
    generator = torch.Generator().manual_seed(len(case))
    opened = Opened(browser, path)
    for _ in range(3):
        layer, head, query = (int(torch.randint(top, (1,), generator=generator)) for top in (3, 5, n_token))
        key = int(torch.randint(query + 1, (1,), generator=generator))
        opened.page.evaluate(f"location.hash = '#h={layer}.{head}&q={query}&k={key}'")
        opened.page.wait_for_function(
            f"document.getElementById('chosen').textContent.startsWith('head {layer}.{head} · {query} ')"
        )
        expected = weights_of(model, layer)[head, query, key].item()
        assert_shown(opened.text("#cell-weight"), expected)
        of_keys = weights_of(model, layer)[head, query].sum().item()
        assert_shown(opened.text("#row-sum"), of_keys)
        if model.blocks[0].attention.sink is not None:
            assert_shown(opened.text("#sink-share"), 1 - of_keys)
        if expected > 0:
            assert opened.text("#weight-shown") == opened.text("#cell-weight")
        else:
            assert opened.text("#cell-masked") == "-∞"
    assert opened.is_quiet(), (opened.messages, opened.requests)


@pytest.mark.parametrize("case", ["scaled_dot", "additive"])
def test_a_prompt_longer_than_its_heads_are_wide_shows_its_weights(browser, tmp_path: Path, case: str) -> None:
    """The file then holds whole queries and keys in place of scores, because they are smaller."""
    model, text = make(*CASES[case]), 2 * PROMPT
    path = page_of(model, tmp_path / "lens.html", text)
    assert '["scores"' not in path.read_text(encoding="utf-8")
    opened = Opened(browser, path, "#h=1.3&q=37&k=21")
    expected = weights_of(model, 1, text)[3, 37]
    assert_shown(opened.text("#cell-weight"), expected[21].item())
    assert_shown(opened.text("#row-sum"), expected.sum().item())
    assert opened.is_quiet(), (opened.messages, opened.requests)


def results_up_to_the_score(model: GPT, score: torch.Tensor) -> list[torch.Tensor]:
    """The results of the steps up to the score of head 1.3."""
    function = model.blocks[1].attention.compatibility
    if modifiers := model.blocks[1].attention.modifiers:  # the case has both; head 3 of 5, five positions apart
        capped = score + 5 * alibi_slopes(5)[3]
        raw = modifiers.softcap * torch.atanh(capped / modifiers.softcap)
        return [raw * CONFIG.head_width**0.5, raw, capped, score]
    if isinstance(function, ScaledDotProduct):
        return [score * CONFIG.head_width**0.5, score]
    if isinstance(function, Cosine):
        return [score / function.log_sharpness[3].exp(), score]
    return [score]


@pytest.mark.parametrize("case", ["scaled_dot", "dot", "bilinear", "cosine", "additive", "cap, ALiBi and sink"])
def test_the_arithmetic_leads_from_score_to_weight(browser, tmp_path: Path, case: str) -> None:
    model = make(*CASES[case])
    with torch.no_grad():
        if case == "cosine":
            model.blocks[1].attention.compatibility.log_sharpness.copy_(torch.arange(5.0))
    opened = Opened(browser, page_of(model, tmp_path / "lens.html"), "#h=1.3&q=9&k=4")
    layer = list(trace_layers(model, prompt_tokens()))[1]
    score, row = layer.scores[0, 3, 9, 4].double(), layer.scores[0, 3, 9, :10].double()
    results = [text.replace("−", "-") for text in opened.page.locator("#steps .result > span").all_inner_texts()]
    of_head = model.blocks[1].attention.output_by_head[3]
    value, weight = layer.value[0, 3, 4], layer.weights[0, 3, 9, 4]
    expected = [
        *results_up_to_the_score(model, score),
        score,
        (score - row.max()).exp(),
        weight,
        weight * value.norm(),
        weight * (of_head @ value).norm(),
        (of_head @ layer.retrieved[0, 3, 9]).norm(),
    ]
    assert len(results) == len(expected)
    for text, number in zip(results, expected, strict=True):
        assert_shown(text, float(number))


def test_the_cell_says_what_a_query_and_a_key_mix(browser, tmp_path: Path) -> None:
    model = make(*CASES["convolution"])
    with torch.no_grad():
        model.blocks[1].attention.taps.zero_()
        model.blocks[1].attention.taps[3, :, 1] = 1.0  # the query of head 3: as much of the token before
        model.blocks[1].attention.taps[5, :, 0], model.blocks[1].attention.taps[5, :, 2] = -0.75, -0.75  # the one key
    opened = Opened(browser, page_of(model, tmp_path / "lens.html"), "#h=1.3&q=9&k=4")
    shown = opened.page.locator("#steps").inner_text()
    assert "q mixes its own token (50 %), 1 before (50 %), 2 before (0 %)" in shown
    assert "k mixes its own token (25 %), 1 before (0 %), 2 before (75 %)" in shown
    assert "v mixes its own token (100 %), 1 before (0 %), 2 before (0 %)" in shown


def test_the_cell_says_how_much_of_a_head_rotary_positions_turn(browser, tmp_path: Path) -> None:
    opened = Opened(browser, page_of(make(*CASES["windows by layer"]), tmp_path / "lens.html"))
    assert "rotary position embedding of 40 % of the channels" in opened.text("#cell-note")


def test_the_cell_says_what_a_value_is_made_of(browser, tmp_path: Path) -> None:
    model = make(*CASES["elementwise gates, learned exclusion, value tables"])
    opened = Opened(browser, page_of(model, tmp_path / "lens.html"), "#h=1.3&q=9&k=4")
    parts = list(trace_layers(model, prompt_tokens()))[1].value_parts
    shown = re.search(r"v = (this.*)", opened.page.locator("#steps").inner_text())[1]
    norms = re.findall(r"(this layer's value|the first layer's|the value embedding) \(norm ([0-9.]+)\)", shown)
    assert [name for name, _ in norms] == list(parts)
    for (_, text), part in zip(norms, parts.values(), strict=True):
        assert_shown(text, part[0, 3, 4].norm().item())
    assert opened.is_quiet()


def test_clicking_hovering_typing_and_pressing_keys(browser, tmp_path: Path) -> None:
    opened = Opened(browser, page_of(hand_made(), tmp_path / "lens.html"))
    page = opened.page
    assert page.locator("#maps .card").count() == 6
    page.fill("#filter", "induction")
    assert page.locator("#maps .card").count() == 1 and opened.text("#count") == "1 of 6 heads"
    page.locator("#maps .card").click()
    assert opened.text("#head-name") == "Head 1.0, induction"
    page.fill("#filter", "")
    page.select_option("#sort", "previous_token")
    assert page.locator("#maps .card").first.get_attribute("data-head") == "0.0"
    page.locator("#maps .card").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    assert opened.text("#head-name") == "Head 0.0, previous-token"

    page.locator("#token-7").click()  # the b of the first "(abc": the a before it gets nearly all of the weight
    assert "7 b → 6 a" in re.sub(r"\s+", " ", opened.text("#chosen")), opened.text("#chosen")
    page.locator("#tokens").focus()
    page.keyboard.press("ArrowRight")
    assert "8 c → 7 b" in re.sub(r"\s+", " ", opened.text("#chosen"))
    page.keyboard.press("ArrowUp")
    assert "8 c → 6 a" in re.sub(r"\s+", " ", opened.text("#chosen"))
    page.locator("#token-3").hover()
    assert opened.text("#top-keys-title").endswith("(3)")
    page.locator("#cell-title").hover()
    assert opened.text("#top-keys-title").endswith("(8)")

    box = page.locator("#map").bounding_box()
    before = opened.text("#readout")
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 0.97 * box["height"])
    hovered = opened.text("#readout")
    assert hovered != before and "query" in hovered
    page.mouse.click(box["x"] + 0.3 * box["width"], box["y"] + 0.97 * box["height"])
    chosen = opened.text("#chosen")
    page.locator("#map").focus()
    page.keyboard.press("ArrowUp")
    assert opened.text("#chosen") != chosen
    assert opened.is_quiet(), (opened.messages, opened.requests)


def test_switches_change_shades_but_not_numbers(browser, tmp_path: Path) -> None:
    opened = Opened(browser, page_of(make(), tmp_path / "lens.html"), "#h=2.1&q=15&k=3")
    page = opened.page

    def shades() -> list[str]:
        return page.evaluate(
            "[...document.querySelectorAll('#tokens [role=option]')].map(token => token.style.background)"
        )

    plain, numbers = shades(), opened.text("#top-keys")
    page.locator("#log").check()
    assert shades() != plain and opened.text("#top-keys") == numbers and opened.text("#legend").startswith("10")
    page.locator("#log").uncheck()
    page.locator("#hide").check()
    hidden = shades()
    page.locator("#token-0").hover()
    assert hidden[0] == shades()[0] != plain[0]  # the shade of zero: the row of the first token has no other key
    page.locator("#cell-title").hover()
    assert hidden != plain and opened.text("#top-keys") == numbers
    assert "The first token is hidden" in opened.text("#head-note") and "hide=1" in page.url
    page.locator("#hide").uncheck()
    assert shades() == plain
    page.locator("#theme").click()
    assert page.get_attribute("html", "data-theme") == "dark" and shades() != plain
    page.locator("#hide").check()
    weights = weights_of(make(), 2)[1]
    query = next(i for i in range(2, len(weights)) if weights[i].argmax() == 0)
    page.locator(f"#token-{query}").click()  # selects the key with the largest weight that is not hidden
    assert re.search(rf"→\s+{1 + int(weights[query, 1:].argmax())}\s", opened.text("#chosen"))
    assert opened.is_quiet()


def test_the_next_token_with_and_without_a_head(browser, tmp_path: Path) -> None:
    model, tokens = make(), prompt_tokens()
    opened = Opened(browser, page_of(model, tmp_path / "lens.html"), "#h=1.2&q=6&k=2")
    on = model.logits(model(tokens)).softmax(-1)[0, 6]
    ((_, without),) = ablate_heads(model, tokens, 1, list(trace_layers(model, tokens))[1], [2])
    best = int(on.argmax())
    cells = opened.page.locator(f'#next-bars tr[data-token="{best}"] td.n').all_inner_texts()
    shown = [float(cell.removesuffix(" %")) / 100 for cell in cells[:2]]
    assert shown == pytest.approx([on[best].item(), without[6].exp()[best].item()], abs=6e-4)
    effects = opened.page.locator("#effects tbody tr")
    assert effects.count() == 7
    probabilities = [
        float(cell.split()[0]) for cell in opened.page.locator("#effects td:nth-child(2)").all_inner_texts()
    ]
    assert probabilities == sorted(probabilities)


def test_a_long_prompt_shows_part_of_the_map_and_some_heads_only_as_small_maps(browser, tmp_path: Path) -> None:
    model = make({"sequence_length": 401})
    text = "the cat (that sat) " * 20
    path = page_of(model, tmp_path / "lens.html", text, detail=False, full=2)
    opened = Opened(browser, path, viewport={"width": 390, "height": 800})
    page = opened.page
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    frame = "document.querySelector('#names').parentElement"
    assert page.evaluate(
        f"{frame}.scrollWidth > {frame}.clientWidth"
    )  # the table of thresholds scrolls, which shades show
    assert page.evaluate(f"getComputedStyle({frame}).backgroundImage.split('linear-gradient').length") == 5
    box = page.locator("#whole").bounding_box()
    page.locator("#whole").scroll_into_view_if_needed()
    page.locator("#whole").click(position={"x": 0.25 * box["width"], "y": 0.75 * box["height"]})
    query, key = map(int, re.findall(r"(?:·|→)\s+(\d+)", opened.text("#chosen")))
    assert (query, key) == pytest.approx((0.75 * 381, 0.25 * 381), abs=3)
    heads = [card.get_attribute("data-head") for card in page.locator("#maps .card").all()]
    reduced = next(head for head in heads if page.locator(f'[id="data-{head}"]').count() == 0)
    page.locator(f'.card[data-head="{reduced}"]').click()
    assert "python -m andrea lens heads=" in opened.text("#head-note") and opened.text("#steps") == ""
    assert opened.is_quiet()


def test_the_small_lens_opens(browser, tmp_path: Path) -> None:
    path = tmp_path / "small.html"
    path.write_text(small_lens(make(), TOKENIZER, PROMPT), encoding="utf-8")
    opened = Opened(browser, path, color_scheme="dark")
    assert opened.text("#row-sum") == "1.000000" and not opened.page.locator("#effects-box").is_visible()
    assert opened.is_quiet()


@pytest.mark.parametrize("kind", ["scalar", "elementwise"])
def test_the_gates_of_a_head_are_shown_and_what_it_writes_after_them(browser, tmp_path: Path, kind: str) -> None:
    model = make({}, {"gate": kind})
    opened = Opened(browser, page_of(model, tmp_path / "lens.html"), "#h=1.3&q=9&k=4&sort=gate")
    page, layer = opened.page, list(trace_layers(model, prompt_tokens()))[1]
    gate, of_head = layer.gate[0, 3], model.blocks[1].attention.output_by_head[3]
    assert_shown(opened.text("#gate-shown"), gate[9].mean().item())
    written = page.locator("#steps .result > span").last.inner_text()
    assert_shown(written, float((of_head @ (gate[9] * layer.retrieved[0, 3, 9])).norm()))
    assert "gate = 2·sigmoid(w·x)" in opened.text("#steps") and "mean gate" in page.locator("#scores").inner_html()
    cards = [float(text) for text in page.locator("#maps .card .id span").all_inner_texts()]
    means = [each.gate[0].mean((1, 2)) for each in trace_layers(model, prompt_tokens())]
    assert cards == sorted(cards) and cards[0] == pytest.approx(torch.cat(means).min().item(), abs=0.006)
    page.locator("#token-3").hover()
    assert_shown(opened.text("#gate-shown"), gate[3].mean().item())
    shades = "[...document.querySelectorAll('#tokens [role=option]')].map(token => token.style.background)"
    plain = page.evaluate(shades)
    page.locator("#gate").check()
    assert page.evaluate(shades) != plain and "gate=1" in page.url
    assert opened.is_quiet(), (opened.messages, opened.requests)


def test_a_model_without_gates_has_no_switch_for_them(browser, tmp_path: Path) -> None:
    opened = Opened(browser, page_of(make(), tmp_path / "lens.html"), "#h=1.3&q=9&k=4&gate=1")
    assert not opened.page.locator("#gate-switch").is_visible() and opened.page.locator("#gate-shown").count() == 0
    assert "gate" not in opened.text("#steps") and "mean gate" not in opened.page.locator("#scores").inner_html()
    assert opened.is_quiet()


@pytest.mark.parametrize("attention", [{"exclusive": "fixed"}, {"exclusive": "learned", "gate": "elementwise"}])
def test_what_exclusion_takes_from_a_head_is_shown(browser, tmp_path: Path, attention: dict) -> None:
    model = make({"n_kv_head": 1}, attention)
    opened = Opened(browser, page_of(model, tmp_path / "lens.html"), "#h=1.3&q=9&k=4")
    layer = list(trace_layers(model, prompt_tokens()))[1]
    of_head, learned = model.blocks[1].attention.output_by_head[3], model.blocks[1].attention.exclusive_share
    z, own = layer.retrieved[0, 3, 9].double(), layer.value[0, 3, 9].double()
    share = 1.0 if learned is None else learned[3].item()
    kept = z - share * (z @ own) / (own @ own) * own
    gate = 1.0 if layer.gate is None else layer.gate[0, 3, 9].double()
    written = opened.page.locator("#steps .result > span").last.inner_text()
    assert_shown(written, float((of_head.double() @ (gate * kept)).norm()))
    (removed,) = re.findall(r"share removed: (\S+)", opened.text("#steps"))
    assert_shown(removed, share)
    assert "share of the own value removed" in opened.page.locator("#scores").inner_html()
    assert opened.is_quiet(), (opened.messages, opened.requests)
