"""The hub over HTTP: the names on the wire, the statuses, who may ask for what, and its own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from aenv import http
from aenv.auth.callers import Caller, Scope
from aenv.client.hub import HubClient
from aenv.errors import Conflict, Forbidden, Invalid, NotFound, StartFailed, TooLarge, Unauthorized
from aenv.hub import routes as hub_routes
from aenv.hub.service import Hub
from aenv.models import EnvRef
from aenv.runtime.access import Hosts
from aenv.runtime.protocol import Connections
from aenv.store import open_store
from aenv.store.blobs import Blobs
from aenv.web.app import App
from aenv.wire import PolicyChange, Status
from tests.hub.lab import ANN, BOB, Stage, package, request
from tests.support import until

CALLERS = {
    "ann": ANN,
    "bob": BOB,
    "reader": Caller("rea", frozenset({Scope.READ})),
    "pusher": Caller("pus", frozenset({Scope.PUSH})),
    "runner": Caller("run", frozenset({Scope.RUN})),
    "root": Caller("root", frozenset({Scope.ADMIN})),
}


class Answer(NamedTuple):
    status: int
    body: Any
    headers: dict[bytes, bytes]


class Served:
    """A hub on a port."""

    def __init__(self, hub: Hub, port: int) -> None:
        self.hub = hub
        self.url = f"http://127.0.0.1:{port}"

    def client(self, token: str = "ann") -> HubClient:
        return HubClient(self.url, token, timeout=30)

    async def ask(self, method: str, path: str, body: Any = None, token: str | None = "ann") -> Answer:
        headers = f"Authorization: Bearer {token}\r\n".encode() if token else b""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        if not isinstance(body, bytes):
            headers += b"Content-Type: application/json\r\n"
        async with asyncio.timeout(30):
            found = await http.request(method, self.url, path, headers=headers, body=data)
        parsed = (
            json.loads(found.body) if found.headers.get(b"content-type", b"").startswith(b"application/json") else None
        )
        return Answer(found.status, parsed, found.headers)


async def authenticate(token: str | None) -> Caller:
    if token not in CALLERS:
        raise Unauthorized("no such token")
    return CALLERS[token]


@pytest.fixture
async def served(tmp_path: Path, blobs: Blobs, engine: Stage) -> AsyncIterator[Served]:
    async with await open_store(f"sqlite:{tmp_path / 'store.db'}") as store:
        async with Hub(store, blobs, engine, builtins=False) as hub:
            app = App(hub_routes.routes(hub), title="Hub", authenticate=authenticate, guard=Hosts(loopback=True))
            connections = Connections(app)
            server = await asyncio.get_running_loop().create_server(connections, "127.0.0.1", 0)
            yield Served(hub, server.sockets[0].getsockname()[1])
            server.close()
            await app.close(patience=1)
            await connections.drain(5)
            await http.close()


async def test_a_program_of_the_wild_pushes_and_lists(served: Served) -> None:
    """It sends no package, a status, camelCase, and takes what comes in ``data``."""
    assert (await served.ask("GET", "/env/search/0.0.1/exists")).body["data"] == {"exists": False}
    sent = {
        "name": "search",
        "version": "0.0.1",
        "tags": ["swe", "python"],
        "buildConfig": {"dockerfile": "./Dockerfile"},
        "testConfig": {"script": "pytest"},
        "deployConfig": {"cpu": "1C", "memory": "2G", "os": "linux"},
        "status": "Ready",
        "codeUrl": "oss://x",
        "artifacts": [{"id": "", "type": "image", "content": "search:1"}],
        "unknown": 1,
    }
    made = await served.ask("POST", "/env", sent)
    assert made.status == 200
    assert {key: made.body[key] for key in ("success", "code", "message")} == {
        "success": True,
        "code": 0,
        "message": "ok",
    }
    data = made.body["data"]
    assert (data["id"], data["status"], data["code_url"]) == ("search@0.0.1", Status.CREATED, "oss://x")
    for theirs, ours in (
        ("buildConfig", "build_config"),
        ("testConfig", "test_config"),
        ("deployConfig", "deploy_config"),
    ):
        assert data[ours] == sent[theirs]
    assert (data["artifacts"], data["tags"], data["owner"]) == (sent["artifacts"], sent["tags"], "ann")
    assert data["created_at"].endswith("Z")
    assert (await served.ask("GET", "/env/search/0.0.1/exists")).body["data"] == {"exists": True}
    again = await served.ask("POST", "/env/", sent)
    assert (again.status, again.body["success"], again.body["code"], again.body["error"]) == (
        409,
        False,
        409,
        "conflict",
    )
    assert (await served.ask("PUT", "/env/search/0.0.1", sent | {"tags": []})).body["data"]["tags"] == []
    status = (await served.ask("GET", "/env/search/0.0.1/status")).body["data"]
    assert (status["status"], status["title"]) == (3, "Created")
    listed = await served.ask("GET", "/env?limit=100&offset=0")
    assert [env["id"] for env in listed.body["data"]] == ["search@0.0.1"]
    assert [listed.body[key] for key in ("total", "limit", "offset")] == [1, 100, 0]
    assert (await served.ask("POST", "/env/search/0.0.1/release")).body["data"]["status"] == 7
    refused = await served.ask("PUT", "/env/search/0.0.1", sent)
    assert (refused.status, refused.body["error"]) == (403, "forbidden")


async def test_our_own_client_does_everything(served: Served) -> None:
    hub = served.client()
    made = await hub.create(request("game", description="x"))
    assert made.status == Status.PENDING
    assert (await hub.update(request("game", description="y"))).description == "y"
    data = package("game", config={"tags": ["fun"]}, files={"README.md": "# Game"})
    pushed = await hub.upload("game", "1.0.0", data)
    assert (pushed.status, pushed.readme, pushed.tools[0].name) == (Status.READY, "# Game", "greet")
    assert await hub.get(EnvRef("game")) == pushed
    assert await hub.download(pushed) == data
    assert (await hub.release("game", "1.0.0")).status == Status.RELEASED
    found, total = await hub.list(name="gam", tags=["fun"], tool="greet", owner="ann")
    assert ([env.id for env in found], total) == (["game@1.0.0"], 1)
    assert (await hub.list(tags=["fun", "other"]))[1] == 0
    assert [env.version for env in await hub.versions("game")] == ["1.0.0"]
    assert await hub.exists("game", "1.0.0")
    assert (await hub.status("game", "1.0.0")).title == "Released"
    assert (await hub.yank("game", "1.0.0", "bad")).yanked == "bad"
    assert (await hub.set_policy("game", PolicyChange(public=False, readers=["bob"]))).readers == ["bob"]
    assert (await hub.policy("game")).public is False
    await hub.create(request("game", "2.0.0"))
    await hub.delete("game", "2.0.0")
    assert not await hub.exists("game", "2.0.0")
    assert await served.client("bob").download(pushed) == data
    stranger = served.client("reader")
    with pytest.raises(NotFound, match="there is no environment 'game'"):
        await stranger.get(EnvRef("game"))
    with pytest.raises(Forbidden):
        await stranger.create(request("other"))
    with pytest.raises(Conflict):
        await hub.delete("game", "1.0.0")


async def test_a_package_in_the_answer_bears_its_digest(served: Served) -> None:
    hub = served.client()
    await hub.create(request("game"))
    made = await hub.upload("game", "1.0.0", package("game"))
    found = await served.ask("GET", "/env/game/latest/package")
    assert found.headers[b"content-type"] == b"application/gzip"
    assert found.headers[b"content-length"] == str(made.size).encode()
    assert found.headers[b"etag"] == f'"{made.digest}"'.encode()


async def test_an_unreadable_package_is_422_with_the_reason(served: Served, engine: Stage) -> None:
    await served.client().create(request("game"))
    engine.answers["start"] = StartFailed("ImportError: no module foo")
    answer = await served.ask("POST", "/env/game/1.0.0/package", package("game"))
    assert (answer.status, answer.body["error"]) == (422, "invalid")
    assert "ImportError: no module foo" in answer.body["message"]
    assert answer.body["hint"]
    status = (await served.ask("GET", "/env/game/1.0.0/status")).body["data"]
    assert (status["title"], status["reason"]) == ("Failed", answer.body["message"])


async def test_a_client_that_leaves_ends_the_reading(served: Served, engine: Stage, home: Path) -> None:
    await served.client().create(request("game"))
    engine.go.clear()
    data = package("game")
    head = "POST /env/game/1.0.0/package HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer ann\r\n"
    _, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    await until(lambda: bool(engine.sandboxes), "the reading")
    writer.close()
    await until(lambda: not engine.sandboxes, "the end of the reading")
    client = served.client()
    deadline = asyncio.get_running_loop().time() + 30
    while (await client.status("game", "1.0.0")).title != "Pending":
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.02)
    _, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data[:50])
    await writer.drain()
    writer.close()
    engine.go.set()
    assert (await client.upload("game", "1.0.0", data)).status == Status.READY


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/env", {"name": "a/b", "version": "1.0.0"}, 422),
        ("POST", "/env", {"name": "x", "version": "one"}, 422),
        ("POST", "/env", {"name": "x"}, 422),
        ("POST", "/env", {"name": 7, "version": "1.0.0"}, 422),
        ("POST", "/env", b"not json", 422),
        ("GET", "/env?limit=100000", None, 422),
        ("GET", "/env?limit=0", None, 422),
        ("GET", "/env?offset=-1", None, 422),
        ("GET", f"/env?name={'x' * 600}", None, 413),
        ("GET", "/env?" + "&".join(f"tags=t{number}" for number in range(300)), None, 413),
        ("GET", "/env?tags=%00", None, 422),
        ("GET", "/env/%2e%2e/1.0.0", None, 422),
        ("GET", "/env/a%2Fb/1.0.0", None, 422),
        ("GET", "/env/gr%C3%B6%C3%9Fe/1.0.0", None, 422),
        ("GET", "/env/game/not-a-version", None, 422),
        ("GET", "/env/game/1.0.0", None, 404),
        ("GET", "/env/game/versions", None, 404),
        ("GET", "/env/game/policy", None, 404),
        ("PUT", "/env/game/policy", {"public": "yes"}, 422),
        ("PUT", "/env/game/1.0.0", {"name": "game", "version": "1.0.1"}, 422),
        ("POST", "/env/game/latest/release", None, 422),
        ("POST", "/env/game/1.0.0/package", b"x", 404),
        ("GET", "/env/game/1.0/exists", None, 422),
        ("DELETE", "/env/game", None, 404),
        ("DELETE", "/env/game/1.0.0", None, 404),
        ("PATCH", "/env/game/1.0.0", None, 405),
    ],
)
async def test_bad_requests_get_right_answers(served: Served, method: str, path: str, body: Any, status: int) -> None:
    answer = await served.ask(method, path, body)
    assert answer.status == status, answer.body
    assert answer.body["success"] is False
    assert answer.body["code"] == status
    assert answer.body["message"]


async def test_scopes(served: Served) -> None:
    """Looking needs ``read`` and changing needs ``push``; an admin has both."""
    await served.client("root").create(request("game", status="Ready"))
    table = {route: route.scope for route in hub_routes.routes(served.hub)}
    assert set(table.values()) == {Scope.READ, Scope.PUSH}
    assert all((scope is Scope.READ) == (route.method == "GET") for route, scope in table.items())
    for route, scope in table.items():
        path = route.path.format(name="game", version="1.0.0") if "{" in route.path else route.path
        for token, caller in CALLERS.items():
            answer = await served.ask(route.method, path, {} if route.method in ("PUT", "POST") else None, token)
            if not caller.has(scope or Scope.ADMIN):
                assert (answer.status, answer.body["error"]) == (403, "forbidden"), (route, token)
            else:
                assert "this token may not" not in str(answer.body), (route, token)
        for token in ("nobody", None):
            assert (await served.ask(route.method, path, None, token)).status == 401


async def test_what_is_too_large_is_refused_before_it_is_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = served.client()
    await hub.create(request("game"))
    _, writer = connection = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
    head = "POST /env/game/1.0.0/package HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer ann\r\n"
    writer.write(f"{head}Content-Length: {1024**4}\r\n\r\n".encode())
    async with asyncio.timeout(30):
        assert b" 413 " in await connection[0].readline()
    writer.close()
    with pytest.raises((TooLarge, Invalid)):
        await hub.create(request("game", "2.0.0", description="x" * 100_000))
