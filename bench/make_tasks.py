"""Makes the data of the three tasks from modules of Python's standard library: python bench/make_tasks.py FOLDER.

Only modules that the default text (data=pystdlib) holds out are read. A module is held out by the hash of its name, so
a run of the default text has seen none of them, whatever the version of Python. The data are shipped, and not made when
they are needed, so that figures of different machines and years can be compared.

Each question is a record with `text`, `choices` and `answer`, the index of the right choice.
"""

from __future__ import annotations

import ast
import io
import json
import keyword
import random
import re
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from common import ROOT

sys.path.insert(0, str(ROOT))

from andrea.text.sources import Source

SEED = 0
MOST_QUESTIONS = 300  # of a task: the standard error of a share is then at most 3 percent
MOST_CONTEXT = 600  # characters in front of a question: about 200 tokens, which a small model's window holds
LEAST_CONTEXT = 200
N_CHOICE = 4
LEAST_NAME = 4  # characters: shorter names are guessed by their frequency
LEAST_APART = 8  # characters between a bracket and the one that closes it
CLOSING = {"(": ")", "[": "]", "{": "}"}
NOT_NAMES = {"self", *keyword.kwlist, *keyword.softkwlist}


@dataclass(frozen=True)
class Question:
    text: str
    choices: list[str]
    answer: int


def held_out_modules() -> list[str]:
    """The text of each held-out module of the running Python, in a fixed order."""
    library = Path(sysconfig.get_paths()["stdlib"])
    modules: list[str] = []
    for piece in Source("pystdlib", "pystdlib", library).pieces("val"):
        if piece.begins_document:
            modules.append("")
        modules[-1] += piece.text
    return modules


# ------------------------------------------------------------------------------------------------ names and brackets


def tokens_of(text: str) -> list[tuple[int, tokenize.TokenInfo]]:
    """The tokens of a module, each with the index in `text` at which it begins."""
    starts = [0, *(match.end() for match in re.finditer("\n", text))]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [(starts[token.start[0] - 1] + token.start[1], token) for token in tokens if token.string]


def context_start(text: str, end: int) -> int:
    """The beginning of the first line of which at most MOST_CONTEXT characters lie in front of `end`."""
    return 0 if end <= MOST_CONTEXT else text.index("\n", end - MOST_CONTEXT - 1) + 1


def name_questions(text: str, random_: random.Random) -> Iterator[Question]:
    """Which name stands here? The right choice and the wrong ones are names that the code in the context uses."""
    names = [
        (place, token.string)
        for place, token in tokens_of(text)
        if token.type == tokenize.NAME and len(token.string) >= LEAST_NAME and token.string not in NOT_NAMES
    ]
    for index, (end, name) in enumerate(names):
        start = context_start(text, end) if end >= LEAST_CONTEXT else end
        known = {earlier for place, earlier in names[:index] if place >= start}
        others = sorted(known - {name})
        if name in known and len(others) >= N_CHOICE - 1:
            yield shuffled(text[start:end], name, random_.sample(others, N_CHOICE - 1), random_)


def bracket_questions(text: str, random_: random.Random) -> Iterator[Question]:
    """Which bracket closes here? The text ends in front of a closing bracket, and holds the bracket that it closes."""
    opened = []
    for end, token in tokens_of(text):
        if token.type != tokenize.OP or token.string not in "()[]{}":
            continue
        if token.string in CLOSING:
            opened.append(end)
            continue
        first = opened.pop()
        start = context_start(text, end)
        if start <= first <= end - LEAST_APART:
            choices = list(CLOSING.values())
            yield at_white_space(text[start:end], choices, choices.index(token.string))


# ------------------------------------------------------------------------------------------------------- signatures


def signature_questions(text: str, random_: random.Random) -> Iterator[Question]:
    """Which signature has the function that this docstring describes? The others are of the same module."""
    functions = [
        (signature_of(node), first_paragraph(node))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    signatures = sorted({signature for signature, _ in functions})
    for signature, about in functions:
        others = [each for each in signatures if name_of(each) != name_of(signature)]
        if about and len(others) >= N_CHOICE - 1:
            comment = "".join(f"# {line}\n" for line in about.split("\n"))
            yield shuffled(comment, signature, random_.sample(others, N_CHOICE - 1), random_)


def signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return f"def {node.name}({ast.unparse(node.args)}):"


def name_of(signature: str) -> str:
    return signature[len("def ") : signature.index("(")]


def first_paragraph(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The first paragraph of a function's docstring; '' without one, or if it is too short to tell anything."""
    about = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
    return about if len(about.split()) >= 4 else ""


# ---------------------------------------------------------------------------------------------------------- the tasks


def shuffled(text: str, right: str, wrong: list[str], random_: random.Random) -> Question:
    choices = [right, *wrong]
    random_.shuffle(choices)
    return at_white_space(text, choices, choices.index(right))


def at_white_space(text: str, choices: list[str], answer: int) -> Question:
    """A question whose text ends in front of white space; what follows it is put in front of each choice.

    Every tokenizer begins a token at white space. Elsewhere the end of the text and the choice may be one token, and a
    choice without a token of its own has no probability.
    """
    end = re.search(r"\s*\S*$", text).start()
    return Question(text[:end], [text[end:] + choice for choice in choices], answer)


def spread(questions: list[list[Question]], random_: random.Random) -> list[Question]:
    """At most MOST_QUESTIONS of the modules' questions, from all modules alike, so that no long module dominates."""
    for of_module in questions:
        random_.shuffle(of_module)
    rounds = (of_module[turn : turn + 1] for turn in range(MOST_QUESTIONS) for of_module in questions)
    return [question for found in rounds for question in found][:MOST_QUESTIONS]


def balanced(questions: list[list[Question]], random_: random.Random) -> list[Question]:
    """Equally many questions for each answer, so that no answer is right more often than chance."""
    answers = range(len(CLOSING))
    by_answer = [
        spread([[one for one in of_module if one.answer == answer] for of_module in questions], random_)
        for answer in answers
    ]
    count = min(MOST_QUESTIONS // len(CLOSING), *map(len, by_answer))
    return [by_answer[answer][number] for number in range(count) for answer in answers]


Make = Callable[[str, random.Random], Iterator[Question]]
Choose = Callable[[list[list[Question]], random.Random], list[Question]]
TASKS: dict[str, tuple[Make, Choose]] = {
    "names": (name_questions, spread),
    "brackets": (bracket_questions, balanced),
    "signatures": (signature_questions, spread),
}


def make_task(name: str, modules: Iterable[str]) -> list[Question]:
    """The questions of a task; the same for the same modules."""
    make, choose = TASKS[name]
    random_ = random.Random(SEED)
    return choose([list(make(text, random_)) for text in modules], random_)


def write_tasks(folder: Path) -> None:
    """Write NAME.jsonl for each task."""
    modules = held_out_modules()
    for name in TASKS:
        lines = [json.dumps(asdict(question), ensure_ascii=False) for question in make_task(name, modules)]
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        print(f"{folder / name}.jsonl: {len(lines)} questions, of Python {sys.version.split()[0]}")


if __name__ == "__main__":
    write_tasks(Path(sys.argv[1]))
