"""The sandbox as one ASGI application: what is served where, and who may ask.

The routes are at the bottom. A handler returns a ``Response`` or an ``Answer``; nothing here waits for author code.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import aclosing, contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from aenv import __version__
from aenv.errors import AEnvError, Conflict, Invalid, NotFound, SandboxLost, TooLarge, Unsupported
from aenv.runtime import delivery, files, functions, nesting, ports, trusted
from aenv.runtime.access import Guard
from aenv.runtime.answers import BYTES, Answer, Answers, Request, Response
from aenv.runtime.commands import Command
from aenv.runtime.functions import Function, Timing
from aenv.runtime.hidden import Answering
from aenv.runtime.history import overhear
from aenv.runtime.mcp import LEGACY, MODERN, Endpoint, Reply
from aenv.runtime.protocol import Receive, Send
from aenv.runtime.replies import failure, is_call, json_object, query, success, working
from aenv.runtime.sending import follow, send_whole
from aenv.runtime.service import Service, Unhealthy, log, lookup
from aenv.runtime.tokens import Access

if TYPE_CHECKING:
    from aenv.project import Project
    from aenv.runtime.a2a import A2A
    from aenv.runtime.loader import Loaded
    from aenv.runtime.openenv import OpenEnv
    from aenv.runtime.shells import Shells
    from aenv.runtime.warm import Warm
    from aenv.runtime.wrapped import Wrapped

Outcome = Reply | ports.Tunnel | ports.Shell | ports.Socket | ports.Carrier
Handler = Callable[["App", Request, str], Outcome]

PATIENCE = 10.0
"""Seconds a call with an id goes on unheard, for its client to come back."""

_command = msgspec.json.Decoder(Command).decode


class App:
    """One sandbox's HTTP surface."""

    def __init__(self, service: Service, guard: Guard, *, max_body: int) -> None:
        self.service = service
        self.mcp = Endpoint(service)
        self.wrapped: Wrapped | None = None
        self.warm: Warm | None = None
        self.answers = Answers()
        self.tunnels = ports.Tunnels(self._stirred)
        self._shells: Shells | None = None
        self._openenv: OpenEnv | None = None
        self._a2a: A2A | None = None
        self.calls: set[asyncio.Task[None]] = set()
        """Calls in flight."""
        self.boot = secrets.token_hex(8)
        """Names this life of the sandbox: a caller that saw another one must hear that its state is gone."""
        self._guard = guard
        self._max_body = max_body
        self._theirs: frozenset[str] = frozenset()
        self._in_flight = 0
        self._begun = 0
        """How many calls there were that may have changed something."""
        self._last = monotonic()

    def wrap(self, wrapped: Wrapped) -> None:
        """Let the project's own MCP server answer at ``/mcp``."""
        self.wrapped = wrapped
        self._theirs = _tools_of_the_server(self.service)
        self.mcp.refresh()  # its tools are among ours now

    def load(self, project: Project, loaded: Loaded) -> None:
        """Take a project that was not imported before."""
        self.service.load(project, loaded)
        self.mcp.refresh()

    def begin(self, guard: Guard) -> None:
        """Begin a life of its own, in a process forked from where it was made."""
        self.boot = secrets.token_hex(8)
        self._guard = guard
        self._last = monotonic()
        if self._openenv is not None:
            self._openenv.forget()

    @property
    def openenv(self) -> OpenEnv:
        """Made when the first client of OpenEnv's comes."""
        if self._openenv is None:
            with trusted.imports():
                from aenv.runtime.openenv import OpenEnv

            self._openenv = OpenEnv(self, self._max_body)
        return self._openenv

    @property
    def a2a(self) -> A2A:
        """Made when the first client of A2A's comes."""
        if not self.service.loaded.agents:
            raise NotFound("this environment has no agent", hint="register one with @register_agent")
        if self._a2a is None:
            with trusted.imports():
                from aenv.runtime.a2a import A2A

            self._a2a = A2A(self)
        return self._a2a

    @property
    def shells(self) -> Shells:
        """Made when the first is wanted, which in most sandboxes is never."""
        if self._shells is None:
            with trusted.imports():
                from aenv.runtime.shells import Shells

            self._shells = Shells(self._stirred)
        return self._shells

    @property
    def idle_seconds(self) -> float:
        """For how long nobody has wanted anything: 0 while a call runs. Health checks and listeners do not count."""
        return 0.0 if self._in_flight else monotonic() - self._last

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"a sandbox serves HTTP, not {scope['type']}")
        request = Request(scope["method"], scope["path"], scope["query_string"], scope["headers"], b"")
        if self.service.hidden is not None:
            send = Answering(self.service.hidden, request.path, send)
        try:
            self._guard.check_host(request)
            needed, handler, rest = self._route(request)
            self._guard.require(request, needed)
            if request.agent and request.agent not in self.service.loaded.players:
                raise NotFound(f"there is no agent {request.agent!r}", hint=_which(self.service.loaded.players))
            if self.warm is not None:
                self.warm.admit(request.path)
            self._same_life(request)
            nesting.enter(request.headers.get(nesting.HEADER))
            request.body = await self._body(request, receive)
            reply = self._once(request, handler, rest)
            if isinstance(reply, ports.Tunnel):
                await self.tunnels.serve(reply, scope)
                return
            if isinstance(reply, ports.Shell):
                await self.shells.serve(self.service.instance.working_directory, scope)
                return
            if isinstance(reply, ports.Socket):
                await self.openenv.serve(reply.key, scope)
                return
            if isinstance(reply, ports.Carrier):
                await self._carried(scope)
                return
        except AEnvError as exc:
            reply = failure(exc)
        except _Gone:
            return
        if isinstance(reply, Response):
            await send_whole(reply, send)
        elif isinstance(reply, Answer):
            await follow(reply, 0, receive, send)
        else:
            await follow(*reply, receive, send)

    def close_streams(self) -> None:
        """End the streams that clients hold open; calls in flight go on."""
        self.mcp.close()
        self.tunnels.close()
        if self._shells is not None:
            self._shells.close()
        if self._openenv is not None:
            self._openenv.leave()
        if self.service.children is not None:
            self.service.children.close()
        if self.wrapped is not None:
            self.wrapped.close()

    async def _carried(self, scope: MutableMapping[str, Any]) -> None:
        """Let a client carry calls to what this sandbox depends on, until it leaves."""
        if self.service.children is None:
            raise Unsupported("this environment depends on no other", hint="deployConfig.dependsOn names some")
        await self.service.children.serve(scope, self._offer, self._stirred)

    def _offer(self, tools: list[Function]) -> None:
        """Have tools of others among our own."""
        self.service.offer(tools)
        self.mcp.refresh()

    def _route(self, request: Request) -> tuple[Access, Handler, str]:
        path = request.path
        if found := EXACT.get(path):
            methods, rest = found, ""
        else:
            first, _, rest = path[1:].partition("/")
            methods = PREFIX.get(first, {}) if rest else {}
            if first == "openenv":
                methods = self.openenv.routes(rest)
        if route := methods.get(request.method):
            return *route, rest
        if (request.method, path) in self.service.loaded.endpoints:
            return Access.OWNER, App.endpoint, path
        if methods:
            raise _WrongMethod(f"{request.method} is not served at {path}", hint=f"use {', '.join(methods)}")
        if path == delivery.PATH:
            raise Conflict(delivery.ALREADY)
        raise NotFound(
            f"nothing is served at {path}",
            hint=f"served: {', '.join([*EXACT, *map('/{}/...'.format, PREFIX)])}",
        )

    def _same_life(self, request: Request) -> None:
        known = request.header(b"aenv-boot")
        if known is not None and known != self.boot:
            raise SandboxLost("the sandbox was restarted, and what the episode did in it is gone")

    async def _body(self, request: Request, receive: Receive) -> bytes:
        limit = self._max_body
        if int(request.headers.get(b"content-length", b"0")) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size = 0
        is_probe = request.path == "/health"
        while True:
            message = await receive()
            if not is_probe:
                self._last = monotonic()
            if message["type"] == "http.disconnect":
                raise _Gone
            if part := message.get("body", b""):
                parts.append(part)
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
            if not message.get("more_body"):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def _once(self, request: Request, handler: Handler, rest: str) -> Outcome:
        """Handle a request, or answer again what was answered before under the same call id."""
        call_id = request.header(b"aenv-call-id")
        if call_id is None:
            return self._start(handler(self, request, rest), request)
        if answer := self.answers.find(call_id, request):
            return answer
        reply = self._start(handler(self, request, rest), request)
        if isinstance(reply, Answer) and not reply.transient:
            reply.patience = PATIENCE
            self.answers.keep(call_id, request, reply)
        return reply

    def _start(self, reply: Outcome, request: Request) -> Outcome:
        if isinstance(reply, Answer) and reply.task is not None:
            if is_call(request):
                self.begun(reply, changes=request.method != "GET")
            else:
                self.calls.add(reply.task)
                reply.task.add_done_callback(self._closed)
        return reply

    def begun(self, answer: Answer, *, changes: bool = True) -> None:
        """Count a call from now on, until its task ends. ``changes``: whether it may change something."""
        assert answer.task is not None
        self.calls.add(answer.task)
        self._in_flight += 1
        self._begun += changes
        answer.task.add_done_callback(self._ended)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the task that enters this as a call, for as long as it is inside."""
        task = asyncio.current_task()
        assert task is not None
        self.calls.add(task)
        self._in_flight += 1
        self._begun += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            self._stirred()
            self.calls.discard(task)

    def _stirred(self) -> None:
        self._last = monotonic()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._in_flight -= 1
        self._last = monotonic()
        self._closed(task)

    def _closed(self, task: asyncio.Task[None]) -> None:
        self.calls.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("a call failed in the runtime itself", exc_info=error)

    # Handlers, in the order of the routes.

    def serve_mcp(self, request: Request, rest: str) -> Reply:
        if self.wrapped is None or self.wrapped.leaves_to_us(request):
            return self.mcp.handle(request)
        answer = self.wrapped.handle(request)
        overhear(self.service.history, request, answer, self._theirs)
        return answer

    def health(self, request: Request, rest: str) -> Reply:
        known = self._guard.access(request) > Access.NONE

        async def answer() -> Response:
            try:
                data = self.warm.health() if self.warm is not None else None
                if data is None:
                    data = await self.service.health(query(request) if known else {})
                elif data["status"] != "warm":
                    raise Unhealthy(data["reason"], data)
                response = success(data if known else {"status": data["status"]})
                response.headers = [*response.headers, (b"aenv-boot", self.boot.encode())]
            except Unhealthy as exc:
                response = failure(exc if known else Unhealthy("unhealthy", {"status": "unhealthy"}))
            if known:
                response.headers = [*response.headers, (b"aenv-calls", b"%d" % self._in_flight)]
            return response

        return working(answer())

    def specialise(self, request: Request, rest: str) -> Reply:
        if self.warm is None:
            raise Conflict("the sandbox is an instance already: it was not made warm", hint="make one with AENV_WARM=1")
        work = self.warm.specialise(request.body)
        phases = self.warm.phases

        async def answer() -> Response:
            try:
                await work
            except AEnvError as exc:
                return failure(exc, {"phases": phases})
            return success({"phases": phases})

        return working(answer())

    def info(self, request: Request, rest: str) -> Reply:
        project, loaded = self.service.project, self.service.loaded
        return success(
            {
                "name": project.name,
                "version": project.version,
                "description": project.description,
                "instance_id": self.service.instance.instance_id,
                "runtime": __version__,
                "protocols": [MODERN, *LEGACY],
                "protocol": project.protocol,
                "deterministic": project.deterministic,
                "forkable": project.forkable and self.service.children is None,
                "saves": self.service.saves,
                "tools": list(loaded.tools),
                "agents": list(loaded.players),
                "rewards": list(loaded.rewards),
                "reward_schemas": [_offered(function) for function in loaded.rewards.values()],
                "functions": list(loaded.functions),
                "timeouts": {"call": self.service.call_limit},
            }
        )

    def reward(self, request: Request, rest: str) -> Reply:
        return self._called(self.service.reward(query(request).get("name")), request)

    def list_functions(self, request: Request, rest: str) -> Reply:
        loaded = self.service.loaded
        functions = [
            {
                **_offered(function),
                "endpoint": function.mark.options.get("endpoint") or f"/functions/{function.name}",
                "method": str(function.mark.options["method"]).upper(),
            }
            for function in loaded.functions.values()
        ]
        health = loaded.health.name if loaded.health else None
        return success(
            {
                "total": len(functions),
                "functions": functions,
                "reward": list(loaded.rewards),
                "health": health,
            }
        )

    def function(self, request: Request, name: str) -> Reply:
        function = lookup(self.service.loaded.functions, name, "function")
        # A page of any site can make a browser send a GET: only an author who asked for GET gets it.
        if request.method not in ("POST", str(function.mark.options["method"]).upper()):
            raise _WrongMethod(f"function {name!r} is not called by {request.method}", hint="use POST")
        return self._called(function, request)

    def endpoint(self, request: Request, path: str) -> Reply:
        return self._called(self.service.loaded.endpoints[request.method, path], request)

    def list_tools(self, request: Request, rest: str) -> Reply:
        return success(self.mcp.tools(request.agent))

    def tool(self, request: Request, name: str) -> Reply:
        return self._called(lookup(self.service.tools(request.agent), name, "tool"), request)

    def reset(self, request: Request, rest: str) -> Reply:
        body = json_object(request.body)
        seed, arguments = body.get("seed"), body.get("arguments") or {}
        if set(body) - {"seed", "arguments"} or not (seed is None or isinstance(seed, int)):
            raise Invalid('reset takes {"seed": an integer or null, "arguments": an object}')
        if not isinstance(arguments, dict):
            raise Invalid("the arguments of a reset are an object")

        async def answer() -> Response:
            return success(await self.service.reset(seed, arguments))

        return working(answer())

    def reseed(self, request: Request, rest: str) -> Reply:
        seed = json_object(request.body).get("seed")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise Invalid('reseed takes {"seed": an integer}')
        self.service.reseed(seed)
        return success(None)

    def save(self, request: Request, rest: str) -> Reply:
        self._check_quiet()
        begun = self._begun

        async def answer() -> Response:
            content = await self.service.save(self._max_body)
            if self._begun != begun:
                raise Conflict("it was called while it was saved", hint="wait for the answers of calls first")
            return Response(200, content, BYTES)

        return working(answer())

    def restore(self, request: Request, rest: str) -> Reply:
        self._check_quiet()

        async def answer() -> Response:
            await self.service.restore(request.body)
            return success(None)

        return working(answer())

    def _check_quiet(self) -> None:
        if self._in_flight:
            raise Conflict(f"calls under way: {self._in_flight}", hint="wait for their answers first")
        if left := functions.abandoned(asyncio.get_running_loop()):
            raise Conflict(f"calls that were given up still run: {left}", hint="wait until their functions return")

    def read_file(self, request: Request, rest: str) -> Reply:
        path = self._path(request)
        answer = Answer(0)
        answer.transient = True

        async def read() -> Response | None:
            if await files.is_directory(path):
                return success(await files.listing(path))
            async with aclosing(files.pieces(path)) as pieces:
                first = await anext(pieces, b"")
                if len(first) < files.PIECE:
                    return Response(200, first, BYTES)
                answer.begin(200, BYTES)
                await answer.pass_on(first)
                async for piece in pieces:
                    await answer.pass_on(piece)
            answer.close()
            return None

        return working(read(), answer)

    def write_file(self, request: Request, rest: str) -> Reply:
        path = self._path(request)

        async def write() -> Response:
            await files.write(path, request.body)
            return success({"path": str(path), "size": len(request.body)})

        return working(write())

    def _path(self, request: Request) -> Path:
        given = query(request).get("path")
        if not isinstance(given, str) or not given:
            raise Invalid("which file?", hint="name it once, as in /files?path=notes/today.txt")
        return self.service.instance.working_directory / given

    def exec(self, request: Request, rest: str) -> Reply:
        try:
            command = _command(request.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            hint = 'send {"command": "ls -l"}, or an array of arguments, and if wanted timeout, directory and stdin'
            raise Invalid(f"the command cannot be read: {exc}", hint=hint) from None

        async def answer() -> Response:
            return success(await self.service.run(command))

        return working(answer())

    def history(self, request: Request, rest: str) -> Reply:
        last = query(request).get("last")
        if last is not None and not (isinstance(last, str) and last.isascii() and last.isdigit()):
            raise Invalid(f"last must be a number of calls, found {last!r}")
        return success(self.service.history.last(None if last is None else int(last)))

    def agent_card(self, request: Request, name: str) -> Reply:
        return self.a2a.card(request, name)

    def serve_a2a(self, request: Request, name: str) -> Reply:
        return self.a2a.handle(request, name)

    def port(self, request: Request, port: str) -> ports.Tunnel:
        return ports.wanted(request, port)

    def shell(self, request: Request, rest: str) -> ports.Shell:
        return ports.shell_wanted(request)

    def carry(self, request: Request, rest: str) -> ports.Carrier:
        return ports.carrier_wanted(request)

    def cancel(self, request: Request, call_id: str) -> Reply:
        return success({"cancelled": self.answers.cancel(call_id, request.agent)})

    def _called(self, function: Function, request: Request) -> Answer:
        timing = Timing()
        if request.method in ("GET", "DELETE"):
            arguments = function.decode(query(request), text=True)
        else:
            arguments = function.decode(request.body or b"{}")

        async def answer() -> Response:
            try:
                response = success(await self.service.call(function, arguments, timing, request.agent))
            except AEnvError as exc:
                response = failure(exc)
            response.headers = [*response.headers, timing.header()]
            return response

        return working(answer())


def _offered(function: Function) -> dict[str, Any]:
    """A function as it is listed."""
    return {
        "name": function.name,
        "description": function.description,
        "inputSchema": function.arguments.schema,
    }


def _tools_of_the_server(service: Service) -> frozenset[str]:
    """The tools that a wrapped server has of its own."""
    from aenv.runtime.wrapped.insider import ServerTool

    return frozenset(name for name, tool in service.loaded.tools.items() if isinstance(tool, ServerTool))


def _which(agents: tuple[str, ...]) -> str:
    return f"its agents are {', '.join(agents)}" if agents else "its tools are everybody's"


class _WrongMethod(Invalid):
    status = 405


class _Gone(Exception):
    """The client left before its request was complete."""


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is over {limit} bytes", hint="AENV_MAX_BODY sets this limit")


EXACT: dict[str, dict[str, tuple[Access, Handler]]] = {
    "/mcp": dict.fromkeys(("POST", "GET", "DELETE"), (Access.AGENT, App.serve_mcp)),
    "/health": {"GET": (Access.NONE, App.health)},
    "/specialise": {"POST": (Access.OWNER, App.specialise)},
    "/info": {"GET": (Access.OWNER, App.info)},
    "/task/reward": {"POST": (Access.OWNER, App.reward)},
    "/functions/list": {"GET": (Access.OWNER, App.list_functions)},
    "/tools": {"GET": (Access.AGENT, App.list_tools)},
    "/reset": {"POST": (Access.OWNER, App.reset)},
    "/reseed": {"POST": (Access.OWNER, App.reseed)},
    "/state": {"GET": (Access.OWNER, App.save), "PUT": (Access.OWNER, App.restore)},
    "/files": {"GET": (Access.OWNER, App.read_file), "PUT": (Access.OWNER, App.write_file)},
    "/exec": {"POST": (Access.OWNER, App.exec)},
    "/history": {"GET": (Access.OWNER, App.history)},
    "/.well-known/agent-card.json": {"GET": (Access.AGENT, App.agent_card)},
    "/a2a": {"POST": (Access.AGENT, App.serve_a2a)},
    "/shell": {"POST": (Access.OWNER, App.shell)},
    "/children": {"POST": (Access.OWNER, App.carry)},
}
PREFIX: dict[str, dict[str, tuple[Access, Handler]]] = {
    "functions": dict.fromkeys(("POST", "GET"), (Access.OWNER, App.function)),
    "tools": {"POST": (Access.AGENT, App.tool)},
    "calls": {"DELETE": (Access.AGENT, App.cancel)},
    "ports": {"POST": (Access.OWNER, App.port)},
    "a2a": {"POST": (Access.AGENT, App.serve_a2a), "GET": (Access.AGENT, App.agent_card)},
    "openenv": {},  # as its own table has it
}
