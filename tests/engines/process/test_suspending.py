"""Sandboxes that nobody calls: they stand still and give memory back, and everything still holds for them."""

from __future__ import annotations

import asyncio
import json
import os
import random
from contextlib import suppress
from pathlib import Path

import pytest

from aenv import Environment, http
from aenv.client import answers, lineage
from aenv.client.local import Embedded
from aenv.engines.conformance import projects
from aenv.engines.process import cgroups, freezer
from aenv.engines.process.engine import ProcessEngine
from aenv.errors import Invalid, NetworkError, SandboxLost
from aenv.models import State
from aenv.runtime.tokens import digest
from tests.engines.process import lab
from tests.engines.process.lab import call, eventually, over, probe, works

SOON = 0.2
"""Seconds without a call."""
MIB = 1024**2


@pytest.fixture
def site(home):
    return Site(home)


@pytest.fixture(autouse=True)
def able(jailed):
    if why := freezer.missing():
        pytest.skip(f"needs a freezer: {why}")


class Site:
    """What the machine says of the sandboxes of the only spawner that lives in a home."""

    def __init__(self, home: Path) -> None:
        self._home = home

    @property
    def groups(self) -> dict[str, Path]:
        (file,) = self._home.glob("run/*/spawner.json")
        return {name: Path(path) for name, path in json.loads(file.read_text())["control_groups"].items()}

    def held(self) -> list[str]:
        """Those of which every process stands still."""
        root = next(root for name, root in self.groups.items() if name in ("unified", ""))
        found = {file.parent.name: file.read_text() for file in root.glob("i*/cgroup.events")}
        return [name for name, text in found.items() if "frozen 1" in text and "populated 1" in text]

    async def still(self, count: int = 1) -> None:
        await eventually(f"{count} of them to stand still", lambda: len(self.held()) == count)

    def statistics(self, leaf: str) -> dict[str, int]:
        root = self.groups.get("memory") or self.groups[""]
        rows = (line.split() for line in (root / leaf / "memory.stat").read_text().splitlines())
        return {name: int(value) for name, value in rows}


def sh(script: str) -> list[str]:
    return ["sh", "-c", script]


# Standing still, and waking


async def test_one_that_nobody_calls_stands_still_until_the_next_call(jail, site):
    sandbox = await jail.create("a", probe(suspend=SOON))
    assert await call(sandbox, "count") == 1
    drawn = await call(sandbox, "pid")
    for number in range(2, 5):
        await site.still()
        assert (await jail.get("a")).state is State.RUNNING
        assert (await jail.get("a")).reason == ""
        assert await call(sandbox, "count") == number
    assert await call(sandbox, "pid") == drawn
    await site.still()
    used = await jail.used("a")
    assert (await jail.used("a")).cpu == used.cpu
    assert used.memory > 0
    assert (await jail.exec("a", ["echo", "woken"])).stdout == "woken\n"


async def test_its_files_and_processes_are_there_when_it_wakes(jail, site):
    await jail.create("a", probe(suspend=SOON))
    await jail.exec("a", sh("echo kept > /tmp/file; setsid sleep 600 </dev/null >/dev/null 2>&1 & echo $! > /tmp/pid"))
    await site.still()
    done = await jail.exec("a", sh("cat /tmp/file; kill -0 $(cat /tmp/pid) && echo alive"))
    assert done.stdout == "kept\nalive\n"


async def test_one_that_stands_still_is_forked_and_its_forks_stand_still_too(jail, site, study):
    body = """
total = [0]

@register_tool
def add(number: int) -> int:
    total[0] += number
    return total[0]
"""
    root = study.write(body, forkable=True)
    parent = await jail.create("a", lab.spec(root, suspend=SOON))
    assert await call(parent, "add", number=1) == 1
    for number in range(3):
        await site.still(1 + number)
        children = [
            await jail.create(f"{number}", lab.spec(root, suspend=SOON, forked_from="a")),
            await jail.create(f"{number}-{number}", lab.spec(root, suspend=SOON, forked_from=f"{number}")),
        ]
        assert [await call(child, "add", number=n) for n, child in enumerate(children, 10)] == [11, 12]
        await jail.delete(f"{number}-{number}")
    await site.still(4)
    await jail.delete("a")
    assert await call(children[0], "add", number=1) == 12
    await site.still(3)


