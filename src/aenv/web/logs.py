"""The log of a server as JSON, an object a line, with what is known of the request that a line is about.

Lines wait in a bounded buffer for a thread that writes them, so that whoever reads our standard error too slowly, or
no longer, makes us lose lines, which are counted, and never a call.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TextIO

import msgspec

from aenv import config
from aenv.errors import InvalidConfig, did_you_mean

FORMATS = ("text", "json")
MOST_BYTES = 4 * 1024 * 1024
"""That wait to be written; more are dropped."""
EVERY = 0.1
"""Seconds for which lines are gathered; one that tells of trouble is written at once."""
FAREWELL = 2.0
"""Seconds at the end of the process for what is left."""
LONGEST = 16 * 1024
"""Characters of a message or a traceback."""
_TEXT = "%(levelname)s %(name)s: %(message)s"

_about: ContextVar[dict[str, Any] | None] = ContextVar("aenv.logs", default=None)
_encode = msgspec.json.Encoder(enc_hook=str).encode
_lines: Lines | None = None


class Lines:
    """Lines on their way to a file descriptor."""

    def __init__(self, descriptor: int, most: int = MOST_BYTES) -> None:
        self._descriptor = descriptor
        self._most = most
        self.written = 0
        self.dropped = 0
        self._begin_life()
        os.register_at_fork(after_in_child=self._begin_life)

    def _begin_life(self) -> None:
        self._waiting: deque[tuple[bytes, int]] = deque()
        self._bytes = 0
        self._under_way = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._stirred = threading.Event()
        self._hurry = threading.Event()

    def write(self, line: bytes, *, count: int = 1, at_once: bool = False) -> None:
        """Have a line written, or so many, soon or at once; from any thread."""
        with self._lock:
            if self._bytes > self._most:
                self.dropped += count
                return
            self._bytes += len(line)
            self._waiting.append((line, count))
        if at_once:
            self._hurry.set()
        if not self._stirred.is_set():
            self._stirred.set()
            if self._thread is None:
                self._start()

    def flush(self, patience: float = FAREWELL) -> bool:
        """Wait until what there is was written, at most so many seconds; whether it was."""
        deadline = time.monotonic() + patience
        while self._waiting or self._under_way:
            self._hurry.set()
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="aenv-log", daemon=True)
                self._thread.start()

    def _write_all(self) -> None:
        while True:
            self._stirred.wait()
            self._hurry.wait(EVERY)
            self._hurry.clear()
            self._stirred.clear()
            self._under_way = True
            batch = [self._waiting.popleft() for _ in range(len(self._waiting))]
            data, lines = b"".join(line for line, _ in batch), sum(count for _, count in batch)
            try:
                _write(self._descriptor, data)
                lost = 0
            except OSError:  # nobody reads any more
                lost = lines
            with self._lock:
                self._bytes -= len(data)
                self.dropped += lost
                self.written += lines - lost
            self._under_way = False


def _write(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:  # somebody who shares it made it so
            time.sleep(EVERY)


class JsonHandler(logging.Handler):
    """Writes records as JSON."""

    def __init__(self, lines: Lines) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.write(_line(record), at_once=record.levelno >= logging.WARNING)
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        self._lines.flush()


def _line(record: logging.LogRecord) -> bytes:
    found: dict[str, Any] = {
        "time": timestamp(record.created),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": _sound(record.getMessage()),
    }
    found |= _about.get() or {}
    found |= getattr(record, "fields", {})
    if record.exc_info and record.exc_info[1] is not None:
        found["exception"] = _sound(_formatter.formatException(record.exc_info))
    return _encode(found) + b"\n"


_formatter = logging.Formatter()


def _sound(text: str) -> str:
    return text[:LONGEST] if text.isascii() else text[:LONGEST].encode(errors="replace").decode()


def timestamp(now: float) -> str:
    """A moment, as the lines have it."""
    seconds = int(now)
    return f"{_second(seconds)}.{int((now - seconds) * 1000):03d}Z"


_known_second = (-1, "")


def _second(seconds: int) -> str:
    global _known_second
    known = _known_second  # another thread may be at another second
    if known[0] != seconds:
        known = _known_second = (seconds, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)))
    return known[1]


@contextmanager
def about(**fields: Any) -> Iterator[dict[str, Any]]:
    """What lines of the block, and of the tasks begun in it, are about. What is learnt later may be added.

    Names and ids only: never a token, an argument or a variable's value.
    """
    found = {**(_about.get() or {}), **fields}
    token = _about.set(found)
    try:
        yield found
    finally:
        with suppress(ValueError):  # a generator that is closed elsewhere
            _about.reset(token)


def fields(given: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """``extra`` of a log call: fields that JSON lines have and text has not."""
    return {"fields": given}


def configure(format: str | None, *, level: int, stream: TextIO | None = None) -> None:
    """Let this process write its log to ``stream``: in that format, or else in the one that the settings say."""
    global _lines
    chosen: str = config.get("log_format", format)
    if chosen not in FORMATS:
        raise InvalidConfig(f"there is no log format {chosen!r}", hint=did_you_mean(chosen, FORMATS))
    stream = stream or sys.stderr
    if chosen == "text":
        logging.basicConfig(stream=stream, level=level, format=_TEXT)
        return
    written = Lines(stream.fileno())  # whose rest is written when logging shuts down
    logging.basicConfig(handlers=[JsonHandler(written)], level=level)
    _lines = written if level <= logging.INFO else None


def lines() -> Lines | None:
    """Where lines about calls go, which are JSON already; None when the log is text, or tells of trouble only."""
    return _lines


def kind(endpoint: str) -> str:
    """What lines call that which a request to this endpoint touches."""
    if endpoint.endswith("/list"):
        return "target"
    return next((name for path, name in _KINDS.items() if endpoint.startswith(path)), "target")


_KINDS = {"/env-instance": "instance", "/env-service": "service"}
