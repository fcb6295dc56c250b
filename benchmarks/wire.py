"""One ``tools/call`` of MCP 2026-07-28 as bytes: what the cheap clients send to either server."""

from __future__ import annotations

import http.client
import json

PROTOCOL = "2026-07-28"
HEADERS = {
    "Content-Type": "application/json",
    "Accept": "application/json, text/event-stream",
    "MCP-Protocol-Version": PROTOCOL,
    "Mcp-Method": "tools/call",
}
ARGUMENTS = {"a": 1, "b": 2}
EXPECTED = 3
MARK = b'"structuredContent":{"result":3}'
"""In every right answer."""


def headers(tool: str) -> dict[str, str]:
    return {**HEADERS, "Mcp-Name": tool}


def body(tool: str, arguments: dict[str, object]) -> bytes:
    meta = {
        "io.modelcontextprotocol/protocolVersion": PROTOCOL,
        "io.modelcontextprotocol/clientCapabilities": {},
        "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1"},
    }
    params = {"name": tool, "arguments": arguments, "_meta": meta}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    return json.dumps(message).encode()


def add(tool: str = "add") -> bytes:
    return body(tool, dict(ARGUMENTS))


def check(status: int, answer: bytes) -> None:
    """Raise unless this is the right answer to ``add``."""
    if status != 200 or MARK not in answer:
        raise RuntimeError(f"wrong answer (status {status}): {answer[:500]!r}")


def ask(connection: http.client.HTTPConnection, tool: str, message: bytes) -> tuple[int, bytes]:
    """One blocking exchange."""
    connection.request("POST", "/mcp", message, headers(tool))
    response = connection.getresponse()
    return response.status, response.read()
