"""``ProcessEngine``: the engine contract over a spawner, which it starts when it is first needed."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from aenv import agent, config
from aenv.cleanup import finish
from aenv.engines.base import Output, Used
from aenv.engines.inside import Door, InsideEngine
from aenv.engines.process import jail, powers, seconds, state
from aenv.engines.process.venvs import interpreter_for
from aenv.engines.process.volumes import check
from aenv.errors import AEnvError, Conflict, Invalid, NotFound, SandboxLost, Unsupported, from_wire
from aenv.models import NAME, Sandbox, SandboxSpec, Second, State, parse_duration
from aenv.project.builtin import builtin_root
from aenv.project.fields import quantity

log = logging.getLogger("aenv.engine")
_SPAWNER = "from aenv.engines.process.spawner import main; main({}, {!r}, {!r})"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_JOIN = 10.0
"""Seconds in which a spawner that lives must listen."""
_ABANDON = 2.0
"""Seconds in which a spawner that nobody wants any more must be gone."""
_WORTH_TELLING = 0.001
"""Seconds from which on it is said that something took time before the spawner was asked."""
_LONGEST = 2**26
_MEMORY, _STORAGE, _CPU = "2Gi", "5Gi", "1"


_lifelines: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Sockets whose end tells a spawner that this process is gone."""


def _forked() -> None:
    """In a forked child: it does not own what its parent owns, and must not keep it alive."""
    for lifeline in list(_lifelines):
        os.close(lifeline.detach())
    _lifelines.clear()


os.register_at_fork(after_in_child=_forked)


