"""Calls through two API replicas on one Redis, beside the same through one."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks import owners
from benchmarks.calls import CALLERS, warm_up
from benchmarks.measure import Effort, Line, interleave, line, rate
from benchmarks.owners import PROJECT
from benchmarks.platform import told
from benchmarks.processes import OURS, START, Server, Worker, cpu_seconds, environment, free_port, running

CALLS = 800
"""Of each client in each round."""
LEAST = 1.6
"""Times the calls of one that two must carry."""
CORES = 6
"""For two servers, two sandboxes and two clients: below that, they would share what is to be measured."""


class _Spent(NamedTuple):
    """Seconds a call."""

    wall: float
    cpu: float


def lacking() -> str:
    """Why it cannot be measured here; empty when it can."""
    if shutil.which("redis-server") is None:
        return "redis-server is not installed"
    return "" if find_spec("redis") else "the redis package is not installed"


def replicas(effort: Effort) -> list[Line]:
    """CPU of a call through two API replicas beside one through one alone; and calls a second, where cores allow."""
    with (
        _redis() as store,
        owners.new_home() as home,
        _server(store, home) as one,
        _server(store, home) as two,
        closing(_Api(one.control, home)) as api,
    ):
        api.push()
        first, second = api.create(), api.create()
        with (
            _client(one, first) as to_one,
            _client(one, second) as also_to_one,
            _client(two, second) as to_two,
        ):
            warm_up(to_one, also_to_one, to_two)

            def alone() -> _Spent:
                return _together((to_one, also_to_one), (one,), CALLERS // 2)

            def both() -> _Spent:
                return _together((to_one, to_two), (one, two), CALLERS)

            shared, single = interleave(effort.rounds(15), both, alone)
    cpu, alone_cpu = [spent.cpu for spent in shared], [spent.cpu for spent in single]
    walls, alone_walls = [spent.wall for spent in shared], [spent.wall for spent in single]
    found = [
        line("two replicas, CPU a call", "µs", cpu, "one", alone_cpu, limit=2 / LEAST, scale=1e6),
        line("two replicas, calls a second of a core", "calls/s", [1 / spent for spent in cpu]),
    ]
    if (cores := len(os.sched_getaffinity(0))) >= CORES:
        return [*found, rate("two replicas, calls", walls, "one", alone_walls, limit=1 / LEAST)]
    sys.stderr.write(
        f"  {cores} cores are too few for two servers, two sandboxes and two clients: here, two carried"
        f" {1 / median(walls):,.0f} calls/s and one {1 / median(alone_walls):,.0f}, which says nothing of either\n"
    )
    return found


def _together(clients: Sequence[Worker], servers: Sequence[_Replica], callers: int) -> _Spent:
    """Have all clients call at the same time, each with so many callers; each server has as many callers as another."""
    before = sum(cpu_seconds(server.data.pid) for server in servers)
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(clients)) as pool:
        list(pool.map(lambda client: client.round("add_once", CALLS, callers), clients))
    calls = CALLS * len(clients)
    wall = time.perf_counter() - begin
    return _Spent(wall / calls, (sum(cpu_seconds(server.data.pid) for server in servers) - before) / calls)


# What is measured


class _Replica(NamedTuple):
    """One server with two ports."""

    control: Server
    data: Server


class _Instance(NamedTuple):
    id: str
    token: str


class _Api:
    """The control plane of a server, as its user asks it."""

    def __init__(self, server: Server, home: Path) -> None:
        self._url = server.url
        self._home = home
        self._connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=START)
        self._headers = {
            "Authorization": f"Bearer {(home / 'token').read_text().strip()}",
            "Content-Type": "application/json",
            "Prefer": f"wait={START:g}",
        }

    def push(self) -> None:
        """Publish the project of the benchmarks."""
        env = environment(AENV_HOME=str(self._home), AENV_SYSTEM_URL=self._url)
        command = [OURS, "-m", "aenv", "push", PROJECT]
        subprocess.run(command, env=env, capture_output=True, timeout=START, check=True)

    def create(self) -> _Instance:
        body = json.dumps({"envName": json.loads((PROJECT / "config.json").read_text())["name"], "ttl": "1h"})
        self._connection.request("POST", "/env-instance", body, self._headers)
        found: dict[str, Any] = json.loads(self._connection.getresponse().read())["data"]
        if found["status"] != "Running":
            raise RuntimeError(f"an instance did not start: {found['reason']}")
        return _Instance(found["id"], found["agent_token"])

    def close(self) -> None:
        self._connection.close()


@contextmanager
def _server(store: str, home: Path) -> Iterator[_Replica]:
    """An API replica."""
    command = [OURS, "-m", "aenv", "serve", "--store", store, "--port", "0", "--data-port", "0", "--until-eof"]
    env = environment(AENV_HOME=str(home))
    with running([*command, "-o", "json"], cwd=home, env=env, piped=True) as process:
        found = told(process)
        control, data = (urlsplit(found[name]).port or 0 for name in ("url", "data_url"))
        yield _Replica(Server(process.pid, control, 0.0), Server(process.pid, data, 0.0))


@contextmanager
def _client(server: _Replica, instance: _Instance) -> Iterator[Worker]:
    url = f"{server.data.url}/env-instance/{instance.id}"
    with running([OURS, "-m", "benchmarks.workers.hop", url, instance.token], piped=True) as process:
        yield Worker(process, server.data)


@contextmanager
def _redis() -> Iterator[str]:
    """A store that several servers share."""
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "yes"]
    with tempfile.TemporaryDirectory(prefix="aenv-redis-") as folder, running(command, cwd=Path(folder)):
        deadline = time.monotonic() + START
        while time.monotonic() < deadline:
            with suppress(OSError), closing(http.client.HTTPConnection("127.0.0.1", port, timeout=1)) as probe:
                probe.connect()
                break
            time.sleep(0.01)
        yield f"redis://127.0.0.1:{port}/0"
