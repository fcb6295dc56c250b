"""``aenv serve`` itself: its parts apart, who is let in from where, what it says when it cannot start, and its end."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from aenv import http
from aenv.auth.callers import Caller
from aenv.auth.keys import platform_key
from aenv.auth.tokens import new_token
from aenv.engines.process import powers
from aenv.engines.process.engine import ProcessEngine
from aenv.errors import AEnvError, Conflict
from aenv.models import NAME, EnvRef
from aenv.runtime.server import bind
from aenv.serve import Options, _Platform, running
from aenv.serve.hubs import HubElsewhere
from aenv.store import open_store
from tests.platform.support import Platform, ask, eventually, new_home, platform, spawners, variant
from tests.store.servers import Server, redis_server

pytestmark = pytest.mark.xdist_group("platform-serve")


@pytest.fixture(scope="module")
def served():
    """A platform with the legacy data plane."""
    with platform("--legacy-data-plane") as found:
        found.push()
        yield found


def test_both_ports_say_that_they_are_well(served: Platform):
    for url in (served.control, served.data):
        reply = ask(url, "GET", "/health")
        assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
        assert reply.json["data"]["status"] in ("ok", "healthy")
    assert "AENV_SYSTEM_URL" in served.text
    assert served.token not in served.text


def test_names_that_are_not_its_own_are_refused(served: Platform):
    for url in (served.control, served.data):
        assert ask(url, "GET", "/health", headers={"Host": "evil.example.com"}).status == 403


def test_an_id_stands_in_for_a_credential_where_that_was_asked_for(served: Platform):
    found = served.create("desk")
    header = {"AEnvCore-EnvInstance-ID": found["id"], "AEnvCore-MCPProxy-URL": "http://192.0.2.1:1"}
    assert ask(served.data, "POST", "/task/reward", {}, headers=header).json["data"] == 1.0
    assert ask(served.data, "POST", "/task/reward", {}, token="nonsense", headers=header).status == 401
    assert ask(served.data, "POST", "/task/reward", {}).status in (400, 404, 422)


def test_ports_and_stores_that_are_taken(served: Platform):
    with new_home() as home:
        for ports, option in (((urlport(served.control), 0), "--port"), ((0, urlport(served.data)), "--data-port")):
            said = Platform(home, ports=ports).refused()
            assert f"cannot listen on 127.0.0.1:{max(ports)}" in said
            assert f"hint: choose another with {option}\n" in said
        said = Platform(home, "--store", f"sqlite:{served.home}/platform/platform.db").refused()
        assert f"belongs to process {served.pid}" in said
        assert "hint: stop it, or name another file" in said
    assert served.ask("GET", "/env/desk/1.2.0").status == 200


def urlport(url: str) -> int:
    return int(url.rpartition(":")[2])


@pytest.mark.parametrize(
    ("wrong", "wanted", "hint"),
    [
        ({"what": "ap"}, "there is no 'ap' to serve", "did you mean 'api'"),
        ({"what": "api"}, "needs a hub", "--hub-url"),
        ({"hub_url": "http://x"}, "only an API service", "aenv serve api"),
        ({"what": "api", "hub_url": "ftp://x"}, "ftp://x", "http"),
        ({"store": "mongo://x"}, "there is no store 'mongo'", "available"),
        ({"store": "s3cr3t"}, "does not say which store", "sqlite:PATH"),
        ({"store": "sqlite:/dev/null/x.db"}, "/dev/null/x.db", "another file"),
        ({"blobs": "ftp://x"}, "cannot be kept in 'ftp'", "file"),
        ({"blobs": "file:/dev/null/x"}, "/dev/null/x", ""),
        ({"engine": "proces"}, "there is no engine 'proces'", "did you mean 'process'?"),
        ({"engine": "json:dumps"}, "is not an engine", "Engine"),
        ({"host": "no-such-name.invalid"}, "cannot listen on no-such-name.invalid", "--port"),
        ({"name": "a b"}, "is not a server's name", "letters"),
        ({"host": ""}, "no address", "127.0.0.1"),
        ({"data_url": "data.example.org"}, "is not the URL of a data port", "https"),
        ({"what": "api", "project": Path("/dev/null/x")}, "/dev/null/x", ""),
        ({"host": "0.0.0.0", "legacy": 1}, "learns an instance's id", "twice"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_what_cannot_start_says_why_and_leaves_nothing(wrong, wanted, hint, monkeypatch):
    with new_home() as home:
        monkeypatch.setenv("AENV_HOME", str(home))
        with pytest.raises(AEnvError) as caught:
            async with running(Options(**{"port": 0, "data_port": 0, **wrong})):
                pass
        assert wanted in caught.value.message
        assert hint in (caught.value.hint or "")
        assert "s3cr3t" not in str(caught.value)
        assert spawners(home) == []


async def test_of_two_that_start_at_once_on_a_port_one_is_told(monkeypatch):
    with new_home() as home, socket.socket() as other:
        monkeypatch.setenv("AENV_HOME", str(home))
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))

        def slower(*where):
            bound = bind(*where)
            other.listen()
            return bound

        monkeypatch.setattr("aenv.serve.bind", slower)
        with pytest.raises(Conflict, match=f"cannot listen at http://127.0.0.1:{other.getsockname()[1]}"):
            async with running(Options(what="hub", port=other.getsockname()[1])):
                pass
        assert spawners(home) == []


def test_beyond_this_machine_there_are_real_tokens_and_strict_isolation(monkeypatch):
    found = powers.probe()
    if not (found.namespaces and found.cgroups and found.privileged):
        pytest.skip("strict isolation is not to be had here")
    with platform("--host", "0.0.0.0") as served:
        served.control = f"http://127.0.0.1:{urlport(served.control)}"
        first = served.told["first_token"]
        assert first
        assert served.told["token_file"] is None
        assert not (served.home / "token").exists()
        assert served.text.count(first) <= 1
        assert served.ask("GET", "/token", token=first).status == 200
        assert served.ask("GET", "/env/", token=None).status == 401
        monkeypatch.setenv("AENV_HOME", str(served.home))
        monkeypatch.delenv("AENV_ISOLATION", raising=False)
        assert asyncio.run(isolation()) == "strict"
        served.stop()
        served.start()
        served.control = f"http://127.0.0.1:{urlport(served.control)}"
        assert served.told["first_token"] is None
        assert served.ask("GET", "/token", token=first).status == 200


async def isolation() -> str:
    async with ProcessEngine(state="platform") as engine:
        return str((await engine.isolated())["isolation"])


# Parts


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory):
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


def test_hub_and_api_service_apart(redis: Server, tmp_path: Path):
    with platform("hub", "--store", redis.url) as hub:
        assert hub.data == ""
        options = ("api", "--store", redis.url, "--hub-url", hub.control)
        with platform(*options, home=hub.home) as api:
            made = {}
            for name in ("ada", "bob"):
                body = {"owner": name, "scopes": ["read", "run", "push"]}
                made[name] = api.ask("POST", "/token", body).data["token"]
            hub.aenv("push", str(variant(tmp_path, "shelf")), AENV_API_KEY=made["ada"])
            hub.ask("PUT", "/env/shelf/policy", {"public": False}, token=made["ada"]).data  # noqa: B018
            found = api.create("shelf", token=made["ada"])
            assert api.call(found["id"], "POST", "/tools/put", {"thing": "book"}, token=made["ada"]).json["data"] == 1
            refused = api.ask("POST", "/env-instance", {"envName": "shelf"}, token=made["bob"])
            assert (refused.status, refused.json["error"]) == (404, "not_found")
            assert api.ask("POST", "/env-instance", {"envName": "nothing"}, token=made["ada"]).status == 404
            assert api.ask("GET", "/env/shelf/latest", token=made["ada"]).status == 404  # it is no hub
            assert hub.ask("POST", "/env-instance", {"envName": "shelf"}, token=made["ada"]).status == 404


def test_the_key_of_api_services_reads_every_environment_and_does_no_more(tmp_path: Path):
    key = new_token()
    with platform("hub", AENV_HUB_KEY=key) as hub:
        hub.aenv("push", str(variant(tmp_path, "shelf")))
        hub.ask("PUT", "/env/shelf/policy", {"public": False}).data  # noqa: B018
        found, size = asyncio.run(fetched(HubElsewhere(hub.control, key), EnvRef("shelf")))
        assert (found, size > 0) == ("shelf@1.2.0", True)
        for method, path in (("DELETE", "/env/shelf/1.2.0"), ("POST", "/env/shelf/1.2.0/release"), ("GET", "/audit")):
            assert hub.ask(method, path, token=key).status == 403
        assert hub.ask("POST", "/token", {}, token=key).status == 403
        assert hub.ask("GET", "/env/shelf/1.2.0", token=new_token()).status == 401
        assert key not in hub.text


@pytest.mark.parametrize(
    ("what", "key"), [((), "of-another-shape"), ((), "aenv_" + 43 * "k"), (("hub",), "aenv_" + 43 * "k")]
)
def test_a_users_key_to_a_hub_elsewhere_opens_nothing_here(what: tuple[str, ...], key: str):
    with new_home() as home:
        (home / "config.json").write_text(json.dumps({"hub_key": key}))
        with platform(*what, home=home) as here:
            assert here.ask("GET", "/env/", token=key).status == 401


async def fetched(hub: HubElsewhere, ref: EnvRef) -> tuple[str, int]:
    """What an API service goes on with by itself, without the token of who asked."""
    nobody = Caller("nobody", frozenset())
    try:
        env = await hub.resolve(ref, "", nobody)
        return env.id, sum([len(piece) async for piece in await hub.package(env, "", nobody)])
    finally:
        await http.close()


def test_a_store_that_comes_later_is_waited_for(tmp_path: Path):
    with redis_server(tmp_path) as server:
        server.kill()
        with new_home() as home:
            late = Platform(home, "hub", "--store", server.url)
            starting = threading.Thread(target=late.start)
            starting.start()
            try:
                eventually("it to say so", lambda: "waiting for the store" in late.text or not starting.is_alive())
                server.start()
                starting.join(60)
                assert late.ask("GET", "/env/").status == 200
            finally:
                starting.join(60)
                late.end()


# The control plane of a project


def test_a_project_is_served_as_it_is_until_its_parent_ends(tmp_path: Path):
    project = variant(tmp_path, "bench")
    with platform("api", "--project", str(project), "--until-eof") as served:
        first = served.create("bench")
        assert served.call(first["id"], "POST", "/tools/put", {"thing": "pen"}).json["data"] == 1
        code = project / "src" / "custom_env.py"
        code.write_text(code.read_text().replace("drawer.append(thing)", "drawer.extend([thing, thing])"))
        second = served.create("bench")
        assert served.call(second["id"], "POST", "/tools/put", {"thing": "pen"}).json["data"] == 2
        refused = served.ask("POST", "/env-instance", {"envName": "desk"})
        assert (refused.status, "bench" in refused.json["hint"]) == (404, True)
        assert (
            served.run(
                "import asyncio\nfrom aenv import Environment\n"
                "async def main():\n"
                "    async with Environment('bench') as env:\n"
                "        print((await env.call_tool('look')).structured)\n"
                "asyncio.run(main())\n"
            ).strip()
            == "{'result': []}"
        )
        assert not (served.home / "platform").exists()
        assert served.hang_up() == 0
        eventually("the end of its sandboxes", lambda: not spawners(served.home))


# Its end


async def test_containers_are_found_again_by_those_of_the_same_store_only(tmp_path: Path):
    """Their daemon may be everybody's, and two stores have the same address to two machines."""
    names = set()
    for file in ("one.db", "two.db", "one.db"):
        url = f"sqlite:{tmp_path / file}"
        async with AsyncExitStack() as stack:
            store = await stack.enter_async_context(await open_store(url))
            key = await platform_key(store)
            platform = _Platform(Options(store=url, engine="docker"), stack)
            assert platform._state(key) == platform._state(key)
            names.add(platform._state(key))
            assert _Platform(Options(what="api", project=tmp_path, engine="docker"), stack)._state(key) == ""
    assert len(names) == 2
    assert all(NAME.fullmatch(name) and name.startswith("platform-") for name in names)


def test_a_signal_ends_it_in_good_order():
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup started these tests
        numbers.remove(signal.SIGHUP)
    with platform("hub") as served:
        for number in numbers:
            if not served.alive:
                served.start()
            with socket.create_connection(("127.0.0.1", urlport(served.control)), 10):
                served.signal(number)
                assert served.wait() == 0
        assert "Traceback" not in served.text


def test_a_second_signal_ends_it_at_once(served: Platform):
    found = served.create("desk")

    def call() -> None:
        with suppress(OSError):
            served.call(found["id"], "POST", "/tools/wait_for", {"file": "never"})

    calling = threading.Thread(target=call)
    calling.start()
    path = f"/env-instance/{found['id']}/files?path=never.awaited"
    eventually("the call to run", lambda: served.ask("GET", path).status == 200)
    served.signal(signal.SIGTERM)
    eventually("it to wait for the call", lambda: "ending" in served.text)
    served.signal(signal.SIGTERM)
    assert served.wait() == 1
    calling.join(60)
    served.start()
    assert served.ask("GET", f"/env-instance/{found['id']}").data["status"] == "Running"
