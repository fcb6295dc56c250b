"""What a version depends on: which versions of it are meant, for ever, and which there cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from aenv.errors import Conflict, Invalid, NotFound, TooLarge
from aenv.hub.service import Hub
from aenv.models import EnvRef
from aenv.project.composed import composed
from aenv.project.depends import DEEPEST
from aenv.wire import Env, Locked, Status
from tests.hub.lab import ANN, BOB, chunks, package, push, request


def needs(**wanted: Any) -> dict[str, Any]:
    return {"dependsOn": wanted}


async def test_versions_are_locked_when_a_package_is_pushed(hub: Hub) -> None:
    first = await push(hub, ANN, "base", "1.0.0")
    made = await push(hub, BOB, "game", deployConfig=needs(b="base@^1.0", c={"env": "base", "prefix": "c_"}))
    locked = Locked(env="base@1.0.0", digest=first.digest)
    assert made.dependencies == {"b": "base@^1.0", "c": "base"}
    assert made.locked == {"b": locked, "c": Locked(env="base@1.0.0", digest=first.digest, prefix="c_")}
    await push(hub, ANN, "base", "1.1.0")
    assert (await hub.get(BOB, "game")).locked["b"] == locked
    assert (await hub.resolve(BOB, EnvRef("game"))).locked["b"] == locked
    with pytest.raises(Conflict, match=r"base@1.0.0 is needed by game@1.0.0"):
        await hub.delete(ANN, "base", "1.0.0")
    await hub.delete(ANN, "base", "1.1.0")
    again = await push(hub, BOB, "game", "1.0.1", deployConfig=needs(b="base"))
    assert again.locked == {"b": locked}


async def test_what_is_not_there_is_refused_with_the_nearest_and_nothing_is_kept(hub: Hub) -> None:
    await push(hub, ANN, "judge")
    with pytest.raises(NotFound, match=r"deployConfig.dependsOn.j: there is no environment 'jugde'") as caught:
        await push(hub, ANN, "game", deployConfig=needs(j="jugde"))
    assert caught.value.hint == "did you mean judge?"
    with pytest.raises(NotFound, match=r"dependsOn.j: no version of 'judge' is \^2") as caught:
        await hub.upload(ANN, "game", "1.0.0", chunks(package("game", config={"deployConfig": needs(j="judge@^2")})))
    assert "the nearest: 1.0.0" in str(caught.value.hint)
    env = await hub.get(ANN, "game", "1.0.0")
    assert (env.status, env.digest, env.locked) == (Status.PENDING, "", {})


async def test_an_environment_is_no_part_of_itself(hub: Hub) -> None:
    await push(hub, ANN, "a")
    await push(hub, ANN, "b", deployConfig=needs(a="a"))
    with pytest.raises(Invalid, match=r"a@1.1.0 -> a@\^1"):
        await push(hub, ANN, "a", "1.1.0", deployConfig=needs(me="a@^1"))
    with pytest.raises(Invalid, match=r"a@1.2.0 -> b@1.0.0 -> a@1.0.0") as caught:
        await push(hub, ANN, "a", "1.2.0", deployConfig=needs(b="b"))
    assert caught.value.hint == "take one of them out of dependsOn"


async def test_compositions_end(hub: Hub) -> None:
    await push(hub, ANN, "e0")
    for level in range(1, DEEPEST):
        await push(hub, ANN, f"e{level}", deployConfig=needs(below=f"e{level - 1}"))
    with pytest.raises(Invalid, match=f"at most {DEEPEST} levels: {'.* -> '.join(f'e{n}' for n in range(8, -1, -1))}"):
        await push(hub, ANN, f"e{DEEPEST}", deployConfig=needs(below=f"e{DEEPEST - 1}"))
    wide = {str(number): "e1" for number in range(32)}
    with pytest.raises(TooLarge, match=r"wide@1.0.0 needs 65 instances with itself; 64 is the most"):
        await push(hub, ANN, "wide", deployConfig=needs(**wide))


async def test_what_is_released_needs_nothing_that_may_change(hub: Hub) -> None:
    await push(hub, ANN, "base")
    await push(hub, ANN, "game", deployConfig=needs(b="base"))
    with pytest.raises(Conflict, match=r"game@1.0.0 needs base@1.0.0, which may still change"):
        await hub.release(ANN, "game", "1.0.0")
    await hub.release(ANN, "base", "1.0.0")
    assert (await hub.release(ANN, "game", "1.0.0")).status == Status.RELEASED


async def test_one_that_was_changed_since_is_not_started(hub: Hub) -> None:
    async def resolve(ref: EnvRef) -> Env:
        return await hub.resolve(ANN, ref)

    await push(hub, ANN, "base")
    game = await push(hub, ANN, "game", deployConfig=needs(b="base"))
    part = await composed(game, game.locked, resolve)
    assert [env.id for env in part.all()] == ["game@1.0.0", "base@1.0.0"]
    await hub.upload(ANN, "base", "1.0.0", chunks(package("base", files={"src/new.py": ""})))
    with pytest.raises(Conflict, match=r"base@1.0.0 was changed since game@1.0.0 was pushed") as caught:
        await composed(game, game.locked, resolve)
    assert "push game again" in str(caught.value.hint)
    # A version that was never given its package says nothing of what it starts with.
    other = await hub.create(ANN, request("other", deploy_config=needs(b="base")))
    with pytest.raises(Invalid, match=r"other@1.0.0 does not say which version of b it starts with"):
        await composed(other, other.locked, resolve)
