"""The agent's work done from outside, where there is no agent for the second container's machine.

The engine listens where the agent would, in the directory that only the main container sees beside it, and does what
is asked there by the daemon's own exec. So the runtime speaks to it as it does to the agent, over any network policy,
and what authorises a command is that directory: it is one instance's own, and gone with it.

The image must have ``/bin/sh`` and ``cat``; and ``mkdir``, ``mv``, ``chmod`` and ``rm`` for files that are written.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from aenv.engines.docker.containers import SECOND_SOCKET
from aenv.engines.docker.daemon import Daemon
from aenv.engines.docker.scripts import (
    FILES,
    KILL,
    PLACE_FILE,
    READ_FILE,
    RUN,
    SWEEP,
    TAKE_FILE,
    Command,
    Left,
    No,
    Told,
)
from aenv.errors import AEnvError
from aenv.runtime.frames import END, ERRORS, EXIT, FAILED, OUTPUT, START, NoFrame, frames
from aenv.runtime.second import (
    ARGUMENTS,
    DIRECTORY,
    ENDED,
    FAILURE,
    MODE,
    READ,
    TERMINAL,
    TIME,
    VARIABLES,
    WRITE,
)

log = logging.getLogger("aenv.engine")
MOST_CLIENTS = 256
MOST_TEXT = 4 * 1024 * 1024
"""Bytes of arguments and variables."""
MOST_TEXTS = 32 * 1024 * 1024
"""The same, of all clients together."""
_BEGIN = 30.0
"""Seconds in which a client must have said what it wants."""
_KILLED, _MISSING, _HIGHEST = -9, 127, 128 + 64
"""Exit codes: of what was killed; of a script that needs a program which is not there; and the highest by which the
daemon says that a signal ended a command."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


class _Asked:
    """What one client wants."""

    def __init__(self) -> None:
        self.kind = b""
        self.path = self.directory = self.mode = ""
        self.seconds: float | None = None
        self.input = True
        self._texts = {ARGUMENTS: bytearray(), VARIABLES: bytearray()}

    def take(self, kind: bytes, data: bytes) -> bool:
        """Whether that was all of it."""
        if kind in self._texts:
            self._texts[kind] += data
            if self.size > MOST_TEXT:
                raise No(errno.E2BIG)
        elif kind == DIRECTORY:
            self.directory = _path(data)
        elif kind == TIME:
            self.seconds = int.from_bytes(data[:8], "big") / 1000
        elif kind == MODE:
            self.mode = f"{int.from_bytes(data, 'big') & 0o777:04o}"
        elif kind == END:
            self.input = False
        elif kind in (READ, WRITE):
            self.kind, self.path = kind, _path(data)
        elif kind == START:
            self.kind = kind
        else:
            raise No(errno.EOPNOTSUPP if kind == TERMINAL else errno.EINVAL)
        return bool(self.kind)

    @property
    def size(self) -> int:
        return sum(map(len, self._texts.values()))

    @property
    def arguments(self) -> list[str]:
        return self._split(ARGUMENTS)

    @property
    def variables(self) -> list[str]:
        return self._split(VARIABLES)

    def _split(self, kind: bytes) -> list[str]:
        return [_text(one) for one in bytes(self._texts[kind]).split(b"\0")[:-1]]


