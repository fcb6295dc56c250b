"""The sandboxes of one spawner, from a request to the end of each: what is asked of them, how they live and die."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shutil
import signal
import socket
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

from aenv.engines.process import state
from aenv.engines.process.attest import attest, first_of
from aenv.engines.process.cgroups import Limits
from aenv.engines.process.egress import Egress
from aenv.engines.process.jail import SPAN
from aenv.engines.process.nursery import Nursery
from aenv.engines.process.output import Printed
from aenv.engines.process.site import Site
from aenv.engines.process.wire import Channel, close_all, failure, until, words
from aenv.engines.process.zygotes import Zygote
from aenv.errors import AEnvError, Conflict, NotFound, SandboxLost, StartFailed

STOP = 2.0
"""Seconds between being asked to end and being killed."""
REAP = 10.0
"""Seconds in which a zygote must reap, on however busy a machine: all its instances go with one that does not."""
WORDS = 1.0
"""Seconds in which the exit code of a process that is gone must come."""
SEAL = 20.0
"""Seconds a fork may take to seal itself."""
_FIRST_USER = 1000
_MOST = SPAN - _FIRST_USER - 1
"""Sandboxes at a time. The last user of the span is the proxy's."""
_KEPT = 1000
"""Ended sandboxes that are remembered with their reason."""
_NAMESPACES = ("pid", "mnt", "ipc", "uts")
_PROCESSES = 512
"""Most processes and threads of an instance."""


class Live:
    """One sandbox, from the request to its end."""

    def __init__(self, id: str, spec: dict[str, Any]) -> None:
        self.id = id
        self.spec = spec
        self.state = "Creating"
        self.reason = ""
        self.created_at = time.time()
        self.expires_at = self.created_at + spec["ttl"] if spec["ttl"] is not None else None
        self.slot = -1
        self.path: Path | None = None
        self.zygote: Zygote | None = None
        self.channel: Channel | None = None
        self.printed: Printed | None = None
        self.number = 0
        self.pid = 0
        self.pidfd: int | None = None
        """The runtime's process."""
        self.first: int | None = None
        """The first process of its namespace, whose end ends all others in it."""
        self.boot = ""
        self.key = secrets.token_urlsafe(32)
        """The token that the engine itself comes with."""
        self.teardown = False
        self.grouped = False
        self.outlet: socket.socket | None = None
        """Where it asks to be let out, when an allow-list says where to."""
        self.timer: asyncio.TimerHandle | None = None
        self.starting: asyncio.Task[None] | None = None
        self.deleted = False
        self.failing = False
        """Whether its start has failed, and is about to end it."""
        self.watching: asyncio.Task[None] | None = None
        self.ending: asyncio.Task[None] | None = None
        self.exit: asyncio.Future[int] | None = None

    @property
    def leaf(self) -> str:
        """The name of its control groups."""
        return f"i{self.slot}"

    def described(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "url": f"unix:{self.path}" if self.path and self.state == "Running" else "",
            "boot": self.boot,
            "state": self.state,
            "reason": self.reason,
            "env": self.spec["env"],
            "owner": self.spec["owner"],
            "labels": self.spec["labels"],
            "created_at": self.created_at,
            "expires_at": self.expires_at,
        }


