"""Calls to services: who may make them, which replica takes them, and what happens when one is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from aenv import Environment, attach, http
from aenv.api.gateway import Gateway, Replicas, balancer
from aenv.api.gateway import gateway as looks
from aenv.errors import NetworkError, StartFailed
from tests.api.gateway.support import (
    AGENT_TOKEN,
    OWNER,
    OWNER_TOKEN,
    Count,
    Handler,
    Known,
    Request,
    Served,
    asked,
    client,
    head,
    inside,
    ok,
    place,
    posted,
    serving,
    upstream,
)
from tests.support import Sandbox, until

MB = 1024 * 1024
BOTH = "/env-service/both"
CALL_ID = f"{OWNER}AEnv-Call-Id: c1\r\n"
NOWHERE = "unix:/nowhere/at/all"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, and do not wait long for anything."""
    monkeypatch.setattr(looks, "EVERY", 0.05)
    monkeypatch.setattr(balancer, "NEWS", 0.3)


class Replica:
    """A server in place of a replica: it answers with its name, unless it is to do something else."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.heard: list[Request] = []
        self.bodies: list[bytes] = []
        self.breaks = 0
        """Requests that it is still to hang up on, without an answer."""
        self.held: asyncio.Event | None = None
        """What it waits for before it answers."""
        self.count = Count()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await head(reader)
            self.bodies.append(await reader.readexactly(int(request.headers.get("content-length", 0))))
            self.heard.append(request)
            if self.breaks:
                self.breaks -= 1
                return
            if self.held is not None:
                await self.held.wait()
            writer.write(ok(self.name.encode(), "AEnv-Boot: b\r\nMcp-Session-Id: s\r\nServer-Timing: tool;dur=1\r\n"))


@contextlib.asynccontextmanager
async def replicas(number: int, **options: bool) -> AsyncIterator[tuple[Gateway, Served, list[Replica]]]:
    """A gateway in front of a service."""
    async with contextlib.AsyncExitStack() as stack:
        made = [Replica(f"r{n}") for n in range(number)]
        urls = [await stack.enter_async_context(upstream(one.count.on(one))) for one in made]
        served = Served(*urls)
        gateway = await stack.enter_async_context(serving(Known(), services=served, **options))
        yield gateway, served, made


async def taker(gateway: Gateway, path: str = "/x", headers: str = OWNER, method: str = "POST") -> str:
    """Who took a call."""
    reply = await asked(gateway, f"{BOTH}{path}", headers, method)
    assert reply.status == 200, reply
    return reply.body.decode()


# Who may


def bearer(token: str) -> str:
    return f"Authorization: Bearer {token}\r\n"


@pytest.mark.parametrize(
    ("headers", "tools", "info"),
    [
        (bearer(OWNER_TOKEN), 200, 200),
        (bearer(AGENT_TOKEN), 200, 403),
        (bearer("anna"), 200, 200),
        (bearer("admin"), 200, 200),
        (bearer("anna-reads"), 403, 403),
        (bearer("bert"), 404, 404),
        (bearer("nobody"), 401, 401),
        ("Authorization: Basic eDp5\r\n", 401, 401),
        ("", 401, 401),
    ],
)
@pytest.mark.parametrize("known", [True, False], ids=["known", "asked-for"])
async def test_what_a_token_opens(lab: Sandbox, headers: str, tools: int, info: int, known: bool) -> None:
    served = Served(lab.url, lab.url)
    if not known:
        served.heard = {}
    async with serving(Known(), services=served) as gateway:
        headers += "X-Request-Id: mine\r\n"
        here = await asked(gateway, f"{BOTH}/tools", headers)
        assert here.status == tools
        assert (await asked(gateway, f"{BOTH}/info", headers)).status == info
        elsewhere = await asked(gateway, "/env-service/none/tools", headers)
        if tools in (401, 403, 404):  # whoever may not use it cannot tell whether it is there
            assert here.body.replace(b"both", b"none") == elsewhere.body
            assert here.headers == elsewhere.headers
        else:
            assert elsewhere.status in (401, 404)
        if not known and tools != 401:
            assert served.asked >= 2


async def test_legacy_clients_and_agents_urls(lab: Sandbox) -> None:
    async with serving(Known(), services=Served(lab.url), legacy=True) as gateway:
        assert (await asked(gateway, f"{BOTH}/info", "")).status == 200
        assert (await asked(gateway, "/env-service/none/info", "")).status == 404
        assert (await asked(gateway, f"{BOTH}/info", bearer(AGENT_TOKEN))).status == 403
    async with serving(Known(), services=Served(lab.url)) as gateway:
        assert (await asked(gateway, f"{BOTH}/mcp?token={AGENT_TOKEN}", "", "DELETE")).status not in (401, 403)
        assert (await asked(gateway, f"{BOTH}/info?token={OWNER_TOKEN}", "")).status == 401
        assert (await asked(gateway, f"{BOTH}/mcp?token=wrong", "")).status == 401


# Who takes a call


async def test_idle_replicas_take_turns() -> None:
    async with replicas(3) as (gateway, _, _):
        assert Counter([await taker(gateway) for _ in range(9)]) == {"r0": 3, "r1": 3, "r2": 3}


async def test_a_slow_replica_gets_fewer_calls() -> None:
    async with replicas(2) as (gateway, _, (first, second)), client(gateway) as waits:
        first.held = asyncio.Event()
        waits.post(f"{BOTH}/x")
        await until(lambda: bool(first.heard), "a call to the slow one")
        assert [await taker(gateway) for _ in range(10)] == ["r1"] * 10
        assert (len(first.heard), len(second.heard)) == (1, 10)
        first.held.set()
        assert (await waits.reply()).body == b"r0"
        first.held = None
        assert {await taker(gateway) for _ in range(2)} == {"r0", "r1"}


async def test_what_concerns_one_sandbox_is_not_told() -> None:
    async with replicas(1) as (gateway, _, (one,)):
        reply = await asked(gateway, f"{BOTH}/health", f"{OWNER}AEnv-Boot: of-another\r\n")
        assert "aenv-boot" not in reply.headers
        assert reply.headers["server-timing"] == "tool;dur=1"
        assert reply.headers["mcp-session-id"] == "s~r0"
        assert "aenv-boot" not in one.heard[0].headers


async def test_a_replica_that_takes_no_connection_is_passed_over() -> None:
    async with replicas(2) as (gateway, served, (one, two)):
        served.set(place(NOWHERE, "gone"), *served.all["both"].ready)
        takers = [await taker(gateway) for _ in range(12)]
        assert set(takers) == {"r0", "r1"}
        assert served.asked >= 1
        assert len(one.heard) + len(two.heard) == 12
        async with client(gateway) as many:  # with a body, too
            for _ in range(6):
                many.post(f"{BOTH}/x", b"body")
            assert [(await many.reply()).status for _ in range(6)] == [200] * 6
        assert set(one.bodies + two.bodies) == {b"", b"body"}


async def test_when_nobody_takes_connections_it_did_not_run() -> None:
    async with serving(Known(), services=Served(NOWHERE, NOWHERE)) as gateway:
        for headers in (OWNER, CALL_ID):
            reply = await posted(gateway, f"{BOTH}/x", b"body", headers)
            assert (reply.status, reply.json["code"], reply.headers["retry-after"]) == (503, "network", "1")
            assert "No such file" in reply.json["error"]
            assert "nothing ran" in reply.json["hint"]


async def test_a_replica_that_comes_meanwhile_takes_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balancer, "NEWS", 30.0)
    async with replicas(1) as (gateway, served, _):
        there = served.all["both"].ready
        served.set(place(NOWHERE, "gone"))

        async def come() -> None:
            await until(lambda: served.asked > 1, "a question")
            served.set(*there)

        coming = asyncio.create_task(come())
        assert await taker(gateway, headers=CALL_ID) == "r0"
        await coming


async def test_nobody_is_ready_yet() -> None:
    class Starting(Served):
        ready = asyncio.Event()

        async def find(self, id: str) -> Replicas:
            await self.ready.wait()
            return await super().find(id)

    async with replicas(1) as (_, there, _):
        served = Starting()
        served.set(failure=StartFailed("replica r0 did not start: no such module", hint="look at its logs"))
        async with serving(Known(), services=served) as gateway, client(gateway) as one, client(gateway) as other:
            one.post(f"{BOTH}/x")
            served.ready.set()
            reply = await one.reply()
            assert (reply.status, reply.json["code"], reply.headers["retry-after"]) == (503, "network", "1")
            assert "did not start: no such module" in reply.json["error"]
            assert reply.json["hint"] == "look at its logs"
            served.ready.clear()
            other.post(f"{BOTH}/x")
            asked_before = served.asked
            served.set(*there.all["both"].ready)
            served.heard = {}
            served.ready.set()
            assert (await other.reply()).body == b"r0"
            assert served.asked >= asked_before


async def test_a_store_that_is_away_is_not_the_end_of_a_service() -> None:
    class Away(Served):
        async def find(self, id: str) -> Replicas:
            raise NetworkError("the store does not answer")

    async with replicas(1) as (_, there, _):
        served = Away()
        served.set(*there.all["both"].ready)
        async with serving(Known(), services=served) as gateway:
            assert await taker(gateway) == "r0"
            served.heard = {}
            reply = await posted(gateway, f"{BOTH}/x")
            assert (reply.status, reply.json["error"]) == (503, "the store does not answer")
            served.heard = {"both": Replicas("both", "anna", OWNER_TOKEN, (place(NOWHERE, "gone"),))}
            assert (await posted(gateway, f"{BOTH}/x")).status == 503


async def test_a_service_that_is_deleted_under_a_call() -> None:
    async with replicas(1) as (gateway, served, (one,)), client(gateway) as first, client(gateway) as second:
        one.held = asyncio.Event()
        first.post(f"{BOTH}/x", b"", CALL_ID)
        await until(lambda: len(one.heard) == 1, "the call")
        served.all.clear()
        gateway.ended("r0")
        reply = await first.reply()
        assert (reply.status, reply.json["code"]) == (502, "network")
        second.post(f"{BOTH}/x", b"", bearer("anna"))
        assert (await second.reply()).status == 404


# What was sent


async def test_what_only_looks_is_asked_of_another() -> None:
    async with replicas(2) as (gateway, _, (one, two)):
        one.breaks = 100
        assert [await taker(gateway, method="GET") for _ in range(6)] == ["r1"] * 6
        assert len(one.heard) >= 1
        two.breaks = 100
        reply = await asked(gateway, f"{BOTH}/x")
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("size", [4, MB], ids=["small", "large"])
async def test_what_was_sent_is_not_sent_to_another(size: int) -> None:
    async with replicas(2) as (gateway, _, (one, two)):
        one.breaks = two.breaks = 1
        for _ in range(2):
            reply = await posted(gateway, f"{BOTH}/x", b"x" * size)
            assert (reply.status, reply.json["code"]) == (502, "network")
            assert reply.json["hint"] == "whether it did what was asked is not known"
        assert (len(one.heard), len(two.heard)) == (1, 1)


async def test_a_call_with_an_id_is_asked_for_again_where_it_was_sent() -> None:
    async with replicas(2) as (gateway, _, (one, two)):
        one.breaks = two.breaks = 1
        for number in range(2):
            reply = await posted(gateway, f"{BOTH}/x", b"body", f"{OWNER}AEnv-Call-Id: c{number}\r\n")
            assert reply.status == 200
        assert [len(one.heard), len(two.heard)] == [2, 2]
        for replica in (one, two):
            assert replica.bodies == [b"body"] * 2
            assert len({request.headers["aenv-call-id"] for request in replica.heard}) == 1
        # Too long to be sent again: whoever asks once more must not run it elsewhere, so it is not told to.
        one.breaks = two.breaks = 1
        reply = await posted(gateway, f"{BOTH}/x", b"x" * MB, f"{OWNER}AEnv-Call-Id: c9\r\n")
        assert (reply.status, reply.json["code"], "retry-after" in reply.headers) == (502, "network", False)


@pytest.mark.parametrize("news", ["told", "not told"])
async def test_a_call_whose_replica_died_is_not_run_elsewhere(news: str) -> None:
    async with contextlib.AsyncExitStack() as stack, replicas(1) as (_, there, (well,)):
        dying = Replica("dying")
        dying.held = asyncio.Event()
        end = contextlib.AsyncExitStack()
        await stack.enter_async_context(end)
        served = Served()
        served.set(place(await end.enter_async_context(upstream(dying)), "dying"))
        gateway = await stack.enter_async_context(serving(Known(), services=served))
        async with client(gateway) as one:
            one.post(f"{BOTH}/x", b"body", CALL_ID)
            await until(lambda: len(dying.heard) == 1, "the call")
            if news == "told":
                served.set(*there.all["both"].ready)
            else:
                served.set(*served.all["both"].ready, *there.all["both"].ready)
            await end.aclose()
            reply = await one.reply()
            assert (reply.status, reply.json["code"]) == (502, "network")
            assert reply.json["hint"] == "whether it did what was asked is not known"
            assert well.heard == []
            if news == "told":  # nor when the same call is asked for once more
                one.post(f"{BOTH}/x", b"body", CALL_ID)
                assert (await one.reply()).status == 502
                assert well.heard == []
            one.post(f"{BOTH}/x", b"body", f"{OWNER}AEnv-Call-Id: c2\r\n")
            assert (await one.reply()).body == b"r0"


async def test_a_session_ends_with_its_replica() -> None:
    async with contextlib.AsyncExitStack() as stack, replicas(1) as (_, there, (well,)):
        dying, end = Replica("dying"), contextlib.AsyncExitStack()
        dying.held = asyncio.Event()
        await stack.enter_async_context(end)
        served = Served()
        served.set(place(await end.enter_async_context(upstream(dying)), "dying"))
        gateway = await stack.enter_async_context(serving(Known(), services=served))
        session = f"{OWNER}Mcp-Session-Id: s~dying\r\n"
        async with client(gateway) as listens, client(gateway) as calls:
            listens.get(f"{BOTH}/mcp", session)
            calls.post(f"{BOTH}/mcp", b"{}", session)
            await until(lambda: len(dying.heard) == 2, "both requests")
            served.set(*there.all["both"].ready)
            await end.aclose()
            assert (await listens.reply()).status == 404  # its client begins a new one
            assert (await calls.reply()).status == 502  # what became of the call is not known
            calls.post(f"{BOTH}/mcp", b"{}", session)
            assert (await calls.reply()).status == 404
        assert well.heard == []


async def test_whoever_speaks_of_a_call_reaches_who_has_it() -> None:
    async with replicas(3) as (gateway, _, made), client(gateway) as gone:
        for replica in made:
            replica.held = asyncio.Event()
        gone.post(f"{BOTH}/x", b"body", CALL_ID)
        await until(lambda: any(replica.heard for replica in made), "the call")
        gone.vanish()
        has_it = next(replica for replica in made if replica.heard)
        for replica in made:
            assert replica.held is not None
            replica.held.set()
        assert await taker(gateway, "/calls/c1", method="DELETE") == has_it.name
        assert await taker(gateway, headers=f"{CALL_ID}Content-Length: 0\r\n") == has_it.name
        assert {await taker(gateway, "/calls/other", method="DELETE") for _ in range(3)} == {"r0", "r1", "r2"}


# Who leaves


async def test_who_leaves_ends_what_it_has_and_is_let_go() -> None:
    async with replicas(2) as (gateway, served, (one, two)), client(gateway) as waits:
        assert {await taker(gateway) for _ in range(2)} == {"r0", "r1"}
        stays, leaves = served.all["both"].ready
        two.held = asyncio.Event()
        for _ in range(2):
            waits.post(f"{BOTH}/x")
        await until(lambda: len(two.heard) == 2, "a call to who leaves")
        served.set(stays, leaving=(leaves,))
        assert [await taker(gateway) for _ in range(3)] == ["r0"] * 3
        served.set(stays)
        assert [await taker(gateway) for _ in range(3)] == ["r0"] * 3
        two.held.set()
        assert sorted([(await waits.reply()).body for _ in range(2)]) == [b"r0", b"r1"]
        await until(lambda: two.count.ended == two.count.made, "the end of its connections")
        assert one.count.ended < one.count.made


async def test_idle_connections_of_who_is_gone_are_closed_without_a_call() -> None:
    async with replicas(2) as (gateway, served, (one, two)):
        assert {await taker(gateway) for _ in range(2)} == {"r0", "r1"}
        assert two.count.ended < two.count.made
        served.set(served.all["both"].ready[0])
        await until(lambda: two.count.ended == two.count.made, "the end of its connections")
        served.set(*served.all["both"].ready, leaving=())
        assert await taker(gateway) == "r0"
        assert one.count.made == 1


async def test_calls_are_counted_out_however_they_end() -> None:
    handler: Handler

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await head(reader)
        if "/cut" in request.line:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
            return
        if "/hold" in request.line:
            await reader.read()
        if "/nonsense" in request.line:
            writer.write(b"SSH-2.0\r\n")
        writer.write(ok())

    async with upstream(handler) as url, serving(Known(), services=Served(url)) as gateway:
        assert await posted(gateway, f"{BOTH}/x")
        (sandbox,) = gateway.router.balancer.crews["both"].ready  # type: ignore[union-attr]
        for path in ("/cut", "/nonsense", "/x"):
            async with client(gateway) as one:
                one.post(f"{BOTH}{path}")
                await one.rest() if path == "/cut" else await one.reply()
        async with client(gateway) as one:
            one.post(f"{BOTH}/hold")
            await until(lambda: sandbox.calls == 1, "the call")
            one.vanish()
        await until(lambda: sandbox.calls == 0, "the end of all calls")


# What the SDK makes of it


@pytest.mark.parametrize("base", ["/env-service/both", "/env-instance/one"])
async def test_the_sdk_asks_again_only_where_the_same_sandbox_hears_it(base: str) -> None:
    heard: list[str] = []

    async def gateway_that_dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await head(reader)
            await reader.readexactly(int(request.headers.get("content-length", 0)))
            heard.append(request.line.split()[0])
            if heard[-1] == "POST" or heard.count("GET") == 2:
                return
            writer.write(ok(b'{"success": true, "data": {"status": "success"}}'))

    async with inside(gateway_that_dies) as port:
        provision = attach(f"http://127.0.0.1:{port}{base}", OWNER_TOKEN)
        async with Environment("both", provision=provision, max_retries=2) as env:
            with pytest.raises(NetworkError, match="without an answer"):
                await env.call_tool("add", {"a": 1})
            assert (heard.count("POST") == 1) is (base == "/env-service/both")
            assert await env.get_env_info()  # what only looks is asked again
            assert heard.count("GET") == 3
        await http.close()
