"""One installation: a fresh virtual environment, and uv or pip putting a project's requirements into it.

Its interpreter is never started after something was installed. A package can have code run at each start, and that
must happen inside a jail.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shlex
import shutil
import signal
import sys
import sysconfig
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from aenv import config, project
from aenv.cleanup import finish
from aenv.engines.process import requirements
from aenv.engines.process.requirements import ALONE_FILE, FILE, Wanted
from aenv.errors import InvalidConfig, StartFailed

TICK = 2.0
"""Seconds between two lines of progress."""
_LAST_LINES = 15
_SCRATCH = "tmp"
_REDIRECTING = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON", "VIRTUAL_ENV")
"""Variables of the user's that would have packages found, or put, somewhere else."""
# Ends the installer and all that it started when the owner ends, in whatever way: the guard's input closes then.
_GUARD = """
import os, signal, subprocess, sys, threading
def watch():
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=watch, daemon=True).start()
code = subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL, close_fds=False)
os._exit(code if code >= 0 else 128 - code)
"""

Progress = Callable[[str], None]


class Order(NamedTuple):
    """What to install where."""

    root: Path
    """The project."""
    path: Path
    """Where the virtual environment is made, and stays."""
    wanted: Wanted
    trusted: bool
    """Whether packages may be built, which runs their code on this machine."""


class _Installer(NamedTuple):
    shown: str
    """What a person would call."""
    install: list[str]
    download: list[str]
    """For the one that takes hashes for all or for none; empty for the other."""


