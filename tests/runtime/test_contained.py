"""A runtime as a container runs it: on a unix socket, in a copy of its project, until its standard input ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aenv import http
from aenv.errors import StartFailed
from aenv.project import Project
from aenv.runtime.tokens import digest, new_owner_token
from aenv.runtime.warm import UNFIT
from aenv.runtime.work import move
from tests.support import until

SOURCE = """
import os
from aenv import Context, register_tool
import beside

@register_tool
def about(ctx: Context) -> dict[str, object]:
    return {
        "work": str(ctx.working_directory),
        "cwd": os.getcwd(),
        "file": __file__,
        "beside": beside.__file__,
        "variables": [name for name in ctx.environment_variables if name.startswith("AENV_")],
        "name": ctx.env_name,
    }

@register_tool
def write(text: str) -> None:
    open("data.txt", "w").write(text)
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """A project with all that a directory can hold."""
    root = tmp_path / "app"
    (root / "src").mkdir(parents=True)
    (root / "src" / "tools.py").write_text(SOURCE)
    (root / "beside.py").write_text("")
    (root / "data.txt").write_text("original")
    (root / "run.sh").write_text("exit 0")
    (root / "run.sh").chmod(0o755)
    (root / "empty").mkdir(mode=0o750)
    (root / ".git").mkdir()
    (root / ".git" / "HEAD").write_text("x")
    (root / ".env").write_text("PASSWORD=1")
    (root / "outside").symlink_to("/etc")
    (root / "relative").symlink_to("data.txt")
    (root / "src" / "absolute").symlink_to(root / "data.txt")
    os.mkfifo(root / "pipe")
    (tmp_path / "work").mkdir()
    return root


class Contained:
    """A runtime that listens on a socket."""

    def __init__(self, process: subprocess.Popen[str], path: Path, token: str | None) -> None:
        self.process, self.path, self.token = process, path, token

    def ask(self, method: str, path: str, body: Any = None, *, token: str | None = None) -> tuple[int, Any]:
        chosen = self.token if token is None else token
        headers = f"Authorization: Bearer {chosen}\r\n".encode() if chosen else b""
        content = b"" if body is None else json.dumps(body).encode()

        async def asked() -> tuple[int, Any]:
            answer = await http.request(method, f"unix:{self.path}", path, headers=headers, body=content)
            return answer.status, json.loads(answer.body)

        return asyncio.run(asked())

    def call(self, tool: str, **arguments: Any) -> Any:
        status, answer = self.ask("POST", f"/tools/{tool}", arguments)
        assert status == 200, answer
        return answer["data"]


@contextmanager
def contained(
    app: Path, tmp_path: Path, *options: str, module: str = "aenv.runtime", variables: Mapping[str, str] | None = None
) -> Iterator[Contained]:
    """Run the runtime on ``tmp_path/s`` until the block ends."""
    path, token = tmp_path / "s", new_owner_token()
    told = {"AENV_SOCKET": str(path), "AENV_WORK": str(tmp_path / "work"), "AENV_OWNER_TOKEN_SHA256": digest(token)}
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(app), *options],
        cwd=app,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **told, **(variables or {})},
    )
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith("serving"):
            break
    reader = threading.Thread(target=process.stderr.read, daemon=True)
    reader.start()
    try:
        assert seen[-1].startswith("serving"), "".join(seen)
        assert seen[-1].endswith(f" at unix:{path}\n")
        yield Contained(process, path, token)
    finally:
        process.kill()
        process.wait()
        reader.join(5)
        assert process.stdin is not None
        process.stdin.close()
        process.stderr.close()


def fails(app: Path, variables: Mapping[str, str], *options: str) -> str:
    """What a runtime says that does not start."""
    command = [sys.executable, "-m", "aenv.runtime", str(app), "--port", "0", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **variables})
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    return ended.stderr


@pytest.mark.parametrize("module", ["aenv.runtime", "aenv.main"])
def test_a_sandbox_works_in_a_copy_and_listens_on_a_socket(app: Path, tmp_path: Path, module: str) -> None:
    with contained(app, tmp_path, module=module) as running:
        work = tmp_path / "work"
        assert stat.S_IMODE(running.path.stat().st_mode) == 0o666
        assert running.call("about") == {
            "work": str(work),
            "cwd": str(work),
            "file": str(work / "src" / "tools.py"),
            "beside": str(work / "beside.py"),
            "variables": [],
            "name": "app",
        }
        running.call("write", text="changed")
        assert (work / "data.txt").read_text() == "changed"
        assert (app / "data.txt").read_text() == "original"
        assert not (app / "src" / "__pycache__").exists()
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(30) == 0
        assert not running.path.exists()


def test_a_socket_asks_for_a_token(app: Path, tmp_path: Path) -> None:
    with contained(app, tmp_path) as running:
        assert running.ask("POST", "/tools/about", {}, token="")[0] == 401
        assert running.ask("POST", "/tools/about", {}, token="other")[0] == 401
        assert running.ask("GET", "/health")[0] == 200


