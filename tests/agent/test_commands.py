"""Commands in a second container: streams, ends, time-outs, terminals, and what is left of them."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.agent.running import PATIENCE, Agent, Done, Wire, alive, running, until

MB = 1024 * 1024


def test_both_streams_and_the_exit_code(agent: Agent) -> None:
    done = agent.run("sh", "-c", "echo out; echo err >&2; exit 3")
    assert (done.stdout, done.stderr, done.code, done.timed_out) == (b"out\n", b"err\n", 3, False)


def test_arguments_arrive_as_they_are(agent: Agent) -> None:
    given = ["", "a b", "*", "ü", "\n", "x" * 100_000]
    done = agent.run(sys.executable, "-c", "import sys; print(ascii(sys.argv[1:]))", *given)
    assert done.stdout.decode().strip() == ascii(given)


def test_variables_are_added_changed_and_removed(program: Path, folder: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "KEPT": "1", "GONE": "1", "CHANGED": "1"}
    with running([program], folder / "s", env=environment) as agent:
        done = agent.run("env", variables=["NEW=a=b", "CHANGED=2", "GONE", "=bad"])
    found = dict(line.split("=", 1) for line in done.stdout.decode().splitlines())
    assert found == {"PATH": os.environ["PATH"], "KEPT": "1", "NEW": "a=b", "CHANGED": "2"}


def test_a_program_is_found_where_no_path_is_set(program: Path, folder: Path) -> None:
    with running([program], folder / "s", env={}) as agent:
        assert agent.run("true").code == 0


def test_200_kb_of_variables(agent: Agent) -> None:
    done = agent.run("sh", "-c", "env | wc -c", variables=[f"V{number}={'x' * 1000}" for number in range(200)])
    assert int(done.stdout) > 200_000


def test_a_directory(agent: Agent, folder: Path) -> None:
    assert agent.run("pwd", directory=str(folder)).stdout.decode().strip() == str(folder)


@pytest.mark.parametrize(
    ("command", "directory", "number", "stage"),
    [
        (["/nowhere/x"], None, errno.ENOENT, "p"),
        (["not-a-program"], None, errno.ENOENT, "p"),
        (["/etc/passwd"], None, errno.EACCES, "p"),
        (["true"], "/nowhere", errno.ENOENT, "d"),
        (["true"], "/etc/passwd", errno.ENOTDIR, "d"),
        (["true", "x" * 200_000], None, errno.E2BIG, "p"),
    ],
)
def test_what_cannot_be_started_says_why(
    agent: Agent, command: list[str], directory: str | None, number: int, stage: str
) -> None:
    done = agent.run(*command, directory=directory)
    assert (done.errno, done.stage, done.code) == (number, stage, None)


def test_input_and_its_end(agent: Agent) -> None:
    data = os.urandom(3 * MB)
    with agent.connect() as wire:
        wire.command("cat", input=None)
        sender = threading.Thread(target=lambda: (wire.send("i", data), wire.send("e")))
        sender.start()
        done = wire.end()
        sender.join()
    assert bytes(done.stdout) == data


def test_without_input_there_is_nothing_to_read(agent: Agent) -> None:
    assert agent.run("sh", "-c", "cat; readlink /proc/self/fd/0").stdout == b"/dev/null\n"


def test_input_that_nobody_reads_holds_up_nothing(agent: Agent) -> None:
    with agent.connect() as wire:
        wire.command("true", input=None)
        assert wire.end().code == 0
    assert agent.run("true", input=b"x" * MB).code == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1])
def test_the_signal_that_ended_it(agent: Agent, number: int) -> None:
    with agent.connect() as wire:
        wire.command("sh", "-c", "echo ready; exec sleep 1000", input=None)
        done = Done()
        wire.until(b"ready", done)
        wire.send("k", bytes([number]))
        assert wire.end().code == -number


def test_a_signal_reaches_the_whole_group(agent: Agent) -> None:
    with agent.connect() as wire:
        wire.command("sh", "-c", "trap 'echo caught; exit 5' INT; echo ready; sleep 1000", input=None)
        done = Done()
        wire.until(b"ready", done)
        until(lambda: any(child.name() == "sleep" for child in agent.children), "the command")
        wire.send("k", b"\xff")  # there is no such signal
        wire.send("k", bytes([signal.SIGINT]))
        done = wire.end()
    assert (done.stdout, done.code) == (b"caught\n", 5)


def test_ignored_and_blocked_signals_are_not_inherited(agent: Agent) -> None:
    code = (
        "import signal; print([n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN"
        " and n not in (signal.SIGPIPE, signal.SIGXFSZ)], signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    )
    assert agent.run(sys.executable, "-c", code).stdout == b"[] set()\n"
    assert agent.run("sh", "-c", "yes | head -1").stdout == b"y\n"


def test_when_its_time_is_over_nothing_of_it_is_left(agent: Agent) -> None:
    script = "sleep 1000 & (sleep 1000 & sleep 1000) & setsid sleep 1000 & echo begun; sleep 1000"
    done = agent.run("sh", "-c", script, timeout=1)
    assert (done.stdout, done.code, done.timed_out) == (b"begun\n", -signal.SIGKILL, True)
    until(lambda: not agent.children, "the end of its children")


def test_who_ignores_signals_is_killed_too(agent: Agent) -> None:
    done = agent.run("sh", "-c", "trap '' HUP INT TERM; while :; do sleep 1000; done", timeout=0.3)
    assert (done.code, done.timed_out) == (-signal.SIGKILL, True)
    until(lambda: not agent.children, "the end of its children")


def test_what_keeps_forking_is_killed(agent: Agent) -> None:
    done = agent.run("sh", "-c", "f() { sleep 0.02 & sleep 0.01; f & }; f; sleep 1000", timeout=0.5)
    assert done.timed_out
    until(lambda: not agent.children, "the end of its children")


def test_a_client_that_leaves_ends_its_command(agent: Agent) -> None:
    wire = agent.connect()
    wire.command("sh", "-c", "sleep 1000 & echo $$; sleep 1000")
    done = Done()
    wire.until(b"\n", done)
    assert alive(int(done.stdout))
    wire.close()
    until(lambda: not agent.children, "the end of its children")


def test_a_client_that_leaves_while_it_does_not_read_ends_its_command(agent: Agent) -> None:
    wire = agent.connect()
    wire.command("yes")
    until(lambda: agent.children, "the command")
    wire.close()
    until(lambda: not agent.children, "the end of the command")


def test_the_background_goes_on_when_a_command_ends(agent: Agent, folder: Path) -> None:
    file = folder / "beats"
    script = f"(while :; do echo x >> {file}; echo flood; sleep 0.02; done) & echo $!"
    done = agent.run("sh", "-c", script)
    pid = int(done.stdout.split()[-1]) if done.stdout.split()[-1] != b"flood" else 0
    assert done.code == 0
    count = len(file.read_text()) if file.exists() else 0
    until(lambda: file.exists() and len(file.read_text()) > count + 20, "what runs in the background")
    pid = pid or agent.children[0].pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: not agent.children, "its end")
    until(lambda: agent.descriptors <= 6, "the end of its pipes")


def test_a_background_that_floods_hides_no_end(agent: Agent) -> None:
    """How much is read in which turn is chance, so it is tried often, for a while."""
    enough = time.monotonic() + 10
    for number in range(200):
        if time.monotonic() >= enough:
            break
        with agent.connect() as wire:
            wire.command("sh", "-c", f"cat /dev/zero & cat /dev/zero & cat /dev/zero & sleep 0.0{number % 4}")
            last = b""
            while not last.startswith(b"x\0\0\0\5"):
                last = (last + wire.raw_answer()[-10:])[-10:]
        for child in agent.children:
            child.kill()


def test_as_many_at_once_as_it_may_open(program: Path, folder: Path) -> None:
    with running(["sh", "-c", f"ulimit -n 64 && exec {program} $0"], folder / "s") as agent:
        wires: list[Wire] = []
        try:
            for _ in range(16):
                wires.append(agent.connect())
                wires[-1].command("sh", "-c", "echo ready; exec sleep 1000")
                wires[-1].until(b"ready", Done())
            for wire in wires:
                wire.send("k", bytes([signal.SIGTERM]))
            assert [wire.end().code for wire in wires] == [-signal.SIGTERM] * len(wires)
        finally:
            for wire in wires:
                wire.close()


def test_orphans_are_reaped(agent: Agent) -> None:
    agent.run("sh", "-c", "(sleep 0.1 &) ; (sleep 0.1 &)")

    def zombies() -> bool:
        listed = Path(f"/proc/{agent.process.pid}/task/{agent.process.pid}/children").read_text()
        return bool(listed.split())

    until(lambda: not zombies(), "the end of the orphans")


def test_100_at_once(agent: Agent) -> None:
    wires = [agent.connect() for _ in range(100)]
    try:
        for number, wire in enumerate(wires):
            wire.command("sh", "-c", f"read go; echo {number}; exit {number}", input=None)
        until(lambda: len(agent.children) >= 100, "all commands")
        for wire in wires:
            wire.send("i", b"go\n")
        for number, wire in enumerate(wires):
            done = wire.end()
            assert (done.stdout, done.code) == (f"{number}\n".encode(), number)
    finally:
        for wire in wires:
            wire.close()
    until(lambda: agent.descriptors <= 6, "the end of its connections")


def test_a_slow_client_holds_up_nobody_and_costs_no_memory(agent: Agent) -> None:
    with agent.connect() as slow:
        slow.command("sh", "-c", "head -c 100000000 /dev/zero")
        for _ in range(10):
            assert agent.run("true").code == 0
        done, size = Done(), 0
        while True:
            found = slow.hear()
            size += sum(len(data) for kind, data in found if kind == b"o")
            if found[-1][0] == b"x":
                break
    assert (size, done.errno) == (100_000_000, 0)
    assert agent.memory < 8 * MB


def test_a_command_waits_while_nobody_reads(agent: Agent, folder: Path) -> None:
    mark = folder / "mark"
    with agent.connect() as wire:
        wire.command("sh", "-c", f"head -c 10000000 /dev/zero; touch {mark}")
        until(lambda: agent.children, "the command")
        assert not mark.exists()
        done = wire.end()
    assert (len(done.stdout), done.code, mark.exists()) == (10_000_000, 0, True)


def test_time_is_over_also_while_nobody_reads(agent: Agent) -> None:
    with agent.connect() as wire:
        wire.command("yes", timeout=0.5)
        until(lambda: agent.children, "the command")
        until(lambda: not agent.children, "its end")
        done = wire.end()
    assert (done.code, done.timed_out) == (-signal.SIGKILL, True)


# Terminals


def test_a_terminal_has_a_size_that_changes(agent: Agent) -> None:
    with agent.connect() as wire:
        wire.command("sh", terminal=(30, 90), variables=["PS1=", "ENV="], input=None)
        done = Done()
        wire.send("i", b"stty -echo; tty; stty size; echo re''ady\n")
        wire.until(b"ready", done)
        assert b"/dev/pts/" in done.stdout
        assert b"30 90" in done.stdout
        wire.send("w", b"\0\x32\0\x84")
        wire.send("i", b"stty size\nexit 7\n")
        done = wire.end()
    assert b"50 132" in done.stdout
    assert done.code == 7


def test_a_terminal_passes_an_interrupt_and_the_end_of_input(agent: Agent) -> None:
    with agent.connect() as wire:
        script = "trap 'echo caught' INT; echo ready; sleep 1000; cat; echo over"
        wire.command("sh", "-c", script, terminal=(24, 80), input=None)
        done = Done()
        wire.until(b"ready", done)
        until(lambda: any(child.name() == "sleep" for child in agent.children), "the command in the foreground")
        wire.send("i", b"\x03")
        wire.until(b"caught", done)
        wire.send("e")
        done = wire.end()
    assert (b"over" in done.stdout, done.code) == (True, 0)


def test_a_terminal_that_is_left_hangs_up(agent: Agent) -> None:
    wire = agent.connect()
    wire.command("sh", "-c", "sleep 1000 & echo ready; cat", terminal=(24, 80), input=None)
    wire.until(b"ready", Done())
    wire.close()
    until(lambda: not agent.children, "the end of what was in the terminal")


def test_the_last_words_in_a_terminal_are_heard(agent: Agent) -> None:
    for _ in range(20):
        done = agent.run("sh", "-c", "head -c 3000 /dev/zero | tr '\\0' x; echo; echo last", terminal=(24, 80))
        assert done.stdout.endswith(b"last\r\n")
        assert done.stdout.count(b"x") == 3000


# The agent's own life


def test_it_ends_in_good_order(program: Path, folder: Path) -> None:
    path = folder / "s"
    with running([program], path) as agent, agent.connect() as wire:
        wire.command("sh", "-c", "trap 'exit 0' TERM; (setsid sleep 1000 &); echo ready; sleep 1000 & wait", input=None)
        wire.until(b"ready", Done())
        left = agent.children
        assert len(left) >= 2
        agent.process.terminate()
        assert agent.process.wait(PATIENCE) == 0
        until(lambda: not any(alive(child.pid) for child in left), "the end of its commands")
        assert not path.exists()
        assert wire.hear() == []


def test_it_ends_with_its_input_where_that_is_wanted(program: Path, folder: Path) -> None:
    path = folder / "s"
    with subprocess.Popen([program, path, "until-eof"], stdin=subprocess.PIPE) as process:
        try:
            until(path.exists, "the socket")
            assert process.stdin is not None
            process.stdin.write(b"alive\n")
            process.stdin.flush()
            agent = Agent(process, path)
            assert agent.run("true").code == 0
            process.stdin.close()
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


def test_it_ends_with_an_input_that_breaks(program: Path, folder: Path) -> None:
    ours, theirs = os.openpty()
    with subprocess.Popen([program, folder / "s", "until-eof"], stdin=ours) as process:
        try:
            os.close(ours)
            until((folder / "s").exists, "the socket")
            os.close(theirs)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


def test_a_socket_that_it_was_given_is_no_path(program: Path, folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(folder / "s"))
        door.listen()
        name = f"fd:{door.fileno()}"
        (folder / name).touch()
        with subprocess.Popen([program, name], pass_fds=[door.fileno()], cwd=folder) as process:
            try:
                assert Agent(process, folder / "s").run("true").code == 0
                process.terminate()
                assert process.wait(PATIENCE) == 0
            finally:
                process.kill()
        assert (folder / name).exists()


def test_a_killed_agent_hangs_up(program: Path, folder: Path) -> None:
    with running([program], folder / "s") as agent, agent.connect() as wire:
        wire.command("sh", "-c", "echo $$; exec sleep 1000", input=None)
        done = Done()
        wire.until(b"\n", done)
        try:
            agent.process.kill()
            while wire.hear():
                pass
        finally:
            os.kill(int(done.stdout), signal.SIGKILL)


def test_a_stale_socket_is_replaced(program: Path, folder: Path) -> None:
    path = folder / "s"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    with running([program], path) as agent:
        until(lambda: path.exists() and stat.S_IMODE(path.stat().st_mode) == 0o666, "a socket that all may use")
        assert agent.run("true").code == 0


@pytest.mark.parametrize("arguments", [[], ["/tmp/x", "y"], ["/tmp/" + "x" * 200], ["/nowhere/at/all"]])
def test_what_it_cannot_use_it_refuses(program: Path, arguments: list[str]) -> None:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode in (1, 2)
    assert "aenv-agent" in done.stderr


def test_a_terminal_whose_user_reads_slowly_costs_nothing(agent: Agent) -> None:
    with agent.connect() as wire:
        wire.command("head", "-c", "1000000", "/dev/zero", terminal=(24, 80), input=None)
        until(lambda: not wire.quiet(0), "what it prints")
        used = _cpu(agent)
        wire.quiet(0)
        threading.Event().wait(1)
        assert _cpu(agent) - used < 0.5
        assert len(wire.end().stdout) == 1_000_000


def _cpu(agent: Agent) -> float:
    found = psutil.Process(agent.process.pid).cpu_times()
    return found.user + found.system


def test_an_agent_that_is_killed_leaves_no_half_of_a_file(program: Path, folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "file").write_bytes(b"old")
    with running([program], folder / "s") as agent, agent.connect() as wire:
        wire.send("u", os.fsencode(folder / "sub" / "file"))
        wire.send("i", b"new" * 1000)
        until(lambda: len(os.listdir(folder / "sub")) == 2, "the new file")
        agent.process.kill()
        agent.process.wait()
        until(lambda: os.listdir(folder / "sub") == ["file"], "the end of the new file")
    assert (folder / "sub" / "file").read_bytes() == b"old"
