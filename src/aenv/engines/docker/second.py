"""The second container of a sandbox: the task's own image, whose first process is our agent.

Whoever runs commands in it may be root there, as most images of tasks expect, with few powers and none over the
machine. What it shares with the main container: ``/shared``, a directory in memory that both may write; and the
directory of the agent's socket, which only the agent writes, where the engine can see to that.

Where there is no agent for the daemon's machine, the image's own shell keeps the container alive, and the engine stands
in for the agent (``deputy``). Then ``second`` sees nothing of the directory of the socket.

The main container is there before the second is, and goes after it: one that has no main container is nobody's.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import tarfile
from contextlib import AsyncExitStack, suppress
from typing import Any, NamedTuple

from aenv import agent
from aenv.engines.docker import containers, doors
from aenv.engines.docker.containers import ENGINE, ID, KIND, LINK, SECOND, SECOND_SOCKET, SHARED, TMP, Site, short
from aenv.engines.docker.daemon import About, Daemon, demultiplex, failure
from aenv.engines.docker.images import Image
from aenv.engines.docker.keepers import USES, Keepers
from aenv.engines.docker.scripts import KEEP_ALIVE
from aenv.engines.printed import last_words
from aenv.engines.room import room
from aenv.errors import AEnvError, NetworkError, NotFound, SandboxLost, StartFailed, StorageFull, Unsupported
from aenv.models import SandboxSpec

log = logging.getLogger("aenv.engine")
AGENT, SHARES = "agent", "shared"
"""Kinds: the container that keeps the agent's volume, and the volumes that the two containers of a sandbox share."""
DISK = "aenv.disk"
"""Label: the bytes that it may write, where the daemon does not see to that."""
AGENTLESS = "aenv.agentless"
"""Label: there is no agent in it."""
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID")
"""What root may do in it. Package managers give files to users, write where only users may, and become users; test
suites end what others started, and servers listen on port 80. Nothing of it reaches beyond the container."""
WHO = "the second container"
_REMOVED = f"{WHO} was removed, and not by this engine"
_PLACE, _PROGRAM = "/aenv/agent", "aenv-agent"
_PREFIX = "aenv-agent-"
_PAGE = 4096
_INODES = 8
_LINES = 20
_MOST_OUTPUT = 4 * containers.MOST_LOG


class Shares(NamedTuple):
    """What the two containers of a sandbox share: volumes, by name."""

    link: str
    """That of the agent's socket."""
    shared: str


def name(engine: str, id: str) -> str:
    """What the container is called."""
    return f"aenv2-{engine}-{id}"


def shares(engine: str, id: str) -> Shares:
    return Shares(f"aenv-link-{short(engine, id)}", f"aenv-shared-{short(engine, id)}")


def body(
    spec: SandboxSpec, id: str, image: Image, *, site: Site, keeper: str, network: str, limited: bool, capped: bool
) -> dict[str, Any]:
    """What is posted to ``/containers/create``. ``keeper``: the container that has the agent, empty when none has.
    ``limited``: whether the daemon sees to it that it writes no more than
    it may; ``capped``: that no file grows larger."""
    share, shared = room(spec), shares(site.engine, id)
    largest = share.disk + _PAGE  # a file system that is full comes first
    host: dict[str, Any] = {
        **containers.limits(spec, share.second, site),
        "NetworkMode": network,
        "CapAdd": list(CAPABILITIES) if _is_root(image.user) else [],
        "Ulimits": [{"Name": "fsize", "Soft": largest, "Hard": largest}] if capped else [],
        "Mounts": [containers.volume(shared.shared, SHARED)],
    }
    # All of them are always given: an image may have labels of these names, too.
    labels = {ENGINE: site.engine, ID: id, KIND: SECOND, DISK: "", AGENTLESS: "", USES: keeper}
    if keeper:
        host["Mounts"].append(containers.volume(shared.link, LINK))
        host["VolumesFrom"] = [f"{keeper}:ro"]
        first = [f"{_PLACE}/{_PROGRAM}", f"{LINK}/{SECOND_SOCKET}", *(["until-eof"] if site.until_eof else [])]
    else:
        labels[AGENTLESS] = "1"
        first = list(KEEP_ALIVE)
    places = containers.writable(image, (TMP,), (SHARED, LINK, _PLACE) if keeper else (SHARED,))
    host["Tmpfs"] = dict.fromkeys(places, containers.in_memory(share.storage(share.second, len(places))))
    if limited:
        host["StorageOpt"] = {"size": str(share.disk)}
    else:
        labels[DISK] = str(share.disk)
    return {
        "Image": image.id,
        "Hostname": "second",
        "Entrypoint": first,
        "Cmd": [],
        "Env": [f"{name}={value}" for name, value in containers.proxy_variables(spec).items()],
        "Healthcheck": {"Test": ["NONE"]},
        "StopSignal": "SIGTERM",
        "OpenStdin": site.until_eof or not keeper,
        "StdinOnce": site.until_eof,
        "Labels": labels,
        "HostConfig": host,
    }


