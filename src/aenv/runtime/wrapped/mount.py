"""The author's server, mounted: requests for ``/mcp`` go to its own application, and our tools into it."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
from collections.abc import Callable
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import Any

import msgspec

from aenv.errors import AEnvError, StartFailed
from aenv.runtime import mounted
from aenv.runtime.answers import Answer, Request, Response
from aenv.runtime.functions import Function
from aenv.runtime.mcp.messages import NO_METHOD, PLATFORM, encode, error, is_modern
from aenv.runtime.service import Service
from aenv.runtime.wrapped.insider import Insider, ServerTool

_LIBRARY_CONTEXT = "aenv_library_context"
"""The parameter by which the server hands its own context to a tool of ours."""
_decode = msgspec.json.Decoder().decode


class Wrapped:
    """The server, mounted. Start it before its first request; closing ends streams, stopping ends everything."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._server = service.loaded.server
        self._stack = AsyncExitStack()
        self._streams: set[Answer] = set()
        self._offered = frozenset(service.loaded.tools)
        """Our own tools beside the server's."""
        self.modern = int(version("mcp").split(".")[0]) >= 2
        """Whether it speaks 2026-07-28 itself."""

    async def start(self) -> None:
        tools = self._service.loaded.tools
        theirs = {tool.name for tool in await self._guarded_tools()}
        for function in list(tools.values()):
            if function.name in theirs:
                raise StartFailed(
                    f"tool {function.name!r} is registered twice: {function.mark.place} and in the MCP server there",
                    hint="rename one, or give one a name: @register_tool(name=...)",
                )
            self._offer(function)
        self._app = self._mount()
        await self._stack.enter_async_context(self._app.router.lifespan_context(self._app))
        insider = Insider(self)
        for listed in await insider.tools():
            tools.setdefault(listed["name"], ServerTool(insider, listed))

    async def _guarded_tools(self) -> list[Any]:
        """The server's tools, made harmless to the sandbox when they call ``sys.exit``."""
        manager = getattr(self._server, "_tool_manager", None)
        tools = list(manager.list_tools() if manager is not None else await self._server.list_tools())
        for tool in tools:
            if hasattr(tool, "fn"):
                tool.fn = _guarded(tool.fn)
        return tools

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
                try:
                    result = await self._service.call_tool(function, arguments, context)
                except AEnvError as exc:  # the platform's failure, which no model may read as the tool's
                    raise _protocol_error(exc) from exc
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

    def leaves_to_us(self, request: Request) -> bool:
        """Whether our endpoint answers instead: single exchanges can go either way, sessions are the server's.

        Ours are the calls of our own tools, and all that an older server does not know. But a client that asks an
        older server what it speaks is to hear "sessions": only they reach everything it offers.
        """
        if not is_modern(request):
            return False
        method = request.header(b"mcp-method")
        if method == "tools/call" and request.header(b"mcp-name") in self._offered:
            return True
        return not self.modern and method != "server/discover"

    def handle(self, request: Request) -> Answer:
        """Let the server answer. It hears that its client left by being cancelled, where the revision says so."""
        legacy_call = request.method == "POST" and request.headers.get(b"mcp-protocol-version", b"") < b"2026"
        answer = Answer(None if legacy_call else 0)
        answer.transient = request.method == "GET"
        method = request.headers.get(b"mcp-method")
        if method == b"server/discover" and not self.modern:  # it would open a session for this, and then refuse
            answer.reply(Response(400, error(NO_METHOD, "Method not found: server/discover", None)))
            return answer
        answer.task = asyncio.create_task(mounted.ask(self._app, request, "/mcp", answer))
        if request.method == "GET" or method == b"subscriptions/listen":
            self._streams.add(answer)
            answer.task.add_done_callback(lambda _: self._streams.discard(answer))
        return answer


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return await function(*args, **kwargs)
            except (SystemExit, KeyboardInterrupt) as exc:
                raise RuntimeError(f"{type(exc).__name__}: {exc}") from None

    else:

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except (SystemExit, KeyboardInterrupt) as exc:
                raise RuntimeError(f"{type(exc).__name__}: {exc}") from None

    return guarded


def _protocol_error(exc: AEnvError) -> Exception:
    """A failure that the server's library sends as a JSON-RPC error."""
    library: Any = importlib.import_module("mcp.shared.exceptions")
    data = {"aenv": exc.to_wire()}
    if hasattr(library, "MCPError"):
        failed: Exception = library.MCPError(PLATFORM, str(exc), data)
        return failed
    from mcp.types import ErrorData

    older: Exception = library.McpError(ErrorData(code=PLATFORM, message=str(exc), data=data))
    return older


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
