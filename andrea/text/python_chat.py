"""Conversations about Python, made from the standard library on this machine: a data set that needs no download.

A question is about a fact of the library (a signature, a docstring), or its answer is computed. The library's files are
parsed, and never imported. The same seed and the same Python give the same bytes.

A tenth is held out, and no question of it is in the training file. Of a fact some phrasings are held out: the fact was
taught, but not in these words. Of a computed answer the operands are held out: the sum of these two numbers was not taught.
"""

import ast
import builtins
import itertools
import json
import math
import operator
import re
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from andrea.config import UserError
from andrea.runtime.files import make_folder, replace_text, storing
from andrea.text.sources import Source

TRAIN, HELD_OUT = "train.jsonl", "held_out.jsonl"
SEED, HELD_OUT_SHARE = 1, 0.1
N_CONVERSATION = {TRAIN: 1000, HELD_OUT: 110}  # conversations of several questions
MOST_OF_MODULE = 13  # functions and classes of one module
LONGEST_SENTENCE, LONGEST_SIGNATURE, LONGEST_LIST = 80, 48, 5  # characters, characters, names

# ---------------------------------------------------------------------------------------------------------- the library

TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
TEMPLATES, FOLLOW_UPS, SMALL_TALK = TABLES["templates"], TABLES["follow_ups"], TABLES["small_talk"]
MODULES, WORDS, SYLLABLES = (TABLES[name].split() for name in ("modules", "words", "syllables"))
# Names that may mean something else than the function of a module of MODULES
ELSEWHERE = {*dir(builtins), *dir(str), *dir(itertools), *dir(math), *dir(time), *sys.stdlib_module_names}
UNUSUAL = re.compile(r"\b_|\bself\b")  # parameters that a caller does not give
DEFINED = re.compile(rb"^([ \t]*)(?:async )?(?:def|class) (\w+)", re.MULTILINE)
# A period ends a sentence if a capital letter follows. The text before it ends with no other period, as in "etc."
SENTENCE = re.compile(r"(.*?[^.\s])\.(?= +[A-Z(]|$)")


def read_library() -> tuple[dict[str, ast.Module], Counter[str]]:
    """The parsed file of each of MODULES, and how many of the library's files define each name. Raises UserError."""
    source = Source("python_chat", "pystdlib", None)
    trees, n_defining = {}, Counter()
    for (path, *_), file in zip(source.listing, source.files, strict=True):
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        content = file.read_bytes()
        if module != "ntpath":  # os.path of another system
            names = [(not indent, name.decode()) for indent, name in DEFINED.findall(content)]
            n_defining.update({name for is_outside, name in names if is_outside})
            n_defining.update({name: 0 for _, name in names})  # methods, which exist too
        if module in MODULES:
            trees["os.path" if module == "posixpath" else module] = ast.parse(content)
    if len(trees) < len(MODULES) / 2:
        raise UserError(
            f"data=python_chat found {len(trees)} of {len(MODULES)} modules in {source.root}; install them, or use data=text"
        )
    return trees, n_defining


def public_definitions(tree: ast.Module) -> list[ast.FunctionDef | ast.ClassDef]:
    """The functions and classes of a module that are in its list `__all__`, or, without one, begin with no underscore."""
    assigned = [each for each in tree.body if isinstance(each, ast.Assign) and isinstance(each.value, ast.List)]
    names = [name for each in assigned if ast.unparse(each.targets[0]) == "__all__" for name in each.value.elts]
    exported = {name.value for name in names if isinstance(name, ast.Constant)}
    found = [each for each in tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name[0] != "_"]
    return [each for each in found if each.name in exported or not exported]


def methods_of(node: ast.ClassDef) -> list[str]:
    """The public methods that the class's body defines, without properties; [] if some depend on the system."""
    if any(isinstance(each, ast.If | ast.Try) for each in node.body):
        return []
    functions = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    is_property = re.compile(r"property|\.setter|\.deleter|overload")
    found = [each.name for each in functions if not any(map(is_property.search, map(ast.unparse, each.decorator_list)))]
    return list(dict.fromkeys(name for name in found if name[0] != "_"))


