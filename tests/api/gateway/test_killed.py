"""Replicas that are killed, stopped and replaced under load: no call runs twice, and none is lost that was not sent."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from aenv import Environment, attach, http
from aenv.errors import NetworkError
from aenv.runtime import tokens
from tests.api.gateway.support import OWNER_TOKEN, Known, Seen, Served, place, serving
from tests.support import Sandbox, sandbox, until

CALLS, AT_ONCE = 240, 24
TOOLS = """
import asyncio, os
from aenv import register_tool

@register_tool
async def note(number: int) -> int:
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"{number}\\n")
    await asyncio.sleep(0.01)
    return number

@register_tool
def noted() -> list[str]:
    return open(os.environ["NOTES"]).read().split()
"""


class Ground:
    """A project whose sandboxes write down which calls they run."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._stack = stack
        self._folder = folder
        self._started = 0
        self.project = folder / "notes"
        (self.project / "src").mkdir(parents=True)
        (self.project / "config.json").write_text('{"name": "notes", "version": "1.0.0"}')
        (self.project / "src" / "tools.py").write_text(TOOLS)

    def start(self) -> Sandbox:
        self._started += 1
        notes = self._folder / f"notes{self._started}.txt"
        notes.touch()
        variables = {"AENV_OWNER_TOKEN_SHA256": tokens.digest(OWNER_TOKEN), "NOTES": str(notes)}
        return self._stack.enter_context(sandbox(self.project, variables=variables))

    def runs(self) -> Counter[int]:
        """How often each call ran."""
        texts = [path.read_text() for path in self._folder.glob("notes*.txt")]
        return Counter(int(number) for text in texts for number in text.split())


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    with ExitStack() as stack:
        yield Ground(tmp_path, stack)


@pytest.mark.parametrize("way", ["killed", "replaced"])
async def test_a_replica_goes_under_load(ground: Ground, way: str) -> None:
    sandboxes = [ground.start() for _ in range(2)]
    served, seen = Served(*(one.url for one in sandboxes)), Seen()
    stays, goes = served.all["both"].ready
    done: list[int] = []
    unknown: list[int] = []
    hints: set[str | None] = set()
    numbers = iter(range(CALLS))

    async with serving(Known(), services=served, watcher=seen) as gateway:
        url = f"http://127.0.0.1:{gateway.port}/env-service/both"
        async with Environment("notes", provision=attach(url, OWNER_TOKEN), timeout=120) as env:

            async def caller() -> None:
                for number in numbers:
                    try:
                        assert (await env.call_tool("note", {"number": number})).text == str(number)
                        done.append(number)
                    except NetworkError as exc:
                        unknown.append(number)
                        hints.add(exc.hint)

            async def change() -> None:
                await until(lambda: len(done) > CALLS // 4, "a quarter of the calls")
                if way == "killed":
                    sandboxes[1].kill()
                    await until(lambda: len(done) > CALLS // 2, "half of the calls")
                    served.set(stays)  # heard of later than calls meet it
                else:
                    other = place((await asyncio.to_thread(ground.start)).url, "r2")
                    served.set(stays, other, leaving=(goes,))
                    await until(lambda: len(done) > CALLS // 2, "half of the calls")
                    await until(lambda: not gateway.router.sandboxes["r1"].calls, "the end of its calls")
                    served.set(stays, other)
                    sandboxes[1].process.send_signal(signal.SIGTERM)

            async with asyncio.timeout(120):
                await asyncio.gather(change(), *(caller() for _ in range(AT_ONCE)))
            assert (await env.call_tool("noted")).is_error is False
        await http.close()
    runs = ground.runs()
    assert sorted(done + unknown) == list(range(CALLS))
    assert max(runs.values()) == 1  # none twice
    assert not set(done) - set(runs)
    assert hints <= {"whether it did what was asked is not known", None}  # None: cut in the middle of its answer
    lost = [call for call in seen.calls if call.status == 502]
    assert len(lost) <= len(unknown) <= AT_ONCE
    assert {call.place.id for call in lost if call.place} <= {"r1"}
    if way == "replaced":
        assert unknown == []