def _is_root(user: str) -> bool:
    """Whether an image's user is root. Podman gives others what is meant for root."""
    return user.partition(":")[0] in ("", "0", "root")


class Beside:
    """The second container of one sandbox, as its engine knows it."""

    def __init__(self, engine: str, id: str, reference: str) -> None:
        self.id, self.reference = id, reference
        self.container, self.shares = name(engine, id), shares(engine, id)
        self.made = ""
        """The daemon's own name for it; empty while there is none."""
        self.keeper = ""
        """The container that keeps its agent; empty when it has none."""
        self.link = ""
        """The directory of the agent's socket, on the daemon's machine."""
        self.memory = 0
        self.disk = 0
        """Bytes that it may write, where somebody must see to that; 0 where the daemon does."""
        self.agentless = False
        """Whether the engine stands in for the agent."""
        self.told = 0
        """Bytes of its output that were passed on."""

    def know(self, found: dict[str, Any]) -> None:
        """Take over what the daemon says of it."""
        self.made = str(found.get("Id") or self.container)
        self.memory = int((found.get("HostConfig") or {}).get("Memory") or 0)
        labels = (found.get("Config") or {}).get("Labels") or {}
        self.disk, self.agentless = int(labels.get(DISK) or 0), bool(labels.get(AGENTLESS))
        self.keeper = str(labels.get(USES) or "")
        self.link = containers.mount_source(found, LINK)


