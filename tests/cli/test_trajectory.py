"""``aenv trajectory``: episodes of a file on the terminal, on a page, and as rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aenv.cli.trajectory import export as export_command
from aenv.rl.exporting import FORMATS
from aenv.rl.files import Writer
from aenv.rl.trajectory import Trajectory
from tests.cli.conftest import Outcome
from tests.rl import made

Run = Callable[..., Outcome]


def write(path: Path, *some: Trajectory) -> Path:
    with Writer(path) as file:
        for of in some:
            file.write(of)
    return path


@pytest.fixture
def run(here: Path) -> Path:
    """The directory of a run."""
    write(here / "run" / "trajectories.jsonl", *made.dozen())
    return here / "run"


def test_a_directory_stands_for_the_file_in_it(aenv: Run, run: Path) -> None:
    of_directory, of_file = aenv("trajectory", "list", run), aenv("trajectory", "list", run / "trajectories.jsonl")
    assert of_directory == of_file
    assert of_file.code == 0


def test_list(aenv: Run, run: Path) -> None:
    answer = aenv("trajectory", "list", run)
    head, *lines = answer.out.splitlines()
    assert head.split() == ["ID", "TASK", "GROUP", "SAMPLE", "OUTCOME", "TURNS", "SECONDS", "REASON"]
    assert lines[6].split()[:6] == ["06c4e9a17f06", "fix-tests", "fix-tests", "2", "sandbox_lost", "1"]
    assert lines[6].endswith("the instance ended with exit code 137")
    assert answer.err == "episodes: 12, scored: 9, failed: 3, mean reward of the scored: 0.6667\n"


def test_list_as_json_has_no_number_for_a_failed_one(aenv: Run, run: Path) -> None:
    items = aenv("trajectory", "list", run, "-o", "json").data["items"]
    assert len(items) == 12
    assert [item["score"] for item in items if item["outcome"] == "sandbox_lost"] == [None, None]
    assert items[0]["score"] == 1.0


def test_list_only_the_failed_and_only_some(aenv: Run, run: Path) -> None:
    items = aenv("trajectory", "list", run, "--failed", "-n", "2", "-o", "json").data["items"]
    assert [item["id"] for item in items] == ["06c4e9a17f06", "09c4e9a17f09"]


@pytest.mark.parametrize("choice", [["--index", "4"], ["--id", "04c4e9a17f04"], ["--id", "04c"]])
def test_show(aenv: Run, run: Path, choice: list[str]) -> None:
    answer = aenv("trajectory", "show", run, *choice)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("mini-terminal@1.0.0  04c4e9a17f04\n")
    assert "1 failed, 6 passed" in answer.out


def test_show_as_json_is_the_trajectory(aenv: Run, run: Path) -> None:
    found = aenv("trajectory", "show", run, "-o", "json").data
    assert (found["schema"], found["id"]) == ("aenv.trajectory/1", "00c4e9a17f00")


def test_show_all_of_a_long_text(aenv: Run, here: Path) -> None:
    file = write(here / "long.jsonl", made.chat("long", "do", [("", "cat", "x" * 5000 + "END")], "done"))
    assert "END" not in aenv("trajectory", "show", file).out
    assert "END" in aenv("trajectory", "show", file, "--full").out


@pytest.mark.parametrize("command", ["list", "show"])
def test_hostile_text_does_not_reach_the_terminal(aenv: Run, here: Path, command: str) -> None:
    file = write(here / "bad.jsonl", made.hostile())
    answer = aenv("trajectory", command, file)
    assert answer.code == 0
    assert "PWNED" in answer.out
    assert not set(answer.out) & set("\x1b\x07\x9b\r\x08\u202e\u2028\x00")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["show", "run", "--index", "12"], 1, "has no episode 12"),
        (["show", "run", "--id", "nobody"], 1, "has no episode 'nobody'"),
        (["show", "run", "--id", "0"], 1, "more than one episode whose id begins with '0'"),
        (["show", "run", "--id", "a", "--index", "0"], 2, "give one of them"),
        (["list", "nowhere"], 1, "there is no file nowhere"),
        (["export", "run", "--format", "opnai"], 1, "there is no format 'opnai'"),
        (["export", "run"], 2, "--format"),
        (["html", "run", "--out", "run/trajectories.jsonl"], 1, "holds the trajectories"),
        (["html", "nowhere"], 1, "there is no file nowhere"),
    ],
)
def test_what_is_wrong_is_said(aenv: Run, run: Path, arguments: list[str], code: int, message: str) -> None:
    before = (run / "trajectories.jsonl").read_bytes()
    answer = aenv("trajectory", *arguments)
    assert (answer.code, answer.out) == (code, "")
    assert message in answer.err.splitlines()[0]
    assert "hint: " in answer.err
    assert (run / "trajectories.jsonl").read_bytes() == before
    assert sorted(file.name for file in run.iterdir()) == ["trajectories.jsonl"]


def test_html_is_written_beside_the_file(aenv: Run, run: Path) -> None:
    record = aenv("trajectory", "html", run, "-o", "json").data
    assert record == {"file": str(run / "trajectories.html"), "episodes": 12, "left_out": 0}
    page = (run / "trajectories.html").read_text(encoding="utf-8")
    assert "<title>run</title>" in page
    assert page.count('type="application/json"') == 13


def test_html_of_some(aenv: Run, run: Path, here: Path) -> None:
    answer = aenv("trajectory", "html", run, "--out", "page.html", "--most", "5", "-o", "json")
    assert answer.data == {"file": "page.html", "episodes": 5, "left_out": 7}
    assert '"leftOut":7' in (here / "page.html").read_text(encoding="utf-8")


def test_export_to_stdout_is_rows_and_nothing_else(aenv: Run, run: Path) -> None:
    answer = aenv("trajectory", "export", run, "--format", "trl")
    rows: list[Any] = [json.loads(line) for line in answer.out.splitlines()]
    assert [row["reward"] for row in rows[:2]] == [1.0, 1.0]
    assert answer.err == "rows: 9, left out: 3, failed: 3\n"
    assert made.GOLD not in answer.out


@pytest.mark.parametrize("format", FORMATS)
def test_export_to_a_file(aenv: Run, run: Path, here: Path, format: str) -> None:
    record = aenv("trajectory", "export", run, "--format", format, "--out", "rows.jsonl", "-o", "json").data
    lines = (here / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert record["rows"] == len(lines) > 0
    assert record["left_out"]["failed"] == 3
    assert format in (export_command.help or "")


def test_a_file_that_cannot_be_read_to_its_end_leaves_what_was_there(aenv: Run, run: Path, here: Path) -> None:
    with (run / "trajectories.jsonl").open("a") as file:
        file.write('{"schema": "else"}\n')
    (here / "rows.jsonl").write_text("before\n")
    answer = aenv("trajectory", "export", run, "--format", "openai", "--out", "rows.jsonl")
    assert answer.code == 1
    assert "trajectories.jsonl:13 has the schema 'else'" in answer.err
    assert (here / "rows.jsonl").read_text() == "before\n"
    assert sorted(file.name for file in here.iterdir()) == ["rows.jsonl", "run"]
