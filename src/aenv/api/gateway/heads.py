"""Heads of requests and answers: read, checked, and written anew.

Nothing of a head is passed on that was not understood here, and how long a body is, is said in our own words: two
readers of the same bytes cannot disagree about where a request ends.
"""

from __future__ import annotations

import re
import secrets
from http import HTTPStatus
from itertools import count
from typing import NamedTuple
from urllib.parse import parse_qs, unquote_to_bytes

from aenv.api.gateway.failures import BadRequest, NotExpected

MOST_HEAD = 64 * 1024

_HOP_BY_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    )
)
_OURS = frozenset((b"aenvcore-envinstance-id", b"aenvcore-mcpproxy-url"))
"""Meant for the platform. A URL in one of them is never dialled."""
_PASSED = (b"aenv-call-id", b"aenv-boot", b"mcp-session-id")
_NOTED = frozenset((*_PASSED, b"aenv-base", b"aenv-hop", b"traceparent", b"x-request-id"))
"""What is passed on when it is as it should be, or changed."""
_READ = (
    _HOP_BY_HOP
    | _OURS
    | _NOTED
    | {b"authorization", b"content-length", b"expect", b"host", b"origin", b"sec-fetch-site"}
)
"""What is looked at, and not simply passed on."""
_ONCE = _READ - {b"connection", b"keep-alive", b"te", b"trailer", b"upgrade", b"traceparent", b"x-request-id"}
"""What two of in one request would be two requests in one."""
_ID = re.compile(rb"[A-Za-z0-9._-]{1,255}")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_TARGET = re.compile(rb"/[\x21\x22\x24-\x7e\x80-\xff]*")
_INSTANCE, _SERVICE, _CALLS = b"/env-instance/", b"/env-service/", b"/calls/"
_MARK = b"~"
"""Between a session's id and its replica's, which has none."""
_STATUS = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}

_TOLD = _HOP_BY_HOP | {b"aenv-boot", b"aenv-hop", b"mcp-session-id", b"server-timing", b"x-request-id"}
"""What of an answer is looked at, and not simply passed on."""
_life = secrets.token_hex(6).encode()
_numbers = count(1)

Headers = list[tuple[bytes, bytes]]


class Address(NamedTuple):
    """What a request is for."""

    id: str
    port: int = 0
    """A port in the instance; 0 is the sandbox itself."""
    is_service: bool = False


