"""Download files. An interrupted download is resumed, and a file gets its final name after its sha256 was checked.

No common library does both: pooch does not resume an interrupted download, and huggingface_hub does not check the
sha256 of a downloaded file.
"""

import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from andrea.config import UserError
from andrea.runtime.files import file_sha256, size_words
from andrea.runtime.system import open_no_link, rename

BLOCK_BYTES = 1 << 20
REPORT_BYTES = 20e6
TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class Remote:
    name: str  # name of the file
    address: str
    sha256: str | None  # None: the server sends it in the header X-Linked-ETag (Hugging Face's large files)


SHAKESPEARE = (
    Remote(
        "tinyshakespeare.txt",
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
)
FINEWEB_EDU_ADDRESS = "https://huggingface.co/datasets/karpathy/fineweb-edu-100B-gpt2-token-shards/resolve/main/"
FINEWEB_EDU_TRAINING_SHARDS = 10  # of 100 million tokens each
FINEWEB_EDU = tuple(
    Remote(name, FINEWEB_EDU_ADDRESS + name, None)
    for name in [
        "edu_fineweb_val_000000.bin",
        *(f"edu_fineweb_train_{number:06d}.bin" for number in range(1, FINEWEB_EDU_TRAINING_SHARDS + 1)),
    ]
)


class RememberChecksum(urllib.request.HTTPRedirectHandler):
    """Remember the sha256 from a redirect's headers.

    Hugging Face redirects large files to another host, and that host does not send the sha256.
    """

    def __init__(self) -> None:
        self.sha256: str | None = None

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # noqa: ANN001, ANN201 (urllib's signature)
        if req.full_url.startswith("https:") and not newurl.startswith("https:"):
            raise urllib.error.URLError(f"the server redirects to {newurl[:80]}, which is not encrypted")
        self.sha256 = announced_checksum(headers) or self.sha256
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def announced_checksum(headers: http.client.HTTPMessage) -> str | None:
    tag = (headers.get("X-Linked-ETag") or "").strip('W/"')
    return tag if re.fullmatch(r"[0-9a-f]{64}", tag) else None


def fetch(remote: Remote, folder: Path, report: Callable[[str], None]) -> Path:
    """The path of `remote` in `folder`, into which what is missing of it is downloaded. Raises UserError."""
    path, partial = folder / remote.name, folder / f"{remote.name}.part"
    if path.exists():
        return path
    by_hand = f"download {remote.address} elsewhere and put it at {path}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        expected = receive(remote, partial, report)
    except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(f"{remote.name} cannot be downloaded ({reason}); run again to go on, or {by_hand}") from error
    except OSError as error:
        raise UserError(f"{partial} cannot be written ({error.strerror}); choose a writable data_dir=…") from error
    found = file_sha256(partial)
    if expected is None:
        report(f"{remote.name}: not checked, because the server sent no sha256")
    elif found != expected:
        partial.unlink()
        raise UserError(f"{remote.name} was damaged on the way (sha256 {found[:12]}…); run again, or {by_hand}")
    rename(partial, path)
    return path


def receive(remote: Remote, partial: Path, report: Callable[[str], None]) -> str | None:
    """Append the missing bytes to `partial`. Returns the sha256 that the complete file must have; None if unknown."""
    n_byte = partial.stat().st_size if partial.exists() else 0
    checksum = RememberChecksum()
    opener = urllib.request.build_opener(checksum)
    headers = {"User-Agent": "andrea", "Accept-Encoding": "identity"}
    if n_byte:
        headers["Range"] = f"bytes={n_byte}-"
    try:
        answer = opener.open(urllib.request.Request(remote.address, headers=headers), timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == 416 and n_byte:  # the file is complete: the last run stopped before its check
            return remote.sha256 or checksum.sha256 or announced_checksum(error.headers)
        raise
    is_continued = answer.status == 206
    with answer, open(partial, "ab" if is_continued else "wb", opener=open_no_link) as file:
        n_byte = n_byte if is_continued else 0
        length = answer.headers.get("Content-Length") or ""
        total = n_byte + (int(length) if length.isdecimal() else 0)
        already = f", of which {size_words(n_byte)} are here already" if n_byte else ""
        report(f"downloading {remote.name}: {size_words(total)}{already}")
        reported = n_byte
        while block := answer.read(BLOCK_BYTES):
            file.write(block)
            n_byte += len(block)
            if n_byte - reported >= REPORT_BYTES:
                reported = n_byte
                report(f"downloaded {size_words(n_byte)} of {size_words(total)} of {remote.name}")
        file.flush()
        os.fsync(file.fileno())
    if n_byte < total:
        raise http.client.IncompleteRead(b"", total - n_byte)
    return remote.sha256 or checksum.sha256 or announced_checksum(answer.headers)
