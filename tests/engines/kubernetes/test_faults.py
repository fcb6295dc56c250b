"""What goes wrong with clusters: each is told in words for a person, is got over where possible, and leaves nothing."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from aenv.engines.kubernetes.api import MERGE
from aenv.engines.kubernetes.engine import KubernetesEngine, _patience
from aenv.engines.kubernetes.manifests import EXPIRES
from aenv.engines.kubernetes.starting import Patience
from aenv.errors import AEnvError, Conflict, Forbidden, NotFound, StartFailed
from aenv.models import Sandbox, State, Volume
from tests import cluster as clusters
from tests.cluster.components import NODE
from tests.engines.kubernetes.lab import PATIENCE, Harbour, asker, call, eventually, of_image, over, probe
from tests.support import ROOT

pytestmark = pytest.mark.xdist_group("kubernetes")

SLOT = "example.com/slot"


async def reason(engine: KubernetesEngine, id: str, words: str) -> Sandbox:
    """The sandbox, once it waits for a reason with these words."""

    async def look() -> Sandbox | None:
        try:
            found = await engine.get(id)
        except NotFound:  # nobody has begun
            return None
        assert not found.state.over, found.reason
        return found if words in found.reason else None

    return await eventually(f"{id} to wait because of {words!r}", look)


@asynccontextmanager
async def down(cluster: clusters.Local, part: str, *, halted: bool = False) -> AsyncIterator[None]:
    """A part of the cluster is gone, or says no word, in the block."""
    await asyncio.to_thread(cluster.halt if halted else cluster.kill, part)
    try:
        yield
    finally:
        await asyncio.to_thread(cluster.resume if halted else cluster.start, part)
        await asyncio.to_thread(cluster.up)


# No room


async def admitted(harbour: Harbour) -> bool:
    """Whether the quotas of the namespace leave room for a pod."""
    try:
        await harbour.kubectl("run", "probe", "--image=x", "--dry-run=server")
    except AssertionError as exc:
        if "exceeded quota" not in str(exc):
            raise
        return False
    return True


@asynccontextmanager
async def quota(harbour: Harbour, name: str, most: int) -> AsyncIterator[None]:
    """A quota of pods. It is none before the cluster has counted for it, and does not know a pod that was made then."""

    async def refused() -> bool:
        return not await admitted(harbour)

    await harbour.kubectl("create", "quota", name, "--hard=pods=0")
    try:
        await eventually("the quota to count", refused)
        if most:
            await harbour.kubectl(
                "patch", "quota", name, "--patch", json.dumps({"spec": {"hard": {"pods": str(most)}}})
            )
            await eventually("the quota to leave room", lambda: admitted(harbour))
        yield
    finally:
        await harbour.kubectl("delete", "quota", name)


async def test_a_quota_is_waited_for(harbour: Harbour) -> None:
    async with quota(harbour, "few", 1), harbour.engine() as engine:
        names = ["one", "two", "three"]

        async def live(id: str) -> State:
            found = await engine.create(id, probe())
            if id != "one":
                await engine.delete(id)
            return found.state

        await live("one")
        others = [asyncio.create_task(live(id)) for id in names[1:]]
        waiting = [await reason(engine, id, "a quota of the namespace is used up") for id in names[1:]]
        assert {found.state for found in waiting} == {State.PENDING}
        assert "few" in waiting[0].reason
        await engine.delete("one")
        assert await asyncio.gather(*others) == [State.RUNNING] * 2


async def test_one_that_waits_for_a_quota_can_be_deleted(harbour: Harbour) -> None:
    async with quota(harbour, "none", 0), harbour.engine() as engine:
        creating = asyncio.create_task(engine.create("one", probe()))
        await reason(engine, "one", "quota")
        await engine.delete("one")
        with pytest.raises(StartFailed):
            await creating


async def test_a_node_without_room_says_what_it_lacks(harbour: Harbour) -> None:
    nodes = await asker(harbour.cluster.kubeconfig)

    async def give(amount: str | None) -> None:
        body = {"status": {"capacity": {SLOT: amount}, "allocatable": {SLOT: amount}}}
        await nodes.ask("PATCH", f"/api/v1/nodes/{NODE}/status", body=body, content_type=MERGE)

    async with harbour.engine(extended=[SLOT]) as engine:
        creating = asyncio.create_task(engine.create("one", probe(resources={SLOT: "1"}, ttl=300.0)))
        try:
            waiting = await reason(engine, "one", f"Insufficient {SLOT}")
            assert waiting.state is State.PENDING
            [pod] = await harbour.pods()
            may_wait = float(pod["metadata"]["annotations"][EXPIRES]) - nodes.now()
            await give("1")
            made = await creating
            assert made.state is State.RUNNING
            assert may_wait > 300.0 + PATIENCE / 2 > (made.expires_at or 0.0) - nodes.now() > 200.0
        finally:
            await give(None)
            await engine.delete("one")


@pytest.mark.parametrize(
    ("lasting", "words"), [(False, "there was no room for it in all the time"), (True, "it was not ready within 3 s")]
)
async def test_a_node_that_never_has_room(harbour: Harbour, lasting: bool, words: str) -> None:
    async with harbour.engine(extended=[SLOT]) as engine:
        with pytest.raises(StartFailed, match=f"{words}.*no node has room for it.*{SLOT}"):
            await engine.create("one", probe(resources={SLOT: "9"}, startup_timeout=3.0, ttl=3.0, lasting=lasting))
        assert (await engine.get("one")).state is State.FAILED
        await engine.delete("one")


async def test_time_stands_still_without_room() -> None:
    async with asyncio.timeout(100.0) as limit:
        end = limit.when() or 0.0
        patience = Patience(limit, 1000.0)
        patience.hold()
        assert (limit.when() or 0.0) == pytest.approx(end + 1000.0)
        await asyncio.sleep(0.2)
        patience.go_on()
        assert end + 0.19 < (limit.when() or 0.0) < end + 900.0
        assert not patience.holds
        patience.hold()
        assert (limit.when() or 0.0) == pytest.approx(end + 1000.0)  # in all
        assert _patience(probe(), limit) is not None
        assert [_patience(probe(**more), limit) for more in ({"lasting": True}, {"warm": True})] == [None, None]


# Ended by others


async def test_a_pod_that_somebody_deletes(harbour: Harbour) -> None:
    async with harbour.engine() as engine:
        await engine.create("one", probe())
        await harbour.kubectl("delete", "pod", "one", "--wait=false")
        found = await over(engine, "one")
        assert found.state is State.FAILED
        assert "somebody deleted it" in found.reason
        await engine.delete("one")


async def test_a_node_that_is_drained(harbour: Harbour) -> None:
    async with harbour.engine() as engine:
        await engine.create("one", probe())
        selector = f"--pod-selector=aenv/state={harbour.state}"
        try:
            await harbour.kubectl("drain", NODE, "--force", "--delete-emptydir-data", "--ignore-daemonsets", selector)
            found = await over(engine, "one")
            assert found.state is State.FAILED
            assert "drained" in found.reason
            creating = asyncio.create_task(engine.create("two", probe()))
            await reason(engine, "two", "unschedulable")
        finally:
            await harbour.kubectl("uncordon", NODE)
        assert (await creating).state is State.RUNNING
        await engine.delete("one")
        await engine.delete("two")


# The cluster itself


async def test_an_api_server_that_is_gone_for_a_while(harbour: Harbour, breakable: clusters.Local) -> None:
    async with harbour.engine() as engine:
        running = await engine.create("before", probe())
        calls: list[Any] = []

        async def go_on() -> None:
            while True:
                calls.append(await call(running, "echo", text="x"))
                await asyncio.sleep(0.02)

        calling = asyncio.create_task(go_on())
        async with down(breakable, "apiserver"):
            creating = [asyncio.create_task(engine.create(f"during-{number}", probe())) for number in range(2)]
            before = len(calls)
            await asyncio.sleep(20)
            assert len(calls) > before, "who has a sandbox does not need the cluster"
        made = await asyncio.gather(*creating)
        assert [found.state for found in made] == [State.RUNNING] * 2
        assert not calling.done(), "no call failed"
        calling.cancel()
        names = {"before", "during-0", "during-1"}
        assert {pod["metadata"]["name"] for pod in await harbour.pods()} == names
        assert {found.id for found in await engine.find()} == names
        await asyncio.gather(*map(engine.delete, names))


@pytest.mark.parametrize("part", ["apiserver", "etcd"])
async def test_a_cluster_that_says_no_word_for_a_while(harbour: Harbour, breakable: clusters.Local, part: str) -> None:
    async with harbour.engine() as engine:
        running = await engine.create("before", probe())
        async with down(breakable, part, halted=True):
            creating = asyncio.create_task(engine.create("during", probe()))
            await asyncio.sleep(6)
            assert await call(running, "echo", text="x") == "x"
            assert not creating.done()
        assert (await creating).state is State.RUNNING
        assert len(await harbour.pods()) == 2
        await engine.delete("before")
        await engine.delete("during")


# Starts that fail


async def test_an_image_that_cannot_be_pulled(harbour: Harbour) -> None:
    async with harbour.engine() as engine:
        with pytest.raises(StartFailed, match=r"cannot be pulled, the image 127\.0\.0\.1:1/none/such:1"):
            await engine.create("one", of_image("127.0.0.1:1/none/such:1", startup_timeout=10 * PATIENCE))
        found = await engine.get("one")
        assert found.state is State.FAILED
        assert "127.0.0.1:1/none/such:1" in found.reason
        await engine.delete("one")


async def test_what_is_no_name_of_an_image(harbour: Harbour) -> None:
    async with harbour.engine() as engine:
        with pytest.raises(StartFailed, match="NOT/An Image"):
            await engine.create("one", of_image("NOT/An Image", startup_timeout=10 * PATIENCE))
        await engine.delete("one")


async def test_a_crash_at_the_start_with_its_last_words(harbour: Harbour, tmp_path: Path) -> None:
    (tmp_path / "bad" / "src").mkdir(parents=True)
    (tmp_path / "bad" / "src" / "custom_env.py").write_text("raise RuntimeError('a crash of its own')\n")
    config = {"name": "bad", "version": "1.0.0", "buildConfig": {}, "deployConfig": {}}
    (tmp_path / "bad" / "config.json").write_text(json.dumps(config))
    async with harbour.engine() as engine:
        with pytest.raises(StartFailed, match=r"(?s)exit code 1.*a crash of its own"):
            await engine.create("one", probe(tmp_path / "bad"))
        assert "a crash of its own" in (await engine.get("one")).reason
        await engine.delete("one")


# Several engines


async def test_two_engines_of_one_state(harbour: Harbour) -> None:
    async with harbour.engine() as first, harbour.engine() as second:
        made = await asyncio.gather(*(engine.create("one", probe()) for engine in (first, second)))
        assert [found.state for found in made] == [State.RUNNING] * 2
        assert len({found.url for found in made}) == 1
        assert len(await harbour.pods()) == 1
        await second.create("two", probe())
        for engine in (first, second):
            assert await eventually("both of both", lambda engine=engine: _has(engine, "one", "two"))  # type: ignore[misc]
        assert sum(engine._ground.leads for engine in (first, second) if engine._ground) == 1
        await asyncio.gather(first.delete("one"), second.delete("one"), first.delete("two"))
        for engine in (first, second):
            await eventually("the end of both", lambda engine=engine: _has(engine))  # type: ignore[misc]


async def test_two_engines_that_want_one_volume_at_once(harbour: Harbour) -> None:
    volume = Volume(owner="ann", name="notes", mount="/home/admin/data", size=1024**2)
    async with harbour.engine() as first, harbour.engine() as second:
        starts = [first.create("one", probe(volumes=[volume])), second.create("two", probe(volumes=[volume]))]
        made = await asyncio.gather(*starts, return_exceptions=True)
        (winner,) = (found for found in made if isinstance(found, Sandbox))
        (refused,) = (found for found in made if not isinstance(found, Sandbox))
        assert isinstance(refused, Conflict)
        assert winner.id in refused.message
        assert [pod["metadata"]["name"] for pod in await harbour.pods()] == [winner.id]
        await first.delete(winner.id)
        await first.delete_volume("ann", "notes")


async def test_an_engine_that_is_killed_while_it_starts_something(harbour: Harbour) -> None:
    script = f"""
        import asyncio
        from aenv.engines.kubernetes.engine import KubernetesEngine
        from tests.engines.kubernetes.lab import probe

        async def main():
            engine = KubernetesEngine(
                kubeconfig={str(harbour.cluster.kubeconfig)!r}, namespace={harbour.namespace!r}, key={harbour.key!r},
                state={harbour.state!r}, base_image={harbour.base_image!r}, templates={str(harbour.templates)!r},
            )
            await asyncio.gather(*(engine.create(id, probe()) for id in ("one", "two")))

        asyncio.run(main())
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, env=os.environ)
    try:
        await eventually("its pods", lambda: _count(harbour, 2))
    finally:
        process.kill()
        process.wait()
    async with harbour.engine() as engine:
        assert (await engine.create("one", probe())).state is State.RUNNING, "who knows what to bring goes on"
        assert await call(await engine.get("one"), "echo", text="x") == "x"
        await asyncio.gather(engine.delete("one"), engine.delete("two"))
        await eventually("the lease of the one that was killed", lambda: _leads(engine))


