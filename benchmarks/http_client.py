"""``aenv.http`` beside the usual clients: CPU of a request against one server, and of the import."""

from __future__ import annotations

from benchmarks import venvs
from benchmarks.calls import CALLERS, warm_up
from benchmarks.measure import Effort, Line, interleave, line
from benchmarks.processes import OURS, cpu_of, ours, server, worker

CALLS = 1600


def http_client(effort: Effort) -> list[Line]:
    """CPU of a request with a small JSON body at 32 callers, less the kernel's, and of importing the client."""
    aiohttp, httpx = venvs.peer("aiohttp"), venvs.peer("httpx")
    tool = "add_async"
    with (
        server(ours("few")) as target,
        worker("raw", target) as mine,
        worker("aiohttp_client", target, aiohttp) as first,
        worker("httpx_client", target, httpx) as second,
    ):
        warm_up(mine, first, second, call=tool)
        our_cpu, aiohttp_cpu, httpx_cpu = interleave(
            effort.rounds(13),
            lambda: mine.round(tool, 2 * CALLS, CALLERS).client_user,
            lambda: first.round(tool, CALLS, CALLERS).client_user,
            lambda: second.round(tool, CALLS // 8, CALLERS).client_user,
        )
    our_import, aiohttp_import, httpx_import = interleave(
        effort.rounds(13),
        lambda: cpu_of([OURS, "-c", "import aenv.http"]),
        lambda: cpu_of([aiohttp, "-c", "import aiohttp"]),
        lambda: cpu_of([httpx, "-c", "import httpx"]),
    )
    return [
        line("HTTP request, client user CPU", "µs", our_cpu, "aiohttp", aiohttp_cpu, limit=0.6, scale=1e6),
        line("HTTP request, client user CPU (httpx)", "µs", our_cpu, "httpx", httpx_cpu, scale=1e6),
        line("HTTP client import, CPU", "ms", our_import, "aiohttp", aiohttp_import, scale=1e3),
        line("HTTP client import, CPU (httpx)", "ms", our_import, "httpx", httpx_import, scale=1e3),
    ]
