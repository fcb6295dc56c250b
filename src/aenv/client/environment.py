"""``Environment``: the handle on one sandbox that agents and trainers hold."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import quote, urlencode

import msgspec

from aenv.client import answers, lineage, mcp
from aenv.client.agents import Agent
from aenv.client.contents import content_of
from aenv.client.handle import Handle, log
from aenv.client.lineage import Forked, Kept, Siblings
from aenv.client.provision import Control, Package, Provision, choose
from aenv.client.vendors import openai_tools
from aenv.errors import AEnvError, Conflict, Invalid, NotFound
from aenv.models import EnvRef, ExecResult, Sandbox, SandboxSpec, ToolResult, parse_duration
from aenv.runtime import registry
from aenv.runtime.tokens import agent_token, digest

if TYPE_CHECKING:
    from aenv.client.sync import SyncEnvironment

MARGIN = 10.0
"""Seconds that a command's answer may take longer than the command."""


class Environment(Handle):
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
        super()._blank()
        self.forked: Forked | None = None
        """How it was forked; None when it was not."""
        self._forked = 0
        """How often it was."""
        self._descent: tuple[int, ...] = ()
        """Which fork of which it is: no two siblings that follow from one environment have the same."""
        self._checkpoints: dict[str, Kept] = {}
        self._promises: tuple[Sandbox | None, dict[str, Any]] = (None, {})

    @staticmethod
    def sync(*args: Any, **kwargs: Any) -> SyncEnvironment:
        """The same environment with blocking methods; takes what ``Environment`` takes."""
        from aenv.client.sync import SyncEnvironment

        return SyncEnvironment(*args, **kwargs)

    async def package(self) -> Package:
        """What the sandbox was made of, as far as who provided it knows: the package's digest, and the image."""
        sandbox = await self._ready()
        if sandbox.digest or not hasattr(self._provision, "package"):
            return Package(sandbox.env, sandbox.digest, sandbox.image)
        return await cast(Control, self._provision).package(self.spec)

    # Tools

    async def list_tools(self) -> list[dict[str, Any]]:
        """The tools: ``name`` (``<env_name>/<tool>``), ``description`` and ``inputSchema``."""
        return await self._listed()

    async def _listed(self, acting: bytes = b"") -> list[dict[str, Any]]:
        return [
            {
                "name": f"{self.env_name}/{tool['name']}",
                "description": tool.get("description"),
                "inputSchema": tool["inputSchema"],
            }
            for tool in await self._tools(acting)
        ]

    async def list_openai_tools(self) -> list[dict[str, Any]]:
        """The tools as OpenAI's API takes them; ``call_tool`` understands the names given here."""
        found, self._openai_names = openai_tools(await self._tools())
        return found

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> ToolResult:
        """Call a tool by its bare name, ``name/tool`` or ``name@version/tool``."""
        return await self._call_as(b"", name, arguments, timeout)

    async def _call_as(
        self, acting: bytes, name: str, arguments: Mapping[str, Any] | None, timeout: float | None
    ) -> ToolResult:
        """Call a tool, as one of several agents where a header says so."""
        sandbox = await self._ready()
        tool = self._tool_name(name, sandbox)
        log.info("[ENV:%s] Executing tool: %s in environment %s", sandbox.id, tool, self.env_name)
        given = arguments or {}
        body = mcp.message("tools/call", name=tool, arguments=given)
        headers = mcp.headers("tools/call", tool) + acting
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

    def agent(self, name: str) -> Agent:
        """One of several agents on this instance, with tools, a turn and a reward of its own."""
        return Agent(self, name)

    async def _tools(self, acting: bytes = b"") -> list[dict[str, Any]]:
        await self._ready()
        headers = mcp.headers("tools/list") + acting
        return mcp.tools(await self._query("/mcp", headers, mcp.message("tools/list"), "tools/list"))

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
        return await self._reward_of(b"", arguments, name, timeout)

    async def _reward_of(
        self, acting: bytes, arguments: Mapping[str, Any] | None, name: str | None, timeout: float | None
    ) -> Any:
        query = f"?name={quote(name)}" if name is not None else ""
        return await self._data(f"/task/reward{query}", arguments, timeout, f"reward {name or ''}".rstrip(), acting)

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

    async def _says(self, promise: str) -> bool:
        """Whether it ``saves``, or makes a promise: ``forkable`` or ``deterministic``. Asked once of a sandbox."""
        sandbox = await self._ready()
        if self._promises[0] is not sandbox:
            self._promises = sandbox, await self.get_env_info()
        return bool(self._promises[1].get(promise))

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

    async def reseed(self, seed: int) -> None:
        """Let the generators that everybody shares (``random``, NumPy, torch) go on from another seed."""
        await self._data("/reseed", {"seed": seed}, None, "reseed")

    # Other sandboxes in the place of this one

    async def fork(self, n: int = 1, *, same_random: bool = False) -> Siblings:
        """``n`` live siblings, each in the place that this environment is in. They draw other random numbers from there
        on, unless ``same_random``.

        Where the environment says that it is forkable, they are forks of its process. Where that cannot be, and its
        author registered how it is saved and loaded, they are given its files and what that says. Otherwise, where it
        says that it is deterministic, what it was asked is asked of them, and ``Diverged`` tells the first answer that
        is not the same. ``forked.why`` says what was in the way of a fork of the process. Siblings are given back by
        their ``release``, or all by an ``async with`` block.
        """
        if n < 1:
            raise Invalid(f"there cannot be {n} siblings", hint="ask for one or more")
        return await lineage.fork(self, n, same_random=same_random)

    async def checkpoint(self) -> str:
        """Remember the place that the environment is in. What ``restore`` takes, until this environment is released.
        Where it is forkable, that is a fork which nobody asks anything, with a time to live like this one's."""
        id = secrets.token_hex(8)
        self._checkpoints[id] = await lineage.keep(self)
        return id

    async def release(self) -> None:
        """Give the sandbox back, and its checkpoints. Safe to call twice; a released environment can be used again."""
        try:
            await super().release()
        finally:  # from when there is no sandbox, there is no further checkpoint either
            checkpoints, self._checkpoints = self._checkpoints, {}
            if forks := lineage.Siblings(kept.fork for kept in checkpoints.values() if kept.fork is not None):
                await forks.release()

    destroy = release

    async def restore(self, checkpoint: str) -> None:
        """Go back to a checkpoint, in another sandbox, which takes the place of this one."""
        self.journal.check_quiet()
        kept = self._checkpoints.get(checkpoint)
        if kept is None:
            raise NotFound(
                f"there is no checkpoint {checkpoint!r}", hint="give what checkpoint() of this object returned"
            )
        await lineage.bring_back(self, kept)

    async def agent_url(self) -> str:
        """A URL to hand to an agent: it opens the tools, and nothing else."""
        return await self._agent_url("")

    async def _agent_url(self, agent: str) -> str:
        sandbox = await self._ready()
        self.journal.miss("an agent was given a way to the tools, and what it calls is not written down", unseen=True)
        known = digest(sandbox.token) if sandbox.token else ""
        token = f"?token={agent_token(known, agent)}" if known or agent else ""
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
        self.journal.miss("a port of it was exposed, and what comes that way is not written down", unseen=True)
        control = self._control("expose", "asked to show a port", "'aenv serve' starts a platform, which can; name it")
        return await control.expose((await self._ready()).id, port, seconds)
