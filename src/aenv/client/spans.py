"""Spans of what an ``Environment`` does, and the trace context that goes with its requests.

Without a collector and without OpenTelemetry in the application there are neither, and nothing is paid for them.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from aenv import tracing
from aenv.http import Response
from aenv.models import Sandbox

_NAMED = ("tool", "reward", "function")
"""What is shown by name; the name of a file, for example, is an argument."""
_FAILED = b'"isError":true'


def context() -> bytes:
    """A line for the head of a request that gets no span of its own; empty where there is no trace."""
    found = tracing.inherited()
    return b"traceparent: %b\r\n" % found if found else b""


class Asking:
    """A request, or the start of a sandbox, for the length of a block."""

    __slots__ = ("_direct", "_sent", "_span", "header")

    def __init__(self, what: str, env: str, sandbox: Sandbox | None = None) -> None:
        context = tracing.inherited()
        tracer = tracing.configured()
        self._span: tracing.Span | None = None
        self._direct = sandbox is not None and not sandbox.relayed
        self._sent = 0.0
        if tracer is not None:
            verb = what.partition(" ")[0]
            self._span = span = tracer.begin(what if verb in _NAMED else verb, context, kind="client")
            span.set("aenv.env", env)
            if sandbox is not None:
                span.set("aenv.instance", sandbox.id)
            context = span.traceparent
            self._sent = span.began
        self.header = b"traceparent: %b\r\n" % context if context else b""
        """A line for the head of the request."""

    def answered(self, response: Response) -> Response:
        """The answer has come. Of a sandbox that was asked directly, it tells what a gateway would tell otherwise."""
        if self._span is not None and self._span.sampled:
            self._span.set("http.response.status_code", response.status)
            if _FAILED in response.body:
                self._span.set("aenv.is_error", True)
            if self._direct:
                self._span.inside(response.headers.get(b"server-timing", b""), self._sent, time.time())
        return response

    def __enter__(self) -> Self:
        if self._span is not None:
            self._span.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._span is not None:
            self._span.__exit__(kind, exc, trace)
