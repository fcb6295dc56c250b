"""A platform in a process of its own, for tests: started by its command, killed and started again on the same ports."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from aenv import config
from aenv.engines.process import state
from tests.store.servers import free_port
from tests.support import Reply

DESK = Path(__file__).parent / "desk"
"""A project with some of everything."""
PATIENCE = 60.0
"""Seconds that anything may take on a busy machine before a test calls it stuck."""
T = TypeVar("T")


def eventually(what: str, look: Callable[[], T], patience: float = PATIENCE) -> T:
    """What ``look`` finds, once it is something. ``what`` is told when it never is."""
    deadline = time.monotonic() + patience
    while not (found := look()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)
    return found


def ask(
    url: str,
    method: str,
    path: str,
    body: Any = None,
    *,
    token: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = PATIENCE,
) -> Reply:
    """One request on a connection of its own. A body is sent as it is when it is bytes, else as JSON."""
    place = urlsplit(url)
    sent = dict(headers or {})
    if token is not None:
        sent["Authorization"] = f"Bearer {token}"
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    if data is not None:
        sent.setdefault("Content-Type", "application/octet-stream" if isinstance(body, bytes) else "application/json")
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=timeout)
    try:
        connection.request(method, place.path.rstrip("/") + path, data, sent)
        response = connection.getresponse()
        return Reply(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
    finally:
        connection.close()


class Program:
    """A program that tells by lines how far it is, and goes on when it is told to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def line(self) -> str:
        """The next line that it prints; empty at its end."""
        assert self.process.stdout is not None
        watchdog = threading.Timer(PATIENCE, self.process.kill)
        watchdog.start()
        try:
            return self.process.stdout.readline().rstrip("\n")
        finally:
            watchdog.cancel()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> int:
        """Wait for its end; the exit code."""
        return self.process.wait(PATIENCE)


