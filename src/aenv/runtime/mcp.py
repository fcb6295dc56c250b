"""The MCP endpoint for lifecycle and tools, on both kinds of revision.

2026-07-28: every POST stands for itself. 2025-11-25 and older: ``initialize`` opens a session, which owns its calls
in flight, its log level and its event streams, so that one client can never cancel or read another's.
A call is answered as JSON, and becomes an event stream only when there is something to say before the result.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import secrets
import threading
from collections import OrderedDict
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from aenv import __version__
from aenv.errors import AEnvError, CallTimeout, Invalid
from aenv.runtime.answers import EVENTS, JSON, Answer, Headers, Request, Response
from aenv.runtime.functions import Function
from aenv.runtime.service import Service, nearest, tool_error

MODERN = "2026-07-28"
LEGACY = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
RESUMABLE = "2025-11-25"
"""The session revision whose event streams begin with an id to resume from."""
_META = "io.modelcontextprotocol/"
_LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
_INTEGER = re.compile(r"-?[0-9]+(\.0+)?")
_MOST_SESSIONS = 4096
_MOST_STREAMS = 64
_RETRY_MS = 1000

PARSE_ERROR, INVALID_REQUEST, NO_METHOD, INVALID_PARAMS = -32700, -32600, -32601, -32602
HEADER_MISMATCH, UNSUPPORTED_VERSION, CANCELLED, PLATFORM = -32020, -32022, -32800, -32000
_STATUS = {NO_METHOD: 404} | dict.fromkeys(
    (PARSE_ERROR, INVALID_REQUEST, INVALID_PARAMS, HEADER_MISMATCH, UNSUPPORTED_VERSION), 400
)
Id = str | int
Reply = Response | Answer | tuple[Answer, int]
"""What a request gets; a tuple is an answer to be followed from that chunk on."""


def is_modern(request: Request) -> bool:
    """Whether a request belongs to the revisions without sessions, known to us or not."""
    version = request.header(b"mcp-protocol-version")
    return version is not None and version not in LEGACY


class _Meta(
    Struct,
    rename={
        "version": _META + "protocolVersion",
        "capabilities": _META + "clientCapabilities",
        "log_level": _META + "logLevel",
        "progress_token": "progressToken",
    },
):
    version: str | None = None
    capabilities: dict[str, Any] | None = None
    log_level: str | None = None
    progress_token: str | int | None = None


class _Params(Struct, rename={"meta": "_meta", "request_id": "requestId", "version": "protocolVersion"}):
    name: str | None = None
    arguments: Raw | UnsetType = UNSET
    meta: _Meta | None = None
    version: str | None = None
    request_id: Id | None = None
    level: str | None = None
    notifications: dict[str, Any] | None = None


class _Message(Struct):
    jsonrpc: str
    method: str | UnsetType = UNSET
    id: Id | UnsetType = UNSET
    params: _Params | None = None


_decode = msgspec.json.Decoder(_Message).decode
_encode = msgspec.json.Encoder().encode


class _Refused(Exception):
    """A JSON-RPC error on its way to the caller."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.data = data


def _error(code: int, message: str, id: Id | None, data: Any = None) -> bytes:
    error: dict[str, Any] = {"code": code, "message": message}
    if data is not None:
        error["data"] = data
    return _encode({"jsonrpc": "2.0", "id": id, "error": error})


class _Session:
    """One client of an older revision."""

    def __init__(self, version: str) -> None:
        self.id = secrets.token_urlsafe(24)
        self.version = version
        self.level = 0
        self.calls: dict[Id, Answer] = {}
        self.streams: OrderedDict[str, Answer] = OrderedDict()
        """Event streams that can be resumed, by the first part of their event ids."""
        self.listeners: set[_Events] = set()

    def keep(self, key: str, answer: Answer) -> None:
        self.streams[key] = answer
        if len(self.streams) > _MOST_STREAMS:
            self.streams.popitem(last=False)

    def close(self) -> None:
        for answer in (*self.calls.values(), *(events.answer for events in self.listeners)):
            answer.cancel()


