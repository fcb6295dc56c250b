"""Traces: spans with W3C trace contexts, sent to an OpenTelemetry collector as OTLP/HTTP JSON, off unless configured.

Spans that ended wait in a bounded buffer for a thread of their own, which sends them in batches; a collector that is
slow or gone costs spans, which are counted, and never a call. The thread blocks on a connection of its own, because
it also sends what is left while the interpreter ends, when event loops can no longer look up a name.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar, Token
from time import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote

import msgspec

from aenv import __version__, config
from aenv.errors import InvalidConfig
from aenv.http import target

if TYPE_CHECKING:
    from http.client import HTTPConnection

log = logging.getLogger("aenv.tracing")

MOST_WAITING = 16384
"""Spans that wait to be sent; more are dropped."""
BATCH = 512
"""Spans that are sent at once."""
FRESH = 64
"""Spans that are written at once."""
EVERY = 1.0
"""Seconds for which spans are gathered, unless there are enough for a batch before."""
ATTEMPTS = 3
MOST_ANSWER = 64 * 1024
ANSWERING = 5.0
"""Seconds in which the collector must answer."""
FAREWELL = 3.0
"""Seconds at the end of the process for what is left."""
LEAST_QUEUE = 0.001
"""Seconds that a call must have waited in its sandbox for the wait to be a span of its own."""
LONGEST = 256
"""Characters of an attribute."""
PATH = "/v1/traces"
_BUSY = (429, 502, 503, 504)
_PAUSE = 0.2
_SAMPLED = frozenset(b"%02x" % flags for flags in range(1, 256, 2))
_KINDS = {"internal": 1, "server": 2, "client": 3, "producer": 4, "consumer": 5}
_TRACEPARENT = re.compile(rb"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_QUEUE, _TOOL = b"queue;dur=", b", tool;dur="
MOST_MILLISECONDS = 1e9
"""That a sandbox may say; more is nonsense."""

Value = str | int | float | bool
_encode = msgspec.json.Encoder().encode
_current: ContextVar[bytes] = ContextVar("aenv.tracing", default=b"")


class Span:
    """Something that takes time. Times are Unix seconds. One that is not sampled costs nothing and tells nothing.

    As a context manager, it is the parent of what is asked for in the block, and ends with it. Whoever makes one is in
    the middle of something: what can be made of it later, when it is sent, is.
    """

    __slots__ = (
        *("_attributes", "_ended", "_error", "_id", "_kind", "_parent", "_parts", "_timing", "_token", "_trace"),
        *("_tracer", "began", "name", "traceparent"),
    )

    def __init__(
        self, tracer: Tracer | None, name: str, kind: str, trace: bytes, id: bytes, parent: bytes, began: float
    ) -> None:
        self._tracer = tracer
        """Who sends it; None when it is not sampled, or has ended."""
        self.name = name
        self._kind = kind
        self._trace = trace
        self._parent = parent
        self._id = id
        self._attributes: list[tuple[str, Value] | bytes] = []
        self._parts: list[_Part] | None = None
        self._timing: tuple[bytes, float, float] | None = None
        self.began = began
        self._ended = 0.0
        self._error = ""
        self.traceparent: bytes = b"00-%b-%b-%b" % (trace, id, b"00" if tracer is None else b"01")
        """The context to be passed on."""
        self._token: Token[bytes] | None = None

    @property
    def sampled(self) -> bool:
        """Whether it will be sent."""
        return self._tracer is not None

    @property
    def trace_id(self) -> str:
        """The trace that it is part of, as logs show it."""
        return self._trace.decode()

    def set(self, name: str, value: Value) -> None:
        """Say something about it. Never an argument, a variable or a token."""
        if self._tracer is not None:
            self._attributes.append((name, value))

    def describe(self, written: bytes) -> None:
        """Say what ``attributes`` made."""
        self._attributes.append(written)

    def child(self, name: str, began: float, ended: float, **attributes: Value) -> None:
        """A part of it that is over."""
        if self._tracer is not None:
            self._parts = self._parts or []
            self._parts.append((name, began, ended, attributes))

    def inside(self, timing: bytes, began: float, ended: float) -> None:
        """What a sandbox did between then and then, as its ``Server-Timing`` tells; nothing when it does not."""
        self._timing = (timing, began, ended)

    def end(self, *, error: str = "") -> None:
        """It is over; a second time makes no difference. ``error`` is the kind of a failure, not what it says."""
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            self._ended, self._error = time(), error
            tracer._note(self)

    def __enter__(self) -> Self:
        self._token = _current.set(self.traceparent)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            _current.reset(self._token)
        self.end(error="" if kind is None else kind.__name__)

    def _told(self, new_id: Callable[[], bytes]) -> Iterator[bytes]:
        """It and its parts, as OTLP has them."""
        status = b',"status":{"code":2,"message":%b}' % _text(self._error) if self._error else b""
        ids = (self._trace, self._id, self._parent)
        kind = _KINDS.get(self._kind, 1)
        yield _span(*ids, self.name, kind, self.began, self._ended, attributes(self._attributes), status)
        if self._parts is not None:
            for name, began, ended, said in self._parts:
                yield _span(self._trace, new_id(), self._id, name, 1, began, ended, attributes(said.items()))
        if self._timing is not None:
            for name, began, ended in _parts(*self._timing):
                yield _span(self._trace, new_id(), self._id, name, 1, began, ended, b"")


_Part = tuple[str, float, float, dict[str, Value]]


def _parts(timing: bytes, began: float, ended: float) -> Iterator[tuple[str, float, float]]:
    """What a sandbox's timing tells of the time between then and then."""
    if (found := parse_timing(timing)) is None:
        return
    queue, tool = (milliseconds / 1000 for milliseconds in found)
    # Its clock is not ours: what is left over went half into the way there and half into the way back.
    start = began + max(ended - began - queue - tool, 0.0) / 2
    if queue >= LEAST_QUEUE:
        yield "queue", start, start + queue
    yield "tool", start + queue, start + queue + tool


