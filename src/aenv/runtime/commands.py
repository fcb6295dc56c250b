"""A command of the owner's, run inside the sandbox: bounded output, a time-out, and nothing of it left behind."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Annotated

import msgspec
from msgspec import Meta

from aenv import config
from aenv.cleanup import finish
from aenv.errors import AEnvError, Invalid, NotFound, StorageFull, TooLarge
from aenv.models import ExecResult
from aenv.runtime import trusted

MOST_OUTPUT = 1024 * 1024
"""Bytes of each stream that are kept. The rest is read and dropped, so that the command does not block."""
_PIECE = 64 * 1024
_PAUSE = 0.05
"""Seconds between two looks at what a command left running prints."""
_SHOWN = 200
"""Characters of a program's name in an error."""
_FAULTS: dict[int, type[AEnvError]] = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOEXEC), Invalid),
    errno.E2BIG: TooLarge,
    errno.ENOSPC: StorageFull,
}
"""Whose fault it is that a command does not start; the sandbox's where nothing is said."""


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to run."""

    command: str | Annotated[list[str], Meta(min_length=1)]
    """Arguments, the program first; or a line for ``/bin/sh``."""
    timeout: Annotated[float, Meta(gt=0, le=1e9)] = 60.0
    directory: str | None = None
    """Where it runs: under the work directory when relative, in the work directory when not given."""
    stdin: str | None = None

    @property
    def argv(self) -> list[str]:
        return ["/bin/sh", "-c", self.command] if isinstance(self.command, str) else self.command


async def run(command: Command, work_directory: Path) -> ExecResult:
    """Run a command to its end. When its time is over or the call is cancelled, its process group is killed.

    What it leaves running in the background goes on, and may keep its output open: nobody waits for that.
    """
    process = _start(command, work_directory / (command.directory or "."))
    out, err = _Output(process.stdout), _Output(process.stderr)
    timed_out = False
    try:
        try:
            async with asyncio.timeout(command.timeout):
                await exited(process)
        except TimeoutError:
            timed_out = process.poll() is None
        finally:
            if process.poll() is None:
                await finish(_kill(process))
        stdout, stderr = out.text(), err.text()
    finally:
        out.let_go()
        err.let_go()
    return ExecResult(
        returncode=process.returncode,
        stdout=stdout,
        stderr=stderr,
        truncated=out.truncated or err.truncated,
        timed_out=timed_out,
    )


def _start(command: Command, directory: Path) -> subprocess.Popen[bytes]:
    program = command.argv[0][:_SHOWN]
    try:
        with _stdin(command.stdin) as stdin:
            return subprocess.Popen(
                command.argv,
                cwd=directory,
                env=config.environment(),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
    except (FileNotFoundError, NotADirectoryError) as exc:
        if not directory.is_dir():
            raise NotFound(f"{program!r} cannot be run in {directory}: there is no such directory") from None
        raise NotFound(f"{program!r} cannot be run: {exc.strerror}", hint="a line of shell is given as text") from None
    except OSError as exc:
        kind = _FAULTS.get(exc.errno or 0, AEnvError)
        raise kind(f"{program!r} cannot be run: {exc.strerror or exc}") from None
    except ValueError as exc:
        raise Invalid(f"{program!r} cannot be run: {exc}") from None


def _stdin(text: str | None) -> IO[bytes]:
    """A file and not a pipe: whether and when the command reads it concerns nobody."""
    if not text:
        return open(os.devnull, "rb")
    with trusted.imports():
        import tempfile  # it brings every compression library, which few sandboxes ever need

    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        file.write(text.encode())
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


async def exited(process: subprocess.Popen[bytes]) -> None:
    """Wait until the process itself has ended, whoever still has its output open."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def tell() -> None:
        if not ended.done():
            ended.set_result(None)

    def wait() -> None:
        process.wait()
        with suppress(RuntimeError):  # the loop is closed: the sandbox has ended
            loop.call_soon_threadsafe(tell)

    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # not on this system, or not in this jail
        threading.Thread(target=wait, name="aenv-exec", daemon=True).start()
        await ended
        return
    loop.add_reader(descriptor, tell)
    try:
        await ended
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    process.wait()


async def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await exited(process)


class _Output:
    """One stream of a command, read as it comes."""

    def __init__(self, pipe: IO[bytes] | None) -> None:
        assert pipe is not None
        self._pipe = pipe
        self._kept = bytearray()
        self._wanted = True
        self.truncated = False
        os.set_blocking(pipe.fileno(), False)
        self._loop = asyncio.get_running_loop()
        self._listen()

    def _listen(self) -> None:
        self._loop.add_reader(self._pipe.fileno(), self._readable)

    def _readable(self) -> None:
        self._read()
        if not self._wanted and not self._pipe.closed:  # a flood from the background is not worth the loop's time
            self._loop.remove_reader(self._pipe.fileno())
            self._loop.call_later(_PAUSE, self._listen)

    def _read(self) -> int:
        """Take what is there; how much that was."""
        piece = self._pipe.read(_PIECE)
        if piece is None:
            return 0
        if not piece:
            self._loop.remove_reader(self._pipe.fileno())
            self._pipe.close()
        elif self._wanted:
            room = MOST_OUTPUT - len(self._kept)
            self._kept += piece[:room]
            self.truncated = self.truncated or len(piece) > room
        return len(piece)

    def text(self) -> str:
        """What was written until now."""
        left = MOST_OUTPUT
        while left > 0 and not self._pipe.closed and (taken := self._read()):
            left -= taken
        return self._kept.decode(errors="replace")

    def let_go(self) -> None:
        """Keep no more. Who still writes is read and ignored, and so neither blocks nor breaks."""
        self._wanted = False
        self._kept.clear()
