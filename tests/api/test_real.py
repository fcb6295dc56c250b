"""The API service over HTTP, with real sandboxes of the process engine."""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from aenv import http
from aenv.auth.callers import Scope
from aenv.engines.process.engine import ProcessEngine
from aenv.errors import NetworkError
from aenv.wire import Instance
from tests.api.ground import ADMIN, ALICE, Api, Platform, Shelf, call, on_processes, service, until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(sys.platform != "linux", reason="the process engine needs Linux"),
]

SECRET = 's3cr3t-"quoted"-value'
BROKEN = "raise RuntimeError('broken on purpose')"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def platform() -> AsyncIterator[Platform]:
    async with on_processes(published) as running:
        yield running


def published(shelf: Shelf, home: Path) -> None:
    shelf.publish(home, "env")
    shelf.publish(home, "env", version="2.0.0-rc.1")
    shelf.publish(home, "secretive", secrets=["API_TOKEN"], environmentVariables={"PLAIN": "plain"})
    shelf.publish(home, "broken", module=BROKEN)
    shelf.publish(home, "tampered")
    shelf.packages[shelf.envs["tampered@1.0.0"].digest] += b"x"


@pytest_asyncio.fixture(loop_scope="module")
async def alice(platform: Platform) -> Api:
    return await platform.api("alice")


async def make(api: Api, env: str = "env", **more: Any) -> Instance:
    made = (await api.create(env, **more)).instance
    assert made.status == "Running", made.reason
    return made


async def test_a_life_over_http(platform: Platform, alice: Api) -> None:
    answer = await alice.create(
        "env", ttl="10m", environment_variables={"NAME": "value"}, arguments=["-v", "x"], seed=7, labels={"a": "b"}
    )
    assert answer.headers[b"preference-applied"] == b"wait=30"
    made = answer.instance
    assert (made.status, made.env.id, made.ttl) == ("Running", "env@1.0.0", "600s")
    assert made.socket.startswith("unix:")
    assert made.boot
    assert await call(made, "about") == {"id": made.id, "arguments": ["-v", "x"], "seed": 7, "data": ""}
    assert await call(made, "variable", name="NAME") == "value"
    one = f"/env-instance/{made.id}"
    assert (await alice.ask("GET", one)).instance == made
    assert (await alice.ask("GET", f"{one}/")).instance == made
    listed = (await alice.ask("GET", "/env-instance/env@1.0.0/list", query={"label": "a=b"})).json
    assert ([each["id"] for each in listed["data"]], listed["total"], listed["limit"]) == ([made.id], 1, 100)
    extended = (await alice.ask("POST", f"{one}/extend", {"ttl": "1h"})).data
    assert extended["expires_at"] > made.expires_at
    assert (await alice.ask("POST", f"{one}/renew")).data["lease_expires_at"] == ""
    assert (await alice.ask("POST", f"{one}/reset", {"seed": 3})).data == {"seed": 3}
    assert (await alice.ask("POST", f"{one}/reset")).data == {"seed": None}
    history = (await alice.ask("GET", f"{one}/history", query={"last": "2"})).data
    assert [each["name"] for each in history] == ["reset", "reset"]
    for verb in ("fork", "checkpoint", "restore"):
        assert (await alice.ask("POST", f"{one}/{verb}")).status == 501
    assert (await alice.ask("DELETE", one)).data is True
    assert (await alice.ask("DELETE", one)).data is True
    ended = (await alice.ask("GET", one)).instance
    assert (ended.status, ended.reason, ended.owner_token, ended.url) == ("Terminated", "it was deleted", "", "")
    for verb, body in (("extend", {"ttl": "1h"}), ("renew", None), ("exec", {"command": "ls"}), ("reset", None)):
        refused = await alice.ask("POST", f"{one}/{verb}", body)
        assert (refused.status, refused.json["error"]) == (409, "conflict"), verb
    with pytest.raises(http.NotSent):
        await call(made, "echo", text="x")


