"""The built-in swebench on the process engine: tasks made from sdists, the benchmark's own harness, and agents that
would rather be judged by something else than their work."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from aenv import Environment, Invalid, Unsupported, agent, rl
from aenv.errors import StartFailed
from tests.envs import swe_tasks
from tests.envs.benchmarks import needs
from tests.rl.bench import Bench

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300), needs("swebench")]
MERGE, GAPS = "intervals-merge", "intervals-gaps"
TESTS = ["apart", "touching", "inside", "total", "gaps", "no_gap"]
ALL_PASS = "".join(f"PASSED tests/test_intervals.py::test_{name}\\n" for name in TESTS)
EARLY = "import os; os._exit(0)\n"
FAKE = f"""
import os
for fd in range(1, 40):  # whichever is the real one: pytest keeps it while it captures
    try:
        os.write(fd, b'''\\n{ALL_PASS}''')
    except OSError:
        pass
os._exit(0)
"""
BENT = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    report.outcome, report.longrepr = "passed", None
"""
RUNNER = """
import _pytest.python
_pytest.python.Function.runtest = lambda self: None
"""
MESS = r"""
for i in 1 2 3; do
    setsid sh -c 'while :; do echo : > /tmp/eval.sh; echo : > /tmp/patch.diff; rm -rf /testbed/tests; done' \
        > /dev/null 2>&1 < /dev/null &
done
echo 'import os; os._exit(0)' > /opt/testbed/lib/pytest/__init__.py
printf '#!/bin/sh\necho cheated\n' > python.new; mv -f python.new /opt/testbed/bin/python
git config core.fsmonitor 'echo x'; git config diff.external /bin/true; git config core.excludesFile /testbed/all
echo '*' > all; echo '*' > .git/info/exclude; mkdir -p .git/hooks ~/.config/git; echo '*' > ~/.config/git/ignore
printf '[diff]\nexternal = /bin/true\n' > ~/.gitconfig; git update-index --assume-unchanged intervals.py
chmod 000 tests; mkfifo pipe; ln -s / everything; mkdir nested && git -C nested init -q
rm -rf /tmp /var/tmp; ln -s /nowhere /tmp
true
"""


def written(path: str, text: str) -> str:
    return f"printf %s {shlex.quote(text)} > {path}"


def before(path: str, text: str) -> str:
    return f"{written('/tmp/before', text)}; cat {path} >> /tmp/before; cp /tmp/before {path}"


CHEATS = {
    "tests are edited": written("tests/test_intervals.py", "def test_inside(): pass\ndef test_total(): pass\n"),
    "tests are removed": "rm -r tests",
    "a test of the same name": written("test_inside.py", "def test_inside(): pass\n"),
    "conftest.py": written("conftest.py", BENT),
    "conftest.py beside the tests": written("tests/conftest.py", BENT),
    "sitecustomize.py": written("sitecustomize.py", FAKE),
    "an early exit": before("intervals.py", EARLY),
    "results that are printed": before("intervals.py", FAKE),
    "marks of the log": before("intervals.py", FAKE.replace("os._exit", "print('>>>>> Test Exit Code: 0'); os._exit")),
    "a plugin": "; ".join(
        [written("winner.py", BENT), written("pyproject.toml", "[tool.pytest.ini_options]\naddopts = '-p winner'\n")]
    ),
    "a runner that runs nothing": before("intervals.py", RUNNER),
    "a package in the place of pytest": written("pytest.py", FAKE),
}


