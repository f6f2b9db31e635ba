"""The routes, and who may use them."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from andrea.checkpoint import Checkpoint
from andrea.config import ServeConfig
from andrea.generation.engine import Engine
from andrea.serve.answers import Answer, Names
from andrea.serve.errors import RequestError, json_response, to_json
from andrea.serve.requests import read_json, read_request
from andrea.serve.worker import Job, Worker

BODY_SECONDS = 15.0  # for a body to arrive
OPEN_ROUTES = ("/", "/health")  # need no key; the page at / has a field for it
GONE = 499  # as nginx has it


@dataclass(frozen=True)
class Served:
    """The model that is served, and the thread that runs it. about: what /v1/models says of it, besides its name.
    beside: a second model, for comparison."""

    name: str
    worker: Worker
    config: ServeConfig
    about: dict[str, Any]
    checkpoint: Checkpoint
    beside: Served | None = None


def make_app(served: Served, more: Sequence[Route] = ()) -> Starlette:
    """more: routes besides those of the API."""
    routes = Routes(served)
    config = served.config
    guards = [Middleware(Guard, config=config)]
    if config.allow_origin is not None:
        headers = ["authorization", "content-type"]
        cors = Middleware(
            CORSMiddleware, allow_origins=[config.allow_origin], allow_methods=["*"], allow_headers=headers
        )
        guards.insert(0, cors)
    app = Starlette(
        routes=[
            Route("/health", routes.health),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", partial(routes.completions, is_chat=True), methods=["POST"]),
            *more,
        ],
        middleware=guards,
        exception_handlers={
            RequestError: lambda request, error: error.response(),
            HTTPException: lambda request, error: RequestError(error.status_code, error.detail).response(),
            Exception: lambda request, error: RequestError(500, "the server failed; its log says why").response(),
        },
    )
    app.router.redirect_slashes = False
    return app


# ------------------------------------------------------------------------------------------------------ who may use it


class Guard:
    """Refuses requests with a wrong Host (a page that made its own name point to this machine: DNS rebinding), requests of
    pages from other hosts, and requests without the key."""

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        self.app, self.config = app, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self.refusal(scope)):
            await error.response()(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def refusal(self, scope: Scope) -> RequestError | None:
        config = self.config
        headers = dict(reversed(scope["headers"]))  # of a header that is given twice, the first one
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if not is_allowed_host(host, config):
            return RequestError(
                403, "this Host is not served; add its name to allow_hosts of the server", code="wrong_host"
            )
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        allowed = ("", f"http://{host}", f"https://{host}", (config.allow_origin or "").lower())
        if origin not in allowed and config.allow_origin != "*":
            return RequestError(403, "pages of other hosts may not use this server (allow_origin)", code="wrong_origin")
        if config.api_key is None or scope["path"] in OPEN_ROUTES:
            return None
        given = headers.get(b"authorization", b"")
        if hmac.compare_digest(given, b"Bearer " + config.api_key.encode()):
            return None
        message = "the server needs its key: Authorization: Bearer KEY"
        return RequestError(401, message, code="invalid_api_key", www_authenticate="Bearer")


def is_allowed_host(host: str, config: ServeConfig) -> bool:
    """Whether the Host of a request names this server. A page can use any name for it, but no address but its own."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.removeprefix("[").removesuffix("]").rstrip(".")
    if name in ("localhost", config.host.lower(), *(each.lower() for each in config.allow_hosts)):
        return True
    address = address_of(name)
    return address is not None and (address.is_loopback or not is_loopback(config.host))


