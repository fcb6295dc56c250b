"""A live agent, and a client that speaks to it byte by byte."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from aenv.runtime.frames import Frames, frames

PATIENCE = 60.0


def until(holds: Callable[[], object], what: str = "it") -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not come about within {PATIENCE:g} s"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Agent:
    """A live one, as a process of this machine."""

    def __init__(self, process: subprocess.Popen[bytes], path: Path) -> None:
        self.process = process
        self.path = path

    def connect(self) -> Wire:
        return Wire(self.path)

    def run(self, *command: str, **how: object) -> Done:
        with self.connect() as wire:
            wire.command(*command, **how)  # type: ignore[arg-type]
            return wire.end()

    @property
    def memory(self) -> int:
        """The most bytes it had, ever."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def children(self) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in found if alive(child.pid)]


class Done:
    """What a command did."""

    def __init__(self) -> None:
        self.stdout = bytearray()
        self.stderr = bytearray()
        self.size: int | None = None
        self.code: int | None = None
        self.timed_out = False
        self.errno = 0
        self.stage = ""


class Wire:
    """One connection."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(PATIENCE)
        self._socket.connect(str(path))
        self._frames = Frames()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def raw(self, data: bytes) -> None:
        self._socket.sendall(data)

    def send(self, kind: str, data: bytes = b"") -> None:
        self.raw(frames(kind.encode(), data))

    def number(self, kind: str, value: int, form: str = "!Q") -> None:
        self.send(kind, struct.pack(form, value))

    def command(
        self,
        *command: str,
        timeout: float | None = None,
        variables: Sequence[str] = (),
        directory: str | None = None,
        terminal: tuple[int, int] | None = None,
        input: bytes | None = b"",
    ) -> None:
        """Say what to run. Input is sent with it; None leaves it open."""
        self.send("a", b"".join(os.fsencode(part) + b"\0" for part in command))
        if variables:
            self.send("v", b"".join(part.encode() + b"\0" for part in variables))
        if directory is not None:
            self.send("d", directory.encode())
        if timeout is not None:
            self.number("t", round(timeout * 1000))
        if terminal is not None:
            self.send("p", struct.pack("!HH", *terminal))
        if input == b"" and terminal is None:
            self.send("e")
        self.send("s")
        if input:
            self.send("i", input)
            self.send("e")

    def raw_answer(self) -> bytes:
        """What comes next, as it is."""
        data = self._socket.recv(1 << 20)
        assert data, "the agent hung up"
        return data

    def hear(self) -> list[tuple[bytes, bytes]]:
        """What comes next; nothing at the end."""
        while data := self._socket.recv(1 << 16):
            if found := list(self._frames.feed(data)):
                return found
        return []

    def quiet(self, seconds: float) -> bool:
        """Whether nothing comes for so long."""
        return not select.select([self._socket], [], [], seconds)[0]

    def take(self, done: Done, keep: bool = True) -> bool:
        """Add what comes next to what is known; whether that was the last."""
        found = self.hear()
        assert found, "the agent hung up"
        for kind, data in found:
            if kind == b"o":
                done.stdout += data if keep else b""
            elif kind == b"r":
                done.stderr += data
            elif kind == b"z":
                done.size = int.from_bytes(data, "big")
            elif kind == b"x":
                done.code, done.timed_out = struct.unpack("!i?", data)
            else:
                assert kind == b"f", kind
                number, stage = struct.unpack_from("!Ic", data)
                done.errno, done.stage = number, stage.decode()
                assert data[5:].decode() == os.strerror(done.errno)
        return found[-1][0] in b"xf"

    def end(self) -> Done:
        """Everything until the end."""
        done = Done()
        while not self.take(done):
            pass
        return done

    def until(self, text: bytes, done: Done) -> None:
        while text not in done.stdout:
            assert not self.take(done), f"it ended, and {text!r} never came: {done.stdout!r}"


def listens(path: Path) -> bool:
    """Whether somebody answers at the socket."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
        return True


@contextlib.contextmanager
def running(command: Sequence[str | Path], path: Path, **how: object) -> Iterator[Agent]:
    """An agent until the block ends."""
    process = subprocess.Popen([*command, path], **how)  # type: ignore[call-overload]
    agent = Agent(process, path)
    try:
        until(lambda: listens(path), "the agent")
        yield agent
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