def parameters_of(arguments: ast.arguments) -> tuple[str, list[str]]:
    """The parameters with their defaults, as in a signature but without annotations; and their names."""
    starred = [("", each) for each in (*arguments.posonlyargs, *arguments.args)]
    starred += [("*", arguments.vararg), *(("", each) for each in arguments.kwonlyargs), ("**", arguments.kwarg)]
    named = [(star, each) for star, each in starred if each is not None]
    for _, each in named:
        each.annotation = None
    return ast.unparse(arguments), [star + each.arg for star, each in named]


def first_sentence(node: ast.FunctionDef | ast.ClassDef | ast.Module) -> str:
    """The first sentence of the docstring; '' if there is none, or none that can be an answer."""
    paragraph = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    found = SENTENCE.match(paragraph)
    sentence = (found[1] if found else paragraph) + "."
    is_plain = sentence[0].isupper() and sentence.isascii() and sentence.count("(") == sentence.count(")")
    is_odd = re.search(r"->|>>>|[:;,!]\.|--|==|deprecat|^don't|^this ", sentence, re.IGNORECASE)
    return sentence if is_plain and not is_odd and 12 <= len(sentence) <= LONGEST_SENTENCE else ""


# -------------------------------------------------------------------------------------------------------- the questions


@dataclass(frozen=True)
class Problem:
    """A question in several phrasings, and its one right answer.

    operand: problems of one kind with the same operand are held out together. None: a fact, of which phrasings are held
    out. follow_ups: (phrasings, answer) of questions that mean this problem's subject with `it`.
    """

    kind: str
    phrasings: tuple[str, ...]
    answer: str
    operand: Hashable = None
    follow_ups: tuple[tuple[tuple[str, ...], str], ...] = ()


REFERRED_TO = "signature purpose parameters module addition subtraction reverse".split()  # by later questions


def facts_of(trees: dict[str, ast.Module], n_defining: Counter[str]) -> Iterator[Problem]:
    """The questions about modules, functions and classes."""
    for module, tree in trees.items():
        about_module = first_sentence(tree)
        if about_module:
            yield Problem("purpose", filled("about_module", module), about_module)
        for node in public_definitions(tree)[:MOST_OF_MODULE]:
            name, about = f"{module}.{node.name}", first_sentence(node)
            is_unique = n_defining[node.name] == 1 and node.name not in ELSEWHERE
            if about and is_unique:
                of_module = ((FOLLOW_UPS["about_module"], about_module),) if about_module else ()
                yield Problem("module", filled("module", node.name), module, follow_ups=of_module)
            if isinstance(node, ast.ClassDef) and 2 <= len(methods := methods_of(node)) <= LONGEST_LIST:
                yield Problem("methods", filled("methods", name), ", ".join(methods))
            answers = {"purpose": about} if about else {}
            if about and isinstance(node, ast.FunctionDef):
                signature, names = parameters_of(node.args)
                if len(signature) <= LONGEST_SIGNATURE and len(names) <= LONGEST_LIST and not UNUSUAL.search(signature):
                    answers["signature"] = f"{name}({signature})"
                    answers["parameters"] = ", ".join(names) or "It takes no parameters."
            for kind, answer in answers.items():
                others = tuple((FOLLOW_UPS[other], answers[other]) for other in answers if other != kind)
                short = filled(kind, node.name)[:2] if is_unique and kind == "purpose" else ()
                yield Problem(kind, (*filled(kind, name), *short), answer, follow_ups=others)


def filled(kind: str, *values: object) -> tuple[str, ...]:
    return tuple(template.format(*values) for template in TEMPLATES[kind])