class ProcessEngine(InsideEngine):
    """Sandboxes as processes of this machine.

    ``isolation`` is ``auto`` (all that can be had here), ``strict`` (everything, or it refuses) or ``none``. Without
    ``state`` all sandboxes end with this process, however it ends. With it, they live on when the engine closes, and
    another engine of the same ``state`` finds them again.
    """

    name = "process"

    @property
    def cannot(self) -> Mapping[str, str]:  # type: ignore[override]
        """What the isolation that is to be had here does not give."""
        found = powers.choose(self.isolation)
        lacks: dict[str, str] = {}
        if not self._name:
            lacks["restart"] = "without a state, sandboxes end with the engine that made them"
        if not found.namespaces:
            why = "without namespaces a sandbox is a plain process of this machine"
            names = ("datasource-read-only", "tmp-apart", "processes-apart", "orphans", "state-goes-elsewhere")
            lacks |= dict.fromkeys(names, why)
        if not found.cgroups:
            lacks["out-of-memory"] = "without control groups nothing ends a sandbox that uses too much memory"
        if found.no_volumes:
            lacks["volumes"] = found.no_volumes
        return lacks

    def __init__(self, *, isolation: str | None = None, state: str = "") -> None:
        if sys.platform != "linux":
            raise Unsupported(
                f"the process engine needs Linux, and this is {sys.platform}",
                hint="use the engine 'plain', which does not isolate, or a Linux container",
            )
        self.isolation: str = config.get("isolation", isolation)
        if state and not NAME.fullmatch(state):
            raise Invalid(f"state {state!r} is not a name", hint="use letters, digits, '-', '_' and '.'")
        self._name = state
        self._connection: _Connection | None = None
        self._opening = asyncio.Lock()
        self._told: set[str] = set()
        self._installing: dict[str, tuple[SandboxSpec, float]] = {}
        """Sandboxes whose spawner does not know of them yet, and since when."""

    async def create(self, id: str, spec: SandboxSpec) -> Sandbox:
        if not _ID.fullmatch(id):
            raise Invalid(f"{id!r} is not an id", hint="use letters, digits, '-', '_' and '.', at most 128")
        self.check_second(spec.second)
        self.check_resources(spec.resources)
        began = self._installing.setdefault(id, (spec, time.time()))[1]
        try:
            request = await _request(spec, self.isolation)
            installed = time.time()
            connection = await self._open()
        finally:
            self._installing.pop(id, None)
        before = {"install": installed - began, "spawner": time.time() - installed}
        request["before"] = {name: took for name, took in before.items() if took >= _WORTH_TELLING}
        try:
            found = await connection.ask("create", id=id, spec=request)
            self._tell(str(spec.env), found.pop("notes"))
            return _sandbox(found)
        except asyncio.CancelledError:
            await finish(self.delete(id))
            raise

    def _tell(self, env: str, notes: Sequence[str]) -> None:
        """Say once why an environment is imported anew in each of its sandboxes."""
        if notes and env not in self._told:
            self._told.add(env)
            log.info("%s is imported in each sandbox, which then starts later: %s", env, "; ".join(notes))

    def check_second(self, second: Second | None) -> None:
        if second is not None and not seconds.is_foreign(second) and self.isolation == "none":
            raise Unsupported(
                "the process engine cannot make a second sandbox without isolation",
                hint="use the isolation 'auto' or 'strict', or the docker engine: AENV_ENGINE=docker",
            )
        if second is not None and seconds.is_foreign(second):
            super().check_second(second)

    def check_fork(self, forked_from: str) -> None:
        """Any, if its project says so; ``Site.why_not_forked`` knows what else there is to it."""

    async def prepare(self, spec: SandboxSpec) -> bool:
        self.check_second(spec.second)
        self.check_resources(spec.resources)
        await _request(spec, self.isolation)
        return True

    async def get(self, id: str) -> Sandbox:
        try:
            return _sandbox(await (await self._open()).ask("get", id=id))
        except NotFound:
            if (found := self._installing.get(id)) is None:
                raise
            return _installing(id, *found)

    async def find(self, labels: Mapping[str, str] | None = None) -> list[Sandbox]:
        found = await (await self._open()).ask("find", labels=dict(labels or {}))
        return [_sandbox(row) for row in found]

    async def delete(self, id: str) -> None:
        if not self._name and (self._connection is None or not self._connection.alive):
            return  # what made sandboxes is gone, and they with it
        try:
            await (await self._open()).ask("delete", id=id)
        except SandboxLost:
            return  # the spawner is gone, and with it all that it made

    async def update(self, id: str, *, ttl: float) -> Sandbox:
        return _sandbox(await (await self._open()).ask("update", id=id, ttl=ttl))

    async def hide(self, id: str, secrets: Mapping[str, str]) -> None:
        await (await self._open()).ask("hide", id=id, secrets=dict(secrets))

    async def output(self, id: str, start: int) -> Output:
        found = await (await self._open()).ask("output", id=id, start=start)
        return Output(found["start"], found["data"].encode("latin-1"))

    async def _door(self, id: str) -> Door:
        found = await (await self._open()).ask("door", id=id)
        return Door(id, found["url"], found["key"])

    async def used(self, id: str) -> Used:
        cpu, memory = await (await self._open()).ask("used", id=id)
        return Used(cpu, memory)

    async def volumes(self, owner: str) -> dict[str, int]:
        found: dict[str, int] = await (await self._open()).ask("volumes", owner=owner)
        return found

    async def delete_volume(self, owner: str, name: str) -> None:
        await (await self._open()).ask("delete_volume", owner=owner, name=name)

    async def isolated(self) -> dict[str, Any]:
        """What the isolation of this engine's sandboxes consists of here."""
        found: dict[str, Any] = await (await self._open()).ask("hello")
        return found

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close(leave=bool(self._name))

    async def end(self) -> None:
        """End every sandbox of this engine, also those that would live on."""
        if self._connection is None and (not self._name or state.alive(self._name) is None):
            return
        connection = await self._open()
        self._connection = None
        await connection.close(leave=False)

    async def _open(self) -> _Connection:
        async with self._opening:
            if self._connection is None or not self._connection.alive:
                if self._connection is not None:
                    await self._connection.bury()
                self._connection = await _Connection.open(self.isolation, self._name)
            return self._connection


