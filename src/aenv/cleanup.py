"""Work that must be done to its end, whoever is cancelled meanwhile; and several things that are had at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

log = logging.getLogger("aenv.cleanup")
T = TypeVar("T")


async def finish(work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` to its end. A cancellation that comes in between is raised afterwards, also when ``work`` fails:
    whoever cancels waits for nothing else."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is None:
        task.result()
        return
    failure = None if task.cancelled() else task.exception()
    if failure is not None:  # whoever cancelled does not look for it
        log.warning("what had to be done to its end failed, after its caller had left: %r", failure)
    raise cancelled from failure


@asynccontextmanager
async def together(contexts: Sequence[AbstractAsyncContextManager[T]]) -> AsyncIterator[list[T]]:
    """Enter all of these at the same time, and leave them so. When one cannot be entered, none is."""
    entering = [asyncio.ensure_future(context.__aenter__()) for context in contexts]
    try:
        yield list(await asyncio.gather(*entering))
    finally:
        await finish(_leave(contexts, entering))


async def _leave(contexts: Sequence[AbstractAsyncContextManager[T]], entering: Sequence[asyncio.Future[T]]) -> None:
    for task in entering:
        task.cancel()
    await asyncio.wait(entering)
    entered = [
        context
        for context, task in zip(contexts, entering, strict=True)
        if not task.cancelled() and task.exception() is None
    ]
    left = await asyncio.gather(*(context.__aexit__(None, None, None) for context in entered), return_exceptions=True)
    for failed in left:
        if isinstance(failed, BaseException):
            raise failed