async def test_without_that_being_asked_for_none_stands_still(jail, site):
    quiet = await jail.create("a", probe())
    watched = await jail.create("b", probe(suspend=SOON))
    await site.still()
    assert await call(quiet, "echo", text="x") == "x"
    await call(watched, "echo", text="x")
    await site.still()


async def test_the_setting_is_for_those_that_say_nothing(jail, site, monkeypatch):
    monkeypatch.setenv("AENV_SUSPEND", "0.2")
    await jail.create("a", probe())
    await jail.create("b", probe(suspend=600.0))
    await jail.create("c", probe(lasting=True))
    await site.still(1)
    assert (await jail.exec("a", ["true"])).returncode == 0
    await site.still(1)
    monkeypatch.setenv("AENV_SUSPEND", "soon")
    with pytest.raises(Invalid, match="AENV_SUSPEND 'soon' is not a length of time"):
        await jail.create("d", probe())


async def test_the_project_says_when(jail, site, jailed_study):
    root = jailed_study.write("", timeouts={"suspend": "0.2"})
    sandbox = await jail.create("a", lab.spec(root))
    await site.still()
    assert await call(sandbox, "echo", text="x") == "x"


async def test_without_isolation_none_stands_still(leftovers):
    async with ProcessEngine(isolation="none") as engine:
        sandbox = await engine.create("a", probe(suspend=0.1))
        assert await call(sandbox, "count") == 1
        await works(engine, probe(suspend=0.1))
        assert await call(sandbox, "count") == 2


async def test_it_does_not_stand_still_during_a_call(jail, site, jailed_study):
    door, ear = jailed_study.door("here"), jailed_study.ear("ear")
    body = "@register_tool\ndef stand() -> str:\n    wait('here')\n    tell('ear', 'through')\n    return 'done'\n"
    sandbox = await jail.create("a", jailed_study.spec(body, suspend=SOON))
    other = await jail.create("b", probe(suspend=SOON))
    calling = asyncio.create_task(call(sandbox, "stand"))
    await door.reached()
    for _ in range(3):  # the other one was idle for longer than this one has been asked to wait
        await site.still(1)
        await call(other, "echo", text="x")
    door.open()
    assert await calling == "done"
    assert ear.heard() == "through"
    await site.still(2)


async def test_who_is_connected_to_a_shell_keeps_it_awake(jail, site):
    sandbox = await jail.create("a", probe(suspend=SOON))
    other = await jail.create("b", probe(suspend=SOON))
    token = f"Authorization: Bearer {sandbox.token}\r\n".encode() if sandbox.token else b""
    async with http.upgrade(sandbox.url, "/shell", "aenv-shell", headers=token) as shell:
        assert shell.status == 101
        for _ in range(3):
            await site.still(1)
            await call(other, "echo", text="x")
    await site.still(2)


async def test_a_spare_is_one_that_can_stand_still(jailed, leftovers, site, monkeypatch):
    monkeypatch.setenv("AENV_SPARE", "1")
    async with ProcessEngine(isolation=jailed) as engine:
        for number in range(4):
            sandbox = await engine.create(f"a{number}", probe(suspend=SOON))
            await site.still(number + 1)
        assert await call(sandbox, "echo", text="x") == "x"
        await works(engine)  # without it, from the same zygote
        await works(engine, probe(suspend=SOON))


async def test_one_that_waits_to_be_specialised_is_left_alone_until_it_was(jail, site):
    told = digest("owner")
    sandbox = await jail.create("a", probe(suspend=SOON, warm=True, owner_token_sha256=told))
    other = await jail.create("b", probe(suspend=SOON))
    headers = b"Content-Type: application/json\r\nAuthorization: Bearer owner\r\n"
    for _ in range(3):
        await site.still(1)
        await call(other, "echo", text="x")
    answer = await http.request("POST", sandbox.url, "/specialise", headers=headers, body=b"{}")
    assert answer.status == 200
    await site.still(2)
    answer = await http.request("POST", sandbox.url, "/tools/count", headers=headers, body=b"{}")
    assert json.loads(answer.body)["data"] == 1


