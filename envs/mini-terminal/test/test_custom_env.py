import asyncio

import custom_env
import pytest
from custom_env import Check

from aenv import Invalid, ToolError


@pytest.fixture(autouse=True)
def work_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert custom_env.reset()["processes_ended"]


def run(command, timeout=30):
    return custom_env.execute_command(command, timeout)


def test_the_answer():
    assert run("echo helloworld") == {
        "output": ["helloworld\n", True],
        "returncode": 0,
        "stdout": "helloworld\n",
        "stderr": "",
        "truncated": False,
        "note": "",
    }


def test_the_shell_stays():
    run("mkdir inner && cd inner && export NAME=kept")
    assert run("basename $PWD; echo $NAME; false")["stdout"] == "inner\nkept\n"
    assert run("echo $?")["stdout"] == "1\n"


def test_a_slow_command_is_ended_and_the_shell_stays():
    run("NAME=kept")
    answer = run("echo begun; sleep 60; touch never", timeout=1)
    assert answer["output"] == ["begun\n", False]
    assert answer["returncode"] == 124
    assert run("echo $NAME; ls")["stdout"] == "kept\n"


def test_exit_is_not_the_end():
    run("NAME=kept")
    answer = run("exit 3")
    assert answer["returncode"] == 3
    assert "started again" in answer["note"]
    assert run("echo $NAME")["stdout"] == "kept\n"


def test_files(work_directory):
    run("mkdir inner && cd inner")
    assert custom_env.write_file("a/b.txt", "one\n")["path"] == str(work_directory / "inner/a/b.txt")
    custom_env.write_file("a/b.txt", "two\n", append=True)
    assert custom_env.read_file("a/b.txt")["content"] == "one\ntwo\n"
    assert [entry["name"] for entry in custom_env.list_files("a")["entries"]] == ["b.txt"]
    with pytest.raises(ToolError, match="No such file"):
        custom_env.read_file("nothing")


def test_the_reward():
    run("echo hello > a.txt; cd /")
    found = custom_env.score(
        [
            Check("file_exists", path="a.txt"),
            Check("file_contains", path="a.txt", text="hell"),
            Check("file_equals", path="a.txt", text="hello"),
            Check("command", command="grep hello a.txt", output="hello"),
        ]
    )
    assert found["score"] == 0.75
    assert found["checks"][2]["why"] == "the file has 6 bytes, 5 are expected"
    with pytest.raises(Invalid):
        custom_env.score([])


def test_health_starts_nothing():
    found = asyncio.run(custom_env.health())
    assert (found["status"], found["directory"]) == ("healthy", None)
