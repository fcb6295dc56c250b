"""Heads of requests and answers: read, checked, and written anew.

Nothing of a head is passed on that was not understood here, and how long a body is, is said in our own words: two
readers of the same bytes cannot disagree about where a request ends.
"""

from __future__ import annotations

import re
from http import HTTPStatus
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
_READ = _HOP_BY_HOP | _OURS | {b"authorization", b"content-length", b"expect", b"host", b"origin", b"sec-fetch-site"}
"""What is looked at, and not simply passed on."""
_ONCE = _READ - {b"connection", b"keep-alive", b"te", b"trailer", b"upgrade"}
"""What two of in one request would be two requests in one."""
_ID = re.compile(rb"[A-Za-z0-9._-]{1,255}")
_TARGET = re.compile(rb"/[\x21\x22\x24-\x7e\x80-\xff]*")
_INSTANCE, _SERVICE = b"/env-instance/", b"/env-service/"
_STATUS = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}

Headers = list[tuple[bytes, bytes]]


class Head:
    """The head of a request."""

    __slots__ = (
        "_kept",
        "chunked",
        "headers",
        "is_old",
        "keep_alive",
        "length",
        "method",
        "path",
        "query",
        "repeatable",
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

    def _sort(self, headers: Headers) -> bytes:
        found = self.headers
        kept: Headers = []
        self.repeatable = self.method in (b"GET", b"HEAD")
        """Whether asking twice does no harm: it only looks, or has an id by which the sandbox knows it again."""
        for name, value in headers:
            lower = name.lower()
            if lower not in _READ:
                kept.append((lower, b"%b: %b\r\n" % (name, value)))
                if lower == b"aenv-call-id":
                    self.repeatable = True
            elif lower not in found:
                found[lower] = value
            elif lower in _ONCE:
                raise BadRequest(f"the request has more than one {name.decode('latin-1')}")
            else:
                found[lower] += b"," + value
        block, is_sound = _block(kept, _tokens(found.get(b"connection", b"")))
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
    def for_a_service(self) -> bool:
        return self.path.startswith(_SERVICE)

    def address(self) -> str | None:
        """The instance that the request is for; from now on its path is the one in the sandbox."""
        path, named, header = self.path, None, self.headers.get(b"aenvcore-envinstance-id")
        if (b"." in path or b"%" in path or b"\\" in path) and not _stays(path):
            raise BadRequest("the path leads elsewhere than it says", hint="leave out . and .. in it")
        if path.startswith(_INSTANCE):
            named, slash, rest = path[len(_INSTANCE) :].partition(b"/")
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
        return named.decode()

    def token(self) -> tuple[str | None, bool]:
        """The credential that came along, and whether it was in the URL."""
        header = self.headers.get(b"authorization")
        if header is not None:
            return (header[7:].strip().decode("latin-1") if header[:7].lower() == b"bearer " else ""), False
        if self.path == b"/mcp" and b"token=" in self.query:
            return parse_qs(self.query[1:].decode("latin-1")).get("token", [None])[0], True
        return None, False

    def to_sandbox(self, prefix: str, owner_token: str | None) -> bytes:
        """The head as the sandbox gets it; with the owner's token instead of the one that came, if one is given."""
        authorization = self.headers.get(b"authorization") if owner_token is None else b"Bearer " + owner_token.encode()
        line = b"%b %b%b%b HTTP/1.1\r\nHost: localhost\r\n"
        begin = line % (self.method, prefix.encode(), self.path, self.query)
        return begin + self._rest(authorization)

    def to_port(self, *, with_authorization: bool) -> bytes:
        """The head as a server on an exposed port gets it: what its own pages and clients send, it hears."""
        begin = b"%b %b%b HTTP/1.1\r\nHost: %b\r\n" % (self.method, self.path, self.query, self.headers[b"host"])
        for name in (b"origin", b"sec-fetch-site"):
            if name in self.headers:
                begin += b"%b: %b\r\n" % (name, self.headers[name])
        return begin + self._rest(self.headers.get(b"authorization") if with_authorization else None)

    @property
    def framing(self) -> bytes:
        """The line that says where the body ends."""
        if self.chunked:
            return b"Transfer-Encoding: chunked\r\n"
        return b"" if self.length is None else b"Content-Length: %d\r\n" % self.length

    def _rest(self, authorization: bytes | None) -> bytes:
        lines = [self._kept, self.framing]
        if authorization is not None:
            lines.append(b"Authorization: %b\r\n" % authorization)
        if self.upgrade is not None:
            lines.append(b"Connection: Upgrade\r\nUpgrade: %b\r\n" % self.upgrade)
        if b"expect" in self.headers and self.has_body and not self.is_old:
            lines.append(b"Expect: 100-continue\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)


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

    __slots__ = ("_kept", "_reason", "chunked", "length", "status", "upgrade")

    def __init__(self, status: int, reason: bytes, headers: Headers) -> None:
        """Raises ValueError for what a client could misunderstand."""
        self.status = status
        self._reason = reason
        self.chunked = False
        self.length: bytes | None = None
        self.upgrade: bytes | None = None
        kept: Headers = []
        named: set[bytes] = set()
        for name, value in headers:
            lower = name.lower()
            if lower == b"content-length":
                if self.length is not None:
                    raise ValueError("more than one Content-Length")
                self.length = value
            elif lower not in _HOP_BY_HOP:
                kept.append((lower, b"%b: %b\r\n" % (name, value)))
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

    def to_client(self, *lines: bytes) -> bytes:
        """The head as the client gets it, with these lines of ours at its end."""
        first = _STATUS.get(self.status)
        if first is None or self._reason not in first:
            first = b"HTTP/1.1 %d %b\r\n" % (self.status, self._reason)
        if self.length is not None and self.status >= 200 and self.status != 204:
            lines = (b"Content-Length: %b\r\n" % self.length, *lines)
        return b"".join((first, self._kept, *lines, b"\r\n"))
