"""An engine on plain processes: small, portable, and not isolated. It serves where the process engine's parts are
missing, as on macOS, and docs/guides/write-an-engine.md walks through it."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from aenv import config, http
from aenv.cleanup import finish
from aenv.engines import usage
from aenv.engines.base import Engine, Output, Used
from aenv.engines.stages import Stages
from aenv.errors import AEnvError, Conflict, Invalid, NotFound, SandboxLost, Unsupported
from aenv.models import Sandbox, SandboxSpec, State
from aenv.runtime.hidden import Hidden, Printing

STOP = 2.0
"""Seconds between TERM and KILL."""
MOST_OUTPUT = 1024 * 1024
KEPT_FOR = 600.0
"""Seconds that a sandbox is remembered after its end."""
_READY = re.compile(rb"serving \d+ tools at (\S+)/mcp")


class _Box(asyncio.Protocol):
    """One sandbox. As a protocol, it takes what the process prints."""

    def __init__(self, id: str, spec: SandboxSpec) -> None:
        self.id, self.spec = id, spec
        self.state, self.reason, self.url, self.boot = State.CREATING, "", "", ""
        self.created_at = time.time()
        self.stages = Stages()
        self.expires_at: float | None = None
        self.work = Path()
        self.life: asyncio.Task[None]
        self.alarm: asyncio.TimerHandle | None = None
        self.listening, self.silent = asyncio.Event(), asyncio.Event()
        self.start, self.kept = 0, bytearray()
        self.printing: Printing | None = None
        self.hide(Hidden.of(spec.secrets, spec.environment_variables))

    def hide(self, hidden: Hidden | None) -> None:
        if hidden is not None:
            self.printing = Printing(hidden)

    def data_received(self, data: bytes) -> None:
        self.kept += data if self.printing is None else self.printing.pass_on(data)
        if not self.url and (found := _READY.search(self.kept)):
            self.url = found[1].decode()
            self.listening.set()
        if (over := len(self.kept) - MOST_OUTPUT) > 0:
            del self.kept[:over]
            self.start += over

    def connection_lost(self, exc: Exception | None) -> None:
        if self.printing is not None:
            self.kept += self.printing.end()
        self.silent.set()

    def end(self, state: State, reason: str) -> None:
        self.stages.end()
        if not self.state.over:
            self.state, self.reason = state, reason

    @property
    def sandbox(self) -> Sandbox:
        return Sandbox(
            url=self.url,
            id=self.id,
            state=self.state,
            reason=self.reason,
            env=str(self.spec.env),
            owner=self.spec.owner,
            labels=self.spec.labels,
            boot=self.boot,
            created_at=self.created_at,
            expires_at=self.expires_at,
            phases=self.stages.seconds,
        )


class PlainEngine(Engine):
    """Each sandbox is a process with a copy of the project. It ends with the process that made it."""

    name = "plain"
    cannot: Mapping[str, str] = {
        "restart": "a sandbox ends with the process that made it",
        "limits": "plain processes have no limits",
        "volumes": "nothing can be mounted for a plain process",
        "datasource-read-only": "the data is as writable as it is on this machine",
        "tmp-apart": "all processes have the same /tmp",
        "processes-apart": "all processes see each other",
        "state-goes-elsewhere": "what a process may write is not its own alone",
    }

    def __init__(self) -> None:
        self._boxes: dict[str, _Box] = {}

    # The four verbs

    async def create(self, id: str, spec: SandboxSpec) -> Sandbox:
        box = self._boxes.get(id)
        if box is None:
            self.check_second(spec.second)
            self.check_resources(spec.resources)
            self.check_fork(spec.forked_from)
            _check(spec)
            box = self._boxes[id] = _Box(id, spec)
            box.life = asyncio.create_task(self._live(box))
            if spec.ttl is not None and not spec.lasting:
                self._let_live(box, spec.ttl)
        elif box.state.over:
            raise Conflict(f"{id} has ended: {box.reason}", hint="use another id")
        return box.sandbox

    async def get(self, id: str) -> Sandbox:
        return self._box(id).sandbox

    async def find(self, labels: Mapping[str, str] | None = None) -> list[Sandbox]:
        wanted = (labels or {}).items()
        return [box.sandbox for box in self._boxes.values() if wanted <= box.spec.labels.items()]

    async def delete(self, id: str) -> None:
        if box := self._boxes.get(id):
            box.end(State.TERMINATED, "it was deleted")
            box.life.cancel()
            await asyncio.wait({box.life})
            self._forget(box)

    async def close(self) -> None:
        await asyncio.gather(*(self.delete(id) for id in list(self._boxes)))

    # A life: from a copy of the project to the end of the process

    async def _live(self, box: _Box) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="aenv-plain-", ignore_cleanup_errors=True) as folder:
                box.work = Path(os.path.realpath(folder))  # noqa: ASYNC240
                box.end(State.FAILED, await self._run(box))
        except OSError as exc:
            box.end(State.FAILED, str(exc))
        finally:
            asyncio.get_running_loop().call_later(KEPT_FOR, self._forget, box)

    async def _run(self, box: _Box) -> str:
        """Run the process to its end, and say how it ended."""
        box.stages.begin("spawn")
        await self._copy(box)
        read, write = os.pipe()
        with ExitStack() as stack:
            output = stack.enter_context(os.fdopen(write, "wb"))
            pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: box, os.fdopen(read, "rb"))
            stack.callback(pipe.close)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "aenv.runtime", ".", "--port", "0", "--until-eof", "--", *box.spec.arguments),
                cwd=box.work,
                env=_variables(box) | {"AENV_OWNER_TOKEN_SHA256": box.spec.owner_token_sha256 or ""},
                stdin=asyncio.subprocess.PIPE,  # closes when this process ends, and with it the sandbox
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            output.close()
            box.stages.begin("import")
            becoming_ready = asyncio.create_task(self._become_ready(box))
            try:
                code = await process.wait()
            finally:
                becoming_ready.cancel()
                await finish(_stop(process, box.id))
            with suppress(TimeoutError):
                await asyncio.wait_for(box.silent.wait(), STOP)
        how = f"it ended with exit code {code}" if code >= 0 else f"signal {-code} ended it"
        return f"{how}; it printed last:\n{box.kept[-4096:].decode(errors='replace')}"

    async def _copy(self, box: _Box) -> None:
        # To its end, also when cancelled: a thread that still writes would fill a directory that is being removed.
        await finish(asyncio.to_thread(_copy, box.spec.project, box.work))

    async def _become_ready(self, box: _Box) -> None:
        """RUNNING is when the author's own check says so, not when a port is open."""
        await box.listening.wait()
        box.stages.begin("health")
        while box.state is State.CREATING:
            with suppress(AEnvError):
                answer = await http.request("GET", box.url, "/health", retries=0)
                if answer.status == 200:
                    box.state, box.boot = State.RUNNING, answer.headers.get(b"aenv-boot", b"").decode()
                    box.stages.end()
            await asyncio.sleep(0.02)

    def _let_live(self, box: _Box, ttl: float) -> None:
        if box.alarm is not None:
            box.alarm.cancel()
        box.expires_at = time.time() + ttl
        box.alarm = asyncio.get_running_loop().call_later(ttl, self._time_is_over, box)

    def _time_is_over(self, box: _Box) -> None:
        box.end(State.TERMINATED, "its time to live is over")
        box.life.cancel()

    def _forget(self, box: _Box) -> None:
        if box.alarm is not None:
            box.alarm.cancel()
        if self._boxes.get(box.id) is box:
            del self._boxes[box.id]

    def _box(self, id: str) -> _Box:
        if id not in self._boxes:
            raise NotFound(f"there is no sandbox {id!r}")
        return self._boxes[id]

    # Powers

    async def output(self, id: str, start: int) -> Output:
        box = self._box(id)
        begin = max(start, box.start)
        return Output(begin, bytes(box.kept[begin - box.start :]))

    async def used(self, id: str) -> Used:
        box = self._box(id)
        if box.state.over:
            raise SandboxLost(f"{id} has ended: {box.reason}")
        if sys.platform != "linux":
            raise self._cannot("tell what a sandbox uses")
        pids = await asyncio.to_thread(lambda: list(_belonging_to(id)))
        return Used(usage.processor(pids), usage.memory(pids))

    async def update(self, id: str, *, ttl: float) -> Sandbox:
        box = self._box(id)
        if box.state.over:
            raise SandboxLost(f"{id} has ended: {box.reason}")
        if not box.spec.lasting:
            self._let_live(box, ttl)
        return box.sandbox

    async def hide(self, id: str, secrets: Mapping[str, str]) -> None:
        self._box(id).hide(Hidden.of(secrets, secrets))


def _check(spec: SandboxSpec) -> None:
    if not spec.project or not os.path.isdir(spec.project):
        raise Invalid(f"{spec.project!r} is not a directory", hint="give the path of one on this machine")
    if spec.datasource and not os.path.exists(spec.datasource):
        raise Invalid(f"there is no datasource {spec.datasource!r}", hint="give a path of this machine")
    if spec.volumes:
        hint = "use the process engine as root on Linux"
        raise Unsupported("the plain engine cannot keep volumes: nothing can be mounted for a plain process", hint=hint)


def _copy(source: str, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)


def _variables(box: _Box) -> dict[str, str]:
    """The spec's, over those of this process, and what the runtime asks for."""
    spec = box.spec
    told = {"AENV_INSTANCE_ID": box.id, "AENV_DATASOURCE": spec.datasource, "PYTHONUNBUFFERED": "1"}
    told["AENV_SECRETS"] = ",".join(spec.secrets)
    if spec.warm:
        told["AENV_WARM"] = "1"
    if spec.seed is not None:
        told["AENV_SEED"] = str(spec.seed)
    return config.child_environment({**spec.environment_variables, **told})


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


async def _stop(process: asyncio.subprocess.Process, id: str) -> None:
    """TERM, some patience, KILL; then what its tools left running, which may have left its group."""
    _signal(process, signal.SIGTERM)
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), STOP)
    _signal(process, signal.SIGKILL)
    await process.wait()
    while left := list(_belonging_to(id)):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.01)


def _belonging_to(id: str) -> Iterator[int]:
    """The processes that inherited this sandbox's name. Linux only."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if f"AENV_INSTANCE_ID={id}\0".encode() in file.read_bytes():
                yield int(file.parent.name)
