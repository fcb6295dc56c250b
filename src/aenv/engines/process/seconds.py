"""The spawner's side of a second sandbox: a jail of its own beside an instance, in the instance's control groups, in
which the exec agent runs for the instance."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from aenv import config
from aenv.engines.process import jail
from aenv.engines.process.attest import attest
from aenv.engines.process.second import LINK, SHARED, SOCKET
from aenv.engines.process.site import HIDDEN, Site
from aenv.engines.process.wire import close_all, connect, discard, failure, until
from aenv.engines.process.zygotes import bury, end_group, launch, stub_of
from aenv.errors import AEnvError, Invalid, SandboxLost, StartFailed
from aenv.models import Second as Asked
from aenv.models import Volume

T = TypeVar("T")
MOUNTS = (SHARED, LINK)
"""Where the main sandbox has what the second one hands over, in this order."""
VARIABLES = {"AENV_SECOND": SOCKET}
"""What tells the main sandbox where the agent is."""
_JAIL = "from aenv.engines.process.second import main; main({})"
_NAMESPACES = ("pid", "mnt", "ipc", "uts")
_BASE = "aenv-base"
"""The base image, where no other is set. On this engine, what it stands for is this machine's programs."""
_OUTLINE = ("root", "tmp", "home", "opt", "run", "srv", "mnt", "var/log", "var/tmp")


def is_foreign(asked: Asked) -> bool:
    """Whether it is an image, and not the one that holds nothing but what every sandbox has."""
    return bool(asked.image) and asked.image not in (_BASE, config.get("base_image"))


def check(asked: Asked, volumes: Iterable[Volume]) -> str:
    """The task's directory, with every link followed, or nothing where it is the base image; ``Invalid`` when it can
    never be one."""
    if not asked.image and not os.path.isdir(asked.directory):
        raise Invalid(f"the task's directory {asked.directory!r} is not there", hint="give a directory of this machine")
    for volume in volumes:
        place = os.path.normpath(volume.mount)
        if place == SHARED or place.startswith(f"{SHARED}/") or place.split("/")[1:2] == ["aenv"]:
            raise Invalid(f"the volume {volume.name!r} cannot be at {place}, which the second sandbox needs")
    return "" if asked.image else os.path.realpath(asked.directory)


class Asking(NamedTuple):
    """What a second sandbox is to be."""

    task: str
    """A directory of this machine; empty for a root of its own with this machine's programs, and nothing else."""
    program: str
    """The agent."""
    variables: dict[str, str]
    network: str
    """``none``, ``proxy`` or ``full``."""
    memory: int
    storage: int
    leaf: str
    """The control groups of its instance."""


