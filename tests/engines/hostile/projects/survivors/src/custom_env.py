"""Author code that wants to outlive its sandbox: from a tool, or while it is imported when ``way.txt`` names a way."""

import ctypes
import os
import platform
import signal
import sys
from pathlib import Path

from aenv import register_teardown, register_tool

_here = Path(__file__).parent.parent
_CODE = "import signal, time\nfor n in (1, 2, 3, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(600)"


def _program(marker: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", _CODE, marker]


def double_fork(marker: str) -> None:
    """Leave a process behind that has another session and parent, and ignores every signal it can."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            os.chdir("/")
            os.execv(sys.executable, _program(marker))
        os._exit(0)
    os.waitpid(pid, 0)


def stopped(marker: str) -> None:
    """Leave processes behind that are stopped, and so do not even look at signals."""
    for _ in range(3):
        pid = os.spawnv(os.P_NOWAIT, sys.executable, _program(marker))
        os.kill(pid, signal.SIGSTOP)


def adopted(marker: str) -> None:
    """Leave a process behind whose parent is this one's parent, which is outside and never asked for it."""
    if platform.machine() != "x86_64":
        raise RuntimeError("the number of the call is for x86-64")
    clone, parent = 56, 0x8000
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(clone, parent | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        os.execv(sys.executable, _program(marker))


def adopted_dead(marker: str) -> None:
    """The same, and it ends at once: nobody may be there who takes note of its end."""
    clone, parent = 56, 0x8000
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(clone, parent | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        os._exit(0)
    double_fork(marker)


def first_dies(marker: str) -> None:
    """Leave a process behind, and end the runtime itself."""
    double_fork(marker)
    os._exit(1)


WAYS = {way.__name__: way for way in (double_fork, stopped, adopted, adopted_dead, first_dies)}
if (_here / "way.txt").exists():
    _way, _marker = (_here / "way.txt").read_text().split()
    WAYS[_way](_marker)


@register_tool
def survive(way: str, marker: str) -> str:
    WAYS[way](marker)
    return "tried"


@register_tool
def fine() -> str:
    return "fine"


if (_here / "hangs.txt").exists():

    @register_teardown
    def never_ends() -> None:
        signal.pause() if (_here / "hangs.txt").read_text() == "pause" else _busy()


def _busy() -> None:
    while True:
        pass
