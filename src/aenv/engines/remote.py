"""``RemoteEngine``: the engine contract as a client of a controller, over HTTP.

Whatever the controller's engine raises is raised here, too. A controller may restart under it: what is safe is asked
again, and a create is, since an id is made once.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import msgspec

from aenv import config, project
from aenv.cleanup import finish
from aenv.control import Service, control_url, key_for, segment
from aenv.engines.base import Engine, Output, Used
from aenv.engines.contract import (
    ATTEMPT,
    CLEANUP,
    ENGINE,
    INSTANCE,
    PROJECT,
    START,
    VOLUME,
    WARMUP,
    Cleaned,
    Command,
    Facts,
    Held,
    Hide,
    Named,
    Update,
    Use,
    Wanted,
)
from aenv.errors import AEnvError, Invalid, NetworkError, NotFound, Unsupported, from_wire
from aenv.models import ExecResult, Sandbox, SandboxSpec, Second, State
from aenv.project import archive
from aenv.project.stamp import stamp
from aenv.wire import moment

WAIT = 20.0
"""Seconds that one question waits for a start: shorter than what stands between two machines cuts off."""
_PATIENCE = 60.0
"""Seconds in which a controller must answer, over those that it was asked to wait."""
_ENDING = 300.0
"""Seconds in which a sandbox must be gone."""
_GIVE_UP = 10.0
"""Seconds to say that a create is not wanted any more."""
_UPLOADS = 3
"""How often a project is sent that the controller then does not have."""
_PORT = 8081
"""Of the runtime in a sandbox of a controller that tells no URL."""
_KNOWN = 1000
"""Digests of projects that are remembered."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


