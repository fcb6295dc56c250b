"""Commands of the owner's: bounded, killed when they should be, and never waited for without need."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import uvloop

from aenv.errors import Invalid, NotFound, TooLarge
from aenv.models import ExecResult
from aenv.runtime import commands
from aenv.runtime.commands import MOST_OUTPUT, Command
from tests.runtime.wire import Reply, send, send_raw
from tests.support import FIXTURES, Sandbox, sandbox

T = TypeVar("T")


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def gone() -> Iterator[list[int]]:
    """Processes that a test leaves running, ended after it."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


# On each kind of loop


@pytest.fixture(params=["uvloop", "asyncio", "without pidfd"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Coroutine[Any, Any, T]], T]:
    if request.param == "without pidfd":
        monkeypatch.delattr(os, "pidfd_open")
    factory = uvloop.new_event_loop if request.param == "uvloop" else None

    def in_loop(work: Coroutine[Any, Any, T]) -> T:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(work)

    return in_loop


Run = Callable[[Coroutine[Any, Any, ExecResult]], ExecResult]


def test_both_streams_and_the_return_code(run: Run, tmp_path: Path) -> None:
    found = run(commands.run(Command("pwd; echo oops >&2; exit 3"), tmp_path))
    assert found == ExecResult(returncode=3, stdout=f"{tmp_path}\n", stderr="oops\n")


FULL_PIPE = """
import fcntl, os, pathlib
pathlib.Path("pid").write_text(str(os.getpid()))
fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, 1 << 20)
os.write(1, b"x" * 500_000 + b"end")
"""


def test_what_was_written_right_before_the_end_is_not_lost(run: Run, tmp_path: Path) -> None:
    async def busy() -> ExecResult:
        running = asyncio.create_task(commands.run(Command([sys.executable, "-c", FULL_PIPE]), tmp_path))
        while not (tmp_path / "pid").exists():
            await asyncio.sleep(0)
        until(lambda: (tmp_path / "pid").read_text() and not alive(int((tmp_path / "pid").read_text())))
        return await running  # the loop reads nothing until here

    found = run(busy())
    assert (len(found.stdout), found.stdout[-3:], found.truncated) == (500_003, "end", False)


def test_more_output_than_is_kept_does_not_block(run: Run, tmp_path: Path) -> None:
    line = "head -c 5000000 /dev/zero | tr '\\0' x; head -c 3000000 /dev/zero | tr '\\0' y >&2; echo done > done"
    found = run(commands.run(Command(line), tmp_path))
    assert (found.returncode, found.truncated, found.timed_out) == (0, True, False)
    assert (found.stdout, found.stderr) == ("x" * MOST_OUTPUT, "y" * MOST_OUTPUT)
    assert (tmp_path / "done").exists()


def test_its_time_over_a_command_is_killed_with_its_group(run: Run, tmp_path: Path, gone: list[int]) -> None:
    line = "sleep 1000 & echo $!; echo $$; exec sleep 1000"
    found = run(commands.run(Command(line, timeout=0.5), tmp_path))
    assert (found.returncode, found.timed_out) == (-signal.SIGKILL, True)
    gone += map(int, found.stdout.split())
    assert len(gone) == 2
    until(lambda: not any(map(alive, gone)))


def test_what_is_left_in_the_background_is_not_waited_for(run: Run, tmp_path: Path, gone: list[int]) -> None:
    found = run(commands.run(Command("sleep 1000 & echo $!"), tmp_path))
    gone.append(int(found.stdout))
    assert alive(gone[0])
    assert (found.returncode, found.timed_out) == (0, False)


def test_what_is_left_in_the_background_may_go_on_writing(run: Run, tmp_path: Path, gone: list[int]) -> None:
    line = "(for i in $(seq 40); do head -c 9000 /dev/zero || exit; sleep 0.005; done; echo > survived) & echo $!"

    async def wait() -> ExecResult:
        found = await commands.run(Command(line), tmp_path)
        async with asyncio.timeout(30):
            while not (tmp_path / "survived").exists():
                await asyncio.sleep(0.01)
        return found

    found = run(wait())
    gone.append(int(found.stdout.strip("\0")))
    assert found.returncode == 0


