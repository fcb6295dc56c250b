"""A cable to an API server that a test can cut, and mend again: what is said meanwhile is not heard."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path


class Cable:
    """Forwards connections, as long as it is whole."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._whole = True
        self._ends: set[asyncio.StreamWriter] = set()
        self.kubeconfig = Path()
        self.carried = 0
        """Connections so far."""

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._whole:
            writer.transport.abort()
            return
        self.carried += 1
        try:
            there, beyond = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.transport.abort()
            return
        self._ends |= {writer, beyond}
        if not self._whole:  # it was cut meanwhile
            self.cut()
        try:
            await asyncio.gather(_pour(reader, beyond), _pour(there, writer))
        finally:
            self._ends -= {writer, beyond}
            writer.transport.abort()
            beyond.transport.abort()

    def cut(self) -> None:
        self._whole = False
        for end in list(self._ends):
            end.transport.abort()

    def mend(self) -> None:
        self._whole = True


async def _pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def laid(kubeconfig: Path, port: int, folder: Path) -> AsyncIterator[Cable]:
    """A cable to the API server of a kubeconfig; its own kubeconfig leads through it."""
    cable = Cable(port)
    server = await asyncio.start_server(cable.carry, "127.0.0.1", 0)
    held = json.loads(kubeconfig.read_text())
    held["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    cable.kubeconfig = folder / "through-the-cable"
    cable.kubeconfig.write_text(json.dumps(held))
    try:
        yield cable
    finally:
        server.close()
        cable.cut()
