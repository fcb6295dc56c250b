"""Versions: how they are made, changed, released, withdrawn and removed."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from aenv.errors import Conflict, Forbidden, Invalid, NotFound, TooLarge
from aenv.hub import records
from aenv.hub.records import TRANSITIONS, advance
from aenv.hub.service import Hub
from aenv.models import EnvRef
from aenv.wire import Env, PolicyChange, Status
from tests.hub.lab import ADMIN, ANN, BOB, EVE, chunks, content, package, push, request

# Making them


async def test_a_version_waits_for_its_package(hub: Hub) -> None:
    made = await hub.create(ANN, request("game", description="A game.", tags=["fun"], code_url="git://x"))
    assert (made.id, made.name, made.version, made.owner) == ("game@1.0.0", "game", "1.0.0", "ann")
    assert (made.status, made.digest, made.size) == (Status.PENDING, "", 0)
    assert (made.description, made.tags, made.code_url) == ("A game.", ["fun"], "git://x")
    assert made.created_at == made.updated_at
    assert [(event.what, event.by) for event in made.history] == [("created", "ann")]
    assert await hub.get(ANN, "game", "1.0.0") == made
    assert await hub.exists(ANN, "game", "1.0.0")
    assert not await hub.exists(ANN, "game", "1.0.1")
    assert not await hub.exists(ANN, "Game", "1.0.0")


@pytest.mark.parametrize("status", ["Ready", "ready", 6, "Released", 99])
async def test_who_sends_a_status_sends_no_package(hub: Hub, status: Any) -> None:
    made = await hub.create(ANN, request("game", status=status, artifacts=[{"type": "image", "content": "x:1"}]))
    assert made.status == Status.CREATED
    with pytest.raises(Conflict, match="it has no package"):
        await hub.resolve(ANN, EnvRef("game", "1.0.0"))
    with pytest.raises(NotFound, match="no package"):
        await hub.package(ANN, "game", "1.0.0")
    assert (await hub.release(ANN, "game", "1.0.0")).status == Status.RELEASED


async def test_a_version_is_made_once(hub: Hub) -> None:
    await hub.create(ANN, request("game"))
    with pytest.raises(Conflict, match="game@1.0.0 is there already"):
        await hub.create(ANN, request("game"))
    with pytest.raises(Conflict, match="'GAME' and 'game', which is there, differ in case only"):
        await hub.create(ANN, request("GAME", "2.0.0"))
    found = await asyncio.gather(*(hub.create(ANN, request("race")) for _ in range(8)), return_exceptions=True)
    assert sum(isinstance(one, Env) for one in found) == 1
    assert sum(isinstance(one, Conflict) for one in found) == 7
    assert (await hub.list(ANN))[1] == 2


async def test_many_versions_of_one_name_at_once(hub: Hub) -> None:
    await asyncio.gather(*(hub.create(ANN, request("game", f"1.0.{number}")) for number in range(20)))
    found, total = await hub.versions(ANN, "game")
    assert total == 20
    assert {env.version for env in found} == {f"1.0.{number}" for number in range(20)}


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"name": "a/b"}, Invalid, "'a/b' is not an environment name"),
        ({"name": "größe"}, Invalid, "is not an environment name"),
        ({"name": "x" * 64}, Invalid, "is not an environment name"),
        ({"name": ""}, Invalid, "'' is not an environment name"),
        ({"version": "1.0"}, Invalid, "'1.0' is not a semantic version"),
        ({"version": "latest"}, Invalid, "is not a semantic version"),
        ({"version": "1.0.0-" + "x" * 100}, Invalid, "is not a semantic version"),
        ({"tags": [" "]}, Invalid, "is not a tag"),
        ({"tags": ["a,b"]}, Invalid, "'a,b' is not a tag"),
        ({"tags": ["a\0b"]}, Invalid, "is not a tag"),
        ({"tags": ["x" * 101]}, Invalid, "is not a tag"),
        ({"tags": [str(number) for number in range(33)]}, TooLarge, "33 tags; 32 is the most"),
        ({"description": "x" * 70_000}, TooLarge, "65536 is the most"),
        ({"deploy_config": {"dependsOn": ["base"]}}, Invalid, "dependsOn is no object"),
        ({"deploy_config": {"dependsOn": {"a": 1}}}, Invalid, "dependsOn.a: it names no environment"),
        ({"deploy_config": {"dependsOn": {"a": "b@@"}}}, Invalid, "dependsOn.a: "),
        ({"deploy_config": {"dependsOn": {str(n): "b" for n in range(33)}}}, TooLarge, "33 entries"),
        ({"build_config": {"x": "\ud800"}}, Invalid, "no JSON form"),
    ],
)
async def test_what_is_no_version_is_refused(
    hub: Hub, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = {"name": "game", "version": "1.0.0", **fields}
    with pytest.raises(error, match=message):
        await hub.create(ANN, request(**given))
    assert (await hub.list(ADMIN))[1] == 0
    assert await hub.create(BOB, request("game"))  # the name is still nobody's


async def test_there_is_a_most_of_versions(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_VERSIONS", 2)
    await hub.create(ANN, request("game", "1.0.0"))
    await hub.create(ANN, request("game", "1.0.1"))
    with pytest.raises(Conflict, match="game has 2 versions") as caught:
        await hub.create(ANN, request("game", "1.0.2"))
    assert caught.value.hint


# Changing them


async def test_what_is_said_of_a_version_can_be_replaced(hub: Hub) -> None:
    await hub.create(ANN, request("game", description="old", tags=["old"]))
    new = request("game", description="new", tags=["new"], deploy_config={"cpu": "1C", "dependsOn": {"b": "base@^1"}})
    changed = await hub.update(ANN, "game", "1.0.0", new)
    assert (changed.description, changed.tags, changed.status) == ("new", ["new"], Status.PENDING)
    assert (changed.deploy_config["cpu"], changed.dependencies) == ("1C", {"b": "base@^1"})
    assert changed.history[-1].what == "updated"
    assert (await hub.list(ANN, tags=["old"]))[1] == 0
    assert (await hub.list(ANN, tags=["new"]))[1] == 1
    assert (await hub.update(ANN, "game", "1.0.0", request("game", status="Ready"))).status == Status.CREATED
    assert (await hub.update(ANN, "game", "1.0.0", request("game"))).status == Status.PENDING


async def test_the_configs_are_those_of_the_package(hub: Hub) -> None:
    made = await push(hub, ANN, "game", tags=["packed"], deployConfig={"memory": "1Gi"}, codeUrl="git://packed")
    assert (made.tags, made.deploy_config, made.code_url) == (["packed"], {"memory": "1Gi"}, "git://packed")
    new = request("game", tags=["said"], code_url="git://said", deploy_config={"memory": "9Gi"}, status="Ready")
    changed = await hub.update(ANN, "game", "1.0.0", new)
    assert (changed.tags, changed.deploy_config, changed.code_url) == (["said"], {"memory": "1Gi"}, "git://said")
    assert (changed.status, changed.digest) == (Status.READY, made.digest)
    assert changed.tools == made.tools


async def test_a_version_is_changed_under_its_own_name(hub: Hub) -> None:
    await hub.create(ANN, request("game"))
    for other in (request("other"), request("game", "1.0.1")):
        with pytest.raises(Invalid, match="the address about game@1.0.0"):
            await hub.update(ANN, "game", "1.0.0", other)
    with pytest.raises(NotFound, match="no version of 'game' is 1.0.1"):
        await hub.update(ANN, "game", "1.0.1", request("game", "1.0.1"))


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Status, Status)))
def test_a_version_becomes_only_what_the_table_says(before: Status, after: Status) -> None:
    env = Env(id="game@1.0.0", name="game", version="1.0.0", created_at="", updated_at="", status=before)
    if after in TRANSITIONS[before]:
        advance(env, after)
        assert env.status == after
    else:
        with pytest.raises(Conflict, match=f"is {before.title} and cannot become {after.title}"):
            advance(env, after)
        assert env.status == before


async def test_a_release_is_for_ever(hub: Hub) -> None:
    await hub.create(ANN, request("game"))
    with pytest.raises(Conflict, match="is Pending and cannot become Released") as caught:
        await hub.release(ANN, "game", "1.0.0")
    assert caught.value.hint == "upload its package first"
    made = await hub.upload(ANN, "game", "1.0.0", chunks(package("game")))
    released = await hub.release(ANN, "game", "1.0.0")
    assert (released.status, released.digest) == (Status.RELEASED, made.digest)
    assert [event.what for event in released.history] == ["created", f"package {made.digest[:12]}", "released"]
    assert await hub.release(ANN, "game", "1.0.0") == released
    for change in (
        hub.update(ANN, "game", "1.0.0", request("game")),
        hub.update(ADMIN, "game", "1.0.0", request("game")),
        hub.upload(ANN, "game", "1.0.0", chunks(b"never read")),
    ):
        with pytest.raises(Forbidden, match="game@1.0.0 is released and never changes"):
            await change
    assert await hub.get(BOB, "game", "1.0.0") == released
    with pytest.raises(Conflict, match="is released and stays") as caught:
        await hub.delete(ANN, "game", "1.0.0")
    assert "aenv yank game@1.0.0" in str(caught.value.hint)


# Which one is meant


async def test_ranges_and_latest_mean_the_newest(hub: Hub) -> None:
    for version in ("1.0.0", "1.2.0", "1.10.0", "2.0.0-rc.1"):
        await push(hub, ANN, "game", version)
    for asked, meant in (
        (None, "1.10.0"),
        ("latest", "1.10.0"),
        ("^1.0", "1.10.0"),
        ("~1.2", "1.2.0"),
        ("1.0", "1.0.0"),
    ):
        assert (await hub.get(BOB, "game", asked)).version == meant
        assert (await hub.resolve(BOB, EnvRef("game", asked))).version == meant
        assert await content(hub, BOB, "game", asked) == package("game", meant)
    assert (await hub.resolve(BOB, EnvRef("game", "2.0.0-rc.1"))).version == "2.0.0-rc.1"
    for asking in (hub.get(BOB, "game", "^3.0"), hub.resolve(BOB, EnvRef("game", "^3.0"))):
        with pytest.raises(NotFound, match="no version of 'game' is \\^3.0") as caught:
            await asking
        assert "1.10.0" in str(caught.value.hint)
    with pytest.raises(Invalid, match="is not a version"):
        await hub.get(BOB, "game", "newest")


async def test_only_what_can_run_is_chosen(hub: Hub) -> None:
    await hub.create(ANN, request("game", "1.1.0"))
    assert (await hub.get(ANN, "game")).version == "1.1.0"  # there is nothing better
    with pytest.raises(NotFound, match="no version of 'game' can be run"):
        await hub.resolve(ANN, EnvRef("game"))
    await push(hub, ANN, "game", "1.0.0")
    assert (await hub.get(ANN, "game")).version == "1.0.0"
    assert (await hub.resolve(ANN, EnvRef("game"))).version == "1.0.0"
    with pytest.raises(Conflict, match="game@1.1.0 cannot be run: it has no package"):
        await hub.resolve(ANN, EnvRef("game", "1.1.0"))


async def test_what_is_resolved_is_short(hub: Hub) -> None:
    await hub.create(ANN, request("game"))
    await hub.upload(ANN, "game", "1.0.0", chunks(package("game", files={"README.md": "# Game"})))
    whole = await hub.get(ANN, "game")
    assert (whole.readme, whole.tools[0].description) == ("# Game", "Says hello.")
    for short in (await hub.resolve(ANN, EnvRef("game")), (await hub.list(ANN))[0][0]):
        assert (short.readme, short.history, short.rewards) == ("", [], [])
        assert [(tool.name, tool.description, tool.input_schema) for tool in short.tools] == [("greet", "", {})]
        assert (short.digest, short.owner) == (whole.digest, "ann")


async def test_a_name_that_is_not_there_is_answered_with_the_nearest(hub: Hub) -> None:
    await hub.create(ANN, request("mini-terminal"))
    await hub.create(ANN, request("mini-terminals"))
    await hub.create(EVE, request("mini-termina"))
    await hub.set_policy(EVE, "mini-termina", PolicyChange(public=False))
    with pytest.raises(NotFound, match="there is no environment 'mini-termnal'") as caught:
        await hub.get(BOB, "mini-termnal")
    assert caught.value.hint == "did you mean mini-terminal, mini-terminals?"
    with pytest.raises(NotFound) as caught:
        await hub.get(BOB, "zzz")
    assert "aenv list" in str(caught.value.hint)
    with pytest.raises(NotFound) as caught:
        await hub.get(BOB, "MINI-TERMINAL")
    assert "mini-terminal" in str(caught.value.hint)
    with pytest.raises(Invalid):
        await hub.get(BOB, "../etc")


# Withdrawing and removing


async def test_a_yanked_version_is_meant_by_its_own_name_only(hub: Hub) -> None:
    await push(hub, ANN, "game", "1.0.0", release=True)
    await push(hub, ANN, "game", "1.1.0", release=True)
    yanked = await hub.yank(ANN, "game", "1.1.0", "  it loses\nyour files ")
    assert (yanked.yanked, yanked.status) == ("it loses your files", Status.RELEASED)
    assert yanked.history[-1].what == "yanked: it loses your files"
    for asked in (None, "latest", "^1.0", "~1.0"):
        assert (await hub.resolve(BOB, EnvRef("game", asked))).version == "1.0.0"
        assert (await hub.get(BOB, "game", asked)).version == "1.0.0"
    with pytest.raises(NotFound):
        await hub.resolve(BOB, EnvRef("game", "~1.1"))
    assert (await hub.resolve(BOB, EnvRef("game", "1.1.0"))).yanked == "it loses your files"
    assert await content(hub, BOB, "game", "1.1.0") == package("game", "1.1.0")
    assert (await hub.get(BOB, "game", "~1.1")).version == "1.1.0"  # it can still be looked at
    await push(hub, ANN, "other")
    assert (await hub.yank(ANN, "other", "1.0.0")).yanked == "no reason was given"
    with pytest.raises(Conflict, match="was yanked"):
        await hub.release(ANN, "other", "1.0.0")


async def test_what_nobody_needs_can_be_removed(hub: Hub) -> None:
    await push(hub, ANN, "game")
    await hub.delete(ANN, "game", "1.0.0")
    assert not await hub.exists(ANN, "game", "1.0.0")
    assert (await hub.list(ANN))[1] == 0
    for asking in (hub.get(ANN, "game"), hub.delete(ANN, "game", "1.0.0"), hub.resolve(ANN, EnvRef("game"))):
        with pytest.raises(NotFound):
            await asking
    # Whose it is and what happened stay.
    with pytest.raises(Forbidden):
        await hub.create(BOB, request("game"))
    again = await push(hub, ANN, "game")
    assert [event.what.split()[0] for event in again.history] == ["created", "package", "deleted", "created", "package"]
    await hub.release(ANN, "game", "1.0.0")
    await hub.delete(ADMIN, "game", "1.0.0")
    with pytest.raises(Conflict, match="game@1.0.0 was released, and then deleted"):
        await hub.create(ANN, request("game"))


async def test_what_others_depend_on_stays(hub: Hub) -> None:
    for version in ("1.0.0", "1.1.0", "2.0.0"):
        await push(hub, ANN, "base", version)
    await push(hub, BOB, "user", deployConfig={"dependsOn": {"b": "base@^1.0"}})
    await push(hub, EVE, "hidden", deployConfig={"dependsOn": {"b": "base@2.0.0"}})
    await hub.set_policy(EVE, "hidden", PolicyChange(public=False))
    with pytest.raises(Conflict, match="base@1.1.0 is needed by user@1.0.0") as caught:
        await hub.delete(ANN, "base", "1.1.0")
    assert "aenv yank base@1.1.0" in str(caught.value.hint)
    with pytest.raises(Conflict, match="base@2.0.0 is needed by others") as caught:
        await hub.delete(ANN, "base", "2.0.0")
    assert "hidden" not in str(caught.value)
    with pytest.raises(Conflict, match="base@2.0.0 is needed by hidden@1.0.0"):
        await hub.delete(ADMIN, "base", "2.0.0")
    await hub.delete(ANN, "base", "1.0.0")  # nobody would get it
    await hub.delete(BOB, "user", "1.0.0")
    await hub.delete(ANN, "base", "1.1.0")
