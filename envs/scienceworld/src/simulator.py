"""The simulator: a Java process behind the benchmark's own class, started when it is first needed, and kept."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

from py4j.protocol import Py4JError, Py4JJavaError
from scienceworld import ScienceWorldEnv
from scienceworld.constants import ID2TASK

from aenv import Invalid, SandboxLost
from aenv.errors import did_you_mean

NAMES: tuple[str, ...] = tuple(ID2TASK.values())
"""The benchmark's 30 tasks, in its order."""
Split = Literal["train", "dev", "test"]
_FIRST = "look around"
"""What the benchmark itself does first."""


class Simulator:
    """One world at a time, in one Java process. Safe to use from several threads, one after the other."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._made: ScienceWorldEnv | None = None
        self._current: tuple[str, int] | None = None
        self._moved = False
        self._lost = ""

    def begin(self, name: str, variation: int) -> str:
        """A new world. What is seen in it first."""
        with self._lock:
            self._current, self._lost = None, ""
            try:
                most = self._world().get_max_variations(name)
            except Py4JError:  # it has died, and nobody had noticed
                self.close()
                most = self._world().get_max_variations(name)
            if variation >= most:
                raise Invalid(f"{name} has no variation {variation}", hint=f"the last one is {name}-{most - 1}")
            self._world().load(name, variation)
            self._current, self._moved = (name, variation), False
            seen: str = self._world().server.step(_FIRST)
            return seen

    def act(self, action: str) -> dict[str, Any]:
        """One action, and whether it was the last."""
        with self._lock:
            if self.done:
                return {"observation": "The task is over, and nothing more can be done in it.", "done": True}
            self._moved = True
            return {"observation": self._asked("step", action), "done": self.done}

    def free(self, what: str) -> Any:
        """What takes no time in the world."""
        with self._lock:
            return self._asked(what)

    @property
    def done(self) -> bool:
        """Whether the task is completed, or failed for good."""
        return bool(self._asked("getCompleted")) or self.points < 0

    @property
    def points(self) -> int:
        """From 0 to 100, as the benchmark rounds them; under 0 when something was done that may not be done."""
        return round(100 * self._asked("getScore"))

    def _asked(self, what: str, *arguments: Any) -> Any:
        with self._lock:
            if self._lost:
                raise SandboxLost(self._lost)
            if self._current is None or self._made is None:
                raise Invalid("no task has begun", hint='reset with a task first: reset(1, {"task": "boil-0"})')
            try:
                return getattr(self._made.server, what)(*arguments)
            except Py4JJavaError as exc:  # it lives, and could not do this
                raise RuntimeError(f"the simulator failed: {exc.java_exception}"[:500]) from exc
            except (Py4JError, OSError) as exc:
                self.close()
                self._lost = f"the simulator ended during the episode: {exc}"
                raise SandboxLost(self._lost) from exc

    # For the owner

    def variations(self, name: str, split: Split) -> list[int]:
        """Those of a task that belong to a split."""
        with self._another(name, 0) as world:
            return [int(one) for one in getattr(world, f"get_variations_{split}")()]

    def description(self, name: str, variation: int) -> str:
        """What there is to do."""
        with self._another(name, variation) as world:
            told: str = world.get_task_description()
            return told

    def gold(self, name: str, variation: int) -> list[str]:
        """Actions that solve the task from its beginning, as the benchmark makes them."""
        with self._another(name, variation, gold=True) as world:
            return [str(action) for action in world.get_gold_action_sequence()]

    @contextmanager
    def _another(self, name: str, variation: int, *, gold: bool = False) -> Iterator[ScienceWorldEnv]:
        """Another world, and then the one that is played again, at whose beginning this must be."""
        with self._lock:
            before = self._current
            if before is not None and self._moved:
                raise Invalid(
                    f"{before[0]}-{before[1]} is being played, and there is one world at a time",
                    hint="ask before the first action, after a reset, or in another instance",
                )
            self._current = None  # for as long as it is not there
            world = self._world()
            world.load(name, variation, generateGoldPath=gold)
            yield world
            if before is not None:
                self.begin(*before)

    # The process

    def _world(self) -> ScienceWorldEnv:
        if self._made is not None and self._made._gateway.java_process.poll() is not None:
            self.close()
        if self._made is None:
            if shutil.which("java") is None:
                raise RuntimeError("ScienceWorld runs on Java, and there is none here: install a JRE, 8 or newer")
            self._made = ScienceWorldEnv()
        return self._made

    def close(self) -> None:
        """End the process."""
        with self._lock:
            made, self._made, self._current = self._made, None, None
            if made is not None:
                process = made._gateway.java_process
                with suppress(Exception):
                    made.close()
                process.kill()
                process.wait()


def parsed(task: str) -> tuple[str, int]:
    """The name and the variation of a task such as ``boil-0``."""
    found = re.fullmatch(r"(.+)-(\d{1,9})", task, re.ASCII)
    if found is None or found[1] not in NAMES:
        name = found[1] if found else task
        hint = f"{did_you_mean(name, NAMES)}; a task is NAME-VARIATION, as in boil-0"
        raise Invalid(f"ScienceWorld has no task {task!r}", hint=hint)
    return found[1], int(found[2])
