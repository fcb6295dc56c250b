"""What both viewers show of an episode, and what they do not let through. A browser sees the page in test_browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.rl.tasks import Task
from aenv.rl.trajectory import Component, Failed, Generation, Tokens, Trajectory, Turn
from aenv.rl.viewing import Step, html, steps, text
from tests.rl import made

OURS = re.compile(r"\x1b\[[0-9;]+m")
"""The only control sequences that the terminal viewer writes."""
HARM = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(of: Trajectory, *, full: bool = False, width: int = 100) -> str:
    return text.render(of, colour=False, width=width, full=full)


# In a terminal


def test_the_head_and_every_turn_are_shown() -> None:
    page = shown(made.dozen()[4])
    head, _, conversation = page.partition("\nturn 1")
    for told in (
        "mini-terminal@1.0.0  04c4e9a17f04",
        "fix-tests, sample 0",
        "20260101",
        "scored 0.8",
        'checks 0.875 x 0.8 {"passed": 7, "of": 8}',
        "ended       done",
        "create 0.6 s",
        "agent aenv.rl.models:OpenAIAgent",
        "Mend the code, not the tests.",
    ):
        assert told in head
    in_order = [
        "qwen3-8b, 1.1 s, tokens 412 + 4, tool_calls",
        "> execute_command  0.02 s at 0.9 s call_0",
        "command: cd ~/shop",
        "1 failed, 6 passed",
        "turn 2",
        "The total is off by one.",
        "< error\n",
        "can't read cart.py",
        "turn 3",
        "turn 4",
        "All seven tests pass",
    ]
    places = [conversation.index(part) for part in in_order]
    assert places == sorted(places)
    assert conversation.count("1 failed, 6 passed") == 1, "the message that repeats a result is not shown again"


def test_a_failure_is_told_with_what_came_before_and_without_a_number() -> None:
    before = Failed(kind="network", phase="create", reason="nobody answered")
    failed = Failed(kind="sandbox_lost", phase="tool", reason="it is gone", hint="try again", turn=0)
    page = shown(made.trajectory(outcome=failed, retried=[before], ended="time"))
    assert "failed: sandbox_lost during tool in turn 1\n              it is gone" in page
    assert "network during create: nobody answered" in page
    assert "hint        try again" in page
    assert "ended       time" in page
    assert "scored" not in page


def test_the_rewards_of_a_turn_are_shown_with_it() -> None:
    of = made.trajectory(turns=[Turn(rewards={"step": Component(score=0.5, weight=2.0)}), Turn()])
    first, second = shown(of).split("turn 2")
    assert "reward step 0.5 x 2" in first
    assert "reward" not in second


def test_what_a_model_asked_for_and_did_not_get_is_shown() -> None:
    asked = {"id": "x", "type": "function", "function": {"name": "fly", "arguments": "{not json"}}
    of = made.trajectory(
        messages=[{"role": "assistant", "content": None, "tool_calls": [asked]}],
        turns=[Turn(generation=Generation(message=0))],
    )
    assert "fly was asked for, and not called\n    arguments: {not json" in shown(of)


def test_long_results_are_cut_unless_all_is_wanted() -> None:
    huge = "".join(f"line {number}\n" for number in range(50_000))
    call = msgspec.structs.replace(made.trajectory().calls[0], result=made.result(huge))
    of = made.trajectory(turns=[Turn(calls=[call])])
    short, full = shown(of), shown(of, full=True)
    assert "line 3\n" in short
    assert "line 49999" not in short
    assert re.search(r"\.\.\. and \d{3},\d{3} more characters", short)
    assert len(short) < 2000
    assert "line 49999" in full
    assert "more characters" not in full


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_no_control_character_reaches_the_terminal(colour: bool, full: bool) -> None:
    page = text.render(made.hostile(), colour=colour, width=80, full=full)
    assert not HARM.search(OURS.sub("", page))
    assert r"\x1b[2J\x1b]0;PWNED\x07\x9b31m\x0d\x08\u202e" in page
    assert bool(OURS.search(page)) is colour


@given(made.anything, st.booleans(), st.integers(0, 120))
def test_whatever_it_says_no_control_character_reaches_the_terminal(of: Trajectory, full: bool, width: int) -> None:
    page = text.render(of, colour=True, width=width, full=full)
    assert not HARM.search(OURS.sub("", page))
    page.encode()  # which a lone surrogate has no bytes for


@given(st.text(), st.integers(20, 100))
def test_a_text_is_folded_and_nothing_of_it_lost(said: str, width: int) -> None:
    said = said.replace("\n", "") + "x" * 50 + " y" * 100
    pieces = list(text._folded(said, width))
    assert all(len(piece) <= width for piece in pieces)
    assert "".join(pieces).replace(" ", "") == said.replace(" ", "")


def test_a_value_that_goes_too_deep_does_not_stop_either_viewer() -> None:
    deep: Any = "bottom"
    for _ in range(3000):
        deep = [deep]
    of = made.trajectory(observation=deep)
    assert "nested too deep" in shown(of)
    assert "more below" in html.page([made.trajectory(observation=json.loads("[" * 400 + "]" * 400))], title="t")


# In which order


def test_messages_stand_where_they_were_heard() -> None:
    of = made.dozen()[4]
    assert steps(of) == [Step([0, 1], 0), Step([], 1), Step([], 2), Step([], 3)]


def test_messages_of_an_agent_that_said_nothing_come_first() -> None:
    of = made.trajectory(messages=[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    assert steps(of) == [Step([0, 1], None), Step([], 0)]


def test_what_was_heard_after_the_last_turn_comes_last() -> None:
    said = [{"role": "assistant", "content": "a"}, {"role": "tool", "tool_call_id": "unknown", "content": "b"}]
    of = made.trajectory(messages=said, turns=[Turn(generation=Generation(message=0))])
    assert steps(of) == [Step([], 0), Step([1], None)]


@given(made.anything)
def test_every_turn_is_shown_once_and_no_message_twice(of: Trajectory) -> None:
    found = steps(of)
    heard = [place for step in found for place in step.heard]
    assert [step.turn for step in found if step.turn is not None] == list(range(len(of.turns)))
    assert heard == sorted(set(heard))
    assert all(0 <= place < len(of.messages) for place in heard)


# As a page


class Page(HTMLParser):
    """A page as a browser takes it apart: its elements, and the texts of its scripts and styles."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._within = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.elements.append((tag, given))
        self._within = given.get("id") or tag
        if tag in ("script", "style", "title"):
            self.texts.setdefault(self._within, []).append("")

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_data(self, data: str) -> None:
        if self._within in self.texts:
            self.texts[self._within][-1] += data

    def data(self, name: str) -> Any:
        (found,) = self.texts[name]
        return json.loads(found)

    @property
    def shape(self) -> list[str]:
        """Its elements, but for the blocks of data."""
        return [tag for tag, given in self.elements if given.get("type") != "application/json"]


