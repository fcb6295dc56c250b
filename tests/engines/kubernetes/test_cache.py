"""What an engine knows of its pods, against a real API server: nothing is missed, whatever becomes of that server."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from aenv.engines.kubernetes import cache as caching
from aenv.engines.kubernetes import manifests, pods
from aenv.engines.kubernetes.api import MERGE, Cluster
from aenv.engines.kubernetes.cache import Cache
from aenv.engines.kubernetes.manifests import APP, SANDBOX, STATE, Site
from aenv.models import EnvRef, SandboxSpec
from tests.cluster.api import ApiServer
from tests.engines.kubernetes.cable import laid
from tests.engines.kubernetes.lab import PATIENCE, asker
from tests.support import until

pytestmark = pytest.mark.xdist_group("kubernetes-api")

PODS = "/api/v1/namespaces/default/pods"


class Told:
    """The pods of one state, and a cache that follows them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.state = f"t{secrets.token_hex(4)}"
        self.names: list[str] = []
        self.cache = self.follower(cluster)

    def follower(self, cluster: Cluster) -> Cache:
        return Cache(cluster, PODS, f"{APP}={SANDBOX},{STATE}={self.state}", self.names.append)

    async def make(self, name: str, state: str = "") -> pods.Pod:
        spec = SandboxSpec(env=EnvRef("probe"), image="env:1", ttl=60.0)
        site = Site(namespace="default", state=state or self.state, base_image="b", longest=60.0)
        body = manifests.pod(spec, manifests.facts(name, spec, self.cluster.now()), site, "0" * 64)
        return pods.decode(await self.cluster.fetch("POST", PODS, body))

    async def change(self, name: str, **notes: str) -> pods.Pod:
        body = {"metadata": {"annotations": {key.replace("_", "/"): value for key, value in notes.items()}}}
        return pods.decode(await self.cluster.fetch("PATCH", f"{PODS}/{name}", body, None, MERGE))

    async def remove(self, name: str) -> None:
        await self.cluster.ask("DELETE", f"{PODS}/{name}", query={"gracePeriodSeconds": "0"})

    async def knows(self, *names: str, cache: Cache | None = None) -> None:
        """Wait until exactly these are known."""
        asked = cache or self.cache
        await until(lambda: {entry.pod.name for entry in asked} == set(names), f"news of {names}", PATIENCE)


@pytest.fixture
async def told(api_server: ApiServer) -> AsyncIterator[Told]:
    found = Told(await asker(api_server.kubeconfig))
    yield found
    await found.cache.close()
    selector = {"labelSelector": f"{APP}={SANDBOX}", "gracePeriodSeconds": "0"}
    await found.cluster.ask("DELETE", PODS, query=selector)


@asynccontextmanager
async def following(told: Told, kubeconfig: Path) -> AsyncIterator[Cache]:
    """Another cache of the same pods, by another way."""
    cache = told.follower(await asker(kubeconfig))
    await cache.open()
    try:
        yield cache
    finally:
        await cache.close()


async def test_what_is_there_is_listed_and_what_comes_is_told(told: Told) -> None:
    await told.make("a")
    await told.cache.open()
    assert [entry.pod.name for entry in told.cache] == ["a"]
    await told.make("b")
    await told.knows("a", "b")
    await told.change("a", aenv_ended="because")
    await until(lambda: _entry(told.cache, "a").pod.ended_because == "because", "news of the change")
    await told.remove("a")
    await told.knows("b")
    assert {"a", "b"} <= set(told.names)


async def test_a_list_of_many_pages(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "PAGE", 2)
    names = [f"p{number}" for number in range(7)]
    await asyncio.gather(*map(told.make, names))
    await told.cache.open()
    assert {entry.pod.name for entry in told.cache} == set(names)


async def test_others_are_not_told_of(told: Told) -> None:
    await told.cache.open()
    await told.make("theirs", state="other")
    body = {
        "metadata": {"name": "bare", "labels": {APP: SANDBOX, STATE: told.state}},
        "spec": {"containers": [{"name": "main", "image": "x"}]},
    }
    await told.cluster.ask("POST", PODS, body=body)
    await told.make("ours")
    await told.knows("ours")


async def test_nothing_is_missed_when_a_stream_ends_in_good_order(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "_TURN", 1)
    await told.cache.open()
    asked = told.cluster.asked
    for number in range(12):
        await told.make(f"n{number}")
        await told.remove(f"n{number}")
        await asyncio.sleep(0.3)
    await told.make("last")
    await told.knows("last")
    assert {f"n{number}" for number in range(12)} <= set(told.names)
    assert told.cluster.asked > asked + 26, "there were several streams"


