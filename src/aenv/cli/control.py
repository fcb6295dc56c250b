"""The control plane beside ``aenv run``: an API service in a process of its own that makes instances of the project."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

from aenv import config
from aenv.errors import Conflict

PORT = 8080
HOST = "127.0.0.1"
READY = 20.0
"""Seconds that it has to start, before the sandbox is shown without it."""
STOP = 8.0
"""Seconds that it has to end its instances, before it is killed."""


class Control:
    """The process. It ends when this one does, however that ends. Its talk goes to stderr."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._reader = Thread(target=self._read)
        self._told = Event()
        self._url: str | None = None
        self.problem: str | None = None
        """Why there is none, though one was asked for."""

    def start(self, root: Path, port: int | None) -> None:
        """Serve the project on ``port``; without one, on the usual port if that is free."""
        if reason := _taken(PORT if port is None else port):
            if port is not None:
                raise Conflict(f"cannot listen on {HOST}:{port}: {reason}", hint="choose another with --control-port")
            self.problem = f"port {PORT}: {reason}; --control-port chooses another"
            return
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "aenv", "serve", "api", "--project", str(root), "--until-eof", "-o", "json"),
                *("--host", HOST, "--port", str(PORT if port is None else port), "--data-port", "0"),
            ],
            env=config.child_environment({}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._reader.start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        text = b""
        for line in self._process.stdout:
            text += line
            with suppress(ValueError):
                self._url = json.loads(text)["url"]
                self._told.set()
        self._told.set()

    def url(self) -> str | None:
        """Where it is, once it is ready; None, and perhaps a ``problem``, when there is none. It blocks for a while."""
        if self._process is None:
            return None
        if not self._told.wait(READY):
            self.problem = f"it was not ready after {READY:g} s"
        elif self._url is None:
            self.problem = "it did not start"
        return self._url

    def stop(self) -> None:
        """End it and its instances."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError):
            process.stdin.close()
        if self._url is None:  # it has no instances
            process.kill()
        try:
            process.wait(STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._reader.join()
        process.stdout.close()


def _taken(port: int) -> str | None:
    """Why nobody can listen on a port of this machine; None when one can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as exc:
            return exc.strerror or str(exc)
    return None
