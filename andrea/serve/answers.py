"""From tokens to OpenAI's answers: whole ones and the chunks of a stream, of completions and of chats."""

import codecs
import time
import uuid
from typing import Any

from andrea.generation.batching import BatchStep, TokenScore
from andrea.serve.requests import Asked
from andrea.serve.worker import PromptScores
from andrea.text.tokenizer import Tokenizer

REASONS = {"end_of_text": "stop", "stop": "stop", "length": "length"}


class Names:
    """The text of each token by itself. One whose bytes are no UTF-8 is written as bytes:\\xe2\\x80, as OpenAI does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.table = tokenizer.token_bytes()
        named = tokenizer.special.items()
        self.special = {token: name for name, token in named} | {tokenizer.end_of_text: "<|endoftext|>"}

    def __getitem__(self, token: int) -> str:
        try:
            return self.special.get(token) or self.table[token].decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.table[token])


class Choice:
    """One text of an answer: its text so far, and what has not been sent of it."""

    def __init__(self, asked: Asked, index: int, names: Names) -> None:
        self.asked, self.index, self.names = asked, index, names
        self.prompt = asked.prompts[index // asked.n]
        self.finish_reason: str | None = None
        self.n_token, self.n_character = 0, 0  # written tokens; characters of all tokens before the next one
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.text, self.scores = "", []
        if asked.echo:
            self.text = self.prompt.shown

    def add_prompt(self, scores: PromptScores) -> None:
        self.scores += [self.scored(*each) for each in zip(self.prompt.ids[self.prompt.n_added :], scores, strict=True)]

    def add(self, step: BatchStep | None) -> None:
        """None: the text ends without a token."""
        if step is None:
            self.finish_reason = "length"
            return
        self.n_token += 1
        self.text += step.token.text
        self.finish_reason = REASONS.get(step.token.ended)
        if step.score is not None:
            self.scores.append(self.scored(step.token.token, step.score))

    def scored(self, token: int, score: TokenScore | None) -> dict[str, Any]:
        """A token in a form from which that of completions and that of chats are made."""
        offset, data = self.n_character, self.names.table[token]
        self.n_character += len(self.decoder.decode(data))
        likeliest = [] if score is None else [(self.names[other], nats, other) for other, nats in score.likeliest]
        nats = None if score is None else score.nats
        return {"token": token, "name": self.names[token], "nats": nats, "likeliest": likeliest, "offset": offset}

    def take(self, role: str | None = None) -> dict[str, Any]:
        """The choice of an answer or a chunk: all that has come since the last call."""
        text, scores, self.text, self.scores = self.text, self.scores, "", []
        form = chat_scores if self.asked.is_chat else completion_scores
        found = {"index": self.index, "finish_reason": self.finish_reason}
        found["logprobs"] = None if self.asked.n_likeliest is None else form(scores, self.names)
        if not self.asked.is_chat:
            return found | {"text": text}
        content = {"content": text} | ({} if role is None else {"role": role})
        return found | {"delta" if self.asked.is_stream else "message": content}


def completion_scores(scores: list[dict[str, Any]], names: Names) -> dict[str, Any]:
    """The likeliest tokens and the token itself. Of two with one name, the likelier one is given."""
    tops = []
    for each in scores:
        top: dict[str, float] = {}
        for name, nats, _ in each["likeliest"]:
            top.setdefault(name, nats)
        top.setdefault(each["name"], each["nats"])
        tops.append(None if each["nats"] is None else top)
    return {
        "tokens": [each["name"] for each in scores],
        "token_ids": [each["token"] for each in scores],  # not OpenAI's; our page continues from them
        "token_logprobs": [each["nats"] for each in scores],
        "top_logprobs": tops,
        "text_offset": [each["offset"] for each in scores],
    }


def chat_scores(scores: list[dict[str, Any]], names: Names) -> dict[str, Any]:
    def entry(token: int, nats: float) -> dict[str, Any]:
        return {"token": names[token], "logprob": nats, "bytes": list(names.table[token])}

    return {
        "content": [
            entry(each["token"], each["nats"])
            | {"top_logprobs": [entry(token, nats) for _, nats, token in each["likeliest"]]}
            for each in scores
        ],
        "refusal": None,
    }


class Answer:
    """The answer to one request. model: the name of the model."""

    def __init__(self, asked: Asked, model: str, names: Names) -> None:
        self.asked = asked
        self.choices = [Choice(asked, index, names) for index in range(len(asked.requests()))]
        kind, id_ = ("chat.completion", "chatcmpl") if asked.is_chat else ("text_completion", "cmpl")
        kind += ".chunk" if asked.is_chat and asked.is_stream else ""
        self.head = {"id": f"{id_}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
        # Not OpenAI's: what it takes to write the same text again, and what the model did not see.
        self.head |= {"seed": asked.settings.seed} | (
            {"turns_left_out": asked.n_turns_left_out} if asked.is_chat else {}
        )

    @property
    def usage(self) -> dict[str, int]:
        n_prompt = sum(len(prompt.ids) for prompt in self.asked.prompts)
        n_new = sum(choice.n_token for choice in self.choices)
        return {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new}

    def whole(self) -> dict[str, Any]:
        choices = [choice.take("assistant") for choice in self.choices]
        return self.head | {"choices": choices, "usage": self.usage}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
        return self.head | {"choices": choices} | ({"usage": usage} if self.asked.has_usage else {})
