"""The server as clients see it: its texts are those of `sample.py`, and its limits hold."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch
from served import config_of, serving
from tiny_checkpoint import CONFIG, make_model, write_model

from andrea.config import UserError
from andrea.evaluation.scoring import Scorer
from andrea.generation import Engine, Request, Sampling
from andrea.serve import app, server
from andrea.serve.server import Server, with_key
from andrea.text.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
ENDLESS = {"prompt": "a", "max_tokens": 1_000_000, "temperature": 0}  # with the model of `endless`


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_model(folder, make_model().state_dict())
    return folder


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A model that writes one letter for ever."""
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embedding.weight[:, 0] = 1.0
        model.final_norm.weight.fill_(1.0)
        model.head.weight[ord("a"), 0] = 3.0
    folder = tmp_path_factory.mktemp("endless")
    write_model(folder, model.state_dict())
    return folder


@pytest.fixture(scope="module")
def served(runs) -> Iterator[tuple[str, Server]]:
    with serving(config_of(runs, max_running=4)) as found:
        yield found


@pytest.fixture(scope="module")
def client(served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served[0]}/v1", api_key="none", max_retries=0)


def wait_until(is_true) -> None:
    for _ in range(3000):
        if is_true():
            return
        time.sleep(0.02)
    raise AssertionError("waited for a minute in vain")


def is_idle(server: Server) -> bool:
    worker = server.served.worker
    return worker.n_live == 0 and not worker.running and len(worker.batch.idle) == worker.n_place


# ------------------------------------------------------------------------------------------------------------- texts


def test_texts_written_at_a_time_are_those_of_the_engine(served, client):
    """29 requests of mixed lengths and rules, at most 4 of which are in the batch."""

    def ask(index: int) -> bool:
        rules = [{}, {"temperature": 0}, {"temperature": 0.7, "extra_body": {"top_k": 9, "repetition_penalty": 1.2}}][
            index % 3
        ]
        prompt, n_new, stop = "def main(self"[: index % 14], 3 + 5 * index % 61, ["e"] if index % 4 == 0 else []
        text = (
            client.completions.create(model="one", prompt=prompt, max_tokens=n_new, seed=index, stop=stop, **rules)
            .choices[0]
            .text
        )
        sampling = [Sampling(), Sampling(temperature=0), Sampling(temperature=0.7, top_k=9, repetition_penalty=1.2)][
            index % 3
        ]
        request = Request(n_new, seed=index, stop=tuple(stop), sampling=sampling)
        return text == Engine(make_model(), TOKENIZER, dtype=torch.float32).write(prompt, request)[0]

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(29)))
    assert is_idle(served[1])


def test_a_stream_is_the_whole_answer_in_pieces(served, client):
    settings = {"model": "one", "prompt": ["ab", "c"], "max_tokens": 20, "seed": 5, "n": 2, "logprobs": 2, "echo": True}
    whole = client.completions.create(**settings)
    texts, tokens, reasons, usage = [""] * 4, [[] for _ in range(4)], [None] * 4, None
    for chunk in client.completions.create(**settings, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices] and texts[0].startswith("ab") and texts[0] != texts[1]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert reasons == ["length"] * 4 and usage == whole.usage and usage.completion_tokens == 80