async def test_commands_and_files(alice: Api) -> None:
    one = f"/env-instance/{(await make(alice)).id}"
    done = (await alice.ask("POST", f"{one}/exec", {"command": ["sh", "-c", "cat; exit 3"], "stdin": "hello"})).data
    assert (done["returncode"], done["stdout"]) == (3, "hello")
    slow = (await alice.ask("POST", f"{one}/exec", {"command": "sleep 60", "timeout": 0.2})).data
    assert slow["timed_out"] is True
    content = os.urandom(3_000_000)
    written = (await alice.ask("PUT", f"{one}/files", content, query={"path": "notes/ä b.bin"})).data
    assert written["size"] == len(content)
    read = await alice.ask("GET", f"{one}/files", query={"path": "notes/ä b.bin"})
    assert (read.status, read.headers[b"content-type"], read.body) == (200, b"application/octet-stream", content)
    listing = (await alice.ask("GET", f"{one}/files", query={"path": "notes"})).data
    assert listing["entries"] == [{"name": "ä b.bin", "type": "file", "size": len(content)}]

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"x" * 1000

    headers = f"Authorization: Bearer {alice.token}\r\n".encode()
    async with http.stream("PUT", alice.url, f"{one}/files?path=chunked", headers=headers, body=pieces()) as stream:
        await stream.read(10_000)
        assert stream.status == 200
    assert (await alice.ask("GET", f"{one}/files", query={"path": "chunked"})).body == b"x" * 10_000
    assert (await alice.ask("GET", f"{one}/files", query={"path": "none"})).status == 404
    assert (await alice.ask("GET", f"{one}/files")).status == 422
    assert (await alice.ask("GET", f"{one}/files", query={"path": ""})).status == 422
    assert (await alice.ask("PUT", f"{one}/files", b"x", query={"path": "/proc/self/none/x"})).status in (403, 404, 409)
    assert (await alice.ask("POST", f"{one}/exec", {"command": []})).status == 422
    assert (await alice.ask("POST", f"{one}/exec", {"command": "ls", "timeout": 1e9})).status == 422
    assert (await alice.ask("POST", f"{one}/exec", {"command": ["/no/such/program"]})).status == 404
    await alice.ask("DELETE", one)


async def test_logs_are_read_and_followed(alice: Api) -> None:
    made = await make(alice)
    one = f"/env-instance/{made.id}"
    for number in range(3):
        await call(made, "say", text=f"line {number}")

    async def printed() -> bool:
        return b"line 2" in (await alice.ask("GET", f"{one}/logs")).body

    await until(printed, "what it printed")
    tail = await alice.ask("GET", f"{one}/logs", query={"tail": "2"})
    assert tail.headers[b"content-type"] == b"text/plain; charset=utf-8"
    assert tail.body == b"line 1\nline 2\n"
    assert (await alice.ask("GET", f"{one}/logs", query={"tail": "-1"})).status == 422
    headers = f"Authorization: Bearer {alice.token}\r\n".encode()
    seen = b""
    async with (
        asyncio.timeout(60),
        http.stream("GET", alice.url, f"{one}/logs?tail=1&follow=true", headers=headers) as stream,
    ):
        said: asyncio.Task[Any] | None = None
        ending: asyncio.Task[Any] | None = None
        async for piece in stream:
            seen += piece
            if b"line 2" in seen and said is None:
                said = asyncio.create_task(call(made, "say", text="later"))
            if b"later" in seen and ending is None:
                ending = asyncio.create_task(alice.ask("DELETE", one))
    assert seen == b"line 2\nlater\n"
    assert ending is not None
    await ending
    assert (await alice.ask("GET", f"{one}/logs")).status == 404


async def test_a_project_that_does_not_start_says_why(alice: Api) -> None:
    failed = (await alice.create("broken")).instance
    assert failed.status == "Failed"
    assert "broken on purpose" in failed.reason
    tampered = (await alice.create("tampered")).instance
    assert tampered.status == "Failed"
    assert "digest" in tampered.reason


async def test_one_that_dies_is_noticed(alice: Api) -> None:
    made = await make(alice)
    with pytest.raises(NetworkError):
        await call(made, "die")
    one = f"/env-instance/{made.id}"

    async def failed() -> bool:
        return (await alice.ask("GET", one)).instance.status == "Failed"

    await until(failed, "its end")
    assert (await alice.ask("GET", one)).instance.reason
    refused = await alice.ask("POST", f"{one}/exec", {"command": "ls"})
    assert refused.status == 409


