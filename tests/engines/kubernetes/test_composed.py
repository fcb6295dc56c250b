"""Environments that depend on others, as pods."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.composing import check_three_levels
from tests.engines.kubernetes.lab import PATIENCE, Harbour

pytestmark = pytest.mark.xdist_group("kubernetes")


async def test_three_levels(harbour: Harbour, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await check_three_levels(harbour.engine(), monkeypatch, tmp_path, PATIENCE)
