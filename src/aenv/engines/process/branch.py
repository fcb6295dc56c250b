"""A fork of a live instance, on its way from its parent's namespaces into its own.

Two processes are forked. The first takes a user namespace, in which the spawner gives it the jail's users, makes the
process namespace with its first process, forks, and ends. The second takes all other namespaces, copies what its parent
has written, opens its files again, gives up what a sandbox must not have, and says that it is sealed. Neither ever
returns to the parent's loop.
"""

from __future__ import annotations

import os
import random
import select
import socket
import stat
import struct
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgspec

from aenv.engines.process import kernel
from aenv.engines.process.instance import announce, say, serve_to_the_end, told
from aenv.engines.process.jail import receive
from aenv.engines.process.kernel import BIND, NODEV, NOEXEC, NOSUID
from aenv.engines.process.seal import PROXY_PORT, SHOWN, STAGE
from aenv.engines.process.wire import receive_some, send
from aenv.runtime.forking import Carried, Order

if TYPE_CHECKING:
    from aenv.runtime.forked import Prepared

_NAMESPACES = kernel.NEWNS | kernel.NEWIPC | kernel.NEWUTS
_KEPT_FLAGS = os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC


class Branching:
    """How an instance is asked for forks, and makes them."""

    def __init__(self, prepared: Prepared, listener: socket.socket, report: socket.socket, hooks: kernel.Hooks) -> None:
        self._hooks = hooks
        self._prepared = prepared
        self._listener = listener
        self._report = report

    def serve(self) -> None:
        """Serve as the instance that is described on the report."""
        self._prepared.serve(self._listener, self._report, self._told, self._say, self)

    def _told(self) -> dict[str, Any]:
        return told(self._report)

    def _say(self, facts: dict[str, Any]) -> None:
        say(self._report, facts)

    # Means

    def asked(self) -> tuple[list[dict[str, Any]], list[int]] | None:
        try:
            data, descriptors = receive_some(self._report)
        except ConnectionResetError:  # it ended with something unread
            return None
        if not data:
            return None
        messages = []
        while data:  # what has descriptors is the last of what comes at once
            size = struct.unpack_from("I", data)[0] + 4
            messages.append(msgspec.json.decode(data[4:size]))
            data = data[size:]
        return messages, descriptors

    def refuse(self, order: dict[str, Any], why: str) -> None:
        printable = why.encode(errors="backslashreplace").decode()
        self._say({"refused": order["number"], "why": printable})

    def fork(self, orders: Sequence[Order], carried: list[Carried], made: list[int]) -> None:
        drawn = random.getstate()
        staging: list[int] = []
        try:
            for order, descriptors in orders:
                staged, is_staged = os.pipe2(os.O_CLOEXEC)
                staging.append(staged)
                try:
                    pid = self._hooks.fork()
                    if pid == 0:
                        given = _Given(order, descriptors, is_staged, carried, drawn, self._become)
                        _never_back(descriptors, lambda given=given: _first(given))  # type: ignore[misc]
                finally:
                    os.close(is_staged)
                made.append(pid)
        finally:
            _wait(staging, max(order["until"] for order, _ in orders))
            for staged in staging:
                os.close(staged)

    def _become(self, listener: socket.socket, report: socket.socket) -> NoReturn:
        """In the fork: be another instance."""
        # Never closed: their numbers are those of other descriptors by now.
        self._listener.detach()
        self._report.detach()
        other = Branching(self._prepared, listener, report, self._hooks)
        serve_to_the_end(lambda: self._prepared.serve_again(listener, report, other._told, other._say, other), report)


def _wait(staging: list[int], until: float) -> None:
    """Until each fork has its files, which are of the same moment as its memory only if this process does nothing."""
    waiting = select.poll()
    for staged in staging:
        waiting.register(staged, select.POLLIN)
    left = len(staging)
    while left and (patience := until - time.monotonic()) > 0:
        for staged, _ in waiting.poll(patience * 1000):
            waiting.unregister(staged)
            left -= 1


class _Given(NamedTuple):
    """What a fork is given."""

    order: dict[str, Any]
    descriptors: list[int]
    staged: int
    """Closed when it has its files."""
    carried: list[Carried]
    drawn: object
    """The state of the generator that everybody shares, which Python changes at a fork."""
    become: Callable[[socket.socket, socket.socket], NoReturn]


def _never_back(descriptors: list[int], act: Callable[[], None]) -> NoReturn:
    """What prints does so where the fork's output goes; what fails is told, and ends it."""
    _, report, log = descriptors[:3]
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        act()
    except BaseException as exc:
        os.write(2, traceback.format_exc().encode())
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, report)
        send(channel, {"failed": {"message": f"it could not be forked: {exc}"}})
    finally:
        os._exit(1)


def _first(given: _Given) -> NoReturn:
    """The first process: users of its own, and a process namespace."""
    listener, report, _, *tasks = given.descriptors
    half = len(tasks) // 2  # the first half are of the namespace's first process, the second of the instance
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, report)
    _check(given.order)
    kernel.unshare(kernel.NEWUSER)
    send(channel, {"user": True})
    receive(channel)
    kernel.prctl(kernel.PR_SET_SECUREBITS, kernel.KEEP_CAPABILITIES)
    _be(0)  # another user than the instance, which cannot reach it then
    _join(tasks[:half])
    kernel.unshare(kernel.NEWPID)
    inits = kernel.Inits()  # kept as long as this process: the other one stands on its memory
    handle = os.pidfd_open(inits.make(namespace=False))
    _be(given.order["user"])
    _join(tasks[half:])
    inits.skip(given.order["generation"])  # libraries notice a fork by its number, which no ancestor of it must have
    pid = kernel.fork()  # what is to be told of a fork was told of the first
    if pid == 0:
        random.setstate(given.drawn)  # type: ignore[arg-type]
        _second(given, listener, channel.detach(), handle)
    kernel.close_all()  # the first of the namespace has the same, and must not hold what others wait for the end of
    os._exit(0)


