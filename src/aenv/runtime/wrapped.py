"""A project's own MCP server, FastMCP's or the official SDK's, behind our routes.

It answers ``/mcp`` itself, so resources, prompts, sampling and elicitation work as its author wrote them; the tools
marked with ``@register_tool`` beside it are added to it, and its tools are callable at ``/tools`` like any other.
A server on the older line of the SDK knows sessions only: single exchanges of 2026-07-28 are then answered by us.
"""

from __future__ import annotations

import asyncio
import inspect
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import Any

from aenv.errors import Invalid
from aenv.models import ToolResult
from aenv.runtime.answers import Answer, Request
from aenv.runtime.context import Context
from aenv.runtime.functions import Function, Raised
from aenv.runtime.loader import Loaded
from aenv.runtime.registry import Mark
from aenv.runtime.schema import Result

_CONNECTION = (b"content-length", b"connection", b"transfer-encoding")
"""Headers that belong to the connection, which is ours."""


class Wrapped:
    """The server, mounted. Enter it to start what the server needs running."""

    def __init__(self, loaded: Loaded) -> None:
        self._server = loaded.server
        self._loaded = loaded
        self._stack = AsyncExitStack()
        self.modern = int(version("mcp").split(".")[0]) >= 2
        """Whether it speaks 2026-07-28 itself."""

    async def start(self) -> None:
        for function in list(self._loaded.tools.values()):
            self._offer(function)
        for tool in await self._server.list_tools():
            name = tool.name
            self._loaded.tools.setdefault(name, ServerTool(self._server, tool))
        if hasattr(self._server, "http_app"):
            app = self._server.http_app(path="/mcp")
        else:
            app = self._server.streamable_http_app()
        await self._stack.enter_async_context(app.router.lifespan_context(app))
        self._app = app

    async def stop(self) -> None:
        await self._stack.aclose()

    def _offer(self, function: Function) -> None:
        async def call(**arguments: Any) -> Any:
            try:
                return await function.call(arguments, Context(name=function.name))
            except Raised as exc:
                raise exc.cause from None

        signature = inspect.signature(function.mark.function, eval_str=True)
        kept = [p for p in signature.parameters.values() if p.name != function.arguments.context]
        call.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in kept if p.annotation is not p.empty}
        call.__name__ = function.name
        call.__doc__ = function.description
        if hasattr(self._server, "http_app"):
            self._server.tool(call, name=function.name, description=function.description)
        else:
            self._server.add_tool(call, name=function.name, description=function.description)

    def handle(self, request: Request) -> Answer:
        """Let the server answer. It hears that its client left by being cancelled, where the revision says so."""
        legacy_call = request.method == "POST" and request.headers.get(b"mcp-protocol-version", b"") < b"2026"
        answer = Answer(None if legacy_call else 0)
        answer.transient = request.method == "GET"
        # Host and Origin were checked on the way in, by rules the server does not know.
        headers = [
            (name, value.strip())
            for name, value in request.raw_headers
            if name not in (b"host", b"origin", b"authorization")
        ]
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
            "headers": [*headers, (b"host", b"127.0.0.1:8081")],
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 8081),
        }
        answer.task = asyncio.create_task(self._run(scope, request.body, answer))
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


class ServerTool(Function):
    """A tool of the wrapped server, for the routes that are ours."""

    def __init__(self, server: Any, tool: Any) -> None:
        shown = (tool.to_mcp_tool() if hasattr(tool, "to_mcp_tool") else tool).model_dump(
            by_alias=True, exclude_none=True
        )
        self._server = server
        self.name = shown["name"]
        self.description = shown.get("description")
        options = {key: shown[key] for key in ("title", "annotations") if key in shown}
        self.mark = Mark("tool", self._run, self.name, {**options, "input_schema": shown["inputSchema"]})
        self.arguments = _Published(shown["inputSchema"])  # type: ignore[assignment]
        self.result = Result(self._run)
        self.result.schema = shown.get("outputSchema")
        self._context = None
        self._is_async = True
        self._function = self._run

    async def _run(self, **arguments: Any) -> ToolResult:
        found = await self._server.call_tool(self.name, arguments)
        if isinstance(found, tuple):  # mcp 1.x: content and structured content
            found, structured = found
        else:
            structured = getattr(found, "structured_content", None)
        content = [
            block.model_dump(mode="json", by_alias=True, exclude_none=True)
            for block in getattr(found, "content", found)
        ]
        return ToolResult(content=content, structured=structured, is_error=bool(getattr(found, "is_error", False)))


class _Published:
    """Arguments whose schema and validation belong to the wrapped server."""

    context = None

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema = schema

    def decode(self, given: Any, *, text: bool = False) -> dict[str, Any]:
        import msgspec

        if not isinstance(given, bytes):
            return dict(given)
        try:
            return msgspec.json.decode(given, type=dict[str, Any])
        except msgspec.DecodeError as exc:
            raise Invalid(f"the arguments are not a JSON object: {exc}") from None
