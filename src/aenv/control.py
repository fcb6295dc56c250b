"""Asking a control plane (hub, API service, controller): its address, the token, one question and its answer."""

from __future__ import annotations

import asyncio
import functools
import random
import re
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

import msgspec
from msgspec import Struct

from aenv import config, http, tracing
from aenv.errors import (
    AEnvError,
    Conflict,
    Forbidden,
    Invalid,
    NetworkError,
    NotFound,
    RateLimited,
    StorageFull,
    TooLarge,
    Unauthorized,
    Unsupported,
    from_wire,
)

PORT = 8080
HERE = f"http://127.0.0.1:{PORT}"
"""Where ``aenv serve`` is on this machine."""
RESTART = 15.0
"""Seconds that a service may take to restart; who asks it meanwhile does not hear of it."""
MOST_ANSWER = 64 * 1024 * 1024
MOST_FAILURE = 1024 * 1024
QUIET = 60.0
"""Seconds that either side of an up- or download may be silent."""
_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
PLAIN = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
"""What a header carries as it is."""
_LOOPBACK = re.compile(r"localhost|127(\.\d{1,3}){3}|::1")
_REPEATABLE = ("GET", "HEAD", "PUT", "DELETE")
_BY_STATUS: dict[int, type[AEnvError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    422: Invalid,
    429: RateLimited,
    501: Unsupported,
    502: NetworkError,
    503: NetworkError,
    504: NetworkError,
    507: StorageFull,
}
_PLATFORM = "the platform"
_START = "start one with 'aenv serve', or set AENV_SYSTEM_URL to where it is"
T = TypeVar("T")
Query = Mapping[str, str | int | float | bool | Sequence[str] | None]


class _Envelope(Struct, Generic[T]):
    success: bool
    data: T
    total: int | None = None


class _Failure(Struct):
    success: bool = False
    message: str = ""
    error: str = ""
    hint: str | None = None


class Service:
    """One control plane, as one caller sees it."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        timeout: float = 60.0,
        retries: int = 5,
        called: str = _PLATFORM,
        hint: str = _START,
    ) -> None:
        """``called`` and ``hint``: what a person is told when it is not there."""
        self.url = url
        self._called, self._hint = called, hint
        self.timeout = timeout
        self.retries = retries
        self._authorization = b""
        if key:
            self._authorization = f"Authorization: Bearer {plain_header(key, 'the API key')}\r\n".encode()

    async def ask(
        self,
        method: str,
        path: str,
        *,
        type: type[T],
        body: Struct | bytes | None = None,
        query: Query | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        retries: int | None = None,
        repeatable: bool | None = None,
    ) -> T:
        """Ask, and get the answer's ``data`` as ``type``. A failure comes back as the exception that it was there.

        ``repeatable`` says that asking twice does no harm; by default, that is so for every method but POST, and for a
        POST with an ``Idempotency-Key``.
        """
        found: _Envelope[T] = await self._asked(method, path, type, body, query, headers, timeout, retries, repeatable)
        return found.data

    async def page(self, path: str, *, type: type[T], query: Query | None = None) -> tuple[list[T], int]:
        """A page of a list, and how many there are in all."""
        found = await self._asked("GET", path, list[type], None, query, None, None, None, None)  # type: ignore[valid-type]
        return found.data, len(found.data) if found.total is None else found.total

    async def fetch(
        self, path: str, *, query: Query | None = None, timeout: float | None = None, most: int = http.MOST_BODY
    ) -> http.Response:
        """Get something that is not in an envelope: a file, for example."""
        response = await self._send("GET", path, b"", query, None, timeout, None, True, most)
        if response.status != 200:
            raise failure(response.status, response.body, self.url, response.headers)
        return response

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        body: bytes | AsyncIterable[bytes] = b"",
        size: int | None = None,
        query: Query | None = None,
        headers: Mapping[str, str] | None = None,
        patience: float | None = QUIET,
    ) -> AsyncIterator[http.Stream]:
        """Ask for something that is read, or sent, piece by piece. As long as nothing of it has come, what is safe is
        tried again."""
        lines = self._lines({**(headers or {}), **({"Content-Type": "application/octet-stream"} if body else {})})

        def asking() -> AbstractAsyncContextManager[http.Stream]:
            where = (method, self.url, f"{path}{_query(query)}")
            return http.stream(*where, headers=lines, body=body, size=size, patience=patience)

        async with AsyncExitStack() as stack:
            with self._explained():
                answer = await self._begun(asking, stack, repeatable=method in ("GET", "HEAD"))
            if not 200 <= answer.status < 300:
                raise failure(answer.status, await answer.read(MOST_FAILURE), self.url, answer.headers)
            yield answer

    async def _begun(
        self, asking: Callable[[], AbstractAsyncContextManager[http.Stream]], stack: AsyncExitStack, *, repeatable: bool
    ) -> http.Stream:
        """The answer to a question, once it begins; a server may restart meanwhile, or another one take its place."""
        loop = asyncio.get_running_loop()
        deadline, attempt = loop.time() + RESTART, 0
        while True:
            last = attempt >= self.retries or loop.time() >= deadline
            try:
                async with AsyncExitStack() as trying:
                    answer = await trying.enter_async_context(asking())
                    if last or not repeatable or answer.status != 503:
                        stack.push_async_exit(trying.pop_all())
                        return answer
            except http.NotSent:
                if last:
                    raise
            except NetworkError:
                if last or not repeatable:
                    raise
            attempt += 1
            await asyncio.sleep(min(_PAUSE * 2**attempt, _LONGEST_PAUSE) * random.uniform(0.5, 1.5))  # noqa: S311

    async def _asked(
        self,
        method: str,
        path: str,
        type: Any,
        body: Struct | bytes | None,
        query: Query | None,
        headers: Mapping[str, str] | None,
        timeout: float | None,
        retries: int | None,
        repeatable: bool | None,
    ) -> _Envelope[Any]:
        given = dict(headers or {})
        content = b""
        if body is not None:
            content = body if isinstance(body, bytes) else msgspec.json.encode(body)
            kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
            given.setdefault("Content-Type", kind)
        if repeatable is None:
            repeatable = method in _REPEATABLE or "Idempotency-Key" in given
        response = await self._send(method, path, content, query, given, timeout, retries, repeatable, MOST_ANSWER)
        if not 200 <= response.status < 300:
            raise failure(response.status, response.body, self.url, response.headers)
        try:
            found: _Envelope[Any] = _decoder(type).decode(response.body)
            return found
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise NetworkError(
                f"what {self.url} answered to {method} {path} is not the platform's: {exc}",
                hint="is this the address of a platform's control plane?",
            ) from exc

    async def _send(
        self,
        method: str,
        path: str,
        body: bytes,
        query: Query | None,
        headers: Mapping[str, str] | None,
        timeout: float | None,
        retries: int | None,
        repeatable: bool,
        most: int,
    ) -> http.Response:
        lines = self._lines(headers or {})
        seconds = self.timeout if timeout is None else timeout
        with self._explained():
            try:
                async with asyncio.timeout(seconds) as limit:
                    return await http.request(
                        *(method, self.url, f"{path}{_query(query)}"),
                        headers=lines,
                        body=body,
                        retries=self.retries if retries is None else retries,
                        repeatable=repeatable,
                        most=most,
                        reconnecting=RESTART,
                    )
            except TimeoutError as exc:
                if not limit.expired():
                    raise
                raise NetworkError(f"{self.url} did not answer {method} {path} within {seconds:g} s") from exc

    def _lines(self, headers: Mapping[str, str]) -> bytes:
        lines = "".join(f"{name}: {plain_header(value, name)}\r\n" for name, value in headers.items())
        if context := tracing.inherited():
            lines += f"traceparent: {context.decode()}\r\n"
        return self._authorization + b"Accept: application/json, */*\r\n" + lines.encode()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except http.NotSent as exc:
            message = f"{self._called} at {self.url} cannot be reached: {exc.message}"
            raise http.NotSent(message, hint=self._hint) from exc


@functools.lru_cache(maxsize=64)
def _decoder(type: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(_Envelope[type])


def _query(given: Query | None) -> str:
    found = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in (given or {}).items()
        if value is not None
    }
    return f"?{urlencode(found, doseq=True, quote_via=quote)}" if found else ""


def failure(status: int, body: bytes, url: str, headers: Mapping[bytes, bytes] | None = None) -> AEnvError:
    """The exception that an answer tells of, also where whoever answered is not the platform itself."""
    told = _told(status, body, url)
    if isinstance(told, RateLimited):
        later = (headers or {}).get(b"retry-after", b"")
        told.retry_after = float(later) if later.isdigit() else None
    return told


def _told(status: int, body: bytes, url: str) -> AEnvError:
    try:
        found = msgspec.json.decode(body, type=_Failure)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        found = _Failure()
    message = found.message or f"{url} answered with status {status}"
    told = from_wire({"code": found.error, "message": message, "hint": found.hint})
    # A code that nobody knows says less than the status; a gateway, for example, has a message there.
    if type(told) is AEnvError and found.error != AEnvError.code:
        return _BY_STATUS.get(status, AEnvError)(message, hint=found.hint)
    return told


def plain_header(value: str, what: str) -> str:
    """A value that must go into a header as it is."""
    if not PLAIN.fullmatch(value):
        raise Invalid(f"{what} has characters that a header does not carry")
    return value


def segment(text: str) -> str:
    """A name as one part of a path."""
    if text in ("", ".", ".."):
        raise Invalid(f"{text!r} is not a name")
    return quote(text, safe="@*")


# Addresses and keys


def platform_url(given: str | None = None) -> str:
    """Where the platform is: what is given, ``AENV_SYSTEM_URL``, the config file, else this machine."""
    return control_url(config.get("system_url", given or None) or HERE)


def hub_url(given: str | None = None) -> str:
    """Where the hub is: what is given, ``AENV_HUB_URL``, the config file, else with the platform."""
    found = config.get("hub_url", given or None)
    return control_url(found) if found else platform_url()


def control_url(given: str) -> str:
    """An address as a person writes it, made whole: ``http`` and port 8080 unless it says otherwise."""
    if given.startswith("unix:"):
        return given
    url = given if "://" in given else f"http://{given}"
    http.target(url)
    scheme, _, rest = url.rstrip("/").partition("://")
    host, slash, path = rest.partition("/")
    if not re.search(r":\d+$", host) or host.endswith("]"):
        host = f"{host}:{PORT}"
    return f"{scheme}://{host}{slash}{path}"


def key_for(url: str, given: str | None = None) -> str | None:
    """The token for a platform: what is given, ``AENV_API_KEY``, the config file, else, where it is on this machine,
    the one that ``aenv serve`` left for its user."""
    found: str | None = config.get("api_key", given or None)
    if found or not _is_here(url):
        return found
    from aenv.auth.tokens import find_local_token

    return find_local_token(config.home())


def _is_here(url: str) -> bool:
    where = http.target(url)
    return where.socket is not None or _LOOPBACK.fullmatch(where.host) is not None
