"""``Context.second``: commands and files of the container beside the runtime's, by the agent that runs in it.

The agent is ``aenv/agent/agent.c``, which says what passes between the two: one connection is one command or one file.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from aenv.errors import (
    AEnvError,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    SandboxLost,
    StorageFull,
    TooLarge,
    Unsupported,
)
from aenv.models import ExecResult
from aenv.runtime.commands import MOST_OUTPUT
from aenv.runtime.context import printable
from aenv.runtime.frames import (
    END,
    ERRORS,
    EXIT,
    FAILED,
    INPUT,
    MOST,
    OUTPUT,
    SIZE,
    START,
    Frames,
    NoFrame,
    frames,
    window,
)

ARGUMENTS, VARIABLES, DIRECTORY, TIME, TERMINAL = b"a", b"v", b"d", b"t", b"p"
"""What to run: each argument and each variable is ended by a zero byte."""
READ, WRITE, MODE, LENGTH, SIGNAL = b"g", b"u", b"m", b"z", b"k"
ENDED, FAILURE = struct.Struct("!i?"), struct.Struct("!Ic")
"""How a command ended: its exit code, and whether its time was over. Why there is none: an errno, and what failed."""
MOST_FILE = 256 * 1024 * 1024
"""Bytes of a file that is read in one piece."""
PATIENCE = 60.0
"""Seconds without a sign of the agent after which it is taken for lost; beyond its time, for a command."""
ARRIVAL = 300.0
"""Seconds in which the agent must be there, when both containers start."""
_PAUSE, _LONGEST_PAUSE = 0.005, 0.1
_LONGEST = 1e9
_AHEAD = 16
"""Pieces that a terminal may print before somebody reads them."""
_SHOWN = 200
"""Characters of a command or path in an error."""
_FAULTS: dict[int, type[AEnvError]] = {
    **dict.fromkeys((errno.ENOENT,), NotFound),
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EEXIST, errno.EBUSY), Conflict),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), Forbidden),
    **dict.fromkeys((errno.ELOOP, errno.ENAMETOOLONG, errno.ENOEXEC, errno.EINVAL), Invalid),
    errno.E2BIG: TooLarge,
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), StorageFull),
    errno.EOPNOTSUPP: Unsupported,
}
"""Whose fault it is that something cannot be done; the sandbox's where nothing is said."""
_WORDS = {errno.ENXIO: "it is not a regular file", errno.ETIMEDOUT: "nothing of it moved for too long"}
"""Where the system's own would mislead."""
_NUMBER = struct.Struct("!Q")
P = ParamSpec("P")
R = TypeVar("R")


class _Failed(Exception):
    """The agent could not do what was asked."""

    def __init__(self, data: bytes) -> None:
        number, self.stage = FAILURE.unpack_from(data)
        self.errno = int(number)
        self.words = _WORDS.get(self.errno) or os.strerror(self.errno)

    def told(self, what: str, hint: str | None = None) -> AEnvError:
        if self.errno == errno.EOPNOTSUPP:
            hint = "there is no agent in it, and its image has not what this takes without one"
        return _FAULTS.get(self.errno, AEnvError)(f"{what}: {self.words}", hint=hint)


