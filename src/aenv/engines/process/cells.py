"""Processes that are sealed and wait to be told which sandbox they are: made, looked at from outside, and ended.

Nothing of a sandbox is known to its process until it is sealed, so one can be made before anybody asks for it. Each
zygote that was asked twice has such a spare, and the next sandbox like the last need not wait for its fork.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from aenv.engines import usage
from aenv.engines.process import state, users
from aenv.engines.process.attest import attest, first_of
from aenv.engines.process.cell import Cell, Shape
from aenv.engines.process.cgroups import Limits
from aenv.engines.process.gate import Gate
from aenv.engines.process.jail import SPAN
from aenv.engines.process.seconds import MOUNTS, Asking, Second
from aenv.engines.process.site import Site
from aenv.engines.process.wire import Channel, discard, failure, until
from aenv.engines.process.zygotes import Zygote, bury
from aenv.engines.stages import Stages
from aenv.errors import AEnvError, SandboxLost, StartFailed, Unsupported

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
"""Cells at a time. The last user of the span is the proxy's."""
_NAMESPACES = ("pid", "mnt", "ipc", "uts")
_PROCESSES = 512
"""Most processes and threads of an instance."""
_FIRST_MEMORY = 64 * 1024**2
"""For the first process of a fork's namespace, and whoever makes it."""
_PLACE = 2
"""The process id of an instance that its zygote forked, in its own namespace."""
_NESTED = 3
"""Process namespaces from the spawner to an instance: the stub's, the zygote's and its own."""
_DEEPEST = 24
"""Generations of forks. The kernel nests 32 namespaces, and some are around the spawner."""


class Cells:
    """All cells of one spawner."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._slots = list(range(_MOST - 1, -1, -1))
        """Numbers of users and control groups that are free."""
        self._numbers = 0
        self._spares: dict[Zygote, Cell] = {}
        self._tasks: dict[asyncio.Task[None], Zygote] = {}
        """Spares that are being made or ended."""

    def take(self, zygote: Zygote, shape: Shape) -> Cell:
        """The zygote's spare, or a new cell. It is the caller's to end."""
        spare = self._unspare(zygote)
        if spare is not None and spare.shape == shape and spare.alive:
            return spare
        if spare is not None:
            self._do(self.end(spare), zygote)
        return self._new(zygote, shape)

    def branch(self, parent: Cell) -> Cell:
        """A new cell, to be forked from one that lives. It is the caller's to end."""
        if parent.generation >= _DEEPEST:
            raise Unsupported(
                f"it has {_DEEPEST} generations of forks before it, and the kernel takes no more",
                hint="a sandbox that is made anew by its journal has none before it",
            )
        cell = self._new(parent.zygote, parent.shape)
        cell.parent = parent
        parent.branches += 1
        return cell

    def user(self, cell: Cell) -> int:
        """The machine's user that the cell's process has, where each has its own."""
        return self._site.users + _FIRST_USER + cell.slot

    async def seal(self, cell: Cell, stages: Stages | None = None) -> None:
        """Have it forked, if it is not, and wait until it is sealed; ``SandboxLost`` when it ends before. ``stages``
        is told where the time goes."""
        if not cell.pid:
            stages = stages or Stages()
            stages.begin("fork")
            if cell.parent is not None:
                await self._fork_from(cell, cell.parent)
                await self._sealed(cell, stages)
                return
            async with cell.zygote.turns:
                await self._fork(cell)
                await self._sealed(cell, stages)

    async def add_second(self, cell: Cell, task: str, program: str, variables: dict[str, str]) -> None:
        """Start the sandbox beside a cell that is not forked yet, and have the cell given what the two share."""
        if not self._site.powers.namespaces:
            raise Unsupported(
                "the process engine cannot make a second sandbox without namespaces, which this machine does not give",
                hint="'aenv doctor' says why; or use the docker engine: AENV_ENGINE=docker",
            )
        self._group(cell)
        shape, slot = cell.shape, self._take_slot()
        asking = Asking(task, program, variables, shape.network, shape.memory, shape.storage, cell.leaf)
        try:
            cell.second = Second(self._site, cell.number, _FIRST_USER + slot, asking)
        except OSError:
            self._slots.append(slot)
            raise
        await cell.second.start()
        cell.add_volumes([*cell.mounts, *MOUNTS], cell.second.mounts)
        cell.second.mounts = []

    def stock(self, zygote: Zygote, shape: Shape) -> None:
        """See to it that a cell is ready before the next one is asked for."""
        busy = zygote in self._spares or zygote in self._tasks.values()
        if self._site.spare and zygote.forks > 1 and len(self._slots) > 1 and not busy:
            self._do(self._make_spare(zygote, shape), zygote)

    def drop(self, zygote: Zygote) -> None:
        """End the spare of a zygote, if it has one."""
        spare = self._unspare(zygote)
        if spare is not None:
            self._do(self.end(spare), zygote)

    async def close(self) -> None:
        """End what nobody has taken."""
        while self._spares or self._tasks:
            for zygote in list(self._spares):
                self.drop(zygote)
            await asyncio.wait(self._tasks)

    # Spares

    async def _make_spare(self, zygote: Zygote, shape: Shape) -> None:
        try:
            cell = self._new(zygote, shape)
        except (AEnvError, OSError):  # whoever asks next hears why
            return
        try:
            await self.seal(cell)
        except (AEnvError, OSError):
            await self.end(cell)
            return
        if zygote.dead or cell.pidfd is None:
            await self.end(cell)
            return
        self._spares[zygote] = cell
        zygote.instances -= 1  # one that nobody has does not keep a zygote from ending
        asyncio.get_running_loop().add_reader(cell.pidfd, self.drop, zygote)

    def _unspare(self, zygote: Zygote) -> Cell | None:
        spare = self._spares.pop(zygote, None)
        if spare is not None:
            assert spare.pidfd is not None
            asyncio.get_running_loop().remove_reader(spare.pidfd)
            zygote.instances += 1
        return spare

    def _do(self, work: Coroutine[Any, Any, None], zygote: Zygote) -> None:
        task = asyncio.create_task(work)
        self._tasks[task] = zygote
        task.add_done_callback(self._tasks.pop)

    # From a request to the seal

    def _new(self, zygote: Zygote, shape: Shape) -> Cell:
        slot = self._take_slot()
        self._numbers += 1
        path = self._site.directory / "i" / f"{self._numbers}.sock"
        try:
            cell = Cell(zygote, shape, self._numbers, slot, path)
        except OSError:
            self._slots.append(slot)
            raise
        zygote.instances += 1
        return cell

    def _take_slot(self) -> int:
        if not self._slots:
            raise StartFailed(f"this engine has {_MOST} sandboxes, which is its most")
        return self._slots.pop()

    def _group(self, cell: Cell) -> None:
        """Make its control groups."""
        if self._site.groups is not None and not cell.grouped:
            cell.grouped = True
            self._site.groups.add(cell.leaf, Limits(cell.shape.cpu, cell.shape.memory, _PROCESSES))

    async def _fork(self, cell: Cell) -> None:
        """Make everything that the child is given, and have it forked."""
        self._equip(cell)
        if self._site.groups is not None:
            cell.given += self._site.groups.open(cell.leaf)
        cell.exit = await cell.zygote.fork(cell.number, self._order(cell), cell.given)
        cell.give()

    async def _fork_from(self, cell: Cell, parent: Cell) -> None:
        """The same, by a cell that lives: it forks, and its fork is given users of its own."""
        groups = self._site.groups
        assert groups is not None
        if parent.gate is None:
            raise Unsupported("the sandbox cannot be forked")
        self._equip(cell)
        groups.add(cell.first_leaf, Limits(cell.shape.cpu, _FIRST_MEMORY, 2))
        cell.given += [*groups.open(cell.first_leaf), *groups.open(cell.leaf)]
        refused = parent.refusals[cell.number] = asyncio.get_running_loop().create_future()
        own = {"number": cell.number, "generation": cell.generation, "until": time.monotonic() + SEAL}
        order = self._order(cell) | own
        parent.forking += 1
        try:
            async with asyncio.timeout(SEAL):
                with parent.gate.opened(parent.pid, SEAL):
                    await parent.channel.send(order, cell.given)
                    cell.give()
                    message = await _first_word(cell.channel, refused)
            parent.refusals.pop(cell.number, None)
            if isinstance(message, dict) and (failed := message.get("failed")):
                raise failure(failed)
            if message != {"user": True} or cell.channel.pid is None or parent.pidfd is None:
                raise SandboxLost("it ended before it was sealed")
            users.give(cell.channel.pid, parent.pid)
            await cell.channel.send({"given": True})
        except TimeoutError:
            raise StartFailed(f"it was not forked within {SEAL:g} s") from None
        finally:
            parent.forking -= 1

    def _equip(self, cell: Cell) -> None:
        """Make what every child is given."""
        cell.channel.ask_who()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(cell.path))
            listener.listen(256)
            if cell.shape.rests:
                cell.listener = listener.dup()
            cell.given.insert(0, listener.detach())
        self._group(cell)

    def _order(self, cell: Cell) -> dict[str, Any]:
        """What a fork needs to know in order to seal itself. No secrets: it is not sealed yet."""
        site = self._site
        return {
            "seccomp": site.powers.seccomp,
            "overlay": site.powers.overlay,
            "network": cell.shape.network,
            "user": _FIRST_USER + cell.slot if site.powers.privileged else 0,
            "storage": cell.shape.storage,
            "memory": cell.shape.memory if site.groups is None and site.isolation != "none" else None,
            "project": cell.zygote.project,
            "directory": str(cell.path.with_suffix("")),
            "volumes": cell.mounts,
            "forkable": cell.zygote.forkable,
        }

    async def _sealed(self, cell: Cell, stages: Stages) -> None:
        """Wait until a fork says that it is sealed, and look whether it is."""
        try:
            async with asyncio.timeout(SEAL):
                message, descriptors = await cell.channel.receive()
        except TimeoutError:
            raise StartFailed(f"it was not sealed within {SEAL:g} s") from None
        stages.begin("seal")
        cell.pid = cell.channel.pid or 0
        cell.pidfd = cell.channel.take_pidfd()
        try:
            if isinstance(message, dict) and (failed := message.get("failed")):
                raise failure(failed)
            if not (isinstance(message, dict) and message.get("sealed")):
                raise SandboxLost("it ended before it was sealed")
            if self._site.powers.namespaces:
                self._attest(cell, descriptors)
            else:
                cell.path.with_suffix(".pid").write_text(f"{cell.pid} {state.start_time(cell.pid)}")
            if cell.parent is not None:
                cell.gate = cell.parent.gate
            elif cell.zygote.forkable and descriptors:
                cell.gate = Gate(descriptors.pop())
            if cell.shape.network == "proxy":
                cell.outlet = _outlet(descriptors)
        finally:
            discard(descriptors)

    def _attest(self, cell: Cell, descriptors: list[int]) -> None:
        if not descriptors or not first_of(descriptors[0], cell.pid):
            raise StartFailed("the instance is not sealed: the first process of its namespace is not the one it names")
        cell.first = descriptors.pop(0)
        site = self._site
        attest(
            cell.pid,
            user=self.user(cell) if site.powers.privileged else os.getuid(),
            group=self.user(cell) if site.powers.privileged else os.getgid(),
            namespaces=_NAMESPACES if cell.shape.network == "full" else (*_NAMESPACES, "net"),
            apart_from=cell.zygote.pid if cell.parent is None else cell.parent.pid,
            filters=2 if site.powers.seccomp else 0,
            groups=site.groups.paths(cell.leaf) if site.groups is not None else {},
            place=_PLACE + cell.generation,
            nested=_NESTED + cell.generation,
        )

    def used(self, cell: Cell) -> tuple[float, int]:
        """Seconds of a processor, and bytes of memory. It looks at many files: in a thread."""
        groups = self._site.groups
        try:
            if groups is None or not cell.grouped:
                pids = usage.beside(cell.pid) if self._site.powers.namespaces else usage.below(cell.pid)
                if cell.second is not None:
                    pids |= usage.beside(cell.second.pid)
                return usage.processor(pids), usage.memory(pids)
            seconds = groups.processor(cell.leaf)
            if seconds is None:
                seconds = usage.processor(groups.processes(cell.leaf))
            return seconds, groups.memory(cell.leaf)
        except (OSError, ValueError) as exc:
            raise SandboxLost(f"it ended while it was looked at ({exc})") from exc

    # Its end

    async def why(self, cell: Cell) -> str:
        """Why a cell ended by itself, in words."""
        if cell.exit is not None:
            await asyncio.wait((cell.exit,), timeout=WORDS)
        groups = self._site.groups
        if groups is not None and cell.grouped and groups.out_of_memory(cell.leaf):
            return f"out of memory: it may use {cell.shape.memory / 1024**2:.0f} MiB{cell.last_words}"
        if cell.zygote.dead:
            return f"the process it came from ended, and it with it\n{cell.zygote.printed.last()}".rstrip()
        if cell.parent is not None:
            how = "it ended"  # nobody but its own namespace is told how
        elif cell.exit is None or not cell.exit.done():
            how = "it was killed"
        elif isinstance(code := cell.exit.result(), str):
            how = code
        elif code < 0:
            how = f"it was ended by {_signal(-code)}"
        else:
            how = f"it ended with exit code {code}"
        return how + cell.last_words

    async def end(self, cell: Cell, *, ask: bool = False) -> None:
        """Kill what runs, and give back all that was made for it. ``ask`` lets it tear down first."""
        cell.give()
        await self._kill(cell, ask=ask)
        if cell.second is not None:
            if self._site.groups is not None:
                self._site.groups.let_run(cell.leaf)
            await cell.second.close()
            self._slots.append(cell.second.user - _FIRST_USER)
        for sock in (cell.outlet, cell.listener):
            if sock is not None:
                sock.close()
        cell.channel.close()
        cell.printed.close()
        cell.path.unlink(missing_ok=True)
        if not self._site.powers.namespaces:
            cell.path.with_suffix(".pid").unlink(missing_ok=True)
            await asyncio.to_thread(shutil.rmtree, cell.path.with_suffix(""), ignore_errors=True)
        await self._ungroup(cell, cell.leaf)
        cell.zygote.forget(cell.number)
        cell.is_over = True
        await self._finish(cell)

    async def _finish(self, cell: Cell) -> None:
        """Give back what the cells that were forked from it need, too, when none of them is left: the first process of
        its namespace, which theirs are below, and its user, who owns theirs."""
        if cell.branches:
            return
        if cell.first is not None:
            first, cell.first = cell.first, None
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(first, signal.SIGKILL)
            await self._gone(cell, first)
        if cell.parent is not None:
            await self._ungroup(cell, cell.first_leaf)
        elif cell.gate is not None:
            cell.gate.close()
        elif cell.zygote.forkable and cell.exit is not None:
            cell.zygote.kill(cell.number)  # one that was never sealed has a first process that only its zygote knows
        self._slots.append(cell.slot)
        cell.zygote.instances -= 1
        if cell.parent is not None:
            cell.parent.branches -= 1
            if cell.parent.is_over:
                await self._finish(cell.parent)

    async def _kill(self, cell: Cell, *, ask: bool) -> None:
        """Back when all its processes are gone."""
        if ask and cell.pidfd is not None:
            with suppress(OSError, TimeoutError):
                cell.channel.sock.shutdown(socket.SHUT_WR)
                await asyncio.wait_for(until(cell.pidfd), STOP)
        if not self._site.powers.namespaces and cell.pid:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(cell.pid, signal.SIGKILL)
        first = None if cell.branches else cell.first
        handles = [pidfd for pidfd in (first, cell.pidfd) if pidfd is not None]
        cell.first, cell.pidfd = (cell.first if first is None else None), None
        for pidfd in handles:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        if handles and self._site.groups is not None and cell.grouped:
            self._site.groups.let_run(cell.leaf)
        for pidfd in handles:
            await self._gone(cell, pidfd)
        if cell.exit is not None and not handles and not cell.exit.done():
            await self._kill_unknown(cell)

    async def _gone(self, cell: Cell, pidfd: int) -> None:
        """Wait until a process that is killed is gone."""
        try:
            await asyncio.wait_for(until(pidfd), REAP)
        except TimeoutError:
            # A namespace ends when its dead are reaped, which is for the zygote to do. One that does not is ended.
            await cell.zygote.close()
        bury(pidfd)  # a plain one is ours once its zygote is gone
        os.close(pidfd)

    async def _kill_unknown(self, cell: Cell) -> None:
        """End a fork that never said that it is sealed: only its zygote knows it. One that does not do so is ended."""
        assert cell.exit is not None
        cell.zygote.kill(cell.number)
        gone = asyncio.ensure_future(cell.zygote.ended())
        await asyncio.wait((cell.exit, gone), timeout=REAP, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not cell.exit.done() and not cell.zygote.dead:
            await cell.zygote.close()

    async def _ungroup(self, cell: Cell, leaf: str) -> None:
        """Remove control groups of it, and first whatever is in them still."""
        groups = self._site.groups
        if groups is None or not cell.grouped:
            return
        for _ in range(int(STOP / 0.002)):
            if groups.remove(leaf):
                return
            for pid in groups.processes(leaf):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.002)


async def _first_word(channel: Channel, refused: asyncio.Future[str]) -> Any:
    """What a fork says first; ``Unsupported`` when its parent says why there is none."""
    coming = asyncio.ensure_future(channel.receive())
    try:
        await asyncio.wait((coming, refused), return_when=asyncio.FIRST_COMPLETED)
    finally:
        coming.cancel()
        await asyncio.wait((coming,))
        if not coming.cancelled() and coming.exception() is None:
            discard(coming.result()[1])
    if refused.done():
        raise Unsupported(f"the sandbox cannot be forked as it is: {refused.result()}")
    return coming.result()[0]


def _outlet(descriptors: list[int]) -> socket.socket:
    try:
        (descriptor,) = descriptors
        listener = socket.socket(fileno=descriptor)
    except (ValueError, OSError) as exc:
        raise SandboxLost("it sent no listener for its proxy") from exc
    descriptors.clear()
    return listener


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