class Head:
    """The head of a request."""

    __slots__ = (
        "_kept",
        "base",
        "chunked",
        "headers",
        "is_old",
        "keep_alive",
        "length",
        "method",
        "path",
        "query",
        "repeatable",
        "replica",
        "request_id",
        "trace",
        "upgrade",
    )

    def __init__(self, method: bytes, url: bytes, headers: Headers, *, version: str, keep_alive: bool) -> None:
        """Raises BadRequest for what may mean one thing to us and another to somebody else."""
        self.method = method
        self.is_old = version == "1.0"
        self.keep_alive = keep_alive and not self.is_old
        self.headers: dict[bytes, bytes] = {}
        """What is not simply passed on, by its name in lower case."""
        if version not in ("1.0", "1.1"):
            raise BadRequest(f"HTTP {version} is not spoken here", hint="use HTTP/1.1")
        if method == b"CONNECT" or not _TARGET.fullmatch(url):
            raise BadRequest("the target of the request is not a path", hint="ask for /path, not for a URL")
        self._kept = self._sort(headers)
        self._read_framing()
        self._read_upgrade()
        self.path, mark, query = url.partition(b"?")
        self.query = mark + query
        self.base = b""
        """The URL under which its client sees the sandbox, where that is for the sandbox to say."""
        self.replica: str | None = None
        """Where the session is that it is part of, of a service."""
        self.trace = self.headers.get(b"traceparent", b"")
        """The trace context that goes on with it."""
        given = self.headers.get(b"x-request-id")
        self.request_id = given if given is not None and _REQUEST_ID.fullmatch(given) else _new_id()

    def _sort(self, headers: Headers) -> bytes:
        found = self.headers
        kept: Headers = []
        for name, value in headers:
            lower = name.lower()
            if lower not in _READ:
                kept.append((lower, b"%b: %b\r\n" % (name, value)))
            elif lower not in found:
                found[lower] = value
            elif lower in _ONCE:
                raise BadRequest(f"the request has more than one {name.decode('latin-1')}")
            else:
                found[lower] += b"," + value
        named = _tokens(found.get(b"connection", b""))
        for name in named & _NOTED:
            found.pop(name, None)
        self.repeatable = self.only_looks or b"aenv-call-id" in found
        """Whether asking the same sandbox twice does no harm: it only looks, or has an id by which it is known again.
        """
        block, is_sound = _block(kept, named)
        if not is_sound or b"\0" in block:
            raise BadRequest("a header has a line break in it")
        return block

    def _read_framing(self) -> None:
        length, coding = self.headers.get(b"content-length"), self.headers.get(b"transfer-encoding")
        if coding is not None and (length is not None or coding.lower() != b"chunked" or self.is_old):
            raise BadRequest(
                "how long the body is cannot be told", hint="send Content-Length, or Transfer-Encoding: chunked"
            )
        if length is not None and not (length.isdigit() and length.isascii()):
            raise BadRequest("the Content-Length is not a number")
        self.chunked = coding is not None
        self.length = int(length) if length is not None else None
        expected = self.headers.get(b"expect")
        if expected is not None and expected.lower() != b"100-continue":
            raise NotExpected("only 100-continue can be expected here")

    def _read_upgrade(self) -> None:
        self.upgrade: bytes | None = None
        """The protocol that the client wants to go on with; ``None`` when it is one that we do not pass on."""
        wanted = self.headers.get(b"upgrade")
        if wanted is None or self.is_old or self.has_body:
            return
        if b"upgrade" in _tokens(self.headers.get(b"connection", b"")) and b"h2c" not in _tokens(wanted):
            self.upgrade = wanted
            self.keep_alive = False  # refused or not, what follows may not be HTTP

    @property
    def has_body(self) -> bool:
        return self.chunked or bool(self.length)

    @property
    def only_looks(self) -> bool:
        return self.method in (b"GET", b"HEAD")

    @property
    def call_id(self) -> bytes | None:
        """The id of the call that it makes or, below ``/calls/``, speaks of."""
        found = self.headers.get(b"aenv-call-id")
        return self.path[len(_CALLS) :] if found is None and self.path.startswith(_CALLS) else found

    def to_service(self) -> None:
        """Leave out what concerns one sandbox, and learn which of the service's the session is with."""
        session = self.headers.get(b"mcp-session-id")
        if session is None:
            self.headers.pop(b"aenv-boot", None)
        elif self.replica is None:
            session, _, replica = session.rpartition(_MARK)
            self.headers[b"mcp-session-id"] = session
            self.replica = replica.decode("latin-1")

    def address(self) -> Address | None:
        """What the request is for; from now on its path is the one in the sandbox."""
        path, named, header = self.path, None, self.headers.get(b"aenvcore-envinstance-id")
        if (b"." in path or b"%" in path or b"\\" in path) and not _stays(path):
            raise BadRequest("the path leads elsewhere than it says", hint="leave out . and .. in it")
        is_service = path.startswith(_SERVICE)
        if is_service or path.startswith(_INSTANCE):
            named, slash, rest = path[len(_SERVICE if is_service else _INSTANCE) :].partition(b"/")
            self.path = slash + rest or b"/"
        if named is not None and header is not None and named != header:
            raise BadRequest("path and AEnvCore-EnvInstance-ID name two instances")
        named = header if named is None else named
        if named is None:
            return None
        if not _ID.fullmatch(named):
            raise BadRequest(
                "that cannot be the id of an instance", hint="ids are of letters, digits, '.', '_' and '-'"
            )
        return Address(named.decode(), 0, is_service)

    def token(self) -> tuple[str | None, bool]:
        """The credential that came along, and whether it was in the URL."""
        header = self.headers.get(b"authorization")
        if header is not None:
            return (header[7:].strip().decode("latin-1") if header[:7].lower() == b"bearer " else ""), False
        if self.path == b"/mcp" and b"token=" in self.query:
            return parse_qs(self.query[1:].decode("latin-1")).get("token", [None])[0], True
        return None, False

    def to_sandbox(self, prefix: str, owner_token: str | None, *, more: bytes = b"") -> bytes:
        """The head as the sandbox gets it; with the owner's token instead of the one that came, if one is given."""
        headers = self.headers
        authorization = headers.get(b"authorization") if owner_token is None else b"Bearer " + owner_token.encode()
        line = b"%b %b%b%b HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: %b\r\n%b"
        begin = line % (self.method, prefix.encode(), self.path, self.query, self.request_id, more)
        for name in _PASSED:
            if name in headers:
                begin += _line(name, headers[name])
        if self.base:
            begin += _line(b"aenv-base", self.base)
        return begin + self._rest(authorization)

    def to_port(self, *, with_authorization: bool) -> bytes:
        """The head as a server on an exposed port gets it: what its own pages and clients send, it hears."""
        begin = b"%b %b%b HTTP/1.1\r\nHost: %b\r\n" % (self.method, self.path, self.query, self.headers[b"host"])
        for name in (b"origin", b"sec-fetch-site", b"x-request-id", *_PASSED):
            if name in self.headers:
                begin += _line(name, self.headers[name])
        return begin + self._rest(self.headers.get(b"authorization") if with_authorization else None)

    @property
    def framing(self) -> bytes:
        """The line that says where the body ends."""
        if self.chunked:
            return b"Transfer-Encoding: chunked\r\n"
        return b"" if self.length is None else b"Content-Length: %d\r\n" % self.length

    def _rest(self, authorization: bytes | None) -> bytes:
        lines = [self._kept, self.framing]
        if self.trace:
            lines.append(_line(b"traceparent", self.trace))
        if authorization is not None:
            lines.append(b"Authorization: %b\r\n" % authorization)
        if self.upgrade is not None:
            lines.append(b"Connection: Upgrade\r\nUpgrade: %b\r\n" % self.upgrade)
        if b"expect" in self.headers and self.has_body and not self.is_old:
            lines.append(b"Expect: 100-continue\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)


def _line(name: bytes, value: bytes) -> bytes:
    if b"\r" in value or b"\n" in value or b"\0" in value:
        raise BadRequest("a header has a line break in it")
    return b"%b: %b\r\n" % (name, value)


def _new_id() -> bytes:
    return b"%b-%x" % (_life, next(_numbers))


def _stays(path: bytes) -> bool:
    return not {b".", b".."} & set(unquote_to_bytes(path).replace(b"\\", b"/").split(b"/"))


def _tokens(value: bytes) -> set[bytes]:
    return {token.strip().lower() for token in value.split(b",")} if value else set()


def _block(lines: Headers, named: set[bytes]) -> tuple[bytes, bool]:
    """Lines of a head, by their names, without those that are for one connection only; and whether each is one line."""
    kept = [line for name, line in lines if name not in named] if named else [line for _, line in lines]
    block = b"".join(kept)
    return block, block.count(b"\n") == len(kept) == block.count(b"\r")


class Answer:
    """The head of an answer."""

    __slots__ = ("_kept", "_reason", "_told", "chunked", "length", "status", "timing", "upgrade")

    def __init__(self, status: int, reason: bytes, headers: Headers) -> None:
        """Raises ValueError for what a client could misunderstand."""
        self.status = status
        self._reason = reason
        self.chunked = False
        self.length: bytes | None = None
        self.upgrade: bytes | None = None
        self.timing = b""
        """Where the sandbox's time went, in its words."""
        self._told: dict[bytes, bytes] = {}
        kept: Headers = []
        named: set[bytes] = set()
        for name, value in headers:
            lower = name.lower()
            if lower == b"content-length":
                if self.length is not None:
                    raise ValueError("more than one Content-Length")
                self.length = value
            elif lower not in _TOLD:
                kept.append((lower, b"%b: %b\r\n" % (name, value)))
            elif lower == b"server-timing":
                self.timing = b"%b, %b" % (self.timing, value) if self.timing else value
                kept.append((lower, b"%b: %b\r\n" % (name, value)))
            elif lower not in _HOP_BY_HOP:
                if b"\n" in value or b"\r" in value:
                    raise ValueError("a line break in a header")
                self._told[lower] = b"%b, %b" % (self._told[lower], value) if lower in self._told else value
            elif lower == b"transfer-encoding":
                if value.lower() != b"chunked":
                    raise ValueError("a Transfer-Encoding other than chunked")
                self.chunked = True
            elif lower == b"upgrade":
                self.upgrade = value
            elif lower == b"connection":
                named |= _tokens(value)
        if self.chunked and self.length is not None:
            raise ValueError("both Content-Length and Transfer-Encoding")
        self._kept, is_sound = _block(kept, named)
        if not is_sound:
            raise ValueError("a line break in a header")

    @property
    def is_bare(self) -> bool:
        """Whether there never is a body after it."""
        return self.status < 200 or self.status in (204, 304)

    def has(self, name: bytes) -> bool:
        """Whether it has a header, given in lower case."""
        return b"\n%b:" % name in b"\n" + self._kept.lower()

    @property
    def not_sent(self) -> bool:
        """Whether the gateway of another server says that the sandbox got nothing of the request."""
        return self.status == 503 and self._told.get(b"aenv-hop") == b"not-sent"

    def as_told(self) -> bytes:
        """What was looked at, as the sandbox said it."""
        return b"".join(b"%b: %b\r\n" % pair for pair in self._told.items())

    def ours(self, request_id: bytes, replica: bytes) -> bytes:
        """The same, with our name of the request, and, of a service, with its replica's: where a session is, and not
        which life of a sandbox it is, since the next call may go to another."""
        told = self._told
        line = b"X-Request-Id: %b\r\n" % request_id
        if (session := told.get(b"mcp-session-id")) is not None:
            line += b"Mcp-Session-Id: %b\r\n" % (session + _MARK + replica if replica else session)
        if (boot := told.get(b"aenv-boot")) is not None and not replica:
            line += b"AEnv-Boot: %b\r\n" % boot
        return line

    def to_client(self, *lines: bytes) -> bytes:
        """The head as the client gets it, with these lines of ours at its end."""
        first = _STATUS.get(self.status)
        if first is None or self._reason not in first:
            first = b"HTTP/1.1 %d %b\r\n" % (self.status, self._reason)
        if self.length is not None and self.status >= 200 and self.status != 204:
            lines = (b"Content-Length: %b\r\n" % self.length, *lines)
        return b"".join((first, self._kept, *lines, b"\r\n"))
