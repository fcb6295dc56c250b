"""Applications of other libraries behind our routes: each is asked by ASGI, once who asks is known."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aenv.runtime.answers import Answer, Headers, Request

_CONNECTION = (b"content-length", b"connection", b"transfer-encoding")
"""Headers that belong to the connection, which is ours."""

App = Callable[[dict[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


async def ask(app: App, request: Request, path: str, answer: Answer) -> None:
    """Let an application answer a request as if it had come to that path. It hears that its client left by being
    cancelled."""
    given = False

    async def receive() -> dict[str, Any]:
        nonlocal given
        if given:
            await asyncio.get_running_loop().create_future()
        given = True
        return {"type": "http.request", "body": request.body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = [(bytes(name).lower(), bytes(value)) for name, value in message["headers"]]
            answer.begin(message["status"], [pair for pair in headers if pair[0] not in _CONNECTION])
        elif message["type"] == "http.response.body":
            if chunk := message.get("body"):
                answer.write(bytes(chunk))
            if not message.get("more_body"):
                answer.close()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [*_passed_on(request.raw_headers), (b"host", b"127.0.0.1:8081")],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 8081),
    }
    try:
        await app(scope, receive, send)
    finally:
        if not answer.status:
            answer.begin(500, [])
        answer.close()


def _passed_on(headers: Headers) -> Headers:
    """What the application may know: who asks, and through which address, was judged before."""
    return [(name, value.strip()) for name, value in headers if name not in (b"host", b"origin", b"authorization")]
