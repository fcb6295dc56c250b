"""What the tests of the hub share: callers, packages, and an engine whose sandboxes answer as they are told."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from aenv.auth.callers import Caller, Scope
from aenv.engines.failing import PaperEngine
from aenv.errors import AEnvError
from aenv.hub.service import Hub
from aenv.models import Sandbox, SandboxSpec
from aenv.project import archive, read
from aenv.wire import Env, EnvRequest

USER = frozenset({Scope.READ, Scope.PUSH, Scope.RUN})
ANN, BOB, EVE = Caller("ann", USER), Caller("bob", USER), Caller("eve", USER)
ADMIN = Caller("root", frozenset({Scope.ADMIN}))

TOOL = {"name": "greet", "description": "Says hello.", "inputSchema": {"type": "object", "properties": {}}}


def package(
    name: str,
    version: str = "1.0.0",
    *,
    config: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
) -> bytes:
    """A project as an archive."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "config.json").write_text(json.dumps({"name": name, "version": version, **(config or {})}))
        for path, text in (files or {}).items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        return archive.pack(read(root))


async def chunks(data: bytes, size: int = 4096) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def request(name: str, version: str = "1.0.0", **fields: Any) -> EnvRequest:
    return EnvRequest(name=name, version=version, **fields)


async def push(
    hub: Hub, caller: Caller, name: str, version: str = "1.0.0", *, release: bool = False, **config: Any
) -> Env:
    """Make a version, with its package."""
    await hub.create(caller, request(name, version))
    env = await hub.upload(caller, name, version, chunks(package(name, version, config=config)))
    return await hub.release(caller, name, version) if release else env


async def content(hub: Hub, caller: Caller, name: str, version: str | None = None) -> bytes:
    _, pieces = await hub.package(caller, name, version)
    return b"".join([piece async for piece in pieces])


class Stage(PaperEngine):
    """Runs nothing: all its sandboxes are one server in this process, which answers what ``answers`` say."""

    name = "stage"

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[str, Any] = {
            "/tools": [TOOL],
            "/functions/list": {"total": 0, "functions": [], "reward": ["score"], "health": None},
            "/info": {"reward_schemas": [{"name": "score", "description": None, "inputSchema": {}}]},
        }
        """What is in the envelope; bytes are sent as they are, in its place."""
        self.specs: list[SandboxSpec] = []
        self.most = 0
        """Most sandboxes that lived at the same time."""
        self.go = asyncio.Event()
        """While it is not set, sandboxes do not start."""
        self.go.set()
        self._folder = tempfile.TemporaryDirectory(prefix="aenv-stage-")
        self._server: asyncio.Server | None = None

    async def create(self, id: str, spec: SandboxSpec) -> Sandbox:
        if self._server is None:
            self._server = await asyncio.start_unix_server(self._serve, f"{self._folder.name}/s")
        self.specs.append(spec)
        made = await super().create(id, spec)
        self.most = max(self.most, len(self.sandboxes))
        await self.go.wait()
        if isinstance(error := self.answers.get("start"), AEnvError):
            raise error
        return msgspec.structs.replace(made, url=f"unix:{self._folder.name}/s")

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._folder.cleanup()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split()[1].decode()
                answer = self.answers[path]
                if answer is None:
                    return  # it hangs up
                body = answer if isinstance(answer, bytes) else json.dumps({"success": True, "data": answer}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
