"""What was called in a sandbox lately: noted at little cost, bounded in number and bytes, made readable when asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from time import monotonic, time
from types import TracebackType
from typing import Any, Self

import msgspec

from aenv.models import to_json
from aenv.runtime.answers import Answer, Request
from aenv.runtime.context import printable
from aenv.runtime.functions import Timing

MOST = 1000
MOST_BYTES = 1024 * 1024
"""Bytes of arguments, all calls together."""
MOST_ARGUMENTS = 4096
"""Bytes of one call's arguments that are kept; larger ones are dropped, and marked so."""
MOST_ERROR = 300


class History:
    """The recent calls of one sandbox."""

    __slots__ = ("bytes", "most", "most_bytes", "notes")

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self.most = most
        self.most_bytes = most_bytes
        self.notes: deque[Noted] = deque()
        self.bytes = 0

    def last(self, count: int | None = None) -> list[dict[str, Any]]:
        """The last ``count`` calls that ended, newest last; all that are kept by default."""
        first = 0 if count is None else max(len(self.notes) - count, 0)
        return [note.shown() for place, note in enumerate(self.notes) if place >= first]


class Noted:
    """A call that goes into the history when its ``with`` ends. One that fails without raising sets ``error``.

    Every call passes here, so it does itself what would read better as a method of ``History``.
    """

    __slots__ = ("arguments", "at", "began", "ended", "error", "history", "kind", "name", "timing")

    def __init__(
        self, history: History, kind: str, name: str, arguments: dict[str, Any], timing: Timing | None = None
    ) -> None:
        self.history = history
        self.kind = kind
        self.name = name
        self.arguments = _packed(arguments)
        """JSON, made before the call because a function may change what it is given; empty when dropped."""
        self.error: str | None = None
        self.timing = timing
        self.at = time()
        self.began = self.ended = monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended = monotonic()
        if error is not None:
            self.error = str(error) if isinstance(error, Exception) else "the call was cancelled"
        if self.error is not None:
            self.error = self.error[:MOST_ERROR]
        history = self.history
        notes = history.notes
        notes.append(self)
        history.bytes += len(self.arguments)
        while len(notes) > history.most or history.bytes > history.most_bytes:
            history.bytes -= len(notes.popleft().arguments)

    def shown(self) -> dict[str, Any]:
        """For a reader."""
        return {
            "at": self.at,
            "kind": self.kind,
            "name": self.name,
            "arguments": msgspec.Raw(self.arguments or b"null"),
            "dropped": not self.arguments,
            "is_error": self.error is not None,
            "error": None if self.error is None else printable(self.error),
            "seconds": self.ended - self.began,
            "queue": None if self.timing is None else self.timing.queue,
            "tool": None if self.timing is None else self.timing.tool,
        }


class _Block(msgspec.Struct):
    text: str = ""


class _Result(msgspec.Struct):
    content: list[_Block] = []
    isError: bool = False  # noqa: N815 - as it is on the wire


class _Error(msgspec.Struct):
    message: str = ""


class _Reply(msgspec.Struct):
    """As much of a JSON-RPC response as is of interest."""

    result: _Result | None = None
    error: _Error | None = None


def _packed(arguments: dict[str, Any]) -> bytes:
    for value in arguments.values():
        if value.__class__ is str and len(value) > MOST_ARGUMENTS:  # spares encoding what is dropped anyway
            return b""
    try:
        data = to_json(arguments)
    except Exception:  # an author's own type may raise anything, and a note is no reason for the call to fail
        return b""
    return data if len(data) <= MOST_ARGUMENTS else b""


def overhear(history: History, request: Request, answer: Answer, tools: Container[str]) -> None:
    """Note a call that another MCP server in this process answers, by what passes: for ``tools`` that are its own."""
    if answer.task is None or b"tools/call" not in request.body:
        return
    try:
        params = msgspec.json.decode(request.body)["params"]
        name, arguments = params["name"], params.get("arguments") or {}
        if params["name"] not in tools:
            return
        note = Noted(history, "tool", name, arguments)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError):
        return  # not a call; the server says so

    def ended(_: object) -> None:
        note.error = _failure(answer)
        note.__exit__(None, None, None)

    answer.task.add_done_callback(ended)


def _failure(answer: Answer) -> str | None:
    """What a JSON-RPC answer says went wrong: JSON, or the last of its events."""
    for line in reversed(b"".join(answer.chunks).splitlines()):
        data = line.removeprefix(b"data:").strip()
        if data[:1] != b"{":
            continue
        try:
            reply = msgspec.json.decode(data, type=_Reply)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            break
        if reply.error is not None:
            return reply.error.message
        if reply.result is not None and reply.result.isError:
            return "\n".join(block.text for block in reply.result.content if block.text)
        return None
    return "it was not answered"
