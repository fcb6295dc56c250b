"""Environments that depend on others, as containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.composing import check_three_levels
from tests.engines.docker.lab import PATIENCE, Harbour


async def test_three_levels(harbour: Harbour, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await check_three_levels(harbour.engine(), monkeypatch, home, PATIENCE)
