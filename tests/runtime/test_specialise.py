"""Warm sandboxes: what they answer while they wait, what they become when they are told, and that it is once."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import pytest_asyncio

from aenv import http, project
from aenv.engines.base import Engine, new_id
from aenv.engines.plain import PlainEngine
from aenv.engines.process.engine import ProcessEngine
from aenv.engines.specs import complete
from aenv.models import EnvRef, Sandbox, SandboxSpec, State
from aenv.runtime.tokens import agent_token, digest, new_owner_token
from aenv.runtime.warm import late

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(sys.platform != "linux", reason="the process engine needs Linux"),
]

IMPORTED = """
import os
import random
import sys

from aenv import Context, register_health, register_reward, register_setup, register_tool

seen = {}
AT_IMPORT = %(at_import)s


@register_setup
def prepare(ctx: Context) -> None:
    print("setting up for", os.environ.get("NAME"), flush=True)
    if "BROKEN" in os.environ:
        raise RuntimeError("broken by " + os.environ["BROKEN"])
    seen["setup"] = os.environ.get("NAME")


@register_health
def health() -> bool:
    seen["asked"] = seen.get("asked", 0) + 1
    return seen["asked"] > 2 and "SICK" not in os.environ


@register_tool
def about(ctx: Context) -> dict[str, object]:
    return {
        "id": ctx.instance_id,
        "variable": os.environ.get("NAME"),
        "told": ctx.environment_variables.get("NAME"),
        "project": os.environ.get("OF_THE_PROJECT"),
        "argv": sys.argv[1:],
        "arguments": list(ctx.arguments),
        "seed": ctx.seed,
        "setup": seen["setup"],
        "import": AT_IMPORT,
    }


@register_tool
def show(name: str) -> str | None:
    return os.environ.get(name)


@register_tool
def draw() -> float:
    return random.random()


@register_reward
def score() -> float:
    return 1.0
