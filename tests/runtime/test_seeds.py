"""The seed of an instance reaches what author code draws from, wherever it draws, and only where there is one."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import pytest_asyncio

from aenv import Environment, http, project
from aenv.engines.base import Engine, new_id
from aenv.engines.plain import PlainEngine
from aenv.engines.process.engine import ProcessEngine
from aenv.engines.specs import complete
from aenv.models import EnvRef, SandboxSpec
from aenv.runtime.tokens import digest, new_owner_token

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(sys.platform != "linux", reason="the process engine needs Linux"),
]

MODULE = """
import random
{early}
from aenv import Context, register_reset, register_setup, register_tool

seen = {{}}
{at_import}

def drawn() -> list[float]:
    {late}
    return [random.random(), float(numpy.random.rand()), float(numpy.random.randint(10**9))]


@register_setup
def prepare(ctx: Context) -> None:
    seen["setup"] = [random.random(), {in_setup}, ctx.seed]


@register_reset
def begin(ctx: Context, seed: int | None = None) -> list[object]:
    return [*drawn(), ctx.seed, seed]


@register_tool
def draw(ctx: Context) -> dict[str, object]:
    return {{**seen, "tool": drawn(), "own": random.Random(ctx.seed).random(), "seed": ctx.seed}}
"""
IMPORT = "import numpy\nimport numpy.random"
DRAWN = 'seen["import"] = [random.random(), float(numpy.random.rand())]'
NUMPY = "float(numpy.random.rand())"
PROJECTS: dict[str, tuple[str, bool]] = {
    "own": (MODULE.format(early=IMPORT, at_import=DRAWN, late="pass", in_setup=NUMPY), False),
    "shared": (MODULE.format(early=IMPORT, at_import="", late="pass", in_setup=NUMPY), True),
    "late": (MODULE.format(early="", at_import="", late="import numpy", in_setup="0.0"), True),
    "late-own": (MODULE.format(early="", at_import="", late="import numpy", in_setup="0.0"), False),
}
"""By name: a module, and whether it is imported before there is an instance. The first draws in its import, too; NumPy
comes to the last two only when the tool is called."""


class Bench(NamedTuple):
    engine: Engine
    folder: Path

    def spec(self, name: str, **fields: Any) -> SandboxSpec:
        spec = SandboxSpec(env=EnvRef(name, "1.0.0"), startup_timeout=60.0, **fields)
        return complete(spec, project.read(self.folder / name))

    async def drawn(self, name: str, seed: int | None) -> dict[str, Any]:
        """What an instance draws in its import, its setup, and two calls."""
        async with self._env(name, seed) as env:
            first = (await env.call_tool("draw")).structured
            return {**first, "second": (await env.call_tool("draw")).structured["tool"]}

    def _env(self, name: str, seed: int | None) -> Environment:
        return Environment(name, seed=seed, provision=lambda spec: self.engine.provision(self.spec(name, seed=seed)))

    async def reset(self, name: str, made_with: int | None, *seeds: int | None) -> list[Any]:
        """What an instance draws in one reset after the other."""
        async with self._env(name, made_with) as env:
            return [await env.reset(seed) for seed in seeds]

    async def specialised(self, name: str, seed: int | None) -> dict[str, Any]:
        """What one draws first that was warm before it was told its seed."""
        id, token = new_id(name), new_owner_token()
        headers = f"Content-Type: application/json\r\nAuthorization: Bearer {token}\r\n".encode()
        try:
            await self.engine.create(id, self.spec(name, warm=True, owner_token_sha256=digest(token)))
            url = (await self.engine.wait(id, 60)).url
            for path, body in (("/specialise", {"seed": seed, "startup_timeout": 60}), ("/tools/draw", {})):
                async with asyncio.timeout(60):
                    answer = await http.request("POST", url, path, headers=headers, body=json.dumps(body).encode())
                assert answer.status == 200, answer.body
            found: dict[str, Any] = msgspec.json.decode(answer.body)["data"]
            return found
        finally:
            await self.engine.delete(id)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["process", "plain"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    """The second is ``python -m aenv.runtime`` for each instance."""
    folder = Path(tempfile.mkdtemp(prefix="aeseed-", dir="/tmp"))
    folder.chmod(0o755)
    for name, (module, preload) in PROJECTS.items():
        (folder / name / "src").mkdir(parents=True)
        (folder / name / "src" / "custom_env.py").write_text(module)
        config = {"name": name, "version": "1.0.0", "deployConfig": {"preload": preload}}
        (folder / name / "config.json").write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AENV_HOME", str(folder / "home"))
        async with ProcessEngine() if request.param == "process" else PlainEngine() as engine:
            yield Bench(engine, folder)
    shutil.rmtree(folder, ignore_errors=True)


def parts(found: dict[str, Any]) -> set[float]:
    """Every number that was drawn, but for places without one."""
    return {
        value
        for name in ("import", "setup", "tool", "second")
        for value in found.get(name, ())
        if isinstance(value, float) and value
    }


@pytest.mark.parametrize("name", PROJECTS)
async def test_one_seed_draws_the_same_and_another_something_else(bench: Bench, name: str) -> None:
    first = await bench.drawn(name, 7)
    assert first == await bench.drawn(name, 7)
    assert first["seed"] == 7
    assert first["second"] != first["tool"]
    other = await bench.drawn(name, 8)
    assert not parts(first) & parts(other)


async def test_importing_early_changes_nothing_of_what_is_drawn_later(bench: Bench) -> None:
    own, shared = await bench.drawn("own", 7), await bench.drawn("shared", 7)
    assert own.pop("import")
    assert own == shared
    assert await bench.drawn("late", 7) == await bench.drawn("late-own", 7)


@pytest.mark.parametrize("name", PROJECTS)
async def test_without_a_seed_no_two_draw_the_same(bench: Bench, name: str) -> None:
    first, second = await bench.drawn(name, None), await bench.drawn(name, None)
    assert first["seed"] is None
    assert not parts(first) & parts(second)


@pytest.mark.parametrize("name", PROJECTS)
async def test_a_reset_begins_with_its_seed(bench: Bench, name: str) -> None:
    one, other, again, free = await bench.reset(name, None, 5, 6, 5, None)
    assert one == again
    assert one[3:] == [5, 5]
    assert one[:3] != other[:3]
    assert free[3:] == [None, None]
    assert free[:3] != one[:3]
    assert await bench.reset(name, 99, 5) == [one]


@pytest.mark.parametrize("name", PROJECTS)
async def test_a_warm_one_draws_as_one_that_was_made_with_the_seed(bench: Bench, name: str) -> None:
    made = await bench.drawn(name, 7)
    del made["second"]
    assert await bench.specialised(name, 7) == made
    assert not parts(await bench.specialised(name, None)) & parts(made)


SCRIPT = """
import random, sys
from aenv.runtime import seeds
before = list(sys.meta_path)
seeds.plant(None)
assert sys.meta_path == before
seeds.plant({seed})
assert "numpy" not in sys.modules
import numpy.random
assert sys.meta_path == before, sys.meta_path
print(random.random(), numpy.random.rand())
"""


@pytest.mark.parametrize("seed", [0, 7, -7, 2**40, -(2**70)])
async def test_any_integer_is_a_seed_and_the_hook_leaves(seed: int) -> None:
    def drawn(seed: int) -> str:
        return subprocess.run(
            [sys.executable, "-c", SCRIPT.format(seed=seed)], check=True, capture_output=True, text=True
        ).stdout

    assert drawn(seed) == drawn(seed)
    assert drawn(seed).split()[0] != drawn(-seed - 1).split()[0]
    if 0 <= seed < 2**32:  # as an author who plants it would have it
        assert drawn(seed).split()[0] == str(random.Random(seed).random())
