"""Reasoning Gym: puzzles of many kinds, each made by a seed, and answered with one text that its own scorer judges."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from typing import Any

from reasoning import generating
from reasoning.scoring import score as scored

from aenv import (
    Invalid,
    ToolError,
    register_function,
    register_reset,
    register_reward,
    register_teardown,
    register_tool,
)
from aenv.errors import did_you_mean

ALL = "all"
_LARGEST_SEED = 2**32 - 1
_LONGEST = 100_000
_SYSTEM = "Solve the puzzle. Give your final answer, and nothing but the answer, with the tool answer."

_episode: dict[str, Any] = {}
"""The task, its puzzle, and the answer."""


def _checked(name: str, seed: int, index: int) -> None:
    if name == generating.UNMADE:
        raise Invalid(f"{name} mixes other datasets and cannot be made by its name", hint="ask for them one by one")
    if name not in generating.NAMES:
        raise Invalid(f"Reasoning Gym has no dataset {name!r}", hint=did_you_mean(name, (ALL, *generating.NAMES)))
    if not 0 <= seed <= _LARGEST_SEED:
        raise Invalid(f"dataset_seed must be from 0 to {_LARGEST_SEED}, found {seed}")
    if not 0 <= index < generating.SIZE:
        raise Invalid(
            f"a dataset has the puzzles 0 to {generating.SIZE - 1} for one seed, found {index}",
            hint="more of them have another dataset_seed",
        )


def _parsed(task: str) -> tuple[str, int, int]:
    name, *numbers = task.rsplit("-", 2)
    try:
        seed, index = map(int, numbers)
    except ValueError:
        raise Invalid(f"{task!r} is no task", hint="a task is DATASET-SEED-INDEX, as in chain_sum-1-0") from None
    _checked(name, seed, index)
    return name, seed, index


def _digest(entry: generating.Entry) -> str:
    return hashlib.sha256(entry["question"].encode()).hexdigest()[:16]


@register_function
def tasks(domain: str = "chain_sum", size: int | None = None, dataset_seed: int = 1) -> dict[str, Any]:
    """The puzzles of one dataset, or of each.

    Args:
        domain: The name of a dataset, or all.
        size: How many of each dataset; 50 of one, and 1 when all are asked for.
        dataset_seed: What they are made by.
    """
    number = size if size is not None else (1 if domain == ALL else 50)
    if number < 1:
        raise Invalid(f"size must be 1 or more, found {number}")
    names = generating.NAMES if domain == ALL else (domain,)
    _checked(names[0], dataset_seed, number - 1)
    return {
        "tasks": [_task(name, dataset_seed, index) for name in names for index in range(number)],
        "source": {"name": "reasoning-gym", "version": version("reasoning-gym")},
    }


def _task(name: str, seed: int, index: int) -> dict[str, Any]:
    entry = generating.entry(name, seed, index)
    task = f"{name}-{seed}-{index}"
    return {
        "id": task,
        "instruction": entry["question"],
        "system": _SYSTEM,
        "tools": ["answer"],
        "reset": {"task": task, "question": _digest(entry)},
        "metadata": {"dataset": name, "category": generating.dataset(name, seed).category},
    }


@register_reset
def begin(task: str, question: str = "", seed: int | None = None) -> None:
    """Begin a puzzle. Nothing of an earlier one is left.

    Args:
        task: Dataset, seed and index, as in chain_sum-1-0.
        question: The digest of the question that the agent is told, which must be the one that is made here.
    """
    name, number, index = _parsed(task)
    entry = generating.entry(name, number, index)
    if question and question != _digest(entry):
        raise Invalid(
            f"{task} is another puzzle here than where it was listed",
            hint="list the tasks with the same version of Python and of the packages",
        )
    _episode.clear()
    _episode.update(task=task, dataset=name, seed=number, entry=entry)


@register_tool
def answer(text: str) -> str:
    """Give the answer. It may be given again: the last one counts.

    Args:
        text: The answer and nothing else, in the form that the puzzle asks for.
    """
    _begun()
    if len(text) > _LONGEST:
        raise ToolError(f"an answer has at most {_LONGEST} characters, found {len(text)}")
    _episode["answer"] = text
    return "noted"


def _begun() -> None:
    if not _episode:
        raise Invalid("no puzzle has begun", hint='reset with a task first: reset(1, {"task": "chain_sum-1-0"})')


@register_reward
def score() -> dict[str, Any]:
    """What the dataset's own scorer gives, from 0 to 1; an answer that it cannot score gets 0, and says so."""
    _begun()
    if "answer" not in _episode:
        return {"score": 0.0, "passed": False, "answered": False, "scored": False, "reason": "there is no answer"}
    dataset = generating.dataset(_episode["dataset"], _episode["seed"])
    found = scored(_episode["dataset"], dataset, _episode["answer"], _episode["entry"])
    return {
        "score": found.score or 0.0,
        "passed": found.score is not None and found.score >= 1.0,
        "answered": True,
        "scored": found.score is not None,
        "reason": found.reason,
    }


@register_function
def solution(task: str, question: str = "") -> list[dict[str, Any]]:
    """What an oracle does: it gives the dataset's own answer, where there is one. Takes what the reset takes."""
    found = generating.entry(*_parsed(task))["answer"]
    return [] if found is None else [{"name": "answer", "arguments": {"text": found}}]


@register_teardown
def close() -> None:
    """No process is left."""
    generating.close()
