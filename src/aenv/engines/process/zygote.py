"""The warm parent of instances: imports the runtime, then the author's modules where that is safe, then only forks.

It runs inside the jail. It holds no secret, no thread and no event loop; what an instance must not share with its
siblings is told to the instance alone, after the fork.
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from aenv import config, project
from aenv.engines.process import kernel
from aenv.engines.process.instance import Birth, serve
from aenv.engines.process.jail import receive
from aenv.engines.process.wire import IMPORTING, receive_some, send
from aenv.errors import AEnvError
from aenv.runtime import forked
from aenv.runtime.preload import early
from aenv.runtime.rehearsal import rehearse

if TYPE_CHECKING:
    from aenv.runtime.loader import Loaded

_GIVEN = 3
"""Descriptors that a child has at least: its listener, its report and its log."""


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
        rehearse(found, serve, given)
        if order["dual"]:
            importlib.import_module("aenv.runtime.second")  # which each instance needs at once
        if order["forkable"]:
            importlib.import_module("aenv.engines.process.branch")
        sys.argv = [found.name]
        if order["preload"] is not False:
            send(spawner, IMPORTING)
        hooks = kernel.Hooks()
        loaded, facts = _prepare(found, order["preload"])
        facts["given"] = given
    except AEnvError as exc:
        send(spawner, {"failed": exc.to_wire()})
        os._exit(1)
    late = facts.get("variables", ()) if order["preload"] == "auto" else ()
    prepared = forked.Prepared(found, loaded, facts.get("changes") or {}, late=late)
    birth = Birth(found, prepared, jailed=order["jailed"], hooks=hooks)
    children = (_Children if order["jailed"] else _Plain)(spawner, hooks)
    kernel.rehearse()
    gc.collect()
    gc.freeze()
    send(spawner, facts)
    children.serve(birth)


class _Plain:
    """Forks children and tells the spawner how each of them ended."""

    def __init__(self, spawner: socket.socket, hooks: kernel.Hooks) -> None:
        self._spawner = spawner
        self._fork_process = hooks.fork
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
                if not data:
                    os._exit(0)
                order = msgspec.json.decode(data)
                if "kill" in order:
                    self._kill(order["kill"])
                else:
                    self._make(birth, order, descriptors)
                for passed in descriptors:
                    os.close(passed)

    def _make(self, birth: Birth, order: dict[str, Any], descriptors: list[int]) -> None:
        """Fork a child. What the machine refuses is told, and harms nobody who is there already."""
        try:
            if len(descriptors) < _GIVEN + len(order["volumes"]):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))  # the kernel gave as many as there was room for
            pid = self._fork(birth, order, descriptors)
            pidfd = os.pidfd_open(pid)
        except OSError as exc:
            self._say_ended(order["number"], f"it could not be forked: {exc}")
            return
        self._runtimes[pidfd] = order["number"], pid
        self._epoll.register(pidfd, select.EPOLLIN)

    def _say_ended(self, number: int, how: int | str) -> None:
        """An exit code, or words where there is none."""
        send(self._spawner, {"exited": number, "status": how})

    def _fork(self, birth: Birth, order: dict[str, Any], descriptors: list[int]) -> int:
        birth.prepare(order, descriptors, [])
        pid = self._fork_process()
        if pid == 0:
            birth.begin(order, descriptors, [])
        return pid

    def _kill(self, wanted: int) -> None:
        for number, pid in self._runtimes.values():
            if number == wanted:
                os.kill(pid, signal.SIGKILL)

    def _ended(self, pidfd: int) -> None:
        number, pid = self._runtimes.pop(pidfd)
        self._epoll.unregister(pidfd)
        os.close(pidfd)
        try:
            _, status = os.waitpid(pid, 0)
        except ChildProcessError:  # reaped by the kernel, in the moment when an init was made
            self._say_ended(number, "it ended")
        else:
            self._say_ended(number, os.waitstatus_to_exitcode(status))


class _Children(_Plain):
    """The same, each child in a process namespace of its own, of which it is the second process."""

    def __init__(self, spawner: socket.socket, hooks: kernel.Hooks) -> None:
        super().__init__(spawner, hooks)
        self._inits = kernel.Inits()
        self._own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._firsts: dict[int, tuple[int, bool]] = {}
        """First processes, and whether each ends with its instance. Where that was forked, its forks need it."""
        self._left: dict[int, int] = {}
        """Of those that do not: a pidfd, by the spawner's number for the instance."""
        self._dying: dict[int, int] = {}
        """First processes that were killed, by pidfd. They end once their namespace has, which nobody need wait for."""

    def _kill(self, wanted: int) -> None:
        super()._kill(wanted)
        if wanted in self._left:
            signal.pidfd_send_signal(self._left[wanted], signal.SIGKILL)

    def _fork(self, birth: Birth, order: dict[str, Any], descriptors: list[int]) -> int:
        first = self._inits.make()
        opened: list[int] = []
        try:
            opened.append(pidfd := os.pidfd_open(first))
            opened.append(namespace := os.open(f"/proc/{first}/ns/pid", os.O_RDONLY | os.O_CLOEXEC))
            handles = [pidfd]
            birth.prepare(order, descriptors, handles)
            kernel.setns(namespace, kernel.NEWPID)
            pid = self._fork_process()
            if pid == 0:
                birth.begin(order, descriptors, handles)
        except OSError:
            self._end_first(first)
            raise
        finally:
            kernel.setns(self._own, kernel.NEWPID)
            for descriptor in opened:
                os.close(descriptor)
        self._firsts[pid] = first, not order.get("forkable", False)
        return pid

    def _ended(self, pidfd: int) -> None:
        if pidfd in self._dying:
            self._epoll.unregister(pidfd)
            os.close(pidfd)
            _reap(self._dying.pop(pidfd))
            self._left = {number: left for number, left in self._left.items() if left != pidfd}
            return
        number, pid = self._runtimes[pidfd]
        first, ends = self._firsts.pop(pid)
        super()._ended(pidfd)  # a namespace ends only when the last of its dead is reaped
        self._end_first(first, None if ends else number)

    def _end_first(self, first: int, number: int | None = None) -> None:
        """End it, and bury it; that of the instance of a ``number`` once the spawner has ended it, or asks."""
        try:
            pidfd = os.pidfd_open(first)
        except ProcessLookupError:  # reaped by the kernel, in the moment when another was made
            return
        except OSError:  # no descriptor is to be had: it is waited for
            os.kill(first, signal.SIGKILL)
            _reap(first)
            return
        if number is None:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        else:
            self._left[number] = pidfd
        self._dying[pidfd] = first
        self._epoll.register(pidfd, select.EPOLLIN)


def _reap(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _prepare(found: project.Project, preload: bool | str) -> tuple[Loaded | None, dict[str, Any]]:
    """Import the author's modules when that may be done before the fork; and what was seen."""
    if preload is False:
        return None, {"ready": True, "preloaded": False, "variables": [], "reasons": []}
    loaded, verdict = early.load(found, preload)
    if loaded is None:  # the spawner starts another that imports nothing
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
