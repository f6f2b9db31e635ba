"""Mutation testing: change one thing in the code at a time, and see whether a test fails.

    python bench/mutants.py --seconds 110         # what is missing, in slices; the same command goes on
    python bench/mutants.py --again               # the survivors once more, after tests were added
    python bench/mutants.py --explain 12 "why"    # a survivor that no test can kill

A sample of mutants (mutations.py) is drawn once, and kept in the record. First, each test file runs once unchanged and
tells which lines each of its tests executes: a map, kept in build/mutants and made again for a file that changes. Then
each mutant meets the tests that execute its statement, or for a constant any function of its file: those of the file that
mirrors its own first, then those of the folder, then others, until they would take --most-s seconds. A mutant is killed
when a test fails, or when the tests take five times as long as they should and more than a minute.

Each run of tests is a fork of this process, which has loaded torch and the other packages but nothing of andrea, in a
copy of the working tree with the change, so that commands that tests start run the changed code too. Slow tests are left
out unless --slow. At the end, the tests that killed run unchanged: each must pass.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded, here and in the tests' commands
os.environ["TRITON_INTERPRET"] = "1"

from mutations import FOLDERS, ROOT, Mutant, draw  # isort: skip
from forked_tests import Fork, Tree, unit_of, wait_for_one  # isort: skip

RECORD = ROOT / "bench" / "results" / "mutants.json"
WORK = ROOT / "build" / "mutants"
KINDS = {  # of tests, by their marks; untraced ones are too slow to be followed, so their lines are not known
    "fast": "not slow and not untraced",
    "untraced": "not slow and untraced",
    "slow": "slow and not untraced",
}
LINES_PER_SECOND = 30.0  # of a test file that is not mapped: a guess, which puts short files first
LEAST_LIMIT_S, TIMES_AS_LONG, LIMIT_OF_A_FILE_S = 60.0, 5.0, 200.0


class Map:
    """Which test executes which line: one file for each test file and kind of test, made again when the file changes.

    A line is named by its text and the how-manieth of its file it is, so that it is found again after other changes.
    """

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.units = {}
        for path in sorted((ROOT / "tests").rglob("test_*.py")):
            file = path.relative_to(ROOT)
            for kind in KINDS:
                has_some = kind == "fast" or kind in path.read_text(encoding="utf-8")
                if has_some and (kind != "slow" or chosen.slow) and file.parts[1] in (chosen.folders or file.parts[1]):
                    self.units[file.as_posix(), kind] = WORK / "map" / unit_of(file.as_posix(), kind)

    def missing(self) -> list[tuple[str, str]]:
        def is_stale(file: str, path: Path) -> bool:
            return not path.exists() or json.loads(path.read_text())["crc"] != zlib.crc32((ROOT / file).read_bytes())

        return [unit for unit, path in self.units.items() if is_stale(unit[0], path)]

    def load(self, trust_old: bool) -> None:
        """trust_old: also the maps of test files that have changed since, which lack new tests."""
        missing = set(self.missing())
        kept = {unit: path for unit, path in self.units.items() if path.exists() and (trust_old or unit not in missing)}
        self.maps = {unit: json.loads(path.read_text()) for unit, path in kept.items()}
        unmapped = [file for file, kind in missing if kind == "fast" and (file, kind) not in kept]
        self.unmapped = {file: (ROOT / file).read_text(encoding="utf-8") for file in sorted(unmapped)}

    def tests_of(self, mutant: Mutant) -> Iterator[tuple[int, str, float]]:
        """Nearness (0 is nearest), test and usual seconds of the tests that execute what the mutant changes."""
        line = mutant.line()
        assert line is not None
        keys = list(keys_of(ROOT / mutant.file, line))
        for (file, kind), unit in self.maps.items():
            near = nearness(mutant.file, file)
            executed = unit["lines"].get(mutant.file, {})
            found = {test for key in keys for test in executed.get(key, ())}
            if kind == "untraced" and near < 3:
                found = {""}
            for name, seconds in unit["passed"].items():
                if name in found or "" in found:
                    yield near, name, seconds
        module = Path(mutant.file).with_suffix("").as_posix().replace("/", ".")
        for file, text in self.unmapped.items():
            near, seconds = nearness(mutant.file, file), text.count("\n") / LINES_PER_SECOND
            if near == 0 or re.search(rf"\b{re.escape(module)}\b", text):
                yield 0, file, 0.0 if near == 0 else seconds
            elif near < 3:
                yield near, file, seconds


def nearness(mutated: str, test_file: str) -> int:
    """0: the test file that mirrors the mutated one. 1: of the same folder. 2: of the same folder of andrea. 3: other."""
    mirrored = Path("tests", *Path(mutated).parts[1:])
    test = Path(test_file)
    if test == mirrored.with_name(f"test_{mirrored.name}"):
        return 0
    if test.parent == mirrored.parent:
        return 1
    return 2 if test.parts[1] == mirrored.parts[1] else 3


def keys_of(path: Path, line: int) -> Iterator[str]:
    """The keys of the lines whose execution shows a change in `line`.

    The lines of its statement, or of its header if the statement has a body. For what is executed when the module is
    loaded: a function's body for its default values and decorators, else all functions of the file.
    """
    text = path.read_text(encoding="utf-8")
    lines = [each.strip() for each in text.split("\n")]
    module = ast.parse(text)
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for number in numbers_of(module, functions, line):
        yield key_of(lines, number)


def key_of(lines: list[str], number: int) -> str:
    return f"{lines[: number - 1].count(lines[number - 1])} {lines[number - 1]}"


def numbers_of(module: ast.Module, functions: list[Any], line: int) -> list[int]:
    def first_line(node: Any) -> int:
        return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])

    def body_lines(node: Any) -> list[int]:
        return list(range(node.body[0].lineno, node.end_lineno + 1))

    around = [node for node in functions if first_line(node) <= line <= node.end_lineno]
    if not around:
        return [number for node in functions for number in body_lines(node)]
    function = max(around, key=lambda node: node.lineno)
    if line < function.body[0].lineno:
        return body_lines(function)
    kinds = (ast.stmt, ast.excepthandler)
    inside = [node for node in ast.walk(function) if isinstance(node, kinds) and node.lineno <= line <= node.end_lineno]
    statement = max(inside, key=lambda node: (node.lineno, -node.end_lineno))
    body = getattr(statement, "body", None)
    return list(
        range(statement.lineno, max(statement.lineno, body[0].lineno - 1 if body else statement.end_lineno) + 1)
    )


def make_map(chosen: argparse.Namespace, trees: list[Tree], deadline: float) -> Map:
    """The map, or as much of it as time allows."""
    tests = Map(chosen)
    waiting, running = [] if chosen.no_map or chosen.tests else tests.missing(), {}
    while (waiting and time.monotonic() < deadline) or running:
        while waiting and len(running) < chosen.jobs and time.monotonic() < deadline:
            file, kind = waiting.pop(0)
            tree = next(tree for tree in trees if tree not in {each for _, each in running.values()})
            fork = Fork(tree, [file], limit_s=1800, marks=KINDS[kind], trace=kind != "untraced")
            running[fork] = ((file, kind), tree)
        fork = wait_for_one(list(running))
        (file, kind), tree = running.pop(fork)
        failed = fork.report["failed"]
        print(f"{file} ({kind}): {len(fork.report['passed'])} tests, {fork.seconds:.0f} s", *failed, flush=True)
        lines = {mutated: by_key(tree.path / mutated, lines) for mutated, lines in fork.report.get("lines", {}).items()}
        stored = {"crc": zlib.crc32((tree.path / file).read_bytes()), "passed": fork.report["passed"], "failed": failed}
        write_json(tests.units[file, kind], stored | {"lines": lines})
    if waiting:
        raise SystemExit(f"{len(waiting)} test files to map: the same command goes on")
    tests.load(trust_old=not (chosen.again or chosen.only))
    return tests


def by_key(path: Path, lines: dict[str, list[str]]) -> dict[str, list[str]]:
    texts = [line.strip() for line in path.read_text(encoding="utf-8").split("\n")]
    return {key_of(texts, int(number)): tests for number, tests in lines.items() if int(number) <= len(texts)}


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


class Trial:
    """One mutant against its tests, the near ones before the others."""

    def __init__(self, number: int, mutant: Mutant, tests: Map, tree: Tree, chosen: argparse.Namespace) -> None:
        most_s, self.with_slow = chosen.most_s, chosen.slow
        self.number, self.mutant, self.tree, self.source = number, mutant, tree, mutant.source()
        self.stages: list[list[str]] = []
        self.left_out, self.seconds, self.met, spent_s = 0, 0.0, 0, 0.0
        self.usual_s: dict[str, float] = dict.fromkeys(chosen.tests.get(number, ()), LEAST_LIMIT_S)
        if self.usual_s:
            self.stages = [list(self.usual_s)]
            return
        for near in ((0,), (1, 2), (3,)):  # within a stage, quick tests first
            stage = sorted((seconds, name) for rank, name, seconds in tests.tests_of(mutant) if rank in near)
            for seconds, name in stage:
                spent_s += seconds
                if spent_s > most_s:
                    self.left_out += 1
                else:
                    self.usual_s[name] = seconds
            names = [name for _, name in stage if name in self.usual_s]
            self.stages += [names] if names else []

    def start(self) -> Fork:
        """Run the next stage."""
        names = self.stages.pop(0)
        self.met += len(names)
        self.tree.put(self.mutant.file, self.source)
        unknown = sum("::" not in name for name in names)
        limit_s = max(LEAST_LIMIT_S, TIMES_AS_LONG * sum(self.usual_s[name] for name in names))
        limit_s += LIMIT_OF_A_FILE_S * unknown
        return Fork(self.tree, names, limit_s, marks="" if self.with_slow else "not slow")

    def outcome(self, fork: Fork) -> dict[str, Any] | None:
        """None: no test failed, and more are waiting."""
        self.tree.put(self.mutant.file, None)
        self.seconds += fork.seconds
        facts = {"tests": self.met, "seconds": round(self.seconds, 1)}
        if fork.report["failed"]:
            return {"outcome": "killed", "by": fork.report["failed"][0], "error": fork.report["error"], **facts}
        if fork.ended != "passed":
            return {"outcome": "killed", "by": fork.ended, "error": fork.report["error"], **facts}
        if self.stages:
            return None
        return {"outcome": "survived", **facts, "tests_left_out": self.left_out}


def try_all(chosen: argparse.Namespace, record: dict[str, Any], tests: Map, trees: list[Tree], deadline: float) -> None:
    waiting = [number for number, row in enumerate(record["rows"]) if is_due(chosen, number, row)]
    running: dict[Fork, Trial] = {}
    while (waiting and time.monotonic() < deadline) or running:
        while waiting and len(running) < chosen.jobs and time.monotonic() < deadline:
            number = waiting.pop(0)
            mutant = Mutant(**{name: record["rows"][number][name] for name in Mutant.__dataclass_fields__})
            tree = next(tree for tree in trees if tree not in {trial.tree for trial in running.values()})
            if mutant.source() is None:
                note(chosen, record, number, {"outcome": "the code is gone"})
                continue
            trial = Trial(number, mutant, tests, tree, chosen)
            if trial.stages:
                running[trial.start()] = trial
            else:
                note(chosen, record, number, {"outcome": "survived", "tests": 0, "tests_left_out": trial.left_out})
        if running:
            fork = wait_for_one(list(running))
            trial = running.pop(fork)
            outcome = trial.outcome(fork)
            if outcome is None:
                running[trial.start()] = trial
            else:
                note(chosen, record, trial.number, outcome)
    print(f"{len(waiting)} mutants are waiting" if waiting else "every mutant was tried", flush=True)


def is_due(chosen: argparse.Namespace, number: int, row: dict[str, Any]) -> bool:
    if chosen.only or chosen.tests:
        return number in chosen.only or number in chosen.tests
    if chosen.folders and row["file"].split("/")[1] not in chosen.folders:
        return False
    return "outcome" not in row or (chosen.again and row["outcome"] == "survived" and "why" not in row)


def note(chosen: argparse.Namespace, record: dict[str, Any], number: int, outcome: dict[str, Any]) -> None:
    """Save an outcome at once."""
    row = record["rows"][number]
    for name in ("outcome", "by", "error", "tests", "seconds", "tests_left_out"):
        row.pop(name, None)
    row.update(outcome)
    row.setdefault("at_first", row["outcome"])
    write_json(chosen.output, record)
    by = row.get("by") or f"{row.get('tests', 0)} tests, {row.get('tests_left_out', 0)} left out"
    print(f"{number:3} {row['outcome']:9}{row.get('seconds', 0):6.0f} s  {row['file']}:{row['line']}  {by}", flush=True)


def sampled(chosen: argparse.Namespace) -> dict[str, Any]:
    """The record with its sample: the stored one, or a new one."""
    if chosen.output.exists():
        return json.loads(chosen.output.read_text())
    mutants, counts = draw(chosen.sample, chosen.seed)
    rows = []
    for mutant in mutants:
        line = mutant.line()
        assert line is not None
        changed = (mutant.source() or "").split("\n")[line - 1].strip()
        rows.append(asdict(mutant) | {"line": line, "changed": changed})
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    record = {"bench": "mutants", "seed": chosen.seed, "commit": commit, "places": counts, "rows": rows}
    write_json(chosen.output, record)
    return record


def summary(record: dict[str, Any]) -> None:
    """Print a table by folder, and the survivors."""
    columns = ("killed at first", "killed", "explained", "survived", "not tried")
    print(f"\n{'':12}{'places':>8}{'sample':>8}" + "".join(f"{name:>17}" for name in columns))
    totals: dict[str, Counter[str]] = {folder: Counter() for folder in FOLDERS}
    for row in record["rows"]:
        state = row.get("outcome", "not tried")
        state = "explained" if state == "survived" and "why" in row else state
        totals[row["file"].split("/")[1]].update(["sample", state])
        totals[row["file"].split("/")[1]]["killed at first"] += row.get("at_first") == "killed"
    for folder, counts in [*totals.items(), ("all", sum(totals.values(), Counter()))]:
        places = record["places"].get(folder) or sum(record["places"].values())
        print(f"{folder:12}{places:8}{counts['sample']:8}" + "".join(f"{counts[name]:17}" for name in columns))
    record["totals"] = {folder: dict(counts) for folder, counts in totals.items()}
    assert not any(name.split(".")[0] == "andrea" for name in sys.modules), "forks would not load the changed files"
    for number, row in enumerate(record["rows"]):
        if row.get("outcome") == "survived":
            print(
                f"\n{number}  {row['file']}:{row['line']}  {row['operator']}\n  - {row['text']}\n  + {row['changed']}"
            )
            print(f"  {row.get('why', '')}")


def confirm(chosen: argparse.Namespace, record: dict[str, Any], trees: list[Tree]) -> None:
    """Run the tests that killed on the unchanged code: each must pass."""
    names = sorted({row["by"] for row in record["rows"] if "::" in row.get("by", "")})
    fork = wait_for_one([Fork(trees[0], names, limit_s=1800, stop=False)])
    unreliable = sorted(set(names) - set(fork.report["passed"]))
    record["killers"] = {"tests": len(names), "that_fail_unchanged": unreliable}
    print(f"{len(names)} tests killed; on the unchanged code {len(unreliable)} of them fail:", *unreliable)
    write_json(chosen.output, record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=200)
    parser.add_argument("--seed", type=int, default=19)
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after so many seconds")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--most-s", type=float, default=100.0, help="seconds of tests that a survivor meets")
    parser.add_argument("--slow", action="store_true", help="slow tests too")
    parser.add_argument("--folders", nargs="*", help="these alone: mutants, and tests")
    parser.add_argument("--no-map", action="store_true", help="of test files not yet mapped, run the near ones whole")
    parser.add_argument("--again", action="store_true", help="try the survivors that are not explained once more")
    parser.add_argument("--only", type=int, nargs="*", default=[], help="try these mutants, by number")
    parser.add_argument(
        "--tests", nargs="*", default=[], metavar="NUMBER=TEST", help="try a mutant with this test alone"
    )
    parser.add_argument("--explain", nargs=2, metavar=("NUMBER", "WHY"), help="say why a mutant survives")
    parser.add_argument("--confirm", action="store_true", help="run the tests that killed on the unchanged code")
    parser.add_argument("--output", type=Path, default=RECORD, help="the record")
    parser.add_argument("--summary", action="store_true", help="only print the record")
    chosen = parser.parse_args()
    pairs = [pair.partition("=") for pair in chosen.tests]
    chosen.tests = {int(number): [each for one, _, each in pairs if one == number] for number, _, _ in pairs}
    deadline = time.monotonic() + chosen.seconds
    record = sampled(chosen)
    if chosen.explain:
        record["rows"][int(chosen.explain[0])]["why"] = chosen.explain[1]
    elif not chosen.summary:
        trees = [Tree(WORK / f"tree-{number}") for number in range(chosen.jobs)]
        if chosen.confirm:
            confirm(chosen, record, trees)
        else:
            try_all(chosen, record, make_map(chosen, trees, deadline), trees, deadline)
    summary(record)
    write_json(chosen.output, record)


if __name__ == "__main__":
    sys.exit(main())
