"""A hostile import before the fork changes the zygote as it likes: no unsealed instance is handed on, no other owner
and no other environment is affected, and every deletion ends."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

from aenv.errors import AEnvError, StartFailed
from aenv.models import State
from tests.engines.hostile.ground import ATTACKS, Outside, project, soon, start
from tests.engines.hostile.test_kernel import SEALING
from tests.support import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOLS = """
import os
import aenv
from aenv import register_tool

ID = os.urandom(8).hex()
SEEN = []

@register_tool
def fine() -> str:
    return "fine"

@register_tool
def patched() -> list[str]:
    return [name for name in vars(aenv) if name.startswith("PATCHED")] + SEEN

@register_tool
def visible() -> list[str]:
    return sorted(name for name in os.listdir("/proc") if name.isdigit())

@register_tool
def identity() -> str:
    return ID

@register_tool
def patch(name: str) -> None:
    setattr(aenv, name, True)
    SEEN.append(name)
"""
HOSTILE = """
import ctypes, os, signal, socket, struct, sys, threading, time
import aenv
from aenv.engines.process import instance, kernel, seccomp, zygote
from aenv.engines.process.instance import Birth
from aenv.engines.process.seal import Seal

announce = instance.announce
begin = Birth.begin
made = Seal.__init__

def sealing(change):
    def make(self, *arguments):
        made(self, *arguments)
        self.steps = [step for call, given in self.steps if (step := change(call, given))]
    Seal.__init__ = make

def without(*names):
    sealing(lambda call, given: call.__name__ not in names and (call, given))

def without_prctl(*options):
    sealing(lambda call, given: not (call.__name__ == 'prctl' and given[0] in options) and (call, given))

def sharing(namespace):
    sealing(lambda call, given: (call, (given[0] & ~namespace,)) if call.__name__ == 'unshare' else (call, given))
"""
LIES = {
    "not sealed at all": "sealing(lambda call, given: None)",
    "root still": "without('setresuid', 'setresgid')",
    "the group of root": "without('setresgid', 'setgroups')",
    "no filter": "without_prctl(22)",
    "rights for programs": "without_prctl(kernel.PR_CAPBSET_DROP)",
    "privileges to gain": "without_prctl(22, kernel.PR_SET_NO_NEW_PRIVS)",
    "no control groups": "without('write')",
    "the network of its zygote": "sharing(kernel.NEWNET)",
    "the semaphores of its zygote": "sharing(kernel.NEWIPC)",
    "no namespace of its own": """
def plain(self, birth, order, descriptors):
    handles = [os.pidfd_open(1)]
    birth.prepare(order, descriptors, handles)
    pid = os.fork()
    if pid == 0:
        birth.begin(order, descriptors, handles)
    self._firsts[pid] = pid
    return pid
zygote._Children._fork = plain
""",
    "another thread": """
def busy(channel, handles):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    announce(channel, handles)
instance.announce = busy
""",
    "no handle": "instance.announce = lambda channel, handles: announce(channel, [])",
    "a handle on itself": """
instance.announce = lambda channel, handles: announce(channel, [os.pidfd_open(os.getpid())])
""",
    "a handle on no process": """
instance.announce = lambda channel, handles: announce(channel, [os.open('/dev/null', os.O_RDONLY)])
""",
    "the third of its namespace": """
def third(channel, handles):
    if os.fork():
        time.sleep(600)
    announce(channel, handles)
instance.announce = third
""",
    "too many handles": "instance.announce = lambda channel, handles: announce(channel, [0] * 9)",
    "gone when looked at": """
def last_words(channel, handles):
    announce(channel, handles)
    os._exit(0)
instance.announce = last_words
""",
    "nonsense": "instance.announce = lambda channel, handles: channel.sendall(b'\\xff' * 64)",
    "a deep answer": """
instance.announce = lambda channel, handles: channel.sendall(struct.pack('I', 200_000) + b'[' * 200_000)
""",
}


def hostile(folder: Path, code: str) -> Path:
    return project(folder, HOSTILE + code + TOOLS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def neighbour(engine, tmp_path_factory):
    """A sandbox of another owner."""
    return await start(engine, project(tmp_path_factory.mktemp("neighbour") / "project", TOOLS), owner="ada")


@pytest.fixture
def outside(neighbour, home: Path) -> Outside:
    return Outside(home)


@pytest.mark.parametrize("lie", LIES)
async def test_who_lies_about_its_seal_is_not_handed_on(engine, neighbour, outside, tmp_path, lie):
    leaves = outside.leaves()
    id = f"liar-{lie.replace(' ', '-')}"
    path = hostile(tmp_path / "project", LIES[lie])
    with pytest.raises(StartFailed):
        await soon(start(engine, path, id=id, owner="eve", preload=True), "the refusal")
    found = await engine.get(id)
    assert found.state is State.FAILED
    assert found.url == ""
    assert found.reason
    assert "import" not in found.reason
    await eventually("its control groups to go", lambda: outside.leaves() == leaves)
    assert await neighbour.tool("fine") == "fine"
    assert await neighbour.tool("patched") == []
    await soon(engine.delete(id), "the deletion")


async def test_the_same_import_without_a_lie_starts(engine, neighbour, tmp_path):
    box = await start(engine, hostile(tmp_path / "project", ""), owner="eve", preload=True)
    assert await box.tool("fine") == "fine"
    await engine.delete(box.id)


async def test_a_handle_on_a_siblings_namespace_is_not_taken(engine, neighbour, tmp_path):
    code = """
