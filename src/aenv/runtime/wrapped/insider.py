"""A client of the author's server in this process, for the routes that are ours."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec

from aenv import __version__
from aenv.errors import AEnvError, ToolError, from_wire
from aenv.models import ToolResult
from aenv.runtime.answers import Answer, Request
from aenv.runtime.context import Context
from aenv.runtime.foreign import Foreign
from aenv.runtime.mcp.messages import LEGACY, NO_METHOD, encode
from aenv.runtime.registry import Mark

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "notice": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_EVENT_END = re.compile(rb"\r\n\r\n|\n\n")
_decode = msgspec.json.Decoder().decode


class Handles(Protocol):
    """What answers requests for ``/mcp``."""

    def handle(self, request: Request) -> Answer: ...


class Insider:
    """A client of the server in this process: our routes reach its tools as any other client does.

    So a tool has its library's context, with a session and a request behind it, whoever calls.
    """

    def __init__(self, mounted: Handles) -> None:
        self._mounted = mounted
        self._ids = itertools.count(1)
        self._session: dict[bytes, bytes] | None = None
        self._opening = asyncio.Lock()
        self._farewells: set[Answer] = set()

    async def tools(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        parameters: dict[str, Any] = {}
        while True:
            result = await self._request("tools/list", parameters, Context())
            found += result["tools"]
            if not (cursor := result.get("nextCursor")):
                return found
            parameters = {"cursor": cursor}

    async def call(self, name: str, arguments: dict[str, Any], context: Context) -> ToolResult:
        parameters = {"name": name, "arguments": arguments, "_meta": {"progressToken": next(self._ids)}}
        result = await self._request("tools/call", parameters, context)
        found = ToolResult(
            content=result["content"], structured=result.get("structuredContent"), is_error=bool(result.get("isError"))
        )
        if found.is_error and all(block["type"] == "text" for block in found.content):
            raise ToolError(found.text or "the tool failed without a message")
        return found

    async def _request(
        self, method: str, parameters: dict[str, Any], context: Context, *, again: bool = True
    ) -> dict[str, Any]:
        session = await self._connected()
        id = next(self._ids)
        answer = self._post({"id": id, "method": method, "params": parameters}, session)
        try:
            reply = await self._reply(answer, id, session, context)
        except asyncio.CancelledError:
            self._tell({"method": "notifications/cancelled", "params": {"requestId": id}}, session)
            answer.cancel()
            raise
        if answer.status == 404 and again and session is self._session:
            self._session = None  # the server forgot an idle session; nothing ran
            return await self._request(method, parameters, context, again=False)
        return _result(reply, answer)

    async def _connected(self) -> dict[bytes, bytes]:
        async with self._opening:
            if self._session is None:
                about = {"name": "aenv", "version": __version__}
                hello = {"protocolVersion": LEGACY[0], "capabilities": {}, "clientInfo": about}
                answer = self._post({"id": 0, "method": "initialize", "params": hello}, {})
                result = _result(await self._reply(answer, 0, {}, Context()), answer)
                given = dict(answer.headers).get(b"mcp-session-id")
                session = {b"mcp-protocol-version": str(result["protocolVersion"]).encode()}
                session |= {b"mcp-session-id": given} if given else {}
                ready = self._post({"method": "notifications/initialized"}, session)
                await self._reply(ready, None, session, Context())
                self._session = session
            return self._session

    def _post(self, message: dict[str, Any], session: dict[bytes, bytes]) -> Answer:
        headers = {
            b"content-type": b"application/json",
            b"accept": b"application/json, text/event-stream",
            **session,
        }
        body = encode({"jsonrpc": "2.0", **message})
        return self._mounted.handle(Request("POST", "/mcp", b"", list(headers.items()), body))

    def _tell(self, message: dict[str, Any], session: dict[bytes, bytes]) -> None:
        """Post what needs no answer."""
        answer = self._post(message, session)
        self._farewells.add(answer)
        if answer.task is not None:
            answer.task.add_done_callback(lambda _: self._farewells.discard(answer))

    async def _reply(
        self, answer: Answer, id: int | None, session: dict[bytes, bytes], context: Context
    ) -> dict[str, Any]:
        """The response among what the server sends; notifications go where ``context`` sends its own."""
        async for message in _messages(answer):
            if "method" not in message:
                if message.get("id") == id:
                    return message
            elif "id" in message:
                refusal = {"code": NO_METHOD, "message": "there is nobody to ask in a call over plain HTTP"}
                self._tell({"id": message["id"], "error": refusal}, session)
            elif message["method"] == "notifications/progress":
                given = message["params"]
                context.progress(given["progress"], given.get("total"), given.get("message"))
            elif message["method"] == "notifications/message":
                _log(message["params"], context)
        return {}


def _log(given: dict[str, Any], context: Context) -> None:
    data = given["data"]
    if isinstance(data, dict) and "msg" in data:  # FastMCP's form
        data = data["msg"]
    context.logger.log(_LEVELS.get(given["level"], logging.CRITICAL), "%s", data)


async def _messages(answer: Answer) -> AsyncIterator[dict[str, Any]]:
    """The JSON-RPC messages of an answer, as they come."""
    buffer = b""
    position = 0
    while True:
        while position < len(answer.chunks):
            buffer += answer.chunks[position]
            position += 1
            if not dict(answer.headers).get(b"content-type", b"").startswith(b"text/event-stream"):
                continue
            while end := _EVENT_END.search(buffer):
                event, buffer = buffer[: end.start()], buffer[end.end() :]
                lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
                if data := b"\n".join(lines):
                    yield _decode(data)
        if answer.done:
            break
        await answer.changed(60.0)
    if dict(answer.headers).get(b"content-type", b"").startswith(b"application/json") and buffer:
        yield _decode(buffer)


def _result(reply: dict[str, Any], answer: Answer) -> dict[str, Any]:
    if "result" in reply:
        found: dict[str, Any] = reply["result"]
        return found
    failed = reply.get("error") or {"message": f"it answered with status {answer.status} and no message"}
    data = failed.get("data")
    if isinstance(data, dict) and isinstance(data.get("aenv"), dict):
        raise from_wire(data["aenv"])
    raise AEnvError(f"the project's MCP server failed: {failed['message']}")


class ServerTool(Foreign):
    """A tool of the wrapped server, for the routes that are ours."""

    def __init__(self, insider: Insider, listed: dict[str, Any]) -> None:
        self._insider = insider
        super().__init__(Mark("tool", self._run, listed["name"], {"listed": listed}))

    async def _run(self, arguments: dict[str, Any], context: Context) -> ToolResult:
        return await self._insider.call(self.name, arguments, context)
