"""The page of examples/09-mini-program in a real browser: from a message to an app that is used, and to a score."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from aenv import Environment
from aenv.rl import Trajectory, read
from tests.browser import needs_browser
from tests.driving import PATIENCE, Browser, browser
from tests.rl.standin import calling, model, saying
from tests.support import ROOT

pytestmark = pytest.mark.xdist_group("mini-program")
EXAMPLE = ROOT / "examples" / "09-mini-program"
APP = EXAMPLE / "app.py"
STATE = "document.getElementById('state').textContent"
LAST = "[...document.querySelectorAll('.agent')].at(-1).textContent"


class Served(NamedTuple):
    url: str
    process: subprocess.Popen[str]
    out: Path

    def stopped(self) -> list[Trajectory]:
        """The episodes, after Ctrl-C."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(60) == 0
        return list(read(self.out))


@contextmanager
def serving(folder: Path, *more: str, **variables: str) -> Iterator[Served]:
    """The program, as a person starts it."""
    out = folder / "trajectories.jsonl"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("AENV_", "DUMMY_", "OPENAI_"))}
    process = subprocess.Popen(
        (sys.executable, str(APP), "--port", "0", "--out", str(out), *more),
        stdout=subprocess.PIPE,
        text=True,
        env={**env, "AENV_HOME": str(folder / "home"), **variables},
    )
    assert process.stdout is not None
    try:
        found = re.search(r"http://localhost:\d+", process.stdout.readline())
        assert found
        yield Served(found[0], process, out)
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def say(page: Browser, text: str) -> None:
    page.until(f"{STATE} === 'ready'")
    page.click("textarea")
    page.type(text)
    page.click("form button")


@needs_browser
def test_from_a_message_to_an_app_that_is_used(tmp_path: Path) -> None:
    with serving(tmp_path) as served, browser(tmp_path / "profile") as page:
        page.open(served.url)
        say(page, "A purple counter, please.")
        page.until(f"{LAST}.startsWith('Here is a counter app')")
        assert page.value("[...document.querySelectorAll('.call')].map((call) => call.textContent)") == [
            "write_file index.html",
            "write_file style.css",
            "write_file app.js",
        ]
        colour = "getComputedStyle(document.querySelector('output')).color"
        page.until(f"{colour} === 'rgb(128, 0, 128)'", frame=1)
        until = time.monotonic() + PATIENCE
        while page.until("document.querySelector('output').value", frame=1) != "1":
            page.click("button:last-of-type", frame=1)  # again where the page has loaded the app once more
            assert time.monotonic() < until
        assert page.value("localStorage.length === 0 && location.origin", frame=1) != served.url

        say(page, "Make it green.")
        page.until(f"{LAST} === 'It is green now.'")
        page.until(f"{colour} === 'rgb(0, 128, 0)'", frame=1)
        page.click("#show-code")
        page.until("document.querySelectorAll('#code pre')[2].textContent.includes('--accent: green')")

        page.click("#end")
        page.until(f"{STATE} === 'over'")
        assert page.value(LAST) == "The conversation is over. Its reward is 1."
        (played,) = served.stopped()
    assert played.reward == 1.0
    calls = [call.name for turn in played.turns for call in turn.calls]
    assert calls == ["write_file", "write_file", "write_file", "read_file", "write_file"]


@needs_browser
def test_a_conversation_ends_with_its_page(tmp_path: Path) -> None:
    with serving(tmp_path) as served, browser(tmp_path / "profile") as page:
        page.open(served.url)
        page.until(f"{STATE} === 'ready'")
        first = page.value("session")
        page.open(served.url)
        page.until(f"{STATE} === 'ready' && session !== {json.dumps(first)}")
        until = time.monotonic() + PATIENCE
        while not (ended := list(read(served.out))):
            assert time.monotonic() < until
    assert [played.reward for played in ended] == [0.0]


