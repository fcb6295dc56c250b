"""An MCP server as a project: a command that the sandbox runs, or an address that it connects to.

A session is a task's own, from its opening to its end, and so is the command's process. What the server answers, also
that a tool failed, is the tool's answer. A server that is gone or is not the one that was added is a platform failure.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TextIO

import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CONNECTION_CLOSED, PARSE_ERROR, CallToolResult
from pydantic import ValidationError

from aenv import config
from aenv.errors import AEnvError, Invalid, NetworkError, SandboxLost
from aenv.integrations import wrapping
from aenv.integrations.wrapping import Found
from aenv.models import ToolResult
from aenv.runtime.context import Context
from aenv.runtime.registry import (
    register_foreign,
    register_function,
    register_health,
    register_reset,
    register_setup,
    register_teardown,
)

Source = str | Sequence[str]
"""The address of a server, or the words of a command."""
PATIENCE = 120.0
"""Seconds for a server to say what it offers: some are downloaded first."""
MOST_ANSWER = 16 * 1024 * 1024
"""Bytes of one message of a server elsewhere."""
_PYTHON = ("python", "python3")
"""The interpreter of the project, which has what the project requires."""
_MOST_TOOLS = 1_000
_MEDIA_TYPES = ("application/json", "text/event-stream")
"""What a server over HTTP answers in."""
_SHOWN = 2_000
"""Characters of what a command complains of."""


def serve(source: Source, stored: Path, *, bearer: str | None = None) -> Server:
    """Offer the tools in ``stored``, of the server at ``source``. ``bearer`` names the secret with its token."""
    server = Server(source, wrapping.read_stored(stored), bearer)
    for listed in server.listed.values():
        register_foreign(listed, server.runner(listed["name"]))
    register_setup(server.start)
    register_teardown(server.stop)
    register_reset(server.restart)
    register_health(server.health)
    if server.offers("resources"):
        register_function(name="mcp_resources")(server.resources)
        register_function(name="mcp_resource")(server.resource)
    if server.offers("prompts"):
        register_function(name="mcp_prompts")(server.prompts)
        register_function(name="mcp_prompt")(server.prompt)
    return server


class Server:
    """The server of an instance, started with it and anew by a reset. A call waits until it is there."""

    def __init__(self, source: Source, stored: dict[str, Any], bearer: str | None = None) -> None:
        self.listed: dict[str, dict[str, Any]] = tools_of(stored)
        """Its tools, as MCP lists them."""
        self._source = source
        self._bearer = bearer
        self._offered = stored.get("capabilities", {})
        self._cwd: Path | None = None
        self._session: Session | None = None

    @property
    def tools(self) -> tuple[str, ...]:
        """What its tools are called."""
        return tuple(self.listed)

    def offers(self, what: str) -> bool:
        return self._offered.get(what) is not None

    async def start(self, ctx: Context) -> None:
        """Begin a session. Whether it comes about is told by whoever uses it: an instance may be without a network."""
        self._cwd = ctx.working_directory
        self._begin()

    async def stop(self) -> None:
        """End the session, and the command with it."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def restart(self) -> None:
        """Begin anew, with a server that knows nothing of before."""
        await self.stop()
        await self._begin().client()

    async def health(self) -> dict[str, Any]:
        """Whether the server is there, as far as its calls have told."""
        lost = self._session.lost if self._session is not None else None
        return {"status": "unhealthy", "reason": lost} if lost else {"status": "healthy"}

    async def call(
        self, name: str, arguments: dict[str, Any] | None = None, context: Context | None = None
    ) -> ToolResult:
        """What a tool of the server answers, also one that is not offered. Its progress goes to that of ``context``."""
        session = self._open()

        async def tell(progress: float, total: float | None, message: str | None) -> None:
            if context is not None:
                context.progress(progress, total, message)

        client = await session.client()
        try:
            found = await session.asked(client.call_tool(name, arguments or {}, progress_callback=tell))
        except MCPError as exc:
            return ToolResult(content=[{"type": "text", "text": exc.message}], is_error=True)
        return _result(found)

    def runner(self, name: str) -> Any:
        async def run(arguments: dict[str, Any], context: Context) -> ToolResult:
            return await self.call(name, arguments, context)

        return run

    async def resources(self) -> list[dict[str, Any]]:
        """The server's resources."""
        return [one async for one in self._paged("list_resources", "resources")]

    async def resource(self, uri: str) -> dict[str, Any]:
        """One of them, read."""
        return await self._asked("read_resource", uri)

    async def prompts(self) -> list[dict[str, Any]]:
        """The server's prompts."""
        return [one async for one in self._paged("list_prompts", "prompts")]

    async def prompt(self, name: str, arguments: dict[str, str] | None = None) -> dict[str, Any]:
        """One of them, with its arguments filled in."""
        return await self._asked("get_prompt", name, arguments)

    async def _paged(self, method: str, field: str) -> AsyncIterator[dict[str, Any]]:
        cursor = None
        while True:
            page = await self._asked(method, cursor=cursor)
            for one in page[field]:
                yield one
            if not (cursor := page.get("nextCursor")):
                return

    async def _asked(self, method: str, *given: Any, **named: Any) -> dict[str, Any]:
        session = self._open()
        client = await session.client()
        try:
            return _plain(await session.asked(getattr(client, method)(*given, **named)))
        except MCPError as exc:
            raise Invalid(f"the MCP server refused: {exc.message}") from exc

    def _begin(self) -> Session:
        self._session = Session(self._source, self.listed, self._bearer, self._cwd)
        return self._session

    def _open(self) -> Session:
        if self._session is None:
            raise SandboxLost("the MCP server was not started, or is stopped")
        return self._session


