"""What a call costs the sandbox, and how many tools or which kind of call changes it."""

from __future__ import annotations

from benchmarks import venvs
from benchmarks.measure import Effort, Line, interleave, line, rate
from benchmarks.processes import Worker, fastmcp, ours, server, worker

CALLERS = 32
OURS_CALLS = 3200
PEER_CALLS = 320


def server_cpu(effort: Effort) -> list[Line]:
    """Server CPU of one ``tools/call`` at 32 callers, driven by the same cheap client."""
    with (
        server(ours("few")) as mine,
        server(fastmcp(venvs.peer("fastmcp"))) as other,
        server(fastmcp(venvs.peer("fastmcp-uvloop"))) as tuned,
        worker("raw", mine) as to_mine,
        worker("raw", other) as to_other,
        worker("raw", tuned) as to_tuned,
    ):

        def cost(client: Worker, tool: str, calls: int) -> float:
            return client.round(tool, calls, CALLERS).server_cpu

        warm_up(to_mine, to_other, to_tuned)
        sync, other_sync, tuned_sync = interleave(
            effort.rounds(13),
            lambda: cost(to_mine, "add", OURS_CALLS),
            lambda: cost(to_other, "add", PEER_CALLS),
            lambda: cost(to_tuned, "add", PEER_CALLS),
        )
        asynchronous, other_asynchronous = interleave(
            effort.rounds(13),
            lambda: cost(to_mine, "add_async", OURS_CALLS),
            lambda: cost(to_other, "add_async", PEER_CALLS),
        )
    name = "sync tool, server CPU a call"
    return [
        line(name, "µs", sync, "FastMCP", other_sync, limit=1 / 8, scale=1e6),
        line(f"{name} (uvloop)", "µs", sync, "FastMCP, uvloop", tuned_sync, scale=1e6),
        line("async tool, server CPU a call", "µs", asynchronous, "FastMCP", other_asynchronous, scale=1e6),
    ]


def many_tools(effort: Effort) -> list[Line]:
    """A sandbox with 100 tools beside one with 3."""
    with (
        server(ours("many")) as many,
        server(ours("few")) as few,
        worker("raw", many) as to_many,
        worker("raw", few) as to_few,
    ):
        warm_up(to_many, to_few)
        hundred, three = interleave(
            effort.rounds(20),
            lambda: to_many.round("add", OURS_CALLS, CALLERS),
            lambda: to_few.round("add", OURS_CALLS, CALLERS),
        )
    cpu, other_cpu = [x.server_cpu for x in hundred], [x.server_cpu for x in three]
    wall, other_wall = [x.wall for x in hundred], [x.wall for x in three]
    return [
        line("100 tools, server CPU a call", "µs", cpu, "3 tools", other_cpu, limit=1.25, scale=1e6),
        rate("100 tools, throughput", wall, "3 tools", other_wall, limit=1.25),
    ]


def kinds(effort: Effort) -> list[Line]:
    """``call_reward`` and ``call_function`` beside ``call_tool``: CPU of client and server together."""
    with server(ours("few")) as mine, worker("sdk", mine) as client:

        def cost(call: str) -> float:
            spent = client.round(call, OURS_CALLS // 2, CALLERS)
            return spent.client_cpu + spent.server_cpu

        for call in ("add", "reward", "function"):
            cost(call)
        tool, reward, function = interleave(
            effort.rounds(20), lambda: cost("add"), lambda: cost("reward"), lambda: cost("function")
        )
    return [
        line("call_reward, CPU of both sides", "µs", reward, "call_tool", tool, limit=1.15, scale=1e6),
        line("call_function, CPU of both sides", "µs", function, "call_tool", tool, limit=1.15, scale=1e6),
    ]


def warm_up(*workers: Worker, call: str = "add") -> None:
    """Calls that are not counted: connections, caches and threads come to be."""
    for each in workers:
        each.round(call, 4 * CALLERS, CALLERS)
