"""Two API servers on one Redis under everything that a team does to them, for a long time.

Episodes from beginning to end, clients that vanish, more instances than the quota has room for, and a service that is
called all the time while it is updated, scaled and loses replicas. Fails when a call that was safe fails, when a
server's memory, descriptors or threads keep growing, or when anything is left at the end.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from aenv import AEnvError, Environment
from aenv.client.api import ApiClient
from aenv.client.platform import Platform
from aenv.client.services import ServicesClient
from aenv.wire import InstanceRequest, QuotaRequest, ServiceChange, ServiceRequest
from benchmarks import owners
from benchmarks.platform import told
from benchmarks.processes import OURS, START, environment, free_port, running
from benchmarks.soak.growth import WARM_UP, State
from benchmarks.workers.owner import Remote

PROJECT = Path(__file__).parent.parent / "projects" / "soak"
ENV = "soak"
WORKERS = 8
"""Episodes at a time."""
ROOM, MEMBERS = 6, 4
"""Instances that may live at a time, so that some always wait; and replicas, with those of an update."""
CALLS = 10
"""Calls of an episode."""
SERVICE_CALLERS = 4
LEFT_FOR = 5.0
"""Seconds of the lease of what a client leaves behind."""
SETTLE = 60.0
"""Seconds in which all that was made must be gone."""


class Run:
    """What is counted, and until when."""

    def __init__(self, urls: list[str], key: str, seconds: float) -> None:
        self.urls = urls
        self.key = key
        self.until = time.monotonic() + seconds
        self.done: Counter[str] = Counter()
        self.took: dict[str, list[float]] = defaultdict(list)

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.until

    def client(self) -> ApiClient:
        return ApiClient(random.choice(self.urls), self.key)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.took[what].append(time.perf_counter() - began)
        self.done[what] += 1


async def episodes(run: Run, number: int) -> None:
    """One after the other, of one of two experiments, at one of the servers; by its gateway, or straight."""
    labels = {"experiment": f"experiment-{number % 2}"}
    while run.goes_on:
        platform = (Remote if number % 4 < 2 else Platform)(random.choice(run.urls), run.key)
        env = Environment(ENV, provision=platform, ttl="10m", labels=labels)
        with run.timed("create, with the queue"):
            await env.initialize()
        try:
            for _ in range(CALLS):
                value = random.randrange(1_000_000)
                with run.timed("call"):
                    result = await env.call_tool("add", {"a": value, "b": 1})
                assert result.structured == {"result": value + 1}, result
            assert await env.call_reward({"answer": value}) == float(value % 2)
        finally:
            with run.timed("release"):
                await env.release()


async def vanishing(run: Run) -> None:
    """Clients that make an instance and are not heard of again."""
    while run.goes_on:
        request = InstanceRequest(env_name=ENV, ttl="10m", lease=LEFT_FOR, labels={"experiment": "left"})
        await run.client().create(request, wait=START, key=None)
        run.done["left behind"] += 1
        await asyncio.sleep(2.0)


async def calling(run: Run, id: str) -> None:
    """The service, all the time."""
    while run.goes_on:
        async with Environment(service_id=id, aenv_url=random.choice(run.urls), api_key=run.key) as env:
            for _ in range(200):
                value = random.randrange(1_000_000)
                try:
                    with run.timed("service call"):
                        result = await env.call_tool("add", {"a": value, "b": 1})
                except AEnvError as exc:
                    # What was under way in a replica that was killed: whether it ran is not known.
                    run.done[f"service call lost with its replica ({exc.code})"] += 1
                    continue
                assert result.structured == {"result": value + 1}, result
                await asyncio.sleep(0.01)


async def operating(run: Run, id: str) -> None:
    """Updates, scaling, and a replica that dies, again and again."""
    acts = ("variables", "scale", "kill")
    number = 0
    while run.goes_on:
        act = acts[number % len(acts)]
        number += 1
        client = ServicesClient(random.choice(run.urls), run.key)
        if act == "variables":
            await client.update(id, ServiceChange(environment_variables={"ROUND": str(number)}))
        elif act == "scale":
            await client.update(id, ServiceChange(replicas=2 + number % 2))
        else:
            async with Environment(service_id=id, aenv_url=run.urls[0], api_key=run.key) as env:
                with suppress(AEnvError):
                    await env.call_tool("end")
        run.done[act] += 1
        await _steady(run, client, id)


async def _steady(run: Run, client: ServicesClient, id: str) -> None:
    """Wait until the service is what it should be, for the next thing to happen to it."""
    deadline = time.monotonic() + SETTLE
    while run.goes_on:
        await asyncio.sleep(1.0)
        found = await client.get(id)
        if found.status == "Running" and found.available_replicas == found.replicas:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"the service does not settle: {found.status}, {found.reason}")


async def watching(run: Run, pids: list[int], seconds: float) -> tuple[list[State], list[State]]:
    """What the servers hold after they are warm, and at the end."""
    started, warm = time.monotonic(), None
    while run.goes_on:
        await asyncio.sleep(min(10.0, seconds / 10))
        states = [State.of(pid) for pid in pids]
        passed = time.monotonic() - started
        print(f"{passed:6.0f} s  {run.done.total():8d} done  {'   '.join(map(str, states))}", file=sys.stderr)
        if warm is None and passed > seconds * WARM_UP:
            warm = states
    assert warm is not None
    return warm, [State.of(pid) for pid in pids]


class Servers(NamedTuple):
    """Two servers on one Redis, in one home, with the project published: where they are, the key to them, and their
    processes."""

    urls: list[str]
    key: str
    pids: list[int]
    home: Path


Actor = Callable[[Run], Coroutine[Any, Any, None]]
"""Does something to the servers for as long as the run goes on."""
Leftovers = Callable[[Servers], Awaitable[list[str]]]
"""What is left of them where they had their sandboxes."""


async def soak(seconds: float) -> int:
    return await churn(seconds, _nothing)


async def _nothing(servers: Servers) -> list[str]:
    return []


async def churn(
    seconds: float,
    leftovers: Leftovers,
    *options: str,
    variables: Mapping[str, str] | None = None,
    more: Sequence[Actor] = (),
) -> int:
    """Everything at once against two servers with these options and variables, and what ``more`` do besides."""
    if shutil.which("redis-server") is None:
        print("redis-server is not installed, and several servers share nothing else", file=sys.stderr)
        return 2
    async with _platforms(*options, **variables or {}) as servers:
        urls, key, pids, _ = servers
        run = Run(urls, key, seconds)
        control, services = ApiClient(urls[0], key), ServicesClient(urls[0], key)
        await control.set_quota("platform", QuotaRequest(instances=ROOM + MEMBERS))
        id = (await services.create(ServiceRequest(env_name=ENV, replicas=2), wait=START)).id
        async with asyncio.TaskGroup() as group:
            for number in range(WORKERS):
                group.create_task(episodes(run, number))
            for _ in range(SERVICE_CALLERS):
                group.create_task(calling(run, id))
            group.create_task(vanishing(run))
            group.create_task(operating(run, id))
            for actor in more:
                group.create_task(actor(run))
            watched = group.create_task(watching(run, pids, seconds))
        warm, end = watched.result()
        await services.delete(id)
        left = await _left(control) + await leftovers(servers)
    _report(run, warm, end)
    grown = [name for then, now in zip(warm, end, strict=True) for name in now.grown_since(then)]
    for what, found in (("growing", grown), ("left", left)):
        if found:
            print(f"{what}: {', '.join(found)}")
    if not grown and not left:
        print(f"{run.done.total()} done in {seconds:.0f} s; nothing grew, nothing is left")
    return 1 if grown or left else 0


async def _left(control: ApiClient) -> list[str]:
    """What is not gone after a while: instances, and what the quotas count."""
    deadline = time.monotonic() + SETTLE
    while True:
        living = sum((await control.top()).counts.values())
        used = {quota.subject: quota.used for quota in (await control.quotas())[0]}
        counted = [
            f"{count:g} {name} of {subject}" for subject in used for name, count in used[subject].items() if count
        ]
        left = [*([f"{living} instances"] if living else []), *counted]
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.5)


def _report(run: Run, warm: list[State], end: list[State]) -> None:
    print("| what | times | median ms | 90% | 99% | longest |\n|---|---|---|---|---|---|")
    for what, took in sorted(run.took.items()):
        ordered = sorted(took)
        shares = (ordered[min(int(len(ordered) * share), len(ordered) - 1)] for share in (0.5, 0.9, 0.99, 1.0))
        print(f"| {what} | {len(took)} | {' | '.join(f'{1e3 * one:.1f}' for one in shares)} |")
    print("  ".join(f"{what} {count}" for what, count in sorted(run.done.items()) if what not in run.took))
    for number, (then, now) in enumerate(zip(warm, end, strict=True), 1):
        print(f"server {number} after {WARM_UP:.0%} of the time: {then}\nserver {number} at the end:            {now}")


@asynccontextmanager
async def _platforms(*options: str, **variables: str) -> AsyncIterator[Servers]:
    with owners.new_home() as home, _redis(home) as store:
        env = environment(AENV_HOME=str(home), **variables)
        serve = [OURS, "-m", "aenv", "serve", "--port", "0", "--data-port", "0", "--until-eof", "-o", "json"]
        command: list[str | Path] = [*serve, "--store", store, *options]
        with (
            running(command, cwd=home, env=env, piped=True) as one,
            running(command, cwd=home, env=env, piped=True) as other,
        ):
            urls = [told(process)["url"] for process in (one, other)]
            key = (home / "token").read_text().strip()
            push = [OURS, "-m", "aenv", "push", PROJECT]
            await asyncio.to_thread(
                subprocess.run,
                push,
                env={**env, "AENV_SYSTEM_URL": urls[0]},
                capture_output=True,
                timeout=START,
                check=True,
            )
            yield Servers(urls, key, [one.pid, other.pid], home)


@contextmanager
def _redis(home: Path) -> Iterator[str]:
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(home), "--appendonly", "yes"]
    with running(command, cwd=home) as process:
        yield f"redis://127.0.0.1:{port}/0"
        os.kill(process.pid, signal.SIGTERM)
