"""What an API server shows of itself: counts of calls and operations, where starts spend their time, how it fares.

``Observed`` is told of every call that the gateway carried, so that path is kept short: calls are put aside, and some
are counted and, when the log is JSON, written down together. Nothing here is named by a token, an argument or a query.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import sys
import time
from collections import Counter as Tally
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import lru_cache
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from msgspec.json import encode

from aenv.api.charges import KIND as USE
from aenv.api.charges import PLATFORM
from aenv.api.gateway.places import Answered
from aenv.api.lives import Lives
from aenv.api.phases import laid_out
from aenv.api.records import InstanceRecord
from aenv.api.services.records import ServiceRecord
from aenv.cleanup import finish
from aenv.errors import AEnvError
from aenv.models import State
from aenv.store import Store
from aenv.tracing import Tracer, inherited, parse_timing, trace_id
from aenv.web.logs import Lines, timestamp
from aenv.web.metrics import MILLISECONDS, OTHER, Labels, Metrics
from aenv.web.routes import Route

log = logging.getLogger("aenv.api")

BATCH = 256
"""Calls that are put aside, at most, and for no longer than LAG."""
MOST_ALIKE = 1024
"""Kinds of calls for which it is remembered how they are counted."""
EVERY = 5.0
"""Seconds between two looks at the store."""
PATIENCE = 5.0
"""Seconds in which the store must answer a look."""
LAG = 0.5
"""Seconds between two looks at how late the event loop is."""
MOST_ENVS = 100
"""Environments that are shown by name, those with the most instances first."""
MOST_SERVICES = 500
"""Services that are shown one by one; all are in the sum."""
_METHODS = {name.encode(): name for name in ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")}
_EXACT = {
    path.encode(): path
    for path in ("/mcp", "/tools", "/functions/list", "/task/reward", "/health", "/info", "/reset", "/files", "/exec")
} | {path.encode(): path for path in ("/history", "/a2a", "/.well-known/agent-card.json")}
_BELOW = {
    b"tools": "/tools/{name}",
    b"functions": "/functions/{name}",
    b"calls": "/calls/{id}",
    b"ports": "/ports/{port}",
    b"openenv": "/openenv/{name}",
    b"a2a": "/a2a/{name}",
}
_PORT = b"/ports/exposed"
"""Stands for whatever path of a server that listens in a sandbox."""
_STATUS = {0: "left"} | {status.value: str(status.value) for status in HTTPStatus}
_NOUNS = {"env-instance": "instance", "env-service": "service"}
_VERBS = {"POST": "create", "GET": "get", "PUT": "update", "DELETE": "delete"}


_LINE = b'{"time":"%b","level":"info","logger":"aenv.gateway",%b,"status":%d,"ms":%.3f,"request_id":"%b"%b}\n'
"""A call in the log. What it is made of needs no escaping, but for the end, which has it."""


class _Alike(NamedTuple):
    """What counts calls that only differ by how long they took."""

    reads: bool
    """Whether its answer may be a stream without end, so that its begin is what counts."""
    words: bytes
    """What is the same in every line about one."""
    counted: Callable[[], None]
    took: Callable[[float], None]
    in_gateway: Callable[[float], None]
    in_queue: Callable[[float], None]
    in_tool: Callable[[float], None]


class Observed:
    """Watches one API server."""

    def __init__(
        self, metrics: Metrics, lives: Lives, store: Store, *, lines: Lines | None = None, tracer: Tracer | None = None
    ) -> None:
        self._metrics = metrics
        self._lives = lives
        self._store = store
        self._lines = lines
        self._tracer = tracer
        self._tasks: list[asyncio.Task[None]] = []
        self._pending: list[Answered] = []
        self._alike: dict[tuple[bytes, bytes, int], _Alike] = {}
        """What counts calls, by method, path and status."""
        self._platform: Mapping[str, float] = {}
        self._store_answers = 1.0
        """Whether the store answered the last look; it did when the server began."""
        self._calls = metrics.counter(
            "aenv_api_mcp_requests_total", "Calls carried to sandboxes.", ("method", "endpoint", "status")
        )
        self._durations = metrics.histogram(
            "aenv_api_mcp_request_duration_ms",
            "Milliseconds that such a call took; of one that reads, until its answer began.",
            *(("endpoint",), MILLISECONDS),
        )
        self._parts = metrics.histogram(
            "aenv_api_mcp_part_duration_ms",
            "Milliseconds of calls to functions by where they went: gateway, queue (in the sandbox) and tool.",
            *(("endpoint", "part"), MILLISECONDS),
        )
        self._operations = {
            noun: metrics.counter(
                f"aenv_api_{noun}_operations_total", f"What was asked of {noun}s.", ("operation", "status")
            )
            for noun in _NOUNS.values()
        }
        self._starts = metrics.counter("aenv_api_starts_total", "Sandboxes that came to run, or did not.", ("status",))
        self._creates = metrics.histogram("aenv_api_create_seconds", "Seconds until a sandbox ran.")
        self._phases = metrics.histogram(
            "aenv_api_create_phase_seconds", "Seconds of the phases of a start.", ("phase",)
        )
        self._store_seconds = metrics.histogram("aenv_api_store_seconds", "Seconds that the store took for a look.")
        self._lag = metrics.histogram(
            "aenv_api_event_loop_lag_ms", "Milliseconds by which the event loop was late.", (), MILLISECONDS
        )
        metrics.gauge(
            "aenv_api_active_instances",
            "Sandboxes that this server looks after.",
            *(self._active, ("env", "status", "kind")),
        )
        metrics.gauge("aenv_api_store_up", "Whether the store answers.", lambda: self._store_answers)
        metrics.gauge(
            "aenv_api_platform_use",
            "What all servers together have admitted: instances, cpu (cores), memory (bytes), waiting.",
            *(self._use, ("resource",)),
        )
        metrics.gauge(
            "aenv_api_queue_oldest_seconds", "For how long the oldest instance waits in the queue here.", self._oldest
        )
        _describe_process(metrics)
        if lines is not None:
            metrics.counted("aenv_api_log_lines_dropped_total", "Log lines that nobody read.", lambda: lines.dropped)
        if tracer is not None:
            metrics.counted("aenv_api_spans_sent_total", "Spans that the collector took.", lambda: tracer.sent)
            metrics.counted("aenv_api_spans_dropped_total", "Spans that it did not get.", lambda: tracer.dropped)
        metrics.listeners.append(self._control_answered)
        metrics.before.append(self._settle)
        lives.started.append(self._started)

    def observe_services(self, looked_after: Callable[[], Iterable[ServiceRecord]]) -> None:
        """Show the services that are looked after here."""

        def replicas() -> Mapping[Labels, float]:
            found: dict[Labels, float] = {}
            for record in islice(looked_after(), MOST_SERVICES):
                found[record.id, "desired"] = record.wanted
                found[record.id, "ready"] = record.ready
            return found

        def services() -> Mapping[Labels, float]:
            short = [record.ready < record.wanted for record in looked_after()]
            return {("whole",): short.count(False), ("short",): short.count(True)}

        self._metrics.gauge("aenv_api_service_replicas", "Replicas of services.", replicas, labels=("service", "state"))
        self._metrics.gauge(
            "aenv_api_services", "Services with all of their replicas, and with fewer.", services, labels=("status",)
        )

    async def start(self) -> None:
        """Look at what does not tell by itself, from now on."""
        for look in (self._watch_store, self._watch_loop):
            self._tasks.append(asyncio.create_task(_for_ever(look)))

    async def close(self) -> None:
        self._settle()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await finish(_ended(self._tasks))

    # Calls through the gateway

    def answered(self, call: Answered) -> None:
        self._pending.append(call)
        if len(self._pending) >= BATCH:
            self._settle()

    def _settle(self) -> None:
        """Count what was answered, and write it into the log. Many at once take a third of the time of one by one."""
        pending, self._pending = self._pending, []
        since = time.time() - time.monotonic()
        rows: list[bytes] = []
        for call in pending:
            path = _PORT if call.exposed else call.path
            alike = self._alike.get((call.method, path, call.status)) or self._kind(call, path)
            milliseconds = ((call.answered if alike.reads else call.ended) - call.began) * 1000
            alike.counted()
            alike.took(milliseconds)
            timing = parse_timing(call.timing) if call.timing else None
            if timing is not None:
                queue, tool = timing
                alike.in_gateway(max(milliseconds - queue - tool, 0.0))
                alike.in_queue(queue)
                alike.in_tool(tool)
            if self._lines is not None:
                place = call.place
                end = _ids("", "", call.service) if place is None else _ids(place.id, place.owner, call.service)
                if timing is not None:
                    end = b'%b,"sandbox_ms":%.3f' % (end, queue + tool)
                if call.trace and (trace := trace_id(call.trace)):
                    end = b'%b,"trace_id":"%b"' % (end, trace.encode())
                at = timestamp(since + call.ended).encode()
                rows.append(_LINE % (at, alike.words, call.status, milliseconds, call.request_id, end))
        if self._lines is not None and rows:
            self._lines.write(b"".join(rows), count=len(rows))

    def _kind(self, call: Answered, path: bytes) -> _Alike:
        """What counts calls like this one."""
        method, endpoint = _METHODS.get(call.method, OTHER), endpoint_of(path)
        status = _STATUS.get(call.status) or f"{call.status // 100}xx"
        if len(self._alike) >= MOST_ALIKE:
            self._alike.clear()  # paths are the callers' to choose
        made = self._alike[call.method, path, call.status] = _Alike(
            reads=method in ("GET", "HEAD"),
            words=f'"message":"{method} {endpoint} {status}","method":"{method}","endpoint":"{endpoint}"'.encode(),
            counted=self._calls.adder((method, endpoint, status)),
            took=self._durations.observer((endpoint,)),
            in_gateway=self._parts.observer((endpoint, "gateway")),
            in_queue=self._parts.observer((endpoint, "queue")),
            in_tool=self._parts.observer((endpoint, "tool")),
        )
        return made

    # The control plane

    def _control_answered(self, route: Route, status: int, milliseconds: float, error: str) -> None:
        noun, _, rest = route.path.strip("/").partition("/")
        if noun in _NOUNS:
            last = rest.rpartition("/")[2]
            operation = last if last and "{" not in last else _VERBS.get(route.method, route.method.lower())
            self._operations[_NOUNS[noun]].add((operation, error or ("ok" if status < 400 else str(status))))

    def _started(self, record: InstanceRecord) -> None:
        """A start is over; said in the context of who asked for it."""
        running = record.status is State.RUNNING
        self._starts.add(("running" if running else "failed",))
        whole = 0.0
        for phase, seconds in record.phases.items():
            self._phases.observe(seconds, (phase,))
            whole += seconds if "." not in phase else 0.0
        if running:
            self._creates.observe(whole)
        if self._tracer is not None and (parent := inherited()):
            began = record.created_at - record.phases.get("hub", 0.0)  # which was asked before it was written down
            span = self._tracer.begin(f"start {record.env.name}", parent, began=began)
            span.set("aenv.instance", record.id)
            span.set("aenv.env", record.env.id)
            span.set("aenv.owner", record.owner)
            for name, first, last in laid_out(record.phases, began):
                span.child(name, first, last)
            span.end(error="" if running else "StartFailed")

    # Gauges

    def _active(self) -> Mapping[Labels, float]:
        found: Tally[Labels] = Tally()
        for entry in self._lives.entries.values():
            record = entry.kept.record
            found[record.env.name, record.status.value, _kind(record)] += 1
        names: Tally[str] = Tally()
        for (env, _, _), count in found.items():
            names[env] += count
        shown = {env for env, _ in names.most_common(MOST_ENVS)}
        bounded: Tally[Labels] = Tally()
        for (env, status, kind), count in found.items():
            bounded[env if env in shown else OTHER, status, kind] += count
        return dict(bounded)

    def _use(self) -> Mapping[Labels, float]:
        found = {name: self._platform.get(name, 0.0) for name in ("instances", "cpu", "memory", "waiting")}
        found["cpu"] /= 1000
        return {(name,): value for name, value in found.items()}

    def _oldest(self) -> float:
        records = (entry.kept.record for entry in self._lives.entries.values())
        since = [record.queued for record in records if record.queued is not None and not record.over]
        return max(self._lives.clock.now() - min(since), 0.0) if since else 0.0

    # What does not tell by itself

    async def _watch_store(self) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE):
                await self._store.get("ping", "ping")
                self._store_seconds.observe(time.monotonic() - began)
                self._platform = (await self._store.counts(USE)).get(PLATFORM, {})
            self._store_answers = 1.0
        except (AEnvError, TimeoutError):
            self._store_answers = 0.0
        await asyncio.sleep(EVERY)

    async def _watch_loop(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + LAG
        await asyncio.sleep(LAG)
        self._lag.observe(max(loop.time() - due, 0.0) * 1000)
        self._settle()


@lru_cache(maxsize=4096)
def _ids(instance: str, owner: str, service: str) -> bytes:
    """The end of a line: who and what."""
    known = {"instance": instance, "owner": owner, "service": service}
    return b"".join(b',"%b":%b' % (name.encode(), encode(text)) for name, text in known.items() if text)


def endpoint_of(path: bytes) -> str:
    """Which of a sandbox's endpoints a path belongs to; those of an author's own are one."""
    if found := _EXACT.get(path):
        return found
    first, slash, rest = path[1:].partition(b"/")
    return _BELOW.get(first, OTHER) if slash and rest else OTHER


def _kind(record: InstanceRecord) -> str:
    if record.service:
        return "replica"
    return "warm" if record.warm else "instance"


async def _for_ever(look: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await look()
        except Exception:
            log.exception("the server cannot look at itself")
            await asyncio.sleep(EVERY)


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks)


# The process, under the names that every Prometheus client uses


def _describe_process(metrics: Metrics) -> None:
    began = time.time()
    metrics.gauge("process_start_time_seconds", "When this process began to serve, in Unix time.", lambda: began)
    metrics.counted("process_cpu_seconds_total", "Seconds of processor time.", time.process_time)
    metrics.gauge("process_resident_memory_bytes", "Memory of this process.", _resident)
    if Path("/proc/self/fd").exists():
        metrics.gauge("process_open_fds", "Open file descriptors.", lambda: len(os.listdir("/proc/self/fd")) - 1)
    metrics.gauge("process_max_fds", "How many there may be.", lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _resident() -> float:
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()
    except OSError:  # not Linux: the most that it ever had
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
