"""The house's arrows: who may import whom, and which packages stay in which room."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Each room may import the rooms named for it, and itself; `config` is everyone's.
MAY_IMPORT = {
    "config": set(),
    "native": set(),
    "text": set(),
    "attention": {"native"},
    "model": {"attention"},
    "checkpoint": {"text", "model"},
    "generation": {"native", "checkpoint", "text", "model", "attention"},
    "training": {"generation", "checkpoint", "text", "model", "attention"},
    "insight": {"training", "generation", "checkpoint", "text", "model", "attention"},
    "command_line": {"insight", "training", "generation", "checkpoint", "text", "model"},
    "sweep": {"command_line"},
    "compile_ahead": {"command_line", "training", "model"},
    "__main__": {"insight", "command_line", "training", "generation", "checkpoint", "text", "model"},
}
MODULES = sorted((ROOT / "andrea").rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Every module named in an import statement of the file, wherever it stands."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "andrea"}
    return names


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "andrea").with_suffix("").parts[0]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_point_one_way(path: Path) -> None:
    room = room_of(path)
    rooms = {name.split(".")[1] for name in imports_of(path) if name.startswith("andrea.")}
    back = rooms - MAY_IMPORT.get(room, set()) - {room, "config"}
    assert not back, f"{room} may not import {back}"


DISTRIBUTED = {
    "andrea/checkpoint.py",  # reads what all ranks wrote
    "andrea/training/distributed.py",
    "andrea/training/parallel.py",
    "andrea/training/saver.py",
    "andrea/training/watchdog.py",
}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_torch_distributed_stays_where_it_is_handed_out(path: Path) -> None:
    used = any(name.startswith("torch.distributed") for name in imports_of(path))
    assert not used or path.relative_to(ROOT).as_posix() in DISTRIBUTED


@pytest.mark.parametrize(
    ("package", "homes"),
    [
        ("hydra", {"andrea/command_line.py", "andrea/sweep.py"}),
        ("omegaconf", {"andrea/command_line.py"}),
        ("wandb", {"andrea/training/loggers.py"}),
        ("triton", set()),
    ],
)
def test_guests_stay_in_their_rooms(package: str, homes: set[str]) -> None:
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
    ]
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in MODULES
        if path.name != "__main__.py"
    ]
    program = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))\n"  # None makes an import fail
        f"import importlib\nfor name in {modules!r}: importlib.import_module(name)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_scripts_are_shells() -> None:
    for name in ("train.py", "sample.py"):
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= 60