def test_log_probabilities_of_an_echo_are_those_of_scoring(client):
    context, continuation = [256, 1, 2, 3], [9, 8, 7, 200, 9]
    answer = client.completions.create(
        model="one", prompt=[*context, *continuation], max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    found = answer.choices[0].logprobs
    (score,) = Scorer(make_model(), 1).score([(context, continuation)])
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None and len(found.tokens) == 10
    assert sum(found.token_logprobs[4:-1]) == pytest.approx(score.nats, abs=1e-5)
    is_greedy = all(
        nats == max(top.values())
        for nats, top in zip(found.token_logprobs[4:-1], found.top_logprobs[4:-1], strict=True)
    )
    assert is_greedy == score.is_greedy
    alone = client.completions.create(
        model="one", prompt=[*context, *continuation], max_tokens=0, echo=True, logprobs=0
    )
    assert alone.choices[0].logprobs.token_logprobs == found.token_logprobs[:-1] and alone.usage.completion_tokens == 0


def test_written_tokens_have_the_scores_that_an_echo_of_them_has(client):
    written = client.completions.create(model="one", prompt="ab", max_tokens=9, seed=3, logprobs=3).choices[0]
    tokens = Engine(make_model(), TOKENIZER, dtype=torch.float32).stream([256, 97, 98], Request(9, seed=3))
    ids = [256, 97, 98, *(token.token for token in tokens)]
    echoed = client.completions.create(model="one", prompt=ids, max_tokens=0, echo=True, logprobs=3).choices[0]
    assert written.logprobs.tokens == echoed.logprobs.tokens[3:]
    assert written.logprobs.token_logprobs == pytest.approx(echoed.logprobs.token_logprobs[3:], abs=1e-5)
    text = TOKENIZER.decode(ids)
    for name, offset in zip(echoed.logprobs.tokens[1:], echoed.logprobs.text_offset[1:], strict=True):
        assert name.startswith("bytes:") or text[offset] == name


def test_the_models_are_listed(served, client):
    assert [model.id for model in client.models.list()] == ["one"] and client.models.retrieve("one").id == "one"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("two")
    assert httpx.get(f"{served[0]}/health").json() == {"status": "ok"}


def test_a_chat_needs_a_chat_model(client):
    with pytest.raises(openai.BadRequestError, match="no tokens for a chat"):
        client.chat.completions.create(model="one", messages=[{"role": "user", "content": "hi"}])


# ------------------------------------------------------------------------------------------------ cancelled, too many


def test_a_client_that_goes_frees_its_place(endless):
    with serving(config_of(endless, max_running=2, max_tokens=10**6)) as (url, running):
        for is_stream in (True, False):
            with httpx.Client(timeout=0.5) as client, pytest.raises(httpx.ReadTimeout):
                settings = ENDLESS | {"n": 5, "stream": is_stream}
                with client.stream("POST", f"{url}/v1/completions", json=settings) as response:
                    next(response.iter_lines())
                    assert not is_idle(running)
                    raise httpx.ReadTimeout("enough")
            wait_until(lambda: is_idle(running))
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a", "temperature": 0}).status_code == 200


def test_more_requests_than_may_wait_are_told_to_come_again(endless):
    with (
        serving(config_of(endless, max_running=1, max_waiting=2, max_tokens=10**6)) as (url, running),
        httpx.Client(timeout=20) as client,
    ):
        streams = [client.stream("POST", f"{url}/v1/completions", json=ENDLESS | {"stream": True}) for _ in range(3)]
        for stream in streams:
            assert stream.__enter__().status_code == 200
        refused = client.post(f"{url}/v1/completions", json=ENDLESS)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        for stream in streams:
            stream.__exit__(None, None, None)
        wait_until(lambda: is_idle(running))
        assert client.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 200


def test_a_request_that_takes_too_long_is_ended(endless):
    with serving(config_of(endless, timeout_s=0.3, max_tokens=10**6)) as (url, running):
        answer = httpx.post(f"{url}/v1/completions", json=ENDLESS | {"n": 9}, timeout=20)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        events = httpx.post(f"{url}/v1/completions", json=ENDLESS | {"n": 2, "stream": True}, timeout=20).text.split(
            "\n\n"
        )
        assert (
            json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "timeout" and "[DONE]" not in events[-1]
        )
        wait_until(lambda: is_idle(running))


def test_a_bug_ends_the_requests_and_not_the_server(served, monkeypatch, capsys):
    url, running = served
    monkeypatch.setattr(running.served.worker.batch, "step", lambda: 1 / 0)
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "secret words"})
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    monkeypatch.undo()
    wait_until(lambda: is_idle(running))
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 200
    log = capsys.readouterr().err
    assert "ZeroDivisionError" in log and "secret" not in log


# ---------------------------------------------------------------------------------------------------------- security


@pytest.mark.parametrize("host", ["evil.com", "localhost.evil.com", "", "1.2.3.4", "a" * 300, "127.0.0.1.evil.com:80"])
def test_other_hosts_are_refused(served, host):
    answer = httpx.get(f"{served[0]}/health", headers={"host": host})
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "wrong_host"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:99", "127.0.0.1:5", "[::1]:8000", "localhost."])
def test_names_of_this_machine_are_served(served, host):
    assert httpx.get(f"{served[0]}/health", headers={"host": host}).status_code == 200


def test_pages_of_other_hosts_are_refused_unless_they_are_allowed(served, runs):
    url, origin = served[0], "http://page.example"
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, headers={"origin": origin})
    assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
    own = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, headers={"origin": url})
    assert own.status_code == 200 and "access-control-allow-origin" not in own.headers
    with serving(config_of(runs, allow_origin=origin)) as (url, _):
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, headers={"origin": origin})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == origin
        asked = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        }
        assert httpx.options(f"{url}/v1/completions", headers=asked).status_code == 200
        other = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, headers={"origin": "http://other.example"})
        assert other.status_code == 403


def test_every_route_but_health_needs_the_key(runs, tmp_path):
    (tmp_path / "key").write_text("s3cret key\n")
    with serving(config_of(runs, api_key=f"@{tmp_path / 'key'}")) as (url, _):
        assert httpx.get(f"{url}/health").status_code == 200
        for path in (
            "/v1/models",
            "/v1/models/one",
            "/v1/completions",
            "/v1/andrea",
            "/nothing",
            "/health/",
            "//health",
        ):
            for key in (
                None,
                "",
                "Bearer",
                "Bearer s3cret",
                "Bearer s3cret key2",
                "bearer s3cret key",
                "s3cret key",
                "Basic x",
            ):
                answer = httpx.get(f"{url}{path}", headers={} if key is None else {"authorization": key})
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key", (path, key)
        assert openai.OpenAI(base_url=f"{url}/v1", api_key="s3cret key").models.list().data[0].id == "one"