class Second:
    """One second sandbox. It belongs to its instance's cell, from before it starts, and is closed with that."""

    def __init__(self, site: Site, number: int, user: int, asking: Asking) -> None:
        self._site = site
        self.user = user
        self._asking = asking
        self._home = site.directory / "i" / f"{number}-second"
        self._channel, self._printed, *self._given = connect()
        self._lifeline = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._stub: int | None = None
        """Its outer process, whose end ends all others in it."""
        self.pid = 0
        """The agent's process."""
        self.gone: asyncio.Task[None] | None = None
        """Done when it has ended."""
        self.outlet: socket.socket | None = None
        self.mounts: list[int] = []
        """Descriptors of what the main sandbox is to have, as long as it has not got them."""

    async def start(self) -> None:
        """Have it built, sealed and looked at, and the agent executed."""
        try:
            await self._start()
        except (SandboxLost, StartFailed, OSError) as exc:
            reason = exc.message if isinstance(exc, AEnvError) else str(exc)
            raise StartFailed(f"the second sandbox did not start: {self._words(reason)}") from exc

    async def _start(self) -> None:
        asking, site = self._asking, self._site
        for name in ("root", "task"):
            (self._home / name).mkdir(parents=True)
        if not asking.task:
            self._outline()
        process = self._process = self._run()
        await self._channel.send(self._plan())
        if await asyncio.to_thread(process.wait):  # it ends well once it has said who the stub is
            raise SandboxLost("its jail could not be built")
        self._stub = await stub_of(self._channel)
        self.gone = asyncio.create_task(until(self._stub))
        self._channel.ask_who()
        await self._channel.send(self._order())
        message, descriptors = await self._channel.receive()
        try:
            self.pid = self._channel.pid or 0
            if (handle := self._channel.take_pidfd()) is not None:
                os.close(handle)
            if not (isinstance(message, dict) and message.get("sealed")):
                raise failure(message.get("failed") if isinstance(message, dict) else None)
            attest(
                self.pid,
                user=site.users + self.user if site.powers.privileged else os.getuid(),
                group=site.users + self.user if site.powers.privileged else os.getgid(),
                namespaces=_NAMESPACES if asking.network == "full" else (*_NAMESPACES, "net"),
                apart_from=os.getpid(),
                filters=2 if site.powers.seccomp else 0,
                groups=site.groups.paths(asking.leaf) if site.groups is not None else {},
                place=1,
                nested=2,
            )
            if asking.network == "proxy":
                self.outlet = socket.socket(fileno=descriptors.pop(0))
            self.mounts = [descriptors.pop(0) for _ in MOUNTS]
        except IndexError:
            raise StartFailed("it did not hand over what the two share") from None
        finally:
            discard(descriptors)
        await self._channel.send({})
        with suppress(SandboxLost):  # which is its end of the socket, that closes when the agent is executed
            message, descriptors = await self._channel.receive()
            discard(descriptors)
            raise failure(message.get("failed") if isinstance(message, dict) else None)

    def _outline(self) -> None:
        """The root of one that has no task: the directories that programs take for granted."""
        for name in _OUTLINE:
            (self._home / "plain" / name).mkdir(parents=True)
        for name in ("tmp", "var/tmp"):
            (self._home / "plain" / name).chmod(0o1777)

    def _run(self) -> subprocess.Popen[bytes]:
        groups = self._site.groups
        report, log = self._given
        read, self._lifeline = os.pipe()
        self._given.append(read)
        program = os.open(self._asking.program, os.O_RDONLY | os.O_CLOEXEC)
        self._given.append(program)
        tasks = groups.open(self._asking.leaf) if groups is not None else []
        self._given += tasks
        passed = [report, read, program, *tasks]
        command = jail.python(sys.executable, _JAIL.format(", ".join(map(str, passed))))
        process = launch(command, passed, log)
        self._give()
        return process

    def _give(self) -> None:
        close_all(self._given)
        self._given = []

    def _plan(self) -> dict[str, Any]:
        asking, site = self._asking, self._site
        return {
            "root": f"{self._home}/root",
            "place": f"{self._home}/task",
            "task": asking.task or f"{self._home}/plain",
            "binds": {},
            "points": list(MOUNTS),
            "hidden": HIDDEN,
            "network": asking.network,
            "privileged": site.powers.privileged,
            "users": site.users,
            "user": self.user,
            "storage": asking.storage,
            "seccomp": site.powers.seccomp,
        }

    def _order(self) -> dict[str, Any]:
        asking, site = self._asking, self._site
        return {
            "seccomp": site.powers.seccomp,
            "overlay": site.powers.overlay,
            "network": asking.network,
            "user": self.user if site.powers.privileged else 0,
            "storage": asking.storage,
            "memory": asking.memory if site.groups is None else None,
            "variables": asking.variables,
            "plain": not asking.task,
        }

    def _words(self, reason: str) -> str:
        groups = self._site.groups
        if groups is not None and groups.out_of_memory(self._asking.leaf):
            return f"out of memory: the instance may use {self._asking.memory / 1024**2:.0f} MiB"
        return f"{reason}\n{self._printed.last()}".rstrip()

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` comes to, for which this must live: ``StartFailed`` when it ends before."""
        assert self.gone is not None
        doing = asyncio.create_task(work)
        try:
            await asyncio.wait((doing, self.gone), return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                return doing.result()
            raise StartFailed(await self.ended())
        finally:
            doing.cancel()
            await asyncio.wait((doing,))

    async def ended(self) -> str:
        """Why it ended by itself, in words, once it has."""
        assert self.gone is not None
        await asyncio.wait((self.gone,))
        return self._words("its second sandbox ended")

    async def close(self) -> None:
        """End all that runs in it, and give back what was made for it."""
        self._give()
        close_all(self.mounts)
        self.mounts = []
        if self._stub is not None:
            assert self.gone is not None
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._stub, signal.SIGKILL)
            await asyncio.wait((self.gone,))
            bury(self._stub)
            os.close(self._stub)
            self._stub = None
        elif self._process is not None:
            await asyncio.to_thread(_end, self._process)
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        if self.outlet is not None:
            self.outlet.close()
        self._channel.close()
        self._printed.close()
        await asyncio.to_thread(shutil.rmtree, self._home, ignore_errors=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a jail whose stub is not known."""
    process.kill()
    process.wait()
    end_group(process.pid)
