"""Programs of trainers, in a virtual environment that each has of its own."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from benchmarks import venvs

from tests.peers.support import requirements

PATIENCE = 550


class Peer:
    """A trainer's virtual environment; the test is skipped where it is not made."""

    def __init__(self, name: str, folder: Path, version: str = "") -> None:
        self.name = name
        self.folder = folder
        if not venvs.is_made(requirements(name), with_package=True, version=version):
            pytest.skip(f"needs the virtual environment {name}: run 'make components'")
        self._python = venvs.python(requirements(name), with_package=True, version=version)
        self.scripts = self._python.parent
        """Where its programs are."""

    async def run(
        self, folder: Path, *line: str | Path, home: str | None = "home", **variables: str
    ) -> tuple[int | None, str, str]:
        """The exit code of a program, what it prints and what it complains of. Without a home it has the user's."""
        taken = {name: value for name, value in os.environ.items() if not name.startswith(("AENV_", "DUMMY_"))}
        own = {"AENV_HOME": str(self.folder / home)} if home else {}
        process = await asyncio.create_subprocess_exec(
            *(str(self._python), *map(str, line)),
            cwd=folder,
            env={**taken, **own, **variables},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            printed, complained = await asyncio.wait_for(process.communicate(), PATIENCE)
        finally:
            if process.returncode is None:
                process.kill()
        return process.returncode, printed.decode(), complained.decode()

    async def ran(self, folder: Path, *line: str | Path, **variables: str) -> str:
        """What a program prints that does not fail."""
        code, printed, complained = await self.run(folder, *line, **variables)
        assert code == 0, complained
        return printed

    async def told(self, folder: Path, *line: str | Path, **variables: str) -> Any:
        """The same, as the JSON of its last line: trainers print, too."""
        return json.loads((await self.ran(folder, *line, **variables)).splitlines()[-1])

    def is_checked(self) -> None:
        """``aenv train-check`` finds nothing wrong with it."""
        line = ("-m", "aenv", "train-check", self.name, "-o", "json")
        found: dict[str, Any] = json.loads(asyncio.run(self.ran(self.folder, *line)))
        assert [row["status"] for row in found["checks"]] == ["ok", "ok", "ok"], found