class Seconds:
    """The second containers of one engine."""

    def __init__(self, daemon: Daemon, about: About, site: Site) -> None:
        self.agents = Agents(daemon, about)
        self._daemon, self._site = daemon, site
        self._limited = True
        """Whether the daemon can limit what they write, as far as is known."""
        self._capped = about.name != "podman"  # which raises other limits too, and fails where it may not

    async def make_volumes(self, beside: Beside, spec: SandboxSpec) -> None:
        """The volumes that both containers have: in memory, and bounded."""
        # By pages, not by a size, which Podman takes for a quota of its own.
        pages = max(room(spec).shared // _PAGE, 1)
        small = f"mode=0777,nr_inodes={_INODES},nr_blocks={_INODES}"
        large = f"mode=1777,nosuid,nodev,nr_blocks={pages},nr_inodes={max(pages, 1024)}"
        for volume, options in zip(beside.shares, (small, large), strict=True):
            driver = {"type": "tmpfs", "device": "tmpfs", "o": options}
            labels = {ENGINE: self._site.engine, ID: beside.id, KIND: SHARES}
            await self._daemon.make_volume(volume, driver, labels)

    async def make(self, beside: Beside, spec: SandboxSpec, image: Image, network: str, *, near: bool) -> None:
        """Make it, of an image that is there. ``near``: the engine can stand in for an agent that is not to be had."""
        try:
            keeper = await self.agents.keeper()
        except Unsupported as exc:
            if not near:
                why = "without one, the engine must be root on the daemon's machine"
                raise Unsupported(f"{exc.message}; {why}", hint=exc.hint) from exc
            log.warning("commands in the second container of %s take longer: %s", beside.id, exc.message)
            keeper = ""
        try:
            await self._make(beside, spec, image, network, keeper)
        except AEnvError:
            if not keeper or not await self.agents.is_gone(keeper):
                raise
            await self._make(beside, spec, image, network, await self.agents.keeper())
        beside.know(await self._inspect(beside))

    async def _make(self, beside: Beside, spec: SandboxSpec, image: Image, network: str, keeper: str) -> None:
        limited = self._limited
        try:
            await self._create(beside, spec, image, network, keeper, limited=limited)
        except AEnvError as exc:
            if not limited or "storage-opt" not in exc.message.lower():
                raise
            self._limited = False
            await self._create(beside, spec, image, network, keeper, limited=False)

    async def _create(
        self, beside: Beside, spec: SandboxSpec, image: Image, network: str, keeper: str, *, limited: bool
    ) -> None:
        limits = {"limited": limited, "capped": self._capped}
        asked = body(spec, beside.id, image, site=self._site, keeper=keeper, network=network, **limits)
        await self._daemon.ask("POST", "/containers/create", query={"name": beside.container}, body=asked)

    async def run(self, beside: Beside, holds: AsyncExitStack) -> None:
        """Start it. Where it is to end with this process, ``holds`` gets what keeps it alive."""
        if self._site.until_eof:
            query = {"stream": "1", "stdin": "1"}
            attached = self._daemon.hijack(f"/containers/{beside.container}/attach", query=query)
            await holds.enter_async_context(attached)
        try:
            await self._daemon.ask("POST", f"/containers/{beside.container}/start")
        except (NetworkError, StorageFull):
            raise
        except AEnvError as exc:
            raise StartFailed(f"{WHO}, of {beside.reference}, does not start: {exc.message}", hint=exc.hint) from exc

    async def has_lost_agent(self, beside: Beside) -> bool:
        """Whether somebody removed its agent before it ran, so that it must be made again."""
        keepers = self.agents.keepers
        if not beside.keeper or not await keepers.has_lost(beside.container, beside.keeper):
            return False
        keepers.forget(beside.keeper)
        return True

    async def link(self, beside: Beside) -> str:
        """The directory that the main container looks for the agent in, on the daemon's machine."""
        found = await self._daemon.ask("GET", f"/volumes/{beside.shares.link}")
        return str((found or {}).get("Mountpoint") or "")

    async def is_up(self, beside: Beside) -> bool:
        """Whether it runs, whoever started it; False when it will. ``SandboxLost`` when there is none."""
        try:
            found = await self._inspect(beside)
        except NotFound:
            raise SandboxLost(_REMOVED) from None
        beside.know(found)
        return bool((found.get("State") or {}).get("Status") == "running")

    async def why(self, beside: Beside) -> str:
        """Why it does not run any more; empty while it does, or has not begun to."""
        try:
            found = await self._inspect(beside)
        except NotFound:
            return _REMOVED
        except AEnvError as exc:
            return f"the daemon does not say how it is with {WHO}: {exc.message}"
        if containers.is_going(found):
            return _REMOVED
        ended = containers.ended(found)
        if ended is None:
            return ""
        words = ""
        with suppress(AEnvError):
            words = last_words(await self._printed(beside), _LINES)
        return ended.told(beside.memory, words, WHO)

    async def news(self, beside: Beside) -> bytes:
        """What it printed since this was asked last, each line marked."""
        try:
            printed = await self._printed(beside)
        except AEnvError:
            return b""
        new, beside.told = printed[beside.told :], len(printed)
        return b"".join(b"second: %b\n" % line for line in new.splitlines())

    async def wrote(self, beside: Beside) -> int:
        """Bytes that it has written."""
        found = await self._daemon.ask("GET", f"/containers/{beside.container}/json", query={"size": "1"})
        return int((found or {}).get("SizeRw") or 0)

    async def kill(self, beside: Beside) -> None:
        """End what runs in it."""
        with suppress(AEnvError):
            await self._daemon.ask("POST", f"/containers/{beside.container}/kill")

    async def remove_volumes(self, shared: Shares) -> None:
        for volume in shared:
            await doors.remove_volume(self._daemon, volume, self._site.engine)

    async def _inspect(self, beside: Beside) -> dict[str, Any]:
        return await self._daemon.inspect(beside.container)

    async def _printed(self, beside: Beside) -> bytes:
        path, query = f"/containers/{beside.container}/logs", {"stdout": "1", "stderr": "1"}
        data = await self._daemon.fetch(path, query=query, most=_MOST_OUTPUT)
        return b"".join(piece for _, piece in demultiplex(data))


class Agents:
    """The agent, as a daemon has it: in a volume that all second containers share and none can change."""

    def __init__(self, daemon: Daemon, about: About) -> None:
        self._daemon, self._about = daemon, about
        self.keepers = Keepers(daemon, AGENT, _PLACE)

    async def keeper(self) -> str:
        """The name of the container that keeps the agent's volume; it is made when there is none."""
        content = await asyncio.to_thread(_packed, self._about.architecture)
        keeper = _PREFIX + hashlib.sha256(content).hexdigest()[:32]

        async def packed() -> bytes:
            await self._import(keeper, content)
            return content

        await self.keepers.have(keeper, agent_image(keeper), packed)
        return keeper

    async def is_gone(self, keeper: str) -> bool:
        """Whether somebody removed it, so that it must be made again."""
        if await self.keepers.is_there(keeper):
            return False
        self.keepers.forget(keeper)
        return True

    async def _import(self, keeper: str, content: bytes) -> None:
        """An image for the keeper: of nobody else's, which could then not be removed, or have volumes of its own."""
        query = {"fromSrc": "-", "repo": agent_image(keeper), "tag": "latest"}
        async for line in self._daemon.lines("POST", "/images/create", query=query, content=content):
            if reason := failure(line):
                raise StartFailed(f"the daemon does not take the agent of {WHO}: {reason}")


def agent_image(keeper: str) -> str:
    """What the image is called that a keeper of an agent is made of."""
    return f"localhost/{keeper}"


def _packed(architecture: str) -> bytes:
    data = agent.binary(architecture).read_bytes()
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        entry = tarfile.TarInfo(_PROGRAM)
        entry.size, entry.mode = len(data), 0o755
        archive.addfile(entry, io.BytesIO(data))
    return held.getvalue()