async def test_a_server_that_is_killed_and_comes_back(told: Told, api_server: ApiServer) -> None:
    await told.make("before")
    await told.cache.open()
    api_server.kill()
    api_server.start()  # from this thread: it ends with the one that started it
    await told.remove("before")
    await told.make("after")
    await told.knows("after")


async def test_what_happened_while_the_stream_was_cut(told: Told, api_server: ApiServer, tmp_path: Path) -> None:
    async with laid(api_server.kubeconfig, api_server.port, tmp_path) as cable:
        await told.make("goes")
        first = await told.make("again")
        async with following(told, cable.kubeconfig) as cache:
            cable.cut()
            await told.remove("goes")
            await told.remove("again")
            await told.make("comes")
            second = await told.make("again")
            assert {entry.pod.name for entry in cache} == {"goes", "again"}
            cable.mend()
            await told.knows("comes", "again", cache=cache)
            await until(lambda: _entry(cache, "again").pod.metadata.uid == second.metadata.uid, "the new one", PATIENCE)
            assert first.metadata.uid != second.metadata.uid


async def test_what_the_server_does_not_remember_is_looked_at_again(
    told: Told, api_server: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "aenv.engine")
    async with laid(api_server.kubeconfig, api_server.port, tmp_path) as cable:
        await told.make("goes")
        async with following(told, cable.kubeconfig) as cache:
            cable.cut()
            await told.remove("goes")
            await told.make("comes")
            # A server that begins anew remembers nothing of what was before.
            api_server.kill()
            api_server.start()  # from this thread: it ends with the one that started it
            await told.make("later")
            cable.mend()
            await told.knows("comes", "later", cache=cache)
            assert "is not remembered any more" in caplog.text
            await told.remove("later")
            await told.knows("comes", cache=cache)


async def test_a_cluster_that_was_restored_from_an_earlier_time(
    told: Told, api_server: ApiServer, tmp_path: Path
) -> None:
    async with laid(api_server.kubeconfig, api_server.port, tmp_path) as cable:
        await told.make("kept")
        data = api_server.folder / "etcd-data"
        api_server.end()
        shutil.copytree(data, tmp_path / "backup")
        api_server.start()
        for number in range(20):
            await told.change("kept", **{"aenv_expires-at": f"{number}"})
        await told.make("lost")
        async with following(told, cable.kubeconfig) as cache:
            await told.make("lost-too")
            await told.knows("kept", "lost", "lost-too", cache=cache)
            cable.cut()
            api_server.end()
            shutil.rmtree(data)
            shutil.copytree(tmp_path / "backup", data)
            api_server.start()
            cable.mend()
            await told.knows("kept", cache=cache)
            await until(lambda: _entry(cache, "kept").expires_at > 1000, "what it was then", PATIENCE)
            await told.make("after")
            await told.knows("kept", "after", cache=cache)


async def test_a_bookmark_saves_a_list(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "_TURN", 4)  # a server marks shortly before the end of a stream
    await told.cache.open()
    theirs = await told.make("theirs", state="other")
    wanted, number = int(theirs.metadata.resource_version), 0
    while int(told.cache._version) < wanted:  # there is one only of what a stream has not told of when it began
        number += 1
        assert number < PATIENCE, "no bookmark came"
        await told.make(f"theirs-{number}", state="other")
        await asyncio.sleep(1)
    assert told.cache.heard == 0


async def test_late_news_of_one_that_is_gone(told: Told) -> None:
    await told.cache.open()
    pod = await told.make("a")
    await told.knows("a")
    await told.remove("a")
    await told.knows()
    told.cache.note(pod)
    assert told.cache.get("a") is None
    again = await told.make("a")
    told.cache.note(again)
    await told.knows("a")


async def test_news_that_come_out_of_order(told: Told) -> None:
    await told.cache.open()
    old = await told.make("a")
    new = await told.change("a", **{"aenv_expires-at": "9000000000"})
    told.cache.note(new)
    told.cache.note(old)
    assert _entry(told.cache, "a").expires_at == 9000000000.0, "what is older does not undo what is newer"


async def test_who_waits_is_told(told: Told) -> None:
    await told.cache.open()
    assert not await told.cache.changed("a", 0.01)
    waiting = asyncio.create_task(told.cache.changed("a", PATIENCE))
    await told.make("a")
    assert await waiting
    waiting = asyncio.create_task(told.cache.changed("a", PATIENCE))
    await told.remove("a")
    assert await waiting
    assert told.cache._waiting == {}


def _entry(cache: Cache, name: str) -> Any:
    found = cache.get(name)
    assert found is not None
    return found
