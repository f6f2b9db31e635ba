"""A small server that speaks as much of the hub's HTTP API as huggingface_hub needs to make a repository and upload to it.

It keeps what it was sent, and checks what the hub checks: the token, the size and sha256 of large files, the commit's form.
Large files go by the plain Git LFS protocol: set HF_HUB_DISABLE_XET=1, because Xet's binary protocol is not spoken here.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WRITER, READER = "hf_writer", "hf_reader"  # tokens


@dataclass
class Repository:
    is_private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    n_commit: int = 0


class SmallHub(ThreadingHTTPServer):
    """repositories: OWNER/NAME -> what it holds. asked: method and path of every request. fails_at: a path to answer with 500."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.large_files: dict[str, bytes] = {}  # sha256 -> content
        self.asked: list[str] = []
        self.fails_at: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def small_hub() -> Iterator[SmallHub]:
    hub = SmallHub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: SmallHub

    def do_GET(self) -> None:
        self.handle_request()

    def do_POST(self) -> None:
        self.handle_request()

    def do_PUT(self) -> None:
        self.handle_request()

    def log_message(self, *_: object) -> None:
        pass

    def handle_request(self) -> None:
        body = self.body()
        path = self.path.partition("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        if self.server.fails_at and re.search(self.server.fails_at, path):
            return self.answer(507, {"error": "no space is left for this account"})
        if self.command == "PUT":  # the large files' storage, which the hub's addresses lead to without a token
            return self.put_large_file(path, body)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in (WRITER, READER):
            return self.answer(401, {"error": "Invalid username or password."})
        for pattern, serve in ROUTES.items():
            if found := re.fullmatch(pattern, f"{self.command} {path}"):
                if token == READER and self.command == "POST":
                    return self.answer(
                        403, {"error": "You don't have the rights to create a model under this namespace"}
                    )
                return serve(self, body, *found.groups())
        return self.answer(404, {"error": f"no such address: {self.command} {path}"})

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status >= 400:
            self.send_header("X-Error-Message", str(content["error"]))
        self.end_headers()
        self.wfile.write(data)

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        address = {"url": f"{self.server.url}/{name}", "name": name, "id": name}
        if name in self.server.repositories:
            return self.answer(409, {"error": "You already created this model repo", **address})
        is_private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.server.repositories[name] = Repository(is_private)
        return self.answer(200, address)

    def info(self, _: bytes, name: str, __: str | None = None) -> None:
        found = self.server.repositories.get(name)
        if found is None:
            return self.answer(404, {"error": "Repository not found"})
        siblings = [{"rfilename": path} for path in found.files]
        content = {"id": name, "sha": f"{found.n_commit:040}", "private": found.is_private, "siblings": siblings}
        return self.answer(200, content | {"tags": []})

    def tree(self, _: bytes, name: str) -> None:
        files = self.server.repositories[name].files
        return self.answer(
            200, [{"type": "file", "path": path, "size": len(each), "oid": "0" * 40} for path, each in files.items()]
        )

    def validate(self, body: bytes) -> None:
        if not json.loads(body)["content"].startswith("---\n"):
            return self.answer(400, {"error": "no metadata", "errors": [{"message": "no metadata"}]})
        return self.answer(200, {"warnings": [], "errors": []})

    def preupload(self, body: bytes, _: str) -> None:
        modes = [
            {
                "path": each["path"],
                "uploadMode": "lfs" if each["path"].endswith((".safetensors", ".gguf")) else "regular",
                "shouldIgnore": False,
            }
            for each in json.loads(body)["files"]
        ]
        return self.answer(200, {"files": modes})

    def batch(self, body: bytes, _: str) -> None:
        objects = []
        for each in json.loads(body)["objects"]:
            actions = {"upload": {"href": f"{self.server.url}/storage/{each['oid']}/{each['size']}", "header": {}}}
            known = each["oid"] in self.server.large_files
            objects.append({"oid": each["oid"], "size": each["size"]} | ({} if known else {"actions": actions}))
        return self.answer(200, {"transfer": "basic", "objects": objects})

    def put_large_file(self, path: str, body: bytes) -> None:
        _, _, sha256, size = path.split("/")
        if hashlib.sha256(body).hexdigest() != sha256 or len(body) != int(size):
            return self.answer(400, {"error": "this is not the announced file"})
        self.server.large_files[sha256] = body
        return self.answer(200, {})

    def commit(self, body: bytes, name: str) -> None:
        repository = self.server.repositories[name]
        for line in body.splitlines():
            kind, value = (each := json.loads(line))["key"], each["value"]
            if kind == "file":
                assert value["encoding"] == "base64"
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                repository.files[value["path"]] = self.server.large_files[value["oid"]]
            elif kind == "deletedFile":
                del repository.files[value["path"]]
        repository.n_commit += 1
        commit = f"{repository.n_commit:040}"
        return self.answer(200, {"commitUrl": f"{self.server.url}/{name}/commit/{commit}", "commitOid": commit})


NAME = r"([\w.-]+/[\w.-]+)"
ROUTES = {
    "POST /api/repos/create": Handler.create,
    "POST /api/validate-yaml": Handler.validate,
    f"GET /api/models/{NAME}(/revision/main)?": Handler.info,
    f"GET /api/models/{NAME}/tree/main": Handler.tree,
    f"POST /api/models/{NAME}/preupload/main": Handler.preupload,
    f"POST /{NAME}.git/info/lfs/objects/batch": Handler.batch,
    f"POST /api/models/{NAME}/commit/main": Handler.commit,
}
