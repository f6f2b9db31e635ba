"""Who may import whom, and which third-party packages stay in which folder (README.md shows the layout)."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Each part may import itself and those named for it; every part may import `config`.
MAY_IMPORT = {
    "config": set(),
    "runtime": set(),
    "text": {"runtime"},
    "attention": {"runtime"},
    "model": {"runtime", "attention"},
    "checkpoint": {"runtime", "text", "model"},
    "generation": {"runtime", "attention", "model", "text", "checkpoint"},
    "interop": {"runtime", "attention", "model", "text", "checkpoint", "generation"},
    "evaluation": {"runtime", "model", "text", "checkpoint", "generation"},
    "training": {"runtime", "attention", "model", "text", "checkpoint", "generation"},
    "insight": {"runtime", "attention", "model", "text", "checkpoint", "generation", "evaluation", "training"},
    "serve": {"runtime", "model", "text", "checkpoint", "generation", "evaluation", "training", "insight"},
    "api": {"runtime", "model", "text", "checkpoint", "generation", "training", "insight", "interop"},
    "cli": {
        "runtime",
        "text",
        "checkpoint",
        "generation",
        "training",
        "insight",
        "interop",
        "evaluation",
        "serve",
        "api",
    },
    "__main__": {"runtime", "text", "checkpoint", "training", "insight", "cli"},
}
MODULES = sorted((ROOT / "andrea").rglob("*.py"))
# Copied into exported folders, where transformers imports it. Nothing here does.
SHIPPED = ROOT / "andrea" / "interop" / "hugging_face" / "modeling_andrea.py"
# Each needs the package that it extends. It is imported by that package, or when the package has been found.
PLUGINS = {
    ROOT / "andrea" / "evaluation" / "harness" / "model.py",
    ROOT / "andrea" / "interop" / "transformer_lens" / "adapter.py",
}


def imports_of(path: Path) -> set[str]:
    """Every module named in an import statement of the file, wherever it stands."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}  # one may be a module of a package
    return names


def part_of(path: Path) -> str:
    return path.relative_to(ROOT / "andrea").with_suffix("").parts[0]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    part = part_of(path)
    parts = {name.split(".")[1] for name in imports_of(path) if name.startswith("andrea.")}
    back = parts - MAY_IMPORT.get(part, set()) - {part, "config"}
    assert not back, f"{part} may not import {back}"


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions and for type checkers count as well."""
    modules = {name_of(path): path for path in MODULES}
    imported = {name: imports_of(path) & modules.keys() - {name} for name, path in modules.items()}
    graphlib.TopologicalSorter(imported).prepare()  # raises CycleError, which lists the modules of the circle


DISTRIBUTED = {
    *(path.relative_to(ROOT).as_posix() for path in MODULES if path.parent.name == "parallel"),
}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_torch_distributed_stays_where_it_is_handed_out(path: Path) -> None:
    used = any(name.startswith("torch.distributed") for name in imports_of(path))
    assert not used or path.relative_to(ROOT).as_posix() in DISTRIBUTED


@pytest.mark.parametrize(
    ("package", "homes"),
    [
        ("hydra", {"andrea/api/command_line.py", "andrea/cli/sweep.py"}),
        ("omegaconf", {"andrea/api/command_line.py"}),
        ("wandb", {"andrea/training/records/weights_and_biases.py"}),
        ("tensorboard", set()),  # torch's writer imports it
        ("triton", set()),
        ("transformers", {"andrea/interop/hugging_face/modeling_andrea.py", "andrea/interop/hugging_face/target.py"}),
        ("gguf", {"andrea/interop/gguf.py"}),
        ("llama_cpp", {"andrea/interop/gguf.py"}),
        (
            "lm_eval",
            {f"andrea/evaluation/harness/{name}.py" for name in ("model", "run", "__main__")},
        ),
        ("transformer_lens", {"andrea/interop/transformer_lens/adapter.py"}),
        ("datasets", {"andrea/evaluation/tasks/data.py"}),
    ],
)
def test_third_party_packages_stay_where_they_belong(package: str, homes: set[str]) -> None:
    scripts = [ROOT / "train.py", ROOT / "sample.py"]
    users = {
        path.relative_to(ROOT).as_posix()
        for path in [*MODULES, *scripts]
        if any(name.split(".")[0] == package for name in imports_of(path)) and "kernels" not in path.parts
    }
    assert users <= homes


def test_the_package_imports_with_torch_and_numpy_alone() -> None:
    blocked = [
        "hydra",
        "omegaconf",
        "wandb",
        "tiktoken",
        "tokenizers",
        "safetensors",
        "rich",
        "yaml",
        "pyarrow",
        "transformers",
        "lm_eval",
        "datasets",
        "tqdm",
        "transformer_lens",
    ]
    modules = [name_of(path) for path in MODULES if path.name != "__main__.py" and path not in {SHIPPED, *PLUGINS}]
    program = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))\n"  # None makes an import fail
        f"import importlib\nfor name in {modules!r}: importlib.import_module(name)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_end_at_a_newline_alone(path: Path) -> None:
    """str.splitlines also splits at U+2028, U+0085 and others, which a text may hold: use runtime.files.lines_of."""
    called = {node.attr for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Attribute)}
    assert not called & {"splitlines", "readlines"}


@pytest.mark.parametrize("path", sorted((ROOT / "bench").glob("*.py")), ids=lambda path: path.stem)
def test_what_bench_imports_from_us_exists(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "andrea":
            module = importlib.import_module(node.module)
            for name in node.names:
                is_module = (
                    importlib.util.find_spec(f"{node.module}.{name.name}") if hasattr(module, "__path__") else None
                )
                assert hasattr(module, name.name) or is_module, f"{node.module} has no {name.name}"


def test_the_scripts_are_shells() -> None:
    for name in ("train.py", "sample.py"):
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= 60


def test_the_files_that_the_pages_for_developers_name_exist() -> None:
    """CAPITALS in a path stand for a name that the reader chooses."""
    for page in ("AGENTS.md", "CONTRIBUTING.md"):
        named = re.findall(
            r"`((?:andrea|bench|configs|docs|tests)/[^`\s]*)`", (ROOT / page).read_text(encoding="utf-8")
        )
        missing = [name for name in named if not re.search("[A-Z]{2}", Path(name).stem) and not (ROOT / name).exists()]
        assert len(named) > 5 and not missing, f"{page} names {missing}"


def test_the_answers_of_where_is_are_files() -> None:
    answers = re.findall(r"\| `([^`]+)` \|$", (ROOT / "docs" / "where-is.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(answers) > 20 and all((ROOT / answer).is_file() for answer in answers)


def test_ci_runs_the_commands_of_the_readme_as_they_stand() -> None:
    readme, ci = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", ".ci/run"))
    commands = re.findall(r"^    (pip install -e .*&& .*)$", readme, re.MULTILINE)
    assert len(commands) == 2 and all(f"\n{command}\n" in ci for command in commands)