class _Events:
    """An answer as server-sent events, with ids where the revision can resume."""

    def __init__(self, answer: Answer, session: _Session | None) -> None:
        self.answer = answer
        self._key = secrets.token_urlsafe(9) if session and session.version == RESUMABLE else None
        self._session = session

    def begin(self) -> None:
        headers: Headers = EVENTS
        if self._session:
            headers = [*EVENTS, (b"mcp-session-id", self._session.id.encode())]
        self.answer.begin(200, headers)
        if self._key and self._session:
            self._session.keep(self._key, self.answer)
            self.answer.write(b"id: %s.0\r\nretry: %d\r\ndata: \r\n\r\n" % (self._key.encode(), _RETRY_MS))

    def send(self, message: bytes) -> None:
        mark = b"id: %s.%d\r\n" % (self._key.encode(), len(self.answer.chunks)) if self._key else b""
        self.answer.write(b"event: message\r\n" + mark + b"data: " + message + b"\r\n\r\n")


class _Call:
    """One ``tools/call`` in flight: where its notifications and its result go."""

    def __init__(self, id: Id, answer: Answer, events: _Events | None, level: int | None) -> None:
        self.id = id
        self.answer = answer
        self._events = events
        self._level = level
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        if events is not None:
            answer.upgrade = events.begin

    def notify(self, method: str, params: dict[str, Any]) -> None:
        """Send a notification; from any thread."""
        if threading.get_ident() == self._thread:
            self._notify(method, params)
        else:
            self._loop.call_soon_threadsafe(self._notify, method, params)

    def _notify(self, method: str, params: dict[str, Any]) -> None:
        if self._events is None or self.answer.done:
            return
        if method == "notifications/message" and (
            self._level is None or _LEVELS.index(params["level"]) < self._level
        ):
            return
        if not self.answer.status:
            self._events.begin()
        self._events.send(_encode({"jsonrpc": "2.0", "method": method, "params": params}))

    def finish(self, message: bytes, status: int = 200) -> None:
        if self.answer.status and self._events is not None:
            self._events.send(message)
            self.answer.close()
        else:
            self.answer.reply(Response(status, message))


class _Tool:
    """A tool as it is listed, and the arguments that a client mirrors in headers."""

    def __init__(self, function: Function) -> None:
        self.function = function
        options = function.mark.options
        schema = options.get("input_schema") or function.arguments.schema
        self.listing: dict[str, Any] = {"name": function.name}
        if title := options.get("title"):
            self.listing["title"] = title
        if function.description:
            self.listing["description"] = function.description
        self.listing["inputSchema"] = schema
        if function.result.schema is not None:
            self.listing["outputSchema"] = function.result.schema
        if annotations := options.get("annotations"):
            self.listing["annotations"] = annotations
        self.headers = {
            name: f"mcp-param-{property['x-mcp-header']}".lower().encode()
            for name, property in schema.get("properties", {}).items()
            if isinstance(property, dict) and "x-mcp-header" in property
        }


