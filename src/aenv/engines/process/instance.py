"""An instance, from its fork to its end: it seals itself, says so, is told its secrets, and serves.

It is the second process of its namespace; the first only lets the kernel reap (``kernel.Inits``). So a tool's orphans
are reaped without taking exit codes away from the author's own children, and no generator of random numbers believes
that it is in the process it was made in.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import socket
import struct
import sys
import tempfile
import traceback
from array import array
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from aenv.engines.process import kernel, seccomp
from aenv.engines.process.jail import receive_bytes
from aenv.engines.process.seal import Seal, limit_memory, limits
from aenv.engines.process.wire import frame, send
from aenv.errors import AEnvError

if TYPE_CHECKING:
    from aenv.project import Project
    from aenv.runtime.forked import Prepared

_SEALED = frame({"sealed": True})


class Birth:
    """Everything that a zygote makes once, so that its children need not."""

    def __init__(self, found: Project, prepared: Prepared, *, jailed: bool, hooks: kernel.Hooks) -> None:
        self._hooks = hooks
        self._found = found
        self._prepared = prepared
        self._jailed = jailed
        self._seal: Seal | None = None

    def prepare(self, order: dict[str, Any], descriptors: list[int], handles: list[int]) -> None:
        """In the zygote: get ready for the next child. ``handles`` are sent along when it is sealed."""
        if not self._jailed:
            return
        if self._seal is None:
            self._seal = Seal(order, len(descriptors) - 3 - len(order["volumes"]))
        self._seal.fit(order, descriptors, handles)

    def begin(self, order: dict[str, Any], descriptors: list[int], handles: list[int]) -> NoReturn:
        """What a zygote's child does, from its first instruction on."""
        listener, report, log, *tasks = descriptors
        try:
            if self._seal is not None:
                kernel.take(self._seal.steps)
            else:
                for descriptor in tasks:
                    os.write(descriptor, b"0")
                _keep(listener, report, log)
                self._settle(order)
            channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, report)
            announce(channel, handles)
            forkable = order.get("forkable", False)
            self._serve(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, listener), channel, forkable)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)

    def _settle(self, order: dict[str, Any]) -> None:
        """Where nothing can be sealed: a copy of the project, limits, and a group of processes to be ended by."""
        os.setsid()
        shutil.copytree(order["project"], order["directory"], symlinks=True, dirs_exist_ok=True)
        os.chdir(order["directory"])
        for kind, most in limits().items():
            resource.setrlimit(kind, (most, most))
        if order["memory"] is not None:
            limit_memory(order["memory"])
        if order["seccomp"]:
            kernel.no_new_privileges()
            kernel.load_filter(seccomp.sealed())

    def _serve(self, listener: socket.socket, report: socket.socket, forkable: bool) -> NoReturn:
        """Be the runtime: take the instance's own variables, import what is not imported yet, and serve."""
        _reseed()
        if forkable:
            from aenv.engines.process.branch import Branching  # its zygote has imported it

            branching = Branching(self._prepared, listener, report, self._hooks)
            serve_to_the_end(branching.serve, report)
        serve_to_the_end(lambda: serve(self._prepared, listener, report), report)


def announce(channel: socket.socket, handles: list[int]) -> None:
    """Say that this process is sealed, and hand over what the spawner is to hold."""
    channel.sendmsg([_SEALED], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", handles))])
    for handle in handles:
        os.close(handle)


def serve_to_the_end(act: Callable[[], None], report: socket.socket) -> NoReturn:
    """Serve, say what fails, and end."""
    try:
        act()
    except AEnvError as exc:
        sys.stderr.write(f"error: {exc}\n")
        sys.stderr.flush()
        send(report, {"failed": exc.to_wire()})  # last: whoever hears it ends this process
        os._exit(1)
    except SystemExit as exc:
        os._exit(exc.code if isinstance(exc.code, int) else 1)
    os._exit(0)


def serve(prepared: Prepared, listener: socket.socket, report: socket.socket) -> None:
    """Serve as the instance that is described on ``report``, until that ends."""
    prepared.serve(listener, report, lambda: told(report), lambda facts: say(report, facts))


def told(report: socket.socket) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(receive_bytes(report))
    return found


def say(report: socket.socket, facts: dict[str, Any]) -> None:
    data = msgspec.json.encode(facts)
    report.sendall(struct.pack("I", len(data)) + data)


def _keep(listener: int, report: int, log: int) -> None:
    """Standard output and error go to the log; every descriptor that is not named is closed."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    kept = sorted((listener, report))
    for low, high in pairwise([2, *kept, os.sysconf("SC_OPEN_MAX")]):
        os.closerange(low + 1, high)


def _reseed() -> None:
    """No two instances draw the same numbers."""
    random.seed()
    vars(tempfile)["_name_sequence"] = None
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.seed()
