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
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from aenv import config
from aenv.engines.docker.containers import short
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
                self._lock = os.open(self._directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._secret = self._read_secret()
        except OSError as exc:
            raise AEnvError(
                f"{self._directory} cannot be written: {exc.strerror or exc}", hint="see AENV_HOME"
            ) from exc

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
        """Where a sandbox is reached."""
        path = self._directory / f"{short(id)}.sock"
        if len(os.fsencode(path)) > _LONGEST:
            raise Invalid(f"{path} is too long for a socket", hint="AENV_HOME names another, shorter place")
        return path

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
        for file in (self._file(id), self._file(id).with_suffix(".sock")):
            file.unlink(missing_ok=True)

    def _file(self, id: str) -> Path:
        return self._directory / f"{short(id)}.json"

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            shutil.rmtree(self._directory, ignore_errors=True)


def is_gone(engine: str) -> bool:
    """Whether an engine without a state is known here, and dead."""
    try:
        lock = os.open(root() / engine / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def gone() -> Iterator[str]:
    """Engines without a state that are dead."""
    with suppress(OSError):
        for path in sorted(root().glob("_*")):
            if is_gone(path.name):
                yield path.name


def bury(engine: str) -> None:
    """Remove what a dead one left here."""
    shutil.rmtree(root() / engine, ignore_errors=True)
