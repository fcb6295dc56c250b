"""What a node keeps of what a container of a pod printed."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from aenv.engines.kubernetes.api import Cluster
from aenv.errors import Invalid, NotFound

_MOST = 16 * 1024 * 1024
"""Bytes that are asked for at once."""


class Log:
    """That of one container."""

    def __init__(self, cluster: Cluster, namespace: str, pod: str, container: str) -> None:
        self._cluster, self._container = cluster, container
        self._path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"

    async def last(self, lines: int | None = None) -> bytes:
        query = {"container": self._container, "limitBytes": str(_MOST)}
        if lines is not None:
            query["tailLines"] = str(lines)
        try:
            return await self._cluster.fetch("GET", self._path, query=query)
        except Invalid as exc:  # it has not begun
            raise NotFound(exc.message) from exc

    async def follow(self) -> AsyncGenerator[bytes, None]:
        query = {"container": self._container, "follow": "true"}
        async with self._cluster.stream(self._path, query, patience=None) as answer:
            async for piece in answer:
                yield piece
