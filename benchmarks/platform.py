"""What a platform adds to the engine below it: to create instances one by one and by many at once, and to list them."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from aenv.api import records
from aenv.api.records import InstanceRecord
from aenv.engines.base import new_id
from aenv.models import State
from aenv.store import open_store
from aenv.wire import Env, timestamp
from benchmarks import owners
from benchmarks.measure import Effort, Line, interleave, line
from benchmarks.owners import PROJECT, SPARE, Family, Left, Owner
from benchmarks.processes import OURS, START, environment, running

SEQUENCE = 5
"""Creates one after the other, to each side in each round."""
COUNT, COUNT_QUICK = 1000, 300
"""Instances that live at a time."""
PARTS = 5
"""Rounds in which they come to be."""
CLIENTS, PROCESSES = 64, 4
"""Creates under way at a time, and the programs that they are in."""
RECORDS, PAGE = 10_000, 100
PAGES = 10
"""Pages that are read, of each side in each round."""
MOST_CREATE, MOST_PAGE, MOST_WARM = 2.0, 5.0, 1.0
IMPORT = 0.2
"""Seconds of an import that is not shared."""
_CREATE = "create through the API, to first call"
_LIVING = ("Pending", "Creating", "Running")


def create(effort: Effort) -> list[Line]:
    """From a new ``Environment`` to its first answer: through a platform, straight and by its gateway; and without."""
    with (
        serving() as platform,
        owners.owner() as engine,
        owners.owner("settings") as embedded,
        platform.owner("settings") as straight,
        platform.owner("gateway") as remote,
    ):
        platform.push()
        for owner in (sides := (straight, remote, engine, embedded)):
            owner.ask("sequence", count=5)

        def sequence(owner: Owner) -> float:
            seconds: list[float] = owner.ask("sequence", count=SEQUENCE)
            return median(seconds)

        api, gateway, alone, local = interleave(
            effort.rounds(21), *(lambda owner=owner: sequence(owner) for owner in sides)
        )
    return [
        line(_CREATE, "ms", api, "engine", alone, limit=MOST_CREATE, scale=1e3),
        line(f"{_CREATE} by the gateway", "ms", gateway, "engine", alone, limit=MOST_CREATE, scale=1e3),
        line(f"{_CREATE} (embedded)", "ms", api, "embedded", local, limit=MOST_CREATE, scale=1e3),
    ]


def warm(effort: Effort) -> list[Line]:
    """The same through the API, where a warm sandbox waits, against a fork; and where each instance imports slowly."""
    with serving() as platform, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aenv-bench-warm-")))
        forked = stack.enter_context(pooled(platform, folder, "forked", 0))
        waiting = stack.enter_context(pooled(platform, folder, "pooled", SEQUENCE + 1))
        slow = stack.enter_context(pooled(platform, folder, "slow", 0, imports=IMPORT))
        slow_pooled = stack.enter_context(pooled(platform, folder, "slow-pooled", 2, imports=IMPORT))
        sides = ((waiting, SEQUENCE), (forked, SEQUENCE), (slow_pooled, 1), (slow, 1))
        for owner, _ in sides:
            owner.ask("sequence", count=3)

        def sequence(owner: Owner, count: int) -> float:
            seconds: list[float] = owner.ask("sequence", count=count)
            platform.fill()  # so that what is made again disturbs nobody
            return median(seconds)

        platform.fill()
        ours, other, late, later = interleave(
            effort.rounds(21), *(lambda owner=owner, count=count: sequence(owner, count) for owner, count in sides)
        )
        platform.check_claims()
    return [
        line(f"{_CREATE}, warm", "ms", ours, "a fork", other, limit=MOST_WARM, scale=1e3),
        line(f"{_CREATE}, warm, {IMPORT:g} s of import in each", "ms", late, "a fork", later, scale=1e3),
    ]


@contextmanager
def pooled(platform: Platform, folder: Path, name: str, size: int, *, imports: float = 0.0) -> Iterator[Owner]:
    """A client of the benchmarks' project under another name, with so many that wait."""
    root = folder / name
    shutil.copytree(PROJECT, root, ignore=shutil.ignore_patterns("__pycache__"))
    config = json.loads((root / "config.json").read_text())
    config["name"] = f"bench-{name}"
    config["deployConfig"]["pool"] = {"min": size, "max": size}
    if imports:
        config["deployConfig"]["preload"] = False
        (root / "src" / "slow.py").write_text(f"import time\n\ntime.sleep({imports})\n")
    (root / "config.json").write_text(json.dumps(config))
    platform.push(root)
    with platform.owner("settings", root) as owner:
        yield owner


