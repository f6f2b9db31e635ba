"""A conversation in the terminal: `python sample.py chat=true`.

Standard output receives the answers; the prompt and everything else go to standard error. A line that begins with "/" is a
command (HELP). A line that ends with a backslash goes on in the next line. Ctrl-C ends the answer that is being written, and
a second one the session.
"""

import contextlib
import dataclasses
import json
import shlex
from pathlib import Path
from typing import final

import torch

from andrea.config import SampleConfig, UserError, readable_path
from andrea.generation.engine import Engine, Request
from andrea.generation.sample_command import ReaderEnded, ask, open_engine, read_prompt, request_of, show, take_lines
from andrea.runtime.files import StorageFailed, replace_text, storing
from andrea.runtime.program import typed_command
from andrea.runtime.streams import tell
from andrea.text.chat import ASSISTANT, SYSTEM, USER, ChatTokenizer, Turn, fitting_prompt
from andrea.text.tokenizer import Tokenizer, without_surrogates

YOU, CONTINUED = "you> ", "...> "
HELP = """\
  /retry          write another answer to the last message
  /edit TEXT      change the last message, and write an answer to it
  /seed N         the seed of the next answer (each answer adds 1 to it)
  /system TEXT    begin a new conversation, with TEXT as the system's turn
  /new            begin a new conversation
  /save FILE      write the conversation to FILE, a line of data=chat
  /help           this list; Ctrl-D ends the session
a line that ends with \\ goes on in the next line
"""


def talk(config: SampleConfig, device: torch.device) -> int:
    """Describe the checkpoint, talk, and return the exit code. prompt= is the first message. Raises UserError."""
    prompt = read_prompt(config.prompt).removesuffix("\n").removesuffix("\r")  # a file's last line has an end
    engine, about = open_engine(config, device, check_can_chat)
    tell(about)
    with contextlib.suppress(ReaderEnded):
        chat(engine, prompt, request_of(config))
    return 0


def check_can_chat(tokenizer: Tokenizer) -> None:
    """Raise UserError if the model was not tuned on conversations."""
    if not isinstance(tokenizer, ChatTokenizer):
        command = typed_command("train")
        raise UserError(
            f"chat=true needs a model that was tuned on conversations, and this one has no tokens for turns; tune it with "
            f"`{command} init_from=auto data=python_chat`, or leave chat out"
        )


@final
class ChatSession:
    """A conversation and the engine that answers. request: its seed is that of the next answer.

    The first prompt may come from prompt=. `turns` has all turns; an answer is written with as many of the newest ones as the
    model can see.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        assert isinstance(engine.tokenizer, ChatTokenizer), "check_can_chat comes first"
        self.engine, self.request, self.tokenizer = engine, request, engine.tokenizer
        self.turns: list[Turn] = []

    def answer(self) -> None:
        """Write the answer to the last turn, which is the user's. Ctrl-C keeps what was written, and is raised again."""
        n_window = self.engine.model.config.sequence_length
        n_new = min(self.request.max_new_tokens, n_window // 2)  # half of the window is for what was said before
        tokens, n_left_out, n_cut = fitting_prompt(self.tokenizer, self.turns, n_window - n_new)
        if n_left_out:
            tell(f"(the model does not see the oldest {n_left_out} turns: model.sequence_length={n_window})\n")
        if n_cut:
            tell(
                f"(the model does not see the first {n_cut} tokens of the message: model.sequence_length={n_window})\n"
            )
        said = ""
        try:
            request = dataclasses.replace(self.request, max_new_tokens=n_new, num_samples=1)
            for token in self.engine.stream(tokens, request):
                said += token.text
                show(token.text)
                if token.ended == "length":
                    show(" …")
        finally:
            show("\n")
            tell("" if said.strip() else "(an empty answer)\n")
            self.turns.append(Turn(ASSISTANT, said))
            self.request = dataclasses.replace(self.request, seed=self.request.seed + 1)

    def take(self, line: str) -> None:
        """One line of the user: a message, or a command."""
        line = without_surrogates(line)  # prompt= may hold bytes that are no text, and /save writes UTF-8
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        system = "".join(turn.content for turn in self.turns[:1] if turn.role == SYSTEM)  # which stays after /new
        commands = {
            "/retry": self.retry, "/edit": self.edit, "/seed": self.set_seed, "/system": self.begin,
            "/new": lambda _: self.begin(system), "/save": self.save, "/help": lambda _: tell(HELP),
        }  # fmt: skip
        if not line.strip():
            return
        if not line.startswith("/"):
            self.say(line)
        elif name in commands:
            commands[name](rest)
        else:
            tell(f"{name} is no command; /help lists them (to send a line that begins with /, put a space before it)\n")

    def say(self, message: str) -> None:
        self.turns.append(Turn(USER, message))
        self.answer()

    def without_answer(self) -> bool:
        """Take the last answer back. False, with a line that says so, if there is none."""
        if not self.turns or self.turns[-1].role != ASSISTANT:
            tell("there is no answer yet\n")
            return False
        self.turns.pop()
        return True

    def retry(self, _: str) -> None:
        if self.without_answer():
            self.answer()

    def edit(self, message: str) -> None:
        if not message:
            tell("/edit needs the new text of your last message: /edit TEXT\n")
        elif self.without_answer():
            self.turns.pop()
            self.say(message)

    def set_seed(self, seed: str) -> None:
        if not (seed.isascii() and seed.isdigit() and len(seed) < 19):
            tell(f"/seed needs a whole number from 0, got {seed!r}\n")
            return
        self.request = dataclasses.replace(self.request, seed=int(seed))
        tell(f"the next answer has the seed {int(seed)}\n")

    def begin(self, system: str) -> None:
        self.turns = [Turn(SYSTEM, system)] if system else []
        tell("a new conversation\n")

    def save(self, words: str) -> None:
        """Write the conversation as one line of data=chat. An error is a line: the session goes on."""
        with contextlib.suppress(ValueError):
            words = " ".join(shlex.split(words)) or words
        if not words:
            tell("/save needs the name of a file: /save FILE\n")
            return
        record = {"messages": [dataclasses.asdict(turn) for turn in self.turns]}
        try:
            path = Path(readable_path("/save", words)).expanduser()
            with storing(path, of_run=False):
                replace_text(path, json.dumps(record, ensure_ascii=False) + "\n")
        except (UserError, StorageFailed) as error:
            tell(f"{error}\n")
        else:
            tell(f"written: {words}\n")


def chat(engine: Engine, prompt: str, request: Request) -> None:
    """Talk until the input ends. prompt: the first message; empty: none. A second Ctrl-C in a row raises KeyboardInterrupt."""
    tell("talk to the model; /help lists the commands, Ctrl-C ends an answer, Ctrl-D the session\n")
    take_lines(prompt, ChatSession(engine, request).take, read_message, errors="replace")


def read_message(is_interrupted: bool) -> str:
    """The next message, of one line or of several of which each but the last ends with a backslash."""
    line = ask(is_interrupted, YOU)
    while line.endswith("\\"):
        try:
            line = line[:-1] + "\n" + ask(False, CONTINUED)
        except EOFError:
            return line[:-1]
    return line
