"""A task: what one episode is about, and what its instance is given."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from aenv.errors import Invalid, NotFound, did_you_mean


class Task(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one episode is about. Whatever stands here is kept in the trajectory, so it holds no secrets."""

    id: str = ""
    """Names the task among others; made of its content when it is not given."""
    instruction: str = ""
    """What the agent is told to do."""
    system: str = ""
    """The system prompt, for agents that are models."""
    tools: list[str] = []
    """The tools that the agent is offered, and may call, by their bare names; all of them where none is named. Whoever
    is given ``agent_url`` sees all of them: what must not be called there, the environment refuses itself."""
    datasource: str = ""
    arguments: list[str] = []
    """What its instance is made with, as in ``Environment``."""
    files: dict[str, str] = {}
    """Texts that are written into the sandbox before the agent begins, by their paths."""
    reset: dict[str, Any] = {}
    """Arguments of the environment's reset, beside the seed: which of its tasks it is, for example."""
    reward: dict[str, Any] = {}
    """Arguments of the reward, which no model sees."""
    seed: int | None = None
    """The seed of every episode of this task; without one, the rollout decides."""
    metadata: dict[str, Any] = {}
    """Whatever else is known of it, for the agent's program and for readers."""

    @classmethod
    def of(cls, given: Task | str | Mapping[str, Any] | None) -> Task:
        """A task from what callers have: an instruction, a mapping with its fields, or a task."""
        if isinstance(given, Task):
            task = given
        elif given is None or isinstance(given, str):
            task = cls(instruction=given or "")
        else:
            known = cls.__struct_fields__
            if unknown := [name for name in given if name not in known]:
                hint = f"{did_you_mean(str(unknown[0]), known)}; whatever else is known of it goes into metadata"
                raise Invalid(f"a task has no {str(unknown[0])[:100]!r}", hint=hint)
            try:
                task = msgspec.convert(dict(given), cls)
            except msgspec.ValidationError as exc:
                raise Invalid(f"that is no task: {exc}", hint=f"a task has {', '.join(known)}") from exc
        return task if task.id else msgspec.structs.replace(task, id=f"task-{task.digest()[:12]}")

    def digest(self) -> str:
        """sha256 over everything that it says."""
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()


def read_tasks(file: Path) -> list[Task]:
    """The tasks of a file, in its order: a JSON object a line, or an instruction as a JSON text."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as exc:
        raise NotFound(f"{file} cannot be read: {exc.strerror or exc}") from exc
    tasks: dict[str, Task] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            given = msgspec.json.decode(line)
            if not isinstance(given, (str, dict)):
                raise Invalid(f"{line[:80].decode(errors='replace')} is no task", hint="write a JSON object a line")
            task = Task.of(given)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as exc:
            raise Invalid(f"{file}:{number}: {exc}", hint="write a JSON object a line") from exc
        except Invalid as exc:
            raise Invalid(f"{file}:{number}: {exc.message}", hint=exc.hint) from exc
        if task.id in tasks:
            raise Invalid(f"{file}:{number}: there is a task {task.id!r} already", hint="give each an id of its own")
        tasks[task.id] = task
    if not tasks:
        raise Invalid(f"{file} has no tasks", hint="write a JSON object a line")
    return list(tasks.values())