class Platform:
    """``aenv serve``, and what its user has: a token, the command line, Python programs."""

    def __init__(
        self,
        home: Path,
        *options: str,
        variables: Mapping[str, str] | None = None,
        ports: tuple[int, int] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """``prefix`` is a command that starts the server's."""
        self.home = home
        self.control = self.data = self.token = ""
        self.told: dict[str, Any] = {}
        """What the server said when it was ready."""
        self.log: list[str] = []
        self._options = options
        self._variables = dict(variables or {})
        self._ports = ports
        self._prefix = prefix
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The variables of this platform's user, and none of this process's that concern AEnvironment."""
        ours = {setting.variable for setting in config.SETTINGS} | {"AENV_HOME"}
        kept = {name: value for name, value in os.environ.items() if name not in ours}
        return {**kept, "PYTHONUNBUFFERED": "1", "AENV_HOME": str(self.home), **self._variables}

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def text(self) -> str:
        """What the server logged so far."""
        return "".join(self.log)

    # Its life

    def start(self) -> None:
        """Start it, on the ports that it had before. Returns when it is ready."""
        for _ in range(5):
            ports = self._ports or (free_port(), free_port())
            if self._start(ports):
                self._ports = ports
                return
            taken = self._ports is None and "cannot listen" in self.text
            assert taken, f"it did not start:\n{self.text}"
        raise AssertionError(f"no port is free:\n{self.text}")

    def _start(self, ports: tuple[int, int]) -> bool:
        command = [*self._prefix, sys.executable, "-m", "aenv", "serve", *self._options, "-o", "json"]
        self._process = process = subprocess.Popen(
            [*command, "--port", str(ports[0]), "--data-port", str(ports[1])],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.home,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        errors = process.stderr
        self._reader = threading.Thread(target=lambda: self.log.extend(errors), daemon=True)
        self._reader.start()
        watchdog = threading.Timer(PATIENCE, process.kill)
        watchdog.start()
        try:
            told = _object(process.stdout)
        finally:
            watchdog.cancel()
        if told is None:
            self._over()
            return False
        self.told = told
        self.control, self.data = self.told["url"], self.told["data_url"] or ""
        file = self.told["token_file"]
        self.token = self.told["first_token"] or (Path(file).read_text().strip() if file else self.token)
        return True

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, patience: float = PATIENCE) -> int:
        """Wait for its end; the exit code."""
        assert self._process is not None
        self._process.wait(patience)
        return self._over()

    def stop(self) -> int:
        """End it in good order; its instances live on."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def hang_up(self) -> int:
        """Close its standard input, as the end of its parent does, and wait for its end."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self.wait()

    def refused(self) -> str:
        """Start one that cannot be started; what it says."""
        assert not self._start(self._ports or (0, 0))
        assert self._process is not None
        assert self._process.returncode in (1, 3), self.text
        assert "Traceback" not in self.text
        assert spawners(self.home) == []
        return self.text

    def _over(self) -> int:
        assert self._process is not None
        code = self._process.wait(PATIENCE)
        if self._reader is not None:
            self._reader.join(5)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        return code

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def end(self) -> None:
        """End it, and everything that lives on."""
        if self.alive:
            self.signal(signal.SIGTERM)
            try:
                self.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
        end_sandboxes(self.home)

    # What its user does

    def ask(self, method: str, path: str, body: Any = None, *, token: str | None = "", **options: Any) -> Reply:
        """One request to the control plane, with the user's token unless another is given, or None."""
        return ask(self.control, method, path, body, token=self.token if token == "" else token, **options)

    def call(
        self, id: str, method: str, path: str, body: Any = None, *, token: str | None = "", **options: Any
    ) -> Reply:
        """One request to an instance through the gateway."""
        token = self.token if token == "" else token
        return ask(f"{self.data}/env-instance/{id}", method, path, body, token=token, **options)

    def aenv(self, *arguments: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the command line as this platform's user."""
        return self._run([sys.executable, "-m", "aenv", *arguments], check, variables)

    def run(self, script: str, *arguments: str, check: bool = True, **variables: str) -> str:
        """Run a Python program as this platform's user; what it prints."""
        return self._run([sys.executable, "-c", script, *arguments], check, variables).stdout

    @contextmanager
    def program(self, script: str, **variables: str) -> Iterator[Program]:
        """A Python program of this platform's user, while it runs. It is killed at the end of the block."""
        environment = {**self.environment, "AENV_SYSTEM_URL": self.control, **variables}
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.home,
        )
        try:
            yield Program(process)
        finally:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with suppress(OSError):
                    stream.close()

    def _run(self, command: list[str], check: bool, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        environment = {**self.environment, "AENV_SYSTEM_URL": self.control, **variables}
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=self.home,
            timeout=2 * PATIENCE,
            check=False,
        )
        assert not check or done.returncode == 0, (
            f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        )
        return done

    def push(self, project: Path = DESK, *, release: bool = True) -> str:
        """Push a project, and release it; its reference."""
        self.aenv("push", str(project))
        found = json.loads((project / "config.json").read_text())
        if release:
            self.ask("POST", f"/env/{found['name']}/{found['version']}/release").data  # noqa: B018
        return f"{found['name']}@{found['version']}"

    def create(self, env: str, *, token: str | None = "", wait: float = PATIENCE, **fields: Any) -> dict[str, Any]:
        """An instance that runs."""
        reply = self.ask(
            "POST", "/env-instance", {"envName": env, **fields}, token=token, headers={"Prefer": f"wait={wait:g}"}
        )
        found: dict[str, Any] = reply.data
        assert found["status"] == "Running", found
        return found


def variant(folder: Path, name: str, version: str = "1.2.0", **deploy: Any) -> Path:
    """A copy of the project, under another name and with more in its ``deployConfig``."""
    project = folder / name
    shutil.copytree(DESK, project, dirs_exist_ok=True)
    config = json.loads((DESK / "config.json").read_text())
    config |= {"name": name, "version": version, "deployConfig": config["deployConfig"] | deploy}
    (project / "config.json").write_text(json.dumps(config))
    return project


def _object(lines: Iterable[str]) -> dict[str, Any] | None:
    """The JSON object that somebody prints; None when it ends without."""
    text = ""
    for line in lines:
        text += line
        with suppress(ValueError):
            found: dict[str, Any] = json.loads(text)
            return found
    return None


def spawners(home: Path) -> list[Path]:
    """Directories of what holds the sandboxes of a home."""
    return [found.parent for found in state.root(home).glob("*/lock")]


def end_sandboxes(home: Path) -> None:
    """End what lives on in a home."""
    for place in spawners(home):
        with suppress(OSError, ValueError):
            os.kill(json.loads((place / "spawner.json").read_text())["pid"], signal.SIGTERM)
    eventually("the end of its sandboxes", lambda: not spawners(home))


@contextmanager
def new_home() -> Iterator[Path]:
    """A home of AEnvironment: a short path, since sockets are below it."""
    path = Path(tempfile.mkdtemp(prefix="aenvp-", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def platform(
    *options: str,
    home: Path | None = None,
    ports: tuple[int, int] | None = None,
    prefix: Sequence[str] = (),
    **variables: str,
) -> Iterator[Platform]:
    """A platform that is ready, on free ports unless some are given. It and all that it made end with the block."""
    with new_home() as made:
        found = Platform(home or made, *options, variables=variables, ports=ports, prefix=prefix)
        try:
            found.start()
            yield found
        finally:
            found.end()
