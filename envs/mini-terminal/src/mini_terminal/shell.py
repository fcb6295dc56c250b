"""One life of a shell: it is started, given commands one after another, and ended."""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from mini_terminal import processes
from mini_terminal.capture import CHUNK, Stream
from mini_terminal.dialects import AGAIN, DEAF, DONE, Dialect

MOST_STATE = 1024 * 1024
"""Most bytes of directory and state that are kept; a shell that holds more cannot be made again as it was."""
START = 10.0
"""Seconds in which a shell must answer for the first time."""
_TICK = 0.05
"""Seconds between looks at the shell where the system cannot tell that it ended."""
_LONGEST_WAIT = 60.0


class ShellError(Exception):
    """The shell did not start."""


class Done(NamedTuple):
    """The command ended, and the shell waits for the next one."""

    returncode: int
    directory: str
    state: bytes | None
    """Code that makes another shell the same; None when it was too long to be kept."""


class Ended(NamedTuple):
    """The shell ended, and the command with it."""

    returncode: int
    deaf: bool
    """It could not open the pipes for the command's output, and the command did not run."""


class TimedOut(NamedTuple):
    """The command was ended, and the shell with it."""

    clean: bool
    """Whether everything that it started is gone."""


Outcome = Done | Ended | TimedOut


class _Fields:
    """What the shell says: fields that end in NUL, each cut when it is too long."""

    def __init__(self) -> None:
        self._part = bytearray()
        self._complete: list[bytes | None] = []

    def feed(self, data: bytes) -> None:
        *ends, rest = data.split(b"\0")
        for end in ends:
            self._add(end)
            self._complete.append(bytes(self._part) if len(self._part) <= MOST_STATE else None)
            self._part.clear()
        self._add(rest)

    def _add(self, data: bytes) -> None:
        self._part += data[: MOST_STATE + 1 - len(self._part)]

    def take(self, count: int) -> list[bytes | None]:
        """The next fields, when there are as many."""
        if len(self._complete) < count:
            return []
        taken, self._complete = self._complete[:count], self._complete[count:]
        return taken

    @property
    def first(self) -> bytes | None:
        return self._complete[0] if self._complete else None


