"""An instance as OpenEnv's clients see one: episodes of reset and step, over a WebSocket, HTTP and JSON-RPC.

What is served below ``/openenv`` is at the bottom.

An action is a call of a tool. A tool called ``step`` is what the actions of an environment are for, and says the reward
and the end, as Gymnasium's do; where there is none, a tool ``finish`` is added, which takes the reward and ends the
episode. What a tool says is an observation, also that it failed. What the platform or the environment fails at is an
error of the protocol, and never a reward.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

from aenv.errors import AEnvError, AuthorError, CallTimeout, Conflict, Invalid, NotFound
from aenv.models import to_json
from aenv.runtime.answers import Answer, Request, Response, cancelled
from aenv.runtime.functions import Timing
from aenv.runtime.ports import UpgradeRequired, socket_wanted
from aenv.runtime.replies import working
from aenv.runtime.service import Unhealthy
from aenv.runtime.tokens import Access
from aenv.runtime.websocket import GOING_AWAY, PROTOCOL, TRY_LATER, WebSocket, accept

if TYPE_CHECKING:
    from aenv.runtime.app import App, Handler

FINISH = "finish"
_LEAVING = 10.0
"""Seconds that a call has to end whose client has left, before the next one is let in."""
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_INVALID_REQUEST, _NO_METHOD, _INVALID_PARAMS, _FAILED = -32600, -32601, -32602, -32603


class _Message(Struct):
    type: str = ""
    data: Raw = Raw(b"{}")


class _Rpc(Struct):
    jsonrpc: str
    method: str
    id: str | int | None = None
    params: dict[str, Raw] = {}


_message = msgspec.json.Decoder(_Message).decode
_rpc = msgspec.json.Decoder(_Rpc).decode
_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_encode = msgspec.json.Encoder().encode


class Seen(NamedTuple):
    """What comes of a reset or a step."""

    observation: dict[str, Any]
    reward: float | None = None
    done: bool = False
    metadata: dict[str, Any] | None = None

    @property
    def told(self) -> dict[str, Any]:
        """As it is on the wire."""
        observation = {**self.observation, "metadata": self.metadata or {}}
        found = {"observation": observation, "reward": self.reward, "done": self.done}
        return {**found, "metadata": self.metadata} if self.metadata else found


class OpenEnv:
    """The episode of one instance, and the only session that there may be at a time."""

    def __init__(self, app: App, most: int) -> None:
        """``most``: bytes of a message."""
        self._app = app
        self._service = app.service
        self._most = most
        self._seat: WebSocket | None = None
        self._episode = uuid.uuid4().hex
        self._steps = 0
        self._is_over = False
        self._reward: tuple[str | None, dict[str, Any]] = None, {}
        """Which reward is taken at the end, and its arguments."""

    def routes(self, name: str) -> dict[str, tuple[Access, Handler]]:
        """How ``/openenv/<name>`` is served, by method."""
        return ROUTES.get(name, {})

    # Episodes

    async def reset(self, given: dict[str, Any]) -> Seen:
        """Begin an episode, and what is seen first. Where the author has no reset, an instance in which nothing was
        called is one that was reset."""
        seed, episode = given.pop("seed", None), given.pop("episode_id", None)
        reward, name = given.pop("reward", None), given.pop("reward_name", None)
        if not (seed is None or (isinstance(seed, int) and not isinstance(seed, bool))):
            raise Invalid(f"seed must be an integer or null, found {seed!r}"[:200])
        if not (episode is None or (isinstance(episode, str) and len(episode) <= 255)):
            raise Invalid("episode_id must be text of at most 255 characters")
        if not (reward is None or isinstance(reward, dict)) or not (name is None or isinstance(name, str)):
            raise Invalid("reward must be an object of arguments for the reward, and reward_name its name")
        if reward is not None or name is not None:
            self._service.reward(name).decode(to_json(reward or {}))
        if self._service.loaded.reset is not None or self._service.history.notes or given:
            seen = _seen(msgspec.json.decode(await self._service.reset(seed, given)))
        else:
            seen = Seen({})
            if seed is not None:
                self._service.reseed(seed)
        self._episode, self._steps, self._is_over = episode or uuid.uuid4().hex, 0, False
        self._reward = name, reward or {}
        return seen

    async def step(self, action: Raw) -> Seen:
        """Take an action."""
        fields = _read(action, "an action")
        kind, name = _text(fields, "type"), _text(fields, "tool_name")
        if kind == "list_tools":
            return Seen({"tools": self.tools})
        if self._is_over:
            raise Conflict("the episode is over", hint="call reset")
        stepping = self._service.loaded.tools.get("step")
        if kind != "call_tool" and name is None and stepping is not None:
            arguments = stepping.decode(bytes(action))
            self._steps += 1
            return self._ended(_seen(msgspec.json.decode(await self._service.call(stepping, arguments, Timing()))))
        name = name or _text(fields, "name")
        if name is None:
            raise Invalid("an action names no tool", hint='send {"tool_name": ..., "arguments": {...}}')
        self._steps += 1
        if name == FINISH and self.finishes:
            return self._ended(await self._finished())
        return await self._called(name, bytes(fields.get("arguments", b"{}")))

    @property
    def finishes(self) -> bool:
        """Whether there is a tool of ours that ends the episode."""
        return not {"step", FINISH} & self._service.loaded.tools.keys()

    @property
    def tools(self) -> list[dict[str, Any]]:
        """All that can be called, as OpenEnv lists it."""
        found = [
            {"name": tool["name"], "description": tool.get("description", ""), "input_schema": tool["inputSchema"]}
            for tool in self._app.mcp.tools("")
        ]
        if self.finishes:
            about = "End the episode, and take its reward."
            found.append({"name": FINISH, "description": about, "input_schema": {"type": "object", "properties": {}}})
        return found

    @property
    def state(self) -> dict[str, Any]:
        return {"episode_id": self._episode, "step_count": self._steps}

    def _ended(self, seen: Seen) -> Seen:
        self._is_over = seen.done
        return seen

    async def _called(self, name: str, given: bytes) -> Seen:
        function = self._service.loaded.tools.get(name)
        if function is None:
            return _refused(name, "tool_not_found", f"there is no tool {name!r}"[:200])
        try:
            arguments = function.decode(given)
        except Invalid as exc:
            return _refused(name, "invalid_args", exc.message)
        try:
            result = await self._service.call_tool(function, arguments, self._service.context(name))
        except CallTimeout as exc:
            return _refused(name, "timeout", exc.message)
        said = "\n".join(str(block.get("text", f"[{block.get('type')}]")) for block in _plain(result["content"]))
        if result["isError"]:
            return _refused(name, "execution_error", said)
        structured = _plain(result.get("structuredContent"))
        data = said if structured is None else structured
        if function.result.wrapped and isinstance(structured, dict) and set(structured) == {"result"}:
            data = structured["result"]
        return Seen(
            {
                "tool_name": name,
                "result": {
                    "content": result["content"],
                    "structured_content": structured,
                    "data": data,
                    "is_error": False,
                },
                "error": None,
            }
        )

    async def _finished(self) -> Seen:
        name, given = self._reward
        value: Any = None
        if self._service.loaded.rewards:
            function = self._service.reward(name)
            value = msgspec.json.decode(await self._service.call(function, function.decode(to_json(given)), Timing()))
        score = value.get("score") if isinstance(value, dict) else value
        result = {"content": [], "structured_content": None, "data": value, "is_error": False}
        return Seen({"tool_name": FINISH, "result": result, "error": None}, score, done=True)

    # Over a WebSocket

    def leave(self) -> None:
        """End the session."""
        if self._seat is not None:
            self._seat.close(GOING_AWAY, "the sandbox ends")

    def forget(self) -> None:
        """In a fork: the session is its parent's."""
        self._seat = None

    async def serve(self, key: str, scope: MutableMapping[str, Any]) -> None:
        """Give a client the seat until it leaves, or tell it that somebody else has it."""
        take_over = scope.get("aenv.upgrade")
        if take_over is None:
            raise UpgradeRequired("the connection cannot be upgraded", hint="send 'Connection: Upgrade'")
        try:
            client, early = take_over(PROTOCOL, f"sec-websocket-accept: {accept(key)}\r\n")
        except ConnectionError:
            return
        socket = WebSocket(client, self._most)
        socket.begin(early)
        if self._seat is not None:
            taken = "another session is open, and an instance has one at a time: make another instance for another one"
            await socket.send(_error(taken, "CAPACITY_REACHED", active_sessions=1, max_sessions=1))
            socket.close(TRY_LATER, "another session is open")
        else:
            self._seat = socket
            try:
                await self._serve(socket)
            finally:
                if self._seat is socket:
                    self._seat = None
                socket.close()
        await socket.ended

    async def _serve(self, socket: WebSocket) -> None:
        while (message := await socket.receive()) is not None:
            answer = Answer(None)
            answer.task = asyncio.create_task(self._run(message, answer))
            self._app.begun(answer)
            try:
                await asyncio.wait({answer.task, socket.ended}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not answer.done:
                    answer.cancel()
            if not answer.done:
                await asyncio.wait({answer.task}, timeout=_LEAVING)
                return
            if not answer.chunks[0]:
                return
            await socket.send(answer.chunks[0])

    async def _run(self, message: str, answer: Answer) -> None:
        try:
            reply = await self._replied(message)
        except asyncio.CancelledError as exc:
            lost = cancelled(exc) or AEnvError("the call was cancelled")
            answer.reply(Response(200, _failure(lost)))
            raise
        except AEnvError as exc:
            reply = _failure(exc)
        except Exception as exc:
            answer.reply(Response(200, _failure(AEnvError(f"the runtime failed: {exc!r}"))))
            raise
        answer.reply(Response(200, reply))

    async def _replied(self, text: str) -> bytes:
        """What a message is answered with; nothing when it says that the session is over."""
        try:
            message = _message(text)
        except msgspec.ValidationError as exc:
            return _error(f"Invalid message: {exc}", "VALIDATION_ERROR")
        except _NOT_JSON as exc:
            return _error(f"Invalid JSON: {exc}", "INVALID_JSON")
        kind = message.type
        if kind == "reset":
            return self._shown("observation", (await self.reset(_object(message.data))).told)
        if kind == "step":
            return self._shown("observation", (await self.step(message.data)).told)
        if kind == "state":
            return self._shown("state", self.state)
        if kind == "mcp":
            return self._shown("mcp", await self.rpc(bytes(message.data)))
        if kind == "close":
            return b""
        return _error(f"Unknown message type: {kind[:100]}", "UNKNOWN_TYPE")

    def _shown(self, kind: str, data: Any) -> bytes:
        return _encode({"type": kind, "data": self._hidden(data)})

    def _hidden(self, data: Any) -> Any:
        hidden = self._service.hidden
        return data if hidden is None else hidden.everything(_plain(data))

    # Over HTTP

    async def reset_over_http(self, request: Request) -> Response:
        return self._answer((await self.reset(_object(Raw(request.body or b"{}")))).told)

    async def step_over_http(self, request: Request) -> Response:
        fields = _read(Raw(request.body), "a step")
        if "action" not in fields:
            raise Invalid("a step has no action", hint='send {"action": {...}}')
        return self._answer((await self.step(fields["action"])).told)

    async def rpc_over_http(self, request: Request) -> Response:
        return self._answer(await self.rpc(request.body))

    async def health(self, request: Request) -> Response:
        """Why it is not healthy is told at ``/health``, to its owner."""
        try:
            await self._service.health({})
        except Unhealthy as exc:
            return Response(exc.status, _encode({"status": "unhealthy"}))
        return self._answer({"status": "healthy"})

    def state_over_http(self) -> Response:
        return self._answer(self.state)

    def schema(self) -> Response:
        """What actions, observations and the state look like."""
        stepping = self._service.loaded.tools.get("step")
        if stepping is not None:
            action = next(tool["input_schema"] for tool in self.tools if tool["name"] == "step")
            observation: dict[str, Any] = {"type": "object", "additionalProperties": True}
            found = {"action": {**action, "title": "StepAction"}, "observation": observation, "state": _STATE}
        else:
            action = {**_ACTION, "properties": {**_ACTION["properties"]}}
            action["properties"]["tool_name"] = {"type": "string", "enum": [tool["name"] for tool in self.tools]}
            found = {"action": action, "observation": _OBSERVATION, "state": _STATE}
        return Response(200, _encode(found))

    def metadata(self) -> Response:
        project = self._service.project
        return self._answer(
            {"name": project.name, "description": project.description or "", "version": project.version}
        )

    def openapi(self) -> Response:
        done = {"responses": {"200": {"description": "OK"}}}
        return self._answer(
            {
                "openapi": "3.1.0",
                "info": {"title": self._service.project.name, "version": "1.0.0"},  # of OpenEnv's HTTP API
                "servers": [{"url": "../openenv"}],
                "paths": {f"/{name}": {method.lower(): done for method in methods} for name, methods in ROUTES.items()},
            }
        )

    def _answer(self, data: Any) -> Response:
        return Response(200, _encode(self._hidden(data)))

    # Over JSON-RPC, without a session of MCP's

    async def rpc(self, body: bytes) -> dict[str, Any]:
        """Answer a message of OpenEnv's clients, which know no handshake."""
        try:
            request = _rpc(body)
        except _NOT_JSON as exc:
            return {"jsonrpc": "2.0", "id": None, "error": {"code": _INVALID_REQUEST, "message": str(exc)}}
        found: dict[str, Any] = {"jsonrpc": "2.0", "id": request.id}
        try:
            return {**found, "result": await self._asked(request.method, request.params)}
        except NotFound as exc:
            code, message = _NO_METHOD, exc.message
        except Invalid as exc:
            code, message = _INVALID_PARAMS, exc.message
        except AEnvError as exc:
            code, message = _FAILED, exc.message
        return {**found, "error": {"code": code, "message": message}}

    async def _asked(self, method: str, params: dict[str, Raw]) -> Any:
        if method in ("openenv/session/create", "openenv/session/close"):  # the WebSocket is what has the seat
            return {"session_id": self._app.boot, "closed": method.endswith("close")}
        if method == "tools/list":
            return {"tools": self.tools}
        if method != "tools/call":
            raise NotFound(f"Method not found: {method}"[:200])
        name, arguments = params.get("name", Raw(b"null")), params.get("arguments", Raw(b"{}"))
        seen = await self.step(Raw(_encode({"type": "call_tool", "tool_name": name, "arguments": arguments})))
        if error := seen.observation["error"]:
            raise AuthorError(error["message"])
        return seen.observation["result"]


def _seen(value: Any) -> Seen:
    """What an author's function returned, apart from what it says about the episode, where it does."""
    if value is None:
        return Seen({})
    if not isinstance(value, dict):
        return Seen({"result": value})
    observation = {key: item for key, item in value.items() if key not in _APART}
    metadata = {key: value[key] for key in ("info", "terminated", "truncated") if key in value}
    reward = value.get("reward")
    if not (reward is None or (isinstance(reward, (int, float)) and not isinstance(reward, bool))):
        raise AuthorError(f"a reward of {reward!r} is no number"[:200])
    return Seen(observation, reward, any(value.get(key) is True for key in _ENDS), metadata)


_ENDS = ("terminated", "truncated", "done")
_APART = frozenset((*_ENDS, "reward", "info", "metadata"))


def _refused(name: str, kind: str, message: str) -> Seen:
    """A call that did not do what was wanted: whoever acts is told of it."""
    return Seen({"tool_name": name, "result": None, "error": {"error_type": kind, "message": message}})


def _failure(exc: AEnvError) -> bytes:
    message = f"{exc.message}; {exc.hint}" if exc.hint else exc.message
    return _error(message, "VALIDATION_ERROR" if isinstance(exc, Invalid) else "EXECUTION_ERROR", error=exc.code)


def _error(message: str, code: str, **more: Any) -> bytes:
    return _encode({"type": "error", "data": {"message": message, "code": code, **more}})


def _plain(value: Any) -> Any:
    """Without parts that are JSON already."""
    return msgspec.json.decode(_encode(value))


def _read(data: Raw, what: str) -> dict[str, Raw]:
    try:
        return _fields(data)
    except _NOT_JSON as exc:
        raise Invalid(f"{what} is a JSON object: {exc}") from None


def _object(data: Raw) -> dict[str, Any]:
    return {name: msgspec.json.decode(value) for name, value in _read(data, "what a reset is given").items()}


def _text(fields: dict[str, Raw], name: str) -> str | None:
    try:
        return msgspec.json.decode(fields.get(name, b"null"), type=str | None)
    except _NOT_JSON:
        return None


_STATE = {
    "title": "State",
    "type": "object",
    "properties": {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer", "minimum": 0}},
}
_ACTION: dict[str, Any] = {
    "title": "CallToolAction",
    "type": "object",
    "properties": {
        "type": {"type": "string", "const": "call_tool", "default": "call_tool"},
        "arguments": {"type": "object", "default": {}},
        "metadata": {"type": "object"},
    },
    "required": ["tool_name"],
}
_OBSERVATION = {
    "title": "CallToolObservation",
    "type": "object",
    "properties": {
        "tool_name": {"type": "string"},
        "result": {"type": ["object", "null"]},
        "error": {
            "type": ["object", "null"],
            "properties": {"error_type": {"type": "string"}, "message": {"type": "string"}},
        },
        "metadata": {"type": "object"},
    },
}


def _later(serve: Callable[[OpenEnv, Request], Coroutine[Any, Any, Response]]) -> Handler:
    return lambda app, request, _: working(serve(app.openenv, request))


def _now(serve: Callable[[OpenEnv], Response]) -> Handler:
    return lambda app, request, _: serve(app.openenv)


ROUTES: dict[str, dict[str, tuple[Access, Handler]]] = {
    "ws": {"GET": (Access.OWNER, lambda app, request, _: socket_wanted(request))},
    "reset": {"POST": (Access.OWNER, _later(OpenEnv.reset_over_http))},
    "step": {"POST": (Access.OWNER, _later(OpenEnv.step_over_http))},
    "state": {"GET": (Access.OWNER, _now(OpenEnv.state_over_http))},
    "mcp": {"POST": (Access.OWNER, _later(OpenEnv.rpc_over_http))},
    "schema": {"GET": (Access.AGENT, _now(OpenEnv.schema))},
    "metadata": {"GET": (Access.AGENT, _now(OpenEnv.metadata))},
    "openapi.json": {"GET": (Access.AGENT, _now(OpenEnv.openapi))},
    "health": {"GET": (Access.NONE, _later(OpenEnv.health))},
}
