"""``Context.env``: the instances that this one depends on, as its code reaches them.

A sandbox may have no network, and holds no token of theirs. So what it asks of them goes out over a connection that
whoever made it has opened to it, and is carried on from there (``carried``).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import secrets
from collections.abc import Callable, Coroutine, Mapping, MutableMapping
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
from msgspec import Raw

from aenv.errors import (
    AEnvError,
    CallTimeout,
    Invalid,
    NotFound,
    SandboxError,
    TooLarge,
    Unsupported,
    did_you_mean,
    from_wire,
)
from aenv.models import NOT_JSON, ToolResult, to_json
from aenv.project.depends import Dependency, seed_of
from aenv.runtime.carried import (
    AT_ONCE,
    MOST,
    PROTOCOL,
    Ask,
    Cancel,
    Messages,
    NoMessage,
    Ready,
    decode_answer,
    written,
)
from aenv.runtime.context import Context
from aenv.runtime.foreign import Foreign
from aenv.runtime.functions import Function
from aenv.runtime.ports import UpgradeRequired
from aenv.runtime.registry import Mark

TIMEOUT = 60.0
"""Seconds that a call may take whose caller does not say."""
MARGIN = 10.0
"""Seconds, over those of a call, in which its answer must have come."""
RETURN = 30.0
"""Seconds in which a carrier that left, or another one, must be back."""
P = ParamSpec("P")
R = TypeVar("R")


def _blocking(
    method: Callable[Concatenate[Child, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[SyncChild, P], R]:
    @functools.wraps(method)
    def call(self: SyncChild, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if asyncio._get_running_loop() is not None:
            name = f"env({self.child.alias!r})"
            raise Invalid(
                f"{name}.sync.{method.__name__}() would hold up everybody: it blocks, and an async function called it",
                hint=f"await {name}.{method.__name__}() there",
            )
        return asyncio.run(method(self.child, *args, **kwargs))

    return call


class Child:
    """An instance that this one depends on. It is there for as long as this one is.

    >>> @register_tool
    ... async def ask(question: str, ctx: Context) -> str:
    ...     result = await ctx.env("judge").call_tool("grade", {"text": question})
    ...     return result.text

    What the platform fails at is raised as an ``AEnvError``, which is to be left alone: it ends the call of this
    environment in the same way, and no model reads of it.
    """

    def __init__(self, children: Children, alias: str) -> None:
        self.alias = alias
        self._children = children

    async def list_tools(self) -> list[dict[str, Any]]:
        """Its tools: ``name``, ``description`` and ``inputSchema``."""
        found: list[dict[str, Any]] = msgspec.json.decode(await self._children.ask(self.alias, "list_tools"))
        return found

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> ToolResult:
        """Call a tool by its bare name. A tool that fails is a result with ``is_error``."""
        found = await self._children.ask(self.alias, "call_tool", name, arguments, timeout)
        return msgspec.json.decode(found, type=ToolResult)

    async def call_reward(
        self, arguments: Mapping[str, Any] | None = None, name: str | None = None, timeout: float | None = None
    ) -> Any:
        """Take its reward: the only one, or the one of that name."""
        return msgspec.json.decode(await self._children.ask(self.alias, "call_reward", name, arguments, timeout))

    async def call_function(
        self, name: str, arguments: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> Any:
        """Call a function that its author registered."""
        return msgspec.json.decode(await self._children.ask(self.alias, "call_function", name, arguments, timeout))

    async def reset(self, seed: int | None = None, arguments: Mapping[str, Any] | None = None) -> Any:
        """Put it back to its beginning. A reset of this environment has done that before its own code runs."""
        return msgspec.json.decode(await self._children.ask(self.alias, "reset", None, arguments, seed=seed))

    @functools.cached_property
    def sync(self) -> SyncChild:
        """The same with methods that block, for functions that are not ``async``."""
        return SyncChild(self)


class SyncChild:
    """``Child`` with methods that block."""

    def __init__(self, child: Child) -> None:
        self.child = child

    list_tools = _blocking(Child.list_tools)
    call_tool = _blocking(Child.call_tool)
    call_reward = _blocking(Child.call_reward)
    call_function = _blocking(Child.call_function)
    reset = _blocking(Child.reset)


class Children:
    """All that a sandbox depends on, and the connections to those that carry its calls there."""

    def __init__(self, depends: Mapping[str, Dependency]) -> None:
        self.depends = depends
        self._links: list[_Link] = []
        """The newest is used. There may be several for a moment, or from several servers."""
        self._came = asyncio.Event()
        self._room = asyncio.Semaphore(AT_ONCE)
        self._loop: asyncio.AbstractEventLoop | None = None
        """Of the first connection; none before."""
        self._has_tools = False
        self._preparing = asyncio.Lock()
        self._closed = False

    def child(self, alias: str) -> Child:
        if alias in self.depends:
            return Child(self, alias)
        raise NotFound(f"there is no {alias!r} in dependsOn", hint=did_you_mean(alias, self.depends))

    async def reset(self, seed: int | None) -> None:
        """Put all of them back to their beginnings, each with a seed of its own that follows from this one."""
        try:
            async with asyncio.TaskGroup() as group:
                for alias in self.depends:
                    group.create_task(self.child(alias).reset(seed_of(seed, alias)))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def ask(
        self,
        alias: str,
        kind: Any,
        name: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        seed: int | None = None,
    ) -> Raw:
        """Ask for something, and what comes of it; from any thread, and any event loop."""
        if self._loop is None:
            raise Unsupported(
                f"{alias} cannot be reached yet: nobody has offered to carry calls there",
                hint="call it from tools, rewards, functions and resets, not from a setup or a teardown",
            )
        try:
            given = Raw(to_json(arguments))
        except NOT_JSON as exc:
            raise Invalid(f"the arguments for {alias} cannot be sent: {exc}") from exc
        if len(given) > MOST // 2:
            raise TooLarge(f"the arguments for {alias} have {len(given)} bytes; {MOST // 2} is the most")
        limit = TIMEOUT if timeout is None else timeout
        ask = Ask(
            id=0,
            call=secrets.token_hex(12),
            alias=alias,
            kind=kind,
            name=name,
            arguments=given,
            seed=seed,
            timeout=limit,
        )
        asking = self._ask(ask)
        if asyncio.get_running_loop() is self._loop:
            return await asking
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asking, self._loop))

    async def _ask(self, ask: Ask) -> Raw:
        try:
            async with asyncio.timeout(ask.timeout + MARGIN) as limit, self._room:
                while True:
                    try:
                        return await (await self._link(ask.alias)).ask(ask)
                    except _Left:  # what it carried is asked for again, under the same id
                        continue
        except TimeoutError:
            if not limit.expired():
                raise
            raise CallTimeout(f"{ask.alias} did not answer {ask.name or ask.kind} within {ask.timeout:g} s") from None

    async def _link(self, alias: str) -> _Link:
        while not (open_ := [link for link in self._links if not link.ended.is_set()]):
            if self._closed:
                raise SandboxError(f"{alias} cannot be reached any more: this environment is ending")
            self._came.clear()
            try:
                async with asyncio.timeout(RETURN):
                    await self._came.wait()
            except TimeoutError:
                raise SandboxError(f"{alias} cannot be reached: nobody carries calls there any more") from None
        return open_[-1]

    # Who carries

    async def serve(
        self, scope: MutableMapping[str, Any], offer: Callable[[list[Function]], None], stirred: Callable[[], None]
    ) -> None:
        """Give calls to whoever has connected, until they leave. ``offer`` takes the tools that are to be among this
        environment's own."""
        take_over = scope.get("aenv.upgrade")
        if take_over is None:
            raise UpgradeRequired("the connection cannot be upgraded", hint="send 'Connection: Upgrade'")
        try:
            transport, early = take_over(PROTOCOL)
        except ConnectionError:
            return
        link = _Link(transport, stirred)
        self._loop = asyncio.get_running_loop()
        self._links.append(link)
        self._came.set()
        try:
            link.begin(early)
            link.send(Ready(await self._prepared(offer)))
            await link.ended.wait()
        finally:
            self._links.remove(link)
            transport.abort()

    async def _prepared(self, offer: Callable[[list[Function]], None]) -> dict[str, Any] | None:
        """See to the tools that are to be offered; what is in the way, if anything is."""
        async with self._preparing:  # who carries may leave meanwhile, and another one come
            if self._has_tools:
                return None
            try:
                tools: list[Function] = []
                for alias, dependency in self.depends.items():
                    if dependency.prefix:
                        child = self.child(alias)
                        tools += [_Tool(child, dependency.prefix, listed) for listed in await child.list_tools()]
                offer(tools)
            except AEnvError as exc:
                return exc.to_wire()
            self._has_tools = True
            return None

    def renew(self) -> None:
        """The project was loaded again: whoever carries calls comes anew, and has the tools offered that are."""
        self._has_tools = False
        for link in self._links:
            link.ended.set()

    def close(self) -> None:
        """Let go of all who carry. From now on nothing can be reached, and nobody waits for that."""
        self._closed = True
        for link in self._links:
            link.ended.set()
        self._came.set()


