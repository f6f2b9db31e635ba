"""Compiled code is kept in folders that only this user can write to."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from andrea.runtime.code_cache import (
    TORCH_VARIABLE,
    cache_folder,
    is_private,
    torch_cache_folder,
    use_private_torch_cache,
)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that all users share for temporary files, and a home of this user."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(TORCH_VARIABLE, raising=False)
    return folder


def test_torch_s_own_folder_is_used_where_it_is_private(temporary: Path) -> None:
    use_private_torch_cache()
    assert list(temporary.iterdir()) == [torch_cache_folder()] and torch_cache_folder().stat().st_mode & 0o777 == 0o700
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    assert os.environ[TORCH_VARIABLE] == default_cache_dir() == str(torch_cache_folder())


@pytest.mark.parametrize("planted", ["writable", "link", "file", "of another user"])
def test_torch_loads_nothing_that_another_user_may_have_planted(planted: str, temporary: Path, tmp_path: Path) -> None:
    usual = torch_cache_folder()
    usual.rmdir()
    if planted == "link":
        (tmp_path / "other").mkdir()
        (tmp_path / "other").chmod(0o777)
        usual.symlink_to(tmp_path / "other")
    elif planted == "file":
        usual.write_text("")
    else:
        usual.mkdir()
        usual.chmod(0o777 if planted == "writable" else 0o755)
    if planted == "of another user":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder to another user")
        os.chown(usual, 12345, 12345)
    use_private_torch_cache()
    assert os.environ[TORCH_VARIABLE] == str(tmp_path / "home" / "andrea" / "torchinductor")
    assert is_private(Path(os.environ[TORCH_VARIABLE]))


def test_without_a_private_folder_torch_uses_one_that_is_removed_at_the_end(temporary: Path) -> None:
    torch_cache_folder().chmod(0o777)
    program = (
        "import os, torch._inductor.codecache; from andrea.runtime import code_cache\n"  # torch sets the variable itself
        "code_cache.use_private_torch_cache(); print(os.environ[code_cache.TORCH_VARIABLE])"
    )
    environment = os.environ | {"TMPDIR": str(temporary), "XDG_CACHE_HOME": "/dev/null"}
    used = Path(subprocess.check_output([sys.executable, "-c", program], env=environment, text=True).strip())
    assert used.parent == temporary and used != torch_cache_folder() and not used.exists()


def test_a_folder_that_the_user_has_chosen_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TORCH_VARIABLE, "/chosen")
    use_private_torch_cache()
    assert os.environ[TORCH_VARIABLE] == "/chosen" and not list(temporary.iterdir())


def test_a_folder_that_others_can_replace_is_not_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    around = tmp_path / "around"
    around.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(around))
    assert cache_folder() == around / "andrea"
    around.chmod(0o777)  # whoever can write here can rename `andrea`
    assert cache_folder() is None
    around.chmod(0o1777)  # but not with the sticky bit, as in /tmp
    assert cache_folder() == around / "andrea"
