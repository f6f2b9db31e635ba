"""The thread that runs the model. The server's other thread hands it the texts of requests, and gets their tokens back."""

import asyncio
import sys
import threading
import traceback
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from andrea.evaluation.scoring import score_tokens
from andrea.generation.batching import Batch, BatchedText, BatchStep, TokenScore
from andrea.generation.engine import Request
from andrea.model.gpt import GPT
from andrea.runtime.device import choose_threads
from andrea.serve.errors import RequestError
from andrea.serve.requests import Asked, Prompt

PromptScores = list[TokenScore | None]  # of each token that the user gave; None: nothing stands before it
MOST_TASKS = 8  # that may wait or run
Event = tuple[int, PromptScores | BatchStep | None]  # text; None: the text has ended without a token


class Job:
    """The texts of one request, and the events that come of them. Used by the server's thread, but for `is_cancelled`."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.is_cancelled = False


@dataclass
class JobText:
    """One text of a job. index: among its texts."""

    job: Job
    index: int
    prompt: Prompt
    request: Request
    written: BatchedText | None = None  # while it is in the batch


class Task:
    """Work with the model that writes no text. It is done in parts, one after each step of the batch; each has a result."""

    def __init__(self, parts: Iterator[dict[str, Any]]) -> None:
        self.parts = parts
        self.events: asyncio.Queue[dict[str, Any] | RequestError | None] = asyncio.Queue()  # None: the end
        self.is_cancelled = False

    async def results(self) -> AsyncIterator[dict[str, Any]]:
        """Raises RequestError."""
        while (found := await self.events.get()) is not None:
            if isinstance(found, RequestError):
                raise found
            yield found

    def cancel(self) -> None:
        self.is_cancelled = True


class Worker:
    """Writes the texts of jobs with `batch`. gpt: the model in fp32, for scores of prompts. max_waiting: texts beyond those
    of the batch that may wait for a place in it. threads: as the key of configs/serve.yaml."""

    def __init__(self, batch: Batch, gpt: GPT, max_waiting: int, threads: int | str) -> None:
        self.batch, self.gpt, self.threads = batch, gpt, threads
        self.n_place, self.max_waiting = len(batch.idle), max_waiting
        self.waiting: deque[JobText] = deque()
        self.running: list[JobText] = []
        self.tasks: deque[Task] = deque()
        self.changed = threading.Condition()  # guards `waiting`, `tasks` and `n_live`
        self.n_live = 0  # texts that wait or run
        self.is_stopping = False
        self.thread = threading.Thread(target=self.run, name="model", daemon=True)

    def start(self) -> None:
        """Call this in the loop that `submit` is called in."""
        self.loop = asyncio.get_running_loop()
        self.thread.start()

    def stop(self) -> None:
        with self.changed:
            self.is_stopping = True
            self.changed.notify()
        self.thread.join(timeout=10)

    # ------------------------------------------------------------------------------------------- the server's thread

    def submit(self, asked: Asked) -> Job:
        """Raises RequestError (429) if too many texts wait."""
        job = Job(asked)
        texts = [JobText(job, index, *each) for index, each in enumerate(asked.requests())]
        with self.changed:
            if self.n_live + len(texts) > self.n_place + self.max_waiting:
                seconds = 1 + len(self.waiting) // self.n_place
                message = f"{self.n_live} texts are being written or wait; try again later"
                raise RequestError(429, message, code="queue_full", retry_after=str(seconds))
            self.n_live += len(texts)
            self.waiting += texts
            self.changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Write no more of the job's texts. Nothing happens if all have ended."""
        with self.changed:
            job.is_cancelled = True
            left = deque(text for text in self.waiting if text.job is not job)
            self.n_live -= len(self.waiting) - len(left)
            self.waiting = left
            self.changed.notify()

    def submit_task(self, task: Task) -> None:
        """Raises RequestError (429) if too many tasks wait."""
        with self.changed:
            if len(self.tasks) >= MOST_TASKS:
                raise RequestError(429, "other requests of the page are answered; try again later", code="queue_full")
            self.tasks.append(task)
            self.changed.notify()

    # -------------------------------------------------------------------------------------------- the model's thread

    def run(self) -> None:
        choose_threads(self.threads)  # OpenMP keeps this number for each thread of the program
        while True:
            with self.changed:
                while not (self.waiting or self.running or self.tasks or self.is_stopping):
                    self.changed.wait()
                if self.is_stopping:
                    return
            try:
                self.step()
                self.advance_task()
            except Exception:  # a bug, told here; the server goes on with the next requests
                traceback.print_exc(file=sys.stderr)
                failed = BatchStep(None, None, error="the server failed; its log says why")
                self.post([(text.job, (text.index, failed)) for text in self.running])
                self.end(list(self.running))

    def step(self) -> None:
        """Let texts join and leave, and add one token to those that are in the batch."""
        self.end([text for text in self.running if text.job.is_cancelled])
        while self.batch.idle:
            with self.changed:
                if not self.waiting:
                    break
                text = self.waiting.popleft()
            self.running.append(text)
            if text.job.asked.echo and text.job.asked.n_likeliest is not None:
                self.post([(text.job, (text.index, self.prompt_scores(text)))])
            if text.request.max_new_tokens == 0:
                self.post([(text.job, (text.index, None))])
                self.end([text])
            else:
                n_likeliest = text.job.asked.n_likeliest
                text.written = BatchedText(self.batch.engine, text.prompt.ids, text.request, n_likeliest)
                self.batch.join(text.written)
            if text.job.asked.echo:
                break  # scores take as long as a step; the texts in the batch go on
        if self.batch.texts:
            made = {each.text: each for each in self.batch.step()}
            with_news = [text for text in self.running if text.written in made]
            self.post([(text.job, (text.index, made[text.written])) for text in with_news])
            self.end([text for text in with_news if text.written.window is None])

    def advance_task(self) -> None:
        """Do one part of the task that waits longest."""
        with self.changed:
            task = self.tasks.popleft() if self.tasks else None
        if task is None or task.is_cancelled:
            return
        try:
            found = next(task.parts, None)
        except Exception:  # as in `run`
            traceback.print_exc(file=sys.stderr)
            found = RequestError(500, "the server failed; its log says why")
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(task.events.put_nowait, found)
        if isinstance(found, dict):
            with self.changed:
                self.tasks.append(task)

    def end(self, texts: list[JobText]) -> None:
        for text in texts:
            self.running.remove(text)
            if text.written is not None:
                self.batch.leave(text.written)
        with self.changed:
            self.n_live -= len(texts)

    def prompt_scores(self, text: JobText) -> PromptScores:
        """Of the user's tokens. The first one is predicted only if end-of-text was put in front of it."""
        ids, n_added = text.prompt.ids, text.prompt.n_added
        return [None] * (1 - n_added) + score_tokens(self.gpt, ids, text.job.asked.n_likeliest)

    def post(self, events: list[tuple[Job, Event]]) -> None:
        def deliver() -> None:
            for job, event in events:
                job.events.put_nowait(event)

        if events and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(deliver)
