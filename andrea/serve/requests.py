"""From the body of a request to what the model shall write. Every key is checked; one that would be ignored is refused."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from andrea.config import ServeConfig
from andrea.generation.engine import Engine, Request
from andrea.generation.sampling import Sampling
from andrea.serve.errors import RequestError
from andrea.text.chat import ChatTokenizer, Turn, fitting_prompt

LARGEST_SEED = 2**63 - 1
MOST_STOPS, LONGEST_STOP = 16, 256  # texts, and characters of each
MOST_LIKELIEST = 20
DEFAULT_TOKENS = {"prompt": 16, "messages": 256}  # OpenAI's for completions; a chat would be cut in a sentence
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

# Keys that change nothing, and keys of which the first value, or none, changes nothing.
IGNORED = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier")
NEUTRAL: dict[str, tuple] = {
    "best_of": (1,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
}


@dataclass(frozen=True)
class Prompt:
    """ids: what the model reads. shown: what `echo` returns. n_added: ids in front that are not the user's (0 or 1)."""

    ids: list[int]
    shown: str
    n_added: int = 0


@dataclass(frozen=True)
class Asked:
    """A checked request. Each of its texts has a seed of its own: `seed` for the first one, then one more for each.

    n_likeliest: how many tokens each token's log-probabilities have; None: no log-probabilities.
    """

    prompts: list[Prompt]
    n: int
    settings: Request
    echo: bool
    n_likeliest: int | None
    is_stream: bool
    has_usage: bool  # at the end of a stream
    is_chat: bool
    n_turns_left_out: int = 0

    def requests(self) -> list[tuple[Prompt, Request]]:
        """Prompt and request of each text: the n texts of the first prompt, then those of the next one."""
        prompts = [prompt for prompt in self.prompts for _ in range(self.n)]
        seed = self.settings.seed
        return [(prompt, replace(self.settings, seed=seed + index)) for index, prompt in enumerate(prompts)]


def read_json(body: bytes) -> dict[str, Any]:
    """The body as a mapping. Raises RequestError: it is no JSON, too deep, has a key twice, NaN, or half a surrogate pair."""
    try:
        value = json.loads(body.decode(), parse_constant=refuse_constant, object_pairs_hook=without_doubles)
        json.dumps(value, ensure_ascii=False).encode()  # fails for half of a surrogate pair
    except RecursionError:
        raise RequestError(400, "the body is nested too deeply") from None
    except UnicodeError:
        raise RequestError(400, "the body is not valid Unicode text in UTF-8") from None
    except ValueError as error:
        detail = f": {error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else f": {error}"
        raise RequestError(400, f"the body is not JSON{detail}") from None
    if not isinstance(value, dict):
        raise RequestError(400, 'the body must be a JSON object, such as {"prompt": "def "}')
    return value


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