def test_a_socket_without_a_token_makes_one(app: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    command = [sys.executable, "-m", "aenv.runtime", str(app), "--socket", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=app) as process:
        assert process.stderr is not None
        try:
            assert next(process.stderr).startswith("serving")
            token = next(process.stderr).partition("owner token (shown once): ")[2].strip()
            running = Contained(process, path, token)
            assert running.ask("POST", "/tools/about", {}, token="")[0] == 401
            assert running.call("about")["cwd"] == str(app)
        finally:
            process.kill()


def test_a_name_that_may_be_rebound_is_refused(app: Path, tmp_path: Path) -> None:
    with contained(app, tmp_path) as running, socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(running.path))
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: attacker.example\r\n\r\n")
        assert b" 403 " in sock.recv(4096)


def test_a_warm_sandbox_becomes_an_instance_in_the_copy(app: Path, tmp_path: Path) -> None:
    with contained(app, tmp_path, variables={"AENV_WARM": "1"}) as running:
        assert running.ask("GET", "/health")[1]["data"]["status"] == "warm"
        assert running.ask("POST", "/specialise", {"environment_variables": {"NAME": "x"}})[0] == 200
        assert running.call("about")["file"] == str(tmp_path / "work" / "src" / "tools.py")


@pytest.mark.parametrize(
    ("told", "own", "early"),
    [
        ("", "auto", False),
        ("", "true", True),
        ("auto", "auto", True),
        ("auto", "false", False),
        ("auto", "true", True),
        ("true", "auto", True),
        ("false", "true", False),
    ],
)
def test_who_says_whether_a_warm_one_imports_before(
    app: Path, tmp_path: Path, told: str, own: str, early: bool
) -> None:
    preload = '"auto"' if own == "auto" else own
    (app / "config.json").write_text(f'{{"name": "app", "version": "1.0.0", "deployConfig": {{"preload": {preload}}}}}')
    with contained(app, tmp_path, variables={"AENV_WARM": "1", "AENV_PRELOAD": told}) as running:
        assert running.ask("GET", "/health")[1]["data"]["preloaded"] is early
        assert running.ask("POST", "/specialise", {"environment_variables": {"NAME": "x"}})[0] == 200
        assert running.call("about")["file"] == str(tmp_path / "work" / "src" / "tools.py")


@pytest.mark.parametrize("kind", ["clock", "thread", "secret", "failure"])
def test_a_warm_one_that_imported_too_early_ends_and_says_why(app: Path, tmp_path: Path, kind: str) -> None:
    lines, said = {
        "clock": ("import time\nNOW = time.time()", "reads the clock (time.time) at src/tools.py"),
        "thread": (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()",
            "leaves the thread 'Thread-1 (sleep)' running",
        ),
        "secret": ("import os\nos.environ.setdefault('KEY', '')", "goes by KEY, of which the value comes later"),
        "failure": ("raise RuntimeError('no name')", "cannot be imported without an instance's variables"),
    }[kind]
    (app / "src" / "tools.py").write_text(f"{SOURCE}\n{lines}\n")
    told = {"AENV_SOCKET": str(tmp_path / "s"), "AENV_WORK": str(tmp_path / "work"), "AENV_SECRETS": "KEY"}
    ended = subprocess.run(
        [sys.executable, "-m", "aenv.runtime", str(app)],
        cwd=app,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **told, "AENV_WARM": "1", "AENV_PRELOAD": "auto"},
    )
    assert ended.returncode == UNFIT, ended.stderr
    assert "not imported before there is an instance" in ended.stderr
    assert said in ended.stderr
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("given", ["variable", "option"])
def test_it_ends_with_its_standard_input(app: Path, tmp_path: Path, given: str) -> None:
    options, variables = ((), {"AENV_UNTIL_EOF": "1"}) if given == "variable" else (("--until-eof",), {})
    with contained(app, tmp_path, *options, variables=variables) as running:
        assert running.process.poll() is None
        assert running.process.stdin is not None
        running.process.stdin.close()
        assert running.process.wait(30) == 0


def test_a_socket_that_nobody_listens_on_is_replaced(app: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "s"))
    with contained(app, tmp_path) as running:
        assert running.ask("GET", "/health")[0] == 200
        said = fails(app, {}, "--socket", str(running.path))
        assert f"cannot listen on unix:{running.path}: Address already in use" in said
        assert running.ask("GET", "/health")[0] == 200


