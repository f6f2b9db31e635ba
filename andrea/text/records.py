"""The text of a record: a line of JSON, an object of a JSON array, a row of a table or of a parquet file.

    {"text": …}                                            as it stands
    {"messages": [{"role": …, "content": …}, …]}           "role: content", with an empty line between two messages
    {"conversations": [{"from": "human", "value": …}, …]}  ShareGPT: the same; human is user, gpt is assistant
    {"instruction": …, "input": …, "output": …}            alpaca: "user: …", "assistant: …", as in a conversation
    {"prompt": …, "completion": …}                         the completion follows the prompt without a space

The names stand for others, too (SINGLE, PAIRS). A field that the user names is read instead.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

SINGLE = ("text", "messages", "conversations", "conversation")
PAIRS = (
    ("instruction", "output"), ("instruction", "response"), ("prompt", "completion"), ("prompt", "response"),
    ("question", "answer"), ("question", "response"), ("input", "output"),
)  # fmt: skip
SYSTEM, CONTEXT = ("system", "system_prompt"), ("input", "context")  # read with a pair, if they are there
CONTINUED = ("prompt", "completion")
USER, ASSISTANT = "user", "assistant"
ROLES = {"human": USER, "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT}


def fields_of(names: Collection[str], wanted: str | None) -> tuple[str, ...]:
    """The fields to read of a record with the fields `names`, in order. Empty: none is known to be the record's text.

    wanted: the field that the user names, which is then the only one.
    """
    if wanted is not None:
        return (wanted,) if wanted in names else ()
    for single in SINGLE:
        if single in names:
            return (single,)
    for question, answer in PAIRS:
        if question in names and answer in names:
            return tuple(dict.fromkeys(name for name in (*SYSTEM, question, *CONTEXT, answer) if name in names))
    return ()


def text_of(record: dict[str, Any], fields: tuple[str, ...]) -> Any:
    """The text of a record, of the fields that `fields_of` has found; None, or another value, if they are not text."""
    values = [record[field] if record[field] is not None else "" for field in fields]
    if len(fields) == 1:
        return conversation(values[0]) if isinstance(values[0], list) else values[0]
    if all(isinstance(value, list) for value in values):  # TRL's: prompt and completion are messages
        return conversation([message for value in values for message in value])
    if not all(isinstance(value, str) for value in values):
        return None
    if fields == CONTINUED:
        return "".join(values)
    roles = ["system" if field in SYSTEM else ASSISTANT if field == fields[-1] else USER for field in fields]
    turns = [{"role": role, "content": value} for role, value in zip(roles, values, strict=True)]
    for index in range(len(turns) - 1, 0, -1):  # a question and its context are one message
        if turns[index]["role"] == turns[index - 1]["role"]:
            both = [turns[index - 1]["content"], turns.pop(index)["content"]]
            turns[index - 1]["content"] = "\n\n".join(filter(None, both))
    return conversation(turns)


def conversation(messages: list[Any]) -> str | None:
    """A list of messages as text; None if an entry is no message."""
    turns = []
    for message in messages:
        role = (message.get("role") or message.get("from")) if isinstance(message, dict) else None
        if not isinstance(role, str):
            return None
        content = message["content"] if message.get("content") is not None else message.get("value")
        if isinstance(content, list):  # parts, of which some may be images
            content = "".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
        if isinstance(content, str) and content:  # a call of a tool may have none
            turns.append(f"{ROLES.get(role, role)}: {content}")
    return "\n\n".join(turns) + "\n" if turns else ""
