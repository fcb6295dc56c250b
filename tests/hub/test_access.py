"""Who sees what, who may change it, and what is found."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from aenv.auth.callers import Caller, Scope
from aenv.errors import Conflict, Forbidden, Invalid, NotFound
from aenv.hub import records
from aenv.hub.service import Hub
from aenv.models import EnvRef
from aenv.wire import Env, Policy, PolicyChange
from tests.hub.lab import ADMIN, ANN, BOB, EVE, Stage, chunks, package, push, request


async def ids(hub: Hub, caller: Caller, **wanted: Any) -> list[str]:
    found, total = await hub.list(caller, **wanted)
    assert total == len(found)
    return [env.id for env in found]


async def test_a_name_belongs_to_who_pushed_first_and_is_public(hub: Hub) -> None:
    await push(hub, ANN, "game")
    assert await hub.policy(ANN, "game") == Policy(owner="ann", public=True)
    assert (await hub.get(BOB, "game")).owner == "ann"
    for change in changes(hub, BOB):
        with pytest.raises(Forbidden, match="game"):
            await change


def changes(hub: Hub, caller: Caller) -> list[Awaitable[Any]]:
    """Everything that changes something."""
    return [
        hub.create(caller, request("game", "2.0.0")),
        hub.update(caller, "game", "1.0.0", request("game")),
        hub.upload(caller, "game", "1.0.0", chunks(package("game"))),
        hub.release(caller, "game", "1.0.0"),
        hub.yank(caller, "game", "1.0.0"),
        hub.delete(caller, "game", "1.0.0"),
        hub.set_policy(caller, "game", PolicyChange(public=True, owner=caller.owner)),
    ]


def looks(hub: Hub, caller: Caller) -> list[Awaitable[Any]]:
    """Everything that shows something."""
    return [
        hub.get(caller, "game"),
        hub.get(caller, "game", "1.0.0"),
        hub.resolve(caller, EnvRef("game")),
        hub.versions(caller, "game"),
        hub.status(caller, "game", "1.0.0"),
        hub.package(caller, "game", "1.0.0"),
        hub.policy(caller, "game"),
    ]


async def test_who_may_not_see_a_name_is_told_that_there_is_none(hub: Hub) -> None:
    await push(hub, ANN, "game")
    await hub.set_policy(ANN, "game", PolicyChange(public=False, readers=["bob"]))
    making, *changing = changes(hub, EVE)
    for asking in [*looks(hub, EVE), *changing]:
        with pytest.raises(NotFound, match="there is no environment 'game'") as caught:
            await asking
        assert "ann" not in f"{caught.value} {caught.value.hint}"
    assert not await hub.exists(EVE, "game", "1.0.0")
    assert await ids(hub, EVE) == []
    with pytest.raises(Conflict, match="the name 'game' is taken"):
        await making
    for asking in looks(hub, BOB):
        await asking
    assert await hub.exists(BOB, "game", "1.0.0")
    assert await ids(hub, BOB) == await ids(hub, ANN) == await ids(hub, ADMIN) == ["game@1.0.0"]
    for change in changes(hub, BOB):
        with pytest.raises(Forbidden):
            await change


async def test_an_api_service_reads_what_is_anybodys_and_changes_nothing(hub: Hub) -> None:
    fetcher = Caller("(api)", frozenset({Scope.FETCH}))
    await push(hub, ANN, "game")
    await hub.set_policy(ANN, "game", PolicyChange(public=False))
    for asking in looks(hub, fetcher):
        await asking
    assert await hub.exists(fetcher, "game", "1.0.0")
    assert await ids(hub, fetcher) == await ids(hub, fetcher, owner="ann") == ["game@1.0.0"]
    for change in changes(hub, fetcher):
        with pytest.raises(Forbidden):
            await change


async def test_writers_push_and_only_the_owner_changes_the_policy(hub: Hub) -> None:
    await push(hub, ANN, "game")
    await hub.set_policy(ANN, "game", PolicyChange(public=False, writers=["bob"], readers=["eve", "eve"]))
    await push(hub, BOB, "game", "1.1.0", release=True)
    await hub.yank(BOB, "game", "1.1.0")
    await hub.delete(BOB, "game", "1.0.0")
    with pytest.raises(Forbidden, match="only ann, its owner"):
        await hub.set_policy(BOB, "game", PolicyChange(owner="bob"))
    policy = Policy(owner="ann", public=False, readers=["eve"], writers=["bob"])
    assert await hub.policy(ANN, "game") == await hub.policy(BOB, "game") == policy
    assert await hub.policy(EVE, "game") == Policy(owner="ann", public=False)
    assert await hub.set_policy(ADMIN, "game", PolicyChange(writers=[])) == Policy(
        owner="ann", public=False, readers=["eve"]
    )
    with pytest.raises(NotFound):
        await hub.get(BOB, "game")


async def test_a_name_can_be_given_away(hub: Hub) -> None:
    await push(hub, ANN, "game")
    await hub.set_policy(ANN, "game", PolicyChange(owner="bob", public=False))
    assert (await hub.get(BOB, "game")).owner == "bob"
    assert await ids(hub, BOB, owner="bob") == ["game@1.0.0"]
    assert await ids(hub, ADMIN, owner="ann") == []
    with pytest.raises(NotFound):
        await hub.get(ANN, "game")


async def test_a_policy_survives_what_it_is_about(hub: Hub) -> None:
    await push(hub, ANN, "game")
    await hub.set_policy(ANN, "game", PolicyChange(public=False, readers=["bob"]))
    await hub.delete(ANN, "game", "1.0.0")
    assert (await hub.policy(ANN, "game")).readers == ["bob"]
    await push(hub, ANN, "game", "2.0.0")
    assert await ids(hub, BOB) == ["game@2.0.0"]
    assert await ids(hub, EVE) == []


@pytest.mark.parametrize(
    "change",
    [
        PolicyChange(readers=[""]),
        PolicyChange(writers=["a\nb"]),
        PolicyChange(owner=""),
        PolicyChange(owner="x" * 201),
        PolicyChange(readers=[str(number) for number in range(65)]),
    ],
)
async def test_what_is_no_policy_is_refused(hub: Hub, change: PolicyChange) -> None:
    await push(hub, ANN, "game")
    with pytest.raises(Invalid):
        await hub.set_policy(ANN, "game", change)
    assert await hub.policy(ANN, "game") == Policy(owner="ann", public=True)


async def test_policies_and_pushes_at_the_same_time_leave_no_version_seen_by_mistake(hub: Hub) -> None:
    await hub.create(ANN, request("game", "0.0.1"))
    await asyncio.gather(
        *(hub.create(ANN, request("game", f"1.0.{number}")) for number in range(6)),
        hub.set_policy(ANN, "game", PolicyChange(public=False)),
        *(hub.create(ANN, request("game", f"2.0.{number}")) for number in range(6)),
    )
    assert await ids(hub, EVE) == []
    assert len(await ids(hub, ANN)) == 13


# What is found


async def test_search(hub: Hub, engine: Stage) -> None:
    def named(*tools: str) -> list[dict[str, Any]]:
        return [{"name": tool, "inputSchema": {}} for tool in tools]

    engine.answers["/tools"] = named("run", "read")
    await push(hub, ANN, "linux-shell", tags=["Linux", "shell"])
    engine.answers["/tools"] = named("run")
    await push(hub, ANN, "web-shell", tags=["web", "shell"])
    engine.answers["/tools"] = named("search")
    await push(hub, BOB, "web-search", tags=["web"])
    assert await ids(hub, EVE) == ["web-search@1.0.0", "web-shell@1.0.0", "linux-shell@1.0.0"]
    assert await ids(hub, EVE, name="SHELL") == ["web-shell@1.0.0", "linux-shell@1.0.0"]
    assert await ids(hub, EVE, name="1.0.0") == []
    assert await ids(hub, EVE, tags=["shell"]) == ["web-shell@1.0.0", "linux-shell@1.0.0"]
    assert await ids(hub, EVE, tags=["shell", "linux"]) == ["linux-shell@1.0.0"]
    assert await ids(hub, EVE, tags=["shell", "linux", "web"]) == []
    assert await ids(hub, EVE, tool="run") == ["web-shell@1.0.0", "linux-shell@1.0.0"]
    assert await ids(hub, EVE, tool="ru") == []
    assert await ids(hub, EVE, owner="bob") == ["web-search@1.0.0"]
    assert await ids(hub, EVE, tool="run", tags=["web"], name="web", owner="ann") == ["web-shell@1.0.0"]


async def test_as_much_as_a_version_may_have_can_be_kept_and_found(hub: Hub, engine: Stage) -> None:
    engine.answers["/tools"] = [{"name": f"tool{number}", "inputSchema": {}} for number in range(500)]
    await push(hub, ANN, "game", "0.0.1")
    await asyncio.gather(*(push(hub, ANN, f"base{number}") for number in range(32)))
    await hub.set_policy(ANN, "game", PolicyChange(public=False, readers=[f"r{number}" for number in range(64)]))
    made = await push(
        hub,
        ANN,
        "game",
        tags=[f"tag{number}" for number in range(32)],
        deployConfig={"dependsOn": {str(number): f"base{number}" for number in range(32)}},
    )
    assert len(made.tools) == 500
    assert await ids(hub, Caller("r63", ANN.scopes), tool="tool119", tags=["tag31"]) == ["game@1.0.0"]


@pytest.mark.parametrize("merged", [200, 3])
async def test_pages_have_what_their_caller_sees_and_nothing_else(
    hub: Hub, merged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_MERGED", merged)

    async def make(number: int) -> None:
        owner = (ANN, BOB, EVE)[number % 3]
        await hub.create(owner, request(f"env-{number:02}", tags=["all"]))
        if number % 2:
            await hub.set_policy(owner, f"env-{number:02}", PolicyChange(public=False, readers=["root2"]))

    for number in range(30):
        await make(number)
    seen = {
        ANN: [number for number in range(30) if number % 2 == 0 or number % 3 == 0],
        ADMIN: list(range(30)),
        Caller("stranger", ANN.scopes): list(range(0, 30, 2)),
        Caller("root2", ANN.scopes): list(range(30)),
    }
    for caller, numbers in seen.items():
        expected = [f"env-{number:02}@1.0.0" for number in sorted(numbers, reverse=True)]
        wanted: list[dict[str, Any]] = [{}, {"tags": ["all"]}, {"name": "env"}, {"name": "v-", "tags": ["ALL"]}]
        for search in wanted:
            paged: list[Env] = []
            while True:
                page, total = await hub.list(caller, limit=7, offset=len(paged), **search)
                assert total == len(expected)
                if not page:
                    break
                paged += page
            assert [env.id for env in paged] == expected
    assert await hub.list(ANN, limit=1000, offset=10_000) == ([], 20)
    assert len((await hub.list(ANN, limit=1000))[0]) == 20
    for owner, total in (("ann", 10), ("bob", 5), ("nobody", 0)):
        assert (await hub.list(ANN, owner=owner))[1] == total


async def test_pages_of_versions(hub: Hub) -> None:
    for number in range(5):
        await hub.create(ANN, request("game", f"1.0.{number}"))
    page, total = await hub.versions(BOB, "game", limit=2, offset=1)
    assert ([env.version for env in page], total) == (["1.0.3", "1.0.2"], 5)
