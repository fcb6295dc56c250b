"""The blocking face: the same surface, also where a loop is running."""

from __future__ import annotations

import asyncio
import inspect
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aenv import CallTimeout, Environment, SyncEnvironment, Unsupported, attach
from tests.client.test_environment import Controlled
from tests.support import Sandbox


def test_every_method_is_there_with_the_same_parameters() -> None:
    for name, method in inspect.getmembers(Environment, inspect.iscoroutinefunction):
        if name.startswith("_"):
            continue
        blocking = getattr(SyncEnvironment, name)
        assert not inspect.iscoroutinefunction(blocking)
        assert inspect.signature(blocking) == inspect.signature(method)
        assert blocking.__doc__ == method.__doc__


def test_every_iterator_is_there_with_the_same_parameters() -> None:
    found = [name for name, _ in inspect.getmembers(Environment, inspect.isasyncgenfunction) if name[0] != "_"]
    assert found == ["logs"]
    for name in found:
        blocking, method = getattr(SyncEnvironment, name), getattr(Environment, name)
        assert inspect.signature(blocking) == inspect.signature(method)
        assert blocking.__doc__ == method.__doc__


def test_an_episode(lab: Sandbox) -> None:
    with Environment.sync("lab", provision=attach(lab.url)) as env:
        assert len(env.list_tools()) > 5
        assert env.call_tool("add", {"a": 1}).text == "3"
        assert env.call_reward({"answer": "42"}, name="score") == 1.0
        with pytest.raises(CallTimeout):
            env.call_tool("sleep", {"seconds": 60}, timeout=0.1)
        assert env.call_tool("echo", {"text": "still here"}).text == "still here"


async def test_inside_a_running_loop(lab: Sandbox) -> None:
    assert asyncio.get_running_loop().is_running()
    with Environment.sync("lab", provision=attach(lab.url)) as env:
        assert env.call_tool("add", {"a": 1}).text == "3"


def test_from_several_threads(lab: Sandbox) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with Environment.sync("lab", provision=attach(lab.url)) as env, ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda n: env.call_tool("add", {"a": n}).text, range(50))
        assert list(results) == [str(n + 2) for n in range(50)]


def test_the_owners_powers(lab: Sandbox, tmp_path: Path) -> None:
    with Environment.sync("lab", provision=attach(lab.url)) as env:
        assert env.exec(["echo", "hi"]).stdout == "hi\n"
        env.upload(str(tmp_path / "file"), "content")
        assert env.download(str(tmp_path / "file")) == b"content"
        assert env.history(last=1)[0]["kind"] == "exec"
        with pytest.raises(Unsupported):
            list(env.logs())


async def test_logs_are_an_iterator_also_inside_a_running_loop(lab: Sandbox) -> None:
    provision = Controlled(lab.url)
    with Environment.sync("lab", provision=provision) as env:
        assert env.instance_id == "box-1"
        env.extend(60)
        assert provision.extended == [("box-1", 60.0)]
        assert list(env.logs(tail=2)) == ["box-1: two", "box-1: three"]
        for line in env.logs(follow=True):
            if line == "more":
                break
        deadline = time.monotonic() + 20
        while provision.open:
            assert time.monotonic() < deadline
    assert env.instance_id is None


INTERRUPTED = """
import asyncio, sys, time
from contextlib import asynccontextmanager
from aenv import SyncEnvironment
from aenv.models import Sandbox

hand_over = asyncio.run_coroutine_threadsafe

def slowly(work, loop):
    asyncio.run_coroutine_threadsafe = hand_over
    future = hand_over(work, loop)
    wait()
    return future

def wait():
    for _ in range(600):  # one sleep would not end where another thread is told of the signal right before it
        time.sleep(0.1)

@asynccontextmanager
async def provision(spec):
    try:
        print("opened" if sys.argv[1] == "ready" else sys.argv[1], flush=True)
        if sys.argv[1] != "ready":
            await asyncio.sleep(60)
        yield Sandbox(url="http://127.0.0.1:9", boot="b")
    finally:
        await asyncio.sleep(0.5)
        print("closed", flush=True)

class Late(SyncEnvironment):
    def initialize(self):
        super().initialize()
        print("ready", flush=True)
        wait()

if sys.argv[1] == "handed over":
    asyncio.run_coroutine_threadsafe = slowly
with Late("lab", provision=provision) as env:
    pass
"""


@pytest.mark.parametrize("moment", ["handed over", "opened", "ready"])
def test_ctrl_c_during_the_start_gives_the_sandbox_back(moment: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, moment]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        while (line := process.stdout.readline().strip()) != moment:
            assert line
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert out == "closed\n"
    assert err.splitlines()[-1] == "KeyboardInterrupt"
