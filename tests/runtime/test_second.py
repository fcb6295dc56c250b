"""``Context.second``: what an author's function can do in the container beside its own, and what it is told."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import uvloop

from aenv.errors import AEnvError, Conflict, Forbidden, Invalid, NotFound, SandboxLost, TooLarge, Unsupported
from aenv.models import ExecResult
from aenv.runtime import second as module
from aenv.runtime.commands import MOST_OUTPUT
from aenv.runtime.context import Context
from aenv.runtime.frames import frames
from aenv.runtime.second import Second
from tests.agent.conftest import agent, folder, program
from tests.agent.running import Agent, running, until
from tests.runtime.wire import modern, send
from tests.support import sandbox

__all__ = ["agent", "folder", "program"]
T = TypeVar("T")
PROJECT = """
from aenv import Context, register_reward, register_tool

@register_tool
async def run(command: str, ctx: Context) -> str:
    return (await ctx.second.exec(command)).stdout

@register_tool
def run_blocking(command: str, ctx: Context) -> str:
    return ctx.second.sync.exec(command).stdout

@register_tool
def variables(ctx: Context) -> list[str]:
    return [name for name in ctx.environment_variables if name.startswith("AENV_")]

@register_reward
async def score(ctx: Context) -> float:
    return float((await ctx.second.exec("echo 0.5")).stdout)