def many(effort: Effort) -> list[Line]:
    """1,000 instances by 64 clients through the API: all of them answer, all of them end, and nothing is left."""
    part = (COUNT_QUICK if effort.quick else COUNT) // PARTS
    with serving() as platform, owners.owner() as engine:
        platform.push()
        with platform.owner("settings") as client:
            for owner in (engine, client):
                owner.ask("sequence", count=5)
        platform.sandboxes.settle(SPARE)
        before = Left(platform)
        with ExitStack() as stack:
            clients = [stack.enter_context(platform.owner("settings")) for _ in range(PROCESSES)]

            def through() -> float:
                return _together(clients, "fill", count=part // PROCESSES, at_once=CLIENTS // PROCESSES) / part

            def alone() -> float:
                seconds = _together([engine], "fill", count=part, at_once=CLIENTS)
                engine.ask("empty")
                return seconds / part

            ours, other = interleave(PARTS, through, alone)
            platform.sandboxes.settle(PARTS * part + SPARE)
            _together(clients, "call", at_once=CLIENTS // PROCESSES)
            releasing = _together(clients, "empty")
        platform.sandboxes.settle(SPARE)
        before.check(platform)
        if living := platform.living():
            raise RuntimeError(f"all instances are released, but the platform lists {living}")
    ratio = median(mine / theirs for mine, theirs in zip(ours, other, strict=True))
    name = f"by {CLIENTS} clients through the API"
    return [
        Line(f"created {name}", "a second", 1 / median(ours), "engine", 1 / median(other), ratio),
        line(f"released {name}, each", "ms", [releasing / part / PARTS], scale=1e3),
    ]


def _together(clients: Sequence[Owner], verb: str, **arguments: object) -> float:
    """Have all of them do the same at the same time; the seconds until the last has done it."""
    begin = time.perf_counter()
    for client in clients:
        client.tell(verb, **arguments)
    for client in clients:
        client.hear(verb)
    return time.perf_counter() - begin


def listing(effort: Effort) -> list[Line]:
    """The last page of 10,000 instances over HTTP, against the first of 100."""
    with serving(records=RECORDS, isolation="auto") as full, serving(records=PAGE, isolation="auto") as small:
        for platform, total in ((full, RECORDS), (small, PAGE)):
            platform.page(0, total)
        last, first = interleave(
            effort.rounds(11),
            lambda: _timed(full, RECORDS - PAGE, RECORDS),
            lambda: _timed(small, 0, PAGE),
        )
    return [line("last page of 10,000 over HTTP", "ms", last, "first of 100", first, limit=MOST_PAGE, scale=1e3)]


def _timed(platform: Platform, offset: int, total: int) -> float:
    begin = time.perf_counter()
    for _ in range(PAGES):
        platform.page(offset, total)
    return (time.perf_counter() - begin) / PAGES


# A platform


class Platform(Family):
    """``aenv serve`` in a process of its own, and its user's token."""

    def __init__(self, process: subprocess.Popen[bytes], home: Path) -> None:
        super().__init__(process.pid, home)
        self.url: str = told(process)["url"]
        token = (home / "token").read_text().strip()
        self._headers = {"Authorization": f"Bearer {token}"}
        self._connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=START)

    @property
    def sandboxes(self) -> Family:
        """What holds the instances, which is not all that a platform has: a hub runs what is pushed."""
        return Family(owners.spawner(self.home / "run" / "platform"), self.home)

    def owner(self, kind: str, project: Path = PROJECT) -> AbstractContextManager[Owner]:
        """A client of it, see ``benchmarks.workers.owner``."""
        return owners.owner(kind, self.home, project=project, AENV_SYSTEM_URL=self.url)

    def push(self, project: Path = PROJECT) -> None:
        """Publish the project of the benchmarks, or another."""
        env = environment(AENV_HOME=str(self.home), AENV_SYSTEM_URL=self.url)
        done = subprocess.run(
            [OURS, "-m", "aenv", "push", project], env=env, capture_output=True, text=True, timeout=START, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the project could not be pushed: {done.stderr}")

    def living(self) -> int:
        """How many instances it says that there are."""
        return sum(self._list(f"status={status}&limit=1")["total"] for status in _LIVING)

    def page(self, offset: int, total: int) -> None:
        """Read a page, and check that it is whole."""
        found = self._list(f"limit={PAGE}&offset={offset}")
        if (len(found["data"]), found["total"]) != (PAGE, total):
            raise RuntimeError(f"wrong page: {len(found['data'])} of {found['total']}, not {PAGE} of {total}")

    def fill(self) -> None:
        """Wait until all that should be warm is."""
        deadline = time.monotonic() + START
        while lacking := [pool for pool in self._get("/pool")["data"] if pool["ready"] < pool["min"]]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the pools are not full: {lacking}")
            time.sleep(0.02)

    def check_claims(self) -> None:
        """See that instances came from the pools, all but those that made the pools begin."""
        for pool in self._get("/pool")["data"]:
            if pool["misses"] > 3:
                raise RuntimeError(f"there was not always one that waited: {pool}")

    def _list(self, query: str) -> Any:
        return self._get(f"/env-instance/*/list?{query}")

    def _get(self, path: str) -> Any:
        self._connection.request("GET", path, headers=self._headers)
        response = self._connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise RuntimeError(f"wrong answer (status {response.status}): {body[:500]!r}")
        return json.loads(body)

    def close(self) -> None:
        self._connection.close()


@contextmanager
def serving(*options: str, records: int = 0, isolation: str = "strict", **variables: str) -> Iterator[Platform]:
    """A platform with so many records of instances that have ended. All that it made on this machine's own engine ends
    with the block."""
    command: list[str | Path] = [
        OURS,
        "-m",
        "aenv",
        "serve",
        "--port",
        "0",
        "--data-port",
        "0",
        "--until-eof",
        "-o",
        "json",
        *options,
    ]
    with owners.new_home() as home:
        if records:
            asyncio.run(_write(home, records))
        env = environment(AENV_HOME=str(home), AENV_ISOLATION=isolation, **variables)
        with running(command, cwd=home, env=env, piped=True) as process, closing(Platform(process, home)) as platform:
            yield platform


def told(process: subprocess.Popen[bytes]) -> Any:
    """The JSON object that a server prints when it is ready."""
    assert process.stdout is not None
    deadline = time.monotonic() + START
    text = b""
    while select.select([process.stdout], [], [], max(deadline - time.monotonic(), 0))[0]:
        part = os.read(process.stdout.fileno(), 4096)
        if not part:
            raise RuntimeError("the platform did not start")
        text += part
        with suppress(ValueError):
            return json.loads(text)
    raise RuntimeError(f"the platform was not ready within {START:g} s")


async def _write(home: Path, count: int) -> None:
    """Put records where the platform of this home keeps its own, as it writes them."""
    async with await open_store(f"sqlite:{home / 'platform' / 'platform.db'}") as store:
        now = time.time()
        made = [_record(now - number / 1000) for number in range(count)]
        for start in range(0, count, 500):
            await store.change(*(records.put(record, 0) for record in made[start : start + 500]))


def _record(at: float) -> InstanceRecord:
    name, version, written = "bench-few", "1.0.0", timestamp(at)
    env = Env(
        id=f"{name}@{version}",
        name=name,
        version=version,
        digest="0" * 64,
        deploy_config={"network": "none", "preload": True},
        created_at=written,
        updated_at=written,
    )
    return InstanceRecord(
        id=new_id(name),
        server="server",
        owner="local",
        env=env,
        status=State.TERMINATED,
        reason="it was deleted",
        created_at=at,
        updated_at=at,
        ttl=1800.0,
        expires_at=at + 1800.0,
        lease=60.0,
        lease_until=at + 60.0,
        labels={"experiment": "first"},
        ran=True,
    )
