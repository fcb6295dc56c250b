"""What outlives one message: a client's session, an event stream, a call in flight."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable
from typing import Any

from aenv.errors import AEnvError
from aenv.runtime.answers import EVENTS, JSON, Answer, Headers, Kept, Response
from aenv.runtime.mcp.messages import PLATFORM, Id, encode, error

RESUMABLE = "2025-11-25"
"""The session revision whose event streams begin with an id to resume from."""
LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
"""Log levels, quietest first."""
_RETRY_MS = 1000


class Session:
    """One client of an older revision."""

    def __init__(self, version: str, streams: Kept) -> None:
        self.streams = streams
        """Event streams that can be resumed, by their key: one store for all sessions."""
        self.id = secrets.token_urlsafe(24)
        self.version = version
        self.level = 0
        self.calls: dict[Id, Answer] = {}
        self.listeners: set[Events] = set()

    def close(self) -> None:
        for answer in (*self.calls.values(), *(events.answer for events in self.listeners)):
            answer.cancel()


class Events:
    """An answer as server-sent events, with ids where the revision can resume."""

    def __init__(self, answer: Answer, session: Session | None) -> None:
        self.answer = answer
        self._key = secrets.token_urlsafe(9) if session and session.version == RESUMABLE else None
        self._session = session

    def begin(self) -> None:
        headers: Headers = EVENTS
        if self._session:
            headers = [*EVENTS, (b"mcp-session-id", self._session.id.encode())]
        self.answer.begin(200, headers)
        if self._key and self._session:
            self._session.streams.add(f"{self._session.id} {self._key}", self.answer)
            self.answer.write(b"id: %s.0\r\nretry: %d\r\ndata: \r\n\r\n" % (self._key.encode(), _RETRY_MS))

    def send(self, message: bytes) -> None:
        mark = b"id: %s.%d\r\n" % (self._key.encode(), len(self.answer.chunks)) if self._key else b""
        self.answer.write(b"event: message\r\n" + mark + b"data: " + message + b"\r\n\r\n")


class Call:
    """One ``tools/call`` in flight: where its notifications and its result go."""

    def __init__(self, id: Id, answer: Answer, events: Events | None, level: int | None) -> None:
        self.id = id
        self.answer = answer
        self._events = events
        self._level = level
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        if events is not None:
            answer.upgrade = events.begin

    def notify(self, method: str, params: dict[str, Any]) -> None:
        """Send a notification; from any thread."""
        if threading.get_ident() == self._thread:
            self._notify(method, params)
        else:
            self._loop.call_soon_threadsafe(self._notify, method, params)

    def _notify(self, method: str, params: dict[str, Any]) -> None:
        if self._events is None or self.answer.done:
            return
        if method == "notifications/message" and (self._level is None or LEVELS.index(params["level"]) < self._level):
            return
        if not self.answer.status:
            self._events.begin()
        self._events.send(encode({"jsonrpc": "2.0", "method": method, "params": params}))

    def fail(self, exc: AEnvError, headers: Headers = JSON) -> None:
        """Answer with a failure of the platform."""
        self.finish(error(PLATFORM, str(exc), self.id, {"aenv": exc.to_wire()}), headers)

    def finish(self, message: bytes, headers: Headers = JSON) -> None:
        """Answer. The headers go with an answer in one piece; one that has begun has had its own."""
        if self.answer.status and self._events is not None:
            self._events.send(message)
            self.answer.close()
        else:
            self.answer.reply(Response(200, message, headers))


def hold_open(events: Events, closed: Callable[[], object]) -> Answer:
    """Keep a stream open until its client leaves or the server stops."""

    async def wait() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            closed()
            events.answer.close()

    events.answer.task = asyncio.create_task(wait())
    return events.answer
