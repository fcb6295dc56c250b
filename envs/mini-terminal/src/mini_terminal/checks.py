"""Checks that score a task: files as they should be, and commands that succeed."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from aenv import ToolError
from mini_terminal import processes
from mini_terminal.capture import Stream
from mini_terminal.dialects import find
from mini_terminal.files import opened

MOST_FILE = 64 * 1024 * 1024
"""Most bytes of a file that a check reads."""
MOST_TIME = 600.0
_PIECE = 1024 * 1024
_SHOWN = 400
"""Most characters of a command's output that a reason quotes."""


@dataclass
class Check:
    """One thing that must hold. Paths are relative to the sandbox's work directory, wherever the agent's shell is."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["file_exists", "file_contains", "file_equals", "command"]
    path: str = ""
    text: str | None = None
    """What the file must contain or equal."""
    command: str = ""
    """It must end with exit code 0."""
    output: str | None = None
    """Text that the command must also have printed."""
    timeout: float = 30.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        about_file = self.kind != "command"
        wants_text = self.kind in ("file_contains", "file_equals")
        if about_file != bool(self.path):
            raise ValueError(f"{self.kind} {'needs a path' if about_file else 'takes no path'}")
        if about_file == bool(self.command.strip()):
            raise ValueError(f"{self.kind} {'takes no command' if about_file else 'needs a command'}")
        if wants_text != (self.text is not None):
            raise ValueError(f"{self.kind} {'needs a text' if wants_text else 'takes no text'}")
        if self.kind == "file_contains" and not self.text:
            raise ValueError("every file contains the empty text")
        if about_file and self.output is not None:
            raise ValueError(f"{self.kind} takes no output")
        if not 0 < self.timeout <= MOST_TIME:
            raise ValueError(f"timeout must be over 0 and at most {MOST_TIME:g} seconds")
        if not 0 < self.weight < float("inf"):
            raise ValueError("weight must be over 0")


class Verdict(NamedTuple):
    passed: bool
    why: str


def judge(check: Check, directory: str, environment: Mapping[str, str]) -> Verdict:
    """Whether a check holds, and why not."""
    if check.kind == "command":
        return _command(check, directory, environment)
    path = os.path.join(directory, check.path)
    try:
        if check.kind == "file_exists":
            os.stat(path)
            return Verdict(True, "it is there")
        expected = (check.text or "").encode(errors="surrogatepass")
        with opened(path, os.O_RDONLY) as descriptor:
            return (_contains if check.kind == "file_contains" else _equals)(descriptor, expected)
    except FileNotFoundError:
        return Verdict(False, f"{check.path} is not there")
    except ToolError as exc:
        return Verdict(False, str(exc))
    except (OSError, ValueError) as exc:
        return Verdict(False, f"{check.path} cannot be read: {getattr(exc, 'strerror', None) or exc}")


def _contains(descriptor: int, expected: bytes) -> Verdict:
    seen, kept = 0, b""
    while seen < MOST_FILE and (piece := os.read(descriptor, _PIECE)):
        seen += len(piece)
        window = kept + piece
        if expected in window:
            return Verdict(True, "the text is in the file")
        kept = window[-(len(expected) - 1) :] if len(expected) > 1 else b""
    read = "" if seen < MOST_FILE else f" (its first {MOST_FILE} bytes were read)"
    return Verdict(False, f"the text is not in the file{read}")


def _equals(descriptor: int, expected: bytes) -> Verdict:
    size = os.fstat(descriptor).st_size
    found = bytearray()
    while len(found) <= len(expected) and (piece := os.read(descriptor, _PIECE)):
        found += piece
    if found == expected:
        return Verdict(True, "the file is as expected")
    place = next((place for place, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return Verdict(False, f"the file has {max(size, len(found))} bytes, {len(expected)} are expected")
    return Verdict(False, f"the file differs from byte {place} on")


def _command(check: Check, directory: str, environment: Mapping[str, str]) -> Verdict:
    try:
        code, text = _run(check.command, check.timeout, directory, environment)
    except (OSError, ValueError) as exc:
        return Verdict(False, f"the command did not start: {exc}")
    shown = text.strip()
    said = f": {shown[-_SHOWN:]}" if shown else ""
    if code is None:
        return Verdict(False, f"the command took longer than {check.timeout:g} s{said}")
    if code != 0:
        return Verdict(False, f"the command ended with {code}{said}")
    if check.output is not None and check.output not in text:
        return Verdict(False, f"the command ended with 0, but did not print the text{said}")
    return Verdict(True, "the command ended with 0")


def _run(command: str, timeout: float, directory: str, environment: Mapping[str, str]) -> tuple[int | None, str]:
    """Exit code and output of a command in a shell of its own, which leaves nothing behind. No code: it timed out."""
    dialect = find()
    if dialect is None:
        raise OSError("this machine has neither bash nor sh")
    mark = f"{os.getpid()}-checks"
    reader, writer = os.pipe()
    stream = Stream(reader)
    since = processes.now()
    try:
        process = subprocess.Popen(
            [dialect.path, *dialect.options, "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env={"LANG": "C.UTF-8", **environment, processes.MARK: mark},
            start_new_session=True,
        )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    try:
        ended = _wait(process, stream, time.monotonic() + timeout)
        stream.drain()
    finally:
        processes.end(process.pid, mark, since=since)
        process.wait()
        stream.release()
    code = process.returncode
    return (128 - code if code < 0 else code) if ended else None, stream.text().text


def _wait(process: subprocess.Popen[bytes], stream: Stream, deadline: float) -> bool:
    """Read until the command ends; False when the time is over first. It is not reaped: its number stays its own."""
    watch = None
    with suppress(AttributeError, OSError):
        watch = os.pidfd_open(process.pid)
    poller = select.poll()
    poller.register(stream.descriptor, select.POLLIN)
    if watch is not None:
        poller.register(watch, select.POLLIN)
    try:
        while (left := deadline - time.monotonic()) > 0:
            for descriptor, _ in poller.poll((left if watch is not None else min(left, 0.05)) * 1000 + 1):
                if descriptor == watch:
                    return True
                if not stream.read():
                    poller.unregister(descriptor)
            if watch is None and process.poll() is not None:
                return True
        return False
    finally:
        if watch is not None:
            os.close(watch)