def test_a_cancelled_command_is_killed_with_its_group(run: Run, tmp_path: Path, gone: list[int]) -> None:
    line = "sleep 1000 & echo $! > child; echo $$ > self; exec sleep 1000"

    async def cancel() -> None:
        task = asyncio.create_task(commands.run(Command(line), tmp_path))
        async with asyncio.timeout(20):
            while not (tmp_path / "self").exists() or not (tmp_path / "self").read_text():
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(cancel())  # type: ignore[arg-type]
    gone += (int((tmp_path / name).read_text()) for name in ("child", "self"))
    until(lambda: not any(map(alive, gone)))


def test_nothing_of_a_command_is_left(run: Run, tmp_path: Path) -> None:
    async def several() -> ExecResult:
        await commands.run(Command("echo warm"), tmp_path)
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        others = psutil.Process().children()
        for line in ("echo", "exit 1", "cat"):
            await asyncio.gather(*(commands.run(Command(line, stdin="x"), tmp_path) for _ in range(4)))
        with pytest.raises(NotFound):
            await commands.run(Command(["no-such-program"]), tmp_path)
        found = await commands.run(Command("sleep 1000", timeout=0.05), tmp_path)
        async with asyncio.timeout(20):
            while len(os.listdir("/proc/self/fd")) > before:
                await asyncio.sleep(0.01)
        assert [child for child in psutil.Process().children() if child not in others] == []
        return found

    assert run(several()).timed_out


async def test_stdin_is_given_whole_and_ends(tmp_path: Path) -> None:
    text = "ü" * 1_000_000 + "\n"
    assert (await commands.run(Command("wc -c", stdin=text), tmp_path)).stdout.strip() == "2000001"
    assert (await commands.run(Command("cat"), tmp_path)).stdout == ""
    assert (await commands.run(Command("true", stdin=text), tmp_path)).returncode == 0


async def test_output_that_is_no_text_is_replaced(tmp_path: Path) -> None:
    assert (await commands.run(Command(r"printf 'a\377b\000'"), tmp_path)).stdout == "a\ufffdb\0"


@pytest.mark.parametrize("inside", ["/", "sub", None])
async def test_the_directory(tmp_path: Path, inside: str | None) -> None:
    (tmp_path / "sub").mkdir()
    found = await commands.run(Command(["pwd"], directory=inside), tmp_path)
    assert found.stdout.strip() == {"/": "/", "sub": str(tmp_path / "sub"), None: str(tmp_path)}[inside]


async def test_what_cannot_be_run_says_why(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("no program")
    for command, kind, words in (
        (Command(["no-such-program"]), NotFound, "No such file"),
        (Command("true", directory="nowhere"), NotFound, "there is no such directory"),
        (Command("true", directory="plain"), NotFound, "there is no such directory"),
        (Command([str(tmp_path / "plain")]), Invalid, "Permission denied"),
        (Command(["a\0b"]), Invalid, "null byte"),
        (Command(["true", "x" * 5_000_000]), TooLarge, "'true' cannot be run: Argument list too long"),
        (Command("x" * 5_000_000), TooLarge, "Argument list too long"),
        (Command(["x" * 5_000]), Invalid, "File name too long"),
        (Command("true", directory="x" * 5_000), Invalid, "File name too long"),
    ):
        with pytest.raises(kind, match=words) as caught:
            await commands.run(command, tmp_path)
        assert len(str(caught.value)) < 1000


async def test_what_concerns_the_runtime_alone_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENV_OWNER_TOKEN_SHA256", "0" * 64)
    monkeypatch.setenv("MINE", "kept")
    variables = (await commands.run(Command(["env"]), tmp_path)).stdout.splitlines()
    assert "MINE=kept" in variables
    assert not [line for line in variables if line.startswith("AENV_OWNER_TOKEN")]


# Over HTTP


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sandbox, Path]]:
    """A sandbox, and its work directory."""
    work = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        with sandbox(FIXTURES / "lab") as running:
            yield running, work


