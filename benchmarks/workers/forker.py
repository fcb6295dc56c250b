"""A program that forks and goes back, in the folder of examples/03-maze: ``python -m benchmarks.workers.forker HOW``.

With ``live`` as its argument, siblings are forks of the process; with ``journal``, the maze does not say that it is
forkable; with ``saved``, it says where it is instead. Requests and answers are lines, as ``benchmarks.workers.owner``
reads and writes them; an answer is the seconds that it took. ``fresh`` starts ``count`` instances at once, each to its
first answer. ``fork`` has as many siblings of one that has played, ``restore`` puts one back to a checkpoint.
``forks_memory`` and ``fresh_memory`` answer the bytes of each of ``count``.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import uvloop

from aenv import Environment, http
from benchmarks.workers.owner import serve

SEED, PLAYED = 7, 8
"""Calls that an instance has had before it is forked."""


class Forker:
    """Instances of the maze."""

    def __init__(self, how: str) -> None:
        self._how = how

    async def fresh(self, count: int) -> float:
        envs = [_maze() for _ in range(count)]
        return await _timed(envs)

    async def fork(self, count: int) -> float:
        async with _maze() as env:
            await _play(env)
            begun = time.perf_counter()
            async with await env.fork(count) as siblings:
                await asyncio.gather(*map(_look, siblings))
                took = time.perf_counter() - begun
                assert all(found.forked is not None and found.forked.how == self._how for found in siblings)
                return took

    async def forks_memory(self, count: int) -> float:
        async with _maze() as env:
            await _play(env)
            before = _used()
            async with await env.fork(count) as siblings:
                await asyncio.gather(*map(_look, siblings))
                return (_used() - before) / count

    async def fresh_memory(self, count: int) -> float:
        async with _maze() as env:
            await _play(env)
            before = _used()
            envs = [_maze() for _ in range(count)]
            try:
                await asyncio.gather(*map(_look, envs))
                return (_used() - before) / count
            finally:
                await asyncio.gather(*(found.release() for found in envs))

    async def restore(self) -> float:
        async with _maze() as env:
            await _play(env)
            begun = time.perf_counter()
            place = await env.checkpoint()
            await env.restore(place)
            await _look(env)
            return time.perf_counter() - begun

    async def empty(self) -> None:
        """Every request has given its instances back."""

    async def close(self) -> None:
        await http.close()


def _used() -> int:
    """Bytes of all processes of spawners' control groups, what several have counted by their shares."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if "/aenv-" in (process / "cgroup").read_text():
                rows = (process / "smaps_rollup").read_text().splitlines()
                total += next((int(row.split()[1]) * 1024 for row in rows if row.startswith("Pss:")), 0)
    return total


_SAVES = """

from aenv import register_load, register_save


@register_save
def save() -> dict:
    return now


@register_load
def load(found: dict) -> None:
    now.update(found)
"""


def _less_forkable(how: str) -> Path:
    """A copy of the project in this directory that does not say that it is forkable."""
    copy = Path(tempfile.mkdtemp(), "maze")
    shutil.copytree(Path.cwd(), copy)
    config = json.loads((copy / "config.json").read_text())
    del config["deployConfig"]["forkable"]
    (copy / "config.json").write_text(json.dumps(config))
    if how == "saved":
        with (copy / "src" / "custom_env.py").open("a") as source:
            source.write(_SAVES)
    return copy


def _maze() -> Environment:
    return Environment("maze", seed=SEED)


async def _play(env: Environment) -> None:
    await env.reset(seed=SEED)
    for number in range(PLAYED - 1):
        await env.call_tool("open_door", {"number": number % 4})


async def _look(env: Environment) -> None:
    assert await env.call_reward() == 0.0


async def _timed(envs: Sequence[Environment]) -> float:
    begun = time.perf_counter()
    try:
        await asyncio.gather(*map(_look, envs))
        return time.perf_counter() - begun
    finally:
        await asyncio.gather(*(env.release() for env in envs))


if __name__ == "__main__":
    if sys.argv[1] != "live":
        os.chdir(_less_forkable(sys.argv[1]))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(Forker(sys.argv[1])))
    finally:
        if sys.argv[1] != "live":
            shutil.rmtree(Path.cwd().parent)
