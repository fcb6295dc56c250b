"""Sessions of MCP with a service: each stays with its replica, however many there are."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from aenv.api.gateway import Gateway, balancer
from aenv.runtime import tokens
from tests.api.gateway.support import (
    AGENT_TOKEN,
    OWNER,
    OWNER_TOKEN,
    Client,
    Known,
    Seen,
    Served,
    asked,
    client,
    place,
    posted,
    serving,
)
from tests.support import FIXTURES, Reply, Sandbox, sandbox, until

MCP = "/env-service/both/mcp"
JSON = f"{OWNER}Content-Type: application/json\r\nAccept: application/json, text/event-stream\r\n"


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Sandbox]]:
    """Two sandboxes of one service."""
    variables = {"AENV_OWNER_TOKEN_SHA256": tokens.digest(OWNER_TOKEN)}
    with (
        sandbox(FIXTURES / "lab", variables=variables) as one,
        sandbox(FIXTURES / "lab", variables=variables) as other,
    ):
        yield [one, other]


@contextlib.asynccontextmanager
async def service(pair: list[Sandbox], **options: Any) -> AsyncIterator[tuple[Gateway, Served]]:
    served = Served(*(one.url for one in pair))
    async with serving(Known(), services=served, **options) as gateway:
        yield gateway, served


def message(method: str, id: int | None = 1, **params: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "method": method, "params": params} | ({"id": id} if id else {})).encode()


async def opened(gateway: Gateway) -> str:
    """A new session."""
    about = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    reply = await posted(gateway, MCP, message("initialize", **about), JSON)
    assert reply.status == 200, reply
    session = reply.headers["mcp-session-id"]
    assert (await said(gateway, session, "notifications/initialized", None)).status == 202
    return session


async def said(gateway: Gateway, session: str, method: str, id: int | None = 1, **params: Any) -> Reply:
    """Something said in a session."""
    headers = f"{JSON}Mcp-Session-Id: {session}\r\nMCP-Protocol-Version: 2025-11-25\r\n"
    return await posted(gateway, MCP, message(method, id, **params), headers)


async def test_a_session_stays_with_its_replica(pair: list[Sandbox]) -> None:
    async with service(pair) as (gateway, _):
        sessions = [await opened(gateway) for _ in range(4)]
        assert sorted(session.rpartition("~")[2] for session in sessions) == ["r0", "r0", "r1", "r1"]
        for session in sessions * 3:
            reply = await said(gateway, session, "tools/call", name="add", arguments={"a": 1, "b": 2})
            assert "3" in reply.body.decode()
            assert reply.headers.get("mcp-session-id", session) == session
        listening = f"{OWNER}Accept: text/event-stream\r\nMcp-Session-Id: {sessions[0]}\r\n"
        async with client(gateway) as one:  # listening, too, and what is said at the end
            one.get(MCP, listening)
            assert (await one.head()).headers["content-type"] == "text/event-stream"
        for session in sessions[:2]:
            assert (await asked(gateway, MCP, f"{OWNER}Mcp-Session-Id: {session}\r\n", "DELETE")).status == 200
            assert (await said(gateway, session, "ping")).status == 404  # said by the replica itself
            assert (await said(gateway, sessions[2], "ping")).status == 200


async def test_who_leaves_keeps_its_sessions_and_takes_no_new_ones(pair: list[Sandbox]) -> None:
    async with service(pair) as (gateway, served):
        sessions = [await opened(gateway) for _ in range(2)]
        one, other = served.all["both"].ready
        served.set(one, leaving=(other,))
        for session in sessions:
            assert (await said(gateway, session, "ping")).status == 200
        assert [(await opened(gateway)).endswith("~r0") for _ in range(3)] == [True] * 3
        served.set(one)
        for session in sessions:
            reply = await said(gateway, session, "ping")
            assert reply.status == (200 if session.endswith("~r0") else 404)
        gone = next(session for session in sessions if session.endswith("~r1"))
        for method in ("GET", "DELETE"):
            assert (await asked(gateway, MCP, f"{OWNER}Mcp-Session-Id: {gone}\r\n", method)).status == 404


async def test_a_session_that_another_gateway_began_is_found(pair: list[Sandbox]) -> None:
    async with service(pair) as (gateway, served):
        session = await opened(gateway)
        other = Served()
        other.set(*served.all["both"].ready)
        other.heard = {"both": other.all["both"].__class__("both", "anna", OWNER_TOKEN)}  # it knows of nobody yet
        async with serving(Known(), services=other) as second:
            assert (await said(second, session, "ping")).status == 200


@pytest.mark.parametrize("session", ["plain", "x~other", "x~", "~r0", "x~one", "x~r0~r9", "~", "%0d%0a~r0", "x~\xff"])
async def test_an_invented_session_reaches_nobody_elses(pair: list[Sandbox], session: str) -> None:
    async with service(pair) as (gateway, served):
        gateway.router.directory.places["one"] = gateway.router.directory.running["one"] = place(pair[0].url)  # type: ignore[attr-defined]
        served.set(place("unix:/nowhere", "other"), id="second")
        reply = await said(gateway, session, "ping")
        assert reply.status == 404
        assert served.all.keys() == {"both", "second"}


async def test_two_sessions_in_one_request_are_refused(pair: list[Sandbox]) -> None:
    async with service(pair) as (gateway, _):
        twice = f"{JSON}Mcp-Session-Id: a~r0\r\nMcp-Session-Id: b~r1\r\n"
        assert (await posted(gateway, MCP, message("ping"), twice)).status == 400


async def test_a_session_whose_replica_takes_no_connection(
    pair: list[Sandbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balancer, "NEWS", 0.2)
    async with service(pair) as (gateway, served):
        one, other = served.all["both"].ready
        served.set(one, place("unix:/nowhere", other.id))
        reply = await said(gateway, "x~r1", "ping")
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")  # it is still a replica, so it may come back
        waiting = asyncio.create_task(said(gateway, "x~r1", "ping"))
        served.set(one)
        assert (await waiting).status == 404


async def test_an_instance_has_its_sessions_as_they_are(pair: list[Sandbox]) -> None:
    async with serving(Known(place(pair[0].url))) as gateway, client(gateway) as one:
        about = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
        one.post("/env-instance/one/mcp", message("initialize", **about), JSON)
        session = (await one.reply()).headers["mcp-session-id"]
        assert "~" not in session
        await _pinged(one, session)


async def _pinged(one: Client, session: str) -> None:
    one.post("/env-instance/one/mcp", message("ping"), f"{JSON}Mcp-Session-Id: {session}\r\n")
    assert (await one.reply()).status == 200


async def test_the_official_client_keeps_its_session(pair: list[Sandbox]) -> None:
    pytest.importorskip("mcp", reason="the extra 'mcp' is not installed")
    from mcp import ClientSession
    from mcp.client.streamable_http import streamable_http_client

    seen = Seen()
    async with service(pair, watcher=seen) as (gateway, served):
        url = f"http://127.0.0.1:{gateway.port}{MCP}?token={AGENT_TOKEN}"
        async with asyncio.timeout(60), streamable_http_client(url) as streams:
            async with ClientSession(streams[0], streams[1]) as session:
                await session.initialize()
                for number in range(6):
                    result = await session.call_tool("add", {"a": number, "b": 1})
                    assert str(number + 1) in str(result.content)
                assert {tool.name for tool in (await session.list_tools()).tools} >= {"add"}
        assert served.asked == 0
        await until(lambda: any(call.method == b"DELETE" for call in seen.calls), "the end of the session")
        places = [call.place.id for call in seen.calls if call.place is not None]
        assert len(places) == len(seen.calls) > 6
        assert len(set(places[1:])) == 1  # the first asks who speaks what, and belongs to no session
