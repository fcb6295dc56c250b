"""Work that must be done to its end, whoever is cancelled meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


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
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    task.result()
