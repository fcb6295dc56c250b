"""What the way through the gateway costs, beside the straight way and beside a proxy of the usual parts."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks import venvs
from benchmarks.calls import CALLERS, warm_up
from benchmarks.measure import Effort, Line, interleave, line, rate
from benchmarks.processes import OURS, Server, Worker, ours, running, server

TOKEN = "of-the-benchmark"
MOST_LATENCY, LEAST_THROUGHPUT, MOST_SHARED = 4.0, 1 / 5, 1.2
MOST_WATCHED, MOST_TRACED = 1.15, 1.4
SMALL_CALLS, LARGE_CALLS, PEER_CALLS = 960, 480, 64


def hop(effort: Effort) -> list[Line]:
    """One call at a time straight and through the gateway; 32 through the gateway and through Starlette + httpx."""
    proxy = [venvs.peer("starlette-httpx"), "-m", "benchmarks.servers.starlette_proxy", "PORT"]
    with (
        server(ours("echo")) as sandbox,
        _gateway(sandbox) as gateway,
        server([*proxy, sandbox.url]) as other,
        _client(sandbox, sandbox.url) as straight,
        _client(gateway, f"{gateway.url}/env-instance/one") as through,
        _client(other, other.url) as through_other,
    ):

        def compared(call: str, calls: int, size: str) -> list[Line]:
            warm_up(straight, through, through_other, call=call)
            one, direct = interleave(
                effort.rounds(21), lambda: through.round(call, 100, 1), lambda: straight.round(call, 100, 1)
            )
            many, proxied = interleave(
                effort.rounds(9),
                lambda: through.round(call, calls, CALLERS),
                lambda: through_other.round(call, PEER_CALLS, CALLERS),
            )
            seconds, direct_seconds = [x.wall for x in one], [x.wall for x in direct]
            walls, other_walls = [x.wall for x in many], [x.wall for x in proxied]
            name = f"gateway at {CALLERS}{size}"
            return [
                line(
                    f"gateway, a call{size}", "µs", seconds, "straight", direct_seconds, limit=MOST_LATENCY, scale=1e6
                ),
                rate(name, walls, "Starlette + httpx", other_walls, limit=LEAST_THROUGHPUT),
                line(f"{name}, CPU a call", "µs", [x.server_cpu for x in many], scale=1e6),
            ]

        return [*compared("add", SMALL_CALLS, ""), *compared("echo", LARGE_CALLS, ", 64 KB")]


def service(effort: Effort) -> list[Line]:
    """CPU of the gateway for a call to a service, which it shares out, beside one to an instance."""
    with (
        server(ours("echo")) as sandbox,
        _gateway(sandbox) as gateway,
        _client(gateway, f"{gateway.url}/env-service/both") as shared,
        _client(gateway, f"{gateway.url}/env-instance/one") as single,
    ):
        warm_up(shared, single)
        many, one = interleave(
            effort.rounds(21),
            lambda: shared.round("add_once", SMALL_CALLS, CALLERS).server_cpu,
            lambda: single.round("add_once", SMALL_CALLS, CALLERS).server_cpu,
        )
    return [line("service call, gateway CPU", "µs", many, "instance call", one, limit=MOST_SHARED, scale=1e6)]


def observed(effort: Effort) -> list[Line]:
    """CPU of the gateway for a call that is counted and logged as JSON, and for one that is traced, beside neither."""
    with (
        server(ours("echo")) as sandbox,
        running([OURS, "-m", "benchmarks.servers.collector"], piped=True) as collector,
        _gateway(sandbox) as plain,
        _gateway(sandbox, "watched") as watched,
        _gateway(sandbox, f"http://127.0.0.1:{_port(collector)}") as traced,
        _client(plain, f"{plain.url}/env-instance/one") as without,
        _client(watched, f"{watched.url}/env-instance/one") as with_lines,
        _client(traced, f"{traced.url}/env-instance/one") as with_spans,
    ):
        warm_up(without, with_lines, with_spans)
        bare, lines, spans = interleave(
            effort.rounds(21),
            lambda: without.round("add", SMALL_CALLS, CALLERS).server_cpu,
            lambda: with_lines.round("add", SMALL_CALLS, CALLERS).server_cpu,
            lambda: with_spans.round("add", SMALL_CALLS, CALLERS).server_cpu,
        )
    return [
        line(
            "call with metrics and JSON logs, gateway CPU", "µs", lines, "without", bare, limit=MOST_WATCHED, scale=1e6
        ),
        line("call with a trace, gateway CPU", "µs", spans, "without", bare, limit=MOST_TRACED, scale=1e6),
    ]


@contextmanager
def _gateway(sandbox: Server, *how: str) -> Iterator[Server]:
    with running([OURS, "-m", "benchmarks.servers.gateway", sandbox.url, TOKEN, *how], piped=True) as process:
        yield Server(process.pid, _port(process), 0.0)


def _port(process: subprocess.Popen[bytes]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


@contextmanager
def _client(target: Server, url: str) -> Iterator[Worker]:
    with running([OURS, "-m", "benchmarks.workers.hop", url, TOKEN], piped=True) as process:
        yield Worker(process, target)