class Second:
    """The second container of a sandbox: the task's own image, as it is.

    >>> @register_tool
    ... async def tests(ctx: Context) -> str:
    ...     result = await ctx.second.exec("cd /testbed && python -m pytest -q", timeout=600)
    ...     return result.stdout
    """

    def __init__(self, socket: str) -> None:
        self._socket = socket

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float = 60.0,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str | None] | None = None,
        input: str | bytes = b"",
        on_output: Callable[[str, bytes], None] | None = None,
    ) -> ExecResult:
        """Run a command: text is a line for ``sh``, a sequence is a program and its arguments.

        One that fails is a result. When its time is over or the call is cancelled, it is killed with all that it
        started; what a command leaves in the background when it ends by itself goes on.

        Args:
            timeout: seconds that it may take.
            cwd: where it runs; the image's working directory when not given.
            env: variables over the image's; None removes one.
            input: what it reads.
            on_output: called with ``"stdout"`` or ``"stderr"`` and what was just printed.
        """
        request = _request(command, cwd, env)
        if not isinstance(timeout, int | float) or not 0 < timeout <= _LONGEST:
            raise Invalid(f"timeout {timeout!r} is not a length of time", hint="give seconds, more than 0")
        request += frames(TIME, _NUMBER.pack(max(1, round(timeout * 1000))))
        data = _bytes(input, "input")
        request += frames(START) if data else frames(END) + frames(START)
        kept = {OUTPUT: bytearray(), ERRORS: bytearray()}
        truncated = False

        def take(kind: bytes, piece: bytes) -> None:
            nonlocal truncated
            if kind in kept:
                room = MOST_OUTPUT - len(kept[kind])
                kept[kind] += piece[:room]
                truncated = truncated or len(piece) > room
                if on_output is not None:
                    on_output("stdout" if kind == OUTPUT else "stderr", piece)

        try:
            async with self._ask(request, take, data, end=bool(data), patience=None) as exchange:
                code, timed_out = await exchange.end(timeout + PATIENCE)
        except _Failed as exc:
            raise _not_run(exc, command, cwd) from None
        return ExecResult(
            returncode=code,
            stdout=kept[OUTPUT].decode(errors="replace"),
            stderr=kept[ERRORS].decode(errors="replace"),
            truncated=truncated,
            timed_out=timed_out,
        )

    async def read(self, path: str | os.PathLike[str], *, most: int = MOST_FILE) -> bytes:
        """A regular file, at most so many bytes of it."""
        held = bytearray()

        def take(kind: bytes, piece: bytes) -> None:
            size = int.from_bytes(piece, "big") if kind == LENGTH else len(held) + len(piece)
            if size > most:
                raise TooLarge(f"{_shown(path)} has more than {most} bytes", hint="read a part of it with exec()")
            if kind == OUTPUT:
                held.extend(piece)

        try:
            async with self._ask(frames(READ, _path(path)), take) as exchange:
                await exchange.finished(f"{_shown(path)} cannot be read")
        except _Failed as exc:
            raise exc.told(f"{_shown(path)} in the second container cannot be read") from None
        return bytes(held)

    async def write(self, path: str | os.PathLike[str], data: bytes | str, *, mode: int | None = None) -> None:
        """Write a file in one step, with its parents: who reads it finds the old content or the new.

        A link is followed, and stays.
        """
        if not isinstance(mode, int | None):
            raise Invalid(f"mode {mode!r} is not a number", hint="give it such as mode=0o755")
        request = b"" if mode is None else frames(MODE, struct.pack("!I", mode & 0o777))
        content = _bytes(data, f"what is to be written to {_shown(path)}")
        try:
            async with self._ask(request + frames(WRITE, _path(path)), None, content, end=True) as exchange:
                await exchange.finished(f"{_shown(path)} cannot be written")
        except _Failed as exc:
            hint = "nothing was changed there"
            if exc.errno == errno.EBUSY:
                hint = "it is a mount of its own and cannot be replaced: write to it with exec(), such as by cat > FILE"
            raise exc.told(f"{_shown(path)} in the second container cannot be written", hint) from None

    @asynccontextmanager
    async def shell(
        self,
        command: str | Sequence[str] = ("/bin/sh",),
        *,
        rows: int = 24,
        columns: int = 80,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> AsyncIterator[Shell]:
        """A command with a terminal, for as long as the block lasts."""
        request = _request(command, cwd, env) + frames(TERMINAL, window(rows, columns)) + frames(START)

        def take(kind: bytes, piece: bytes) -> None:
            live._take(piece)

        try:
            async with self._ask(request, take, patience=None) as exchange:
                live = Shell(exchange)
                yield live
        except _Failed as exc:
            raise _not_run(exc, command, cwd) from None

    async def answers(self, patience: float = ARRIVAL) -> None:
        """Wait until the agent is there, and answers; ``SandboxLost`` when it does not in so many seconds."""
        pause, why = _PAUSE, ""
        try:
            async with asyncio.timeout(patience):
                while True:
                    try:
                        async with self._ask(frames(START), None) as exchange:
                            await exchange.end(None)
                    except _Failed:  # to run nothing, as it must
                        return
                    except SandboxLost as exc:
                        why = f": {exc.message}"
                    await asyncio.sleep(pause)
                    pause = min(pause * 1.2, _LONGEST_PAUSE)
        except TimeoutError:
            raise SandboxLost(f"the second container does not answer within {patience:g} s{why}") from None

    @functools.cached_property
    def sync(self) -> SyncSecond:
        """The same with methods that block, for functions that are not ``async``."""
        return SyncSecond(self)

    @asynccontextmanager
    async def _ask(
        self,
        request: bytes,
        take: Callable[[bytes, bytes], None] | None,
        data: bytes = b"",
        *,
        end: bool = False,
        patience: float | None = PATIENCE,
    ) -> AsyncIterator[_Exchange]:
        """A connection of its own, which ends what is asked on it when it is closed."""
        exchange = _Exchange(take, patience)
        try:
            async with asyncio.timeout(PATIENCE):
                await asyncio.get_running_loop().create_unix_connection(lambda: exchange, self._socket)
        except (OSError, TimeoutError) as exc:
            why = exc.strerror or f"nobody took the call within {PATIENCE:g} s"
            raise SandboxLost(f"the second container is gone: {why}") from exc
        try:
            exchange.begin(request, data, end=end)
            yield exchange
        finally:
            exchange.close()


class Shell:
    """A command with a terminal. Iterate over what it prints until it ends."""

    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange
        self._printed: asyncio.Queue[bytes] = asyncio.Queue()
        self._readers = 0
        self._waiters = 0

    def send(self, data: bytes) -> None:
        """Type this."""
        self._exchange.send(frames(INPUT, data))

    def resize(self, rows: int, columns: int) -> None:
        self._exchange.send(frames(SIZE, window(rows, columns)))

    def signal(self, number: int) -> None:
        """Send a signal to what runs in the foreground."""
        self._exchange.send(frames(SIGNAL, bytes([number])))

    async def wait(self) -> int:
        """Its exit code, or minus the signal that ended it. What it prints meanwhile is dropped if nobody reads it."""
        self._waiters += 1
        try:
            self._drop()
            code, _ = await self._exchange.end(None)
        finally:
            self._waiters -= 1
        return code

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self._readers += 1
        try:
            while True:
                getting = asyncio.ensure_future(self._printed.get())
                try:
                    await asyncio.wait((getting, self._exchange.done), return_when=asyncio.FIRST_COMPLETED)
                    if not getting.done() and self._printed.empty():
                        await self._exchange.end(None)
                        return
                    piece = await getting
                finally:
                    getting.cancel()
                self._exchange.resume()
                yield piece
        finally:
            self._readers -= 1
            self._drop()

    def _take(self, piece: bytes) -> None:
        self._printed.put_nowait(piece)
        if self._printed.qsize() >= _AHEAD:
            self._exchange.pause()
        self._drop()

    def _drop(self) -> None:
        """Somebody waits for the end, and nobody reads."""
        if self._waiters and not self._readers:
            while not self._printed.empty():
                self._printed.get_nowait()
            self._exchange.resume()


def _blocking(
    method: Callable[Concatenate[Second, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[SyncSecond, P], R]:
    @functools.wraps(method)
    def call(self: SyncSecond, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if asyncio._get_running_loop() is not None:
            raise Invalid(
                f"second.sync.{method.__name__}() would hold up everybody: it blocks, and an async function called it",
                hint=f"await second.{method.__name__}() there",
            )
        return asyncio.run(method(self.second, *args, **kwargs))

    return call


class SyncSecond:
    """``Second`` with methods that block: a thread of its own waits for each."""

    def __init__(self, second: Second) -> None:
        self.second = second

    exec = _blocking(Second.exec)
    read = _blocking(Second.read)
    write = _blocking(Second.write)


class _Exchange(asyncio.Protocol):
    """One connection to the agent."""

    def __init__(self, take: Callable[[bytes, bytes], None] | None, patience: float | None) -> None:
        self._take = take
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._frames = Frames()
        self._input: Iterator[bytes] = iter(())
        self._writable = True
        self._heard = 0.0
        self._transport: asyncio.Transport | None = None
        self.done: asyncio.Future[tuple[int, bool]] = self._loop.create_future()
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())

    def begin(self, request: bytes, data: bytes, *, end: bool) -> None:
        """Send what is wanted, and the input for it as fast as it is taken."""
        self._input = _pieces(data, end)
        self._heard = self._loop.time()
        self.send(request)
        self.resume_writing()

    def send(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def pause(self) -> None:
        if self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing() and not self._transport.is_reading():
            self._transport.resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self.done.cancel()

    async def end(self, limit: float | None) -> tuple[int, bool]:
        """The exit code, and whether its time was over."""
        try:
            async with asyncio.timeout(limit):
                return await asyncio.shield(self.done)
        except TimeoutError:
            raise SandboxLost("the second container does not answer: its command should have ended") from None

    async def finished(self, what: str) -> None:
        """Wait for the end of what moves a file. It may take as long as something moves."""
        assert self._patience is not None
        while not self.done.done():
            quiet = self._loop.time() - self._heard
            if quiet >= self._patience:
                raise SandboxLost(f"the second container does not answer for {self._patience:g} s")
            await asyncio.wait((self.done,), timeout=self._patience - quiet)
        code, _ = self.done.result()
        if code:
            raise AEnvError(f"{what}: what moved it in the second container was killed", hint="try it again")

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._heard = self._loop.time()
        while self._writable and (piece := next(self._input, b"")):
            self.send(piece)

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        try:
            for kind, piece in self._frames.feed(data):
                self._obey(kind, piece)
        except (NoFrame, struct.error) as exc:
            self._fail(SandboxLost(f"what came from the second container makes no sense: {exc}"))
        except Exception as exc:  # what is wrong with what was taken concerns who asked
            self._fail(exc)

    def _obey(self, kind: bytes, piece: bytes) -> None:
        if self.done.done():
            return
        if kind == EXIT:
            self.done.set_result(ENDED.unpack(piece))
        elif kind == FAILED:
            self._fail(_Failed(piece))
        elif self._take is not None:
            self._take(kind, piece)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(SandboxLost("the second container is gone: it ended while it was at work"))

    def _fail(self, exc: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(exc)


def _pieces(data: bytes, end: bool) -> Iterator[bytes]:
    view = memoryview(data)
    for start in range(0, len(view), MOST):
        yield frames(INPUT, bytes(view[start : start + MOST]))
    if end:
        yield frames(END)


def _request(
    command: str | Sequence[str], cwd: str | os.PathLike[str] | None, env: Mapping[str, str | None] | None
) -> bytes:
    argv = ["sh", "-c", command] if isinstance(command, str) else command
    if not isinstance(argv, Sequence) or not argv or not all(isinstance(part, str) for part in argv):
        raise Invalid("a command is text, or a sequence of texts, the program first")
    variables = [name if value is None else f"{name}={value}" for name, value in (env or {}).items()]
    for text in (*argv, *variables):
        if "\0" in text:
            raise Invalid(f"{_shown(text)} holds a zero character, which no command can be given")
    for name in env or {}:
        if not isinstance(name, str) or not name or "=" in name:
            raise Invalid(f"{_shown(name)} is not a variable's name")
    request = frames(ARGUMENTS, b"".join(os.fsencode(part) + b"\0" for part in argv))
    if variables:
        request += frames(VARIABLES, b"".join(os.fsencode(part) + b"\0" for part in variables))
    if cwd is not None:
        request += frames(DIRECTORY, _path(cwd))
    return request


def _path(path: str | os.PathLike[str]) -> bytes:
    text = os.fsencode(path) if isinstance(path, str | bytes | os.PathLike) else b""
    if not text or b"\0" in text:
        raise Invalid(f"{_shown(path)} is not a path")
    if len(text) >= MOST:
        raise Invalid(f"{_shown(path)} is too long for a path")
    return text


def _bytes(data: object, what: str) -> bytes:
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    if not isinstance(data, str):
        raise Invalid(f"{what} is bytes or text, not {type(data).__name__}")
    try:
        return data.encode()
    except UnicodeEncodeError as exc:
        raise Invalid(f"{what} is no text that UTF-8 can hold: {exc.reason}") from None


def _shown(what: object) -> str:
    return repr(printable(str(what))[:_SHOWN])


def _not_run(exc: _Failed, command: str | Sequence[str], cwd: str | os.PathLike[str] | None) -> AEnvError:
    program = "sh" if isinstance(command, str) else str(command[0])
    what = f"{_shown(program)} cannot be run in the second container"
    if exc.stage == DIRECTORY:
        return exc.told(f"{what} in the directory {_shown(cwd)}")
    hint = None
    if exc.errno == errno.ENOENT:
        hint = (
            "its image has no shell: give the program and its arguments as a list"
            if isinstance(command, str)
            else "a line of shell is given as text"
        )
    return exc.told(what, hint)
