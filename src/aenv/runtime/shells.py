"""An interactive shell of the owner's, inside the sandbox: ``POST /shell`` switches the connection to it.

It has a terminal where one is wanted and to be had, and pipes otherwise. It ends with its connection, and with it
everything that it started and that did not leave its session.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from aenv import config
from aenv.cleanup import finish
from aenv.errors import Invalid, RateLimited
from aenv.runtime.commands import exited
from aenv.runtime.frames import (
    END,
    ERRORS,
    EXIT,
    FAILED,
    INPUT,
    MOST,
    OUTPUT,
    PROTOCOL,
    SIZE,
    START,
    Frames,
    NoFrame,
    frames,
    read_window,
)
from aenv.runtime.ports import UpgradeRequired

MOST_SHELLS = 8
"""Shells at a time."""
_BEGIN = 30.0
"""Seconds in which a client must say what it wants."""
_HANG_UP = 1.0
"""Seconds that a shell whose user left has to end by itself."""
_LAST = 1024 * 1024
"""Bytes that are still read of each stream when the shell itself has ended."""
_ROUNDS = 100
_SHOWN = 200
"""Characters of a program's name in an error."""
_SHELLS = ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash")
_NOT_FOUND, _NOT_RUN = 127, 126
_LEAD = f"""
import os, signal, sys
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGPIPE):
    signal.signal(number, signal.SIG_DFL)
if sys.argv[1] == "tty":
    import fcntl, termios
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as exc:
    sys.stderr.write(f"{{sys.argv[2]}}: {{exc.strerror}}\\n")
    sys.exit({_NOT_FOUND} if isinstance(exc, FileNotFoundError) else {_NOT_RUN})
"""
"""Has no signal ignored, as a sandbox may, takes its input for the terminal of its session, and becomes another
program."""


class Start(Struct, frozen=True, forbid_unknown_fields=True):
    """What to run."""

    command: list[str] | None = None
    """The program and its arguments; a line for ``/bin/sh`` when there is one only; a shell when there is none."""
    tty: bool = False
    rows: Annotated[int, Meta(ge=0, le=65535)] = 24
    columns: Annotated[int, Meta(ge=0, le=65535)] = 80
    term: Annotated[str, Meta(max_length=100)] = ""
    """The kind of the terminal, as ``TERM`` has it."""

    @property
    def argv(self) -> list[str]:
        if not self.command:
            return [next((shell for shell in _SHELLS if os.access(shell, os.X_OK)), "/bin/sh")]
        return ["/bin/sh", "-c", self.command[0]] if len(self.command) == 1 else self.command


_start = msgspec.json.Decoder(Start).decode


class Shells:
    """The open shells of a sandbox."""

    def __init__(self, active: Callable[[], None]) -> None:
        """``active`` is called whenever something passes."""
        self._active = active
        self._open: set[_Shell] = set()

    async def serve(self, directory: Path, scope: MutableMapping[str, Any]) -> None:
        """Give the client's connection a shell, until one of the two ends."""
        take_over = scope.get("aenv.upgrade")
        if take_over is None:
            raise UpgradeRequired("the connection cannot be upgraded", hint="send 'Connection: Upgrade'")
        if len(self._open) >= MOST_SHELLS:
            raise RateLimited(f"{MOST_SHELLS} shells are open in this sandbox", hint="end one of them first")
        try:
            client, early = take_over(PROTOCOL)
        except ConnectionError:
            return
        shell = _Shell(client, directory, self._active)
        self._open.add(shell)
        try:
            shell.begin(early)
            await shell.run()
        finally:
            self._open.discard(shell)
            client.close()

    def close(self) -> None:
        for shell in self._open:
            shell.cut()


