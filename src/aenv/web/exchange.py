"""One request, from its head to the last byte of its answer."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, MutableMapping
from contextlib import ExitStack
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from aenv import tracing
from aenv.auth.callers import Caller
from aenv.cleanup import finish
from aenv.errors import AEnvError, NetworkError, RateLimited, TooLarge
from aenv.runtime.protocol import Receive, Send
from aenv.web import logs
from aenv.web.endpoints import Endpoint
from aenv.web.routes import Call, ClientLeft, Paged, Route, Streamed, Upload
from aenv.web.table import Match, WrongMethod
from aenv.wire import Audited, timestamp

if TYPE_CHECKING:
    from aenv.web.app import App

log = logging.getLogger("aenv.web")

QUICK = 0.05
"""A handler that takes longer is watched for its client's leaving; a quick one is not worth it."""
SLOW_READER = 60.0
"""Seconds a client may take to read a piece of an answer."""
CHUNK = 256 * 1024
LONGEST_TARGET = 256
"""Characters of the audit log for what was touched."""
RETRY_AFTER = b"1"
"""Seconds after which a client that was turned away may ask again."""

_PROBES = (b"/health", b"/metrics")
"""What is asked for all the time, and begins no trace."""

Headers = tuple[tuple[bytes, bytes], ...]

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_JSON: Headers = ((b"content-type", b"application/json"),)
_COMMON: Headers = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
_NOBODY = Caller("", frozenset())
_encode = msgspec.json.Encoder().encode


class Stopping(AEnvError):
    """The service ends, and does not wait for the answer."""

    code, status = NetworkError.code, 503

    def __init__(self) -> None:
        super().__init__("the service is stopping", hint="ask again in a moment")


class Whole(NamedTuple):
    """An answer in one piece."""

    status: int
    body: bytes
    headers: Headers = _JSON


