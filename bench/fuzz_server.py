"""Thousands of hostile requests to a server: bytes, headers and bodies. None may stop it, leak, or answer out of form.

    python bench/fuzz_server.py --requests 10000

A server with a tiny model runs in a process of its own, with a key. An answer must be HTTP: 2xx where the request is sound, 4xx
with JSON in OpenAI's form where not, and never a 5xx but 503 and 504. Afterwards the server must be as at its beginning: no
text, no connection, no memory kept, and nothing of a prompt in its log. Whatever else happens is a finding; exit code 1.
"""

from __future__ import annotations

import argparse
import collections
import errno
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import ROOT, python_path, write_record

sys.path.insert(0, str(ROOT / "tests"))

KEY, MARK = "fuzz-key", "sEcReT-pRoMpT"
SECONDS = 20.0  # for an answer
PATHS = ["/v1/completions"] * 8 + ["/v1/chat/completions"] * 3
PATHS += [
    "/v1/andrea/token",
    "/v1/andrea/tokens",
    "/v1/andrea/run/load",
    "/v1/andrea/run/stop",
    "/v1/andrea/run",
    "/v1/andrea",
]
PATHS += [
    "/v1/models",
    "/v1/models/one",
    "/v1/models/../../etc/passwd",
    "/health",
    "/",
    "/%00",
    "/v1/completions/",
    "//v1//models",
]
KEYS = "prompt messages model max_tokens n temperature top_p top_k min_p seed stop logprobs echo stream stream_options".split()
KEYS += "best_of suffix logit_bias tools response_format user max_completion_tokens top_logprobs repetition_penalty x".split()
TEXTS = [
    "",
    "a",
    "def ",
    f"{MARK} <script>alert(1)</script>",
    "<|endoftext|><|user|><|assistant|>",
    "\0",
    "é" * 9,
    "a" * 400,
    "\u2028",
]
TEXTS += ["{{7*7}}", "${jndi:ldap://x}", "'; DROP TABLE", "../../etc/passwd", "\x1b[31m", "🙂" * 5]
RAW = [
    '"\\ud800"',
    "NaN",
    "Infinity",
    "1e999",
    "-0",
    "9" * 400,
    "1.0",
    "[" * 3000 + "]" * 3000,
    '{"a":1,"a":2}',
    "tru",
    "0x10",
    "",
]


def value(draw: random.Random, depth: int = 0) -> str:
    """A piece of JSON, or of what is nearly JSON."""
    kind = draw.randrange(10)
    if kind == 0:
        return draw.choice(RAW)
    if kind < 4:
        return json.dumps(draw.choice(TEXTS))
    if kind < 7:
        return json.dumps(draw.choice([0, 1, 2, 5, -1, 256, 257, 0.5, 1.5, 2**31, 2**63, 2**64, True, False, None]))
    if depth > 2:
        return "[]"
    if kind == 7:
        return "[" + ",".join(value(draw, depth + 1) for _ in range(draw.randrange(4))) + "]"
    if kind == 8:
        return "[" + ",".join(str(draw.randrange(-1, 260)) for _ in range(draw.randrange(30))) + "]"
    pairs = [
        (draw.choice([*KEYS, "role", "content", "type", "text", "include_usage"]), value(draw, depth + 1))
        for _ in range(draw.randrange(4))
    ]
    return "{" + ",".join(f"{json.dumps(key)}:{each}" for key, each in pairs) + "}"


SOUND = {
    "prompt": ['"a"', '["a","b"]', "[97,98]", "[[97],[98,99]]", json.dumps(MARK), '""'],
    "max_tokens": ["1", "7", "40"],
    "n": ["1", "3"],
    "temperature": ["0", "0.7"],
    "top_p": ["0.5"],
    "seed": ["5"],
    "stop": ['"e"', '["x","y"]'],
    "logprobs": ["0", "3"],
    "echo": ["true"],
    "stream": ["true", "false"],
}  # fmt: skip


