"""Work that must be done to its end, whoever is cancelled meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger("aenv.cleanup")


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
