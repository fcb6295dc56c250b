"""Carries what an instance asks of those that it depends on: whoever made them all does, since the instance itself may
have no network, and holds no token of theirs.

It goes to those alone that were made for that instance. What comes from there is not trusted: it names an alias and
what is wanted, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from contextvars import ContextVar
from itertools import count
from typing import Any, Protocol

import msgspec
from msgspec import Raw

from aenv import http
from aenv.client.environment import Environment
from aenv.control import plain_header
from aenv.errors import (
    AEnvError,
    Invalid,
    NetworkError,
    SandboxError,
    SandboxLost,
    TooLarge,
    Unauthorized,
    from_wire,
    loss,
)
from aenv.models import Sandbox, SandboxSpec, to_json
from aenv.runtime.carried import (
    AT_ONCE,
    MOST,
    PATH,
    PROTOCOL,
    Answer,
    Ask,
    Cancel,
    Messages,
    NoMessage,
    Ready,
    decode_asked,
    written,
)

log = logging.getLogger("aenv.environment")
PREPARATION = 60.0
"""Seconds in which an instance must have looked at the tools of those that it depends on."""
_PAUSE, _LONGEST_PAUSE = 0.05, 5.0
_MOST_REFUSAL = 64 * 1024
_NAMES: ContextVar[Iterator[str]] = ContextVar("call ids of what is being carried")


class Reasons(Protocol):
    """Who knows why an instance is no more."""

    async def reason(self, id: str, patience: float) -> str: ...


class _Known:
    """A provision of an instance that somebody else has made, and will end."""

    def __init__(self, sandbox: Sandbox, reasons: Reasons) -> None:
        self._sandbox = sandbox
        self.reason = reasons.reason

    def __call__(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        return nullcontext(self._sandbox)


class Carried(Protocol):
    """One that an instance depends on, as far as calls are carried to it."""

    is_left: bool
    """Whether nobody carries calls to it any more. Those under way may be carried on by another."""

    async def carried(self, ask: Ask) -> Any: ...


class Lost:
    """One that is gone."""

    def __init__(self, reason: str) -> None:
        self.is_left = False
        self._reason = reason

    async def carried(self, ask: Ask) -> Any:
        raise loss(self._reason)(f"the sandbox is gone: {self._reason}")


class Child(Environment):
    """An instance that another one depends on, as its calls are carried there. None is kept, and each has the id that
    the asking instance gave it."""

    def __init__(self, sandbox: Sandbox, reasons: Reasons) -> None:
        super().__init__(sandbox.env, provision=_Known(sandbox, reasons))
        self._most = MOST // 2
        self.is_left = False

    def _say_cancelled(self, sandbox: Sandbox, call_id: str) -> None:
        if not self.is_left:
            super()._say_cancelled(sandbox, call_id)

    async def _call(
        self, path: str, headers: bytes, body: bytes, timeout: float | None, what: str, method: str = "POST"
    ) -> http.Response:
        return await self._ask(path, headers, body, timeout, what, method, call_id=next(_NAMES.get()))

    async def carried(self, ask: Ask) -> Any:
        """What comes of a question."""
        _NAMES.set(f"{ask.call}.{number}" for number in count())
        given = _arguments(ask.arguments)
        timeout, name = ask.timeout, ask.name
        if ask.kind == "list_tools":
            return await self._tools()
        if ask.kind == "reset":
            return await self.reset(ask.seed, given)
        if ask.kind == "call_reward":
            return await self.call_reward(given, name, timeout)
        if not name:
            raise Invalid(f"{ask.kind} of which name?")
        call = self.call_tool if ask.kind == "call_tool" else self.call_function
        return await call(name, given, timeout)


def _arguments(given: Raw) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(given, type=dict[str, Any] | None)
    except msgspec.MsgspecError as exc:
        raise Invalid(f"the arguments are not a JSON object: {exc}") from None


@asynccontextmanager
async def carrying(parent: Sandbox, children: Mapping[str, Carried]) -> AsyncIterator[None]:
    """Carry what an instance asks of these, by alias, for the length of a block. It begins when the instance is
    prepared for that."""
    carrier = Carrier(parent, children)
    task = asyncio.create_task(carrier.run())
    try:
        await carrier.prepared
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))


class Carrier:
    """The connection to one instance, opened again whenever it ends."""

    def __init__(self, parent: Sandbox, children: Mapping[str, Carried]) -> None:
        self._parent = parent
        self._children = children
        self._calls: dict[str, asyncio.Task[Answer]] = {}
        self.prepared: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the instance can call the others; it may fail."""
        self.prepared.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def run(self) -> None:
        """Carry until cancelled. The first connection must be had; later ones are tried for as long as it takes."""
        try:
            await self._run()
        finally:
            for child in self._children.values():
                child.is_left = True
            calls = list(self._calls.values())
            for call in calls:
                call.cancel()
            if calls:
                await asyncio.wait(calls)

    async def _run(self) -> None:
        pause = _PAUSE
        while True:
            try:
                async with asyncio.timeout(None if self.prepared.done() else PREPARATION) as limit:
                    await self._connected(limit)
                pause = _PAUSE
            except TimeoutError:
                self._fail(SandboxError(f"it was not prepared for what it depends on within {PREPARATION:g} s"))
            except AEnvError as exc:
                self._fail(exc)
            except Exception as exc:
                log.exception("calls of %s are not carried", self._parent.id)
                self._fail(AEnvError(f"calls of {self._parent.id} could not be carried: {exc!r}"))
            if self.prepared.exception() is not None:
                return
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _fail(self, error: AEnvError) -> None:
        if self.prepared.done():
            log.debug("calls of %s are not carried at the moment: %s", self._parent.id, error)
        else:
            self.prepared.set_exception(error)

    async def _connected(self, limit: asyncio.Timeout) -> None:
        """Carry over one connection, until it ends."""
        parent = self._parent
        headers = b""
        if parent.token:
            headers = f"Authorization: Bearer {plain_header(parent.token, 'the token')}\r\n".encode()
        if parent.boot:
            headers += f"AEnv-Boot: {plain_header(parent.boot, 'the name of its life')}\r\n".encode()
        async with http.upgrade(parent.url, PATH, PROTOCOL, headers=headers) as connection:
            if connection.status != http.SWITCHED:
                raise _refusal(await connection.read(_MOST_REFUSAL))
            messages, passage = Messages(), _Passage(self._children, self._calls, connection)
            try:
                async for piece in connection:
                    for data in messages.feed(piece):
                        message = decode_asked(data)
                        if isinstance(message, Ready):
                            self._ready(message)
                            limit.reschedule(None)
                        else:
                            passage.take(message)
            except (NoMessage, msgspec.MsgspecError) as exc:
                raise NetworkError(f"what {parent.id} asks cannot be read: {exc}") from exc
            finally:
                await passage.close()
        if not self.prepared.done():
            raise SandboxLost(f"{parent.id} left before it was prepared for what it depends on")

    def _ready(self, message: Ready) -> None:
        if self.prepared.done():
            return
        if message.error is None:
            self.prepared.set_result(None)
        else:
            self.prepared.set_exception(from_wire(message.error))


