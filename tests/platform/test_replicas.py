"""Two servers on one Redis: either serves everything, either may be killed, stopped or replaced, and no client that
tries again what is safe to try again hears of it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.platform.balancer import Replicas, replicas
from tests.platform.conftest import DURABLE
from tests.platform.support import PATIENCE, Platform, ask, eventually, platform, variant
from tests.platform.watching import living, sandboxes, status
from tests.store.servers import Server, redis_server

pytestmark = pytest.mark.xdist_group("platform-replicas")

EPISODES = """
import asyncio, json, os, sys
from aenv import Environment
from aenv.client.platform import Platform
import msgspec

class Elsewhere(Platform):
    \"\"\"A client that cannot open the socket of a sandbox: all that it asks goes through the servers.\"\"\"

    async def _sandbox(self, instance, attached=False):
        return await super()._sandbox(msgspec.structs.replace(instance, socket=""), attached)

async def episode(done):
    async with Environment("desk", labels={"of": "episodes"}, provision=Elsewhere(None)) as env:
        for number in range(1, 6):
            assert (await env.call_tool("put", {"thing": str(number)})).structured == {"result": number}
        assert await env.call_reward() == 1 / 6
        assert (await env.call_tool("look")).structured == {"result": ["1", "2", "3", "4", "5"]}
        assert [row["name"] for row in await env.history()].count("put") == 5
    print(done, flush=True)

async def client(stop):
    done = 0
    while not stop.is_set():
        await episode(done := done + 1)

async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline).add_done_callback(lambda _: stop.set())
    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(client(stop))
    print("over", flush=True)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with redis_server(tmp_path_factory.mktemp("redis"), *DURABLE) as server:
        yield server


@pytest.fixture(scope="module")
def both(redis: Server) -> Iterator[Replicas]:
    with replicas(redis.url, AENV_GRACE="30") as found:
        found.push()
        yield found


@pytest.fixture
def pair(both: Replicas) -> Replicas:
    """Two servers that run, whatever an earlier test did to them."""
    if not both.alive:
        both.start()
    return both


# Either serves everything


def test_either_server_serves_everything(pair: Replicas, tmp_path: Path) -> None:
    one, two = pair.servers
    one.push(variant(tmp_path, "pushed", secrets=["WORD"]))
    token = one.ask("POST", "/token", {"owner": "ada", "scopes": ["read", "run"]}).data
    one.ask("PUT", "/secret/WORD", {"value": "of-one"}).data  # noqa: B018
    assert two.create("pushed")["env"]["version"] == "1.2.0"
    made = one.create("desk", token=token["token"], labels={"at": "one"})
    id, theirs = made["id"], {"token": token["token"]}
    path = f"/env-instance/{id}"
    assert two.call(id, "POST", "/tools/put", {"thing": "pen"}, **theirs).json["data"] == 1
    assert two.ask("GET", path, **theirs).data["owner_token"] == made["owner_token"]
    assert [row["id"] for row in two.ask("GET", "/env-instance/list?label=at%3Done").data] == [id]
    assert two.ask("POST", f"{path}/exec", {"command": "echo hey"}, **theirs).data["stdout"] == "hey\n"
    assert two.ask("PUT", f"{path}/files?path=a", b"x", **theirs).status == 200
    assert one.ask("GET", f"{path}/files?path=a", **theirs).body == b"x"
    assert eventually("a line", lambda: two.ask("GET", f"{path}/logs", **theirs).body) == b"put pen\n"
    assert two.ask("GET", f"{path}/history", **theirs).data[0]["name"] == "put"
    extended = two.ask("POST", f"{path}/extend", {"ttl": "2h"}, **theirs).data["expires_at"]
    assert one.ask("GET", path, **theirs).data["expires_at"] == extended > made["expires_at"]
    two.call(id, "POST", "/tools/serve", {"port": 9000}, **theirs)
    url = two.ask("POST", f"{path}/expose", {"port": 9000}, **theirs).data["url"]
    assert f":{pair.data.rpartition(':')[2]}/" in url
    host = {"Host": url.split("/")[2]}
    assert {ask(server.data, "GET", "/x", headers=host).body for server in (pair, one, two)} == {b"desk at /x"}
    assert two.ask("POST", f"{path}/reset", {"seed": 1}, **theirs).data == {"seed": 1}
    # What ends through one is over for the other at once.
    assert two.ask("DELETE", path, **theirs).status == 200
    assert one.ask("GET", path, **theirs).data["status"] == "Terminated"
    assert one.ask("GET", "/env-instance/list?label=at%3Done&status=Running").data == []
    gone = one.call(id, "POST", "/tools/look", {}, **theirs)
    assert (gone.status, "it was deleted" in gone.json["error"]) == (502, True)
    assert one.ask("POST", f"{path}/extend", {"ttl": "1h"}, **theirs).status == 409
    assert two.ask("DELETE", f"/token/{token['id']}").status == 200
    eventually("word of that", lambda: one.ask("GET", path, **theirs).status == 401)


