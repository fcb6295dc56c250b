"""Episodes of ``aenv rollout`` on a platform, while instances, zygotes, the API service and the trainer are killed.

Fails when an episode is missing or there twice, has a number that is not its own, or failed by anything but the
platform; when anything is left afterwards; and when the trainer or the server keeps growing.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from aenv.errors import CallTimeout, Expired, NetworkError, OutOfMemory, RateLimited, SandboxLost, StartFailed
from aenv.rl import Failed, Task, Trajectory, read
from benchmarks import owners
from benchmarks.owners import SPARE, Family, Left
from benchmarks.processes import START
from benchmarks.soak import playing
from benchmarks.soak.victims import Life, Server, Trainer, kill_instance, kill_zygote

PROJECT = Path(__file__).parent.parent / "projects" / "rollouts"
ENV = "soak-rollouts"
AGENT = f"{playing.__name__}:play"
EPISODES = 5000
GROUP = 4
"""Episodes of a task."""
CONCURRENCY = 16
REUSE = 8
"""Episodes that an instance plays at most."""
OF_PLATFORM = frozenset(
    kind.code for kind in (SandboxLost, NetworkError, StartFailed, CallTimeout, Expired, OutOfMemory, RateLimited)
)
"""What an episode may fail by."""
LEAST_SCORED = 0.9
"""Share of the episodes that has a score in the end: the others are begun again too often."""
KILLS = {"instance": 200, "zygote": 20, "server": 20, "trainer": 20}
"""In a run of ``EPISODES``; fewer in a shorter one."""
HANDFUL = 5
"""Kills of each kind that there are in any run; some more are planned, since the run may end before the last."""
CALM = (0.5, 0.9)
"""Between these shares of the run, the server and the trainer live, so that what grows in them is seen."""
LAST = 0.97
"""Share of the run after which nothing is killed."""
PAUSE = (0.02, 0.3)
"""Seconds from one kill to the next, at least."""
WARM = 1 / 3
"""Share of its episodes after which a process has grown to its size."""
LONGEST, LONGEST_EACH = 90.0, 0.25
"""Seconds that a run may take, and those that each episode adds."""
DESERTED = 30.0
"""Seconds in which all is gone when nobody wants it any more."""
_TICK, _LOOK, _TELL = 0.02, 0.5, 5.0
"""Seconds between two looks at the run, at what its processes hold, and two lines about it."""


class Kill(NamedTuple):
    """What is killed, and after how many episodes."""

    after: int
    kind: str


class Written:
    """Counts the lines of a file that others write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = self._lines = 0

    def count(self) -> int:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._place)
                new = file.read()
            self._place += new.rfind(b"\n") + 1
            self._lines += new.count(b"\n")
        return self._lines