class _Connection:
    """Requests to one spawner."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        process: subprocess.Popen[bytes] | None,
    ) -> None:
        self._writer = writer
        self._process = process
        self._numbers = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._made_in = os.getpid()
        self._reading = asyncio.create_task(self._read(reader))

    @property
    def alive(self) -> bool:
        return not self._reading.done() and self._made_in == os.getpid()

    @classmethod
    async def open(cls, isolation: str, name: str) -> _Connection:
        """Join the spawner of that name, or start one. Without a name it is nobody else's."""
        while True:
            if name and (joined := await cls._join(isolation, name)):
                return joined
            await asyncio.to_thread(state.sweep)
            try:
                return await cls._start(isolation, name)
            except Conflict:
                continue  # another engine of that name was faster

    @classmethod
    async def _join(cls, isolation: str, name: str) -> _Connection | None:
        """Join the spawner of that name; None when none is alive, or the one that was has ended."""
        try:
            async with asyncio.timeout(_JOIN):
                while path := state.alive(name):
                    with suppress(OSError, SandboxLost):
                        return await cls._greet(path / "control.sock", isolation)
                    await asyncio.sleep(0.01)  # it holds its lock, and listens soon, or is about to end
        except TimeoutError:
            hint = f"end the process that {state.root() / name}/spawner.json names; its sandboxes end with it"
            raise AEnvError(f"what holds the sandboxes of {name!r} does not answer", hint=hint) from None
        return None

    @classmethod
    async def _greet(cls, path: Path, isolation: str) -> _Connection:
        made = cls(*await asyncio.open_unix_connection(str(path), limit=_LONGEST), None)
        try:
            found = (await made.ask("hello"))["isolation"]
            if isolation == "strict" and found != "strict":
                if await made.ask("retire"):
                    raise SandboxLost("it was less isolated, and nobody's")
                raise Invalid(
                    f"sandboxes of {path.parent.name!r} are alive that are isolated as {found!r}, not strictly",
                    hint=f"delete them first, or set AENV_ISOLATION={found}",
                )
        except BaseException:
            await finish(made.close(leave=True))
            raise
        return made

    @classmethod
    async def _start(cls, isolation: str, name: str) -> _Connection:
        mine, theirs = socket.socketpair()
        _lifelines.add(mine)
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220  it forks a small process, and returns
                jail.python(sys.executable, _SPAWNER.format(theirs.fileno(), isolation, name), site=True),
                env=config.child_environment({}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if config.get("debug") else subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                cwd="/",
            )
        # Whenever it ends, and whoever ends it, it is not left as a zombie.
        threading.Thread(target=process.wait, name="aenv-spawner", daemon=True).start()
        mine.setblocking(False)
        made = cls(*await asyncio.open_unix_connection(sock=mine, limit=_LONGEST), process)
        try:
            hello = await made.ask("hello")
        except BaseException:
            await finish(made.abandon(process))
            raise
        lacks = hello["powers"]["lacks"]
        if lacks and isolation == "auto":
            log.warning(
                "sandboxes on this machine go without: %s ('aenv doctor' explains)",
                ", ".join(lack[0] for lack in lacks),
            )
        return made

    async def ask(self, verb: str, **arguments: Any) -> Any:
        self._numbers += 1
        number = self._numbers
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            if self._reading.done():
                raise SandboxLost("the spawner is gone")
            self._writer.write(json.dumps({"n": number, "do": verb, "with": arguments}).encode() + b"\n")
            return await answer
        finally:
            del self._waiting[number]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        error: AEnvError = SandboxLost("the spawner is gone, and all its sandboxes with it")
        try:
            while line := await reader.readline():
                reply = json.loads(line)
                if reply["n"] == 0:
                    error = from_wire(reply["error"])
                answer = self._waiting.get(reply["n"])
                if answer is None or answer.done():
                    continue
                if "error" in reply:
                    answer.set_exception(from_wire(reply["error"]))
                else:
                    answer.set_result(reply["result"])
        except (OSError, ValueError):
            pass
        finally:
            self._writer.close()  # also when the event loop ends, and this task with it
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(error)

    async def bury(self) -> None:
        """Wait until a spawner that is gone has let go of its lock, too."""
        if self._process is not None and self._made_in == os.getpid():
            await asyncio.to_thread(self._process.wait)

    async def abandon(self, process: subprocess.Popen[bytes]) -> None:
        """Let go of a spawner that has not said hello: it ends by itself, or is stuck."""
        self._writer.close()
        try:
            await asyncio.to_thread(process.wait, _ABANDON)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)
        self._reading.cancel()
        await asyncio.wait((self._reading,))

    async def close(self, *, leave: bool) -> None:
        """Let go. A spawner that is not to be left ends everything, and itself; back when it has."""
        if not leave and self.alive:
            with suppress(SandboxLost):
                await self.ask("end")
            await asyncio.wait((self._reading,))  # its end of the connection closes last
        self._writer.close()
        if self._process is not None and not leave:
            await asyncio.to_thread(self._process.wait)
        self._reading.cancel()
        await asyncio.wait((self._reading,))