"""
# The second reads what is the instance's own, so its import is not shared. It runs a loop, too, as modules may. Of the
# third its author says that it may be imported before anything is known of the instance.
PROJECTS = {
    "shared": IMPORTED % {"at_import": "None"},
    "own": "import asyncio\n\nasyncio.run(asyncio.sleep(0))\n"
    + IMPORTED % {"at_import": '[os.environ.get("NAME"), sys.argv[1:]]'},
    "early": IMPORTED % {"at_import": "None"},
    "broken": "raise RuntimeError('broken on purpose')",
}
TOLD = {
    "environment_variables": {"NAME": "ada"},
    "arguments": ["--side", "a b"],
    "seed": 7,
    "startup_timeout": 60,
}


class Warmed(NamedTuple):
    engine: Engine
    sandbox: Sandbox
    token: str

    @property
    def id(self) -> str:
        return self.sandbox.id

    async def ask(self, method: str, path: str, body: Any = None, token: str | None = None) -> tuple[int, Any]:
        """The status and the answer that its owner gets, or whoever has that token."""
        token = self.token if token is None else token
        headers = b"Content-Type: application/json\r\n"
        headers += f"Authorization: Bearer {token}\r\n".encode() if token else b""
        data = b"" if body is None else json.dumps(body).encode()
        async with asyncio.timeout(60):
            answer = await http.request(method, self.sandbox.url, path, headers=headers, body=data, retries=0)
        return answer.status, msgspec.json.decode(answer.body)

    async def tool(self, name: str, /, **arguments: Any) -> Any:
        status, answer = await self.ask("POST", f"/tools/{name}", arguments)
        assert status == 200, answer
        return answer["data"]

    async def specialise(self, **told: Any) -> tuple[int, Any]:
        return await self.ask("POST", "/specialise", TOLD | told)

    async def ended(self) -> Sandbox:
        """How the engine says that it ended."""
        async with asyncio.timeout(30):
            while not (found := await self.engine.get(self.id)).state.over:
                await asyncio.sleep(0.02)
        return found


class Bench(NamedTuple):
    engine: Engine
    folder: Path

    @asynccontextmanager
    async def warm(self, name: str = "shared", *, warm: bool = True, **fields: Any) -> AsyncIterator[Warmed]:
        """A warm sandbox of a project for the length of a block."""
        id, token = new_id(name), new_owner_token()
        path = self.folder / name
        given = SandboxSpec(
            env=EnvRef(name, "1.0.0"), warm=warm, owner_token_sha256=digest(token), startup_timeout=60.0, **fields
        )
        try:
            await self.engine.create(id, complete(given, project.read(path)))
            yield Warmed(self.engine, await self.engine.wait(id, 60), token)
        finally:
            await self.engine.delete(id)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["process", "plain"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    folder = Path(tempfile.mkdtemp(prefix="aewarm-", dir="/tmp"))
    folder.chmod(0o755)
    for name, module in PROJECTS.items():
        (folder / name / "src").mkdir(parents=True)
        (folder / name / "src" / "custom_env.py").write_text(module)
        deploy = {"environmentVariables": {"OF_THE_PROJECT": "yes"}} | ({"preload": True} if name == "early" else {})
        config = {"name": name, "version": "1.0.0", "deployConfig": deploy}
        (folder / name / "config.json").write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AENV_HOME", str(folder / "home"))
        async with ProcessEngine() if request.param == "process" else PlainEngine() as engine:
            yield Bench(engine, folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("name", ["shared", "own", "early"])
async def test_it_waits_and_becomes_what_it_is_told(bench: Bench, name: str) -> None:
    async with bench.warm(name) as made:
        assert made.sandbox.state is State.RUNNING
        status, answer = await made.ask("GET", "/health")
        preloaded = name == "early" or (name == "shared" and bench.engine.name == "process")
        assert (status, answer["data"]["status"], answer["data"]["preloaded"]) == (200, "warm", preloaded)
        assert (await made.ask("GET", "/health", token=""))[1]["data"] == {"status": "warm"}
        for method, path in (
            *(("POST", "/tools/about"), ("POST", "/task/reward"), ("POST", "/mcp"), ("GET", "/tools")),
            *(("GET", "/info"), ("POST", "/exec"), ("POST", "/reset"), ("GET", "/history")),
        ):
            status, answer = await made.ask(method, path, {})
            assert (status, answer["code"]) == (409, "conflict"), path
            assert (await made.ask(method, path, {}, token="wrong"))[0] == 401, path
        assert (await made.ask("POST", "/specialise", {}, token=""))[0] == 401
        assert (await made.ask("POST", "/specialise", {}, token=agent_token(digest(made.token))))[0] == 403

        status, answer = await made.specialise()
        assert status == 200, answer
        assert {"import", "setup", "health"} == set(answer["data"]["phases"])
        assert await made.tool("about") == {
            "id": made.id,
            "variable": "ada",
            "told": "ada",
            "project": "yes",
            "argv": ["--side", "a b"],
            "arguments": ["--side", "a b"],
            "seed": 7,
            "setup": "ada",
            "import": ["ada", ["--side", "a b"]] if name == "own" else None,
        }
        assert (await made.ask("POST", "/task/reward", {}))[1]["data"] == 1.0
        assert (await made.ask("GET", "/health"))[1]["data"]["status"] == "success"
        assert len((await made.ask("GET", "/tools"))[1]["data"]) == 3
        status, answer = await made.specialise()
        assert (status, answer["code"]) == (409, "conflict")
        assert (await bench.engine.get(made.id)).boot == made.sandbox.boot


async def test_two_are_never_alike(bench: Bench) -> None:
    async with bench.warm() as first, bench.warm() as second:
        others = {"environment_variables": {"NAME": "bob"}, "seed": None}
        await asyncio.gather(first.specialise(seed=None), second.specialise(**others))
        assert (await first.tool("about"))["variable"] == "ada"
        assert (await second.tool("about"))["variable"] == "bob"
        assert await first.tool("draw") != await second.tool("draw")


@pytest.mark.parametrize("name", ["shared", "own"])
async def test_its_secrets_are_hidden(bench: Bench, name: str) -> None:
    secret = "s3cr3t-value"
    async with bench.warm(name, secrets=["KEY"]) as made:
        told = {"environment_variables": {"NAME": "ada", "KEY": secret}, "secrets": ["KEY"]}
        assert (await made.specialise(**told))[0] == 200
        assert await made.tool("show", name="KEY") == "***"
    async with bench.warm(name) as made:
        told = {"environment_variables": {"BROKEN": secret}, "secrets": ["BROKEN"]}
        status, answer = await made.specialise(**told)
        assert status == 500
        assert "broken by ***" in answer["error"]
        assert secret not in json.dumps(answer)
        await made.ended()


async def test_what_does_not_come_up_says_why_and_ends(bench: Bench) -> None:
    async with bench.warm("broken") as made:
        status, answer = await made.specialise()
        assert (status, answer["code"]) == (502, "start_failed")
        assert "RuntimeError: broken on purpose" in answer["error"]
        assert "custom_env.py" in answer["error"]
        ended = await made.ended()
        assert ended.state is State.FAILED
        assert "broken on purpose" in ended.reason
    async with bench.warm() as made:
        status, answer = await made.specialise(environment_variables={"SICK": "1"}, startup_timeout=0.5)
        assert (status, answer["code"]) == (502, "start_failed")
        assert answer["error"] == "it was not ready within 0.5 s"
        assert answer["data"]["phases"]["health"] > 0
        await made.ended()


async def test_it_goes_on_when_who_told_it_has_left(bench: Bench) -> None:
    async with bench.warm() as made:
        leaving = asyncio.create_task(made.specialise())
        async with asyncio.timeout(30):
            while "warm" in str(await made.ask("GET", "/health")):
                await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            while (await made.ask("GET", "/health"))[0] != 200:
                await asyncio.sleep(0.02)
        assert (await made.tool("about"))["seed"] == 7


async def test_what_it_cannot_be(bench: Bench) -> None:
    async with bench.warm() as made:
        for wrong in (
            *({"nonsense": 1}, {"environment_variables": {"A": 1}}, {"environment_variables": {"A=B": "x"}}),
            *({"environment_variables": {"A": "\0"}}, {"startup_timeout": -1}, {"seed": "x"}, [], 7),
            {"environment_variables": {"": "x"}},
        ):
            status, answer = await made.ask("POST", "/specialise", wrong)
            assert (status, answer["code"]) == (422, "invalid"), wrong
        status, answer = await made.specialise(environment_variables={"AENV_THREADS": "1"})
        assert (status, answer["code"]) == (409, "conflict")
        assert "AENV_THREADS" in answer["error"]
        assert (await made.specialise())[0] == 200  # none of that counted
    async with bench.warm(warm=False) as made:
        status, answer = await made.specialise()
        assert (status, answer["code"]) == (409, "conflict")


async def test_one_that_waits_can_end(bench: Bench) -> None:
    async with bench.warm("own") as made:
        await bench.engine.delete(made.id)
        with pytest.raises(http.NetworkError):
            await made.ask("GET", "/health")


async def test_variables_that_come_too_late() -> None:
    given = {"SAME": "1", "OMP_NUM_THREADS": "1"}
    patterns = ["SAME", "OMP_*", "EXACT"]
    assert late({"SAME": "1", "OTHER": "x"}, patterns, given) == []
    assert late({"SAME": "2", "OMP_NUM_THREADS": "2", "EXACTLY": "x"}, patterns, given) == ["SAME", "OMP_NUM_THREADS"]
    assert late({"X": "y"}, [], {}) == []