# Who may not


async def test_an_account_that_may_not(harbour: Harbour, tmp_path: Path) -> None:
    named = ("create", "role", "looks", "--verb=get,list,watch", "--resource=pods")
    await harbour.kubectl("create", "serviceaccount", "guest")
    await harbour.kubectl(*named)
    await harbour.kubectl(
        "create", "rolebinding", "looks", "--role=looks", f"--serviceaccount={harbour.namespace}:guest"
    )

    async def token() -> str:
        found = json.loads(await harbour.kubectl("get", "secrets", "--output", "json"))["items"]
        mine = [row for row in found if row["metadata"]["name"].startswith("guest-token-") and "token" in row["data"]]
        return str(mine[0]["data"]["token"]) if mine else ""

    held = yaml.safe_load(harbour.cluster.kubeconfig.read_text())
    held["users"][0]["user"] = {"token": base64.b64decode(await eventually("a token", token)).decode()}
    (tmp_path / "guest").write_text(json.dumps(held))
    async with harbour.engine(kubeconfig=str(tmp_path / "guest")) as engine:
        with pytest.raises(Forbidden, match="guest.*cannot") as caught:
            await engine.create("one", probe(network="full"))
        assert "Role" in str(caught.value.hint)
        assert await engine.find() != []


async def test_a_namespace_that_is_being_deleted(harbour: Harbour, cluster: clusters.Cluster) -> None:
    name = f"{harbour.namespace}-leaves"
    await harbour.kubectl("create", "namespace", name)
    held = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "held", "namespace": name, "finalizers": ["example.com/held"]},
    }
    await harbour.kubectl("apply", "--namespace", name, "--filename", "-", input=json.dumps(held))
    await harbour.kubectl("delete", "namespace", name, "--wait=false")
    try:
        async with harbour.engine(namespace=name) as engine:
            with pytest.raises(AEnvError, match="being terminated") as caught:
                await engine.create("one", probe(network="full"))
            assert "namespace" in str(caught.value.hint)
            with pytest.raises(NotFound):
                await engine.get("other")
    finally:
        gone = json.dumps({"metadata": {"finalizers": None}})
        await harbour.kubectl("patch", "configmap", "held", "--namespace", name, "--type=merge", f"--patch={gone}")


# Help


async def _has(engine: KubernetesEngine, *ids: str) -> bool:
    return {found.id for found in await engine.find() if not found.state.over} == set(ids)


async def _leads(engine: KubernetesEngine) -> bool:
    return engine._ground is not None and engine._ground.leads


async def _count(harbour: Harbour, number: int) -> bool:
    return len(await harbour.pods()) == number
