"""What a sandbox is brought when it is up: real runtimes that wait, and whoever comes to them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aenv import project
from aenv.runtime.delivery import Brought, pack
from tests.runtime.wire import send
from tests.store.servers import free_port
from tests.support import Reply

KEY, OWNER = "the engine's", "the owner's"
BEARER = {"Authorization": f"Bearer {KEY}"}
SHOWS = """
    import os, sys
    from aenv import register_tool

    @register_tool
    def show() -> dict:
        return {"argv": sys.argv[1:], "value": os.environ.get("VALUE"), "home": os.getcwd()}
"""


class Waiting:
    """A runtime that waits for what it is brought."""

    def __init__(self, process: subprocess.Popen[str], port: int, work: Path) -> None:
        self.process, self.port, self.work = process, port, work

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        return send(self.port, method, path, body, headers)

    def bring(self, content: bytes, key: str = KEY) -> Reply:
        return self.ask("PUT", "/delivery", content, {"Authorization": f"Bearer {key}"})

    def await_health(self, status: int) -> Reply:
        """The answer to a question for its health, once it has that status."""
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                reply = self.ask("GET", "/health")
                if reply.status == status:
                    return reply
            assert self.process.poll() is None, f"it ended: {self.process.stderr and self.process.stderr.read()}"
            assert time.monotonic() < deadline, f"its health never was {status}"
            time.sleep(0.02)

    def call(self, tool: str) -> Any:
        return self.ask("POST", f"/tools/{tool}", {}, {"Authorization": f"Bearer {OWNER}"}).data

    def end(self) -> str:
        """Wait for its end, which is a failure; what it said."""
        _, said = self.process.communicate(timeout=60)
        assert self.process.returncode == 1
        return said


@contextlib.contextmanager
def waiting(work: Path, *start: str, path: str = "/nowhere", **variables: str) -> Iterator[Waiting]:
    """One, until the block ends. ``start`` is how it is started; as a container does it by default."""
    port = free_port()
    told = {
        "AENV_DELIVERY": "1",
        "AENV_ENGINE_TOKEN_SHA256": hashlib.sha256(KEY.encode()).hexdigest(),
        "AENV_OWNER_TOKEN_SHA256": hashlib.sha256(OWNER.encode()).hexdigest(),
        "AENV_LISTEN": f"127.0.0.1:{port}",
        "AENV_WORK": str(work),
        **variables,
    }
    command = [*(start or (sys.executable, "-m", "aenv.runtime")), path]
    process = subprocess.Popen(command, env={**os.environ, **told}, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        yield Waiting(process, port, work)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Waiting]:
    work = tmp_path / "work"
    work.mkdir()
    with waiting(work) as found:
        found.await_health(503)
        yield found


@pytest.fixture
def shows(tmp_path: Path) -> bytes:
    """The archive of a project that shows what it was given."""
    root = tmp_path / "shows"
    (root / "src").mkdir(parents=True)
    (root / "src" / "custom_env.py").write_text(textwrap.dedent(SHOWS))
    config = {"name": "shows", "version": "1.0.0", "buildConfig": {}, "deployConfig": {}}
    (root / "config.json").write_text(json.dumps(config))
    return project.pack(project.read(root))


def test_variables_arguments_and_a_project(runtime: Waiting, shows: bytes) -> None:
    brought = Brought(variables={"VALUE": "a $HOME\nof two lines é"}, arguments=["--x", "y z"], project=True)
    assert runtime.bring(pack(brought, shows)).status == 200
    runtime.await_health(200)
    found = runtime.call("show")
    assert (found["argv"], found["value"]) == (["--x", "y z"], "a $HOME\nof two lines é")
    assert Path(found["home"]) == runtime.work / "project"


def test_the_project_of_an_image_is_served_with_what_is_brought(tmp_path: Path, shows: bytes) -> None:
    with waiting(tmp_path, path=str(tmp_path / "shows")) as runtime:
        runtime.await_health(503)
        assert runtime.bring(pack(Brought(variables={"VALUE": "1"}, arguments=["a"]))).status == 200
        runtime.await_health(200)
        assert runtime.call("show")["value"] == "1"


def test_until_then_it_says_that_it_waits(runtime: Waiting) -> None:
    for method, path in (("GET", "/health"), ("POST", "/tools/show"), ("POST", "/mcp"), ("GET", "/delivery")):
        reply = runtime.ask(method, path, {} if method == "POST" else None, BEARER)
        assert reply.status == 503
        assert "waits" in reply.json["error"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": "Bearer"},
        {"Authorization": f"Bearer {hashlib.sha256(KEY.encode()).hexdigest()}"},
        {"Authorization": f"Bearer {OWNER}"},
    ],
)
def test_only_the_engine_may_bring_it(runtime: Waiting, shows: bytes, headers: dict[str, str]) -> None:
    content = pack(Brought(variables={"VALUE": "theirs"}, project=True), shows)
    assert runtime.ask("PUT", "/delivery", content, headers).status == 401
    assert runtime.bring(pack(Brought(variables={"VALUE": "ours"}, project=True), shows)).status == 200
    runtime.await_health(200)
    assert runtime.call("show")["value"] == "ours"


def test_a_second_delivery_is_refused(runtime: Waiting, shows: bytes) -> None:
    content = pack(Brought(variables={"VALUE": "first"}, project=True), shows)
    assert runtime.bring(content).status == 200
    runtime.await_health(200)
    assert (
        runtime.bring(pack(Brought(variables={"VALUE": "second"}, project=True), shows)).json["error"]
        == "it was brought already"
    )
    assert runtime.call("show")["value"] == "first"


def test_of_two_that_overlap_one_is_told_that_it_was_taken(runtime: Waiting, shows: bytes) -> None:
    slow = pack(Brought(variables={"VALUE": "slow"}, project=True), shows)
    head = f"PUT /delivery HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(slow)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", runtime.port), timeout=30) as first:
        first.sendall(head.encode() + slow[:-1])
        assert runtime.bring(pack(Brought(variables={"VALUE": "fast"}, project=True), shows)).status == 200
        answer = b""
        with contextlib.suppress(OSError):
            first.sendall(slow[-1:])
            answer = first.recv(1000)
    assert b" 200 " not in answer
    runtime.await_health(200)
    assert runtime.call("show")["value"] == "fast"


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"{\n", b"[]\n", b'{"variables": {"a": 1}}\n', b'{"more": 1}\n', b"\xff"]
)
def test_what_cannot_be_read_is_refused_and_it_waits_on(runtime: Waiting, shows: bytes, content: bytes) -> None:
    reply = runtime.bring(content)
    assert reply.status == 422
    assert "cannot be read" in reply.json["error"]
    assert runtime.bring(pack(Brought(project=True), shows)).status == 200
    runtime.await_health(200)


def test_one_that_is_cut_off_is_none(runtime: Waiting, shows: bytes) -> None:
    content = pack(Brought(variables={"VALUE": "half"}, project=True), shows)
    head = f"PUT /delivery HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", runtime.port), timeout=30) as first:
        first.sendall(head.encode() + content[: len(content) // 2])
    runtime.await_health(503)
    assert runtime.bring(pack(Brought(variables={"VALUE": "whole"}, project=True), shows)).status == 200
    runtime.await_health(200)
    assert runtime.call("show")["value"] == "whole"


def test_too_much_is_refused(tmp_path: Path, shows: bytes) -> None:
    little = (
        "import sys; from aenv.runtime import __main__, delivery; delivery.MOST = 100_000; sys.exit(__main__.main())"
    )
    with waiting(tmp_path, sys.executable, "-c", little) as runtime:
        runtime.await_health(503)
        assert runtime.bring(pack(Brought(project=True), b"x" * 100_000)).status == 413
        assert runtime.bring(pack(Brought(project=True), shows)).status == 200
        runtime.await_health(200)


def hostile(kind: str) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as archive:
        if kind in ("above", "absolute"):
            info = tarfile.TarInfo("../escaped" if kind == "above" else "/tmp/escaped")
            info.size = 1
            archive.addfile(info, io.BytesIO(b"x"))
        elif kind == "link":
            info = tarfile.TarInfo("way")
            info.type, info.linkname = tarfile.SYMTYPE, "/etc"
            archive.addfile(info)
            info = tarfile.TarInfo("way/escaped")
            info.size = 1
            archive.addfile(info, io.BytesIO(b"x"))
        elif kind == "device":
            info = tarfile.TarInfo("device")
            info.type, info.devmajor, info.devminor = tarfile.CHRTYPE, 1, 3
            archive.addfile(info)
    return held.getvalue()


@pytest.mark.parametrize("kind", ["above", "absolute", "link", "device", "cut", "nothing", "no archive"])
def test_archives_that_mean_harm_end_it_with_the_reason(runtime: Waiting, shows: bytes, kind: str) -> None:
    data = {"cut": shows[: len(shows) // 2], "nothing": b"", "no archive": b"text" * 100}.get(kind) or hostile(kind)
    if kind == "nothing":
        data = b""
    assert runtime.bring(pack(Brought(project=True), data)).status == 200
    assert runtime.end().startswith("error: ")
    assert {path.name for path in runtime.work.iterdir()} <= {"project"}
    assert not (runtime.work.parent / "escaped").exists()


def test_nobody_could_bring_it(tmp_path: Path) -> None:
    with waiting(tmp_path, AENV_ENGINE_TOKEN_SHA256="") as runtime:
        said = runtime.end()
    assert "error: nobody could bring" in said
    assert "AENV_ENGINE_TOKEN_SHA256" in said


def test_it_ends_when_it_is_asked_to_while_it_waits(runtime: Waiting) -> None:
    runtime.process.send_signal(signal.SIGTERM)
    assert runtime.process.wait(30) == 128 + signal.SIGTERM


def test_it_ends_when_it_is_asked_to_in_the_midst_of_requests(tmp_path: Path) -> None:
    for attempt in range(3):
        (work := tmp_path / str(attempt)).mkdir()
        with waiting(work) as runtime:
            runtime.await_health(503)
            with socket.create_connection(("127.0.0.1", runtime.port), 30) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 16)
                runtime.process.send_signal(signal.SIGTERM)
                assert runtime.process.wait(30) == 128 + signal.SIGTERM


def test_it_ends_also_as_the_first_process_of_its_container(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root, and unshare")
    start = ("unshare", "--pid", "--fork", "--kill-child", sys.executable, "-m", "aenv.runtime")
    with waiting(tmp_path, *start) as runtime:
        runtime.await_health(503)
        children = Path(f"/proc/{runtime.process.pid}/task/{runtime.process.pid}/children").read_text().split()
        (first,) = map(int, children)
        os.kill(first, signal.SIGTERM)
        runtime.process.wait(30)
