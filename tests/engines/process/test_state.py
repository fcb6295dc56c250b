"""What spawners keep on disk, what is left when they are killed, and how it is told and cleared away."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from aenv import config
from aenv.cli.gc import gc as collect
from aenv.engines.docker import daemon
from aenv.engines.process import cgroups, state
from aenv.engines.process.engine import ProcessEngine
from aenv.errors import AEnvError, Invalid
from tests.engines.process import lab
from tests.engines.process.lab import probe

pytestmark = pytest.mark.usefixtures("leftovers")


@contextmanager
def sleeper(**options):
    """A process that ends only when it is killed."""
    process = subprocess.Popen(["sleep", "600"], **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def dead(name="dead", **facts):
    """The directory of a spawner that was killed."""
    directory = state.Directory.make(name)
    directory.record({"pid": 0, "control_groups": {}, **facts})
    os.close(directory._lock)
    return directory.path


def group(name):
    try:
        return cgroups.make(name)
    except OSError as exc:
        pytest.skip(f"needs control groups: {exc}")


def join(tree, leaf, process):
    tree.add(leaf, cgroups.Limits())
    for root in tree.roots.values():
        (root / leaf / "cgroup.procs").write_text(str(process.pid))


# Directories


def test_each_spawner_has_a_directory_of_its_own(home):
    first, second = state.Directory.make(), state.Directory.make()
    assert first.path != second.path
    assert first.path.parent == second.path.parent == state.root() == home / "run"
    assert (first.path.stat().st_mode & 0o777, state.root().stat().st_mode & 0o777) == (0o700, 0o700)
    first.record({"pid": 1})
    assert json.loads((first.path / "spawner.json").read_text()) == {"pid": 1}
    assert (first.path / "spawner.json").stat().st_mode & 0o777 == 0o600
    first.remove()
    second.remove()
    assert [path.name for path in state.root().iterdir()] == [".lock"]


def test_a_name_has_one_spawner_at_a_time(home):
    directory = state.Directory.make("site")
    assert state.alive("site") == directory.path
    with pytest.raises(AEnvError, match="belongs to another spawner"):
        state.Directory.make("site")
    directory.remove()
    assert state.alive("site") is None
    state.Directory.make("site").remove()


def test_what_is_locked_is_never_swept(home):
    living = state.Directory.make()
    with sleeper(start_new_session=True) as process:
        (living.path / "i" / "1.pid").write_text(f"{process.pid} {state.start_time(process.pid)}")
        assert state.left() == []
        assert state.sweep() == []
        assert living.path.is_dir()
        assert process.poll() is None
    living.remove()


def test_a_lock_is_held_by_a_process_and_not_by_its_file(home):
    path = dead()
    lock = os.open(path / "lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert state.sweep() == []
    os.close(lock)
    assert [left.directory for left in state.sweep()] == [path]
    assert not path.exists()


@pytest.mark.parametrize("text", ["", "nonsense", "[]", '{"control_groups": {"memory": "/nowhere/at/all"}}', "\xff"])
def test_facts_that_cannot_be_read_do_not_stop_a_sweep(home, text):
    path = dead()
    (path / "spawner.json").write_text(text, encoding="latin-1")
    (path / "i" / "1.pid").write_text("nonsense")
    assert len(state.left()) == 1
    state.sweep()
    assert not path.exists()


def test_what_is_no_spawners_is_left_alone(home):
    foreign = state.root() / "foreign"
    foreign.mkdir(parents=True)
    (foreign / "file").write_text("precious")
    assert state.left() == state.sweep() == []
    assert (foreign / "file").read_text() == "precious"
    shutil.rmtree(foreign)


# What is left


def test_a_sweep_ends_plain_processes_with_their_group(home):
    path = dead()
    with sleeper(start_new_session=True) as process, sleeper() as innocent:
        (path / "i" / "1.pid").write_text(f"{process.pid} {state.start_time(process.pid)}")
        (path / "i" / "2.pid").write_text(f"{innocent.pid} {state.start_time(innocent.pid) + 1}")
        (left,) = state.left()
        assert left.processes == (process.pid,)
        assert process.poll() is None
        assert state.sweep() == [left]
        assert process.wait(lab.PATIENCE) == -signal.SIGKILL
        assert innocent.poll() is None
    assert not path.exists()


def test_a_sweep_ends_what_is_in_control_groups_and_removes_them(home, pen):
    tree = group("dead")
    path = dead(control_groups={name: str(root) for name, root in tree.roots.items()})
    (path / "i" / "1.sock").touch()
    with sleeper() as first, sleeper() as second:
        join(tree, "i0", first)
        join(tree, "z1", second)
        (left,) = state.left()
        assert left.processes == tuple(sorted((first.pid, second.pid)))
        assert set(left.control_groups) == {str(root) for root in tree.roots.values()}
        assert left.sockets == 1
        assert state.sweep() == [left]
        assert [process.wait(lab.PATIENCE) for process in (first, second)] == [-signal.SIGKILL] * 2
    assert not any(root.exists() for root in tree.roots.values())
    assert state.left() == []


def test_a_process_that_is_stopped_is_swept_too(home, pen):
    tree = group("dead")
    dead(control_groups={name: str(root) for name, root in tree.roots.items()})
    with sleeper() as process:
        join(tree, "i0", process)
        process.send_signal(signal.SIGSTOP)
        state.sweep()
        assert process.wait(lab.PATIENCE) == -signal.SIGKILL
    assert not any(root.exists() for root in tree.roots.values())


async def test_what_a_killed_spawner_left_is_swept_by_the_next_engine(home, jailed, family, leftovers):
    engine = ProcessEngine(isolation=jailed)
    await engine.create("a", probe())
    family.spawner.kill()
    await leftovers.none("processes")
    (left,) = state.left()
    assert left.processes == ()
    assert left.sockets == 1
    assert len(left.control_groups) > 0
    await lab.noticed(engine)
    assert await engine.find() == []
    assert state.left() == []
    await engine.close()


# aenv gc


@pytest.fixture(autouse=True)
def no_containers(monkeypatch):
    """Those of this machine belong to others."""
    monkeypatch.setattr(daemon, "SOCKETS", ())
    for name in ("AENV_DOCKER_HOST", "DOCKER_HOST", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)


def gc(*arguments):
    done = CliRunner().invoke(collect, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def test_gc_explains_and_removes(home, pen):
    tree = group("dead")
    path = dead(control_groups={name: str(root) for name, root in tree.roots.items()})
    living = state.Directory.make()
    with sleeper() as process:
        join(tree, "i0", process)
        for _ in range(2):
            found = json.loads(gc("--dry-run", "-o", "json").stdout)
            assert found["removed"] is False
            (row,) = [row for row in found["found"] if row["where"] == str(path)]
            assert row["what"] == "sandboxes"
            assert "their program is gone; 1 process" in row["why"]
            assert process.poll() is None
        text = gc("--dry-run").output
        assert "would be removed" in text
        assert str(path) in text.replace("\n", "")
        gone = json.loads(gc("-o", "json").stdout)
        assert gone["removed"] is True
        assert str(path) in [row["where"] for row in gone["found"]]
        assert process.wait(lab.PATIENCE) == -signal.SIGKILL
    assert not path.exists()
    assert not any(root.exists() for root in tree.roots.values())
    assert living.path.is_dir()
    assert json.loads(gc("-o", "json").stdout)["found"] == []
    assert "nothing is left behind" in gc().output
    living.remove()


def test_gc_finds_control_groups_that_belong_to_nobody(home, pen):
    group("known").remove()
    script = "from aenv.engines.process import cgroups; print(*cgroups.make('stray').roots.values())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    roots = [Path(root) for root in done.stdout.split()]
    shown = json.loads(gc("--dry-run", "-o", "json").stdout)["found"]
    assert {row["where"] for row in shown} >= {str(root) for root in roots}  # others may have left some beside the pen
    assert {row["what"] for row in shown} == {"control group"}
    assert all(root.exists() for root in roots)
    gc()
    assert not any(root.exists() for root in roots)


async def test_gc_leaves_alone_what_lives_in_another_home(home, jailed, pen, monkeypatch, tmp_path):
    """The control groups of all homes are in one place."""
    async with ProcessEngine(isolation=jailed) as engine:
        await engine.find()
        before = pen.groups()
        assert before
        monkeypatch.setenv("AENV_HOME", str(tmp_path))
        assert json.loads((await asyncio.to_thread(gc, "-o", "json")).stdout)["found"] == []
        assert pen.groups() == before
        monkeypatch.setenv("AENV_HOME", str(home))
        await lab.works(engine)


async def test_gc_leaves_a_living_engine_alone(home, jailed):
    async with ProcessEngine(isolation=jailed) as engine:
        sandbox = await engine.create("a", probe())
        assert json.loads((await asyncio.to_thread(gc, "-o", "json")).stdout)["found"] == []
        assert await lab.call(sandbox, "echo", text="x") == "x"


# Where it is


# A spawner with a name


async def test_a_spawner_that_nobody_needs_ends_by_itself(home, isolation, leftovers):
    first = ProcessEngine(isolation=isolation, state="shared")
    made = await first.create("kept", probe(labels={"a": "b"}))
    await first.close()
    async with ProcessEngine(isolation=isolation, state="shared") as second:
        (found,) = await second.find({"a": "b"})
        assert (found.boot, found.url) == (made.boot, made.url)
        assert await lab.call(found, "echo", text="still here") == "still here"
        await second.delete("kept")
    await lab.eventually("its end", lambda: state.alive("shared") is None, patience=60)
    await leftovers.none()
    async with ProcessEngine(isolation=isolation, state="shared") as third:
        await lab.works(third)
        await third.end()


async def test_a_spawner_that_nobody_can_find_any_more_ends_with_its_sandboxes(home, isolation, family, leftovers):
    engine = ProcessEngine(isolation=isolation, state="shared")
    await engine.create("kept", probe())
    await engine.close()
    shutil.rmtree(home / "run")
    await leftovers.none("processes", patience=60)


async def test_engines_that_come_while_a_spawner_ends_get_another(home, isolation):
    for _ in range(3):
        ending, coming = (ProcessEngine(isolation=isolation, state="shared") for _ in range(2))
        await lab.works(ending)
        await asyncio.gather(ending.end(), *(coming.find() for _ in range(5)))
        await lab.works(coming)
        await coming.end()


async def test_strict_isolation_does_not_join_what_has_less(home):
    async with ProcessEngine(isolation="none", state="shared") as engine:
        await engine.find()
        with pytest.raises(Invalid, match="isolated as 'none'"):
            await ProcessEngine(isolation="strict", state="shared").find()
        await engine.end()


async def test_what_has_less_isolation_and_nothing_to_do_makes_room(home, jailed):
    async with ProcessEngine(isolation="none", state="shared") as engine:
        await engine.find()
    async with ProcessEngine(isolation="strict", state="shared") as engine:
        assert (await engine.isolated())["isolation"] == "strict"
        await engine.end()


async def test_a_spawner_that_does_not_answer_is_told_with_its_place(home, isolation, family, monkeypatch):
    monkeypatch.setattr("aenv.engines.process.engine._JOIN", 0.5)
    async with ProcessEngine(isolation=isolation, state="shared") as engine:
        await engine.find()
        family.spawner.kill(signal.SIGSTOP)
        with pytest.raises(AEnvError, match="does not answer") as caught:
            await ProcessEngine(isolation=isolation, state="shared").find()
        assert "spawner.json" in caught.value.hint
        family.spawner.kill(signal.SIGCONT)
        await engine.end()


def test_a_long_home_has_its_sockets_elsewhere(home, monkeypatch):
    long = home / ("d" * 90)
    monkeypatch.setenv("AENV_HOME", str(long))
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    root = state.root()
    assert root.parent == home
    assert root == state.root()
    assert len(str(root)) < 70
    monkeypatch.setenv("AENV_HOME", str(home / ("e" * 90)))
    assert state.root() != root
    assert config.home() == home / ("e" * 90)


async def test_an_engine_with_a_long_home_works(home, monkeypatch):
    monkeypatch.setenv("AENV_HOME", str(home / ("d" * 150)))
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    monkeypatch.setenv("TMPDIR", str(home))
    async with ProcessEngine(isolation="none") as engine:
        await lab.works(engine)
    assert [path.name for path in state.root().iterdir()] == [".lock"]


def test_a_directory_that_somebody_else_made_for_us_is_not_used(home, monkeypatch):
    """The place for long homes has a name that others can guess."""
    if os.getuid():
        pytest.skip("only root can give a directory away")
    monkeypatch.setenv("AENV_HOME", str(home / ("d" * 90)))
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    theirs = state.root()
    theirs.mkdir(mode=0o777)
    os.chown(theirs, 4242, 4242)
    with pytest.raises(AEnvError, match=str(theirs)):
        state.Directory.make().remove()


def test_when_a_process_began(home):
    assert state.start_time(os.getpid()) > 0
    with sleeper() as process:
        first = state.start_time(process.pid)
        assert first >= state.start_time(os.getpid())
    assert state.start_time(process.pid) == 0


def test_no_room_is_told_with_the_place(home):
    (home / "run").write_text("")
    with pytest.raises(AEnvError) as caught:
        state.Directory.make()
    assert str(home / "run") in str(caught.value)
    assert "AENV_HOME" in caught.value.hint
    Path(home / "run").unlink()
