"""Programs that use the engine and end in every way a program can end, alone and beside each other."""

from __future__ import annotations

import asyncio
import signal

import pytest

from aenv.engines.conformance import projects
from tests.engines.process import lab
from tests.engines.process.lab import line, owner
from tests.support import eventually

HEAD = """
import asyncio, os, signal, sys, time
from aenv import Environment
from aenv.engines.conformance import projects

async def told():
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(0, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(0)
    return sys.stdin.readline()
"""
LIVING = (
    HEAD
    + """
async def main():
    async with Environment(projects.NAME) as env:
        print((await env.call_tool("echo", {"text": "up"})).text)
        await told()
        print((await env.call_tool("echo", {"text": "still here"})).text)
    print("done")

asyncio.run(main())
"""
)
STUDYING = (
    HEAD
    + """
async def main():
    async with Environment("study", datasource=sys.argv[1]) as env:
        print("up")
        if sys.argv[2] == "call":
            await env.call_tool("stand")
    print("done")

asyncio.run(main())
"""
)


def live(home, isolation="auto", script=LIVING):
    return owner(script, home, cwd=projects.PROBE, AENV_ISOLATION=isolation)


async def go_on(process):
    process.stdin.write("\n")
    process.stdin.flush()
    assert await line(process) == "still here"
    assert await line(process) == "done"
    assert await asyncio.to_thread(process.wait, lab.PATIENCE) == 0


async def runs(home, isolation):
    """A program that does nothing special works."""
    with live(home, isolation) as process:
        assert await line(process) == "up"
        await go_on(process)


# Killed in the middle

BODIES = {
    "preload": ("wait('here')", True),
    "import": ("wait('here')", False),
    "setup": ("@register_setup\ndef prepare() -> None:\n    wait('here')\n", True),
    "call": ("@register_tool\ndef stand() -> None:\n    wait('here')\n", True),
    "release": ("@register_teardown\ndef clear() -> None:\n    wait('here')\n", True),
}


@pytest.mark.parametrize("moment", BODIES)
async def test_an_owner_that_is_killed_leaves_nothing(home, study, isolation, leftovers, moment):
    door = study.door("here")
    body, preload = BODIES[moment]
    project = study.write(body, preload=preload)
    with owner(STUDYING, home, str(study.data), moment, cwd=project, AENV_ISOLATION=isolation) as process:
        await door.reached()
        process.kill()
        process.wait()
        await leftovers.none("processes", "control groups", "mounts", "files")
        door.open()
    door.remove()
    with owner(STUDYING, home, str(study.data), moment, cwd=project, AENV_ISOLATION=isolation) as process:
        assert [await line(process), await line(process)] == ["up", "done"]


async def test_an_owner_and_its_spawner_that_are_killed_leave_what_the_next_one_clears(
    home, isolation, leftovers, family
):
    with live(home, isolation) as process:
        assert await line(process) == "up"
        spawner = family.spawner
        spawner.kill(signal.SIGSTOP)  # so that it cannot clear up after its owner
        process.kill()
        process.wait()
        spawner.kill()
    await leftovers.none("processes")
    assert leftovers.found("files")
    await runs(home, isolation)
    await leftovers.none()


async def test_programs_beside_each_other_never_end_each_others_sandboxes(home, isolation, leftovers, family):
    with live(home, isolation) as first:
        assert await line(first) == "up"
        doomed = family.spawner
        with live(home, isolation) as second:
            assert await line(second) == "up"
            doomed.kill(signal.SIGSTOP)
            first.kill()
            first.wait()
            doomed.kill()
            await runs(home, isolation)
            await eventually("the others to end", lambda: len(family.spawners()) == 1)
            await go_on(second)
    await leftovers.none()


async def test_two_programs_that_start_at_once(home, isolation, leftovers):
    with live(home, isolation) as first, live(home, isolation) as second:
        assert [await line(first), await line(second)] == ["up", "up"]
        await asyncio.gather(go_on(first), go_on(second))
    await leftovers.none()


# Other ends

ENDS = {
    "SIGTERM": ("", -signal.SIGTERM),
    "SIGINT": ("", None),
    "SIGHUP": ("", -signal.SIGHUP),
    "os._exit": ("os._exit(3)", 3),
    "sys.exit": ("sys.exit(4)", 4),
    "an exception": ("1 / 0", 1),
    "nothing": ("return", 0),
}


@pytest.mark.parametrize("end", ENDS)
async def test_however_an_owner_ends_nothing_is_left(home, leftovers, jailed, end):
    last, code = ENDS[end]
    script = (
        HEAD
        + f"""
async def main():
    env = Environment(projects.NAME)
    print((await env.call_tool("echo", {{"text": "up"}})).text)
    {last or "await asyncio.Event().wait()"}

asyncio.run(main())
"""
    )
    with live(home, jailed, script) as process:
        assert await line(process) == "up"
        if not last:
            process.send_signal(signal.Signals[end])
        found = await asyncio.to_thread(process.wait, lab.PATIENCE)
        assert found == code if code is not None else found in (1, 130, -signal.SIGINT)
    await leftovers.none()


