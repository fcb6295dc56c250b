"""The parts that episodes from outside do not show: the harness, rows, and what is no part of a patch."""

import pytest

pytest.importorskip("swebench", reason="pip install -r requirements.txt")

import custom_env
from swe import harness, rows
from swe.judging import _failing
from swe.prediction import is_test

from aenv.errors import Invalid

TASK = "intervals-merge"
TESTS = ("apart", "touching", "inside", "total", "gaps", "no_gap")


def printed(status: str) -> str:
    lines = [f"{status} tests/test_intervals.py::test_{name}" for name in TESTS]
    return "\n".join([f"+ : '{harness.START}'", *lines, f"+ : '{harness.END}'"])


@pytest.mark.parametrize(("status", "resolved"), [("PASSED", True), ("FAILED", False)])
def test_the_harness_reads_the_log(status: str, resolved: bool) -> None:
    row = rows.find(TASK)
    assert harness.report(row.spec, row.gold, printed(status))["resolved"] is resolved


def test_an_exit_code_that_says_otherwise() -> None:
    row = rows.find(TASK)
    log = printed("PASSED") + "\n>>>>> Test Exit Code: 1\n"
    assert harness.report(row.spec, row.gold, log)["resolved"] is False


def test_a_row_that_cannot_be_judged() -> None:
    values = dict(rows.find(TASK).values)
    with pytest.raises(Invalid, match="swebench has no parser 'parse_log_pytes'"):
        rows.read({**values, "log_parser": "parse_log_pytes"}, "rows.jsonl:1")
    del values["eval_script"]
    with pytest.raises(Invalid, match="has no eval_script"):
        rows.read(values, "rows.jsonl:1")


def test_the_control_comes_once_the_tests_are_there() -> None:
    row = rows.find(TASK)
    script = _failing(row.spec.eval_script, row)
    assert script.index("git apply") < script.index("cat >> tests/test_intervals.py") < script.index(harness.START)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tests/helpers.py", True),
        ("src/pkg/test_it.py", True),
        ("conftest.py", True),
        ("evil.pth", True),
        ("src/pytest/runner.py", False),
        ("src/latest.py", False),
        ("setup.cfg", False),
    ],
)
def test_what_is_no_part_of_a_patch(name: str, expected: bool) -> None:
    assert is_test(name) is expected


def test_tasks_say_nothing_of_their_solution() -> None:
    (task,) = custom_env.tasks([TASK])["tasks"]
    assert task["reset"] == {"task": TASK}
    assert "test_inside" not in str(task)