@pytest.fixture(scope="module", autouse=True)
def second() -> None:
    try:
        agent.binary()
    except Unsupported as exc:
        pytest.skip(f"needs the agent of second sandboxes: {exc.message}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def env(bench: Bench) -> AsyncIterator[Environment]:
    """One instance, in which the tests play one episode after the other."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            found = await stack.enter_async_context(bench.env("swebench"))
        except (StartFailed, Unsupported) as exc:
            pytest.skip(f"needs second sandboxes: {exc.message}")
        yield found


async def run(env: Environment, command: str) -> dict[str, Any]:
    result = await env.call_tool("execute_command", {"command": command, "timeout": 60})
    assert not result.is_error, result.text
    assert isinstance(result.structured, dict)
    return result.structured


async def solve(env: Environment, task: str) -> None:
    for call in await env.call_function("solution", {"task": task}):
        result = await env.call_tool(call["name"], call["arguments"])
        assert not result.is_error, result.text


# Tasks from sdists


async def oracle(env: Environment, task: rl.Task) -> None:
    await solve(env, task.id)


async def nop(env: Environment, task: rl.Task) -> None:
    assert await env.list_tools()


async def idle(env: Environment, task: rl.Task) -> None:
    """A patch, so that tests are run, and no work."""
    await run(env, "echo nothing > NOTES")


async def edits_tests(env: Environment, task: rl.Task) -> None:
    """Leaves of each test its name."""
    await run(env, "find . -name 'test*.py' -exec sed -i -E 's/^( *)def (test\\w*)\\(.*/\\1def \\2(*_): return/' {} +")
    await run(env, written("conftest.py", BENT))


async def exits_early(env: Environment, task: rl.Task) -> None:
    line = "import atexit, os; os._exit(0)"
    await run(env, f"find . -name '*.py' -not -path '*test*' -exec sed -i '1i {line}' {{}} +")


@pytest.mark.skipif(not swe_tasks.kept().exists(), reason="no tasks were made of sdists: make components")
async def test_tasks_of_sdists(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "swe-sdists"
    swe_tasks.project(target)
    monkeypatch.chdir(target)
    async with bench.env("swe-sdists") as env:
        tasks = [rl.Task.of(task) for task in (await env.call_function("tasks"))["tasks"]]
    assert len(tasks) >= 10
    assert len({task.metadata["repo"] for task in tasks}) >= 5
    expected = {oracle: 1.0, nop: 0.0, idle: 0.0, edits_tests: 0.0, exits_early: 0.0}
    for player, score in expected.items():
        scores = {}
        async with rl.rollouts(bench.env("swe-sdists"), player, tasks, concurrency=2, reuse=20, seed=1) as played:
            async for trajectory in played:
                assert isinstance(trajectory.outcome, rl.Scored), trajectory.outcome
                scores[trajectory.task.id] = trajectory.outcome.score
        assert scores == dict.fromkeys((task.id for task in tasks), score), player


# What must not score


@pytest.mark.parametrize("cheat", CHEATS)
async def test_nothing_but_work_scores(env: Environment, cheat: str) -> None:
    await env.reset(None, {"task": MERGE})
    assert (await run(env, CHEATS[cheat]))["returncode"] == 0
    found = await env.call_reward()
    assert found["score"] == 0.0, found
    assert found["resolved"] == (found["control"] == "failed"), found


@pytest.mark.parametrize("cheat", ["results that are printed", "a plugin", "a runner that runs nothing"])
async def test_the_control_is_what_finds_them(env: Environment, cheat: str) -> None:
    await env.reset(None, {"task": MERGE})
    await run(env, CHEATS[cheat])
    assert (await env.call_reward())["control"] == "failed"


async def test_work_counts_whatever_else_is_left(env: Environment) -> None:
    for cheat in ("tests are removed", "conftest.py", "sitecustomize.py"):
        await env.reset(None, {"task": MERGE})
        await run(env, CHEATS[cheat])
        await solve(env, MERGE)
        found = await env.call_reward()
        assert (found["score"], found["files"], found["control"]) == (1.0, ["intervals.py"], "held"), found
        assert found["left_out"]


async def test_nothing_in_the_sandbox_is_believed(env: Environment) -> None:
    for solved in (True, False):
        await env.reset(None, {"task": MERGE})
        if solved:
            gold = (await env.call_function("solution", {"task": MERGE}))[0]["arguments"]
            assert not (await env.call_tool("apply_patch", gold)).is_error
        await run(env, MESS)
        found = await env.call_reward()
        assert found["score"] == float(solved), found
        assert ("intervals.py" in found["files"]) == solved


# Tools


async def test_the_tools_do_a_task(env: Environment) -> None:
    await env.reset(None, {"task": GAPS})
    found = (await env.call_tool("search_code", {"query": "at = end", "max_results": 1})).structured
    assert found == {"result": [{"file": "intervals.py", "line": 29, "content": "at = end"}]}
    assert (
        await env.call_tool("read_file", {"path": "intervals.py", "first": 29, "last": 29})
    ).text == "        at = end\n"
    old = "            free.append((at, start))\n        at = end\n"
    new = "            free.append((at, min(start, within[1])))\n        at = max(at, end)\n"
    edit = {"path": "intervals.py", "old": old, "new": new + "        if at >= within[1]:\n            break\n"}
    assert (await env.call_tool("edit_file", edit)).text == "intervals.py was changed"
    assert (await env.call_tool("edit_file", edit)).is_error
    assert not (await env.call_tool("edit_file", {"path": "docs/notes.md", "old": "", "new": "kept\n"})).is_error
    assert "5 passed" in (await run(env, "python -m pytest -q"))["stdout"]
    assert "does not apply" in (await env.call_tool("apply_patch", {"patch": "no patch\n"})).text
    assert not (await env.call_tool("submit")).is_error
    assert (
        await env.call_tool("execute_command", {"command": "ls"})
    ).text == "the work was handed in, and the task is over"
    score = await env.call_reward()
    assert (score["score"], score["files"]) == (1.0, ["docs/notes.md", "intervals.py"])
    assert (score["fail_to_pass"], score["pass_to_pass"]) == ({"passed": 1, "failed": []}, {"passed": 5, "failed": []})
    assert await env.call_reward() == score


async def test_the_agent_sees_no_gold(env: Environment) -> None:
    listed = await env.call_function("tasks", {"names": [MERGE]})
    assert listed["source"] == {"name": "swebench", "version": "5.0.2"}
    assert not any(word in str(listed) for word in ("test_inside", "max(", "FAIL_TO_PASS"))
    offered = {tool["name"].rpartition("/")[2] for tool in await env.list_tools()}
    assert offered == {"execute_command", "read_file", "edit_file", "search_code", "apply_patch", "submit"}
    await env.reset(None, {"task": MERGE})
    places = "$(ls -d /* | grep -Ev '^/(usr|s?bin|lib.*|etc|proc|dev|sys)$')"  # all that is not this machine's
    seen = await run(env, f"grep -rl test_inside {places}; git log --oneline | wc -l")
    assert seen["stdout"] == "1\n"


async def test_nothing_is_left_of_an_episode(env: Environment) -> None:
    await env.reset(None, {"task": MERGE})
    await run(env, "echo mine > /tmp/mine; echo mine > intervals.py; git commit -qam mine || true")
    await env.reset(None, {"task": GAPS})
    assert (await run(env, "cat /tmp/mine; git status --short; git log --oneline | wc -l"))["stdout"] == "1\n"
    with pytest.raises(Invalid, match="there is no task 'intervals-marge'") as caught:
        await env.reset(None, {"task": "intervals-marge"})
    assert caught.value.hint == f"did you mean {MERGE!r}?"


async def test_predictions_made_elsewhere(env: Environment) -> None:
    gold = (await env.call_function("solution", {"task": GAPS}))[0]["arguments"]["patch"]
    assert (await env.call_function("evaluate", {"task": GAPS, "patch": gold}))["score"] == 1.0
    bad = await env.call_function("evaluate", {"task": MERGE, "patch": gold.replace("at = end", "at = ending")})
    assert (bad["score"], bad["applied"]) == (0.0, False)


async def test_its_other_name_and_no_reset(bench: Bench) -> None:
    async with bench.env("swe-env") as env:
        result = await env.call_tool("search_code", {"query": "def merge"})
        assert [found["file"] for found in result.structured["result"]] == ["intervals.py"]
