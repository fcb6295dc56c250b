"""Author code that takes as much as it can get, from a tool, or while it is imported when ``flood.txt`` names a way."""

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from aenv import register_tool

PLACES = ("/project", "/tmp", "/dev/shm", "/home/sandbox")
_PIECE = bytes(1024 * 1024)
_kept: list[Any] = []


def forks() -> str:
    """Fork for ever, in every child too; this process goes on."""
    if os.fork() == 0:
        while True:
            try:
                os.fork()
            except OSError:
                time.sleep(30)
    return "forked"


def sleepers(most: int = 1000) -> int:
    """How many children that do nothing can be had, up to a number."""
    for number in range(most):
        try:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
        except OSError:
            return number
    return most


def memory(most: int = 512) -> int:
    """How much memory can be had, in MiB, up to a number."""
    _kept.extend(bytearray(b"x") * len(_PIECE) for _ in range(most))
    return most


def disk() -> dict[str, Any]:
    """Fill every place that can be written, one after the other; how much each took, and why it took no more."""
    took = {}
    for place in PLACES:
        written = 0
        try:
            with open(f"{place}/flood", "wb", buffering=0) as file:
                while written < 1024**3:
                    written += file.write(_PIECE)
        except OSError as exc:
            took[place] = [written, errno.errorcode[exc.errno]]
        else:
            took[place] = [written, ""]
    return took


def inodes() -> list[Any]:
    """Make empty files until there is no more room for another."""
    os.mkdir("/tmp/many")
    for number in range(300_000):
        try:
            os.close(os.open(f"/tmp/many/{number}", os.O_CREAT | os.O_WRONLY))
        except OSError as exc:
            return [number, errno.errorcode[exc.errno]]
    return [number, ""]


def log() -> str:
    """Print for ever, by a process that writes nothing else; this one goes on."""
    code = "import os\nwhile True: os.write(1, b'flood ' * 8000 + b'\\n')"
    _kept.append(subprocess.Popen([sys.executable, "-I", "-S", "-c", code]))
    return "prints"


def descriptors() -> list[Any]:
    """Open files until no more can be had, and close them."""
    opened = []
    try:
        opened.extend(os.open("/dev/null", os.O_RDONLY) for _ in range(100_000))
        return [len(opened), ""]
    except OSError as exc:
        return [len(opened), errno.errorcode[exc.errno]]
    finally:
        for descriptor in opened:
            os.close(descriptor)


def sockets(most: int = 300) -> int:
    """How much can be under way between two sockets of its own, in MiB, up to a number."""
    listener = socket.create_server(("127.0.0.1", 0))
    sent = 0
    with contextlib.suppress(OSError):
        for _ in range(500):
            one = socket.create_connection(listener.getsockname(), timeout=1)
            _kept.extend((one, listener.accept()[0]))
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while sent < most * len(_PIECE):
                    sent += one.send(_PIECE[:65536])
    return sent // len(_PIECE)


def threads() -> int:
    """How many threads can be had."""
    done = threading.Event()
    number = 0
    try:
        for number in range(5000):  # noqa: B007
            threading.Thread(target=done.wait, daemon=True).start()
    except RuntimeError:
        pass
    finally:
        done.set()
    return number


WAYS = {way.__name__: way for way in (forks, sleepers, memory, disk, inodes, log, descriptors, threads, sockets)}
_named = Path(__file__).parent.parent / "flood.txt"
AT_IMPORT = WAYS[_named.read_text()]() if _named.exists() else None


@register_tool
def flood(way: str) -> Any:
    return WAYS[way]()


@register_tool
def at_import() -> Any:
    return AT_IMPORT


@register_tool
def fine() -> str:
    return "fine"
