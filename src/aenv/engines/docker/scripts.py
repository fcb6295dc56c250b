"""Scripts that run in a container by the daemon's exec, for what has no agent in it.

Each prints one line before anything else: its process, by which it can be killed, or what is wrong.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

from aenv.engines.docker.daemon import Daemon, Hijacked
from aenv.errors import AEnvError
from aenv.runtime.frames import END, INPUT, MOST, Frames, NoFrame, frames

KEEP_ALIVE = ("/bin/sh", "-c", "while :; do cat >/dev/null; [ $? -lt 128 ] && exit 0; done")
"""What runs in a container that has no agent, until its input ends. No signal from inside ends it, and it buries whom
nobody else does."""
_LAST, _LONGEST_LAST = 1.0, 30.0
"""Seconds of silence after which all that a command printed has come, once it has ended; and in which it must have."""
SWEEP = 10.0
"""Seconds that it may take to kill a command."""
_LOOK, _LONGEST_LOOK = 0.05, 1.0
"""Seconds between two looks whether a command whose output is held open by others has ended."""
OTHER, FILES = b"b", b"g"
"""What failed, beside the directory: anything, or what concerns a file."""
_FIRST = re.compile(rb"(?:p (?P<process>\d{1,10})|f (?P<errno>\d{1,3}) (?P<stage>[a-z]))\r?\n")
_MOST_WORDS = 4096
"""Bytes that are looked through for what went wrong."""
_NUMBERS = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP),
    *(errno.ENAMETOOLONG, errno.ENOSPC, errno.EDQUOT, errno.E2BIG, errno.EFBIG),
)
_SAID = {os.strerror(number).lower(): number for number in _NUMBERS}
"""What programs say, and the number of that."""
RUN = """
if [ -n "$1" ]; then
    cd -- "$1" 2>/dev/null || {
        if [ -d "$1" ]; then echo f 13 d; elif [ -e "$1" ]; then echo f 20 d; else echo f 2 d; fi; exit 0; }
fi
shift
case "$1" in */*) [ -f "$1" ] && [ -x "$1" ] ;; *) command -v "$1" >/dev/null 2>&1 ;; esac || {
    if [ -e "$1" ]; then echo f 13 p; else echo f 2 p; fi; exit 0; }
echo p $$
exec "$@"
"""
READ_FILE = """
if [ -d "$1" ]; then echo f 21 g; exit 0; fi
if [ ! -e "$1" ]; then cat -- "$1"; exit 1; fi
if [ ! -f "$1" ]; then echo f 6 g; exit 0; fi
if [ ! -r "$1" ]; then echo f 13 g; exit 0; fi
echo p $$
exec cat <"$1"
"""
TAKE_FILE = """
if [ -d "$1" ]; then echo f 21 g; exit 0; fi
if [ -e "$1" ] && [ ! -f "$1" ]; then echo f 6 g; exit 0; fi
case "$1" in ?*/*) mkdir -p -- "${1%/*}" || exit;; esac
echo p $$
exec cat >"$2"
"""
PLACE_FILE = """
if [ -n "$3" ]; then chmod "$3" "$2" || exit
elif [ -f "$1" ] && [ -x "$1" ]; then chmod +x "$2" || exit; fi
mv -f -- "$2" "$1" || exit
echo p $$
"""
KILL = """
session=$1 all=" $1 " round=0
while [ $round -lt 200 ]; do
    round=$((round + 1)) found=
    for one in /proc/[0-9]*; do
        { read -r line <"$one/stat"; } 2>/dev/null || continue
        set -- ${line##*) }
        process=${one##*/}
        case "$all" in
            *" $process "*) ;;
            *" $2 "*) all="$all$process " ;;
            *) [ "$4" = "$session" ] || continue; all="$all$process " ;;
        esac
        case "$1" in Z | X) ;; *) found="$found $process" ;; esac
    done
    [ -n "$found" ] || break
    kill -9 $found 2>/dev/null
done
echo p $$
"""
"""Of a command's session, and of what descends from it, nothing lives on."""


class No(Exception):
    """It cannot be done."""

    def __init__(self, number: int, stage: bytes = OTHER) -> None:
        self.number, self.stage = number, stage


class Left(Exception):
    """Whoever asked is gone."""


