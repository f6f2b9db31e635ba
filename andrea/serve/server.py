"""The command `serve`: load a checkpoint, say what is served, and answer requests until Ctrl-C."""

import asyncio
import contextlib
import dataclasses
import logging
import socket
import sys
from pathlib import Path

import h11
import torch
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from andrea.checkpoint.folder import model_name
from andrea.checkpoint.model import open_model
from andrea.config import ServeConfig, UserError
from andrea.generation.batching import Batch
from andrea.generation.sample_command import describe, make_engine
from andrea.runtime.streams import at_words
from andrea.serve.app import Served, is_loopback, make_app
from andrea.serve.errors import RequestError, to_json
from andrea.serve.page import page_routes
from andrea.serve.worker import Worker

IDLE_SECONDS = 15.0  # a connection may be open without a request, or with a part of its first lines
GRACE_SECONDS = 5.0  # for a client to read the rest of an answer
SWEEP_SECONDS = 1.0
MAX_CONNECTIONS = 256


class Connection(H11Protocol):
    """A connection. Invalid HTTP is refused in JSON; connections that are too many are closed at once."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.last_seen, self.last_cycle, self.last_busy = self.loop.time(), None, False
        if len(self.connections) > MAX_CONNECTIONS:
            self.refuse(RequestError(503, "too many connections are open"))

    def send_400_response(self, msg: str) -> None:
        self.refuse(RequestError(400, "the request is not valid HTTP"))

    def refuse(self, error: RequestError) -> None:
        body = to_json(error.body).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        with contextlib.suppress(h11.LocalProtocolError):  # an answer has begun already
            answer = h11.Response(status_code=error.status, headers=headers)
            for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        if self.cycle is not None:  # its request is answered by this, and must not be answered again
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def sweep(self, now: float, busy_seconds: float) -> None:
        """Close the connection if its request takes too long, or if it has waited too long without one."""
        is_busy = self.cycle is not None and not self.cycle.response_complete
        if (self.cycle, is_busy) != (self.last_cycle, self.last_busy):
            self.last_seen, self.last_cycle, self.last_busy = now, self.cycle, is_busy
        if now - self.last_seen > (busy_seconds + GRACE_SECONDS if is_busy else IDLE_SECONDS):
            self.transport.abort()


class Server(uvicorn.Server):
    """uvicorn's server, with a worker. It closes connections of clients that are too slow."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.all_served = [served] + ([] if served.beside is None else [served.beside])
        super().__init__(
            uvicorn.Config(
                make_app(served, page_routes(served, load_one)),
                http=Connection,
                ws="none",
                lifespan="off",
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                headers=[("x-content-type-options", "nosniff")],
                timeout_keep_alive=int(IDLE_SECONDS),
                timeout_graceful_shutdown=3,
            )
        )

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        for each in self.all_served:
            each.worker.start()
        sweeping = asyncio.create_task(self.sweep())
        try:
            await super().serve(sockets)
        finally:
            sweeping.cancel()
            for each in self.all_served:
                each.worker.stop()

    async def sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            for connection in list(self.server_state.connections):
                connection.sweep(asyncio.get_running_loop().time(), self.served.config.timeout_s)


def serve(config: ServeConfig, device: torch.device) -> int:
    """Serve until Ctrl-C. Raises UserError for wrong input."""
    config = with_key(config)
    served, about = load(config, device)
    listening = listen(config.host, config.port)
    print(at_words("\n".join(about)), file=sys.stderr)
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"http://{host}:{listening.getsockname()[1]}"
    print(f"{url}/v1 for programs, {url} for a browser (Ctrl-C ends the server)", file=sys.stderr, flush=True)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each write to a client that has gone
    Server(served).run(sockets=[listening])
    return 0


def with_key(config: ServeConfig) -> ServeConfig:
    """The configuration with the key itself where it names a file. Raises UserError if a key is needed and missing."""
    key = config.api_key
    if key is not None and key.startswith("@"):
        try:
            key = Path(key[1:]).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise UserError(f"api_key={config.api_key}: the file cannot be read: {reason}") from None
    if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key != ""):
        raise UserError("api_key must be printable ASCII text without a space at its ends; give another key")
    if key is None and not is_loopback(config.host):
        raise UserError(
            f"host={config.host} lets other machines use the server, and needs api_key=KEY or api_key=@FILE; for this "
            f"machine alone, use host=127.0.0.1"
        )
    return dataclasses.replace(config, api_key=key)


def load(config: ServeConfig, device: torch.device) -> tuple[Served, list[str]]:
    """The served model, with the one beside it, and lines that describe them. Raises UserError."""
    served, about = load_one(config, device)
    if config.beside is not None:
        beside, more = load_one(dataclasses.replace(config, checkpoint=config.beside, served_name=None), device)
        served, about = dataclasses.replace(served, beside=beside), [*about, *more]
    return served, about


def load_one(config: ServeConfig, device: torch.device) -> tuple[Served, list[str]]:
    checkpoint, model, tokenizer = open_model(config.checkpoint, config.runs_dir, device, config.trust)
    engine = make_engine(model, tokenizer, config.precision)
    batch = Batch(engine, config.max_running)
    way = "all in one pass" if batch.is_joint else "one after another, for want of our CPU kernels"
    lines = [
        describe(checkpoint, model, tokenizer, f"{device}, {engine.numbers}"),
        f"{config.max_running} texts at a time, {way}; their keys and values take {batch.n_cache_bytes / 2**20:,.0f} MiB; "
        f"{config.max_waiting} more may wait",
    ]
    name = config.served_name or model_name(checkpoint.path.resolve())
    about = {
        "max_model_len": model.config.sequence_length,
        "tokenizer": tokenizer.identity,
        "precision": engine.numbers,
    }
    return Served(name, Worker(batch, model, config.max_waiting, config.threads), config, about, checkpoint), lines


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises UserError if there is no such host, or if the port is taken."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=MAX_CONNECTIONS)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a host name"
        raise UserError(f"host={host} port={port} cannot be listened on: {reason}; choose another port=…") from None