kept = []
def swapped(self, order, descriptors, handles):
    begin(self, order, descriptors, [kept[0]] if kept else handles)
def fork(self, birth, order, descriptors, original=zygote._Children._fork):
    pid = original(self, birth, order, descriptors)
    kept.append(os.pidfd_open(self._firsts[pid][0]))
    return pid
Birth.begin = swapped
zygote._Children._fork = fork
"""
    path = hostile(tmp_path / "project", code)
    first = await start(engine, path, owner="eve", preload=True)
    with pytest.raises(StartFailed):
        await soon(start(engine, path, owner="eve", preload=True), "the refusal")
    assert await first.tool("fine") == "fine"
    await soon(engine.delete(first.id), "the deletion")


async def test_a_zygote_that_pretends_to_be_another_gets_nobody_into_its_namespace(engine, neighbour, tmp_path):
    """It may name any process of its namespace as the sender, and give out any number to the next that it forks."""
    code = """
def decoy():
    told, tell = os.pipe()
    middle = os.fork()
    if middle == 0:
        kernel.unshare(kernel.NEWNS | kernel.NEWIPC | kernel.NEWUTS | kernel.NEWNET | kernel.NEWPID)
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        os.write(tell, struct.pack('i', pid))
        os._exit(0)
    pid = struct.unpack('i', os.read(told, 4))[0]
    os.waitpid(middle, 0)
    return pid

def forged(sock, message, handles=()):
    data = __import__('json').dumps(message).encode()
    who = struct.pack('3i', decoy(), 0, 0)
    sock.sendmsg([struct.pack('I', len(data)) + data], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, who)])

def plain(self, birth, order, descriptors):
    with open('/proc/sys/kernel/ns_last_pid', 'w') as file:
        file.write('1')
    handles = [os.pidfd_open(1)]
    birth.prepare(order, descriptors, handles)
    pid = os.fork()
    if pid == 0:
        birth.begin(order, descriptors, handles)
    self._firsts[pid] = pid
    return pid

zygote.send = forged
zygote._Children._fork = plain
"""
    try:
        box = await soon(start(engine, hostile(tmp_path / "project", code), owner="eve", preload=True), "the start")
    except StartFailed as exc:
        assert "import" not in str(exc)  # noqa: PT017  it may be refused as well, but for what it is
        return
    assert await box.tool("visible") == ["1", "2"]
    await soon(engine.delete(box.id), "the deletion")


async def test_a_filter_of_its_own_making_wins_nothing(engine, neighbour, tmp_path):
    """The number of filters can be had with any filter. So what matters is in the one before the import."""
    allow_all = "struct.pack('HBBI', 6, 0, 0, 0x7FFF0000)"
    code = f"seccomp.sealed = lambda: {allow_all}\n"
    path = hostile(tmp_path / "project", code + "import _attacks\n")
    shutil.copytree(ATTACKS / "src" / "_attacks", path / "src" / "_attacks")
    with (path / "src" / "custom_env.py").open("a") as file:
        file.write("\n@register_tool\ndef attack(name: str) -> object:\n    return _attacks.run(name, {})['got']\n")
    try:
        box = await soon(start(engine, path, owner="eve", preload=True), "the start")
    except StartFailed as exc:
        assert "import" not in str(exc)  # noqa: PT017  it may be refused as well, but for what it is
        return
    assert await box.tool("attack", name="odd_sockets") == []
    assert await box.tool("attack", name="debug") == []
    assert set(await box.tool("attack", name="reached_calls")) <= SEALING
    assert not [made for made in await box.tool("attack", name="made_namespaces") if "user" in made]
    status = (await box.tool("attack", name="ids"))["own"]
    assert int(status["CapBnd"], 16) == 0
    await soon(engine.delete(box.id), "the deletion")


@pytest.mark.parametrize(
    ("way", "code"),
    {
        "never seals": "Birth.begin = lambda *arguments: time.sleep(600)",
        "never forks": "zygote._Children._fork = lambda *arguments: time.sleep(600)",
        "never imports": "time.sleep(600)",
        "ends": "zygote._Children._fork = lambda *arguments: os._exit(0)",
        "ends at import": "os._exit(0)",
    }.items(),
)
async def test_who_never_answers_is_given_up(engine, neighbour, outside, tmp_path, way, code):
    leaves = outside.leaves()
    id = f"silent-{way.replace(' ', '-')}"
    path = hostile(tmp_path / "project", code)
    with pytest.raises(StartFailed):
        await soon(start(engine, path, id=id, owner="eve", preload=True, startup_timeout=3.0), "the end")
    assert (await engine.get(id)).state is State.FAILED
    assert await neighbour.tool("fine") == "fine"
    await soon(engine.delete(id), "the deletion")
    assert outside.leaves() == leaves


NEVER_REAPS = {
    "does not reap": "zygote._Children._ended = lambda self, pidfd: self._epoll.unregister(pidfd)",
    "hangs when it should reap": "zygote._Children._ended = lambda self, pidfd: time.sleep(600)",
    "hangs after a fork": """
