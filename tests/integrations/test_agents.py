"""Agents of other frameworks in instances: the programs of their guides, with a model that says what a test wants."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings

from aenv import gemini_tools
from tests.client.test_vendors import inputs
from tests.integrations.peers import Peer
from tests.support import ROOT

pytestmark = [pytest.mark.peer, pytest.mark.xdist_group("agents")]
SCRIPT = ROOT / "tests" / "peers" / "scripts" / "agent_loops.py"
MORE = {
    "openai-agents": ["play_as_server"],
    "langchain": ["play_in_graph"],
    "pydantic-ai": ["play_with_toolset"],
    "anthropic": ["play_step_by_step"],
}
"""What else a guide has, by its name."""
SILENT = ("play_with_toolset", "play_step_by_step")
"""What is not written down as a conversation."""
OK = '{"output":["",true],"returncode":0,"stdout":"","stderr":"","truncated":false,"note":""}'
WRITE = ["execute_command", {"command": "echo hello > note"}, "w1", False]

PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
PICTURES = f"""
import base64

from aenv import Image, register_tool


@register_tool
def picture() -> list:
    return ["Here it is:", Image(base64.b64decode("{PICTURE}"), "image/png")]
"""


class Guide:
    """What became of a guide's programs."""

    def __init__(self, name: str, found: dict[str, Any]) -> None:
        self.name = name
        self.found = found
        text = (ROOT / "docs" / "guides" / f"{name}.md").read_text()
        self.prints = re.findall(r"```text\n(.*?)```", text, re.DOTALL)

    def __getitem__(self, scene: str) -> Any:
        return self.found["play"][scene]


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Peer:
    return Peer("agents", tmp_path_factory.mktemp("agents"))


@pytest.fixture(scope="module", params=MORE)
def guide(request: pytest.FixtureRequest, peer: Peer) -> Guide:
    name = request.param
    text = (ROOT / "docs" / "guides" / f"{name}.md").read_text()
    by_url, *adapter = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    folder = peer.folder / name
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "custom_env.py").write_text(PICTURES)
    (folder / "config.json").write_text('{"name": "pictures", "version": "1.0.0"}')
    (folder / "by_url.py").write_text(by_url)
    (folder / "adapter.py").write_text("\n\n".join(adapter))
    return Guide(name, asyncio.run(peer.told(folder, SCRIPT, PYTHONPATH=str(ROOT))))


def test_the_programs_print_what_the_guide_says(guide: Guide) -> None:
    assert [guide.found["printed"]["by_url"], guide.found["printed"]["adapter"]] == guide.prints


def test_answer_reward_and_trajectory(guide: Guide) -> None:
    done = guide["done"]
    assert (done["reward"], done["answer"], done["ended"]) == (1.0, "Done.", "done")
    user, asked, heard, said = done["messages"]
    assert user == {"role": "user", "content": "Write hello into the file note."}
    (call,) = asked["tool_calls"]
    assert (asked["role"], call["id"], call["function"]["name"]) == ("assistant", "w1", "execute_command")
    assert (heard["role"], heard["tool_call_id"], heard["content"]) == ("tool", "w1", OK)
    assert (said["role"], said["content"]) == ("assistant", "Done.")
    assert done["tools"] == ["execute_command", "read_file", "write_file", "list_files"]
    assert (done["turns"], done["calls"]) == ([1, 0], [WRITE])
    model = "gpt-5-mini" if guide.name == "openai-agents" else "stand-in-1"
    assert done["generations"] == [[model, "tool_calls", 11], [model, "stop", 11]]


def test_an_agent_that_does_nothing(guide: Guide) -> None:
    assert (guide["nothing"]["reward"], guide["nothing"]["turns"]) == (0.0, [0])


def test_calls_at_the_same_time_are_one_turn(guide: Guide) -> None:
    both = guide["both"]
    assert (both["reward"], both["turns"], [call[2] for call in both["calls"]]) == (1.0, [2, 0], ["c0", "c1"])
    assert [message.get("tool_call_id") for message in both["messages"]] == [None, None, "c0", "c1", None]


@pytest.mark.parametrize("scene", ["no json", "no object", "wrong", "unknown"])
def test_a_malformed_call_is_told_to_the_model(guide: Guide, scene: str) -> None:
    found = guide[scene]
    if guide.name == "langchain" and scene.startswith("no "):
        assert_it_ended_there(found, scene)
        return
    assert (found["reward"], found["calls"][-1]) == (1.0, WRITE)
    _, asked, heard, *_ = found["messages"]
    assert [call["id"] for call in asked["tool_calls"]] == [heard["tool_call_id"]] == ["b1"]
    said = {"wrong": "argument 'command'", "unknown": "nothing", "no json": "JSON", "no object": "object"}[scene]
    assert said in heard["content"]


def assert_it_ended_there(found: dict[str, Any], scene: str) -> None:
    """LangChain keeps what is no JSON to itself, and cannot make a message of what is no object."""
    if scene == "no object":
        assert found["failed"] == ["agent_failed", "agent"]
        return
    assert (found["reward"], found["ended"]) == (0.0, "done")
    (call,) = found["messages"][1]["tool_calls"]
    assert (call["id"], call["function"]["arguments"]) == ("b1", '{"command": "')


def test_a_lost_instance_ends_the_run_and_is_no_reward(guide: Guide) -> None:
    for name in ("play", *MORE[guide.name]):
        lost = guide.found[name]["lost"]
        assert (lost["reward"], lost["failed"], lost["answer"]) == (None, ["sandbox_lost", "tool"], None), name
        assert "gone" not in str(lost["messages"])
        assert guide.found[name]["raised"] == "sandbox_lost after 1"  # the model was not asked again


def test_the_other_ways_of_a_guide(guide: Guide) -> None:
    for name in MORE[guide.name]:
        done = guide.found[name]["done"]
        assert (done["reward"], done["answer"]) == (1.0, "Done."), name
        assert [call[:2] for call in done["calls"]] == [WRITE[:2]]
        if name not in SILENT:
            assert [message["role"] for message in done["messages"]] == ["user", "assistant", "tool", "assistant"]


def test_a_model_sees_the_picture_of_a_tool(guide: Guide) -> None:
    assert "Here it is:" in guide["pictured"]
    seen = PICTURE in guide["pictured"]
    assert seen is (guide.name != "openai-agents")  # which leaves pictures of tools out of chat completions


def test_a_run_whose_turns_are_used_up_is_scored(guide: Guide) -> None:
    found = guide["one turn"]
    assert (found["reward"], found["ended"], found["turns"]) == (1.0, "max_turns", [1])


def test_a_run_that_is_cancelled(guide: Guide) -> None:
    assert guide["cancelled"] == ["CancelledError", "CancelledError"]


def test_nothing_is_left(guide: Guide) -> None:
    used, there = guide.found["instances"]
    assert used >= 15
    assert there == 0
    assert guide.found["left"] == []


async def test_geminis_own_types_take_what_is_made_of_schemas(peer: Peer) -> None:
    found: list[Any] = []

    @settings(max_examples=150, derandomize=True, database=None)
    @given(inputs)
    def collect(schema: Any) -> None:
        found.extend(gemini_tools([{"name": "press", "inputSchema": schema}])[0])

    collect()
    (peer.folder / "tools.json").write_text(json.dumps(found))
    code = (
        "import json; from google.genai import types;"
        "made = [types.FunctionDeclaration.model_validate(one) for one in json.load(open('tools.json'))];"
        "print(json.dumps([one.model_dump(mode='json', by_alias=True, exclude_none=True) for one in made]))"
    )
    assert await peer.told(peer.folder, "-c", code) == found
