"""The installed package: the wheel holds every file, and its command works in an empty folder, away from the clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, tiny_words

pytestmark = pytest.mark.slow


def tracked(*folders: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the tracked files alone, in a folder of their own."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        ".",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        built,
    ]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (path,) = built.glob("*.whl")
    return path


def test_the_wheel_holds_every_file_of_the_package_and_of_configs(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    configs = {f"andrea/{name}" for name in tracked("configs")}
    assert held == {*tracked("andrea"), *configs}
    assert "andrea/configs/train.yaml" in held and "andrea/attention/kernels/attend.cpp" in held


def test_the_installed_command_works_in_an_empty_folder(wheel: Path, notes: Path, tmp_path: Path) -> None:
    installed, here = tmp_path / "installed", tmp_path / "here"
    here.mkdir()
    install = ["install", "--no-deps", "--no-index", "--target", installed, wheel]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, capture_output=True)
    path = f"{installed / 'bin'}{os.pathsep}{os.environ['PATH']}"  # before another `andrea` of this environment
    environment = os.environ | {"PYTHONPATH": str(installed), "PATH": path}

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    andrea = installed / "bin" / "andrea"
    words = tiny_words(here, notes, "train.steps=2", "train.eval_every=2", "train.save_every=2")
    words = [word for word in words if not word.startswith(("runs_dir=", "data_dir="))]
    where = "import andrea, andrea.config as c; print(andrea.__file__, c.CONFIGS)"
    assert run(sys.executable, "-c", where).split() == [
        str(installed / "andrea" / "__init__.py"),
        str(installed / "andrea" / "configs"),
    ]
    assert run(andrea, "train", "--help").startswith("andrea train [key=value …]\n")
    assert "next: andrea sample checkpoint=runs/one/" in run(andrea, "train", "name=one", *words)
    assert "def " in run(andrea, "sample", "prompt=def ", "max_new_tokens=3", "device=cpu")
    run(andrea, "lens", "prompt=def main", "device=cpu")
    assert "sweep: 2 of 2 runs done" in run(andrea, "train", "-m", "seed=1,2", "name=both", *words)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run(*torchrun, "-m", "andrea", "train", "name=two", *words)
    assert {path.name for path in here.iterdir()} == {"data", "lens.html", "runs"}
    assert len(list(here.glob("runs/*/checkpoints/best"))) == 4
