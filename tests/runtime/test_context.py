"""What an author's function may ask about its sandbox, and what it tells its caller."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from aenv.runtime.context import Context, Instance, silent


class Listener:
    """A caller that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, method: str, parameters: dict[str, Any]) -> None:
        self.heard.append((method, parameters))


class DeafListener:
    """A caller to whom nothing can be sent."""

    def __call__(self, method: str, parameters: dict[str, Any]) -> None:
        raise ValueError("this cannot be written")


def test_a_context_shows_the_instance() -> None:
    instance = Instance("i-1", "shop", "1.2.3", {"KEY": "value"}, ["--x"], "/data", 7, Path("/work"))
    context = Context(instance)
    assert {name: getattr(context, name) for name in Instance._fields} == instance._asdict()


def test_a_context_can_be_made_in_a_unit_test() -> None:
    context = Context()
    assert (context.instance_id, context.seed, context.arguments) == ("local", None, ())
    context.progress(1, 2, "half")
    context.logger.info("nobody listens")


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ((1,), {"progress": 1}),
        ((1, 2), {"progress": 1, "total": 2}),
        ((0.5, 0, ""), {"progress": 0.5, "total": 0, "message": ""}),
        ((3, None, "three"), {"progress": 3, "message": "three"}),
    ],
)
@pytest.mark.parametrize("token", ["t", 0])
def test_progress_is_sent_to_who_asked(given: tuple[Any, ...], sent: dict[str, Any], token: str | int) -> None:
    listener = Listener()
    Context(notify=listener, progress_token=token).progress(*given)
    assert listener.heard == [("notifications/progress", {"progressToken": token, **sent})]


def test_progress_without_a_token_is_not_sent() -> None:
    listener = Listener()
    Context(notify=listener).progress(1, 2)
    assert listener.heard == []


@pytest.mark.parametrize(
    ("level", "name"),
    [
        (logging.DEBUG, "debug"),
        (5, "debug"),
        (logging.INFO, "info"),
        (logging.WARNING, "warning"),
        (logging.ERROR, "error"),
        (logging.CRITICAL, "critical"),
        (60, "critical"),
    ],
)
def test_log_lines_go_to_the_caller_with_their_level(level: int, name: str) -> None:
    listener = Listener()
    logger = Context(name="dig", notify=listener).logger
    logger.setLevel(1)
    logger.log(level, "depth %d", 3)
    assert listener.heard == [("notifications/message", {"level": name, "logger": "aenv.tool.dig", "data": "depth 3"})]


def test_log_lines_go_to_the_log_of_the_sandbox_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "aenv.tool"):
        Context(name="dig").logger.warning("a stone")
    assert [(record.name, record.getMessage()) for record in caplog.records] == [("aenv.tool.dig", "a stone")]


def test_contexts_do_not_share_their_logger() -> None:
    first, second = Listener(), Listener()
    one, other = Context(name="t", notify=first), Context(name="t", notify=second)
    one.logger.info("for one")
    other.logger.info("for the other")
    assert one.logger is one.logger
    assert [heard["data"] for _, heard in first.heard] == ["for one"]
    assert [heard["data"] for _, heard in second.heard] == ["for the other"]


def test_a_line_that_cannot_be_sent_does_not_fail_the_tool(capsys: pytest.CaptureFixture[str]) -> None:
    Context(name="t", notify=DeafListener()).logger.info("lost")
    assert "this cannot be written" in capsys.readouterr().err


def test_the_silent_listener_hears_nothing() -> None:
    assert silent("notifications/progress", {}) is None