class Installation:
    """The steps from nothing to a virtual environment that nobody changes any more."""

    def __init__(self, order: Order, lock: int, tell: Progress) -> None:
        self._order = order
        self._path = order.path
        self._lock = lock
        self._tell = tell
        self._python = str(order.path / "bin" / "python")
        bases = {"base": str(order.path), "platbase": str(order.path)}
        self._packages = sysconfig.get_path("purelib", "venv", bases)
        self._said: deque[str] = deque(maxlen=200)
        self._since = time.monotonic()
        try:
            self._name = project.read(order.root, config_required=False).name
        except InvalidConfig:
            self._name = order.root.resolve().name

    async def run(self) -> None:
        """Install everything, or raise ``StartFailed`` with what the installer said."""
        number = self._order.wanted.number
        what = f"{number} requirement{'' if number == 1 else 's'} of {self._name}"
        self._tell(f"installing {what} (first use; kept in {self._path})")
        *first, last = self._installers()
        for installer in first:
            if await self._install(installer):
                break
            if self._is_full():
                raise self._failed(installer)
            self._tell(f"{installer.shown} could not install them; trying {last.shown}")
        else:
            if not await self._install(last):
                raise self._failed(last)
        # Nobody can write beside the modules later. What does not compile is its package's own affair.
        await self._run([sys.executable, "-P", "-m", "compileall", "-q", "-j", "0", self._packages])
        await finish(asyncio.to_thread(self._seal))
        self._tell(f"installed {what} in {time.monotonic() - self._since:.0f} s")

    def _installers(self) -> list[_Installer]:
        """Those there are, the fastest first. pip is the other's fallback: the file is written for it."""
        found = []
        has_pip = find_spec("pip") is not None
        if uv := shutil.which("uv"):
            found.append(self._uv(uv))
        if has_pip or not uv:
            found.append(self._pip(has_pip))
        return found

    def _uv(self, uv: str) -> _Installer:
        lines = self._order.wanted.lines
        command = [uv, "pip", "install", "--python", self._python]
        # Linked files would let an instance that gets at them change uv's cache, and so everything else of the user's.
        command += ["--link-mode", "copy"]
        # As pip does, which takes the best of all indexes.
        command += ["--index-strategy", "unsafe-best-match"]
        command += ["--prerelease", "allow"] if "--pre" in lines else []
        for line in lines:
            if line.startswith("--trusted-host "):
                command += ["--allow-insecure-host", line.partition(" ")[2]]
        command += [] if self._order.trusted else ["--no-build"]
        return _Installer(f"{uv} pip", command, [])

    def _pip(self, is_here: bool) -> _Installer:
        pip = [sys.executable, "-P", "-m", "pip", "--python"] if is_here else []
        pip += [self._python] if is_here else [self._python, "-P", "-m", "pip"]
        options = ["--progress-bar", "off", *([] if self._order.trusted else ["--only-binary", ":all:"])]
        install = [*pip, "install", "--no-compile", "--no-warn-script-location", *options]
        return _Installer(f"{sys.executable} -m pip", install, [*pip, "download", *options])

    async def _install(self, installer: _Installer) -> bool:
        """One resolution for the author's pins and the runtime's needs, in an environment with nothing in it."""
        self._said.clear()
        await finish(asyncio.to_thread(clear, self._path))
        (self._path / _SCRATCH).mkdir(parents=True)
        # A pip in each would take seconds, and be there for the author's code.
        bare = [] if installer.install[0] == self._python else ["--without-pip"]
        if await self._run([sys.executable, "-P", "-m", "venv", *bare, str(self._path)]):
            return False
        wanted = self._order.wanted
        self._write("requirements.txt", wanted.lines)
        if wanted.constraints:
            self._write("constraints.txt", wanted.constraints)
        self._write("runtime.txt", requirements.of_runtime())
        if wanted.hashed and installer.download and not await self._hash_runtime(installer.download):
            return False
        files = ["-r", "requirements.txt", "-r", "runtime.txt", *self._bounds()]
        if await self._run([*installer.install, *files]):
            return False
        return not wanted.alone or await self._install_alone(installer)

    async def _install_alone(self, installer: _Installer) -> bool:
        """What comes without its dependencies, from where the rest came."""
        wanted = self._order.wanted
        self._write(ALONE_FILE, [*(line for line in wanted.lines if line.startswith("-")), *wanted.alone])
        return await self._run([*installer.install, "--no-deps", "-r", ALONE_FILE, *self._bounds()]) == 0

    def _bounds(self) -> list[str]:
        return ["-c", "constraints.txt"] if self._order.wanted.constraints else []

    async def _hash_runtime(self, download: list[str]) -> bool:
        """Give hashes to what the runtime needs, where the author gave none: pip wants them for all or for none."""
        lines = self._order.wanted.lines
        pins = [line.partition(" --")[0] for line in lines if not line.startswith("-") and " @ " not in line]
        self._write("pins.txt", pins)
        self._write("runtime.txt", [*(line for line in lines if line.startswith("-")), *requirements.of_runtime()])
        folder = self._path / _SCRATCH / "packages"
        files = ["-r", "runtime.txt", "-c", "pins.txt", *self._bounds(), "-d", str(folder)]
        if await self._run([*download, *files]):
            return False
        theirs = {requirements.normal(re.split(r"[^\w.-]", pin, maxsplit=1)[0]) for pin in pins}
        hashed = [f"--find-links {folder.as_uri()}"]
        for file in sorted(folder.iterdir()):
            is_wheel = file.suffix == ".whl"
            name, version = file.name.split("-")[:2] if is_wheel else file.name.removesuffix(".tar.gz").rsplit("-", 1)
            if requirements.normal(name) not in theirs:
                hashed.append(f"{name}=={version} --hash=sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}")
        self._write("runtime.txt", hashed)
        return True

    def _seal(self) -> None:
        """Files that every user can read and none writes, in folders that their owner can remove with ``rm -r``."""
        shutil.rmtree(self._path / _SCRATCH)
        for folder, _, files in os.walk(self._path):
            Path(folder).chmod(0o755)
            for file in files:
                found = Path(folder, file)
                if not found.is_symlink():
                    found.chmod(0o555 if found.stat().st_mode & 0o100 else 0o444)

    # The installer's process

    async def _run(self, command: list[str]) -> int:
        starting = asyncio.create_task(
            asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _GUARD, *command),
                cwd=self._path,
                env=self._environment(),
                stdin=PIPE,
                stdout=PIPE,
                stderr=STDOUT,
                start_new_session=True,
                # As long as any of it runs, nobody else builds in the same place.
                pass_fds=(self._lock,),
            )
        )
        reading: asyncio.Task[None] | None = None
        try:
            process = await asyncio.shield(starting)
            reading = asyncio.create_task(self._read(process))
            while True:
                try:
                    code = await asyncio.wait_for(process.wait(), TICK)
                    break
                except TimeoutError:
                    last = next((line for line in reversed(self._said) if line), "starting")
                    self._tell(f"{last[:200]} ({time.monotonic() - self._since:.0f} s)")
            await asyncio.wait((reading,), timeout=1)  # a process that it left may hold the pipe
            return code
        finally:
            await finish(_stopped(starting, reading))

    async def _read(self, process: Process) -> None:
        assert process.stdout is not None
        rest = b""
        while chunk := await process.stdout.read(65536):
            *whole, rest = re.split(rb"[\r\n]+", (rest + chunk)[-65536:])
            self._said.extend(line.decode(errors="replace").rstrip() for line in whole)
        self._said.append(rest.decode(errors="replace").rstrip())

    def _environment(self) -> dict[str, str]:
        found = config.child_environment(
            {
                "PIP_DISABLE_PIP_VERSION_CHECK": "1",
                "PIP_NO_INPUT": "1",
                "PIP_USER": "0",
                "PYTHONUNBUFFERED": "1",
                "NO_COLOR": "1",
                "TMPDIR": str(self._path / _SCRATCH),  # what a killed installer leaves goes with the rest
            }
        )
        return {name: value for name, value in found.items() if name not in _REDIRECTING}

    def _write(self, name: str, lines: Iterable[str]) -> None:
        (self._path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    # What to say when it fails

    def _is_full(self) -> bool:
        return any("No space left on device" in line or "Disk quota exceeded" in line for line in self._said)

    def _failed(self, installer: _Installer) -> StartFailed:
        last = [f"  {line}" for line in self._said if line][-_LAST_LINES:]
        what = f"{self._name} did not start: its requirements could not be installed"
        return StartFailed("\n".join([what, *last]), hint=self._hint(installer))

    def _hint(self, installer: _Installer) -> str:
        if self._is_full():
            return f"free space on the disk that holds {self._path.parent}"
        said = "\n".join(self._said)
        if "ensurepip" in said:
            return "install uv, or your system's package for venv (python3-venv)"
        wheels = "" if self._order.trusted else "--only-binary :all: "
        command = (
            f"{installer.shown} install --dry-run {wheels}-r {shlex.quote(str(self._order.root.resolve() / FILE))}"
        )
        if re.search(r"[Cc]onnection|name resolution|dns error|unreachable|timed out|Failed to fetch", said):
            return f"is the package index reachable from here? try: {command}"
        if wheels and re.search(r"No matching distribution|building from source is disabled", said):
            why = "only wheels are installed, since building runs code outside a sandbox"
            return f"{why}; make one with 'pip wheel -w vendor NAME', and add '--find-links vendor'; try: {command}"
        if re.search(r"ResolutionImpossible|No solution found", said):
            return f"a sandbox itself needs {', '.join(requirements.of_runtime())}; try: {command}"
        return f"try: {command}"


def clear(path: Path) -> None:
    """Remove what is there of a virtual environment."""
    if path.is_dir():
        shutil.rmtree(path)


async def _stopped(starting: asyncio.Task[Process], reading: asyncio.Task[None] | None) -> None:
    """Nothing that was started runs on."""
    with suppress(OSError):
        process = await starting
        if process.returncode is None:  # so its number is still its own
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if reading is not None:
        reading.cancel()
        await asyncio.wait((reading,))
