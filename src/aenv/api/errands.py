"""What is done inside an instance for its owner, and what is read of it: commands, files, history, reset, logs.

All but logs is asked of the runtime inside, wherever that is. What an instance printed is kept by its engine, so the
server is asked that has the engine.

The values of its secrets are taken out of all of it, but for files, which are the owner's as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import AsyncExitStack, aclosing
from typing import Any

import msgspec

from aenv.api import inside
from aenv.api.lives import ENGINE, Entry, Lives
from aenv.api.peers import HOP, Peer
from aenv.api.visible import Visible
from aenv.auth.callers import Caller
from aenv.control import Service, segment
from aenv.errors import AEnvError, Invalid, NetworkError, NotFound, SandboxError, Unsupported
from aenv.models import ExecResult, to_json
from aenv.wire import Exec, Reset

LONGEST_EXEC = 3600.0
"""Most seconds of a command."""
_RESET = 600.0
_ANSWER = 15.0
"""Seconds that a sandbox has for what should take it none, and over those of a command."""
_NOTHING = 2**53
"""A position in an instance's output that is never reached."""

Calls = list[dict[str, Any]]


class Errands:
    """What owners have done inside their instances."""

    def __init__(self, visible: Visible, lives: Lives) -> None:
        self._visible = visible
        self._lives = lives

    async def exec(self, caller: Caller, id: str, command: Exec) -> ExecResult:
        """Run a command inside."""
        if not 0 < command.timeout <= LONGEST_EXEC:
            raise Invalid(f"timeout {command.timeout:g} is not between 0 and {LONGEST_EXEC:g} seconds")
        if not command.command:
            raise Invalid("command is empty", hint='send {"command": "ls -l"}, or an array of arguments')
        data = await self._ask(caller, id, "POST", "/exec", to_json(command), timeout=command.timeout + _ANSWER)
        try:
            return msgspec.convert(data, ExecResult)
        except msgspec.ValidationError as exc:
            raise SandboxError(f"{id} answered with nonsense") from exc

    async def history(self, caller: Caller, id: str, last: int | None = None) -> Calls:
        """The calls that ended lately inside, the newest last."""
        if last is not None and last < 0:
            raise Invalid(f"last {last} is no number of calls")
        path = "/history" if last is None else f"/history?last={last}"
        found: Calls = await self._ask(caller, id, "GET", path, timeout=_ANSWER)
        return found

    async def reset(self, caller: Caller, id: str, wanted: Reset) -> Any:
        """Put an instance back to its beginning; what the author's reset returns."""
        return await self._ask(caller, id, "POST", "/reset", to_json(wanted), timeout=_RESET)

    async def _ask(self, caller: Caller, id: str, method: str, path: str, body: bytes = b"", *, timeout: float) -> Any:
        entry, place = await self._visible.running(caller, id)
        hidden = await self._lives.hidden(entry.kept.record)
        with self._lives.used(entry):
            try:
                data = await inside.ask(place, method, path, body, timeout=timeout)
            except AEnvError as exc:
                raise await self._explained(entry, exc) from exc
        try:
            return data if hidden is None else hidden.everything(data)
        except RecursionError:
            raise SandboxError(f"{id} answered with nonsense") from None

    async def read(self, caller: Caller, id: str, path: str) -> inside.Opened:
        """Open a file inside, or list a directory."""
        entry, place = await self._visible.running(caller, id)
        with self._lives.used(entry):
            try:
                return await inside.read(place, _path(path))
            except AEnvError as exc:
                raise await self._explained(entry, exc) from exc

    async def write(
        self, caller: Caller, id: str, path: str, content: AsyncIterable[bytes], size: int | None
    ) -> dict[str, Any]:
        """Write a file inside, as it comes."""
        entry, place = await self._visible.running(caller, id)
        with self._lives.used(entry):
            try:
                return await inside.write(place, _path(path), content, size)
            except AEnvError as exc:
                raise await self._explained(entry, exc) from exc

    async def _explained(self, entry: Entry, exc: AEnvError) -> AEnvError:
        """Why an instance did not do what was asked: what its engine knows, or else what it said itself."""
        if isinstance(exc, SandboxError) and entry.id in self._lives.entries:
            await self._lives.look(entry)
            if (record := entry.kept.record).over:
                return type(exc)(f"{entry.id} is {record.status.lower()}: {record.reason}")
        if hidden := await self._lives.hidden(entry.kept.record):
            exc.message = hidden.text(exc.message)
            exc.hint = exc.hint and hidden.text(exc.hint)
        return exc

    async def logs(
        self,
        caller: Caller,
        id: str,
        *,
        tail: int | None = None,
        follow: bool = False,
        token: str = "",
        passed_on: bool = False,
    ) -> AsyncGenerator[bytes, None]:
        """What an instance printed, by line; of one that has ended, too, as long as its engine keeps it.

        ``token`` is the caller's own, to be shown to the server that has the engine; what one server passed on to
        another is not passed on again.
        """
        if tail is not None and tail < 0:
            raise Invalid(f"tail {tail} is no number of lines")
        record = await self._visible.find(caller, id)
        engine = self._lives.engine
        try:
            async with asyncio.timeout(ENGINE):
                await engine.output(id, _NOTHING)  # what there is to raise is raised before an answer begins
        except (NotFound, Unsupported) as exc:
            if record.server != self._lives.name and not passed_on:
                peer = self._lives.peers.at(id, record.server)
                return await printed_at(peer, f"/env-instance/{segment(id)}/logs", tail, follow, token)
            if isinstance(exc, Unsupported):
                raise
            raise NotFound(f"nothing is kept of what {id} printed") from None
        except TimeoutError:
            raise AEnvError(f"the engine did not answer for {id}") from None
        hidden = await self._lives.hidden(record)

        async def lines() -> AsyncGenerator[bytes, None]:
            async with aclosing(engine.logs(id, tail, follow)) as found:  # type: ignore[type-var]
                async for line in found:
                    yield f"{line if hidden is None else hidden.text(line)}\n".encode()

        return lines()


async def printed_at(peer: Peer, path: str, tail: int | None, follow: bool, token: str) -> AsyncGenerator[bytes, None]:
    """What was printed at another server, from there."""
    asking = Service(peer.control_url, token, retries=0).stream(
        *("GET", path),
        query={"tail": tail, "follow": follow or None},
        headers={HOP: "1"},
        patience=None if follow else ENGINE,
    )
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(ENGINE):
                found = await stack.enter_async_context(asking)
        except (NetworkError, TimeoutError) as exc:
            why = exc.message if isinstance(exc, NetworkError) else "it took too long"
            raise NetworkError(f"the server {peer.name}, where it is, did not answer: {why}") from exc
        opened = stack.pop_all()

    async def pieces() -> AsyncGenerator[bytes, None]:
        async with opened:
            async for piece in found:
                yield piece

    return pieces()


def _path(path: str) -> str:
    if not path or "\0" in path:
        raise Invalid("which file?", hint="name it, as in ?path=notes/today.txt")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise Invalid("the path has half a character", hint="give text in UTF-8") from None
    return path
