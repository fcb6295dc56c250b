"""Our gateway in front of one sandbox: ``python -m benchmarks.servers.gateway URL TOKEN``, which prints its port.

It is there as an instance, ``one``, and as a service with two replicas, ``both``. Ends with its standard input. With
``watched`` behind, every call is counted and is a line of JSON on standard error; with the URL of a collector, every
call is traced.
"""

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import uvloop

from aenv.api.gateway import Gateway, Place, Replicas
from aenv.api.observed import Observed
from aenv.auth.callers import Caller
from aenv.errors import NotFound, Unauthorized
from aenv.tracing import Tracer
from aenv.web.logs import Lines
from aenv.web.metrics import Metrics


class One:
    """A directory with one instance in it."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def known(self, id: str) -> Place | None:
        return self._place if id == self._place.id else None

    async def place(self, id: str) -> Place:
        raise NotFound("there is one instance here")

    async def caller(self, token: str) -> Caller:
        raise Unauthorized("there are no accounts here")

    def touched(self, id: str) -> None:
        pass


class Both:
    """A service whose replicas are the same sandbox, so that only the way there differs."""

    def __init__(self, url: str, token: str) -> None:
        places = (Place("first", url, "bench", token), Place("second", url, "bench", token))
        self._replicas = Replicas("both", "bench", token, places)

    def known(self, id: str) -> Replicas | None:
        return self._replicas if id == self._replicas.id else None

    async def find(self, id: str) -> Replicas:
        raise NotFound("there is one service here")


def observed() -> Observed:
    """Counts and writes as a server does, without the rest of one."""
    lives: Any = SimpleNamespace(entries={}, started=[], clock=None)
    store: Any = None
    return Observed(Metrics(), lives, store, lines=Lines(sys.stderr.fileno()))


async def main(url: str, token: str, how: str = "") -> None:
    gateway = Gateway(
        One(Place("one", url, "bench", token)),
        key=bytes(32),
        services=Both(url, token),
        watcher=observed() if how == "watched" else None,
        tracer=Tracer(how) if how.startswith("http") else None,
    )
    print(await gateway.listen(port=0), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await gateway.close(0)


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
