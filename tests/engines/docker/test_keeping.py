"""What an engine keeps on this machine: short sockets in long homes, and nothing of it when it is over."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from aenv.engines.docker import keeping
from aenv.engines.docker.keeping import Keeping
from aenv.engines.process.state import start_time
from aenv.errors import AEnvError, Invalid
from tests.engines.docker.lab import Harbour, call, probe

LONG = "long-" * 30


@pytest.fixture
def far(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a path that is too long for a socket."""
    path = home / LONG
    monkeypatch.setenv("AENV_HOME", str(path))
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    return path


def test_a_socket_in_a_long_home_is_elsewhere(far: Path, home: Path) -> None:
    kept = Keeping("_one", lasting=False)
    path = kept.socket("a")
    assert path.parent.parent == home
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path == kept.socket("a") != kept.socket("b")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    kept.forget("a")
    assert not path.exists()
    kept.close()
    assert not path.parent.exists()
    assert not (far / "docker" / "_one").exists()


def test_those_of_a_dead_engine_go_with_it(far: Path) -> None:
    kept = Keeping("_two", lasting=False)
    path = kept.socket("a")
    os.close(kept._lock)
    assert list(keeping.gone()) == ["_two"]
    keeping.bury("_two")
    assert not path.parent.exists()


def test_one_that_opens_is_not_taken_for_dead(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody sweeps just before the lock is held, and thinks that the engine is gone."""
    real = fcntl.flock
    swept = []

    def flock(lock: int, how: int) -> None:
        if how == fcntl.LOCK_EX and not swept:
            swept.extend(keeping.gone())
            for engine in swept:
                keeping.bury(engine)
        real(lock, how)

    monkeypatch.setattr(keeping.fcntl, "flock", flock)
    kept = Keeping("_five", lasting=False)
    assert swept == ["_five"]
    assert kept.socket("a").parent.is_dir()
    assert list(keeping.gone()) == []
    keeping.bury("_five")
    assert kept.socket("a").parent.is_dir()
    kept.close()


@pytest.mark.parametrize("kind", ["link", "file", "open"])
def test_what_somebody_else_made_in_its_place_is_refused(far: Path, home: Path, kind: str) -> None:
    kept = Keeping("three", lasting=True)
    path = kept.socket("a").parent
    path.rmdir()
    (home / "trap").mkdir(mode=0o700)
    {"link": lambda: path.symlink_to(home / "trap"), "file": path.touch, "open": lambda: path.mkdir(mode=0o755)}[kind]()
    with pytest.raises(AEnvError, match="is not this user's own|cannot be made"):
        kept.socket("a")


def test_nowhere_is_short_enough(far: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(home / LONG))
    with pytest.raises(Invalid, match="too long for a socket") as refused:
        Keeping("four", lasting=True).socket("a")
    assert refused.value.hint is not None
    assert "TMPDIR" in refused.value.hint


def test_who_is_dead() -> None:
    with subprocess.Popen(["sleep", "600"]) as other:
        boot, namespace, _, _ = keeping.process().split()
        told = f"{boot} {namespace} {other.pid} {start_time(other.pid)}"
        assert not keeping.is_dead(told)
        other.kill()
    assert keeping.is_dead(told)
    assert keeping.is_dead(f"{boot} {namespace} {os.getpid()} 1"), "another has its number by now"
    assert not keeping.is_dead(keeping.process())
    for unknown in ("", "what is this", f"another {namespace} {other.pid} 1", f"{boot} 1 {other.pid} 1"):
        assert not keeping.is_dead(unknown), unknown


async def test_sandboxes_are_reached_from_a_long_home(daemon: str, base_image: str, far: Path) -> None:
    harbour = Harbour(daemon, base_image)
    try:
        async with harbour.engine() as engine:
            made = await engine.create("one", probe())
            assert await call(made, "echo", text="hello") == "hello"
        async with harbour.engine() as engine:
            found = await engine.get("one")
            assert await call(found, "echo", text="again") == "again"
            await engine.delete("one")
        assert await harbour.left() == []
    finally:
        await harbour.clear()
