"""Storage that outlives sandboxes, against a real API server: each is one sandbox's at a time."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aenv.engines.kubernetes.api import MERGE
from aenv.engines.kubernetes.manifests import HOLDER, Site, claim_name
from aenv.engines.kubernetes.volumes import Volumes
from aenv.errors import Conflict
from aenv.models import Volume
from tests.cluster.api import ApiServer
from tests.engines.kubernetes.lab import asker

pytestmark = pytest.mark.xdist_group("kubernetes-api")

CLAIMS = "/api/v1/namespaces/default/persistentvolumeclaims"


def volume(name: str = "notes", owner: str = "ann", size: int = 1024**2) -> Volume:
    return Volume(owner=owner, name=name, mount="/home/notes", size=size)


class Kept:
    """The volumes of a state, and who of its sandboxes lives."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.living: set[str] = set()
        self.state = f"s{secrets.token_hex(4)}"
        self.volumes = self.another()

    def another(self) -> Volumes:
        """As another engine of this state has them."""
        site = Site(namespace="default", state=self.state, base_image="b", longest=60.0)
        return Volumes(self.cluster, site, self.lives)

    async def lives(self, id: str) -> bool:
        return id in self.living

    async def start(self, id: str, *wanted: Volume, volumes: Volumes | None = None) -> None:
        """What a sandbox does with volumes when it starts."""
        async with (volumes or self.volumes).taken(wanted, id):
            self.living.add(id)

    async def holder(self, owner: str = "ann", name: str = "notes") -> str | None:
        found = await self.cluster.ask("GET", f"{CLAIMS}/{claim_name(self.state, owner, name)}")
        holder: str | None = found["metadata"]["annotations"].get(HOLDER)
        return holder


@pytest.fixture
async def kept(api_server: ApiServer) -> AsyncIterator[Kept]:
    found = Kept(await asker(api_server.kubeconfig))
    yield found
    for row in (await found.cluster.ask("GET", CLAIMS))["items"]:
        await found.cluster.ask("DELETE", f"{CLAIMS}/{row['metadata']['name']}")
        gone = {"metadata": {"finalizers": None}}  # no controller is here that would see that nobody uses it
        place = f"{CLAIMS}/{row['metadata']['name']}"
        await found.cluster.ask("PATCH", place, body=gone, content_type=MERGE)


async def test_it_is_made_and_kept(kept: Kept) -> None:
    await kept.start("one", volume(), volume("more", size=5 * 1024**2))
    assert await kept.holder() == "one"
    assert await kept.volumes.of("ann") == {"notes": 1024**2, "more": 5 * 1024**2}
    assert await kept.volumes.of("bob") == {}
    kept.living.discard("one")
    await kept.volumes.leave([("ann", "notes"), ("ann", "more")], "one")
    assert await kept.holder() is None
    await kept.start("two", volume())
    assert await kept.holder() == "two"


async def test_it_is_one_sandboxs_at_a_time(kept: Kept) -> None:
    await kept.start("one", volume())
    with pytest.raises(Conflict, match="another sandbox's, one") as caught:
        await kept.start("two", volume())
    assert caught.value.hint
    await kept.start("two", volume(owner="bob"))
    await kept.start("one", volume())  # who has it may take it again
    assert await kept.holder() == "one"


async def test_a_holder_that_is_gone_is_no_holder(kept: Kept) -> None:
    await kept.start("one", volume())
    kept.living.clear()
    await kept.start("two", volume())
    assert await kept.holder() == "two"
    await kept.volumes.leave([("ann", "notes")], "one")  # late, and no longer its own
    assert await kept.holder() == "two"


@pytest.mark.parametrize("there", [True, False])
async def test_of_many_at_once_one_gets_it(kept: Kept, there: bool) -> None:
    if there:
        await kept.start("before", volume())
        kept.living.clear()
    engines = [kept.volumes, kept.another()]
    starts = [kept.start(f"s{number}", volume(), volumes=engines[number % 2]) for number in range(8)]
    results = await asyncio.gather(*starts, return_exceptions=True)
    assert [type(result) for result in results if result is not None] == [Conflict] * 7
    winner = next(f"s{number}" for number, result in enumerate(results) if result is None)
    assert await kept.holder() == winner


async def test_one_that_is_about_to_begin_has_it(kept: Kept) -> None:
    async with kept.volumes.taken([volume()], "one"):
        with pytest.raises(Conflict, match="another sandbox's, one"):
            await kept.start("two", volume())
        kept.living.add("one")
    assert await kept.holder() == "one"


async def test_one_that_was_not_seen_by_another_engine_gives_way(kept: Kept) -> None:
    async def overtaken() -> None:
        async with kept.volumes.taken([volume()], "one"):
            await kept.start("two", volume(), volumes=kept.another())
            kept.living.add("one")

    with pytest.raises(Conflict, match="another sandbox's, two"):
        await overtaken()
    assert await kept.holder() == "two"


async def test_a_start_that_failed_keeps_nothing_from_others(kept: Kept) -> None:
    with pytest.raises(KeyError):
        async with kept.volumes.taken([volume()], "one"):
            raise KeyError
    await kept.start("two", volume())
    assert await kept.holder() == "two"


async def test_one_that_is_used_is_not_deleted(kept: Kept) -> None:
    await kept.start("one", volume())
    with pytest.raises(Conflict, match="a sandbox's, one"):
        await kept.volumes.delete("ann", "notes")
    assert await kept.volumes.of("ann") == {"notes": 1024**2}


async def test_one_that_is_being_deleted_is_not_given(kept: Kept) -> None:
    await kept.start("one", volume())
    kept.living.clear()
    await kept.cluster.ask("DELETE", f"{CLAIMS}/{claim_name(kept.state, 'ann', 'notes')}")
    with pytest.raises(Conflict, match="being deleted"):
        await kept.start("two", volume())
    assert await kept.volumes.of("ann") == {}


async def test_there_is_nothing_to_delete(kept: Kept) -> None:
    await kept.volumes.delete("ann", "nothing")
    await kept.volumes.leave([("ann", "nothing")], "one")
