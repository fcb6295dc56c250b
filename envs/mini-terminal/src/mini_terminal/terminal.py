"""The terminal of a sandbox: a shell that is always there, whatever its commands do to it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from mini_terminal import processes
from mini_terminal.capture import Text
from mini_terminal.dialects import Dialect, find
from mini_terminal.shell import Done, Ended, Shell, ShellError, TimedOut

LONGEST = 1024 * 1024
"""Most bytes of one command."""
TIMED_OUT = 124
"""Exit code of a command that took too long, as of ``timeout``."""


class Answer(NamedTuple):
    """What became of a command."""

    stdout: Text
    stderr: Text
    returncode: int
    finished: bool
    note: str
    """What the exit code does not say; empty when there is nothing."""


class Terminal:
    """One shell at a time, one command at a time. It is started by the first command.

    Whatever ends the shell, the next command finds the directory, variables, functions and options from before the
    command that ended it.
    """

    def __init__(self, find: Callable[[], Dialect | None] = find) -> None:
        self._find = find
        self._running = threading.Lock()
        self._shell: Shell | None = None
        self._directory: str | None = None
        self._state: bytes | None = None
        self._status = 0
        self._used = False
        self._ending = False
        self._closed = False

    @property
    def directory(self) -> str | None:
        """Where the shell is; None before the first command."""
        return self._directory

    @property
    def busy(self) -> bool:
        return self._running.locked()

    def run(self, command: str, timeout: float, directory: str, environment: Mapping[str, str]) -> Answer:
        """Run a command, once those before it are done. ``directory`` and ``environment`` are for a first shell."""
        order = _encoded(command)
        with self._running:
            if self._closed:
                raise ShellError("the sandbox is ending")
            shell, begun = self._ready(directory, environment)
            outcome, out, err = shell.run(order, self._status, timeout)
            notes = [begun, self._settle(outcome, timeout)]
        stdout, stderr = out.text(), err.text()
        for name, text in (("stdout", stdout), ("stderr", stderr)):
            if text.truncated:
                notes.append(f"{name} was too long: its middle is left out")
            if text.binary:
                notes.append(f"{name} had bytes that are not UTF-8: each is shown as \N{REPLACEMENT CHARACTER}")
        note = "; ".join(filter(None, notes))
        returncode = TIMED_OUT if isinstance(outcome, TimedOut) else outcome.returncode
        return Answer(stdout, stderr, returncode, not isinstance(outcome, TimedOut), note)

    def _ready(self, directory: str, environment: Mapping[str, str]) -> tuple[Shell, str]:
        """The shell, and a note when it is not the one that the last command ran in."""
        died = self._shell is not None and not self._shell.alive
        if self._shell is not None and not died:
            return self._shell, ""
        if self._shell is not None:
            self._shell.close()
            self._shell = None
        dialect = self._find()
        if dialect is None:
            raise ShellError("this machine has neither bash nor sh")
        notes = ["the shell had ended and was started again"] if died else []
        home = directory if os.path.isdir(directory) else "/"
        code = self._code(dialect, home, notes)
        self._used = True
        shell = self._start(dialect, home, environment, notes)
        try:
            found = shell.begin(code)
        except ShellError:
            if code is None:
                raise
            shell = self._start(dialect, home, environment, notes)
            found = shell.begin(None)
            notes.append("the shell could not be made as it was: its variables are gone")
        self._shell, self._directory, self._state = shell, found.directory, found.state
        return shell, "; ".join(filter(None, notes))

    def _start(self, dialect: Dialect, home: str, environment: Mapping[str, str], notes: list[str]) -> Shell:
        try:
            return Shell(dialect, home, environment, self._mark)
        except ShellError as exc:
            if not isinstance(exc.__cause__, OSError) or exc.__cause__.errno not in (errno.EAGAIN, errno.ENOMEM):
                raise
        # Without this, what runs in the background could keep the terminal from ever coming back.
        processes.end(None, self._mark)
        notes.append("no more processes could be started, so those in the background were ended")
        return Shell(dialect, home, environment, self._mark)

    def _code(self, dialect: Dialect, home: str, notes: list[str]) -> bytes | None:
        """What makes a new shell as the last one was."""
        if self._directory is None:
            return None
        state = self._state or b""
        if os.path.isdir(self._directory):
            return b"cd -- %s\n%s" % (dialect.quote(os.fsencode(self._directory)), state)
        notes.append(f"{self._directory} is gone, so the shell is in {home}")
        return b"%s\ncd -- %s" % (state, dialect.quote(os.fsencode(home)))

    def _settle(self, outcome: Done | Ended | TimedOut, timeout: float) -> str:
        """Keep what the next command needs; what to say about this one."""
        if isinstance(outcome, Done):
            self._status, self._directory, self._state = outcome
            return ""
        self._shell = None
        kept = "the directory and variables from before it are kept"
        if self._state is None:
            kept = "its variables were too long to be kept, and are gone"
        if isinstance(outcome, TimedOut):
            self._status = TIMED_OUT
            rest = "" if outcome.clean else "; some of its processes could not be ended"
            return f"the command took longer than {timeout:g} s and was ended; {kept}{rest}"
        self._status = outcome.returncode
        if self._ending:
            return "the command was ended, and the shell with it, by a reset or the end of the sandbox"
        if outcome.deaf:
            return f"the command did not run: the shell could open no more files, and was started again; {kept}"
        return f"the command ended the shell, which was started again; {kept}"

    def end(self, *, for_good: bool = False) -> bool:
        """End the shell and every process that it started, and forget it; a command that runs is ended, too.

        False when something could not be ended.
        """
        self._ending = True
        self._closed = self._closed or for_good
        while not self._running.acquire(timeout=0.1):
            shell = self._shell
            if shell is not None:
                processes.end(shell.pid, self._mark)
        try:
            clean = not self._used or processes.end(self._shell.pid if self._shell else None, self._mark)
            if self._shell is not None:
                self._shell.close()
            self._shell = self._directory = self._state = None
            self._status, self._used = 0, False
        finally:
            self._ending = False
            self._running.release()
        return clean

    @property
    def _mark(self) -> str:
        """What tells our processes from others': no two sandboxes that see each other have the same number."""
        return str(os.getpid())


def _encoded(command: str) -> bytes:
    try:
        order = command.encode()
    except UnicodeEncodeError as exc:
        raise ValueError("the command holds half of a surrogate pair, which no program could read") from exc
    if b"\0" in order:
        raise ValueError("the command holds a NUL character, which no shell can read")
    if len(order) > LONGEST:
        raise ValueError(
            f"the command has {len(order)} bytes and {LONGEST} is the most; put the text into a file with write_file"
        )
    return order
