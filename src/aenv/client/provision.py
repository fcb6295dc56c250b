"""Where sandboxes come from: what a provision is, and which one is meant."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import NamedTuple, Protocol

from aenv import config, http
from aenv.models import Sandbox, SandboxSpec

Provision = Callable[[SandboxSpec], AbstractAsyncContextManager[Sandbox]]
"""Where a sandbox comes from: enter to get one, exit to give it back. It may have methods of ``Control``, too."""
DEFAULT_PORT = 8081


class Package(NamedTuple):
    """What a sandbox is made of; empty texts where that is not known."""

    env: str
    """``name@version``."""
    digest: str
    """sha256 of the package."""
    image: str


class Control(Protocol):
    """What a provision may offer beside giving sandboxes: power over one from outside. Each method is optional."""

    async def extend(self, id: str, ttl: float) -> object:
        """Let the sandbox live ``ttl`` seconds from now."""

    def logs(self, id: str, tail: int | None, follow: bool) -> AsyncGenerator[str, None]:
        """What it printed, by line."""

    async def reason(self, id: str, patience: float) -> str:
        """Why it failed or ended, in words; empty while it is well. One of memory begins "out of memory"."""

    async def expose(self, id: str, port: int, ttl: float | None) -> str:
        """A URL of a port inside, open to whoever has it."""

    async def package(self, spec: SandboxSpec) -> Package:
        """What a sandbox of that spec is made of."""


def attach(url: str, token: str | None = None) -> Provision:
    """A provision for a sandbox that somebody else runs, ``aenv run`` for example.

    ``url`` is a URL, ``host:port`` or a host; the port is 8081 when none is given.
    """
    where = _sandbox_url(url)
    sandbox = Sandbox(url=where, token=token, attached=True, shared="/env-service/" in where)
    return lambda spec: nullcontext(sandbox)


def _sandbox_url(given: str) -> str:
    if given.startswith("unix:"):
        return given
    url = (given if "://" in given else f"http://{given}").rstrip("/")
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    if not re.search(r":\d+$", host) and scheme == "http":
        host = f"{host}:{DEFAULT_PORT}"
    url = f"{scheme}://{host}{slash}{path}"
    http.target(url)
    return url


def choose(
    aenv_url: str | None,
    api_key: str | None,
    *,
    retries: int = 10,
    instance_id: str | None = None,
    service_id: str | None = None,
) -> Provision:
    """Where the sandbox comes from when the caller did not say: the first that is set."""
    attached = config.get("attach")
    named = instance_id if service_id is None else service_id
    if aenv_url or named is not None or (config.get("system_url") and not attached):
        from aenv.client.platform import Platform

        return Platform(aenv_url, api_key, retries=retries, instance_id=instance_id, service_id=service_id)
    if attached:
        return attach(attached, config.get("api_key", api_key))
    from aenv.client.local import embedded

    return embedded