def execute(running: Sandbox, **body: Any) -> Reply:
    return send(running.port, "POST", "/exec", body)


def test_the_answer(box: tuple[Sandbox, Path]) -> None:
    running, work = box
    whole = {"returncode": 0, "stdout": f"{work}\n", "stderr": "", "truncated": False, "timed_out": False}
    assert execute(running, command=["pwd"]).json == {"success": True, "data": whole}
    assert execute(running, command="cat; exit 4", stdin="in", timeout=20).json["data"]["returncode"] == 4


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"{}",
        b'{"command": []}',
        b'{"command": [1]}',
        b'{"command": 5}',
        b'{"command": "true", "timeout": 0}',
        b'{"command": "true", "timeout": -1}',
        b'{"command": "true", "timeout": "x"}',
        b'{"command": "true", "timeout": 1e999}',
        b'{"command": "true", "stdin": 5}',
        b'{"command": "true", "directory": 5}',
        b'{"command": "true", "shell": true}',
        b'{"command": "\xff"}',
        b'{"command": ' + b"[" * 100_000,
    ],
)
def test_a_command_that_cannot_be_read(box: tuple[Sandbox, Path], body: bytes) -> None:
    reply = send(box[0].port, "POST", "/exec", body)
    assert (reply.status, reply.json["code"]) == (422, "invalid")
    assert "command" in reply.json["hint"]


def test_a_program_that_is_not_there(box: tuple[Sandbox, Path]) -> None:
    reply = execute(box[0], command=["no-such-program"])
    assert (reply.status, reply.json["code"]) == (404, "not_found")


def _pid(work: Path, name: str) -> int:
    until(lambda: (work / name).exists() and (work / name).read_text().endswith("\n"))
    return int((work / name).read_text())


def test_a_client_that_leaves_ends_its_command(box: tuple[Sandbox, Path], gone: list[int]) -> None:
    running, work = box
    with send_raw(running.port, "POST", "/exec", {"command": "echo $$ > left; exec sleep 1000"}, {}):
        gone.append(_pid(work, "left"))
        assert alive(gone[0])
    until(lambda: not alive(gone[0]))


def test_a_command_is_cancelled_by_its_call_id(box: tuple[Sandbox, Path], gone: list[int]) -> None:
    running, work = box
    body, headers = {"command": "echo $$ > cancelled; exec sleep 1000"}, {"AEnv-Call-Id": "a-command"}
    with send_raw(running.port, "POST", "/exec", body, headers):
        gone.append(_pid(work, "cancelled"))
        assert send(running.port, "DELETE", "/calls/a-command").json["data"] == {"cancelled": True}
        until(lambda: not alive(gone[0]))


def test_the_end_of_the_sandbox_ends_its_commands(tmp_path: Path, gone: list[int]) -> None:
    with sandbox(FIXTURES / "lab", variables={"AENV_GRACE": "0"}) as running:
        line = f"echo $$ > {tmp_path}/pid; exec sleep 1000"
        with send_raw(running.port, "POST", "/exec", {"command": line}, {}):
            gone.append(_pid(tmp_path, "pid"))
            assert running.stop() == 0
    until(lambda: not alive(gone[0]))


def test_commands_and_calls_run_side_by_side(box: tuple[Sandbox, Path]) -> None:
    running, work = box
    fifo = work / "fifo"
    os.mkfifo(fifo)
    with send_raw(running.port, "POST", "/exec", {"command": "cat fifo"}, {"Connection": "close"}) as sock:
        assert execute(running, command="echo quick").json["data"]["stdout"] == "quick\n"
        assert send(running.port, "POST", "/tools/add", {"a": 1}).json["data"] == 3
        fifo.write_text("through")
        answer = b""
        while data := sock.recv(65536):
            answer += data
    assert b'"stdout":"through"' in answer