class _Shell(asyncio.Protocol):
    """One shell, and the connection to its user."""

    def __init__(self, client: Any, directory: Path, active: Callable[[], None]) -> None:
        self._client = client
        self._directory = directory
        self._active = active
        self._frames = Frames()
        self._process: asyncio.Future[subprocess.Popen[bytes]] = asyncio.get_running_loop().create_future()
        self._left = asyncio.Event()
        """Set when the connection is gone."""
        self._outputs: list[_Output] = []
        self._input: _Input | None = None
        self._terminal = -1

    def begin(self, early: bytes) -> None:
        self._client.set_protocol(self)
        if not self._client.is_closing() and not self._client.is_reading():
            self._client.resume_reading()
        if early:
            self.data_received(early)

    def cut(self) -> None:
        self._client.abort()

    async def run(self) -> None:
        """From what the client wants to the end of that, or of the client."""
        left = asyncio.ensure_future(self._left.wait())
        try:
            await asyncio.wait((self._process, left), timeout=_BEGIN, return_when=asyncio.FIRST_COMPLETED)
            if self._process.done():
                await self._live(self._process.result(), left)
        finally:
            left.cancel()

    async def _live(self, process: subprocess.Popen[bytes], left: asyncio.Future[Any]) -> None:
        ending = asyncio.ensure_future(exited(process))
        try:
            await asyncio.wait((ending, left), return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                for output in self._outputs:
                    output.drain()
                self.say(EXIT, msgspec.json.encode({"code": process.returncode}))
        finally:
            await finish(self._end(process, ending))

    async def _end(self, process: subprocess.Popen[bytes], ending: asyncio.Future[None]) -> None:
        """Nothing of it is left afterwards, but what went out of its way."""
        for stream in (*self._outputs, self._input):
            if stream is not None:
                stream.close()
        if self._terminal >= 0:
            os.close(self._terminal)
            self._terminal = -1  # its user may still tell the size of a window
        if not ending.done():
            for number in (signal.SIGHUP, signal.SIGCONT):
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)
            await asyncio.wait((ending,), timeout=_HANG_UP)
        await asyncio.to_thread(_kill_session, process.pid)
        if not ending.done():
            process.kill()
            await asyncio.wait((ending,))

    # Its process

    def _open(self, start: Start) -> subprocess.Popen[bytes]:
        variables = config.environment()
        if start.tty:
            try:
                self._terminal, theirs = os.openpty()
            except OSError as exc:
                self.say(ERRORS, f"there is no terminal here ({exc.strerror}): it goes on without one\n".encode())
            else:
                variables["TERM"] = start.term or "xterm"
                self._resize(start.rows, start.columns)
                return self._on_terminal(start, theirs, variables)
        process = _popen("pipes", start, self._directory, variables, *[subprocess.PIPE] * 3)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._input = _Input(os.dup(process.stdin.fileno()), self._regulate)
        for kind, pipe in ((OUTPUT, process.stdout), (ERRORS, process.stderr)):
            self._outputs.append(_Output(os.dup(pipe.fileno()), kind, self))
        for ours in (process.stdin, process.stdout, process.stderr):
            ours.close()
        return process

    def _on_terminal(self, start: Start, theirs: int, variables: dict[str, str]) -> subprocess.Popen[bytes]:
        try:
            process = _popen("tty", start, self._directory, variables, theirs, theirs, theirs)
        except BaseException:
            os.close(self._terminal)
            self._terminal = -1
            raise
        finally:
            os.close(theirs)
        self._input = _Input(os.dup(self._terminal), self._regulate, at_end=b"\x04")
        self._outputs.append(_Output(os.dup(self._terminal), OUTPUT, self))
        return process

    def _resize(self, rows: int, columns: int) -> None:
        if self._terminal >= 0:
            fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    # The connection

    def say(self, kind: bytes, data: bytes) -> None:
        self._active()
        if not self._client.is_closing():
            self._client.write(frames(kind, data))

    def data_received(self, data: bytes) -> None:
        self._active()
        try:
            for kind, piece in self._frames.feed(data):
                self._take(kind, piece)
        except (NoFrame, Invalid) as exc:
            error = exc if isinstance(exc, Invalid) else Invalid(f"that is not how a shell is spoken to: {exc}")
            self.say(FAILED, msgspec.json.encode(error.to_wire()))
            self._client.close()

    def _take(self, kind: bytes, data: bytes) -> None:
        if kind == START and not self._process.done():
            try:
                start = _start(data)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
                raise Invalid(f"what to run cannot be read: {exc}") from None
            self._process.set_result(self._open(start))
        elif self._input is None:
            raise NoFrame("it comes before there is a shell")
        elif kind == INPUT:
            self._input.write(data)
        elif kind == END:
            self._input.end()
        elif kind == SIZE:
            self._resize(*read_window(data))
        else:
            raise NoFrame(f"nothing is called {kind!r}")

    def _regulate(self) -> None:
        """Make the user wait while the shell does not take what was typed."""
        if self._client.is_closing() or self._input is None:
            return
        if self._input.is_full and self._client.is_reading():
            self._client.pause_reading()
        elif not self._input.is_full and not self._client.is_reading():
            self._client.resume_reading()

    def pause_writing(self) -> None:
        for output in self._outputs:
            output.hold(True)

    def resume_writing(self) -> None:
        for output in self._outputs:
            output.hold(False)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._left.set()


