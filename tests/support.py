"""Help for tests that need a live sandbox: real processes, real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).parent.parent
FIXTURES = Path(__file__).parent / "fixtures"


class Reply(NamedTuple):
    """An answer that a server gave."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def data(self) -> Any:
        """What a success has for its caller."""
        assert self.status == 200, f"{self.status}: {self.body.decode(errors='replace')}"
        return self.json["data"]

    @property
    def events(self) -> list[Any]:
        """The messages of an event stream."""
        found = []
        for event in self.body.replace(b"\r\n", b"\n").split(b"\n\n"):
            data = b"".join(line[6:] for line in event.split(b"\n") if line.startswith(b"data: "))
            if data:
                found.append(json.loads(data))
        return found


class Sandbox:
    """A runtime in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: list[str], reader: threading.Thread) -> None:
        self.process = process
        self.url = url
        self.port = int(url.rpartition(":")[2])
        self._log = log
        self._reader = reader

    @property
    def log(self) -> str:
        return "".join(self._log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, patience: float = 20) -> int:
        """End it in good order; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(patience)
        self._reader.join(5)
        return code


@contextlib.contextmanager
def sandbox(
    project: Path,
    *options: str,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> Iterator[Sandbox]:
    """Run ``python -m aenv.runtime`` on a free port until the block ends."""
    command = [python, "-m", "aenv.runtime", str(project), "--port", "0", *options, "--", *arguments]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1", **(variables or {})}
    )
    assert process.stderr is not None
    log: list[str] = []
    url = ""
    for line in process.stderr:
        log.append(line)
        if found := re.search(r"serving \d+ tools at (\S+)/mcp", line):
            url = found[1].replace("0.0.0.0", "127.0.0.1")
            break
    if not url:
        process.wait()
        raise RuntimeError(f"the sandbox did not start:\n{''.join(log)}")
    reader = threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True)
    reader.start()
    try:
        yield Sandbox(process, url, log, reader)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        reader.join(5)
        process.stderr.close()


@contextlib.contextmanager
def serve(project: Path, *, python: str = sys.executable) -> Iterator[str]:
    """The base URL of a project that runs until the block ends."""
    with sandbox(project, python=python) as running:
        yield running.url


async def eventually(what: str, look: Callable[[], T | Coroutine[Any, Any, T]], patience: float = 180.0) -> T:
    """What ``look`` finds, once it is something. ``what`` is told when it never is."""
    deadline = time.monotonic() + patience
    while True:
        found = look()
        value: T = await found if isinstance(found, Coroutine) else found
        if value:
            return value
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        await asyncio.sleep(0.02)


async def until(holds: Callable[[], bool], what: str, patience: float = 30.0) -> None:
    """Wait for something that comes by itself."""
    await eventually(what, holds, patience)
