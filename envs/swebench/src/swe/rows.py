"""The rows that are played: SWE-bench's, one JSON object on a line, and a checkout of the repository for each.

They are files of the project, so only the main sandbox has them: ``rows.jsonl``, ``repos/CHECKOUT`` for each row, and
``packages`` with what their tests import beside pytest. Nothing of them is in the second sandbox but the checkout.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from aenv.errors import Invalid, did_you_mean, nearest
from swe import harness

PROJECT = Path(__file__).resolve().parents[2]
PACKAGES = PROJECT / "packages"
NEEDED = ("instance_id", "repo", "base_commit", "patch", "problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS")
JUDGED = ("eval_script", "log_parser", "eval_type")
"""What the harness runs, and how it reads what that prints; rows of old have none of it."""


class Row(NamedTuple):
    """One row, and what the harness makes of it."""

    values: dict[str, Any]
    spec: Any

    @property
    def id(self) -> str:
        return str(self.values["instance_id"])

    @property
    def gold(self) -> str:
        return str(self.values["patch"])

    @property
    def image(self) -> str:
        return str(self.values["image"])

    @property
    def checkout(self) -> Path:
        return PROJECT / "repos" / str(self.values.get("checkout") or self.id)

    @property
    def test_files(self) -> list[str]:
        """The files with the tests that must pass in the end: those that the row's own patch of tests writes, and those
        that the names of the tests say."""
        patched = [line[6:] for line in self.values.get("test_patch", "").splitlines() if line.startswith("+++ b/")]
        named = [test.partition("::")[0] for test in self.spec.FAIL_TO_PASS if "::" in test]
        return sorted({name.strip() for name in (*patched, *named)})


@cache
def rows() -> dict[str, Row]:
    """By their ids, in the order of the file."""
    found: dict[str, Row] = {}
    file = PROJECT / "rows.jsonl"
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            row = read(json.loads(line), f"{file.name}:{number}")
            found[row.id] = row
    return found


def find(task: str) -> Row:
    """The row of a task."""
    known = rows()
    if task not in known:
        near = nearest(task, known)
        hint = f"did you mean {near!r}?" if near else "the function tasks lists them"
        raise Invalid(f"there is no task {task!r}", hint=hint)
    return known[task]


def read(values: dict[str, Any], where: str) -> Row:
    """A row from its fields; ``Invalid`` where the harness could not judge it."""
    if missing := [name for name in (*NEEDED, *JUDGED) if name not in values]:
        hint = "rows of swebench 5 say how they are judged; with_rows.py adds it to others: --command and --parser"
        raise Invalid(f"{where} has no {', '.join(missing)}", hint=hint)
    if values["log_parser"] not in harness.PARSERS:
        hint = did_you_mean(values["log_parser"], harness.PARSERS)
        raise Invalid(f"{where}: swebench has no parser {values['log_parser']!r}", hint=hint)
    if not (harness.START in values["eval_script"] and harness.END in values["eval_script"]):
        raise Invalid(f"{where}: its eval_script does not mark the output of its tests with {harness.START!r}")
    complete = {"image": "", "version": "", "test_patch": "", **values}
    return Row(complete, harness.spec_of(complete))
