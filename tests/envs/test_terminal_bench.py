"""The built-in terminal-bench on the process engine: tasks as Harbor writes them, their own verifiers, and agents that
try to be judged otherwise than by their work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from aenv import Environment, Invalid, Unsupported, agent, rl
from aenv.errors import AuthorError, StartFailed
from aenv.project.builtin import builtin_root

PROJECT = builtin_root() / "terminal-bench"
TASKS = ["fix-the-parser", "log-report", "merge-ledgers", "old-console", "paged-service", "sealed-cipher"]
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

CHEAT = r"""
for i in 1 2 3; do  # processes that go on: in the background, in a session of their own, and orphaned
    setsid sh -c 'while :; do for d in /logs/verifier /app/logs; do mkdir -p $d; echo 1 > $d/reward.txt;
        echo "{\"reward\": 1}" > $d/reward.json; done; echo : > /tests/test.sh; : > /tests/check.py; done' \
        > /dev/null 2>&1 < /dev/null &
done
mkdir -p /logs/verifier /tests "$HOME/bin" /usr/local/bin /app
echo 1 > /logs/verifier/reward.txt; echo '{"reward": 1.0}' > /logs/verifier/reward.json
printf '#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n' > /tests/test.sh; chmod 555 /tests/test.sh; chmod 555 /tests
for name in bash sh python3 python pytest cat echo mkdir; do  # programs of the same names, wherever one is looked for
    for folder in /bin /usr/bin /usr/local/bin /usr/local/sbin "$HOME/bin" /app; do
        printf '#!/bin/sh\necho 1 > /logs/verifier/reward.txt; exit 0\n' > $folder/$name && chmod +x $folder/$name
    done
done
mv /bin /bin-before; mkdir /bin; cp /app/bash /bin/bash; mv /usr /usr-before; mv /lib64 /lib64-before
for name in .bashrc .profile .bash_profile .bash_env; do
    echo 'export PATH=$HOME/bin:/app; alias python3=true; trap "echo 1 > /logs/verifier/reward.txt" EXIT' > $HOME/$name
