"""Servers that are killed, stopped and started again, and a store that goes away: nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from aenv import http
from tests.platform.support import Platform, ask, eventually, platform, variant

pytestmark = pytest.mark.xdist_group("platform-restarts")

CALLER = """
import asyncio, sys
from aenv import Environment

async def main():
    async with Environment("desk") as env:
        print(env.instance_id, flush=True)
        sys.stdin.readline()
        print((await env.call_tool("put", {"thing": "pen"})).structured["result"], flush=True)
        await env.extend("1h")
        print(len(await env.history()), flush=True)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def desk(ground) -> str:
    return ground.platform.push()


def status(served: Platform, id: str) -> str:
    return str(served.ask("GET", f"/env-instance/{id}").data["status"])


def ask_socket(instance: dict[str, str], path: str, body: dict[str, str]) -> Any:
    """Ask a sandbox itself, and not through a server."""
    headers = f"Authorization: Bearer {instance['owner_token']}\r\nContent-Type: application/json\r\n".encode()
    sent = http.request("POST", instance["socket"], path, headers=headers, body=json.dumps(body).encode())
    return json.loads(asyncio.run(sent).body)["data"]


def test_a_server_that_is_killed_loses_nothing(served: Platform, desk: str, tmp_path: Path):
    served.push(variant(tmp_path, "chair"), release=False)
    token = served.ask("POST", "/token", {"owner": "ada", "scopes": ["read", "run"]}).data["token"]
    served.ask("PUT", "/secret/WORD", {"value": "kept-for-later"}).data  # noqa: B018
    mine = served.create("desk", token=token, labels={"kept": "1"}, ttl="1h")
    short = served.create("desk", ttl="1h")
    served.ask("POST", f"/env-instance/{short['id']}/extend", {"ttl": 6}).data  # noqa: B018
    leased = served.create("desk", lease=5)
    key = {"Idempotency-Key": "across-a-restart", "Prefer": "wait=60"}
    body = {"envName": "desk", "labels": {"keyed": "1"}}
    keyed = served.ask("POST", "/env-instance", body, headers=key).data
    assert served.call(mine["id"], "POST", "/tools/put", {"thing": "pen"}).json["data"] == 1
    with served.program(CALLER) as program:
        assert program.line()
        served.kill()
        # What was handed out goes on working without the server, for who can reach the sandbox itself.
        assert ask_socket(mine, "/tools/put", {"thing": "cup"}) == 2
        served.start()
        program.go_on()
        assert [program.line(), program.line()] == ["1", "1"]
        assert program.end() == 0
    found = served.ask("GET", "/env-instance/desk/list?label=kept%3D1", token=token).data
    assert [(row["id"], row["status"], row["boot"]) for row in found] == [(mine["id"], "Running", mine["boot"])]
    assert found[0]["owner_token"] == mine["owner_token"]
    assert served.call(mine["id"], "POST", "/tools/look", {}, token=token).json["data"] == ["pen", "cup"]
    assert served.call(mine["id"], "POST", "/tools/look", {}, token=mine["agent_token"]).json["data"] == ["pen", "cup"]
    assert served.ask("POST", "/env-instance", body, headers=key).data["id"] == keyed["id"]
    assert served.ask("GET", "/env/chair/1.2.0").data["status"] == 6
    assert served.ask("GET", "/secret").data[0]["name"] == "WORD"
    # Time went on, and goes on.
    eventually("its client to be missed", lambda: status(served, leased["id"]) == "Terminated")
    eventually("its time to be over", lambda: status(served, short["id"]) == "Terminated")
    assert served.ask("DELETE", f"/env-instance/{mine['id']}", token=token).status == 200
    assert served.call(mine["id"], "POST", "/tools/look", {}, token=token).status == 502


def test_what_was_begun_is_finished_by_the_next_server(served: Platform, tmp_path: Path):
    slow = variant(tmp_path, "slow", preload=False)
    code = slow / "src" / "custom_env.py"
    code.write_text(
        code.read_text()
        + "\n\nfrom aenv import register_health\nimport time\n\nBORN = time.monotonic()\n\n\n"
        + "@register_health\ndef ready() -> bool:\n    return time.monotonic() - BORN > 2\n"
    )
    served.push(slow)
    made = [served.ask("POST", "/env-instance", {"envName": "slow", "ttl": "10m"}).data for _ in range(3)]
    served.kill()
    served.start()
    for each in made:
        eventually("it to run", lambda it=each["id"]: status(served, it) == "Running")
        assert served.call(each["id"], "POST", "/tools/look", {}).json["data"] == []
        assert served.ask("DELETE", f"/env-instance/{each['id']}").status == 200
    listed = served.ask("GET", "/env-instance/slow/list").json
    assert listed["total"] == 3


def test_a_call_in_flight_ends_before_the_server_does(served: Platform, desk: str):
    found = served.create("desk")
    answers = []

    def call() -> None:
        answers.append(served.call(found["id"], "POST", "/tools/wait_for", {"file": "now"}))

    calling = threading.Thread(target=call)
    calling.start()
    path = f"/env-instance/{found['id']}/files?path=now.awaited"
    eventually("the call to run", lambda: served.ask("GET", path).status == 200)
    served.signal(signal.SIGTERM)
    eventually("it to take no more", lambda: not answers_at(served.control))
    assert ask_socket(found, "/exec", {"command": "touch now"})["returncode"] == 0
    calling.join(60)
    assert answers[0].json["data"] == "there"
    assert served.wait() == 0
    served.start()
    assert status(served, found["id"]) == "Running"


def answers_at(url: str) -> bool:
    try:
        return ask(url, "GET", "/health").status == 200
    except OSError:
        return False


def test_a_store_that_is_away_for_a_while(ground, served: Platform, desk: str):
    if ground.redis is None:
        pytest.skip("SQLite is in the server itself")
    found = served.create("desk")
    pushed = served.ask("GET", "/env/desk/1.2.0").data
    ground.redis.kill()
    try:
        # What runs can be used, and what needs the store fails in the envelope, in bounded time.
        assert served.call(found["id"], "POST", "/tools/put", {"thing": "x"}, token=found["owner_token"]).status == 200
        away = served.ask("GET", "/env/desk/1.2.0")
        assert (away.status, away.json["error"], away.headers["retry-after"]) == (503, "network", "1")
    finally:
        ground.redis.start()
    assert eventually("the store", lambda: served.ask("GET", "/env/desk/1.2.0").status == 200)
    assert served.ask("GET", "/env/desk/1.2.0").data == pushed
    assert status(served, found["id"]) == "Running"
    assert served.call(found["id"], "POST", "/tools/look", {}).json["data"] == ["x"]
    assert served.create("desk")["status"] == "Running"


def test_a_server_beside_it_on_the_same_store_leaves_its_instances_alone(ground, served: Platform, desk: str):
    if ground.redis is None:
        pytest.skip("a file has one server")
    found = served.create("desk")
    with platform("--store", ground.redis.url) as beside:  # as it starts, it looks for what it has lost
        assert status(served, found["id"]) == "Running"
        assert served.call(found["id"], "POST", "/tools/look", {}).json["data"] == []
        assert beside.ask("GET", f"/env-instance/{found['id']}").data["status"] == "Running"
