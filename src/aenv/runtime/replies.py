"""What a request asks for, read, and how it is answered: the shapes that the handlers of a sandbox share."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from aenv.errors import AEnvError, Invalid
from aenv.runtime.answers import Answer, Request, Response, cancelled
from aenv.runtime.service import Unhealthy

_encode = msgspec.json.Encoder().encode


def success(data: Any, status: int = 200) -> Response:
    return Response(status, _encode({"success": True, "data": data}))


def failure(exc: AEnvError, data: Any = None) -> Response:
    body: dict[str, Any] = {"success": False, "error": exc.message, "code": exc.code}
    if exc.hint:
        body["hint"] = exc.hint
    if isinstance(exc, Unhealthy):
        data = exc.data
    if data is not None:
        body["data"] = data
    response = Response(exc.status, _encode(body))
    if exc.status == 401:
        response.headers = [*response.headers, (b"www-authenticate", b"Bearer")]
    return response


def query(request: Request) -> dict[str, Any]:
    """The query's arguments; one that is given several times is a list."""
    found: dict[str, Any] = {}
    for name, value in parse_qsl(request.query.decode("latin-1"), keep_blank_values=True):
        if name in found:
            found[name] = [*(found[name] if isinstance(found[name], list) else [found[name]]), value]
        else:
            found[name] = value
    return found


def json_object(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body or b"{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise Invalid(f"the body is not a JSON object: {exc}") from None


def is_call(request: Request) -> bool:
    """Whether a request wants something done, and does not only look or listen."""
    if request.path == "/mcp":
        return request.method != "GET" and request.headers.get(b"mcp-method") != b"subscriptions/listen"
    return request.path != "/health"


def working(work: Coroutine[Any, Any, Response | None], answer: Answer | None = None) -> Answer:
    """An answer that ``work`` returns or, when it returns none, writes itself; its client's leaving ends it."""
    answer = answer or Answer(0)

    async def run() -> None:
        try:
            if response := await work:
                answer.reply(response)
        except asyncio.CancelledError as exc:
            answer.fail(failure(cancelled(exc) or AEnvError("the call was cancelled")))
            raise
        except AEnvError as exc:
            answer.fail(failure(exc))
        except Exception as exc:
            answer.fail(failure(AEnvError(f"the runtime failed: {exc!r}")))
            raise

    answer.task = asyncio.create_task(run())
    return answer
