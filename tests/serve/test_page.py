"""The page in a real browser, and what its routes say of a token."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from conftest import ROOT, launched_browser
from served import config_of, serving
from tiny_checkpoint import CONFIG

from andrea.attention import attention_weights
from andrea.checkpoint import checkpoints_of, read_checkpoint, write_checkpoint
from andrea.config import AttentionConfig, to_plain
from andrea.generation import Engine, Request, Sampling
from andrea.model import GPT, initialise
from andrea.serve.page import N_ALTERNATIVES
from andrea.text.chat import ChatTokenizer
from andrea.text.tokenizer import ByteTokenizer
from andrea.training.records.run_folder import LOCK

pytestmark = pytest.mark.untraced

AXE = Path(os.environ.get("AXE_CORE", "/tmp/axe/node_modules/axe-core/axe.min.js"))  # npm install axe-core
TOKENIZER = ChatTokenizer(ByteTokenizer())
SHAPE = replace(CONFIG, d_model=48, n_layer=2, n_head=3, sequence_length=128)
ATTENTION = AttentionConfig("scaled_dot", "auto")


def make_model(seed: int) -> GPT:
    model = GPT(SHAPE, ATTENTION, TOKENIZER.n_vocab)
    initialise(model, torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for block in model.blocks:  # as written at the start, they are zero
            block.attention.output.weight.normal_(0, 0.3, generator=generator)
            block.mlp.down.weight.normal_(0, 0.3, generator=generator)
        model.head.weight.normal_(0, 0.3, generator=generator)
    return model.eval()


def script_writer() -> GPT:
    """Writes <script><script>… for ever: the head knows of each letter the next one, and the blocks are silent."""
    model = make_model(5)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.output.weight.zero_()
            block.mlp.down.weight.zero_()
        model.embedding.weight.copy_(
            torch.randn(model.embedding.weight.shape, generator=torch.Generator().manual_seed(1))
        )
        model.head.weight.zero_()
        letters = list(b"<script>")
        for letter, following in zip(letters, letters[1:] + letters[:1], strict=True):
            model.head.weight[following] += model.embedding.weight[letter]
        model.head.weight[letters[0]] += model.embedding.weight[TOKENIZER.assistant]
    return model


def save(runs: Path, name: str, model: GPT, step: int = 60) -> None:
    groups = {"model": to_plain(SHAPE), "attention": to_plain(ATTENTION)}
    state = {"step": step, "tokens": 1380, "config": groups, "val_bpb": 1.25}
    write_checkpoint(runs / name / "checkpoints", state, model.state_dict(), {}, TOKENIZER)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    save(folder, "one", make_model(3))
    save(folder, "two", make_model(4))
    save(folder, "script", script_writer())
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with launched_browser() as launched:
        yield launched


@pytest.fixture(scope="module")
def served(runs):
    with serving(config_of(runs, checkpoint="one", max_running=2)) as (url, server):
        yield url, server


class Opened:
    """The page in a browser: with the messages it logs, and the addresses it asks for."""

    def __init__(self, browser, url: str, is_ready: bool = True, **context) -> None:
        self.url, self.messages, self.requests = url, [], []
        self.page = browser.new_page(**context)
        self.page.set_default_timeout(20_000)
        self.page.on("console", lambda message: message.type == "error" and self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)
        if is_ready:
            self.page.wait_for_selector("html[data-ready=yes]")

    def set(self, **settings) -> None:
        self.page.evaluate("document.getElementById('settings').open = true")
        for name, value in settings.items():
            self.page.fill(f"#{name}", str(value))

    def send(self, text: str) -> None:
        self.page.fill("#input", text)
        self.page.press("#input", "Enter")

    def wait_idle(self) -> None:
        self.page.wait_for_selector("#stop", state="hidden")
        self.page.wait_for_selector(".tools >> text=/seed \\d+/ >> nth=0")

    def answers(self, column: int = 0) -> list[str]:
        boxes = self.page.locator(".column").nth(column).locator(".turn:not(.user) .text")
        return boxes.evaluate_all("boxes => boxes.map(box => box.textContent)")

    def notice(self, text: str) -> None:
        self.page.wait_for_selector(f"#notice:visible >> text=/{text}/")

    def is_quiet(self) -> bool:
        return not self.messages and all(url.startswith(f"{self.url}/") for url in self.requests)


# ------------------------------------------------------------------------------------------------------------- routes


def token_events(url: str, ids: list[int]) -> list[dict]:
    with httpx.stream("POST", f"{url}/v1/andrea/token", json={"ids": ids}, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def last_log_probabilities(model: GPT, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(torch.tensor([ids]))[0][-1]).float().log_softmax(-1)


def test_a_token_has_the_models_alternatives_and_the_effect_of_each_head(served):
    model, ids = make_model(3), [TOKENIZER.end_of_text, *TOKENIZER.encode("for x in y:")]
    events = token_events(served[0], ids)
    context, token = ids[:-1], ids[-1]
    row = last_log_probabilities(model, context)
    found = next(event for event in events if "likeliest" in event)
    assert found["nats"] == pytest.approx(float(row[token]), abs=1e-5)
    assert found["rank"] == int((row > row[token]).sum())
    expected = row.topk(N_ALTERNATIVES)
    assert [other["id"] for other in found["likeliest"]] == expected.indices.tolist()
    assert [other["nats"] for other in found["likeliest"]] == pytest.approx(expected.values.tolist(), abs=1e-5)
    assert len(found["lens"]) == SHAPE.n_layer + 1 and found["lens"][-1]["nats"] == found["nats"]
    assert found["lens"][0]["nats"] != found["nats"]
    shares = np.frombuffer(base64.b64decode(found["attention"]), "<u2").reshape(2, 3, len(context)) / 65535
    first = model.blocks[0].attention
    x, shared = model.block_inputs(torch.tensor([context]))
    query, key, _, compatibility = first.project(model.blocks[0].attention_norm(x), shared=shared)
    weights = attention_weights(query, key, compatibility=compatibility, mask=first.mask)[0, :, -1].detach()
    assert np.allclose(shares[0], weights, atol=2e-5) and np.allclose(shares.sum(-1), 1, atol=1e-3)

    changes = {event["layer"]: event["changes"] for event in events if "changes" in event}
    width = SHAPE.d_model // SHAPE.n_head
    for layer in range(SHAPE.n_layer):
        for head in range(SHAPE.n_head):
            without = copy.deepcopy(model)
            with torch.no_grad():  # the head's columns of W_O
                without.blocks[layer].attention.output.weight[:, head * width : (head + 1) * width] = 0
            change = float(last_log_probabilities(without, context)[token] - row[token])
            assert changes[layer][head] == pytest.approx(change, abs=1e-4) and abs(change) > 1e-3


def test_texts_do_not_change_while_tokens_are_explained(served):
    body = {"prompt": "def f", "max_tokens": 300, "seed": 3, "logprobs": 0}
    ids = [TOKENIZER.end_of_text, *TOKENIZER.encode("for x in range(10): print(x)")] * 4
    alone = httpx.post(f"{served[0]}/v1/completions", json=body, timeout=60).json()["choices"]
    with ThreadPoolExecutor(4) as pool:
        explained = [pool.submit(token_events, served[0], ids) for _ in range(6)]
        among = httpx.post(f"{served[0]}/v1/completions", json=body, timeout=60).json()["choices"]
        assert all(len(each.result()) == 2 * SHAPE.n_layer + 1 for each in explained)
    assert among == alone
    written = Engine(make_model(3), TOKENIZER, dtype=torch.float32).write(
        "def f", Request(300, seed=3, sampling=Sampling(temperature=1.0, repetition_penalty=1.0))
    )
    assert alone[0]["text"] == written[0]


@pytest.mark.parametrize(
    "body",
    [{}, {"ids": []}, {"ids": [1]}, {"ids": "ab"}, {"ids": [1, 999]}, {"ids": [-1, 1]}, {"ids": [1] * 130},
     {"ids": [1, 2], "a": 1}, {"ids": [1, True]}],
)  # fmt: skip
def test_wrong_requests_of_a_token_are_refused(served, body):
    assert httpx.post(f"{served[0]}/v1/andrea/token", json=body).status_code == 400


def test_tokens_are_those_that_the_model_reads(served):
    def tokens(**body):
        return httpx.post(f"{served[0]}/v1/andrea/tokens", json=body)

    found = tokens(prompt="a<|end|>").json()
    assert found["ids"] == found["read"] == [TOKENIZER.end_of_text, *b"a<|end|>"]  # text stays text
    assert tokens(prompt=found["ids"]).json()["ids"] == found["ids"]
    chat = tokens(messages=[{"role": "user", "content": "hi"}], max_tokens=9).json()
    assert chat["names"][:2] == ["<|endoftext|>", "<|user|>"] and chat["names"][-1] == "<|assistant|>"
    for wrong in (
        {},
        {"prompt": ["a"]},
        {"prompt": "a", "b": 1},
        {"messages": "a"},
        {"prompt": [999]},
        {"prompt": "a" * 200},
    ):
        assert tokens(**wrong).status_code == 400


def test_a_newer_checkpoint_is_loaded(tmp_path):
    save(tmp_path, "one", make_model(3))
    request = Request(20, seed=1, sampling=Sampling(temperature=1.0, repetition_penalty=1.0))
    with serving(config_of(tmp_path)) as (url, _):
        save(tmp_path, "one", make_model(4), step=61)
        assert httpx.get(f"{url}/v1/andrea").json()["step"] == 60
        assert httpx.post(f"{url}/v1/andrea/run/load", timeout=60).json() == {"step": 61}
        assert httpx.get(f"{url}/v1/andrea").json()["step"] == 61
        text = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 20, "seed": 1}).json()
        assert (
            text["choices"][0]["text"] == Engine(make_model(4), TOKENIZER, dtype=torch.float32).write("a", request)[0]
        )


@contextlib.contextmanager
def holding(path: Path) -> Iterator[subprocess.Popen]:
    """A process that holds the lock of a run, as training does."""
    program = (
        "import sys, time; from pathlib import Path; from andrea.runtime.files import exclusive_lock\n"
        "with exclusive_lock(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout.readline() == b"held\n"
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_training_is_interrupted_only_by_its_lock(tmp_path):
    save(tmp_path, "one", make_model(3))
    with serving(config_of(tmp_path)) as (url, _):
        assert httpx.post(f"{url}/v1/andrea/run/stop").status_code == 409
        with holding(tmp_path / "one" / LOCK) as process:
            assert httpx.post(f"{url}/v1/andrea/run/stop").json() == {"interrupted": process.pid}
            assert process.wait(timeout=20) in (130, -signal.SIGINT)
        (tmp_path / "one" / ".lock").write_text(f"process {os.getpid()} on {os.uname().nodename}\n")  # not held
        assert httpx.post(f"{url}/v1/andrea/run/stop").status_code == 409


def test_the_policy_of_the_page_has_no_hole(served):
    answer = httpx.get(served[0])
    policy = dict(each.strip().partition(" ")[::2] for each in answer.headers["content-security-policy"].split(";"))
    assert (
        policy["default-src"] == "'none'"
        and policy["connect-src"] == "'self'"
        and policy["frame-ancestors"] == "'none'"
    )
    assert re.fullmatch(r"'sha256-[\w+/=]+'", policy["script-src"]) and "unsafe" not in str(policy)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", answer.text)


# ------------------------------------------------------------------------------------------------------------ browser


def test_a_chat_streams_and_is_asked_again_and_edited(browser, served):
    opened = Opened(browser, served[0])
    opened.set(seed=7, max_tokens=40)
    opened.send("first\nline")
    opened.wait_idle()
    answer = opened.answers()[0]
    ids = httpx.post(
        f"{served[0]}/v1/andrea/tokens",
        json={"messages": [{"role": "user", "content": "first\nline"}], "max_tokens": 40},
    )
    body = {"prompt": ids.json()["ids"], "max_tokens": 40, "seed": 7, "temperature": 0.7}
    text = httpx.post(f"{served[0]}/v1/completions", json=body).json()["choices"][0]["text"]
    assert answer.replace("<|end|>", "").rstrip("�") == text.rstrip("�") and len(text) > 5
    assert opened.page.locator("#announce").inner_text() != ""
    opened.page.click(".turn:not(.user) >> text=Retry")
    opened.page.wait_for_selector("text=Answer 2/2")
    opened.wait_idle()
    assert opened.answers()[0] != answer
    opened.page.click("[aria-label='Answer: the one before']")
    assert opened.answers() == [answer]
    opened.page.click(".turn.user >> text=Edit")
    assert opened.page.input_value("#input") == "first\nline"
    opened.send("second")
    opened.page.wait_for_selector("text=Message 2/2")
    opened.wait_idle()
    assert opened.page.locator(".turn.user .said").all_inner_texts() == ["second"]
    opened.send("third")
    opened.page.wait_for_selector(".turn.user >> nth=1")
    opened.wait_idle()
    assert len(opened.answers()) == 2
    opened.page.click("#new")
    assert opened.answers() == [] and opened.page.locator(".turn").count() == 0
    assert opened.is_quiet(), (opened.messages, opened.requests)


def test_another_token_makes_a_branch(browser, served):
    opened = Opened(browser, served[0])
    opened.page.click("nav >> text=Text")
    opened.set(seed=2, max_tokens=12, temperature=0)
    opened.send("abc")
    opened.wait_idle()
    before = opened.answers()[0]
    assert before.startswith("abc") and opened.page.locator(".tok.given").count() == 3
    tokens = opened.page.locator(".listing .tok")
    tokens.nth(6).click()
    picked = tokens.nth(6).get_attribute("data-place")
    opened.page.wait_for_selector("#heads tr >> nth=2")
    assert opened.page.locator("#alternatives button").count() == N_ALTERNATIVES
    assert opened.page.locator("#alternatives .own").count() == 1
    other = opened.page.locator("#alternatives button:not(.own)").first
    name = other.locator(".name").inner_text()
    other.click()
    opened.page.wait_for_selector("text=Answer 2/2")
    opened.wait_idle()
    kept = [each.text_content() for each in tokens.all()[:6]]
    branch = opened.answers()[0]
    places = "all => all.map(made => [made.className.includes('branch'), made.dataset.place])"
    assert [place for is_branch, place in tokens.evaluate_all(places) if is_branch] == [picked]
    assert branch.startswith("".join(kept)) and branch != before and opened.page.locator(".tok.branch").count() == 1
    if not name.startswith("bytes:"):
        assert opened.page.locator(".tok.branch").text_content() in (name, "\n", "\t")
    opened.page.click("[aria-label='Answer: the one before']")
    assert opened.answers() == [before]
    assert opened.is_quiet(), (opened.messages, opened.requests)


def test_the_panel_by_keyboard(browser, served):
    opened = Opened(browser, served[0])
    opened.set(seed=2, max_tokens=12)
    opened.send("abc")
    opened.wait_idle()
    opened.page.focus(".listing")
    for key in ("ArrowRight", "ArrowRight", "Enter"):
        opened.page.keyboard.press(key)
    assert opened.page.locator(".listing .tok.active").get_attribute("data-place")
    opened.page.wait_for_selector("#heads tbody tr >> nth=1")
    opened.page.select_option("#head", "1.2")
    assert opened.page.locator("#heads td.chosen").count() == 1 and opened.page.input_value("#shade") == "attention"
    shares = opened.page.locator("#context .tok").evaluate_all(
        "all => all.map(e => (+e.style.getPropertyValue('--share')) ** 2)"
    )
    assert sum(shares) == pytest.approx(1, abs=0.01) and shares[0] > 0
    opened.page.focus("#close")
    opened.page.keyboard.press("Escape")
    assert opened.page.locator("#panel").is_hidden()
    assert opened.page.evaluate("document.activeElement.className") == "text listing"
    assert opened.is_quiet(), (opened.messages, opened.requests)


def test_escape_stops_and_the_text_goes_on(browser, runs):
    with serving(config_of(runs, checkpoint="script", max_tokens=1_000_000)) as (url, _):
        opened = Opened(browser, url)
        opened.page.click("nav >> text=Text")
        opened.set(temperature=0, repetition_penalty=1, max_tokens=1_000_000)
        opened.send("<")
        opened.page.wait_for_selector(".listing .tok >> nth=20")
        opened.page.keyboard.press("Escape")
        opened.wait_idle()
        n = opened.page.locator(".listing .tok").count()
        assert n < 1_000_000 and "stopped" in opened.page.locator(".tools").inner_text()
        assert opened.page.locator("#notice").is_hidden()
        opened.set(max_tokens=SHAPE.sequence_length + 20)
        opened.page.click("text=Go on")
        opened.wait_idle()
        tokens = opened.page.locator(".listing .tok")
        assert tokens.count() == n + SHAPE.sequence_length + 20
        assert set(opened.answers()[0].split("<")) == {"", "script>", opened.answers()[0].rpartition("<")[2]}
        tokens.last.click()
        opened.page.wait_for_selector("#heads tbody tr >> nth=1")
        assert SHAPE.sequence_length / 2 <= opened.page.locator("#context .tok").count() <= SHAPE.sequence_length
        assert opened.is_quiet(), (opened.messages, opened.requests)


def test_an_empty_field_of_most_tokens_is_its_default(browser, served):
    opened = Opened(browser, served[0])
    opened.page.click("nav >> text=Text")
    opened.set(max_tokens="", seed=3)
    opened.send("abc")
    opened.wait_idle()
    assert opened.page.locator(".listing .tok").count() > len("abc") + 16  # of which OpenAI's completions have 16
    assert opened.is_quiet(), (opened.messages, opened.requests)


def test_markup_stays_text_and_scripts_of_others_do_not_run(browser, runs):
    with serving(config_of(runs, checkpoint="script")) as (url, _):
        opened = Opened(browser, url)
        opened.set(temperature=0, max_tokens=40)
        n_script = opened.page.evaluate("document.scripts.length")
        evil = "<img src=x onerror='window.bad=1'><script>window.bad=1</script>"
        opened.set(system=evil)
        opened.send(evil)
        opened.wait_idle()
        assert opened.answers() == ["<script>" * 5]
        assert opened.page.locator(".turn.user .said").inner_text() == evil
        opened.page.locator(".listing .tok").nth(9).click()
        opened.page.wait_for_selector("#context .tok")
        state = "[window.bad ?? null, document.scripts.length, document.images.length]"
        assert opened.page.evaluate(state) == [None, n_script, 0]
        assert opened.is_quiet(), (opened.messages, opened.requests)
        opened.page.evaluate(
            "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.bad=2'}));"
            "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.bad=3\">');"
            "fetch('http://other.example/').catch(() => (window.refused = true))"
        )
        opened.page.wait_for_timeout(300)
        assert opened.page.evaluate("[window.bad ?? null, window.refused]") == [None, True]
        assert sum("Content Security Policy" in message for message in opened.messages) >= 3


def test_a_wrong_key_is_refused_and_the_right_one_works(browser, runs):
    with serving(config_of(runs, checkpoint="one", api_key="right")) as (url, _):
        opened = Opened(browser, url, is_ready=False)
        opened.notice("needs its key")
        assert opened.page.evaluate("document.activeElement.id") == "key"
        opened.page.fill("#key", "wrong")
        opened.page.press("#key", "Tab")
        opened.notice("needs its key")
        opened.page.fill("#key", "right")
        opened.page.press("#key", "Tab")
        opened.page.wait_for_selector("html[data-ready=yes]")
        assert opened.page.locator("#notice").is_hidden()
        opened.set(max_tokens=5)
        opened.send("hi")
        opened.wait_idle()
        assert len(opened.answers()) == 1


def test_a_full_server_is_told_and_asked_again(browser, runs):
    endless = {"prompt": "<", "max_tokens": 10**6, "temperature": 0, "stream": True}
    is_told = threading.Event()

    def hold_a_place(url: str) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=endless, timeout=60) as answer:
            assert answer.status_code == 200
            is_told.wait(60)

    limits = {"max_running": 1, "max_waiting": 1, "max_tokens": 10**6}
    with serving(config_of(runs, checkpoint="script", **limits)) as (url, server):
        opened = Opened(browser, url)
        opened.set(max_tokens=5, temperature=0)
        with ThreadPoolExecutor(2) as pool:
            held = [pool.submit(hold_a_place, url) for _ in range(2)]
            while server.served.worker.n_live < 2:
                time.sleep(0.01)
            opened.send("hi")
            opened.notice("The server is busy")
            is_told.set()
            for each in held:
                each.result()
        while server.served.worker.n_live:
            time.sleep(0.01)
        opened.page.click("#again")
        opened.page.wait_for_selector(".listing .tok >> nth=4")
        assert opened.answers() == ["<scri"] and opened.page.locator("#notice").is_hidden()


@pytest.mark.slow
def test_a_killed_server_is_told_and_found_again(browser, runs, tmp_path):
    def start(port: int) -> tuple[subprocess.Popen, str]:
        words = [
            f"runs_dir={runs}",
            "checkpoint=script",
            "max_tokens=1000000",
            f"port={port}",
            "device=cpu",
            "precision=fp32",
        ]
        command = [sys.executable, "-m", "andrea", "serve", *words]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        for line in process.stderr:
            if found := re.search(r"(http://\S+)/v1", line):
                return process, found[1]
        raise AssertionError("the server did not start")

    process, url = start(0)
    try:
        opened = Opened(browser, url)
        opened.page.click("nav >> text=Text")
        opened.set(max_tokens=1_000_000, temperature=0, repetition_penalty=1)
        opened.send("<")
        opened.page.wait_for_selector(".listing .tok >> nth=20")
        process.kill()
        process.wait()
        opened.notice("The server does not answer")
        opened.wait_idle()
        n = opened.page.locator(".listing .tok").count()
        assert n > 20 and "broken off" in opened.page.locator(".tools").inner_text()
        opened.page.click("#again")
        opened.notice("The server does not answer")
        process, _ = start(int(url.rpartition(":")[2]))
        opened.notice("The server is back")
        opened.set(max_tokens=9)
        opened.page.click("#again")
        opened.page.wait_for_selector("#notice", state="hidden")
        opened.wait_idle()
        assert opened.page.locator(".listing .tok").count() > n
    finally:
        process.kill()
        process.wait()


def test_two_models_answer_one_prompt(browser, runs):
    with serving(config_of(runs, checkpoint="one", beside="two")) as (url, _):
        opened = Opened(browser, url)
        opened.page.click("nav >> text=Text")
        opened.set(seed=3, max_tokens=30)
        opened.send("abc")
        opened.page.wait_for_selector(".column >> nth=1 >> .tools >> text=/seed 3/")
        opened.wait_idle()
        for column, seed in enumerate((3, 4)):
            request = Request(30, seed=3, sampling=Sampling(temperature=1.0, repetition_penalty=1.1))
            text = Engine(make_model(seed), TOKENIZER, dtype=torch.float32).write("abc", request)[0]
            found = re.sub(r"<\|\w+\|>$", "", opened.answers(column)[0])
            assert found.rstrip("�") == ("abc" + text).rstrip("�")
        assert opened.answers(0) != opened.answers(1)
        opened.page.locator(".column").nth(1).locator(".tok").nth(8).click()
        opened.page.wait_for_selector("#heads tbody tr >> nth=1")
        assert opened.is_quiet(), (opened.messages, opened.requests)


def test_a_run_is_shown(browser, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "runs" / "first")
    with serving(config_of(tmp_path / "runs")) as (url, _):
        opened = Opened(browser, url)
        assert opened.page.locator("[data-mode=chat]").is_disabled()  # no chat model
        opened.page.click("nav >> text=Run")
        opened.page.wait_for_selector("#bpb circle", state="attached")
        assert opened.page.locator("#loss polyline").count() == 2 and opened.page.locator("#run-stop").is_disabled()
        assert "not training now" in opened.page.locator("#run-state").inner_text()
        assert opened.page.locator("#run-load").is_disabled()
        folder = tmp_path / "runs" / "first"
        with holding(folder / LOCK) as process:
            newest = read_checkpoint(checkpoints_of(folder)[-1])
            write_checkpoint(
                folder / "checkpoints", newest.state | {"step": 9}, newest.model_tensors(), {}, newest.tokenizer()
            )
            opened.page.wait_for_selector("#run-state >> text=/It is training; newest checkpoint: step 9/")
            opened.page.click("#run-load")
            opened.page.wait_for_selector(".about >> text=/step 9,/")
            opened.page.click("nav >> text=Run")
            questions = []
            opened.page.on("dialog", lambda dialog: (questions.append(dialog.message), dialog.accept()))
            opened.page.click("#run-stop")
            assert process.wait(timeout=20) in (130, -signal.SIGINT) and "Stop the training" in questions[0]
            opened.page.wait_for_selector("#run-state >> text=/not training now.*you talk to step 9/")
        assert opened.is_quiet(), (opened.messages, opened.requests)


@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core: npm install axe-core, and AXE_CORE=…/axe.min.js")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1300, 390])
def test_axe_finds_nothing_serious(browser, served, scheme, width):
    opened = Opened(browser, served[0], color_scheme=scheme, viewport={"width": width, "height": 900})
    opened.page.evaluate(AXE.read_text())

    def serious() -> list:
        found = opened.page.evaluate("axe.run()")["violations"]
        return [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in ("serious", "critical")]

    assert serious() == []
    opened.set(max_tokens=20, seed=1)
    opened.send("hi")
    opened.wait_idle()
    for shade in ("none", "surprise"):
        opened.page.select_option("#shade", shade)
        assert serious() == [], shade
    opened.page.locator(".listing .tok").nth(5).click()
    opened.page.wait_for_selector("#heads tbody tr >> nth=1")
    opened.page.select_option("#head", "1.1")
    assert serious() == []
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
