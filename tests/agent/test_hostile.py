"""Whatever a client sends and a command does: others are served on, and memory stays as it is."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from aenv.agent import recipe
from aenv.runtime.frames import frames
from tests.agent.running import PATIENCE, Agent, Done, listens, until
from tests.support import ROOT

MB = 1024 * 1024


def well(agent: Agent) -> None:
    assert agent.run("sh", "-c", "echo well").stdout == b"well\n"
    assert agent.memory < 64 * MB


@pytest.mark.parametrize(
    ("sent", "number"),
    ids=lambda given: repr(given)[:20],
    argvalues=[
        (struct.pack("!cI", b"a", 65537), errno.EMSGSIZE),
        (struct.pack("!cI", b"a", 0xFFFFFFFF), errno.EMSGSIZE),
        (frames(b"?"), errno.EINVAL),
        (frames(b"\0"), errno.EINVAL),
        (frames(b"i", b"x"), errno.EINVAL),
        (frames(b"s"), errno.EINVAL),
        (frames(b"a", b"true") + frames(b"s"), errno.EINVAL),
        (frames(b"t", b"\0"), errno.EINVAL),
        (frames(b"m", b"\0"), errno.EINVAL),
        (frames(b"p", b"\0"), errno.EINVAL),
        (frames(b"d", b"a\0b"), errno.EINVAL),
        (frames(b"g", b""), errno.EINVAL),
        (frames(b"g", b"a\0b"), errno.EINVAL),
        (frames(b"a", b"x" * (5 * MB)), errno.E2BIG),
        (frames(b"v", b"x" * (5 * MB)), errno.E2BIG),
    ],
)
def test_nonsense_is_refused(agent: Agent, sent: bytes, number: int) -> None:
    with agent.connect() as wire:
        with contextlib.suppress(BrokenPipeError):
            wire.raw(sent)
        done = wire.end()
        assert (done.errno, done.stage) == (number, "b")
    well(agent)


def test_nonsense_in_the_middle_ends_the_command(agent: Agent) -> None:
    with agent.connect() as wire:
        wire.command("sleep", "1000", input=None)
        until(lambda: agent.children, "the command")
        wire.send("?")
        until(lambda: not agent.children, "its end")
    well(agent)


@pytest.mark.parametrize("seed", range(8))
def test_anything_may_come(agent: Agent, seed: int) -> None:
    chance = random.Random(seed)
    letters = b"avdtpsgumiewk?\0"
    for _ in range(60):
        pieces = []
        for _ in range(chance.randrange(1, 12)):
            letter, data = chance.choice(letters), chance.randbytes(chance.choice((0, 1, 2, 4, 8, 100, 70000)))
            if letter == ord("a"):
                data = chance.choice((b"true\0", b"cat\0", b"echo\0x\0", data))
            if letter == ord("u"):
                data = b"/nowhere/" + data  # it must not write to this machine
                letter = ord("g")
            if letter == ord("t"):
                data = chance.choice((struct.pack("!Q", chance.randrange(1 << 64)), data))
            length = len(data) if chance.random() < 0.95 else chance.randrange(1 << 32)
            pieces.append(struct.pack("!BI", letter, length) + data)
        with agent.connect() as wire, contextlib.suppress(ConnectionError):
            wire.raw(b"".join(pieces)[: chance.randrange(1, 200000)])
            if chance.random() < 0.5 and not wire.quiet(0.01):
                wire.hear()
    well(agent)
    until(lambda: not agent.children, "the end of all commands")
    until(lambda: agent.descriptors <= 6, "the end of all connections")


def test_a_byte_at_a_time(agent: Agent) -> None:
    with agent.connect() as wire:
        for byte in frames(b"a", b"echo\0slow\0") + frames(b"e") + frames(b"s"):
            wire.raw(bytes([byte]))
        assert wire.end().stdout == b"slow\n"


def test_many_who_want_nothing_keep_out_nobody(agent: Agent) -> None:
    idle = [agent.connect() for _ in range(500)]
    try:
        for number, wire in enumerate(idle):
            wire.raw(b"a\0\0\xff\xff" + b"x" * (number % 3) * 1000)
        well(agent)
    finally:
        for wire in idle:
            wire.close()
    until(lambda: agent.descriptors <= 6, "the end of all connections")


def test_arguments_of_many_are_bounded_together(agent: Agent) -> None:
    wires = [agent.connect() for _ in range(16)]
    try:
        for wire in wires:
            with contextlib.suppress(ConnectionError):
                wire.raw(frames(b"a", b"x" * (3 * MB)))
        assert agent.memory < 64 * MB
    finally:
        for wire in wires:
            wire.close()
    until(lambda: agent.descriptors <= 6, "the end of all connections")
    well(agent)


def test_a_command_inherits_nothing_of_the_agent(agent: Agent) -> None:
    done = agent.run("sh", "-c", "ls -l /proc/self/fd | grep -c -e socket -e signalfd; cat /proc/self/status")
    assert done.stdout.splitlines()[0] == b"0"
    assert b"NoNewPrivs:\t1" in done.stdout


def test_when_memory_is_short_a_command_goes_first(agent: Agent) -> None:
    own = int(Path(f"/proc/{agent.process.pid}/oom_score_adj").read_text())
    for _ in range(2):
        assert int(agent.run("cat", "/proc/self/oom_score_adj").stdout) == min(own + 500, 1000)
    assert int(Path(f"/proc/{agent.process.pid}/oom_score_adj").read_text()) == own


@pytest.fixture(scope="session")
def forger(program: Path) -> Path:
    """What tries to end the agent; compiled as that was."""
    found = recipe.compiler(platform.machine())
    assert found is not None
    made = program.parent / "forger"
    subprocess.run([found, "-static", "-o", made, Path(__file__).parent / "forge.c"], check=True, timeout=PATIENCE)
    return made


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make namespaces and change its root")
class TestFirstProcess:
    """As it is in a container: the first process of its namespace, an ordinary user, and nothing else there."""

    @pytest.fixture
    def contained(self, program: Path, forger: Path) -> Iterator[Agent]:
        busybox = shutil.which("busybox")
        linked = subprocess.run(["ldd", busybox or "/nowhere"], capture_output=True, text=True, check=False)
        if busybox is None or linked.returncode == 0:
            pytest.skip("no static busybox (on Debian: apt install busybox-static)")
        with tempfile.TemporaryDirectory(prefix="aenv-", dir="/tmp") as made:
            root = Path(made)
            root.chmod(0o755)
            for name in ("bin", "proc", "dev", "run", "tmp"):
                (root / name).mkdir()
            (root / "dev" / "null").touch()
            (root / "run").chmod(0o777)
            (root / "tmp").chmod(0o777)
            shutil.copy(busybox, root / "bin" / "busybox")
            shutil.copy(forger, root / "bin" / "forger")
            shutil.copy(program, root / "agent")
            for name in ("sh", "kill", "sleep", "cat", "echo", "true", "ps", "yes"):
                (root / "bin" / name).symlink_to("busybox")
            inside = f"mount -t proc proc {root}/proc && mount --bind /dev/null {root}/dev/null"
            start = f"exec env -i PATH=/bin {shutil.which('chroot')} --userspec=1000:1000 {root} /agent /run/s"
            namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
            process = subprocess.Popen([*namespaces, "sh", "-c", f"{inside} && {start}"])
            agent = Agent(process, root / "run" / "s")
            try:
                until(lambda: listens(agent.path), "the agent")
                yield agent
            finally:
                process.kill()
                process.wait()

    def test_an_image_with_nothing_but_a_shell(self, contained: Agent) -> None:
        done = contained.run("sh", "-c", "echo $$ $(cat /proc/1/comm); id -u 2>/dev/null; cat", input=b"in")
        assert done.stdout.endswith(b"in")
        assert b"agent" in done.stdout

    def test_a_command_cannot_end_it(self, contained: Agent) -> None:
        for number in ("TERM", "INT", "KILL", "STOP", "HUP", "CHLD"):
            contained.run("kill", f"-{number}", "1")
            assert contained.run("echo", "well").stdout == b"well\n"

    @pytest.mark.parametrize("how", ["code", "kernel", "room"])
    def test_a_command_cannot_pretend_to_be_outside(self, contained: Agent, how: str) -> None:
        done = contained.run("forger", how)
        assert done.stdout == b"tried\n"
        assert done.stderr == b""
        assert contained.run("echo", "well").stdout == b"well\n"

    def test_who_is_outside_can_end_it(self, contained: Agent) -> None:
        [first] = psutil.Process(contained.process.pid).children()
        first.terminate()
        contained.process.wait(PATIENCE)

    def test_a_command_that_kills_all_ends_no_other_result(self, contained: Agent) -> None:
        with contained.connect() as other:
            other.command("sh", "-c", "echo ready; sleep 1000", input=None)
            other.until(b"ready", Done())
            assert contained.run("sh", "-c", "kill -9 -1; echo done").code is not None
            assert other.end().code == -signal.SIGKILL
        assert contained.run("echo", "well").stdout == b"well\n"

    def test_a_command_can_neither_read_nor_trace_it(self, contained: Agent) -> None:
        done = contained.run("sh", "-c", "cat /proc/1/mem /proc/1/environ /proc/1/maps; cat /proc/1/fd/*; echo $?")
        assert done.stdout.strip() != b"0"
        assert b"denied" in done.stderr.lower()

    def test_a_command_cannot_use_it(self, contained: Agent) -> None:
        """Who is in its namespace is turned away, and who is outside is not."""
        [first] = psutil.Process(contained.process.pid).children()
        script = f"from tests.agent.running import Wire; print(Wire({str(contained.path)!r}).hear())"
        inside = ["nsenter", "--target", str(first.pid), "--pid", sys.executable, "-c", script]
        done = subprocess.run(inside, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE, check=False)
        assert (done.stdout, done.stderr) == ("[]\n", "")
        with contained.connect() as wire:
            assert wire.quiet(0.2)

    def test_without_devices_there_is_no_terminal(self, contained: Agent) -> None:
        with contained.connect() as wire:
            wire.command("sh", terminal=(24, 80), input=None)
            done = wire.end()
        assert (done.errno, done.stage) == (errno.ENOENT, "s")