def test_a_request_with_a_key_is_the_same_at_both(pair: Replicas) -> None:
    body, key = {"envName": "desk", "count": 3}, {"Idempotency-Key": "at-both", "Prefer": "wait=60"}
    answers: list[Any] = []
    asking = [
        threading.Thread(
            target=lambda it=server: answers.append(it.ask("POST", "/env-instance", body, headers=key).data)
        )
        for server in pair.servers * 3
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(PATIENCE)
    assert len({tuple(each["id"] for each in answer) for answer in answers}) == 1
    assert len(answers) == 6
    assert {each["status"] for answer in answers for each in answer} == {"Running"}


def test_a_client_that_uses_one_is_heard_by_the_other(pair: Replicas) -> None:
    one, two = pair.servers
    left, used = (one.create("desk", lease=3)["id"] for _ in range(2))

    def over() -> bool:
        assert two.call(used, "POST", "/tools/look", {}).status == 200
        return status(one, left) == "Terminated"

    eventually("the end of the one that nobody used", over)
    assert status(one, used) == status(two, used) == "Running"
    one.ask("DELETE", f"/env-instance/{used}").data  # noqa: B018


# One is killed


def test_what_a_server_that_is_killed_left_goes_on(pair: Replicas, tmp_path: Path) -> None:
    one, two = pair.servers
    slow = variant(tmp_path, "slow", preload=False)
    code = slow / "src" / "custom_env.py"
    code.write_text(
        code.read_text()
        + "\n\nfrom aenv import register_health\nimport time\n\nBORN = time.monotonic()\n\n\n"
        + "@register_health\ndef ready() -> bool:\n    return time.monotonic() - BORN > 2\n"
    )
    pair.push(slow)
    short, kept = one.create("desk", ttl="5s")["id"], one.create("desk", ttl="1h")["id"]
    key = {"Idempotency-Key": "begun-by-one"}
    begun = [each["id"] for each in one.ask("POST", "/env-instance", {"envName": "slow", "count": 3}, headers=key).data]
    one.kill()
    assert two.call(kept, "POST", "/tools/put", {"thing": "pen"}).json["data"] == 1
    wait = {**key, "Prefer": "wait=60"}
    found = two.ask("POST", "/env-instance", {"envName": "slow", "count": 3}, headers=wait).data
    assert [(each["id"], each["status"]) for each in found] == [(id, "Running") for id in begun]
    eventually("its time to be over", lambda: status(two, short) == "Terminated")
    one.start()
    assert status(one, kept) == "Running"
    assert one.call(kept, "POST", "/tools/look", {}).json["data"] == ["pen"]
    for id in (kept, *begun):
        assert one.ask("DELETE", f"/env-instance/{id}").status == 200
    assert not {kept, short, *begun} & sandboxes(two)


def test_what_holds_the_sandboxes_is_nobodys_own(pair: Replicas) -> None:
    """It outlives the server that started it, and when it is killed, either server starts another."""
    one, two = pair.servers
    id = two.create("desk")["id"]
    (place,) = pair.home.glob("run/platform*/spawner.json")
    for server in (one, two):
        server.kill()
        server.start()
        assert server.call(id, "POST", "/tools/look", {}).json["data"] == []
    os.kill(json.loads(place.read_text())["pid"], signal.SIGKILL)
    for server in (one, two):
        eventually("news of it", lambda it=server: status(it, id) == "Failed")
        assert "lost" in server.ask("GET", f"/env-instance/{id}").data["reason"]
        assert server.call(server.create("desk")["id"], "POST", "/tools/look", {}).json["data"] == []


@contextmanager
def episodes(pair: Replicas) -> Iterator[Any]:
    """Clients that begin, use and end instances all the time, through the balancers; ``more`` waits for some to end.
    None may fail, and none may leave anything."""
    with pair.program(EPISODES) as program:

        def more() -> None:
            for _ in range(8):
                line = program.line()
                assert line.isdigit(), f"an episode failed; the servers said:\n{pair.text[-4000:]}"

        more()
        yield more
        program.go_on()
        while (line := program.line()) != "over":
            assert line.isdigit(), f"an episode failed; the servers said:\n{pair.text[-4000:]}"
        assert program.end() == 0
    eventually("the end of all that was made", lambda: not living(pair, of="episodes"))
    eventually("agreement", lambda: living(pair) == sandboxes(pair))
    assert "Traceback" not in pair.text


def test_one_is_killed_under_load(pair: Replicas) -> None:
    with episodes(pair) as more:
        for _ in range(4):
            pair.lose_one()
            more()
        pair.settle()
        more()


def test_servers_are_replaced_one_after_the_other(redis: Server, pair: Replicas) -> None:
    """Each says that it is about to end, serves on until it is sent no more, finishes, and is started anew."""
    with episodes(pair) as more:
        for server in pair.servers:
            assert server._ports is not None
            server._variables["AENV_DRAIN"] = "2"
            server.stop()
            server.start()  # with what was set
            more()
            for balancer, port in zip(pair._balancers, server._ports, strict=True):
                eventually("its health", lambda it=balancer, port=port: port in it.well)
            server.signal(signal.SIGTERM)
            for balancer, port in zip(pair._balancers, server._ports, strict=True):
                eventually("word of its end", lambda it=balancer, port=port: port not in it.well)
            more()
            assert server.wait() == 0
            server.start()
            more()


# The store is away for a while


def test_a_store_that_is_paused(pair: Replicas, redis: Server) -> None:
    one, two = pair.servers
    used = one.create("desk", ttl="1h", lease=5)
    answers: list[int] = []
    stop = threading.Event()

    def call() -> None:
        while not stop.wait(0.1):
            for server in (one, two):
                reply = server.call(used["id"], "POST", "/tools/look", {}, token=used["owner_token"])
                answers.append(reply.status)

    def make() -> str:
        body, key = {"envName": "desk", "labels": {"while": "paused"}}, {"Idempotency-Key": "while-paused"}
        while (reply := pair.ask("POST", "/env-instance", body, headers={**key, "Prefer": "wait=60"})).status == 503:
            time.sleep(0.1)
        return str(reply.data["id"])

    with ThreadPoolExecutor() as pool:
        calling = pool.submit(call)
        try:
            eventually("a call at each server", lambda: len(answers) > 1)
            assert redis._process is not None
            redis._process.send_signal(signal.SIGSTOP)
            try:
                making = pool.submit(make)
                time.sleep(10)
            finally:
                redis._process.send_signal(signal.SIGCONT)
            made = making.result(PATIENCE)
            for server in (one, two):
                eventually("the store", lambda it=server: it.ask("GET", "/env/desk/1.2.0").status == 200)
                found = server.ask("GET", f"/env-instance/{used['id']}").data
                assert found["status"] == "Running", found
        finally:
            stop.set()
        calling.result(PATIENCE)
    assert set(answers) == {200}
    assert living(pair, **{"while": "paused"}) == {made}
    assert {status(server, made) for server in (one, two)} == {"Running"}
    eventually("agreement", lambda: living(pair) == sandboxes(pair))


# A server on another machine


@pytest.fixture
def far(pair: Replicas, redis: Server) -> Iterator[Platform]:
    """A server with a home of its own, which does not see the sockets of the others' sandboxes."""
    hidden = pair.home / "run"
    hiding = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none "{hidden}" && exec "$@"', "sh"]
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    if subprocess.run([*hiding, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces can be made by root only")
    with platform("--store", redis.url, "--blobs", f"file:{pair.home / 'platform' / 'blobs'}", prefix=hiding) as found:
        yield found


def test_an_instance_on_another_machine(pair: Replicas, far: Platform) -> None:
    """Calls go through a server of that machine, and so does what only its engine knows."""
    near, _ = pair.servers
    token = {"token": near.ask("POST", "/token", {"owner": "ada", "scopes": ["read", "run"]}).data["token"]}
    made = near.create("desk", **token)
    id = made["id"]
    path = f"/env-instance/{id}"
    assert far.ask("GET", path, **token).data["status"] == "Running"
    for credential in (token, {"token": made["owner_token"]}, {"token": made["agent_token"]}):
        assert far.call(id, "POST", "/tools/put", {"thing": "pen"}, **credential).status == 200
    assert far.call(id, "POST", "/exec", {"command": "id"}, token=made["agent_token"]).status == 403
    assert far.ask("POST", f"{path}/exec", {"command": "echo hey"}, **token).data["stdout"] == "hey\n"
    assert far.ask("PUT", f"{path}/files?path=a", b"x", **token).status == 200
    assert far.ask("GET", f"{path}/files?path=a", **token).body == b"x"
    assert far.ask("GET", f"{path}/history?last=1", **token).data[0]["kind"] == "exec"
    logs = eventually("a line", lambda: far.ask("GET", f"{path}/logs", **token).body)
    assert logs.startswith(b"put pen\n")
    assert far.ask("POST", f"{path}/extend", {"ttl": "2h"}, **token).status == 200
    service = {"envName": "desk", "replicas": 1, "service_name": "shared"}
    shared = near.ask("POST", "/env-service", service, **token, headers={"Prefer": "wait=60"}).data
    replica = shared["members"][0]["id"]
    assert far.ask("GET", f"/env-service/{shared['id']}", **token).data["available_replicas"] == 1
    assert far.call(replica, "POST", "/tools/put", {"thing": "ink"}, **token).status == 200
    logs = eventually("its line", lambda: far.ask("GET", f"/env-service/{shared['id']}/logs", **token).body)
    assert logs.startswith(f"{replica} | put ink\n".encode())
    assert far.ask("DELETE", f"/env-service/{shared['id']}", **token).status == 200
    back = far.create("desk", **token)["id"]
    assert pair.call(back, "POST", "/tools/look", {}, **token).json["data"] == []
    for server in pair.servers:
        server.kill()
    for reply in (far.ask("GET", f"{path}/logs", **token), far.call(id, "POST", "/tools/look", {}, **token)):
        assert reply.status in (502, 503), reply
    (name,) = {record["server"] for record in [json.loads(_record(far, id))]}
    assert name in far.ask("GET", f"{path}/logs", **token).json["message"]
    pair.start()
    assert far.ask("DELETE", path, **token).status == 200
    eventually("its end", lambda: id not in sandboxes(pair))
    assert pair.ask("DELETE", f"/env-instance/{back}", **token).status == 200
    eventually("its end", lambda: back not in sandboxes(far))


def _record(served: Platform, id: str) -> bytes:
    """What is written down of an instance."""
    from aenv.store import open_store

    async def read() -> bytes:
        async with await open_store(served._options[1]) as store:
            found = await store.get("instance", id)
            assert found is not None
            return found.value

    return asyncio.run(read())
