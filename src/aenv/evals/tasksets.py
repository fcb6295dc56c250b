"""Many tasks of one environment: where they come from, and which of them are meant."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import msgspec
from msgspec import Struct

from aenv.client.environment import Environment
from aenv.errors import Invalid, NotFound, Unsupported, did_you_mean, nearest
from aenv.rl.playing import template
from aenv.rl.runs import tasks_digest
from aenv.rl.tasks import Task, read_tasks

FUNCTION = "tasks"
"""The owner's function of an environment that tells its tasks."""
HOW = "write '@register_function def tasks() -> dict', which returns {'tasks': [{'id': ..., 'instruction': ...}, ...]}"


class Source(Struct, frozen=True, kw_only=True):
    """Where tasks come from."""

    name: str = ""
    version: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip()


class _Told(Struct):
    """What the function ``tasks`` returns."""

    tasks: list[dict[str, Any]]
    source: Source = Source()


@dataclass(frozen=True, kw_only=True)
class Taskset:
    """Tasks of one environment, in an order that stays."""

    env: str
    tasks: tuple[Task, ...]
    source: Source = field(default_factory=Source)
    selection: Mapping[str, Any] = field(default_factory=dict)
    """What the environment was asked for, such as ``domain``."""

    @classmethod
    async def load(cls, env: str | Environment, selection: Mapping[str, Any] | None = None) -> Self:
        """Ask an instance of the environment. ``selection`` are arguments of its function ``tasks``; texts are read
        as the types that it takes."""
        asked = Environment.like(template(env))
        name = str(asked.spec.env)
        async with asked:
            takes = parameters(await asked.list_functions(), FUNCTION)
            if takes is None:
                hint = f"{HOW}; or give a file of tasks, one JSON object a line"
                raise Unsupported(f"{name} does not tell its tasks: it has no function 'tasks'", hint=hint)
            chosen = {key: _fitting(takes, key, value, name) for key, value in (selection or {}).items()}
            told = await asked.call_function(FUNCTION, chosen)
        try:
            found = msgspec.convert(told, _Told)
        except msgspec.ValidationError as exc:
            raise Invalid(f"the function 'tasks' of {name} returned no tasks: {exc}", hint=HOW) from exc
        return cls(env=name, tasks=_unique(found.tasks, name), source=found.source, selection=chosen)

    @classmethod
    def read(cls, env: str, path: Path) -> Self:
        """The tasks of a file, one JSON object a line."""
        return cls(env=env, tasks=tuple(read_tasks(path)), source=Source(name=path.name))

    @cached_property
    def digest(self) -> str:
        """sha256 over all of them, in their order."""
        return tasks_digest(list(self.tasks))

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def __getitem__(self, id: str) -> Task:
        return self.only(id).tasks[0]

    def only(self, *names: str) -> Self:
        """Those of these ids, or that fit one of these patterns (``*``, ``?``, ``[...]``); several may stand in one
        text, with commas between. What fits none is an error."""
        ids = [task.id for task in self.tasks]
        wanted: set[str] = set()
        for name in names:
            for part in [name] if name in ids else name.split(","):
                text = part.strip()
                fitting = {text} if text in ids else {id for id in ids if fnmatchcase(id, text)}
                if not fitting:
                    near = nearest(text, ids)
                    hint = f"did you mean {near!r}?" if near else f"'aenv tasks list {self.env}' shows those it has"
                    raise NotFound(f"{self.env} has no task {text!r} among these {len(ids)}", hint=hint)
                wanted |= fitting
        return self._with([task for task in self.tasks if task.id in wanted])

    def shuffled(self, seed: int) -> Self:
        """The same in an order that follows from the seed."""
        tasks = list(self.tasks)
        random.Random(seed).shuffle(tasks)  # noqa: S311 - it has to be repeatable
        return self._with(tasks)

    def head(self, size: int) -> Self:
        """The first so many."""
        return self._with(self.tasks[:size])

    def split(self, share: float, seed: int = 0) -> tuple[Self, Self]:
        """Two parts that have nothing in common, the first with that share of the tasks; each in the order of all."""
        if not 0 < share < 1:
            raise Invalid(f"a share of {share:g} leaves nothing for one of two parts", hint="give one between 0 and 1")
        first = {task.id for task in self.shuffled(seed).tasks[: round(share * len(self))]}
        return (
            self._with([task for task in self.tasks if task.id in first]),
            self._with([task for task in self.tasks if task.id not in first]),
        )

    def _with(self, tasks: Sequence[Task]) -> Self:
        return replace(self, tasks=tuple(tasks))


def parameters(functions: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """What an environment's function takes, by name, as schemas; None where it has no such function."""
    for function in functions["functions"]:
        if function["name"] == name:
            found: dict[str, Any] = function["inputSchema"].get("properties", {})
            return found
    return None


def _fitting(takes: Mapping[str, Any], key: str, value: Any, env: str) -> Any:
    """A value of a selection as its parameter takes it: of a text that stands for something else, that."""
    if key not in takes:
        hint = did_you_mean(key, takes) if takes else "leave it out: they cannot be chosen by anything"
        raise Invalid(f"the tasks of {env} cannot be chosen by {key!r}", hint=hint)
    if not isinstance(value, str) or _takes_text(takes[key]):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.MsgspecError:
        return value


def _takes_text(schema: Any) -> bool:
    """Whether a text is what a parameter takes, and not only what it is made of."""
    kinds = [schema, *schema.get("anyOf", ())] if isinstance(schema, dict) else []
    return any("string" in kind.get("type", ()) or "enum" in kind or "const" in kind for kind in kinds)


def _unique(given: Sequence[Mapping[str, Any]], env: str) -> tuple[Task, ...]:
    tasks: dict[str, Task] = {}
    for place, fields in enumerate(given):
        try:
            task = Task.of(fields)
        except Invalid as exc:
            raise Invalid(f"task {place} of {env}: {exc.message}", hint=exc.hint) from exc
        if task.id in tasks:
            raise Invalid(f"{env} has two tasks {task.id!r}", hint="give each an id of its own")
        tasks[task.id] = task
    if not tasks:
        raise NotFound(f"{env} has no tasks in this selection")
    return tuple(tasks.values())
