"""From a project on disk to its instances and back, by the means that users have, on every kind of store, and on two
servers that share one, of which each test may lose one in its middle."""

from __future__ import annotations

import json
from urllib.parse import urlsplit

import pytest

from tests.platform.support import DESK, Platform, ask, eventually, variant

pytestmark = pytest.mark.parametrize(
    "ground",
    [
        pytest.param("sqlite", marks=pytest.mark.xdist_group("platform-end-to-end")),
        pytest.param("redis", marks=pytest.mark.xdist_group("platform-end-to-end")),
        pytest.param("replicas", marks=pytest.mark.xdist_group("platform-replicas")),
        pytest.param("losing", marks=pytest.mark.xdist_group("platform-replicas")),
    ],
    indirect=True,
)

SDK = """
import asyncio, json, sys
from aenv import Environment

async def main():
    async with Environment(
        "desk@^1.0", ttl="20m", environment_variables={"SIZE": "large"}, arguments=["--legs", "4"], seed=7,
        labels={"made-by": "sdk"},
    ) as env:
        found = {"tools": [tool["name"] for tool in await env.list_tools()]}
        found["about"] = (await env.call_tool("about")).structured
        found["put"] = (await env.call_tool("desk/put", {"thing": "pen"})).structured
        found["wrong"] = (await env.call_tool("put", {"thing": 3})).is_error
        found["reward"] = await env.call_reward({"bonus": 0.25})
        found["function"] = await env.call_function("count")
        found["functions"] = (await env.list_functions())["functions"][0]["name"]
        found["health"] = await env.check_health()
        found["reset"] = await env.reset(seed=11)
        found["exec"] = (await env.exec("echo $SIZE; exit 3")).returncode
        await env.upload("notes/a.txt", b"\\x00hey")
        found["download"] = list(await env.download("notes/a.txt"))
        while not found.get("logs"):
            found["logs"] = [line async for line in env.logs()]
        found["history"] = [row["kind"] for row in await env.history()]
        await env.extend("2h")
        await env.call_tool("serve", {"port": 9000})
        found["exposed"] = await env.expose(9000)
        found["agent"] = await env.agent_url()
        print(json.dumps(found), flush=True)
        sys.stdin.readline()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def desk(ground) -> str:
    """An environment that everybody may run."""
    return ground.platform.push()


@pytest.fixture(scope="module")
def others(ground) -> dict[str, str]:
    """Tokens of two other owners, and one that may only look."""
    made = {}
    for name, scopes in (("ada", ["read", "run", "push"]), ("bob", ["read", "run", "push"]), ("eve", ["read"])):
        body = {"name": "test", "owner": name, "scopes": scopes}
        made[name] = ground.platform.ask("POST", "/token", body).data["token"]
    return made


def test_a_project_is_pushed_released_found_and_pulled(served: Platform, desk: str, tmp_path):
    shown = json.loads(served.aenv("get", "desk", "-o", "json").stdout)
    assert (shown["version"], shown["status"], shown["tags"]) == ("1.2.0", 7, ["furniture", "test"])
    assert [tool["name"] for tool in shown["tools"]] == ["put", "look", "about", "wait_for", "serve"]
    assert (shown["rewards"][0]["name"], shown["functions"][0]["name"]) == ("tidy", "count")
    assert shown["readme"].startswith("# desk")
    assert served.ask("GET", "/env/?tags=furniture").json["total"] == 1
    assert [row["version"] for row in served.ask("GET", "/env/desk/versions").data] == ["1.2.0"]
    assert served.ask("POST", "/env/", {"name": "desk", "version": "1.2.0"}).status == 409
    served.aenv("pull", "desk@1.2.0")
    (pulled,) = served.home.glob("envs/**/src/custom_env.py")
    assert pulled.read_text() == (DESK / "src" / "custom_env.py").read_text()


def test_a_version_that_is_not_released_can_change_and_be_yanked_after(served: Platform, tmp_path):
    for version in ("0.1.0", "0.2.0"):
        served.push(variant(tmp_path, "stool", version))
    assert served.ask("GET", "/env/stool/latest").data["version"] == "0.2.0"
    assert served.ask("POST", "/env/stool/0.2.0/yank", {"reason": "it wobbles"}).data["yanked"] == "it wobbles"
    found = served.create("stool")
    assert found["env"]["version"] == "0.1.0"
    assert served.ask("DELETE", f"/env-instance/{found['id']}").status == 200


def test_private_environments_are_for_their_readers(served: Platform, others, tmp_path):
    served.aenv("push", str(variant(tmp_path, "safe")), AENV_API_KEY=others["ada"])
    served.aenv("access", "safe", "--private", AENV_API_KEY=others["ada"])
    for method, path in (
        ("GET", "/env/safe/latest"),
        ("GET", "/env/safe/1.2.0/package"),
        ("GET", "/env/safe/versions"),
    ):
        assert served.ask(method, path, token=others["bob"]).status == 404
        assert served.ask(method, path, token=others["ada"]).status == 200
    create = {"envName": "safe"}
    assert served.ask("POST", "/env-instance", create, token=others["bob"]).status == 404
    assert served.ask("PUT", "/env/safe/policy", {"readers": ["bob"]}, token=others["ada"]).status == 200
    found = served.create("safe", token=others["bob"])
    assert (found["owner"], found["env"]["owner"]) == ("bob", "ada")


def test_everything_that_an_environment_offers_works_by_the_sdk(served: Platform, desk: str):
    with served.program(SDK) as program:
        found = json.loads(program.line())
        assert found["tools"] == [f"desk@^1.0/{name}" for name in ("put", "look", "about", "wait_for", "serve")]
        about = found["about"]
        (row,) = served.ask("GET", "/env-instance/desk/list?label=made-by%3Dsdk").data
        assert (row["id"], row["status"], row["labels"]) == (about["id"], "Running", {"made-by": "sdk"})
        assert (about["colour"], about["size"], about["seed"]) == ("oak", "large", 7)
        assert about["arguments"] == ["--legs", "4"]
        assert (found["put"], found["wrong"], found["reward"]) == ({"result": 1}, True, 0.75)
        assert (found["function"], found["functions"]) == ({"things": 1}, "count")
        assert found["health"]["status"] == "success"
        assert (found["reset"], found["exec"], bytes(found["download"])) == ({"seed": 11}, 3, b"\x00hey")
        assert found["logs"] == ["put pen"]
        assert found["history"] == ["tool", "tool", "reward", "function", "reset", "exec"]
        # A port inside, by a URL that needs no token and is not the gateway's own origin.
        url = urlsplit(found["exposed"])
        assert url.hostname not in (None, "127.0.0.1", "localhost")
        assert ask(served.data, "GET", "/drawer?x=1", headers={"Host": url.netloc}).body == b"desk at /drawer?x=1"
        assert ask(served.data, "GET", "/", headers={"Host": url.netloc.replace("9000-", "9001-")}).status in (403, 404)
        # What is handed to an agent opens tools, and nothing else.
        agent = urlsplit(found["agent"])
        token = agent.query.partition("token=")[2]
        tools = served.call(row["id"], "GET", "/tools", token=token)
        assert tools.json["data"][0]["name"] == "put"
        for path in ("/task/reward", "/functions/count", "/reset", "/exec"):
            assert served.call(row["id"], "POST", path, {}, token=token).status == 403
        assert served.ask("GET", f"/env-instance/{row['id']}", token=token).status == 401
        program.go_on()
        assert program.end() == 0
    ended = served.ask("GET", f"/env-instance/{row['id']}").data
    assert ended["status"] == "Terminated"
    assert served.call(row["id"], "POST", "/tools/look", {}).status >= 400


def test_by_http_alone(served: Platform, desk: str):
    body = {"envName": "desk@1.2.0", "ttl": "10m", "count": 2, "labels": {"pair": "1"}}
    key = {"Idempotency-Key": "a-key-of-this-test", "Prefer": "wait=60"}
    first, second = served.ask("POST", "/env-instance", body, headers=key).data
    assert [each["id"] for each in served.ask("POST", "/env-instance", body, headers=key).data] == [
        first["id"],
        second["id"],
    ]
    assert served.ask("POST", "/env-instance", {**body, "ttl": "11m"}, headers=key).status == 422
    id = first["id"]
    assert served.call(id, "POST", "/tools/put", {"thing": "cup"}).json["data"] == 1
    assert served.call(second["id"], "POST", "/tools/look", {}).json["data"] == []
    by_header = ask(
        served.data, "POST", "/tools/look", {}, token=first["owner_token"], headers={"AEnvCore-EnvInstance-ID": id}
    )
    assert by_header.json["data"] == ["cup"]
    for wrong in (None, "nonsense", second["owner_token"]):
        assert served.call(id, "POST", "/tools/look", {}, token=wrong).status in (401, 403)
    assert (
        served.ask("POST", f"/env-instance/{id}/exec", {"command": "cat; pwd", "stdin": "in"}).data["stdout"]
        == "in/project\n"
    )
    assert served.ask("PUT", f"/env-instance/{id}/files?path=x%2Fy.bin", b"\x01\x02").status == 200
    assert served.ask("GET", f"/env-instance/{id}/files?path=x%2Fy.bin").body == b"\x01\x02"
    assert eventually("a line", lambda: served.ask("GET", f"/env-instance/{id}/logs?tail=1").body) == b"put cup\n"
    assert served.ask("GET", f"/env-instance/{id}/history?last=1").data[0]["kind"] == "exec"
    assert served.ask("POST", f"/env-instance/{id}/reset", {"seed": 2}).data == {"seed": 2}
    assert served.ask("POST", f"/env-instance/{id}/fork", {}).status == 501
    renewed = served.ask("POST", f"/env-instance/{id}/extend", {"ttl": "2h"}).data["expires_at"]
    assert renewed > first["expires_at"]
    for each in (first, second):
        assert served.ask("DELETE", f"/env-instance/{each['id']}").status == 200
        assert served.ask("DELETE", f"/env-instance/{each['id']}").status == 200
    running = served.ask("GET", "/env-instance/list?label=pair%3D1&status=Running").json
    assert (running["data"], running["total"]) == ([], 0)


def test_owners_do_not_see_each_other(served: Platform, desk: str, others):
    mine = served.create("desk", token=others["ada"])
    id = mine["id"]
    assert (mine["owner"], served.ask("GET", f"/env-instance/{id}", token=others["ada"]).status) == ("ada", 200)
    for who in ("bob", "eve"):
        token = others[who]
        assert id not in served.ask("GET", "/env-instance/list", token=token).body.decode()
        assert served.ask("GET", f"/env-instance/{id}", token=token).status == 404
        assert served.ask("GET", f"/env-instance/{id}/logs", token=token).status == 404
        assert served.ask("DELETE", f"/env-instance/{id}", token=token).status in (403, 404)
        assert served.ask("POST", f"/env-instance/{id}/exec", {"command": "id"}, token=token).status in (403, 404)
        assert served.call(id, "POST", "/tools/look", {}, token=token).status in (401, 403, 404)
    assert served.ask("POST", "/env-instance", {"envName": "desk"}, token=others["eve"]).status == 403
    assert served.ask("POST", "/env-instance", {"envName": "desk", "owner": "ada"}, token=others["bob"]).status == 403
    assert served.ask("GET", f"/env-instance/{id}").data["owner"] == "ada"  # an admin sees everybody's
    assert served.call(id, "POST", "/tools/look", {}).json["data"] == []
    assert served.ask("GET", f"/env-instance/{id}", token=None).status == 401


def test_secrets_reach_the_sandbox_and_nothing_else(served: Platform, others, tmp_path):
    served.push(variant(tmp_path, "vault", secrets=["SIZE"]))
    refused = served.ask("POST", "/env-instance", {"envName": "vault"}, token=others["ada"])
    assert refused.status == 422
    assert "SIZE" in refused.json["message"]
    assert served.ask("PUT", "/secret/SIZE", {"value": "s3cr3t-size"}, token=others["ada"]).status == 200
    id = served.create("vault", token=others["ada"])["id"]
    owner = {"token": others["ada"]}
    told = served.call(id, "POST", "/tools/about", {}, **owner)
    assert told.json["data"]["size"] == "***"
    ran = served.ask("POST", f"/env-instance/{id}/exec", {"command": "printf %s $SIZE | wc -c; echo $SIZE"}, **owner)
    assert ran.data["stdout"].split() == ["11", "***"]
    served.call(id, "POST", "/tools/put", {"thing": "s3cr3t-size"}, **owner)
    logs = eventually("the line", lambda: served.ask("GET", f"/env-instance/{id}/logs", **owner).body)
    assert logs == b"put ***\n"
    history = served.ask("GET", f"/env-instance/{id}/history", **owner).body
    listed = served.ask("GET", "/secret", **owner).body
    for body in (history, listed, served.text.encode()):
        assert b"s3cr3t-size" not in body


def test_time_that_is_over_ends_an_instance(served: Platform, desk: str):
    made = served.ask("POST", "/env-instance", {"envName": "desk", "ttl": 2}).data
    shortened = served.create("desk", ttl="1h")
    served.ask("POST", f"/env-instance/{shortened['id']}/extend", {"ttl": 1}).data  # noqa: B018
    left = served.create("desk", lease=1)
    kept = served.create("desk", lease=600)

    def over(id: str) -> dict[str, str]:
        found: dict[str, str] = served.ask("GET", f"/env-instance/{id}").data
        return found if found["status"] == "Terminated" else {}

    lost = ((made, "over", "expired"), (shortened, "over", "expired"), (left, "heard of", "sandbox_lost"))
    for each, why, code in lost:
        assert why in eventually("its end", lambda it=each["id"]: over(it))["reason"]
        gone = served.call(each["id"], "POST", "/tools/look", {})
        assert (gone.status, gone.json["code"]) == (502, code)
    assert served.call(kept["id"], "POST", "/tools/look", {}).status == 200
    assert served.ask("POST", f"/env-instance/{kept['id']}/renew").data["lease_expires_at"]


def test_what_fails_to_start_says_why(served: Platform, tmp_path):
    project = variant(tmp_path, "broken")
    (project / "src" / "custom_env.py").write_text("import nothing_like_this\n")
    done = served.aenv("push", str(project), check=False)
    assert done.returncode == 1
    assert "nothing_like_this" in done.stderr
    assert served.ask("POST", "/env-instance", {"envName": "broken"}).status in (404, 409)
