"""What answers in the agent's place, on real daemons: commands and files of an unmodified image, by their exec."""

from __future__ import annotations

import asyncio
import secrets
import stat
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from aenv.engines.conformance.bench import running_here
from aenv.engines.docker import deputy as module
from aenv.engines.docker.daemon import Daemon
from aenv.engines.docker.deputy import Deputy
from aenv.engines.docker.scripts import KEEP_ALIVE
from aenv.errors import AEnvError, Conflict, Forbidden, Invalid, NotFound, SandboxLost, TooLarge, Unsupported
from aenv.runtime.commands import MOST_OUTPUT
from aenv.runtime.frames import FAILED, INPUT, frames
from aenv.runtime.second import READ, WRITE, Second
from tests.engines.docker.beside import imported, with_links
from tests.engines.docker.lab import PATIENCE, eventually

TOOLS = ("mkdir", "mv", "chmod", "rm", "setsid", "stat", "env", "head", "wc", "ln", "mkfifo", "pwd")


@pytest.fixture
async def container(daemon: str, busybox: bytes) -> AsyncIterator[tuple[Daemon, str]]:
    """A container of an image with a shell and a few tools, and no agent."""
    asked = await Daemon.find(daemon)
    async with imported(daemon, with_links(busybox, *TOOLS), "ENV COLOUR=red", "WORKDIR /bin") as image:
        body = {
            "Image": image,
            "Entrypoint": list(KEEP_ALIVE),
            "OpenStdin": True,
            "Labels": {"aenv.test.second": "1"},
            "HostConfig": {"NetworkMode": "none", "PidsLimit": 200, "Tmpfs": {"/tmp": "rw,mode=1777"}},
        }
        made = await asked.ask("POST", "/containers/create", body=body)
        try:
            await asked.ask("POST", f"/containers/{made['Id']}/start")
            yield asked, made["Id"]
        finally:
            await asked.ask("DELETE", f"/containers/{made['Id']}", query={"force": "1", "v": "1"})


@pytest.fixture
async def deputy(container: tuple[Daemon, str], home: Path) -> AsyncIterator[Deputy]:
    made = Deputy(*container)
    (home / "link").mkdir()
    await made.open(str(home / "link"))
    yield made
    await made.close()


@pytest.fixture
def second(deputy: Deputy, home: Path) -> Second:
    return Second(str(home / "link" / "second.sock"))


