"""``aenv replay``: whether recorded episodes come out the same when they are run again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aenv.cli.output import FAILED, harmless, label, output_option, say, show_json, show_table
from aenv.cli.project import run_async
from aenv.errors import Invalid, NotFound

if TYPE_CHECKING:
    from aenv.client.environment import Environment
    from aenv.rl.replaying import Replayed
    from aenv.rl.trajectory import Trajectory

"""What a file of trajectories is called in a directory of a run."""
EVERY = 2.0
"""Seconds between two words on how far it is."""


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--env", metavar="NAME", help="Replay in this environment instead of the recorded one.")
@click.option("--id", "ids", metavar="ID", multiple=True, help="Only the trajectory with this id. May be repeated.")
@click.option(
    "--index",
    "places",
    type=click.IntRange(0),
    metavar="N",
    multiple=True,
    help="Only the trajectory at this place of the file, from 0. May be repeated.",
)
@click.option("--concurrency", type=click.IntRange(1), default=8, help="Most episodes at a time.")
@click.option("--no-reward", is_flag=True, help="Take no reward: compare what the tools gave, and nothing else.")
@click.option(
    "--system-url", metavar="URL", help="Replay on this platform, not on this machine. Also: AENV_SYSTEM_URL."
)
@output_option
def replay(
    *,
    file: Path,
    env: str | None,
    ids: tuple[str, ...],
    places: tuple[int, ...],
    concurrency: int,
    no_reward: bool,
    system_url: str | None,
    output: str,
) -> int:
    """Run recorded episodes again, and show the first difference.

    FILE is a file of trajectories, or a directory with a trajectories.jsonl. Each episode gets a fresh instance of the
    environment and version that it was recorded in, with its seed, and makes the recorded calls one after the other.
    What each gives, and the rewards of the environment, are compared with the record. Episodes that failed before
    their agent began are left out.

    Replay files that you trust: they choose the environment, and what is done in it.

    Exit code 1 when an episode differs, or could not be replayed: the last line says which.

    \b
    Example:
      aenv replay trajectories.jsonl
      aenv replay runs/today --index 3 -o json
      aenv replay runs/today --env my-env@1.1.0
    """
    from aenv.rl.files import located, read

    path = located(file)
    chosen = _chosen(read(path), ids, set(places))
    found = run_async(_Replays(chosen, env, system_url, rewards=not no_reward).run(concurrency))
    if not found.ended:
        reason = f"{found.left_out} failed before their agent began" if found.left_out else "there is none"
        raise Invalid(f"{path} has no episode to replay: {reason}")
    _show(found, output)
    return FAILED if any(replayed.verdict != "same" for replayed in found.ended) else 0


def _chosen(read: Iterator[Trajectory], ids: Collection[str], places: Collection[int]) -> Iterator[Trajectory]:
    """The trajectories that are meant; a name or a place that the file does not have is an error at its end."""
    seen: set[str] = set()
    count = 0
    for trajectory in read:
        if not (ids or places) or trajectory.id in ids or count in places:
            yield trajectory
        seen.add(trajectory.id)
        count += 1
    if missing := [id for id in ids if id not in seen]:
        raise NotFound(f"the file has no trajectory {missing[0]}")
    if places and max(places) >= count:
        raise NotFound(f"the file has no trajectory at {max(places)}", hint=f"it has {count}, from 0")


class _Replays:
    """Replays of trajectories as they are read, so many at a time."""

    def __init__(
        self, trajectories: Iterator[Trajectory], env: str | None, system_url: str | None, *, rewards: bool
    ) -> None:
        self._trajectories = enumerate(trajectories)
        self._env = env
        self._system_url = system_url
        self._rewards = rewards
        self._found: dict[int, Replayed] = {}
        self.left_out = 0

    @property
    def ended(self) -> list[Replayed]:
        """In the order of the file."""
        return [self._found[place] for place in sorted(self._found)]

    async def run(self, concurrency: int) -> _Replays:
        from aenv import http

        telling = asyncio.create_task(self._tell())
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(self._work())
        except BaseExceptionGroup as exc:
            raise exc.exceptions[0] from None
        finally:
            telling.cancel()
            with suppress(asyncio.CancelledError):
                await telling
            await http.close()
        return self

    async def _work(self) -> None:
        from aenv.rl.replaying import is_replayable, replay

        for place, trajectory in self._trajectories:
            if is_replayable(trajectory):
                self._found[place] = await replay(trajectory, self._like(trajectory), rewards=self._rewards)
            else:
                self.left_out += 1

    def _like(self, trajectory: Trajectory) -> str | Environment | None:
        if self._system_url is None:
            return self._env
        from aenv.client.environment import Environment

        name = self._env or trajectory.provenance.env or trajectory.env
        return Environment(name, aenv_url=self._system_url)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(EVERY)
            say(f"replayed so far: {_counted(self.ended)}")


def _counted(ended: list[Replayed]) -> str:
    counts = Counter(replayed.verdict for replayed in ended)
    return f"{len(ended)} ({', '.join(f'{counts[verdict]} {verdict}' for verdict in ('same', 'differs', 'failed'))})"


def _show(found: _Replays, output: str) -> None:
    counts = Counter(replayed.verdict for replayed in found.ended)
    if output == "json":
        from msgspec import to_builtins

        verdicts = {verdict: counts[verdict] for verdict in ("same", "differs", "failed")}
        show_json({**verdicts, "left_out": found.left_out, "episodes": to_builtins(found.ended)})
    else:
        show_table(
            ["id", "verdict", "steps", "first difference"],
            [[one.id, one.verdict, one.steps, one.failure or one.difference or ""] for one in found.ended],
        )
    notes = Counter(note for replayed in found.ended for note in replayed.notes)
    for note, times in notes.most_common(10):
        say(f"note: {harmless(note)}" + (f" ({times} episodes)" if times > 1 else ""))
    if found.left_out:
        say(f"left out, since they failed before their agent began: {found.left_out}")
    say(f"replayed: {_counted(found.ended)}")
    if counts["failed"]:
        label("error", f"{counts['failed']} could not be replayed: whether they are the same is not known")
    if counts["differs"]:
        label("error", f"{counts['differs']} did not come out the same")
