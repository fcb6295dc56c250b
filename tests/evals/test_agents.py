"""Agents by name, each in a real instance of the benchmark."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from aenv import Environment
from aenv.errors import Invalid
from aenv.evals import Command, agent, agents
from aenv.rl import OpenAIAgent, Rules, Trajectory, rollout
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("benchmark_home")
OVER_MCP = """
import asyncio, os, re
from mcp import Client

async def main():
    one, other = re.findall(r"\\d+", os.environ["AENV_TASK_OBSERVATION"])[:2]
    assert re.fullmatch("[0-9a-f]{16}", os.environ["AENV_TASK_ID"])
    assert os.environ["AENV_TASK_SYSTEM"] == "You add numbers."
    assert int(os.environ["AENV_TASK_SEED"]) >= 0
    assert "AENV_API_KEY" not in os.environ
    assert os.environ["OPENAI_API_KEY"] == "of-its-model"
    async with Client(os.environ["AENV_AGENT_URL"]) as client:
        print(await client.call_tool("submit", {"value": int(one) + int(other)}))

asyncio.run(main())
"""


async def played(name: str, task: str = "small-1", **rules: float) -> Trajectory:
    reset = {"task": task, "domain": task.split("-")[0]}
    given = {"id": task, "instruction": f"Do {task}", "system": "You add numbers.", "reset": reset}
    return await rollout("sums", agent(name), given, 7, rules=Rules(**rules))  # type: ignore[arg-type]


async def test_the_oracle_makes_the_calls_of_the_solution() -> None:
    found = await played("oracle")
    assert (found.reward, found.provenance.agent) == (1.0, "oracle")
    assert [call.name for call in found.calls] == ["submit"]
    assert found.answer == {"steps": 2, "errors": []}
    assert found.outcome.components["reward"].details["graded"] == 1  # type: ignore[union-attr]


async def test_a_tool_that_fails_is_told_and_goes_on() -> None:
    found = await played("oracle", "small-3")
    assert found.reward == 1.0
    assert [call.result.is_error for call in found.calls if call.result] == [True, False]
    assert found.answer["errors"] == ["step 0, submit: a sum is no less than 0"]


async def test_nop_does_nothing() -> None:
    found = await played("nop")
    assert (found.reward, found.calls, found.provenance.agent) == (0.0, [], "nop")


async def test_an_environment_without_a_solution_has_no_oracle() -> None:
    found = await rollout("words", agent("oracle"), rules=Rules(rewards={"first": 1.0}))
    assert found.failure is not None
    assert (found.failure.kind, found.failure.phase) == ("unsupported", "agent")
    assert "@register_function def solution" in str(found.failure.hint)


async def test_a_program_plays_over_mcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENV_API_KEY", "of-the-platform")
    monkeypatch.setenv("OPENAI_API_KEY", "of-its-model")
    file = tmp_path / "over mcp.py"
    file.write_text(OVER_MCP)
    found = await played(f"cmd: {sys.executable} {shlex.quote(str(file))}")
    assert found.failure is None
    assert found.reward == 1.0
    assert "noted" in found.answer
    assert found.calls == [], "it went another way"


async def test_a_program_that_ends_badly_has_no_score() -> None:
    found = await played("cmd: sh -c 'echo because >&2; exit 3'")
    assert found.failure is not None
    assert (found.failure.kind, found.failure.phase) == ("agent_failed", "agent")
    assert found.failure.reason == "sh ended with exit code 3: because"
    none = await played("cmd: no-such-program-here")
    assert none.failure is not None
    assert "no-such-program-here cannot be started" in none.failure.reason


async def test_a_program_ends_with_all_that_it_started(tmp_path: Path) -> None:
    """Whether it ends by itself and leaves others behind, or its time is over."""
    for name, line, rules in (
        ("left", "sleep 3600 & echo $! > {0}; exit 0", {}),
        ("late", "sleep 3600 & echo $! > {0}; wait", {"episode_timeout": 2.0}),
    ):
        file = tmp_path / name
        found = await played(f"cmd: sh -c {shlex.quote(line.format(file))}", **rules)
        assert (found.failure.kind if found.failure else found.reward) == ("episode_timeout" if rules else 0.0)
        await eventually(f"the end of {name}", partial(_gone, int(file.read_text())), 10.0)


async def _gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("name", ["oracle", "cmd: ./agent --model x:", "openai:org/model:free", "agent.py:play"])
def test_what_names_an_agent(name: str) -> None:
    agents.check(name)


@pytest.mark.parametrize("name", ["", "nothing", "orakel", "cmd:", "cmd: ", ":play", "agent.py:"])
def test_what_names_no_agent(name: str) -> None:
    with pytest.raises(Invalid, match="names no agent"):
        agent(name)


def test_a_model_by_name() -> None:
    found = agent("openai:org/model:latest", base_url="http://localhost:1/v1", system="Be brief.")
    assert isinstance(found, OpenAIAgent)
    assert (found.model, found.system) == ("org/model:latest", "Be brief.")


def test_a_command_that_no_shell_could_read() -> None:
    with pytest.raises(Invalid, match="is no command"):
        Command("sh -c 'open")


async def test_a_solution_that_is_none(benchmark_home: Path) -> None:
    source = benchmark_home / "envs" / "sums" / "1.0.0" / "src" / "custom_env.py"
    before = source.read_text()
    try:
        source.write_text(before.replace("return [*first, ", "return ['x', "))
        async with Environment("sums"):
            found = await played("oracle")
    finally:
        source.write_text(before)
    assert found.failure is not None
    assert "returned ['x'" in found.failure.reason