def small_talk() -> Iterator[Problem]:
    for each in SMALL_TALK.values():
        phrasings = tuple(start + end for start in each["beginnings"] for end in each["endings"])
        yield Problem("small_talk", phrasings, each["answer"])


def unknown(trees: dict[str, ast.Module], n_defining: Counter[str], rng: Random) -> Iterator[Problem]:
    """Questions about what does not exist: invented names, and pairs of words from names that exist."""
    names = [node.name for tree in trees.values() for node in public_definitions(tree)]
    parts = sorted({part for name in names if name.islower() for part in name.split("_") if 3 < len(part) < 9})

    def invented() -> str:
        if rng.random() < 0.3:
            return "_".join(rng.sample(parts, 2))
        return "".join(rng.sample(SYLLABLES, rng.choice((2, 2, 3))))

    for name in distinct(700, invented):
        if name in n_defining:
            continue
        thing = rng.choice(("function", "function", "function", "module", "class"))
        shown, kinds = name, ["signature", "purpose", "parameters", "module"]
        if thing == "function" and rng.random() < 0.5:
            shown, kinds = f"{rng.choice(list(trees))}.{name}", kinds[:3]
        elif thing != "function":
            shown = name.title().replace("_", "") if thing == "class" else name
            kinds = ["methods" if thing == "class" else "about_module"]
        asked = [question for kind in kinds for question in filled(kind, shown)]
        yield Problem("unknown", tuple(rng.sample(asked, 2)), f"I do not know a {thing} named {shown}.", name)


# ---------------------------------------------------------------------------------------------------- computed answers

LARGEST = 30  # operand of sums and differences
LETTERS = "abcdexyz"  # of short strings: few, so that each pair of them is seen often
BRACKETS = {"(": ")", "[": "]", "{": "}"}
SIGNS = {"<": operator.lt, ">": operator.gt, "==": operator.eq, "!=": operator.ne, "<=": operator.le, ">=": operator.ge}


def distinct(count: int, make: Callable[[], Any]) -> list[Any]:
    """`count` different results of `make`, which must be able to give as many."""
    found: dict[Any, None] = {}
    while len(found) < count:
        found.setdefault(make())
    return list(found)


def computed(
    rng: Random, kind: str, values: tuple[object, ...], answer: object, operand: Hashable, count: int = 2
) -> Problem:
    """A problem with `count` of its phrasings."""
    return Problem(kind, tuple(rng.sample(filled(kind, *values), count)), str(answer), operand)


def arithmetic(rng: Random) -> Iterator[Problem]:
    """Sums and differences of numbers up to LARGEST. `a + b` and `b + a` are held out together."""
    for a in range(LARGEST + 1):
        for b in range(LARGEST + 1):
            yield computed(rng, "addition", (a, b), a + b, (min(a, b), max(a, b)))
            if a >= b:
                yield computed(rng, "subtraction", (a, b), a - b, (a, b))


def comparisons(rng: Random) -> Iterator[Problem]:
    """Of numbers, which are equal in a third of them. `a < b` and `b > a` are held out together."""

    def operands() -> tuple[int, int]:
        a = rng.randrange(51)
        return a, rng.choice((a, rng.randrange(51), rng.randrange(51)))

    for a, b in distinct(450, operands):
        for sign in rng.sample(sorted(SIGNS), 2):
            yield computed(rng, "comparison", (a, sign, b), SIGNS[sign](a, b), (min(a, b), max(a, b)), count=1)


def sequences(rng: Random) -> Iterator[Problem]:
    """The next number of a range, of which three or four are shown."""
    for start in range(LARGEST + 1):
        for step in range(1, 7):
            *shown, answer = range(start, start + step * rng.choice((4, 5)), step)
            yield computed(rng, "sequence", (", ".join(map(str, shown)),), answer, (start, step), count=3)


