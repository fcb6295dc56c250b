"""Several environments as one, and several agents in one, as containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.docker.lab import PATIENCE, Harbour
from tests.engines.together import check_three_levels, check_two_agents


async def test_three_levels(harbour: Harbour, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await check_three_levels(harbour.engine(), monkeypatch, home, PATIENCE)


async def test_two_agents(harbour: Harbour, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await check_two_agents(harbour.engine(), monkeypatch, home, PATIENCE)
