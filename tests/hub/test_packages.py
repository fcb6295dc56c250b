"""Packages: how they come, what is refused, and what is left when something goes wrong."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from aenv.errors import (
    AEnvError,
    Conflict,
    Invalid,
    NetworkError,
    NotFound,
    OutOfMemory,
    RateLimited,
    StartFailed,
    StorageFull,
    TooLarge,
    Unsupported,
)
from aenv.hub import packages, reading
from aenv.hub.packages import sweep
from aenv.hub.service import Hub
from aenv.models import EnvRef
from aenv.store import Delete, Store, open_store
from aenv.store.blobs import Blobs, FileBlobs, open_blobs
from aenv.wire import Env, PolicyChange, Status
from tests.hub.lab import ADMIN, ANN, BOB, EVE, TOOL, Stage, chunks, content, package, push, request
from tests.support import until


async def kept(blobs: Blobs) -> set[str]:
    return {blob.digest async for blob in blobs.all()}


def work(home: Path) -> list[str]:
    """What lies in the folders of hubs, beside their locks."""
    found = (path for path in (home / "hub").rglob("*") if path.name not in ("lock", ".lock"))
    return sorted(path.name for path in found if path.parent != home / "hub")


# What comes


async def test_a_package_makes_a_version_ready(hub: Hub, blobs: Blobs, engine: Stage, home: Path) -> None:
    await hub.create(ANN, request("game"))
    files = {"README.md": "# A game\n", "src/game.py": "raise SystemExit('the hub must not import this')"}
    config = {"description": "A game.", "tags": ["fun"], "deployConfig": {"secrets": ["KEY"], "preload": True}}
    data = package("game", config=config, files=files)
    made = await hub.upload(ANN, "game", "1.0.0", chunks(data))
    assert (made.status, made.digest, made.size) == (Status.READY, hashlib.sha256(data).hexdigest(), len(data))
    assert (made.description, made.tags, made.readme) == ("A game.", ["fun"], "# A game\n")
    assert [(tool.name, tool.description, tool.input_schema) for tool in made.tools] == [
        ("greet", "Says hello.", TOOL["inputSchema"])
    ]
    assert [(reward.name, reward.description) for reward in made.rewards] == [("score", "")]
    assert await hub.get(BOB, "game") == made
    assert await content(hub, BOB, "game") == data
    assert await kept(blobs) == {made.digest}
    [spec] = engine.specs
    assert (spec.network, spec.preload, spec.owner, spec.stamp) == ("none", False, "ann", made.digest)
    assert set(spec.environment_variables) == {"KEY"}
    assert engine.deleted  # nothing of it runs on
    assert not engine.sandboxes
    assert work(home) == []


async def test_an_unreleased_version_may_get_another_package(hub: Hub, store: Store, blobs: Blobs) -> None:
    first = await push(hub, ANN, "game")
    second = await hub.upload(ANN, "game", "1.0.0", chunks(package("game", files={"new": "x"})))
    assert second.digest != first.digest
    assert (await hub.resolve(ANN, EnvRef("game"))).digest == second.digest
    # What nobody needs goes away, but not at once: it may be somebody's who is pushing it.
    assert await sweep(store, blobs) == 0
    assert await kept(blobs) == {first.digest, second.digest}
    assert await sweep(store, blobs, kept=-60) == 1
    assert await kept(blobs) == {second.digest}


async def test_two_versions_may_share_a_package(hub: Hub, store: Store, blobs: Blobs) -> None:
    made = await push(hub, ANN, "game")
    assert isinstance(blobs, FileBlobs)
    os.utime(blobs._path(made.digest), (1, 1))
    again = await hub.upload(ANN, "game", "1.0.0", chunks(package("game")))
    assert again.digest == made.digest
    await hub.delete(ANN, "game", "1.0.0")
    assert await sweep(store, blobs) == 0  # it was put again just now
    os.utime(blobs._path(made.digest), (1, 1))
    assert await sweep(store, blobs) == 1


# What is refused


def bomb() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        info = tarfile.TarInfo("zeros")
        info.size = packages.MOST + 1
        tar.addfile(info, _Zeros())
    return buffer.getvalue()


class _Zeros(io.RawIOBase):
    def read(self, size: int = -1) -> bytes:
        return b"\0" * size


def escaping() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        info = tarfile.TarInfo("../../outside")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    return buffer.getvalue()


REFUSED: dict[str, tuple[Callable[[], bytes], type[AEnvError], str]] = {
    "nothing": (lambda: b"", Invalid, "truncated"),
    "text": (lambda: b"no archive", Invalid, "not gzip"),
    "escaping": (escaping, Invalid, "leaves the project"),
    "other name": (lambda: package("other"), Invalid, "the package is other@1.0.0, not game@1.0.0"),
    "other version": (lambda: package("game", "1.0.1"), Invalid, "the package is game@1.0.1, not game@1.0.0"),
    "tags": (lambda: package("game", config={"tags": [str(n) for n in range(40)]}), TooLarge, "40 tags"),
    "large": (lambda: package("game", config={"buildConfig": {"x": "y" * 70_000}}), TooLarge, "65536 is the most"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_what_is_no_package_changes_nothing(hub: Hub, blobs: Blobs, engine: Stage, home: Path, what: str) -> None:
    data, error, message = REFUSED[what]
    before = await hub.create(ANN, request("game"))
    with pytest.raises(error, match=message):
        await hub.upload(ANN, "game", "1.0.0", chunks(data()))
    assert await hub.get(ANN, "game") == before
    assert await kept(blobs) == set()
    assert engine.specs == []
    assert work(home) == []


async def test_bombs_and_what_never_ends(hub: Hub, blobs: Blobs, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "MOST", 1_000_000)
    monkeypatch.setattr(packages.archive, "MAX_SIZE", 1_000_000)
    before = await push(hub, ANN, "game")

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65536

    with pytest.raises(TooLarge, match="more than 1000000 bytes"):
        await hub.upload(ANN, "game", "1.0.0", endless())
    monkeypatch.setattr(packages.archive.unpack, "__kwdefaults__", {"limit": 1_000_000, "most_files": 100})
    with pytest.raises(TooLarge, match="more than"):
        await hub.upload(ANN, "game", "1.0.0", chunks(bomb()))
    assert await hub.get(ANN, "game") == before
    assert work(home) == []


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (
            {"start": StartFailed("ImportError: no module named foo")},
            "cannot be read: ImportError: no module named foo",
        ),
        ({"start": Invalid("requirements.txt: nonsense")}, "cannot be read: requirements.txt: nonsense"),
        ({"start": OutOfMemory("out of memory")}, "cannot be read: out of memory"),
        ({"/tools": b"nonsense"}, "GET /tools is no answer of a runtime"),
        ({"/tools": {"a": "b"}}, "GET /tools is no answer of a runtime"),
        ({"/tools": b'{"success": true}'}, "GET /tools is no answer of a runtime"),
        ({"/tools": None}, "closed the connection"),
        ({"/info": b"[" * 100_000}, "GET /info is no answer of a runtime"),
        ({"/tools": b"x" * 5_000_000}, "over 4194304 bytes"),
        ({"/tools": [{"name": f"t{number}"} for number in range(1001)]}, "1001 tools; 1000 is the most"),
        ({"/tools": [{"name": ""}]}, "a name that cannot be kept"),
        ({"/tools": [{"name": "a\u202eb"}]}, "a name that cannot be kept"),
        ({"/tools": [{"name": "a", "inputSchema": {"x": "y" * 700_000}}]}, "the schemas of game@1.0.0 have 700"),
    ],
)
async def test_a_project_that_cannot_be_read_fails_its_version(
    hub: Hub, blobs: Blobs, engine: Stage, home: Path, answers: dict[str, Any], message: str
) -> None:
    before = await push(hub, ANN, "game")
    good = dict(engine.answers)
    engine.answers |= answers
    with pytest.raises(Invalid, match=message) as caught:
        await hub.upload(ANN, "game", "1.0.0", chunks(package("game", files={"new": "x"})))
    assert caught.value.status == 422
    failed = await hub.get(ANN, "game")
    assert (failed.status, failed.reason) == (Status.FAILED, caught.value.message)
    assert (failed.digest, failed.size, failed.tools, failed.rewards) == ("", 0, [], [])
    assert (await hub.status(ANN, "game", "1.0.0")).reason == caught.value.message
    assert failed.history[-1].what == "failed"
    assert await kept(blobs) == {before.digest}
    for asking in (hub.resolve(ANN, EnvRef("game", "1.0.0")), hub.release(ANN, "game", "1.0.0")):
        with pytest.raises(Conflict):
            await asking
    assert engine.sandboxes == {}
    assert work(home) == []
    engine.answers = good
    again = await hub.upload(ANN, "game", "1.0.0", chunks(package("game")))
    assert (again.status, again.reason) == (Status.READY, "")


async def test_a_failure_of_the_platform_is_not_the_versions(hub: Hub, engine: Stage) -> None:
    before = await push(hub, ANN, "game")
    engine.answers["start"] = Unsupported("no engine here")
    with pytest.raises(Unsupported, match="no engine here"):
        await hub.upload(ANN, "game", "1.0.0", chunks(package("game", files={"new": "x"})))
    assert await hub.get(ANN, "game") == before


async def test_a_sandbox_that_says_nothing_is_not_waited_for(
    hub: Hub, engine: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "START", 0.05)
    await hub.create(ANN, request("game"))
    engine.go.clear()
    with pytest.raises(Invalid, match="did not start within 0.05 s"):
        await hub.upload(ANN, "game", "1.0.0", chunks(package("game")))
    assert (await hub.get(ANN, "game")).status == Status.FAILED
    assert engine.sandboxes == {}


# What is interrupted


async def test_a_client_that_vanishes_leaves_nothing(hub: Hub, blobs: Blobs, home: Path) -> None:
    before = await push(hub, ANN, "game")

    async def broken() -> AsyncIterator[bytes]:
        yield package("game")[:100]
        raise NetworkError("the client left")

    with pytest.raises(NetworkError):
        await hub.upload(ANN, "game", "1.0.0", broken())
    begun = asyncio.Event()

    async def stuck() -> AsyncIterator[bytes]:
        yield package("game")[:100]
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(hub.upload(ANN, "game", "1.0.0", stuck()))
    await begun.wait()
    assert work(home) != []
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await hub.get(ANN, "game") == before
    assert await kept(blobs) == {before.digest}
    assert work(home) == []


async def test_one_who_leaves_while_the_package_is_read_leaves_nothing(
    hub: Hub, blobs: Blobs, engine: Stage, home: Path
) -> None:
    before = await push(hub, ANN, "game")
    engine.go.clear()
    task = asyncio.create_task(hub.upload(ANN, "game", "1.0.0", chunks(package("game", files={"new": "x"}))))
    await until(lambda: bool(engine.sandboxes), "the reading")
    assert (await hub.status(ANN, "game", "1.0.0")).title == "Testing"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await hub.get(ANN, "game") == before
    assert await kept(blobs) == {before.digest}
    assert (engine.sandboxes, work(home)) == ({}, [])
    engine.go.set()
    assert await hub.upload(ANN, "game", "1.0.0", chunks(package("game")))


async def test_while_a_package_is_read_its_version_is_left_alone(hub: Hub, engine: Stage) -> None:
    await hub.create(ANN, request("game"))
    engine.go.clear()
    task = asyncio.create_task(hub.upload(ANN, "game", "1.0.0", chunks(package("game"))))
    await until(lambda: bool(engine.sandboxes), "the reading")
    for change in (
        hub.update(ANN, "game", "1.0.0", request("game")),
        hub.release(ANN, "game", "1.0.0"),
        hub.yank(ANN, "game", "1.0.0"),
        hub.delete(ANN, "game", "1.0.0"),
        hub.upload(ADMIN, "game", "1.0.0", chunks(package("game"))),
    ):
        with pytest.raises(Conflict):
            await change
    await hub.set_policy(ANN, "game", PolicyChange(public=False))
    engine.go.set()
    assert (await task).status == Status.READY
    with pytest.raises(NotFound):
        await hub.get(EVE, "game")
    assert (await hub.list(EVE))[1] == 0


async def test_of_two_who_push_the_same_version_one_wins(hub: Hub, engine: Stage) -> None:
    await hub.create(ANN, request("game"))
    await hub.set_policy(ANN, "game", PolicyChange(writers=["bob"]))
    engine.go.clear()
    one = asyncio.create_task(hub.upload(ANN, "game", "1.0.0", chunks(package("game", files={"of": "ann"}))))
    other = asyncio.create_task(hub.upload(BOB, "game", "1.0.0", chunks(package("game", files={"of": "bob"}))))
    await asyncio.wait((one, other), return_when=asyncio.FIRST_COMPLETED)
    engine.go.set()
    found = await asyncio.gather(one, other, return_exceptions=True)
    [won] = [outcome for outcome in found if isinstance(outcome, Env)]
    [lost] = [outcome for outcome in found if not isinstance(outcome, Env)]
    assert isinstance(lost, Conflict)
    assert await hub.get(ANN, "game") == won


async def test_who_began_before_another_one_was_done_does_not_replace_it(hub: Hub) -> None:
    await hub.create(ANN, request("game"))
    begun, go = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        begun.set()
        await go.wait()
        yield package("game", files={"of": "the slow one"})

    task = asyncio.create_task(hub.upload(ANN, "game", "1.0.0", slow()))
    await begun.wait()
    made = await hub.upload(ANN, "game", "1.0.0", chunks(package("game")))
    go.set()
    with pytest.raises(Conflict, match="was changed while its package came"):
        await task
    assert await hub.get(ANN, "game") == made


async def test_readings_take_turns(hub: Hub, engine: Stage) -> None:
    async def one(owner: Any, name: str) -> None:
        await push(hub, owner, name)

    engine.go.clear()
    tasks = [asyncio.create_task(one(ANN, f"ann-{number}")) for number in range(3)]
    await until(lambda: len(engine.sandboxes) == 1, "the first reading")
    callers = [type(ANN)(f"user{number}", ANN.scopes) for number in range(6)]
    tasks += [asyncio.create_task(one(caller, f"{caller.owner}-env")) for caller in callers]
    await until(lambda: len(engine.sandboxes) == 4, "as many readings as there may be")
    engine.go.set()
    await asyncio.gather(*tasks)
    assert engine.most == 4
    assert (await hub.list(ANN))[1] == 9


async def test_who_waits_too_long_is_told(hub: Hub, engine: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    await hub.create(ANN, request("one"))
    await hub.create(ANN, request("two"))
    engine.go.clear()
    task = asyncio.create_task(hub.upload(ANN, "one", "1.0.0", chunks(package("one"))))
    await until(lambda: bool(engine.sandboxes), "the reading")
    monkeypatch.setattr(packages, "_PATIENCE", 0.05)
    with pytest.raises(RateLimited):
        await hub.upload(ANN, "two", "1.0.0", chunks(package("two")))
    assert (await hub.get(ANN, "two")).status == Status.PENDING
    engine.go.set()
    await task


# What a hub that was killed left


_HUB = """
import asyncio, sys
from aenv.engines.failing import SlowEngine
from aenv.hub import packages
from aenv.hub.service import Hub
from aenv.store import open_store
from aenv.store.blobs import open_blobs
from tests.hub.lab import ANN, chunks, package, request

