"""Agents of frameworks, as their own objects, served as environments: they answer, remember, and are saved so."""

from __future__ import annotations

import pytest

from tests.peers.support import OBJECTS, interpreter
from tests.runtime.wire import send
from tests.support import sandbox

pytestmark = pytest.mark.peer


@pytest.mark.parametrize(
    ("venv", "prefixes"), [("agents", ["openai_", "pydantic_", "langgraph_"]), ("camel", [""])], ids=["agents", "camel"]
)
def test_they_answer_and_remember(venv: str, prefixes: list[str]):
    with sandbox(OBJECTS, python=interpreter(venv)) as running:
        for prefix in prefixes:

            def chat(session: str, tool: str = f"{prefix}chat") -> str:
                reply = send(running.port, "POST", f"/tools/{tool}", {"message": "hello", "session": session})
                text: str = reply.data["content"][0]["text"]
                return text

            assert [chat("a"), chat("a"), chat("b")] == ["heard 1", "heard 2", "heard 1"]
            send(running.port, "POST", f"/tools/{prefix}chat_reset", {"session": "a"})
            assert chat("a") == "heard 1"
        assert send(running.port, "GET", "/info").data["saves"] is True
