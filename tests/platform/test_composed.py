"""Environments that depend on others, on a platform: made, charged, listed, reached and ended as one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aenv.project.depends import seed_of
from tests.platform.support import PATIENCE, Platform, eventually, platform
from tests.support import FIXTURES

pytestmark = pytest.mark.xdist_group("platform-composed")
COMPOSED = FIXTURES / "composed"
LIVING = "status=Pending&status=Creating&status=Running"

EPISODE = """
import asyncio, sys
from aenv import Environment, SandboxLost

async def main():
    async with Environment("top", seed=7, labels={"run": "episode"}) as env:
        found = await env.call_function("look")
        print(found["mid"]["low"]["seed"], flush=True)
        print((await env.call_tool("add", {"number": 2})).text, flush=True)
        calling = asyncio.create_task(env.call_tool("wait", {"seconds": 6}))
        print("calls", flush=True)
        sys.stdin.readline()
        print((await calling).text, flush=True)
        print((await env.call_tool("add", {"number": 1})).text, flush=True)
        print((await env.call_tool("mid_low_add", {"number": 1})).text, flush=True)
        try:
            await env.call_tool("lose")
        except SandboxLost as exc:
            print(exc, flush=True)

asyncio.run(main())
"""


BROKEN = """
from aenv import register_setup


@register_setup
def fail(ctx: Context) -> None:
    if ctx.seed is not None:
        raise OSError("no")
"""


@pytest.fixture(scope="module")
def served() -> Iterator[Platform]:
    with platform() as found:
        for name in ("low", "side", "mid", "top"):
            found.push(COMPOSED / name)
        yield found


def living(served: Platform, **labels: str) -> dict[str, dict[str, Any]]:
    """The instances that live, by the name of their environment."""
    wanted = "".join(f"&label={name}%3D{value}" for name, value in labels.items())
    found = served.ask("GET", f"/env-instance/*/list?{LIVING}{wanted}").data
    return {one["env"]["name"]: one for one in found}


def nothing_left(served: Platform) -> bool:
    return not served.ask("GET", f"/env-instance/*/list?{LIVING}").data


def test_one_create_is_one_composition(served: Platform) -> None:
    key = {"Idempotency-Key": "once", "Prefer": f"wait={PATIENCE:g}"}
    body = {"envName": "top", "ttl": "1h", "labels": {"run": "x"}, "seed": 7}
    made = served.ask("POST", "/env-instance", body, headers=key).data
    assert made["status"] == "Running", made
    found = living(served, run="x")
    assert sorted(found) == ["low", "mid", "side", "top"]
    assert found["top"]["needs"] == {"mid": found["mid"]["id"], "side": found["side"]["id"]}
    assert [found[name]["parent"] for name in ("top", "mid", "side", "low")] == [
        *("", made["id"], made["id"], found["mid"]["id"])
    ]
    assert {one["owner"] for one in found.values()} == {made["owner"]}
    assert len({one["expires_at"] for one in found.values()}) == 1
    assert "parts" in made["phases"]
    # Asked again, it is the same one; and what it is made of counts.
    assert served.ask("POST", "/env-instance", body, headers=key).data["id"] == made["id"]
    assert len(living(served)) == 4
    platforms = next(one for one in served.ask("GET", "/quota").data if one["subject"] == "platform")
    assert platforms["used"]["instances"] == 4
    shown = served.aenv("instance", "get", made["id"]).stdout
    assert f"mid: {found['mid']['id']}" in shown
    listed = served.aenv("instance", "list").stdout
    assert "PART OF" in listed
    assert f"side: {'side@~1.2'}" in served.aenv("get", "top").stdout
    # Calls, also of those below, end and longer lives are those of all.
    assert served.call(made["id"], "POST", "/tools/add", {"number": 2}).data == [4, 2]
    assert served.call(made["id"], "POST", "/tools/mid_low_add", {"number": 1}).json["success"]
    served.ask("POST", f"/env-instance/{made['id']}/extend", {"ttl": "2h"}).data  # noqa: B018
    longer = living(served)
    assert all(longer[name]["expires_at"] > found[name]["expires_at"] for name in found)
    assert served.ask("POST", f"/env-instance/{made['id']}/fork", {"count": 1}).status == 501
    assert served.ask("DELETE", f"/env-instance/{made['id']}").status == 200
    assert nothing_left(served)
    ended = served.ask("GET", f"/env-instance/{found['low']['id']}").data
    assert (ended["status"], ended["reason"]) == ("Terminated", f"{made['id']}, which needed it, was deleted")


def test_time_that_is_over_is_over_for_all(served: Platform) -> None:
    served.create("top", ttl="3s")
    eventually("the end of all", lambda: nothing_left(served))


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_server_that_comes_back_carries_calls_again(served: Platform, how: str) -> None:
    with served.program(EPISODE) as program:
        assert [program.line() for _ in range(3)] == [str(seed_of(seed_of(7, "mid"), "low")), "[4,2]", "calls"]
        getattr(served, how)()
        served.start()
        assert sorted(living(served, run="episode")) == ["low", "mid", "side", "top"]
        program.go_on()
        assert [program.line() for _ in range(3)] == ["waited", "[6,3]", "7"]
        assert "side: the sandbox is gone" in program.line()
        assert program.end() == 0
    eventually("the end of all", lambda: nothing_left(served))


def test_when_one_does_not_start_all_end(served: Platform, tmp_path: Path) -> None:
    shutil.copytree(COMPOSED / "side", tmp_path / "frail")
    config = {"name": "frail", "version": "1.0.0"}
    (tmp_path / "frail" / "config.json").write_text(json.dumps(config))
    code = tmp_path / "frail" / "src" / "leaf.py"
    code.write_text(f"{code.read_text()}\n\n{BROKEN}")
    whole = tmp_path / "whole"
    shutil.copytree(COMPOSED / "top", whole)
    wanted = {"mid": "mid", "side": "frail"}
    (whole / "config.json").write_text(
        json.dumps({"name": "whole", "version": "1.0.0", "deployConfig": {"dependsOn": wanted}})
    )
    served.push(tmp_path / "frail")
    served.push(whole)
    wait = {"Prefer": f"wait={PATIENCE:g}"}
    failed = served.ask("POST", "/env-instance", {"envName": "whole", "seed": 1}, headers=wait).data
    assert failed["status"] == "Failed"
    assert "side (frail@1.0.0), which it needs, did not start" in failed["reason"]
    eventually("the end of all", lambda: nothing_left(served))
