"""A project whose tools pass everything on to the second sandbox, and tasks for it."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from aenv.agent import binary
from aenv.engines.process.engine import ProcessEngine
from aenv.models import Sandbox, SandboxSpec, Second
from tests.engines.process import lab

MODULE = """
import os
from typing import Any

from aenv import *


@register_tool
async def run(ctx: Context, command: str, timeout: float = 60.0, input: str = "") -> dict[str, Any]:
    done = await ctx.second.exec(command, timeout=timeout, input=input)
    return {"code": done.returncode, "out": done.stdout, "err": done.stderr, "late": done.timed_out}


@register_tool
async def read(ctx: Context, path: str) -> str:
    return (await ctx.second.read(path)).decode()


@register_tool
async def write(ctx: Context, path: str, text: str) -> None:
    await ctx.second.write(path, text)


@register_tool
async def typed(ctx: Context, line: str) -> str:
    said = b""
    async with ctx.second.shell(["/bin/sh"]) as shell:
        shell.send(line.encode() + b"\\nexit\\n")
        async for piece in shell:
            said += piece
    return said.decode()


@register_tool
def listing(ctx: Context, path: str) -> list[str]:
    return ctx.second.sync.exec(["ls", path]).stdout.split()


@register_tool
def own(path: str, text: str = "") -> str:
    if text:
        with open(path, "a") as file:
            file.write(text)
    with open(path) as file:
        return file.read()
"""
PROGRAMS = ("sh", "ls", "cat", "echo", "id", "mkdir", "rm", "sleep", "touch")


class Duals:
    """Dual sandboxes of one engine."""

    def __init__(self, folder: Path, home: Path, cached: Path) -> None:
        self.folder = folder
        place = home / "cache" / "agent"
        place.mkdir(parents=True)
        shutil.copy(cached, place / cached.name)
        (home / "cache").chmod(0o755)
        self.project = folder / "dual"
        (self.project / "src").mkdir(parents=True)
        (self.project / "src" / "custom_env.py").write_text(MODULE)
        config = {"name": "dual", "version": "1.0.0", "deployConfig": {"podTemplate": "DualContainer"}}
        (self.project / "config.json").write_text(json.dumps(config))

    def task(self, name: str = "task", **files: str) -> Path:
        """A task's directory; a file of the owner's alone is in it, too."""
        root = self.folder / name
        root.mkdir(mode=0o755)
        for file, text in (files or {"file.txt": "original\n"}).items():
            (root / file).write_text(text)
        (root / "private.txt").write_text("mine\n")
        (root / "private.txt").chmod(0o600)
        return root

    def root_file_system(self) -> Path:
        """A task's directory that holds a root file system, with little in it."""
        root = self.folder / "whole"
        for place in ("bin", "etc", "root", "testbed"):
            (root / place).mkdir(parents=True)
        for name in PROGRAMS:
            program = shutil.which(name)
            assert program is not None
            shutil.copy(program, root / "bin" / name)
            for library in _libraries(program):
                target = root / library.lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(library, target)
        (root / "etc" / "issue").write_text("another system\n")
        return root

    def spec(self, task: Path | str, **fields: Any) -> SandboxSpec:
        """``task``: its directory, or the name of an image."""
        second = Second(image=task) if isinstance(task, str) else Second(directory=str(task))
        return lab.spec(self.project, second=second, **{"network": "none", **fields})

    async def start(self, engine: ProcessEngine, id: str, task: Path | str, **fields: Any) -> Box:
        return Box(await engine.create(id, self.spec(task, **fields)))


class Box:
    """A dual sandbox that runs."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    async def call(self, tool: str, /, **arguments: Any) -> Any:
        return await lab.call(self.sandbox, tool, **arguments)

    async def run(self, command: str, **arguments: Any) -> dict[str, Any]:
        found: dict[str, Any] = await self.call("run", command=command, **arguments)
        return found

    async def out(self, command: str) -> str:
        """What a command that must succeed prints."""
        done = await self.run(command)
        assert done["code"] == 0, done
        return str(done["out"])


def agents(processes: list[lab.Process]) -> list[lab.Process]:
    return [found for found in processes if found.command.startswith("aenv-agent fd:") and not found.zombie]


def stubs(processes: list[lab.Process]) -> list[lab.Process]:
    """What stays of the jail of a second sandbox, or builds it."""
    return [found for found in processes if "process.second" in found.command and not found.zombie]


def compiled() -> Path:
    """The agent, in whatever home there is now."""
    return binary()


@contextmanager
def web_server() -> Iterator[int]:
    """A server of this machine that greets; its port."""

    class Greeting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Greeting) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def _libraries(program: str) -> list[str]:
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return [word for word in said.split() if word.startswith("/")]
