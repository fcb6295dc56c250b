"""The spawner's side of a zygote: starting the jail, asking for forks, hearing how they ended."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from aenv.engines.process import jail
from aenv.engines.process.cgroups import Limits, remove_soon
from aenv.engines.process.install import install
from aenv.engines.process.output import Printed
from aenv.engines.process.powers import Powers
from aenv.engines.process.second import LINK
from aenv.engines.process.site import HIDDEN, Site
from aenv.engines.process.volumes import made_outside
from aenv.engines.process.wire import IMPORTING, Channel, close_all, connect, discard, failure, until, words
from aenv.engines.stages import Stages
from aenv.errors import AEnvError, SandboxLost, StartFailed

_MEMORY = 4 * 1024**3
_PROCESSES = 30_000
"""What a zygote may have when it forks: tables of pages, and a first process for each instance."""
_IMPORTING = 512
"""Processes and threads while it imports."""
_LEAST = 256 * 1024**2
"""Bytes that an import may use in any case."""
_MOMENT = 0.5
_NOTHING = 0
"""Standard input, which is /dev/null here."""
_AT_ONCE = 16
"""Forks that are under way at a time. More would make each of them later, and none of them sooner."""
_OWN = 2
"""Processes of a jail without instances: the stub and the zygote."""
_ZYGOTE = "from aenv.engines.process.zygote import main; main({})"
_JAIL = "from aenv.engines.process.jail import main; main({})"
_IN_JAIL = "import sys; sys.path.insert(0, '/runtime'); " + _ZYGOTE


class Key(NamedTuple):
    """What instances of one zygote have in common."""

    owner: str | None
    project: str
    stamp: str
    """Which state of the project's files."""
    interpreter: str
    network: str
    """``none``, ``proxy`` or ``full``."""
    datasource: str
    mounts: tuple[str, ...] = ()
    """Where they have volumes, in order."""
    forkable: bool = False
    """Whether they may be forked while they live."""


