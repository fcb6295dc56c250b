"""The sandboxes of one spawner, from a request to the end of each: what is asked of them, how they live and die."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import OrderedDict
from contextlib import suppress
from typing import Any

from aenv.cleanup import finish
from aenv.engines.egress.outlets import Outlets
from aenv.engines.process.cell import Cell, Shape
from aenv.engines.process.cells import Cells
from aenv.engines.process.jail import SPAN
from aenv.engines.process.nursery import Nursery
from aenv.engines.process.seconds import VARIABLES, Second
from aenv.engines.process.site import Site
from aenv.engines.process.suspending import Suspending
from aenv.engines.process.volumes import Held, Volumes
from aenv.engines.process.wire import discard, failure, words
from aenv.engines.stages import Stages
from aenv.errors import AEnvError, Conflict, Forbidden, NotFound, SandboxLost, StartFailed, Unsupported, from_wire
from aenv.runtime.hidden import Hidden

_CLEARING = 1.0
"""Seconds for which a failed start is cleared up before its caller is told; it goes on after that."""
_NEWS = 1.0
"""Seconds between two things that a sandbox says of itself."""
_LOOK = 1.0
"""Seconds between two looks at how full the volumes of a sandbox are."""
_PHASES = ("import", "setup", "health")
"""What a sandbox may say that it is at, each once."""
_OWN = ("labels", "ttl", "idle", "startup_timeout", "owner_token_sha256", "forked_from", "before")
"""What a fork does not have of its parent."""
_KEPT = 1000
"""Ended sandboxes that are remembered with their reason."""


class Live:
    """One sandbox, from the request to its end."""

    def __init__(self, id: str, spec: dict[str, Any]) -> None:
        self.id = id
        self.spec = spec
        self.state = "Creating"
        self.reason = ""
        self.created_at = time.time()
        self.expires_at = self.created_at + spec["ttl"] if spec["ttl"] is not None else None
        self.hidden = Hidden.of(spec["secrets"], spec["environment_variables"]) if spec["secrets"] else None
        self.stages = Stages(spec.get("before", {}))
        self.cell: Cell | None = None
        """The process that it is."""
        self.boot = ""
        self.key = secrets.token_urlsafe(32)
        """The token that the engine itself comes with."""
        self.volumes: list[Held] = []
        self.full = ""
        """Which of them are full, in words."""
        self.teardown = False
        self.timer: asyncio.TimerHandle | None = None
        self.starting: asyncio.Task[None] | None = None
        self.deleted = False
        self.failing = False
        """Whether its start has failed, and is about to end it."""
        self.watching: asyncio.Task[None] | None = None
        self.measuring: asyncio.Task[None] | None = None
        self.beside: asyncio.Task[None] | None = None
        self.ending: asyncio.Task[None] | None = None

    def described(self) -> dict[str, Any]:
        reason = "; ".join(filter(None, (self.reason, self.full)))
        return {
            "id": self.id,
            "url": self.cell.url if self.cell is not None and self.state == "Running" else "",
            "boot": self.boot,
            "state": self.state,
            "reason": reason if self.hidden is None else self.hidden.text(reason),
            "env": self.spec["env"],
            "owner": self.spec["owner"],
            "labels": self.spec["labels"],
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "phases": self.stages.seconds,
        }


class Sandboxes:
    """All that one spawner made."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._cells = Cells(site)
        self._suspending = Suspending(site.freezer)
        self._nursery = Nursery(site, self._cells.drop)
        self._volumes = Volumes(why_not=site.powers.no_volumes)
        self._live: dict[str, Live] = {}
        self._ended: OrderedDict[str, Live] = OrderedDict()
        self._outlets = Outlets(site.users + SPAN - 1 if site.powers.privileged else None)
        self._closing = False

    @property
    def any(self) -> bool:
        """Whether one is alive, or on its way there."""
        return bool(self._live)

    # The verbs, as the engine asks for them

    async def hello(self) -> dict[str, Any]:
        return {"isolation": self._site.isolation, "powers": self._site.powers._asdict()}

    async def create(self, id: str, spec: dict[str, Any]) -> dict[str, Any]:
        while (live := self._live.get(id)) is not None and live.ending is not None:
            await asyncio.wait((live.ending,))
        if self._closing:
            raise SandboxLost("the engine ends")
        if live is None:
            if id in self._ended:
                raise Conflict(f"{id} has ended: {self._ended[id].reason}", hint="use another id")
            live = self._live[id] = self._begun(id, spec)
            live.starting = asyncio.create_task(self._start(live))
        assert live.starting is not None
        await asyncio.shield(live.starting)
        zygote = live.cell.zygote if live.cell is not None else None
        return live.described() | {"notes": zygote.reasons if zygote is not None and not zygote.preloaded else []}

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
        if not live.spec.get("lasting"):
            live.spec["ttl"] = ttl
            live.expires_at = time.time() + ttl
            self._arm(live)
        return live.described()

    async def hide(self, id: str, secrets: dict[str, str]) -> None:
        """What a warm sandbox is told from now on is secret."""
        live = self._running(id)
        live.hidden = Hidden.of(secrets, secrets)
        if live.hidden is not None and live.cell is not None:
            live.cell.printed.hide(live.hidden)

    async def door(self, id: str) -> dict[str, Any]:
        """Where a sandbox is, and the token that opens it to the engine."""
        live = self._running(id)
        assert live.cell is not None
        self._suspending.wake(live.cell)
        return {"url": live.cell.url, "key": live.key}

    async def output(self, id: str, start: int) -> dict[str, Any]:
        live = self._find(id)
        begin, data = live.cell.printed.since(start) if live.cell is not None else (start, b"")
        return {"start": begin, "data": data.decode("latin-1")}

    async def used(self, id: str) -> list[float]:
        live = self._running(id)
        assert live.cell is not None
        return list(await asyncio.to_thread(self._cells.used, live.cell))

    async def volumes(self, owner: str) -> dict[str, int]:
        return await self._volumes.used(owner)

    async def delete_volume(self, owner: str, name: str) -> None:
        await self._volumes.delete(owner, name)

    async def close(self) -> None:
        """End everything."""
        self._closing = True
        endings = [self._end(live, "Terminated", "the engine ended") for live in list(self._live.values())]
        if endings:
            await asyncio.wait(endings)
        await self._cells.close()
        await self._nursery.close()
        await self._outlets.close()
        self._suspending.close()

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
            words = live.cell.last_words if live.cell is not None else ""
            await self._fail(live, f"it was not ready within {patience:g} s{words}")
        except SandboxLost as exc:
            await self._fail(live, exc.message)
        except AEnvError as exc:
            await self._fail(live, exc.message, exc)
        except OSError as exc:
            await self._fail(live, f"this machine refused: {exc}")
        except Exception as exc:
            await self._fail(live, f"the engine itself failed: {exc!r}")

    async def _fail(self, live: Live, reason: str, error: AEnvError | None = None) -> None:
        live.failing = True
        await asyncio.wait((self._end(live, "Failed", reason),), timeout=_CLEARING)
        if live.hidden is not None:
            reason = live.hidden.text(reason)
            error = error and from_wire(live.hidden.words(error.to_wire()))
        raise error or StartFailed(f"{live.id} did not start: {reason}")

    async def _bring_up(self, live: Live) -> None:
        if wanted := live.spec.get("volumes"):
            live.stages.begin("volumes")
            await self._volumes.take(wanted, live.id, lambda: live.ending is not None, live.volumes)
            live.volumes.sort(key=lambda held: held.mount)
        cell = await self._cell(live)
        if cell.outlets:
            await self._admit(live, cell)
        if live.hidden is not None:
            cell.printed.hide(live.hidden)
        live.stages.begin("serve")
        try:
            await cell.channel.send(self._secrets(live))
            coming = self._come_up(live, cell)
            facts = await (coming if cell.second is None else cell.second.during(coming))
        except SandboxLost:
            raise SandboxLost(await self._cells.why(cell)) from None
        if not isinstance(facts, dict):
            raise SandboxLost("it sent nonsense")
        if failed := facts.get("failed"):
            raise failure(failed)
        live.teardown, live.boot = facts.get("teardown") is True, words(facts.get("boot"), 64)
        if not live.boot.isalnum():
            raise SandboxLost("it sent nonsense")
        live.stages.end()
        live.state = "Running"
        live.watching = asyncio.create_task(self._watch(live, cell))
        self._arm(live)
        if cell.second is not None:
            live.beside = asyncio.create_task(self._watch_second(live, cell.second))
        if live.volumes:
            live.measuring = asyncio.create_task(self._measure(live))
        if not cell.mounts and cell.parent is None:
            self._cells.stock(cell.zygote, cell.shape)

    async def _come_up(self, live: Live, cell: Cell) -> Any:
        """What a sandbox says when it is up, or is not to be; and until then, what it is at."""
        expected = list(_PHASES)
        while True:
            facts, descriptors = await cell.channel.receive()
            discard(descriptors)
            phase = facts.get("phase") if isinstance(facts, dict) else None
            if phase not in expected:
                return facts
            expected.remove(phase)
            live.stages.begin(phase)

    def _begun(self, id: str, spec: dict[str, Any]) -> Live:
        """One that is to be. A fork is its parent, but for who may ask it, for how long, and what it is called."""
        if not spec["forked_from"]:
            return Live(id, spec)
        parent = self._running(spec["forked_from"])
        if spec["owner"] != parent.spec["owner"] or spec["env"] != parent.spec["env"]:
            raise Forbidden(f"a fork of {parent.id} is of {parent.spec['env']}, and of the same owner")
        if reason := self._site.why_not_forked(parent.spec):
            raise Unsupported(f"{parent.id} cannot be forked: {reason}")
        live = Live(id, parent.spec | {name: spec[name] for name in _OWN})
        live.hidden = parent.hidden  # a warm one was told its secrets later
        return live

    async def _branch(self, live: Live, parent: Live) -> Cell:
        """A sealed process for it, forked from another sandbox, which lives."""
        above = parent.cell
        assert above is not None
        live.cell = cell = self._cells.branch(above)
        self._suspending.wake(above)
        try:
            await self._cells.seal(cell, live.stages)
        except SandboxLost:
            raise SandboxLost(await self._cells.why(cell)) from None
        return cell

    async def _cell(self, live: Live) -> Cell:
        """A sealed process for it, from its zygote; from another one when that turns out to be dead."""
        if parent := live.spec.get("forked_from"):
            return await self._branch(live, self._running(parent))
        rests = live.spec.get("suspend") is not None and self._site.freezer is not None
        shape = Shape.of(live.spec, self._site.network(live.spec), rests=rests)
        second = live.spec.get("second")
        if second:  # the two have as much between them as one alone
            shape = shape._replace(storage=shape.storage // 2)
        again = True
        while True:
            zygote = await self._nursery.zygote(live.spec, live.stages)
            live.cell = cell = self._cells.take(zygote, shape)
            if live.volumes:
                live.stages.begin("volumes")
                mounted = await self._volumes.mount(live.volumes, self._cells.user(cell))
                cell.add_volumes([held.mount for held in live.volumes], mounted)
            if second:
                live.stages.begin("second")
                variables = self._site.variables(live.spec)
                await self._cells.add_second(cell, second["directory"], second["program"], variables)
            try:
                await self._cells.seal(cell, live.stages)
                return cell
            except SandboxLost:
                if not (again and await zygote.died()):
                    raise SandboxLost(await self._cells.why(cell)) from None
            again = False
            live.cell = None
            await finish(self._cells.end(cell))

    async def _admit(self, live: Live, cell: Cell) -> None:
        """Hand the instance's only way out to the proxy, and that of its second sandbox."""
        for which, outlet in cell.outlets.items():
            await self._outlets.add(live.id + which, outlet, live.spec["network"]["allow"])

    def _secrets(self, live: Live) -> dict[str, Any]:
        """What only a sealed instance is told."""
        spec = live.spec
        datasource = "/datasource" if spec["datasource"] and self._site.powers.namespaces else spec["datasource"]
        return {
            "id": live.id,
            "environment_variables": self._site.variables(spec)
            | spec["environment_variables"]
            | (VARIABLES if spec.get("second") else {}),
            "secrets": spec["secrets"],
            "arguments": spec["arguments"],
            "datasource": datasource,
            "seed": spec["seed"],
            "idle": spec["idle"],
            "suspend": spec["suspend"] if live.cell is not None and live.cell.listener is not None else None,
            "warm": spec["warm"],
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

    async def _watch(self, live: Live, cell: Cell) -> None:
        """Notice the end of a sandbox that nobody asked to end, and hear how it is until then."""
        reason = ""
        while not reason:
            try:
                message, descriptors = await cell.channel.receive()
            except SandboxLost:
                reason = await self._cells.why(cell)
                break
            discard(descriptors)
            if cell.hears(message):
                continue
            unhealthy = message.get("unhealthy") if isinstance(message, dict) else None
            failed = message.get("failed") if isinstance(message, dict) and live.spec["warm"] else None
            if isinstance(unhealthy, str):
                live.reason = f"unhealthy: {words(unhealthy, 1024)}" if unhealthy else ""
                await asyncio.sleep(_NEWS)  # who says too much is heard less
                if not cell.alive:  # however much it had to say
                    reason = await self._cells.why(cell)
            elif isinstance(message, dict) and "idle" in message and cell.listener is not None:
                await self._suspending.rest(cell, message["idle"], live.spec["idle"])
            elif failed:  # it was warm, and could not become what it was told
                reason = failure(failed).message
            else:
                reason = "it spoke to the engine unasked, which only hostile code does"
        ended_well = cell.exit is not None and cell.exit.done() and cell.exit.result() == 0
        self._end(live, "Terminated" if ended_well else "Failed", reason)

    async def _watch_second(self, live: Live, second: Second) -> None:
        """Notice the end of the sandbox beside it, without which it is none."""
        self._end(live, "Failed", await second.ended())

    async def _measure(self, live: Live) -> None:
        """Notice when a volume is full, and when it is not any more."""
        while True:
            live.full = "; ".join(filter(None, (held.full for held in live.volumes)))
            await asyncio.sleep(_LOOK)

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
        live.stages.end()
        if live.timer is not None:
            live.timer.cancel()
        for watching in (live.watching, live.measuring, live.beside):
            if watching is not None:
                watching.cancel()
        if (cell := live.cell) is not None:
            await self._suspending.release(cell)
            await self._cells.end(cell, ask=live.teardown)
            self._suspending.forget(cell)
            for which in cell.outlets:
                with suppress(AEnvError, OSError):
                    await self._outlets.remove(live.id + which)
        await self._volumes.release(live.volumes)
        del self._live[live.id]
        if not live.deleted:
            self._ended[live.id] = live
        while len(self._ended) > _KEPT:
            self._ended.popitem(last=False)