# Memory


async def test_most_of_what_can_be_taken_back_is(jail, site, tmp_path):
    data = tmp_path / "data"
    with data.open("wb") as file:
        for _ in range(64):
            file.write(os.urandom(MIB))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that it counts for who reads it
    data.chmod(0o644)
    for directory in (tmp_path, *tmp_path.parents):
        if str(directory).startswith("/tmp/"):
            directory.chmod(0o755)
    await jail.create("a", probe(suspend=SOON, datasource=str(data)))
    # What is read twice is kept longer.
    read = await jail.exec("a", sh("cat /datasource | cksum; cat /datasource | cksum"))
    assert len(set(read.stdout.splitlines())) == 1
    leaf = next(path.name for path in next(iter(site.groups.values())).glob("i*"))

    def kept():
        found = site.statistics(leaf)
        return found["inactive_file"] + found["active_file"]

    before, used = kept(), (await jail.used("a")).memory
    assert before > 60 * MIB
    await site.still()
    await eventually("memory to be taken back", lambda: kept() < before / 2)
    assert (await jail.used("a")).memory < used
    assert (await jail.exec("a", sh("cat /datasource | cksum"))).stdout in read.stdout


async def test_what_was_used_for_a_call_alone_is_given_back(jail, site):
    sandbox = await jail.create("a", probe(suspend=SOON))
    await call(sandbox, "eat", megabytes=128)
    await site.still()
    assert (await jail.used("a")).memory < 64 * MIB


# Its end


async def test_its_time_is_over_while_it_stands_still(jail, site):
    await works(jail)
    await jail.create("a", probe(suspend=SOON, ttl=3.0))
    await site.still()
    ended = await over(jail, "a")
    assert (ended.state, ended.reason) == (State.TERMINATED, "its time to live of 3 s is over")
    await eventually("its end", lambda: not site.held())


async def test_time_without_a_call_is_over_while_it_stands_still(jail, site):
    await jail.create("a", probe(suspend=SOON, idle=1.5))
    await site.still()
    ended = await over(jail, "a")
    assert ended.state is State.TERMINATED
    assert "no call for 1.5 s" in ended.reason


async def test_one_that_stands_still_is_deleted_after_its_teardown(jail, site, jailed_study, family):
    ear = jailed_study.ear("ear")
    body = "@register_teardown\ndef clear() -> None:\n    tell('ear', 'torn down')\n"
    await jail.create("a", jailed_study.spec(body, preload=True, suspend=SOON))
    await site.still()
    await jail.delete("a")
    assert ear.heard() == "torn down"
    assert not family.instances()
    assert not site.held()


async def test_an_engine_ends_those_that_stand_still(jail, site, leftovers):
    await asyncio.gather(*(jail.create(f"a{number}", probe(suspend=SOON)) for number in range(5)))
    await site.still(5)
    async with asyncio.timeout(lab.PATIENCE):
        await jail.close()
    await leftovers.none()


@pytest.mark.parametrize("role", ["instance", "first", "zygote", "stub"])
async def test_one_that_is_killed_while_it_stands_still(jail, site, family, role):
    await jail.create("a", probe(suspend=SOON))
    await site.still()
    family.get(role).kill()
    ended = await over(jail, "a")
    assert ended.state is State.FAILED
    assert ended.reason
    await works(jail)


async def test_nothing_is_left_when_the_spawner_is_killed(jail, site, family, leftovers):
    await asyncio.gather(*(jail.create(f"a{number}", probe(suspend=SOON)) for number in range(3)))
    await jail.exec("a0", sh("setsid sleep 600 </dev/null >/dev/null 2>&1 &"))
    await site.still(3)
    instances = family.instances()
    assert len(instances) == 3
    family.spawner.kill()
    await lab.noticed(jail)
    await leftovers.none("processes")
    await works(jail)  # which begins with what the last one left
    await jail.close()
    await leftovers.none()


