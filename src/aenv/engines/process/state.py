"""What a spawner keeps on disk: one locked directory each, and how to tell and clear away what a dead one left.

A directory whose lock is held belongs to a living spawner and is not touched. So two owners on one machine never end
each other's sandboxes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from aenv import config
from aenv.engines.process import cgroups
from aenv.errors import AEnvError, Conflict

_PATIENCE = 2.0
"""Seconds in which what was killed must be gone."""
_LONGEST = 70
"""Characters of a directory below which a socket's path is short enough for the system."""


class Left(NamedTuple):
    """What a spawner that is gone left behind."""

    directory: Path
    processes: tuple[int, ...]
    control_groups: tuple[str, ...]
    sockets: int


def root(home: Path | None = None) -> Path:
    """Where the directories of a home's spawners are, this user's own by default."""
    usual = (home or config.home()) / "run"
    if len(str(usual)) <= _LONGEST:
        return usual
    name = hashlib.sha256(str(usual).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir(), f"aenv-{os.getuid()}-{name}")


class Directory:
    """A spawner's own directory, locked for as long as it lives."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls, name: str | None = None) -> Self:
        """A new directory, locked."""
        parent = root()
        try:
            with _everything(parent):
                path = parent / (name or secrets.token_hex(4))
                path.mkdir(mode=0o700, exist_ok=True)
                lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(lock)
                    raise
                for child in ("i", "z"):
                    (path / child).mkdir(mode=0o711, exist_ok=True)
        except BlockingIOError:
            raise Conflict(f"{path} belongs to another spawner that is alive") from None
        except OSError as exc:
            hint = "make room there, or set AENV_HOME to another directory"
            raise AEnvError(f"{parent} cannot hold sandboxes: {exc.strerror or exc}", hint=hint) from exc
        return cls(path, lock)

    def record(self, facts: dict[str, Any]) -> None:
        config.replace_file(self.path / "spawner.json", json.dumps(facts), mode=0o600)

    def remove(self) -> None:
        with suppress(AEnvError), _everything(self.path.parent):  # nobody of the same name begins meanwhile
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def alive(name: str) -> Path | None:
    """The directory of that name, when a living spawner holds it."""
    path = root() / name
    with _everything(root()), _free(path) as free:
        return None if free or not path.exists() else path


def left() -> list[Left]:
    """What dead spawners left behind, for a person to read."""
    return [_described(path) for path in _dead()]


def sweep() -> list[Left]:
    """End and remove everything that dead spawners left behind; what it was."""
    found = []
    for path in _dead():
        with _everything(root()), _free(path) as free:
            if not free:
                continue
            found.append(_described(path))
            _clear(path)
    return found


def _dead() -> list[Path]:
    parent = root()
    if not parent.is_dir():
        return []
    dead = []
    for path in sorted(parent.iterdir()):
        if path.is_dir():
            with _free(path) as free:
                if free:
                    dead.append(path)
    return dead


@contextmanager
def _everything(parent: Path) -> Iterator[None]:
    """One at a time makes or removes directories here."""
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if parent.lstat().st_uid != os.geteuid():  # below /tmp, anybody may have made it, or a link
            raise PermissionError(errno.EPERM, "it belongs to another user")
        lock = os.open(parent / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        hint = "make room there, or set AENV_HOME to another directory"
        raise AEnvError(f"{parent} cannot hold sandboxes: {exc.strerror or exc}", hint=hint) from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def _free(path: Path) -> Iterator[bool]:
    """Whether nobody holds the lock of a directory; it is held meanwhile, if so."""
    try:
        lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield False  # it is no spawner's, or nothing can be removed there either
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(lock)


def _facts(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads((path / "spawner.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _described(path: Path) -> Left:
    groups = _facts(path).get("control_groups") or {}
    tree = cgroups.found(groups) if groups else None
    processes = tree.processes() if tree else set()
    processes |= set(_plain(path))
    there = tuple(where for where in groups.values() if os.path.isdir(where))
    return Left(path, tuple(sorted(processes)), there, sum(1 for _ in path.glob("i/*.sock")))


def _clear(path: Path) -> None:
    groups = _facts(path).get("control_groups") or {}
    if groups and not cgroups.remove_soon(cgroups.found(groups), kill=True):
        return  # what is written down here is needed to find them the next time
    deadline = time.monotonic() + _PATIENCE
    while (plain := list(_plain(path))) and time.monotonic() < deadline:
        for pid in plain:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        time.sleep(0.002)
    shutil.rmtree(path, ignore_errors=True)


def _plain(path: Path) -> Iterator[int]:
    """Processes of instances that have no control group, when they are still the same processes."""
    for file in path.glob("i/*.pid"):
        with suppress(OSError, ValueError):
            pid, started = map(int, file.read_text().split())
            if start_time(pid) == started:
                yield pid


def start_time(pid: int) -> int:
    """When a process began, in the kernel's ticks: with its id, this names it for good. 0 where that is not known."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0
