"""Secrets of a sandbox: what is printed and what is answered shows three stars in their place.

Only words are changed, never what gives them their structure: a secret whose value is ``true``, or the name of a tool,
changes no protocol. This guards against what is shown by mistake. Code that has a secret and means to tell it can
always write it in another way.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from itertools import pairwise
from typing import Any, Self

import msgspec

MARK = "***"
LEAST = 4
"""Characters of a value that is hidden. What is shorter is found everywhere, and would be told by what is missing."""
_PART = 16
"""Characters of a line that is hidden by itself, where a value has several."""
_PIECE = 64
"""Characters of a value that are looked for at once. However long secrets are, a text that comes close to one at every
place is looked through in a time that its length decides: whoever made both must not keep everybody waiting."""
_OURS = frozenset(("code", "content", "is_error", "returncode", "score", "status", "stderr", "stdout", "text", "type"))
"""Keys that mean something to clients, in what an author's function answers."""
_STATES = tuple(("status", word) for word in ("healthy", "success", "ok", "unhealthy"))
"""What a health check says to programs."""
_WORDS = frozenset(("data", "description", "error", "hint", "instructions", "message", "text", "title"))
"""Where text of an author's is, in what the runtime itself answers."""
_AUTHORS = frozenset(("arguments", "const", "default", "enum", "examples", "structuredContent"))
"""Where values of an author's are."""
_LISTS = ("/info", "/tools", "/functions/list", "/history", "/files")
"""Routes whose data is the runtime's own."""
_EVENT_END = re.compile(rb"\r\n\r\n|\n\n")

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class Hidden:
    """Finds the values of secrets, however they were written down."""

    def __init__(self, values: Iterable[str]) -> None:
        forms = {form for value in values for form in _forms(value)}
        self.any = bool(forms)
        self._text = re.compile(_either(piece for form in forms for piece in _pieces(form)))
        encoded = (form.encode(errors="backslashreplace").decode("latin-1") for form in forms)
        pieces = {piece for form in encoded for piece in _pieces(form)}
        self.forms = sorted(piece.encode("latin-1") for piece in pieces)
        """What is looked for in bytes."""
        self.bytes = re.compile(_either(pieces).encode("latin-1"))

    @classmethod
    def of(cls, names: Iterable[str], variables: Mapping[str, str]) -> Self | None:
        """What hides the values of those variables; None where there is nothing to hide."""
        made = cls(variables[name] for name in names if name in variables)
        return made if made.any else None

    def text(self, text: str) -> str:
        return self._text.sub(MARK, text)

    def everything(self, value: Any) -> Any:
        """In what an author's function made, every text, and keys that mean nothing to clients."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.everything(item) for item in value]
        if isinstance(value, dict):
            return {
                key if key in _OURS else self.text(key): item if (key, item) in _STATES else self.everything(item)
                for key, item in value.items()
            }
        return value

    def words(self, value: Any) -> Any:
        """In what the runtime says, the fields where an author's words and values are."""
        if isinstance(value, list):
            return [self.words(item) for item in value]
        if not isinstance(value, dict):
            return value
        return {key: self._field(key, item) for key, item in value.items()}

    def _field(self, key: str, value: Any) -> Any:
        if key in _AUTHORS:
            return self.everything(value)
        if not isinstance(value, str):
            return self.words(value)
        if key == "text" and value[:1] in ("{", "["):  # the JSON of a result stays JSON
            return self._changed(value.encode(), self.everything).decode()
        return self.text(value) if key in _WORDS else value

    def envelope(self, body: bytes, path: str) -> bytes:
        """An answer of one of the plain routes."""
        return self._changed(body, lambda answer: self._envelope(answer, path))

    def _envelope(self, answer: Any, path: str) -> Any:
        if not isinstance(answer, dict):
            return self.everything(answer)
        found = self.words(answer)
        if "data" in answer and path not in _LISTS:
            found["data"] = self.everything(answer["data"])
        return found

    def rpc(self, body: bytes) -> bytes:
        """A message of MCP."""
        return self._changed(body, self._rpc)

    def _rpc(self, message: Any) -> Any:
        if not isinstance(message, dict):
            return self.everything(message)
        found = self.words(message)
        if found.get("method") == "notifications/message":
            found["params"]["data"] = self.everything(message["params"]["data"])
        return found

    def event(self, event: bytes) -> bytes:
        """A server-sent event, with a message of MCP in it."""
        if not self.bytes.search(event):
            return event
        lines = event.splitlines(keepends=True)
        for place, line in enumerate(lines):
            if line.startswith(b"data:") and (data := line[5:].strip()):
                lines[place] = b"data: " + self.rpc(data) + line[len(line.rstrip()) :]
        return b"".join(lines)

    def _changed(self, body: bytes, change: Callable[[Any], Any]) -> bytes:
        if not self.bytes.search(body):
            return body
        try:
            return msgspec.json.encode(change(msgspec.json.decode(body)))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, KeyError, AttributeError):
            return self.bytes.sub(MARK.encode(), body)  # no JSON that we know