class Exchange:
    """A request and its answer."""

    def __init__(self, app: App, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        self._app = app
        self._scope = scope
        self._receive = receive
        self._send = send
        self._transport = scope.get("aenv.transport")
        self._method: str = scope["method"]
        self._begun = False
        self._began = time.monotonic()
        self._error = ""
        """The code of the failure that it is answered with."""
        self._about: dict[str, Any] = {}
        """What the log says of it."""
        self._span: tracing.Span | None = None
        headers = dict(scope["headers"])
        self._call = Call(
            caller=_NOBODY,
            headers=headers,
            request_id=_request_id(headers.get(b"x-request-id", b"")),
            peer_is_local=self._is_local(headers),
            route=Route("", "", app.health, None),
        )

    def _is_local(self, headers: dict[bytes, bytes]) -> bool:
        if self._transport is None or b"x-forwarded-for" in headers or b"forwarded" in headers:
            return False
        peer = self._transport.get_extra_info("peername")
        return not isinstance(peer, tuple) or _is_loopback(peer[0])

    async def run(self) -> None:
        call = self._call
        with logs.about(request_id=call.request_id) as self._about, ExitStack() as stack:
            above = call.headers.get(b"traceparent", b"")
            if self._app.tracer is not None and (above or self._scope["raw_path"] not in _PROBES):
                self._span = stack.enter_context(self._app.tracer.begin(self._method, above, kind="server"))
                above = self._span.traceparent
            if above and (trace := tracing.trace_id(above)):
                self._about["trace_id"] = trace
            await self._run()

    async def _run(self) -> None:
        try:
            answer, status = await self._answer()
        except ClientLeft as exc:
            self._begin(exc.status)
            self._abort()
            return
        except Exception as exc:
            answer = self._failure(exc)
        if isinstance(answer, Streamed):
            await self._stream(answer, status)
        else:
            await self._reply(answer)

    # The request

    async def _answer(self) -> tuple[Any, int]:
        call, scope = self._call, self._scope
        if self._app.stopping:
            raise Stopping
        found = self._app.table.find(self._method, scope["raw_path"])
        if isinstance(found, Match):
            call.route, call.target = found.endpoint.route, "/".join(found.values)
        self._app.guard.check_host(call)
        if isinstance(found, AEnvError):
            raise found
        endpoint = found.endpoint
        if call.route.scope is not None:
            call.token = _bearer(call.headers.get(b"authorization", b""))
            call.caller = await self._app.authenticate(call.token or None)
            self._about["owner"] = call.caller.owner
            call.caller.require(call.route.scope)
        arguments = endpoint.arguments(found.values, scope["query_string"], call.headers)
        upload = self._upload(endpoint)
        if upload is not None:
            arguments["body"] = upload
        elif endpoint.body is not None:
            arguments["body"] = endpoint.decode(await self._body())
        given = await self._watched(endpoint.route.handler(call, **arguments), upload)
        if isinstance(given, Streamed):
            return given, call.route.status
        envelope: dict[str, Any] = {"success": True, "code": 0, "message": "ok"}
        if isinstance(given, Paged):
            envelope |= {"data": given.items, "total": given.total}
            envelope |= {"limit": arguments["limit"], "offset": arguments["offset"]}
        else:
            envelope["data"] = given
        return Whole(call.route.status, _encode(envelope)), call.route.status

    def _most(self) -> int:
        return self._app.max_body if self._call.route.most is None else self._call.route.most

    def _declared(self) -> int | None:
        length = self._call.headers.get(b"content-length", b"")
        size = int(length) if length.isdigit() else None
        if size is not None and size > self._most():
            raise TooLarge(f"the body is over {self._most()} bytes")
        return size

    def _upload(self, endpoint: Endpoint) -> Upload | None:
        return Upload(self._receive, size=self._declared(), most=self._most()) if endpoint.upload else None

    async def _body(self) -> bytes:
        return b"".join([part async for part in Upload(self._receive, size=self._declared(), most=self._most())])

    async def _watched(self, work: Coroutine[Any, Any, Any], upload: Upload | None) -> Any:
        """What a handler returns. Its client's leaving cancels it, and so does the end of the service."""
        task = asyncio.create_task(work)
        watch: asyncio.Task[None] | None = None
        try:
            await asyncio.wait((task,), timeout=QUICK)
            if not task.done():
                watch = asyncio.create_task(self._until_gone(upload))
                with self._app.waited_for() as cut:
                    await asyncio.wait((task, watch, cut), return_when=asyncio.FIRST_COMPLETED)
            if task.cancelled():
                raise AEnvError("what the request asked for was cancelled in the service")
            if task.done():
                return task.result()
            raise ClientLeft("the client left") if watch is not None and watch.done() else Stopping
        finally:
            if watch is not None:
                watch.cancel()
            if not task.done():
                await finish(_end(task))

    async def _until_gone(self, upload: Upload | None = None) -> None:
        if upload is not None:
            await upload.ended.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # The answer

    def _failure(self, exc: Exception) -> Whole:
        if not isinstance(exc, AEnvError):
            log.error("%s failed, request %s", self._action, self._call.request_id, exc_info=exc)
            hint = f"the service's log says why, under request {self._call.request_id}"
            exc = AEnvError("the service failed", hint=hint)
        status = 503 if isinstance(exc, NetworkError) else exc.status
        self._error = exc.code
        headers = _JSON
        if status == 401:
            headers += ((b"www-authenticate", b"Bearer"),)
        if isinstance(exc, WrongMethod):
            headers += ((b"allow", ", ".join(exc.allowed).encode()),)
        if status == 503 or isinstance(exc, RateLimited):
            later = exc.retry_after if isinstance(exc, RateLimited) else None
            headers += ((b"retry-after", RETRY_AFTER if later is None else b"%d" % max(math.ceil(later), 1)),)
        envelope = {
            "success": False,
            "code": status,
            "message": _sound(exc.message),
            "data": None,
            "error": exc.code,
            "hint": None if exc.hint is None else _sound(exc.hint),
        }
        return Whole(status, _encode(envelope), headers)

    @property
    def _action(self) -> str:
        route = self._call.route
        return f"{route.method} {route.path}" if route.path else f"{self._method} -"

    def _begin(self, status: int) -> None:
        """The answer is known: count it, and put it in the audit log when it changed something or was refused."""
        call = self._call
        self._begun = True
        milliseconds = (time.monotonic() - self._began) * 1000
        self._app.metrics.answered(call.route, status, milliseconds, self._error)
        self._note(status, milliseconds)
        changes = bool(call.route.path) and call.route.method != "GET"
        if self._app.audit is not None and (changes or status in (401, 403)):
            self._app.audit(
                Audited(
                    at=timestamp(time.time()),
                    owner=call.caller.owner,
                    token=call.caller.token_id,
                    action=self._action,
                    target=_CONTROL.sub("?", call.target[:LONGEST_TARGET]),
                    status=status,
                    request_id=call.request_id,
                )
            )

    def _note(self, status: int, milliseconds: float) -> None:
        """Write the answer into the log, and what is known of it into its span."""
        call, endpoint = self._call, self._call.route.path or "-"
        fields = {"method": self._method, "endpoint": endpoint, "status": status, "ms": round(milliseconds, 3)}
        if self._error:
            fields["error"] = self._error
        if call.target:
            fields[logs.kind(endpoint)] = _CONTROL.sub("?", call.target[:LONGEST_TARGET])
        log.info("%s %d, request %s", self._action, status, call.request_id, extra=logs.fields(fields))
        if self._span is not None:
            self._span.name = self._action
            self._span.set("http.request.method", self._method)
            self._span.set("http.route", endpoint)
            self._span.set("http.response.status_code", status)
            self._span.set("aenv.request_id", call.request_id)
            self._span.set("aenv.owner", call.caller.owner)
            if status >= 500:
                self._span.end(error=self._error)

    def _headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        call = self._call
        return [*headers, *call.answer_headers, (b"x-request-id", call.request_id.encode()), *_COMMON]

    async def _reply(self, answer: Whole) -> None:
        status, body, headers = answer
        self._begin(status)
        lines = self._headers((*headers, (b"content-length", b"%d" % len(body))))
        await self._send({"type": "http.response.start", "status": status, "headers": lines})
        try:
            last = max(len(body) - 1, 0) // CHUNK * CHUNK
            for start in range(0, last, CHUNK):
                await self._piece(body[start : start + CHUNK])
            await self._send({"type": "http.response.body", "body": body[last:]})
        except ClientLeft:
            self._abort()

    async def _piece(self, chunk: bytes) -> None:
        try:
            async with asyncio.timeout(SLOW_READER):
                await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        except TimeoutError:
            raise ClientLeft(f"the client read nothing for {SLOW_READER:g} s") from None

    def _abort(self) -> None:
        """Break the connection: half an answer must not pass for a whole one."""
        if self._transport is not None:
            self._transport.abort()

    async def _stream(self, streamed: Streamed, status: int) -> None:
        """Send a stream until it ends, its client leaves or reads no more, or the service stops."""
        pump = asyncio.create_task(self._pump(streamed, status))
        watch = asyncio.create_task(self._until_gone())
        try:
            with self._app.waited_for(endless=streamed.endless) as cut:
                await asyncio.wait((pump, watch, cut), return_when=asyncio.FIRST_COMPLETED)
                stopped = cut.done()
        finally:
            watch.cancel()
            await finish(_end(pump))
        failure = None if pump.cancelled() else pump.exception()
        if failure is None and not pump.cancelled():
            return
        if not self._begun:
            await self._reply(self._failure(failure if isinstance(failure, Exception) else Stopping()))
        elif failure is None and stopped and streamed.endless:
            await self._send({"type": "http.response.body", "body": b""})
        else:
            if failure is not None:
                known = isinstance(failure, AEnvError)
                log.warning("%s broke off: %s", self._action, failure, exc_info=None if known else failure)
            self._abort()

    async def _pump(self, streamed: Streamed, status: int) -> None:
        chunks = streamed.chunks
        try:
            # What fails before its first piece is answered as a failure; one without an end may be silent for long.
            is_head = self._method == "HEAD"
            first: bytes | None = b"" if is_head or streamed.endless else await anext(chunks, b"")
            self._begin(status)
            headers: Headers = ((b"content-type", streamed.content_type.encode()), *streamed.headers)
            if streamed.size is not None:
                headers += ((b"content-length", b"%d" % streamed.size),)
            await self._send({"type": "http.response.start", "status": status, "headers": self._headers(headers)})
            sent, chunk = 0, first
            while chunk is not None:
                sent += len(chunk)
                if streamed.size is not None and sent > streamed.size:
                    break
                await self._piece(chunk)
                chunk = None if is_head else await anext(chunks, None)
            if not is_head and streamed.size not in (None, sent):
                raise AEnvError(f"{sent} bytes came where {streamed.size} were promised")
            await self._send({"type": "http.response.body", "body": b""})
        finally:
            await _close(chunks)


async def _close(chunks: AsyncIterator[bytes]) -> None:
    if (close := getattr(chunks, "aclose", None)) is not None:
        await close()


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel, and wait for what it still has to do. A stream that it made nevertheless is closed."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled() and task.exception() is None and isinstance(task.result(), Streamed):
        await _close(task.result().chunks)


def _request_id(given: bytes) -> str:
    return given.decode() if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)


def _bearer(header: bytes) -> str:
    return header[7:].strip().decode("latin-1") if header[:7].lower() == b"bearer " else ""


def _sound(text: str) -> str:
    """Without what UTF-8 cannot carry, such as half of a character from a file's name."""
    return text.encode(errors="replace").decode()


@lru_cache(maxsize=1024)
def _is_loopback(host: str) -> bool:
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback
