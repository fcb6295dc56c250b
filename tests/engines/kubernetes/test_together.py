"""Several environments as one, and several agents in one, as pods."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.kubernetes.lab import PATIENCE, Harbour
from tests.engines.together import check_three_levels, check_two_agents

pytestmark = pytest.mark.xdist_group("kubernetes")


async def test_three_levels(harbour: Harbour, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await check_three_levels(harbour.engine(), monkeypatch, tmp_path, PATIENCE)


async def test_two_agents(harbour: Harbour, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await check_two_agents(harbour.engine(), monkeypatch, tmp_path, PATIENCE)
