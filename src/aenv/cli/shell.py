"""A person's terminal, or what stands in its place, joined to a shell in an instance."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from aenv import config
from aenv.cli.output import say
from aenv.client.shell import Shell, Window, shell
from aenv.errors import AEnvError, Conflict, Forbidden, NetworkError, SandboxLost
from aenv.models import State

if TYPE_CHECKING:
    from aenv.client.api import ApiClient
    from aenv.wire import Instance

_PIECE = 64 * 1024
_LOOK = 5.0
"""Seconds in which a platform must say what became of an instance."""
_ESCAPE = (b"\r~.", b"\n~.")
"""What ends it from this side, whatever the other does: a new line, a tilde and a dot, as in ssh."""


async def join(api: ApiClient, id: str, command: Sequence[str]) -> int:
    """Run a shell, or a command, in an instance, with this terminal. The exit code is the shell's."""
    found = await api.get(id)
    _usable(found)
    terminal = _Terminal()
    async with shell(found.url, found.owner_token, command, terminal.window) as opened:
        try:
            with terminal.raw():
                code = await _joined(opened, terminal)
        except (SandboxLost, NetworkError) as exc:
            raise await _why(api, id, exc) from exc
    if code is None:
        say("left, and the shell is ended")
        return 128 + signal.SIGHUP
    return code if code >= 0 else 128 - code


def _usable(found: Instance) -> None:
    if found.status in (State.FAILED, State.TERMINATED):
        raise SandboxLost(f"{found.id} has ended{f': {found.reason}' if found.reason else ''}")
    if found.status != State.RUNNING or not found.url:
        raise Conflict(f"{found.id} is not running yet: it is {found.status.lower()}", hint="try again in a moment")
    if not found.owner_token:
        raise Forbidden(f"{found.id} is not yours: only its owner may have a shell in it")


async def _why(api: ApiClient, id: str, error: AEnvError) -> AEnvError:
    """What became of the instance, where that is why the shell ended."""
    try:
        async with asyncio.timeout(_LOOK):
            _usable(await api.get(id))
    except AEnvError as exc:
        return exc
    except TimeoutError:
        pass
    return error


async def _joined(opened: Shell, terminal: _Terminal) -> int | None:
    """How the shell ended; None when the user left."""
    typing = asyncio.create_task(_type(opened, terminal))
    printing = asyncio.create_task(_print(opened))
    try:
        with terminal.resized(lambda: _resize(opened, terminal)):
            await asyncio.wait((typing, printing), return_when=asyncio.FIRST_COMPLETED)
            if typing.done() and not printing.done():
                if typing.result():
                    return None
                await printing
        printing.result()
    finally:
        for task in (typing, printing):
            task.cancel()
        await asyncio.wait((typing, printing))
    return opened.code


async def _type(opened: Shell, terminal: _Terminal) -> bool:
    """Pass on what is typed, until that ends; whether the user wants to leave."""
    line = b"\n"
    try:
        async for piece in terminal.pieces():
            if terminal.window is not None:
                line = (line + piece)[-_PIECE:]
                if any(escape in line for escape in _ESCAPE):
                    return True
                line = line[-2:]
            await opened.type(piece)
        await opened.end_input()
    except NetworkError:
        pass  # who reads hears why
    return False


async def _print(opened: Shell) -> None:
    async for printed in opened:
        _write(2 if printed.is_error else 1, printed.data)


async def _resize(opened: Shell, terminal: _Terminal) -> None:
    if (window := terminal.window) is not None:
        with suppress(NetworkError):
            await opened.resize(window.rows, window.columns)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # whoever shares it made it so
            select.select([], [descriptor], [])


class _Terminal:
    """Standard input and output of this command."""

    def __init__(self) -> None:
        self._is_one = os.isatty(0) and os.isatty(1)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def window(self) -> Window | None:
        """Its size, when it is a terminal."""
        if not self._is_one:
            return None
        kind = config.environment().get("TERM", "")
        try:
            size = os.get_terminal_size(1)
        except OSError:
            return Window(24, 80, kind)
        return Window(size.lines, size.columns, kind)

    @contextmanager
    def raw(self) -> Iterator[None]:
        """Every key goes to the shell, for the length of a block. However that ends, the terminal is as it was."""
        if not self._is_one:
            yield
            return
        import termios
        import tty

        before = termios.tcgetattr(0)
        try:
            tty.setraw(0, termios.TCSADRAIN)  # what was typed already is the shell's, too
            yield
        finally:
            termios.tcsetattr(0, termios.TCSADRAIN, before)

    @contextmanager
    def resized(self, tell: Callable[[], Coroutine[Any, Any, None]]) -> Iterator[None]:
        """Whenever the window gets another size, ``tell`` is run."""
        if not self._is_one:
            yield
            return
        loop = asyncio.get_running_loop()

        def changed() -> None:
            task = loop.create_task(tell())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        loop.add_signal_handler(signal.SIGWINCH, changed)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGWINCH)

    async def pieces(self) -> AsyncIterator[bytes]:
        """What comes in, until it ends."""
        while True:
            with suppress(PermissionError):  # a file is always ready
                await _readable(0)
            try:
                data = os.read(0, _PIECE)
            except BlockingIOError:
                continue
            except OSError:  # the terminal is gone
                return
            if not data:
                return
            yield data


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def tell() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(descriptor, tell)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)
