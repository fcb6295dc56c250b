"""Instances of a platform: where ``Environment`` gets its sandboxes in remote mode, and what keeps them alive."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

from aenv import http
from aenv.cleanup import finish
from aenv.client.api import ApiClient
from aenv.client.leases import leases
from aenv.client.services import ServicesClient
from aenv.control import key_for, plain_header, platform_url
from aenv.errors import AEnvError, Conflict, Invalid, NetworkError, NotFound, SandboxLost, StartFailed, Unsupported
from aenv.models import Sandbox, SandboxSpec, State, parse_duration, told
from aenv.project.images import image_of
from aenv.wire import LEASE, Expose, Instance, InstanceRequest

log = logging.getLogger("aenv.environment")
SLICE = 20.0
"""Seconds that one question waits for an instance to run; then it is asked again."""
MARGIN = 10.0
"""Seconds that the answer to a request for an instance may take longer than its start, and that the platform has, over
those of a start, to say by itself why it failed."""
DEPARTURE = 15.0
"""Seconds that giving an instance back may take; after that, its lease ends it."""
_POLL = 0.1
_AT_ONCE = 16
"""Instances that are ended at the same time."""
_MEETING = 2.0
"""Seconds that a sandbox on this machine may take to say which it is."""


class Platform:
    """A provision that gets its sandboxes from a platform, or the one that is called ``instance_id`` there, or the
    service that is called ``service_id``."""

    def __init__(
        self,
        url: str | None,
        key: str | None = None,
        *,
        retries: int = 10,
        instance_id: str | None = None,
        service_id: str | None = None,
    ) -> None:
        if instance_id is not None and service_id is not None:
            raise Invalid("instance_id and service_id are both given", hint="give one of the two")
        where = platform_url(url)
        self._key = key_for(where, key)
        self._api = ApiClient(where, self._key, retries=retries)
        self._services = ServicesClient(where, self._key, retries=retries)
        self._instance_id = instance_id
        self._service_id = service_id

    def __call__(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        if self._service_id is not None:
            return self._served(self._service_id, spec)
        return self._made(spec) if self._instance_id is None else self._found(self._instance_id, spec)

    # What ``provision.Control`` has

    async def extend(self, id: str, ttl: float) -> None:
        if self._service_id is not None:
            raise Unsupported("a service lives until it is deleted; it has no time to extend")
        await self._api.extend(id, ttl)

    def logs(self, id: str, tail: int | None = None, follow: bool = False) -> AsyncGenerator[str, None]:
        return (self._api if self._service_id is None else self._services).logs(id, tail, follow)

    async def reason(self, id: str, patience: float) -> str:
        """Why an instance is no more, as far as the platform knows, or learns within so many seconds."""
        if self._service_id is not None:
            return await self._services.reason(id)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        while True:
            try:
                found = await self._api.get(id, retries=0)
            except NotFound:
                return "the platform has no such instance any more: it was deleted, or its time was over"
            if _over(found) or loop.time() >= deadline:
                return _why(found) if _over(found) else ""
            await asyncio.sleep(_POLL)

    async def expose(self, id: str, port: int, ttl: float | None) -> str:
        if self._service_id is not None:
            raise Unsupported("ports of a service are not exposed", hint="expose a port of an instance")
        return (await self._api.expose(id, Expose(port=port, ttl=ttl))).url

    async def end_all(self, labels: Mapping[str, str]) -> int:
        """End every instance with these labels; how many there were. For what a killed program left: its leases would
        end it, too, but later."""
        ids: list[str] = []
        living = [State.PENDING, State.CREATING, State.RUNNING]
        total = 1
        while len(ids) < total:
            found, total = await self._api.list(labels=labels, status=living, offset=len(ids))
            ids += [instance.id for instance in found]
            if not found:
                break
        turn = asyncio.Semaphore(_AT_ONCE)

        async def end(id: str) -> None:
            try:
                async with turn:
                    await self._api.delete(id)
            except AEnvError as exc:
                log.warning("[ENV:%s] could not be ended, and ends with its lease: %s", id, exc)

        await asyncio.gather(*map(end, ids))
        return len(ids)

    @asynccontextmanager
    async def _served(self, id: str, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        yield await self._services.sandbox(id, spec, self._key)

    # Instances

    @asynccontextmanager
    async def _found(self, id: str, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        instance = await self._api.get(id)
        if _over(instance):
            raise SandboxLost(f"instance {id} is {instance.status}: {_why(instance)}")
        deadline = asyncio.get_running_loop().time() + spec.startup_timeout
        yield await self._sandbox(await self._running(instance, deadline, spec.startup_timeout), attached=True)

    @asynccontextmanager
    async def _made(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        request = _request(spec)
        key = secrets.token_urlsafe(18)
        id, nothing_made = None, False
        process = os.getpid()
        deadline = asyncio.get_running_loop().time() + spec.startup_timeout + MARGIN
        try:
            try:
                instance = await self._api.create(
                    request, wait=min(SLICE, spec.startup_timeout), key=key, timeout=spec.startup_timeout + MARGIN
                )
            except AEnvError as exc:
                unheard = isinstance(exc, NetworkError) and not isinstance(exc, http.NotSent)
                nothing_made = not unheard and type(exc) is not AEnvError
                if isinstance(exc, Conflict) and (why := await self._why_over(spec.forked_from)):
                    raise SandboxLost(f"instance {spec.forked_from} is gone: {why}") from exc
                raise
            id = instance.id
            leases().hold(id, self._api)
            yield await self._sandbox(await self._running(instance, deadline, spec.startup_timeout))
        finally:
            if process == os.getpid() and not nothing_made:  # a forked child does not own its parent's
                if id is not None:
                    leases().drop(id)
                await finish(self._give_back(id, request, key))

    async def _why_over(self, id: str) -> str:
        """Why an instance that was to be forked is no more; empty where it lives, or nobody knows."""
        with suppress(AEnvError):
            return await self.reason(id, 0.0) if id else ""
        return ""

    async def _running(self, instance: Instance, deadline: float, patience: float) -> Instance:
        """The instance once it runs."""
        loop = asyncio.get_running_loop()
        pause = _POLL
        while instance.status != State.RUNNING:
            if _over(instance):
                raise StartFailed(f"{_named(instance)} did not start: {_why(instance)}")
            asked = loop.time()
            if asked >= deadline:
                raise StartFailed(
                    f"{_named(instance)} does not run after {patience:g} s: it is {instance.status}"
                    f"{': ' + instance.reason if instance.reason else ''}"
                    f"{'; the time went to: ' + told(instance.phases) if told(instance.phases) else ''}"
                )
            instance = await self._api.get(instance.id, wait=min(SLICE, deadline - asked))
            if loop.time() - asked < pause:  # not waited for
                await asyncio.sleep(min(pause, max(deadline - loop.time(), 0)))
                pause = min(pause * 2, 1.0)
        return instance

    async def _sandbox(self, instance: Instance, attached: bool = False) -> Sandbox:
        token = instance.owner_token
        direct = instance.socket if await _is_here(instance) else ""
        if not direct and not instance.url:
            raise NetworkError(f"{self._api.url} did not say where {_named(instance)} is")
        now = time.time()  # by this machine's clock, to which nobody else's need be right
        return Sandbox(
            url=direct or instance.url,
            public_url=instance.url,
            id=instance.id,
            token=token or self._key,
            boot=instance.boot,
            attached=attached,
            env=instance.env.id,
            digest=instance.env.digest,
            image=image_of(instance.env.artifacts),
            owner=instance.owner,
            labels=instance.labels,
            created_at=now,
            expires_at=None if attached else _end(instance, now),
        )

    async def _give_back(self, id: str | None, request: InstanceRequest, key: str) -> None:
        """Delete an instance. When nobody heard what it is called, the key under which it was asked for tells."""
        try:
            async with asyncio.timeout(DEPARTURE):
                if id is None:
                    id = (await self._api.create(request, key=key, retries=1)).id
                await self._api.delete(id)
        except NotFound:
            pass
        except (AEnvError, TimeoutError) as exc:
            log.warning(
                "[ENV:%s] could not be released, and ends with its lease: %s", id or "unknown", exc or "no answer"
            )


def _request(spec: SandboxSpec) -> InstanceRequest:
    return InstanceRequest(
        env_name=str(spec.env),
        datasource=spec.datasource,
        environment_variables=spec.environment_variables or None,
        arguments=spec.arguments or None,
        ttl=spec.ttl,
        owner=spec.owner,
        labels=spec.labels or None,
        resources=spec.resources or None,
        seed=spec.seed,
        lease=LEASE,
        startup_timeout=spec.startup_timeout,
        forked_from=spec.forked_from,
    )


def _named(instance: Instance) -> str:
    return f"{instance.env.id} ({instance.id})"


def _over(instance: Instance) -> bool:
    return instance.status in (State.FAILED, State.TERMINATED)


def _why(instance: Instance) -> str:
    return instance.reason or f"it is {instance.status}"


async def _is_here(instance: Instance) -> bool:
    """Whether this process can reach the sandbox by its socket. The path may be another user's, or, when the platform
    is on another machine, that of another sandbox: so it is asked for its name before anything is told to it."""
    path = instance.socket.removeprefix("unix:")
    if path == instance.socket or not os.path.isabs(path) or not (instance.boot and instance.owner_token):
        return False
    boot = plain_header(instance.boot, "the name of the sandbox's life").encode()
    with suppress(AEnvError, TimeoutError):
        async with asyncio.timeout(_MEETING):
            found = await http.request(
                "GET", instance.socket, "/health", headers=b"AEnv-Boot: %b\r\n" % boot, retries=0
            )
            return found.headers.get(b"aenv-boot") == boot
    return False


def _end(instance: Instance, now: float) -> float | None:
    """When the time of an instance is over that runs since now, as far as the platform says."""
    try:
        return now + parse_duration(instance.ttl) if instance.ttl else None
    except Invalid:
        return None
