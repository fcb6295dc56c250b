"""What a cache of pods knows of their ends, and which of two answers about one it believes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from aenv.engines.kubernetes import cache as caching
from aenv.engines.kubernetes import manifests, pods
from aenv.engines.kubernetes.access import Access
from aenv.engines.kubernetes.api import Cluster
from aenv.engines.kubernetes.cache import Cache
from aenv.engines.kubernetes.manifests import EXPIRES, FACTS, MAIN, Facts

NOW = 1_000_000.0


@pytest.fixture
def cache() -> Cache:
    return Cache(Cluster(Access("http://127.0.0.1:1")), "/pods", "", lambda name: None)


def told(name: str, version: int, ends: float | None = None, **status: Any) -> pods.Pod:
    """A pod, as a cluster writes it."""
    notes = {FACTS: msgspec.json.encode(Facts(id=name, env="e", created_at=NOW)).decode()}
    if ends is not None:
        notes[EXPIRES] = manifests.expiry(ends)
    meta = {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version), "annotations": notes}
    return pods.decode(msgspec.json.encode({"metadata": meta, "status": status}))


def ended(at: str) -> dict[str, Any]:
    """The status of one whose container ended then."""
    return {"containerStatuses": [{"name": MAIN, "state": {"terminated": {"exitCode": 1, "finishedAt": at}}}]}


def test_those_whose_time_is_over_are_due_until_they_are_gone(cache: Cache) -> None:
    for number in range(5):
        cache.note(told(f"p{number}", 1, NOW + number))
    cache.note(told("lasting", 1))
    assert cache.due(NOW - 1) == []
    assert sorted(cache.due(NOW + 2)) == ["p0", "p1", "p2"]
    assert sorted(cache.due(NOW + 2)) == ["p0", "p1", "p2"]
    cache.forget("p1", "uid-p1")
    assert sorted(cache.due(NOW + 2)) == ["p0", "p2"]


def test_a_time_that_was_put_off_does_not_count(cache: Cache) -> None:
    cache.note(told("p", 1, NOW))
    cache.note(told("p", 2, NOW + 60))
    assert cache.due(NOW + 59) == []
    assert cache.due(NOW + 60) == ["p"]
    cache.note(told("p", 3, NOW + 10))
    assert cache.due(NOW + 10) == ["p"]


def test_times_that_do_not_count_any_more_are_not_kept(cache: Cache) -> None:
    times = 3 * caching._SPARE
    for number in range(times):
        cache.note(told("p", number, NOW + number))
    assert len(cache._ends) <= caching._SPARE + 2
    assert cache.due(NOW + times - 2) == []
    assert cache.due(NOW + times - 1) == ["p"]


def test_those_that_ended_are_known_by_when(cache: Cache) -> None:
    cache.note(told("early", 1, **ended("2026-01-01T00:00:00Z")))
    cache.note(told("late", 1, **ended("2026-01-01T00:10:00Z")))
    cache.note(told("alive", 1))
    middle = pods.moment("2026-01-01T00:05:00Z")
    assert cache.over_before(middle) == ["early"]
    assert sorted(cache.over_before(middle + 3600)) == ["early", "late"]
    cache.forget("early", "uid-early")
    assert cache.over_before(middle) == []


def test_an_answer_that_was_overtaken_is_not_believed(cache: Cache) -> None:
    cache.note(told("p", 9, podIP="10.0.0.7"))
    cache.note(told("p", 3))  # what its create was answered, which took longer than the news
    entry = cache.get("p")
    assert entry is not None
    assert entry.pod.status.pod_ip == "10.0.0.7"
    cache.note(told("p", 10, podIP="10.0.0.8"))
    entry = cache.get("p")
    assert entry is not None
    assert entry.pod.status.pod_ip == "10.0.0.8"


def test_that_all_of_it_began_is_remembered(cache: Cache) -> None:
    running, waiting = ({"containerStatuses": [{"name": MAIN, "state": {how: {}}}]} for how in ("running", "waiting"))
    for number, (status, began) in enumerate([(waiting, False), (running, True), (waiting, True)], 1):
        cache.note(told("p", number, **status))
        entry = cache.get("p")
        assert entry is not None
        assert entry.began is began
