"""The contract of an engine: four verbs that every engine has, what is built on them, and powers that some have.

An engine keeps no state of its own: after a restart ``find`` returns what is alive. All methods may be called
concurrently, from one event loop. What is not an ``AEnvError`` is a defect of the engine.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import ClassVar, NamedTuple, Self

import msgspec

from aenv.cleanup import finish
from aenv.errors import AEnvError, Invalid, NotFound, SandboxLost, StartFailed, Unsupported
from aenv.models import ExecResult, Sandbox, SandboxSpec, Second, State, told
from aenv.runtime.tokens import digest, new_owner_token

_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
_LONGEST_LINE = 1024 * 1024


_MOMENT = 2.0
"""Seconds in which an engine must say how far a start is that takes too long."""


RESOURCES = ("cpu", "memory", "ephemeralStorage")
"""What every engine gives, as far as it can."""


class Used(NamedTuple):
    """What a sandbox has used so far, and uses now."""

    cpu: float
    """Seconds of a processor, since it began."""
    memory: int
    """Bytes, now."""


class Output(NamedTuple):
    """A piece of what a sandbox printed."""

    start: int
    """Position of the first byte; greater than what was asked for when older output is no longer kept."""
    data: bytes


def _spent(sandbox: Sandbox | None) -> str:
    where = told(sandbox.phases) if sandbox is not None else ""
    return f"; the time went to: {where}" if where else ""


async def _ended(task: asyncio.Task[Sandbox]) -> None:
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # of no more interest


def new_id(name: str) -> str:
    """An id for a sandbox of the environment ``name``: readable, unguessable, and fit to be a host name."""
    shown = re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-")
    return f"{shown}-{''.join(secrets.choice(_ALPHABET) for _ in range(10))}"


class Engine(ABC):
    """Makes sandboxes, finds them again, and ends them."""

    name: ClassVar[str]
    """What a person calls it: ``process``, ``docker``."""
    shared: ClassVar[bool] = False
    """Whether several servers reach the same sandboxes by it, wherever they run."""
    images: ClassVar[bool] = False
    """Whether it runs images: a spec that has one then needs no files of the project."""
    cannot: Mapping[str, str] = {}
    """Checks of the conformance list that it cannot pass as it runs here, or the power that several need, each with
    the reason."""

    # The four verbs

    @abstractmethod
    async def create(self, id: str, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox under the id that is given, and return it, RUNNING or on its way there.

        Idempotent: an id that is alive is returned as it is, whatever ``spec`` says. An id that has ended is a
        ``Conflict``. What can be known at once raises at once: ``Invalid`` for a spec that can never start,
        ``StartFailed`` with the reason a person needs. Cancelled, it leaves nothing behind.
        """

    @abstractmethod
    async def get(self, id: str) -> Sandbox:
        """The sandbox as it is now; ``NotFound`` when there is none. A failed one is kept for a while with its
        reason; whether an ended one is kept is the engine's choice."""

    @abstractmethod
    async def find(self, labels: Mapping[str, str] | None = None) -> list[Sandbox]:
        """Every sandbox that is alive or kept and bears all these labels; after a restart of the engine too."""

    @abstractmethod
    async def delete(self, id: str) -> None:
        """End a sandbox. Returns when nothing of it is left; gone already is success."""

    async def close(self) -> None:  # noqa: B027  most engines hold nothing
        """Let go of what the engine itself holds."""

    # Built on the four

    async def wait(self, id: str, timeout: float, *, where: bool = True) -> Sandbox:
        """The sandbox once it is RUNNING; ``StartFailed`` with its reason when it fails, or takes too long, where the
        time that it is PENDING does not count. ``where``: whether the error says where the time went."""
        seen: Sandbox | None = None
        pause, loop = 0.01, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout) as limit:
                while True:
                    seen = await self.get(id)
                    if seen.state is State.RUNNING:
                        return seen
                    if seen.state.over:
                        raise StartFailed(f"{id} did not start: {seen.reason or seen.state.lower()}")
                    if seen.state is State.PENDING:
                        limit.reschedule(None)
                    elif limit.when() is None:
                        limit.reschedule(loop.time() + timeout)
                    await self._pause(id, pause)
                    pause = min(pause * 2, 1.0)
        except NotFound as exc:
            raise StartFailed(f"{id} is gone: it was deleted while it started") from exc
        except TimeoutError:
            if not limit.expired():
                raise
            how = f"still {seen.state.lower()}" if seen else "silent"
            why = f": {seen.reason}" if seen and seen.reason else ""
            spent = _spent(seen) if where else ""
            raise StartFailed(f"{id} is {how} after {timeout:g} s{why}{spent}") from None

    async def _pause(self, id: str, seconds: float) -> None:
        """Wait before it is worth to look at a start again: so long, or until an engine that is told of it knows."""
        await asyncio.sleep(seconds)

    @asynccontextmanager
    async def provision(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """A sandbox for the length of a block, with the owner's token. It is deleted at the end, come what may."""
        token = new_owner_token()
        id = new_id(spec.env.name)
        try:
            sandbox = await self._start(id, msgspec.structs.replace(spec, owner_token_sha256=digest(token)))
            yield msgspec.structs.replace(sandbox, token=token)
        except BaseException as exc:
            try:
                await finish(self.delete(id))
            except AEnvError as failure:  # what ended the block is what its caller should see
                exc.add_note(f"{id} could not be deleted: {failure}")
            raise
        await finish(self.delete(id))

    async def _start(self, id: str, spec: SandboxSpec) -> Sandbox:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + spec.startup_timeout
        creating = asyncio.create_task(self.create(id, spec))
        try:
            await asyncio.wait((creating,), timeout=spec.startup_timeout)
            if not creating.done():
                raise StartFailed(f"{id} did not start within {spec.startup_timeout:g} s{await self._stands(id)}")
            sandbox = creating.result()
        finally:
            if not creating.done():
                creating.cancel()
                await finish(_ended(creating))
            elif not creating.cancelled():
                creating.exception()  # taken note of, also where its caller has just left
        if sandbox.state is State.RUNNING:
            return sandbox
        return await self.wait(id, deadline - loop.time())

    async def _stands(self, id: str) -> str:
        """Where the time of a start that goes on went so far, in words."""
        with suppress(AEnvError, TimeoutError):
            async with asyncio.timeout(_MOMENT):
                return _spent(await self.get(id))
        return ""

    async def logs(self, id: str, tail: int | None = None, follow: bool = False) -> AsyncIterator[str]:
        """What the sandbox printed, by line: the last ``tail``, all that is kept by default. With ``follow``, also
        what it prints from then on, until it ends."""
        found = await self.output(id, 0)
        *lines, rest = found.data.split(b"\n")
        if rest and not follow:
            lines, rest = [*lines, rest], b""
        for line in lines if tail is None else lines[max(len(lines) - tail, 0) :]:
            yield line.decode(errors="replace")
        position = found.start + len(found.data)
        pause = 0.05
        while follow:
            try:
                ended = (await self.get(id)).state.over
                found = await self.output(id, position)
            except (NotFound, SandboxLost):
                break
            if found.data:
                if rest and (found.start > position or len(rest) > _LONGEST_LINE):
                    yield rest.decode(errors="replace")  # its end is no longer kept, or has not come for too long
                    rest = b""
                position = found.start + len(found.data)
                *lines, rest = (rest + found.data).split(b"\n")
                for line in lines:
                    yield line.decode(errors="replace")
                pause = 0.05
            elif ended:
                break
            else:
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, 1.0)
        if rest:
            yield rest.decode(errors="replace")

    # Powers that an engine may have

    def check_second(self, second: Second | None) -> None:
        """Raise unless a sandbox can have such a second container; None is no wish. ``create`` asks, and before it
        whoever admits sandboxes, so that nothing is made in vain."""
        if second is not None:
            what = f"make a second container ({second.image or second.directory})"
            raise Unsupported(
                f"the {self.name} engine cannot {what}",
                hint="use the docker engine: aenv serve --engine docker, or AENV_ENGINE=docker",
            )

    def check_resources(self, resources: Mapping[str, str]) -> None:
        """Raise unless it gives all of these: ``create`` and whoever admits sandboxes ask, as with ``check_second``."""
        for name in resources:
            if name not in RESOURCES:
                raise Invalid(
                    f"the {self.name} engine does not give {name[:100]!r}", hint=f"use {', '.join(RESOURCES)}"
                )

    def check_fork(self, forked_from: str) -> None:
        """Raise unless a sandbox can begin as a fork of that one, which lives; empty is no wish. Asked as
        ``check_second`` is. Whether that very one can be forked at that moment, ``create`` finds out."""
        if forked_from:
            raise self._cannot("fork a sandbox that lives")

    async def prepare(self, spec: SandboxSpec) -> bool:
        """Do now what the first sandbox of such a spec would have to wait for, and keep it: packages, an image. False
        when this engine keeps nothing, and nothing was done."""
        return False

    async def output(self, id: str, start: int) -> Output:
        """What the sandbox printed, from that position on, as far as it is kept. ``logs`` is built on this."""
        raise self._cannot("keep what a sandbox prints")

    async def update(self, id: str, *, ttl: float) -> Sandbox:
        """Let the sandbox live ``ttl`` seconds from now."""
        raise self._cannot("change a sandbox")

    async def hide(self, id: str, secrets: Mapping[str, str]) -> None:
        """Show the values of these no more, which a warm sandbox is about to be told: neither in what it prints nor in
        what is said of it. Whoever keeps nothing of that has nothing to do."""
        return

    async def exec(self, id: str, command: Sequence[str], *, timeout: float = 60.0) -> ExecResult:
        """Run a command inside, as the sandbox's own user, in its work directory. One that takes too long is ended."""
        raise self._cannot("run a command inside a sandbox")

    async def upload(self, id: str, path: str, content: bytes) -> None:
        """Write a file inside; a relative path is under the work directory. Folders that are missing are made."""
        raise self._cannot("write files of a sandbox")

    async def download(self, id: str, path: str) -> bytes:
        """Read a file inside; ``NotFound`` when there is none."""
        raise self._cannot("read files of a sandbox")

    async def used(self, id: str) -> Used:
        """What it has used; ``NotFound`` when there is no such sandbox."""
        raise self._cannot("tell what a sandbox uses")

    async def volumes(self, owner: str) -> dict[str, int]:
        """The owner's volumes: the name of each, and the bytes that are in use in it."""
        raise self._cannot("keep volumes")

    async def delete_volume(self, owner: str, name: str) -> None:
        """Forget a volume with all that it holds; gone already is success. ``Conflict`` while a sandbox has it."""
        raise self._cannot("keep volumes")

    async def expose(self, id: str, port: int) -> str:
        """A URL for something that listens on a port inside."""
        raise self._cannot("expose a port")

    def _cannot(self, what: str) -> Unsupported:
        return Unsupported(f"the {self.name} engine cannot {what}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await finish(self.close())
