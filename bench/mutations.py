"""The mutants of bench/mutants.py: every place that cosmic-ray's operators can change, and a fixed sample of them.

A place is a position in a file and a family of operators, such as "a binary operator is replaced". A sample draws places,
so that `+`, which eleven others may replace, is as likely as a number; then it draws one of the place's mutants. Each
folder gets a share in proportion to its places. Left out, because no test of behaviour can see them or need see them:

- annotations, `if TYPE_CHECKING`, declarations (`frozen`, `slots` and the like of a dataclass, decorators that cache or
  mark a method as abstract or final);
- `assert` statements and `strict=` of zip, which only a bug in this program trips;
- `==` in the place of `is` and the reverse, and orders (`<`) in the place of `is`, which raise a TypeError at once;
- the operators that put a random number or variable in the place of a variable: they take arguments;
- what is no Python after the change.

Docstrings, imports and the text of messages have no places: the operators don't change strings.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import parso

try:
    from cosmic_ray.ast import Visitor, ast_nodes
    from cosmic_ray.plugins import get_operator, operator_names
except ImportError:
    raise SystemExit("bench/mutants.py takes its mutants from cosmic-ray: pip install cosmic-ray") from None

ROOT = Path(__file__).resolve().parent.parent  # common.py has it too, but loads andrea, which the forks load changed
FOLDERS = ("attention", "text", "checkpoint", "training", "generation")
DECLARATIONS = {"frozen", "slots", "kw_only", "eq", "order", "repr"}
MARKING_DECORATORS = ("cache", "lru_cache", "abstractmethod", "final", "overload", "override", "runtime_checkable")
SKIPPED_LEAVES = {"name", "string", "newline", "endmarker", "fstring_string", "fstring_start", "fstring_end"}
BRACKETS = set("()[]{},:.;=@") | {"->", "...", ":="}


@dataclass(frozen=True)
class Mutant:
    """One change. The place is named by its line's text, and the how-manieth such line of the file it is, so that
    it is found again after other lines of the file have changed. column: from 0. index: of the operator's mutations there.
    """

    file: str
    text: str
    nth: int
    column: int
    operator: str
    index: int

    def line(self) -> int | None:
        """The line's number today, from 1, or None if it is gone."""
        lines = (ROOT / self.file).read_text(encoding="utf-8").split("\n")
        same = [number for number, line in enumerate(lines, 1) if line.strip() == self.text]
        return same[self.nth] if self.nth < len(same) else None

    def source(self) -> str | None:
        """The file's text with the change, or None if its place is gone."""
        line = self.line()
        return line and mutated((ROOT / self.file).read_text(encoding="utf-8"), (line, self.column), self)


class Changing(Visitor):
    """Applies one mutation where it begins at `place`."""

    def __init__(self, place: tuple[int, int], mutant: Mutant) -> None:
        self.place, self.operator, self.index, self.done = place, get_operator(mutant.operator)(), mutant.index, False

    def visit(self, node: Any) -> Any:
        starts = [] if self.done else [start for start, _ in self.operator.mutation_positions(node)]
        if self.index < len(starts) and starts[self.index] == self.place:
            self.done = True
            return self.operator.mutate(node, self.index)
        return node


def mutated(source: str, place: tuple[int, int], mutant: Mutant) -> str | None:
    visitor = Changing(place, mutant)
    try:
        tree = visitor.walk(parso.parse(source))
    except AttributeError:  # the operator for exceptions expects a name, and finds an attribute of a module
        return None
    return tree.get_code() if visitor.done else None


@lru_cache
def operators() -> list[tuple[str, Any]]:
    """Name and instance of each operator that takes no arguments."""
    return [(name, get_operator(name)()) for name in operator_names() if not get_operator(name).arguments()]


def files() -> list[Path]:
    """The files that are mutated: the five folders without their kernels."""
    found = (path for folder in FOLDERS for path in sorted((ROOT / "andrea" / folder).rglob("*.py")))
    return [path for path in found if "kernels" not in (*path.relative_to(ROOT).parts, path.stem)]


def places(path: Path) -> Iterator[tuple[tuple[Any, ...], Mutant]]:
    """Every mutant of a file with its place: file, position, family."""
    source = path.read_text(encoding="utf-8")
    lines = [line.strip() for line in source.split("\n")]
    file = path.relative_to(ROOT).as_posix()
    for node in ast_nodes(parso.parse(source)):
        if node.type in SKIPPED_LEAVES or (node.type == "operator" and node.value in BRACKETS) or is_left_out(node):
            continue
        for name, operator in operators():
            if is_pointless(name):
                continue
            for index, ((line, column), _) in enumerate(operator.mutation_positions(node)):
                text = lines[line - 1]
                mutant = Mutant(file, text, lines[: line - 1].count(text), column, name, index)
                yield (file, line, column, name.partition("_")[0]), mutant


def is_left_out(node: Any) -> bool:
    """Whether a node is part of an annotation, a declaration or an assertion, or changes one."""
    if node.type == "decorator":
        return any(name in node.get_code() for name in MARKING_DECORATORS)
    if node.type == "operator" and node.parent.type in ("parameters", "lambdef"):
        return True
    if node.type == "if_stmt" and "TYPE_CHECKING" in node.children[1].get_code():
        return True
    inner, outer = node, node.parent
    while True:
        if inner.type == "assert_stmt":
            return True
        if outer is None:
            return False
        if outer.type == "argument" and outer.children[0].get_code().strip() in {"strict", *DECLARATIONS}:
            return True
        if outer.type == "annassign" and inner is outer.children[1]:
            return True
        if outer.type in ("param", "tfpdef", "funcdef") and inner is getattr(outer, "annotation", None):
            return True
        if outer.type == "tfpdef" and inner is outer.children[-1]:
            return True
        inner, outer = outer, outer.parent


def is_pointless(operator: str) -> bool:
    family, _, change = operator.partition("_")
    before, _, after = change.partition("_")
    if not family.endswith("ReplaceComparisonOperator"):
        return False
    identity = {"Is", "IsNot"}
    return (before in identity) != (after in identity)


def draw(size: int, seed: int) -> tuple[list[Mutant], dict[str, int]]:
    """The sample, and the number of places of each folder."""
    chance = random.Random(seed)
    pool: dict[str, dict[tuple[Any, ...], list[Mutant]]] = {folder: defaultdict(list) for folder in FOLDERS}
    for path in files():
        for place, mutant in places(path):
            pool[place[0].split("/")[1]][place].append(mutant)
    counts = {folder: len(each) for folder, each in pool.items()}
    sample = []
    for folder, share in shares(size, counts).items():
        order = chance.sample(sorted(pool[folder]), counts[folder])
        drawn = (chance.choice(pool[folder][place]) for place in order)
        sound = (mutant for mutant in drawn if is_python(mutant))
        sample += [next(sound) for _ in range(share)]
    return sample, counts


def shares(size: int, counts: dict[str, int]) -> dict[str, int]:
    """`size` divided in proportion to the counts; the largest remainders get what is left."""
    exact = {name: size * count / sum(counts.values()) for name, count in counts.items()}
    whole = {name: int(share) for name, share in exact.items()}
    for name in sorted(exact, key=lambda name: whole[name] - exact[name])[: size - sum(whole.values())]:
        whole[name] += 1
    return whole


def is_python(mutant: Mutant) -> bool:
    source = mutant.source()
    try:
        return source is not None and compile(source, mutant.file, "exec") is not None
    except (SyntaxError, ValueError):
        return False
