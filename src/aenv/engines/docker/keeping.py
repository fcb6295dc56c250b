"""What an engine keeps on this machine, in ``<home>/docker/<engine>``: the secret that its tokens come from, new ends
of sandboxes, sockets of tunnels, and, without a state, a lock that says that it is alive."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from aenv import config
from aenv.engines.docker.containers import short
from aenv.engines.process.state import start_time
from aenv.errors import AEnvError, Invalid

_LOCK, _SECRET = "lock", "secret"
_LONGEST = 107
"""Bytes of the path of a socket."""


def root() -> Path:
    return config.home().absolute() / "docker"


class Keeping:
    """One engine's directory."""

    def __init__(self, engine: str, *, lasting: bool) -> None:
        """``lasting``: it outlives this process, and is shared by all engines of that name."""
        self._directory = root() / engine
        self._lasting = lasting
        self._lock = -1
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not lasting:
                self._lock = self._hold()
            self._secret = self._read_secret()
        except OSError as exc:
            raise AEnvError(
                f"{self._directory} cannot be written: {exc.strerror or exc}", hint="see AENV_HOME"
            ) from exc

    def _hold(self) -> int:
        """The lock. Until it is held, others may take this engine for a dead one, and remove the directory."""
        while True:
            try:
                self._directory.mkdir(mode=0o700, exist_ok=True)
                lock = os.open(self._directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                return lock
            os.close(lock)

    def _read_secret(self) -> bytes:
        if not self._lasting:
            return secrets.token_bytes(32)
        file = self._directory / _SECRET
        with suppress(FileExistsError):
            made = self._directory / f".{_SECRET}.{os.getpid()}.{secrets.token_hex(4)}"
            made.touch(mode=0o600)
            made.write_bytes(secrets.token_bytes(32))
            try:
                os.link(made, file)  # whoever is first
            finally:
                made.unlink()
        return file.read_bytes()

    def key(self, id: str) -> str:
        """The token that the engine comes with to that sandbox."""
        return hmac.new(self._secret, id.encode(), hashlib.sha256).hexdigest()

    def socket(self, id: str) -> Path:
        """Where a sandbox is reached; its directory is there."""
        path = self._socket(id)
        if len(os.fsencode(path)) > _LONGEST:
            raise Invalid(f"{path} is too long for a socket", hint="AENV_HOME or TMPDIR names another, shorter place")
        if path.parent != self._directory:
            _make_own(path.parent)
        return path

    def _socket(self, id: str) -> Path:
        path = self._directory / f"{short(id)}.sock"
        return path if len(os.fsencode(path)) <= _LONGEST else _elsewhere(self._directory) / path.name

    def expires(self, id: str) -> float | None:
        """The end that a sandbox was told last; None when it was told none."""
        try:
            found = json.loads(self._file(id).read_bytes())
        except (OSError, ValueError):
            return None
        return float(found) if isinstance(found, (int, float)) else None

    def set_expires(self, id: str, moment: float) -> None:
        if self._lasting:
            config.replace_file(self._file(id), json.dumps(moment), mode=0o600)

    def forget(self, id: str) -> None:
        """Remove what is here of a sandbox that has ended."""
        for file in (self._file(id), self._socket(id)):
            file.unlink(missing_ok=True)

    def _file(self, id: str) -> Path:
        return self._directory / f"{short(id)}.json"

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            _remove(self._directory)


def _take(engine: str) -> int | None:
    """The lock of an engine without a state that is known here, and dead; None of any other."""
    try:
        lock = os.open(root() / engine / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def gone() -> Iterator[str]:
    """Engines without a state that are dead."""
    with suppress(OSError):
        for path in sorted(root().glob("_*")):
            if (lock := _take(path.name)) is not None:
                os.close(lock)
                yield path.name


def bury(engine: str) -> None:
    """Remove what a dead one left here."""
    if (lock := _take(engine)) is not None:
        try:
            _remove(root() / engine)
        finally:
            os.close(lock)


def _elsewhere(directory: Path) -> Path:
    """Where the sockets of a directory are that is too long for them."""
    return Path(tempfile.gettempdir(), f"aenv-{os.getuid()}-{short(str(directory))}")


def _make_own(path: Path) -> None:
    """Make a directory where anybody may have made it before, or a link."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as exc:
        raise AEnvError(f"{path} cannot be made: {exc.strerror or exc}", hint="see TMPDIR") from exc
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise AEnvError(f"{path} is not this user's own directory", hint="remove it, or give a shorter AENV_HOME")


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    shutil.rmtree(_elsewhere(directory), ignore_errors=True)


def process() -> str:
    """This process, so that others can tell later whether it is dead; empty where that cannot be told."""
    where, began = _where(), start_time(os.getpid())
    return f"{where} {os.getpid()} {began}" if where and began else ""


def is_dead(process: str) -> bool:
    """Whether that was a process where this one is, too, and is no more. One from elsewhere may be alive."""
    match process.split():
        case [boot, namespace, pid, began] if f"{boot} {namespace}" == _where() and pid.isdecimal():
            return str(start_time(int(pid))) != began
    return False


def _where() -> str:
    """This start of this machine, and which of its processes are seen from here."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""
