"""What the way through the gateway costs, beside the straight way and beside a proxy of the usual parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks import venvs
from benchmarks.calls import CALLERS, warm_up
from benchmarks.measure import Effort, Line, interleave, line, rate
from benchmarks.processes import OURS, Server, Worker, ours, running, server

TOKEN = "of-the-benchmark"
MOST_LATENCY, LEAST_THROUGHPUT = 4.0, 1 / 5
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


@contextmanager
def _gateway(sandbox: Server) -> Iterator[Server]:
    with running([OURS, "-m", "benchmarks.servers.gateway", sandbox.url, TOKEN], piped=True) as process:
        assert process.stdout is not None
        yield Server(process.pid, int(process.stdout.readline()), 0.0)


@contextmanager
def _client(target: Server, url: str) -> Iterator[Worker]:
    with running([OURS, "-m", "benchmarks.workers.hop", url, TOKEN], piped=True) as process:
        yield Worker(process, target)
