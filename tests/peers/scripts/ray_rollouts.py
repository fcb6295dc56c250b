"""Rollouts of actors of Ray's, on two nodes of one machine: ``ray_rollouts.py`` kills an actor and a node while they
play, leaves a run in the middle of it, and asks for actors that cannot be made."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.cluster_utils import Cluster

from aenv import AEnvError
from aenv.integrations.ray import rollouts
from aenv.rl import Episode, Task, Trajectory

TASKS = [Task(id=str(number), reset={"digit": number % 5}) for number in range(12)]
ACTORS, EACH = 2, 3


class Seat(NamedTuple):
    """Where an episode is played."""

    task: str
    node: str
    actor: int
    processes: list[int]


def family(pid: int) -> list[int]:
    """All that a process has begun."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (thread / "children").read_text().split()):
            found += [child, *family(child)]
    return found


class Player:
    """Presses the key that is shown where the task's number is odd, and waits before it does until it is let."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def __call__(self, env: Episode, task: Task) -> None:
        seat = Seat(task.id, ray.get_runtime_context().get_node_id(), os.getpid(), family(os.getpid()))
        with (self.folder / "seats").open("a") as seats:
            seats.write(json.dumps(seat) + "\n")
        while not (self.folder / "open").exists():
            await asyncio.sleep(0.05)
        shown = int(env.observation[-2])
        await env.call_tool("press", {"key": shown if int(task.id) % 2 else (shown + 1) % 5})


def seats(folder: Path) -> list[Seat]:
    file = folder / "seats"
    return [Seat(*json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not holds():
            await asyncio.sleep(0.05)


async def all_play(folder: Path) -> list[Seat]:
    """Wait until as many episodes go on as there may be at a time."""
    await until(lambda: len(seats(folder)) == ACTORS * EACH)
    return seats(folder)


async def ended(lost: list[Seat]) -> None:
    """Wait until nothing is left of actors, and of all that they began."""
    pids = {pid for seat in lost for pid in (seat.actor, *seat.processes)}
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


async def played(folder: Path, kill: Callable[[list[Seat]], list[Seat]]) -> dict[str, Any]:
    """A run some of whose seats are lost while all are taken, and what came of it."""
    async with rollouts("keypad", Player(folder), TASKS, actors=ACTORS, each=EACH, seed=1) as run:
        lost = kill(await all_play(folder))
        await ended(lost)
        (folder / "open").touch()
        found = [trajectory async for trajectory in run]
    await ended(seats(folder))
    return {
        "nodes": len({seat.node for seat in seats(folder)[: ACTORS * EACH]}),
        "episodes": sorted(int(trajectory.task.id) for trajectory in found),
        "wrong": [trajectory.task.id for trajectory in found if not right(trajectory)],
        "lost": sorted(seat.task for seat in lost),
        "retried": sorted(trajectory.task.id for trajectory in found for _ in trajectory.retried),
        "kinds": sorted({failed.kind for trajectory in found for failed in trajectory.retried}),
    }


def right(trajectory: Trajectory) -> bool:
    return trajectory.ok and trajectory.reward == int(trajectory.task.id) % 2


async def left(folder: Path) -> None:
    """A run that is left while all of it plays: its instances are given back."""
    async with rollouts("keypad", Player(folder), TASKS, actors=ACTORS, each=EACH):
        await all_play(folder)
    await ended(seats(folder))


class Unsent(Player):
    """Cannot be sent to an actor."""

    def __getstate__(self) -> Any:
        raise ValueError("it stays where it is")


class Unmade(Player):
    """Cannot be made in an actor."""

    def __setstate__(self, state: Any) -> None:
        raise ValueError("it stays where it is")


async def refused(agent: Player) -> str:
    try:
        async with rollouts("keypad", agent, TASKS, actors=ACTORS, each=EACH) as run:
            await anext(run)
    except AEnvError as exc:
        return exc.code
    return ""


def main() -> dict[str, Any]:
    node = {"num_cpus": ACTORS, "object_store_memory": 2**27}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        second = cluster.add_node(**node)
        ray.init(cluster.address, log_to_driver=False)

        def kill_actor(taken: list[Seat]) -> list[Seat]:
            os.kill(taken[0].actor, signal.SIGKILL)
            return [seat for seat in taken if seat.actor == taken[0].actor]

        def kill_node(taken: list[Seat]) -> list[Seat]:
            cluster.remove_node(second, allow_graceful=False)
            return [seat for seat in taken if seat.node == second.node_id]

        folders = [Path("..", name).resolve() for name in ("actor", "left", "node")]  # beside the project
        for folder in folders:
            folder.mkdir()
        actor, leave, node_folder = folders
        found: dict[str, Any] = {"actor": asyncio.run(played(actor, kill_actor))}
        asyncio.run(left(leave))
        found["refused"] = [asyncio.run(refused(kind(leave))) for kind in (Unsent, Unmade)]
        found["node"] = asyncio.run(played(node_folder, kill_node))
        return found
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
