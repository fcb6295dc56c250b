"""The conformance list on a real cluster."""

from __future__ import annotations

import pytest

from aenv.engines import conformance
from tests.engines.kubernetes.lab import PATIENCE, Harbour

pytestmark = pytest.mark.xdist_group("kubernetes")


async def test_the_engine_keeps_every_promise(harbour: Harbour, busybox_image: str) -> None:
    async with harbour.engine() as engine:
        results = await conformance.run(engine, another=harbour.engine, limit=PATIENCE, at_once=4, second=busybox_image)
        assert {result.name: result.detail for result in results if result.status == "fail"} == {}
        skipped = {result.name for result in results if result.status == "skip"}
        assert {"used", "datasource", "datasource-read-only", "volume-is-full"} == skipped
        assert await engine.find() == []
