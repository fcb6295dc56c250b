"""``Environment``: the handle on one sandbox that agents and trainers hold."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import quote, urlencode

import msgspec

from aenv import http
from aenv.cleanup import finish
from aenv.client import answers, mcp, spans
from aenv.client.contents import content_of
from aenv.client.openai import openai_tools
from aenv.client.provision import Control, Package, Provision, choose
from aenv.control import RESTART, plain_header
from aenv.errors import (
    AEnvError,
    CallTimeout,
    Conflict,
    Invalid,
    NetworkError,
    NotFound,
    SandboxLost,
    StartFailed,
    Unsupported,
    loss,
)
from aenv.models import NOT_JSON, EnvRef, ExecResult, Sandbox, SandboxSpec, ToolResult, parse_duration, to_json
from aenv.runtime import registry
from aenv.runtime.tokens import agent_token, digest

if TYPE_CHECKING:
    from aenv.client.sync import SyncEnvironment

log = logging.getLogger("aenv.environment")
log.addHandler(logging.NullHandler())
UNREACHABLE = 5.0
"""Seconds a sandbox may be unreachable at the start before it is taken for absent."""
FAREWELL = 5.0
"""Seconds that cancelling a call on the other side may take."""
MARGIN = 10.0
"""Seconds that a command's answer may take longer than the command."""
NEWS = 2.0
"""Seconds in which an engine hears of the end of a sandbox that does not answer."""
ASKING = 5.0
"""Seconds that whoever made the sandbox gets to say why it is gone."""


