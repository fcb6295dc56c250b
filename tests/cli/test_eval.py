"""``aenv eval``, ``aenv compare`` and ``aenv tasks`` from end to end, on a benchmark of their own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from aenv.comparing import unlike
from aenv.rl import files
from tests.cli.conftest import Outcome
from tests.cli.test_rollout import PATIENCE, _begun
from tests.evals.bench import AGENT, new_home


@pytest.fixture
def home():
    with new_home() as found:
        yield found


@pytest.fixture
def here(tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GO_ON", str(tmp_path / "go-on"))
    (folder / "agent.py").write_text(AGENT)
    yield folder
    sys.modules.pop("agent", None)


def of(folder):
    return list(files.read(Path(folder)))


# Tasks


def test_tasks_are_listed_and_shown(aenv):
    table = aenv("tasks", "list", "sums", "--limit", "2")
    assert table.code == 0, table.err
    assert table.out.count("small-") == 2
    assert "tasks: 4 of sums 1.2, shown: 2, sha256: " in table.err
    some = aenv("tasks", "list", "sums", "--domain", "large", "--tasks", "large-1*,large-3", "-o", "json").data
    assert [task["id"] for task in some["tasks"]] == ["large-1", "large-3", "large-10", "large-11"]
    assert (some["source"], some["selection"]) == ({"name": "sums", "version": "1.2"}, {"domain": "large"})
    one = aenv("tasks", "show", "sums", "large-3", "--domain", "large", "-o", "json").data
    assert one["reset"] == {"task": "large-3", "domain": "large"}
    assert "Add up the two numbers of small 1." in aenv("tasks", "show", "sums", "small-1").out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["tasks", "list", "words"], 1, "def tasks()"),
        (["tasks", "show", "sums", "smal-1"], 1, "did you mean 'small-1'?"),
        (["tasks", "list", "sums", "--split", "test"], 1, "cannot be chosen by 'split'"),
        (["eval", "words"], 1, "has no function 'tasks'"),
        (["eval", "sums", "--agent", "orakel"], 2, "oracle, nop, openai:MODEL"),
        (["eval", "sums", "--k", "1,x"], 2, "is no list of numbers"),
        (["eval", "sums", "--k", "0"], 2, "is no number of samples"),
        (["eval", "sums", "--k", "4", "-n", "2"], 2, "-n says 2"),
        (["eval", "sums", "--resume"], 2, "--resume needs --out"),
        (["eval", "sums", "--tasks", "none.jsonl"], 1, "none.jsonl cannot be read"),
        (["eval", "sums", "--tasks", "some.jsonl", "--domain", "small"], 2, "leave out what else"),
        (["compare", "none", "none"], 1, "holds no run"),
    ],
)
def test_what_is_refused(aenv, here, arguments, code, said):
    answer = aenv(*arguments)
    assert said in answer.err
    assert (answer.code, answer.out) == (code, "")
    assert "Traceback" not in answer.err
    assert not (here / "runs").exists()


# Evaluations


def test_the_oracle_passes_and_nop_does_not(aenv, here):
    table = aenv("eval", "sums", "--out", "run")
    assert table.code == 0, table.err
    assert "4 of 4" in table.out
    assert "1.0000 (0.5101 to 1.0000)" in table.out
    assert "ended in a tool error: 1" in table.err
    assert sorted(os.listdir("run")) == ["report.html", "report.json", "run.json", "trajectories.jsonl"]
    assert "Pass rate by task" in (here / "run" / "report.html").read_text()
    nop = aenv("eval", "sums", "--agent", "nop", "--domain", "large", "-o", "json")
    assert nop.code == 0
    expected = {"env": "sums@1.0.0", "agent": "nop", "tasks": 12, "passed": 0, "failed": 0, "score": 0.0}
    assert {name: nop.data[name] for name in expected} == expected
    assert nop.data["interval"] == [0.0, pytest.approx(0.2425, abs=1e-3)]
    assert nop.data["run"].startswith("runs/sums-")
    assert json.loads(Path(nop.data["run"], "report.json").read_text()) == nop.data


def test_samples_pass_rates_and_what_is_missed(aenv, here):
    arguments = ("eval", "sums", "--agent", "agent.py:sometimes", "--domain", "large", "--k", "1,4")
    arguments += ("--shuffle", "-c", "2")
    answer = aenv(*arguments, "--limit", "6", "-o", "json", "--out", "run")
    found = answer.data
    assert (found["tasks"], found["episodes"], found["n"]) == (6, 24, 4)
    assert 0 < found["passed"] < 24
    assert found["pass@k"]["1"]["value"] == pytest.approx(found["passed"] / 24)
    assert found["pass@k"]["4"]["value"] >= found["pass@k"]["1"]["value"] >= found["pass^k"]["4"]["value"]
    assert found["interval"][0] < found["score"] < found["interval"][1]
    ids = [result["id"] for result in found["results"]]
    assert ids != sorted(ids)
    assert len({trajectory.provenance.instance for trajectory in of("run")}) == 2
    table = aenv(*arguments, "--limit", "6")
    assert "MISSED" in table.out
    assert "pass^4" in table.out


def test_what_cannot_be_scored_is_apart_and_no_zero(aenv, here):
    answer = aenv("eval", "sums", "--domain", "broken", "-o", "json", "--out", "run")
    assert answer.code == 0
    expected = {"tasks": 3, "passed": 2, "failed": 1, "score": 1.0, "failures": {"author_failed": 1}}
    assert {name: answer.data[name] for name in expected} == expected
    table = aenv("eval", "sums", "--domain", "broken", "--out", "run", "--resume", "--retry-failed")
    assert "cannot be judged" in table.out
    assert "2 of 3 episodes have ended" in table.err
    alone = aenv("eval", "sums", "--domain", "broken", "--tasks", "broken-1", "-o", "json")
    assert (alone.code, alone.data["score"], alone.data["failed"]) == (1, None, 1)


def test_what_the_agent_failed_in_was_not_passed(aenv, here):
    (here / "frail.py").write_text(
        "from aenv.evals.agents import Oracle\n\n"
        "oracle = Oracle()\n\n\n"
        "async def play(env, task):\n"
        "    if not task.id.endswith('-1'):\n"
        "        raise ValueError('too hard')\n"
        "    await oracle(env, task)\n"
    )
    arguments = ("eval", "sums", "--agent", "frail.py:play", "--domain", "large", "--limit", "4", "--out", "run")
    answer = aenv(*arguments, "-o", "json")
    expected = {"tasks": 4, "passed": 1, "failed": 0, "agent_failed": 3, "score": 0.25}
    assert {name: answer.data[name] for name in expected} == expected
    assert answer.data["pass_rate"]["value"] == 0.25
    assert [row["scores"] for row in answer.data["results"]].count([0.0]) == 3
    assert [found.ok for found in of("run")].count(False) == 3, "a trainer gets no number of them"
    table = aenv(*arguments, "--resume", "--retry-failed")
    assert "4 of 4 episodes have ended" in table.err, "what counted is not played until it goes well"
    assert "3 episodes, which count as not passed" in table.out
    assert "too hard" in table.out


def test_tasks_of_a_file_and_other_environments(aenv, here):
    (here / "some.jsonl").write_text('{"id": "one"}\n{"id": "two"}\n')
    answer = aenv("eval", "words", "--agent", "nop", "--tasks", "some.jsonl", "--reward", "first", "-o", "json")
    assert (answer.code, answer.data["tasks"], answer.data["passed"]) == (0, 2, 2)
    assert answer.data["taskset"]["source"] == "some.jsonl"


def test_a_program_as_the_agent(aenv, here):
    answer = aenv("eval", "sums", "--agent", "cmd: sh -c 'test -n \"$AENV_AGENT_URL\"'", "--limit", "2", "-o", "json")
    assert (answer.data["episodes"], answer.data["failed"], answer.data["passed"]) == (2, 0, 0)


def test_a_rollout_has_the_same_agents(aenv, here):
    task = {"id": "one", "reset": {"task": "small-1", "domain": "small"}}
    (here / "one.jsonl").write_text(json.dumps(task))
    answer = aenv("rollout", "sums", "--agent", "oracle", "--tasks", "one.jsonl", "-o", "json")
    assert (answer.code, answer.data["reward"]["mean"]) == (0, 1.0)


def test_two_runs_are_compared(aenv, here):
    for agent, folder in (("nop", "before"), ("agent.py:sometimes", "after")):
        assert aenv("eval", "sums", "--agent", agent, "--domain", "large", "--out", folder).code == 0
    table = aenv("compare", "before", "after")
    assert table.code == 0, table.err
    assert "NOW PASSED: " in table.out
    found = aenv("compare", "before", "after", "-o", "json").data
    assert (found["tasks"], found["runs"]["before"]["agent"], found["before"]) == (12, "nop", 0.0)
    assert found["interval"][0] <= found["difference"] <= found["interval"][1]
    assert len(found["won"]) > 0
    assert found["lost"] == []


def in_a_process(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    return Outcome(done.returncode, done.stdout, done.stderr)


def lasting(trajectory):
    """What a trajectory says but for ids, times and the instance."""
    raw = msgspec.to_builtins(trajectory)
    for name in ("id", "began_at", "seconds"):
        del raw[name]
    for name in ("instance", "earlier"):
        raw["provenance"].pop(name, None)
    for call in (call for turn in raw["turns"] for call in turn.get("calls", ())):
        for name in ("at", "seconds"):
            call.pop(name, None)
    return raw


def by_sample(folder):
    return {f"{found.group}/{found.sample}": lasting(found) for found in of(folder)}


def test_an_evaluation_that_was_killed_ends_as_one_that_was_not(aenv, here):
    """The same results, trajectory for trajectory, and the same report."""
    arguments = ["eval", "sums", "--agent", "agent.py:slow", "--domain", "large", "--k", "2", "--seed", "5", "-c", "4"]
    command = [sys.executable, "-m", "aenv", *arguments, "--out", "killed"]
    process = _begun(command, here / "killed" / "trajectories.jsonl", 4)
    try:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    before = len(of("killed"))
    assert 4 <= before < 24
    Path(os.environ["GO_ON"]).touch()
    resumed = in_a_process(*command, "--resume", "-o", "json")
    assert f"{before} of 24 episodes have ended" in resumed.err
    whole = in_a_process(*command[:-1], "whole", "-o", "json")
    assert unlike(by_sample("whole"), by_sample("killed")) is None
    same = ("tasks", "episodes", "passed", "failed", "score", "interval", "pass_rate", "pass@k", "pass^k", "taskset")
    assert {name: resumed.data[name] for name in same} == {name: whole.data[name] for name in same}
    scores = [[result["id"], result["scores"]] for result in whole.data["results"]]
    assert [[result["id"], result["scores"]] for result in resumed.data["results"]] == scores
    other = aenv(*arguments[:-2], "--out", "whole", "--resume", "--tasks", "large-1")
    assert "its tasks was of other tasks" in other.err


def test_json_is_all_that_stdout_has(home, here):
    (here / "loud.py").write_text("print('at import')\n\nasync def play(env, task):\n    print('of the agent')\n")
    command = [sys.executable, "-m", "aenv", "eval", "sums", "--agent", "loud.py:play", "-o", "json", "--out", "run"]
    done = in_a_process(*command)
    assert done.data["passed"] == 0
    assert "of the agent" in done.err
