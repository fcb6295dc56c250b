"""The servers on one store: who is there, where each is reached, and who is gone.

Each process has a name for its life, its boot id, under which it writes a word every second, with its own addresses:
so no caller can name a host that is then dialled. One that was not heard of for a while is taken for gone, by a clock
of ours that nobody sets, and only if the store itself was there all the time. Servers of one home know it at once: each
holds a lock there, which ends with its process, whatever ends that.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from aenv import __version__
from aenv.api.clock import steady
from aenv.api.records import InstanceRecord
from aenv.errors import AEnvError, Conflict, NetworkError
from aenv.store import Delete, Put, Store

KIND = "peer"
BEAT = 1.0
"""Seconds between two words of a server."""
QUIET = 15.0
"""Seconds after which a server that was not heard of is taken for gone."""
LATE = 5.0
"""Seconds after which a server that could not ask the store has missed what others said."""
HOP = "AEnv-Hop"
"""The header of a request that one server passes on to another: it is not passed on again."""
_FAREWELL = 2.0
"""Seconds that a store has to take a server's last word."""
_REMEMBERED = 3600.0
"""Seconds that a server's word is kept."""


class Peer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A server, as the others know it. Those of one name share sandboxes."""

    boot: str
    name: str
    control_url: str = ""
    """Where it is itself, and not what stands in front of several."""
    data_url: str = ""
    version: str = ""
    draining: bool = False
    """It is about to end, and should be sent nothing new."""


class _Seen(NamedTuple):
    peer: Peer
    revision: int
    since: float
    """When this revision was first seen."""


class Peers:
    """This server, and those beside it."""

    def __init__(
        self, store: Store, name: str, *, control_url: str = "", data_url: str = "", folder: Path | None = None
    ) -> None:
        """``folder`` is where servers of one home hold their locks."""
        self.me = Peer(
            boot=secrets.token_hex(8), name=name, control_url=control_url, data_url=data_url, version=__version__
        )
        self._store = store
        self._folder = folder
        self._lock: int | None = None
        self._seen: dict[str, _Seen] = {}
        self._heard: dict[str, float] = {}
        """When a server of each name was last heard of, or its name first seen."""
        self._beaten = steady()

    async def beat(self) -> int:
        """Say that this server is there, and hear who else is; the store's revision at that moment.

        Of a store that is not shared nobody has to be told.
        """
        if not self._store.shared:
            return 0
        self._hold()
        word = Put(KIND, self.me.boot, msgspec.json.encode(self.me), expires_at=time.time() + _REMEMBERED)
        [revision] = await self._store.change(word)
        found = [record async for record in self._store.scan(KIND) if record.key != self.me.boot]
        now = steady()
        missed, self._beaten = now - self._beaten > LATE, now
        seen: dict[str, _Seen] = {}
        for record in found:
            try:
                peer = msgspec.json.decode(record.value, type=Peer)
            except msgspec.MsgspecError:
                continue  # of a version that says it in another way
            before = self._seen.get(record.key)
            same = before is not None and before.revision == record.revision and not missed
            seen[record.key] = _Seen(peer, record.revision, before.since if before is not None and same else now)
            if not same:
                self._heard[peer.name] = now
        self._seen = seen
        for boot in [boot for boot in seen if self._has_let_go(boot)]:
            with suppress(Conflict):  # another one was faster
                await self._store.change(Delete(KIND, boot, seen[boot].revision))
            self._seen.pop(boot, None)
        return revision

    async def drain(self) -> None:
        """Say that this server is about to end."""
        self.me = msgspec.structs.replace(self.me, draining=True)
        with suppress(AEnvError, TimeoutError):
            async with asyncio.timeout(_FAREWELL):
                await self.beat()

    async def leave(self) -> None:
        """Say that this server is gone."""
        if self._store.shared:
            with suppress(AEnvError, TimeoutError):
                async with asyncio.timeout(_FAREWELL):
                    await self._store.change(Delete(KIND, self.me.boot))
        if self._lock is not None:
            self._place(self.me.boot).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    # Who is there

    def alive(self, boot: str) -> bool:
        """Whether a server is there, as far as is known."""
        return boot == self.me.boot or (boot in self._seen and steady() - self._seen[boot].since <= QUIET)

    @property
    def others(self) -> list[Peer]:
        """Those beside this one that are there."""
        return [seen.peer for boot, seen in self._seen.items() if self.alive(boot)]

    def find(self, name: str) -> Peer | None:
        """A server of that name that is there, if possible one that stays."""
        found = [peer for peer in self.others if peer.name == name]
        return min(found, key=lambda peer: (peer.draining, peer.boot), default=None)

    def silence(self, name: str) -> float:
        """Seconds for which no server of a name was heard of, or since the name was first asked for here."""
        if name == self.me.name:
            return 0.0
        now = steady()
        return now - self._heard.setdefault(name, now)

    def url(self, record: InstanceRecord) -> str:
        """Where a running sandbox is reached from here: itself, or through a server that can reach it."""
        return self.reached(record.id, record.server, record.url)

    def reached(self, id: str, server: str, url: str) -> str:
        """The same, of one that is there at its server."""
        path = url.removeprefix("unix:")
        if server == self.me.name or path == url or os.access(path, os.W_OK):
            return url
        return f"{self.at(id, server).data_url}/env-instance/{id}"

    def at(self, id: str, server: str) -> Peer:
        """The server that what another one has is asked for at. Raises what is wrong with it."""
        peer = self.find(server)
        if peer is None:
            raise NetworkError(
                f"{id} is at the server {server}, which was not heard of for {QUIET:g} s",
                hint="start it again; its instances live on as long as its machine does",
            )
        return peer

    # Locks of one home

    def _place(self, boot: str) -> Path:
        assert self._folder is not None
        return self._folder / boot

    def _hold(self) -> None:
        """Hold this server's lock from now on, and clear away what is long over."""
        if self._folder is None or self._lock is not None:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in self._folder.iterdir():
                with suppress(FileNotFoundError):  # another one clears away, too
                    if time.time() - path.stat().st_mtime > _REMEMBERED and _is_free(path):
                        path.unlink()
            lock = os.open(self._place(self.me.boot), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._lock = lock
        except OSError:  # a full disk; then it is known by its words alone
            self._folder = None

    def _has_let_go(self, boot: str) -> bool:
        """Whether a server of this home is gone for certain."""
        if self._folder is None:
            return False
        path = self._place(boot)
        with suppress(OSError):
            if _is_free(path):
                path.unlink(missing_ok=True)
                return True
        return False


def _is_free(path: Path) -> bool:
    """Whether a lock is there, and nobody holds it."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
