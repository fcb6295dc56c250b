"""deploy/compose on a real Docker: started as a whole, with images that are made here, since none can be pulled."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import secrets
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException
from pathlib import Path

import pytest

from aenv import http
from aenv.engines.docker.containers import ENGINE
from aenv.engines.docker.daemon import Daemon
from tests import daemons
from tests.daemons import programs
from tests.platform.support import ask, eventually
from tests.store.servers import free_port
from tests.support import ROOT

FILE = ROOT / "deploy" / "compose" / "compose.yaml"
PATIENCE = 300.0
"""Seconds that anything may take on a busy machine before a test calls it stuck."""
PLATFORM, REDIS = "aenv-platform:test", "aenv-test/redis:test"
_FORWARD = Path(__file__).parent / "forward.py"
_KEY = re.compile(r"AENV_API_KEY=(\S+)")
_CREDENTIALS = struct.Struct("3i")


@functools.cache
def compose() -> list[str]:
    """Docker Compose, as it is installed: of its own, or a part of the command line of Docker. Empty when it is not."""
    for command in (["docker-compose"], ["docker", "compose"]):
        if shutil.which(command[0]) is not None:
            found = subprocess.run([*command, "version"], capture_output=True, timeout=PATIENCE, check=False)
            if found.returncode == 0:
                return command
    return []


def missing() -> str:
    """Why there can be no stack here; empty when there can."""
    absent = [name for name in ("redis-server", "redis-cli", "nsenter") if shutil.which(name) is None]
    absent += [] if compose() else ["docker-compose"]
    return f"not installed: {', '.join(absent)}" if absent else ""


class Stack:
    """A platform by Docker Compose. Its ports are in the network of the daemon, and carried into ours."""

    def __init__(self, address: str, base_image: str) -> None:
        self.address = address
        self.project = f"aenvt{secrets.token_hex(4)}"
        self.port, self.data_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.variables = {
            "DOCKER_HOST": address,
            "DOCKER_SOCKET": address.removeprefix("unix://"),
            "COMPOSE_PROJECT_NAME": self.project,
            "AENV_BASE_IMAGE": base_image,
            "AENV_PLATFORM_IMAGE": os.environ.get("AENV_TEST_PLATFORM_IMAGE") or PLATFORM,
            "REDIS_IMAGE": REDIS,
            "AENV_PORT": str(self.port),
            "AENV_DATA_PORT": str(self.data_port),
            "AENV_DATA_URL": f"http://127.0.0.1:{self.data_port}",
        }
        self.token = ""

    def compose(self, *words: str) -> str:
        """Run Docker Compose; what it prints."""
        done = subprocess.run(
            [*compose(), "--file", str(FILE), *words],
            env={**os.environ, **self.variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, f"compose {' '.join(words)} ended with {done.returncode}:\n{done.stderr}"
        return done.stdout

    def up(self) -> None:
        """Start it, and wait until it is ready."""
        self.compose("up", "-d")
        self.ready()
        self.token = self.token or str(_KEY.findall(self.compose("logs", "--no-log-prefix", "platform"))[-1])

    def ready(self) -> None:
        """Wait until it answers."""

        def answers() -> bool:
            with suppress(OSError, HTTPException):
                return ask(self.url, "GET", "/health", timeout=10.0).status == 200
            return False

        try:
            eventually("the platform", answers, PATIENCE)
        except AssertionError as exc:
            exc.add_note(self.compose("logs", "--tail", "50"))
            raise

    @property
    def engine(self) -> str:
        """The name that all its sandboxes have at the daemon, once it has made one."""
        names = self.compose("exec", "-T", "platform", "ls", "/var/lib/aenv/docker").split()
        (name,) = (name for name in names if name.startswith("platform-"))
        return name

    @contextmanager
    def carried(self) -> Iterator[None]:
        """Its ports, here, until the block ends."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(self.address.removeprefix("unix://"))
            found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        namespace = f"/proc/{_CREDENTIALS.unpack(found)[0]}/ns/net"
        if os.path.samefile(namespace, "/proc/self/ns/net"):
            yield
            return
        with ExitStack() as held:
            for port in (self.port, self.data_port):
                listener = held.enter_context(socket.create_server(("127.0.0.1", port)))
                command = ["nsenter", f"--net={namespace}", "--", sys.executable, str(_FORWARD)]
                process = held.enter_context(
                    subprocess.Popen([*command, str(listener.fileno()), str(port)], pass_fds=[listener.fileno()])
                )
                held.callback(process.terminate)
            yield

    def down(self) -> None:
        """End it, and forget all that it kept."""
        self.compose("down", "--volumes", "--timeout", "30")


@contextmanager
def stack(address: str) -> Iterator[Stack]:
    """One that is not started yet. It is gone at the end of the block."""
    if reason := missing():
        pytest.skip(reason)
    if not address.startswith("unix://"):
        pytest.skip("needs a Docker on a unix socket")
    base = os.environ.get("AENV_TEST_BASE_IMAGE") or daemons.base_image(address)
    if not os.environ.get("AENV_TEST_PLATFORM_IMAGE"):
        daemons.platform_image(address, base, PLATFORM)

    async def redis() -> None:
        await programs.make(Daemon(address), REDIS, "redis-server", "redis-cli")
        await http.close()

    asyncio.run(redis())
    made = Stack(address, base)
    with made.carried():
        try:
            yield made
        finally:
            engine = ""
            with suppress(AssertionError, ValueError):  # when it does not run any more
                engine = made.engine
            made.down()
            asyncio.run(_clear(address, engine))


async def _clear(address: str, engine: str) -> None:
    """Remove the sandboxes that somebody left."""
    daemon = Daemon(address)
    query = {"all": "1", "filters": {"label": [f"{ENGINE}={engine}"]}}
    for row in await daemon.ask("GET", "/containers/json", query=query):
        await daemon.ask("DELETE", f"/containers/{row['Id']}", query={"force": "1", "v": "1"})
    await http.close()
