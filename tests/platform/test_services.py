"""Services on the process engine: the commands and the comparison of seed 002, row by row, and what may go wrong."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from aenv import Environment, http
from aenv.client.hub import HubClient
from aenv.engines.process import powers
from aenv.errors import AEnvError, Invalid, NotFound, SandboxLost, StartFailed
from aenv.project import read
from aenv.project.archive import pack
from aenv.wire import EnvRequest
from tests.platform.support import PATIENCE, Platform, Reply, ask, eventually, new_home, platform
from tests.store.servers import redis_server

pytestmark = [
    pytest.mark.xdist_group("platform-services"),
    pytest.mark.skipif(sys.platform != "linux", reason="sandboxes of the process engine are Linux processes"),
]

MODULE = '''
"""A shop: says who serves, keeps a book where it is told to, and breaks when it is told to."""

import os
import signal
import time
from pathlib import Path

from aenv import Context, register_setup, register_tool

sold: list[str] = []


@register_setup
def open_the_doors() -> None:
    if EDITION == "2.0.0" and os.environ.get("SIGN"):
        raise RuntimeError("the shop is on fire")
    print(f"open, with {os.environ.get('SIGN', 'no sign')}", flush=True)


@register_tool
def who(ctx: Context) -> dict[str, object]:
    """Who serves."""
    return {"id": ctx.instance_id, "sign": os.environ.get("SIGN"), "edition": EDITION}


@register_tool
def sell(thing: str) -> int:
    """Sell something; how much this one has sold."""
    sold.append(thing)
    return len(sold)


@register_tool
def write(text: str) -> None:
    """Write into the book."""
    with open("/home/admin/data/book", "a") as book:
        book.write(text + "\\n")


@register_tool
def read() -> str:
    """Read the book."""
    book = Path("/home/admin/data/book")
    return book.read_text() if book.exists() else ""


@register_tool
def nap(seconds: float) -> str:
    """Be slow."""
    time.sleep(seconds)
    return "awake"


@register_tool
def die() -> None:
    """End as a crash ends."""
    os.kill(os.getpid(), signal.SIGKILL)
'''
NO_VOLUMES = powers.probe().no_volumes if sys.platform == "linux" else "there are no sandboxes"
STORAGE = {"enableStorage": True, "storageSize": "1Mi", "storageName": "book"}
SHOP, NEXT, BROKEN, STORED = "shop@1.0.0", "shop@1.1.0", "shop@2.0.0", "bookshop@1.0.0"


def _project(folder: Path, name: str, version: str, **deploy: Any) -> Path:
    root = folder / f"{name}-{version}" / name
    (root / "src").mkdir(parents=True)
    (root / "src" / "custom_env.py").write_text(f"EDITION = {version!r}\n{MODULE}")
    config = {"name": name, "version": version, "deployConfig": {"preload": True, **deploy}}
    (root / "config.json").write_text(json.dumps(config))
    return root


async def _push(found: Platform, root: Path) -> None:
    project = read(root)
    hub = HubClient(found.control, found.token)
    deploy = project.config["deployConfig"]
    await hub.create(EnvRequest(name=project.name, version=project.version, deploy_config=deploy))
    await hub.upload(project.name, project.version, pack(project))
    await http.close()


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform with what the tests serve. They leave each other's services alone."""
    folder = tmp_path_factory.mktemp("projects")

    with platform() as found:
        for version in ("1.0.0", "1.1.0", "2.0.0"):
            asyncio.run(_push(found, _project(folder, "shop", version)))
        asyncio.run(_push(found, _project(folder, "bookshop", "1.0.0", service=STORAGE)))
        yield found


@pytest.fixture
def served(ground: Platform) -> Platform:
    """The platform, which runs whatever an earlier test did to it."""
    if not ground.alive:
        ground.start()
    return ground


def make(served: Platform, env: str = SHOP, **fields: Any) -> dict[str, Any]:
    """A service that runs."""
    reply = served.ask("POST", "/env-service", {"envName": env, **fields}, headers={"Prefer": f"wait={PATIENCE:g}"})
    found: dict[str, Any] = reply.data
    assert found["status"] == "Running", found
    return found


