"""The official client of line 1.x."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import journey
from journey import Connect, Result, Trace
from mcp import ClientSession, types
from mcp.client.streamable_http import streamablehttp_client
from mcp.shared._httpx_utils import create_mcp_http_client
from pydantic import AnyUrl


class Official1:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.logs: list[list[str]] = []
        self.changes = 0

    @asynccontextmanager
    async def connected(self, url: str, headers: dict[str, str]) -> AsyncIterator[Official1]:
        def client(**options: Any) -> Any:
            made = create_mcp_http_client(**options)
            made.event_hooks["response"].append(self._trace.note)
            return made

        async with streamablehttp_client(url, headers=headers, httpx_client_factory=client) as (read, write, _):
            async with ClientSession(read, write, logging_callback=self._log, message_handler=self._message) as session:
                self.session = session
                self._initialized = await session.initialize()
                yield self

    async def _log(self, params: types.LoggingMessageNotificationParams) -> None:
        self.logs.append([params.level, str(params.data)])

    async def _message(self, message: Any) -> None:
        if isinstance(message, types.ServerNotification):
            self.changes += isinstance(message.root, types.ToolListChangedNotification)

    @property
    def revision(self) -> str:
        return str(self._initialized.protocolVersion)

    @property
    def server(self) -> str:
        info = self._initialized.serverInfo
        return f"{info.name} {info.version}"

    async def tools(self) -> dict[str, dict[str, Any]]:
        found = (await self.session.list_tools()).tools
        return {tool.name: tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in found}

    async def call(
        self,
        name: str,
        arguments: dict[str, Any],
        progress: list[list[Any]] | None = None,
        timeout: float | None = None,
    ) -> Result:
        async def heard(done: float, total: float | None, message: str | None) -> None:
            if progress is not None:
                progress.append([done, total, message])

        limit = timedelta(seconds=timeout) if timeout else None
        callback = None if progress is None else heard
        found = await self.session.call_tool(name, arguments, limit, callback)
        content = [block.model_dump(mode="json", by_alias=True, exclude_none=True) for block in found.content]
        return Result(content=content, structured=found.structuredContent, error=found.isError)

    async def set_level(self, level: Any) -> None:
        await self.session.set_logging_level(level)

    async def resources(self) -> list[str]:
        listed = [str(item.uri) for item in (await self.session.list_resources()).resources]
        return listed + [item.uriTemplate for item in (await self.session.list_resource_templates()).resourceTemplates]

    async def read(self, uri: str) -> str:
        (found,) = (await self.session.read_resource(AnyUrl(uri))).contents
        assert isinstance(found, types.TextResourceContents)
        return found.text

    async def prompts(self) -> list[str]:
        return [item.name for item in (await self.session.list_prompts()).prompts]

    async def prompt(self, name: str, arguments: dict[str, str]) -> str:
        (message,) = (await self.session.get_prompt(name, arguments)).messages
        assert isinstance(message.content, types.TextContent)
        return message.content.text

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        await journey.until(lambda: 200 in self._trace.statuses("GET"))
        yield


def connect(order: dict[str, Any]) -> Connect:
    return lambda url, headers, trace: Official1(trace).connected(url, headers)


if __name__ == "__main__":
    journey.main(connect)
