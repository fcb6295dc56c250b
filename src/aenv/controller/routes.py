"""The controller over HTTP: the handlers, and the table of routes at the bottom."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated

from aenv.api.routes import Bytes, Lines, Prefer, preferred_wait
from aenv.auth.callers import Scope
from aenv.controller.service import Controller
from aenv.engines import contract
from aenv.engines.base import Engine
from aenv.engines.contract import Cleaned, Command, Facts, Held, Hide, Update, Use, Wanted
from aenv.errors import Invalid
from aenv.models import ExecResult
from aenv.project.archive import MAX_SIZE
from aenv.web.routes import Call, Header, Query, Route, Streamed, Upload

_OCTETS = "application/octet-stream"
Attempt = Annotated[str, Header(contract.ATTEMPT, "names one attempt to create, which may be given up under that name")]


class Handlers:
    """What each route does, with the engine's own words for it."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    @property
    def _engine(self) -> Engine:
        return self._controller.engine

    async def create(self, call: Call, body: Wanted, prefer: Prefer = "", attempt: Attempt = "") -> Held:
        """Make an instance of an environment.

        Asked again with the same `instance_id`, it is made once. `pending` says that it takes longer than the client
        wants to wait, `missing` that the project must be sent first.
        """
        call.target = body.instance_id[:128] or body.name[:64]
        patience = preferred_wait(call, prefer) if prefer else None
        held = await self._controller.create(body, patience, attempt)
        call.target = held.id
        return held

    async def get(self, call: Call, id: str, prefer: Prefer = "") -> Held:
        """An instance, as it is now."""
        return await self._controller.get(id, preferred_wait(call, prefer))

    async def list(
        self,
        call: Call,
        env: Annotated[str, Query("envName", "only those of this environment")] = "",
        label: Annotated[list[str] | None, Query(about="name=value; all of these")] = None,
    ) -> list[Held]:
        """Every instance that is alive or kept."""
        pairs = [given.partition("=") for given in label or ()]
        if wrong := [name for name, equals, _ in pairs if not equals]:
            raise Invalid(f"label {wrong[0][:80]!r} has no value", hint="use name=value")
        return await self._controller.find(env, {name: value for name, _, value in pairs})

    async def delete(self, call: Call, id: str, attempt: Attempt = "") -> bool:
        """End an instance. It is answered when nothing of it is left; gone already is success."""
        await self._controller.delete(id, attempt)
        return True

    async def update(self, call: Call, id: str, body: Update) -> Held:
        """Let an instance live so long from now."""
        return self._controller.shown(await self._engine.update(id, ttl=body.ttl))

    async def warmup(self, call: Call, body: Wanted | None) -> Held:
        """Do now what the first instance of an environment would have to wait for."""
        if body is None or not (body.name or body.spec):
            return Held(reason="no environment was named, so nothing was prepared")
        call.target = body.name[:64]
        return await self._controller.prepare(body)

    async def cleanup(self, call: Call) -> Cleaned:
        """Remove instances that are over, with all that is kept of them, and projects that nobody uses."""
        return await self._controller.clean()

    async def hide(self, call: Call, id: str, body: Hide) -> None:
        """Show these values no more, which a warm instance is about to be told."""
        await self._engine.hide(id, body.secrets)

    async def execute(self, call: Call, id: str, body: Command) -> ExecResult:
        """Run a command inside."""
        return await self._engine.exec(id, body.command, timeout=body.timeout)

    async def read(self, call: Call, id: str, path: str) -> Bytes:
        """A file inside."""
        content = await self._engine.download(id, path)
        return Streamed(_one(content), content_type=_OCTETS, size=len(content))

    async def write(self, call: Call, id: str, path: str, body: Upload) -> None:
        """Write a file inside; folders that are missing are made."""
        await self._engine.upload(id, path, b"".join([piece async for piece in body]))

    async def output(self, call: Call, id: str, start: int = 0) -> Bytes:
        """What an instance printed, from that position on, as far as it is kept. A header says where it begins."""
        found = await self._engine.output(id, start)
        begins = (contract.START.lower().encode(), b"%d" % found.start)
        return Streamed(_one(found.data), content_type=_OCTETS, size=len(found.data), headers=[begins])

    async def logs(self, call: Call, id: str, tail: int | None = None, follow: bool = False) -> Lines:
        """What an instance printed, by line; with follow, also what it prints from then on, until it ends."""
        await self._engine.get(id)  # what there is to raise is raised before an answer begins
        return Streamed(self._lines(id, tail, follow), content_type="text/plain; charset=utf-8", endless=follow)

    async def _lines(self, id: str, tail: int | None, follow: bool) -> AsyncIterator[bytes]:
        async with aclosing(self._engine.logs(id, tail, follow)) as lines:  # type: ignore[type-var]
            async for line in lines:
                yield f"{line}\n".encode()

    async def used(self, call: Call, id: str) -> Use:
        """What an instance has used so far, and uses now."""
        found = await self._engine.used(id)
        return Use(cpu=found.cpu, memory=found.memory)

    async def receive(self, call: Call, digest: str, body: Upload) -> None:
        """Send a project, as tar.gz, under the sha256 of that. It is unpacked and kept as long as it is used."""
        await self._controller.receive(digest, body)

    async def volumes(self, call: Call, owner: str) -> dict[str, int]:
        """The volumes of an owner, and the bytes that are in use in each."""
        return await self._engine.volumes(owner)

    async def delete_volume(self, call: Call, name: str, owner: str) -> bool:
        """Forget a volume with all that it holds."""
        await self._engine.delete_volume(owner, name)
        return True

    async def facts(self, call: Call) -> Facts:
        """Which engine this is, and what it cannot do."""
        return self._controller.facts()


async def _one(content: bytes) -> AsyncIterator[bytes]:
    yield content


def routes(controller: Controller) -> list[Route]:
    """The controller's part of a service."""
    on, engine = Handlers(controller), Scope.ENGINE
    one = f"{contract.INSTANCE}/{{id}}"
    return [
        Route("POST", contract.INSTANCE, on.create, engine),
        Route("GET", contract.INSTANCE, on.list, engine),
        Route("GET", one, on.get, engine),
        Route("PUT", one, on.update, engine),
        Route("DELETE", one, on.delete, engine),
        Route("PUT", contract.WARMUP, on.warmup, engine),
        Route("PUT", contract.CLEANUP, on.cleanup, engine),
        Route("PUT", f"{one}/hide", on.hide, engine),
        Route("POST", f"{one}/exec", on.execute, engine),
        Route("GET", f"{one}/files", on.read, engine),
        Route("PUT", f"{one}/files", on.write, engine, most=contract.MOST_FILE),
        Route("GET", f"{one}/output", on.output, engine),
        Route("GET", f"{one}/logs", on.logs, engine),
        Route("GET", f"{one}/used", on.used, engine),
        Route("PUT", f"{contract.PROJECT}/{{digest}}", on.receive, engine, most=MAX_SIZE),
        Route("GET", contract.VOLUME, on.volumes, engine),
        Route("DELETE", f"{contract.VOLUME}/{{name}}", on.delete_volume, engine),
        Route("GET", contract.ENGINE, on.facts, engine),
    ]