class Asker:
    """What the page asks, without the page."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.session = ""

    def ask(self, path: str, sent: Any = None, **headers: str) -> tuple[int, Any]:
        body = None if sent is None else sent if isinstance(sent, bytes) else json.dumps(sent).encode()
        headers = {"Content-Type": "application/json", **headers} if body is not None else headers
        try:
            with urlopen(Request(self.url + path, body, headers), timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except HTTPError as exc:
            return exc.code, exc.read().decode()

    def begin(self) -> None:
        self.session = self.ask("/sessions", {})[1]["id"]
        self.waited("ready")

    def say(self, text: str) -> tuple[int, Any]:
        return self.ask(f"/sessions/{self.session}/messages", {"message": text})

    def waited(self, state: str) -> Any:
        found = {"state": ""}
        while found["state"] != state:
            _, found = self.ask(f"/sessions/{self.session}?state={found['state']}&from=1000")
        return self.ask(f"/sessions/{self.session}")[1]


async def test_a_model_builds_and_its_failure_is_no_reward(tmp_path: Path) -> None:
    page = json.dumps({"path": "index.html", "content": "<h1>Hello</h1>"})
    async with model(calling("write_file", page), saying("Done."), (400, {"error": "no such model"})) as server:

        def talk() -> tuple[Any, list[Trajectory]]:
            with serving(tmp_path, "--model", "m", OPENAI_BASE_URL=server.url, OPENAI_API_KEY="k") as served:
                asker = Asker(served.url)
                asker.begin()
                asker.say("A greeting.")
                assert asker.waited("ready")["messages"][-1]["content"] == "Done."
                assert asker.ask(f"/sessions/{asker.session}/files")[1] == {"index.html": "<h1>Hello</h1>"}
                asker.say("And now a song.")
                return asker.waited("over"), served.stopped()

        over, (played,) = await asyncio.to_thread(talk)
    assert over["reward"] is None
    assert "no such model" in over["failure"]
    assert played.failure
    assert played.failure.kind == "model_failed"
    offered = [tool["function"]["name"] for tool in server.asked[0]["tools"]]
    assert offered == ["write_file", "read_file", "list_files", "delete_file", "run"]
    said = [message["content"] for message in server.asked[2]["messages"] if message["role"] == "user"]
    assert said == ["A greeting.", "And now a song."]


async def test_an_instance_that_is_lost_ends_its_conversation(tmp_path: Path) -> None:
    async with model(calling("run", json.dumps({"command": "kill -9 $PPID"}))) as server:

        def talk() -> tuple[Any, list[Trajectory]]:
            with serving(tmp_path, "--model", "m", OPENAI_BASE_URL=server.url) as served:
                asker = Asker(served.url)
                asker.begin()
                asker.say("End yourself.")
                return asker.waited("over"), served.stopped()

        over, (played,) = await asyncio.to_thread(talk)
    assert over["reward"] is None
    assert played.failure
    assert played.failure.kind == "sandbox_lost"


async def test_commands_reach_no_port_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of ``aenv run``, which the page starts, and whose tools ask nobody who calls them."""
    monkeypatch.setenv("AENV_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(EXAMPLE)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        async with Environment("mini-program") as env:
            command = f": < /dev/tcp/127.0.0.1/{listening.getsockname()[1]}"
            found = await env.call_tool("run", {"command": command})
    assert found.structured
    assert found.structured["exit_code"] != 0


def test_what_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        asker = Asker(served.url)
        assert asker.ask("/", Host="evil.example")[0] == 400
        assert asker.ask("/sessions", b"{}", **{"Content-Type": "text/plain"})[0] == 415
        assert asker.ask("/sessions", b"{")[0] == 400
        assert asker.ask("/sessions/none")[0] == 404
        asker.begin()
        assert asker.ask(f"/sessions/{asker.session}?from=x")[0] == 400
        assert asker.ask(f"/sessions/{asker.session}/messages", {"message": 1})[0] == 400
        assert asker.say("x" * 8001)[0] == 400
        others = [asker.ask("/sessions", {})[0] for _ in range(8)]
        assert others == [200] * 7 + [429]
        assert asker.ask(f"/sessions/{asker.session}/end", {})[1]["reward"] == 0.0
        assert asker.say("More.")[0] == 409
        assert asker.ask("/sessions", {})[0] == 200
        assert len(served.stopped()) >= 1


def test_the_tests_of_the_environment_itself() -> None:
    line = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE / "test"))
    done = subprocess.run(line, cwd=EXAMPLE, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