def _check(order: dict[str, Any]) -> None:
    """By then nobody waits for it any more, and its parent goes on."""
    if time.monotonic() > order["until"]:
        raise TimeoutError("it took too long")


def _be(user: int) -> None:
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _join(tasks: Iterable[int]) -> None:
    for descriptor in tasks:
        os.write(descriptor, b"0")


def _second(given: _Given, listener: int, report: int, handle: int) -> None:
    """The second process, which becomes the instance."""
    here = os.getcwd()
    _close_others((listener, report, handle, given.staged))
    network = given.order["network"]
    kernel.unshare(_NAMESPACES | (0 if network == "full" else kernel.NEWNET))
    before = os.open(STAGE, os.O_PATH | os.O_DIRECTORY)
    handles = [handle]
    if network != "full":
        kernel.loopback_up()
    if network == "proxy":
        handles.append(socket.create_server(("127.0.0.1", PROXY_PORT), backlog=128).detach())
    _stage(before, given.order["storage"])
    _check(given.order)
    os.close(before)
    os.close(given.staged)
    with suppress(OSError):
        os.chdir("/project")
        os.chdir(here)
    for file in given.carried:
        _open_again(file)
    kernel.take(_privileges())
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, report)
    announce(channel, handles)
    given.become(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, listener), channel)


def _close_others(kept: Iterable[int]) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for low, high in pairwise([2, *sorted(kept), os.sysconf("SC_OPEN_MAX")]):
        os.closerange(low + 1, high)


def _stage(before: int, size: int) -> None:
    """Its own processes and terminals, and a copy of what its parent has written, within its own bound. ``before`` is
    the parent's stage."""
    kernel.mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
    kernel.mount("devpts", "/dev/pts", "devpts", NOSUID | NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    kernel.mount("tmpfs", STAGE, "tmpfs", NOSUID | NODEV, f"size={size},nr_inodes=100k,mode=755")
    there = f"/proc/self/fd/{before}"
    for name in ("lower", "work"):
        os.mkdir(f"{STAGE}/{name}")
    for stage, target in ((f"{STAGE}/upper", ""), *((os.fsdecode(made), os.fsdecode(seen)) for made, seen in SHOWN)):
        _copy(f"{there}/{os.path.basename(stage)}", stage, {})
        if target:
            kernel.mount(stage, target, None, BIND)
    kernel.mount(f"{there}/lower", f"{STAGE}/lower", None, BIND)
    overlay = f"lowerdir={STAGE}/lower,upperdir={STAGE}/upper,workdir={STAGE}/work,userxattr"
    kernel.mount("overlay", "/project", "overlay", NOSUID | NODEV, overlay)
    os.chown(STAGE, 0, 0)
    os.chmod(STAGE, 0o700)


def _copy(source: str, target: str, known: dict[int, str]) -> None:
    """A tree as it is, with the marks of an overlay, and files of several names as such. Sockets are left out: nobody
    listens on them."""
    found = os.lstat(source)
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFDIR and found.st_nlink > 1:
        if found.st_ino in known:
            os.link(known[found.st_ino], target, follow_symlinks=False)
            return
        known[found.st_ino] = target
    if kind == stat.S_IFDIR:
        os.mkdir(target)
        for entry in os.scandir(source):
            _copy(entry.path, f"{target}/{entry.name}", known)
    elif kind == stat.S_IFLNK:
        os.symlink(os.readlink(source), target)
        return
    elif kind == stat.S_IFREG:
        _copy_content(source, target)
    elif kind == stat.S_IFSOCK:
        return
    else:  # a named pipe, or the mark of a file that was removed
        os.mknod(target, found.st_mode, found.st_rdev)
        return
    for name in os.listxattr(source):
        os.setxattr(target, name, os.getxattr(source, name))
    os.chmod(target, stat.S_IMODE(found.st_mode))
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))


def _copy_content(source: str, target: str) -> None:
    """Without what is not there: a file may be larger than all that may be written."""
    with open(source, "rb", buffering=0) as before, open(target, "wb", buffering=0) as made:
        size = os.fstat(before.fileno()).st_size
        os.ftruncate(made.fileno(), size)
        end = 0
        while end < size:
            try:
                begin = os.lseek(before.fileno(), end, os.SEEK_DATA)
            except OSError:  # there is nothing more
                return
            end = os.lseek(before.fileno(), begin, os.SEEK_HOLE)
            os.lseek(made.fileno(), begin, os.SEEK_SET)
            while begin < end:
                begin += os.sendfile(made.fileno(), before.fileno(), begin, end - begin)


def _open_again(file: Carried) -> None:
    """Under the same number, at the same place: the fork's own file of that name."""
    opened = os.open(file.path, file.flags & _KEPT_FLAGS)
    if stat.S_ISREG(os.fstat(opened).st_mode):
        os.lseek(opened, file.position, os.SEEK_SET)
    if opened != file.descriptor:
        os.dup2(opened, file.descriptor, inheritable=not file.flags & os.O_CLOEXEC)
        os.close(opened)


def _privileges() -> Iterator[kernel.Step]:
    for number in range(kernel.last_capability() + 1):
        yield kernel.step("prctl", kernel.PR_CAPBSET_DROP, number, 0, 0, 0)
    yield kernel.step("capset", kernel.CAPABILITIES, bytes(24))
