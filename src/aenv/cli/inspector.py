"""The MCP inspector: a Node program that shows a server's tools in the browser, run beside ``aenv run``."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

from aenv import config

PACKAGE = "@modelcontextprotocol/inspector"
NODE = (22, 19)
"""The oldest Node that the inspector runs on."""
DEFAULT_PORT = 6274


def problem() -> str | None:
    """Why the inspector cannot run on this machine; None when it can."""
    if shutil.which("node") is None or shutil.which("npx") is None:
        return "the MCP inspector needs Node with npx, which is not installed"
    found = answer("node", "--version")
    try:
        version = tuple(int(part) for part in (found or "").removeprefix("v").split(".")[:2])
    except ValueError:
        return f"the MCP inspector needs Node, and 'node --version' answered {found!r}"
    return None if version >= NODE else f"the MCP inspector needs Node 22.19 or newer, and this is {found}"


def answer(*command: str) -> str | None:
    """What a program prints, in one line; None when it fails or takes long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


class Inspector:
    """The inspector's process with everything it starts. Its talk goes to stderr."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, url: str, port: int) -> None:
        """Open the MCP server at ``url``. npx downloads the package when it is not there yet."""
        self._process = subprocess.Popen(
            ["npx", "--yes", PACKAGE, "--transport", "http", "--server-url", url],
            env=config.child_environment({"CLIENT_PORT": str(port)}),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            start_new_session=True,
        )

    def stop(self, grace: float = 2.0) -> None:
        """End it and its children: TERM, a moment, KILL."""
        process, self._process = self._process, None
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
            except (ProcessLookupError, PermissionError):  # macOS says the latter of a group that is gone
                break
            try:
                process.wait(grace)
            except subprocess.TimeoutExpired:
                continue
        process.wait()