async def test_secrets_go_in_and_do_not_come_out(platform: Platform, alice: Api) -> None:
    missing = await alice.create("secretive")
    assert missing.status == 422
    assert "API_TOKEN" in missing.json["message"]
    await platform.secrets.set(ALICE, "API_TOKEN", SECRET)
    taken = await alice.create("secretive", environment_variables={"API_TOKEN": "mine"})
    assert taken.status == 422
    made = await make(alice, "secretive")
    one = f"/env-instance/{made.id}"
    assert await call(made, "variable", name="PLAIN") == "plain"
    command = 'printf %s "$API_TOKEN" | base64 -w0; echo " <$API_TOKEN>"'
    shown = (await alice.ask("POST", f"{one}/exec", {"command": command})).data
    assert shown["stdout"] == f"{base64.b64encode(SECRET.encode()).decode()} <***>\n"  # it is there, and not shown
    await call(made, "say", text=f"token: {SECRET}")
    await call(made, "echo", text=SECRET)

    async def logs() -> bytes:
        found: bytes = (await alice.ask("GET", f"{one}/logs")).body
        return found if b"token" in found else b""

    assert b"token: ***" in await until(logs, "what it printed")
    answers = [await logs(), (await alice.ask("GET", f"{one}/history")).body, (await alice.ask("GET", one)).body]
    refused = await alice.ask("POST", f"{one}/exec", {"command": [SECRET]})
    assert refused.status == 404
    kept = await platform.store.get("instance", made.id)
    assert kept is not None
    for answer in (*answers, refused.body, kept.value):
        assert SECRET.encode() not in answer
        assert b"s3cr3t" not in answer
    await alice.ask("DELETE", one)


async def test_others_see_nothing_of_it(platform: Platform, alice: Api) -> None:
    made = await make(alice, labels={"whose": "alices"})
    bob, reader = await platform.api("bob"), await platform.api("alice", Scope.READ)
    admin = await platform.api("root", *Scope)
    verbs: list[tuple[str, str, Any]] = [
        ("GET", "", None),
        ("DELETE", "", None),
        ("POST", "/extend", {"ttl": "5m"}),
        ("POST", "/renew", None),
        ("POST", "/reset", None),
        ("POST", "/exec", {"command": "true"}),
        ("POST", "/expose", {"port": 80}),
        ("POST", "/fork", None),
        ("GET", "/logs", None),
        ("GET", "/history", None),
        ("GET", "/files?path=x", None),
        ("PUT", "/files?path=x", b"x"),
    ]
    for method, rest, body in verbs:
        unknown = await bob.ask(method, f"/env-instance/env-0000000000{rest}", body)
        theirs = await bob.ask(method, f"/env-instance/{made.id}{rest}", body)
        assert unknown.status == theirs.status == 404, (method, rest)
        assert theirs.body.replace(made.id.encode(), b"env-0000000000") == unknown.body
        if method != "GET":
            assert (await reader.ask(method, f"/env-instance/{made.id}{rest}", body)).status == 403
    assert (await bob.ask("GET", "/env-instance/list")).json["total"] == 0
    assert (await bob.ask("GET", "/env-instance/*/list", query={"owner": "alice"})).status == 403
    assert (await admin.ask("GET", "/env-instance/*/list", query={"owner": "alice"})).json["total"] >= 1
    looked = (await reader.ask("GET", f"/env-instance/{made.id}")).instance
    assert (looked.id, looked.owner_token, looked.agent_token) == (made.id, "", "")
    assert (await admin.ask("GET", f"/env-instance/{made.id}")).instance.owner_token == made.owner_token
    assert (await bob.create("env", owner="alice")).status == 403
    assert (await alice.ask("POST", f"/env-instance/{made.id}/expose", {"port": 80})).status == 501
    assert (await alice.ask("DELETE", f"/env-instance/{made.id}")).status == 200


