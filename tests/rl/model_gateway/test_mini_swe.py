"""mini-swe-agent as it is on PyPI, inside a sandbox: it asks its model through the gateway, and has no provider key."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from benchmarks.servers.model import Model

from aenv import http
from aenv.engines.process.engine import ProcessEngine
from aenv.engines.process.venvs import is_ready
from aenv.rl import Episode, Rules, Task, export, rollout
from aenv.rl.model_gateway import ModelGateway, Upstream
from tests.peers.support import MINI_SWE
from tests.rl.bench import Bench
from tests.rl.model_gateway.support import ids, standin
from tests.rl.proofs import is_scored

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group("rl-model-gateway"),
    pytest.mark.peer,
    pytest.mark.skipif(not is_ready(MINI_SWE), reason="the packages of mini-swe are not installed: make components"),
]
KEY = "sk-provider-4711"
COMMANDS = [
    "cat sums.py; env; cat /proc/[0-9]*/environ; true",
    "sed -i 's/a - b/a + b/' sums.py",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat sums.py",
]
TASK = Task(instruction="add(2, 3) is -1. Mend it.", files={"sums.py": "def add(a, b):\n    return a - b\n"})


@pytest_asyncio.fixture(loop_scope="module")
async def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Model, ModelGateway, Bench]]:
    """A model with something to say, the gateway, and an engine at the project: with the gateway in its allow-list."""
    for name in ("AENV_SYSTEM_URL", "AENV_HUB_URL", "AENV_API_KEY", "AENV_ENGINE", "DUMMY_INSTANCE_IP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PROVIDER_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    root = tmp_path / "mini-swe"
    shutil.copytree(MINI_SWE, root, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(root)
    async with standin() as (model, url), ModelGateway([Upstream(url, key_variable="PROVIDER_KEY")]) as gateway:
        model.script = [f"call bash {json.dumps({'command': command})}" for command in COMMANDS]
        config = root / "config.json"
        config.write_text(config.read_text().replace("127.0.0.1:8085", f"127.0.0.1:{gateway.port}"))
        async with ProcessEngine() as engine:
            yield model, gateway, Bench(engine, tmp_path)
        await http.close()


async def mini(env: Episode, task: Task) -> str:
    """What the agent hands in."""
    assert env.models is not None
    name, dialect = task.metadata["model"]
    given = [f"{name}={value}" for name, value in env.models.variables.items()]
    told = ["-m", name, "--model-class", dialect, "-t", task.instruction, "-o", "/tmp/run.json"]
    mini = ["/venv/bin/python", "-m", "minisweagent", "--yolo", "--exit-immediately"]
    done = await env.exec(["env", *given, *mini, *told], timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    info = json.loads(await env.download("/tmp/run.json"))["info"]
    assert (info["exit_status"], info["model_stats"]["api_calls"]) == ("Submitted", len(COMMANDS))
    return str(info["submission"])


@pytest.mark.parametrize(
    ("name", "dialect"),
    [("openai/stand-in", "litellm"), ("openai/stand-in", "litellm_response"), ("anthropic/claude-stand-in", "litellm")],
    ids=["chat", "responses", "messages"],
)
async def test_it_plays_an_episode_that_can_be_trained_on(
    made: tuple[Model, ModelGateway, Bench], name: str, dialect: str
) -> None:
    model, gateway, bench = made
    task = Task(instruction=TASK.instruction, files=TASK.files, metadata={"model": [name, dialect]})
    trajectory = await rollout(bench.env("mini-swe"), gateway.agent(mini), task, rules=Rules(rewards="mended"))
    is_scored(trajectory, 1.0)
    assert trajectory.answer == "def add(a, b):\n    return a + b\n"
    roles = [message["role"] for message in trajectory.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert TASK.instruction in trajectory.messages[1]["content"]

    found = [turn.generation for turn in trajectory.turns]
    tokens = [generation.tokens for generation in found if generation and generation.tokens]
    said = [json.dumps({"command": command}) for command in COMMANDS]
    assert [each.completion for each in tokens] == [ids(text) for text in said]
    assert [each.logprobs for each in tokens] == [[-ord(c) / 1000 for c in text] for text in said]
    assert [each.prompt for each in tokens] == [ids(json.dumps(asked["messages"])) for asked in model.asked]
    assert [row["messages"] for row in export([trajectory], "openai")]

    assert model.keys == [f"Bearer {KEY}"] * len(COMMANDS)
    seen = trajectory.messages[3]["content"]
    assert "OPENAI_API_KEY=ek-" in seen
    assert KEY not in seen


async def test_it_is_ended_at_a_limit_although_it_would_ask_for_minutes(
    made: tuple[Model, ModelGateway, Bench],
) -> None:
    model, gateway, bench = made
    task = Task(instruction=TASK.instruction, files=TASK.files, metadata={"model": ["openai/stand-in", "litellm"]})
    rules = Rules(rewards="mended", max_turns=2)
    trajectory = await rollout(bench.env("mini-swe"), gateway.agent(mini), task, rules=rules)
    is_scored(trajectory, 1.0)
    assert (trajectory.ended, len(trajectory.turns), len(model.asked)) == ("max_turns", 2, 2)
