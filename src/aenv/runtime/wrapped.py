"""A project's own MCP server, FastMCP's or the official SDK's, behind our routes.

It answers ``/mcp`` itself, so resources, prompts, sampling and elicitation work as its author wrote them; the tools
marked with ``@register_tool`` beside it are added to it, and its tools are callable at ``/tools`` like any other.
A server on the older line of the SDK knows sessions only: single exchanges of 2026-07-28 are then answered by us.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
import logging
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import Any

import msgspec

from aenv import __version__
from aenv.errors import AEnvError, Invalid, StartFailed, ToolError
from aenv.models import ToolResult
from aenv.runtime.answers import Answer, Headers, Request, Response
from aenv.runtime.context import Context
from aenv.runtime.functions import Function
from aenv.runtime.mcp.messages import LEGACY, NO_METHOD, encode, error
from aenv.runtime.registry import Mark
from aenv.runtime.schema import Result
from aenv.runtime.service import Service

_CONNECTION = (b"content-length", b"connection", b"transfer-encoding")
"""Headers that belong to the connection, which is ours."""
_LIBRARY_CONTEXT = "aenv_library_context"
"""The parameter by which the server hands its own context to a tool of ours."""
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "notice": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_EVENT_END = re.compile(rb"\r\n\r\n|\n\n")
_decode = msgspec.json.Decoder().decode


class Wrapped:
    """The server, mounted. Start it before its first request; closing ends streams, stopping ends everything."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._server = service.loaded.server
        self._stack = AsyncExitStack()
        self._streams: set[Answer] = set()
        self.modern = int(version("mcp").split(".")[0]) >= 2
        """Whether it speaks 2026-07-28 itself."""

    async def start(self) -> None:
        tools = self._service.loaded.tools
        theirs = {tool.name for tool in await self._server.list_tools()}
        for function in list(tools.values()):
            if function.name in theirs:
                raise StartFailed(
                    f"tool {function.name!r} is registered twice: {function.mark.place} and in the MCP server beside it",
                    hint="rename one, or give one a name: @register_tool(name=...)",
                )
            self._offer(function)
        self._app = self._mount()
        await self._stack.enter_async_context(self._app.router.lifespan_context(self._app))
        insider = _Insider(self)
        for listed in await insider.tools():
            tools.setdefault(listed["name"], ServerTool(insider, listed))

    def _mount(self) -> Any:
        if hasattr(self._server, "http_app"):
            return self._server.http_app(path="/mcp")
        # Host and Origin are checked on the way in, by rules the server does not know.
        from mcp.server.transport_security import TransportSecuritySettings

        unchecked = TransportSecuritySettings(enable_dns_rebinding_protection=False)
        if self.modern:
            return self._server.streamable_http_app(transport_security=unchecked)
        self._server.settings.transport_security = unchecked
        self._server.settings.streamable_http_path = "/mcp"
        return self._server.streamable_http_app()

    def close(self) -> None:
        """End the streams that clients hold open."""
        for answer in list(self._streams):
            answer.cancel()

    async def stop(self) -> None:
        await self._stack.aclose()

    def _offer(self, function: Function) -> None:
        """Add a tool of ours to the server. The result is made by us; the server validates and sends."""

        async def call(**arguments: Any) -> Any:
            relay = _Relay(arguments.pop(_LIBRARY_CONTEXT))
            async with relay:
                context = self._service.context(function.name, relay.notify, _LIBRARY_CONTEXT)
                result = await self._service.call_tool(function, arguments, context)
            return _library_result(self._server, _decode(encode(result)))

        library = _library(self._server)
        signature = inspect.signature(function.mark.function, eval_str=True)
        kept = [p for p in signature.parameters.values() if p.name != function.arguments.context]
        theirs = inspect.Parameter(_LIBRARY_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=library.Context)
        extra = [p for p in kept if p.kind is p.VAR_KEYWORD]
        kept = [*(p for p in kept if p not in extra), theirs, *extra]
        call.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in kept if p.annotation is not p.empty}
        call.__name__ = function.name
        call.__doc__ = function.description
        options = function.mark.options
        shown: dict[str, Any] = {"name": function.name, "description": function.description}
        shown["title"] = options.get("title")
        if annotations := options.get("annotations"):
            from mcp.types import ToolAnnotations

            shown["annotations"] = ToolAnnotations.model_validate(annotations)
        if hasattr(self._server, "http_app"):
            self._server.tool(call, output_schema=function.result.schema, **shown)
        else:
            self._server.add_tool(call, structured_output=False, **shown)

    def handle(self, request: Request) -> Answer:
        """Let the server answer. It hears that its client left by being cancelled, where the revision says so."""
        legacy_call = request.method == "POST" and request.headers.get(b"mcp-protocol-version", b"") < b"2026"
        answer = Answer(None if legacy_call else 0)
        answer.transient = request.method == "GET"
        method = request.headers.get(b"mcp-method")
        if method == b"server/discover" and not self.modern:  # it would open a session for this, and then refuse
            answer.reply(Response(400, error(NO_METHOD, "Method not found: server/discover", None)))
            return answer
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": "/mcp",
            "raw_path": b"/mcp",
            "query_string": b"",
            "root_path": "",
            "headers": [*_passed_on(request.raw_headers), (b"host", b"127.0.0.1:8081")],
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 8081),
        }
        answer.task = asyncio.create_task(self._run(scope, request.body, answer))
        if request.method == "GET" or method == b"subscriptions/listen":
            self._streams.add(answer)
            answer.task.add_done_callback(lambda _: self._streams.discard(answer))
        return answer

    async def _run(self, scope: dict[str, Any], body: bytes, answer: Answer) -> None:
        given = False

        async def receive() -> dict[str, Any]:
            nonlocal given
            if given:
                await asyncio.get_running_loop().create_future()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = [(bytes(name).lower(), bytes(value)) for name, value in message["headers"]]
                answer.begin(message["status"], [pair for pair in headers if pair[0] not in _CONNECTION])
            elif message["type"] == "http.response.body":
                if chunk := message.get("body"):
                    answer.write(bytes(chunk))
                if not message.get("more_body"):
                    answer.close()

        try:
            await self._app(scope, receive, send)
        finally:
            if not answer.status:
                answer.begin(500, [])
            answer.close()


