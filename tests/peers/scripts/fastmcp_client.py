"""FastMCP's client: 3 as it is, 4 in the mode that the order names."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import journey
from fastmcp import Client
from fastmcp.client.messages import MessageHandler
from fastmcp.client.transports import StreamableHttpTransport
from journey import Connect, Result, Trace
from mcp.shared._httpx_utils import create_mcp_http_client


class FastMCPClient:
    def __init__(self, trace: Trace, options: dict[str, Any]) -> None:
        self._trace = trace
        self._options = options
        self._level: str | None = None
        self.logs: list[list[str]] = []
        self.changes = 0

    @asynccontextmanager
    async def connected(self, url: str, headers: dict[str, str]) -> AsyncIterator[FastMCPClient]:
        peer = self

        class Handler(MessageHandler):
            async def on_tool_list_changed(self, message: Any) -> None:
                peer.changes += 1

        def client(**options: Any) -> Any:
            kept = {key: value for key, value in options.items() if key in ("headers", "timeout", "auth")}
            made = create_mcp_http_client(**kept)
            made.event_hooks["response"].append(self._trace.note)
            return made

        transport = StreamableHttpTransport(url, headers=headers, httpx_client_factory=client)
        self.client = Client(transport, log_handler=self._log, message_handler=Handler(), **self._options)
        async with self.client:
            yield self

    async def _log(self, message: Any) -> None:
        data = message.data
        self.logs.append([message.level, str(data["msg"] if isinstance(data, dict) and "msg" in data else data)])

    @property
    def revision(self) -> str:
        session: Any = self.client.session
        if hasattr(session, "protocol_version"):
            return str(session.protocol_version)
        return str(self.client.initialize_result.protocolVersion)  # type: ignore[union-attr]

    @property
    def server(self) -> str:
        session: Any = self.client.session
        info = session.server_info if hasattr(session, "server_info") else self.client.initialize_result.serverInfo  # type: ignore[union-attr]
        return f"{info.name} {info.version}"

    async def tools(self) -> dict[str, dict[str, Any]]:
        found = await self.client.list_tools()
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

        meta = {"io.modelcontextprotocol/logLevel": self._level} if self._level else None
        found = await self.client.call_tool(
            name, arguments, timeout=timeout, progress_handler=heard, raise_on_error=False, meta=meta
        )
        content = [block.model_dump(mode="json", by_alias=True, exclude_none=True) for block in found.content]
        data = dataclasses.asdict(found.data) if dataclasses.is_dataclass(found.data) else found.data
        made = {} if data is None else {"data": data}
        return Result(content=content, structured=found.structured_content, error=found.is_error, **made)

    async def set_level(self, level: Any) -> None:
        if self.revision == "2026-07-28":
            self._level = level
            return
        with warnings.catch_warnings(action="ignore"):
            await self.client.set_logging_level(level)

    async def resources(self) -> list[str]:
        listed = [str(item.uri) for item in await self.client.list_resources()]
        templates: list[Any] = await self.client.list_resource_templates()
        return listed + [item.model_dump(by_alias=True)["uriTemplate"] for item in templates]

    async def read(self, uri: str) -> str:
        (found,) = await self.client.read_resource(uri)
        return str(found.text)  # type: ignore[union-attr]

    async def prompts(self) -> list[str]:
        return [item.name for item in await self.client.list_prompts()]

    async def prompt(self, name: str, arguments: dict[str, str]) -> str:
        (message,) = (await self.client.get_prompt(name, arguments)).messages
        return str(message.content.text)  # type: ignore[union-attr]

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        await journey.until(lambda: 200 in self._trace.statuses("GET"))
        yield


def connect(order: dict[str, Any]) -> Connect:
    options = {"mode": order["mode"]} if order["mode"] else {}
    return lambda url, headers, trace: FastMCPClient(trace, options).connected(url, headers)


if __name__ == "__main__":
    journey.main(connect)