def brackets(rng: Random) -> Iterator[Problem]:
    """Some brackets alone, others in code whose end is missing."""

    def opened() -> str:
        signs = [rng.choice("([{") for _ in range(rng.choice((1, 2, 3, 3, 4, 4, 5)))]
        if rng.random() < 0.5:
            return "".join(signs)
        code = "".join(sign if sign != "(" else rng.choice(("print(", "len(", "sum(", "set(")) for sign in signs)
        return code + ", ".join(str(rng.randrange(10)) for _ in range(rng.choice((1, 2, 3))))

    for text in distinct(450, opened):
        answer = "".join(BRACKETS[sign] for sign in reversed(text) if sign in BRACKETS)
        yield computed(rng, "brackets", (text,), answer, text)


def expressions(rng: Random) -> Iterator[Problem]:
    """Expressions of small lists, strings and numbers, with their values."""

    def pair() -> tuple[str, str]:
        xs, ys = ([rng.randrange(10) for _ in range(rng.randint(2, 4))] for _ in "xy")
        s, t = short_string(rng), short_string(rng)
        n, k, place = rng.randrange(2, 10), rng.randrange(2, 5), rng.randrange(2)
        text, value = rng.choice([
            (f"{xs} + {ys}", xs + ys), (f"{xs}[{place}]", xs[place]), (f"{xs}[-1]", xs[-1]), (f"{xs}[::-1]", xs[::-1]),
            (f"len({xs})", len(xs)), (f"sum({xs})", sum(xs)), (f"max({xs})", max(xs)), (f"min({xs})", min(xs)),
            (f"sorted({xs})", sorted(xs)), (f"{n} in {xs}", n in xs), (f"{s!r} + {t!r}", s + t), (f"{s!r} * {k}", s * k),
            (f"{s!r}[{place}]", s[place]), (f"{s!r}[-1]", s[-1]), (f"len({s!r})", len(s)), (f"{s[:1]!r} in {t!r}", s[0] in t),
            (f"list(range({n}))", list(range(n))), (f"[{n}] * {k}", [n] * k), (f"{n} * {xs[0]}", n * xs[0]),
        ])  # fmt: skip
        return text, repr(value)

    for text, answer in distinct(950, pair):
        yield computed(rng, "expression", (text,), answer, text)


def short_string(rng: Random) -> str:
    return "".join(rng.choices(LETTERS, k=rng.choice((2, 3, 3, 4))))


def strings(rng: Random) -> Iterator[Problem]:
    """Questions about the letters of words, and of short strings that are no words."""
    for text in dict.fromkeys([*WORDS, *distinct(250, lambda: short_string(rng))]):
        quoted = repr(text)
        yield computed(rng, "reverse", (quoted,), text[::-1], text)
        yield computed(rng, "upper", (quoted,), text.upper(), text)
        yield computed(rng, "length", (quoted,), len(text), text)
        yield computed(rng, "letter", (quoted, "first", "begin"), text[0], text, count=1)
        yield computed(rng, "letter", (quoted, "last", "end"), text[-1], text, count=1)
        other = rng.choice(LETTERS)  # often in no place
        for letter in dict.fromkeys((rng.choice(text), rng.choice((rng.choice(text), other)))):
            yield computed(rng, "count", (quoted, repr(letter)), text.count(letter), text, count=1)


# ----------------------------------------------------------------------------------------------- the split, and the files

Asked = tuple[Problem, str]  # a problem in one of its phrasings