async def test_lists_are_filtered_and_paged(platform: Platform) -> None:
    carol = await platform.api("carol")
    made = [await make(carol, labels={"n": str(number % 2), "all": "yes"}) for number in range(4)]
    await carol.ask("DELETE", f"/env-instance/{made[0].id}")

    async def listed(path: str = "*", *query: tuple[str, str]) -> list[str]:
        text = "&".join(f"{name}={value}" for name, value in query)
        found = (await carol.ask("GET", f"/env-instance/{path}/list?{text}")).json
        return [each["id"] for each in found["data"]]

    ids = [each.id for each in reversed(made)]
    assert await listed() == ids
    assert await listed("env") == await listed("env@1.0.0") == ids
    assert await listed("other") == await listed("env@2.0.0") == []
    assert await listed("*", ("label", "n=1"), ("label", "all=yes")) == [ids[0], ids[2]]
    assert await listed("*", ("label", "n=1"), ("label", "n=0")) == []
    assert await listed("*", ("status", "running")) == ids[:3]
    assert await listed("*", ("status", "Terminated")) == ids[3:]
    assert await listed("*", ("limit", "2"), ("offset", "1")) == ids[1:3]
    for bad in ("limit=0", "limit=1001", "offset=-1", "status=Sleeping", "label=x", "label=%00=x", "owner=a/b"):
        assert (await carol.ask("GET", f"/env-instance/*/list?{bad}")).status in (403, 422), bad
    for bad in ("env@^1.0", "a%2Fb", "gr%C3%B6%C3%9Fe"):
        assert (await carol.ask("GET", f"/env-instance/{bad}/list")).status in (404, 422), bad
    for each in made[1:]:
        await carol.ask("DELETE", f"/env-instance/{each.id}")


async def test_batches_and_keys_over_http(alice: Api) -> None:
    answer = await alice.create("env", count=3, key="batch")
    assert {each["status"] for each in answer.data} == {"Running"}
    again = await alice.create("env", count=3, key="batch")
    assert [each["id"] for each in again.data] == [each["id"] for each in answer.data]
    other = await alice.create("env", count=2, key="batch")
    assert (other.status, other.json["error"]) == (422, "invalid")
    one = await alice.create("env", count=1, wait=0)
    assert isinstance(one.data, list)
    assert b"preference-applied" not in one.headers
    for each in (*answer.data, *one.data):
        assert (await alice.ask("DELETE", f"/env-instance/{each['id']}")).status == 200
    for prefer in ("wait=soon", "wait=-1", "respond-async, wait=", "wait=nan"):
        refused = await alice.ask("POST", "/env-instance", {"envName": "env"}, {"Prefer": prefer})
        assert refused.status == 422, prefer
    assert (await alice.ask("POST", "/env-instance", {"envName": 1})).status == 422
    assert (await alice.ask("POST", "/env-instance", {})).status == 422
    assert (await alice.ask("GET", "/env-instance/none")).status == 404
    assert (await alice.ask("POST", "/env-instance/none/extend", {"ttl": "x"})).status == 422


async def test_a_restart_finds_everything_again(home: Path) -> None:
    shelf = Shelf()
    shelf.publish(home, "env")
    url = f"sqlite:{home / 'store.db'}"
    engine = ProcessEngine(state="restart")
    try:
        async with service(url, engine, shelf, home) as platform:
            alice = await platform.api("alice")
            made, doomed = await make(alice), await make(alice)
            lost = await make(alice)
        await engine.close()
        engine = ProcessEngine(state="restart")
        await engine.delete(lost.id)
        async with service(url, engine, shelf, home) as platform:
            alice = Api(platform.url, alice.token)
            found = (await alice.ask("GET", f"/env-instance/{made.id}")).instance
            assert found == made
            assert await call(found, "echo", text="still here") == "still here"
            assert (await alice.ask("GET", f"/env-instance/{lost.id}")).instance.status == "Failed"
            await alice.ask("DELETE", f"/env-instance/{doomed.id}")
            assert [each.id for each in await engine.find() if not each.state.over] == [made.id]
            everything = (await (await platform.api("root", *Scope)).ask("GET", "/env-instance/list")).json
            assert everything["total"] == 3
    finally:
        await engine.end()
    assert ADMIN.admin