class Deputy:
    """What answers in the agent's place, for one second container."""

    def __init__(self, daemon: Daemon, container: str) -> None:
        self._daemon, self._container = daemon, container
        self._server: asyncio.AbstractServer | None = None
        self._clients: set[asyncio.Task[None]] = set()
        self._asking: set[_Asked] = set()

    async def open(self, link: str) -> None:
        """Listen in that directory, which nobody in a container can write from now on."""
        self._server = await asyncio.start_unix_server(self._serve, sock=_listen(link))

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._clients:
            task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        try:
            if len(self._clients) > MOST_CLIENTS:
                raise No(errno.EAGAIN)
            await self._answer(Told(reader), writer)
        except No as exc:
            writer.write(frames(FAILED, FAILURE.pack(exc.number, exc.stage)))
        except (AEnvError, OSError, NoFrame) as exc:  # whoever connected sees that nobody answers
            log.debug("nothing is done in %s: %s", self._container, exc)
        except (asyncio.CancelledError, Left):  # cancelled by close; passed on, the server would log it as a fault
            return
        finally:
            self._clients.discard(task)
            writer.close()

    async def _answer(self, told: Told, writer: asyncio.StreamWriter) -> None:
        asked = _Asked()
        self._asking.add(asked)
        try:
            await self._listen(asked, told)
            await self._do(asked, told, writer)
        finally:
            self._asking.discard(asked)

    async def _listen(self, asked: _Asked, told: Told) -> None:
        """Hear all that a client wants."""
        try:
            async with asyncio.timeout(_BEGIN):
                while not asked.take(*await told.next()):
                    if sum(one.size for one in self._asking) > MOST_TEXTS:
                        raise No(errno.EAGAIN)
        except TimeoutError:
            raise No(errno.ETIMEDOUT) from None

    async def _do(self, asked: _Asked, told: Told, writer: asyncio.StreamWriter) -> None:
        code, timed_out = 0, False
        if asked.kind == START:
            code, timed_out = await self._command(asked, told, writer)
        elif asked.kind == READ:
            await self._file(READ_FILE, [asked.path], told, writer)
        else:
            await self._write(asked, told)
        writer.write(frames(EXIT, ENDED.pack(code, timed_out)))
        await writer.drain()

    async def _command(self, asked: _Asked, told: Told, writer: asyncio.StreamWriter) -> tuple[int, bool]:
        if not asked.arguments:
            raise No(errno.EINVAL)
        removed = [one for one in asked.variables if "=" not in one]
        if not all(_NAME.fullmatch(one) for one in removed):
            raise No(errno.EINVAL)
        script = f"unset {' '.join(removed)}\n{RUN}" if removed else RUN
        given = [one for one in asked.variables if "=" in one]
        words = [asked.directory, *asked.arguments]
        async with self._begun(script, words, variables=given, input=asked.input) as command:
            code = await command.attend(told, writer, (OUTPUT, ERRORS), asked.seconds)
            if not command.process:
                raise No(command.number())
        if code is None:
            return _KILLED, True
        return (128 - code if 128 < code <= _HIGHEST else code), False

    async def _write(self, asked: _Asked, told: Told) -> None:
        folder, slash, _ = asked.path.rpartition("/")
        temporary = f"{folder}{slash}.aenv-{secrets.token_hex(8)}"
        try:
            await self._file(TAKE_FILE, [asked.path, temporary], told, None)
            await self._file(PLACE_FILE, [asked.path, temporary, asked.mode], told, None, input=False)
        except BaseException:
            await self._quietly('rm -f -- "$1"', temporary)
            raise

    async def _file(
        self, script: str, words: Sequence[str], told: Told, writer: asyncio.StreamWriter | None, *, input: bool = True
    ) -> None:
        async with self._begun(script, words, variables=["LC_ALL=C"], input=input and writer is None) as command:
            code = await command.attend(told, writer, (OUTPUT, b""), None)
            if code or not command.process:
                raise No(errno.EOPNOTSUPP if code == _MISSING else command.number(), FILES)

    @asynccontextmanager
    async def _begun(
        self,
        script: str,
        words: Sequence[str],
        *,
        variables: Sequence[str] = (),
        input: bool = False,
        last: bool = False,
    ) -> AsyncIterator[Command]:
        """A script that runs; when this is left, nothing of it does. ``last``: it is one that clears up."""
        asked = {
            "Cmd": ["/bin/sh", "-c", script, "sh", *words],
            "Env": list(variables),
            "AttachStdin": input,
            "AttachStdout": True,
            "AttachStderr": True,
        }
        made = await self._daemon.ask("POST", f"/containers/{self._container}/exec", body=asked)
        start = {"Detach": False, "Tty": False}
        async with self._daemon.hijack(f"/exec/{made['Id']}/start", body=start) as inside:
            command = Command(self._daemon, made["Id"], inside, None if last else self._kill, open=input)
            try:
                yield command
            finally:
                await command.close()

    async def _kill(self, process: int) -> None:
        await self._quietly(KILL, str(process))

    async def _quietly(self, script: str, *words: str) -> None:
        """Run a script that clears up, as far as that is possible."""
        with suppress(AEnvError, TimeoutError, No):
            async with asyncio.timeout(SWEEP), self._begun(script, words, last=True) as command:
                await command.attend(None, None, (b"", b""), None)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:  # the daemon takes no other
        raise No(errno.EINVAL) from None


def _path(data: bytes) -> str:
    path = _text(data)
    if not path or "\0" in path:
        raise No(errno.EINVAL)
    return path if path.startswith("/") else f"./{path}"


def _listen(link: str) -> socket.socket:
    """A socket there, in the place of one that an engine which is gone had. By a descriptor: its path may be too
    long."""
    folder = os.open(link, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchown(folder, 0, 0)
        os.fchmod(folder, 0o755)
        name = f".{secrets.token_hex(8)}"
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.bind(f"/proc/self/fd/{folder}/{name}")
        os.chmod(name, 0o666, dir_fd=folder)  # noqa: S103  whoever sees it is the main container
        made.listen(MOST_CLIENTS)
        os.replace(name, SECOND_SOCKET, src_dir_fd=folder, dst_dir_fd=folder)
        return made
    finally:
        os.close(folder)