async def test_nothing_is_left_when_the_program_is_killed(home, site, leftovers):
    script = """
import asyncio, sys
from aenv.engines.process.engine import ProcessEngine
from tests.engines.process.lab import probe

async def main():
    engine = ProcessEngine(isolation="auto")
    await engine.create("a", probe(suspend=0.2))
    print("made")
    await asyncio.Event().wait()

asyncio.run(main())
"""
    with lab.owner(script, home, cwd=lab.ROOT) as process:
        assert await lab.line(process) == "made"
        await site.still()
        process.kill()
        process.wait()
        await leftovers.none("processes", "control groups", "files")


async def test_one_of_a_named_engine_stands_still_without_it(jailed, leftovers, site):
    async with ProcessEngine(isolation=jailed, state="site") as first:
        sandbox = await first.create("a", probe(suspend=SOON))
        assert await call(sandbox, "count") == 1
    await site.still()
    assert await call(sandbox, "count") == 2
    await site.still()
    second = ProcessEngine(isolation=jailed, state="site")
    assert [found.id for found in await second.find()] == ["a"]
    assert await call(sandbox, "count") == 3
    await second.end()
    await second.close()


# Health


async def test_waking_is_no_reason_to_be_ill(jail, site, jailed_study, monkeypatch):
    monkeypatch.setenv("AENV_HEALTH_INTERVAL", "0.1")
    body = "@register_health\ndef health() -> bool:\n    return True\n"
    sandbox = await jail.create("a", jailed_study.spec(body, suspend=SOON))
    for _ in range(3):
        await site.still()
        assert await call(sandbox, "echo", text="x") == "x"
        assert (await jail.get("a")).reason == ""


# Calls


@pytest.fixture
async def embedded(jailed, monkeypatch, leftovers):
    monkeypatch.chdir(projects.PROBE)
    monkeypatch.setenv("AENV_ISOLATION", jailed)
    monkeypatch.setenv("AENV_SUSPEND", "0.1")
    found = Embedded()
    yield found
    await found._engine().close()


async def test_no_call_is_lost_and_none_runs_twice(embedded, site):
    dice = random.Random(7)
    async with Environment(projects.NAME, provision=embedded) as env:
        for number in range(1, 51):
            assert (await env.call_tool("count", {})).text == str(number)
            if number % 2:
                await site.still()
            else:  # about when it is going to stand still
                await asyncio.sleep(dice.uniform(0.08, 0.13))


async def test_it_is_woken_to_be_saved_and_what_was_saved_is_loaded_in_one_that_is_woken_for_it(embedded, site):
    async with Environment(projects.NAME, provision=embedded) as env, Environment.like(env) as other:
        await env.call_tool("count", {})
        await other.initialize()
        await site.still(2)
        content = (await lineage.save(lineage.Origin.of(env))).content
        await site.still(2)
        answers.data(await other._ask("/state", b"", content, None, "load", "PUT"))
        await site.still(2)
        assert (await other.call_tool("count", {})).text == "2"


async def test_calls_without_an_id_reach_it_too(jail, site):
    sandbox = await jail.create("a", probe(suspend=0.1))
    dice = random.Random(8)
    for number in range(1, 51):
        assert await call(sandbox, "count") == number
        await asyncio.sleep(dice.uniform(0.08, 0.14))


async def test_many_callers_at_once_wake_it_together(jail, site):
    sandbox = await jail.create("a", probe(suspend=SOON))
    for round in range(3):
        await site.still()
        found = await asyncio.gather(*(call(sandbox, "count") for _ in range(40)))
        assert sorted(found) == [round * 40 + number for number in range(1, 41)]


# Those that lie

LIAR = """
import os, socket, struct, threading, time

def report():
    for number in range(3, 64):
        try:
            found = socket.socket(fileno=os.dup(number))
        except OSError:
            continue
        if found.family == socket.AF_UNIX and not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            peer = struct.unpack("3i", found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            if peer != os.getpid():
                return found

def lie(text, pause):
    data = text.encode()
    while True:
        REPORT.sendall(struct.pack("I", len(data)) + data)
        time.sleep(pause)

@register_tool
def begin(text: str, pause: float) -> bool:
    global REPORT
    REPORT = report()
    threading.Thread(target=lie, args=(text, pause), daemon=True).start()
    return True
"""


