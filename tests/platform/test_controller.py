"""The controller: the contract by raw requests, its own death and return, and API services over it."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import socket
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from aenv import http, project
from aenv.auth.tokens import new_token
from aenv.engines import load_engine
from aenv.engines.base import Engine, new_id
from aenv.engines.remote import RemoteEngine
from aenv.engines.specs import complete
from aenv.errors import Invalid, NetworkError, NotFound, Unauthorized, Unsupported
from aenv.models import EnvRef, SandboxSpec, Second, State
from aenv.project import archive
from aenv.runtime.tokens import digest, new_owner_token
from tests.platform.conftest import DURABLE
from tests.platform.support import DESK, PATIENCE, Platform, ask, end_sandboxes, eventually, new_home, platform
from tests.store.servers import Server, free_port, redis_server

pytestmark = pytest.mark.xdist_group("platform-controller")

INSTANCE = "/aenvironment/instance"
SCRAPER = new_token()


@pytest.fixture(scope="module")
def served() -> Iterator[Platform]:
    with platform("controller", "--engine", "process", AENV_GRACE="5", AENV_METRICS_TOKEN=SCRAPER) as found:
        yield found
        assert processes(found.home) > 0
        found.end()
        eventually("the end of all processes", lambda: processes(found.home) == 0)


@pytest.fixture
def controller(served: Platform) -> Platform:
    """One that runs, whatever an earlier test did to it."""
    if not served.alive:
        served.start()
    return served


def engine_of(served: Platform, **options: Any) -> Engine:
    return load_engine(f"http={served.control}", key=served.token, **options)


def spec_of(token: str = "", **fields: Any) -> SandboxSpec:
    """A spec of the desk, as an API service gives it to its engine."""
    found = project.read(DESK)
    sealed = digest(token) if token else None
    return complete(SandboxSpec(env=EnvRef("desk"), ttl=600.0, owner_token_sha256=sealed, **fields), found)


def wire(spec: SandboxSpec, **fields: Any) -> dict[str, Any]:
    told = json.loads(msgspec.json.encode(msgspec.structs.replace(spec, project="", stamp="")))
    return {"name": spec.env.name, "version": spec.env.version, "spec": told, **fields}


def packed() -> tuple[str, bytes]:
    content = archive.pack(project.read(DESK))
    return hashlib.sha256(content).hexdigest(), content


def processes(home: Path) -> int:
    """How many processes belong to sandboxes of a home: each has its path in its variables or its command."""
    found = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
        except OSError:
            continue
        found += str(home).encode() in words and b"aenv" in words
    return found


# The contract, by raw requests


def test_what_existing_programs_send_and_expect(controller: Platform) -> None:
    env = {
        "id": "env-123",
        "name": "mini-terminal",
        "description": "",
        "version": "",
        "tags": None,
        "code_url": "",
        "build_config": {"timeout": 600},
        "test_config": None,
        "deploy_config": {"cpu": "1", "memory": "1Gi"},
    }
    made = controller.ask("POST", INSTANCE, env)
    assert made.status == 200
    assert {*made.json} >= {"success", "code", "message", "data"}
    assert made.json["success"] is True
    held = made.data
    assert {*held} >= {"id", "env", "status", "created_at", "updated_at", "ip", "ttl"}
    assert (held["env"]["name"], held["status"], held["ip"]) == ("mini-terminal", "Running", "127.0.0.1")
    assert held["id"] != "env-123"
    assert controller.ask("GET", f"{INSTANCE}/{held['id']}").data["status"] == "Running"
    listed = controller.ask("GET", f"{INSTANCE}?envName=mini-terminal").data
    assert held["id"] in {row["id"] for row in listed}
    assert controller.ask("GET", f"{INSTANCE}?envName=another").data == []
    # Existing programs name the instance by a header, at the port of the runtime.
    named = {"AEnvCore-EnvInstance-ID": held["id"]}
    assert ask(controller.data, "GET", "/health", headers=named).status == 200
    assert controller.ask("PUT", f"{INSTANCE}/action/warmup").json["success"] is True
    assert controller.ask("DELETE", f"{INSTANCE}/{held['id']}").data is True
    assert controller.ask("DELETE", f"{INSTANCE}/{held['id']}").data is True
    assert controller.ask("PUT", f"{INSTANCE}/action/cleanup").json["success"] is True
    assert ask(controller.data, "GET", "/health", headers=named).status in (404, 502)


def test_what_is_wrong_is_said(controller: Platform) -> None:
    spec = wire(spec_of(), project=packed()[0])
    wrong: list[tuple[int, str, str, Any]] = [
        (404, "GET", f"{INSTANCE}/nobody", None),
        (404, "PUT", f"{INSTANCE}/nobody", {"ttl": 60}),
        (404, "GET", f"{INSTANCE}/nobody/output", None),
        (404, "GET", f"{INSTANCE}/nobody/logs", None),
        (404, "POST", f"{INSTANCE}/nobody/exec", {"command": ["true"]}),
        (422, "POST", INSTANCE, b"{"),
        (422, "POST", INSTANCE, []),
        (422, "POST", INSTANCE, {}),
        (422, "POST", INSTANCE, {"name": "no such environment"}),
        (422, "POST", INSTANCE, {"name": "no-image-and-not-ours", "version": "1.0.0"}),
        (422, "POST", INSTANCE, {**spec, "instance_id": "../../etc", "project": ""}),
        (422, "POST", INSTANCE, {**spec, "project": "../../etc/passwd"}),
        (422, "POST", INSTANCE, {**spec, "project": "", "instance_id": "no-files"}),
        (422, "POST", INSTANCE, {**spec, "spec": {**spec["spec"], "datasource": "/etc"}}),
        (422, "POST", INSTANCE, {**spec, "spec": {**spec["spec"], "second": {"directory": "/etc"}}}),
        (422, "PUT", f"{INSTANCE}/nobody", {"ttl": "long"}),
        (422, "GET", f"{INSTANCE}?label=nothing", None),
        (422, "PUT", "/aenvironment/project/abc", b"x"),
        (422, "PUT", f"/aenvironment/project/{'0' * 64}", b"x"),
        (413, "POST", INSTANCE, b'{"name": "' + b"x" * (9 * 1024 * 1024) + b'"}'),
    ]
    for status, method, path, body in wrong:
        headers = {"Content-Type": "application/json"} if path == INSTANCE else {}
        reply = controller.ask(method, path, body, headers=headers)
        assert reply.status == status, f"{method} {path} {str(body)[:80]}: {reply.body!r}"
        assert reply.json["success"] is False
        assert reply.json["message"]
        assert "Traceback" not in reply.body.decode()
    assert controller.ask("GET", INSTANCE, token=None).status == 401
    assert controller.ask("GET", INSTANCE, token="aenv_wrong").status == 401
    reader = controller.ask("POST", "/token", {"owner": "ada", "scopes": ["read", "run"]}).data["token"]
    assert controller.ask("GET", INSTANCE, token=reader).status == 403
    server = controller.ask("POST", "/token", {"owner": "ada", "scopes": ["engine"]}).data["token"]
    assert controller.ask("GET", INSTANCE, token=server).status == 200
    assert controller.ask("POST", "/token", {"owner": "bob", "scopes": ["admin"]}, token=server).status == 403
    assert controller.ask("GET", INSTANCE, headers={"Host": "evil.example.org"}).status in (403, 421)
    assert [row for row in controller.ask("GET", INSTANCE).data if row["status"] == "Running"] == []


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "a/../../outside"])
def test_an_archive_cannot_write_elsewhere(controller: Platform, name: str) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as made:
        for path, content in (("config.json", (DESK / "config.json").read_bytes()), (name, b"x")):
            info = tarfile.TarInfo(path)
            info.size = len(content)
            made.addfile(info, io.BytesIO(content))
    content = buffer.getvalue()
    sha = hashlib.sha256(content).hexdigest()
    reply = controller.ask("PUT", f"/aenvironment/project/{sha}", content)
    assert (reply.status, reply.json["error"]) == (422, "invalid")
    assert not list(controller.home.rglob("outside"))
    assert controller.ask("POST", INSTANCE, wire(spec_of(), project=sha, instance_id="with-it")).data["missing"]


def test_a_client_that_hangs_up_leaves_nothing(controller: Platform) -> None:
    sha, content = packed()
    place = urlsplit(controller.control)
    assert controller.ask("PUT", f"/aenvironment/project/{sha}", content).status == 200
    body = json.dumps(wire(spec_of(labels={"of": "hung-up"}), project=sha, instance_id=new_id("desk"))).encode()
    head = (
        f"POST {INSTANCE} HTTP/1.1\r\nHost: {place.netloc}\r\nAuthorization: Bearer {controller.token}\r\n"
        f"Prefer: wait=60\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    for part in (head[:40], head, head + body[:100]):  # before anything could be made
        with socket.create_connection((place.hostname or "", place.port or 0)) as client:
            client.sendall(part)
    # In the middle of an upload, too.
    with socket.create_connection((place.hostname or "", place.port or 0)) as client:
        client.sendall(
            f"PUT /aenvironment/project/{'1' * 64} HTTP/1.1\r\nHost: {place.netloc}\r\n"
            f"Authorization: Bearer {controller.token}\r\nContent-Length: 1000000\r\n\r\nabc".encode()
        )
    assert controller.ask("GET", f"{INSTANCE}?label=of%3Dhung-up").data == []
    assert controller.ask("GET", "/health", token=None).status == 200


# Both ends against each other


async def test_errors_are_what_they_would_be_here(controller: Platform) -> None:
    async with engine_of(controller) as engine:
        with pytest.raises(NotFound):
            await engine.get("nobody")
        with pytest.raises(Invalid, match="datasource"):
            await engine.create(new_id("desk"), spec_of(datasource="/etc"))
        with pytest.raises(Invalid, match="not an id"):
            await engine.create("a/b", spec_of())
        with pytest.raises(Unsupported, match="second container"):
            engine.check_second(Second(image="debian"))
        with pytest.raises(Invalid, match="no project directory"):
            await engine.create(new_id("desk"), SandboxSpec(env=EnvRef("desk"), project="/nonexistent"))
        id = new_id("desk")
        made = await engine.create(id, spec_of())
        assert (made.state, made.url) == (State.RUNNING, f"{controller.data}/env-instance/{id}")
        with pytest.raises(NotFound):
            await engine.download(id, "nothing")
        await engine.delete(id)
        with pytest.raises(NotFound):
            await engine.used(id)
    with pytest.raises(Unauthorized):
        async with load_engine(f"http={controller.control}", key="aenv_wrong"):
            pass


async def test_a_project_is_sent_once(controller: Platform) -> None:
    async with engine_of(controller) as engine, engine_of(controller) as other:
        assert await engine.prepare(spec_of())
        first, second = new_id("desk"), new_id("desk")
        await asyncio.gather(engine.create(first, spec_of()), other.create(second, spec_of()))
        kept = controller.home / "controller" / "projects"
        assert [path.name for path in kept.iterdir() if not path.name.startswith(".")].count(packed()[0]) == 1
        labels = (await engine.get(first)).labels
        assert not any(name.startswith("aenv/") for name in labels)
        # What is in use stays; then it goes, and is sent again.
        controller.ask("PUT", f"{INSTANCE}/action/cleanup").data  # noqa: B018
        assert (kept / packed()[0]).is_dir()
        await asyncio.gather(engine.delete(first), engine.delete(second))
        cleaned = controller.ask("PUT", f"{INSTANCE}/action/cleanup").data
        assert cleaned["projects"] >= 1
        assert not (kept / packed()[0]).exists()
        second = new_id("desk")
        assert (await engine.create(second, spec_of())).state is State.RUNNING
        await engine.delete(second)


async def test_a_create_that_is_given_up_makes_nothing_whenever_that_is(controller: Platform) -> None:
    async with engine_of(controller) as engine:
        await engine.prepare(spec_of())
        for pause in (0.0, 0.001, 0.005, 0.02, 0.05, 0.2):
            creating = asyncio.create_task(engine.create(new_id("desk"), spec_of(labels={"of": "given-up"})))
            await asyncio.sleep(pause)
            creating.cancel()
            await asyncio.wait((creating,))
            if not creating.cancelled():
                await engine.delete(creating.result().id)
        assert [found for found in await engine.find({"of": "given-up"}) if not found.state.over] == []


def test_what_it_counts_is_open_to_who_may_read(controller: Platform) -> None:
    """Its records are not those of the platform: a scraper of both has a token that each has from its settings."""
    controller.ask("GET", INSTANCE).data  # noqa: B018
    made = controller.ask("POST", "/token", {"scopes": ["read"]}).data["token"]
    for token in (SCRAPER, made):
        page = controller.ask("GET", "/metrics", token=token)
        assert (page.status, page.headers["content-type"]) == (200, "text/plain; version=0.0.4")
        line = f'aenv_api_requests_total{{method="GET",endpoint="{INSTANCE}",status="200"}} '
        assert line in page.body.decode()
        assert controller.ask("GET", INSTANCE, token=token).status == 403
    assert controller.ask("GET", "/metrics", token=None).status == 401
    assert controller.ask("GET", "/metrics", token=new_token()).status == 401


def test_an_attempt_may_be_given_up_before_it_comes(controller: Platform) -> None:
    id, attempt = new_id("desk"), {"AEnv-Attempt": "early"}
    assert controller.ask("DELETE", f"{INSTANCE}/{id}", headers=attempt).data is True
    body = wire(spec_of(), project=packed()[0], instance_id=id)
    assert controller.ask("PUT", f"/aenvironment/project/{packed()[0]}", packed()[1]).status == 200
    assert controller.ask("POST", INSTANCE, body, headers=attempt).status == 409
    made = controller.ask("POST", INSTANCE, body, headers={"AEnv-Attempt": "another"})
    assert made.data["status"] == "Running"
    assert controller.ask("POST", INSTANCE, body).data["sandbox"]["boot"] == made.data["sandbox"]["boot"]
    controller.ask("DELETE", f"{INSTANCE}/{id}").data  # noqa: B018


def test_who_waits_less_than_a_start_takes_asks_again(controller: Platform) -> None:
    sha, content = packed()
    assert controller.ask("PUT", f"/aenvironment/project/{sha}", content).status == 200
    body = wire(spec_of(), project=sha, instance_id=new_id("desk"))
    held = controller.ask("POST", INSTANCE, body, headers={"Prefer": "wait=0"}).data
    while held["pending"]:
        assert held["id"] == body["instance_id"]
        held = controller.ask("POST", INSTANCE, body, headers={"Prefer": "wait=1"}).data
    assert held["status"] == "Running"
    assert controller.ask("DELETE", f"{INSTANCE}/{held['id']}").data is True


# The controller comes and goes


async def test_sandboxes_outlive_their_controller(controller: Platform) -> None:
    token = new_owner_token()
    async with engine_of(controller) as engine:
        id = new_id("desk")
        made = await engine.create(id, spec_of(token, labels={"of": "outliving"}))
        controller.kill()
        asking = asyncio.create_task(engine.get(id))  # it is there again before the client gives up
        await asyncio.to_thread(controller.start)
        found = await asking
        assert (found.boot, found.state, found.url) == (made.boot, State.RUNNING, made.url)
        assert [one.id for one in await engine.find({"of": "outliving"})] == [id]
        assert (await engine.create(id, spec_of(token))).boot == made.boot
        headers = b"Content-Type: application/json\r\nAuthorization: Bearer %b\r\n" % token.encode()
        answer = await http.request("POST", found.url, "/tools/put", headers=headers, body=b'{"thing": "pen"}')
        assert json.loads(answer.body)["data"] == 1
        controller.stop()
        await asyncio.to_thread(controller.start)
        assert (await engine.update(id, ttl=900.0)).boot == made.boot
        await engine.delete(id)
        assert [one for one in await engine.find() if not one.state.over] == []


async def test_a_create_survives_the_death_of_its_controller(controller: Platform) -> None:
    async with engine_of(controller) as engine:
        await engine.prepare(spec_of())
        ids = [new_id("desk") for _ in range(6)]
        creating = [asyncio.create_task(engine.create(id, spec_of(labels={"of": "twice"}))) for id in ids]
        await asyncio.sleep(0.02)
        controller.kill()
        await asyncio.to_thread(controller.start)
        made = await asyncio.gather(*creating)
        assert {one.id for one in made} == {*ids}
        found = [one for one in await engine.find({"of": "twice"}) if not one.state.over]
        assert sorted(one.id for one in found) == sorted(ids)
        await asyncio.gather(*(engine.delete(id) for id in ids))


async def test_nobody_there_is_an_error_of_the_network() -> None:
    engine = load_engine(f"http=127.0.0.1:{free_port()}", key="aenv_any")
    with pytest.raises(NetworkError, match="the controller at .* cannot be reached"):
        async with asyncio.timeout(PATIENCE):
            await engine.get("desk-1")


async def test_a_controller_that_is_silent_is_an_error_in_time() -> None:
    held: list[asyncio.StreamWriter] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = f"http=127.0.0.1:{server.sockets[0].getsockname()[1]}"
    engine = load_engine(url, key="aenv_any")
    assert isinstance(engine, RemoteEngine)
    engine._service.timeout = 0.2
    with pytest.raises(NetworkError, match=r"did not answer GET .*desk-1 within 0.2 s"):
        await engine.get("desk-1")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):  # as an API service bounds each question
            await engine.create("desk-1", spec_of())
    for writer in held:
        writer.close()
    server.close()


async def test_a_controller_that_chooses_ids_is_refused() -> None:
    deleted: list[str] = []

    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            length = 0
            while (header := await reader.readline()).strip():
                if header.lower().startswith(b"content-length:"):
                    length = int(header.split(b":")[1])
            await reader.readexactly(length)
            method, path, _ = line.decode().split()
            data: Any = {"id": "inst-789", "env": {"name": "desk"}, "status": "Running", "ip": "192.0.2.1"}
            if path.endswith("/engine"):
                data = {"name": "theirs", "images": True}
            if method == "DELETE":
                deleted.append(path)
                data = True
            body = json.dumps({"success": True, "code": 200, "data": data}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    server = await asyncio.start_server(stranger, "127.0.0.1", 0)
    async with load_engine(f"http=127.0.0.1:{server.sockets[0].getsockname()[1]}", key="aenv_any") as engine:
        spec = spec_of()
        with pytest.raises(Unsupported, match="ids that it is given"):
            await engine.create("desk-1", spec)
        assert deleted == [f"{INSTANCE}/inst-789"]
        found = await engine.get("inst-789")
        assert (found.url, found.state, found.env) == ("http://192.0.2.1:8081", State.RUNNING, "desk")
    server.close()


# API services over it


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with redis_server(tmp_path_factory.mktemp("redis"), *DURABLE) as server:
        yield server


def over(served: Platform, redis: Server, home: Path) -> Platform:
    options = ("--store", redis.url, "--engine", f"http={served.control}", "--blobs", f"file:{served.home}/blobs")
    return Platform(home, *options, variables={"AENV_CONTROLLER_KEY": served.token, "AENV_GRACE": "5"})


def test_two_api_services_over_one_controller(controller: Platform, redis: Server) -> None:
    with new_home() as here, new_home() as there:
        one, two = over(controller, redis, here), over(controller, redis, there)
        try:
            one.start()
            two.start()
            one.push()
            ids = [server.create("desk")["id"] for server in (one, two) * 3]
            counts = dict.fromkeys(ids, 0)

            def put(server: Platform, id: str) -> None:
                counts[id] += 1
                assert server.call(id, "POST", "/tools/put", {"thing": str(counts[id])}).json["data"] == counts[id]

            for id in ids:  # either carries calls to all, wherever they were made
                put(one, id)
                put(two, id)
            stop = threading.Event()
            calls: list[int] = []

            def keep_calling() -> None:
                while not stop.is_set():
                    for id in ids:
                        put(two, id)
                        calls.append(1)

            calling = threading.Thread(target=keep_calling)
            calling.start()
            eventually("calls", lambda: len(calls) > 20)
            one.kill()
            seen = len(calls)
            eventually("calls after its death", lambda: len(calls) > seen + 50)
            stop.set()
            calling.join(PATIENCE)
            for id in ids:  # and does everything else for what the dead one had made
                assert two.ask("POST", f"/env-instance/{id}/extend", {"ttl": "1h"}).status == 200
                assert two.ask("POST", f"/env-instance/{id}/exec", {"command": "echo hey"}).data["stdout"] == "hey\n"
                assert b"put 1" in two.ask("GET", f"/env-instance/{id}/logs").body
                put(two, id)
            url = two.ask("POST", f"/env-instance/{ids[0]}/expose", {"port": 9000}).data["url"]
            two.call(ids[0], "POST", "/tools/serve", {"port": 9000})
            assert ask(two.data, "GET", "/x", headers={"Host": url.split("/")[2]}).body == b"desk at /x"
            for id in ids:
                assert two.ask("DELETE", f"/env-instance/{id}").status == 200
            assert [row for row in controller.ask("GET", INSTANCE).data if row["status"] == "Running"] == []
        finally:
            for server in (one, two):
                server.end()


def test_a_controller_dies_under_an_api_service(controller: Platform, redis: Server) -> None:
    with new_home() as home:
        api = over(controller, redis, home)
        try:
            api.start()
            api.push()
            id = api.create("desk")["id"]
            assert api.call(id, "POST", "/tools/put", {"thing": "pen"}).json["data"] == 1
            controller.kill()
            gone = api.call(id, "POST", "/tools/put", {"thing": "pen"})
            assert gone.status in (502, 503), gone.body  # an error of the platform, and nothing that is over
            assert api.ask("GET", f"/env-instance/{id}").data["status"] == "Running"
            controller.start()
            again = eventually(
                "its return", lambda: (found := api.call(id, "POST", "/tools/look", {})).status == 200 and found
            )
            assert again.json["data"] == ["pen"]
            assert api.ask("DELETE", f"/env-instance/{id}").status == 200
            assert [row for row in controller.ask("GET", INSTANCE).data if row["status"] == "Running"] == []
        finally:
            api.end()


def test_two_controllers_over_one_engine_answer_alike(redis: Server) -> None:
    with new_home() as home:
        options = ("controller", "--engine", "process", "--store", f"{redis.url.removesuffix('/0')}/1")
        one, two = (Platform(home, *options) for _ in range(2))
        try:
            one.start()
            two.start()
            made = one.ask("POST", INSTANCE, {"name": "mini-terminal"}).data
            found = two.ask("GET", f"{INSTANCE}/{made['id']}").data
            assert found["sandbox"]["boot"] == made["sandbox"]["boot"]
            for server in (one, two):
                url = f"{server.data}/env-instance/{made['id']}"
                assert ask(url, "GET", "/health").status == 200
            one.kill()
            assert two.ask("DELETE", f"{INSTANCE}/{made['id']}").data is True
            assert [row for row in two.ask("GET", INSTANCE).data if row["status"] == "Running"] == []
        finally:
            for server in (one, two):
                if server.alive:
                    server.kill()
            end_sandboxes(home)
        eventually("the end of all processes", lambda: processes(home) == 0)