class _Passage:
    """What is being carried over one connection. ``calls`` are those of all connections, by their ids: one whose
    connection was cut goes on, and is asked for again over the next."""

    def __init__(
        self, children: Mapping[str, Carried], calls: dict[str, asyncio.Task[Answer]], connection: http.Upgraded
    ) -> None:
        self._children = children
        self._calls = calls
        self._connection = connection
        self._asking: dict[int, tuple[str, asyncio.Task[None]]] = {}
        self._sending = asyncio.Lock()

    def take(self, message: Ask | Cancel) -> None:
        if isinstance(message, Cancel):
            if (asking := self._asking.get(message.id)) and (call := self._calls.get(asking[0])):
                call.cancel()
        elif message.id in self._asking or max(len(self._calls), len(self._asking)) >= 2 * AT_ONCE:
            raise NoMessage(f"it asks more than {AT_ONCE} things at once, or one twice")
        else:
            task = asyncio.create_task(self._ask(message))
            self._asking[message.id] = message.call, task
            task.add_done_callback(lambda _: self._asking.pop(message.id))

    async def close(self) -> None:
        """Nobody listens any more."""
        asking = [task for _, task in self._asking.values()]
        for task in asking:
            task.cancel()
        if asking:
            await asyncio.wait(asking)

    async def _ask(self, ask: Ask) -> None:
        call = self._calls.get(ask.call)
        if call is None:
            call = self._calls[ask.call] = asyncio.create_task(self._answer(ask))
            call.add_done_callback(lambda _: self._calls.pop(ask.call))
        answer = msgspec.structs.replace(await asyncio.shield(call), id=ask.id)
        async with self._sending:  # one that does not read is sent one answer, and not a copy of each
            with suppress(NetworkError):  # who asked has left
                await self._connection.send(written(answer))

    async def _answer(self, ask: Ask) -> Answer:
        try:
            child = self._children.get(ask.alias)
            if child is None:
                raise Invalid(f"there is no {ask.alias[:100]!r}")
            value = to_json(await child.carried(ask))
            if len(value) > MOST // 2:
                raise TooLarge(f"the answer of {ask.alias} has {len(value)} bytes; {MOST // 2} is the most")
            return Answer(id=ask.id, value=Raw(value))
        except AEnvError as exc:
            return Answer(id=ask.id, error=_told(exc, ask.alias).to_wire())
        except Exception as exc:
            log.exception("a call of %s was not carried", ask.alias[:100])
            return Answer(id=ask.id, error=SandboxError(f"{ask.alias}: it could not be carried: {exc!r}").to_wire())


def _told(exc: AEnvError, alias: str) -> AEnvError:
    """An error as the asking instance hears it: whatever the way there fails at is the platform's failure."""
    on_the_way = isinstance(exc, (NetworkError, Unauthorized)) or exc.code == AEnvError.code
    kind = SandboxError if on_the_way else type(exc)
    return kind(f"{alias}: {exc.message}", hint=exc.hint)


def _refusal(body: bytes) -> AEnvError:
    try:
        wire = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError:
        return NetworkError("the instance does not let its calls be carried")
    return from_wire({**wire, "message": wire.get("error") or wire.get("message")})