@pytest.mark.parametrize(
    "said", ['{"idle": 0}', '{"idle": "x"}', '{"idle": -1e300}', '{"idle": NaN}', '{"idle": null}']
)
async def test_one_that_always_says_it_is_idle_harms_nobody(jail, site, jailed_study, said):
    liar = await jail.create("a", jailed_study.spec(LIAR, suspend=600.0, idle=600.0))
    assert await call(liar, "begin", text=f'{{"idle": {said}}}', pause=0.0)
    await site.still()
    for _ in range(3):  # it is held whatever it says, and woken whenever it is called
        waker = asyncio.create_task(call(liar, "echo", text="x"))
        await works(jail)
        await asyncio.wait((waker,), timeout=1.0)
        waker.cancel()
        await asyncio.wait((waker,))
    assert (await jail.get("a")).state is State.RUNNING
    async with asyncio.timeout(lab.PATIENCE):
        await jail.delete("a")
    await works(jail)


async def test_one_that_may_not_stand_still_and_says_it_is_idle_is_ended(jail, jailed_study):
    liar = await jail.create("a", jailed_study.spec(LIAR))
    with suppress(NetworkError, SandboxLost):
        await call(liar, "begin", text='{"idle": 0}', pause=0.1)
    ended = await over(jail, "a")
    assert "it spoke to the engine unasked" in ended.reason


async def test_one_that_always_starts_processes_is_called_as_ever_and_left_alone(jail, site, jailed_study):
    body = (
        "import threading, subprocess\n"
        "def storm():\n    while True:\n        subprocess.run(['true'])\n"
        "@register_tool\ndef begin() -> None:\n"
        "    for _ in range(20):\n        threading.Thread(target=storm, daemon=True).start()\n"
    )
    sandbox = await jail.create("a", jailed_study.spec(body, suspend=0.1))
    await call(sandbox, "begin")
    other = await jail.create("b", probe(suspend=SOON))
    for number in range(1, 6):
        await asyncio.sleep(0.3)
        assert await call(sandbox, "echo", text="x") == "x"
        assert await call(other, "count") == number
    async with asyncio.timeout(lab.PATIENCE):
        await jail.delete("a")


# The freezer


@pytest.fixture
def held(pen):
    try:
        tree = cgroups.make(f"test-{os.getpid()}")
    except OSError as exc:
        pytest.skip(f"needs control groups: {exc}")
    found = freezer.Freezer.make(tree)
    yield tree, found
    found.close()
    cgroups.remove_soon(tree, kill=True)


async def _joined(tree, leaf, process):
    for root in tree.roots.values():
        (root / leaf / "cgroup.procs").write_text(str(process.pid))


async def test_only_its_own_processes_are_gathered(held):
    tree, found = held
    if not found.roots:
        pytest.skip("version 2 needs no gathering")
    apart = Path(found.roots["unified"])
    tree.add("i0", cgroups.Limits())
    mine, other = [await asyncio.create_subprocess_exec("sleep", "600") for _ in range(2)]
    try:
        await _joined(tree, "i0", mine)
        (apart / "i0").mkdir()
        (apart / "i0" / "cgroup.procs").write_text(str(other.pid))  # as an id would be that was given anew
        assert found.gather("i0") is True
        assert (apart / "i0" / "cgroup.procs").read_text().split() == [str(mine.pid)]
        found.hold("i0")
        await eventually("it to stand still", lambda: "frozen 1" in (apart / "i0" / "cgroup.events").read_text())
        mine.kill()
        await mine.wait()
    finally:
        for process in (mine, other):
            if process.returncode is None:
                process.kill()
                await process.wait()
    cgroups.remove_soon(tree, "i0")
    found.remove("i0")
    assert not (apart / "i0").exists()
