"""A composition of three levels on an engine, whichever it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aenv import Environment, SandboxLost
from aenv.client.composing import compose
from aenv.client.local import resolve
from aenv.engines.base import Engine
from aenv.models import Sandbox
from tests.support import FIXTURES


class _Reasons:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def reason(self, id: str, patience: float) -> str:
        """Why a sandbox is no more."""
        found: Sandbox = await self._engine.get(id)
        return found.reason


async def check_three_levels(engine: Engine, monkeypatch: pytest.MonkeyPatch, home: Path, patience: float) -> None:
    """Start one that needs two others, of which one needs a third; call through it; lose one; leave nothing."""
    monkeypatch.setenv("AENV_HOME", str(home))
    monkeypatch.chdir(FIXTURES / "composed" / "top")
    env = Environment(
        "top",
        seed=7,
        timeout=patience,
        startup_timeout=patience,
        provision=lambda spec: compose(engine, resolve(spec), {}, _Reasons(engine)),
    )
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
