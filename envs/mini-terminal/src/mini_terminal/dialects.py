"""What is said to a shell, in bash and in the language that every shell knows.

A shell reads its orders from descriptor 0, a socket, and answers there: nothing that a command prints can be taken for
an answer, and no program inherits the socket, since a command's own input is /dev/null. An answer is

    D NUL exit-code NUL directory NUL state NUL

where ``state`` is shell code that makes another shell the same: options, variables, functions, aliases, traps.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from typing import ClassVar

DONE = b"D"
AGAIN = b"B"
"""A ``break`` of the command's ended the loop in which the shell waits for orders."""
DEAF = b"X"
"""The shell could not open the pipes for the command's output, and ends."""
_QUIET = b" </dev/null >/dev/null 2>&1"


class Dialect(ABC):
    """A shell, and how to speak with it."""

    name: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()
    escape: ClassVar[bytes]
    """Before the name of a builtin: that command, whatever functions and aliases there are."""
    greeting: ClassVar[bytes]
    """The first order; the shell answers it."""

    def __init__(self, path: str) -> None:
        self.path = path

    @abstractmethod
    def order(self, command: bytes, last: int, out: bytes, err: bytes) -> bytes:
        """Run a command whose output goes to the pipes ``out`` and ``err``. ``last`` is what it finds in ``$?``."""

    @abstractmethod
    def restore(self, code: bytes) -> bytes:
        """Become what another shell was; ``code`` is its state."""

    @abstractmethod
    def quote(self, text: bytes) -> bytes:
        """One word."""

    def _run(self, command: bytes, last: int, out: bytes, err: bytes) -> bytes:
        escape = self.escape
        out, err = self.quote(out), self.quote(err)
        run = b"%seval %s </dev/null >%s 2>%s" % (escape, self.quote(command), out, err)
        if last:  # a function that is gone when it returns, since a subshell would need one more process
            name = b"__mini_terminal"
            told = b"%s() { %sunset -f %s; %sreturn %d; }" % (name, escape, name, escape, last)
            run = b"%s; %s || %s" % (told, name, run)
        return b"%strue >%s 2>%s || { %sprintf 'X\\0' >&0; %sexit 125; }; %s" % (escape, out, err, escape, escape, run)


class Bash(Dialect):
    """A loop reads orders, so that every command begins at line 1 of what the shell counts."""

    name = "bash"
    options = ("--norc", "--noprofile")
    escape = rb"\builtin "
    _report = rb"""\builtin printf 'D\0%s\0' "$?" >&0 || \builtin exit 125; """ + b"".join(
        rb"\builtin %s >&0; " % part
        for part in (
            b"pwd",
            rb"printf '\0'",
            b"shopt -p",
            b"umask -p",
            b"declare -p",
            rb"printf '\\builtin set --'",
            rb"""printf -- "${1+ %q}" ${1+"$@"}""",
            rb"printf '\n'",
            b"declare -f",
            b"declare -F",  # which of them are exported
            b"alias -p",
            b"trap -p",
            b"set +o",
            rb"printf '\0'",
        )
    )
    greeting = (
        rb"""\builtin shopt -s expand_aliases; while %s IFS= \builtin read -r -d '' -u 0 __mini_terminal; """
        rb"""do \builtin eval "$__mini_terminal"; done; \builtin printf 'B\0' >&0""" % _report
    ) + b"\n"

    def order(self, command: bytes, last: int, out: bytes, err: bytes) -> bytes:
        run = self._run(command, last, out, err)
        return rb"\builtin unset -v __mini_terminal; " + run + b"\0"

    def restore(self, code: bytes) -> bytes:
        return rb"\builtin unset -v __mini_terminal; \builtin eval " + self.quote(code) + _QUIET + b"\0"

    def quote(self, text: bytes) -> bytes:
        """On one line, or what follows would be counted as further lines."""
        escaped = text.replace(b"\\", b"\\\\").replace(b"'", b"\\'").replace(b"\n", b"\\n")
        return b"$'" + escaped + b"'"


class Posix(Dialect):
    """Orders are lines that the shell reads itself. It cannot tell its functions and aliases."""

    name = "sh"
    escape = rb"\command "  # it also keeps a mistake in what is evaluated from ending the shell
    _report = rb"""; \command printf 'D\0%s\0' "$?" >&0 || exit 125""" + b"".join(
        rb"; \command %s >&0" % part
        for part in (
            b"pwd",
            rb"printf '\0'",
            b"printf 'umask '",
            b"umask",
            b"set",
            b"export -p",
            b"trap",
            b"set +o",
            rb"printf '\0'",
        )
    )
    greeting = b":" + _report + b"\n"

    def order(self, command: bytes, last: int, out: bytes, err: bytes) -> bytes:
        return self._run(command, last, out, err) + self._report + b"\n"

    def restore(self, code: bytes) -> bytes:
        return rb"\command eval " + self.quote(code) + _QUIET + self._report + b"\n"

    def quote(self, text: bytes) -> bytes:
        return b"'" + text.replace(b"'", b"'\\''") + b"'"


def find() -> Dialect | None:
    """The shell of this machine: bash, else sh; None when there is neither."""
    for kind in (Bash, Posix):
        places = (f"{folder}/{kind.name}" for folder in ("/bin", "/usr/bin", "/usr/local/bin"))
        found = shutil.which(kind.name) or next((path for path in places if os.access(path, os.X_OK)), None)
        if found:
            return kind(found)
    return None