class Tracer:
    """Makes spans, and sends those that ended to one collector. Safe in any thread, and in a forked child."""

    def __init__(
        self, url: str, *, headers: Mapping[str, str] | None = None, service: str = "aenv", ratio: float = 1.0
    ) -> None:
        """``url`` is the collector's base URL, such as ``http://127.0.0.1:4318``. ``ratio`` is the share of traces
        that is kept, of those that begin here; the others follow whoever began them."""
        # Not in the thread, for a fork may come in the middle of it; nor with this module, which every process has.
        import atexit
        from http.client import HTTPConnection, HTTPSConnection

        where = target(url)  # or it says what is wrong with it
        kind = HTTPSConnection if where.secure else HTTPConnection
        self._connect = functools.partial(kind, where.host, where.port, timeout=ANSWERING)
        self._path = where.prefix.removesuffix(PATH) + PATH
        self._headers = {**(headers or {}), "Content-Type": "application/json"}
        self._least = int((1.0 - min(max(ratio, 0.0), 1.0)) * 2**64)
        self._service = service
        self.sent = 0
        """Spans that the collector took."""
        self.dropped = 0
        """Spans that it did not get: it was gone, refused them, or was too slow."""
        self._begin_life()
        os.register_at_fork(after_in_child=self._begin_life)
        atexit.register(self.flush, FAREWELL)

    def _begin_life(self) -> None:
        self._fresh: list[Span] = []
        """Spans that ended, and are to be written as OTLP has them."""
        self._waiting: deque[bytes] = deque()
        """Spans that are, and wait to be sent."""
        # Not the application's, which may be seeded.
        self._bits = random.Random(os.urandom(32)).getrandbits  # noqa: S311
        self._written = 0
        self._settled = 0
        self._thread: threading.Thread | None = None
        self._connection: HTTPConnection | None = None
        """The thread's, while it is between two batches."""
        self._lock = threading.Lock()
        self._stirred = threading.Event()
        self._hurry = threading.Event()
        self._progress = threading.Condition()

    def begin(
        self, name: str, parent: str | bytes | None = None, *, kind: str = "internal", began: float | None = None
    ) -> Span:
        """A span, of its parent's trace or, without a parent that can be read, of a new one.

        ``kind`` is one of OpenTelemetry's: internal, server, client, producer or consumer.
        """
        if began is None:
            began = time()
        if parent:
            found = _TRACEPARENT.fullmatch(parent.encode("latin-1", "replace") if isinstance(parent, str) else parent)
            if found is not None:
                trace, above, flags = found.groups()
                if flags in _SAMPLED:
                    return Span(self, name, kind, trace, self._new_id(), above, began)
                return Span(None, name, kind, trace, above, above, began)
        share = self._bits(64) or 1
        trace = b"%016x%016x" % (self._bits(64), share)
        return Span(self if share >= self._least else None, name, kind, trace, self._new_id(), b"", began)

    def _new_id(self) -> bytes:
        return b"%016x" % (self._bits(64) or 1)

    def flush(self, patience: float = FAREWELL) -> bool:
        """Wait until what ended before was sent or given up, at most so many seconds; whether all of it was."""
        self._write()
        wanted = self._written
        if self._settled >= wanted:
            return True
        self._hurry.set()
        self._stirred.set()
        with self._progress:
            return self._progress.wait_for(lambda: self._settled >= wanted, patience)

    # What ended

    def _note(self, span: Span) -> None:
        fresh = self._fresh
        with self._lock:
            fresh.append(span)
        if len(fresh) >= FRESH:
            self._write()
        if not self._stirred.is_set():
            self._stirred.set()
            if self._thread is None:
                self._start()

    def _write(self) -> None:
        """Write what ended as OTLP has it. Some at once, where they ended: a thread that did it would take turns with
        the event loop, which costs more than the writing."""
        with self._lock:
            fresh = self._fresh[:]
            self._fresh.clear()
        try:
            told = [part for span in fresh for part in span._told(self._new_id)]
        except Exception:  # an attribute that is none
            log.debug("spans were lost", exc_info=True)
            told, lost = [], len(fresh)
        else:
            lost = max(len(told) + len(self._waiting) - MOST_WAITING, 0)
        with self._lock:
            self.dropped += lost
            self._waiting.extend(told[: len(told) - lost])
            self._written += max(len(told) - lost, 0)
        if len(self._waiting) >= BATCH:
            self._hurry.set()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._send_all, name="aenv-traces", daemon=True)
                self._thread.start()

    def _send_all(self) -> None:
        while True:
            self._stirred.wait()
            self._hurry.wait(EVERY)
            self._hurry.clear()
            self._stirred.clear()
            self._write()
            while batch := [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]:
                lost = len(batch)
                try:
                    lost = self._send(batch)
                except Exception:  # whatever it is, the next batch may do better
                    log.debug("spans were lost", exc_info=True)
                with self._lock:
                    self.sent += len(batch) - lost
                    self.dropped += lost
                with self._progress:
                    self._settled += len(batch)
                    self._progress.notify_all()

    def _send(self, spans: list[bytes]) -> int:
        """Send spans, a few times if need be; how many of them the collector refused."""
        body = self._message(spans)
        pause = _PAUSE
        for attempt in range(1, ATTEMPTS + 1):
            try:
                status, answer = self._post(body)
                if 200 <= status < 300:
                    return _rejected(answer, len(spans))
                if status not in _BUSY:
                    return len(spans)
            except OSError:
                if attempt == ATTEMPTS:
                    raise
            if attempt < ATTEMPTS:
                self._hurry.wait(pause)  # who flushes does not wait for long
                pause *= 4
        return len(spans)

    def _post(self, body: bytes) -> tuple[int, bytes]:
        connection: HTTPConnection | None
        connection, self._connection = self._connection or self._connect(), None
        try:
            connection.request("POST", self._path, body, self._headers)
            response = connection.getresponse()
            answer = response.read(MOST_ANSWER)
            if response.isclosed():  # all of it is read, so that the next may follow
                self._connection, connection = connection, None
            return response.status, answer
        finally:
            if connection is not None:
                connection.close()

    def _message(self, spans: list[bytes]) -> bytes:
        about: tuple[tuple[str, Value], ...] = (
            ("service.name", self._service),
            ("service.version", __version__),
            ("process.pid", os.getpid()),
        )
        return _MESSAGE % (attributes(about), _text(__version__), b",".join(spans))


