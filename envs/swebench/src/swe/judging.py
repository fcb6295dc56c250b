"""The verdict: the row's own script on a fresh checkout with the patch, and the harness on what it printed.

The tests run in one process with the code that they test, so a patch can print whatever a log consists of, end the
process, or bend the runner of the tests. The harness compares the log with the exit code. Here, a patch that resolved
its task is put to a control: the same run, in which every test that had to pass is made to fail. Where the log says
that one passed nonetheless, the log is not that of the tests.
"""

from __future__ import annotations

import shlex
import time
from typing import Any, Literal

from aenv.errors import AEnvError
from swe import harness
from swe.rows import Row
from swe.testbed import Testbed

TIME = 1800.0
"""Seconds that the tests may take, as in the harness."""
MOST = 32 * 1024 * 1024
"""Bytes of a log."""
SHOWN = 8000
_APPLY = (
    "git apply --verbose",
    "git apply --verbose --3way",
    "git apply --verbose --reject",
    "patch --batch --forward --fuzz=5 -p1 -i",
)
"""What the harness tries, one after the other."""
_AGAIN = "git reset -q --hard HEAD && git clean -q -fd"
_RUN = "source /tmp/eval.sh 2>&1"
"""All of the script is read before the first line of it runs."""
_FAILING = """

def _fails(found):
    import functools

    @functools.wraps(found)
    def failing(*args, **kwargs):
        raise AssertionError("every test of this run fails")

    return failing


for _name, _found in list(globals().items()):
    if isinstance(_found, type):
        for _test in [name for name in dir(_found) if name.startswith("test") and callable(getattr(_found, name))]:
            setattr(_found, _test, _fails(getattr(_found, _test)))
    elif _name.startswith("test") and callable(_found):
        globals()[_name] = _fails(_found)
"""
Control = Literal["held", "failed", "not possible", "not needed"]


async def judge(testbed: Testbed, row: Row, patch: str) -> dict[str, Any]:
    """The score of a patch, and what it consists of."""
    began = time.monotonic()
    if not patch.strip():
        verdict, log = {"resolved": False, "patch_successfully_applied": False}, "there is no patch"
    else:
        verdict, log = await _evaluate(testbed, row, patch)
        if verdict.get("patch_exists") and not verdict["patch_successfully_applied"]:
            await _check(testbed, row)
    control: Control = "not needed"
    if verdict["resolved"]:
        control = await _control(testbed, row, patch)
    statuses = verdict.get("tests_status", {})
    return {
        "score": float(verdict["resolved"] and control != "failed"),
        "resolved": verdict["resolved"],
        "control": control,
        "applied": verdict["patch_successfully_applied"],
        "infra_failure": verdict.get("infra_failure_reason", "") if verdict.get("infra_failure") else "",
        **{kind.lower(): _counts(statuses[kind]) for kind in ("FAIL_TO_PASS", "PASS_TO_PASS") if kind in statuses},
        "log": log[-SHOWN:],
        "seconds": round(time.monotonic() - began, 3),
    }


async def _check(testbed: Testbed, row: Row) -> None:
    """Where nothing that a patch printed can be read as a log of tests, that is the patch's fault if the gold's can."""
    verdict, log = await _evaluate(testbed, row, row.gold)
    if not verdict["resolved"]:
        raise AEnvError(f"{row.id} cannot be judged here, since its own patch does not resolve it: {log[-SHOWN:]}")


async def _control(testbed: Testbed, row: Row, patch: str) -> Control:
    if not _python(row):
        return "not possible"
    if not await _passing(testbed, row, patch):
        return "held"
    gold = await _passing(testbed, row, row.gold)
    return "not possible" if gold else "failed"  # tests that are made where no control reaches them


async def _passing(testbed: Testbed, row: Row, patch: str) -> list[str]:
    """The tests that pass by the log of a run in which none can."""
    verdict, _ = await _evaluate(testbed, row, patch, failing=True)
    passing: list[str] = verdict.get("tests_status", {}).get("FAIL_TO_PASS", {}).get("success", [])
    return passing


async def _evaluate(testbed: Testbed, row: Row, patch: str, *, failing: bool = False) -> tuple[dict[str, Any], str]:
    await testbed.fresh(row)
    await testbed.second.write("/tmp/patch.diff", patch.encode(errors="surrogateescape"))  # noqa: S108
    for number, command in enumerate(_APPLY):
        if number:
            await testbed.run(_AGAIN, TIME)
        applied = await testbed.run(f"{command} /tmp/patch.diff", TIME)
        if applied.returncode == 0:
            break
    else:
        said = (applied.stdout + applied.stderr)[-SHOWN:]
        return {"resolved": False, "patch_successfully_applied": False}, f"the patch does not apply: {said}"
    script = row.spec.eval_script.replace(row.values["base_commit"], "HEAD")  # the history is one commit here
    await testbed.second.write("/tmp/eval.sh", _failing(script, row) if failing else script)  # noqa: S108
    log = bytearray()

    def hear(_: str, piece: bytes) -> None:
        log.extend(piece[: MOST - len(log)])

    done = await testbed.run(_RUN, TIME, hear)
    text = log.decode(errors="replace")
    if done.timed_out:
        text += f"\n\nTimeout error: {TIME:g} seconds exceeded."
        return {"resolved": False, "patch_successfully_applied": True}, text
    return harness.report(row.spec, patch, text), text


def _failing(script: str, row: Row) -> str:
    """The script with tests that fail, once it has brought them in."""
    lines = script.split("\n")
    start = next((number for number, line in enumerate(lines) if harness.START in line), None)
    if start is None:
        raise AEnvError(f"the eval_script of {row.id} does not mark where its tests begin")
    added = [f"cat >> {shlex.quote(name)} <<'EVERY_TEST_FAILS'\n{_FAILING}\nEVERY_TEST_FAILS" for name in _python(row)]
    return "\n".join([*lines[:start], *added, *lines[start:]])


def _python(row: Row) -> list[str]:
    return [name for name in row.test_files if name.endswith(".py")]


def _counts(found: dict[str, list[str]]) -> dict[str, Any]:
    return {"passed": len(found["success"]), "failed": found["failure"]}
