"""Instances at another server: through that one's gateway, and never further."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aenv import Environment, attach, http
from aenv.api.gateway import Gateway, balancer, router
from aenv.errors import SandboxLost
from tests.api.gateway.support import (
    OWNER,
    OWNER_TOKEN,
    Known,
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
from tests.support import Sandbox

ONE, BOTH = "/env-instance/one", "/env-service/both"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "NEWS", 0.3)
    monkeypatch.setattr(balancer, "NEWS", 0.3)


def there(gateway: Gateway, id: str = "one") -> str:
    """The place of an instance behind another gateway."""
    return f"http://127.0.0.1:{gateway.port}/env-instance/{id}"


@contextlib.asynccontextmanager
async def two(far: Known) -> AsyncIterator[tuple[Gateway, Gateway]]:
    """A gateway that knows an instance at another, and that one."""
    near = Known()
    async with serving(far) as beyond, serving(near, services=Served(there(beyond))) as gateway:
        near.places["one"] = near.running["one"] = place(there(beyond))
        gateway.router.balancer._services.set(place(there(beyond), "one"))  # type: ignore[union-attr, attr-defined]
        yield gateway, beyond


async def test_an_instance_at_another_server_is_used_as_any_other(lab: Sandbox, tmp_path: Path) -> None:
    file = str(tmp_path / "a b" / "c.txt")
    async with two(Known(place(lab.url))) as (gateway, _):
        for base in (ONE, BOTH):
            url = f"http://127.0.0.1:{gateway.port}{base}"
            async with Environment("lab", provision=attach(url, OWNER_TOKEN)) as env:
                assert (await env.call_tool("add", {"a": 1, "b": 2})).text == "3"
                assert await env.call_reward({"answer": "42"}, name="score") == 1.0
                assert len((await env.call_tool("big", {"size": 3_000_000})).text) == 3_000_000
                await env.upload(file, b"x" * 3_000_000)
                assert len(await env.download(file)) == 3_000_000
            assert (await asked(gateway, f"{base}/info", "Authorization: Bearer anna\r\n")).status == 200
            assert (await asked(gateway, f"{base}/info", "Authorization: Bearer bert\r\n")).status == 404
        await http.close()


async def test_a_port_of_an_instance_at_another_server(lab: Sandbox) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await head(reader)
        writer.write(ok(json.dumps([request.line, request.headers]).encode()))

    async with inside(handler) as port, two(Known(place(lab.url))) as (gateway, _):
        name = gateway.exposed_url("one", port, time.time() + 1000).split("/")[2]
        line, headers = (await asked(gateway, "/page?x=1", "Cookie: a=b\r\n", host=name)).json
        assert (line, headers["cookie"], headers["host"]) == ("GET /page?x=1 HTTP/1.1", "a=b", name)
        assert "aenv-hop" not in headers


async def test_the_name_and_the_trace_of_a_request_go_all_the_way() -> None:
    seen: list[dict[str, str]] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append((await head(reader)).headers)
        writer.write(ok(extra="Server-Timing: tool;dur=1\r\n"))

    async with upstream(handler) as url, two(Known(place(url))) as (gateway, _):
        reply = await asked(gateway, f"{ONE}/x?y=1", f"{OWNER}X-Request-Id: mine\r\ntraceparent: t\r\n")
        assert (reply.headers["x-request-id"], reply.headers["server-timing"]) == ("mine", "tool;dur=1")
        assert (seen[0]["x-request-id"], seen[0]["traceparent"]) == ("mine", "t")
        assert "aenv-hop" not in seen[0]


@pytest.mark.parametrize("base", [ONE, BOTH])
async def test_servers_that_take_each_other_for_the_place_do_not_go_round(base: str) -> None:
    far = Known()
    async with two(far) as (gateway, beyond):
        far.places["one"] = far.running["one"] = place(there(gateway))
        reply = await posted(gateway, f"{base}/x")
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert "is not where another server takes it to be" in reply.json["error"]
        assert not beyond.router.sandboxes["one"].open
        far.places["one"] = far.running["one"] = place(there(beyond))  # nor to itself
        assert (await asked(gateway, f"{base}/x")).status == 503


async def test_what_did_not_reach_a_replica_beyond_may_go_to_another() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await head(reader)
        await reader.readexactly(int(request.headers["content-length"]))

    far = Known(place("unix:/nowhere/at/all"))
    async with upstream(handler) as url, two(far) as (gateway, _):
        reply = await posted(gateway, f"{ONE}/x", b"", f"{OWNER}AEnv-Call-Id: c1\r\n")
        assert (reply.status, reply.json["code"]) == (502, "sandbox_lost")
        reply = await posted(gateway, f"{BOTH}/x", b"", f"{OWNER}AEnv-Call-Id: c2\r\n")
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        far.fails("one", SandboxLost("one is gone: out of disk"))
        reply = await posted(gateway, f"{BOTH}/x", b"", f"{OWNER}AEnv-Call-Id: c3\r\n")
        assert (reply.status, reply.json["error"]) == (503, "one is gone: out of disk")
        # What was sent, and is too long to be sent again, is not said to be harmless there either.
        far.places["one"] = far.running["one"] = place(url)
        for base, status in ((ONE, 503), (BOTH, 502)):
            reply = await posted(gateway, f"{base}/x", b"x" * 1024 * 1024, f"{OWNER}AEnv-Call-Id: c4\r\n")
            assert (reply.status, reply.json["code"]) == (status, "network")


async def test_a_call_that_a_replica_beyond_did_not_get_is_passed_to_another_at_once() -> None:
    bodies: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            found = await head(reader)
            bodies.append(await reader.readexactly(int(found.headers.get("content-length", "0"))))
            writer.write(ok())

    async with upstream(handler) as url, two(Known(place(url, "well"), place(url, "lost"))) as (gateway, beyond):
        beyond.router.directory.fails("lost", SandboxLost("lost is gone"))  # type: ignore[attr-defined]
        replicas = [place(there(beyond, id), id) for id in ("well", "lost")]
        gateway.router.balancer._services.set(*replicas)  # type: ignore[union-attr, attr-defined]
        for number in range(6):  # none of them may be repeated: nothing says that they only look
            reply = await posted(gateway, f"{BOTH}/x", b"%d" % number)
            assert (reply.status, "aenv-hop" in reply.headers) == (200, False)
        assert bodies == [b"%d" % number for number in range(6)]
        gateway.router.balancer._services.set(replicas[1])  # type: ignore[union-attr, attr-defined]
        alone = await posted(gateway, f"{BOTH}/x", b"7")
        assert (alone.status, alone.headers["retry-after"]) == (503, "1")
        assert "aenv-hop" not in alone.headers


async def test_a_server_that_is_gone() -> None:
    far = Known(place("unix:/nowhere"))
    async with two(far) as (gateway, beyond):
        await beyond.close(0)
        reply = await posted(gateway, f"{ONE}/x")
        assert (reply.status, reply.json["code"]) == (503, "network")  # which says nothing of the sandbox
        assert (await posted(gateway, f"{BOTH}/x")).status == 503


async def test_a_client_cannot_make_use_of_the_mark() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert "aenv-hop" not in (await head(reader)).headers
        writer.write(ok())

    async with upstream(handler) as url, two(Known(place(url))) as (gateway, beyond):
        marked = f"{OWNER}AEnv-Hop: service\r\n"
        assert (await asked(beyond, f"{ONE}/x", marked)).status == 200
        assert (await asked(gateway, f"{ONE}/x", marked)).status == 503
        async with client(gateway) as one:
            one.get(f"{ONE}/x", f"{marked}AEnv-Hop: instance\r\n")
            assert (await one.reply()).status == 400
