"""The API of a Kubernetes cluster over ``aenv.http``: questions and answers, streams of changes, and what went wrong as
one of ``aenv.errors``."""

from __future__ import annotations

import asyncio
import secrets
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import Any, ParamSpec
from urllib.parse import urlencode

import msgspec
from msgspec import Struct

from aenv import http
from aenv.engines.kubernetes import access
from aenv.engines.kubernetes.access import Access
from aenv.errors import (
    AEnvError,
    Conflict,
    Forbidden,
    Invalid,
    NetworkError,
    NotFound,
    RateLimited,
    TooLarge,
    Unauthorized,
)
from aenv.models import to_json

P = ParamSpec("P")
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
FIELD_MANAGER = "aenv"
FIRST_RETRIES = 2
"""How often a cluster is asked again that never answered: it may be the wrong address."""
RETRIES, RECONNECTING = 14, 45.0
"""How often, and for how many seconds, a cluster is asked again that does not answer: an API server takes that long to
start again."""
ANSWER = 90.0
"""Seconds for one question, with all that it is asked again."""
AT_ONCE = 32
"""Requests that are under way at the same time. An API server shares what it does among its clients, and lets those
wait who ask for more."""
MOST_ANSWER = 256 * 1024 * 1024
MOST_LINE = 8 * 1024 * 1024
SILENCE = 90.0
"""Seconds without a word after which nobody may be at the other end of a stream: a server marks each minute."""