_MESSAGE = (
    b'{"resourceSpans":[{"resource":{"attributes":[%b]},'
    b'"scopeSpans":[{"scope":{"name":"aenv","version":%b},"spans":[%b]}]}]}'
)
_SPAN = (
    b'{"traceId":"%b","spanId":"%b","parentSpanId":"%b","name":%b,"kind":%d,'
    b'"startTimeUnixNano":"%d","endTimeUnixNano":"%d","attributes":[%b]%b}'
)


def _span(
    trace: bytes,
    id: bytes,
    parent: bytes,
    name: str,
    kind: int,
    began: float,
    ended: float,
    about: bytes,
    more: bytes = b"",
) -> bytes:
    times = (int(began * 1e9), int(max(began, ended) * 1e9))
    return _SPAN % (trace, id, parent, _text(name), kind, *times, about, more)


@functools.lru_cache(maxsize=1024)
def _text(text: str) -> bytes:
    return _encode(_sound(text))


def attributes(given: Iterable[tuple[str, Value] | bytes]) -> bytes:
    """Attributes as OTLP has them; some may be that already, of whoever says the same of many spans."""
    return b",".join(one if isinstance(one, bytes) else _fragment(*one) for one in given)


@functools.lru_cache(maxsize=4096, typed=True)
def _fragment(name: str, value: Value) -> bytes:
    """Most are the same from span to span."""
    return _encode({"key": name, "value": _value(value)})


