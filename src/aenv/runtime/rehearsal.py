"""A sandbox's first moments, run through in the process that sandboxes are forked from.

What running code leaves in memory (specialised byte code, attributes that were looked up, filled caches) is then there
before the fork. A fork would make all of it anew, and a copy of each page that it is written to.

Nothing of the author's runs, and no thread, loop or descriptor is left. It is not the loop that sandboxes run on: what
libuv keeps for a process that has had a loop would be closed in its forks.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any

from aenv.project import Project
from aenv.runtime import functions, tokens
from aenv.runtime.forked import Prepared
from aenv.runtime.loader import Loaded
from aenv.runtime.mcp import MODERN
from aenv.runtime.registry import Mark

Serve = Callable[[Prepared, socket.socket, socket.socket], None]
TIMES = 10
"""The interpreter specialises a function when it has run about so often."""
_TOKEN = "rehearsal"  # noqa: S105
_PATIENCE = 10.0


def rehearse(found: Project, serve: Serve, variables: Mapping[str, str], times: int = TIMES) -> None:
    """Start as the instance that a message on a socket describes, answer a call, and end."""
    for _ in range(times):
        prepared = Prepared(found, Loaded([Mark("tool", _repeat, "repeat", {})]), {}, asyncio.SelectorEventLoop)
        _Client(prepared).run(serve, variables)


def _repeat(text: str) -> str:
    return text


class _Client:
    """Who makes the call, on the same loop as who answers it."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._control, self._engine = socket.socketpair()
        self._socket = socket.socket(socket.AF_UNIX)

    def run(self, serve: Serve, variables: Mapping[str, str]) -> None:
        listener = socket.socket(socket.AF_UNIX)
        loop = self._prepared.loop
        try:
            listener.bind("")  # the system chooses a name that is no file
            listener.listen(1)
            self._socket.connect(listener.getsockname())
            self._socket.sendall(_request())
            self._engine.sendall(_message(variables))
            loop.add_reader(self._socket.fileno(), self._answered)
            loop.call_later(_PATIENCE, self._engine.close)
            serve(self._prepared, listener, self._control)
        finally:
            functions.end_threads(loop)
            asyncio.set_event_loop(None)
            loop.close()
            for sock in (listener, self._control, self._engine, self._socket):
                sock.close()
            for thread in threading.enumerate():
                if thread is not threading.current_thread():
                    thread.join(_PATIENCE)

    def _answered(self) -> None:
        """What controls an instance goes, and the instance with it."""
        self._socket.recv(65536)
        self._engine.recv(65536)
        self._prepared.loop.remove_reader(self._socket.fileno())
        self._engine.close()


def _message(variables: Mapping[str, str]) -> bytes:
    told: dict[str, Any] = {
        "id": "rehearsal",
        "environment_variables": dict(variables),
        "arguments": [],
        "datasource": "",
        "seed": None,
        "secrets": [],
        "idle": None,
        "owner_token_sha256": tokens.digest(_TOKEN),
        "engine_token_sha256": tokens.digest(_TOKEN),
    }
    data = json.dumps(told).encode()
    return struct.pack("I", len(data)) + data


def _request() -> bytes:
    meta = {
        "io.modelcontextprotocol/protocolVersion": MODERN,
        "io.modelcontextprotocol/clientCapabilities": {},
        "io.modelcontextprotocol/clientInfo": {"name": "rehearsal", "version": "1"},
    }
    params = {"name": "repeat", "arguments": {"text": "yes"}, "_meta": meta}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})
    lines = (
        "POST /mcp HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        "Accept: application/json, text/event-stream",
        f"MCP-Protocol-Version: {MODERN}",
        "Mcp-Method: tools/call",
        "Mcp-Name: repeat",
        f"Authorization: Bearer {_TOKEN}",
        "AEnv-Call-Id: rehearsal",
        f"Content-Length: {len(body)}",
        "",
        body,
    )
    return "\r\n".join(lines).encode()
