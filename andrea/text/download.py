"""Files from the network: resumable, checked against a sha256, whole or not there."""

from __future__ import annotations

import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from andrea.config import UserError
from andrea.runtime.files import file_sha256

BLOCK_BYTES = 1 << 20
TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class Remote:
    name: str  # of the file
    address: str
    sha256: str | None  # None: the one the server tells (X-Linked-ETag of a large file)


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
    """Large files come from another host; the sha256 stands in the answer that sends us there."""

    def __init__(self) -> None:
        self.sha256: str | None = None

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # noqa: ANN001, ANN201 (urllib's signature)
        self.sha256 = told_checksum(headers) or self.sha256
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def told_checksum(headers: http.client.HTTPMessage) -> str | None:
    tag = (headers.get("X-Linked-ETag") or "").strip('W/"')
    return tag if re.fullmatch(r"[0-9a-f]{64}", tag) else None


def fetch(remote: Remote, folder: Path, report: Callable[[str], None]) -> Path:
    """`remote` as a file in `folder`, downloaded where it is not there; a broken download is gone on with.

    Raises UserError: no network, or a content whose sha256 is not the expected one.
    """
    path, beside = folder / remote.name, folder / f"{remote.name}.part"
    if path.exists():
        return path
    by_hand = f"download {remote.address} elsewhere and put it at {path}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        expected = receive(remote, beside, report)
    except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(f"{remote.name} cannot be downloaded ({reason}); {by_hand}, or run again to go on") from error
    except OSError as error:
        raise UserError(f"data_dir: {beside} cannot be written ({error.strerror}); set data_dir=…") from error
    found = file_sha256(beside)
    if expected is not None and found != expected:
        beside.unlink()
        raise UserError(
            f"{remote.name} was damaged on the way: sha256 {found[:12]}…, not {expected[:12]}…; run again or {by_hand}"
        )
    os.replace(beside, path)
    return path


def receive(remote: Remote, beside: Path, report: Callable[[str], None]) -> str | None:
    """Append what is missing to `beside`; returns the sha256 that the whole file should have."""
    have = beside.stat().st_size if beside.exists() else 0
    checksum = RememberChecksum()
    opener = urllib.request.build_opener(checksum)
    headers = {"User-Agent": "andrea", "Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        answer = opener.open(urllib.request.Request(remote.address, headers=headers), timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing is missing: the last run ended before the check
            return remote.sha256 or checksum.sha256 or told_checksum(error.headers)
        raise
    with answer, open(beside, "ab" if answer.status == 206 else "wb") as file:
        have = have if answer.status == 206 else 0
        total = have + int(answer.headers.get("Content-Length") or 0)
        report(f"downloading {remote.name}: {total / 1e6:.1f} MB" + (f", {have / 1e6:.1f} MB are here" if have else ""))
        told = have
        while block := answer.read(BLOCK_BYTES):
            file.write(block)
            have += len(block)
            if have - told >= 20e6:
                told = have
                report(f"downloaded {have / 1e6:.0f} of {total / 1e6:.0f} MB of {remote.name}")
        file.flush()
        os.fsync(file.fileno())
    if have < total:
        raise http.client.IncompleteRead(b"", total - have)
    return remote.sha256 or checksum.sha256 or told_checksum(answer.headers)