def _forms(value: str) -> Iterable[str]:
    """A value as it may stand in a text: by itself, in JSON, and each long line of it."""
    if len(value) < LEAST:
        return
    yield value
    yield repr(value)[1:-1]
    for ascii_only in (False, True):
        once = json.dumps(value, ensure_ascii=ascii_only)[1:-1]
        yield from (once, json.dumps(once, ensure_ascii=ascii_only)[1:-1])  # JSON may be a text in JSON
    lines = value.splitlines()
    if len(lines) > 1:
        yield from (line.strip() for line in lines if len(line.strip()) >= _PART)


def _pieces(form: str) -> Iterable[str]:
    """A text in pieces of about the same length, none of them long."""
    size = -(-len(form) // -(-len(form) // _PIECE))
    return (form[start : start + size] for start in range(0, len(form), size))


def _either(texts: Iterable[str]) -> str:
    """An expression for any of these, the longest at a place, and as many as follow each other.

    Where several begin alike, what they share is written once: at each place of a text one way is tried, and not each
    of them.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for letter in text:
            node = node.setdefault(letter, {})
        node[""] = {}
    return f"(?:{_branches(tree)})+" if tree else "(?!)"


def _branches(tree: dict[str, Any]) -> str:
    return "|".join(_branch(letter, node) for letter, node in tree.items() if letter)


def _branch(text: str, node: dict[str, Any]) -> str:
    while len(node) == 1 and "" not in node:
        [(letter, node)] = node.items()
        text += letter
    if len(node) == 1:
        return re.escape(text)
    return f"{re.escape(text)}(?:{_branches(node)}){'?' if '' in node else ''}"


class Printing:
    """Hides secrets in what is printed, which comes in pieces."""

    def __init__(self, hidden: Hidden) -> None:
        self._hidden = hidden
        self._longest = max(map(len, hidden.forms))
        self._first = re.compile(b"[" + b"".join({re.escape(form[:1]) for form in hidden.forms}) + b"]")
        self._held = b""
        """The beginning of what may become a secret."""

    def pass_on(self, data: bytes) -> bytes:
        """What can be shown by now."""
        data = self._held + data
        hold, shown = self._hold(data, 0), 0
        pieces: list[bytes] = []
        for found in self._hidden.bytes.finditer(data):
            if found.start() >= hold:
                break
            pieces += (data[shown : found.start()], MARK.encode())
            shown = found.end()
            if shown > hold:
                hold = self._hold(data, shown)
        self._held = data[hold:]
        return b"".join((*pieces, data[shown:hold]))

    def end(self) -> bytes:
        """What was held back."""
        held, self._held = self._held, b""
        return self._hidden.bytes.sub(MARK.encode(), held)

    def _hold(self, data: bytes, start: int) -> int:
        """Where the first secret begins that is not complete."""
        forms = self._hidden.forms
        for found in self._first.finditer(data, max(start, len(data) - self._longest + 1)):
            end = data[found.start() :]
            place = bisect_right(forms, end)  # whatever goes on from it comes next
            if place < len(forms) and forms[place].startswith(end):
                return found.start()
        return len(data)


class Answering:
    """An ASGI ``send`` that hides secrets in what it passes on. Files are the owner's, and pass as they are."""

    def __init__(self, hidden: Hidden, path: str, send: Send) -> None:
        self._hidden = hidden
        self._path = path
        self._send = send
        self._start: Message = {}
        self._kind = b""
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._kind = dict(message["headers"]).get(b"content-type", b"").partition(b";")[0]
            self._start = message
            if self._kind != b"application/json":
                await self._send(message)
        elif self._kind == b"application/json":
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._whole()
        elif self._kind == b"text/event-stream":
            await self._send({**message, "body": self._events(message.get("body", b""), message.get("more_body"))})
        else:
            await self._send(message)

    async def _whole(self) -> None:
        body = bytes(self._body)
        body = self._hidden.rpc(body) if self._path == "/mcp" else self._hidden.envelope(body, self._path)
        headers = [pair for pair in self._start["headers"] if pair[0] != b"content-length"]
        await self._send({**self._start, "headers": [*headers, (b"content-length", b"%d" % len(body))]})
        await self._send({"type": "http.response.body", "body": body})

    def _events(self, data: bytes, more: bool | None) -> bytes:
        """The events that are complete."""
        self._body += data
        ends = [found.end() for found in _EVENT_END.finditer(self._body)]
        if not more:
            ends.append(len(self._body))
        pieces = [self._hidden.event(bytes(self._body[begin:end])) for begin, end in pairwise([0, *ends])]
        del self._body[: ends[-1] if ends else 0]
        return b"".join(pieces)