class _Tool(Foreign):
    """A tool of another instance, among those of this one."""

    def __init__(self, child: Child, prefix: str, listed: Mapping[str, Any]) -> None:
        self._child = child
        self._theirs: str = listed["name"]
        super().__init__(Mark("tool", self._run, prefix + self._theirs, {"listed": listed}))

    async def _run(self, arguments: dict[str, Any], context: Context) -> ToolResult:
        return await self._child.call_tool(self._theirs, arguments)


class _Left(Exception):
    """Who carried the call has left before its answer came."""


class _Link(asyncio.Protocol):
    """A connection to one who carries calls."""

    def __init__(self, transport: Any, stirred: Callable[[], None]) -> None:
        self.ended = asyncio.Event()
        self._transport = transport
        self._stirred = stirred
        self._messages = Messages()
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Raw]] = {}
        self._writable = asyncio.Event()
        self._writable.set()

    def begin(self, early: bytes) -> None:
        """Take the connection over, and what it has brought already."""
        self._transport.set_protocol(self)
        if not self._transport.is_closing() and not self._transport.is_reading():
            self._transport.resume_reading()
        self.data_received(early)

    def send(self, message: Ask | Cancel | Ready) -> None:
        if not self._transport.is_closing():
            self._transport.write(written(message))

    async def ask(self, ask: Ask) -> Raw:
        """What a call comes to. Cancelled, it is cancelled there, too."""
        await self._writable.wait()
        if self.ended.is_set():
            raise _Left
        ask = msgspec.structs.replace(ask, id=next(self._ids))
        answer: asyncio.Future[Raw] = asyncio.get_running_loop().create_future()
        self._waiting[ask.id] = answer
        try:
            self.send(ask)
            return await answer
        except asyncio.CancelledError:
            self.send(Cancel(ask.id))
            raise
        finally:
            del self._waiting[ask.id]

    # asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        self._stirred()
        try:
            for message in self._messages.feed(data):
                answer = decode_answer(message)
                waiting = self._waiting.get(answer.id)
                if waiting is None or waiting.done():
                    continue
                if answer.error is None:
                    waiting.set_result(answer.value)
                else:
                    waiting.set_exception(from_wire(answer.error))
        except (NoMessage, msgspec.MsgspecError):
            self._transport.abort()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()
        self._writable.set()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(_Left())

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()