class Endpoint:
    """``/mcp`` of one sandbox."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._listeners: dict[_Events, Id] = {}
        self._info = {"name": service.project.name, "version": service.project.version}
        self._stamp = {_META + "serverInfo": self._info}
        self._capabilities = {"tools": {"listChanged": True}, "logging": {}}
        self.refresh()

    def refresh(self) -> None:
        """Read the tools again, and tell every client that listens."""
        self._tools = {name: _Tool(function) for name, function in self._service.loaded.tools.items()}
        listing = [tool.listing for tool in self._tools.values()]
        self._listed = Raw(_encode({"tools": listing}))
        fields = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private", "_meta": self._stamp}
        self._listed_modern = Raw(_encode({"tools": listing, **fields}))
        changed = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}
        for session in self._sessions.values():
            for events in session.listeners:
                events.send(_encode(changed))
        for events, id in self._listeners.items():
            events.send(_encode({**changed, "params": {"_meta": {_META + "subscriptionId": id}}}))

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools as ``tools/list`` shows them."""
        return [tool.listing for tool in self._tools.values()]

    def close(self) -> None:
        """End every stream; calls in flight are the server's to wait for."""
        for events, id in list(self._listeners.items()):
            result = {"resultType": "complete", "_meta": {**self._stamp, _META + "subscriptionId": id}}
            events.send(_encode({"jsonrpc": "2.0", "id": id, "result": result}))
            events.answer.cancel()
        for session in self._sessions.values():
            for events in session.listeners:
                events.answer.cancel()

    def handle(self, request: Request) -> Reply:
        """Answer a request."""
        modern = is_modern(request)
        if request.method != "POST":
            return self._not_post(request, modern)
        accept = request.headers.get(b"accept", b"*/*")
        events = b"text/event-stream" in accept or b"*/*" in accept
        if not events and b"application/json" not in accept:
            return Response(406, _error(INVALID_REQUEST, "Accept must allow application/json or text/event-stream", None))
        id: Id | None = None
        try:
            message = _parse(request.body)
            if message.id is UNSET:
                return self._notification(request, message, modern)
            id = message.id
            if message.method is UNSET:
                raise _Refused(INVALID_REQUEST, "this server sends no requests, so it takes no responses")
            if modern:
                return self._modern(request, message, events)
            return self._legacy(request, message, events)
        except _Refused as exc:
            status = _STATUS.get(exc.code, 200) if modern or id is None else 200
            return Response(status, _error(exc.code, str(exc), id, exc.data))
        except _BadMessage as exc:
            return Response(400, _error(exc.code, str(exc), exc.id))

    def _not_post(self, request: Request, modern: bool) -> Reply:
        if modern or request.method not in ("GET", "DELETE"):
            return Response(405, headers=[(b"allow", b"POST" if modern else b"GET, POST, DELETE")])
        session = self._session(request)
        if isinstance(session, Response):
            return session
        if request.method == "DELETE":
            del self._sessions[session.id]
            session.close()
            return Response(200)
        if b"text/event-stream" not in request.headers.get(b"accept", b""):
            return Response(406, _error(INVALID_REQUEST, "Accept must allow text/event-stream", None))
        if last := request.header(b"last-event-id"):
            key, _, index = last.rpartition(".")
            answer = session.streams.get(key)
            if answer is None or not index.isdigit():
                return Response(404, _error(INVALID_REQUEST, "that event stream is no longer kept", None))
            return answer, int(index) + 1
        return self._listen(_Events(Answer(0), session), session)

    def _listen(self, events: _Events, session: _Session) -> Answer:
        session.listeners.add(events)
        events.begin()
        return _open(events, lambda: session.listeners.discard(events))

    def _session(self, request: Request) -> _Session | Response:
        id = request.header(b"mcp-session-id")
        if id is None:
            return Response(400, _error(INVALID_REQUEST, "Mcp-Session-Id is missing: call initialize first", None))
        session = self._sessions.get(id)
        if session is None:
            return Response(404, _error(INVALID_REQUEST, "there is no such session: call initialize again", None))
        self._sessions.move_to_end(id)
        return session

    def _notification(self, request: Request, message: _Message, modern: bool) -> Response:
        if modern:
            return Response(202)
        session = self._session(request)
        if isinstance(session, Response):
            return session
        params = message.params
        if message.method == "notifications/cancelled" and params and params.request_id is not None:
            if answer := session.calls.get(params.request_id):
                answer.cancel()
        return Response(202)

    def _legacy(self, request: Request, message: _Message, events: bool) -> Reply:
        assert message.id is not UNSET
        id, params = message.id, message.params or _Params()
        if message.method == "initialize":
            return self._initialize(id, params)
        session = self._session(request)
        if isinstance(session, Response):
            return session
        headers = [*JSON, (b"mcp-session-id", session.id.encode())]
        if message.method == "tools/call":
            if id in session.calls:
                raise _Refused(INVALID_REQUEST, f"request id {id!r} is in use by a call in flight")
            return self._call(id, params, events, session, session.level)
        if message.method == "tools/list":
            result: Any = self._listed
        elif message.method == "ping":
            result = {}
        elif message.method == "logging/setLevel":
            if params.level not in _LEVELS:
                raise _Refused(INVALID_PARAMS, f"level must be one of {', '.join(_LEVELS)}")
            session.level = _LEVELS.index(params.level)
            result = {}
        else:
            raise _Refused(NO_METHOD, f"Method not found: {message.method}")
        return Response(200, _encode({"jsonrpc": "2.0", "id": id, "result": result}), headers)

    def _initialize(self, id: Id, params: _Params) -> Response:
        session = _Session(params.version if params.version in LEGACY else LEGACY[0])
        self._sessions[session.id] = session
        if len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)[1].close()
        result = {
            "protocolVersion": session.version,
            "capabilities": self._capabilities,
            "serverInfo": self._info,
            "_meta": {"aenv/version": __version__},
        }
        body = _encode({"jsonrpc": "2.0", "id": id, "result": result})
        return Response(200, body, [*JSON, (b"mcp-session-id", session.id.encode())])

    def _modern(self, request: Request, message: _Message, events: bool) -> Reply:
        assert message.id is not UNSET
        version = request.header(b"mcp-protocol-version") or ""
        id, params = message.id, message.params or _Params()
        meta = params.meta
        if meta is None or meta.version is None or meta.capabilities is None:
            raise _Refused(INVALID_PARAMS, f"params._meta needs {_META}protocolVersion and {_META}clientCapabilities")
        _check_headers(request, message, meta.version, version)
        if version != MODERN:
            data = {"supported": [MODERN], "requested": version}
            raise _Refused(UNSUPPORTED_VERSION, f"Unsupported protocol version {version}", data)
        if message.method == "tools/call":
            level = _LEVELS.index(meta.log_level) if meta.log_level in _LEVELS else None
            if (tool := self._tools.get(params.name or "")) and tool.headers:
                _check_mirrored(request, tool.headers, params.arguments)
            return self._call(id, params, events, None, level)
        if message.method == "tools/list":
            result: Any = self._listed_modern
        elif message.method == "server/discover":
            result = {
                "supportedVersions": [MODERN],
                "capabilities": self._capabilities,
                "resultType": "complete",
                "ttlMs": 0,
                "cacheScope": "private",
                "_meta": self._stamp,
            }
        elif message.method == "subscriptions/listen":
            return self._subscribe(id, params.notifications or {}, events)
        else:
            raise _Refused(NO_METHOD, f"Method not found: {message.method}")
        return Response(200, _encode({"jsonrpc": "2.0", "id": id, "result": result}))

    def _subscribe(self, id: Id, wanted: dict[str, Any], accepts: bool) -> Reply:
        if not accepts:
            return Response(406, _error(INVALID_REQUEST, "Accept must allow text/event-stream", id))
        events = _Events(Answer(0), None)
        events.begin()
        honoured = {"toolsListChanged": True} if wanted.get("toolsListChanged") else {}
        params = {"notifications": honoured, "_meta": {_META + "subscriptionId": id}}
        acknowledged = {"jsonrpc": "2.0", "method": "notifications/subscriptions/acknowledged", "params": params}
        events.send(_encode(acknowledged))
        if honoured:
            self._listeners[events] = id
        return _open(events, lambda: self._listeners.pop(events, None))

    def _call(
        self,
        id: Id,
        params: _Params,
        accepts_events: bool,
        session: _Session | None,
        level: int | None,
    ) -> Reply:
        if params.name is None:
            raise _Refused(INVALID_PARAMS, "params.name is missing: which tool?")
        tool = self._tools.get(params.name)
        given = b"{}" if params.arguments is UNSET else bytes(params.arguments)
        given = b"{}" if given == b"null" else given
        try:
            if tool is None:
                raise Invalid(f"there is no tool {params.name!r}; {nearest(self._service.loaded.tools, params.name)}")
            arguments = tool.function.decode(given)
        except Invalid as exc:
            return Response(200, self._result(id, tool_error(str(exc)), session))
        # A cut connection is a cancellation in 2026-07-28; before, only notifications/cancelled is.
        answer = Answer(0 if session is None else None)
        call = _Call(id, answer, _Events(answer, session) if accepts_events else None, level)
        token = params.meta.progress_token if params.meta else None
        answer.task = asyncio.create_task(self._run(call, tool.function, arguments, token, session))
        if session is not None:
            session.calls[id] = answer
        return answer

    async def _run(
        self,
        call: _Call,
        function: Function,
        arguments: dict[str, Any],
        token: str | int | None,
        session: _Session | None,
    ) -> None:
        try:
            context = self._service.context(function.name, call.notify, token)
            result = await self._service.call_tool(function, arguments, context)
            call.finish(self._result(call.id, result, session))
        except asyncio.CancelledError:
            call.finish(_error(CANCELLED, "Request cancelled", call.id))
            raise
        except CallTimeout as exc:
            call.finish(_error(PLATFORM, str(exc), call.id, {"aenv": exc.to_wire()}))
        except Exception as exc:
            error = exc if isinstance(exc, AEnvError) else AEnvError(f"the runtime failed: {exc!r}")
            call.finish(_error(PLATFORM, str(error), call.id, {"aenv": error.to_wire()}))
            raise
        finally:
            if session is not None:
                session.calls.pop(call.id, None)

    def _result(self, id: Id, result: dict[str, Any], session: _Session | None) -> bytes:
        if session is None:
            result["resultType"] = "complete"
            result["_meta"] = self._stamp
        return _encode({"jsonrpc": "2.0", "id": id, "result": result})


