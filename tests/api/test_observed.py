"""What an API server counts: of calls however odd, of starts that fail, of a store that is away."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv.api import observed
from aenv.api.gateway.places import Answered, Place
from aenv.api.observed import Observed, endpoint_of
from aenv.api.phases import laid_out
from aenv.engines.failing import FailingEngine, PaperEngine
from aenv.store import open_store
from aenv.web.logs import Lines
from aenv.web.metrics import Metrics
from tests.api.ground import ALICE, FragileStore, PaperShelf, Platform, service

parser = pytest.importorskip("prometheus_client.parser", reason="needs prometheus-client")
PLACE = Place("i-1", "unix:/nowhere", "ann", "a-token")
TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def read(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Samples by name and the values of their labels."""
    families = parser.text_string_to_metric_families(metrics.text())
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def answered(**changes: Any) -> Answered:
    fields: dict[str, Any] = {
        "place": PLACE,
        "service": "",
        "method": b"POST",
        "path": b"/mcp",
        "status": 200,
        "began": 10.0,
        "answered": 10.004,
        "ended": 10.005,
        "request_id": b"r",
        "trace": b"",
        "timing": b"",
    }
    return Answered(**(fields | changes))


@pytest.fixture
async def platform(tmp_path: Path, home: Path) -> AsyncIterator[Platform]:
    shelf = PaperShelf()
    shelf.on_paper("desk")
    shelf.on_paper("lamp")
    store = FragileStore(await open_store(f"sqlite:{tmp_path / 'store.db'}"))
    async with store, PaperEngine() as engine, service(store, engine, shelf, home) as found:
        yield found