"""


@pytest.fixture(params=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, T]], T]:
    factory = uvloop.new_event_loop if request.param == "uvloop" else None

    def in_loop(work: Coroutine[Any, Any, T]) -> T:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(work)

    return in_loop


Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture
def second(agent: Agent) -> Second:
    return Second(str(agent.path))


def test_a_line_of_shell_and_a_list(run: Run, second: Second) -> None:
    assert run(second.exec("echo out; echo err >&2; exit 3")) == ExecResult(
        returncode=3, stdout="out\n", stderr="err\n"
    )
    assert run(second.exec(["echo", "a b", "*"])).stdout == "a b *\n"


def test_where_with_what_and_from_what(run: Run, second: Second, folder: Path) -> None:
    found = run(second.exec("pwd; echo $NEW-$HOME-; cat", cwd=folder, env={"NEW": "ü", "HOME": None}, input="typed"))
    assert found.stdout == f"{folder}\nü--\ntyped"
    assert len(run(second.exec(["wc", "-c"], input=b"\0" * 5_000_000)).stdout.split()[0]) == 7
    assert run(second.exec("exit 0", input=b"x" * 5_000_000)).returncode == 0


def test_output_is_bounded_and_still_heard(run: Run, second: Second) -> None:
    heard = {"stdout": 0, "stderr": 0}

    def hear(stream: str, piece: bytes) -> None:
        heard[stream] += len(piece)

    found = run(second.exec("head -c 5000000 /dev/zero; echo err >&2", on_output=hear))
    assert (len(found.stdout), found.truncated, found.stderr) == (MOST_OUTPUT, True, "err\n")
    assert heard == {"stdout": 5_000_000, "stderr": 4}


def test_what_is_not_text_is_shown_as_such(run: Run, second: Second) -> None:
    assert run(second.exec("printf '\\377ok'")).stdout == "\ufffdok"


def test_time_is_over(run: Run, second: Second, agent: Agent) -> None:
    found = run(second.exec("echo begun; sleep 1000", timeout=0.5))
    assert (found.returncode, found.stdout, found.timed_out) == (-signal.SIGKILL, "begun\n", True)
    until(lambda: not agent.children, "its end")


def test_a_cancelled_call_ends_its_command(run: Run, second: Second, agent: Agent) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(second.exec("sleep 1000 & sleep 1000"))
        await asyncio.to_thread(until, lambda: len(agent.children) >= 2, "the command")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(cancel())
    until(lambda: not agent.children, "its end")


def test_what_listens_may_fail(run: Run, second: Second, agent: Agent) -> None:
    def fail(stream: str, piece: bytes) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(second.exec("yes", on_output=fail))
    until(lambda: not agent.children, "its end")


@pytest.mark.parametrize(
    ("command", "how", "kind", "says"),
    [
        (["no-such-program"], {}, NotFound, "'no-such-program' cannot be run in the second container"),
        (["/etc/passwd"], {}, Forbidden, "'/etc/passwd' cannot be run"),
        ("true", {"cwd": "/nowhere"}, NotFound, "in the directory '/nowhere'"),
        (["true", "x" * 200_000], {}, TooLarge, "too long"),
        (["true", "x" * 5_000_000], {}, TooLarge, "too long"),
        ([], {}, Invalid, "a command is"),
        ([1], {}, Invalid, "a command is"),
        (["a\0b"], {}, Invalid, "zero character"),
        ("true", {"env": {"A=B": "1"}}, Invalid, "not a variable's name"),
        ("true", {"cwd": ""}, Invalid, "not a path"),
        ("true", {"timeout": 0}, Invalid, "not a length of time"),
        ("true", {"timeout": float("nan")}, Invalid, "not a length of time"),
        ("true", {"timeout": "5"}, Invalid, "not a length of time"),
        ("true", {"input": 5}, Invalid, "input is bytes or text, not int"),
        ("true", {"input": "\ud800"}, Invalid, "input is no text that UTF-8 can hold"),
        ("true", {"cwd": 5}, Invalid, "not a path"),
        ("true", {"env": {5: "1"}}, Invalid, "not a variable's name"),
        (5, {}, Invalid, "a command is"),
    ],
    ids=lambda given: repr(given)[:30],
)
def test_what_cannot_be_run_says_why(
    run: Run, second: Second, command: Any, how: dict[str, Any], kind: type[AEnvError], says: str
) -> None:
    with pytest.raises(kind, match=says) as caught:
        run(second.exec(command, **how))
    assert not isinstance(caught.value, SandboxLost)


def test_an_image_without_a_shell_says_what_to_do(run: Run, second: Second) -> None:
    with pytest.raises(NotFound) as caught:
        run(second.exec("true", env={"PATH": "/nowhere"}))
    assert caught.value.hint == "its image has no shell: give the program and its arguments as a list"


def test_files(run: Run, second: Second, folder: Path) -> None:
    data = os.urandom(3_000_000)
    run(second.write(folder / "a" / "file", data, mode=0o700))
    assert run(second.read(folder / "a" / "file")) == data
    run(second.write(str(folder / "a" / "file"), "text"))
    assert (folder / "a" / "file").read_text() == "text"
    assert (folder / "a" / "file").stat().st_mode & 0o777 == 0o700


def test_files_that_cannot_be(run: Run, second: Second, folder: Path) -> None:
    for work, kind, says in (
        (second.read(folder / "none"), NotFound, "cannot be read: No such file"),
        (second.read(folder), Conflict, "Is a directory"),
        (second.read(folder / "agent.sock"), Conflict, "not a regular file"),
        (second.write(folder, b"x" * 3_000_000), Conflict, "cannot be written: Is a directory"),
        (second.write("/proc/none/x", b""), NotFound, "cannot be written"),
        (second.write(folder / "file", cast(Any, 5)), Invalid, "file' is bytes or text, not int"),
        (second.write(folder / "file", b"", mode=cast(Any, "755")), Invalid, "mode '755' is not a number"),
        (second.write(f"{folder}/new/", b""), Conflict, "Is a directory"),
        (second.read("a\0b"), Invalid, "not a path"),
        (second.read(""), Invalid, "not a path"),
        (second.read("x" * 100_000), Invalid, "too long"),
        (second.read("x" * 5_000), Invalid, "too long"),
    ):
        with pytest.raises(kind, match=says):
            run(work)


def test_a_file_that_is_too_large_is_not_held(run: Run, second: Second, folder: Path, agent: Agent) -> None:
    with open(folder / "file", "wb") as file:
        file.truncate(50_000_000_000)
    with pytest.raises(TooLarge):
        run(second.read(folder / "file"))
    with pytest.raises(TooLarge):
        run(second.read("/proc/self/status", most=10))
    until(lambda: not agent.children, "the end of the reader")


def test_a_shell(run: Run, second: Second, agent: Agent) -> None:
    async def talk() -> tuple[bytes, int]:
        async with second.shell("stty size; read line; stty size; echo $line; exit 4", rows=30, columns=90) as shell:
            printed = b""
            async for piece in shell:
                if b"30 90" in printed + piece and b"30 90" not in printed:
                    shell.resize(50, 132)
                    shell.send(b"typed\n")
                printed += piece
            return printed, await shell.wait()

    printed, code = run(talk())
    assert b"50 132" in printed
    assert (printed.count(b"typed"), code) == (2, 4)


def test_who_waits_for_a_shell_need_not_read(run: Run, second: Second) -> None:
    async def wait() -> int:
        async with second.shell("seq 1 200000; exit 4") as shell:
            return await shell.wait()

    async def read_some() -> int:
        async with second.shell("seq 1 200000; exit 5") as shell:
            async for _ in shell:
                break
            return await shell.wait()

    async def read_all() -> tuple[bytes, int]:
        async with second.shell("seq 1 20000; exit 6") as shell:
            pieces = aiter(shell)
            first = await anext(pieces)
            waiting = asyncio.create_task(shell.wait())
            return first + b"".join([piece async for piece in pieces]), await waiting

    assert (run(wait()), run(read_some())) == (4, 5)
    printed, code = run(read_all())
    assert (printed.split(), code) == ([b"%d" % number for number in range(1, 20001)], 6)


def test_a_shell_that_is_left_ends(run: Run, second: Second, agent: Agent) -> None:
    async def leave() -> None:
        async with second.shell(["cat"]) as shell:
            shell.send(b"x\n")
            async for _ in shell:
                break

    run(leave())
    until(lambda: not agent.children, "its end")


def test_100_at_once(run: Run, second: Second) -> None:
    async def all_of_them() -> list[str]:
        found = await asyncio.gather(*(second.exec(f"echo {number}", timeout=120) for number in range(100)))
        return [result.stdout for result in found]

    assert run(all_of_them()) == [f"{number}\n" for number in range(100)]


def test_the_blocking_face(second: Second, folder: Path) -> None:
    assert second.sync.exec("echo x").stdout == "x\n"
    second.sync.write(folder / "file", b"1")
    assert second.sync.read(folder / "file") == b"1"


async def test_the_blocking_face_is_not_for_async_functions(second: Second) -> None:
    with pytest.raises(Invalid, match="would hold up everybody"):
        second.sync.exec("true")


# The platform's failures


def test_nobody_there(run: Run, folder: Path) -> None:
    for path in (folder / "none", folder):
        with pytest.raises(SandboxLost, match="the second container is gone: (No such file|Connection refused)"):
            run(Second(str(path)).exec("true"))


def test_it_dies_under_a_command(run: Run, program: Path, folder: Path) -> None:
    async def die(agent: Agent) -> None:
        task = asyncio.create_task(Second(str(agent.path)).exec("sleep 1000"))
        await asyncio.to_thread(until, lambda: agent.children, "the command")
        agent.process.terminate()
        with pytest.raises(SandboxLost, match="it ended while it was at work"):
            await task

    with running([program], folder / "s") as agent:
        run(die(agent))


@pytest.fixture
def odd() -> Iterator[Callable[[bytes], Second]]:
    """What answers with these bytes, and then says nothing more."""
    with tempfile.TemporaryDirectory(prefix="aenv-", dir="/tmp") as made, socket.socket(socket.AF_UNIX) as door:
        path = f"{made}/s"
        door.bind(path)
        door.listen()
        taken: list[socket.socket] = []

        def serve(answer: bytes) -> None:
            connection, _ = door.accept()
            taken.append(connection)
            connection.sendall(answer)

        def start(answer: bytes) -> Second:
            threading.Thread(target=serve, args=(answer,), daemon=True).start()
            return Second(path)

        yield start
        for connection in taken:
            connection.close()


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n", frames(b"x", b"1"), frames(b"f", b"1"), b"o\xff\xff\xff\xff"]
)
def test_what_makes_no_sense_is_the_platforms_failure(run: Run, odd: Callable[[bytes], Second], answer: bytes) -> None:
    with pytest.raises(SandboxLost, match="makes no sense"):
        run(odd(answer).exec("true"))


@pytest.mark.parametrize(
    ("number", "kind", "says", "hint"),
    [
        (errno.EBUSY, Conflict, "busy", "it is a mount of its own"),
        (errno.ETIMEDOUT, AEnvError, "nothing of it moved", "nothing was changed there"),
    ],
)
def test_why_a_file_cannot_be_written(
    run: Run, odd: Callable[[bytes], Second], number: int, kind: type[AEnvError], says: str, hint: str
) -> None:
    with pytest.raises(kind, match=says) as caught:
        run(odd(frames(b"f", module.FAILURE.pack(number, b"g"))).write("/etc/hosts", b""))
    assert not isinstance(caught.value, SandboxLost)
    assert hint in str(caught.value.hint)


def test_who_never_answers_is_not_waited_for(
    run: Run, odd: Callable[[bytes], Second], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.2)
    with pytest.raises(SandboxLost, match="does not answer"):
        run(odd(b"").exec("true", timeout=0.1))


# In a sandbox


def test_without_a_second_container_the_error_says_how_to_get_one() -> None:
    with pytest.raises(Unsupported, match='"podTemplate": "DualContainer"'):
        _ = Context().second


def test_the_failure_rule(program: Path, folder: Path, tmp_path: Path) -> None:
    """A second container that is gone is the platform's failure: never what a tool answered, nor a reward."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "tools.py").write_text(PROJECT)
    with (
        running([program], folder / "s") as agent,
        sandbox(tmp_path, variables={"AENV_SECOND": str(agent.path)}) as live,
    ):
        for tool in ("run", "run_blocking"):
            assert _tool(live.port, tool, {"command": "echo hi"})["data"] == "hi\n"
        assert "AENV_SECOND" not in _tool(live.port, "variables", {})["data"]
        assert send(live.port, "POST", "/task/reward", {}).json["data"] == 0.5
        agent.process.terminate()
        agent.process.wait()
        for tool in ("run", "run_blocking"):
            assert _tool(live.port, tool, {"command": "echo hi"})["code"] == "sandbox_lost"
            reply = modern(live.port, "tools/call", {"name": tool, "arguments": {"command": "echo hi"}})
            assert (reply.json["error"]["data"]["aenv"]["code"], "result" in reply.json) == ("sandbox_lost", False)
        assert send(live.port, "POST", "/task/reward", {}).json["code"] == "sandbox_lost"


def _tool(port: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = send(port, "POST", f"/tools/{name}", arguments).json
    return found