def _may_build(root: str, isolation: str) -> bool:
    """Whether requirements may be built. What comes with this package is trusted as much as the package is."""
    return isolation == "none" or (isolation == "auto" and Path(root).resolve().parent == builtin_root().resolve())


async def _request(spec: SandboxSpec, isolation: str) -> dict[str, Any]:
    """A spec as the spawner takes it: numbers for quantities, and the interpreter for the project."""
    root = _directory(spec)
    volumes = check((one.owner, one.name, one.mount, one.size) for one in spec.volumes)
    trusted = _may_build(root, isolation)
    interpreter = await interpreter_for(Path(root), lambda line: log.info("%s", line), trusted=trusted)
    memory = _size(spec.resources, "memory", _MEMORY)
    second = None
    if spec.second is not None:
        directory = seconds.check(spec.second, spec.volumes)
        second = {"directory": directory, "program": str(await asyncio.to_thread(agent.binary))}
    return {
        "env": str(spec.env),
        "owner": spec.owner,
        "labels": spec.labels,
        "project": root,
        "stamp": spec.stamp,
        "interpreter": "" if interpreter.executable == sys.executable else interpreter.executable,
        "ttl": None if spec.lasting else spec.ttl,
        "lasting": spec.lasting,
        "volumes": volumes,
        "second": second,
        "startup_timeout": spec.startup_timeout,
        "environment_variables": spec.environment_variables,
        "secrets": spec.secrets,
        "arguments": spec.arguments,
        "datasource": spec.datasource,
        "seed": spec.seed,
        "network": spec.network,
        "preload": spec.preload,
        "idle": None if spec.lasting else spec.idle,
        "suspend": _suspend(spec),
        "warm": spec.warm,
        "forkable": spec.forkable,
        "forked_from": spec.forked_from,
        "owner_token_sha256": spec.owner_token_sha256,
        "cpu": _size(spec.resources, "cpu", _CPU),
        "memory": int(memory),
        # What is written is in memory, and counts: half of it at most, so that a full disk comes before the end.
        "storage": int(min(_size(spec.resources, "ephemeralStorage", _STORAGE), memory / 2)),
    }


def _suspend(spec: SandboxSpec) -> float | None:
    """Seconds without a call after which it may stand still. Never what others look at all the time, as they do at
    services, and never what has files or processes beyond those of one sandbox."""
    if spec.lasting or spec.volumes or spec.second is not None:
        return None
    if spec.suspend is not None:
        return spec.suspend
    said: str = config.get("suspend")
    return parse_duration(said, "AENV_SUSPEND") if said else None


def _directory(spec: SandboxSpec) -> str:
    if not spec.project or not os.path.isdir(spec.project):
        raise Invalid(f"{spec.env} has no project directory {spec.project!r}", hint="give one that exists")
    return os.path.realpath(spec.project)


def _size(resources: Mapping[str, str], name: str, default: str) -> float:
    found = quantity(resources.get(name, default))
    if found <= 0:
        raise Invalid(f"{name} {resources[name]!r} is not an amount", hint=f"use for example {default!r}")
    return found


def _installing(id: str, spec: SandboxSpec, since: float) -> Sandbox:
    """One whose requirements are being installed."""
    return Sandbox(
        url="",
        id=id,
        state=State.CREATING,
        env=str(spec.env),
        owner=spec.owner,
        labels=spec.labels,
        created_at=since,
        phases={"install": round(max(time.time() - since, 0.0), 6)},
    )


def _sandbox(row: Mapping[str, Any]) -> Sandbox:
    return Sandbox(**{**row, "state": State(row["state"])})
