"""A run that is kept in a folder: what was asked for, what has ended so far, and how to go on after a kill."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import msgspec
from msgspec import Struct

from aenv.client.environment import Environment
from aenv.errors import AEnvError, Conflict, Invalid
from aenv.rl.batches import rollouts
from aenv.rl.files import NAME, Writer, read
from aenv.rl.groups import Tally
from aenv.rl.playing import Agent
from aenv.rl.tasks import Task
from aenv.rl.trajectory import Failed, Trajectory

ABOUT, REPORT, PAGE = "run.json", "report.json", "report.html"
LABEL = "aenv-run"
"""The label that instances of a run have on a platform, with the run's id."""


class Asked(Struct, frozen=True, kw_only=True):
    """What must be the same for a run to be gone on with."""

    env: str
    agent: str
    tasks: str
    """sha256 over all of them."""
    n: int
    seed: int | None
    rewards: dict[str, float]
    settings: dict[str, Any] = {}
    """Whatever else an episode depends on: its limits, what the model is told."""


class About(Struct, frozen=True, kw_only=True):
    """What a folder says of its run."""

    schema: str = "aenv.run/1"
    id: str
    began_at: float
    asked: Asked


Again = Callable[[Failed], bool]
"""Whether an episode that failed so is played once more."""


class Run:
    """A run in its folder, for the length of a ``with`` block: what is added to it is there for good."""

    def __init__(self, folder: Path, about: About, *, resumed: bool, again: Again | None) -> None:
        self.folder = folder
        self.about = about
        self.resumed = resumed
        self.tally = Tally()
        self.done: set[tuple[str, int]] = set()
        """Episodes that have ended, as (group, sample)."""
        self._again = again
        self._writer = Writer(folder / NAME)

    @classmethod
    def open(cls, folder: Path, asked: Asked, *, resume: bool, again: Again | None = None) -> Run:
        """A new run in a folder, or, with ``resume``, the one that is there; ``again`` tells what of all that failed is
        played once more."""
        about = about_run(folder)
        if about is None:
            if (folder / NAME).exists():  # of whom, nobody knows: they are no part of this run
                raise Invalid(f"{folder} has trajectories and no {ABOUT}, so it cannot be gone on with")
            return cls(folder, _new(folder, asked), resumed=False, again=again)
        if not resume:
            raise Conflict(f"{folder} holds a run already", hint="--resume goes on with it; --out names another folder")
        for name in Asked.__struct_fields__:
            before, now = getattr(about.asked, name), getattr(asked, name)
            if before != now:
                shown = f"{before!r}, and now it is {now!r}" if name != "tasks" else "of other tasks"
                raise Invalid(f"the run in {folder} cannot be gone on with: its {name} was {shown}")
        return cls(folder, about, resumed=True, again=again)

    def __enter__(self) -> Self:
        self._writer.__enter__()
        try:
            if self._again is not None:
                self._forget_failed(self._again)
            for trajectory in self.trajectories():
                self._note(trajectory)
        except BaseException:
            self._writer.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.__exit__(None, None, None)

    def add(self, trajectory: Trajectory) -> None:
        """Write down an episode that has ended."""
        self._writer.write(trajectory)
        self._note(trajectory)

    async def play(
        self, env: Environment, agent: Agent, tasks: Sequence[Task], told: Callable[[], None] | None = None, **how: Any
    ) -> None:
        """Play what has not ended yet, and add each episode as it ends, of which ``told`` hears; ``how`` are further
        arguments of ``rollouts``."""
        asked = self.about.asked
        async with rollouts(env, agent, tasks, n=asked.n, seed=asked.seed, skip=self.done, **how) as going:
            async for trajectory in going:
                self.add(trajectory)
                if told is not None:
                    told()

    def trajectories(self) -> Iterator[Trajectory]:
        """What there is so far."""
        return read(self.folder / NAME)

    def _note(self, trajectory: Trajectory) -> None:
        key = (trajectory.group, trajectory.sample)
        if key in self.done:
            raise Invalid(f"{self._writer.path} has two episodes of {key[0]!r}, sample {key[1]}")
        self.done.add(key)
        self.tally.add(trajectory)

    def _forget_failed(self, again: Again) -> None:
        """Leave out what is played once more, in one step: whatever happens meanwhile, the file is whole."""
        path = self._writer.path
        new = path.with_name(f".{path.name}.new")
        new.unlink(missing_ok=True)
        with ExitStack() as stack:
            kept = stack.enter_context(Writer(new))
            for trajectory in self.trajectories():
                if trajectory.failure is None or not again(trajectory.failure):
                    kept.write(trajectory)
            new.replace(path)
            stack.pop_all()
        before, self._writer = self._writer, kept
        kept.path = path
        before.__exit__(None, None, None)


def tasks_digest(tasks: list[Task]) -> str:
    """sha256 over tasks, in their order."""
    return hashlib.sha256("".join(task.digest() for task in tasks).encode()).hexdigest()


def about_run(folder: Path) -> About | None:
    """What a folder says of its run; None when it holds none."""
    try:
        return msgspec.json.decode((folder / ABOUT).read_bytes(), type=About)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as exc:
        raise Invalid(f"{folder / ABOUT} cannot be read: {exc}") from exc


def _new(folder: Path, asked: Asked) -> About:
    about = About(id=secrets.token_hex(6), began_at=time.time(), asked=asked)
    write_whole(folder / ABOUT, about)
    return about


def write_whole(path: Path, value: Any) -> None:
    """Write a text, or anything else as JSON, in one step: whoever reads it finds all of it, or what was before."""
    data = value.encode() if isinstance(value, str) else msgspec.json.format(msgspec.json.encode(value)) + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.{os.getpid()}")
        new.write_bytes(data)
        new.replace(path)
    except OSError as exc:
        raise AEnvError(f"{path} cannot be written: {exc.strerror or exc}") from exc