def _passed_on(headers: Headers) -> Headers:
    """What the server may know: who asks, and through which address, was judged before."""
    return [(name, value.strip()) for name, value in headers if name not in (b"host", b"origin", b"authorization")]


def _library(server: Any) -> Any:
    """The package that the server's class comes from; it has the ``Context`` that goes with it."""
    for cls in type(server).__mro__:
        if cls.__name__ in ("FastMCP", "MCPServer") and cls.__module__.startswith(("mcp.", "fastmcp.")):
            return importlib.import_module(cls.__module__.rpartition(".")[0])
    raise AEnvError(f"{type(server)} is not an MCP server")


def _library_result(server: Any, result: dict[str, Any]) -> Any:
    """A ``tools/call`` result as the server's library takes it from a function."""
    from mcp.types import CallToolResult

    found = CallToolResult.model_validate(result)
    if not hasattr(server, "http_app"):
        return found
    if result["isError"]:
        text = "\n".join(block["text"] for block in result["content"] if block["type"] == "text")
        raise importlib.import_module("fastmcp.exceptions").ToolError(text)
    made = importlib.import_module("fastmcp.tools.base").ToolResult
    return made(content=found.content, structured_content=result.get("structuredContent"))


class _Relay:
    """Notifications of a tool of ours, from any thread and in order, sent by the server's own context."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._waiting: asyncio.Queue[tuple[str, dict[str, Any]] | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def notify(self, method: str, parameters: dict[str, Any]) -> None:
        self._loop.call_soon_threadsafe(self._waiting.put_nowait, (method, parameters))

    async def __aenter__(self) -> None:
        self._sending = asyncio.create_task(self._send())

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._sending.cancel()
            return
        self._loop.call_soon(self._waiting.put_nowait, None)
        await self._sending

    async def _send(self) -> None:
        while (item := await self._waiting.get()) is not None:
            method, given = item
            if method == "notifications/progress":
                await self._context.report_progress(given["progress"], given.get("total"), given.get("message"))
            elif hasattr(self._context, "fastmcp"):
                await self._context.log(given["data"], level=given["level"], logger_name=given["logger"])
            else:
                await self._context.log(given["level"], given["data"], logger_name=given["logger"])


class _Insider:
    """A client of the server in this process: our routes reach its tools as any other client does.

    So a tool has its library's context, with a session and a request behind it, whoever calls.
    """

    def __init__(self, wrapped: Wrapped) -> None:
        self._wrapped = wrapped
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

    async def _request(self, method: str, parameters: dict[str, Any], context: Context) -> dict[str, Any]:
        session = await self._connected()
        id = next(self._ids)
        answer = self._post({"id": id, "method": method, "params": parameters}, session)
        try:
            reply = await self._reply(answer, id, session, context)
        except asyncio.CancelledError:
            self._tell({"method": "notifications/cancelled", "params": {"requestId": id}}, session)
            answer.cancel()
            raise
        if answer.status == 404 and session is self._session:  # the server forgot an idle session; nothing ran
            self._session = None
            return await self._request(method, parameters, context)
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
        return self._wrapped.handle(Request("POST", "/mcp", b"", list(headers.items()), body))

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
    raise AEnvError(f"the project's MCP server failed: {failed['message']}")


class ServerTool(Function):
    """A tool of the wrapped server, for the routes that are ours."""

    def __init__(self, insider: _Insider, listed: dict[str, Any]) -> None:
        self._insider = insider
        self.name = listed["name"]
        self.description = listed.get("description")
        options: dict[str, Any] = {key: listed[key] for key in ("title", "annotations") if key in listed}
        self.mark = Mark("tool", self._run, self.name, {**options, "input_schema": listed["inputSchema"]})
        self.arguments = _Published(listed["inputSchema"])  # type: ignore[assignment]
        self.result = Result(self._run)
        self.result.schema = listed.get("outputSchema")
        self._function = self._run
        self._context = None
        self._is_async = True

    async def call(self, arguments: dict[str, Any], context: Context) -> Any:
        return await super().call({"arguments": arguments, "context": context}, context)

    async def _run(self, arguments: dict[str, Any], context: Context) -> ToolResult:
        return await self._insider.call(self.name, arguments, context)


class _Published:
    """Arguments whose schema and validation belong to the wrapped server."""

    context = None

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema = schema

    def decode(self, given: Any, *, text: bool = False) -> dict[str, Any]:
        if not isinstance(given, bytes):
            return dict(given)
        try:
            return msgspec.json.decode(given, type=dict[str, Any])
        except msgspec.DecodeError as exc:
            raise Invalid(f"the arguments are not a JSON object: {exc}") from None
