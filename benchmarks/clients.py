"""What a call costs the program that makes it, and how many it gets through."""

from __future__ import annotations

from benchmarks import venvs
from benchmarks.calls import CALLERS, warm_up
from benchmarks.measure import Effort, Line, interleave, line, rate
from benchmarks.processes import fastmcp, ours, server, worker

OURS_CALLS = 1600
PEER_CALLS = 256


def client_cpu(effort: Effort) -> list[Line]:
    """Client CPU of ``Environment.call_tool`` and of FastMCP's ``Client.call_tool`` against one server, ours."""
    lines = []
    python = venvs.python("fastmcp")
    with (
        server(ours("few")) as target,
        worker("sdk", target) as mine,
        worker("fastmcp_client", target, python) as other,
    ):
        warm_up(mine, other)
        for callers, limit in ((1, None), (CALLERS, 1 / 6)):
            our_rounds, other_rounds = interleave(
                effort.rounds(13),
                lambda callers=callers: mine.round("add", OURS_CALLS, callers),
                lambda callers=callers: other.round("add", PEER_CALLS, callers),
            )
            lines.append(
                line(
                    f"call_tool at {callers}, client CPU a call",
                    "µs",
                    [x.client_cpu for x in our_rounds],
                    "FastMCP",
                    [x.client_cpu for x in other_rounds],
                    limit=limit,
                    scale=1e6,
                )
            )
    return lines


def throughput(effort: Effort) -> list[Line]:
    """Calls a second at 32 callers: our client and server, FastMCP's client and server."""
    python = venvs.python("fastmcp")
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