def test_the_page_loads_nothing_and_runs_only_its_own_script() -> None:
    page = Page(html.page(made.dozen(), title="a run"))
    (policy,) = [given["content"] or "" for tag, given in page.elements if given.get("http-equiv")]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules == {
        "default-src": "'none'",
        "script-src": f"'{_hash(page.texts['script'][0])}'",
        "style-src": f"'{_hash(page.texts['style'][0])}'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert len(page.texts["script"]) == len(page.texts["style"]) == 1
    used = {name for _, given in page.elements for name in given}
    assert not used & {"src", "href", "style", "action", "srcset"}
    assert not [name for name in used if name.startswith("on")]


def _hash(source: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}"


def test_the_page_holds_every_episode_whole() -> None:
    dozen = made.dozen()
    page = Page(html.page(dozen, title="a run"))
    index = page.data("index")
    assert index["leftOut"] == 0
    assert [row["id"] for row in index["rows"]] == [of.id for of in dozen]
    assert [row.get("score") for row in index["rows"]] == [of.reward if of.ok else None for of in dozen]
    for number, of in enumerate(dozen):
        known = msgspec.convert(page.data(f"episode-{number}")["trajectory"], Trajectory)
        assert (known.messages, known.outcome, known.calls) == (of.messages, of.outcome, of.calls)


def test_hostile_text_changes_nothing_of_the_page() -> None:
    calm, page = Page(html.page([], title="a run")), Page(html.page([made.hostile()], title=made.HOSTILE))
    assert page.shape == calm.shape
    assert page.texts["title"] == [made.HOSTILE]
    assert page.texts["script"] == calm.texts["script"]
    known = page.data("episode-0")["trajectory"]
    assert known["messages"][0]["content"] == made.HOSTILE
    assert known["task"]["instruction"] == f"instruction {made.HOSTILE}"


@given(st.lists(made.anything, max_size=3), st.text(max_size=30) | st.just(made.HOSTILE))
def test_whatever_they_say_the_page_keeps_its_shape(some: list[Trajectory], title: str) -> None:
    page = Page(html.page(some, title=title))
    assert page.shape == Page(html.page([], title="")).shape
    assert len(page.data("index")["rows"]) == len(some)
    for number, of in enumerate(some):
        task = page.data(f"episode-{number}")["trajectory"]["task"]
        assert task.get("instruction", "") == of.task.instruction


def test_data_has_no_character_that_a_page_would_read() -> None:
    source = html.page([made.hostile()], title="t")
    data = "".join(re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', source, re.DOTALL))
    assert made.GOLD in data
    assert not re.search("[<>&\u2028\u2029]", data)


def test_more_episodes_than_wanted_are_counted() -> None:
    page = Page(html.page(iter(made.dozen()), title="t", most=5))
    index = page.data("index")
    assert (len(index["rows"]), index["leftOut"]) == (5, 7)
    assert "episode-4" in page.texts
    assert "episode-5" not in page.texts


def test_long_texts_are_cut_and_images_are_whole_or_not_there() -> None:
    limit = html.LONGEST_TEXT
    image = {"type": "image", "mimeType": "image/png", "data": "A" * (limit + 50)}
    too_large = {"type": "image", "mimeType": "image/png", "data": "A" * (html.LARGEST_IMAGE + 1)}
    texts = [{"type": "text", "text": "x" * limit + "y" * 5}, {"type": "text", "text": "x" * limit, "data": "z" * 500}]
    call = made.trajectory().calls[0]
    answer = msgspec.structs.replace(made.result(""), content=[*texts, image, too_large])
    of = made.trajectory(turns=[Turn(calls=[msgspec.structs.replace(call, result=answer)])])
    episode = Page(html.page([of], title="t")).data("episode-0")
    blocks = episode["trajectory"]["turns"][0]["calls"][0]["result"]["content"]
    assert blocks[0]["text"] == "x" * limit + "\n... and 5 more characters, which are in the file"
    assert blocks[1:] == [texts[1], image, {**too_large, "data": ""}]


def test_token_ids_are_not_on_the_page() -> None:
    known = Tokens(prompt=[987654321], completion=[1], logprobs=[-0.5])
    of = made.trajectory(turns=[Turn(generation=Generation(message=0, model="m", tokens=known))])
    source = html.page([of], title="t")
    assert "987654321" not in source
    assert '"model":"m"' in source


def test_a_title_is_text() -> None:
    assert Page(html.page([], title="<b>&amp;")).texts["title"] == ["<b>&amp;"]


def test_a_task_without_anything() -> None:
    of = Trajectory(id="e", env="x", task=Task(), outcome=Failed(kind="network", phase="create", reason="no"))
    assert "network during create" in shown(of)
    assert Page(html.page([of], title="t")).data("index")["rows"][0]["group"] == ""
