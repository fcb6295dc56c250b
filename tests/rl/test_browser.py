"""The page of episodes in a real browser: what it shows, what its controls do, and that hostile text stays text."""

from __future__ import annotations

import pytest

from aenv.rl.trajectory import Trajectory
from aenv.rl.viewing import html
from tests.browser import Open, needs_browser, opened
from tests.rl import made

__all__ = ["opened"]
pytestmark = needs_browser


def page(*some: Trajectory, title: str = "a run", most: int = 1000) -> str:
    return html.page(some, title=title, most=most)


def test_the_list_the_summary_and_the_episode_of_the_address(opened: Open) -> None:
    seen = opened(page(*made.dozen()), "04c4e9a17f04")
    assert seen.console == []
    assert len(seen.texts(kind="row")) == 12
    assert seen.texts("div", kind="group") == [
        "count-errorsmean 0.75 of 4",
        "fix-testsmean 0.433 of 3",
        "find-secretmean 0.85 of 2",
    ]
    assert seen.texts("div", kind="fact") == ["12episodes", "9scored", "3failed", "0.667mean reward of the scored"]
    assert [button.text for button in seen.root.one(kind="kinds").all("button")] == ["sandbox_lost 2", "model_failed 1"]
    assert sum(int(title.rsplit(": ", 1)[1]) for title in seen.texts("title") if ": " in title) == 9
    (chosen,) = seen.root.all(**{"aria-selected": "true"})
    assert "04c4e9a17f04" in chosen.text
    assert seen.episode.one("h2").text == "fix-tests"
    assert seen.texts(kind="instruction") == ["The tests of the project in ~/shop fail. Mend the code, not the tests."]
    assert [row.text for row in seen.episode.one("table").all("tr")] == [
        "componentscoreweightgives",
        'checks0.8750.80.7{"passed":7,"of":8}',
        "brevity0.50.20.1",
        "total0.8",
    ]
    assert len(seen.texts(kind="turn")) == 4
    calls = list(seen.episode.all("details", kind="call"))
    assert "1 failed, 6 passed" in calls[0].text
    assert ["error" in (call.attributes["class"] or "") for call in calls] == [False, True, False]
    assert "create 600 ms" in seen.episode.one(kind="legend").text
    assert "aenv.rl.models:OpenAIAgent" in seen.episode.one("dl").text


def test_a_failed_episode_has_its_failure_and_no_reward(opened: Open) -> None:
    seen = opened(page(*made.dozen()), "06c4e9a17f06")
    assert seen.console == []
    failure = seen.episode.one(kind="failure")
    assert failure.text == "sandbox_lost during tool, turn 1: the instance ended with exit code 137try again"
    assert list(seen.episode.all("table")) == []


def test_without_an_address_the_first_is_chosen(opened: Open) -> None:
    for id in ("", "nobody"):
        assert opened(page(*made.dozen()), id).episode.one("h2").text == "count-errors"


def test_hostile_text_is_shown_as_text_and_does_nothing(opened: Open) -> None:
    bad = made.hostile()
    seen = opened(page(made.trajectory(), bad, title=made.SCRIPT), bad.id)
    assert seen.console == []
    assert seen.root.one("head").one("title").text == made.SCRIPT
    assert seen.root.one("h1").text == made.SCRIPT
    assert made.SCRIPT in seen.episode.one("h2").text
    assert made.SCRIPT in seen.episode.one(kind="instruction").text
    assert made.SCRIPT in seen.texts(kind="turn")[0]
    assert made.SCRIPT in seen.root.one("div", role="listbox").text
    shown = seen.episode.text
    assert "\\u001b[2J" in shown
    assert "\\u202e" in shown
    assert not set(shown) & set("\x1b\x9b\u202e\u2028")
    images = [image.attributes["src"] for image in seen.episode.all("img")]
    assert images == [f"data:image/png;base64,{made.PIXEL}"] * 2, "of the message and of the result; no SVG"
    assert len(list(seen.root.all("script"))) == 4, "the page's own, and the blocks of data"


def test_a_page_that_would_run_foreign_script_is_stopped_by_its_policy(opened: Open) -> None:
    """What the tests above rest on: a script in the page's own markup does not run, and the browser says so."""
    broken = page(made.trajectory()).replace("</body>", "<script>document.title = 'PWNED'</script></body>")
    seen = opened(broken)
    assert seen.root.one("head").one("title").text == "a run"
    assert any("Content Security Policy" in line for line in seen.console)


def test_keys_go_up_and_down_the_list_as_it_is_shown(opened: Open) -> None:
    press = "const press = (key) => document.dispatchEvent(new KeyboardEvent('keydown', { key, cancelable: true }));"
    sort = "sort.value = 'worst'; grouped.checked = false; filters.dispatchEvent(new Event('input'));"
    down = "press('ArrowUp');" + "press('ArrowDown');" * 3 + "press('ArrowUp');"
    first = "document.querySelector('.row').click();"
    seen = opened(page(*made.dozen()), then=press + sort + first + down + "document.title = location.hash;")
    assert seen.console == []
    order = [row.one(kind="badge").text for row in seen.root.all(kind="row")]
    assert order[:9] == ["0.1", "0.3", "0.4", "0.7", "0.7", "0.8", "1", "1", "1"]
    assert set(order[9:]) == {"sandbox_lost", "model_failed"}, "those without a score come after all that have one"
    chosen = [row.attributes.get("aria-selected") for row in seen.root.all(kind="row")]
    assert chosen.index("true") == 2
    assert seen.root.one("head").one("title").text == "#05c4e9a17f05"
    assert "05c4e9a17f05" in seen.episode.text


@pytest.mark.parametrize(
    ("outcome", "search", "count"),
    [
        ("scored", "", 9),
        ("failed", "", 3),
        ("kind:sandbox_lost", "", 2),
        ("", "fix-tests", 4),
        ("", "EXIT code", 1),
        ("scored", "fix-tests", 3),
        ("", "nothing like it", 0),
    ],
)
def test_filters(opened: Open, outcome: str, search: str, count: int) -> None:
    script = f"outcome.value = '{outcome}'; search.value = '{search}'; filters.dispatchEvent(new Event('input'));"
    seen = opened(page(*made.dozen()), then=script)
    assert seen.console == []
    assert len(seen.texts(kind="row")) == count
    assert seen.root.one(id="count").text == f"{count} of 12 episodes"


def test_all_of_a_long_result_and_the_raw_json_on_demand(opened: Open) -> None:
    long = "".join(f"line {number}\n" for number in range(2000))
    of = made.chat("long", "do", [("", "cat", long)], "done")
    before = opened(page(of))
    assert "line 20\n" in before.episode.text
    assert "line 1999" not in before.episode.text
    after = opened(page(of), then="raw.click(); document.querySelector('button.more').click();")
    assert "line 1999\n" in after.episode.text
    assert '"schema": "aenv.trajectory/1"' in after.episode.text


def test_a_thousand_episodes_and_more(opened: Open) -> None:
    some = [made.trajectory(id=f"e{number}") for number in range(1003)]
    seen = opened(page(*some), "e999")
    assert seen.console == []
    assert len(seen.texts(kind="row")) == 1000
    assert "e999" in seen.episode.one(kind="under").text
    assert seen.root.one(id="left-out").text == "3 more episodes were left out of this page"


def test_a_page_of_nothing(opened: Open) -> None:
    seen = opened(page(title="<&>"))
    assert seen.console == []
    assert seen.episode.text == "There are no episodes here."
    assert seen.root.one("h1").text == "<&>"
