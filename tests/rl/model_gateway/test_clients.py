"""The clients that others wrote, unmodified, against the gateway."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from benchmarks import venvs

from aenv.rl.model_gateway import ModelGateway
from tests.peers.support import requirements
from tests.rl.model_gateway.support import ids, standin

pytestmark = pytest.mark.peer
SCRIPT = Path(__file__).parent.parent.parent / "peers" / "scripts" / "models.py"


@pytest.fixture
def python() -> str:
    if not venvs.is_made(requirements("models")):
        pytest.skip("needs the virtual environment models: run 'make components'")
    return str(venvs.python(requirements("models")))


async def test_openai_anthropic_and_openai_agents(python: str) -> None:
    async with standin() as (model, url), ModelGateway([url]) as gateway, gateway.episode() as episode:
        process = await asyncio.create_subprocess_exec(
            *(python, str(SCRIPT)),
            env={**os.environ, **episode.variables},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        printed, complained = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, complained.decode()
    told = json.loads(printed)
    for dialect in ("chat", "responses", "messages"):
        assert told[dialect] == ["hello there", "hello there", "work", {"times": 2}], dialect
    assert told["refused"] == [401, 401]
    assert told["agents"] == ["worked"] * 4 + [[2] * 4]
    assert len(episode.records) == len(model.asked)
    assert episode.failure is None
    for record in episode.records:
        assert record.tokens is not None
        written = (record.message or {})["content"]
        if not (record.message or {}).get("tool_calls"):
            assert record.tokens.completion == ids(written)
