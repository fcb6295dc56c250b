"""The official client of line 2.x, in the mode that the order names."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import journey
import mcp_types as types
from journey import Connect, Result, Trace
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

MODERN = "2026-07-28"


class Official2:
    def __init__(self, trace: Trace, mode: str) -> None:
        self._trace = trace
        self._mode = mode
        self._level: str | None = None
        self.logs: list[list[str]] = []
        self.changes = 0

    @asynccontextmanager
    async def connected(self, url: str, headers: dict[str, str]) -> AsyncIterator[Official2]:
        async with create_mcp_http_client(headers=headers) as http:
            http.event_hooks["response"].append(self._trace.note)
            self.client = Client(
                streamable_http_client(url, http_client=http),
                mode=self._mode,
                logging_callback=self._log,
                message_handler=self._message,
            )
            async with self.client:
                yield self

    async def _log(self, params: types.LoggingMessageNotificationParams) -> None:
        self.logs.append([params.level, str(params.data)])

    async def _message(self, message: Any) -> None:
        self.changes += isinstance(message, types.ToolListChangedNotification)

    @property
    def revision(self) -> str:
        return self.client.protocol_version

    @property
    def server(self) -> str:
        info = self.client.server_info
        return f"{info.name} {info.version}" if info else ""

    async def tools(self) -> dict[str, dict[str, Any]]:
        found = (await self.client.list_tools()).tools
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

        found = await self.client.call_tool(
            name,
            arguments,
            read_timeout_seconds=timeout,
            progress_callback=None if progress is None else heard,
            meta={"io.modelcontextprotocol/logLevel": self._level} if self._level else None,  # type: ignore[typeddict-unknown-key]
        )
        content = [block.model_dump(mode="json", by_alias=True, exclude_none=True) for block in found.content]
        return Result(content=content, structured=found.structured_content, error=found.is_error)

    async def set_level(self, level: Any) -> None:
        if self.revision == MODERN:
            self._level = level
            return
        with warnings.catch_warnings(action="ignore"):
            await self.client.set_logging_level(level)

    async def resources(self) -> list[str]:
        listed = [str(item.uri) for item in (await self.client.list_resources()).resources]
        templates = (await self.client.list_resource_templates()).resource_templates
        return listed + [item.uri_template for item in templates]

    async def read(self, uri: str) -> str:
        (found,) = (await self.client.read_resource(uri)).contents
        assert isinstance(found, types.TextResourceContents)
        return found.text

    async def prompts(self) -> list[str]:
        return [item.name for item in (await self.client.list_prompts()).prompts]

    async def prompt(self, name: str, arguments: dict[str, str]) -> str:
        (message,) = (await self.client.get_prompt(name, arguments)).messages
        assert isinstance(message.content, types.TextContent)
        return message.content.text

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        if self.revision != MODERN:
            await journey.until(lambda: 200 in self._trace.statuses("GET"))
            yield
            return
        async with self.client.listen(tools_list_changed=True) as subscription:

            async def follow() -> None:
                async for _ in subscription:
                    self.changes += 1

            following = asyncio.create_task(follow())
            try:
                yield
            finally:
                following.cancel()


def connect(order: dict[str, Any]) -> Connect:
    return lambda url, headers, trace: Official2(trace, order["mode"]).connected(url, headers)


if __name__ == "__main__":
    journey.main(connect)