class Session:
    """One session with a server, and the task that holds it."""

    def __init__(self, source: Source, wanted: dict[str, dict[str, Any]], bearer: str | None, cwd: Path | None) -> None:
        self.lost: str | None = None
        """Why there is no server any more, once there was one."""
        self._source = source
        self._wanted = wanted
        self._bearer = bearer
        self._cwd = cwd
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._holding = asyncio.create_task(self._hold())

    async def client(self) -> Client:
        """The client, once the server has said what it offers, and that is what it was."""
        if self.lost:
            raise SandboxLost(self.lost)
        return await asyncio.shield(self._client)

    async def asked(self, question: Any) -> Any:
        """An answer of the server's. ``MCPError`` is one, too, as long as the server is there."""
        asking = asyncio.ensure_future(question)
        try:
            await asyncio.wait({asking, self._holding}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait({asking})
        try:
            if not self._holding.done() or not asking.cancelled():
                return asking.result()
        except MCPError as exc:
            if exc.code not in (CONNECTION_CLOSED, PARSE_ERROR) and self.lost is None:
                raise
            self.lost = self.lost or f"{_named(self._source)} is gone: {exc.message}"[:_SHOWN]
        except ValidationError as exc:
            self.lost = self.lost or f"{_named(self._source)} answered what is no MCP: {exc}"[:_SHOWN]
        except httpx2.HTTPError as exc:
            self.lost = self.lost or f"{_named(self._source)} is gone: {exc!r}"
        raise SandboxLost(self.lost or f"{_named(self._source)} is gone")

    async def close(self) -> None:
        """End it. The command has some seconds to end by itself, and is killed then."""
        self._holding.cancel()
        await asyncio.wait({self._holding})

    async def _hold(self) -> None:
        try:
            async with connected(self._source, self._bearer, told=self._refused, cwd=self._cwd) as client:
                try:
                    async with asyncio.timeout(PATIENCE):
                        self._compare({one["name"]: one for one in await _tools(client)})
                except TimeoutError:
                    raise SandboxLost(f"{_named(self._source)} does not answer within {PATIENCE:g} s") from None
                self._client.set_result(client)
                await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self._give_up(SandboxLost(f"{_named(self._source)} was stopped"))
            raise
        except Exception as exc:
            self._give_up(_failure(self._source, exc))

    def _give_up(self, why: AEnvError) -> None:
        if self._client.done():
            self.lost = self.lost or str(why)
        else:
            self._client.set_exception(SandboxLost(str(why), hint=why.hint))
            self._client.exception()  # told to whoever calls, and to nobody where nobody does

    async def _refused(self, response: httpx2.Response) -> None:
        """Remember an answer that is none of MCP's. 400 is what a server may say of the call itself."""
        if response.request.method != "POST" or not self._client.done():
            return
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if response.status_code > 400:
            self.lost = f"{_named(self._source)} answered with status {response.status_code}"
        elif response.status_code == 200 and kind not in _MEDIA_TYPES:  # of a proxy before it, such as a page to log in
            self.lost = f"{_named(self._source)} answered with {kind or 'nothing'}, which is no MCP"

    def _compare(self, found: dict[str, dict[str, Any]]) -> None:
        gone = sorted(self._wanted.keys() - found.keys())
        changed = sorted(
            name
            for name, listed in self._wanted.items()
            if name in found and found[name]["inputSchema"] != listed["inputSchema"]
        )
        if gone or changed:
            parts = [f"{', '.join(names)} {what}" for names, what in ((gone, "gone"), (changed, "changed")) if names]
            raise SandboxLost(
                f"{_named(self._source)} is not the one that was added: {'; '.join(parts)}",
                hint="ask for the version that was added, or add it anew with --update and publish that",
            )


def look(source: Source, *, bearer: str | None = None, cwd: Path | None = None) -> Found:
    """Ask a server what it is and offers. A command is carried out in ``cwd``."""
    return asyncio.run(_look(source, bearer, cwd))


async def _look(source: Source, bearer: str | None, cwd: Path | None) -> Found:
    allow = (wrapping.host_of(source),) if isinstance(source, str) else ()
    with tempfile.TemporaryFile("w+") as complaints:
        try:
            async with asyncio.timeout(PATIENCE), connected(source, bearer, cwd=cwd, errors=complaints) as client:
                tools = await _tools(client)
                about = client.server_info
                stored: dict[str, Any] = {
                    "source": source if isinstance(source, str) else list(source),
                    "server": _plain(about) if about is not None else {},
                    "protocol": client.protocol_version,
                    "instructions": client.instructions or "",
                    "capabilities": _plain(client.server_capabilities),
                    "tools": tools,
                }
        except Exception as exc:
            failed = _failure(source, exc)
            complaints.seek(0)
            said = complaints.read()[-_SHOWN:].strip()
            hint = (
                failed.hint
                or "a command is one that serves MCP on its standard input and output; a URL ends in /mcp as a rule"
            )
            raise NetworkError("\n".join(filter(None, (str(failed), said))), hint=hint) from exc
    name = stored["server"].get("name", "")
    words = {
        "source": wrapping.python(stored["source"]),
        "options": wrapping.option("bearer", bearer),
        "tool": wrapping.python(next(iter(tools_of(stored)), "")),
    }
    return Found(
        name=wrapping.usable_name(name.rpartition("/")[2]),
        about=stored["server"].get("title") or name or _named(source),
        stored=stored,
        tools=tools_of(stored),
        words=words,
        allow=allow,
        secrets=(bearer,) if bearer else (),
    )


def tools_of(stored: dict[str, Any]) -> dict[str, Any]:
    """The tools that are stored, each with what it is made of."""
    return {one["name"]: one for one in stored.get("tools", ())}


@asynccontextmanager
async def connected(
    source: Source,
    bearer: str | None = None,
    *,
    told: Any = None,
    cwd: Path | None = None,
    errors: TextIO | None = None,
) -> AsyncIterator[Client]:
    """A client of the server, which lives as long as the block. ``told`` hears of each answer over HTTP."""
    if not isinstance(source, str):
        program, *words = source
        program = sys.executable if program in _PYTHON else program
        parameters = StdioServerParameters(command=program, args=words, env=config.environment(), cwd=cwd)
        async with Client(stdio_client(parameters, errlog=errors or sys.stderr), cache=None) as client:
            yield client
        return
    limits = httpx2.Timeout(None, connect=wrapping.CONNECT)
    hooks = {"response": [told] if told is not None else []}
    async with httpx2.AsyncClient(timeout=limits, headers=wrapping.bearer(bearer), event_hooks=hooks) as http:
        async with Client(
            streamable_http_client(source, http_client=http, max_sse_event_size=MOST_ANSWER), cache=None
        ) as client:
            yield client


async def _tools(client: Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    cursor = None
    while len(found) <= _MOST_TOOLS:
        page = await client.list_tools(cursor=cursor)
        found += [_plain(tool) for tool in page.tools]
        if not (cursor := page.next_cursor):
            return found
    raise Invalid(f"it offers more than {_MOST_TOOLS} tools")


def _plain(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = model.model_dump(mode="json", by_alias=True, exclude_none=True)
    return found


def _result(found: CallToolResult) -> ToolResult:
    return ToolResult(
        content=[_plain(block) for block in found.content],
        structured=found.structured_content,
        is_error=bool(found.is_error),
    )


def _failure(source: Source, exc: BaseException) -> AEnvError:
    """Why there is no server, in a sentence."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    if isinstance(exc, AEnvError):
        return exc
    if isinstance(exc, FileNotFoundError):
        return SandboxLost(
            f"there is no program {source[0]!r}", hint="install it where the sandbox finds it, or give its whole path"
        )
    if isinstance(exc, TimeoutError):
        return SandboxLost(f"{_named(source)} does not answer within {PATIENCE:g} s")
    if isinstance(exc, httpx2.ConnectError):
        return SandboxLost(f"{_named(source)} cannot be reached: {exc}")
    said = exc.message if isinstance(exc, MCPError) else f"{type(exc).__name__}: {exc}"
    return SandboxLost(f"{_named(source)} is no MCP server: {said}"[:_SHOWN])


def _named(source: Source) -> str:
    return f"the server {source}" if isinstance(source, str) else f"the server '{shlex.join(source)}'"
