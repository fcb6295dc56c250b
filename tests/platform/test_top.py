"""The live view: what it says of instances that work, and to whom."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.platform.support import Platform, platform


@pytest.fixture(scope="module")
def served() -> Iterator[Platform]:
    with platform() as found:
        yield found


@pytest.fixture(scope="module")
def busy(served: Platform) -> Any:
    """An instance that did three calls through the gateway."""
    wanted = {"envName": "mini-terminal", "labels": {"experiment": "first"}}
    made = served.ask("POST", "/env-instance", wanted, headers={"Prefer": "wait=60"}).data
    for _ in range(3):
        body = {"command": "head -c 20000000 /dev/urandom | md5sum"}
        answer = served.call(made["id"], "POST", "/tools/execute_command", body)
        assert answer.status == 200, answer.body
    return made


def test_it_says_what_an_instance_uses_and_how_often_it_was_called(served: Platform, busy: Any) -> None:
    found = json.loads(served.aenv("top", "--once", "-o", "json").stdout)
    [item] = [item for item in found["items"] if item["id"] == busy["id"]]
    assert item["env"].startswith("mini-terminal@")
    assert item["experiment"] == "first"
    assert item["calls"] == 3
    assert item["memory"] > 1_000_000
    assert item["cpu_seconds"] > 0
    assert found["counts"]["Running"] >= 1


def test_where_there_is_no_terminal_it_is_drawn_once(served: Platform, busy: Any) -> None:
    shown = served.aenv("instance", "top").stdout
    [line] = [line for line in shown.splitlines() if line.startswith(busy["id"])]
    assert " first " in line
    assert " MB " in line
    assert "\x1b" not in shown


def test_another_owner_sees_nothing_of_it(served: Platform, busy: Any) -> None:
    other = served.ask("POST", "/token", {"owner": "somebody", "scopes": ["run"]}).data["token"]
    answer = served.ask("GET", "/top", token=other)
    assert answer.data["loads"] == []
    assert answer.data["counts"] == {}
    assert served.ask("GET", "/top?owner=local", token=other).status == 403


def test_more_than_a_page_is_refused(served: Platform) -> None:
    answer = served.ask("GET", "/top?most=100000")
    assert answer.status == 422
    assert "most" in answer.json["message"]