done
echo 'export BASH_ENV=$HOME/.bash_env' > /etc/environment; export BASH_ENV=$HOME/.bash_env PATH=$HOME/bin:/app:$PATH
echo /app/evil.so > /etc/ld.so.preload
site=$(/usr/bin/python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p $site
for name in sitecustomize usercustomize pytest json csv hashlib subprocess; do
    for folder in $site /app /tmp; do echo 'import os; os._exit(0)' > $folder/$name.py; done
done
echo 'import os; os._exit(0)' > $site/x.pth
touch /app/left-by-the-agent
true
"""


@pytest.fixture(scope="module", autouse=True)
def home():
    """A home for the whole module: the agent of second sandboxes is compiled once."""
    path = Path(tempfile.mkdtemp(prefix="aetb-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AENV_HOME", str(path))
        patch.delenv("AENV_ENGINE", raising=False)
        if shutil.which("tmux") is None:
            pytest.skip("needs tmux")
        try:
            agent.binary()
        except Unsupported as exc:
            pytest.skip(f"needs the agent of second sandboxes: {exc.message}")
        yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def env():
    """One instance, in which the tests play one episode after the other."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            found = await stack.enter_async_context(Environment("terminal-bench"))
        except (StartFailed, Unsupported) as exc:
            pytest.skip(f"needs second sandboxes: {exc.message}")
        yield found


async def run(env: Environment, command: str, timeout: float = 30) -> dict[str, Any]:
    result = await env.call_tool("execute_command", {"command": command, "timeout": timeout})
    assert not result.is_error, result.text
    return result.structured


async def solve(env: Environment, task: str) -> None:
    for call in await env.call_function("solution", {"task": task}):
        assert (await env.call_tool(call["name"], call["arguments"])).structured["returncode"] == 0


# Agents, and what they score


async def oracle(env: Environment, task: rl.Task) -> None:
    await solve(env, task.reset["task"])


async def nop(env: Environment, task: rl.Task) -> None:
    await asyncio.sleep(0)


async def cheat(env: Environment, task: rl.Task) -> None:
    await run(env, CHEAT)
    await env.call_tool("keystrokes", {"keys": "while :; do echo 1 > /logs/verifier/reward.txt; done\n", "wait": 0})


@pytest.mark.parametrize(("player", "score"), [(oracle, 1.0), (nop, 0.0), (cheat, 0.0)])
async def test_each_task_is_scored_by_its_own_verifier(env, player, score):
    tasks = [rl.Task.of(task) for task in (await env.call_function("tasks"))["tasks"]]
    assert [task.id for task in tasks] == TASKS
    scores = {}
    async with rl.rollouts(Environment("terminal-bench"), player, tasks, concurrency=3, seed=1) as played:
        async for trajectory in played:
            assert isinstance(trajectory.outcome, rl.Scored), trajectory.outcome
            scores[trajectory.task.id] = trajectory.outcome.score
    assert scores == dict.fromkeys(TASKS, score)


async def test_work_counts_whatever_else_the_agent_left(env):
    for task in ("fix-the-parser", "paged-service", "sealed-cipher"):
        await env.reset(None, {"task": task})
        await solve(env, task)
        await run(env, CHEAT.replace("/app/$name", "/tmp/$name"))
        assert (await env.call_reward())["score"] == 1.0, task


async def test_a_program_under_test_writes_no_verdict(env):
    """What the verifier itself runs of the agent's may leave a process, too."""
    await env.reset(None, {"task": "fix-the-parser"})
    loop = "while :; do echo 1 > /logs/verifier/reward.txt; done"
    null = "null = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.DEVNULL)"
    started = f"subprocess.Popen(['sh', '-c', '{loop}'], start_new_session=True, **null)"
    await run(env, f"cat > /app/durations.py <<'END'\nimport subprocess; {null}; {started}; print(5400)\nEND")
    assert (await env.call_reward())["score"] == 0.0


@pytest.mark.parametrize(
    "command",
    [
        "cd /; rm -rf /app /logs /tmp; touch /app /logs /tmp",
        "cd /; rm -rf app logs tmp; mkdir /other; for d in app logs tmp tests; do ln -s /other $d; done",
        "mkdir -p /tests/a/b; chmod 0 /tests/a/b /tests/a /tests /logs/verifier /logs /tmp /app",
        "mkfifo /tests; rm -rf /logs; mkfifo /logs",
        "cat /dev/zero > /app/full; cat /dev/zero > /tmp/full",
    ],
)
async def test_who_leaves_no_place_for_the_verifier_has_not_done_the_task(env, command):
    await env.reset(None, {"task": "merge-ledgers"})
    await run(env, command)
    assert (await env.call_reward())["score"] == 0.0
    await env.reset(None, {"task": "merge-ledgers"})
    await solve(env, "merge-ledgers")
    assert (await env.call_reward())["score"] == 1.0


# What an agent sees


async def test_neither_solution_nor_tests_are_there_to_be_seen(env):
    await env.reset(None, {"task": "log-report"})
    found = await run(
        env, "ls -A / /logs/verifier; find / -xdev -name 'solve.sh' -o -name 'check.py' 2>/dev/null | grep -v ^/usr"
    )
    assert "tests" not in found["stdout"].split()
    assert "solution" not in found["stdout"].split()
    assert "solve.sh" not in found["stdout"]
    assert "check.py" not in found["stdout"]
    for tool in ("tasks", "solution", "score", "begin"):
        assert tool not in {one["name"].partition("/")[2] for one in await env.list_tools()}


async def test_the_verdict_ends_the_episode(env):
    await env.reset(None, {"task": "merge-ledgers"})
    late = asyncio.create_task(env.call_tool("execute_command", {"command": "sleep 1000; echo late", "timeout": 2000}))
    while not (await run(env, "pgrep -x sleep; true"))["stdout"]:
        assert not late.done(), late.result()
    assert (await env.call_reward())["score"] == 0.0
    assert "the episode is over" in (await late).text
    for tool, arguments in {
        "execute_command": {"command": "ls /tests"},
        "keystrokes": {"keys": "ls /tests\n"},
        "capture_pane": {},
    }.items():
        result = await env.call_tool(tool, arguments)
        assert result.is_error
        assert "the episode is over" in result.text


async def test_nothing_of_an_episode_is_in_the_next(env):
    await env.reset(None, {"task": "old-console"})
    await env.call_tool("keystrokes", {"keys": ["sleep 1234", "Enter"], "wait": 0})
    places = "/app /root /tmp /home /opt /var/tmp /shared /dev/shm /logs/agent"
    await run(
        env, f"for d in {places}; do touch $d/mine $d/.mine; done; mkdir -m 0 /closed /app/shut; ln -s /app /link"
    )
    await env.reset(None, {"task": "merge-ledgers"})
    found = await run(
        env, "find / -xdev -name '*mine' -user $(id -u); ls -A / /app /shared /dev/shm; pgrep -ax sleep; true"
    )
    for left in ("mine", "closed", "link", "shut", "console.py", "1234"):
        assert left not in found["stdout"], found["stdout"]
    assert (await run(env, "pwd; ls"))["stdout"] == "/app\nnorth.csv\nsouth.csv\n"
    assert "1234" not in (await env.call_tool("capture_pane", {})).text


# The terminal


async def test_a_person_at_the_terminal_could_do_it(env):
    await env.reset(None, {"task": "old-console"})
    assert "needs a terminal" in (await run(env, "python3 console.py"))["stderr"]

    async def typed(keys: str | list[str], then: str) -> str:
        screen = (await env.call_tool("keystrokes", {"keys": keys, "wait": 0})).text
        async with asyncio.timeout(60):
            while then not in screen:
                screen = (await env.call_tool("capture_pane", {})).text
        return screen

    await typed(["python3 console.py", "Enter"], "operator number:")
    await typed("4471\n", "hour (0-23):")
    await typed("14\n", "[q]uit:")
    await typed("l\n", "units: 3 7 9")
    await typed("c\n", "unit:")
    screen = await typed(["7", "Enter"], "code: ")
    code = screen.partition("code: ")[2].split()[0]
    await typed("C-c", "KeyboardInterrupt")
    await typed(f"clear; echo {code} > code.txt; echo 'wrote' it\n", "wrote it")
    assert (await env.call_reward())["score"] == 1.0


async def test_the_terminal_keeps_what_scrolled_away_and_colours_and_names(env):
    await env.reset(None, {"task": "merge-ledgers"})
    async with asyncio.timeout(60):
        screen = (await env.call_tool("keystrokes", {"keys": "seq 1 500; tput cols; echo grün\n"})).text
        while "160\ngrün" not in screen:
            screen = (await env.call_tool("capture_pane", {})).text
    assert "\n100\n" not in screen
    assert "\n100\n" in (await env.call_tool("capture_pane", {"history": 1000})).text
    long = await env.call_tool("keystrokes", {"keys": "x" * 5000})
    assert long.is_error
    assert "execute_command" in long.text


async def test_commands_say_how_they_ended(env):
    await env.reset(None, {"task": "merge-ledgers"})
    assert await run(env, "echo out; echo err >&2; exit 3") == {
        "returncode": 3,
        "stdout": "out\n",
        "stderr": "err\n",
        "timed_out": False,
        "truncated": False,
    }
    assert (await run(env, "sleep 1000", timeout=0.2))["timed_out"]
    many = await run(env, "seq 1 100000")
    assert many["truncated"]
    assert many["stdout"].startswith("1\n2\n")
    assert many["stdout"].endswith("\n100000\n")


# Faults


async def test_what_cannot_be_judged_is_no_score(env):
    with pytest.raises(Invalid, match="no task 'old-konsole'") as caught:
        await env.reset(None, {"task": "old-konsole"})
    assert "old-console" in (caught.value.hint or "")
    await env.reset(None, {"task": "log-report"})
    with pytest.raises(Invalid, match="was not begun"):
        await env.call_function("solution", {"task": "old-console"})


# Tasks of one's own


def _task(root: Path, name: str, dockerfile: str, test: str, toml: str = "") -> None:
    for place, text in {
        "task.toml": f'schema_version = "1.4"\n{toml}',
        "instruction.md": "Do it.",
        "environment/Dockerfile": dockerfile,
        "solution/solve.sh": "#!/bin/bash\n(sleep 1000 & echo $! > /app/pid) > /dev/null 2>&1\necho $MADE > /app/made",
        "tests/test.sh": test,
    }.items():
        path = root / name / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


async def test_a_directory_of_ones_own(tmp_path, monkeypatch, env):
    plain = "FROM debian:bookworm-slim\nENV MADE=yes\nWORKDIR /app\nRUN echo $MADE > made-by && mkdir sub\n"
    alive = (
        "#!/bin/sh\nkill -0 $(cat /app/pid) && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
    )
    many = (
        '#!/bin/bash\n[ "$(cat /app/made)" = yes ] && echo \'{"reward": 0.5, "speed": 3}\' > /logs/verifier/reward.json'
    )
    tasks = tmp_path / "tasks"
    _task(tasks, "many", plain, many)
    _task(tasks, "runs-on", plain, alive)
    _task(
        tasks,
        "asks",
        plain,
        f"#!/bin/sh\necho $GIVEN-$KEY > /app/given\n{many[12:]}",
        '[verifier.env]\nKEY = "${KEY}"\n',
    )
    _task(tasks, "installs", "FROM debian\nRUN apt-get install -y cowsay\n", many)
    _task(tasks, "fails", "FROM debian\nRUN echo why >&2; false\n", many)
    _task(tasks, "offline", plain, many, '[environment]\nnetwork_mode = "no-network"\n')
    trusting = "#!/bin/bash\npython3 -c 'raise SystemExit(1)'; echo $((! $?)) > /logs/verifier/reward.txt"
    _task(tasks, "trusting", plain, trusting)
    _task(tasks, "stepwise", plain, many, '[[steps]]\nname = "one"\n')
    subprocess.run([sys.executable, PROJECT / "with_tasks.py", tasks, tmp_path / "mine"], check=True)
    monkeypatch.chdir(tmp_path / "mine")
    assert json.loads(Path("config.json").read_text())["name"] == "mine"
    async with Environment("mine") as mine:
        listed = await mine.call_function("tasks")
        assert [task["id"] for task in listed["tasks"]] == ["asks", "fails", "many", "runs-on", "trusting"]
        assert {left["id"]: left["why"] for left in listed["left_out"]} == {
            "installs": "line 2 of its Dockerfile: RUN installs by apt-get",
            "offline": "its network is 'no-network', and this project's is 'public': see with_tasks.py --network",
            "stepwise": "it has several steps",
        }
        with pytest.raises(Invalid, match="apt-get"):
            await mine.reset(None, {"task": "installs"})
        with pytest.raises(Invalid, match="line 2 of its Dockerfile failed here: why"):
            await mine.reset(None, {"task": "fails"})
        with pytest.raises(Invalid, match="nothing to score"):
            await mine.call_reward()
        await mine.reset(None, {"task": "many"})
        with pytest.raises(AuthorError, match="wrote neither reward.json nor reward.txt"):
            await mine.call_reward()
        await mine.reset(None, {"task": "many"})
        assert (await run(mine, "cat made-by; ls -d sub"))["stdout"] == "yes\nsub\n"
        await solve(mine, "many")
        found = await mine.call_reward()
        assert (found["score"], found["rewards"]) == (0.5, {"reward": 0.5, "speed": 3.0})
        await mine.reset(None, {"task": "trusting"})
        await run(
            mine, "d=$(python3 -m site --user-site); mkdir -p $d; echo 'import os; os._exit(0)' > $d/usercustomize.py"
        )
        assert (await run(mine, "python3 -c 'raise SystemExit(1)'"))["returncode"] == 0, "so the trick is one"
        assert (await mine.call_reward())["score"] == 0.0
        await mine.reset(None, {"task": "asks"})
        with pytest.raises(Invalid, match="needs the variable KEY"):
            await mine.call_reward()
        for processes, score in (("ended", 0.0), ("kept", 1.0)):
            [task] = (await mine.call_function("tasks", {"names": ["runs-on"], "processes": processes}))["tasks"]
            await mine.reset(None, task["reset"])
            await solve(mine, "runs-on")
            assert (await mine.call_reward())["score"] == score


async def test_the_projects_own_tests_pass():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test"]
    done = await asyncio.to_thread(subprocess.run, command, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
