"""What episodes from outside do not show: no browser, a browser that ends, a page that is left, and its clock."""

import importlib.metadata
import os
import signal

import pytest

from aenv import Invalid, SandboxLost

try:
    importlib.metadata.version("miniwob")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("pip install --no-deps -r requirements-no-deps.txt", allow_module_level=True)

import custom_env
from miniwob_env import browser


@pytest.fixture(autouse=True)
def closed():
    try:
        browser.program()
    except Invalid as exc:
        pytest.skip(f"{exc.message}: {exc.hint}")
    yield
    if custom_env.current.browser:
        custom_env.current.browser.close()


def test_without_a_browser(monkeypatch):
    monkeypatch.setattr(browser, "PROGRAMS", ("no-such-browser",))
    with pytest.raises(Invalid, match="there is no Chromium on this machine") as caught:
        custom_env.begin("click-test", 1)
    assert "apt-get install chromium" in caught.value.hint


def test_a_browser_that_ended_is_no_answer_and_the_next_reset_starts_another():
    custom_env.begin("click-test", 1)
    os.kill(custom_env.current.browser._pid, signal.SIGKILL)
    with pytest.raises(SandboxLost, match="the browser ended"):
        custom_env.look()
    with pytest.raises(SandboxLost, match="the browser has ended"):
        custom_env.score()
    assert custom_env.begin("click-test", 1)["goal"] == "Click the button."


def test_a_page_that_is_left_has_no_reward_any_more():
    custom_env.begin("click-test", 1)
    page = custom_env.current.page
    page.browser.evaluate("core.endEpisode(1.0)")
    assert custom_env.score()["score"] == 1.0
    url = page.browser.evaluate("location.href")
    page.browser.call("Page.navigate", url=url)
    assert custom_env.score() == {"score": 0.0, "done": True, "raw_reward": 0.0, "reason": "the page was left"}


def test_no_clock_ends_an_episode_and_nothing_begins_it_anew():
    custom_env.begin("click-test", 1)
    page = custom_env.current.page
    assert page.browser.evaluate("core.EPISODE_MAX_TIME") > 24 * 24 * 3600 * 1000
    page.browser.evaluate("core.endEpisode(-1.0)")
    page.click(80, 105)  # what says START, in the middle of a page that is over
    assert custom_env.score() == {"score": 0.0, "done": True, "raw_reward": -1, "reason": ""}


def test_the_whole_task_is_in_the_window():
    custom_env.begin("click-test", 1)
    assert custom_env.current.browser.evaluate("[innerWidth, innerHeight]") == [500, 320]


def test_a_message_of_the_page_does_not_stop_it():
    custom_env.begin("click-test", 1)
    assert custom_env.current.browser.evaluate("alert('stop') === undefined")


@pytest.mark.parametrize("seed", range(8))
def test_every_task_is_solved_whatever_is_drawn(seed):
    for task in custom_env.SOLVERS:
        custom_env.begin(task, seed)
        for step in custom_env.solution(task):
            getattr(custom_env, step["name"])(**step["arguments"])
        assert custom_env.score()["score"] == 1.0, task