class RemoteEngine(Engine):
    """Sandboxes of an engine elsewhere, by its controller at ``address``.

    ``key`` is the token for it; else the setting ``controller_key``, or the one for a platform there.
    """

    name = "http"
    shared = True

    def __init__(self, address: str = "", *, key: str | None = None) -> None:
        if not address:
            raise Invalid("an engine over HTTP needs the address of its controller", hint="name it: http=URL")
        self.url = control_url(address)
        self._service = Service(
            self.url,
            key_for(self.url, config.get("controller_key", key)),
            timeout=_PATIENCE,
            called="the controller",
            hint="start one with 'aenv serve controller', or name another address: --engine http=URL",
        )
        self._facts: Facts | None = None
        self._digests: dict[tuple[str, str], str] = {}

    async def __aenter__(self) -> Self:
        await self._learn()
        return self

    async def _learn(self) -> Facts:
        """What the engine there is. It is asked once, when there is time for it."""
        if self._facts is None:
            self._facts = await self._service.ask("GET", ENGINE, type=Facts)
            self.cannot = self._facts.cannot
        return self._facts

    # The four verbs

    async def create(self, id: str, spec: SandboxSpec) -> Sandbox:
        attempt = secrets.token_hex(8)
        try:
            return await self._create(id, spec, attempt)
        except asyncio.CancelledError:
            await finish(self._give_up(id, attempt))
            raise

    async def _create(self, id: str, spec: SandboxSpec, attempt: str) -> Sandbox:
        headers = {"Prefer": f"wait={WAIT:g}", ATTEMPT: attempt}
        while True:
            held = await self._told("POST", INSTANCE, await self._wanted(spec, id), spec, headers)
            if not held.pending:
                break
        if held.id != id:
            with suppress(AEnvError):
                await self._service.ask("DELETE", f"{INSTANCE}/{segment(held.id)}", type=Any, timeout=_GIVE_UP)
            raise Unsupported(
                f"{self.url} does not make instances under the ids that it is given: it was asked for {id}",
                hint="it must take 'instance_id' of the request, as 'aenv serve controller' does",
            )
        return _sandbox(held)

    async def _told(
        self, method: str, path: str, wanted: Wanted, spec: SandboxSpec, headers: Mapping[str, str] | None = None
    ) -> Held:
        """What is answered to a request that may need the project's files."""
        for _ in range(_UPLOADS):
            held = await self._service.ask(
                *(method, path), type=Held, body=wanted, headers=headers, timeout=WAIT + _PATIENCE, repeatable=True
            )
            if not held.missing:
                return held
            await self._send(spec, wanted.project)
        raise NetworkError(f"{self.url} does not keep the project of {spec.env} that it was sent")

    async def _give_up(self, id: str, attempt: str) -> None:
        """Let nothing be made of a create that was cancelled; where nobody hears it, the time to live ends it."""
        if _ID.fullmatch(id):
            with suppress(AEnvError):
                await self._service.ask(
                    "DELETE", self._at(id), type=Any, headers={ATTEMPT: attempt}, timeout=_GIVE_UP, retries=1
                )

    async def get(self, id: str) -> Sandbox:
        return _sandbox(await self._service.ask("GET", self._at(id), type=Held))

    async def find(self, labels: Mapping[str, str] | None = None) -> list[Sandbox]:
        query = {"label": [f"{name}={value}" for name, value in (labels or {}).items()]}
        found = await self._service.ask("GET", INSTANCE, type=list[Held], query=query)
        return [_sandbox(held) for held in found]

    async def delete(self, id: str) -> None:
        with suppress(NotFound):
            await self._service.ask("DELETE", self._at(id), type=Any, timeout=_ENDING)

    async def _pause(self, id: str, seconds: float) -> None:
        """The controller answers when the start is over, so nobody looks in vain."""
        headers = {"Prefer": f"wait={WAIT:g}"}
        await self._service.ask("GET", self._at(id), type=Held, headers=headers, timeout=WAIT + _PATIENCE)

    # Powers

    def check_second(self, second: Second | None) -> None:
        """As the engine there does, as far as it is known; it is asked again by ``create``."""
        if second is not None and self._facts is not None:
            refusal = self._facts.refusals.get("image" if second.image else "directory")
            if refusal is not None:
                raise from_wire(refusal)

    def check_resources(self, resources: Mapping[str, str]) -> None:
        """What is to be had the engine there knows, and says so to ``create``."""

    def check_fork(self, forked_from: str) -> None:
        """So does it that."""

    async def prepare(self, spec: SandboxSpec) -> bool:
        return (await self._told("PUT", WARMUP, await self._wanted(spec), spec)).status != ""

    async def clean(self) -> Cleaned:
        """Have what is over and what nobody uses removed there."""
        return await self._service.ask("PUT", CLEANUP, type=Cleaned, timeout=_ENDING)

    async def output(self, id: str, start: int) -> Output:
        answer = await self._service.fetch(f"{self._at(id)}/output", query={"start": start})
        return Output(int(answer.headers.get(START.lower().encode(), b"0")), answer.body)

    async def logs(self, id: str, tail: int | None = None, follow: bool = False) -> AsyncIterator[str]:
        query = {"tail": tail, "follow": follow}
        rest = b""
        async with self._service.stream("GET", f"{self._at(id)}/logs", query=query, patience=None) as pieces:
            async for piece in pieces:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield line.decode(errors="replace")
        if rest:
            yield rest.decode(errors="replace")

    async def update(self, id: str, *, ttl: float) -> Sandbox:
        return _sandbox(await self._service.ask("PUT", self._at(id), type=Held, body=Update(ttl=ttl)))

    async def hide(self, id: str, secrets: Mapping[str, str]) -> None:
        await self._service.ask("PUT", f"{self._at(id)}/hide", type=Any, body=Hide(secrets=dict(secrets)))

    async def exec(self, id: str, command: Sequence[str], *, timeout: float = 60.0) -> ExecResult:
        asked = Command(command=list(command), timeout=timeout)
        return await self._service.ask(
            "POST", f"{self._at(id)}/exec", type=ExecResult, body=asked, timeout=timeout + _PATIENCE, repeatable=False
        )

    async def upload(self, id: str, path: str, content: bytes) -> None:
        await self._service.ask("PUT", f"{self._at(id)}/files", type=Any, body=content, query={"path": path})

    async def download(self, id: str, path: str) -> bytes:
        return (await self._service.fetch(f"{self._at(id)}/files", query={"path": path})).body

    async def used(self, id: str) -> Used:
        found = await self._service.ask("GET", f"{self._at(id)}/used", type=Use)
        return Used(found.cpu, found.memory)

    async def volumes(self, owner: str) -> dict[str, int]:
        return await self._service.ask("GET", VOLUME, type=dict[str, int], query={"owner": owner})

    async def delete_volume(self, owner: str, name: str) -> None:
        await self._service.ask("DELETE", f"{VOLUME}/{segment(name)}", type=Any, query={"owner": owner})

    # What is sent

    def _at(self, id: str) -> str:
        if not _ID.fullmatch(id):
            raise NotFound(f"there is no sandbox {id!r}")
        return f"{INSTANCE}/{id}"

    async def _wanted(self, spec: SandboxSpec, id: str = "") -> Wanted:
        if id and not _ID.fullmatch(id):
            raise Invalid(f"{id!r} is not an id", hint="use letters, digits, '-', '_' and '.', at most 128")
        facts = await self._learn()
        return Wanted(
            id=str(spec.env),
            name=spec.env.name,
            version=spec.env.version or "",
            artifacts=[{"type": "image", "content": spec.image}] if spec.image else [],
            deploy_config={**spec.resources, "environmentVariables": spec.environment_variables},
            instance_id=id,
            spec=msgspec.structs.replace(spec, project="", stamp=""),
            project="" if spec.image and facts.images else await self._digest(spec),
        )

    async def _digest(self, spec: SandboxSpec) -> str:
        """The sha256 of the project's archive. It is packed once for each state of its files."""
        if not spec.project or not await asyncio.to_thread(Path(spec.project).is_dir):
            raise Invalid(f"{spec.env} has no project directory {spec.project!r}", hint="give one that exists")
        state = (spec.project, spec.stamp or await asyncio.to_thread(stamp, Path(spec.project)))
        found = self._digests.get(state)
        if found is None:
            packed = await asyncio.to_thread(_packed, Path(spec.project))
            if len(self._digests) >= _KNOWN:
                self._digests.clear()
            found = self._digests[state] = hashlib.sha256(packed).hexdigest()
        return found

    async def _send(self, spec: SandboxSpec, digest: str) -> None:
        packed = await asyncio.to_thread(_packed, Path(spec.project))
        found = hashlib.sha256(packed).hexdigest()
        if found != digest:
            self._digests.clear()
            raise Invalid(f"the files of {spec.env} changed while it was to start", hint="try again")
        await self._service.ask("PUT", f"{PROJECT}/{digest}", type=Any, body=packed, timeout=_ENDING)


def _packed(root: Path) -> bytes:
    return archive.pack(project.read(root, config_required=False))


def _sandbox(held: Held) -> Sandbox:
    """A sandbox as its controller tells it; a stranger tells less."""
    if held.sandbox is not None:
        return held.sandbox
    known = {state.value.lower(): state for state in State if state is not State.PENDING}  # which is theirs for a start
    state = known.get(held.status.lower(), State.CREATING)
    env = held.env or Named()
    host = f"[{held.ip}]" if ":" in held.ip else held.ip
    return Sandbox(
        url=f"http://{host}:{_PORT}" if held.ip else "",
        id=held.id,
        state=state if held.ip or state is not State.RUNNING else State.CREATING,
        reason=held.reason,
        env=f"{env.name}@{env.version}" if env.version else env.name,
        created_at=moment(held.created_at, 0.0, "created_at") if held.created_at else 0.0,
    )