def test_what_is_no_socket_is_not_replaced(app: Path, tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    assert "cannot listen on" in fails(app, {"AENV_SOCKET": str(tmp_path / "s")})
    assert (tmp_path / "s").read_text() == "precious"
    said = fails(app, {"AENV_SOCKET": str(tmp_path / "nowhere" / "s")})
    assert "No such file or directory" in said
    assert "hint: choose another with --socket" in said


def test_a_work_directory_that_cannot_be_used_is_named(app: Path, tmp_path: Path) -> None:
    said = fails(app, {"AENV_WORK": str(tmp_path / "nowhere")})
    assert f"error: the project cannot be copied to {tmp_path / 'nowhere'}" in said
    assert "hint: AENV_WORK names a directory that is there" in said
    assert "is in the project" in fails(app, {"AENV_WORK": str(app / "empty")})
    assert "cannot be copied" in fails(
        app, {"AENV_WORK": str(tmp_path / "nowhere"), "AENV_SOCKET": str(tmp_path / "s")}
    )
    assert not (tmp_path / "s").exists()
    assert (app / "data.txt").read_text() == "original"


@pytest.fixture
def here() -> Iterator[None]:
    """Back to this directory and search path at the end."""
    before, searched = os.getcwd(), list(sys.path)
    yield
    os.chdir(before)
    sys.path[:] = searched


@pytest.mark.usefixtures("here")
def test_the_copy_keeps_modes_and_links_and_leaves_out_what_an_archive_does(app: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "data.txt").symlink_to(tmp_path / "elsewhere")  # what is there already is not written through
    (work / "src").symlink_to(tmp_path)
    sys.path.append(str(app))
    moved = move(Project(app, "app", "1", {}), work)
    assert moved.source == work / "src"
    assert Path.cwd() == work
    assert sys.path[-1] == str(work)
    names = sorted(str(path.relative_to(work)) for path in work.rglob("*"))
    assert names == sorted(
        ["beside.py", "data.txt", "empty", "outside", "relative", "run.sh", "src", "src/absolute", "src/tools.py"]
    )
    assert stat.S_IMODE((work / "run.sh").stat().st_mode) == 0o755
    assert stat.S_IMODE((work / "empty").stat().st_mode) == 0o750
    assert os.readlink(work / "outside") == "/etc"
    assert os.readlink(work / "relative") == "data.txt"
    assert (work / "src" / "absolute").resolve() == work / "data.txt"
    assert not (work / "data.txt").is_symlink()
    assert not (tmp_path / "elsewhere").exists()
    move(Project(app, "app", "1", {}), work)


@pytest.mark.usefixtures("here")
@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="root can become another user, on Linux")
def test_a_directory_that_may_not_be_written_is_an_error(app: Path, tmp_path: Path) -> None:
    (tmp_path / "work").chmod(0o555)
    os.chmod(tmp_path, 0o755)
    code = (
        "import os; from pathlib import Path; from aenv.project import Project; from aenv.runtime.work import move\n"
        "os.setegid(65534); os.seteuid(65534)\n"
        f"move(Project(Path({str(app)!r}), 'app', '1', {{}}), Path({str(tmp_path / 'work')!r}))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert StartFailed.__name__ in ended.stderr
    assert "Permission denied" in ended.stderr


def tunnel(path: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "aenv.runtime.tunnel", str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_tunnel_carries_requests(app: Path, tmp_path: Path) -> None:
    with contained(app, tmp_path) as running, tunnel(running.path) as joined:
        assert joined.stdin is not None
        assert joined.stdout is not None
        for _ in range(2):
            joined.stdin.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            joined.stdin.flush()
            assert joined.stdout.readline().startswith(b"HTTP/1.1 200")
            length = 0
            while (line := joined.stdout.readline()) != b"\r\n":
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            joined.stdout.read(length)
        joined.stdin.close()
        assert joined.wait(30) == 0


def test_a_tunnel_passes_on_the_end_of_either_side(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        sent = os.urandom(1_000_000)
        with tunnel(tmp_path / "s") as joined:
            peer = listener.accept()[0]

            def answer() -> None:
                with peer:
                    got = b""
                    while piece := peer.recv(65536):
                        got += piece
                    peer.sendall(got[::-1])

            answering = threading.Thread(target=answer)
            answering.start()
            out, _ = joined.communicate(sent, timeout=60)
            answering.join(60)
            assert out == sent[::-1]
            assert joined.returncode == 0
        with tunnel(tmp_path / "s") as joined:  # the socket ends while the input goes on
            listener.accept()[0].close()
            assert joined.wait(30) == 0


async def test_a_tunnel_ends_when_nobody_reads(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        with tunnel(tmp_path / "s") as joined:
            assert joined.stdout is not None
            with listener.accept()[0] as peer:
                joined.stdout.close()
                peer.sendall(b"x")
                await until(lambda: joined.poll() is not None, "the end of the tunnel")


def test_a_tunnel_to_nowhere_says_so(tmp_path: Path) -> None:
    with tunnel(tmp_path / "nothing") as joined:
        _, said = joined.communicate(timeout=60)
        assert joined.returncode == 1
        assert b"nothing answers at" in said


def test_a_tunnel_imports_little() -> None:
    code = "import aenv.runtime.tunnel, sys; print(*(name for name in sys.modules if name.startswith('aenv')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert set(done.stdout.split()) == {"aenv", "aenv.runtime", "aenv.runtime.tunnel"}
