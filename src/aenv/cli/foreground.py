"""An instance that lives as long as a command: asked for, awaited with its reasons, held by a lease, and ended."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from aenv.cleanup import finish
from aenv.cli.output import FAILED, label, say
from aenv.cli.platform import PATIENCE
from aenv.client.leases import Leases
from aenv.errors import AEnvError, NetworkError, NotFound, RateLimited, StartFailed
from aenv.models import State
from aenv.wire import LEASE

if TYPE_CHECKING:
    from aenv.client.api import ApiClient
    from aenv.wire import Instance, InstanceRequest

LOOK_EVERY = 2.0
"""Seconds between two looks at an instance that runs."""
LONGEST_START = 3600.0
"""Seconds after which nobody believes a platform any more that says of an instance that it is starting."""
_OVER = frozenset(state for state in State if state.over)
_PAUSE = 0.1
"""For platforms that answer at once, whatever is preferred."""
ENDING = 15.0
"""Seconds that the end of an instance may take; after them, its lease ends it."""


async def hold(api: ApiClient, request: InstanceRequest, running: Callable[[Instance], None], keep_alive: bool) -> int:
    """Make an instance and tell ``running`` of it. Unless it is kept alive, hold it until it or this command ends.

    However this ends, an instance that is not kept alive is ended with it: by a request, else by its lease.
    """
    if not keep_alive:
        request = msgspec.structs.replace(request, lease=LEASE)
    made = await _asked(api, request)
    leases = Leases()
    leases.hold(made.id, api)
    kept = False
    try:
        found = await _running(api, made, (request.startup_timeout or LONGEST_START) + ENDING)
        if keep_alive:
            kept = True
            running(found)
            return 0
        stop = _asked_to_stop()
        running(found)
        code = await _until_over(api, found, stop)
        kept = not stop.is_set()  # it ended by itself
        return code
    finally:
        leases.drop(made.id)
        if not kept:
            await finish(_ended(api, made.id))


async def _asked(api: ApiClient, request: InstanceRequest) -> Instance:
    """The instance as soon as it has an id. Who is interrupted before that ends it none the less."""
    asking = asyncio.ensure_future(api.create(request, wait=0, key=uuid.uuid4().hex))
    try:
        return await asyncio.shield(asking)
    except asyncio.CancelledError:
        await finish(_undone(api, asking))
        raise


async def _undone(api: ApiClient, asking: asyncio.Future[Instance]) -> None:
    with suppress(AEnvError, TimeoutError):
        async with asyncio.timeout(ENDING):
            made = await asking
        await _ended(api, made.id)


async def _running(api: ApiClient, found: Instance, patience: float) -> Instance:
    """Wait until it runs; what it is waiting for is said when that changes, and now and then."""
    begun = time.monotonic()
    said, mark = "", float(PATIENCE[0])
    while found.status != State.RUNNING:
        waited = time.monotonic() - begun
        if found.status in _OVER:
            raise StartFailed(f"{found.id} did not start: {found.reason or found.status}")
        if waited > patience:
            raise StartFailed(f"{found.id} is not ready after {patience:g} s: {found.reason or found.status}")
        reason = found.reason or found.status.lower()
        if waited >= mark or (said and reason != said):
            say(f"waiting for {found.id}: {reason} ... {waited:.0f} s")
            said, mark = reason, waited + PATIENCE[1]
        found = await api.get(found.id, wait=PATIENCE[0])
        await asyncio.sleep(_PAUSE if found.status != State.RUNNING else 0)
    return found


def _asked_to_stop() -> asyncio.Event:
    """Set by the signals with which people end a command that runs until they do."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def _until_over(api: ApiClient, found: Instance, stop: asyncio.Event) -> int:
    """Wait until it is to stop, or for the instance's end; the exit code."""
    lost = False
    while not stop.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOOK_EVERY)
            break
        try:
            found = await api.get(found.id)
            lost = False
        except NotFound:
            say(f"{found.id} is gone")
            return 0
        except (NetworkError, RateLimited) as exc:
            if not lost:
                label("warning", f"{exc.message}; it is asked again")
            lost = True
            continue
        if found.status in _OVER:
            say(f"{found.id} ended: {found.reason or found.status.lower()}")
            return 0 if found.status == State.TERMINATED else FAILED
    return 0


async def _ended(api: ApiClient, id: str) -> None:
    try:
        async with asyncio.timeout(ENDING):
            await api.delete(id)
        say(f"ended {id}")
    except NotFound:
        pass
    except (AEnvError, TimeoutError) as exc:
        why = exc.message if isinstance(exc, AEnvError) else "the platform does not answer"
        label("warning", f"{id} was not ended: {why}; its lease or its TTL ends it")
