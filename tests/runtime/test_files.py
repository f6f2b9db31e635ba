"""Files are replaced whole or not at all; a lock has one holder; a crash leaves only names that can be removed."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from andrea.config import UserError
from andrea.runtime import files
from andrea.runtime.files import (
    Locked,
    StorageFailed,
    check_writable,
    exclusive_lock,
    file_sha256,
    is_locked,
    lines_of,
    remove_unfinished,
    replace_text,
    replacing,
    size_words,
    staging_path,
    storing,
)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("\n", [""]),
        ("a\n\nb", ["a", "", "b"]),
        ("a\r\nb\r\r\n", ["a", "b\r"]),
        ("a\rb\u2028c\u2029d\u0085e\x0bf\x0cg\x1ch\n", ["a\rb\u2028c\u2029d\u0085e\x0bf\x0cg\x1ch"]),
    ],
)
def test_a_line_ends_at_a_newline_alone(text: str, lines: list[str]) -> None:
    assert lines_of(text) == lines


def test_a_pipe_or_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    """Root could otherwise replace /dev/null."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe cannot be written"):
        check_writable(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        replace_text(tmp_path / "pipe", "text")
    assert (tmp_path / "pipe").is_fifo() and os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize(
    ("n_byte", "words"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (9949, "9.9 kB"),
        (19_999, "20 kB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (23_456_789, "23 MB"),
        (5.1e9, "5.1 GB"),
        (5.1e13, "51,000 GB"),
    ],
)
def test_sizes_for_people_are_never_zero_for_some_bytes(n_byte: float, words: str) -> None:
    assert size_words(n_byte) == words


def test_a_replaced_file_has_the_new_content_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for text in ("first é", "second"):
        replace_text(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]
    assert file_sha256(path) == hashlib.sha256(b"second").hexdigest()


@pytest.mark.parametrize("step", ["flush_to_disk", "os.replace"])
def test_a_failed_write_leaves_the_old_content(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    replace_text(path, "old")

    def disk_is_full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"andrea.runtime.files.{step}", disk_is_full)
    with pytest.raises(StorageFailed, match=r"/a cannot be written: No space left on device$"), storing(path):
        replace_text(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (28, "earlier checkpoints are intact; free some space, then continue with resume=auto"),
        (30, "earlier checkpoints are intact; make it readable and writable, then continue with resume=auto"),
        (5, "earlier checkpoints are intact; check the disk, then continue with resume=auto"),
    ],
)
def test_the_advice_for_a_failed_write_fits_its_cause(number: int, advice: str, tmp_path: Path) -> None:
    with pytest.raises(StorageFailed) as failed, storing(tmp_path / "a"):
        raise OSError(number, os.strerror(number))
    assert failed.value.advice == advice
    assert pickle.loads(pickle.dumps(failed.value)).advice == advice  # ranks send it to each other
    with pytest.raises(StorageFailed) as failed, storing(tmp_path / "a", of_run=False):
        raise OSError(number, os.strerror(number))
    assert "resume" not in failed.value.advice


def test_an_interrupted_block_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "a"
    replace_text(path, "old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as staging:
        staging.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_staging_names_are_found_and_removed_and_no_others(tmp_path: Path) -> None:
    kept = tmp_path / "step-00000001"
    kept.mkdir()
    assert staging_path(kept) != staging_path(kept)
    staging_path(tmp_path / ("long" * 63)).write_text("half")  # a name as long as a file system allows
    folder = staging_path(kept)
    folder.mkdir()
    (folder / "model").write_text("half")
    assert len(list(tmp_path.iterdir())) == 3
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == [kept]
    remove_unfinished(tmp_path / "absent")


HOLDER = """
import sys
from pathlib import Path
from andrea.runtime.files import exclusive_lock
with exclusive_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(path: Path) -> subprocess.Popen:
    """A process that holds the lock until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_a_held_lock_is_refused_and_names_its_holder(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    holder = hold(path)
    with pytest.raises(Locked, match=f"process {holder.pid} on "), exclusive_lock(path):
        pass
    holder.kill()  # without a chance to remove the file
    holder.wait()
    assert path.exists()
    with exclusive_lock(path):
        assert path.read_text().startswith(f"process {os.getpid()} on ")
    assert not path.exists()


def test_a_held_lock_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    holder, order = hold(path), []

    def release() -> None:
        order.append("waits")
        threading.Timer(0.2, lambda: (order.append("released"), holder.stdin.close())).start()

    with exclusive_lock(path, on_wait=release):
        order.append("held")
        assert path.exists()  # not the file that the first holder has removed
    assert order == ["waits", "released", "held"] and holder.wait() == 0


COUNTER = """
import sys
from pathlib import Path
from andrea.runtime.files import exclusive_lock
folder = Path(sys.argv[1])
count = folder / "count"
for _ in range(300):
    with exclusive_lock(folder / ".lock", on_wait=lambda: None):
        count.write_text(str(int(count.read_text()) + 1))
"""


def test_processes_that_take_the_lock_at_the_same_time_hold_it_one_after_the_other(tmp_path: Path) -> None:
    """Each holder removes the file while others open it and ask for its state. Two holders at once would lose counts."""
    (tmp_path / "count").write_text("0")
    counters = [subprocess.Popen([sys.executable, "-c", COUNTER, str(tmp_path)]) for _ in range(3)]
    assert [counter.wait() for counter in counters] == [0, 0, 0]
    assert (tmp_path / "count").read_text() == "900" and not (tmp_path / ".lock").exists()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    """A run folder of somebody else may hold such a link. The lock would empty the file that it points to."""
    other, path = tmp_path / "other", tmp_path / ".lock"
    other.write_text("precious")
    path.symlink_to(other)
    with pytest.raises(OSError), exclusive_lock(path):
        pass
    assert other.read_text() == "precious" and not is_locked(path)


def test_a_lock_that_is_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    assert not is_locked(tmp_path / ".lock")


def test_an_error_under_a_lock_is_raised_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the lock file can no longer be removed."""

    def read_only(*given: object, **named: object) -> None:
        raise OSError(30, "Read-only file system")

    with pytest.raises(ValueError, match="of the block"), exclusive_lock(tmp_path / ".lock"):
        monkeypatch.setattr(files.Path, "unlink", read_only)
        raise ValueError("of the block")
