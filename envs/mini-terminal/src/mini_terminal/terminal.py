"""The terminal of a sandbox: a shell that is always there, whatever its commands do to it."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from aenv import Unsupported
from mini_terminal import processes
from mini_terminal.capture import Text
from mini_terminal.dialects import Dialect, find
from mini_terminal.shell import MOST_STATE, Done, Ended, Shell, ShellError, TimedOut

LONGEST = 1024 * 1024
"""Most bytes of one command."""
TIMED_OUT = 124
"""Exit code of a command that took too long, as of ``timeout``."""
_DECLARED = re.compile(rb"^(?:declare -[-\w]+ )?(\w+)(?:=|$)", re.MULTILINE)
"""A variable in a shell's state, as either shell writes it."""
_GRACE = 0.25
"""Seconds for programs that were told to end, at most; one that was just started has its name by then."""
_NAMED = 3
"""Most programs in the background that a message names."""
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


class Answer(NamedTuple):
    """What became of a command."""

    stdout: Text
    stderr: Text
    returncode: int
    finished: bool
    note: str
    """What the exit code does not say; empty when there is nothing."""


class Kept(NamedTuple):
    """What makes another terminal go on in the place of one, where the files are the same."""

    directory: str | None
    """None before the first command; then nothing else counts."""
    state: bytes
    status: int
    mark: str


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
        code = self._code(dialect, home, environment, notes)
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

    def _code(self, dialect: Dialect, home: str, environment: Mapping[str, str], notes: list[str]) -> bytes | None:
        """What makes a new shell as the last one was."""
        if self._directory is None:
            return None
        state = self._state or b""
        if self._state is not None and (gone := _gone(environment, state)):
            state = b"%sunset -v %s\n%s" % (dialect.escape, b" ".join(gone), state)
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

    def save(self) -> Kept:
        """What another terminal must know to go on in the place of this one, which goes on as well."""
        if not self._running.acquire(blocking=False):
            raise Unsupported("a command is under way", hint="wait for its answer first")
        try:
            shell = self._shell if self._shell is not None and self._shell.alive else None
            self._check_alone(shell)
            if self._directory is None:
                return Kept(None, b"", 0, self._mark)
            if self._state is None:
                raise Unsupported(f"the shell holds over {MOST_STATE} bytes of variables and functions")
            if not _is_in(shell, self._directory):
                raise Unsupported(f"the directory that the shell is in is gone: {self._directory}")
            if shell is not None:
                shell.tidy()
            return Kept(self._directory, self._state, self._status, self._mark)
        finally:
            self._running.release()

    def _check_alone(self, shell: Shell | None) -> None:
        """Nothing that a command has started goes on: no other sandbox could have it."""
        deadline = time.monotonic() + _GRACE
        while (found := processes.others(shell.pid if shell else None, self._mark)) and time.monotonic() < deadline:
            time.sleep(_GRACE / 20)
        if found is None:
            raise Unsupported("this machine does not say which programs run")
        if found:
            more = f", and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            shown = ", ".join(f"{processes.title(pid)} ({pid})" for pid in found[:_NAMED])
            raise Unsupported(f"programs still run in the background: {shown}{more}", hint="let them end first")

    def load(self, kept: Kept, directory: str, environment: Mapping[str, str]) -> None:
        """Go on in the place of another terminal. ``directory`` and ``environment`` are as for ``run``.

        The shell is started here, and not by the next command: whoever asked must know when it cannot be the same.
        """
        self.end()
        if kept.directory is None:
            return
        with self._running:
            if self._closed:
                raise ShellError("the sandbox is ending")
            self._directory, self._state, self._status = kept.directory, kept.state, kept.status
            if kept.mark != self._mark and (dialect := self._find()) is not None:
                self._state += b"\n%sexport %s=%s" % (dialect.escape, processes.MARK.encode(), self._mark.encode())
            _, note = self._ready(directory, environment)
        if note:
            self.end()
            raise Unsupported(note)

    @property
    def _mark(self) -> str:
        """What tells our processes from others': no two sandboxes that see each other have the same number."""
        return str(os.getpid())


def _gone(environment: Mapping[str, str], state: bytes) -> list[bytes]:
    """The variables that a new shell is given and that the one with this state had no more."""
    declared = set(_DECLARED.findall(state))
    given = {"LANG", *environment}
    return [name.encode() for name in given if _NAME.fullmatch(name) and name.encode() not in declared]


def _is_in(shell: Shell | None, directory: str) -> bool:
    """Whether a directory is there, and is not another that came after the one that the shell is in."""
    own = f"/proc/{shell.pid}/cwd" if shell else ""
    return os.path.isdir(directory) and (not os.path.exists(own) or os.path.samefile(own, directory))


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
