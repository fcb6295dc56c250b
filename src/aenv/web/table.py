"""Which endpoint a path means. A part that is written out goes before one in braces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from aenv.errors import AEnvError, Invalid, NotServed, nearest
from aenv.web.endpoints import Endpoint
from aenv.web.routes import Route


class WrongMethod(Invalid):
    """The path is served, but not like this."""

    status = 405

    def __init__(self, method: str, path: str, allowed: Sequence[str]) -> None:
        super().__init__(f"{method} is not served at {path[:200]!r}", hint=f"use {', '.join(allowed)}")
        self.allowed = allowed


class Match(NamedTuple):
    endpoint: Endpoint
    values: list[str]
    """What the path has where the template has braces."""


class _Node:
    __slots__ = ("any", "endpoints", "literals")

    def __init__(self) -> None:
        self.literals: dict[str, _Node] = {}
        self.any: _Node | None = None
        self.endpoints: dict[str, Endpoint] = {}


class Table:
    """The endpoints of a service by method and path."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.endpoints = [Endpoint(route) for route in routes]
        self._root = _Node()
        for endpoint in self.endpoints:
            node = self._root
            for part in endpoint.path:
                if part[0] == "{":
                    node.any = node = node.any or _Node()
                else:
                    node = node.literals.setdefault(part, _Node())
            for method, other in node.endpoints.items():
                if method == endpoint.route.method or other.path != endpoint.path:
                    raise TypeError(f"{endpoint.action} and {other.action} are at the same place")
            node.endpoints[endpoint.route.method] = endpoint

    def find(self, method: str, raw_path: bytes) -> Match | AEnvError:
        """The endpoint for a request, or what to answer once it is known that the client may ask at all."""
        try:
            parts = [unquote_to_bytes(part).decode() for part in raw_path[1:].removesuffix(b"/").split(b"/")]
        except UnicodeDecodeError:
            return Invalid("the path is not UTF-8")
        if parts == [""]:
            parts = []
        method = "GET" if method == "HEAD" else method
        allowed: list[str] = []
        for node, values in _leaves(self._root, parts, 0, []):
            if endpoint := node.endpoints.get(method):
                return Match(endpoint, values)
            allowed += node.endpoints
        path = "/" + "/".join(parts)
        if allowed:
            return WrongMethod(method, path, sorted({*allowed, *(["HEAD"] if "GET" in allowed else [])}))
        near = nearest(path[:200], {endpoint.route.path for endpoint in self.endpoints})
        return NotServed(
            f"nothing is served at {path[:200]!r}",
            hint=f"did you mean {near}?" if near else "/docs lists what is served",
        )


def _leaves(node: _Node, parts: list[str], depth: int, values: list[str]) -> Iterator[tuple[_Node, list[str]]]:
    if depth == len(parts):
        if node.endpoints:
            yield node, values
        return
    part = parts[depth]
    if literal := node.literals.get(part):
        yield from _leaves(literal, parts, depth + 1, values)
    if node.any is not None and part:
        yield from _leaves(node.any, parts, depth + 1, [*values, part])
