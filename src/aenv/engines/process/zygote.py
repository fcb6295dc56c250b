"""The warm parent of instances: imports the runtime, then the author's modules where that is safe, then only forks.

It runs inside the jail. It holds no secret, no thread and no event loop; what an instance must not share with its
siblings is told to the instance alone, after the fork.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

from aenv import config, project
from aenv.engines.process import kernel
from aenv.engines.process.instance import Birth
from aenv.engines.process.jail import receive
from aenv.engines.process.wire import receive_some, send
from aenv.errors import AEnvError
from aenv.runtime import forked, loader
from aenv.runtime.preload import watch

if TYPE_CHECKING:
    from aenv.runtime.loader import Loaded


def main(control: int) -> NoReturn:
    """Serve the spawner on this descriptor until it closes."""
    spawner = socket.socket(fileno=control)
    forked.say_everything_at_once()
    order = receive(spawner)
    try:
        found = project.read(Path(order["project"]), config_required=False)
        # As every instance has it that is told nothing else: what the import reads is then right for those.
        given = order["variables"] | found.environment_variables
        config.replace_environment(given)
        sys.argv = [found.name]
        with _Hooks() as hooks:
            loaded, facts = _prepare(found, order["preload"])
        facts["given"] = given
    except AEnvError as exc:
        send(spawner, {"failed": exc.to_wire()})
        os._exit(1)
    birth = Birth(found, forked.Prepared(found, loaded, facts.get("changes") or {}), jailed=order["jailed"])
    children = (_Children if order["jailed"] else _Plain)(spawner, hooks=hooks.asked)
    gc.collect()
    gc.freeze()
    send(spawner, facts)
    children.serve(birth)


class _Hooks:
    """Notices whether anybody asks to be told of forks."""

    def __enter__(self) -> Self:
        self.asked = False
        self._register = os.register_at_fork
        os.register_at_fork = self._noticed
        return self

    def _noticed(self, **hooks: Any) -> None:
        self.asked = True
        self._register(**hooks)

    def __exit__(self, *failure: object) -> None:
        os.register_at_fork = self._register


class _Plain:
    """Forks children and tells the spawner how each of them ended."""

    def __init__(self, spawner: socket.socket, *, hooks: bool) -> None:
        """``hooks``: whether the author's modules asked to be told of forks."""
        self._spawner = spawner
        self._fork_process = os.fork if hooks or sys.platform != "linux" else kernel.fork
        self._epoll = select.epoll()
        self._epoll.register(spawner.fileno(), select.EPOLLIN)
        self._runtimes: dict[int, tuple[int, int]] = {}
        """By pidfd: the spawner's number for an instance, and the process that runs it."""

    def serve(self, birth: Birth) -> NoReturn:
        while True:
            for descriptor, _ in self._epoll.poll():
                if descriptor != self._spawner.fileno():
                    self._ended(descriptor)
                    continue
                data, descriptors = receive_some(self._spawner)
                if not descriptors:
                    os._exit(0)
                order = json.loads(data)
                pid = self._fork(birth, order, descriptors)
                for passed in descriptors:
                    os.close(passed)
                self._runtimes[os.pidfd_open(pid)] = order["number"], pid
                self._epoll.register(next(reversed(self._runtimes)), select.EPOLLIN)

    def _fork(self, birth: Birth, order: dict[str, Any], descriptors: list[int]) -> int:
        pid = self._fork_process()
        if pid == 0:
            birth.begin(order, descriptors, [])
        return pid

    def _ended(self, pidfd: int) -> None:
        number, pid = self._runtimes.pop(pidfd)
        self._epoll.unregister(pidfd)
        os.close(pidfd)
        try:
            _, status = os.waitpid(pid, 0)
        except ChildProcessError:
            return
        send(self._spawner, {"exited": number, "status": os.waitstatus_to_exitcode(status)})


class _Children(_Plain):
    """The same, each child in a process namespace of its own, of which it is the second process."""

    def __init__(self, spawner: socket.socket, *, hooks: bool) -> None:
        super().__init__(spawner, hooks=hooks)
        self._inits = kernel.Inits()
        self._own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._firsts: dict[int, int] = {}
        self._dying: set[int] = set()
        """First processes that were killed. They are gone once their namespace is, which nobody need wait for."""

    def _fork(self, birth: Birth, order: dict[str, Any], descriptors: list[int]) -> int:
        first = self._inits.make()
        pidfd = os.pidfd_open(first)
        namespace = os.open(f"/proc/{first}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        kernel.setns(namespace, kernel.NEWPID)
        pid = self._fork_process()
        if pid == 0:
            birth.begin(order, descriptors, [pidfd])
        kernel.setns(self._own, kernel.NEWPID)
        os.close(namespace)
        os.close(pidfd)
        self._firsts[pid] = first
        return pid

    def _ended(self, pidfd: int) -> None:
        first = self._firsts.pop(self._runtimes[pidfd][1])
        super()._ended(pidfd)  # a namespace ends only when the last of its dead is reaped
        with suppress(ProcessLookupError):
            os.kill(first, signal.SIGKILL)
        self._dying.add(first)
        self._dying -= {pid for pid in self._dying if _reaped(pid)}


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True  # by the kernel, in the moment when an init was made


def _prepare(found: project.Project, preload: bool | str) -> tuple[Loaded | None, dict[str, Any]]:
    """Import the author's modules when that may be done before the fork; and what was seen."""
    if preload is False:
        return None, {"ready": True, "preloaded": False, "variables": [], "reasons": []}
    try:
        with watch(found.source) as watched:
            loaded = loader.load(found)
    except AEnvError as exc:
        if preload is True:
            raise
        return None, {"ready": False, "reasons": [f"it cannot be imported without an instance's variables: {exc}"]}
    verdict = watched.verdict()
    if preload == "auto" and not verdict.clean:
        # What was imported cannot be taken back: the spawner starts another that imports nothing.
        return None, {"ready": False, "reasons": list(verdict.reasons)}
    return loaded, {
        "ready": True,
        "preloaded": True,
        "variables": list(verdict.variables),
        "changes": verdict.changes,
        "reasons": list(verdict.reasons),
    }


if __name__ == "__main__":
    main(int(sys.argv[1]))
