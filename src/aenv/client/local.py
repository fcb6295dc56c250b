"""Sandboxes on this machine with nothing to start: a project run by a process of our own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from aenv import config, http, project
from aenv.errors import AEnvError, InvalidConfig, NotFound, StartFailed
from aenv.models import Sandbox, SandboxSpec

STOP = 2.0
"""Seconds between TERM and KILL."""


def embedded(spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
    """The project in the current directory, when it bears the name that is asked for."""
    try:
        found = project.read(Path.cwd())
    except InvalidConfig as exc:
        raise NotFound(
            f"no environment {str(spec.env)!r} is known here: {exc}",
            hint="run this in the project's directory, or start it with 'aenv run' and set DUMMY_INSTANCE_IP",
        ) from exc
    if found.name != spec.env.name or spec.env.version not in (None, "latest", found.version):
        raise NotFound(
            f"no environment {str(spec.env)!r} is known here; this directory holds {found.name}@{found.version}",
            hint="run this in the project's directory, or start it with 'aenv run' and set DUMMY_INSTANCE_IP",
        )
    variables = {**found.environment_variables, **spec.environment_variables}
    if spec.seed is not None:
        variables["AENV_SEED"] = str(spec.seed)
    if spec.datasource:
        variables["AENV_DATASOURCE"] = spec.datasource
    return _sandbox(found.root, arguments=spec.arguments, environment_variables=variables)


@asynccontextmanager
async def _sandbox(
    path: Path, *, arguments: Sequence[str], environment_variables: Mapping[str, str]
) -> AsyncIterator[Sandbox]:
    async with run_project(path, arguments=arguments, environment_variables=environment_variables) as url:
        yield Sandbox(url=url, id=f"local-{url.rpartition(':')[2]}")


@asynccontextmanager
async def run_project(
    path: Path,
    *,
    arguments: Sequence[str] = (),
    environment_variables: Mapping[str, str] | None = None,
    startup_timeout: float = 60.0,
) -> AsyncIterator[str]:
    """Run a project in a process of its own; its URL, once it is ready. When it fails, what it logged is the error."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "aenv.runtime", str(path), "--port", str(port), "--", *arguments]
    process = await asyncio.create_subprocess_exec(
        *command,
        env=config.child_environment(environment_variables or {}),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stderr is not None
    lines: list[str] = []
    reader = asyncio.create_task(_collect(process.stderr, lines))
    try:
        await _until_ready(process, url, startup_timeout, lines, reader)
        yield url
    finally:
        await asyncio.shield(_stop(process, reader))


async def _collect(stream: asyncio.StreamReader, lines: list[str]) -> None:
    while line := await stream.readline():
        lines.append(line.decode(errors="replace"))
        del lines[:-200]


async def _until_ready(
    process: asyncio.subprocess.Process,
    url: str,
    patience: float,
    lines: list[str],
    reader: asyncio.Task[None],
) -> None:
    try:
        async with asyncio.timeout(patience):
            while process.returncode is None:
                try:
                    if (await http.request("GET", url, "/health", retries=0)).status == 200:
                        return
                except AEnvError:
                    pass
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise StartFailed(f"the project is not ready after {patience:g} s\n{''.join(lines)}") from None
    await reader
    raise StartFailed(f"the project ended with exit code {process.returncode}\n{''.join(lines)}".rstrip())


async def _stop(process: asyncio.subprocess.Process, reader: asyncio.Task[None]) -> None:
    for number, patience in ((signal.SIGTERM, STOP), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            await asyncio.wait_for(process.wait(), patience)
            break
        except TimeoutError:
            continue
    await process.wait()
    reader.cancel()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
