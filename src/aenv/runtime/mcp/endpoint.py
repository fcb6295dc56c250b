"""``/mcp``: which message gets which answer."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

from msgspec import UNSET, Raw

from aenv import __version__
from aenv.errors import AEnvError, Invalid, did_you_mean
from aenv.runtime.answers import JSON, Answer, Kept, Request, Response, cancelled
from aenv.runtime.functions import Function, Timing
from aenv.runtime.mcp.headers import check_headers, check_mirrored
from aenv.runtime.mcp.messages import (
    CANCELLED,
    INVALID_PARAMS,
    INVALID_REQUEST,
    LEGACY,
    META,
    MODERN,
    NO_METHOD,
    STATUS,
    UNSUPPORTED_VERSION,
    BadMessage,
    Id,
    Message,
    Params,
    Refused,
    encode,
    error,
    is_modern,
    parse,
)
from aenv.runtime.mcp.streams import LEVELS, Call, Events, Session, hold_open
from aenv.runtime.service import Service, tool_error

_MOST_SESSIONS = 4096
Reply = Response | Answer | tuple[Answer, int]
"""What a request gets; a tuple is an answer to be followed from that chunk on."""


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
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._streams = Kept()
        self._listeners: dict[Events, Id] = {}
        self._info = {"name": service.project.name, "version": service.project.version}
        self._stamp = {META + "serverInfo": self._info}
        self._capabilities = {"tools": {"listChanged": True}, "logging": {}}
        self.refresh()

    def refresh(self) -> None:
        """Read the tools again, and tell every client that listens."""
        self._tools = {name: _Tool(function) for name, function in self._service.loaded.tools.items()}
        self._lists: dict[tuple[str | None, bool], Raw] = {}
        changed = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}
        for session in self._sessions.values():
            for events in session.listeners:
                events.send(encode(changed))
        for events, id in self._listeners.items():
            events.send(encode({**changed, "params": {"_meta": {META + "subscriptionId": id}}}))

    def tools(self, agent: str | None = None) -> list[dict[str, Any]]:
        """The tools as ``tools/list`` shows them to an agent, or to the owner."""
        return [self._tools[name].listing for name in self._service.tools(agent)]

    def _listed(self, agent: str | None, modern: bool) -> Raw:
        """The same, on the wire."""
        found = self._lists.get((agent, modern))
        if found is None:
            more = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private", "_meta": self._stamp}
            found = Raw(encode({"tools": self.tools(agent), **(more if modern else {})}))
            self._lists[agent, modern] = found
        return found

    def close(self) -> None:
        """End every stream; calls in flight are the server's to wait for."""
        for events, id in list(self._listeners.items()):
            result = {"resultType": "complete", "_meta": {**self._stamp, META + "subscriptionId": id}}
            events.send(encode({"jsonrpc": "2.0", "id": id, "result": result}))
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
            return Response(
                406, error(INVALID_REQUEST, "Accept must allow application/json or text/event-stream", None)
            )
        id: Id | None = None
        try:
            message = parse(request.body)
            if message.id is UNSET:
                return self._notification(request, message, modern)
            id = message.id
            if message.method is UNSET:
                raise Refused(INVALID_REQUEST, "this server sends no requests, so it takes no responses")
            if modern:
                return self._modern(request, message, events)
            return self._legacy(request, message, events)
        except Refused as exc:
            status = STATUS.get(exc.code, 200) if modern or id is None else 200
            return Response(status, error(exc.code, str(exc), id, exc.data))
        except BadMessage as exc:
            return Response(400, error(exc.code, str(exc), exc.id))

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
            return Response(406, error(INVALID_REQUEST, "Accept must allow text/event-stream", None))
        if last := request.header(b"last-event-id"):
            key, _, index = last.rpartition(".")
            answer = self._streams.get(f"{session.id} {key}")
            if answer is None or not index.isdigit():
                return Response(404, error(INVALID_REQUEST, "that event stream is no longer kept", None))
            return answer, int(index) + 1
        return self._listen(Events(Answer(0), session), session)

    def _listen(self, events: Events, session: Session) -> Answer:
        session.listeners.add(events)
        answer = hold_open(events, lambda: session.listeners.discard(events))
        events.begin()
        return answer

    def _session(self, request: Request) -> Session | Response:
        id = request.header(b"mcp-session-id")
        if id is None:
            return Response(400, error(INVALID_REQUEST, "Mcp-Session-Id is missing: call initialize first", None))
        session = self._sessions.get(id)
        if session is None:
            return Response(404, error(INVALID_REQUEST, "there is no such session: call initialize again", None))
        self._sessions.move_to_end(id)
        return session

    def _notification(self, request: Request, message: Message, modern: bool) -> Response:
        if modern:
            return Response(202)
        session = self._session(request)
        if isinstance(session, Response):
            return session
        params = message.params
        cancelled = params.request_id if params and message.method == "notifications/cancelled" else None
        if cancelled is not None and (answer := session.calls.get(cancelled)):
            answer.cancel()
        return Response(202)

    def _legacy(self, request: Request, message: Message, events: bool) -> Reply:
        assert message.id is not UNSET
        id, params = message.id, message.params or Params()
        if message.method == "initialize":
            return self._initialize(id, params)
        session = self._session(request)
        if isinstance(session, Response):
            return session
        headers = [*JSON, (b"mcp-session-id", session.id.encode())]
        if message.method == "tools/call":
            if id in session.calls:
                raise Refused(INVALID_REQUEST, f"request id {id!r} is in use by a call in flight")
            return self._call(id, params, events, session, session.level, request.agent)
        if message.method == "tools/list":
            result: Any = self._listed(request.agent, modern=False)
        elif message.method == "ping":
            result = {}
        elif message.method == "logging/setLevel":
            if params.level not in LEVELS:
                raise Refused(INVALID_PARAMS, f"level must be one of {', '.join(LEVELS)}")
            session.level = LEVELS.index(params.level)
            result = {}
        else:
            raise Refused(NO_METHOD, f"Method not found: {message.method}")
        return Response(200, encode({"jsonrpc": "2.0", "id": id, "result": result}), headers)

    def _initialize(self, id: Id, params: Params) -> Response:
        session = Session(params.version if params.version in LEGACY else LEGACY[0], self._streams)
        self._sessions[session.id] = session
        if len(self._sessions) > _MOST_SESSIONS:
            idle = next((old for old in self._sessions.values() if not old.calls), None)
            if idle is not None and idle is not session:
                del self._sessions[idle.id]
                idle.close()
        result = {
            "protocolVersion": session.version,
            "capabilities": self._capabilities,
            "serverInfo": self._info,
            "_meta": {"aenv/version": __version__},
        }
        body = encode({"jsonrpc": "2.0", "id": id, "result": result})
        return Response(200, body, [*JSON, (b"mcp-session-id", session.id.encode())])

    def _modern(self, request: Request, message: Message, events: bool) -> Reply:
        assert message.id is not UNSET
        version = request.header(b"mcp-protocol-version") or ""
        id, params = message.id, message.params or Params()
        meta = params.meta
        if meta is None or meta.version is None or meta.capabilities is None:
            raise Refused(INVALID_PARAMS, f"params._meta needs {META}protocolVersion and {META}clientCapabilities")
        check_headers(request, message, meta.version, version)
        if version != MODERN:
            data = {"supported": [MODERN], "requested": version}
            raise Refused(UNSUPPORTED_VERSION, f"Unsupported protocol version {version}", data)
        if message.method == "tools/call":
            level = LEVELS.index(meta.log_level) if meta.log_level in LEVELS else None
            if (tool := self._tools.get(params.name or "")) and tool.headers:
                check_mirrored(request, tool.headers, params.arguments)
            return self._call(id, params, events, None, level, request.agent)
        if message.method == "tools/list":
            result: Any = self._listed(request.agent, modern=True)
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
            raise Refused(NO_METHOD, f"Method not found: {message.method}")
        return Response(200, encode({"jsonrpc": "2.0", "id": id, "result": result}))

    def _subscribe(self, id: Id, wanted: dict[str, Any], accepts: bool) -> Reply:
        if not accepts:
            return Response(406, error(INVALID_REQUEST, "Accept must allow text/event-stream", id))
        events = Events(Answer(0), None)
        events.begin()
        honoured = {"toolsListChanged": True} if wanted.get("toolsListChanged") else {}
        params = {"notifications": honoured, "_meta": {META + "subscriptionId": id}}
        acknowledged = {"jsonrpc": "2.0", "method": "notifications/subscriptions/acknowledged", "params": params}
        events.send(encode(acknowledged))
        if honoured:
            self._listeners[events] = id
        return hold_open(events, lambda: self._listeners.pop(events, None))

    def _call(
        self,
        id: Id,
        params: Params,
        accepts_events: bool,
        session: Session | None,
        level: int | None,
        agent: str | None,
    ) -> Reply:
        timing = Timing()
        if params.name is None:
            raise Refused(INVALID_PARAMS, "params.name is missing: which tool?")
        offered = self._service.tools(agent)
        tool = self._tools[params.name] if params.name in offered else None
        given = b"{}" if params.arguments is UNSET else bytes(params.arguments)
        given = b"{}" if given == b"null" else given
        try:
            if tool is None:
                raise Invalid(f"there is no tool {params.name!r}; {did_you_mean(params.name, offered)}")
            arguments = tool.function.decode(given)
        except Invalid as exc:
            return Response(200, self._result(id, tool_error(str(exc)), session))
        # A cut connection is a cancellation in 2026-07-28; before, only notifications/cancelled is.
        answer = Answer(0 if session is None else None)
        call = Call(id, answer, Events(answer, session) if accepts_events else None, level)
        token = params.meta.progress_token if params.meta else None
        answer.task = asyncio.create_task(self._run(call, tool.function, arguments, token, session, timing, agent))
        if session is not None:
            session.calls[id] = answer
        return answer

    async def _run(
        self,
        call: Call,
        function: Function,
        arguments: dict[str, Any],
        token: str | int | None,
        session: Session | None,
        timing: Timing,
        agent: str | None,
    ) -> None:
        try:
            context = self._service.context(function.name, call.notify, token, agent)
            result = await self._service.call_tool(function, arguments, context, timing)
            call.finish(self._result(call.id, result, session), [*JSON, timing.header()])
        except asyncio.CancelledError as exc:
            if lost := cancelled(exc):
                call.fail(lost)
            else:
                call.finish(error(CANCELLED, "Request cancelled", call.id))
            raise
        except AEnvError as exc:
            call.fail(exc, [*JSON, timing.header()])
        except Exception as exc:
            failed = AEnvError(f"the runtime failed: {exc!r}")
            call.fail(failed)
            raise
        finally:
            if session is not None:
                session.calls.pop(call.id, None)

    def _result(self, id: Id, result: dict[str, Any], session: Session | None) -> bytes:
        if session is None:
            result["resultType"] = "complete"
            result["_meta"] = self._stamp
        return encode({"jsonrpc": "2.0", "id": id, "result": result})