class Environment:
    """One sandbox of an environment, for the length of an ``async with`` block or until ``release``.

    The first call starts it. A tool that fails gives a ``ToolResult`` with ``is_error``; what the platform fails at
    raises an ``AEnvError``. With ``instance_id`` or ``service_id`` it is an instance or a service that a platform has
    already: the name may be left out, and releasing it ends nothing.
    """

    def __init__(
        self,
        env_name: str = "",
        datasource: str = "",
        ttl: str | float | None = None,
        environment_variables: Mapping[str, str] | None = None,
        arguments: Sequence[str] | None = None,
        aenv_url: str | None = None,
        timeout: float = 60.0,
        startup_timeout: float = 500.0,
        max_retries: int = 10,
        api_key: str | None = None,
        skip_for_healthy: bool = False,
        owner: str | None = None,
        labels: Mapping[str, str] | None = None,
        *,
        instance_id: str | None = None,
        service_id: str | None = None,
        seed: int | None = None,
        resources: Mapping[str, str] | None = None,
        provision: Provision | None = None,
    ) -> None:
        registry.stop_script()
        self.env_name = env_name
        self.timeout = timeout
        self.startup_timeout = startup_timeout
        self.max_retries = max_retries
        self.skip_for_healthy = skip_for_healthy
        self.spec = SandboxSpec(
            env=EnvRef.parse(env_name) if env_name or (instance_id or service_id) is None else EnvRef(""),
            datasource=datasource,
            ttl=None if ttl is None else parse_duration(ttl),
            startup_timeout=startup_timeout,
            environment_variables=dict(environment_variables or {}),
            arguments=list(arguments or ()),
            owner=owner,
            labels=dict(labels or {}),
            seed=seed,
            resources=dict(resources or {}),
        )
        self._provision = provision or choose(
            aenv_url, api_key, retries=max_retries, instance_id=instance_id, service_id=service_id
        )
        self._blank()

    @classmethod
    def like(cls, other: Environment, provision: Provision | None = None, **changes: Any) -> Self:
        """Another environment of the same description, which is not started yet; ``changes`` are fields of its
        ``SandboxSpec``. It comes from where the other one does, unless a ``provision`` is given."""
        made = cls.__new__(cls)
        made.env_name = str(other.spec.env)
        for kept in ("timeout", "startup_timeout", "max_retries", "skip_for_healthy"):
            setattr(made, kept, getattr(other, kept))
        made._provision = provision or other.provision
        made.spec = msgspec.structs.replace(other.spec, **changes)
        made._blank()
        return made

    def _blank(self) -> None:
        """No sandbox yet."""
        self._sandbox: Sandbox | None = None
        self._stack: AsyncExitStack | None = None
        self._forwarded: str | None = None
        self._opening = asyncio.Lock()
        self._headers = b""
        self._openai_names: dict[str, str] = {}
        self._mirrored: dict[str, dict[str, str]] = {}
        """Per tool, the arguments that are repeated in headers; read when a server asks for them."""
        self._farewells: set[asyncio.Task[None]] = set()
        self._process = os.getpid()

    @staticmethod
    def sync(*args: Any, **kwargs: Any) -> SyncEnvironment:
        """The same environment with blocking methods; takes what ``Environment`` takes."""
        from aenv.client.sync import SyncEnvironment

        return SyncEnvironment(*args, **kwargs)

    @property
    def instance_id(self) -> str | None:
        """What the sandbox is called; None while there is none."""
        return None if self._sandbox is None else self._sandbox.id

    @property
    def sandbox(self) -> Sandbox | None:
        """The sandbox as it was given; None while there is none."""
        return self._sandbox

    @property
    def provision(self) -> Provision:
        """Where its sandbox comes from."""
        return self._provision

    async def package(self) -> Package:
        """What the sandbox was made of, as far as who provided it knows: the package's digest, and the image."""
        sandbox = await self._ready()
        if sandbox.digest or not hasattr(self._provision, "package"):
            return Package(sandbox.env, sandbox.digest, sandbox.image)
        return await cast(Control, self._provision).package(self.spec)

    # Life

    async def initialize(self) -> bool:
        """Start the sandbox and wait until it is healthy. Once, however many ask."""
        if self._sandbox is not None:
            return True
        async with self._opening:
            if self._sandbox is None:
                with spans.Asking("initialize", self.env_name):
                    await self._open()
        return True

    async def _open(self) -> None:
        async with AsyncExitStack() as stack:
            sandbox = await stack.enter_async_context(self._provision(self.spec))
            token = b""
            if sandbox.token:
                token = f"Authorization: Bearer {plain_header(sandbox.token, 'the token')}\r\n".encode()
            boot: bytes | None = sandbox.boot.encode()
            if not boot and not self.skip_for_healthy:
                boot = await self._healthy(sandbox, token, self.startup_timeout)
            token += b"AEnv-Boot: %b\r\n" % boot if boot and not sandbox.shared else b""
            self._headers = token
            self._process = os.getpid()
            self._stack = stack.pop_all()
            self._sandbox = sandbox
            self.env_name = self.env_name or sandbox.env
        log.info("[ENV:%s] Environment %s is ready", sandbox.id, self.env_name)

    async def _healthy(self, sandbox: Sandbox, headers: bytes, patience: float) -> bytes | None:
        """Wait until ``/health`` says yes; the answer names the sandbox's life."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        pause = 0.01
        while True:
            try:
                async with asyncio.timeout(max(patience, 0.001)):
                    response = await http.request("GET", sandbox.url, "/health", headers=headers, retries=0)
                reason = f"unhealthy: {answers.reason(response)}"
                if response.status == 200:
                    return response.headers.get(b"aenv-boot")
                if response.status not in http.BUSY:
                    raise answers.error(response)
                limit = patience
            except (NetworkError, TimeoutError) as exc:
                reason = str(exc) or "no answer"
                limit = min(patience, UNREACHABLE)
            if loop.time() - start > limit:
                hint = "is it running? start one with 'aenv run'" if sandbox.attached else None
                reason = await self._reason(sandbox) or reason
                raise StartFailed(f"{sandbox.url} is not ready after {limit:g} s: {reason}", hint=hint)
            await asyncio.sleep(pause)
            pause = min(pause * 2, 1.0)

    async def release(self) -> None:
        """Give the sandbox back. Safe to call twice; a released environment can be used again."""
        async with self._opening:
            stack, self._stack, sandbox, self._sandbox = self._stack, None, self._sandbox, None
            self._forwarded = None
            if stack is None or sandbox is None or self._process != os.getpid():
                return  # nothing to give back, or a forked child that does not own its parent's sandbox
            await finish(self._close(stack, sandbox))
        log.info("[ENV:%s] Environment %s is released", sandbox.id, self.env_name)

    async def _close(self, stack: AsyncExitStack, sandbox: Sandbox) -> None:
        if sandbox.attached and self._farewells:  # it lives on, so what was cancelled in it should hear that
            await asyncio.wait(set(self._farewells), timeout=FAREWELL)
        for task in list(self._farewells):
            task.cancel()
        await stack.aclose()

    destroy = release

    async def __aenter__(self) -> Self:
        await self.initialize()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()

    # Tools

    async def list_tools(self) -> list[dict[str, Any]]:
        """The tools: ``name`` (``<env_name>/<tool>``), ``description`` and ``inputSchema``."""
        return [
            {
                "name": f"{self.env_name}/{tool['name']}",
                "description": tool.get("description"),
                "inputSchema": tool["inputSchema"],
            }
            for tool in await self._tools()
        ]

    async def list_openai_tools(self) -> list[dict[str, Any]]:
        """The tools as OpenAI's API takes them; ``call_tool`` understands the names given here."""
        found, self._openai_names = openai_tools(await self._tools())
        return found

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> ToolResult:
        """Call a tool by its bare name, ``name/tool`` or ``name@version/tool``."""
        sandbox = await self._ready()
        tool = self._tool_name(name, sandbox)
        log.info("[ENV:%s] Executing tool: %s in environment %s", sandbox.id, tool, self.env_name)
        given = arguments or {}
        body = mcp.message("tools/call", name=tool, arguments=given)
        headers = mcp.headers("tools/call", tool)
        while True:
            mirrored = mcp.mirror(self._mirrored.get(tool, {}), given)
            response = await self._call("/mcp", headers + mirrored, body, timeout, f"tool {tool}")
            try:
                return mcp.tool_result(response)
            except mcp.HeaderMismatch:
                if tool in self._mirrored:
                    raise
                found = {listed["name"]: mcp.mirrored(listed) for listed in await self._tools()}
                self._mirrored = {tool: {}, **found}

    async def _tools(self) -> list[dict[str, Any]]:
        await self._ready()
        return mcp.tools(
            await self._call("/mcp", mcp.headers("tools/list"), mcp.message("tools/list"), None, "tools/list")
        )

    def _tool_name(self, name: str, sandbox: Sandbox) -> str:
        if name in self._openai_names:
            return self._openai_names[name]
        prefix, slash, tool = name.partition("/")
        if not slash:
            return name
        if not sandbox.attached and prefix.partition("@")[0] != self.spec.env.name:
            raise Invalid(f"{name!r} names a tool of {prefix!r}, but this is {self.env_name!r}")
        return tool

    # Reward, functions, health

    async def call_reward(
        self,
        arguments: Mapping[str, Any] | None = None,
        name: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Take the reward: the only one, or the one of that name."""
        query = f"?name={quote(name)}" if name is not None else ""
        return await self._data(f"/task/reward{query}", arguments, timeout, f"reward {name or ''}".rstrip())

    async def call_function(
        self, name: str, arguments: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> Any:
        """Call a function that the author registered."""
        return await self._data(f"/functions/{quote(name, safe='')}", arguments, timeout, f"function {name}")

    async def list_functions(self) -> dict[str, Any]:
        """``{"total", "functions", "reward", "health"}`` of the environment."""
        found: dict[str, Any] = await self._get("/functions/list")
        return found

    async def check_health(self, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What the author's health check answers, healthy or not."""
        query = f"?{urlencode(dict(arguments))}" if arguments else ""
        response = await self._fetch(f"/health{query}", retries=0)
        if response.status not in (200, 503):
            raise answers.error(response)
        found: dict[str, Any] = answers.envelope(response).get("data") or {}
        return found

    async def get_env_info(self) -> dict[str, Any]:
        """Name, version, protocols, tools and rewards of the running environment."""
        found: dict[str, Any] = await self._get("/info")
        return found

    async def wait_for_ready(self, timeout: float | None = None) -> bool:
        """Wait until the sandbox is healthy."""
        sandbox = await self._ready()
        await self._healthy(sandbox, self._headers, self.startup_timeout if timeout is None else timeout)
        return True

    async def reset(self, seed: int | None = None, arguments: Mapping[str, Any] | None = None) -> Any:
        """Put the environment back to its beginning, or that of a task; ``arguments`` are those of the author's reset.
        What that returns."""
        more = {"arguments": dict(arguments)} if arguments else {}
        return await self._data("/reset", {"seed": seed, **more}, None, "reset")

    async def agent_url(self) -> str:
        """A URL to hand to an agent: it opens the tools, and nothing else."""
        sandbox = await self._ready()
        token = f"?token={agent_token(digest(sandbox.token))}" if sandbox.token else ""
        return f"{await self._public(sandbox)}/mcp{token}"

    async def _public(self, sandbox: Sandbox) -> str:
        """A URL that others can use, too: wherever they are when it is a platform's, else on this machine."""
        if sandbox.public_url or not sandbox.url.startswith("unix:"):
            return sandbox.public_url or sandbox.url
        async with self._opening:
            if self._forwarded is None:
                if self._stack is None:
                    raise AEnvError("the environment was released meanwhile")
                from aenv.client.forward import forwarded

                self._forwarded = await self._stack.enter_async_context(forwarded(sandbox.url.removeprefix("unix:")))
            return self._forwarded

    # The sandbox itself

    async def exec(
        self,
        command: str | Sequence[str],
        timeout: float = 60.0,
        *,
        directory: str | None = None,
        stdin: str | None = None,
    ) -> ExecResult:
        """Run a command in the sandbox: a line for its shell, or arguments with the program first.

        A command that fails is a result with its return code, and so is one that is killed when its time is over.
        """
        given = {
            "command": command if isinstance(command, str) else list(command),
            "timeout": timeout,
            "directory": directory,
            "stdin": stdin,
        }
        return msgspec.convert(await self._data("/exec", given, timeout + MARGIN, "exec"), ExecResult)

    async def upload(self, path: str, content: bytes | str | os.PathLike[str], timeout: float | None = None) -> None:
        """Write a file in the sandbox, in one step: bytes, text, or the content of the local file at a ``Path``.

        A relative path is under the work directory. Folders that are missing are made.
        """
        await self._ready()
        headers, body = b"Content-Type: application/octet-stream\r\n", await content_of(content)
        there = f"/files?path={quote(path)}"
        answers.data(await self._call(there, headers, body, timeout, f"upload of {path}", "PUT"))

    async def download(self, path: str, timeout: float | None = None) -> bytes:
        """The content of a file in the sandbox; a relative path is under the work directory."""
        response = await self._fetch(f"/files?path={quote(path)}", timeout=timeout)
        if response.status != 200:
            raise answers.error(response)
        if response.headers.get(b"content-type") != b"application/octet-stream":
            raise Conflict(f"{path} is a directory", hint="download its files one by one")
        return response.body

    async def history(self, last: int | None = None) -> list[dict[str, Any]]:
        """The calls that ended lately in the sandbox, newest last: ``at``, ``kind``, ``name``, ``arguments``,
        ``dropped``, ``is_error``, ``error``, ``seconds``, and of these ``queue`` and ``tool``."""
        found: list[dict[str, Any]] = await self._get("/history" if last is None else f"/history?last={last}")
        return found

    async def extend(self, ttl: str | float) -> None:
        """Let the sandbox live so long from now."""
        seconds = parse_duration(ttl)
        control = self._control("extend", "extended")
        await control.extend((await self._ready()).id, seconds)

    async def logs(self, tail: int | None = None, follow: bool = False) -> AsyncGenerator[str, None]:
        """What the sandbox printed, by line: the last ``tail``, all that is kept by default; with ``follow`` also
        what it prints from then on, until it ends."""
        control = self._control("logs", "asked for its logs")
        async with aclosing(control.logs((await self._ready()).id, tail, follow)) as lines:
            async for line in lines:
                yield line

    async def expose(self, port: int, ttl: str | float | None = None) -> str:
        """A URL of a port inside, open to whoever has it, for ``ttl`` or as long as the platform thinks fit."""
        seconds = None if ttl is None else parse_duration(ttl)
        control = self._control("expose", "asked to show a port", "'aenv serve' starts a platform, which can; name it")
        return await control.expose((await self._ready()).id, port, seconds)

    def _control(
        self, power: str, asked: str, hint: str = "an attached sandbox is its starter's to control"
    ) -> Control:
        if not hasattr(self._provision, power):
            raise Unsupported(f"this sandbox cannot be {asked}: what provided it has no such power", hint=hint)
        return cast(Control, self._provision)

    # The one way out

    async def _ready(self) -> Sandbox:
        if self._sandbox is None:
            await self.initialize()
        if self._sandbox is None:
            raise AEnvError("the environment was released while it started")
        return self._sandbox

    async def _data(self, path: str, arguments: Mapping[str, Any] | None, timeout: float | None, what: str) -> Any:
        await self._ready()
        try:
            body = to_json(arguments or {})
        except NOT_JSON as exc:
            raise Invalid(f"the arguments of {what} cannot be sent: {exc}") from exc
        return answers.data(await self._call(path, b"Content-Type: application/json\r\n", body, timeout, what))

    async def _get(self, path: str) -> Any:
        return answers.data(await self._fetch(path))

    async def _fetch(self, path: str, retries: int | None = None, timeout: float | None = None) -> http.Response:
        sandbox = await self._ready()
        request = self._request(sandbox, "GET", path, self._headers + spans.context(), retries=retries)
        return await self._within(self.timeout if timeout is None else timeout, request, path, sandbox)

    async def _call(
        self, path: str, headers: bytes, body: bytes, timeout: float | None, what: str, method: str = "POST"
    ) -> http.Response:
        """Ask for something that has an effect: its id makes asking again safe, and cancelling possible."""
        sandbox = await self._ready()
        call_id = secrets.token_hex(12)
        with spans.Asking(what, self.env_name, sandbox) as asking:
            headers = b"%b%b%bAEnv-Call-Id: %b\r\n" % (headers, self._headers, asking.header, call_id.encode())
            request = self._request(sandbox, method, path, headers, body)
            try:
                seconds = self.timeout if timeout is None else timeout
                return asking.answered(await self._within(seconds, request, what, sandbox))
            except (asyncio.CancelledError, CallTimeout):
                self._say_cancelled(sandbox, call_id)
                raise

    def _request(
        self, sandbox: Sandbox, method: str, path: str, headers: bytes, body: bytes = b"", retries: int | None = None
    ) -> Coroutine[Any, Any, http.Response]:
        return http.request(
            *(method, sandbox.url, path),
            headers=headers,
            body=body,
            retries=self.max_retries if retries is None else retries,
            repeatable=method == "GET" or not sandbox.shared,  # another replica would not know the call
            reconnecting=RESTART if sandbox.relayed else 0.0,
        )

    async def _within(
        self, seconds: float, request: Coroutine[Any, Any, http.Response], what: str, sandbox: Sandbox
    ) -> http.Response:
        failed: AEnvError | http.Response
        try:
            async with asyncio.timeout(seconds) as limit:
                response = await request
                gone = NotFound if sandbox.shared and response.status == NotFound.status else SandboxLost
                if response.status != gone.status:
                    return response
                failed = answers.error(response) if sandbox.relayed else response
        except TimeoutError:
            if not limit.expired():
                raise
            failed = CallTimeout(f"{what} did not answer within {seconds:g} s")
        except http.NotSent as exc:
            failed = exc if sandbox.relayed else SandboxLost(f"the sandbox is gone: {exc}")
        except NetworkError as exc:
            failed = exc
        if reason := await self._reason(sandbox, 0.0 if isinstance(failed, CallTimeout) else NEWS):
            cause = failed if isinstance(failed, AEnvError) else None
            raise loss(reason)(f"the sandbox is gone: {reason}") from cause
        if isinstance(failed, AEnvError):
            raise failed
        return failed  # the sandbox itself says what is wrong, and nobody knows better

    async def _reason(self, sandbox: Sandbox, patience: float = 0.0) -> str:
        """Why the sandbox is gone, when somebody knows, or learns it within so many seconds."""
        if not hasattr(self._provision, "reason"):
            return ""
        with suppress(AEnvError, TimeoutError):
            async with asyncio.timeout(ASKING):
                return await self._control("reason", "").reason(sandbox.id, patience)
        return ""

    def _say_cancelled(self, sandbox: Sandbox, call_id: str) -> None:
        async def farewell() -> None:
            with suppress(AEnvError, TimeoutError):
                async with asyncio.timeout(FAREWELL):
                    await http.request("DELETE", sandbox.url, f"/calls/{call_id}", headers=self._headers)

        task = asyncio.get_running_loop().create_task(farewell())
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)
