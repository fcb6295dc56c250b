"""The report of an evaluation: rows for a terminal, and a page that is opened in a real browser."""

from __future__ import annotations

import re

import pytest

from aenv.evals import plots, report
from aenv.evals.results import Evaluation
from aenv.rl import Scored, Task, Trajectory
from aenv.rl.runs import Asked
from tests.browser import Open, needs_browser, opened
from tests.rl import made

__all__ = ["opened"]
ASKED = Asked(
    env="mini-terminal",
    agent="openai:m",
    tasks="0",
    n=4,
    seed=0,
    rewards={},
    settings={"taskset": {"source": "made 1.0", "selection": {"domain": "files"}}},
)


def page(*some: Trajectory, most: int = 1000) -> str:
    return report.page(Evaluation(ASKED, some, ks=(1, 2)), some, title="a report", most=most)


def test_the_rows_of_a_terminal() -> None:
    rows = report.summary(Evaluation(ASKED, made.dozen(), ks=(2,)))
    assert rows["tasks"] == "3 (made 1.0, domain=files)"
    assert rows["episodes"] == "12, failed: 3"
    assert rows["passed"] == "3 of 9"
    assert re.fullmatch(r"0\.\d{4} \(0\.\d{4} to 0\.\d{4}\)", rows["score"])
    assert "read" in rows["tokens"]
    assert "pass@2" in rows
    assert "pass^2" in rows
    hostile = report.summary(Evaluation(Asked(**{**_fields(), "agent": made.HOSTILE}), []))
    assert "\x1b" not in hostile["agent"]
    assert hostile["score"] == "not known"


def _fields() -> dict[str, object]:
    return {name: getattr(ASKED, name) for name in ASKED.__struct_fields__}


def test_time_of_the_agent_is_what_neither_model_nor_tool_took() -> None:
    assert report.spent_in({"agent": 5.0, "model": 3.0, "tool": 1.5, "total": 9.0})["agent"] == 0.5


def test_every_score_is_in_one_bin() -> None:
    scores = [0.0, 0.5, 0.5, 0.999, 1.0, -0.5, 2.0]
    drawn = plots.histogram(scores, 1.0)
    assert sum(int(count) for count in re.findall(r": (\d+)</title>", drawn)) == len(scores)
    green = re.findall(r'class="bin passed"[^>]*><title>[^<]*: (\d+)<', drawn)
    assert sum(map(int, green)) == 2, "those that passed, whatever else is in their bin"
    assert "<svg" in plots.histogram([], 1.0)
    assert "nan" not in plots.histogram([0.0], 1.0)


def test_plots_say_only_what_is_escaped() -> None:
    drawn = plots.rates([plots.Rate(made.SCRIPT, 0.5, (0.1, 0.9), '#"><script>')])
    assert "<script" not in drawn
    assert drawn.count("<circle") == 1


@needs_browser
def test_the_report_is_shown_first_with_its_plots(opened: Open) -> None:
    seen = opened(page(*made.dozen()))
    assert seen.console == []
    overview = seen.root.one(id="overview")
    assert "hidden" not in overview.attributes
    assert "hidden" in seen.episode.attributes
    assert [figure.one("figcaption").text for figure in overview.all("figure")] == [
        "Scores",
        "Time of all episodes by phase",
        "Pass rate by task",
    ]
    scores, time, rates = (figure.one("svg") for figure in overview.all("figure"))
    assert sum(int(title.text.rsplit(": ", 1)[1]) for title in scores.all("title")) == 9
    assert len(list(rates.all("circle"))) == 3
    assert any(text.text == "model" for text in time.all("text"))
    facts = [fact.text for fact in overview.all("div", kind="fact")]
    assert "3 of 9episodes passed" in facts
    rows = [[cell.text for cell in row.all("td")] for row in overview.one("table").all("tr")][1:]
    assert [row[:2] for row in rows] == [["count-errors", "2 of 4"], ["find-secret", "1 of 2"], ["fix-tests", "0 of 3"]]
    assert "failed" in rows[1][4] + rows[2][4]


@needs_browser
@pytest.mark.parametrize("where", ["#tasks a", "#overview svg a"])
def test_an_episode_is_a_click_away_and_so_is_the_way_back(opened: Open, where: str) -> None:
    click = f"document.querySelector('{where}').dispatchEvent(new MouseEvent('click', {{ bubbles: true }}));"
    seen = opened(page(*made.dozen()), then=click)
    assert seen.console == []
    assert "hidden" in seen.root.one(id="overview").attributes
    assert "hidden" not in seen.episode.attributes
    assert seen.episode.one("h2").text in ("count-errors", "fix-tests", "find-secret")
    assert len(list(seen.root.all(**{"aria-selected": "true"}))) == 1
    back = click + "setTimeout(() => document.getElementById('to-overview').click(), 500);"
    after = opened(page(*made.dozen()), then=back)
    assert "hidden" not in after.root.one(id="overview").attributes
    assert list(after.root.all(**{"aria-selected": "true"})) == []


@needs_browser
def test_an_address_opens_its_episode(opened: Open) -> None:
    seen = opened(page(*made.dozen()), "04c4e9a17f04")
    assert "hidden" in seen.root.one(id="overview").attributes
    assert seen.episode.one("h2").text == "fix-tests"


@needs_browser
def test_hostile_tasks_are_text(opened: Open) -> None:
    bad = made.trajectory(id=made.SCRIPT, task=Task(id=made.HOSTILE), outcome=Scored(score=0.3))
    seen = opened(page(bad, made.hostile()))
    assert seen.console == []
    overview = seen.root.one(id="overview")
    assert made.SCRIPT in overview.one("table").text
    assert not set(overview.text) & set("\x1b\x9b\u202e\u2028")
    assert list(overview.all("script")) == []
    assert seen.root.one("head").one("title").text == "a report"


@needs_browser
def test_episodes_that_the_page_leaves_out_are_no_links(opened: Open) -> None:
    seen = opened(page(*made.dozen(), most=2))
    assert len(list(seen.root.one(id="tasks").all("a"))) == 2
    assert seen.root.one(id="left-out").text == "10 more episodes were left out of this page"
