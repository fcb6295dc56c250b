"""A project served on a port by a process of its own, for commands that test it as its users will see it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from aenv import config, project
from aenv.cleanup import finish
from aenv.client.local import embedded
from aenv.errors import StartFailed

STOP = 2.0
"""Seconds between TERM and KILL."""
_LONGEST_LINE = 1024 * 1024
_READY = re.compile(r"serving \d+ tools at (\S+)/mcp")


@asynccontextmanager
async def run_project(
    path: Path,
    *,
    arguments: Sequence[str] = (),
    environment_variables: Mapping[str, str] | None = None,
    startup_timeout: float = 60.0,
) -> AsyncIterator[str]:
    """Run a project in a process of its own, with what it depends on; its URL, once it is ready. When it fails, what it
    logged is the error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "aenv.runtime", str(path), "--port", "0", "--until-eof", "--", *arguments),
        env=config.child_environment(environment_variables or {}),
        stdin=asyncio.subprocess.PIPE,  # closes when this process ends, however it ends, and with it the sandbox
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    log = _Log(process)
    try:
        url = await log.ready(startup_timeout)
        async with embedded.accompanied(project.read(path, config_required=False), url):
            yield url
    finally:
        await finish(_stop(process, log))


class _Log:
    """What a sandbox's process prints: the line that says it is ready, and the last lines for when it is not."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._lines: deque[str] = deque(maxlen=200)
        self._url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process.stdout is not None
        rest = b""
        while chunk := await self._process.stdout.read(65536):
            *whole, rest = (rest + chunk)[-_LONGEST_LINE:].split(b"\n")
            for line in whole:
                self._lines.append(line.decode(errors="replace"))
                if not self._url.done() and (found := _READY.search(self._lines[-1])):
                    self._url.set_result(found[1])
        self._lines.append(rest.decode(errors="replace"))
        if not self._url.done():
            self._url.cancel()

    async def ready(self, patience: float) -> str:
        await asyncio.wait((self._url, self._reading), timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        if self._url.done() and not self._url.cancelled():
            return self._url.result()
        if not self._reading.done():
            raise StartFailed(f"the project is not ready after {patience:g} s\n{self._text}")
        raise StartFailed(f"the project ended with exit code {await self._process.wait()}\n{self._text}")

    @property
    def _text(self) -> str:
        return "\n".join(self._lines).rstrip()

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.wait((self._reading,))


async def _stop(process: asyncio.subprocess.Process, log: _Log) -> None:
    for number, patience in ((signal.SIGTERM, STOP), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            await asyncio.wait_for(process.wait(), patience)
            break
        except TimeoutError:
            continue
    with suppress(ProcessLookupError):  # what its tools left running
        os.killpg(process.pid, signal.SIGKILL)
    await log.close()