class Told:
    """What a client sends."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader, self._frames = reader, Frames()
        self._ready: deque[tuple[bytes, bytes]] = deque()

    async def next(self) -> tuple[bytes, bytes]:
        """The next of it, a kind and data; ``Left`` when there is no more."""
        while not self._ready:
            try:
                data = await self._reader.read(MOST)
            except ConnectionError:
                raise Left from None
            if not data:
                raise Left
            self._ready.extend(self._frames.feed(data))
        return self._ready.popleft()


class Command:
    """One exec of the daemon's."""

    def __init__(
        self,
        daemon: Daemon,
        id: str,
        inside: Hijacked,
        kill: Callable[[int], Awaitable[None]] | None,
        *,
        open: bool,
    ) -> None:
        self._daemon, self._id, self._inside, self._kill, self._open = daemon, id, inside, kill, open
        self.process = 0
        """Its number in the container; 0 while it is not known."""
        self._begun = asyncio.Event()
        self._ended = False
        self._first, self._errors = bytearray(), bytearray()
        self._heard = 0.0
        self._tasks: list[asyncio.Task[Any]] = []

    async def attend(
        self,
        told: Told | None,
        writer: asyncio.StreamWriter | None,
        kinds: tuple[bytes, bytes],
        seconds: float | None,
    ) -> int | None:
        """Pass on what is typed and what is printed, as ``kinds``, until it ends; its exit code, or None when its time
        was over. Who leaves before is ``Left``."""
        following = asyncio.create_task(self._follow(writer, kinds))
        self._tasks.append(following)
        if told is not None:
            self._tasks.append(asyncio.create_task(self._feed(told)))
        await asyncio.wait(self._tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            return following.result()
        if any(task.done() for task in self._tasks):
            raise Left
        await self._stop()
        await asyncio.wait((following,), timeout=_LAST)
        return None

    def number(self) -> int:
        """The number of what went wrong, by what it said."""
        said = bytes(self._errors + self._first).decode(errors="replace").lower()
        return next((number for words, number in _SAID.items() if words in said), errno.EIO)

    async def close(self) -> None:
        try:
            await self._stop()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _stop(self) -> None:
        """Kill what runs of it."""
        if self._ended or self._kill is None:
            return
        if self._tasks and not self._tasks[0].done():
            await self._beginning()
        if self.process:
            await self._kill(self.process)
            self._ended = True

    async def _beginning(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(SWEEP):
                await self._begun.wait()

    async def _feed(self, told: Told) -> None:
        """Pass on what is typed, until whoever types is gone."""
        with suppress(Left, NoFrame):
            while True:
                kind, data = await told.next()
                if self._open and kind in (INPUT, END):
                    await self._beginning()  # Podman drops what was said by one that ended before it could read
                    await self._type(kind, data)

    async def _type(self, kind: bytes, data: bytes) -> None:
        self._open = kind == INPUT
        try:
            if kind == INPUT:
                await self._inside.send(data)
            else:
                self._inside.end_input()
        except AEnvError:  # it reads no more
            self._open = False

    async def _follow(self, writer: asyncio.StreamWriter | None, kinds: tuple[bytes, bytes]) -> int:
        """Pass on what it prints until it has ended."""
        passing = asyncio.create_task(self._pass_on(writer, kinds))
        pause, clock = _LOOK, asyncio.get_running_loop().time
        try:
            while not (await asyncio.wait((passing,), timeout=pause))[0]:
                # Before it begins it does not run, either; and what it leaves when it ends may hold its output.
                if self._begun.is_set() and not (await self._about())["Running"]:
                    until = clock() + _LONGEST_LAST
                    while not passing.done() and clock() < min(self._heard + _LAST, until):
                        await asyncio.wait((passing,), timeout=_LOOK)
                    break
                pause = min(pause * 1.5, _LONGEST_LOOK)
            if passing.done():
                passing.result()
        finally:
            passing.cancel()
            await asyncio.gather(passing, return_exceptions=True)
        pause = _LOOK
        while (found := await self._about())["Running"]:
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_LOOK)
        self._ended = True
        return int(found.get("ExitCode") or 0)

    async def _about(self) -> dict[str, Any]:
        return {"Running": False, **(await self._daemon.ask("GET", f"/exec/{self._id}/json") or {})}

    async def _pass_on(self, writer: asyncio.StreamWriter | None, kinds: tuple[bytes, bytes]) -> None:
        async with aclosing(self._inside.output()) as pieces:
            async for channel, piece in pieces:
                self._heard, kept = asyncio.get_running_loop().time(), piece
                if channel == 2:
                    self._errors += piece[: _MOST_WORDS - len(self._errors)]
                elif not self.process:
                    kept = self._begin(piece)
                if writer is not None and kept and kinds[channel - 1]:
                    writer.write(frames(kinds[channel - 1], kept))
                    await writer.drain()

    def _begin(self, piece: bytes) -> bytes:
        """Take its first line out of what it prints."""
        self._first += piece
        found = _FIRST.match(self._first)
        if found is None:
            if len(self._first) > _MOST_WORDS:
                raise No(self.number())
            return b""
        if found["errno"]:
            self._ended = True
            raise No(int(found["errno"]), found["stage"])
        self.process = int(found["process"])
        self._begun.set()
        return bytes(self._first[found.end() :])