class Zygote:
    """A warm parent of instances."""

    def __init__(self, site: Site, number: int, channel: Channel, printed: Printed, lifeline: int) -> None:
        self._site = site
        self._number = number
        self._leaf = _leaf(number)
        self.printed = printed
        self.forkable = False
        """Whether its instances may be forked while they live."""
        self.preloaded = False
        self.variables: frozenset[str] = frozenset()
        """Names, or patterns of names, that libraries read from the environment while they were imported."""
        self.given: dict[str, str] = {}
        """The environment they were imported with."""
        self.reasons: list[str] = []
        """Why the author's modules are imported in each instance instead."""
        self.used = asyncio.get_running_loop().time()
        self.instances = 0
        self._channel = channel
        self._process = -1
        """A pidfd, where the system has them."""
        self._lifeline = lifeline
        self._asking = asyncio.Lock()
        self.turns = asyncio.Semaphore(_AT_ONCE)
        self._exits: dict[int, asyncio.Future[int | str]] = {}
        self.forks = 0
        self._hearing: asyncio.Task[None] | None = None
        self._gone: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self.pid = 0

    @property
    def project(self) -> str:
        """The installed project, as an instance sees it."""
        return "/project" if self._site.powers.namespaces else f"{_home(self._site, self._number)}/project"

    @classmethod
    async def start(
        cls,
        site: Site,
        number: int,
        key: Key,
        preload: bool | str,
        variables: dict[str, str],
        patience: float,
        memory: int,
        stages: Stages,
    ) -> Self:
        """Install the project, start the process, and wait until everything is imported."""
        home = _home(site, number)
        try:
            async with asyncio.timeout(patience):
                stages.begin("install")
                (home / "root").mkdir(parents=True)
                owner = site.users if site.powers.privileged and site.powers.namespaces else None
                await asyncio.to_thread(install, Path(key.project), home / "project", owner)
                stages.begin("zygote")
                return await cls._started(site, number, key, preload, variables, max(memory, _LEAST), stages)
        except TimeoutError:
            await asyncio.to_thread(_clear, site, number)
            raise StartFailed(f"the project was not imported within {patience:g} s") from None
        except BaseException:
            await asyncio.to_thread(_clear, site, number)
            raise
        finally:
            stages.end()

    @classmethod
    async def _started(
        cls,
        site: Site,
        number: int,
        key: Key,
        preload: bool | str,
        variables: dict[str, str],
        memory: int,
        stages: Stages,
    ) -> Self:
        channel, printed, report, log = connect()
        passed = [report, log]
        try:
            lifeline_read, lifeline = os.pipe()
            passed.append(lifeline_read)
        except OSError:
            close_all(passed)
            channel.close()
            printed.close()
            raise
        made = cls(site, number, channel, printed, lifeline)
        made.forkable = key.forkable
        try:
            process = made._run(key, passed, memory)
        except BaseException:
            await made.close()
            raise
        finally:
            close_all(passed)
        try:
            await made._introduce(process, key, preload, variables, stages)
        except BaseException as exc:
            ended = made._how_it_ended
            await made.close()
            process.kill()
            await asyncio.to_thread(process.wait)
            await asyncio.to_thread(end_group, process.pid)
            if isinstance(exc, SandboxLost):
                raise StartFailed(f"{ended}\n{made.printed.last()}".rstrip()) from exc
            raise
        return made

    def _run(self, key: Key, passed: list[int], memory: int) -> subprocess.Popen[bytes]:
        """Start its process. What it is passed is this one's no more: all in ``passed`` are then closed."""
        site = self._site
        report, log, lifeline = passed
        given = [report]
        if site.powers.namespaces:
            given.append(lifeline)
            if site.groups is not None:
                site.groups.add(self._leaf, Limits(memory=memory, pids=_IMPORTING))
                tasks = site.groups.open(self._leaf)
                passed += tasks
                given += tasks
        return launch(_command(site.powers, key, given), given, log)

    @property
    def _how_it_ended(self) -> str:
        groups = self._site.groups
        if groups is not None and groups.out_of_memory(self._leaf):
            return "out of memory: importing the project took more than an instance may use"
        return "the project's first process ended"

    async def _introduce(
        self,
        process: subprocess.Popen[bytes],
        key: Key,
        preload: bool | str,
        variables: dict[str, str],
        stages: Stages,
    ) -> None:
        powers = self._site.powers
        if powers.namespaces:
            await self._channel.send(_plan(self._site, self._number, key))
            self._process = await stub_of(self._channel)
            await asyncio.to_thread(process.wait)
        else:
            self.pid = process.pid
            if hasattr(os, "pidfd_open"):
                self._process = os.pidfd_open(process.pid)
        self._channel.ask_who()
        order = {"project": self.project, "preload": preload, "jailed": powers.namespaces, "variables": variables}
        await self._channel.send(order | {"dual": LINK in key.mounts, "forkable": key.forkable})
        facts, descriptors = await self._channel.receive()
        discard(descriptors)
        if facts == IMPORTING:
            stages.begin("import")
            facts, descriptors = await self._channel.receive()
            discard(descriptors)
        self.pid = self._channel.pid or self.pid
        if (handle := self._channel.take_pidfd()) is not None:
            os.close(handle)
        if not isinstance(facts, dict):
            raise SandboxLost("the zygote sent nonsense")
        if failed := facts.get("failed"):
            raise failure(failed)
        self.reasons = _texts(facts.get("reasons"))
        if facts.get("ready") is not True:
            raise NotPreloadable(self.reasons)
        self.preloaded = facts.get("preloaded") is True
        self.variables = frozenset(_texts(facts.get("variables")))
        given = facts.get("given")
        self.given = given if isinstance(given, dict) else {}
        self._settle()
        self._hearing = asyncio.create_task(self._hear())

    def _settle(self) -> None:
        """Look whether the import left processes behind, which nobody would end, and make room for instances."""
        groups = self._site.groups
        if groups is None or not self._site.powers.namespaces:
            return
        if len(groups.processes(self._leaf)) > _OWN:
            raise NotPreloadable(["it starts processes that go on"])
        groups.add(self._leaf, Limits(memory=_MEMORY, pids=_PROCESSES))

    def comes_too_late(self, variables: Mapping[str, str]) -> bool:
        """Whether the import, or a library in it, went by another value of one of these."""
        changed = [name for name, value in variables.items() if self.given.get(name) != value]
        beginnings = tuple(pattern[:-1] for pattern in self.variables if pattern.endswith("*"))
        return any(name in self.variables or name.startswith(beginnings) for name in changed)

    async def _hear(self) -> None:
        """Learn how children ended. It is for words in a reason, and nothing else depends on it."""
        heard = 0
        with suppress(SandboxLost):
            while heard <= self.forks:
                heard += 1
                message, descriptors = await self._channel.receive()
                discard(descriptors)
                if not isinstance(message, dict):
                    continue
                number, status = message.get("exited"), message.get("status")
                ended = self._exits.get(number) if isinstance(number, int) else None
                if ended is not None and not ended.done():
                    ended.set_result(status if isinstance(status, int) else words(status, 1024))

    async def fork(self, number: int, order: dict[str, Any], descriptors: list[int]) -> asyncio.Future[int | str]:
        """Ask for a child that gets these descriptors: the listener, its report, its log, and its control groups.
        Its exit code, or words in its place, comes later, if it comes."""
        loop = asyncio.get_running_loop()
        self.used = loop.time()
        self.forks += 1
        ended = self._exits[number] = loop.create_future()
        message = json.dumps(order | {"number": number}).encode()
        async with self._asking:
            # One message, one answer: the zygote takes a request with its descriptors, or nothing.
            while True:
                try:
                    socket.send_fds(self._channel.sock, [message], descriptors)
                    return ended
                except BlockingIOError:
                    await until(self._channel.sock.fileno(), writable=True)
                except OSError as exc:
                    raise SandboxLost("the zygote is gone") from exc

    def kill(self, number: int) -> None:
        """Have a child killed that only the zygote knows."""
        with suppress(OSError):
            # With a descriptor, as every request, so that two are not read as one. Any that is of no use will do.
            socket.send_fds(self._channel.sock, [json.dumps({"kill": number}).encode()], [_NOTHING])

    def forget(self, number: int) -> None:
        """The exit code of that child is of no more interest."""
        self._exits.pop(number, None)

    @property
    def dead(self) -> bool:
        return self._gone is not None and self._gone.done()

    async def died(self) -> bool:
        """Whether it is dead. The end of a socket may be heard a moment before that of its process."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_MOMENT):
                await self.ended()
        return self.dead

    async def ended(self) -> None:
        """Wait until it is gone."""
        if self._gone is None:
            waiting = until(self._process) if self._process >= 0 else asyncio.to_thread(os.waitpid, self.pid, 0)
            self._gone = asyncio.create_task(_quietly(waiting))  # one waiter: a descriptor wakes only one
        await asyncio.shield(self._gone)

    async def close(self) -> None:
        """End it, and with it, inside a jail, every instance of it. Nothing of it is left afterwards."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._process >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            await self.ended()
            bury(self._process)
            os.close(self._process)
            self._process = -1
        elif self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            await self.ended()
        if self._hearing is not None:
            self._hearing.cancel()
            await asyncio.wait((self._hearing,))
        self._channel.close()
        self.printed.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        await asyncio.to_thread(_clear, self._site, self._number)


