"""The page at /, and the routes that it uses besides OpenAI's.

A text is tokenized once, at /v1/andrea/tokens, and from then on the page works with ids: it continues them by
/v1/completions, and asks at /v1/andrea/token why the model wrote one. Routes of the second model begin with /beside.

S tokens before the one asked for, L layers, H heads.
"""

import asyncio
import base64
import dataclasses
import hashlib
import os
import platform
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from andrea.checkpoint import checkpoints_of, step_of
from andrea.config import ServeConfig, UserError
from andrea.generation.batching import token_score
from andrea.insight.compare.page import page_data
from andrea.insight.compare.runs import read_run
from andrea.insight.html import fill_template, without_comments
from andrea.insight.lens.interventions import ablate_heads
from andrea.insight.lens.trace import next_log_probabilities, trace_layers
from andrea.model.gpt import GPT
from andrea.runtime.files import StorageFailed, is_locked
from andrea.serve.answers import Names
from andrea.serve.app import Routes, Served, Stream, read_body
from andrea.serve.errors import RequestError, json_response
from andrea.serve.requests import Fields, is_list_of, read_json, read_messages, read_prompt
from andrea.serve.worker import Task, Worker
from andrea.text.chat import ChatTokenizer
from andrea.training.records.run_folder import LOCK

N_ALTERNATIVES, N_LENS = 10, 3  # likeliest tokens: of the model, and after each layer
Load = Callable[[ServeConfig, torch.device], tuple[Served, list[str]]]


def page_routes(served: Served, load: Load) -> list[Route]:
    """load: as `server.load_one`."""
    routes = [Route("/", make_page(), methods=["GET"])]
    for prefix, each in (("", served), ("/beside", served.beside)):
        if each is None:
            continue
        own = PageRoutes(each, load)
        routes += [
            Route(f"{prefix}/v1/andrea", own.facts),
            Route(f"{prefix}/v1/andrea/tokens", own.tokens, methods=["POST"]),
            Route(f"{prefix}/v1/andrea/token", own.token, methods=["POST"]),
            Route(f"{prefix}/v1/andrea/run", own.run),
            Route(f"{prefix}/v1/andrea/run/stop", own.stop_run, methods=["POST"]),
            Route(f"{prefix}/v1/andrea/run/load", own.load_newest, methods=["POST"]),
        ]
        if prefix:
            routes.append(Route(f"{prefix}/v1/completions", own.api.completions, methods=["POST"]))
    return routes


def make_page() -> Response:
    """The page, the same for every request. Its policy allows its own script and style, by their hashes, and its own origin."""
    folder = Path(__file__).parent / "web"
    hashes = {
        name: base64.b64encode(hashlib.sha256(without_comments(folder / file).encode()).digest()).decode()
        for name, file in (("SCRIPT", "page.js"), ("STYLE", "page.css"))
    }
    text = fill_template(folder / "page.html", hashes)
    policy = re.search(r'Security-Policy" content="([^"]+)"', text)[1]
    headers = {
        "content-security-policy": f"{policy}; frame-ancestors 'none'",  # which no element of the page can say
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
    }
    return HTMLResponse(text, headers=headers)


