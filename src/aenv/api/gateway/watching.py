"""What others learn of calls: a watcher is told of each, a tracer's span is made of it."""

from __future__ import annotations

import logging
from functools import lru_cache
from time import monotonic, time

from aenv.api.gateway.heads import Address, Head
from aenv.api.gateway.passages import Passage
from aenv.api.gateway.places import Answered, Watcher
from aenv.tracing import Span, Tracer, attributes

log = logging.getLogger("aenv.gateway")
_ROUTES = {
    b"mcp": "mcp",
    b"tools": "tool",
    b"task": "reward",
    b"functions": "function",
    b"health": "health",
    b"exec": "exec",
    b"files": "files",
}


class Watching:
    """Who wants to know of calls."""

    def __init__(self, watcher: Watcher | None, tracer: Tracer | None) -> None:
        self.watcher = watcher
        self.tracer = tracer

    def begin(self, head: Head) -> Watch:
        """A call has come."""
        return Watch(self, head)


class Watch:
    """What is noted of one call."""

    __slots__ = ("_answered", "_began", "_error", "_passed", "_span", "_status", "_timing", "_watching")

    def __init__(self, watching: Watching, head: Head) -> None:
        self._watching = watching
        self._began = monotonic()
        self._passed = self._answered = 0.0
        self._status = 0
        self._timing = b""
        self._error = ""
        self._span: Span | None = None
        if watching.tracer is not None:
            self._span = watching.tracer.begin("gateway", head.trace, kind="server")
            head.trace = self._span.traceparent

    def passed(self) -> None:
        """It is on its way to the sandbox."""
        self._passed = monotonic()

    def answered(self, status: int, timing: bytes, *, error: str = "") -> None:
        """The head of its answer is there; ``error`` is what kind of failure it is of ours."""
        self._answered = monotonic()
        self._status, self._timing, self._error = status, timing, error

    def ended(self, head: Head, wanted: Address | None, passage: Passage | None) -> None:
        """It is over."""
        ended = monotonic()
        service = wanted.id if wanted is not None and wanted.is_service else ""
        place = None if passage is None else passage.sandbox.place
        if self._span is not None:
            self._describe(self._span, head, wanted, place.id if place is not None else "", service, ended)
        watcher = self._watching.watcher
        if watcher is None:
            return
        call = Answered(
            place=place,
            service=service,
            method=head.method,
            path=head.path,
            status=self._status,
            began=self._began,
            answered=self._answered or ended,
            ended=ended,
            request_id=head.request_id,
            trace=head.trace,
            timing=self._timing,
            exposed=wanted is not None and bool(wanted.port),
        )
        try:
            watcher.answered(call)
        except Exception:
            log.exception("whoever is told of calls failed")

    def _describe(
        self, span: Span, head: Head, wanted: Address | None, instance: str, service: str, ended: float
    ) -> None:
        if not span.sampled:
            return
        exposed = wanted is not None and wanted.port
        route = "port" if exposed else _ROUTES.get(head.path[1:].partition(b"/")[0], "other")
        same = _about(instance, service, route, head.method, self._status)
        span.describe(b'%b,{"key":"aenv.request_id","value":{"stringValue":"%b"}}' % (same, head.request_id))
        if self._timing and self._passed:
            shift = time() - ended
            span.inside(self._timing, self._passed + shift, self._answered + shift)
        failed = self._error or ("left" if not self._status else str(self._status) if self._status >= 500 else "")
        span.end(error=failed)


@lru_cache(maxsize=4096)
def _about(instance: str, service: str, route: str, method: bytes, status: int) -> bytes:
    """What many calls have in common."""
    said: list[tuple[str, str | int]] = [("aenv.instance", instance)] if instance else []
    if service:
        said.append(("aenv.service", service))
    said += [("aenv.route", route), ("http.request.method", method.decode("latin-1"))]
    return attributes([*said, ("http.response.status_code", status)])