def messages_of(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def split(problems: list[Problem], rng: Random) -> dict[str, list[Asked]]:
    """All phrasings of the problems, as the module's docstring says. No question is in both files, and none is there twice."""
    operands: dict[str, dict[Hashable, None]] = {}
    for each in problems:
        if each.operand is not None:
            operands.setdefault(each.kind, {}).setdefault(each.operand)
    held_out = {kind: set(rng.sample(list(of), round(len(of) * HELD_OUT_SHARE))) for kind, of in operands.items()}
    asked: dict[str, dict[str, Asked]] = {TRAIN: {}, HELD_OUT: {}}
    for each in problems:
        if each.operand is None:  # of 6 phrasings 0 or 1, of 49 phrasings 4 or 5
            chosen = set(rng.sample(each.phrasings, int(len(each.phrasings) * HELD_OUT_SHARE + rng.random())))
        else:
            chosen = set(each.phrasings) if each.operand in held_out[each.kind] else set()
        for question in each.phrasings:
            asked[HELD_OUT if question in chosen else TRAIN].setdefault(question, (each, question))
    return {
        TRAIN: list(asked[TRAIN].values()),
        HELD_OUT: [each for question, each in asked[HELD_OUT].items() if question not in asked[TRAIN]],
    }


def conversation(by_kind: dict[str, list[Asked]], rng: Random) -> list[dict[str, str]]:
    """The messages of a conversation of two to six questions. Some refer to the answer or the subject before."""

    def small_talk_with(name: str) -> list[dict[str, str]]:
        answer = SMALL_TALK[name]["answer"]
        asked = [question for problem, question in by_kind["small_talk"] if problem.answer == answer]
        return messages_of(rng.choice(asked), answer)

    messages = small_talk_with("hello") if rng.random() < 0.2 else []
    n_message = len(messages) + rng.choice((4, 4, 6, 8))
    while len(messages) < n_message:
        kind = rng.choice(REFERRED_TO if rng.random() < 0.6 else [each for each in by_kind if each != "small_talk"])
        problem, question = rng.choice(by_kind[kind])
        messages += messages_of(question, problem.answer) + follow_up(problem, rng)
    if rng.random() < 0.3:
        messages += small_talk_with("welcome")
    return messages


def follow_up(problem: Problem, rng: Random) -> list[dict[str, str]]:
    """A question that is understood only after `problem`, with its answer; [] for a kind that has none."""
    if problem.follow_ups:
        phrasings, answer = rng.choice(problem.follow_ups)
        return messages_of(rng.choice(phrasings), answer)
    if problem.kind in ("addition", "subtraction"):
        number = rng.randrange(1, 10)
        return messages_of(f"Add {number} to that.", str(int(problem.answer) + number))
    if problem.kind == "reverse":
        changed = {"Now in upper case.": problem.answer.upper(), "How long is that?": str(len(problem.answer))}
        return messages_of(*rng.choice(list(changed.items())))
    return []


def conversations(seed: int = SEED) -> dict[str, list[dict[str, Any]]]:
    """The records of TRAIN and of HELD_OUT in a random order. Raises UserError if Python's library cannot be read."""
    rng, library = Random(seed), read_library()
    problems = [*facts_of(*library), *small_talk(), *unknown(*library, rng)]
    for make in (arithmetic, comparisons, sequences, brackets, expressions, strings):
        problems += make(rng)
    files = {}
    for name, asked in split(problems, rng).items():
        by_kind: dict[str, list[Asked]] = {}
        for each in asked:
            by_kind.setdefault(each[0].kind, []).append(each)
        records = [{"messages": messages_of(each, problem.answer), "kind": problem.kind} for problem, each in asked]
        several = distinct(N_CONVERSATION[name], lambda by_kind=by_kind: json.dumps(conversation(by_kind, rng)))
        records += [{"messages": json.loads(each), "kind": "conversation"} for each in several]
        rng.shuffle(records)
        files[name] = records
    return files


def python_chat_in(data_dir: Path) -> Path:
    """The folder of the two files in data_dir, for this version of Python, whose library it is. They are made if need be."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return write_python_chat(data_dir / f"python_chat-{version}")


def write_python_chat(folder: Path) -> Path:
    """Write the two files into `folder`, if they are not there yet, and return it. Raises UserError or StorageFailed."""
    if not all((folder / name).is_file() for name in (TRAIN, HELD_OUT)):
        files = conversations()
        with storing(folder, of_run=False):
            make_folder(folder)
            for name, records in files.items():
                replace_text(folder / name, "".join(json.dumps(record) + "\n" for record in records))
    return folder
