"""``aenv rollout`` from end to end: a real environment, a folder that is kept, a run that is killed and goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from aenv.cli.progress import Progress
from aenv.rl import Failed, Tally, files
from tests.rl import made
from tests.rl.bench import new_home

AGENT = """
import asyncio, os

async def play(env, task):
    for _ in range(task.metadata.get("turns", 1)):
        await env.call_tool("work")
    return "done"

async def slow(env, task):
    await env.call_tool("work")
    if task.id >= "t2" and not os.path.exists(os.environ["GO_ON"]):
        await asyncio.sleep(3600)

async def shaky(env, task):
    if task.id == "t1" and not os.path.exists(os.environ["GO_ON"]):
        raise ValueError("not yet")
    await env.call_tool("work")

def blocking(env, task):
    return 1

number = 7
"""
PATIENCE = 120.0


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with an agent and tasks, and a user whose home has the environments of these tests."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "agent.py").write_text(AGENT)
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"id": f"t{place}"}) + "\n" for place in range(4)))
    monkeypatch.setenv("GO_ON", str(tmp_path / "go-on"))
    yield folder
    sys.modules.pop("agent", None)


@pytest.fixture
def home():
    with new_home() as found:
        yield found


@pytest.fixture
def rollout(aenv):
    def run(*arguments, agent="play", env="saboteur"):
        return aenv("rollout", env, "--agent", f"agent.py:{agent}", *arguments)

    return run


def of(folder):
    return list(files.read(Path(folder) / "trajectories.jsonl"))


def test_a_run_and_its_report(rollout, here):
    answer = rollout("--tasks", "tasks.jsonl", "-n", "2", "--out", "run")
    assert answer.code == 0, answer.err
    assert "1.0000 (from 1 to 1)" in answer.out
    assert Counter(trajectory.group for trajectory in of("run")) == {f"t{place}": 2 for place in range(4)}
    assert {trajectory.reward for trajectory in of("run")} == {1.0}
    report = json.loads((here / "run" / "report.json").read_text())
    assert (report["episodes"], report["scored"], report["failed"]) == (8, 8, 0)
    assert "<html" in (here / "run" / "report.html").read_text()
    assert sorted(os.listdir("run")) == ["report.html", "report.json", "run.json", "trajectories.jsonl"]


def test_json_is_all_that_stdout_has(home, here):
    loud = "print('at import')\n\nasync def play(env, task):\n    print('of the agent')\n"
    (here / "loud.py").write_text(loud)
    command = [sys.executable, "-m", "aenv", "rollout", "saboteur", "--agent", "loud.py:play", "-o", "json"]
    done = subprocess.run([*command, "--out", "run"], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert json.loads(done.stdout) == json.loads((here / "run" / "report.json").read_text())
    assert "at import" in done.stderr
    assert "of the agent" in done.stderr


def test_a_failure_is_no_zero_in_the_report(rollout, here):
    lines = [{"id": "good"}, {"id": "bad", "reward": {"what": "nan"}}, {"id": "lost", "arguments": ["reset=kill"]}]
    (here / "mixed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer = rollout("--tasks", "mixed.jsonl", "-o", "json", "--retries", "0", "--out", "run")
    assert answer.code == 0
    assert (answer.data["scored"], answer.data["failed"], answer.data["reward"]["mean"]) == (1, 2, 1.0)
    assert answer.data["failures"]["author_failed"] == 1
    shown = rollout("--tasks", "mixed.jsonl", "--retries", "0", "--out", "other")
    assert "author_failed" in shown.out
    assert "2 episodes have no score" in shown.err


def test_a_run_of_failures_has_no_reward_and_says_so(rollout, here):
    answer = rollout("--tasks", "tasks.jsonl", "-o", "json", "--out", "run", agent="blocking")
    assert answer.code != 0
    assert (answer.data["scored"], answer.data["reward"], answer.data["failed"]) == (0, None, 4)
    shown = rollout("--tasks", "tasks.jsonl", "--out", "other", agent="blocking")
    assert "is not async" in shown.out
    assert "reward" not in shown.out.replace("trajectories", "")


def test_failures_are_counted_by_where_they_happened(rollout, here):
    """One kind in two phases: each row has its own number."""
    lines = [{"id": f"reset-{place}", "arguments": ["reset=raise"]} for place in range(2)]
    lines += [{"id": "reward", "reward": {"what": "nan"}}]
    (here / "mixed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer = rollout("--tasks", "mixed.jsonl", "--out", "run")
    rows = [line.split() for line in answer.out.splitlines() if line.startswith("author_failed")]
    assert sorted((row[1], row[2]) for row in rows) == [("reset", "2"), ("reward", "1")]


@pytest.mark.parametrize(
    ("content", "line", "said"),
    [
        ('{"id": "a"}\n{"id": \n', 2, ""),
        ('\n{"id": "a"}\n[1]\n', 3, "is no task"),
        ('{"id": "a", "instrution": "x"}\n', 1, "instruction"),
        ('{"id": "a"}\n\n{"id": "a"}\n', 3, "there is a task 'a' already"),
        ('{"id": 7}\n', 1, "id"),
    ],
)
def test_a_wrong_task_is_named_with_its_line(rollout, here, content, line, said):
    (here / "wrong.jsonl").write_text(content)
    answer = rollout("--tasks", "wrong.jsonl", "--out", "run")
    assert (answer.code, answer.out) == (1, "")
    assert f"wrong.jsonl:{line}: " in answer.err
    assert said in answer.err
    assert not (here / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--tasks", "none.jsonl"], 1, "none.jsonl cannot be read"),
        (["--tasks", "tasks.jsonl", "--instruction", "x"], 2, "not both"),
        (["--resume"], 2, "--resume needs --out"),
        (["--retry-failed", "--out", "run"], 2, "goes with --resume"),
        (["--reward", "a=b"], 2, "is no weight"),
        (["--turn-timeout", "0"], 1, "turn_timeout"),
        (["--agent", "agent.py:none"], 1, "no function 'none'"),
        (["--agent", "agent.py:number"], 1, "no function 'number'"),
        (["--agent", "none.py:play"], 1, "there is no file none.py"),
        (["--agent", "none.such:play"], 1, "cannot be imported"),
        (["--agent", "nothing"], 2, "names no agent"),
    ],
)
def test_what_is_refused(rollout, here, arguments, code, said):
    answer = rollout(*arguments)
    assert said in answer.err
    assert (answer.code, answer.out) == (code, "")
    assert "Traceback" not in answer.err


def test_an_unknown_environment_stops_the_run(rollout, here):
    lines = "".join(json.dumps({"id": f"t{place}"}) + "\n" for place in range(50))
    (here / "many.jsonl").write_text(lines)
    answer = rollout("--tasks", "many.jsonl", "--out", "run", "-c", "2", env="saboter")
    assert answer.code != 0
    assert "did you mean 'saboteur'" in answer.err
    assert "--resume" in answer.err
    assert len(of("run")) < 50


def test_rewards_and_limits_of_the_command_line(rollout, here):
    (here / "turns.jsonl").write_text(json.dumps({"id": "t", "metadata": {"turns": 5}}))
    answer = rollout(
        "--tasks", "turns.jsonl", "--max-turns", "2", "--reward", "score=0.5", "-o", "json", "--out", "run"
    )
    assert (answer.data["reward"]["mean"], answer.data["ended"]) == (1.0, {"max_turns": 1})
    words = rollout("--reward", "first=2", "--reward", "second", "-o", "json", "--out", "other", env="words")
    assert words.data["reward"]["mean"] == 4.0
    assert words.data["components"] == {"first": 1.0, "second": 2.0}


def test_a_folder_is_used_once_and_gone_on_with_when_that_is_said(rollout, here):
    assert rollout("--tasks", "tasks.jsonl", "--out", "run").code == 0
    again = rollout("--tasks", "tasks.jsonl", "--out", "run")
    assert again.code != 0
    assert "--resume goes on with it" in again.err
    before = (here / "run" / "trajectories.jsonl").read_bytes()
    resumed = rollout("--tasks", "tasks.jsonl", "--out", "run", "--resume", "-o", "json")
    assert (resumed.code, resumed.data["episodes"]) == (0, 4)
    assert "4 of 4 episodes have ended" in resumed.err
    assert (here / "run" / "trajectories.jsonl").read_bytes() == before
    other = rollout("--tasks", "tasks.jsonl", "--out", "run", "--resume", "-n", "2")
    assert "its n was 1" in other.err


def test_what_failed_is_played_once_more(rollout, here):
    first = rollout("--tasks", "tasks.jsonl", "--out", "run", "-o", "json", agent="shaky")
    assert (first.data["scored"], first.data["failures"]) == (3, {"agent_failed": 1})
    kept = rollout("--tasks", "tasks.jsonl", "--out", "run", "--resume", "-o", "json", agent="shaky")
    assert kept.data["failed"] == 1
    Path(os.environ["GO_ON"]).touch()
    again = rollout("--tasks", "tasks.jsonl", "--out", "run", "--resume", "--retry-failed", "-o", "json", agent="shaky")
    assert (again.data["scored"], again.data["failed"]) == (4, 0)
    assert Counter(trajectory.group for trajectory in of("run")) == {f"t{place}": 1 for place in range(4)}


def _begun(command, path, count):
    """A run in a process of its own, once it has written so many."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    deadline = time.monotonic() + PATIENCE
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.stdout.read().decode()
        assert time.monotonic() < deadline, "waited in vain for the first episodes"
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_ended_goes_on_with_every_episode_once(rollout, here, number):
    arguments = ["--tasks", "tasks.jsonl", "-n", "2", "--out", "run"]
    command = [sys.executable, "-m", "aenv", "rollout", "saboteur", "--agent", "agent.py:slow", *arguments]
    path = here / "run" / "trajectories.jsonl"
    process = _begun(command, path, 4)
    try:
        os.kill(process.pid, number)
        said = process.communicate(timeout=PATIENCE)[0].decode()
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0
    if number == signal.SIGINT:
        assert "--out run --resume' goes on" in said
        assert "Traceback" not in said
    before = path.read_bytes()
    path.write_bytes(before + before.splitlines(True)[0][:100])  # as if it had been killed while it wrote
    Path(os.environ["GO_ON"]).touch()
    answer = rollout(*arguments, "--resume", "-o", "json", agent="slow")
    assert (answer.code, answer.data["episodes"], answer.data["scored"]) == (0, 8, 8), answer.err
    assert path.read_bytes().startswith(before)
    found = [(trajectory.group, trajectory.sample) for trajectory in of("run")]
    assert sorted(found) == [(f"t{place}", sample) for place in range(4) for sample in range(2)]
    assert {trajectory.reward for trajectory in of("run")} == {1.0}