def body(draw: random.Random) -> bytes:
    kind = draw.randrange(10)
    if kind == 0:
        return draw.randbytes(draw.randrange(200))
    if kind == 1:
        return value(draw).encode("utf-8", "surrogatepass")
    names = ["prompt", *draw.sample(list(SOUND), draw.randrange(5))]
    fields = {name: draw.choice(SOUND[name]) for name in names}
    if kind > 5:
        fields |= {draw.choice(KEYS): value(draw) for _ in range(draw.randrange(1, 3))}
    if kind == 5:
        messages = json.dumps([{"role": "user", "content": draw.choice(TEXTS)}])
        fields = {"messages": messages, "max_tokens": "3"}
    if kind == 4:  # of the page
        fields = {"ids": draw.choice(["[97,98]", "[256,97,98,99]", "[1]", "[1,999]", value(draw)])}
    return ("{" + ",".join(f'"{name}":{each}' for name, each in fields.items()) + "}").encode()


def request(draw: random.Random) -> tuple[bytes, str]:
    """The bytes of a request, and what is wrong with how it is sent: '' if nothing is."""
    sent, path = body(draw), draw.choice(PATHS)
    if draw.randrange(60) == 0:
        sent = b" " * (1 << 20) + sent
    method = draw.choice(
        ["POST"] * 12 + ["GET"] * 4 + ["HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "X" * 50]
    )
    headers = {
        "Host": "localhost",
        "Authorization": f"Bearer {KEY}",
        "Content-Type": "application/json",
        "Content-Length": str(len(sent)),
    }
    wrong = draw.choice(
        [""] * 12
        + ["host", "key", "no key", "origin", "length", "short", "header", "bytes", "chunked", "gone", "pipelined"]
    )
    if wrong == "host":
        headers["Host"] = draw.choice(
            ["evil.com", "localhost.evil.com", "", "1.2.3.4", "[::2]", "localhost@evil.com", "a" * 5000]
        )
    elif wrong == "key":
        headers["Authorization"] = draw.choice(
            ["Bearer", "Bearer x", f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "\x80\xff"]
        )
    elif wrong == "no key":
        del headers["Authorization"]
    elif wrong == "origin":
        headers["Origin"] = draw.choice(["http://evil.com", "null", "http://localhost.evil.com", "file://"])
    elif wrong == "length":
        headers["Content-Length"] = draw.choice(["-1", "x", "99999999999999999999", "1e3", "0", "1, 2"])
    elif wrong == "header":
        headers[
            draw.choice(
                ["X-A", "Transfer-Encoding", "Expect", "Upgrade", "Connection", "Content-Encoding", "X-Forwarded-For"]
            )
        ] = draw.choice(["x" * 70_000, "chunked", "100-continue", "websocket", "gzip", "\x01", "a: b"])
    elif wrong == "chunked":
        del headers["Content-Length"]
        headers["Transfer-Encoding"] = "chunked"
        size = draw.choice([b"%x" % len(sent), b"zz", b"-5", b"%x" % (len(sent) + 5)])
        sent = size + b"\r\n" + sent + b"\r\n0\r\n\r\n"
    head = (
        f"{method} {path} HTTP/1.1\r\n"
        + "".join(f"{name}: {each}\r\n" for name, each in headers.items())
        + "Connection: close\r\n\r\n"
    )
    data = head.encode("latin-1") + sent
    if wrong == "short":
        data = data[: draw.randrange(len(data))]
    elif wrong == "bytes":
        place = draw.randrange(len(data))
        data = data[:place] + draw.randbytes(3) + data[place + 1 :]
    elif wrong == "pipelined":
        data = data.replace(b"Connection: close\r\n", b"") + data
    return data, wrong


# The server has refused the rest of a request, and we learn it when we write, when we read, or when we end our half.
REFUSED_REST = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN)