class Fields:
    """The keys of a body. Each `take` checks one of them; `finish` refuses those that nobody took. null is as if absent."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.left = {key: value for key, value in body.items() if value is not None}

    def take(self, key: str, default: Any, is_valid: Callable[[Any], bool], allowed: str) -> Any:
        value = self.left.pop(key, None)
        if value is None:
            return default
        if not is_valid(value):
            raise RequestError(400, f"{key} must be {allowed}", key)
        return value

    def whole(self, key: str, default: int | None, low: int, high: int) -> int | None:
        is_valid = lambda value: type(value) is int and low <= value <= high  # noqa: E731
        return self.take(key, default, is_valid, f"a whole number from {low} to {high}")

    def number(self, key: str, default: float | None, low: float, high: float) -> float | None:
        """high is finite, so NaN and infinity are out of range."""
        is_valid = lambda value: type(value) in (int, float) and low <= value <= high  # noqa: E731
        return self.take(key, default, is_valid, f"a number from {low:g} to {high:g}")

    def flag(self, key: str, default: bool = False) -> bool:
        return self.take(key, default, lambda value: isinstance(value, bool), "true or false")

    def finish(self) -> None:
        for key in IGNORED:
            self.left.pop(key, None)
        for key, neutral in NEUTRAL.items():
            value = self.left.pop(key, neutral[0])
            if not any(value == each and type(value) in (type(each), float) for each in neutral):
                raise RequestError(400, f"{key} is not supported by this server; leave it out", key, "unsupported")
        for key in self.left:
            name = key if key.isidentifier() and len(key) <= 64 else "a key of the body"
            raise RequestError(400, f"{name} is not known to this server; leave it out", name, "unknown_parameter")


def read_request(body: dict[str, Any], engine: Engine, name: str, config: ServeConfig, is_chat: bool) -> Asked:
    """Raises RequestError. name: of the model."""
    fields = Fields(body)
    if fields.take("model", name, lambda value: isinstance(value, str), "a text") != name:
        raise RequestError(404, f"this server has one model, {name}", "model", "model_not_found")
    source = "messages" if is_chat else "prompt"
    default = min(config.max_tokens, DEFAULT_TOKENS[source])
    n_new = fields.whole(tokens_key(fields, is_chat), default, 0, config.max_tokens)
    n_left_out = 0
    if is_chat:
        prompt, n_left_out = read_messages(fields.left.pop("messages", None), engine, n_new)
        prompts, echo = [prompt], False
        n_top = fields.whole("top_logprobs", 0, 0, MOST_LIKELIEST)
        n_likeliest = n_top if fields.flag("logprobs") else None
    else:
        prompts = read_prompts(fields.left.pop("prompt", None), engine)
        echo = fields.flag("echo")
        n_likeliest = fields.whole("logprobs", None, 0, MOST_LIKELIEST)
    if n_new == 0 and not echo:
        raise RequestError(400, "max_tokens=0 is for echo=true alone; ask for at least one token", "max_tokens")
    n = fields.whole("n", 1, 1, config.max_waiting)
    if n * len(prompts) > config.max_waiting:
        raise RequestError(400, f"{len(prompts)} prompts times n={n} are more than {config.max_waiting} texts", "n")
    top_k = fields.whole("top_k", -1, -1, engine.tokenizer.n_vocab)
    is_stream = fields.flag("stream")
    options = Fields(fields.take("stream_options", {}, lambda value: isinstance(value, dict), "an object"))
    has_usage = options.flag("include_usage")
    options.flag("include_obfuscation")
    options.finish()
    settings = Request(
        max_new_tokens=n_new,
        seed=fields.whole("seed", random.getrandbits(31), 0, LARGEST_SEED),
        stop=read_stop(fields),
        sampling=Sampling(
            temperature=fields.number("temperature", 1.0, 0, 100),
            top_k=top_k if top_k > 0 else None,
            top_p=fields.number("top_p", None, 0, 1),
            min_p=fields.number("min_p", None, 0, 1),
            repetition_penalty=fields.number("repetition_penalty", 1.0, 0.01, 100),
        ),
    )
    fields.finish()
    return Asked(prompts, n, settings, echo, n_likeliest, is_stream, has_usage, is_chat, n_left_out)


def tokens_key(fields: Fields, is_chat: bool) -> str:
    """The key with the number of tokens, of which a chat has an old and a new name."""
    keys = [key for key in ("max_tokens", "max_completion_tokens")[: 1 + is_chat] if key in fields.left]
    if len(keys) == 2:
        raise RequestError(400, "max_tokens is the old name of max_completion_tokens; give one of them", keys[0])
    return keys[0] if keys else "max_tokens"


def read_stop(fields: Fields) -> tuple[str, ...]:
    def is_valid(value: Any) -> bool:
        stops = [value] if isinstance(value, str) else value
        return (
            isinstance(stops, list)
            and len(stops) <= MOST_STOPS
            and all(isinstance(stop, str) and 0 < len(stop) <= LONGEST_STOP for stop in stops)
        )

    allowed = f"a text or at most {MOST_STOPS} texts, of 1 to {LONGEST_STOP} characters each"
    stop = fields.take("stop", [], is_valid, allowed)
    return (stop,) if isinstance(stop, str) else tuple(stop)


def read_prompts(value: Any, engine: Engine) -> list[Prompt]:
    """The prompts of a completion: a text, a list of texts, the ids of a text, or a list of lists of ids."""
    if isinstance(value, str) or is_list_of(value, int):
        return [read_prompt(value, engine)]
    if is_list_of(value, str) or (is_list_of(value, list) and all(is_list_of(each, int) for each in value)):
        return [read_prompt(each, engine) for each in value]
    raise RequestError(
        400, "prompt must be a text, a list of token ids, or a list of texts or of lists of ids", "prompt"
    )


def is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is kind for each in value)


def read_prompt(value: str | list[int], engine: Engine) -> Prompt:
    """A text is read as `sample.py` reads it: end-of-text stands in front, unless it fills the window. Ids stay as they are."""
    n_window, tokenizer = engine.model.config.sequence_length, engine.tokenizer
    if isinstance(value, str):
        longest = n_window * max(map(len, tokenizer.token_bytes()))
        if len(value) > longest:  # it is not encoded: that would take time
            raise too_long(f"over {longest} characters", n_window)
        ids, n_cut = engine.encode_end(value)
        if n_cut:
            raise too_long(f"{n_window + n_cut} tokens", n_window)
        return Prompt(ids, value, n_added=len(ids) - len(tokenizer.encode(value)))
    if len(value) > n_window:
        raise too_long(f"{len(value)} tokens", n_window)
    if not all(0 <= each < tokenizer.n_vocab for each in value):
        raise RequestError(400, f"prompt has ids that are not from 0 to {tokenizer.n_vocab - 1}", "prompt")
    return Prompt(value, tokenizer.decode(value))


def too_long(size: str, n_window: int) -> RequestError:
    message = f"prompt has {size}, and the model reads at most {n_window} tokens; shorten it"
    return RequestError(400, message, "prompt", "context_length_exceeded")


def read_messages(value: Any, engine: Engine, n_new: int) -> tuple[Prompt, int]:
    """The prompt of a conversation, and the number of its first turns that do not fit the window."""
    tokenizer, n_window = engine.tokenizer, engine.model.config.sequence_length
    if not isinstance(tokenizer, ChatTokenizer):
        message = "this model has no tokens for a chat; use /v1/completions, or serve a model trained with data=chat"
        raise RequestError(400, message, "messages", "no_chat_model")
    if not is_list_of(value, dict):
        raise RequestError(400, "messages must be a list of objects with role and content", "messages")
    turns = []
    for message in value:
        role, content = message.get("role"), message.get("content")
        if is_list_of(content, dict) and all(part.keys() == {"type", "text"} for part in content):
            is_text = all(part["type"] == "text" and isinstance(part["text"], str) for part in content)
            content = "".join(part["text"] for part in content) if is_text else None
        is_known = isinstance(role, str) and role in ROLES and message.keys() == {"role", "content"}
        if not is_known or not isinstance(content, str):
            allowed = f"role ({', '.join(ROLES)}) and content, a text or a list of parts of type text, and nothing else"
            raise RequestError(400, f"each of messages must have {allowed}", "messages")
        turns.append(Turn(ROLES[role], content))
    if turns[-1].role != "user":
        raise RequestError(400, "the last of messages must have role user", "messages")
    # As when the window slides while a text is written, at least half of it is the conversation.
    ids, n_left_out, n_cut = fitting_prompt(tokenizer, turns, max(n_window - n_new, (n_window + 1) // 2))
    if n_cut:
        raise too_long(f"{len(ids) + n_cut} tokens with its last message alone", n_window)
    return Prompt(ids, ""), n_left_out