def put(served: Platform, id: str, *, wait: bool = True, **fields: Any) -> dict[str, Any]:
    headers = {"Prefer": f"wait={PATIENCE:g}"} if wait else {}
    found: dict[str, Any] = served.ask("PUT", f"/env-service/{id}", fields, headers=headers).data
    return found


def get(served: Platform, id: str) -> dict[str, Any]:
    found: dict[str, Any] = served.ask("GET", f"/env-service/{id}").data
    return found


def tell(served: Platform, id: str, tool: str, **arguments: Any) -> Reply:
    """Call a tool of a service."""
    return ask(f"{served.data}/env-service/{id}", "POST", f"/tools/{tool}", arguments, token=served.token)


def call(served: Platform, id: str, tool: str, **arguments: Any) -> Any:
    return tell(served, id, tool, **arguments).data


def ready(found: dict[str, Any]) -> list[str]:
    return sorted(member["id"] for member in found["members"] if member["ready"])


def once(served: Platform, id: str, what: str, holds: Any) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        found = get(served, id)
        return found if holds(found) else None

    found: dict[str, Any] = eventually(what, look)
    return found


# The commands of seed 002


def test_the_commands(served: Platform) -> None:
    """As the seed writes them, but for the names."""
    made = json.loads(served.aenv("service", "create", SHOP, "--replicas", "3", "-e", "SIGN=old", "-o", "json").stdout)
    id = made["id"]
    assert (made["status"], made["replicas"], made["available_replicas"]) == ("Running", 3, 3)
    assert made["mcp"].startswith(f"{served.data}/env-service/{id}/mcp?token=")
    able = [] if not NO_VOLUMES else ["--no-wait"]
    stored = served.aenv("service", "create", STORED, "--enable-storage", "-s", "keeper", *able)
    assert "keeper-" in stored.stdout
    assert "book (1Mi) at /home/admin/data" in stored.stdout
    assert "made keeper-" in stored.stderr
    listed = served.aenv("service", "list").stdout
    assert id in listed
    assert "3/3" in listed
    page = json.loads(served.aenv("service", "list", "--name", "shop", "-o", "json").stdout)
    assert id in [one["id"] for one in page["items"]]
    assert made["owner_token"] not in json.dumps(page)
    scaled = json.loads(served.aenv("service", "update", id, "--replicas", "5", "-o", "json").stdout)
    assert scaled["available_replicas"] == 5
    assert set(ready(made)) < set(ready(scaled))
    updated = served.aenv("service", "update", id, "-r", "1", "--image", NEXT, "--env", "SIGN=new")
    assert NEXT in updated.stdout
    assert call(served, id, "who") | {"id": ""} == {"id": "", "sign": "new", "edition": "1.1.0"}
    assert "yes" in served.aenv("service", "get", id).stdout
    lines = served.aenv("service", "logs", id, "--tail", "5").stdout
    assert f"{call(served, id, 'who')['id']} | open, with new" in lines
    refused = served.aenv("service", "update", id, "--image", "registry.example.org/shop:1", check=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "the process engine runs packages of the hub, no images" in refused.stderr
    [keeper] = [one["id"] for one in served.ask("GET", "/env-service/bookshop@1.0.0/list").data]
    ended = json.loads(served.aenv("service", "delete", id, keeper, "--yes", "-o", "json").stdout)
    assert ended == {"deleted": [id, keeper]}
    assert not {one["id"] for one in served.ask("GET", "/env-service/list").data} & {id, keeper}
    assert {one["id"] for one in served.ask("GET", "/env-service/list?ended=true").data} >= {id, keeper}


# The comparison matrix of seed 002


def test_lifetime(served: Platform) -> None:
    """An instance is temporary; a service is there until it is deleted, also when the server was not."""
    service = make(served)
    instance = served.create(SHOP, ttl="1s")
    assert "expires_at" in instance
    assert "expires_at" not in service
    one = f"/env-instance/{instance['id']}"
    eventually("the end of the instance", lambda: served.ask("GET", one).data["status"] == "Terminated")
    served.stop()
    served.start()
    assert ready(get(served, service["id"])) == ready(service)
    assert call(served, service["id"], "who")["edition"] == "1.0.0"


def test_replicas(served: Platform) -> None:
    """An instance is one; a service has several, and calls find all of them."""
    service = make(served, replicas=3, port=9090)
    assert (len(ready(service)), service["port"]) == (3, 9090)
    met = {call(served, service["id"], "who")["id"] for _ in range(12)}
    assert sorted(met) == ready(service)
    assert served.ask("POST", "/env-service", {"envName": SHOP, "replicas": 101}).status == 422


@pytest.mark.skipif(bool(NO_VOLUMES), reason=NO_VOLUMES)
def test_storage(served: Platform) -> None:
    """What a service stores survives restart, update and deletion; an instance stores nothing."""
    service = make(served, STORED)
    id = service["id"]
    call(served, id, "write", text="one")
    tell(served, id, "die")
    again = once(served, id, "another replica", lambda found: ready(found) and ready(found) != ready(service))
    assert call(served, id, "read") == "one\n"
    call(served, id, "write", text="two")
    updated = put(served, id, environment_variables={"SIGN": "x"})
    assert ready(updated) != ready(again)
    assert call(served, id, "read") == "one\ntwo\n"
    assert served.ask("PUT", f"/env-service/{id}", {"replicas": 2}).status == 422
    served.ask("DELETE", f"/env-service/{id}").data  # noqa: B018
    assert served.ask("POST", "/env-service", {"envName": STORED, "storage_size": "2Mi"}).status == 409
    second = make(served, STORED)
    assert call(served, second["id"], "read") == "one\ntwo\n"
    served.ask("DELETE", f"/env-service/{second['id']}?deleteStorage=true").data  # noqa: B018
    third = make(served, STORED)
    assert call(served, third["id"], "read") == ""
    instance = served.create(STORED)
    assert served.call(instance["id"], "POST", "/tools/read", {}).data == ""
    served.ask("DELETE", f"/env-service/{third['id']}?deleteStorage=true").data  # noqa: B018


def test_service_url(served: Platform) -> None:
    """A service's URL is the same whoever serves; an instance's is that of one sandbox."""
    service = make(served)
    url, agent = service["service_url"], service["agent_token"]
    assert url == f"{served.data}/env-service/{service['id']}"
    first = ask(url, "POST", "/tools/who", {}, token=agent).data["id"]
    updated = put(served, service["id"], version="1.1.0")
    assert (updated["service_url"], updated["agent_token"]) == (url, agent)
    assert ask(url, "POST", "/tools/who", {}, token=agent).data["id"] not in ("", first)
    assert ask(url, "POST", "/task/reward", {}, token=agent).status in (401, 403)
    instance = served.create(SHOP)
    assert instance["url"].endswith(f"/env-instance/{instance['id']}")


def test_scaling(served: Platform) -> None:
    """A service grows and shrinks, and those that stay are not touched; an instance cannot be scaled."""
    service = make(served)
    id = service["id"]
    assert call(served, id, "sell", thing="a") == 1
    more = put(served, id, replicas=3)
    assert set(ready(service)) < set(ready(more))
    put(served, id, replicas=1)
    less = once(served, id, "one to be left", lambda found: len(ready(found)) == 1)
    assert ready(less) == ready(service)
    assert call(served, id, "sell", thing="b") == 2
    put(served, id, replicas=0)
    once(served, id, "nobody to be left", lambda found: not ready(found))
    refused = tell(served, id, "who")
    assert refused.status == 503
    assert "scaled to 0 replicas" in refused.json["error"]
    assert put(served, id, replicas=1)["available_replicas"] == 1
    instance = served.create(SHOP)
    assert served.ask("PUT", f"/env-instance/{instance['id']}", {"replicas": 2}).status == 405


async def test_use_case(served: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance is its client's; a service is used by many, and none of them ends it."""
    _user(served, monkeypatch)
    service = make(served, replicas=2)
    async with Environment(SHOP) as mine:
        id = mine.instance_id
    assert served.ask("GET", f"/env-instance/{id}").data["status"] == "Terminated"
    for name in ("", "shop", SHOP, "shop@^1"):
        async with Environment(name, service_id=service["id"]) as env:
            assert env.instance_id == service["id"]
            assert (await env.call_tool("who", {})).structured["edition"] == "1.0.0"
            assert (await env.list_tools())[0]["name"].endswith("/who")
            assert "token=" in await env.agent_url()
            sold = await asyncio.gather(*(env.call_tool("sell", {"thing": "x"}) for _ in range(20)))
            assert not any(result.is_error for result in sold)
    assert ready(get(served, service["id"])) == ready(service)
    with pytest.raises(Invalid, match="is of shop@1.0.0, not of desk"):
        await Environment("desk", service_id=service["id"]).initialize()
    with pytest.raises(NotFound, match="there is no service"):
        await Environment(service_id="nobody").initialize()
    lines = [line async for line in Environment(service_id=service["id"]).logs(tail=1)]
    assert len(lines) == 2
    with pytest.raises(AEnvError, match="lives until it is deleted"):
        await Environment(service_id=service["id"]).extend("1h")


def test_auto_cleanup(served: Platform) -> None:
    """An instance ends with its TTL; a service only by hand, and then with nothing left but its storage."""
    service = make(served)
    instance = served.create(SHOP, ttl="1s")
    eventually(
        "the end of the instance",
        lambda: served.ask("GET", f"/env-instance/{instance['id']}").data["status"] == "Terminated",
    )
    [replica] = ready(service)
    lives = served.ask("GET", f"/env-instance/{replica}").data
    assert lives["status"] == "Running"
    socket = Path(lives["socket"].removeprefix("unix:"))
    assert socket.exists()
    assert served.ask("DELETE", f"/env-service/{service['id']}").data is True
    assert served.ask("DELETE", f"/env-service/{service['id']}").data is True
    assert served.ask("GET", f"/env-instance/{replica}").data["status"] == "Terminated"
    ended = get(served, service["id"])
    assert (ended["status"], ended["reason"], ended["members"]) == ("Terminated", "it was deleted", [])
    assert not socket.exists()
    assert tell(served, service["id"], "who").status == 404


def test_resource_isolation(served: Platform) -> None:
    """Each replica is a sandbox of its own: what one holds or breaks is not the others'."""
    service = make(served, replicas=2, memory_limit="256Mi", cpu_limit="1")
    id = service["id"]
    assert service["resources"] == {"memory": "256Mi", "cpu": "1"}
    sold = [call(served, id, "sell", thing="a") for _ in range(4)]
    assert sorted(sold) == [1, 1, 2, 2]
    broken = tell(served, id, "die")
    assert broken.status == 502
    again = once(served, id, "two to serve", lambda found: len(ready(found)) == 2 and ready(found) != ready(service))
    assert len(set(ready(again)) & set(ready(service))) == 1
    assert sorted(member["restarts"] for member in again["members"]) == [0, 1]


def test_cost_model(served: Platform) -> None:
    """An instance costs until it ends; a service runs on, whether anybody calls it or not."""
    service = make(served, replicas=2, labels={"bill": "me"})
    instance = served.create(SHOP, labels={"bill": "me"})
    running = "/env-instance/list?status=Running&label=bill=me"
    assert [one["id"] for one in served.ask("GET", running).data] == [instance["id"]]
    served.ask("DELETE", f"/env-instance/{instance['id']}").data  # noqa: B018
    assert served.ask("GET", running).data == []
    for replica in ready(service):
        assert served.ask("GET", f"/env-instance/{replica}").data["status"] == "Running"


# Faults


def test_a_replica_killed_under_traffic(served: Platform) -> None:
    """Only the call that was in the dead one may fail; nothing that was not sent does."""
    service = make(served, replicas=2)
    with Traffic(served, service["id"]) as traffic:
        assert tell(served, service["id"], "die").status == 502
        once(
            served,
            service["id"],
            "another replica",
            lambda found: len(ready(found)) == 2 and ready(found) != ready(service),
        )
        traffic.more(20)
    assert all(status == 502 for status in traffic.failed), traffic.failed
    assert len(traffic.failed) <= traffic.THREADS


def test_an_update_under_traffic(served: Platform) -> None:
    service = make(served, replicas=2)
    id = service["id"]
    with Traffic(served, id) as traffic:
        slow = threading.Thread(target=traffic.one, args=("nap",), kwargs={"seconds": 4.0})
        slow.start()
        updated = put(served, id, version="1.1.0")
        assert updated["env"]["id"] == NEXT
        traffic.more(10)
        slow.join(PATIENCE)
    assert traffic.failed == []


def test_an_update_that_never_becomes_ready(served: Platform) -> None:
    service = make(served, replicas=2, environment_variables={"SIGN": "open"})
    id = service["id"]
    with Traffic(served, id) as traffic:
        assert put(served, id, wait=False, version="2.0.0")["status"] == "Updating"
        back = once(
            served, id, "the way back", lambda found: found["status"] == "Running" and found["env"]["id"] == SHOP
        )
    assert traffic.failed == []
    assert "the update to shop@2.0.0 was rolled back" in back["reason"]
    assert "the shop is on fire" in back["reason"]
    assert ready(back) == ready(service)
    told = served.aenv("service", "update", id, "--version", "2.0.0", check=False)
    assert told.returncode == 1
    assert f"{id} is not as it was asked to be: the update to shop@2.0.0 was rolled back" in told.stderr


def test_two_operators_at_once(served: Platform) -> None:
    service = make(served)
    id = service["id"]
    replies: list[Reply] = []

    def operate(who: str) -> None:
        body = {"environment_variables": {"SIGN": who}, "generation": service["generation"]}
        replies.append(served.ask("PUT", f"/env-service/{id}", body))

    threads = [threading.Thread(target=operate, args=(who,)) for who in ("ada", "bob")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(reply.status for reply in replies) == [200, 409]
    [done] = [reply.data for reply in replies if reply.status == 200]
    found = once(served, id, "the update", lambda found: found["status"] == "Running")
    assert found["environment_variables"] == done["environment_variables"]
    assert call(served, id, "who")["sign"] == done["environment_variables"]["SIGN"]


def test_a_service_deleted_under_traffic(served: Platform) -> None:
    """Calls end, or fail with a reason that a program understands; none hangs."""
    service = make(served, replicas=2)
    with Traffic(served, service["id"]) as traffic:
        assert served.ask("DELETE", f"/env-service/{service['id']}").data is True
        traffic.until_failed()
    assert set(traffic.failed) <= {404, 502, 503}, traffic.failed
    assert traffic.codes <= {"not_found", "network", "sandbox_lost"}, traffic.codes


def test_the_server_killed_in_the_middle_of_an_update(served: Platform) -> None:
    service = make(served, replicas=2)
    id = service["id"]
    put(served, id, wait=False, version="1.1.0")
    once(served, id, "a new one", lambda found: any(one["env"] == NEXT and one["ready"] for one in found["members"]))
    served.kill()
    served.start()
    half = get(served, id)
    done = once(served, id, "the rest", lambda found: found["status"] == "Running")
    serving = [one for one in done["members"] if one["ready"]]
    assert (done["env"]["id"], {one["env"] for one in serving}) == (NEXT, {NEXT})
    assert [one["restarts"] for one in serving] == [0, 0]
    lived = {one["id"] for one in half["members"] if one["env"] == NEXT and one["ready"]}
    assert lived <= set(ready(done))


def test_another_server_goes_on_with_an_update(tmp_path: Path) -> None:
    """Two on one Redis: a service that one makes, the other carries calls to, changes, and looks after in the end."""
    with ExitStack() as stack:
        redis, home = stack.enter_context(redis_server(tmp_path)), stack.enter_context(new_home())
        one, two = (stack.enter_context(platform("--store", redis.url, home=home)) for _ in range(2))
        for version in ("1.0.0", "1.1.0"):
            asyncio.run(_push(one, _project(tmp_path, "shop", version)))
        service = make(one, replicas=2)
        id = service["id"]
        assert {call(two, id, "who")["id"] for _ in range(8)} == set(ready(service))
        with Traffic(two, id) as traffic:
            put(two, id, wait=False, version="1.1.0")
            once(
                two, id, "a new one", lambda found: any(one["env"] == NEXT and one["ready"] for one in found["members"])
            )
            one.kill()
            done = once(two, id, "the rest", lambda found: found["status"] == "Running")
        assert traffic.failed == []
        assert (done["env"]["id"], done["available_replicas"]) == (NEXT, 2)
        assert {one["env"] for one in done["members"] if one["ready"]} == {NEXT}


async def test_what_takes_no_calls_says_why(served: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    _user(served, monkeypatch)
    wanted = {"envName": BROKEN, "environment_variables": {"SIGN": "open"}}
    reply = served.ask("POST", "/env-service", wanted, headers={"Prefer": f"wait={PATIENCE:g}"})
    broken = reply.data
    assert broken["status"] == "Failed"
    assert "the shop is on fire" in broken["reason"]
    with pytest.raises(StartFailed, match="the shop is on fire"):
        await Environment(service_id=broken["id"]).initialize()
    assert served.aenv("service", "get", broken["id"]).returncode == 0
    served.ask("DELETE", f"/env-service/{broken['id']}").data  # noqa: B018
    with pytest.raises(SandboxLost, match="is Terminated: it was deleted"):
        await Environment(service_id=broken["id"]).initialize()


async def test_without_a_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An embedded user has no services, and is told where they are."""
    for name in ("AENV_SYSTEM_URL", "AENV_HUB_URL", "AENV_API_KEY", "DUMMY_INSTANCE_IP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AENV_HOME", str(tmp_path))
    monkeypatch.setattr("aenv.control.HERE", "http://127.0.0.1:9")
    monkeypatch.setattr("aenv.control.RESTART", 0.0)
    with pytest.raises(AEnvError, match="the platform at http://127.0.0.1:9 cannot be reached") as caught:
        await Environment(service_id="some", max_retries=0).initialize()
    assert "aenv serve" in (caught.value.hint or "")


def _user(served: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is one of the platform's user."""
    for name in ("AENV_HUB_URL", "AENV_API_KEY", "DUMMY_INSTANCE_IP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AENV_HOME", str(served.home))
    monkeypatch.setenv("AENV_SYSTEM_URL", served.control)


class Traffic:
    """Calls of a service, without a pause, for the length of a block."""

    THREADS = 3

    def __init__(self, served: Platform, id: str) -> None:
        self.failed: list[int] = []
        self.codes: set[str] = set()
        self._served, self._id = served, id
        self._done = 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(self.THREADS)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        self.more(3)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in self._threads), "a call hangs"

    def _run(self) -> None:
        while not self._stop.is_set():
            self.one("who")

    def one(self, tool: str, **arguments: Any) -> None:
        try:
            reply = tell(self._served, self._id, tool, **arguments)
        except OSError as exc:
            self.failed.append(0)
            self.codes.add(repr(exc))
            return
        self._done += 1
        if reply.status != 200:
            self.failed.append(reply.status)
            self.codes.add(reply.json["code"])
            time.sleep(0.02)

    def more(self, count: int) -> None:
        """Wait for so many more calls."""
        wanted = self._done + count
        eventually("more calls", lambda: self._done >= wanted)

    def until_failed(self) -> None:
        eventually("a call to fail", lambda: self.failed)
