"""Environments that depend on others, on the engine of this process: started, reached and ended together."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest
import pytest_asyncio

from aenv import Environment, Invalid, NotFound, SandboxLost, StartFailed, http
from aenv.client.local import Embedded
from aenv.errors import CallTimeout, TooLarge, Unsupported
from aenv.project.depends import DEEPEST, seed_of
from tests.support import FIXTURES

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="sandboxes of the process engine are Linux processes"),
    pytest.mark.asyncio(loop_scope="module"),
]
COMPOSED = FIXTURES / "composed"

PROGRAM = """
import asyncio
from aenv import Environment

async def main():
    async with Environment("top") as env:
        print((await env.call_tool("add", {"number": 1})).text, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


TALKER = """
from aenv import Context, register_agent


@register_agent
async def talker(message: str, ctx: Context) -> str:
    return (await ctx.env("low").call_tool("add", {"number": int(message)})).text
"""


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is in the directory of the outermost one."""
    for name in ("AENV_SYSTEM_URL", "DUMMY_INSTANCE_IP", "AENV_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AENV_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(COMPOSED / "top")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provision() -> AsyncIterator[Embedded]:
    made = Embedded()
    yield made
    await made._engine().close()


@pytest_asyncio.fixture(loop_scope="module")
async def env(provision: Embedded) -> AsyncIterator[Environment]:
    async with Environment("top", seed=7, provision=provision) as started:
        yield started


async def alive(provision: Embedded) -> list[str]:
    return [found.env for found in await provision._engine().find() if not found.state.over]


async def test_three_levels_are_one(env: Environment) -> None:
    found = await env.call_function("look")
    low = found["mid"]["low"]
    assert len({found["id"], found["mid"]["id"], low["id"], found["side"]["id"]}) == 4
    assert found["mid"]["seed"] == seed_of(7, "mid")
    assert low["seed"] == seed_of(seed_of(7, "mid"), "low")
    assert sorted(found["tools"]) == ["add_twice", "die_below", "low_add", "low_die", "low_wait"]
    assert json.loads((await env.call_tool("add", {"number": 2})).text) == [4, 2]
    assert (await env.call_tool("add_blocking", {"number": 3})).text == "5"
    assert await env.call_reward() == 5.0
    assert (await env.call_tool("many", {"count": 200})).text == "205"


async def test_tools_of_others_are_among_its_own(env: Environment) -> None:
    names = [tool["name"].partition("/")[2] for tool in await env.list_tools()]
    assert {"add", "mid_add_twice", "mid_low_add", "mid_low_wait"} <= set(names)
    assert not any(name.startswith("side_") for name in names)
    assert (await env.call_tool("mid_low_add", {"number": 5})).text == "5"
    failed = await env.call_tool("mid_low_add", {"number": -1})
    assert (failed.is_error, failed.text) == (True, "ValueError: it only grows")
    wrong = await env.call_tool("mid_low_add", {"number": "x"})
    assert wrong.is_error
    assert "number" in wrong.text
    listed = next(tool for tool in await env.list_tools() if tool["name"] == "top/mid_low_add")
    assert listed["inputSchema"]["properties"]["number"]["description"] == "how much."
    with pytest.raises(SandboxLost, match=r"mid: low: the sandbox is gone: it was ended by SIGKILL"):
        await env.call_tool("mid_low_die")


async def test_a_reset_resets_all_with_seeds_that_follow(env: Environment) -> None:
    await env.call_tool("add", {"number": 2})
    await env.reset(seed=8)
    found = await env.call_function("look")
    assert (found["side"]["total"], found["mid"]["low"]["total"], found["side"]["resets"]) == (0, 0, 1)
    assert found["side"]["seed"] == seed_of(8, "side")
    assert found["mid"]["low"]["seed"] == seed_of(seed_of(8, "mid"), "low")


@pytest.mark.parametrize(
    ("tool", "words"),
    [("lose", "side: the"), ("lose_deep", "mid: low: the"), ("lose_in_a_group", "side: the")],
)
async def test_what_ends_in_a_call_is_no_tools_failure(env: Environment, tool: str, words: str) -> None:
    with pytest.raises(SandboxLost, match=f"{words} sandbox is gone: it was ended by SIGKILL"):
        await env.call_tool(tool)
    assert await env.check_health() == {"status": "success"}
    if tool == "lose":
        caught = await env.call_tool("lose", {"caught": True})
        assert caught.text.startswith("sandbox_lost side: the sandbox is gone")
        with pytest.raises(SandboxLost, match="side: the sandbox is gone"):
            await env.call_reward()
        with pytest.raises(SandboxLost, match="side: the sandbox is gone"):
            await env.reset()


async def test_what_others_tools_fail_at_a_model_may_read(env: Environment) -> None:
    failed = await env.call_tool("pass_on", {"number": -1})
    assert (failed.is_error, failed.text) == (True, "ValueError: it only grows")

    async def said(how: str) -> str:
        return (await env.call_tool("misuse", {"how": how})).text

    assert await said("alias") == "not_found there is no 'sid' in dependsOn"
    assert "there is no tool 'ad'" in await said("tool")
    assert (await said("blocking")).startswith("invalid env('side').sync.list_tools() would hold up everybody")
    assert await said("refused") == "author_failed side: function refuse() raised RuntimeError: no"
    assert await said("function") == "not_found side: there is no function 'look_up'"


async def test_time_that_is_over_and_calls_that_are_given_up(env: Environment) -> None:
    async def heard(count: int) -> None:
        while (await env.call_function("look"))["side"]["cancelled"] < count:
            await asyncio.sleep(0.01)

    with pytest.raises(CallTimeout, match=r"side: tool wait did not answer within 0.3 s"):
        await env.call_tool("wait", {"seconds": 60, "timeout": 0.3})
    await heard(1)
    calling = asyncio.create_task(env.call_tool("wait", {"seconds": 60}))
    await asyncio.sleep(0.2)
    calling.cancel()
    with suppress(asyncio.CancelledError):
        await calling
    await heard(2)


async def test_all_end_together(provision: Embedded) -> None:
    env = Environment("top", ttl=600, labels={"run": "x"}, owner="ann", provision=provision)
    async with env:
        engine = provision._engine()
        found = await engine.find({"run": "x"})
        assert sorted(one.env for one in found) == ["low@1.0.0", "mid@1.0.0", "side@1.2.0", "top@1.0.0"]
        assert {one.owner for one in found} == {"ann"}
        ends = [one.expires_at or 0.0 for one in found]
        assert max(ends) - min(ends) < 60
        await env.extend(3600)
        assert all((one.expires_at or 0.0) > max(ends) + 1000 for one in await engine.find({"run": "x"}))
        # There is no fork of one that shares others, and what it was asked is asked of another one instead.
        await env.call_tool("add", {"number": 1})
        async with await env.fork() as (sibling,):
            assert sibling.forked is not None
            assert sibling.forked.how == "journal"
            assert await sibling.call_reward() == 1.0
    assert await alive(provision) == []
    with pytest.raises(Unsupported, match="top@1.0.0 depends on others, and is not forked"):
        provision(msgspec.structs.replace(env.spec, forked_from="x"))


async def test_one_that_is_cancelled_while_it_starts_leaves_nothing(provision: Embedded) -> None:
    env = Environment("top", provision=provision)
    starting = asyncio.create_task(env.initialize())
    while not await alive(provision):
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert await alive(provision) == []


async def test_all_end_with_a_program_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        said = await asyncio.to_thread(program.stdout.readline)
        began = psutil.Process(program.pid).children(recursive=True)
        program.kill()
    assert said == "[2,1]\n"
    assert len(began) >= 4
    _, left = await asyncio.to_thread(psutil.wait_procs, began, 60)
    assert left == []


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The projects, to be changed."""
    shutil.copytree(COMPOSED, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path / "copy" / "top")
    return tmp_path / "copy"


def needs(root: Path, name: str, **wanted: object) -> None:
    (root / name).mkdir(exist_ok=True)
    config = {"name": name, "version": "1.0.0", "deployConfig": {"dependsOn": wanted}}
    (root / name / "config.json").write_text(json.dumps(config))


async def test_when_one_does_not_start_none_does(copy: Path, provision: Embedded) -> None:
    (copy / "low" / "src" / "leaf.py").write_text("raise RuntimeError('broken')\n")
    with pytest.raises(StartFailed, match=r"(?s)mid \(mid@1.0.0\), which it needs: low \(low@1.0.0\).*broken"):
        await Environment("top", provision=provision).initialize()
    assert await alive(provision) == []
    # Two tools of one name are one too many, and so is a call before anybody is there to carry it.
    shutil.copy(COMPOSED / "low" / "src" / "leaf.py", copy / "low" / "src" / "leaf.py")
    (copy / "top" / "src" / "more.py").write_text(
        "from aenv import register_tool\n\n@register_tool\ndef mid_low_add() -> None: ...\n"
    )
    with pytest.raises(StartFailed, match="there are two tools 'mid_low_add'") as caught:
        await Environment("top", provision=provision).initialize()
    assert caught.value.hint == "choose another prefix in dependsOn"
    (copy / "top" / "src" / "more.py").write_text(
        "from aenv import Context, register_setup\n\n"
        "@register_setup\nasync def early(ctx: Context) -> None:\n    await ctx.env('side').list_tools()\n"
    )
    with pytest.raises(StartFailed, match="side cannot be reached yet"):
        await Environment("top", provision=provision).initialize()
    assert await alive(provision) == []


async def test_compositions_that_cannot_be(copy: Path, provision: Embedded) -> None:
    async def start() -> None:
        await Environment("top", provision=provision).initialize()

    needs(copy, "low", top="top")
    with pytest.raises(Invalid, match=r"top@1.0.0 -> mid@1.0.0 -> low@1.0.0 -> top"):
        await start()
    needs(copy, "low", gone="sied")
    with pytest.raises(NotFound, match=r"low@1.0.0 needs gone: no environment 'sied' is known here"):
        await start()
    needs(copy, "low", side="side@^2")
    with pytest.raises(NotFound, match=r"no environment 'side@\^2' is known here; the one beside it holds side@1.2.0"):
        await start()
    needs(copy, "low", below="e0")
    for level in range(DEEPEST):
        needs(copy, f"e{level}", below=f"e{level + 1}")
    with pytest.raises(Invalid, match=f"a composition has at most {DEEPEST} levels: top@1.0.0 -> mid@1.0.0"):
        await start()
    needs(copy, "low", **{str(number): "pair" for number in range(32)})
    needs(copy, "pair", one="side")
    with pytest.raises(TooLarge, match=r"top@1.0.0 needs 68 instances with itself; 64 is the most"):
        await start()
    assert await alive(provision) == []


async def test_an_agent_that_is_talked_to_by_a2a_reaches_what_it_depends_on(copy: Path, provision: Embedded) -> None:
    needs(copy, "talker", low="low")
    (copy / "talker" / "src").mkdir()
    (copy / "talker" / "src" / "talker.py").write_text(TALKER)
    part = {"messageId": "1", "role": "ROLE_USER", "parts": [{"text": "3"}]}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": part}}).encode()
    os.chdir(copy / "talker")
    async with Environment("talker", provision=provision) as env:
        assert env.sandbox is not None
        headers = f"Authorization: Bearer {env.sandbox.token}\r\nContent-Type: application/json\r\nA2A-Version: 1.0\r\n"
        response = await http.request("POST", env.sandbox.url, "/a2a", headers=headers.encode(), body=body)
        assert json.loads(response.body)["result"]["task"]["artifacts"][0]["parts"] == [{"text": "3"}]
