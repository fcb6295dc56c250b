"""A whole hub as one file, and back, between stores of any kind."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from aenv.errors import Conflict, Invalid, NotFound
from aenv.hub.moving import Moved, export, take_in
from aenv.hub.service import Hub
from aenv.models import EnvRef
from aenv.store import Store, open_store
from aenv.store.blobs import Blobs, FileBlobs, open_blobs
from aenv.wire import PolicyChange, Status
from tests.hub.lab import ADMIN, ANN, BOB, EVE, Stage, content, package, push, request


@pytest.fixture
async def other(tmp_path: Path, engine: Stage) -> AsyncIterator[Hub]:
    """An empty hub elsewhere, on SQLite."""
    async with await open_store(f"sqlite:{tmp_path / 'other.db'}") as store:
        blobs = await open_blobs(f"file:{tmp_path / 'other-blobs'}")
        async with Hub(store, blobs, engine, folder=tmp_path / "other", builtins=False) as opened:
            yield opened


async def filled(hub: Hub) -> None:
    await push(hub, BOB, "base", release=True)
    await push(hub, ANN, "game", "1.0.0", release=True, tags=["fun"], deployConfig={"dependsOn": {"b": "base@^1"}})
    await push(hub, ANN, "game", "1.1.0")
    await hub.yank(BOB, "base", "1.0.0", "old")
    await push(hub, EVE, "own")
    await hub.set_policy(EVE, "own", PolicyChange(public=False, readers=["bob"], writers=["ann"]))
    await hub.create(ANN, request("plain", status="Ready"))
    await push(hub, ANN, "gone", release=True)
    await hub.delete(ADMIN, "gone", "1.0.0")


async def everything(hub: Hub) -> list[Any]:
    found, _ = await hub.list(ADMIN)
    return [await hub.get(ADMIN, env.name, env.version) for env in found]


def moving(hub: Hub) -> tuple[Store, Blobs]:
    return hub._store, hub._blobs


async def test_a_hub_moves_with_all_that_it_has(hub: Hub, other: Hub, tmp_path: Path) -> None:
    await filled(hub)
    file = tmp_path / "hub.tar"
    assert await export(*moving(hub), file) == Moved(names=5, versions=5, packages=4)
    assert file.stat().st_mode & 0o077 == 0
    assert await take_in(*moving(other), file) == Moved(names=5, versions=5, packages=4)
    assert await everything(other) == await everything(hub)
    for name, version in (("game", "1.0.0"), ("game", "1.1.0"), ("base", "1.0.0"), ("own", "1.0.0")):
        assert await content(other, EVE, name, version) == await content(hub, EVE, name, version)
    # What is found, seen and allowed is what it was.
    assert (await other.resolve(BOB, EnvRef("game", "^1.0"))).version == "1.1.0"
    assert [env.id for env in (await other.list(BOB, tags=["fun"], tool="greet"))[0]] == ["game@1.0.0"]
    assert await other.policy(EVE, "own") == await hub.policy(EVE, "own")
    with pytest.raises(NotFound):
        await other.get(type(EVE)("stranger", EVE.scopes), "own")
    with pytest.raises(Conflict, match="was released, and then deleted"):
        await other.create(ANN, request("gone"))
    assert (await other.release(ANN, "game", "1.1.0")).status == Status.RELEASED


async def test_taking_in_twice_does_no_harm(hub: Hub, other: Hub, tmp_path: Path) -> None:
    await filled(hub)
    file = tmp_path / "hub.tar"
    await export(*moving(hub), file)
    await take_in(*moving(other), file)
    before = await everything(other)
    assert await take_in(*moving(other), file) == Moved()
    assert await take_in(*moving(hub), file) == Moved()
    await push(other, ANN, "game", "3.0.0")
    assert await take_in(*moving(other), file) == Moved()
    assert [env for env in await everything(other) if env.version != "3.0.0"] == before


async def test_what_does_not_go_together_is_named_and_nothing_is_added(hub: Hub, other: Hub, tmp_path: Path) -> None:
    await filled(hub)
    file = tmp_path / "hub.tar"
    await export(*moving(hub), file)
    await push(other, ANN, "game", "1.1.0", tags=["another"])
    await push(other, ANN, "base")
    before = await everything(other)
    with pytest.raises(Conflict) as caught:
        await take_in(*moving(other), file)
    assert "game@1.1.0 is different here" in caught.value.message
    assert "base has another owner or other access here" in caught.value.message
    assert caught.value.hint
    assert await everything(other) == before
    await other.create(EVE, request("GONE"))
    with pytest.raises(Conflict, match="gone has another owner"):
        await take_in(*moving(other), file)


async def test_an_export_of_nothing(hub: Hub, other: Hub, tmp_path: Path) -> None:
    assert await export(*moving(hub), tmp_path / "hub.tar") == Moved()
    assert await take_in(*moving(other), tmp_path / "hub.tar") == Moved()
    with pytest.raises(Conflict, match="is there already"):
        await export(*moving(hub), tmp_path / "hub.tar")
    with pytest.raises(Exception, match="cannot hold"):
        await export(*moving(hub), tmp_path / "nowhere" / "hub.tar")


async def test_a_damaged_package_is_not_exported(hub: Hub, blobs: Blobs, tmp_path: Path) -> None:
    made = await push(hub, ANN, "game")
    assert isinstance(blobs, FileBlobs)
    blobs._path(made.digest).write_bytes(b"x" * made.size)
    with pytest.raises(Exception, match="damaged"):
        await export(*moving(hub), tmp_path / "hub.tar")
    assert [path for path in tmp_path.iterdir() if "hub.tar" in path.name] == []


def rewritten(source: Path, target: Path, change: Callable[[str, bytes], tuple[str, bytes] | None]) -> None:
    """The same file with other entries."""
    with tarfile.open(source) as old, tarfile.open(target, "w") as new:
        for member in old:
            opened = old.extractfile(member)
            assert opened is not None
            if (changed := change(member.name, opened.read())) is not None:
                info = tarfile.TarInfo(changed[0])
                info.size = len(changed[1])
                new.addfile(info, io.BytesIO(changed[1]))


def edited(part: str, **fields: Any) -> Callable[[str, bytes], tuple[str, bytes]]:
    def change(name: str, data: bytes) -> tuple[str, bytes]:
        if not name.startswith(part):
            return name, data
        value = json.loads(data)
        target = value.get("env", value)
        return name, json.dumps({**value, "env": target | fields} if "env" in value else target | fields).encode()

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name, data: None if name == "hub.json" else (name, data), "is not the file of a hub"),
        (lambda name, data: None if name.startswith("blobs/") else (name, data), "1 packages are missing"),
        (lambda name, data: None if name.startswith("names/") else (name, data), "is not what a hub wrote"),
        (lambda name, data: (name, data[:-1] + b"x") if name.startswith("blobs/") else (name, data), "is damaged"),
        (lambda name, data: (name, b"{}") if name.startswith("names/") else (name, data), "is not what a hub wrote"),
        (lambda name, data: ("../../etc/x", data) if name.startswith("names/") else (name, data), "no hub wrote"),
        (lambda name, data: ("names/../x.json", data) if name.startswith("names/") else (name, data), "no hub wrote"),
        (edited("hub.json", format=2), "version 2 of the format"),
        (edited("names/", name="other"), "is not what a hub wrote"),
        (edited("names/", owner=""), "no owner's name"),
        (edited("versions/", version="x"), "not a semantic version"),
        (edited("versions/", id="game@2.0.0"), "is not what a hub wrote"),
        (edited("versions/", name="another"), "is not what a hub wrote"),
        (edited("versions/", status=44), "is not what a hub wrote"),
        (edited("versions/", status=4), "is not what a hub wrote"),
        (edited("versions/", digest="0" * 64), "is not what a hub wrote"),
    ],
)
async def test_a_file_that_no_hub_wrote_adds_nothing(
    tmp_path: Path, engine: Stage, other: Hub, change: Callable[[str, bytes], tuple[str, bytes] | None], message: str
) -> None:
    async with await open_store(f"sqlite:{tmp_path / 'store.db'}") as store:
        blobs = await open_blobs(f"file:{tmp_path / 'blobs'}")
        async with Hub(store, blobs, engine, builtins=False) as hub:
            await push(hub, ANN, "game")
            await export(store, blobs, tmp_path / "hub.tar")
    rewritten(tmp_path / "hub.tar", tmp_path / "bad.tar", change)
    with pytest.raises(Invalid, match=message):
        await take_in(*moving(other), tmp_path / "bad.tar")
    assert await everything(other) == []


async def test_what_is_no_file_at_all(other: Hub, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    (tmp_path / "package").write_bytes(package("game"))
    for name in ("text", "package", "nothing"):
        with pytest.raises(Invalid, match="is not the file of a hub"):
            await take_in(*moving(other), tmp_path / name)