class _Output:
    """A stream of the shell's, passed on as it comes."""

    def __init__(self, descriptor: int, kind: bytes, shell: _Shell) -> None:
        self._descriptor = descriptor
        self._kind = kind
        self._shell = shell
        self._loop = asyncio.get_running_loop()
        self._held = False
        os.set_blocking(descriptor, False)
        self._loop.add_reader(descriptor, self._readable)

    def _readable(self) -> None:
        if not self._read():
            self.close()

    def _read(self) -> int:
        """Pass on what is there; how much that was. Nothing at the end."""
        try:
            data = os.read(self._descriptor, MOST)
        except BlockingIOError:
            return -1
        except OSError:  # of a terminal that nobody has any more
            return 0
        if data:
            self._shell.say(self._kind, data)
        return len(data)

    def hold(self, held: bool) -> None:
        if self._descriptor >= 0 and held != self._held:
            self._held = held
            if held:
                self._loop.remove_reader(self._descriptor)
            else:
                self._loop.add_reader(self._descriptor, self._readable)

    def drain(self) -> None:
        """Pass on what is left. Who still has it open, in the background, is not waited for."""
        left = _LAST
        while self._descriptor >= 0 and left > 0 and (taken := self._read()) > 0:
            left -= taken

    def close(self) -> None:
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


class _Input:
    """What is typed, given to the shell as it takes it."""

    def __init__(self, descriptor: int, regulate: Callable[[], None], at_end: bytes = b"") -> None:
        """``at_end`` is what says on a terminal that nothing more comes; a pipe is closed."""
        self._descriptor = descriptor
        self._regulate = regulate
        self._at_end = at_end
        self._loop = asyncio.get_running_loop()
        self._waiting = bytearray()
        self._ended = False
        os.set_blocking(descriptor, False)

    @property
    def is_full(self) -> bool:
        return len(self._waiting) > MOST

    def write(self, data: bytes) -> None:
        if self._descriptor >= 0 and not self._ended:
            self._waiting += data
            self._flush()

    def end(self) -> None:
        if self._descriptor >= 0 and not self._ended:
            self._waiting += self._at_end
            self._ended = not self._at_end
            self._flush()

    def _flush(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: os.write(self._descriptor, self._waiting[:MOST])]
        except BlockingIOError:
            self._loop.add_writer(self._descriptor, self._flush)
        except OSError:  # nobody reads it any more
            self.close()
        else:
            self._loop.remove_writer(self._descriptor)
            if self._ended:
                self.close()
        self._regulate()

    def close(self) -> None:
        if self._descriptor >= 0:
            self._loop.remove_writer(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
            self._waiting.clear()


def _popen(
    kind: str, start: Start, directory: Path, variables: dict[str, str], stdin: int, stdout: int, stderr: int
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LEAD, kind, *start.argv],
            cwd=directory,
            env=variables,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            bufsize=0,
            start_new_session=True,
        )
    except (OSError, ValueError) as exc:
        program = start.argv[0][:_SHOWN]
        raise Invalid(f"{program!r} cannot be run: {getattr(exc, 'strerror', None) or exc}") from None


def _kill_session(leader: int) -> None:
    """Kill every process of a session; first stop them all, so that none can make others meanwhile."""
    stopped: set[int] = set()
    for _ in range(_ROUNDS):
        new = set(_session(leader)) - stopped
        if not new:
            break
        _signal(new, signal.SIGSTOP)
        stopped |= new
    _signal(stopped, signal.SIGKILL)


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _session(leader: int) -> Iterator[int]:
    """Who is in it, where the system says so."""
    for entry in os.scandir("/proc") if os.path.isdir("/proc/self") else ():
        if entry.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader:
                    yield int(entry.name)
