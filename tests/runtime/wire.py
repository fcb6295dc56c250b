"""Raw HTTP and MCP for tests: what goes over the socket is written here, not by our own client."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

from tests.support import Reply

META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
}


def send(
    port: int, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 30
) -> Reply:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, data, headers or {})
        response = connection.getresponse()
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def modern(
    port: int, method: str, params: dict[str, Any] | None = None, headers: dict[str, str] | None = None, id: Any = 1
) -> Reply:
    """A request of revision 2026-07-28."""
    params = {"_meta": META, **(params or {})}
    sent = {
        "MCP-Protocol-Version": "2026-07-28",
        "Mcp-Method": method,
        "Accept": "application/json, text/event-stream",
        **({"Mcp-Name": params["name"]} if "name" in params else {}),
        **(headers or {}),
    }
    return send(port, "POST", "/mcp", {"jsonrpc": "2.0", "id": id, "method": method, "params": params}, sent)


class Session:
    """A client of revision 2025-11-25."""

    def __init__(self, port: int, version: str = "2025-11-25") -> None:
        self.port = port
        reply = self.request("initialize", {"protocolVersion": version, "capabilities": {}, "clientInfo": {}}, id=0)
        self.id = reply.headers["mcp-session-id"]
        self.result = reply.json["result"]
        assert self.notify("notifications/initialized").status == 202

    @property
    def headers(self) -> dict[str, str]:
        found = {"Accept": "application/json, text/event-stream"}
        if hasattr(self, "id"):
            found |= {"Mcp-Session-Id": self.id, "MCP-Protocol-Version": self.result["protocolVersion"]}
        return found

    def request(self, method: str, params: dict[str, Any] | None = None, id: Any = 1) -> Reply:
        return send(self.port, "POST", "/mcp", _message(method, params, id), self.headers)

    def notify(self, method: str, params: dict[str, Any] | None = None) -> Reply:
        return send(
            self.port, "POST", "/mcp", {"jsonrpc": "2.0", "method": method, "params": params or {}}, self.headers
        )

    def raw(self, method: str, params: dict[str, Any] | None = None, id: Any = 1) -> socket.socket:
        """Send a request and leave the answer in the socket."""
        return send_raw(self.port, "POST", "/mcp", _message(method, params, id), self.headers)


def _message(method: str, params: dict[str, Any] | None, id: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "method": method, "params": params or {}}


def send_raw(port: int, method: str, path: str, body: Any, headers: dict[str, str]) -> socket.socket:
    data = json.dumps(body).encode() if body is not None else b""
    lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", f"Content-Length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    sock = socket.create_connection(("127.0.0.1", port), timeout=30)
    sock.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
    return sock


def lines(sock: socket.socket) -> Iterator[str]:
    """The lines of what comes out of a socket, until it ends."""
    with sock.makefile("rb") as file:
        for line in file:
            yield line.decode().rstrip("\r\n")
