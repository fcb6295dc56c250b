"""``aenv instance shell``: at a real terminal, without one, and where there is nothing to open a shell in."""

import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl

import pytest

from tests.platform.support import DESK, PATIENCE, eventually
from tests.platform.support import platform as serving

AENV = (sys.executable, "-m", "aenv", "instance", "shell")


@pytest.fixture(scope="module")
def platform():
    with serving() as found:
        found.push(DESK)
        yield found


@pytest.fixture(scope="module")
def instance(platform):
    return platform.create("desk", ttl="1h")["id"]


def variables(platform):
    return {**platform.environment, "AENV_SYSTEM_URL": platform.control, "TERM": "xterm-256color"}


class Terminal:
    """A terminal with the command in it."""

    def __init__(self, platform, *arguments, rows=30, columns=90):
        self._master, slave = pty.openpty()
        self.resize(rows, columns)
        self._slave = slave
        self.before = termios.tcgetattr(slave)
        self.process = subprocess.Popen(
            [*AENV, *arguments],
            env=variables(platform),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.seen = b""

    def resize(self, rows, columns):
        ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text):
        os.write(self._master, text)

    def until(self, text):
        """Read until ``text`` has come; what came up to there is forgotten."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            self._read()
        before, _, self.seen = self.seen.partition(text)
        return before

    def _read(self):
        if select.select([self._master], [], [], 0.1)[0]:
            self.seen += os.read(self._master, 65536)

    def end(self):
        """Its exit code, and whether the terminal is as it was."""
        deadline = time.monotonic() + PATIENCE
        while (code := self.process.poll()) is None:
            assert time.monotonic() < deadline, self.seen
            self._read()
        return code, termios.tcgetattr(self._slave) == self.before

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)
        os.close(self._slave)


@pytest.fixture
def terminal(platform):
    opened = []

    def open_one(*arguments, **size):
        opened.append(Terminal(platform, *arguments, **size))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def test_a_shell_in_a_terminal(terminal, instance):
    shown = terminal(instance)
    shown.type(b"stty size; echo $TERM $USER; pwd; echo do''ne\n")
    seen = shown.until(b"\ndone")
    assert b"30 90\r\n" in seen
    assert b"xterm-256color sandbox\r\n" in seen
    shown.resize(41, 77)
    shown.process.send_signal(signal.SIGWINCH)
    shown.type(b"until [ \"$(stty size)\" = '41 77' ]; do sleep 0.05; done; echo resi''zed\n")
    shown.until(b"resized")
    shown.type(b"exit 9\n")
    assert shown.end() == (9, True)


def test_keys_reach_what_runs(terminal, instance):
    shown = terminal(instance, "--", "trap 'echo caught; exit 3' INT; echo rea''dy; while :; do sleep 0.1; done")
    shown.until(b"ready")
    shown.type(b"\x03")
    shown.until(b"caught")
    assert shown.end() == (3, True)


def test_a_command_in_a_terminal(terminal, instance):
    shown = terminal(instance, "--", "sh", "-c", "tty; kill -TERM $$")
    shown.until(b"/dev/pts/")
    assert shown.end() == (128 + signal.SIGTERM, True)


def test_leaving_whatever_the_shell_does(terminal, instance):
    shown = terminal(instance, "--", "trap '' INT HUP; stty raw -echo; echo rea''dy; sleep 300")
    shown.until(b"ready")
    shown.type(b"\r~.")
    assert shown.end() == (128 + signal.SIGHUP, True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_whatever_ends_it_the_terminal_is_as_it_was(terminal, instance, number):
    shown = terminal(instance, "--", "echo rea''dy; sleep 300")
    shown.until(b"ready")
    shown.process.send_signal(number)
    code, restored = shown.end()
    assert code != 0
    assert restored


def test_an_instance_that_ends_meanwhile(terminal, platform):
    id = platform.create("desk", ttl="1h")["id"]
    shown = terminal(id, "--", "echo rea''dy; sleep 300")
    shown.until(b"ready")
    assert platform.ask("DELETE", f"/env-instance/{id}").status == 200
    code, restored = shown.end()
    assert (code, restored) == (1, True)
    shown.until(b"has ended")


def run(platform, *arguments, text="", check=False):
    return subprocess.run(
        [*AENV, *arguments],
        env=variables(platform),
        input=text,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=check,
    )


def test_without_a_terminal(platform, instance):
    done = run(platform, instance, text="echo out; echo err >&2; exit 4\n")
    assert (done.returncode, done.stdout, done.stderr) == (4, "out\n", "err\n")
    done = run(platform, instance, "--", "wc -c", text="x" * 100_000)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "100000", "")


def test_what_comes_from_a_file(platform, instance, tmp_path):
    script = tmp_path / "script"
    script.write_text("echo from a file\n")
    with script.open() as file:
        done = subprocess.run(
            [*AENV, instance], env=variables(platform), stdin=file, capture_output=True, text=True, timeout=PATIENCE
        )
    assert (done.returncode, done.stdout) == (0, "from a file\n")
    done = subprocess.run(
        [*AENV, instance],
        env=variables(platform),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_where_there_is_none(platform):
    done = run(platform, "desk-nowhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is no instance 'desk-nowhere'" in done.stderr
    id = platform.create("desk", ttl="1h")["id"]
    platform.ask("DELETE", f"/env-instance/{id}")

    def over():
        return platform.ask("GET", f"/env-instance/{id}").data["status"] in ("Terminated", "Failed")

    eventually("its end", over)
    done = run(platform, id)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{id} has ended" in done.stderr


def test_an_agent_has_none(platform, instance):
    found = platform.ask("GET", f"/env-instance/{instance}").data
    upgrade = {"Connection": "Upgrade", "Upgrade": "aenv-shell"}
    reply = platform.call(instance, "POST", "/shell", token=found["agent_token"], headers=upgrade)
    assert reply.status == 403
    assert platform.call(instance, "POST", "/shell").status == 426
