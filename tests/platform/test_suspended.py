"""Instances that nobody calls stand still on a platform, too: calls come through the gateway, and leases hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aenv.engines.process import powers
from tests.platform.support import Platform, eventually, platform, variant

pytestmark = pytest.mark.xdist_group("platform-suspended")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    if why := powers.probe().no_suspending:
        pytest.skip(f"needs a freezer: {why}")
    with platform() as found:
        found.push(variant(tmp_path_factory.mktemp("projects"), "quiet", timeouts={"suspend": "0.2"}))
        yield found


def held(served: Platform) -> int:
    """How many stand still."""
    found: list[str] = []
    for file in served.home.glob("run/*/spawner.json"):  # the hub has one, too
        groups = json.loads(file.read_text())["control_groups"]
        root = Path(groups.get("unified") or groups[""])
        found += [events.read_text() for events in root.glob("i*/cgroup.events")]
    return sum("frozen 1" in text and "populated 1" in text for text in found)


def test_a_call_through_the_gateway_wakes_an_instance(served: Platform):
    id = served.create("quiet")["id"]
    for number in range(1, 6):
        eventually("it to stand still", lambda: held(served) == 1)
        assert served.ask("GET", f"/env-instance/{id}").data["status"] == "Running"
        assert served.call(id, "POST", "/tools/put", {"thing": "x"}).data == number
    eventually("it to stand still", lambda: held(served) == 1)
    assert served.aenv("instance", "exec", id, "--", "echo", "woken").stdout == "woken\n"
    eventually("it to stand still", lambda: held(served) == 1)
    assert served.ask("DELETE", f"/env-instance/{id}").status == 200
    eventually("its end", lambda: held(served) == 0)


def test_a_lease_ends_an_instance_that_stands_still(served: Platform):
    left, kept = (served.create("quiet", lease=lease)["id"] for lease in (4, 600))
    eventually("them to stand still", lambda: held(served) == 2)
    over = eventually("its end", lambda: _over(served, left))
    assert "heard of" in over["reason"]
    assert served.call(kept, "POST", "/tools/look", {}).status == 200


def _over(served: Platform, id: str) -> dict[str, str]:
    found: dict[str, str] = served.ask("GET", f"/env-instance/{id}").data
    return found if found["status"] == "Terminated" else {}