async def test_commands(second: Second) -> None:
    await second.answers(PATIENCE)
    done = await second.exec("cat; echo problem >&2; pwd; exit 3", input="typed\n", timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (3, "typed\n/bin\n", "problem\n")
    assert (done.timed_out, done.truncated) == (False, False)
    done = await second.exec(["echo", "a  b", "$HOME", "ü"], timeout=PATIENCE)
    assert done.stdout == "a  b $HOME ü\n"
    done = await second.exec("kill -USR1 $$; sleep 100", timeout=PATIENCE)
    assert done.returncode == -10
    done = await second.exec("cat", timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, "")


async def test_variables_and_directories(second: Second) -> None:
    line = 'echo "$COLOUR-$SIZE"; pwd'
    done = await second.exec(line, env={"SIZE": "x = 'y'"}, cwd="/tmp", timeout=PATIENCE)
    assert done.stdout == "red-x = 'y'\n/tmp\n"
    done = await second.exec(line, env={"COLOUR": None, "PATH": "/bin"}, cwd="../proc", timeout=PATIENCE)
    assert done.stdout == "-\n/proc\n"
    with pytest.raises(Invalid):
        await second.exec(line, env={"a-b": None})
    with pytest.raises(NotFound, match="/no/such"):
        await second.exec("pwd", cwd="/no/such")
    with pytest.raises(Conflict, match="/bin/busybox"):
        await second.exec("pwd", cwd="/bin/busybox")


async def test_what_cannot_be_run(second: Second) -> None:
    with pytest.raises(NotFound, match="no-such-program"):
        await second.exec(["no-such-program"])
    with pytest.raises(NotFound, match="/no/such/program"):
        await second.exec(["/no/such/program"])
    with pytest.raises(Forbidden, match="/proc/version"):
        await second.exec(["/proc/version"])
    with pytest.raises(TooLarge):
        await second.exec(["echo", "x" * (module.MOST_TEXT + 1)])
    with pytest.raises(AEnvError):
        await second.exec(["echo", "x" * 1_000_000])  # more than the kernel takes for one
    with pytest.raises(Invalid):
        await second.exec(["echo", "\udcff"])  # the daemon takes text only
    with pytest.raises(Unsupported, match="not supported"):
        async with second.shell() as shell:
            await shell.wait()
    assert (await second.exec("echo well", timeout=PATIENCE)).stdout == "well\n"


async def test_much_passes_in_both_directions(second: Second) -> None:
    data = secrets.token_bytes(3_000_000)
    heard = bytearray()
    done = await second.exec(["cat"], input=data, timeout=PATIENCE, on_output=lambda stream, piece: heard.extend(piece))
    assert (done.returncode, done.truncated, bytes(heard)) == (0, True, data)
    assert len(done.stdout) <= MOST_OUTPUT
    done = await second.exec("echo enough", input=data, timeout=PATIENCE)  # which reads nothing
    assert (done.returncode, done.stdout) == (0, "enough\n")


async def test_one_after_the_other_as_it_comes(second: Second) -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    line = "echo first; until [ -e /tmp/go ]; do sleep 0.1; done; echo last"
    running = asyncio.create_task(
        second.exec(line, timeout=PATIENCE, on_output=lambda stream, piece: heard.put_nowait(piece))
    )
    async with asyncio.timeout(PATIENCE):
        assert await heard.get() == b"first\n"
        await second.write("/tmp/go", b"")
        assert (await running).stdout == "first\nlast\n"


async def test_its_time_is_over(second: Second) -> None:
    marks = [f"85{secrets.randbelow(10**9):09}" for _ in range(3)]
    line = f"echo begun; sleep {marks[0]} & setsid sleep {marks[1]} & sleep {marks[2]}"
    done = await second.exec(line, timeout=2.0)
    assert (done.returncode, done.timed_out) == (-9, True)
    assert not any(running_here(mark) for mark in marks)
    assert (await second.exec("echo well", timeout=PATIENCE)).stdout == "well\n"


async def test_who_leaves_ends_the_command(second: Second, deputy: Deputy) -> None:
    mark = f"84{secrets.randbelow(10**9):09}"
    running = asyncio.create_task(second.exec(["sleep", mark], timeout=PATIENCE))
    await eventually("the command", lambda: running_here(mark))
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    await eventually("its end", lambda: not running_here(mark) and not deputy._clients)


async def test_what_is_left_in_the_background_goes_on(second: Second) -> None:
    mark = f"83{secrets.randbelow(10**9):09}"
    done = await second.exec(f"echo before; sleep {mark} & echo after", timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.timed_out) == (0, "before\nafter\n", False)
    assert running_here(mark)


async def test_files(second: Second) -> None:
    data = secrets.token_bytes(1_000_000)
    await second.write("/made/by/me", data)
    assert await second.read("/made/by/me") == data
    await second.write("/made/by/me", "less", mode=0o750)
    assert await second.read("/made/by/me") == b"less"
    await second.write("/made/by/me", "more")
    done = await second.exec("stat -c %a me; ls -a", cwd="/made/by", timeout=PATIENCE)
    assert stat.S_IXUSR & int(done.stdout.splitlines()[0], 8)
    assert done.stdout.split()[1:] == [".", "..", "me"]  # and nothing that was on the way
    await second.write("plain", "")
    await second.write("-r f", "a name")
    assert await second.read("/bin/plain") == b""
    assert await second.read("-r f") == b"a name"
    assert await second.read("/proc/self/cmdline")
    with pytest.raises(TooLarge):
        await second.read("/made/by/me", most=3)


async def test_files_that_cannot_be(second: Second) -> None:
    await second.exec("mkfifo /tmp/pipe; ln -s loop /tmp/loop", timeout=PATIENCE)
    with pytest.raises(NotFound, match="/no/such"):
        await second.read("/no/such")
    with pytest.raises(Conflict, match="directory"):
        await second.read("/tmp")
    with pytest.raises(Conflict, match="regular"):
        await second.read("/tmp/pipe")
    with pytest.raises(Conflict, match="directory"):
        await second.write("/tmp", "x")
    with pytest.raises(Conflict, match="regular"):
        await second.write("/tmp/pipe", "x")
    with pytest.raises((Conflict, AEnvError), match="/bin/busybox/x"):
        await second.write("/bin/busybox/x", "x")
    with pytest.raises(Invalid):
        await second.read("/tmp/loop")
    with pytest.raises(AEnvError, match="/proc/x"):
        await second.write("/proc/x", "x")


async def test_a_file_that_comes_in_part_is_not_there(second: Second, deputy: Deputy) -> None:
    await second.write("/tmp/whole", "old")
    _, writer = await asyncio.open_unix_connection(second._socket)
    writer.write(frames(WRITE, b"/tmp/whole") + frames(INPUT, b"half"))
    await writer.drain()

    async def begun() -> bool:
        return b".aenv-" in (await second.exec("ls -a /tmp", timeout=PATIENCE)).stdout.encode()

    await eventually("its beginning", begun)
    writer.close()
    await eventually("its end", lambda: not deputy._clients)
    assert (await second.exec("cat /tmp/whole; ls -a /tmp", timeout=PATIENCE)).stdout == "old.\n..\nwhole\n"


async def test_nobody_inside_ends_it(second: Second) -> None:
    for _ in range(3):
        await second.exec("kill -9 -1; kill -9 1; kill -TERM 1", timeout=PATIENCE)
    assert (await second.exec("echo well", timeout=PATIENCE)).stdout == "well\n"
    for _ in range(30):
        await second.exec("setsid sleep 0 & setsid sleep 0 &", timeout=PATIENCE)
    done = await second.exec("cat /proc/[0-9]*/stat", timeout=PATIENCE)
    assert done.stdout.count(") Z ") < 30


async def test_many_at_once(second: Second) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(second.exec(f"echo {n}", timeout=PATIENCE)) for n in range(12)]
    assert [task.result().stdout for task in tasks] == [f"{n}\n" for n in range(12)]


async def test_more_than_it_takes(second: Second, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CLIENTS", 0)
    with pytest.raises(AEnvError, match="temporarily"):
        await second.exec("true")


async def test_a_container_that_is_gone(second: Second, container: tuple[Daemon, str]) -> None:
    daemon, id = container
    await daemon.ask("POST", f"/containers/{id}/kill")
    with pytest.raises(SandboxLost):
        await second.exec("true", timeout=PATIENCE)
    with pytest.raises(SandboxLost):
        await second.read("/x")


async def test_nonsense(second: Second) -> None:
    for sent in (b"\xff" * 10, frames(b"?"), frames(READ, b""), b""):
        reader, writer = await asyncio.open_unix_connection(second._socket)
        writer.write(sent)
        writer.write_eof()
        async with asyncio.timeout(PATIENCE):
            answered = await reader.read()
        assert answered[:1] in (b"", FAILED)
        writer.close()
