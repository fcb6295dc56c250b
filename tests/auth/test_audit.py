"""The audit log, on each kind of store."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from types import SimpleNamespace

import pytest
from msgspec import structs

from aenv.auth import audit as module
from aenv.auth.audit import Audit
from aenv.auth.callers import Caller
from aenv.auth.tokens import new_token
from aenv.errors import Forbidden
from aenv.store import Store, open_store
from aenv.store import redis as redis_store
from aenv.wire import Audited
from tests.store.servers import redis_server
from tests.support import until


def line(target: object, status: int = 200) -> Audited:
    return Audited(
        at="2026-01-01T00:00:00.000Z",
        owner="alice",
        token="t1",
        action="DELETE /env/{name}",
        target=str(target),
        status=status,
        request_id="r1",
    )


async def targets(audit: Audit, admin: Caller, **page: int) -> list[str]:
    return [found.target for found in (await audit.list(admin, **page))[0]]


async def written(store: Store) -> int:
    return (await store.find("audit", limit=0)).total


async def until_written(store: Store, count: int) -> None:
    async with asyncio.timeout(30):
        while await written(store) != count:
            await asyncio.sleep(0.01)


async def test_lines_are_listed_newest_first(store: Store, admin: Caller, alice: Caller) -> None:
    audit = Audit(store)
    assert await audit.list(admin) == ([], 0)
    for number in range(250):
        audit.note(line(number))
    found, total = await audit.list(admin, limit=1)
    assert (found, total) == ([line(249)], 250)
    assert await targets(audit, admin, limit=1000) == [str(number) for number in reversed(range(250))]
    assert await targets(audit, admin, limit=3, offset=100) == ["149", "148", "147"]
    assert await audit.list(admin, offset=20_000) == ([], 250)
    with pytest.raises(Forbidden):
        await audit.list(alice)
    await audit.close()


async def test_lines_are_written_by_themselves_and_kept(url: str, admin: Caller) -> None:
    async with await open_store(url) as store:
        audit = Audit(store)
        audit.note(line("first"))
        await until_written(store, 1)
        audit.note(line("second"))
        await until_written(store, 2)
        audit.note(line("third"))
        await audit.close()
        assert await written(store) == 3
    async with await open_store(url) as store:
        audit = Audit(store)
        audit.note(line("fourth"))
        assert await targets(audit, admin) == ["fourth", "third", "second", "first"]
        await audit.close()
        await audit.close()
        await Audit(store).close()


async def test_a_line_that_comes_while_others_are_written_is_kept(
    sqlite: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAUSE", 0)
    for ticks in range(30):  # at whatever place the writer is
        audit = Audit(sqlite)
        audit.note(line(0))
        for _ in range(ticks):
            await asyncio.sleep(0)
        audit.note(line(1))
        await audit.close()
        assert await written(sqlite) == 2 * (ticks + 1)


async def test_the_newest_are_kept(store: Store, admin: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLACK", 20)
    audit = Audit(store, most=150)
    for start in range(0, 400, 100):
        for number in range(start, start + 100):
            audit.note(line(number))
        await audit.list(admin)
    audit.note(line(400))
    assert await audit.list(admin, limit=1) == ([line(400)], 150)
    assert await targets(audit, admin, limit=1000) == [str(number) for number in range(400, 250, -1)]
    assert await targets(audit, admin, limit=10, offset=145) == ["255", "254", "253", "252", "251"]
    assert await targets(audit, admin, limit=10, offset=150) == []
    assert await written(store) < 150 + 20
    await audit.close()


async def test_the_order_is_kept_when_the_clock_goes_back(
    store: Store, admin: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(2_000_000_000, -3600)
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: next(clock), monotonic=time.monotonic))
    for start in (0, 5):
        audit = Audit(store)
        for number in range(start, start + 5):
            audit.note(line(number))
        await audit.close()
    assert await targets(Audit(store), admin) == list("9876543210")


async def test_several_servers_write_one_log(store: Store, admin: Caller) -> None:
    audits = [Audit(store), Audit(store)]
    for number in range(20):
        audits[number % 2].note(line(number))
    await asyncio.gather(*(audit.close() for audit in audits))
    assert sorted(await targets(Audit(store), admin), key=int) == [str(number) for number in range(20)]


async def test_whatever_is_named_can_be_written(sqlite: Store, admin: Caller) -> None:
    audit, token = Audit(sqlite), new_token()
    for target in ("\ud800", "x" * 100_000, "\0", f"/token/{token}"):
        audit.note(line(target))
    assert await targets(audit, admin) == ["/token/***", "\0", "x" * 512, "\\ud800"]
    await audit.close()


async def test_strangers_do_not_drive_out_the_others(
    sqlite: Store, admin: Caller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(module, "time", SimpleNamespace(time=time.time, monotonic=lambda: now))
    monkeypatch.setattr(module, "_STRANGERS", 5)
    audit = Audit(sqlite)
    audit.note(line("known"))
    for number in range(100):
        audit.note(structs.replace(line(number, 401), owner="", token=""))
    assert await targets(audit, admin) == ["4", "3", "2", "1", "0", "known"]
    now += 3600 / 5
    for number in (100, 101):
        audit.note(structs.replace(line(number, 401), owner="", token=""))
    assert (await targets(audit, admin))[0] == "100"
    assert "95 requests without a token" in caplog.text
    await audit.close()


async def test_lines_wait_for_a_store_that_is_away(
    tmp_path, admin: Caller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "aenv.audit")
    with redis_server(tmp_path) as server:
        async with await open_store(server.url) as store:
            audit = Audit(store, most=10)
            monkeypatch.setattr(redis_store, "_PATIENCE", 0.2)
            server.kill()
            audit.note(line(0))
            await until(lambda: "is not being written" in caplog.text, "the warning")
            for number in range(1, 31):
                audit.note(line(number))
            await asyncio.to_thread(server.start)
            monkeypatch.setattr(redis_store, "_PATIENCE", 30.0)
            await until(lambda: "is being written again" in caplog.text, "the end of the failure")
            found = await targets(audit, admin, limit=100)
            assert found[:10] == [str(number) for number in range(30, 20, -1)]
            assert caplog.text.count("is not being written") == 1
            await audit.close()
    lost = int(caplog.text.partition("it has lost ")[2].split()[0])
    assert 20 <= lost <= 21


async def test_closing_waits_for_no_store_that_is_gone(
    tmp_path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CLOSING", 0.2)
    with redis_server(tmp_path) as server:
        async with await open_store(server.url) as store:
            audit = Audit(store)
            server.kill()
            for number in range(3):
                audit.note(line(number))
            await audit.close()
    assert "lost its last 3 lines" in caplog.text