class Sandboxes:
    """All that one spawner made."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._nursery = Nursery(site)
        self._live: dict[str, Live] = {}
        self._ended: OrderedDict[str, Live] = OrderedDict()
        self._slots = list(range(_MOST - 1, -1, -1))
        """Numbers of users and control groups that are free."""
        self._numbers = 0
        self._egress: Egress | None = None
        self._opening_egress = asyncio.Lock()
        self._minding: asyncio.Task[None] | None = None

    # The verbs, as the engine asks for them

    async def hello(self) -> dict[str, Any]:
        return {"isolation": self._site.isolation, "powers": self._site.powers._asdict()}

    async def create(self, id: str, spec: dict[str, Any]) -> dict[str, Any]:
        live = self._live.get(id)
        if live is not None and live.ending is not None:
            await asyncio.wait((live.ending,))
            live = None
        if live is None:
            if id in self._ended:
                raise Conflict(f"{id} has ended: {self._ended[id].reason}", hint="use another id")
            live = self._live[id] = Live(id, spec)
            live.starting = asyncio.create_task(self._start(live))
        assert live.starting is not None
        await asyncio.shield(live.starting)
        return live.described()

    async def get(self, id: str) -> dict[str, Any]:
        return self._find(id).described()

    async def find(self, labels: dict[str, str]) -> list[dict[str, Any]]:
        known = [*self._live.values(), *self._ended.values()]
        return [live.described() for live in known if labels.items() <= live.spec["labels"].items()]

    async def delete(self, id: str) -> None:
        if live := self._live.get(id):
            live.deleted = True
            await asyncio.shield(self._end(live, "Terminated", "it was deleted"))
        self._ended.pop(id, None)

    async def update(self, id: str, ttl: float) -> dict[str, Any]:
        live = self._running(id)
        live.spec["ttl"] = ttl
        live.expires_at = time.time() + ttl
        self._arm(live)
        return live.described()

    async def door(self, id: str) -> dict[str, Any]:
        """Where a sandbox is, and the token that opens it to the engine."""
        live = self._running(id)
        return {"url": f"unix:{live.path}", "key": live.key}

    async def output(self, id: str, start: int) -> dict[str, Any]:
        live = self._find(id)
        begin, data = live.printed.since(start) if live.printed else (start, b"")
        return {"start": begin, "data": data.decode("latin-1")}

    async def close(self) -> None:
        """End everything."""
        endings = [self._end(live, "Terminated", "the engine ended") for live in list(self._live.values())]
        if endings:
            await asyncio.wait(endings)
        await self._nursery.close()
        if self._minding is not None:
            self._minding.cancel()
        if self._egress is not None:
            await self._egress.close()

    def _find(self, id: str) -> Live:
        live = self._live.get(id) or self._ended.get(id)
        if live is None:
            raise NotFound(f"there is no sandbox {id!r}")
        return live

    def _running(self, id: str) -> Live:
        live = self._find(id)
        if live.state != "Running":
            raise SandboxLost(f"{id} is {live.state.lower()}{f': {live.reason}' if live.reason else ''}")
        return live

    # From a request to a sandbox that runs

    async def _start(self, live: Live) -> None:
        """Bring it up, or end it with the reason. A cancellation comes from its end, which clears up itself."""
        patience = live.spec["startup_timeout"]
        try:
            async with asyncio.timeout(patience):
                await self._bring_up(live)
        except TimeoutError:
            await self._fail(live, f"it was not ready within {patience:g} s{_last_words(live)}")
        except SandboxLost:
            await self._fail(live, await self._why(live))
        except AEnvError as exc:
            await self._fail(live, exc.message, exc)
        except OSError as exc:
            await self._fail(live, f"this machine refused: {exc}")
        except Exception as exc:
            await self._fail(live, f"the engine itself failed: {exc!r}")

    async def _fail(self, live: Live, reason: str, error: AEnvError | None = None) -> None:
        live.failing = True
        await asyncio.shield(self._end(live, "Failed", reason))
        raise error or StartFailed(f"{live.id} did not start: {reason}")

    async def _bring_up(self, live: Live) -> None:
        zygote = await self._nursery.zygote(live.spec)
        zygote.instances += 1
        live.zygote = zygote
        if not self._slots:
            raise StartFailed(f"this engine has {_MOST} sandboxes, which is its most")
        live.slot = self._slots.pop()
        self._numbers += 1
        live.number = self._numbers
        live.path = self._site.directory / "i" / f"{live.number}.sock"
        await self._fork(live, zygote)
        await self._sealed(live)
        assert live.channel is not None
        await live.channel.send(self._secrets(live))
        facts, descriptors = await live.channel.receive()
        close_all(descriptors)
        if not isinstance(facts, dict):
            raise SandboxLost("it sent nonsense")
        if failed := facts.get("failed"):
            raise failure(failed)
        live.teardown, live.boot = facts.get("teardown") is True, words(facts.get("boot"), 64)
        if not live.boot.isalnum():
            raise SandboxLost("it sent nonsense")
        live.state = "Running"
        live.watching = asyncio.create_task(self._watch(live))
        self._arm(live)

    async def _fork(self, live: Live, zygote: Zygote) -> None:
        """Make everything that the child is given, and have it forked."""
        assert live.path is not None
        groups = self._site.groups
        listener = socket.socket(socket.AF_UNIX)
        mine, theirs = socket.socketpair()
        live.channel = Channel(mine)
        live.channel.ask_who()
        printed_read, printed_write = os.pipe()
        live.printed = Printed(printed_read)
        tasks: list[int] = []
        try:
            listener.bind(str(live.path))
            listener.listen(256)
            if groups is not None:
                live.grouped = True
                groups.add(live.leaf, _limits(live.spec))
                tasks = groups.open(live.leaf)
            given = [listener.fileno(), theirs.fileno(), printed_write, *tasks]
            live.exit = await zygote.fork(live.number, self._order(live, zygote), given)
        finally:
            listener.close()
            theirs.close()
            close_all((printed_write, *tasks))

    def _order(self, live: Live, zygote: Zygote) -> dict[str, Any]:
        """What a fork needs to know in order to seal itself. No secrets: it is not sealed yet."""
        site = self._site
        assert live.path is not None
        return {
            "id": live.id,
            "seccomp": site.powers.seccomp,
            "overlay": site.powers.overlay,
            "network": site.network(live.spec),
            "user": _FIRST_USER + live.slot if site.powers.privileged else 0,
            "storage": live.spec["storage"],
            "memory": live.spec["memory"] if site.groups is None and site.isolation != "none" else None,
            "project": zygote.project,
            "directory": str(live.path.with_suffix("")),
        }

    async def _sealed(self, live: Live) -> None:
        """Wait until a fork says that it is sealed, and look whether it is."""
        assert live.channel is not None
        assert live.path is not None
        message, descriptors = await asyncio.wait_for(live.channel.receive(), SEAL)
        live.pid = live.channel.pid or 0
        live.pidfd = live.channel.take_pidfd()
        try:
            if not (isinstance(message, dict) and message.get("sealed")):
                raise SandboxLost("it ended before it was sealed")
            if self._site.powers.namespaces:
                self._attest(live, descriptors)
            else:
                live.path.with_suffix(".pid").write_text(f"{live.pid} {state.start_time(live.pid)}")
            if self._site.network(live.spec) == "proxy":
                await self._admit(live, descriptors)
        finally:
            close_all(descriptors)

    def _attest(self, live: Live, descriptors: list[int]) -> None:
        if not descriptors or not first_of(descriptors[0], live.pid):
            raise StartFailed("the instance is not sealed: it is not the second process of a namespace")
        live.first = descriptors.pop(0)
        site = self._site
        attest(
            live.pid,
            user=site.users + _FIRST_USER + live.slot if site.powers.privileged else os.getuid(),
            group=site.users + _FIRST_USER + live.slot if site.powers.privileged else os.getgid(),
            namespaces=_NAMESPACES if site.network(live.spec) == "full" else (*_NAMESPACES, "net"),
            apart_from=live.zygote.pid if live.zygote is not None else 0,
            filters=2 if site.powers.seccomp else 0,
            groups=site.groups.paths(live.leaf) if site.groups is not None else {},
        )

    async def _admit(self, live: Live, descriptors: list[int]) -> None:
        """Hand the instance's only way out to the proxy."""
        if len(descriptors) != 1:
            raise SandboxLost("it sent no listener for its proxy")
        live.outlet = socket.socket(fileno=descriptors.pop())
        async with self._opening_egress:
            if self._egress is None or self._egress.died:
                await self._open_egress()
            else:
                await self._egress.add(live.id, live.outlet, live.spec["network"]["allow"])

    async def _open_egress(self) -> None:
        """Start the proxy, for all that have none: a first sandbox, or those whose proxy died."""
        self._egress = await Egress.start(self._site.users + SPAN - 1 if self._site.powers.privileged else None)
        self._minding = asyncio.create_task(self._mind_egress(self._egress))
        for live in list(self._live.values()):
            if live.outlet is not None:
                await self._egress.add(live.id, live.outlet, live.spec["network"]["allow"])

    async def _mind_egress(self, egress: Egress) -> None:
        await egress.wait()
        async with self._opening_egress:
            if self._egress is egress and any(live.outlet for live in self._live.values()):
                await self._open_egress()

    def _secrets(self, live: Live) -> dict[str, Any]:
        """What only a sealed instance is told."""
        spec = live.spec
        datasource = "/datasource" if spec["datasource"] and self._site.powers.namespaces else spec["datasource"]
        return {
            "id": live.id,
            "environment_variables": self._site.variables(spec) | spec["environment_variables"],
            "arguments": spec["arguments"],
            "datasource": datasource,
            "seed": spec["seed"],
            "idle": spec["idle"],
            "owner_token_sha256": spec["owner_token_sha256"],
            "engine_token_sha256": hashlib.sha256(live.key.encode()).hexdigest(),
        }

    # From there to its end

    def _arm(self, live: Live) -> None:
        """Let it end when its time is over."""
        if live.timer is not None:
            live.timer.cancel()
        if live.expires_at is not None:
            reason = f"its time to live of {live.spec['ttl']:g} s is over"
            loop = asyncio.get_running_loop()
            live.timer = loop.call_later(live.expires_at - time.time(), self._end, live, "Terminated", reason)

    async def _watch(self, live: Live) -> None:
        """Notice the end of a sandbox that nobody asked to end."""
        assert live.channel is not None
        try:
            _, descriptors = await live.channel.receive()
        except SandboxLost:
            reason = await self._why(live)
        else:
            close_all(descriptors)
            reason = "it spoke to the engine unasked, which only hostile code does"
        ended_well = live.exit is not None and live.exit.done() and live.exit.result() == 0
        self._end(live, "Terminated" if ended_well else "Failed", reason)

    async def _why(self, live: Live) -> str:
        """Why a sandbox ended by itself, in words."""
        if live.exit is not None:
            await asyncio.wait((live.exit,), timeout=WORDS)
        groups = self._site.groups
        if groups is not None and live.grouped and groups.out_of_memory(live.leaf):
            return f"out of memory: it may use {live.spec['memory'] / 1024**2:.0f} MiB{_last_words(live)}"
        if live.zygote is not None and live.zygote.dead:
            return f"the process it came from ended, and it with it\n{live.zygote.printed.last()}".rstrip()
        if live.exit is None or not live.exit.done():
            how = "it was killed"
        elif (code := live.exit.result()) < 0:
            how = f"it was ended by {_signal(-code)}"
        else:
            how = f"it ended with exit code {code}"
        return how + _last_words(live)

    def _end(self, live: Live, over: str, reason: str) -> asyncio.Task[None]:
        """End a sandbox, whatever it is doing. Once, however many ask; who asks first says why."""
        if live.ending is None:
            live.ending = asyncio.create_task(self._clear(live, over, reason))
        return live.ending

    async def _clear(self, live: Live, over: str, reason: str) -> None:
        """Kill what runs, and give back all that was its."""
        if live.starting is not None and not live.failing and not live.starting.done():
            live.starting.cancel()
            await asyncio.wait((live.starting,))
        live.state, live.reason = over, reason
        if live.timer is not None:
            live.timer.cancel()
        if live.watching is not None:
            live.watching.cancel()
        await self._kill(live)
        if live.outlet is not None:
            live.outlet.close()
            live.outlet = None
            if self._egress is not None:
                with suppress(AEnvError, OSError):
                    await self._egress.remove(live.id)
        if live.channel is not None:
            live.channel.close()
        if live.printed is not None:
            live.printed.close()
        if live.path is not None:
            live.path.unlink(missing_ok=True)
            if not self._site.powers.namespaces:
                live.path.with_suffix(".pid").unlink(missing_ok=True)
                await asyncio.to_thread(shutil.rmtree, live.path.with_suffix(""), ignore_errors=True)
        await self._ungroup(live)
        if live.slot >= 0:
            self._slots.append(live.slot)
        if live.zygote is not None:
            live.zygote.forget(live.number)
            live.zygote.instances -= 1
        del self._live[live.id]
        if not live.deleted:
            self._ended[live.id] = live
        while len(self._ended) > _KEPT:
            self._ended.popitem(last=False)

    async def _kill(self, live: Live) -> None:
        """Ask when there is something to tear down, then kill; back when all its processes are gone."""
        if live.teardown and live.pidfd is not None and live.channel is not None:
            with suppress(OSError, TimeoutError):
                live.channel.sock.shutdown(socket.SHUT_WR)
                await asyncio.wait_for(until(live.pidfd), STOP)
        if not self._site.powers.namespaces and live.pid:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(live.pid, signal.SIGKILL)
        handles = [pidfd for pidfd in (live.first, live.pidfd) if pidfd is not None]
        live.first = live.pidfd = None
        for pidfd in handles:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for pidfd in handles:
            try:
                await asyncio.wait_for(until(pidfd), REAP)
            except TimeoutError:
                # A namespace ends when its dead are reaped, which is for the zygote to do. One that does not is ended.
                if live.zygote is not None:
                    await live.zygote.close()
            os.close(pidfd)

    async def _ungroup(self, live: Live) -> None:
        """Remove its control groups, and first whatever is in them still."""
        groups = self._site.groups
        if groups is None or not live.grouped:
            return
        for _ in range(int(STOP / 0.002)):
            if groups.remove(live.leaf):
                return
            for pid in groups.processes(live.leaf):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.002)


def _limits(spec: dict[str, Any]) -> Limits:
    return Limits(spec["cpu"], spec["memory"], _PROCESSES)


def _last_words(live: Live) -> str:
    words = live.printed.last() if live.printed else ""
    return f"; the last it printed:\n{words}" if words else ""


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