def test_a_built_in_environment(aenv, here):
    (here / "terminal.py").write_text(
        "async def play(env, task):\n    await env.call_tool('execute_command', {'command': 'echo hi > out.txt'})\n"
    )
    check = {"checks": [{"type": "file", "path": "out.txt"}]}
    (here / "one.jsonl").write_text(json.dumps({"id": "t", "reward": check}))
    answer = aenv("rollout", "mini-terminal", "--agent", "terminal.py:play", "--tasks", "one.jsonl", "-o", "json")
    assert answer.data["episodes"] == 1
    (trajectory,) = of(answer.data["run"])
    assert trajectory.calls[0].name == "execute_command"
    assert answer.data["run"].startswith("runs/mini-terminal-")
    sys.modules.pop("terminal", None)


# Progress


def test_progress_counts_failures_apart():
    tally = Tally([made.trajectory(), made.trajectory(outcome=Failed(kind="network", phase="tool", reason="cut"))])
    progress = Progress(tally, 10)
    line = progress.line(time.monotonic() + 5)
    assert "2/10 episodes" in line
    assert "reward 1.000" in line
    assert "failed 1 (network 1)" in line
    only = Progress(Tally([made.trajectory(outcome=Failed(kind="network", phase="tool", reason="cut"))]), None)
    assert "reward" not in only.line(time.monotonic())


def test_progress_is_said_when_it_takes_longer(rollout, here, monkeypatch):
    monkeypatch.setattr("aenv.cli.progress.SILENT", 0.0)
    monkeypatch.setattr("aenv.cli.progress.SELDOM", 0.0)
    answer = rollout("--tasks", "tasks.jsonl", "--out", "run", "-o", "json")
    assert "4/4 episodes" in answer.err
    assert answer.data["episodes"] == 4
