"""Our gateway in front of one sandbox: ``python -m benchmarks.servers.gateway URL TOKEN``, which prints its port.

Ends with its standard input.
"""

import asyncio
import sys

import uvloop

from aenv.api.gateway import Gateway, Place
from aenv.auth.callers import Caller
from aenv.errors import NotFound, Unauthorized


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


async def main(url: str, token: str) -> None:
    gateway = Gateway(One(Place("one", url, "bench", token)), key=bytes(32))
    print(await gateway.listen(port=0), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await gateway.close(0)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2]))
