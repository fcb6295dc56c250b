"""The store in a Redis: servers that go away, connections that are cut, and what is said of them."""

from __future__ import annotations

import asyncio
import logging
import shutil
import subprocess
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis", reason="the redis package is not installed")

from redis.asyncio import Redis

from aenv.errors import AEnvError, Conflict, InvalidConfig, NetworkError, Unsupported
from aenv.store import Add, Delete, Put, Store, open_store
from aenv.store import redis as module
from tests.store.servers import Server, free_port, redis_server

SECRET = "s3cr3t-p4ssw0rd"
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


@pytest.fixture
def server(redis: Server) -> Server:
    redis.empty()
    return redis


@asynccontextmanager
async def raw(server: Server, **options: Any) -> AsyncIterator[Redis]:
    """The server without a store around it."""
    client = Redis(host="127.0.0.1", port=server.port, **options)
    try:
        yield client
    finally:
        await client.aclose()


class Proxy:
    """Passes bytes on to a server, and cuts a connection where it is told to."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._left: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        listening = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}/0"
        finally:
            listening.close()
            for end in self._ends:
                end.transport.abort()
            await asyncio.gather(*self._tasks)

    def cut(self, direction: str, after: int) -> None:
        """Cut the connection on which this many bytes have gone that way from now on."""
        self._left = {direction: after}

    def leave(self) -> bool:
        """Cut nothing any more; whether what was asked for was done."""
        done, self._left = not self._left, {}
        return done

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        ends = {back, writer}
        self._ends |= ends

        async def carry(direction: str, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            await self._pass(direction, source, target)
            for end in ends:
                end.transport.abort()

        await asyncio.gather(carry("asked", reader, back), carry("answered", there, writer))
        self._ends -= ends

    async def _pass(self, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                left = self._left.get(direction)
                if left is not None and len(data) > left:
                    self._left = {}
                    writer.write(data[:left])
                    await writer.drain()
                    return
                if left is not None:
                    self._left[direction] = left - len(data)
                writer.write(data)
                await writer.drain()


# Connections that are cut, servers that end


@pytest.mark.parametrize(("direction", "step"), [("asked", 9), ("answered", 1)])
async def test_a_change_is_made_once_wherever_its_connection_is_cut(server: Server, direction: str, step: int) -> None:
    proxy = Proxy(server.port)
    async with proxy.running() as url, await open_store(url) as store:
        [first] = await store.change(Put("k", "n", b"0"))
        last, after = first, 0
        while True:
            proxy.cut(direction, after)
            [revision] = await store.change(Put("k", "n", b"%d" % after, expect=last))
            was_cut = proxy.leave()
            assert revision == last + 1, f"cut after {after} bytes {direction}"
            record = await store.get("k", "n")
            assert record is not None
            assert (record.value, record.revision) == (b"%d" % after, revision)
            last = revision
            if not was_cut:
                break
            after += step
        assert after > 3 * step


@pytest.mark.parametrize(("direction", "step"), [("asked", 29), ("answered", 1)])
async def test_what_is_added_is_added_once_wherever_its_connection_is_cut(
    server: Server, direction: str, step: int
) -> None:
    proxy = Proxy(server.port)
    async with proxy.running() as url, await open_store(url) as store:
        added, was_cut = 0, True
        while was_cut:
            proxy.cut(direction, added * step)
            await store.change(Add("n", "a", {"i": 1}, most={"i": added + 1}))
            was_cut = proxy.leave()
            added += 1
            assert await store.counts("n") == {"a": {"i": float(added)}}, f"cut {direction}"
        assert added > 3


async def test_a_conflict_whose_answer_was_lost_is_still_one(server: Server) -> None:
    proxy = Proxy(server.port)
    async with proxy.running() as url, await open_store(url) as store:
        await store.change(Put("k", "a", b"1"))
        proxy.cut("answered", 0)
        with pytest.raises(Conflict):
            await store.change(Put("k", "a", b"2", expect=0))
        assert proxy.leave()


async def test_reading_goes_on_wherever_its_connection_is_cut(server: Server) -> None:
    proxy = Proxy(server.port)
    async with proxy.running() as url, await open_store(url) as store:
        await store.change(*(Put("k", f"{number:03}", b"1", tags={"t": ["1"], "u": ["1"]}) for number in range(250)))

        async def everything(store: Store) -> list[object]:
            return [
                await store.get("k", "000"),
                await store.find("k", {"t": "1", "u": ["1", "2"]}),
                [record async for record in store.scan("k")],
                await store.kinds(),
            ]

        expected = await everything(store)
        for direction, afters in {"asked": (0, 100, 300), "answered": (0, 1, 100, 1000, 10_000)}.items():
            for after in afters:
                proxy.cut(direction, after)
                assert await everything(store) == expected
                assert proxy.leave()


async def test_opening_goes_on_when_its_connection_is_cut(server: Server) -> None:
    proxy = Proxy(server.port)
    async with proxy.running() as url:
        for direction in ("asked", "answered"):
            proxy.cut(direction, 0)
            async with await open_store(url) as store:
                assert proxy.leave()
                assert await store.kinds() == []


async def test_a_server_that_is_killed_loses_and_doubles_nothing(tmp_path: Path) -> None:
    with redis_server(tmp_path, *DURABLE) as server:
        async with await open_store(server.url) as store:
            acknowledged: list[int] = []
            stop = asyncio.Event()

            async def count(key: str) -> int:
                """Increments that were acknowledged."""
                made, revision = 0, 0
                while not stop.is_set():
                    [revision] = await store.change(Put("k", key, b"%d" % (made + 1), expect=revision))
                    made += 1
                    acknowledged.append(revision)
                return made

            counters = [asyncio.create_task(count(f"{number}")) for number in range(8)]
            for _ in range(4):
                seen = len(acknowledged)
                while len(acknowledged) < seen + 100:
                    assert not [counter for counter in counters if counter.done()], "a counter failed"
                    await asyncio.sleep(0.001)
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            stop.set()
            made = await asyncio.gather(*counters)
            assert {record.key: int(record.value) async for record in store.scan("k")} == {
                f"{number}": count for number, count in enumerate(made)
            }
            assert sorted(acknowledged) == list(range(1, sum(made) + 1))


async def test_a_script_that_the_server_forgot_is_sent_again(server: Server) -> None:
    async with await open_store(server.url) as store, raw(server) as client:
        await store.change(Put("k", "a", b"1"))
        await client.script_flush()
        await store.change(Put("k", "a", b"2"))
        await client.script_flush()
        assert (await store.find("k")).total == 1


async def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.2)
    port = free_port()
    with pytest.raises(NetworkError, match=f"^the store at 127.0.0.1:{port} does not answer$") as caught:
        await open_store(f"redis://:{SECRET}@127.0.0.1:{port}/0")
    assert_discreet(caught.value)


async def test_a_server_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    listening = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    for patience, timeout in ((0.2, 60.0), (0.5, 0.1)):
        monkeypatch.setattr(module, "_PATIENCE", patience)
        monkeypatch.setattr(module, "_TIMEOUT", timeout)
        with pytest.raises(NetworkError, match=f"^the store at 127.0.0.1:{port} does not answer$") as caught:
            await open_store(f"redis://me:{SECRET}@127.0.0.1:{port}/0")
        assert_discreet(caught.value)
    listening.close()


async def test_a_server_that_ends_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with redis_server(tmp_path) as server:
        async with await open_store(server.url) as store:
            monkeypatch.setattr(module, "_PATIENCE", 0.2)
            server.kill()
            for ask in (store.get("k", "a"), store.change(Put("k", "a", b"1")), store.find("k"), store.kinds()):
                with pytest.raises(NetworkError, match=f"the store at {server.address} does not answer"):
                    await ask


async def test_many_callers_share_few_connections(server: Server) -> None:
    async with await open_store(server.url) as store, raw(server) as client:
        before = len(await client.client_list())
        await asyncio.gather(*(store.change(Put("k", f"{number}", b"1")) for number in range(500)))
        assert (await store.find("k", limit=0)).total == 500
        assert len(await client.client_list()) <= before + module._CONNECTIONS


async def test_several_processes_share_the_records(server: Server) -> None:
    async with await open_store(server.url) as one, await open_store(server.url) as other:

        async def increment(store: Store) -> None:
            while True:
                record = await store.get("k", "n")
                number, revision = (int(record.value), record.revision) if record else (0, 0)
                with suppress(Conflict):
                    await store.change(Put("k", "n", b"%d" % (number + 1), expect=revision))
                    return

        await asyncio.gather(*(increment(store) for _ in range(20) for store in (one, other)))
        record = await one.get("k", "n")
        assert record is not None
        assert record.value == b"40"


# Passwords and settings


def assert_discreet(error: BaseException) -> None:
    """The password is in nothing that anybody reads of an error."""
    shown = "".join(traceback.format_exception(error))
    if isinstance(error, AEnvError):
        shown += f"{error.message} {error.hint} {error.to_wire()}"
    assert SECRET not in f"{shown} {error!r} {error}"


async def test_a_password_is_needed_and_never_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with redis_server(tmp_path, "--requirepass", SECRET) as server:
        for who in ("", f":wrong-{SECRET}@", f"me:{SECRET}@"):
            with pytest.raises(InvalidConfig, match=f"the store at {server.address} does not accept") as caught:
                await open_store(f"redis://{who}{server.address}/0")
            assert caught.value.hint
            assert_discreet(caught.value)
        for who in (f":{SECRET}@", f"default:{SECRET}@", f":{SECRET.replace('-', '%2d')}@"):
            async with await open_store(f"redis://{who}{server.address}/0") as store:
                await store.change(Put("k", "a", b"1"))
                assert SECRET not in repr(store)
    assert SECRET not in caplog.text


async def test_who_loses_records_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with redis_server(tmp_path) as server:
        async with await open_store(server.url) as store:
            for _ in range(3):
                await store.change(Put("k", "a", b"1"))
    [record] = [record for record in caplog.records if record.name == "aenv.store"]
    assert record.levelno == logging.WARNING
    assert f"the store at {server.address} loses records" in record.getMessage()
    caplog.clear()
    with redis_server(tmp_path, *DURABLE) as server:
        async with await open_store(server.url):
            pass
    assert not [record for record in caplog.records if record.name == "aenv.store"]


async def test_a_user_who_may_not_ask_for_settings(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--user", "app", "on", f">{SECRET}", "~*", "+@all", "-info") as server:
        async with await open_store(f"redis://app:{SECRET}@{server.address}/0") as store:
            await store.change(Put("k", "a", b"1"))


async def test_what_the_server_refuses_is_told(tmp_path: Path, server: Server) -> None:
    with pytest.raises(AEnvError, match=f"the store at {server.address} refuses: .*out of range"):
        await open_store(f"redis://{server.address}/99")
    with redis_server(tmp_path) as full:
        async with await open_store(full.url) as store, raw(full) as client:
            await store.change(Put("k", "a", b"1"))
            await client.config_set("maxmemory", "1")
            with pytest.raises(AEnvError, match=f"the store at {full.address} refuses: .*maxmemory") as caught:
                await store.change(Put("k", "a", b"2"))
            assert caught.value.hint
            record = await store.get("k", "a")
            assert record is not None
            assert record.value == b"1"


async def test_a_newer_schema_is_refused_with_both_numbers(server: Server) -> None:
    async with raw(server) as client:
        await client.set("aenv:{store}:schema", "7")
        with pytest.raises(Unsupported, match="has version 7 of the schema; this package knows 1") as caught:
            await open_store(server.url)
        assert caught.value.hint
        assert await client.get("aenv:{store}:schema") == b"7"


async def test_databases_are_apart(server: Server) -> None:
    async with await open_store(server.url) as one, await open_store(f"redis://{server.address}/3") as other:
        await one.change(Put("k", "a", b"1"))
        assert await other.kinds() == []


async def test_keys_lie_below_one_prefix_and_none_are_left(server: Server) -> None:
    async with await open_store(server.url) as store, raw(server) as client:
        puts = [Put("k", f"{number}", b"1", tags={"t": ["1", "2"], "u": ["1"]}, search="x") for number in range(9)]
        await store.change(*puts, Put("k", "expires", b"1", expires_at=1.0), Add("n", "a", {"i": 1}))
        for containing in ("", "x"):
            assert (await store.find("k", {"t": ["1", "2"], "u": ["1", "2"]}, containing=containing)).total == 9
        assert not [key for key in await client.keys() if not key.startswith(b"aenv:{store}:") or b"found" in key]
        await store.change(*(Delete(put.kind, put.key) for put in puts), Add("n", "a", {"i": -1}))
        left = [key.removeprefix(b"aenv:{store}:") for key in await client.keys()]
        assert sorted(key for key in left if not key.startswith(b"done\0")) == [b"revision", b"schema"]
        assert all([await client.ttl(b"aenv:{store}:" + key) > 0 for key in left if key.startswith(b"done\0")])


async def test_a_node_of_a_cluster_holds_all_of_it(tmp_path: Path) -> None:
    if shutil.which("redis-server") and b" v=6" in subprocess.check_output(["redis-server", "--version"]):
        pytest.skip("Redis 6 needs a second port that is 10,000 higher")
    with redis_server(tmp_path, "--cluster-enabled", "yes", "--cluster-port", str(free_port())) as server:
        async with raw(server) as client:
            await client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            while b"cluster_state:ok" not in await client.execute_command("CLUSTER", "INFO"):
                await asyncio.sleep(0.01)
        async with await open_store(server.url) as store:
            await store.change(
                *(Put("{k}", f"{{{number}}}", b"1", tags={"t": ["{1}"], "u": ["2"]}) for number in range(9))
            )
            assert (await store.find("{k}", {"t": ["{1}", "x"], "u": "2"}, containing="")).total == 9
            assert await store.kinds() == ["{k}"]


async def test_a_caller_that_is_cancelled_is_cancelled(server: Server) -> None:
    """Whatever the client is doing at that moment, which it may not tell."""
    async with await open_store(server.url) as store:
        for number in range(240):
            asking = asyncio.create_task(store.get("k", "a"))
            for _ in range(number % 12):
                await asyncio.sleep(0)
            was_done = asking.done()
            asking.cancel()
            await asyncio.wait((asking,))
            assert was_done or asking.cancelled()


async def test_what_an_older_server_deleted_was_not_changed(server: Server) -> None:
    async with await open_store(server.url) as store, raw(server) as client:
        await store.change(Put("k", "a", b"1"), Put("k", "b", b"1"))
        await client.execute_command("HDEL", b"aenv:{store}:revisions\0k", "a")
        assert [record.key for record in await store.since("k", 0)] == ["b"]


async def test_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    options = "req -x509 -newkey rsa:2048 -nodes -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        ["openssl", *options.split(), "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    port = free_port()
    tls = f"--tls-port {port} --tls-cert-file cert.pem --tls-key-file key.pem --tls-auth-clients no".split()
    with redis_server(tmp_path, *tls) as server:
        monkeypatch.setattr(module, "_PATIENCE", 0.5)
        for url in (f"rediss://127.0.0.1:{port}/0", f"rediss://{server.address}/0"):  # not trusted; no TLS at all
            with pytest.raises(NetworkError, match="does not answer"):
                await open_store(url)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        monkeypatch.setattr(module, "_PATIENCE", 10.0)
        async with await open_store(f"rediss://127.0.0.1:{port}/0") as store:
            await store.change(Put("k", "a", b"1"))
            assert await store.kinds() == ["k"]


def test_where_a_url_points() -> None:
    shown: Callable[[str], str] = lambda url: module._address(url).shown  # noqa: E731
    assert module._address("rediss://me:a%40b@host:1/2") == ("host", 1, 2, True, "me", "a@b")
    assert module._address("redis://host") == ("host", 6379, 0, False, None, None)
    assert shown("redis://[::1]:7/") == "[::1]:7"