def is_loopback(host: str) -> bool:
    """Whether the host can only be reached from this machine."""
    address = address_of(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def address_of(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


# ---------------------------------------------------------------------------------------------------------- the routes


class Routes:
    def __init__(self, served: Served) -> None:
        self.served, self.worker, self.config = served, served.worker, served.config
        self.names = Names(self.engine.tokenizer)
        self.began = int(time.time())

    @property
    def engine(self) -> Engine:
        """Another one after the page has loaded a newer checkpoint."""
        return self.worker.batch.engine

    async def health(self, request: Request) -> Response:
        is_alive = self.worker.thread.is_alive()
        return json_response({"status": "ok" if is_alive else "stopped"}, 200 if is_alive else 503)

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self.description]})

    async def model(self, request: Request) -> Response:
        if request.path_params["name"] != self.served.name:
            raise RequestError(404, f"this server has one model, {self.served.name}", "model", "model_not_found")
        return json_response(self.description)

    @property
    def description(self) -> dict[str, Any]:
        head = {"id": self.served.name, "object": "model", "created": self.began, "owned_by": "andrea"}
        return head | self.served.about

    async def completions(self, request: Request, is_chat: bool = False) -> Response:
        body = await read_body(request, self.config.max_body_bytes)
        asked = await asyncio.to_thread(
            lambda: read_request(read_json(body), self.engine, self.served.name, self.config, is_chat)
        )
        job = self.worker.submit(asked)
        answer = Answer(asked, self.served.name, self.names)
        if asked.is_stream:
            return Stream(self.chunks(job, answer), self.config.timeout_s, lambda: self.worker.cancel(job))

        async def write() -> None:
            async for _ in news(job, answer):
                pass

        try:
            await unless_gone(request.receive, write(), self.config.timeout_s)
        finally:
            self.worker.cancel(job)
        return json_response(answer.whole())

    async def chunks(self, job: Job, answer: Answer) -> AsyncIterator[dict[str, Any]]:
        if job.asked.is_chat:
            yield answer.chunk([choice.take("assistant") for choice in answer.choices])
        async for choice in news(job, answer):
            if choice.text or choice.scores or choice.finish_reason is not None:
                yield answer.chunk([choice.take()])
        if job.asked.has_usage:
            yield answer.chunk([], answer.usage)


async def news(job: Job, answer: Answer) -> AsyncIterator[Any]:
    """The choices of the answer, each whenever something has come for it, until all have ended. Raises RequestError."""
    n_left = len(answer.choices)
    while n_left:
        index, event = await job.events.get()
        choice = answer.choices[index]
        if isinstance(event, list):
            choice.add_prompt(event)
        elif event is not None and event.error is not None:
            raise RequestError(500, event.error)
        else:
            choice.add(event)
            n_left -= choice.finish_reason is not None
        yield choice


async def read_body(request: Request, most: int) -> bytes:
    """Raises RequestError if the body is too large, or does not arrive in time."""
    # Closing while a body arrives would reset the connection, and the client could lose the answer. So it stays open:
    # uvicorn drops the rest of the body, and the server closes the connection if that takes long.
    too_large = RequestError(413, f"the body has more than {most} bytes")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large
    except ClientDisconnect:
        raise gone_error() from None
    except TimeoutError:
        raise RequestError(408, f"the body did not arrive within {BODY_SECONDS:g} s", connection="close") from None
    return bytes(body)


def gone_error() -> RequestError:
    return RequestError(GONE, "the client has gone")  # which nobody reads


async def unless_gone(receive: Receive, work: Awaitable[None], timeout_s: float) -> None:
    """Await `work`. It is cancelled if the client has gone, and if it takes too long. Raises RequestError in both cases."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        done, _ = await asyncio.wait((working, leaving), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if working in done:
            return working.result()
        if leaving in done:
            raise gone_error()
        raise RequestError(
            504, f"the answer took longer than {timeout_s:g} s (timeout_s of the server)", code="timeout"
        )
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class Stream(Response):
    """Server-sent events: one for each chunk, then [DONE]. An error after the beginning is an event too."""

    def __init__(self, chunks: AsyncIterator[dict[str, Any]], timeout_s: float, cancel: Callable[[], None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self.chunks, self.timeout_s, self.cancel = chunks, timeout_s, cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def event(text: str) -> None:
            await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})

        async def send_all() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in self.chunks:
                await event(to_json(chunk))

        try:
            await unless_gone(receive, send_all(), self.timeout_s)
            await event("[DONE]")
        except RequestError as error:
            if error.status == GONE:
                return
            try:
                await asyncio.wait_for(event(to_json(error.body)), timeout=1)
            except TimeoutError:  # the client reads nothing; the server closes its connection
                return
        finally:
            self.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
