import asyncio

import custom_env
import pytest


@pytest.fixture(autouse=True)
def no_notes():
    custom_env.notes.clear()


def test_the_server_offers_its_tools():
    tools = asyncio.run(custom_env.server.list_tools())
    assert {tool.name for tool in tools} == {"read_note", "write_note"}


def test_a_note_is_kept():
    custom_env.write_note("plan", "first the tests")
    assert custom_env.read_note("plan") == "first the tests"
    with pytest.raises(ValueError, match="plan"):
        custom_env.read_note("other")


def test_reward():
    assert custom_env.note_contains("plan", "tests") == 0.0
    custom_env.write_note("plan", "first the tests")
    assert custom_env.note_contains("plan", "tests") == 1.0