class _BadMessage(Exception):
    def __init__(self, code: int, message: str, id: Id | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.id = id


def _parse(body: bytes) -> _Message:
    try:
        message = _decode(body)
    except msgspec.ValidationError as exc:
        found = msgspec.json.decode(body)
        if isinstance(found, list):
            raise _BadMessage(INVALID_REQUEST, "batches are not supported: send one message") from None
        id = found.get("id") if isinstance(found, dict) else None
        code = INVALID_PARAMS if "$.params" in str(exc) else INVALID_REQUEST
        raise _BadMessage(code, str(exc), id if isinstance(id, (str, int)) else None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise _BadMessage(PARSE_ERROR, f"the body is not JSON: {exc}") from None
    if message.jsonrpc != "2.0":
        id = None if message.id is UNSET else message.id
        raise _BadMessage(INVALID_REQUEST, "jsonrpc must be '2.0'", id)
    return message


def _check_headers(request: Request, message: _Message, meta_version: str, version: str) -> None:
    """The routing headers of 2026-07-28 must say what the body says."""
    if len(request.headers) != len(request.raw_headers):
        names = [name for name, _ in request.raw_headers]
        for name in (b"mcp-protocol-version", b"mcp-method", b"mcp-name"):
            if names.count(name) > 1:
                raise _Refused(HEADER_MISMATCH, f"header {name.decode()} is given twice")
    if meta_version != version:
        raise _Refused(HEADER_MISMATCH, "MCP-Protocol-Version differs from params._meta")
    if request.header(b"mcp-method") != message.method:
        raise _Refused(HEADER_MISMATCH, "Mcp-Method differs from the body's method")
    name = message.params.name if message.params else None
    if message.method == "tools/call" and name is not None and _plain_header(request, b"mcp-name") != name:
        raise _Refused(HEADER_MISMATCH, "Mcp-Name differs from params.name")


def _check_mirrored(request: Request, headers: dict[str, bytes], arguments: Raw | UnsetType) -> None:
    given = msgspec.json.decode(arguments) if arguments is not UNSET else {}
    for name, header in headers.items():
        value = given.get(name) if isinstance(given, dict) else None
        shown = _plain_header(request, header)
        if value is None and shown is None:
            continue
        if shown is None or value is None or not _same(shown, value):
            raise _Refused(HEADER_MISMATCH, f"header {header.decode()} differs from argument {name!r}")


def _same(shown: str, value: Any) -> bool:
    if isinstance(value, bool):
        return shown == ("true" if value else "false")
    if isinstance(value, int):
        return _INTEGER.fullmatch(shown) is not None and float(shown) == value
    return shown == value


def _plain_header(request: Request, name: bytes) -> str | None:
    """A header's text; what does not fit in one travels as ``=?base64?...?=``."""
    value = request.headers.get(name)
    if value is None:
        return None
    text = value.decode("latin-1").strip()
    if not (text.startswith("=?base64?") and text.endswith("?=")):
        return text
    try:
        coded = text[len("=?base64?") : -len("?=")]
        decoded = base64.b64decode(coded, validate=True)
        if base64.b64encode(decoded).decode() != coded:
            raise ValueError("not canonical")
        return decoded.decode()
    except (binascii.Error, ValueError) as exc:
        raise _Refused(HEADER_MISMATCH, f"header {name.decode()} is not valid base64") from exc


def _open(events: _Events, closed: Any) -> Answer:
    """Keep a stream open until its client leaves or the server stops."""

    async def wait() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            closed()
            events.answer.close()

    events.answer.task = asyncio.create_task(wait())
    return events.answer