packages._LEASE = 3600.0

async def main():
    store, blobs = await open_store(sys.argv[1]), await open_blobs(sys.argv[2])
    hub = Hub(store, blobs, SlowEngine(create=3600), builtins=False)
    await hub.start()
    await hub.create(ANN, request("game"))
    task = asyncio.create_task(hub.upload(ANN, "game", "1.0.0", chunks(package("game"))))
    while (await hub.status(ANN, "game", "1.0.0")).title != "Testing":
        await asyncio.sleep(0.01)
    print("reading", flush=True)
    await task

asyncio.run(main())
"""


async def test_what_a_killed_hub_left_is_removed_and_the_version_can_be_pushed_again(
    url: str, tmp_path: Path, home: Path, engine: Stage
) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", _HUB, url, f"file:{tmp_path / 'blobs'}"]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"reading\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert work(home) != []
    async with await open_store(url) as store, await open_blobs(f"file:{tmp_path / 'blobs'}") as blobs:
        async with Hub(store, blobs, engine, builtins=False) as hub:
            assert work(home) == []
            assert (await hub.status(ANN, "game", "1.0.0")).title == "Testing"
            with pytest.raises(Conflict):  # it may be alive
                await hub.upload(ANN, "game", "1.0.0", chunks(package("game")))
            await store.change(Delete("env-busy", "game@1.0.0"))  # as time does
            status = await hub.status(ANN, "game", "1.0.0")
            assert (status.title, status.reason.startswith("the hub was stopped")) == ("Failed", True)
            made = await hub.upload(ANN, "game", "1.0.0", chunks(package("game")))
            assert (made.status, made.reason) == (Status.READY, "")


async def test_hubs_that_live_at_the_same_time_leave_each_others_folders_alone(
    store: Store, blobs: Blobs, engine: Stage, home: Path
) -> None:
    async with Hub(store, blobs, engine, builtins=False), Hub(store, blobs, engine, builtins=False):
        assert len([path for path in (home / "hub").iterdir() if path.is_dir()]) == 2
    assert [path for path in (home / "hub").iterdir() if path.is_dir()] == []


async def test_a_reader_that_is_slow_gives_signs_of_life(
    hub: Hub, engine: Stage, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "_RENEWAL", 0.05)
    await hub.create(ANN, request("game"))
    engine.go.clear()
    task = asyncio.create_task(hub.upload(ANN, "game", "1.0.0", chunks(package("game"))))
    await until(lambda: bool(engine.sandboxes), "the reading")
    first = await store.get("env-busy", "game@1.0.0")
    assert first is not None
    deadline = time.monotonic() + 30
    while (now := await store.get("env-busy", "game@1.0.0")) is None or now.revision == first.revision:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    engine.go.set()
    await task
    assert await store.get("env-busy", "game@1.0.0") is None


# Disks that fail


@pytest.mark.parametrize("place", ["folder", "blobs"])
async def test_a_full_disk_changes_nothing(tmp_path: Path, engine: Stage, place: str) -> None:
    small = tmp_path / "small"
    small.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted by root only")
    try:
        folder = (small if place == "folder" else tmp_path) / "hub"
        where = (small if place == "blobs" else tmp_path) / "blobs"
        async with (
            await open_store(f"sqlite:{tmp_path / 'store.db'}") as store,
            await open_blobs(f"file:{where}") as blobs,
        ):
            async with Hub(store, blobs, engine, folder=folder, builtins=False) as hub:
                before = await push(hub, ANN, "game")
                large = package("game", files={"noise": os.urandom(3_000_000).hex()})
                with pytest.raises(StorageFull, match="no room is left") as caught:
                    await hub.upload(ANN, "game", "1.0.0", chunks(large, 65536))
                assert caught.value.hint
                assert await hub.get(ANN, "game") == before
                assert await kept(blobs) == {before.digest}
                assert await hub.upload(ANN, "game", "1.0.0", chunks(package("game", files={"small": "x"})))
    finally:
        subprocess.run(["umount", str(small)], check=True)
