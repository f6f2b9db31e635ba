"""Downloads from a server on this machine: whole, continued, damaged, absent."""

from __future__ import annotations

import hashlib
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from andrea.config import UserError
from andrea.runtime.files import size_words
from andrea.text import download
from andrea.text.download import RememberChecksum, Remote, fetch

CONTENT = bytes(range(251)) * 4001
CHECKSUM = hashlib.sha256(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/file")
            self.send_header("X-Linked-ETag", f'"{CHECKSUM}"')
            self.end_headers()
            return
        if self.path == "/missing":
            self.send_error(404)
            return
        start = int(self.headers.get("Range", "bytes=0-")[6:-1])
        if start >= len(CONTENT):
            self.send_error(416)
            return
        self.server.starts.append(start)
        self.send_response(206 if start and self.path != "/whole" else 200)
        start = 0 if self.path == "/whole" else start
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        self.wfile.write(CONTENT[start : start + 1000] if self.path == "/torn" else CONTENT[start:])

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        made.starts = []
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def remote(server: ThreadingHTTPServer, path: str, sha256: str | None = CHECKSUM) -> Remote:
    return Remote("a.bin", f"http://127.0.0.1:{server.server_port}{path}", sha256)


def quiet(line: str) -> None:
    assert "\n" not in line


@pytest.mark.parametrize(("path", "have"), [("/file", 0), ("/file", 777), ("/whole", 777), ("/file", len(CONTENT))])
def test_the_missing_bytes_are_fetched(server: ThreadingHTTPServer, tmp_path: Path, path: str, have: int) -> None:
    if have:
        (tmp_path / "a.bin.part").write_bytes(CONTENT[:have])
    assert fetch(remote(server, path), tmp_path, quiet).read_bytes() == CONTENT
    assert server.starts == ([] if have == len(CONTENT) else [have])
    assert [file.name for file in tmp_path.iterdir()] == ["a.bin"]
    server.starts.clear()
    fetch(remote(server, "/missing"), tmp_path, quiet)  # the file is there: no request
    assert not server.starts


def test_a_broken_download_is_continued(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run again to go on"):
        fetch(remote(server, "/torn"), tmp_path, quiet)
    assert (tmp_path / "a.bin.part").stat().st_size == 1000
    assert fetch(remote(server, "/file"), tmp_path, quiet).read_bytes() == CONTENT
    assert server.starts == [0, 1000]


def test_progress_is_said_after_every_so_many_bytes(server: ThreadingHTTPServer, tmp_path: Path, monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(download, "BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(download, "REPORT_BYTES", 300_000)
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:50_000])
    fetch(remote(server, "/file"), tmp_path, said.append)
    assert said[0] == "downloading a.bin: 1.0 MB, of which 50 kB are here already"
    after = [50_000 + blocks * (1 << 16) for blocks in (5, 10)]  # the third would be beyond the end
    assert said[1:] == [f"downloaded {size_words(n_byte)} of {size_words(len(CONTENT))} of a.bin" for n_byte in after]


def test_damage_is_noticed_also_by_the_checksum_of_a_redirect(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    for source in (remote(server, "/moved", None), remote(server, "/file")):
        (tmp_path / "a.bin.part").write_bytes(b"x" * 99)
        with pytest.raises(UserError, match="damaged on the way"):
            fetch(source, tmp_path, quiet)
        assert not list(tmp_path.iterdir())
    assert fetch(remote(server, "/moved", None), tmp_path, quiet).read_bytes() == CONTENT


def test_a_file_without_a_checksum_is_said_to_be_unchecked(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    said: list[str] = []
    fetch(remote(server, "/file", None), tmp_path, said.append)
    assert "a.bin: not checked, because the server sent no sha256" in said


def test_no_redirect_leaves_encryption() -> None:
    request = urllib.request.Request("https://example.org/a")
    with pytest.raises(urllib.error.URLError, match="not encrypted"):
        RememberChecksum().redirect_request(request, None, 302, "", HTTPMessage(), "http://example.org/a")


def test_a_download_writes_through_no_link(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "a.bin.part").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="cannot be written"):
        fetch(remote(server, "/whole"), tmp_path, quiet)
    assert (tmp_path / "precious").read_text() == "precious"


def test_no_network_says_which_file_to_place_where(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    for source in (remote(server, "/missing"), Remote("a.bin", "http://127.0.0.1:9/a.bin", None)):
        with pytest.raises(UserError, match="put it at") as caught:
            fetch(source, tmp_path, quiet)
        assert str(tmp_path / "a.bin") in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_written_is_named(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="data_dir"):
        fetch(remote(server, "/file"), tmp_path / "file", quiet)
