"""A platform and a trainer that are killed and started again, and what each of their lives held."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.owners import SPARE, Family, Process, spawner
from benchmarks.platform import told
from benchmarks.processes import OURS, START, environment, free_port
from benchmarks.soak.growth import State
from benchmarks.venvs import ROOT

STOP = 60.0
"""Seconds that a program may take to end when it is asked to."""
_KILLED = -signal.SIGKILL


class Life:
    """What one process held, by how many episodes had ended then."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, State]] = []

    def look(self, pid: int, ended: int) -> None:
        with suppress(OSError, RuntimeError):  # it has just ended
            self._seen.append((ended, State.of(pid)))

    @property
    def episodes(self) -> int:
        """How many ended in its time."""
        return self._seen[-1][0] - self._seen[0][0] if self._seen else 0

    def at(self, share: float) -> State:
        """What it held after that share of its episodes."""
        wanted = self._seen[0][0] + share * self.episodes
        return next(state for ended, state in self._seen if ended >= wanted)


class Program:
    """A process that is started again, and again, by the same command. What it writes goes to one file."""

    def __init__(self, name: str, folder: Path, env: dict[str, str]) -> None:
        self.name = name
        self.lives: list[Life] = []
        self._log = folder / f"{name}.log"
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str | Path]:
        """What is run, this time."""
        raise NotImplementedError

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def start(self) -> None:
        self.lives.append(Life())
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), cwd=ROOT, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )

    def kill(self) -> bool:
        """Kill it, whatever it is at, and start it again; False when it has ended by itself."""
        self.process.kill()
        self.process.wait()
        if self.process.returncode != _KILLED:
            return False
        self._let_go()
        self.start()
        return True

    def look(self, ended: int) -> None:
        """Write down what it holds, after so many episodes."""
        self.lives[-1].look(self.process.pid, ended)

    def wait(self, seconds: float) -> int | None:
        """Its exit code; None when it has not ended by then."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def stop(self) -> int | None:
        """End it in peace: its exit code, or None when that could not be had."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        return self.wait(STOP)

    def close(self) -> None:
        """End it in any case."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._let_go()

    def last_words(self) -> str:
        """The end of what it wrote."""
        return self._log.read_bytes()[-3000:].decode(errors="replace") if self._log.exists() else ""

    def _let_go(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


class Server(Program):
    """``aenv serve``, in one home and on the same ports in each of its lives."""

    def __init__(self, home: Path, folder: Path) -> None:
        super().__init__("server", folder, environment(AENV_HOME=str(home), AENV_ISOLATION="strict"))
        self.home = home
        self._ports = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self._ports[0]}"

    def command(self) -> list[str | Path]:
        port, data_port = map(str, self._ports)
        options = ["--port", port, "--data-port", data_port, "--until-eof", "-o", "json"]
        return [OURS, "-m", "aenv", "serve", *options]

    def ready(self) -> None:
        """Wait until it serves, in its first life."""
        told(self.process)

    def aenv(self, *arguments: str | Path) -> str:
        """What a command of ``aenv`` prints that is pointed at it."""
        env = environment(AENV_HOME=str(self.home), AENV_SYSTEM_URL=self.url)
        command = [OURS, "-m", "aenv", *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=START, check=False)
        if done.returncode:
            raise RuntimeError(f"aenv {arguments[0]} failed: {done.stderr}")
        return done.stdout

    def instances(self) -> list[dict[str, Any]]:
        """Those that live, as it says."""
        found: list[dict[str, Any]] = json.loads(self.aenv("instance", "list", "-o", "json"))["items"]
        return found

    @property
    def sandboxes(self) -> Family:
        """What holds the instances, whichever life of the server it began in."""
        return Family(spawner(self.home / "run" / "platform"), self.home)

    def processes(self) -> list[int]:
        """Whatever runs for this home: it was given the home's name, or has a part of the home mounted."""
        name, own = str(self.home).encode(), os.getpid()
        files = ("environ", "cmdline", "mountinfo")
        pids = map(int, filter(str.isdigit, os.listdir("/proc")))
        return [pid for pid in pids if pid != own and any(name in _content(pid, file) for file in files)]


class Trainer(Program):
    """``aenv rollout``: from its second life on, it goes on with the run."""

    def __init__(self, server: Server, folder: Path, *arguments: str | Path) -> None:
        env = environment(AENV_HOME=str(server.home), AENV_SYSTEM_URL=server.url)
        super().__init__("trainer", folder, env)
        self._arguments = arguments

    def command(self) -> list[str | Path]:
        return [OURS, "-m", "aenv", "rollout", *self._arguments, *(["--resume"] if len(self.lives) > 1 else [])]


def kill_instance(family: Family, draws: random.Random) -> bool:
    """Kill a process of an instance, its first or its runtime; False when nobody has one."""
    return _kill_one(family, draws, lambda process: len(process.places) == 4, beyond=2 * SPARE)


def kill_zygote(family: Family, draws: random.Random) -> bool:
    """Kill what instances are forked from, and with it all of them; False when there is none."""
    return _kill_one(family, draws, lambda process: len(process.places) == 3, beyond=0)


def _kill_one(family: Family, draws: random.Random, chosen: Callable[[Process], bool], *, beyond: int) -> bool:
    """Kill one of those, when there are more than ``beyond``."""
    found = sorted(process.pid for process in family.members() if chosen(process))
    if len(found) <= beyond:
        return False
    with suppress(ProcessLookupError):
        os.kill(draws.choice(found), signal.SIGKILL)
        return True
    return False


def _content(pid: int, file: str) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/{file}").read_bytes()
    return b""
