"""Several environments as one, and several agents in one, on an engine, whichever it is."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from aenv import Environment, SandboxLost
from aenv.client.composing import compose
from aenv.client.local import resolve
from aenv.engines.base import Engine
from aenv.models import Sandbox, SandboxSpec
from tests.support import FIXTURES, ROOT


class _Reasons:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def reason(self, id: str, patience: float) -> str:
        """Why a sandbox is no more."""
        found: Sandbox = await self._engine.get(id)
        return found.reason


def _on(engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch, home: Path, patience: float) -> Environment:
    """The project of the directory, on that engine."""
    monkeypatch.setenv("AENV_HOME", str(home))

    def provision(spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        return compose(engine, resolve(spec), {}, _Reasons(engine))

    return Environment(name, seed=7, timeout=patience, startup_timeout=patience, provision=provision)


async def check_three_levels(engine: Engine, monkeypatch: pytest.MonkeyPatch, home: Path, patience: float) -> None:
    """Start one that needs two others, of which one needs a third; call through it; lose one; leave nothing."""
    monkeypatch.chdir(FIXTURES / "composed" / "top")
    env = _on(engine, "top", monkeypatch, home, patience)
    async with env:
        assert len([found for found in await engine.find() if not found.state.over]) == 4
        assert json.loads((await env.call_tool("add", {"number": 2})).text) == [4, 2]
        assert (await env.call_tool("mid_low_add", {"number": 1})).text == "5"
        await env.reset(seed=8)
        found = await env.call_function("look")
        assert (found["mid"]["low"]["total"], found["side"]["resets"]) == (0, 1)
        assert len({found["id"], found["mid"]["id"], found["mid"]["low"]["id"], found["side"]["id"]}) == 4
        with pytest.raises(SandboxLost, match="mid: low: "):
            await env.call_tool("lose_deep")
    assert [found for found in await engine.find() if not found.state.over] == []


async def check_two_agents(engine: Engine, monkeypatch: pytest.MonkeyPatch, home: Path, patience: float) -> None:
    """Two play in one sandbox: each has its tools, its turn and its reward, and neither has the other's."""
    monkeypatch.chdir(ROOT / "examples" / "10-tic-tac-toe")
    async with _on(engine, "tic-tac-toe", monkeypatch, home, patience) as env:
        await env.reset()
        x, o = env.agent("x"), env.agent("o")
        assert "tic-tac-toe/concede" not in [tool["name"] for tool in await o.list_tools()]
        early = await o.call_tool("place", {"cell": 4})
        assert (early.is_error, early.text) == (True, "it is x's turn")
        for agent, cell in ((x, 0), (o, 3), (x, 1), (o, 4), (x, 2)):
            assert not (await agent.call_tool("place", {"cell": cell})).is_error
        assert (await x.call_reward(), await o.call_reward()) == (1.0, -1.0)
    assert [found for found in await engine.find() if not found.state.over] == []
