"""A server in a thread of this process, for tests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from andrea.api.command_line import configure
from andrea.config import ServeConfig
from andrea.serve.server import Server, listen, load, with_key


def config_of(runs: Path, **changes) -> ServeConfig:
    config = configure(ServeConfig, "serve", [f"runs_dir={runs}", "port=0", "device=cpu", "precision=fp32"])
    return replace(config, **changes)


@contextlib.contextmanager
def serving(config: ServeConfig) -> Iterator[tuple[str, Server]]:
    """Context in which the server answers. Gives its address, and the server itself."""
    served, _ = load(with_key(config), torch.device("cpu"))
    listening = listen(config.host, config.port)
    server = Server(served)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive()