def _value(value: Value) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": _sound(value)}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": float(value)}


def _sound(text: str) -> str:
    return text[:LONGEST] if text.isascii() else text[:LONGEST].encode(errors="replace").decode()


def _rejected(answer: bytes, most: int) -> int:
    try:
        found = msgspec.json.decode(answer)
        return min(max(int(found["partialSuccess"]["rejectedSpans"]), 0), most)
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError, ValueError):
        return 0


def parse_timing(value: bytes) -> tuple[float, float] | None:
    """The milliseconds that a call waited in its sandbox, and that its function took, of a runtime's
    ``Server-Timing``. A sandbox is not to be trusted; what another server says in its own words is not understood."""
    queue, _, tool = value.partition(_TOOL)
    if not queue.startswith(_QUEUE) or len(value) > LONGEST:
        return None
    try:
        found = float(queue[len(_QUEUE) :]), float(tool)
    except ValueError:
        return None
    # What is not a number is not between two, either.
    return found if 0.0 <= found[0] < MOST_MILLISECONDS and 0.0 <= found[1] < MOST_MILLISECONDS else None


def trace_id(traceparent: bytes) -> str:
    """The trace of a context, as logs show it; empty when it is none."""
    return traceparent[3:35].decode() if _TRACEPARENT.fullmatch(traceparent) else ""


def inherited() -> bytes:
    """The context of the span that is under way here: ours, else the application's own when it uses OpenTelemetry,
    else empty."""
    if ours := _current.get():
        return ours
    theirs = sys.modules.get("opentelemetry.trace")
    if theirs is None:
        return b""
    context = theirs.get_current_span().get_span_context()
    if not context.is_valid:
        return b""
    return b"00-%032x-%016x-%02x" % (context.trace_id, context.span_id, context.trace_flags)


_configured: Tracer | None = None
_looked = False


def configured() -> Tracer | None:
    """The tracer of this process, as its settings want it; None where tracing is off."""
    global _configured, _looked
    if not _looked:
        _configured = _made()
        _looked = True
    return _configured


def _made() -> Tracer | None:
    url = config.get("traces") or config.get("otel_endpoint")
    if not url:
        return None
    ratio = config.get("otel_sampler_arg")
    return Tracer(url, headers=_pairs(config.get("otel_headers")), service=config.get("otel_service_name"), ratio=ratio)


def _pairs(given: str | None) -> dict[str, str]:
    """Headers as OpenTelemetry writes them: ``name=value,name=value``, percent-encoded."""
    found: dict[str, str] = {}
    for pair in filter(str.strip, (given or "").split(",")):
        name, equals, value = (part.strip() for part in pair.partition("="))
        text = unquote(value)
        if not equals or not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name) or not text.isprintable():
            # What it says is not shown: it may be a credential.
            raise InvalidConfig("OTEL_EXPORTER_OTLP_HEADERS is not name=value,name=value", hint="percent-encode values")
        found[name] = text
    return found