async def eventually(look: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not look():
            await asyncio.sleep(0.01)


async def test_calls_are_counted_by_where_they_go_and_where_their_time_goes(platform: Platform) -> None:
    metrics = Metrics()
    watch = Observed(metrics, platform.instances.lives, platform.store)
    watch.answered(answered(timing=b"queue;dur=1, tool;dur=2"))
    watch.answered(answered(path=b"/tools/x", status=0))
    watch.answered(answered(method=b"GET", ended=9999.0))  # a stream that was open for hours
    watch.answered(answered(place=None, path=b"/no/where", status=999, method=b"BREW"))
    watch.answered(answered(timing=b"queue;dur=1, tool;dur=500"))  # a clock that is not ours
    watch.answered(answered(exposed=True))  # whose path is not one of ours
    found = read(metrics)
    assert found["aenv_api_mcp_requests_total", "POST", "/ports/{port}", "200"] == 1
    assert found["aenv_api_mcp_requests_total", "POST", "/mcp", "200"] == 2
    assert found["aenv_api_mcp_requests_total", "POST", "/tools/{name}", "left"] == 1
    assert found["aenv_api_mcp_requests_total", "other", "other", "9xx"] == 1
    assert found["aenv_api_mcp_request_duration_ms_count", "/mcp"] == 3
    assert found["aenv_api_mcp_request_duration_ms_sum", "/mcp"] == pytest.approx(5 + 4 + 5)
    assert found["aenv_api_mcp_part_duration_ms_sum", "/mcp", "gateway"] == pytest.approx(2)
    assert found["aenv_api_mcp_part_duration_ms_sum", "/mcp", "queue"] == 2
    assert found["aenv_api_mcp_part_duration_ms_sum", "/mcp", "tool"] == 502


async def test_a_calls_line_has_ids_and_no_token(platform: Platform) -> None:
    reading, writing = os.pipe()
    lines = Lines(writing)
    watch = Observed(Metrics(), platform.instances.lives, platform.store, lines=lines)
    watch.answered(answered(path=b"/tools/secret", trace=TRACE, service="s-1", timing=b"queue;dur=1, tool;dur=2"))
    watch.answered(answered(place=None, status=0, trace=b"nonsense"))
    await watch.close()
    assert await asyncio.to_thread(lines.flush, 60)
    first, second = map(json.loads, os.read(reading, 65536).splitlines())
    os.close(reading)
    os.close(writing)
    assert first.pop("time")
    assert first == {
        "level": "info",
        "logger": "aenv.gateway",
        "message": "POST /tools/{name} 200",
        "method": "POST",
        "endpoint": "/tools/{name}",
        "status": 200,
        "ms": 5.0,
        "sandbox_ms": 3.0,
        "request_id": "r",
        "instance": "i-1",
        "service": "s-1",
        "owner": "ann",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
    }
    assert (second["status"], "trace_id" in second, "instance" in second) == (0, False, False)


@given(st.binary(max_size=100))
@settings(max_examples=200, deadline=None)
def test_endpoints_are_few_whatever_is_asked_for(path: bytes) -> None:
    known = {*observed._EXACT.values(), *observed._BELOW.values(), "other"}
    assert endpoint_of(path) in known
    assert endpoint_of(b"/tools/" + path) in known
    assert len(known) < 20


async def test_environments_are_shown_by_name_up_to_a_bound(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observed, "MOST_ENVS", 1)
    metrics = Metrics()
    Observed(metrics, platform.instances.lives, platform.store)
    api = await platform.api("alice")
    for env in ("desk", "desk", "lamp"):
        assert (await api.create(env)).instance.status == "Running"
    found = read(metrics)
    assert found["aenv_api_active_instances", "desk", "Running", "instance"] == 2
    assert found["aenv_api_active_instances", "other", "Running", "instance"] == 1


async def test_starts_are_counted_with_their_phases(platform: Platform) -> None:
    metrics = Metrics()
    Observed(metrics, platform.instances.lives, platform.store)
    api = await platform.api("alice")
    assert (await api.create("desk")).instance.status == "Running"
    found = read(metrics)
    assert found["aenv_api_starts_total", "running"] == 1
    assert found["aenv_api_create_seconds_count",] == 1
    assert found["aenv_api_create_phase_seconds_count", "engine"] == 1


async def test_a_start_that_fails_is_counted_as_one(tmp_path: Path, home: Path) -> None:
    shelf, metrics = PaperShelf(), Metrics()
    shelf.on_paper("desk")
    async with FailingEngine() as engine, service(f"sqlite:{tmp_path / 'store.db'}", engine, shelf, home) as found:
        Observed(metrics, found.instances.lives, found.store)
        made = (await (await found.api(ALICE.owner)).create("desk")).instance
        assert made.status == "Failed"
        await eventually(lambda: ("aenv_api_starts_total", "failed") in read(metrics))
        assert ("aenv_api_create_seconds_count",) not in read(metrics)


async def test_a_store_that_is_away_is_seen_and_so_is_its_return(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observed, "EVERY", 0.02)
    monkeypatch.setattr(observed, "LAG", 0.02)
    metrics = Metrics()
    watch = Observed(metrics, platform.instances.lives, platform.store)
    await watch.start()
    assert isinstance(platform.store, FragileStore)
    await eventually(lambda: ("aenv_api_store_seconds_count",) in read(metrics))
    assert read(metrics)["aenv_api_store_up",] == 1
    platform.store.down = True
    await eventually(lambda: read(metrics)["aenv_api_store_up",] == 0)
    platform.store.down = False
    await eventually(lambda: read(metrics)["aenv_api_store_up",] == 1)
    await eventually(lambda: ("aenv_api_event_loop_lag_ms_count",) in read(metrics))
    await watch.close()


def test_phases_follow_one_another() -> None:
    seconds = {"hub": 1.0, "engine": 4.0, "queue": 0.5, "engine.import": 3.0, "engine.health": 2.0}
    assert list(laid_out(seconds, 100.0)) == [
        ("hub", 100.0, 101.0),
        ("engine", 101.0, 105.0),
        ("engine.import", 101.0, 104.0),
        ("engine.health", 104.0, 105.0),
        ("queue", 105.0, 105.5),
    ]
