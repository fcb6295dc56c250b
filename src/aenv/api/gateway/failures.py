"""What a client is told when its request does not get as far as a sandbox, or its answer not back."""

from __future__ import annotations

import json
from http import HTTPStatus

from aenv.errors import AEnvError, Forbidden, Invalid, NetworkError, NotFound


class BadRequest(Invalid):
    """Not HTTP as we take it."""

    status = 400


class HeadTooLong(Invalid):
    status = 431


class TooSlow(Invalid):
    status = 408


class NotExpected(Invalid):
    status = 417


class Expired(Forbidden):
    """An exposed URL whose time is over."""

    status = 410


class SessionGone(NotFound):
    """What MCP has a server say of a session that it does not know: its client then begins a new one."""


class Busy(NetworkError):
    """Later it may work, and asking again does no harm: nothing ran, or the same sandbox would be asked."""

    status = 503


def answer(
    error: AEnvError,
    *,
    close: bool,
    page: bool,
    with_body: bool = True,
    request_id: bytes | None = None,
    not_sent: bool = False,
) -> bytes:
    """A failure as a whole answer: in the runtime's envelope, or as a page for a person. ``not_sent`` tells the gateway
    of a service that the sandbox got nothing of the request."""
    headers = ["AEnv-Hop: not-sent"] if not_sent else []
    if request_id is not None:
        headers.append(f"X-Request-Id: {request_id.decode()}")
    if error.status == 401:
        headers.append("WWW-Authenticate: Bearer")
    if error.status in (429, 503):
        headers.append("Retry-After: 1")
    if page:
        headers.append("Content-Type: text/plain; charset=utf-8")
        text = f"{error.message}\n"
    else:
        headers.append("Content-Type: application/json")
        told = {"success": False, "error": error.message, "code": error.code}
        text = json.dumps(told | ({"hint": error.hint} if error.hint else {}))
    return _whole(error.status, headers, text, close=close, with_body=with_body)


def healthy(*, close: bool, with_body: bool) -> bytes:
    """The gateway's own health."""
    text = json.dumps({"success": True, "data": {"status": "healthy"}})
    return _whole(200, ["Content-Type: application/json"], text, close=close, with_body=with_body)


def _whole(status: int, headers: list[str], text: str, *, close: bool, with_body: bool) -> bytes:
    body = text.encode()
    ends = ["Connection: close"] if close else []
    first = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"
    head = "\r\n".join((first, *headers, f"Content-Length: {len(body)}", *ends, "", ""))
    return head.encode() + (body if with_body else b"")
