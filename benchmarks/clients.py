"""What a call costs the program that makes it, and how many it gets through."""

from __future__ import annotations

from benchmarks import venvs
from benchmarks.calls import CALLERS, warm_up
from benchmarks.measure import Effort, Line, interleave, line, rate
from benchmarks.processes import Worker, fastmcp, ours, server, worker

OURS_CALLS = 1600
PEER_CALLS = 256


def client_cpu(effort: Effort) -> list[Line]:
    """Client CPU of ``Environment.call_tool`` and of FastMCP's ``Client.call_tool`` against one server, ours."""
    python = venvs.peer("fastmcp")
    with (
        server(ours("few")) as target,
        worker("sdk", target) as mine,
        worker("fastmcp_client", target, python) as other,
    ):

        def cost(client: Worker, calls: int, callers: int) -> float:
            return client.round("add", calls, callers).client_cpu

        warm_up(mine, other)
        one, other_one = interleave(
            effort.rounds(13), lambda: cost(mine, OURS_CALLS, 1), lambda: cost(other, PEER_CALLS, 1)
        )
        many, other_many = interleave(
            effort.rounds(13), lambda: cost(mine, OURS_CALLS, CALLERS), lambda: cost(other, PEER_CALLS, CALLERS)
        )
    name = f"call_tool at {CALLERS}, client CPU a call"
    return [
        line("call_tool at 1, client CPU a call", "µs", one, "FastMCP", other_one, scale=1e6),
        line(name, "µs", many, "FastMCP", other_many, limit=1 / 6, scale=1e6),
    ]


def throughput(effort: Effort) -> list[Line]:
    """Calls a second at 32 callers: our client and server, FastMCP's client and server."""
    python = venvs.peer("fastmcp")
    with (
        server(ours("few")) as mine,
        server(fastmcp(python)) as other,
        worker("sdk", mine) as to_mine,
        worker("fastmcp_client", other, python) as to_other,
    ):
        warm_up(to_mine, to_other)
        our_rounds, other_rounds = interleave(
            effort.rounds(13),
            lambda: to_mine.round("add", 2 * OURS_CALLS, CALLERS),
            lambda: to_other.round("add", PEER_CALLS, CALLERS),
        )
    walls, other_walls = [x.wall for x in our_rounds], [x.wall for x in other_rounds]
    return [rate(f"throughput at {CALLERS}", walls, "FastMCP", other_walls, limit=1 / 10)]