def once(self, birth, order, descriptors, original=zygote._Children._fork):
    pid = original(self, birth, order, descriptors)
    os.kill(pid, 0)
    time.sleep(600)
zygote._Children._fork = once
""",
}


async def test_a_deletion_does_not_depend_on_the_zygote(engine, neighbour, outside, tmp_path):
    leaves = outside.leaves()

    async def made_and_deleted(name: str, code: str) -> None:
        path = hostile(tmp_path / name.replace(" ", "-"), code)
        box = await soon(start(engine, path, owner="eve", preload=True), "the start")
        assert await box.tool("fine") == "fine"
        await soon(engine.delete(box.id), f"the deletion where the zygote {name}")

    await asyncio.gather(*(made_and_deleted(*case) for case in NEVER_REAPS.items()))
    assert outside.leaves() == leaves
    assert await neighbour.tool("fine") == "fine"


async def test_no_zygote_is_shared_by_owners_or_projects(engine, neighbour, tmp_path):
    path, other = (hostile(tmp_path / name, "aenv.PATCHED_AT_IMPORT = True\n") for name in ("one", "two"))
    clean = project(tmp_path / "clean", TOOLS)
    given = {"preload": True}
    boxes = {
        "eve": await start(engine, path, owner="eve", **given),
        "eve again": await start(engine, path, owner="eve", **given),
        "bob": await start(engine, path, owner="bob", **given),
        "nobody": await start(engine, path, **given),
        "eve's other": await start(engine, other, owner="eve", **given),
        "eve's clean": await start(engine, clean, owner="eve", **given),
    }
    identities = {name: await box.tool("identity") for name, box in boxes.items()}
    assert identities["eve"] == identities["eve again"]
    assert len(set(identities.values())) == 5
    assert await boxes["eve"].tool("patched") == ["PATCHED_AT_IMPORT"]
    assert await boxes["eve's clean"].tool("patched") == []
    assert await neighbour.tool("patched") == []
    for box in boxes.values():
        await engine.delete(box.id)


@pytest.mark.parametrize("preload", [False, True])
async def test_a_tool_changes_no_instance_but_its_own(engine, neighbour, tmp_path, preload):
    path = project(tmp_path / "project", TOOLS)
    first = await start(engine, path, owner="eve", preload=preload)
    await first.tool("patch", name="PATCHED_BY_A_TOOL")
    assert await first.tool("patched") == ["PATCHED_BY_A_TOOL"] * 2
    second = await start(engine, path, owner="eve", preload=preload)
    assert await second.tool("patched") == []
    for box in (first, second):
        await engine.delete(box.id)


async def test_author_code_runs_only_in_a_sealed_instance_when_nothing_is_preloaded(engine, neighbour, tmp_path):
    """Also when it is imported: there is no moment in which it has more rights than later."""
    code = "STATUS = open('/proc/self/status').read()\n"
    path = project(tmp_path / "project", code + TOOLS + "\n@register_tool\ndef status() -> str:\n    return STATUS\n")
    for preload in (False, "auto"):  # which is the same under strict isolation
        box = await start(engine, path, owner="eve", preload=preload)
        rows = dict(line.split(":\t", 1) for line in (await box.tool("status")).splitlines() if ":\t" in line)
        assert int(rows["CapEff"], 16) == int(rows["CapBnd"], 16) == 0
        assert rows["Seccomp_filters"] == "2"
        assert rows["NSpid"].split()[-1] == "2"
        assert int(rows["Uid"].split()[0]) >= 1000
        await engine.delete(box.id)


async def test_many_at_once_are_refused_and_cleared_away(engine, neighbour, outside, tmp_path):
    leaves = outside.leaves()
    path = hostile(tmp_path / "project", LIES["not sealed at all"])

    async def refused(number: int) -> bool:
        with suppress(AEnvError):
            await start(engine, path, id=f"crowd-{number}", owner="eve", preload=True)
            return False
        return True

    assert all(await soon(asyncio.gather(*map(refused, range(20))), "the refusals"))
    await eventually("their control groups to go", lambda: outside.leaves() == leaves)
    assert await neighbour.tool("fine") == "fine"
