"""Where the time of a call went: in the answer's ``Server-Timing``, and in the history."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from aenv.runtime.context import Context
from aenv.runtime.functions import Function, Raised, Timing
from aenv.runtime.registry import Mark
from aenv.tracing import parse_timing
from tests.runtime.test_mcp import call
from tests.runtime.wire import Session, modern, send
from tests.support import Sandbox, sandbox


def timing(headers: dict[str, str]) -> tuple[float, float]:
    """Milliseconds of waiting and of running."""
    found = parse_timing(headers["server-timing"].encode())
    assert found is not None
    return found


def test_every_call_of_a_function_tells(lab: Sandbox) -> None:
    replies = [
        modern(lab.port, "tools/call", call("sleep", {"seconds": 0.05})),
        Session(lab.port).request("tools/call", call("sleep", {"seconds": 0.05})),
        send(lab.port, "POST", "/tools/sleep", {"seconds": 0.05}),
    ]
    for reply in replies:
        queue, tool = timing(reply.headers)
        assert tool >= 40  # timers of event loops are coarse
        assert queue >= 0
    for path, body in (("/task/reward?name=score", {"answer": "42"}), ("/functions/shout", {"text": "a"})):
        queue, tool = timing(send(lab.port, "POST", path, body).headers)
        assert (queue >= 0, tool >= 0) == (True, True)
    failed = modern(lab.port, "tools/call", call("fail", {"message": "broken"}))
    assert timing(failed.headers)
    assert timing(send(lab.port, "POST", "/functions/shout", {"text": "a"}).headers)


def test_what_calls_no_function_has_nothing_to_tell(lab: Sandbox) -> None:
    for reply in (
        modern(lab.port, "tools/list", {}),
        modern(lab.port, "tools/call", call("no-such-tool", {})),
        send(lab.port, "POST", "/tools/add", {"a": "x"}),
        send(lab.port, "GET", "/info"),
    ):
        assert "server-timing" not in reply.headers


def test_an_answer_that_is_given_again_tells_the_same(lab: Sandbox) -> None:
    headers = {"AEnv-Call-Id": "timed-once"}
    first, again = (send(lab.port, "POST", "/tools/add", {"a": 1}, headers) for _ in range(2))
    assert first.headers["server-timing"] == again.headers["server-timing"]


def test_the_history_has_it(lab: Sandbox) -> None:
    send(lab.port, "POST", "/tools/sleep", {"seconds": 0.05})
    send(lab.port, "POST", "/exec", {"command": ["true"]})
    found: list[dict[str, Any]] = send(lab.port, "GET", "/history?last=2").json["data"]
    assert 0.04 <= found[0]["tool"] <= found[0]["seconds"]
    assert found[0]["queue"] >= 0
    assert found[1]["queue"] is found[1]["tool"] is None


def test_a_call_that_took_too_long_tells_whether_it_waited_or_ran(tmp_path: Path) -> None:
    config = {"name": "slow", "version": "1.0.0", "deployConfig": {"timeouts": {"call": 1}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "custom_env.py").write_text(
        "import time\nfrom aenv import register_tool\n\n\n@register_tool\ndef hang() -> None:\n    time.sleep(3600)\n"
    )
    with sandbox(tmp_path, variables={"AENV_THREADS": "1"}) as running:
        first = send(running.port, "POST", "/tools/hang", {})
        second = send(running.port, "POST", "/tools/hang", {})
    assert first.status == second.status == 504
    assert timing(first.headers)[1] > 0
    assert "in wait for a thread" in second.json["error"]
    queue, tool = timing(second.headers)
    assert (queue >= 900, tool) == (True, 0)


async def test_a_function_that_returns_an_awaitable_is_timed_to_its_end() -> None:
    async def later() -> str:
        await asyncio.sleep(0.02)
        return "done"

    async def fail() -> None:
        raise ValueError("no")

    def first() -> Any:
        return later()

    for function in (later, first):
        taken = Timing()
        assert await Function(Mark("tool", function, "f", {})).call({}, Context(), taken) == "done"
        assert taken.tool >= 0.01
    taken = Timing()
    with pytest.raises(Raised):
        await Function(Mark("tool", fail, "f", {})).call({}, Context(), taken)
    assert taken.header()[1].startswith(b"queue;dur=")