class PageRoutes:
    """What the page asks of one model."""

    def __init__(self, served: Served, load: Load) -> None:
        self.served, self.worker, self.load = served, served.worker, load
        self.api, self.loading = Routes(served), asyncio.Lock()
        self.checkpoint = served.checkpoint
        self.folder = served.checkpoint.path.absolute().parent.parent  # of the run

    async def facts(self, request: Request) -> Response:
        gpt, tokenizer = self.worker.gpt, self.api.engine.tokenizer
        facts = {
            "name": self.served.name,
            "step": self.checkpoint.step,
            "bits_per_byte": self.checkpoint.state.get("val_bpb"),
            "n_parameter": sum(parameter.numel() for parameter in gpt.parameters()),
            "n_layer": gpt.config.n_layer,
            "n_head": gpt.config.n_head,
            "n_window": gpt.config.sequence_length,
            "precision": self.served.about["precision"],
            "max_tokens": self.served.config.max_tokens,
            "can_chat": isinstance(tokenizer, ChatTokenizer),
            "special": self.api.names.special,
            "has_beside": self.served.beside is not None,
            "has_run": (self.folder / "config.yaml").is_file(),
        }
        return json_response(facts)

    async def tokens(self, request: Request) -> Response:
        """{"prompt": as of /v1/completions} or {"messages": …, "max_tokens": …} -> the ids of the prompt. `read`: the ids
        that the model reads, which lack a space at the end (token healing), and their names."""
        fields = Fields(await self.body(request))
        engine = self.api.engine
        n_new = fields.whole("max_tokens", 256, 1, self.served.config.max_tokens)
        prompt, messages = fields.left.pop("prompt", None), fields.left.pop("messages", None)
        fields.finish()
        if messages is None:
            if not isinstance(prompt, str) and not is_list_of(prompt, int):
                raise RequestError(400, "prompt must be a text or a list of token ids", "prompt")
            found, n_left_out = await asyncio.to_thread(read_prompt, prompt, engine), 0
        else:
            found, n_left_out = await asyncio.to_thread(read_messages, messages, engine, n_new)
        read, _ = engine.healing.heal(found.ids)
        names = [self.api.names[token] for token in read]
        return json_response({"ids": found.ids, "read": read, "names": names, "turns_left_out": n_left_out})

    async def token(self, request: Request) -> Response:
        """{"ids": S + 1 ids}: why the last of them is there. Server-sent events, of `token_parts`."""
        fields = Fields(await self.body(request))
        ids = fields.take("ids", None, lambda value: is_list_of(value, int) and len(value) > 1, "two or more token ids")
        fields.finish()
        if ids is None:
            raise RequestError(400, "ids must be two or more token ids", "ids")
        for part in (ids[:-1], ids[-1:]):
            read_prompt(part, self.api.engine)  # raises RequestError
        task = Task(token_parts(self.worker.gpt, self.api.names, ids))
        self.worker.submit_task(task)
        return Stream(task.results(), self.served.config.timeout_s, task.cancel)

    async def body(self, request: Request) -> dict[str, Any]:
        return read_json(await read_body(request, self.served.config.max_body_bytes))

    # ------------------------------------------------------------------------------------------ a run that is training

    async def run(self, request: Request) -> Response:
        """The figures of the run's page, and whether it trains. No file of more than a few MB is read."""
        return json_response(await asyncio.to_thread(self.run_facts))

    def run_facts(self) -> dict[str, Any]:
        try:
            data = page_data([read_run(self.folder, self.folder.name)])
        except (UserError, StorageFailed) as error:
            raise RequestError(409, f"the run cannot be shown: {error}") from None
        newest = max(map(step_of, checkpoints_of(self.folder)), default=None)
        is_training = is_locked(self.folder / LOCK)
        return data | {"is_training": is_training, "newest_step": newest, "served_step": self.checkpoint.step}

    async def stop_run(self, request: Request) -> Response:
        """Interrupt the process that trains the run, as Ctrl-C does: it saves, and ends."""
        path = self.folder / LOCK
        try:
            holder = path.read_text("utf-8").strip() if is_locked(path) else ""
            process, _, machine = holder.removeprefix("process ").partition(" on ")
            if machine != platform.node() or os.name == "nt":
                where = (
                    f"the run trains in {holder}; press Ctrl-C there" if holder else "no process trains this run now"
                )
                raise RequestError(409, where)
            os.kill(int(process), signal.SIGINT)
        except (OSError, ValueError) as error:
            raise RequestError(409, f"the training cannot be interrupted: {error}") from None
        return json_response({"interrupted": int(process)})

    async def load_newest(self, request: Request) -> Response:
        """Serve the run's newest checkpoint, as soon as no text is being written."""
        async with self.loading:
            newest = max(checkpoints_of(self.folder), key=step_of, default=None)
            if newest is not None and step_of(newest) != self.checkpoint.step:
                config = dataclasses.replace(self.served.config, checkpoint=str(newest))
                try:
                    fresh, _ = await asyncio.to_thread(self.load, config, self.worker.gpt.embedding.weight.device)
                except (UserError, StorageFailed) as error:
                    raise RequestError(409, f"the checkpoint cannot be loaded: {error}") from None
                task = Task(replace_model(self.worker, fresh.worker))
                self.worker.submit_task(task)
                async for _ in task.results():
                    pass
                self.checkpoint = fresh.checkpoint
        return json_response({"step": self.checkpoint.step})


# ------------------------------------------------------------------------------------------------ in the model's thread


def replace_model(worker: Worker, fresh: Worker) -> Iterator[dict[str, Any]]:
    while worker.running:
        yield {}
    worker.batch, worker.gpt = fresh.batch, fresh.gpt


def token_parts(gpt: GPT, names: Names, ids: list[int]) -> Iterator[dict[str, Any]]:
    """Why the model gives ids[-1] its probability after the S tokens ids[:-1], in fp32. First the alternatives, the logit
    lens (nostalgebraist 2020: the head applied to the residual stream after each layer) and the attention of the last
    position; then, for each layer, what switching off each head changes in the token's log-probability."""
    tokens, token = torch.tensor([ids[:-1]], device=gpt.embedding.weight.device), ids[-1]

    def scored(row: torch.Tensor, n_likeliest: int) -> dict[str, Any]:
        score = token_score(row, token, n_likeliest)
        likeliest = [{"id": other, "name": names[other], "nats": nats} for other, nats in score.likeliest]
        return {"nats": score.nats, "rank": int((row > row[token]).sum()), "likeliest": likeliest}

    lens, weights, row = [], [], None
    for layer in trace_layers(gpt, tokens):
        if not lens:
            lens.append(scored(next_log_probabilities(gpt, layer.before[:, -1:])[0, 0].cpu(), N_LENS))
        row = next_log_probabilities(gpt, layer.after[:, -1:])[0, 0].cpu()
        lens.append(scored(row, N_LENS))
        weights.append(layer.weights[0, :, -1].cpu())
        yield {"n_layer_read": len(weights)}
    shares = (torch.stack(weights) * 65535).round().to(torch.int32).numpy().astype("<u2")  # (L, H, S)
    attention = base64.b64encode(shares.tobytes()).decode()
    yield scored(row, N_ALTERNATIVES) | {"lens": lens, "attention": attention}
    with_all = float(row[token])
    for index, layer in enumerate(trace_layers(gpt, tokens)):
        without = ablate_heads(gpt, tokens, index, layer, range(gpt.config.n_head), last_only=True)
        yield {"layer": index, "changes": [float(left[0, token]) - with_all for _, left in without]}
