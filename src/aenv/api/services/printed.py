"""What the replicas of a service printed, as one text in which every line begins with the replica's name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

from aenv.api.lives import Lives
from aenv.errors import AEnvError

log = logging.getLogger("aenv.api")

MOST = 1000
"""Lines that wait to be read; a replica that prints more waits."""
_LOOK = 1.0
"""Seconds between two looks for replicas that have come."""


async def lines(
    lives: Lives,
    first: Sequence[str],
    members: Callable[[], Awaitable[Sequence[str] | None]],
    tail: int | None,
    follow: bool,
) -> AsyncGenerator[bytes, None]:
    """Lines of those replicas, the last ``tail`` of each; with ``follow``, as they come, also of replicas that come
    later, until ``members`` says that there is no such service."""
    if not follow:
        for id in first:
            async with aclosing(_lines(lives, id, tail, False)) as found:
                async for line in found:
                    yield line
        return
    ready: asyncio.Queue[bytes] = asyncio.Queue(MOST)
    tasks: dict[str, asyncio.Task[None]] = {}

    async def pass_on(id: str, tail: int | None) -> None:
        async with aclosing(_lines(lives, id, tail, True)) as found:
            async for line in found:
                await ready.put(line)

    async def watch() -> None:
        found: Sequence[str] | None = first
        last = tail
        while found is not None:
            for id in found:
                if id not in tasks:
                    tasks[id] = asyncio.create_task(pass_on(id, last))
            await asyncio.sleep(_LOOK)
            last = None  # of those that come now, all
            with suppress(AEnvError):
                found = await members()
        if left := [task for task in tasks.values() if not task.done()]:
            await asyncio.wait(left)

    watching = asyncio.create_task(watch())
    getting: asyncio.Future[bytes] | None = None
    try:
        while not (watching.done() and ready.empty()):
            getting = asyncio.ensure_future(ready.get())
            await asyncio.wait((getting, watching), return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                yield getting.result()
            else:
                getting.cancel()
    finally:
        every: list[asyncio.Future[Any]] = [watching, *tasks.values(), *filter(None, [getting])]
        for task in every:
            task.cancel()
        await asyncio.wait(every)


async def _lines(lives: Lives, id: str, tail: int | None, follow: bool) -> AsyncGenerator[bytes, None]:
    """Of one replica; nothing where nothing is kept."""
    try:
        kept = await lives.records.get(id)
        if kept is None:
            return
        hidden = await lives.hidden(kept.record)
        async with aclosing(lives.engine.logs(id, tail, follow)) as found:  # type: ignore[type-var]
            async for line in found:
                yield f"{id} | {line if hidden is None else hidden.text(line)}\n".encode()
    except AEnvError as exc:
        log.info("what %s printed could not be read: %s", id, exc)
