"""Agents of frameworks in instances, each with the programs of its guide: what they answer, what is written down of
them, and how they end."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.docs.doc_pages import blocks
from tests.integrations.peers import Peer
from tests.support import ROOT

pytestmark = pytest.mark.peer
SCRIPTS = ROOT / "tests" / "peers" / "scripts"
QUIET = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "CREWAI_DISABLE_VERSION_CHECK": "true",
    "DO_NOT_TRACK": "1",
    "ANONYMIZED_TELEMETRY": "false",
}
"""No framework tells anybody of these tests."""
FAULTS = '''\
"""What ends an instance while an agent plays, what keeps it waiting, and what may be left out."""

import os
import time

from aenv import register_tool


@register_tool
def crash() -> str:
    """End the instance."""
    os._exit(1)


@register_tool
def note(text: str, times: int = 1, tags: list[str] | None = None) -> str:
    """Note something down.

    Args:
        text: What.
        times: How often.
    """
    return f"noted {text} {times} times"


@register_tool
def wait() -> str:
    """Wait."""
    time.sleep(500)
    return "waited"
'''


class Framework(NamedTuple):
    """One that has a guide."""

    guide: str
    venv: str

    def __str__(self) -> str:
        return self.guide


ALL = [
    pytest.param(Framework(guide, venv), id=guide, marks=pytest.mark.xdist_group(venv))
    for guide, venv in (
        ("google-adk", "agents"),
        ("smolagents", "agents"),
        ("autogen", "agents"),
        ("crewai", "crewai"),
        ("camel", "camel"),
    )
]


class Report(NamedTuple):
    """What came of a framework's agents."""

    framework: Framework
    found: dict[str, Any]

    def of(self, *cases: str) -> list[str]:
        """Those of the cases that there are; only AutoGen's agents play in teams."""
        return [case for case in cases if self.framework.guide == "autogen" or not case.startswith("team")]

    def said(self, case: str) -> list[tuple[str, str]]:
        """The model's calls, and its words."""
        found = []
        for message in self.found[case]["said"]:
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            found += [(call["name"], call["arguments"]) for call in calls] or [("", message["content"])]
        return found

    def heard(self, case: str) -> str:
        """All that the model was told."""
        return "\n".join(str(message["content"]) for message in self.found[case]["heard"])


@pytest.fixture(scope="module", params=ALL)
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Report:
    framework: Framework = request.param
    peer = Peer(framework.venv, tmp_path_factory.mktemp(framework.guide))
    folder = Path(shutil.copytree(ROOT / "examples" / "06-keypad", peer.folder / "keypad"))
    (folder / "src" / "faults.py").write_text(FAULTS)
    page = ROOT / "docs" / "guides" / f"{framework.guide}.md"
    programs = [block.text for block in blocks(page) if block.language == "python"]
    for name, program in zip(("by_url.py", "play.py"), programs, strict=True):
        (folder / name).write_text(program)
    path = f"{folder}:{SCRIPTS}:{ROOT}"
    line = (SCRIPTS / "guide_cases.py", framework.guide)
    return Report(framework, asyncio.run(peer.told(folder, *line, PYTHONPATH=path, HOME=str(peer.folder), **QUIET)))


DONE = {"smolagents": ("final_answer", '{"answer": "Done."}')}
"""How a model ends, where it is not by words."""
PRESS = ("press", '{"key": 3}')


def done(report: Report) -> tuple[str, str]:
    return DONE.get(report.framework.guide, ("", "Done."))


def test_the_programs_of_the_page_print_answer_and_reward(report: Report) -> None:
    assert (report.found["by_url"], report.found["page"]) == ("Done. 1.0", "Done. 1.0")


def test_a_trajectory_has_what_the_model_heard_said_and_called(report: Report) -> None:
    whole = report.found["whole"]
    assert (whole["reward"], whole["answer"], whole["ended"], whole["turns"]) == (1.0, "Done.", "done", 2)
    assert whole["calls"] == [["press", {"key": 3}, False]]
    assert report.said("whole") == [PRESS, done(report)]
    roles = [role for role in whole["roles"] if role != "system"]
    assert roles == ["user", "assistant", "user" if report.framework.guide == "smolagents" else "tool", "assistant"]
    assert "Case as on the page." in report.heard("whole")
    assert "You pressed 3." in report.heard("whole")


def test_a_model_that_calls_wrongly_is_told_and_goes_on(report: Report) -> None:
    wrong = report.found["wrong"]
    assert (wrong["reward"], wrong["ended"], wrong["asked"], wrong["turns"]) == (1.0, "done", 5, 5)
    assert [name for name, _ in report.said("wrong")] == [PRESS[0], "jump", PRESS[0], PRESS[0], done(report)[0]]
    assert wrong["calls"][-2:] == [["press", {"key": 9}, True], ["press", {"key": 3}, False]]
    assert "there are keys 0 to 4" in report.heard("wrong")


def test_arguments_that_are_no_json_reach_no_tool(report: Report) -> None:
    found = report.found["no JSON"]
    if report.framework.guide == "camel":  # which ends the run itself
        assert (found["reward"], found["failure"]) == (None, ["agent_failed", "agent"])
        assert not found["calls"]
        assert "Case no JSON." in report.heard("no JSON")
    else:
        assert (found["reward"], found["ended"], found["asked"]) == (1.0, "done", 3)
        assert [call for call in found["calls"] if not call[2]] == [["press", {"key": 3}, False]]


def test_the_same_call_is_made_as_often_as_the_model_makes_it(report: Report) -> None:
    assert report.found["twice"]["calls"] == [["press", {"key": 3}, False]] * 2


def test_arguments_may_be_left_out(report: Report) -> None:
    assert report.found["left out"]["calls"] == [["note", {"text": "it"}, False]]
    assert "noted it 1 times" in report.heard("left out")
    note = report.found["offered"]["note"]
    assert note["properties"]["text"] == {"description": "What.", "type": "string"}
    assert note["properties"]["times"]["description"] == "How often."
    assert note["required"] == (["text", "times", "tags"] if report.framework.guide == "crewai" else ["text"])


def test_calls_of_one_answer_are_one_turn(report: Report) -> None:
    together = report.found["together"]
    assert together["turns"] == 2
    assert sorted(call[1]["key"] for call in together["calls"]) == [3, 4]
    assert all(f"You pressed {key}." in report.heard("together") for key in (3, 4))


def test_a_lost_instance_ends_the_run_and_is_no_reward(report: Report) -> None:
    for case in report.of("crash", "crash beside others", "team crash"):
        crash = report.found[case]
        assert (crash["reward"], crash["failure"]) == (None, ["sandbox_lost", "tool"]), case
        assert crash["asked"] == 1, f"the model was asked again: {case}"
    assert report.said("crash") == [("crash", "{}")]
    assert report.found["alone"] == ["sandbox_lost", 1]


def test_turns_that_are_used_up_end_the_run_with_its_reward(report: Report) -> None:
    for case in report.of("one turn", "team one turn"):
        found = report.found[case]
        assert (found["reward"], found["ended"], found["turns"], found["asked"]) == (1.0, "max_turns", 1, 1), case
        assert "You pressed 3." in report.heard(case)


def test_a_cancelled_run_leaves_nothing_behind(report: Report) -> None:
    assert report.found["cancelled"] == ["cancelled", 1], "a model was asked when nobody was there any more"
    assert report.found["left"] == []