class NotPreloadable(AEnvError):
    """The import did something that must not be shared by forks."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("the project cannot be preloaded")
        self.reasons = reasons


def _texts(value: object) -> list[str]:
    """The texts in what ought to be a list of some."""
    return [words(item, 1024) for item in value[:1000] if isinstance(item, str)] if isinstance(value, list) else []


def bury(pidfd: int) -> None:
    """Leave no zombie of a process that is dead, if it is this one's to bury."""
    with suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)


def launch(command: list[str], given: list[int], log: int) -> subprocess.Popen[bytes]:
    """Start the first process of a jail, or of what is one where there are none."""
    return subprocess.Popen(
        command,
        env={},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=given,
        start_new_session=True,
        cwd="/",
    )


async def stub_of(channel: Channel) -> int:
    """A handle on the process that holds a jail together, once that is built. Its first process ends then."""
    _, descriptors = await channel.receive()
    if len(descriptors) != 1:
        discard(descriptors)
        raise SandboxLost("the jail could not be built")
    return descriptors[0]


def end_group(leader: int) -> None:
    """End and bury what a jail that came to nothing left to this process: its stub may never have been told of."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitid(os.P_PGID, leader, os.WEXITED)


async def _quietly(waiting: Awaitable[Any]) -> None:
    with suppress(ChildProcessError):
        await waiting


def _command(powers: Powers, key: Key, passed: list[int]) -> list[str]:
    if powers.namespaces:
        return jail.python(sys.executable, _JAIL.format(", ".join(map(str, passed))))
    return jail.python(key.interpreter or sys.executable, _ZYGOTE.format(passed[0]), site=True)


def _leaf(number: int) -> str:
    """The name of its control groups."""
    return f"z{number}"


def _home(site: Site, number: int) -> Path:
    return site.directory / "z" / str(number)


def _plan(site: Site, number: int, key: Key) -> dict[str, Any]:
    powers = site.powers
    executable, binds = _interpreter(key)
    if key.datasource:
        binds["/datasource"] = key.datasource
    return {
        "root": f"{_home(site, number)}/root",
        "project": f"{_home(site, number)}/project",
        "binds": binds,
        "points": [mount for mount in key.mounts if made_outside(mount)],
        "hidden": HIDDEN,
        "network": key.network,
        "privileged": powers.privileged,
        "users": site.users,
        "seccomp": powers.seccomp,
        "forkable": key.forkable,
        "command": [executable, "-I", "-c", _IN_JAIL],
    }


def _interpreter(key: Key) -> tuple[str, dict[str, str]]:
    """The interpreter as it is called inside, and what must be visible there for it: inside -> outside.

    A virtual environment is at ``/venv`` whatever its place outside is, since that may be below ``/tmp``.
    """
    executable = key.interpreter or sys.executable
    prefix = Path(executable).parent.parent
    package = str(Path(jail.__file__).resolve().parents[2])
    binds = {sys.base_prefix: sys.base_prefix, "/runtime/aenv": package}
    if (prefix / "pyvenv.cfg").exists():
        binds["/venv"] = str(prefix)
        executable = f"/venv/bin/{Path(executable).name}"
    if not key.interpreter:
        prefixes = (sys.prefix, sys.base_prefix, package)
        home = os.path.expanduser("~")
        for path in sys.path:
            inside = any(path == known or path.startswith(known + "/") for known in prefixes)
            if os.path.isdir(path) and not inside and not home.startswith(path) and path != str(Path(package).parent):
                binds[path] = path
    return executable, binds


def _clear(site: Site, number: int) -> None:
    shutil.rmtree(_home(site, number), ignore_errors=True)
    if site.groups is not None:
        remove_soon(site.groups, _leaf(number))
