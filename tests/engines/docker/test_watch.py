"""Events of a daemon that never come, or only after it was gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from aenv import http
from aenv.engines.docker import watch
from aenv.engines.docker.daemon import Daemon
from aenv.errors import NetworkError
from aenv.models import State
from tests.engines.docker.lab import Harbour, over, probe


class Deaf:
    """A way to a daemon on which events are lost from some moment on, and nobody is told."""

    def __init__(self, daemon: str) -> None:
        self._daemon = daemon
        self._joined: set[asyncio.Task[None]] = set()
        self.lost = False

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._joined.add(task)
        there, back = await asyncio.open_unix_connection(self._daemon)
        listening = asyncio.Event()

        async def send() -> None:
            while piece := await reader.read(65536):
                if b"/events?" in piece:
                    listening.set()
                back.write(piece)
            back.close()

        async def receive() -> None:
            new = self.lost
            while piece := await there.read(65536):
                if new or not self.lost or not listening.is_set():
                    writer.write(piece)

        try:
            await asyncio.gather(send(), receive(), return_exceptions=True)
        except asyncio.CancelledError:
            return
        finally:
            writer.close()
            back.close()

    async def close(self) -> None:
        for task in self._joined:
            task.cancel()
        await asyncio.gather(*self._joined, return_exceptions=True)


class Restarted:
    """A daemon that is away at first, and then tells of an end that it caused itself."""

    shown = "a daemon"

    def __init__(self, refusals: int) -> None:
        self._words, self._refusals = 0, refusals

    async def greet(self) -> None:
        self._refusals -= 1
        if self._refusals >= 0:
            raise NetworkError("it does not answer")

    async def lines(self, method: str, path: str, **options: Any) -> AsyncIterator[dict[str, Any]]:
        self._words += 1
        if self._words == 1:
            raise NetworkError("it is gone")
        yield {"Action": "die", "Actor": {"ID": "one", "Attributes": {}}}
        await asyncio.Event().wait()


@pytest.mark.parametrize("refusals", [0, 1, 2])
async def test_what_happened_while_it_was_gone_is_looked_at_first(refusals: int) -> None:
    """Also when it was back before anybody asked."""
    heard: list[object] = []
    told = asyncio.Event()

    def tell(action: str, *_: object) -> None:
        heard.append(action)
        told.set()

    async def look(gone: bool) -> None:
        heard.append(gone)

    watching = watch.Watch(cast(Daemon, Restarted(refusals)), "label", tell, look)
    async with asyncio.timeout(30):
        await told.wait()
    await watching.close()
    assert heard == [True, "die"]


async def test_a_stream_that_falls_silent_is_opened_again(
    daemon: str, base_image: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_SILENCE", 1.0)
    deaf = Deaf(daemon.removeprefix("unix://"))
    server = await asyncio.start_unix_server(deaf.join, str(home / "deaf.sock"))
    harbour = Harbour(f"unix://{home}/deaf.sock", base_image)
    try:
        async with harbour.engine() as engine:
            await engine.create("one", probe())
            deaf.lost = True
            await harbour.daemon.ask("POST", f"/containers/aenv-{harbour.state}-one/kill")
            assert (await over(engine, "one")).state is State.FAILED
            await engine.delete("one")
    finally:
        await harbour.clear()
        server.close()
        await http.close()
        await deaf.close()
