"""Why a head looked there, on the page: the numbers shown, in a real browser, by mouse and by keyboard."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_attribution import Explained, copying_by_hand, model_of
from test_lens_page import Opened, assert_shown, browser, page_of  # noqa: F401
from tiny_models import TOKENIZER, make, prompt_tokens

from andrea.insight.lens.attribution import KINDS, largest_pairs, logit_parts
from andrea.insight.lens.lens import small_lens
from andrea.insight.lens.trace import next_log_probabilities

pytestmark = pytest.mark.untraced

CASES = ["scaled_dot", "cosine", "as GPT-2", "cap, ALiBi and sink", "pairs of tokens, a convolution, documents"]


def numbers(opened: Opened, selector: str) -> list[float]:
    return [float(text.replace("−", "-").replace("+", "")) for text in opened.page.locator(selector).all_inner_texts()]


@pytest.mark.parametrize("case", CASES)
def test_the_table_of_pairs_sums_to_the_score(browser, tmp_path: Path, case: str) -> None:  # noqa: F811
    model = model_of(case)
    explained = Explained(model, prompt_tokens())
    layer, head, query, key = 1, 3, 14, 6
    opened = Opened(browser, page_of(model, tmp_path / "lens.html"), f"#h={layer}.{head}&q={query}&k={key}")
    adds = numbers(opened, "#why-pairs tbody td.n")
    assert_shown(opened.text("#why-score"), explained.layers[layer].scores[0, head, query, key].item())
    assert sum(adds[:-1]) == pytest.approx(adds[-1], abs=2e-3 * max(map(abs, adds)))
    scores = explained.scores(layer)
    keys = torch.full((prompt_tokens().shape[1], 1), key)
    found = largest_pairs(scores.query[:, head], scores.key[:, head], keys, 8)
    assert adds[:8] == pytest.approx(found.values[query, 0].tolist(), rel=1e-3, abs=1e-3 * abs(adds[0]))
    titles = opened.text("#why-pairs")
    assert ("with a bias" in titles) == (model.config.bias)
    assert ("ALiBi" in titles and "soft cap" in titles) == (case == "cap, ALiBi and sink")
    assert ("before" in titles) == (model.config.qkv_convolution is not None)
    assert opened.is_quiet(), (opened.messages, opened.requests)


def test_parts_are_named_and_a_head_among_them_can_be_opened(browser, tmp_path: Path) -> None:  # noqa: F811
    model = make({"position": "learned", "bigram_rows": 37})
    with torch.no_grad():
        model.blocks[0].attention.output.weight.mul_(20)  # so that later heads read from the first layer's
    opened = Opened(browser, page_of(model, tmp_path / "lens.html"), "#h=2.3&q=14&k=6")
    table = opened.page.locator("#why-pairs tbody")
    button = table.locator("button", has_text="head 0.").first
    label = button.inner_text()
    button.focus()
    opened.page.keyboard.press("Enter")
    assert opened.text("#chosen").startswith(label)
    texts = []
    for query in range(4, 15):
        opened.page.evaluate(f"location.hash = '#h=0.1&q={query}&k=3'")
        opened.page.wait_for_function(f"document.getElementById('chosen').textContent.includes('· {query} ')")
        texts.append(opened.text("#why-pairs"))
    assert all(any(word in text for text in texts) for word in ("token", "token pair", "position 3"))
    assert opened.is_quiet(), (opened.messages, opened.requests)


def test_a_cell_without_pairs_leads_to_one_that_has_them(browser, tmp_path: Path, monkeypatch) -> None:  # noqa: F811
    monkeypatch.setattr("andrea.insight.lens.attribution.MOST_CELLS", 1)  # three keys of each query
    model = make()
    weights = Explained(model, prompt_tokens()).layers[1].weights[0, 2, 12]
    weakest, strongest = weights[:13].argmin().item(), weights.argmax().item()
    opened = Opened(browser, page_of(model, tmp_path / "lens.html"), f"#h=1.2&q=12&k={weakest}")
    assert not opened.page.locator("#why-table").is_visible()
    buttons = opened.page.locator("#why-note button")
    assert buttons.count() == 3 and buttons.first.inner_text().startswith(f"{strongest} ")
    buttons.first.focus()
    opened.page.keyboard.press("Enter")
    assert opened.page.locator("#why-table").is_visible() and opened.page.locator("#why-pairs tbody tr").count() > 8
    opened.page.locator("#key-choice").select_option("14")
    assert "does not see" in opened.text("#why-note")
    assert opened.is_quiet(), (opened.messages, opened.requests)


def test_a_function_that_is_not_bilinear_is_said_to_be_so(browser, tmp_path: Path) -> None:  # noqa: F811
    opened = Opened(browser, page_of(model_of("additive"), tmp_path / "lens.html"))
    assert "additive is not bilinear" in opened.text("#why-note")
    assert opened.page.locator("#reads-table tbody tr").count() > 0 and opened.is_quiet()


def test_the_graph_shows_the_strongest_reads(browser, tmp_path: Path) -> None:  # noqa: F811
    model = model_of("scaled_dot")
    explained = Explained(model, prompt_tokens())
    opened = Opened(browser, page_of(model, tmp_path / "lens.html"), "#h=2.3&q=14&k=6")
    page, rows = opened.page, opened.page.locator("#reads-table tbody tr")
    effects = {layer: explained.effects(layer) for layer in (1, 2)}
    assert rows.count() == page.locator("#graph path.arrow").count() > 6
    for row in rows.all():
        source, reader, kind = row.get_attribute("data-read").split()
        (layer, head), (from_layer, from_head) = (map(int, each.split(".")) for each in (reader, source))
        expected = effects[layer][KINDS.index(kind), 5 * from_layer + from_head, head].item()
        assert float(row.locator("td.n").inner_text().removesuffix(" %")) == pytest.approx(100 * expected, abs=0.06)
    strongest = max(effects[layer][0].max().item() for layer in effects)  # of those in a query
    first = page.locator('#reads-table tr[data-read$=" query"] td.n').first.inner_text()
    assert float(first.removesuffix(" %")) == pytest.approx(100 * strongest, abs=0.06)

    page.locator("#only-head").focus()
    page.keyboard.press("Space")
    reads = [row.get_attribute("data-read").split()[:2] for row in rows.all()]
    assert reads and all("2.3" in each for each in reads) and "only=1" in page.url
    rows.first.locator("button").first.focus()
    page.keyboard.press("Enter")
    assert opened.text("#chosen").startswith(f"head {reads[0][0]}")
    page.locator("#only-head").uncheck()
    page.locator("#graph .head-mark").nth(11).click()
    assert opened.text("#chosen").startswith("head 2.1")
    assert opened.is_quiet(), (opened.messages, opened.requests)


def test_the_induction_circuit_is_named_and_seen(browser, tmp_path: Path) -> None:  # noqa: F811
    opened = Opened(browser, page_of(copying_by_hand(), tmp_path / "lens.html", "abcdeabcde"), "#h=1.0&q=6&k=2")
    assert opened.text("#circuit").startswith("Induction circuit: head 0.0 previous-token looks at")
    assert "head 1.0 induction reads that in its key" in opened.text("#circuit")
    first = opened.page.locator("#reads-table tbody tr").first
    assert first.get_attribute("data-read") == "0.0 1.0 key"
    assert opened.page.locator("#why-pairs tbody tr").first.inner_text().split("\t")[2:] == [
        "token a",
        "head 0.0 previous-token",
    ]
    opened.page.locator("#circuit button").first.click()
    assert opened.text("#chosen").startswith("head 0.0")
    assert opened.is_quiet(), (opened.messages, opened.requests)


def test_what_adds_to_a_logit_sums_to_it(browser, tmp_path: Path) -> None:  # noqa: F811
    model = model_of("fewer key/value heads, biases")
    explained = Explained(model, prompt_tokens())
    last, query = explained.layers[-1], 9
    opened = Opened(browser, page_of(model, tmp_path / "lens.html"), f"#h=1.2&q={query}&k=2")
    candidates = next_log_probabilities(model, last.after)[0].topk(10).indices
    targets = prompt_tokens()[0, 1:]
    adds = logit_parts(model, last, explained.parts, candidates)
    head = explained.model.config.n_head + 1 + 1 + 2  # after the token, and layer 0's heads and MLP
    best = int(candidates[query, 0])
    shown = opened.page.locator(f'#next-bars tr[data-token="{best}"] td.n').last.inner_text()
    assert float(shown.replace("−", "-")) == pytest.approx(adds[head, query, 0].item(), abs=2e-4)
    logit = (model.final_norm(last.after)[0, query] @ model.head_weight.T)[targets[query]].item()
    assert float(opened.text("#direct-sum")) == pytest.approx(logit, abs=2e-4)
    numbers_shown = numbers(opened, "#direct tbody td.n")
    assert sum(numbers_shown[:-1]) == pytest.approx(numbers_shown[-1], abs=2e-3)
    assert opened.is_quiet(), (opened.messages, opened.requests)


def test_a_sink_looks_empty_when_shaded_by_what_is_written(browser, tmp_path: Path) -> None:  # noqa: F811
    model = make()
    attention = model.blocks[1].attention
    with torch.no_grad():
        attention.value.weight.view(5, 6, -1)[2] *= 1e-4  # head 1.2 looks, but writes next to nothing ...
        attention.value.weight.view(5, 6, -1)[2, :, :3] += 1  # ... except for some tokens
    trace = Explained(model, prompt_tokens()).layers[1]
    written = trace.weights[0, 2] * (trace.value[0, 2] @ attention.output_by_head[2].T).norm(dim=-1)
    opened = Opened(browser, page_of(model, tmp_path / "lens.html"), "#h=1.2&q=14&k=6")
    page = opened.page
    assert_shown(opened.text("#readout b:last-of-type"), written[14, 6].item())
    shades = "[...document.querySelectorAll('#tokens [role=option]')].map(token => token.style.background)"
    plain = page.evaluate(shades)
    page.locator("#written").focus()
    page.keyboard.press("Space")
    assert page.evaluate(shades) != plain and "written=1" in page.url
    assert_shown(opened.text("#legend").split()[1], written.max().item())
    j = int(written[14].argmax())
    assert page.locator(f"#token-{j}").evaluate("token => token.style.color") != ""
    assert opened.is_quiet(), (opened.messages, opened.requests)


def test_the_page_fits_a_phone_and_reaches_its_tables_by_keyboard(browser, tmp_path: Path) -> None:  # noqa: F811
    path = page_of(model_of("pairs of tokens, a convolution, documents"), tmp_path / "lens.html")
    opened = Opened(browser, path, viewport={"width": 390, "height": 800}, color_scheme="dark", reduced_motion="reduce")
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
    graph = opened.page.locator("#graph").bounding_box()
    assert graph["x"] >= 0 and graph["x"] + graph["width"] <= 390
    opened.page.locator("#why-table").focus()
    assert opened.page.evaluate("document.activeElement.id") == "why-table"
    opened.page.locator("nav a", has_text="head to head").click()
    top = opened.page.evaluate("document.getElementById('reads').getBoundingClientRect().top")
    assert abs(top) < 200
    assert opened.is_quiet(), (opened.messages, opened.requests)


def test_the_small_page_has_no_parts_and_says_so(browser, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "small.html"
    path.write_text(small_lens(make(), TOKENIZER, "say (abc, abc) twice"), encoding="utf-8")
    opened = Opened(browser, path)
    assert "holds no parts of scores" in opened.text("#why-note")
    assert not any(
        opened.page.locator(each).is_visible() for each in ("#why-table", "#reads", "#direct-box", "#reads-link")
    )
    assert opened.is_quiet()


def test_a_prompt_of_one_token_and_a_model_of_one_layer_have_pages(browser, tmp_path: Path) -> None:  # noqa: F811
    for name, model, text in (("token", make(), ""), ("layer", make({"n_layer": 1}), "abc abc")):
        opened = Opened(browser, page_of(model, tmp_path / f"{name}.html", text))
        assert opened.page.locator("#why-table").is_visible()
        assert opened.page.locator("#reads").is_visible() == (name == "token")
        assert opened.is_quiet(), (opened.messages, opened.requests)
