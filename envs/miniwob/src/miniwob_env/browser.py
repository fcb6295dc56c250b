"""One headless Chromium with one tab, a child of this process, led over the pipe of its DevTools protocol.

The pipe is two descriptors that nobody else has: there is no port to be found, and the browser ends when this
process does, whatever way that is.
"""

import fcntl
import json
import os
import selectors
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from aenv import AEnvError, Invalid, SandboxLost

PROGRAMS = (
    "/usr/lib/chromium/chromium",  # without Debian's script, which reads settings in /etc that a sandbox does not have
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)
WIDTH, HEIGHT = 500, 320
"""The inside of the window, as the benchmark has it."""
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # this sandbox is the boundary, and lets nobody make another one
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-smooth-scrolling",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--disable-breakpad",
    "--disable-features=Translate,MediaRouter,OptimizationHints,PaintHolding",
    "--force-color-profile=srgb",
    "--force-device-scale-factor=1",
    "--hide-scrollbars",
    "--metrics-recording-only",
    "--mute-audio",
    "--no-first-run",
    "--no-zygote",
    "--password-store=basic",
    "--renderer-process-limit=1",
    f"--window-size={WIDTH},{HEIGHT}",
)
PATIENCE = 30.0
"""Seconds that a command may take; the first one includes the start of the browser."""


class BrowserLost(SandboxLost):
    """The browser has ended, and the episode with it: nothing of that is for the agent to read."""


class PageError(AEnvError):
    """The browser is well, and did not do what it was told."""


def program() -> str:
    """The path of a browser on this machine."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        raise Invalid(
            "there is no Chromium on this machine, and the pages need one",
            hint="install it, on Debian and Ubuntu with: apt-get install chromium",
        )
    return found


class Browser:
    """A browser that runs, and its tab."""

    def __init__(self) -> None:
        path = program()
        self.profile = tempfile.mkdtemp(prefix="miniwob-")
        self._pending = b""
        self._last = 0
        self._session = ""
        self._pid: int | None = None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        try:
            self._spawn(path, theirs_in, theirs_out)
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        try:
            tab = self._new_tab()
            self._session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
            self.call("Page.enable")
            # A window without a head has bars as well, and the page would have what they leave of it.
            size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
            self.call("Emulation.setDeviceMetricsOverride", **size)
        except BaseException:
            self.close()
            raise

    def _spawn(self, path: str, theirs_in: int, theirs_out: int) -> None:
        """Start the program with the pipe at descriptors 3 and 4, where it expects it."""
        # Copied out of the way first: either end may itself be 3 or 4.
        high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs_in, theirs_out)]
        log = os.open(f"{self.profile}/log", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            places = [(high[0], 3), (high[1], 4), (log, 1), (log, 2)]
            self._pid = os.posix_spawn(
                path,
                [path, *FLAGS, f"--user-data-dir={self.profile}", "about:blank"],
                {**os.environ, "HOME": self.profile},
                file_actions=[(os.POSIX_SPAWN_DUP2, here, there) for here, there in places],
            )
        finally:
            for descriptor in (*high, log):
                os.close(descriptor)

    def _new_tab(self) -> str:
        """The tab that the browser opens by itself, a moment after it begins to answer, or else one of ours."""
        for target in self.call("Target.getTargets")["targetInfos"]:
            if target["type"] == "page":
                return str(target["targetId"])
        return str(self.call("Target.createTarget", url="about:blank")["targetId"])

    def call(self, method: str, /, **arguments: Any) -> dict[str, Any]:
        """Send a command, and return what it answers."""
        number = self._send(method, arguments)
        deadline = time.monotonic() + PATIENCE
        while True:
            message = self._receive(method, deadline)
            if message.get("method") == "Page.javascriptDialogOpening":  # which stops the page until somebody answers
                self._send("Page.handleJavaScriptDialog", {"accept": True})
            elif message.get("method") == "Inspector.targetCrashed":
                raise self._ended(f"the page crashed during {method}")
            elif message.get("id") == number:
                if "error" in message:
                    raise PageError(f"the browser refused {method}: {message['error'].get('message')}")
                return dict(message["result"])

    def evaluate(self, expression: str) -> Any:
        """What an expression of ours gives in the page, as JSON; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            thrown = answer["exceptionDetails"].get("exception", {}).get("description", "an exception")
            raise PageError(f"the page raised {thrown}")
        return answer["result"].get("value")

    @property
    def closed(self) -> bool:
        return self._pid is None

    def close(self) -> None:
        """End the browser. May be called again."""
        if self._pid is None:
            return
        pid, self._pid = self._pid, None
        os.close(self._out)
        os.close(self._in)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        shutil.rmtree(self.profile, ignore_errors=True)

    def _send(self, method: str, arguments: dict[str, Any]) -> int:
        if self._pid is None:
            raise BrowserLost("the browser has ended", hint="a reset starts another one")
        self._last += 1
        command = {"id": self._last, "method": method, "params": arguments}
        if self._session:
            command["sessionId"] = self._session
        data = memoryview(json.dumps(command).encode() + b"\0")
        try:
            while data:
                data = data[os.write(self._out, data) :]
        except BrokenPipeError:
            raise self._ended(f"the browser ended before {method}") from None
        return self._last

    def _receive(self, method: str, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._pending:
            with selectors.DefaultSelector() as selector:
                selector.register(self._in, selectors.EVENT_READ)
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self._ended(f"the browser did not answer {method} within {PATIENCE:.0f} seconds")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise self._ended(f"the browser ended during {method}")
            self._pending += data
        message, _, self._pending = self._pending.partition(b"\0")
        return dict(json.loads(message))

    def _ended(self, what: str) -> BrowserLost:
        """Close a browser that is of no more use, and say what it said last."""
        said = ""
        with suppress(OSError):
            said = Path(self.profile, "log").read_text(errors="replace").strip()[-500:]
        self.close()
        return BrowserLost(f"{what}{': ' + said if said else ''}", hint="a reset starts another one")
