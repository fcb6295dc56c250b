"""Tools that tell a counter outside of every call, before they answer: whatever ends this process, what ran is known.

The counter is at ``COUNTER``: host and port, or a port of the machine's loopback. The edition ``bad`` never becomes
ready where it is to count.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

from edition import EDITION

from aenv import Context, register_setup, register_tool

STORE = Path("/home/admin/data")
_counters: dict[int, socket.socket] = {}


@register_setup
def be_in_a_mood() -> None:
    if EDITION == "bad" and "COUNTER" in os.environ:
        raise RuntimeError("not in the mood")


def tell(who: str, line: str) -> None:
    """One line to the counter, on a connection of this process."""
    counter = _counters.get(os.getpid())
    if counter is None:
        host, _, port = os.environ["COUNTER"].rpartition(":")
        counter = _counters[os.getpid()] = socket.create_connection((host or "127.0.0.1", int(port)), 60)
        line = f"at {who}\n{line}"
    counter.sendall(f"{line}\n".encode())


@register_tool
async def count(ctx: Context, id: str, nap: float = 0.0) -> dict[str, Any]:
    """Be called once.

    Args:
        id: The call's name.
        nap: Seconds that it takes.
    """
    tell(ctx.instance_id, f"ran {id}")
    if nap:
        await asyncio.sleep(nap)
    return {"id": id, "replica": ctx.instance_id, "edition": EDITION, "sign": os.environ.get("SIGN")}


@register_tool
def die(ctx: Context) -> None:
    """End as a process does that is killed."""
    tell(ctx.instance_id, "dies")
    os.kill(os.getpid(), signal.SIGKILL)


@register_tool
def store(name: str, size: int) -> int:
    """Write a file into the storage.

    Args:
        name: Its name.
        size: How many bytes.
    """
    with (STORE / name).open("wb") as file:
        file.write(b"x" * size)
        file.flush()
        os.fsync(file.fileno())
    return size


@register_tool
def drop(name: str) -> None:
    """Remove a file from the storage.

    Args:
        name: Its name.
    """
    (STORE / name).unlink()


@register_tool
def stored() -> dict[str, int]:
    """The files in the storage, with their sizes."""
    return {path.name: path.stat().st_size for path in sorted(STORE.iterdir()) if path.is_file()}