class Shell:
    """A shell in a session of its own, for one thread at a time."""

    def __init__(self, dialect: Dialect, directory: str, environment: Mapping[str, str], mark: str) -> None:
        self._dialect = dialect
        self._mark = mark
        self._fields = _Fields()
        self._pipes = _Pipes()
        self._watch: int | None = None
        self._talk, theirs = socket.socketpair()
        reader, aside = os.pipe()
        self._aside = Stream(reader)
        """What the shell prints outside of commands: what a trap prints when it ends."""
        try:
            self._process = subprocess.Popen(
                [dialect.name, *dialect.options],
                executable=dialect.path,
                stdin=theirs.fileno(),
                stdout=aside,
                stderr=subprocess.DEVNULL,
                cwd=directory,
                env={"LANG": "C.UTF-8", **environment, processes.MARK: mark},
                start_new_session=True,
            )
        except OSError as exc:
            self._talk.close()
            os.close(reader)
            raise ShellError(f"{dialect.path} cannot be started: {exc.strerror or exc}") from exc
        finally:
            theirs.close()
            os.close(aside)
        self._talk.setblocking(False)
        with suppress(AttributeError, OSError):
            self._watch = os.pidfd_open(self._process.pid)

    def begin(self, code: bytes | None) -> Done:
        """Wait until the shell answers; with ``code``, the state of another one, until it is the same."""
        found = self._order(self._dialect.greeting)
        return found if code is None else self._order(self._dialect.restore(code))

    def _order(self, order: bytes) -> Done:
        found = self._exchange(order, (), START, processes.now(), frozenset())
        if not isinstance(found, Done):
            raise ShellError(f"{self._dialect.path} does not answer")
        return found

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, command: bytes, last: int, timeout: float) -> tuple[Outcome, Stream, Stream]:
        """Run one command. ``last`` is the exit code of the one before."""
        out, err = self._pipes.make()
        since, keep = processes.now(), processes.children(self._process.pid)
        order = self._dialect.order(command, last, os.fsencode(out.path), os.fsencode(err.path))
        streams = Stream(out.reader), Stream(err.reader)
        try:
            outcome = self._exchange(order, streams, timeout, since, keep)
            if isinstance(outcome, Ended):
                streams[0].drain()
                streams[0].add(self._aside.take())
        finally:
            for pipe, stream in ((out, streams[0]), (err, streams[1])):
                stream.drain()
                os.close(pipe.writer)
                stream.release()
        return outcome, *streams

    def _exchange(
        self, order: bytes, streams: Sequence[Stream], timeout: float, since: int, keep: frozenset[int]
    ) -> Outcome:
        """Send an order and wait for the answer, the end of the shell or the end of the time."""
        deadline = time.monotonic() + timeout
        self._forget()
        readers = {stream.descriptor: stream for stream in (*streams, self._aside)}
        talk = self._talk.fileno()
        poller = select.poll()
        for descriptor in readers:
            poller.register(descriptor, select.POLLIN)
        poller.register(talk, select.POLLIN | select.POLLOUT)
        if self._watch is not None:
            poller.register(self._watch, select.POLLIN)
        unsent, listening = memoryview(order), True
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return self._time_out(since, keep)
            ended = self._watch is None and not self.alive
            wait = min(left, _LONGEST_WAIT if self._watch is not None else _TICK)
            for descriptor, event in poller.poll(0 if ended else wait * 1000 + 1):
                if descriptor in readers:
                    if not readers[descriptor].read():
                        poller.unregister(descriptor)
                elif descriptor == self._watch:
                    ended = True
                elif event & ~select.POLLOUT:
                    listening = self._listen()
                    if not listening:
                        poller.unregister(talk)
                elif unsent:
                    unsent = unsent[self._say(unsent) :]
                    if not unsent:
                        poller.modify(talk, select.POLLIN)
            if ended:
                self._listen()
            if self._fields.first == AGAIN and listening:
                self._fields.take(1)
                unsent = memoryview(self._dialect.greeting)
                poller.modify(talk, select.POLLIN | select.POLLOUT)
            if found := self._answer():
                return found
            if ended:
                return self._end()

    def _forget(self) -> None:
        """What was said before this order cannot be an answer to it."""
        self._listen()
        self._fields = _Fields()
        self._aside.drain()
        self._aside.take()

    def _say(self, data: memoryview) -> int:
        try:
            return self._talk.send(data[:CHUNK])
        except BlockingIOError:
            return 0
        except OSError:  # it has ended; that is noticed by itself
            return len(data)

    def _listen(self) -> bool:
        """Take what the shell says; False when nobody can say anything any more."""
        try:
            while data := self._talk.recv(CHUNK):
                self._fields.feed(data)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def _answer(self) -> Done | None:
        if self._fields.first != DONE or not (fields := self._fields.take(4)):
            return None
        _, status, directory, state = fields
        if status is None or directory is None or not status.isdigit():
            return None
        return Done(int(status), os.fsdecode(directory.removesuffix(b"\n")), state)

    def _end(self) -> Ended:
        deaf = self._fields.first == DEAF
        self._aside.drain()
        self._process.wait()
        self.close()
        code = self._process.returncode
        return Ended(128 - code if code < 0 else code, deaf)

    def _time_out(self, since: int, keep: frozenset[int]) -> TimedOut:
        clean = processes.end(self._process.pid, self._mark, since=since, keep=keep)
        self.close()
        return TimedOut(clean)

    @property
    def pid(self) -> int | None:
        """The shell's number, as long as it is the shell's own."""
        return self._process.pid if self._process.returncode is None else None

    def tidy(self) -> None:
        """Leave no files behind, until the next command."""
        self._pipes.close()

    def close(self) -> None:
        """Let go of the shell; it ends by itself when it lives."""
        self._talk.close()
        if self._watch is not None:
            os.close(self._watch)
            self._watch = None
        self._aside.close()
        self._pipes.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(START)


class _Pipe(NamedTuple):
    path: str
    reader: int
    writer: int
    """Ours, so that the pipe does not seem to end before the command does."""


class _Pipes:
    """Named pipes for the output of each command, by which a running shell can be given new ones.

    They are new for every command: what an earlier one left in the background does not print into later answers.
    """

    def __init__(self) -> None:
        self._directory: str | None = None
        self._paths: tuple[str, ...] = ()
        self._count = 0

    def make(self) -> tuple[_Pipe, _Pipe]:
        try:
            self._renew()
        except OSError as exc:
            if not all(map(os.path.exists, self._paths)) or not self._paths:  # on a full disk, the old ones will do
                raise ShellError(f"there is no place for the shell's pipes: {exc.strerror or exc}") from exc
        made: list[_Pipe] = []
        try:
            for path in self._paths:
                reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                made.append(_Pipe(path, reader, -1))
                made[-1] = _Pipe(path, reader, os.open(path, os.O_WRONLY))
        except OSError as exc:
            for descriptor in (end for pipe in made for end in (pipe.reader, pipe.writer) if end >= 0):
                os.close(descriptor)
            raise ShellError(f"the shell's pipes cannot be opened: {exc.strerror or exc}") from exc
        return made[0], made[1]

    def _renew(self) -> None:
        if self._directory is None or not os.path.isdir(self._directory):
            self._directory = _private_directory()
            self._paths = ()
        self._count += 1
        paths = tuple(os.path.join(self._directory, f"{name}{self._count}") for name in ("out", "err"))
        for path in paths:
            os.mkfifo(path, 0o600)
        for path in self._paths:
            with suppress(OSError):
                os.unlink(path)
        self._paths = paths

    def close(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def _private_directory() -> str:
    """Under the same name in every sandbox that has a /tmp of its own, since a command may list it."""
    name = f".mini-terminal-{os.getpid()}"
    path = os.path.join(tempfile.gettempdir(), name)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return tempfile.mkdtemp(prefix=f"{name}-")
    return path
