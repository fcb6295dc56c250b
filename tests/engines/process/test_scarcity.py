"""Machines that run out of something: the error names it, nothing is left, and it works again afterwards."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress

import pytest

from aenv.engines.process import state
from aenv.engines.process.engine import ProcessEngine
from aenv.errors import AEnvError, StartFailed
from tests.engines.process import lab
from tests.engines.process.lab import call, probe, works


class Disk:
    """A small file system of its own."""

    def __init__(self, path):
        self.path = path
        path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "aenv-test", path], check=True)

    def fill(self):
        with open(self.path / "filler", "wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        assert os.statvfs(self.path).f_bavail == 0

    def free(self):
        (self.path / "filler").unlink()

    def remount(self, mode):
        subprocess.run(["mount", "-o", f"remount,{mode}", self.path], check=True)

    def remove(self):
        subprocess.run(["umount", "-l", self.path], check=True)


@pytest.fixture
def disk(home, monkeypatch, leftovers):
    """Where engines keep their state in these tests."""
    if os.getuid():
        pytest.skip("only root can mount a file system")
    found = Disk(home / "disk")
    monkeypatch.setenv("AENV_HOME", str(found.path))
    yield found
    found.remove()


def kept(disk):
    run = disk.path / "run"
    return sorted(path.name for path in run.iterdir() if path.name != ".lock") if run.is_dir() else []


async def test_a_disk_that_is_full_before_anything_started(disk, isolation):
    disk.fill()
    async with ProcessEngine(isolation=isolation) as engine:
        with pytest.raises(AEnvError, match="No space left on device") as caught:
            await engine.create("a", probe())
        assert str(disk.path) in str(caught.value)
        assert kept(disk) == []
        disk.free()
        await works(engine)
    assert kept(disk) == []


async def test_a_disk_that_becomes_full(disk, isolation, tmp_path):
    other = lab.Study(tmp_path, isolation)
    async with ProcessEngine(isolation=isolation) as engine:
        sandbox = await engine.create("first", probe())
        disk.fill()
        with pytest.raises(StartFailed, match="No space left on device") as caught:
            await engine.create("a", other.spec("DATA = ' '\n" + "# filling\n" * 1000, preload=True))
        assert str(disk.path) in str(caught.value)
        assert (await engine.get("a")).state == "Failed"
        assert await call(sandbox, "echo", text="x") == "x"
        disk.free()
        await works(engine, other.spec(preload=True))
    assert kept(disk) == []


@pytest.mark.parametrize("name", ["", "named"])
async def test_a_home_that_cannot_be_written(disk, isolation, name):
    disk.remount("ro")
    engine = ProcessEngine(isolation=isolation, state=name)
    with pytest.raises(AEnvError, match="Read-only file system") as caught:
        await engine.create("a", probe())
    assert str(disk.path) in str(caught.value)
    assert "AENV_HOME" in (caught.value.hint or "")
    disk.remount("rw")
    await works(engine)
    await engine.end()


async def test_a_home_with_old_things_that_cannot_be_written_anymore(disk):
    directory = state.Directory.make()
    os.close(directory._lock)
    disk.remount("ro")
    engine = ProcessEngine(isolation="none")
    with pytest.raises(AEnvError, match="Read-only file system"):
        await engine.create("a", probe())
    disk.remount("rw")
    await works(engine)
    await engine.close()
    assert kept(disk) == []


async def test_a_home_that_is_a_file(home, leftovers, monkeypatch):
    (home / "file").write_text("")
    monkeypatch.setenv("AENV_HOME", str(home / "file"))
    async with ProcessEngine(isolation="none") as engine:
        with pytest.raises(AEnvError, match="Not a directory"):
            await engine.create("a", probe())


# Descriptors

CROWDING = """
import asyncio, json, os, resource, sys
from aenv.engines.process.engine import ProcessEngine
from tests.engines.process.lab import call, probe, works

async def main():
    engine = ProcessEngine(isolation=sys.argv[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
    await engine.find()
    errors, made = [], 0
    for number in range(60):
        try:
            sandbox = await engine.create(f"a{number}", probe())
            made += 1
        except Exception as exc:
            errors.append([type(exc).__name__, str(exc)])
            if len(errors) == 3:
                break
    alive = [found.id for found in await engine.find() if found.state == "Running"]
    print(json.dumps({"made": made, "errors": errors, "alive": len(alive)}))
    for id in alive[: len(alive) // 2]:
        await engine.delete(id)
    await works(engine)
    await engine.close()
    print("done")

asyncio.run(main())
"""


async def test_an_engine_that_runs_out_of_descriptors(home, leftovers, isolation):
    with lab.owner(CROWDING, home, isolation, cwd=lab.ROOT) as process:
        found = json.loads(await lab.line(process))
        assert found["made"] == found["alive"] > 1
        assert [kind for kind, _ in found["errors"]] == ["StartFailed"] * 3
        assert all("Too many open files" in text for _, text in found["errors"])
        assert await lab.line(process) == "done"
        process.wait(lab.PATIENCE)
    await leftovers.none()


async def test_an_owner_that_runs_out_of_descriptors(home, leftovers):
    script = """
import asyncio, os, resource
from aenv.engines.process.engine import ProcessEngine
from tests.engines.process.lab import probe, works

async def main():
    engine = ProcessEngine(isolation="none")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    try:
        await engine.create("a", probe())
    except Exception as exc:
        print(type(exc).__module__.partition(".")[0], str(exc))
    for descriptor in held:
        os.close(descriptor)
    before = len(os.listdir("/proc/self/fd"))
    await works(engine)
    await engine.close()
    print("done")

asyncio.run(main())
"""
    with lab.owner(script, home, cwd=lab.ROOT) as process:
        assert "Too many open files" in (said := await lab.line(process))
        assert said.startswith("aenv ")
        assert await lab.line(process) == "done"
        process.wait(lab.PATIENCE)
    await leftovers.none()
