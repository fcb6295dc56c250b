"""A real Redis for tests, on a free port of the loopback."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_PATIENCE = 30.0
_DRAWN = random.SystemRandom()
"""Not the generator that everybody shares: tests seed it, and two processes of a run would draw the same ports."""


def free_port() -> int:
    """A port that is not among those from which the system takes the near end of a connection."""
    while True:
        port = _DRAWN.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Server:
    """A ``redis-server`` that can be killed and started again on the same port and folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"redis://{self.address}/0"

    def start(self) -> None:
        """Returns when it answers."""
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", *self._options]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log)
        deadline = time.monotonic() + _PATIENCE
        while not self._answers():
            assert self._process.poll() is None, (self._folder / "redis.log").read_text()
            assert time.monotonic() < deadline, "redis-server did not answer"
            time.sleep(0.01)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def empty(self) -> None:
        with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
            connection.sendall(b"FLUSHALL\r\n")
            assert connection.recv(64) == b"+OK\r\n"

    def _answers(self) -> bool:
        """Whether it is there, be it that it wants a password."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[Server]:
    """A server that runs until the block ends; the test is skipped where there is none."""
    pytest.importorskip("redis", reason="the redis package is not installed")
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    server = Server(folder, *(options or ("--appendonly", "no")))
    try:
        server.start()
        yield server
    finally:
        server.kill()
