"""A thin MCP client for tools: one self-contained POST a call, as revision 2026-07-28 has it."""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from aenv import __version__
from aenv.control import PLAIN
from aenv.errors import AEnvError, Invalid, NetworkError, from_wire
from aenv.http import Response
from aenv.models import NOT_JSON, ToolResult, to_json

PROTOCOL = "2026-07-28"
_HEADER_MISMATCH = -32020
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_META = {
    "io.modelcontextprotocol/protocolVersion": PROTOCOL,
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "aenv", "version": __version__},
}


class _Result(Struct, rename={"is_error": "isError", "structured": "structuredContent"}):
    content: list[dict[str, Any]] = []
    is_error: bool = False
    structured: Any = None
    tools: list[dict[str, Any]] = []


class _Reply(Struct):
    id: str | int | None = None
    result: _Result | UnsetType = UNSET
    error: dict[str, Any] | str | None = None
    method: str | None = None
    success: bool | None = None
    """Of the runtime's own envelope, in which ``error`` is a text."""


_decode = msgspec.json.Decoder(_Reply).decode


def header_text(text: str) -> str:
    """A value that fits in a header: as it is, or in base64."""
    if PLAIN.fullmatch(text) and not text.startswith("=?base64?"):
        return text
    return f"=?base64?{base64.b64encode(text.encode()).decode()}?="


class HeaderMismatch(AEnvError):
    """The server wants arguments mirrored in headers; the call did not run."""


def mirrored(tool: Mapping[str, Any]) -> dict[str, str]:
    """The arguments of a tool that a client repeats in headers, and in which."""
    properties = tool["inputSchema"].get("properties", {})
    return {
        name: f"Mcp-Param-{schema['x-mcp-header']}"
        for name, schema in properties.items()
        if isinstance(schema, dict) and _TOKEN.fullmatch(str(schema.get("x-mcp-header", "")))
    }


def mirror(names: Mapping[str, str], arguments: Mapping[str, Any]) -> bytes:
    """The header lines that repeat those arguments."""
    lines = []
    for name, header in names.items():
        if (value := arguments.get(name)) is not None:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            lines.append(f"{header}: {header_text(text)}\r\n")
    return "".join(lines).encode()


@functools.lru_cache(maxsize=1024)
def headers(method: str, name: str | None = None) -> bytes:
    """The header lines of a request."""
    lines = (
        "Content-Type: application/json\r\nAccept: application/json, text/event-stream\r\n"
        f"MCP-Protocol-Version: {PROTOCOL}\r\nMcp-Method: {method}\r\n"
    )
    return (lines if name is None else f"{lines}Mcp-Name: {header_text(name)}\r\n").encode()


def message(method: str, **params: Any) -> bytes:
    """The body of a request. Its id is always 1: each exchange has a connection to itself."""
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": _META}}
    try:
        return to_json(body)
    except NOT_JSON as exc:
        raise Invalid(f"the arguments cannot be sent: {exc}", hint="pass what JSON can carry") from exc


def tool_result(response: Response) -> ToolResult:
    """The result of a ``tools/call``. What is not one is the platform's failure, and raised."""
    result = _result(response)
    return ToolResult(content=result.content, is_error=result.is_error, structured=result.structured)


def tools(response: Response) -> list[dict[str, Any]]:
    """The tools of a ``tools/list``."""
    return _result(response).tools


def _result(response: Response) -> _Result:
    reply = _reply(response)
    if reply.result is not UNSET:
        return reply.result
    raise _failure(reply.error if isinstance(reply.error, dict) else {})


def _reply(response: Response) -> _Reply:
    try:
        if response.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            for event in response.body.replace(b"\r\n", b"\n").split(b"\n\n"):
                data = b"".join(line[5:] for line in event.split(b"\n") if line.startswith(b"data:"))
                if data.strip() and (reply := _decode(data)).method is None:
                    return reply
            raise NetworkError("the event stream ended without a result")
        reply = _decode(response.body)
        if reply.success is False:  # refused before it came to MCP
            raise from_wire({**msgspec.json.decode(response.body), "message": reply.error})
        return reply
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as exc:
        raise NetworkError(f"the answer (status {response.status}) is not MCP: {exc}") from exc


def _failure(error: dict[str, Any]) -> AEnvError:
    data = error.get("data")
    if isinstance(data, dict) and isinstance(data.get("aenv"), dict):
        return from_wire(data["aenv"])
    kind = HeaderMismatch if error.get("code") == _HEADER_MISMATCH else AEnvError
    return kind(f"MCP error {error.get('code')}: {error.get('message')}")