def test_another_host_needs_a_key_and_a_key_must_be_sendable(runs, tmp_path):
    with pytest.raises(UserError, match="host=0.0.0.0 lets other machines"):
        with_key(config_of(runs, host="0.0.0.0"))
    for key in ("", " a", "a\nb", "é", f"@{tmp_path / 'none'}"):
        with pytest.raises(UserError, match="api_key"):
            with_key(config_of(runs, api_key=key))
    with_key(config_of(runs, host="0.0.0.0", api_key="k"))


def test_a_taken_port_is_told(runs, served):
    port = int(served[0].rpartition(":")[2])
    with pytest.raises(UserError, match=f"port={port} cannot be listened on"):
        server.listen("127.0.0.1", port)
    with pytest.raises(UserError, match="cannot be listened on"):
        server.listen("no such host", 0)


def test_large_bodies_are_refused_before_they_are_read(served):
    url, running = served
    most = running.served.config.max_body_bytes
    answer = httpx.post(f"{url}/v1/completions", content=b" " * (most + 1))
    assert answer.status_code == 413 and answer.json()["error"]["message"]
    chunked = httpx.post(f"{url}/v1/completions", content=(b" " * 65536 for _ in range(most // 65536 + 1)))
    assert chunked.status_code == 413


def test_the_answer_to_a_large_body_arrives_though_the_body_is_still_sent(served):
    """A server that closes here resets the connection, and the client loses the answer."""
    url, running = served
    most = running.served.config.max_body_bytes
    host, _, port = url.removeprefix("http://").rpartition(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {4 * most}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode())
        wait_until(
            lambda: any(each.cycle and each.cycle.response_complete for each in list(running.server_state.connections))
        )
        connection.sendall(b" " * (4 * most))
        answered = connection.recv(65536)
        assert answered.startswith(b"HTTP/1.1 413") and b"more than" in answered
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def send(url: str, data: bytes, seconds: float = 10) -> bytes:
    """What the server answers to these bytes until it closes the connection."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        connection.sendall(data)
        while part := connection.recv(65536):
            received += part
    return received


@pytest.mark.parametrize(
    "data", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16\x03\x01"]
)
def test_what_is_no_http_is_refused_in_json(served, data):
    if data[0] == 0x16:
        data += b"\r\n\r\n"
    head, _, body = send(served[0], data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and b"application/json" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_slow_clients_are_closed(runs, monkeypatch):
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.4)
    monkeypatch.setattr(server, "SWEEP_SECONDS", 0.1)
    monkeypatch.setattr(app, "BODY_SECONDS", 0.4)
    with serving(config_of(runs)) as (url, running):
        assert send(url, b"") == b"" and send(url, b"POST /v1/completions HTTP/1.1\r\nHost: local") == b""
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n"
        assert send(url, head + b'{"prompt":').startswith(b"HTTP/1.1 408")
        wait_until(lambda: not running.server_state.connections)


def test_a_client_that_reads_nothing_is_closed(endless, monkeypatch):
    def listen_with_small_buffers(
        host: str, port: int
    ) -> socket.socket:  # which are full in time on a slow machine, too
        listening = server.listen(host, port)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listening

    monkeypatch.setattr("served.listen", listen_with_small_buffers)
    monkeypatch.setattr(server, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(server, "SWEEP_SECONDS", 0.1)
    with serving(config_of(endless, timeout_s=1.5, max_tokens=10**6)) as (url, running):
        body = json.dumps(ENDLESS | {"n": 32, "stream": True, "logprobs": 20}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        port = int(url.rpartition(":")[2])
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", port))
            connection.sendall(head + body)
            wait_until(lambda: not is_idle(running))
            wait_until(lambda: any(each.flow.write_paused for each in running.server_state.connections))
            wait_until(lambda: is_idle(running) and not running.server_state.connections)


def test_too_many_connections_are_refused(runs, monkeypatch):
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    with serving(config_of(runs)) as (url, running):
        port = int(url.rpartition(":")[2])
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        wait_until(lambda: len(running.server_state.connections) == 3)
        assert send(url, b"").startswith(b"HTTP/1.1 503")
        for each in held:
            each.close()
        wait_until(lambda: not running.server_state.connections)
        assert httpx.get(f"{url}/health").status_code == 200


def test_html_in_a_prompt_comes_back_as_json_alone(client, served):
    answer = httpx.post(f"{served[0]}/v1/completions", json={"prompt": "<script>", "echo": True, "max_tokens": 1})
    assert (
        answer.headers["content-type"] == "application/json" and answer.headers["x-content-type-options"] == "nosniff"
    )
    assert answer.json()["choices"][0]["text"].startswith("<script>")


def test_the_window_slides_in_a_long_text(client):
    n_new = 5 * CONFIG.sequence_length
    text = client.completions.create(model="one", prompt="ab", max_tokens=n_new, seed=4).choices[0].text
    assert text == Engine(make_model(), TOKENIZER, dtype=torch.float32).write("ab", Request(n_new, seed=4))[0]