class Run:
    """What is played, and what has happened so far."""

    def __init__(self, episodes: int, seed: int, server: Server, folder: Path) -> None:
        self.draws = random.Random(seed)
        self.server = server
        self.folder = folder / "run"
        self.trajectories = self.folder / "trajectories.jsonl"
        self.tasks = [Task.of(playing.task(number)) for number in range(-(-episodes // GROUP))]
        self.trainer = Trainer(server, folder, *_arguments(folder / "tasks.jsonl", self.folder))
        self.kills: Counter[str] = Counter()
        self.wrong: list[str] = []
        """What does not hold, in words."""
        self.seconds = 0.0
        _write(folder / "tasks.jsonl", len(self.tasks))

    @property
    def episodes(self) -> int:
        return len(self.tasks) * GROUP

    def planned(self) -> list[Kill]:
        """All kills, the next one last."""
        plan = []
        for kind, usual in KILLS.items():
            for _ in range(max(usual * self.episodes // EPISODES, HANDFUL + 2)):
                share = self.draws.uniform(0, LAST)
                if kind in ("server", "trainer") and CALM[0] < share < CALM[1]:
                    share = self.draws.uniform(0, CALM[0])
                plan.append(Kill(int(share * self.episodes), kind))
        return sorted(plan, reverse=True)

    def kill(self, kind: str) -> bool:
        """Kill one of that kind; False when there was none."""
        kills = {
            "instance": lambda: kill_instance(self.server.sandboxes, self.draws),
            "zygote": lambda: kill_zygote(self.server.sandboxes, self.draws),
            "server": self.server.kill,
            "trainer": self.trainer.kill,
        }
        with suppress(FileNotFoundError):  # nothing holds sandboxes at the moment
            if kills[kind]():
                self.kills[kind] += 1
                return True
        return False

    def go(self) -> None:
        """Play it to its end, with all the kills."""
        plan, written = self.planned(), Written(self.trajectories)
        began = time.monotonic()
        deadline = began + LONGEST + LONGEST_EACH * self.episodes
        pause = look = tell = began
        self.trainer.start()
        while self.trainer.wait(_TICK) is None:
            now, count = time.monotonic(), written.count()
            if self.server.wait(0) is not None:
                return self._broke(f"the server ended by itself, with {self.server.wait(0)}", self.server.last_words())
            if now > deadline:
                words = f"after {now - began:.0f} s, {count} of {self.episodes} episodes have ended"
                return self._broke(words, self.trainer.last_words())
            if now >= look:
                look = now + _LOOK
                for program in (self.trainer, self.server):
                    program.look(count)
            if now >= tell:
                tell = now + _TELL
                self._tell(now - began, count)
            if plan and plan[-1].after <= count and now >= pause and self.kill(plan[-1].kind):
                plan.pop()
                pause = time.monotonic() + self.draws.uniform(*PAUSE)
        self.seconds = time.monotonic() - began
        if code := self.trainer.wait(0):
            self._broke(f"the trainer ended with {code}", self.trainer.last_words())
        return None

    def _broke(self, what: str, words: str) -> None:
        self.wrong.append(what)
        print(words, file=sys.stderr)

    def _tell(self, seconds: float, count: int) -> None:
        shown = "  ".join(f"{kind} {number}" for kind, number in sorted(self.kills.items()))
        print(f"{seconds:6.0f} s  {count:6d} episodes  killed: {shown}", file=sys.stderr)


def soak(episodes: int = EPISODES, seed: int = 0) -> int:
    """A run with so many episodes; ``seed`` decides what is killed, and when."""
    folder = Path(tempfile.mkdtemp(prefix="aenv-soak-rollouts-"))
    with owners.new_home() as home, closing(Server(home, folder)) as server:
        run = Run(episodes, seed, server, folder)
        with closing(run.trainer):
            before = _begin(server, folder)
            run.go()
        found = list(read(run.trajectories)) if run.trajectories.exists() else []
        run.wrong += [*_unaccounted(run, found), *_growing(run)]
        if server.wait(0) is None:
            run.wrong += [*_left(server, before), *_left_after(server)]
    _report(run, found)
    for words in run.wrong:
        print(f"wrong: {words}")
    if run.wrong:
        print(f"the run is kept in {folder}")
        return 1
    shutil.rmtree(folder)
    print(f"{run.episodes} episodes, {run.kills.total()} kills: every episode once, no wrong number, nothing is left")
    return 0


def _arguments(tasks: Path, out: Path) -> list[str | Path]:
    fixed = [ENV, "--agent", AGENT, "-n", str(GROUP), "--seed", str(playing.SEED), "--concurrency", str(CONCURRENCY)]
    return [*fixed, "--reuse", str(REUSE), "--tasks", tasks, "--out", out]


def _write(path: Path, count: int) -> None:
    """Write the first so many tasks."""
    path.write_text("\n".join(json.dumps(playing.task(number)) for number in range(count)))


def _begin(server: Server, folder: Path) -> Left:
    """Start the server, publish the project, and play a few episodes; what there is then.

    The server that counts is one that joined its engine, as all will that come after it: who started it has a
    connection of another kind.
    """
    server.start()
    server.ready()
    server.aenv("push", PROJECT)
    server.kill()
    server.ready()
    _write(folder / "first.jsonl", CONCURRENCY // GROUP)
    server.aenv("rollout", *_arguments(folder / "first.jsonl", folder / "first"))
    server.sandboxes.settle(SPARE)
    return Left(server.sandboxes)


# What must hold


def _unaccounted(run: Run, found: list[Trajectory]) -> Iterator[str]:
    """Episodes that are not there, or there twice, or whose end is not one of theirs."""
    times = Counter((one.group, one.sample) for one in found)
    for group in run.tasks:
        for sample in range(GROUP):
            if (count := times.pop((group.id, sample), 0)) != 1:
                yield f"{group.id}, sample {sample} is there {count} times"
    yield from (f"nobody asked for {group}, sample {sample}" for group, sample in times)
    tasks = {task.id: task for task in run.tasks}
    for one in found:
        if one.group in tasks:
            yield from (f"{one.group}, sample {one.sample}: {words}" for words in _mistakes(one, tasks[one.group]))
    scored = sum(one.ok for one in found)
    if scored < LEAST_SCORED * run.episodes:
        yield f"only {scored} of {run.episodes} episodes have a score"
    for kind in KILLS:
        if run.kills[kind] < HANDFUL:
            yield f"only {run.kills[kind]} were killed: {kind}"
    report = run.folder / "report.json"
    told = json.loads(report.read_text()) if report.exists() else {}
    if [told.get(name) for name in ("episodes", "scored", "failed")] != [run.episodes, scored, run.episodes - scored]:
        yield f"the report says {told or 'nothing'}"


def _mistakes(one: Trajectory, task: Task) -> Iterator[str]:
    """What is wrong with an episode."""
    if one.task != task:
        yield f"another task was played: {one.task}"
    for failed in (*one.retried, one.outcome):
        if isinstance(failed, Failed) and failed.kind not in OF_PLATFORM:
            yield f"it failed by {failed}"
    answered = [call.result.structured["result"] for call in one.calls if call.result is not None]
    right = playing.totals(task, one.sample)
    if answered != right[: len(answered)]:
        yield f"its calls answered {answered}, not {right}"
    if one.ok and (one.reward, one.answer) != (playing.score(task, one.sample), right[-1]):
        yield f"its score is {one.reward}, not {playing.score(task, one.sample)}"


def _growing(run: Run) -> Iterator[str]:
    for program in (run.trainer, run.server):
        life = _longest(program.lives)
        for name in life.at(1.0).grown_since(life.at(WARM)) if life.episodes else ():
            yield f"the {program.name} keeps growing: {name}"


def _longest(lives: list[Life]) -> Life:
    return max(lives, key=lambda life: life.episodes)


def _left(server: Server, before: Left) -> Iterator[str]:
    """What is there of the instances, though all episodes have ended."""
    deadline = time.monotonic() + START
    while (living := server.instances()) and time.monotonic() < deadline:
        time.sleep(0.5)
    for one in living:
        yield f"instance {one['id']} is {one['status']}"
    while (count := sum(one.is_runtime for one in server.sandboxes.members())) > SPARE and time.monotonic() < deadline:
        time.sleep(0.1)
    if count > SPARE:
        yield f"{count} sandboxes are alive, and {SPARE} of them may be"
    try:
        before.check(server.sandboxes)
    except RuntimeError as exc:
        yield str(exc)


def _left_after(server: Server) -> Iterator[str]:
    """What is there when the platform is stopped, after a while."""
    engine: Family = server.sandboxes
    engine.groups()
    if (code := server.stop()) != 0:
        yield "the server does not end" if code is None else f"the server ended with {code}"
    deadline = time.monotonic() + DESERTED
    while (processes := server.processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in processes:
        yield f"process {pid} is there after the platform"
    try:
        engine.check_end()
    except RuntimeError as exc:
        yield str(exc)


# The report


def _report(run: Run, found: list[Trajectory]) -> None:
    failed = Counter(one.outcome.kind for one in found if isinstance(one.outcome, Failed))
    retried = Counter(failure.kind for one in found for failure in one.retried)
    rows = {
        "episodes": len(found),
        "scored": sum(one.ok for one in found),
        "failed": _counted(failed),
        "begun again": _counted(retried),
        "killed": _counted(run.kills),
        "resumed": len(run.trainer.lives) - 1,
        "seconds": f"{run.seconds:.0f}",
        "episodes/s": f"{len(found) / run.seconds:.1f}" if run.seconds else "",
        "load of the machine": f"{os.getloadavg()[0]:.1f}",
    }
    print("| what | |\n|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value} |")
    for program in (run.trainer, run.server):
        life = _longest(program.lives)
        if life.episodes:
            print(f"{program.name}, of its longest life with {life.episodes} episodes:")
            print(f"  after a third: {life.at(WARM)}\n  at the end:    {life.at(1.0)}")


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "0"
