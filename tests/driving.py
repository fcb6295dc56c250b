"""A real browser, told what to do by its debugging protocol: a person's clicks and keys, and what is there then."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.browser import CHROMIUM, OPTIONS

DRIVEN = (
    *(option for option in OPTIONS if option != "--dump-dom" and "virtual-time" not in option),
    "--disable-features=IsolateOrigins,site-per-process",  # frames of other origins can be looked into
    "--disable-site-isolation-trials",
    "--window-size=1280,800",
    "--remote-debugging-pipe",
)
PATIENCE = 60


class BrowserError(Exception):
    """It cannot do what it is asked for, such as with a frame that is being loaded."""


class Browser:
    """Its one page. Messages go over two pipes, each ended by a zero."""

    def __init__(self, to: int, come: int) -> None:
        self._to = to
        self._come = come
        self._left = b""
        self._asked = 0
        self._session = ""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What the browser answers to a command."""
        self._asked += 1
        order: dict[str, Any] = {"id": self._asked, "method": method, "params": parameters}
        if self._session:
            order["sessionId"] = self._session
        os.write(self._to, json.dumps(order).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while True:
            while b"\0" not in self._left:
                ready, _, _ = select.select([self._come], [], [], max(until - time.monotonic(), 0))
                assert ready, f"no answer to {method} {parameters}"
                self._left += os.read(self._come, 1 << 20)
            message, _, self._left = self._left.partition(b"\0")
            told = json.loads(message)
            if told.get("id") == self._asked:
                if "error" in told:
                    raise BrowserError(f"{method}: {told['error']}")
                found: dict[str, Any] = told["result"]
                return found

    def open(self, url: str) -> None:
        self.ask("Page.navigate", url=url)

    def value(self, expression: str, *, frame: int = 0) -> Any:
        """What a script says, in the page or, from 1 on, in one of the frames in it."""
        where = {}
        if frame:
            frames = self.ask("Page.getFrameTree")["frameTree"]["childFrames"]
            world = self.ask("Page.createIsolatedWorld", frameId=frames[frame - 1]["frame"]["id"])
            where = {"contextId": world["executionContextId"]}
        told = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, **where)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def until(self, expression: str, *, frame: int = 0) -> Any:
        """Waits for a script to say something that is true."""
        script = f"(() => {{ try {{ return {expression} }} catch {{ return null }} }})()"
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            with suppress(BrowserError):
                if found := self.value(script, frame=frame):
                    return found
            select.select([], [], [], 0.05)
        raise AssertionError(f"never true: {expression}; the page says {self.value('document.body.innerText')}")

    def click(self, selector: str, *, frame: int = 0) -> None:
        """A click of the mouse where an element is shown."""
        x, y = self._middle(f"document.querySelector({json.dumps(selector)})", frame)
        if frame:
            around = f"document.querySelectorAll('iframe')[{frame - 1}].getBoundingClientRect()"
            x, y = x + self.value(f"{around}.x"), y + self.value(f"{around}.y")
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def _middle(self, element: str, frame: int) -> tuple[float, float]:
        middle = "(({x, y, width, height}) => [x + width / 2, y + height / 2])"
        x, y = self.value(f"{middle}({element}.getBoundingClientRect())", frame=frame)
        return x, y

    def type(self, text: str) -> None:
        self.ask("Input.insertText", text=text)

    def picture(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with a profile in a folder, until the block ends."""
    (theirs, to), (come, answers) = os.pipe(), os.pipe()
    line = [CHROMIUM or "", *DRIVEN, f"--user-data-dir={folder}"]
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{answers}', "-", *line],
        pass_fds=(theirs, answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs)
    os.close(answers)
    try:
        yield Browser(to, come)
    finally:
        os.close(to)
        os.close(come)
        process.terminate()
        process.wait(PATIENCE)
