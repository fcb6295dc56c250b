"""An HTTP service with an OpenAPI description as a project: each operation is a tool.

What the service answers is the tool's answer, also that it refuses. A service that is not there, is overloaded, or
does not take the credential of this instance is a platform failure: no model did that, and none may read of it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from referencing import Registry

from aenv.errors import CallTimeout, Invalid, SandboxLost
from aenv.integrations import wrapping
from aenv.integrations.wrapping import Found, documents, requests
from aenv.integrations.wrapping.operations import READING, Credential, Filter, Operation, check, read, server_of
from aenv.models import Audio, Image, ToolResult
from aenv.runtime.context import Context
from aenv.runtime.registry import register_foreign, register_setup, register_teardown

MOST_ANSWER = 4 * 1024 * 1024
"""Bytes of an answer."""
ATTEMPTS = 3
_LONGEST_PAUSE = 10.0
_AWAY = (502, 503, 504)
_BUSY = (429, 503)
"""Whoever answers so has not done what was asked."""
_MOST_REDIRECTS = 5


def serve(
    stored: Path,
    *,
    base: str,
    credentials: Mapping[str, str] | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    read_only: bool = False,
    timeout: float = 60.0,
) -> Service:
    """Offer the operations of the document ``stored``, of the service at ``base``.

    ``credentials`` names the secret for each security scheme. ``timeout`` is the longest silence in seconds.
    """
    operations = read(wrapping.read_stored(stored), base, Filter(include, exclude, read_only)).operations
    service = Service(operations, credentials or {}, timeout)
    for operation in operations:
        register_foreign(operation.listed, service.runner(operation.name))
    register_setup(service.start)
    register_teardown(service.stop)
    return service


class Service:
    """The service, as an instance asks it."""

    def __init__(self, operations: Sequence[Operation], credentials: Mapping[str, str], timeout: float) -> None:
        self._operations = {one.name: one for one in operations}
        self._credentials = credentials
        self._timeout = timeout
        self._client: httpx.AsyncClient | None = None
        self._validators: dict[str, Any] = {}

    @property
    def tools(self) -> tuple[str, ...]:
        """What its tools are called."""
        return tuple(self._operations)

    async def start(self) -> None:
        """Make ready to ask. Nobody is asked yet: an instance may be without a network."""
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs URLs, and a credential may be in one
        limits = httpx.Timeout(self._timeout, connect=wrapping.CONNECT)
        self._client = httpx.AsyncClient(timeout=limits, follow_redirects=False)

    async def stop(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def runner(self, name: str) -> Callable[..., Awaitable[ToolResult]]:
        async def run(arguments: dict[str, Any], context: Context) -> ToolResult:
            return await self.call(name, arguments)

        return run

    async def call(self, name: str, arguments: Mapping[str, Any] | None = None) -> ToolResult:
        """What an operation answers."""
        operation = self._operations[name]
        given = dict(arguments or {})
        self._validate(operation, given)
        asked = requests.made(operation, given)
        used = self._sign(operation, asked)
        response, body = await self._answered(operation, asked)
        if response.status_code == 401 and used:
            raise SandboxLost(
                f"the service answers 401 to {', '.join(used)}, asked for {operation.method.upper()} {operation.path}",
                hint="set it to what the service takes",
            )
        return _result(response, body)

    def _validate(self, operation: Operation, given: dict[str, Any]) -> None:
        validator = self._validators.get(operation.name)
        if validator is None:
            schema = operation.listed["inputSchema"]
            validator = self._validators[operation.name] = Draft202012Validator(schema, registry=Registry())
        if error := best_match(validator.iter_errors(given)):
            where = ".".join(map(str, error.absolute_path))
            raise Invalid(f"{where}: {error.message}" if where else error.message)

    def _sign(self, operation: Operation, asked: requests.Asked) -> list[str]:
        """Add the credentials that the operation wants; the names of their secrets."""
        ways = [way for way in operation.security if all(one.scheme in self._credentials for one in way)]
        if operation.security and not ways:
            lacking = " or ".join(" and ".join(one.scheme for one in way) for way in operation.security)
            raise SandboxLost(
                f"{operation.method.upper()} {operation.path} wants {lacking}",
                hint="name a secret for it in credentials= of serve, and in deployConfig.secrets",
            )
        used = []
        for credential in ways[0] if ways else ():
            name = self._credentials[credential.scheme]
            value = wrapping.line if credential.kind in ("header", "bearer") else wrapping.secret
            _add(credential, value(name), asked)
            used.append(name)
        return used

    async def _answered(self, operation: Operation, asked: requests.Asked) -> tuple[httpx.Response, bytes]:
        """An answer of the service itself."""
        what = f"{operation.method.upper()} {operation.path}"
        repeatable = operation.method in READING
        for attempt in range(1, ATTEMPTS + 1):
            pause = 0.2 * attempt
            try:
                response, body = await self._followed(asked)
            except (httpx.ConnectError, httpx.ConnectTimeout) as exc:
                problem, again = f"cannot be reached: {exc}", True
            except httpx.TimeoutException:
                raise CallTimeout(f"the service said nothing for {self._timeout:g} s after {what}") from None
            except httpx.HTTPError as exc:
                problem, again = f"is gone: {exc!r}", repeatable
            else:
                status = response.status_code
                if status not in (*_AWAY, *_BUSY):
                    return response, body
                problem, again = f"answered with status {status}", status in _BUSY or repeatable
                pause = _asked_for(response, pause)
            if not again or attempt == ATTEMPTS:
                break
            await asyncio.sleep(pause)
        raise SandboxLost(f"the service at {operation.base} {problem}, asked for {what}")

    async def _followed(self, asked: requests.Asked) -> tuple[httpx.Response, bytes]:
        """The answer, behind redirects that stay at the service and need not be asked anything anew."""
        if self._client is None:
            raise SandboxLost("the service is used before the instance is ready, or after its end")
        request = self._client.build_request(
            asked.method,
            asked.url,
            headers=asked.headers,
            content=asked.content,
            params=tuple(asked.query) or None,
        )
        for _ in range(_MOST_REDIRECTS):
            response = await self._client.send(request, stream=True)
            try:
                following = response.next_request
                if following is None or not _is_same_place(request, following):
                    return response, await _body(response)
            finally:
                await response.aclose()
            request = following
        return response, b""


def look(
    source: str,
    *,
    server: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    read_only: bool = False,
) -> Found:
    """Read a document, and what it offers."""
    document = documents.fetch(source)
    check(document)
    base = (server or server_of(document, source if wrapping.is_url(source) else None)).rstrip("/")
    allow = wrapping.host_of(base, what="the address of the service")
    found = read(document, base, Filter(include, exclude, read_only))
    if not found.operations:
        why = "; ".join(f"{what}: {reason}" for what, reason in found.left_out.items())
        raise Invalid(
            f"no operation of {source} becomes a tool{f': {why}' if why else ''}",
            hint="see --include, --exclude and --read-only",
        )
    info = document.get("info")
    title = str(info.get("title") or "") if isinstance(info, dict) else ""
    name = wrapping.usable_name(title or base.partition("//")[2])
    credentials = _secrets(found.operations, name)
    given = {"credentials": credentials, "include": list(include), "exclude": list(exclude), "read_only": read_only}
    return Found(
        name=name,
        about=title or base,
        stored=document,
        tools={one.name: one.listed for one in found.operations},
        words={
            "base": wrapping.python(base),
            "options": "".join(wrapping.option(key, value) for key, value in given.items()),
            "tool": wrapping.python(found.operations[0].name),
        },
        allow=(allow,),
        secrets=tuple(dict.fromkeys(credentials.values())),
        left_out=found.left_out,
    )


def tools_of(stored: dict[str, Any], server: str | None = None, **wanted: Any) -> dict[str, Any]:
    """The tools that a stored document comes to, each with what it is made of."""
    base = server or server_of(stored, "http://localhost/")
    return {one.name: one.listed for one in read(stored, base, Filter(**wanted)).operations}


def _secrets(operations: Sequence[Operation], name: str) -> dict[str, str]:
    """A secret for each scheme of the first way into every operation."""
    schemes = dict.fromkeys(credential.scheme for one in operations for way in one.security[:1] for credential in way)
    return {scheme: re.sub(r"[^A-Z0-9]+", "_", f"{name}_{scheme}".upper()).strip("_") for scheme in schemes}


def _add(credential: Credential, value: str, asked: requests.Asked) -> None:
    if credential.kind == "query":
        asked.query.append((credential.name, value))
    elif credential.kind == "cookie":
        requests.add_cookie(asked, credential.name, value)
    elif credential.kind == "header":
        asked.headers[credential.name] = value
    elif credential.kind == "basic":
        asked.headers["Authorization"] = "Basic " + base64.b64encode(value.encode()).decode()
    else:
        asked.headers["Authorization"] = f"Bearer {value}"


def _asked_for(response: httpx.Response, pause: float) -> float:
    """Seconds before the next attempt: what the service says, within a bound."""
    said = response.headers.get("retry-after", "")
    return min(float(said), _LONGEST_PAUSE) if said.isdigit() else pause


def _is_same_place(request: httpx.Request, following: httpx.Request) -> bool:
    one, other = request.url, following.url
    return following.method == request.method and (one.scheme, one.host, one.port) == (
        other.scheme,
        other.host,
        other.port,
    )


async def _body(response: httpx.Response) -> bytes:
    found = b""
    async for piece in response.aiter_bytes():
        found += piece
        if len(found) > MOST_ANSWER:
            raise Invalid(f"the answer is larger than {MOST_ANSWER // 1024**2} MiB: ask for less at once")
    return found


def _result(response: httpx.Response, body: bytes) -> ToolResult:
    status = response.status_code
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if status >= 300:
        text = body.decode("utf-8", "replace")
        where = f"to {response.headers['location']}, which is not followed" if "location" in response.headers else text
        return ToolResult(content=[_text(f"status {status}: {where or response.reason_phrase}")], is_error=True)
    if kind.startswith("image/"):
        return ToolResult(content=[Image(body, kind).block()])
    if kind.startswith("audio/"):
        return ToolResult(content=[Audio(body, kind).block()])
    try:
        text = body.decode(response.encoding or "utf-8")
    except (UnicodeDecodeError, LookupError):
        blob = {"uri": "aenv://result", "mimeType": kind, "blob": base64.b64encode(body).decode()}
        return ToolResult(content=[{"type": "resource", "resource": blob}])
    structured = _object(body) if kind.endswith("json") else None
    return ToolResult(content=[_text(text or f"status {status}")], structured=structured)


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