def exchange(port: int, data: bytes, wrong: str) -> bytes:
    """What the server answers. A request that is not whole is ended by us, one that is `gone` in the middle of its answer."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        try:
            connection.sendall(data)
            if wrong == "gone":
                connection.recv(20)
                return b""
            if wrong:
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                received += part
        except OSError as error:
            if error.errno not in REFUSED_REST:
                raise
    return received


def verdict(data: bytes, wrong: str, answer: bytes) -> str | None:
    """What is wrong with the answer; None if nothing is."""
    if not answer:
        return None if wrong else "no answer to a whole request"
    head, _, content = answer.partition(b"\r\n\r\n")
    match = re.match(rb"HTTP/1\.1 (\d\d\d) ", head)
    if not match:
        return "an answer that is not HTTP"
    status = int(match[1])
    if status >= 500 and status not in (503, 504):
        return f"status {status}"
    line = data.split(b"\r\n")[0]
    needs_no_key = b" /health " in line or (b" / " in line and wrong in ("key", "no key"))
    if wrong in ("host", "key", "no key", "origin") and status < 400 and not needs_no_key:
        return f"let in: wrong {wrong}"
    if status >= 400 and not data.startswith(b"HEAD"):
        try:
            error = json.loads(content.partition(b"HTTP/1.1")[0])["error"]
            assert error.keys() == {"message", "type", "param", "code"} and error["message"]
            assert MARK not in error["message"]
        except (ValueError, KeyError, TypeError, AssertionError):
            return f"status {status} without OpenAI's form"
    return None


def resident_mib(process_id: int) -> float:
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process_id}/status").read_text())[1]) / 1024


def attack(port: int, process: subprocess.Popen, chosen: argparse.Namespace) -> dict:
    findings: dict[str, str] = {}
    statuses: collections.Counter = collections.Counter()

    def one(seed: int) -> None:
        data, wrong = request(random.Random(seed))
        try:
            answer = exchange(port, data, wrong)
            found = verdict(data, wrong, answer)
        except OSError as error:
            answer, found = b"", f"connection: {error!r}"
        statuses[answer[9:12].decode("latin-1") or "none"] += 1
        if found:
            findings.setdefault(found, f"seed {seed}: {data[:300]!r} -> {answer[:200]!r}")

    began, memory = time.monotonic(), {}
    with ThreadPoolExecutor(chosen.at_once) as pool:
        for first in range(0, chosen.requests, 1000):
            list(pool.map(one, range(chosen.seed + first, chosen.seed + min(first + 1000, chosen.requests))))
            n_done = min(first + 1000, chosen.requests)
            memory[n_done] = round(resident_mib(process.pid), 1)
            print(f"{n_done:7} requests, {memory[n_done]} MiB, {len(findings)} findings", flush=True)
            if process.poll() is not None:
                findings["the server has ended"] = f"within {first} .. {first + 1000}"
                break
    sound = b'{"prompt":"a","max_tokens":4,"seed":1}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n"
    head += f"Content-Length: {len(sound)}\r\n\r\n"
    if b"200" not in exchange(port, head.encode() + sound, "")[:15]:
        findings["the server does not answer any more"] = ""
    return {
        "seconds": time.monotonic() - began,
        "statuses": dict(sorted(statuses.items())),
        "memory_mib": memory,
        "findings": findings,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "fuzz_server.json")
    chosen = parser.parse_args()
    from tiny_checkpoint import make_model, write_model

    with tempfile.TemporaryDirectory() as place:
        write_model(Path(place), make_model().state_dict())
        keys = [
            f"runs_dir={place}",
            "port=0",
            "device=cpu",
            "precision=fp32",
            f"api_key={KEY}",
            "max_running=8",
            "threads=1",
        ]
        log = Path(place) / "log"
        with (
            log.open("w") as stream,
            subprocess.Popen(
                [sys.executable, "-m", "andrea", "serve", *keys],
                stderr=stream,
                stdout=stream,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": python_path()},
            ) as process,
        ):
            try:
                while not (found := re.search(r"http://127.0.0.1:(\d+)/", log.read_text())):
                    assert process.poll() is None, log.read_text()
                    time.sleep(0.1)
                outcome = attack(int(found[1]), process, chosen)
            finally:
                process.send_signal(signal.SIGTERM)
        text = log.read_text(errors="replace")
    if MARK in text or KEY in text:
        outcome["findings"]["a prompt or the key in the log"] = text[:500]
    if "Traceback" in text:
        outcome["findings"]["a traceback in the log"] = text[text.index("Traceback") :][-1500:]
    for name, each in outcome.items():
        print(f"{name:12} {each}")
    write_record(chosen.output, "fuzz_server", "cpu", {"arguments": vars(chosen) | {"output": None}, **outcome})
    if outcome["findings"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
