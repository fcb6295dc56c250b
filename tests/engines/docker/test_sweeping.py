"""What engines that are gone left at a daemon is found, told and removed; what may be somebody's stays.

The daemon may be that of other tests too: nothing here removes what another engine made.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from aenv import http
from aenv.engines.docker import sweeping
from aenv.engines.docker.containers import ENGINE, FACTS, ID, KIND, PROCESS, PROJECT, SANDBOX, SOCKETS
from aenv.engines.docker.daemon import Daemon
from aenv.engines.docker.explaining import explain
from aenv.engines.docker.keepers import USES
from aenv.engines.docker.keeping import Keeping, is_dead, process, root
from aenv.engines.process.state import start_time
from aenv.errors import Conflict, NotFound

LONG = 10 * 365 * 24 * 3600.0


class Yard:
    """A daemon, and what a test made there."""

    def __init__(self, daemon: Daemon, image: str) -> None:
        self.daemon, self.image = daemon, image
        self.name = secrets.token_hex(6)
        self.made: list[tuple[str, str]] = []

    async def container(self, engine: str, kind: str = SANDBOX, **labels: str) -> str:
        """One that never ran; it is listed as one that does not run."""
        name = f"aenv-sweep-{self.name}-{len(self.made)}"
        marks = {ENGINE: engine, ID: name, KIND: kind, **labels}
        body = {"Image": self.image, "Entrypoint": ["sleep", "600"], "Labels": marks}
        host = {"NetworkMode": "none"}
        self.made.append(("containers", name))
        await self.daemon.ask("POST", "/containers/create", query={"name": name}, body={**body, "HostConfig": host})
        return name

    async def volume(self, engine: str, container: str = "") -> str:
        name = f"aenv-sweep-{self.name}-{len(self.made)}"
        self.made.append(("volumes", name))
        labels = {ENGINE: engine, ID: container, KIND: SOCKETS}
        await self.daemon.ask("POST", "/volumes/create", body={"Name": name, "Driver": "local", "Labels": labels})
        return name

    async def is_there(self, name: str) -> bool:
        kind = {made: kind for kind, made in self.made}[name]
        try:
            await self.daemon.ask("GET", f"/{kind}/{name}" + ("/json" if kind == "containers" else ""))
        except NotFound:
            return False
        return True

    async def left(self, **options: Any) -> dict[str, str]:
        """Of what was made here, what would be removed, and why."""
        found = await sweeping.sweep(self.daemon, **{"unused": LONG, "dry_run": True, **options})
        mine = {name for _, name in self.made}
        return {left.name: left.why for left in found if left.name in mine}

    async def clear(self) -> None:
        for kind, name in sorted(self.made):
            with suppress(NotFound):
                await self.daemon.ask("DELETE", f"/{kind}/{name}", query={"force": "1"})


@pytest.fixture
async def yard(daemon: str, base_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Yard]:
    monkeypatch.setenv("AENV_HOME", str(tmp_path / "home"))
    made = Yard(await Daemon.find(daemon), base_image)
    try:
        yield made
    finally:
        await made.clear()
        await http.close()


def engine(alive: bool) -> tuple[str, int]:
    """An engine without a state that this home knows, and its lock."""
    name = f"_{secrets.token_hex(6)}"
    (root() / name).mkdir(parents=True)
    lock = os.open(root() / name / "lock", os.O_RDWR | os.O_CREAT)
    if alive:
        fcntl.flock(lock, fcntl.LOCK_EX)
    return name, lock


async def test_what_a_dead_engine_left_is_told_and_removed(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    dead, first = engine(alive=False)
    alive, second = engine(alive=True)
    try:
        gone, stays = await yard.container(dead), await yard.container(alive)
        elsewhere = await yard.container("_nobody-knows")
        door, open_door = await yard.volume(dead, gone), await yard.volume(alive, stays)
        young = await yard.volume(alive)
        said = {gone: "its program is gone", door: "its container is gone"}
        assert await yard.left() == said
        assert await yard.is_there(gone), "it was only to be told"
        assert (root() / dead).is_dir()
        assert await yard.left(dry_run=False) == said
        for name in (gone, door):
            assert not await yard.is_there(name)
        for name in (stays, open_door, elsewhere, young):
            assert await yard.is_there(name)
        assert not (root() / dead).exists()
        assert (root() / alive).is_dir()
        monkeypatch.setattr(sweeping, "_MAKING", -60.0)
        assert await yard.left() == {young: "its container is gone"}
    finally:
        os.close(first)
        os.close(second)


async def test_a_process_that_is_dead_is_known_in_other_homes_too(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "600"]) as other:
        boot, namespace, _, _ = process().split()
        told = f"{boot} {namespace} {other.pid} {start_time(other.pid)}"
        gone = await yard.container("_elsewhere", **{PROCESS: told})
        mine = await yard.container("_this", **{PROCESS: process()})
        monkeypatch.setattr(sweeping.keeping, "is_dead", lambda text: text == told and is_dead(text))
        monkeypatch.setattr(sweeping, "_ELSEWHERE", -60.0)
        assert await yard.left() == {}
        other.kill()
    monkeypatch.setattr(sweeping, "_ELSEWHERE", 600.0)
    assert await yard.left() == {}, "its own home comes first"
    monkeypatch.setattr(sweeping, "_ELSEWHERE", -60.0)
    assert await yard.left() == {gone: "its program is gone"}
    assert await yard.left(dry_run=False) == {gone: "its program is gone"}
    assert not await yard.is_there(gone)
    assert await yard.is_there(mine)


async def test_what_cannot_be_removed_is_tried_again_later(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    dead, lock = engine(alive=False)
    os.close(lock)
    gone = await yard.container(dead)
    ask = yard.daemon.ask

    async def refused(method: str, path: str, **options: Any) -> Any:
        if method == "DELETE":
            raise Conflict("it is busy")
        return await ask(method, path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(yard.daemon, "ask", refused)
        assert "cannot be removed: it is busy" in (await yard.left(dry_run=False))[gone]
    assert (root() / dead).is_dir(), "nobody would know any more that it is dead"
    assert await yard.left(dry_run=False) == {gone: "its program is gone"}
    assert not (root() / dead).exists()


async def test_what_nobody_came_for_is_left(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = await yard.container("platform-1")
    ended = await yard.container("platform-1")
    await yard.daemon.ask("POST", f"/containers/{ended}/start")
    assert await yard.left() == {}
    await yard.daemon.ask("POST", f"/containers/{ended}/kill")
    assert await yard.left() == {}, "whoever made them may still ask"
    monkeypatch.setattr(sweeping, "OVER", -60.0)
    assert set(await yard.left()) == {waiting, ended}


async def test_what_should_have_ended_long_ago_is_left(yard: Yard) -> None:
    state = f"platform-{secrets.token_hex(4)}"

    async def running(ttl: float | None, age: float) -> str:
        created = time.time() - age
        facts = {"id": "x", "env": "e", "created_at": created, **({} if ttl is None else {"ttl": ttl})}
        name = await yard.container(state, **{FACTS: json.dumps(facts)})
        await yard.daemon.ask("POST", f"/containers/{name}/start")
        return name

    over, later = await running(60.0, 7200.0), await running(60.0, 7200.0)
    await running(60.0, 1800.0)
    await running(None, 7200.0)
    assert await yard.left() == {}, "another home's may have been told to live longer"
    Keeping(state, lasting=True).set_expires(later, time.time() + 600)
    assert await yard.left() == {over: "its time is over, and what was to end it is gone"}
    for _, name in yard.made:
        await yard.daemon.ask("POST", f"/containers/{name}/kill")


async def test_a_project_that_no_sandbox_has_is_left_after_a_while(yard: Yard) -> None:
    unused, used = await yard.container("", PROJECT), await yard.container("", PROJECT)
    await yard.container("platform-1", **{USES: used})
    assert await yard.left() == {}
    assert await yard.left(unused=-60.0) == {unused: "no sandbox has it"}


async def test_the_doctor_tells_what_a_daemon_gives(
    daemon: str, base_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AENV_BASE_IMAGE", base_image)
    rows = {row.name: row for row in await explain(daemon)}
    assert rows["docker"].status == "ok"
    assert rows["docker: base image"].detail.startswith(f"{base_image}, linux/")
    assert {"docker: storage", "docker: limits", "docker: runtimes", "docker: network"} <= set(rows)
    monkeypatch.setenv("AENV_BASE_IMAGE", "no-such-image")
    monkeypatch.setenv("AENV_DOCKER_RUNTIME", "no-such-runtime")
    rows = {row.name: row for row in await explain(daemon)}
    assert "make base-image" in rows["docker: base image"].fix
    assert rows["docker: runtimes"].detail.startswith("no-such-runtime is not there")
    assert all(rows[name].status == "warn" for name in ("docker: base image", "docker: runtimes"))
    await http.close()
