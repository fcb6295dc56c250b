"""OpenEnv's client: ``python -m benchmarks.workers.openenv_client [URL]``, which runs the episodes that are asked for.

A round is a line ``{"episodes": n, "at_once": n, "turns": n}``. An episode connects, resets, takes its turns, looks at
the reward of the last, and closes. Its answer is a line with the seconds of the ``wall`` and of this process's ``cpu``,
how many were ``done`` and ``failed``, and how many were open at a time (``peak``). Without a URL each episode has a
server process of its own, from its start to its end, whose CPU is the ``server_cpu``.
"""

import asyncio
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from openenv.core import GenericEnvClient

from benchmarks.processes import START, STOP, environment, free_port
from benchmarks.venvs import ROOT

SERVER = "benchmarks.servers.openenv_server"


def main(url: str | None) -> None:
    """Run rounds until stdin ends."""
    _answer({"ready": True})
    while line := sys.stdin.readline():
        wanted = json.loads(line)
        _answer(asyncio.run(_round(url, wanted["episodes"], wanted["at_once"], wanted["turns"])))


async def _round(url: str | None, episodes: int, at_once: int, turns: int) -> dict[str, float]:
    count: Counter[str] = Counter()
    numbers = iter(range(episodes))
    wall, cpu, children = time.perf_counter(), time.process_time(), _children()
    await asyncio.gather(*(_caller(url, numbers, turns, count) for _ in range(at_once)))
    spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "server_cpu": _children() - children}
    return {**spent, "done": count["done"], "failed": count["failed"], "peak": count["peak"]}


async def _caller(url: str | None, numbers: Iterator[int], turns: int, count: Counter[str]) -> None:
    """Run episodes, one after the other, as long as there are any."""
    for number in numbers:
        try:
            async with _server(url) as found:
                await _episode(found, number, turns, count)
        except Exception as error:
            count["failed"] += 1
            sys.stderr.write(f"episode {number}: {error!r}\n")
        else:
            count["done"] += 1


async def _episode(url: str, number: int, turns: int, count: Counter[str]) -> None:
    # Patience to connect: a thousand that come at once are more than ten seconds, its default, may be enough for.
    async with GenericEnvClient(base_url=url, connect_timeout_s=START) as env:
        count["open"] += 1
        count["peak"] = max(count["peak"], count["open"])
        try:
            result = await env.reset(turns=turns)
            assert result.observation["result"] is None, result
            for turn in range(1, turns + 1):
                result = await env.step({"a": number, "b": turn})
                assert result.observation["result"] == number + turn, result
                assert result.done == (turn == turns), result
            assert result.reward == number + turns, result
        finally:
            count["open"] -= 1


def _server(url: str | None) -> AbstractAsyncContextManager[str]:
    return nullcontext(url) if url else _own_server()


@asynccontextmanager
async def _own_server() -> AsyncIterator[str]:
    """A server process for one episode, which answers when the block starts and has ended after it."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", SERVER, str(port), cwd=ROOT, env=environment(PYTHONPATH=str(ROOT))
    )
    try:
        async with asyncio.timeout(START):
            await _listening(process, port)
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _listening(process: asyncio.subprocess.Process, port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            if process.returncode is not None:
                raise RuntimeError(f"the server ended with {process.returncode}") from None
            await asyncio.sleep(0.005)
        else:
            writer.close()
            return


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _answer(value: dict[str, float]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