_ERRORS: Mapping[int, type[AEnvError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    405: NotFound,
    409: Conflict,
    413: TooLarge,
    415: Invalid,
    422: Invalid,
    429: RateLimited,
}
_QUOTA = "exceeded quota"
_LEAVING = "because it is being terminated"
_UNKNOWN = 401


class Expired(AEnvError):
    """A point in the history of objects is so long ago that the server does not know it any more."""


class Full(RateLimited):
    """A quota of the namespace leaves no room."""


class Status(Struct):
    """What a cluster answers instead of what was asked for."""

    message: str = ""
    reason: str = ""
    code: int = 0


def _read(fetch: Callable[P, Awaitable[bytes]]) -> Callable[P, Coroutine[Any, Any, Any]]:
    async def ask(*words: P.args, **terms: P.kwargs) -> Any:
        return msgspec.json.decode(await fetch(*words, **terms) or b"null")

    return ask


class Cluster:
    """One cluster, as it is asked by one event loop."""

    def __init__(self, found: Access) -> None:
        self._access = found
        self._room = asyncio.Semaphore(AT_ONCE)
        self._ahead = 0.0
        """Seconds by which the server's clock is ahead of ours."""
        self._met = False
        """Whether it ever answered."""
        self.asked = 0
        """Requests so far: what each sandbox costs the server is measured."""

    @classmethod
    async def find(cls, kubeconfig: str | None = None, context: str | None = None) -> Cluster:
        """The cluster that is meant, see ``access.find``."""
        return cls(await asyncio.to_thread(access.find, kubeconfig, context))

    @property
    def url(self) -> str:
        return self._access.url

    @property
    def inside(self) -> bool:
        """Whether this process is in a pod of it."""
        return self._access.inside

    @property
    def namespace(self) -> str:
        """The one that the kubeconfig or the pod names."""
        return self._access.namespace or "default"

    def now(self) -> float:
        """The time by the server's clock, which all who ask it share."""
        return time.time() + self._ahead

    async def fetch(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        timeout: float = ANSWER,
    ) -> bytes:
        """Ask, and return the answer as it came. It is asked again where that does no harm: every request of ours names
        what it makes, so that it is made once."""
        data = b"" if body is None else to_json(body)
        headers = b"Accept: application/json\r\nUser-Agent: aenv\r\n"
        if data:
            headers += f"Content-Type: {content_type}\r\n".encode()
        try:
            async with asyncio.timeout(timeout), self._room:
                response = await self._send(method, _with(path, query), headers, data)
                if response.status == _UNKNOWN and self._access.doubt():  # its token may be over since it was read
                    response = await self._send(method, _with(path, query), headers, data)
        except TimeoutError:
            raise NetworkError(f"the cluster at {self.url} did not answer within {timeout:g} s") from None
        if response.status >= 400:
            raise failure(response.status, response.body)
        return response.body

    ask = _read(fetch)
    """The same, with the answer read: JSON, or None when there is none."""

    async def _send(self, method: str, path: str, headers: bytes, data: bytes) -> http.Response:
        headers += await self._access.header()
        self.asked += 1
        begun = time.time()
        response = await http.request(
            method,
            self.url,
            path,
            headers=headers,
            body=data,
            retries=RETRIES if self._met else FIRST_RETRIES,
            repeatable=True,
            reconnecting=RECONNECTING if self._met else 0.0,
            most=MOST_ANSWER,
        )
        self._met = True
        self._note_time(response.headers.get(b"date", b""), begun)
        return response

    def _note_time(self, date: bytes, begun: float) -> None:
        """See how far the clocks are apart. The server tells whole seconds: up to one is no difference."""
        try:
            told = parsedate_to_datetime(date.decode("latin-1")).timestamp()
        except ValueError:
            return
        now = time.time()
        if told > now:
            self._ahead = told - now
        elif told + 1.0 < begun:
            self._ahead = told + 1.0 - begun
        else:
            self._ahead = 0.0

    @asynccontextmanager
    async def stream(
        self, path: str, query: Mapping[str, str] | None = None, *, patience: float | None = SILENCE
    ) -> AsyncIterator[http.Stream]:
        """An answer that is read as it comes."""
        headers = await self._access.header() + b"Accept: application/json, */*\r\nUser-Agent: aenv\r\n"
        self.asked += 1
        async with http.stream("GET", self.url, _with(path, query), headers=headers, patience=patience) as answer:
            if answer.status == _UNKNOWN:
                self._access.doubt()
            if answer.status >= 400:
                raise failure(answer.status, await answer.read(MOST_LINE))
            yield answer

    @asynccontextmanager
    async def switch(self, path: str, protocol: str) -> AsyncIterator[http.Upgraded]:
        """A WebSocket with that protocol inside."""
        words = {
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": b64encode(secrets.token_bytes(16)).decode(),
            "Sec-WebSocket-Protocol": protocol,
        }
        headers = await self._access.header() + b"User-Agent: aenv\r\n"
        headers += "".join(f"{name}: {value}\r\n" for name, value in words.items()).encode()
        self.asked += 1
        async with http.upgrade(self.url, path, "websocket", headers=headers, method="GET") as connection:
            if connection.status != http.SWITCHED:
                raise failure(connection.status, await connection.read(MOST_LINE))
            yield connection

    async def lines(self, path: str, query: Mapping[str, str] | None = None) -> AsyncGenerator[bytes, None]:
        """An answer of lines, as they come."""
        async with self.stream(path, query) as answer:
            rest = b""
            async for piece in answer:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield line
                if len(rest) > MOST_LINE:
                    raise NetworkError(f"{self.url} tells of a change in more than {MOST_LINE} bytes")

    async def offers(self, group: str) -> set[str]:
        """The kinds of a group, ``apps/v1`` or ``v1``, that this server knows; none when it does not know the group."""
        place = f"/apis/{group}" if "/" in group else f"/api/{group}"
        try:
            found = await self.ask("GET", place)
        except NotFound:
            return set()
        return {row["kind"] for row in found.get("resources") or () if "/" not in row["name"]}


def failure(status: int, body: bytes) -> AEnvError:
    """What went wrong."""
    try:
        told = msgspec.json.decode(body, type=Status)
    except msgspec.MsgspecError:
        told = Status(message=body[:500].decode(errors="replace"))
    return told_failure(status, told)


def told_failure(status: int, told: Status) -> AEnvError:
    message = f"the cluster answered {status}: {told.message or told.reason or 'without a word'}"
    if status == 410 or told.reason == "Expired":
        return Expired(message)
    if status == 403 and _QUOTA in told.message:
        return Full(f"a quota of the namespace is used up: {told.message}")
    kind = _ERRORS.get(status, NetworkError)
    hint = None
    if kind is Forbidden and _LEAVING in told.message:
        hint = "the namespace is being deleted; use another one (AENV_NAMESPACE)"
    elif kind is Forbidden:
        hint = "give the account what docs/guides/kubernetes.md lists: the chart has it as a Role"
    elif kind is Unauthorized:
        hint = access.HINT
    return kind(message, hint=hint)


def _with(path: str, query: Mapping[str, str] | None) -> str:
    return f"{path}?{urlencode(query)}" if query else path
