"""What is read of HTTP/1.1: heads, lengths of bodies, and what of them is passed on. Pure, and strict.

Only what has one meaning gets through. Heads are written anew, so that nothing a client wrote in its own way reaches a
server.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from aenv.engines.egress.rules import Address, parse

MOST_FIELDS = 256
CHUNKED, TO_THE_END = -1, -2
"""Lengths of bodies that are not told in their heads."""

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]"
_TEXT = rb"[\t\x20-\x7e\x80-\xff]*"
_REQUEST = re.compile(rb"(" + _TOKEN + rb"{1,32}) ([\x21-\x7e]+) HTTP/1\.([01])")
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-9][0-9]{2})(?: (" + _TEXT + rb"))?")
_FIELD = re.compile(rb"(" + _TOKEN + rb"+):(" + _TEXT + rb")")
_URL = re.compile(rb"(?i:http)://([^/?#]+)([/?][^#]*)?")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;" + _TEXT + rb")?")
_DROPPED = frozenset(
    (
        b"connection",
        b"content-length",
        b"host",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""Fields that concern one connection, and those that are written anew."""

Fields = list[tuple[bytes, bytes]]


class Request(NamedTuple):
    """What a client asked for, taken apart and checked."""

    method: bytes
    address: Address
    modern: bool
    """Whether the client knows HTTP/1.1."""
    length: int
    head: bytes
    """What the server is sent; nothing when a tunnel is asked for."""

    @property
    def tunnel(self) -> bool:
        return self.method == b"CONNECT"


class Answer(NamedTuple):
    """The head of a server's answer."""

    status: int
    length: int
    chunked: bool
    """Whether the client gets the body in chunks."""
    head: bytes
    """What the client is sent."""


def read_request(head: bytes) -> Request:
    """Read the head of a request; ``ValueError`` says what is wrong with it."""
    first, fields = _split(head)
    found = _REQUEST.fullmatch(first)
    if found is None:
        raise ValueError("not a request of HTTP/1.1")
    method, target, modern = found[1], found[2], found[3] == b"1"
    host = _single(fields, b"host")
    if host is None and modern:
        raise ValueError("no Host")
    length = _length(fields, 0)
    if length == CHUNKED and not modern:
        raise ValueError("Transfer-Encoding in HTTP/1.0")
    if method == b"CONNECT":
        if length:
            raise ValueError("CONNECT with a body")
        return Request(method, parse(target.decode("ascii")), modern, 0, b"")
    url = _URL.fullmatch(target)
    if url is None:
        raise ValueError("this is a proxy: ask for http://host/path, or CONNECT host:port")
    address = parse(url[1].decode("ascii"), 80)
    if host is not None and parse(host.decode("latin-1"), 80) != address:
        raise ValueError("Host is not the host of the URL")
    path = url[2] or b"/"
    lines = [
        b"%b %b%b HTTP/1.1\r\n" % (method, b"" if path.startswith(b"/") else b"/", path),
        b"Host: %b\r\n" % str(address).removesuffix(":80").encode("ascii"),
        *_passed_on(fields),
        b"Connection: close\r\n",
    ]
    if length == CHUNKED:
        lines.append(b"Transfer-Encoding: chunked\r\n")
    elif _single(fields, b"content-length") is not None:
        lines.append(b"Content-Length: %d\r\n" % length)
    return Request(method, address, modern, length, b"".join([*lines, b"\r\n"]))


def read_answer(head: bytes, request: Request) -> Answer:
    """Read the head of an answer to ``request``; ``ValueError`` says what is wrong with it."""
    first, fields = _split(head)
    found = _STATUS.fullmatch(first)
    if found is None:
        raise ValueError("not an answer of HTTP/1.1")
    status = int(found[1])
    lines = [b"HTTP/1.1 %d %b\r\n" % (status, found[2] or b""), *_passed_on(fields)]
    if status < 200:
        return Answer(status, 0, False, b"".join([*lines, b"\r\n"]))
    length = _length(fields, TO_THE_END)
    if length >= 0:
        lines.append(b"Content-Length: %d\r\n" % length)
    if request.method == b"HEAD" or status in (204, 304):
        length = 0
    chunked = length == CHUNKED and request.modern
    if chunked:
        lines.append(b"Transfer-Encoding: chunked\r\n")
    return Answer(status, length, chunked, b"".join([*lines, b"Connection: close\r\n\r\n"]))


def read_chunk_size(line: bytes) -> int:
    found = _CHUNK_LINE.fullmatch(line)
    if found is None:
        raise ValueError("the size of a chunk is malformed")
    return int(found[1], 16)


def _split(head: bytes) -> tuple[bytes, Fields]:
    """The first line of a head, and its fields with names in lower case."""
    first, *lines = head.split(b"\r\n")
    if len(lines) > MOST_FIELDS:
        raise ValueError(f"more than {MOST_FIELDS} header fields")
    fields: Fields = []
    for line in lines:
        found = _FIELD.fullmatch(line)
        if found is None:
            raise ValueError("a header field is malformed")
        fields.append((found[1].lower(), found[2].strip(b" \t")))
    return first, fields


def _single(fields: Fields, name: bytes) -> bytes | None:
    values = [value for key, value in fields if key == name]
    if len(values) > 1:
        raise ValueError(f"more than one {name.decode('ascii').title()}")
    return values[0] if values else None


def _length(fields: Fields, otherwise: int) -> int:
    """How long the body is. What two readers could take for two lengths is refused."""
    told, encoding = _single(fields, b"content-length"), _single(fields, b"transfer-encoding")
    if encoding is not None:
        if told is not None:
            raise ValueError("both Content-Length and Transfer-Encoding")
        if encoding.lower() != b"chunked":
            raise ValueError("a Transfer-Encoding other than chunked")
        return CHUNKED
    if told is None:
        return otherwise
    if not _LENGTH.fullmatch(told):
        raise ValueError("Content-Length is not a number")
    return int(told)


def _passed_on(fields: Fields) -> list[bytes]:
    named = b",".join(value for name, value in fields if name == b"connection").lower().split(b",")
    dropped = _DROPPED.union(name.strip() for name in named)
    return [b"%b: %b\r\n" % field for field in fields if field[0] not in dropped]
