"""Containers that do not end with an engine that was killed, though it has no state: somebody finds them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aenv.engines.docker import sweeping
from aenv.engines.docker.containers import PROCESS
from aenv.engines.docker.keeping import is_dead
from tests.engines.docker.lab import Harbour, killed, python

DEAF = (
    "import os",
    "os.environ.pop('AENV_UNTIL_EOF', None)",
    "os.mkdir('/tmp/app')",
    "text = 'import aenv\\n@aenv.register_tool\\ndef nothing() -> None: ...\\n'",
    "open('/tmp/app/tools.py', 'w').write(text)",
    "os.execvp('python3', ['python3', '-m', 'aenv.runtime', '/tmp/app'])",
)
"""What does not hear that its engine is gone."""


@asynccontextmanager
async def outlived(harbour: Harbour, home: Path) -> AsyncIterator[str]:
    """The name of an engine in that home that was killed, and whose one container runs on."""
    async with harbour.image(*python(*DEAF)) as image:
        name = await killed(harbour, home, f"of_image({image!r})")
        container = f"aenv-{name}-one"
        try:
            found = await harbour.daemon.ask("GET", f"/containers/{container}/json")
            assert found["State"]["Running"]
            told = found["Config"]["Labels"][PROCESS]
            assert is_dead(told)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(sweeping, "_ELSEWHERE", -60.0)
                patched.setattr(sweeping.keeping, "is_dead", lambda text: text == told)  # not that of other tests
                yield name
        finally:
            for left in await harbour.left(f"aenv.engine={name}"):
                path = f"/containers{left}" if left.startswith("/") else f"/volumes/{left}"
                await harbour.daemon.ask("DELETE", path, query={"force": "1"})


@pytest.mark.parametrize("where", ["here", "elsewhere"])
async def test_the_next_engine_removes_them(harbour, home, where):
    async with outlived(harbour, home if where == "here" else home / "another") as name:
        async with harbour.engine() as engine:
            await engine.find()
            await harbour.gone(label=f"aenv.engine={name}")


async def test_so_does_a_sweep(harbour, home):
    async with outlived(harbour, home / "another") as name:
        found = await sweeping.sweep(harbour.daemon, unused=1e9, dry_run=True)
        assert {left.why for left in found if left.engine == name} >= {"its program is gone"}
        assert await harbour.left(f"aenv.engine={name}")
        await sweeping.sweep(harbour.daemon, unused=1e9)
        assert await harbour.left(f"aenv.engine={name}") == []
