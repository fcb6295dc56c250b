"""The base image, built on one such as python:slim, which has no byte code."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from scripts import base_image as building

from aenv.engines.docker.daemon import Daemon, demultiplex
from aenv.errors import NotFound
from tests import daemons

IMPORTS = (
    "import aenv.runtime.__main__, aenv.runtime.validation, pydantic.plugin._loader, uvloop, sqlite3, xml.dom.minidom"
)


@asynccontextmanager
async def ended(daemon: Daemon, image: str, *command: str) -> AsyncIterator[tuple[str, str]]:
    """A container that ran a command as root: its place, and what it printed."""
    body = {"Image": image, "Entrypoint": list(command), "Cmd": [], "User": "0", "NetworkDisabled": True}
    place = f"/containers/{(await daemon.ask('POST', '/containers/create', body=body))['Id']}"
    try:
        await daemon.ask("POST", f"{place}/start")
        assert (await daemon.ask("POST", f"{place}/wait"))["StatusCode"] == 0
        printed = await daemon.fetch(f"{place}/logs", query={"stdout": "1", "stderr": "1"}, most=16 * 1024 * 1024)
        yield place, b"".join(piece for _, piece in demultiplex(printed)).decode(errors="replace")
    finally:
        await daemon.ask("DELETE", place, query={"force": "1"})


@pytest.mark.xdist_group("docker-base")
async def test_nothing_is_compiled_when_a_sandbox_starts(dockerd: str) -> None:
    daemon = Daemon(dockerd)
    slim, built = (f"aenv-test-{name}-{secrets.token_hex(6)}" for name in ("slim", "base"))
    debian = await daemons.debian_on(daemon)
    try:
        async with ended(daemon, debian, "find", "/", "-xdev", "-name", "*.pyc", "-delete") as (place, _):
            query = {"container": place.rpartition("/")[2], "repo": slim}
            await daemon.ask("POST", "/commit", query=query)
        await building.build(daemon, base=slim, tags=[built])
        async with ended(daemon, built, "python", "-B", "-v", "-c", IMPORTS) as (_, said):
            found = re.findall(r"(?m)^# code object from '?(.*?)'?$", said)
            assert len(found) > 200
            assert not [path for path in found if not path.endswith(".pyc")]
    finally:
        for name in (built, slim):
            with suppress(NotFound):
                await daemon.ask("DELETE", f"/images/{name}", query={"force": "1"})
