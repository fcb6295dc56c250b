"""What is known of tasks before any of them is begun."""

import asyncio
from pathlib import Path

import custom_env
import pytest
from terminal_bench.recipes import Copy, NotPlain, Run, recipe
from terminal_bench.tasks import TASKS, find, names

from aenv import Invalid, ToolError


def made(folder: Path, dockerfile: str, **files: str) -> Path:
    (folder / "Dockerfile").write_text(dockerfile)
    for name, text in files.items():
        place = folder / name.replace("__", "/")
        place.parent.mkdir(exist_ok=True)
        place.write_text(text)
    return folder


def test_all_tasks_of_the_project_can_be_played_in_a_plain_system():
    assert names() == sorted(path.name for path in TASKS.iterdir() if path.is_dir())
    for name in names():
        assert find(name).wrong(built=False) == ""
        assert find(name).recipe().workdir == "/app"


def test_the_list_gives_nothing_away():
    listed = custom_env.tasks()
    assert [task["id"] for task in listed["tasks"]] == names()
    for task in listed["tasks"]:
        assert set(task) == {"id", "instruction", "reset", "metadata"}
        assert task["reset"] == {"task": task["id"]}
        for secret in ("solution/solve.sh", "tests/check.py"):
            assert (TASKS / task["id"] / secret).read_text() not in str(task)


def test_images_are_named_by_what_the_caller_says():
    listed = custom_env.tasks(["log-report"], images="reg.example.org/tb/{task}:1")["tasks"]
    assert (listed[0]["datasource"], listed[0]["reset"]["built"]) == ("reg.example.org/tb/log-report:1", True)
    everything = custom_env.tasks(images="tb-{task}")
    assert [left["id"] for left in everything["left_out"]] == ["sealed-cipher"]
    with pytest.raises(Invalid, match="a container of its own"):
        custom_env.tasks(["sealed-cipher"], images="tb-{task}")


def test_a_dockerfile_is_followed(tmp_path):
    folder = made(
        tmp_path,
        '# a comment\nARG WHO=me\nFROM docker.io/library/python:3.11-slim AS base\nENV A=1 B="two words"\nENV C ${A}x\n'
        "WORKDIR /srv\nWORKDIR ${A}\nCOPY --chown=0:0 --chmod=700 run.sh run\nCOPY data /data\nCOPY data/x.txt ./\n"
        'RUN echo $WHO \\\n  > who\nRUN ["touch", "made"]\nUSER root\nEXPOSE 80\nCMD ["run"]\n',
        **{"run.sh": "x", "data__x.txt": "1"},
    )
    found = recipe(folder)
    assert (found.workdir, found.variables) == ("/srv/1", {"A": "1", "B": "two words", "C": "1x"})
    files = [(step.target, step.mode) for step in found.steps if isinstance(step, Copy)]
    assert files == [("/srv/1/run", 0o700), ("/data/x.txt", None), ("/srv/1/x.txt", None)]
    runs = [step for step in found.steps if isinstance(step, Run)]
    assert [step.command for step in runs] == ["echo $WHO    > who", ["touch", "made"]]
    assert (runs[0].variables["WHO"], runs[0].workdir, runs[0].line) == ("me", "/srv/1", 11)


@pytest.mark.parametrize(
    ("dockerfile", "why"),
    [
        ("FROM gcc:13\n", "gcc:13 is not a plain system"),
        ("FROM debian\nRUN apt-get update && apt-get install -y git\n", "line 2.*installs by apt-get"),
        ("FROM debian AS one\nFROM debian\n", "several stages"),
        ("FROM debian\nCOPY --from=one /x /x\n", "--from=one needs an image"),
        ("FROM debian\nUSER agent\n", "a user of the image's"),
        ("FROM debian\nCOPY missing /x\n", "missing is not among its files"),
        ("FROM debian\nCOPY ../../etc/passwd /x\n", "not among its files"),
        ("FROM debian\nADD https://example.org/x /x\n", "fetches or unpacks"),
        ("FROM debian\nRUN <<END\nEND\n", "needs a builder"),
        ("FROM debian\nSHELL ['x']\n", "SHELL needs an image"),
    ],
)
def test_what_takes_an_image_is_said_to(tmp_path, dockerfile, why):
    with pytest.raises(NotPlain, match=why):
        recipe(made(tmp_path, dockerfile))


def test_a_task_that_is_not_there_is_said_to_be_near_another():
    with pytest.raises(Invalid) as caught:
        find("log-rapport")
    assert "log-report" in caught.value.hint


def test_a_timeout_must_be_one():
    with pytest.raises(ToolError, match="over 0"):
        asyncio.run(custom_env.execute_command("true", timeout=0))
