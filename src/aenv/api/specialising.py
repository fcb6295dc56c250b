"""What is asked of a warm sandbox: whether it still waits, and to become the instance that it was claimed for.

Where it is gone, or cannot become that one, it is ``Gone``: a new one can. What the author's own code refuses is
``StartFailed``, as it is for a sandbox that is made anew.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct

from aenv import http
from aenv.api.gateway.places import Place
from aenv.engines.base import Engine
from aenv.engines.specs import TTL
from aenv.errors import AEnvError, NetworkError, NotFound, SandboxError, StartFailed
from aenv.models import Sandbox, SandboxSpec, to_json
from aenv.runtime.warm import Told

log = logging.getLogger("aenv.api")

LONGER = 5.0
"""Seconds that a sandbox has, over those of a start, to say by itself why it failed."""
_LOOK = 10.0
"""Seconds in which one that waits must answer."""
_ENGINE = 30.0
"""Seconds in which an engine must answer."""
_AGAIN = 0.05
_ENDING = 5.0
"""Seconds in which an engine should notice the end of one that did not come up."""
_MOST = 4 * 1024 * 1024
_TAKEN, _NOT_YET = 409, 503
_OF_NO_USE = (200, 401, 403, 404, _TAKEN, _NOT_YET)


class Gone(Exception):
    """A warm sandbox that is not there, or of no use for what is wanted."""


class _Data(Struct):
    status: str = ""
    preloaded: bool = False
    late: list[str] = []
    phases: dict[str, float] = {}


class _Answer(Struct):
    code: str = ""
    error: str = ""
    hint: str | None = None
    data: _Data | None = None


class Waits(Struct, frozen=True):
    """A warm sandbox that waits."""

    preloaded: bool
    late: list[str]
    """Variables that would come too late for it."""


async def look(place: Place) -> Waits:
    """See that a sandbox is warm. ``Gone`` when it is not."""
    status, answer = await _ask(place, "GET", "/health", b"", _LOOK)
    data = answer.data or _Data()
    if status != 200 or data.status != "warm":
        raise Gone(f"it is not warm: it answered {status}, {data.status or answer.error or 'nothing'}")
    return Waits(data.preloaded, data.late)


async def become(place: Place, spec: SandboxSpec, *, again: bool, phases: dict[str, float]) -> None:
    """Make a warm sandbox an instance. ``again`` when it may have been told before; ``phases`` is told where the time
    went."""
    told = Told(
        environment_variables=spec.environment_variables,
        arguments=spec.arguments,
        seed=spec.seed,
        secrets=spec.secrets,
        startup_timeout=spec.startup_timeout,
    )
    patience = spec.startup_timeout + LONGER
    try:
        async with asyncio.timeout(patience):
            status, answer = await _ask(place, "POST", "/specialise", to_json(told), patience)
            while status in (_TAKEN, _NOT_YET) and again:
                await asyncio.sleep(_AGAIN)
                status, answer = await _ask(place, "GET", "/health", b"", patience)
    except TimeoutError:
        raise StartFailed(f"it was not ready within {spec.startup_timeout:g} s") from None
    data = answer.data or _Data()
    phases |= data.phases
    if status == 200 and data.status != "warm":
        return
    if status in _OF_NO_USE or answer.code in ("", "sandbox_lost"):
        raise Gone(answer.error or f"it answered {status} {data.status}")
    raise StartFailed(answer.error, hint=answer.hint)


async def specialised(
    engine: Engine, id: str, spec: SandboxSpec, place: Place | None, *, token: str, phases: dict[str, float]
) -> Sandbox | None:
    """Make a warm sandbox an instance; None when it is gone, and its id can be used again. ``place`` is None when a
    server that is gone took it, and may have told it."""
    living = asyncio.create_task(_let_live(engine, id, spec))
    living.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        if spec.secrets:
            await living  # it prints nothing of them before the engine knows them
        where = place or Place(id, (await living).url, spec.owner or "", token)
        await become(where, spec, again=place is None, phases=phases)
        return await living
    except Gone as exc:
        log.info("%s was warm, and is of no use (%s): a new one is made", id, exc)
        await _deleted(engine, id)
        return None
    except StartFailed:
        await _ended(engine, id)
        raise
    finally:
        living.cancel()


async def _let_live(engine: Engine, id: str, spec: SandboxSpec) -> Sandbox:
    """Let it live as long as what it becomes, with its secrets. ``Gone`` when it does not."""
    variables = spec.environment_variables
    try:
        async with asyncio.timeout(_ENGINE):
            if secrets := {name: variables[name] for name in spec.secrets if name in variables}:
                await engine.hide(id, secrets)
            return await engine.update(id, ttl=spec.ttl or TTL)
    except (NotFound, SandboxError, TimeoutError) as exc:
        raise Gone(str(exc) or "the engine did not answer") from exc


async def _deleted(engine: Engine, id: str) -> None:
    """End what is left of it."""
    try:
        async with asyncio.timeout(_ENGINE):
            await engine.delete(id)
    except TimeoutError:
        raise StartFailed(f"the engine did not end the warm sandbox in the place of {id}") from None


async def _ended(engine: Engine, id: str) -> None:
    """Wait until an engine has noticed that a sandbox is over, so that it keeps what it printed; not for long."""
    with suppress(AEnvError, TimeoutError):
        async with asyncio.timeout(_ENDING):
            while not (await engine.get(id)).state.over:  # noqa: ASYNC110
                await asyncio.sleep(_AGAIN)


async def _ask(place: Place, method: str, path: str, body: bytes, timeout: float) -> tuple[int, _Answer]:
    headers = b"Content-Type: application/json\r\nAuthorization: Bearer %b\r\n" % place.token.encode()
    try:
        async with asyncio.timeout(timeout):
            response = await http.request(method, place.url, path, headers=headers, body=body, retries=0, most=_MOST)
    except NetworkError as exc:
        raise Gone(exc.message) from exc
    return response.status, _decoded(response.body)


def _decoded(body: bytes) -> _Answer:
    try:
        found: Any = msgspec.json.decode(body)
        return msgspec.convert(found, _Answer, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Answer()
