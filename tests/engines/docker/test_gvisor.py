"""Containers that have a kernel of their own, by gVisor."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.engines.docker.lab import call, own_daemon, probe


async def test_a_sandbox_has_a_kernel_of_its_own(dockerd: str, home: Path) -> None:
    if (runsc := shutil.which("runsc")) is None:
        pytest.skip("not installed: runsc, of gVisor")
    async with own_daemon(dockerd, "--add-runtime", f"runsc={runsc}") as (_, harbour):
        async with harbour.engine(runtime="runsc") as engine:
            made = await engine.create("one", probe())
            assert await call(made, "echo", text="inside") == "inside"
            code, kernel = await harbour.run(engine, "one", "uname", "-r")
            assert (code, kernel.strip() != os.uname().release) == (0, True)
            await engine.delete("one")
            assert await harbour.left() == []