async def test_ctrl_c_in_a_block_tears_down_what_is_inside(home, study, isolation, leftovers):
    ear = study.ear("ear")
    project = study.write("@register_teardown\ndef clear() -> None:\n    tell('ear', 'torn down')\n", preload=True)
    script = STUDYING.replace('print("up")', 'print("up"); await asyncio.Event().wait()')
    with owner(script, home, str(study.data), "", cwd=project, AENV_ISOLATION=isolation) as process:
        assert await line(process) == "up"
        process.send_signal(signal.SIGINT)
        await asyncio.to_thread(process.wait, lab.PATIENCE)
    assert ear.heard() == "torn down"


# Children of an owner

FORKING = (
    HEAD
    + """
import multiprocessing, subprocess

def idle():
    time.sleep(600)

async def main():
    async with Environment(projects.NAME) as env:
        print((await env.call_tool("echo", {"text": "up"})).text)
        if sys.argv[1] == "fork":
            child = os.fork()
            if not child:
                idle()
                os._exit(0)
        elif sys.argv[1] == "multiprocessing":
            started = multiprocessing.get_context("fork").Process(target=idle)
            started.start()
            child = started.pid
        else:
            child = subprocess.Popen(["sleep", "600"], close_fds=False).pid
        print(child)
        await asyncio.Event().wait()

asyncio.run(main())
"""
)


@pytest.mark.parametrize("way", ["fork", "multiprocessing", "subprocess"])
async def test_a_child_that_lives_on_does_not_keep_its_parents_sandboxes(home, leftovers, family, pen, jailed, way):
    with owner(FORKING, home, way, cwd=projects.PROBE, AENV_ISOLATION=jailed) as process:
        assert await line(process) == "up"
        child = lab.Process(int(await line(process)))
        try:
            process.kill()
            process.wait()
            await leftovers.none("control groups", "files", "mounts")
            assert [found.pid for found in pen.processes() if "engines.process" in found.command] == []
            assert lab.Process(child.pid).command == child.command
        finally:
            child.kill()
    await leftovers.none()


async def test_a_forked_child_has_sandboxes_of_its_own(home, leftovers, isolation):
    script = (
        HEAD
        + """
async def child():
    async with Environment(projects.NAME) as env:
        print((await env.call_tool("echo", {"text": "child"})).text)

async def main():
    async with Environment(projects.NAME) as env:
        print((await env.call_tool("count")).text)
        pid = os.fork()
        if not pid:
            try:
                asyncio.run(child())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        print((await env.call_tool("count")).text)

asyncio.run(main())
"""
    )
    with live(home, isolation, script) as process:
        assert [await line(process) for _ in range(3)] == ["1", "child", "2"]
        assert await asyncio.to_thread(process.wait, lab.PATIENCE) == 0
    await leftovers.none()


# Event loops of an owner


async def test_one_event_loop_after_the_other(home, leftovers, isolation):
    """Each has an engine of its own; that of a loop which is closed does not stay."""
    script = (
        HEAD
        + """
from pathlib import Path

def spawners():
    return len(list(Path(os.environ["AENV_HOME"]).glob("run/*/spawner.json")))

async def main():
    async with Environment(projects.NAME) as env:
        print((await env.call_tool("echo", {"text": "up"})).text)
    return Environment(projects.NAME)

async def forgetful():
    env = Environment(projects.NAME)
    await env.initialize()

asyncio.run(main())
asyncio.run(main())
asyncio.run(forgetful())
deadline = time.monotonic() + 10
while spawners() and time.monotonic() < deadline:
    time.sleep(0.02)
print(spawners())
asyncio.run(main())
"""
    )
    with live(home, isolation, script) as process:
        assert [await line(process) for _ in range(4)] == ["up", "up", "0", "up"]
        assert await asyncio.to_thread(process.wait, lab.PATIENCE) == 0
    await leftovers.none()


async def test_the_blocking_face(home, leftovers, jailed):
    script = (
        HEAD
        + """
env = Environment.sync(projects.NAME)
print(env.call_tool("echo", {"text": "up"}).text)
if sys.stdin.readline() == "release\\n":
    env.release()
"""
    )
    for word in ("release", "end"):
        with live(home, jailed, script) as process:
            assert await line(process) == "up"
            process.stdin.write(f"{word}\n")
            process.stdin.flush()
            assert await asyncio.to_thread(process.wait, lab.PATIENCE) == 0
        await leftovers.none()
