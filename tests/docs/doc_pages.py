"""Runs a page of the documentation as its reader would, from top to bottom, in a directory of its own.

What a comment before a block means:

    <!-- file: src/custom_env.py -->   the block is that file; it is written, not run
    <!-- not run: the reason -->       the block is left alone
    <!-- needs volumes -->             the block is left alone where sandboxes can have none
    <!-- needs docker -->              the block is left alone where no daemon of containers is to be had
    <!-- needs compose -->             the block is left alone where deploy/compose cannot be started there
    <!-- needs cluster -->             the block is left alone where no cluster of Kubernetes can be started
    <!-- output -->                    the text block is what the block before it printed ("..." for anything)

A page may say ``<!-- project: examples/01-hello -->`` once: its reader begins in a copy of that project.
Without a comment: Python is run, and may await at the top level as in a notebook; JSON must be JSON; each line of
a bash block is carried out when it is one of ``COMMANDS``, and any other command is a mistake in the page.
``aenv run`` starts a sandbox that lives until the page ends. Its port is free, and stands in for 8081. ``aenv serve``
starts a platform likewise, and its ports stand in for 8080 and 8081; served again, it is stopped first. That of
``aenv serve controller`` stand in for 8090 and 8091, and it lives beside the platform until the page ends. The tests'
own base image stands in for ``aenv-base``. ``docker compose up`` starts deploy/compose, whose ports stand in likewise,
and whose first token for that of the page.

On a cluster, namespaces of the test's own stand in for ``aenv`` and ``aenv-sandboxes``, its servers for those at
example.org, and its images for those of the page: the test's values are laid over the page's.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import inspect
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from aenv import http
from aenv.client import sync
from aenv.engines.docker.containers import ENGINE
from aenv.engines.docker.daemon import Daemon
from aenv.engines.process import powers
from aenv.errors import Conflict, NotFound
from aenv.project import CONFIG
from tests.daemons.stack import FILE, Stack
from tests.deploy.site import Site
from tests.platform.support import end_sandboxes

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
AENV = [sys.executable, "-c", "import sys; from aenv.cli import main; sys.exit(main())"]
_PROJECT = re.compile(r"^<!-- project: (\S+) -->$", re.MULTILINE)
_READY = re.compile(r"ready: control http://[^ ]+:(\d+) data http://[^ ]+:(\d+)")
_FENCE = re.compile(
    r"^(?:<!-- (?P<comment>[^\n]*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


RUN = ("python", "json", "bash")
"""Languages of blocks that are carried out."""


def _forget(before: set[str], directory: Path) -> None:
    """Modules that a page brought along are not the next one's."""
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(directory)):
            del sys.modules[name]


class Block(NamedTuple):
    language: str
    text: str
    comment: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start("text")) + 1
        yield Block(found["language"], found["text"], found["comment"] or "", line)


class Containers(NamedTuple):
    """A daemon of containers, and the base image there."""

    address: str
    base_image: str
    stack: Stack | None = None
    """A platform by Docker Compose there, which nobody has started."""


class Reader:
    """Somebody who follows a page."""

    def __init__(
        self, page: Path, monkeypatch: Any, containers: Containers | None = None, site: Site | None = None
    ) -> None:
        """``site`` is what a deployment of the page becomes."""
        self.page = page
        self._containers = containers
        self._site = site
        self._is_alone = False
        """Whether the last block was left alone."""
        self.left = 0
        """Blocks that were left alone."""
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.printed = ""
        self.done = 0
        self._patch = monkeypatch
        self._loop = asyncio.new_event_loop()
        self._stack = contextlib.ExitStack()
        self._url: str | None = None
        self._ports: dict[str, str] = {}
        """The ports that stand in for those of the page."""
        self._platform: subprocess.Popen[str] | None = None

    def read(self) -> int:
        """Follow the page; how many blocks were carried out."""
        with self._stack:
            self._stack.callback(self._loop.close)
            if self._containers is not None:
                self._patch.setenv("AENV_DOCKER_HOST", self._containers.address)
                self._patch.setenv("AENV_BASE_IMAGE", self._containers.base_image)
                self._stack.callback(end_containers, self._containers, Path(os.environ["AENV_HOME"]), Path.cwd())
            if self._site is not None:
                self._patch.setenv("KUBECONFIG", str(self._site.cluster.kubeconfig))
            if project := _PROJECT.search(self.page.read_text(encoding="utf-8")):
                shutil.copytree(ROOT / project[1], "project", ignore=shutil.ignore_patterns("__pycache__", ".*"))
                self._patch.chdir("project")
            self._patch.syspath_prepend(str(Path.cwd()))  # a reader's Python finds what is in the directory
            self._stack.callback(_forget, set(sys.modules), Path.cwd())
            for block in blocks(self.page):
                try:
                    self._carry_out(block)
                except Exception as exc:
                    exc.add_note(f"in {self.page.relative_to(ROOT)}:{block.line}")
                    raise
        return self.done

    def _carry_out(self, block: Block) -> None:
        kind, _, value = block.comment.partition(": ")
        if kind == "not run":
            assert value.strip(), "say why it is not run"
        lacks = {
            "needs volumes": powers.probe().no_volumes,
            "needs docker": self._containers is None,
            "needs compose": self._containers is None or self._containers.stack is None,
            "needs cluster": self._site is None,
        }
        if kind == "not run" or lacks.get(kind) or (kind == "output" and self._is_alone):
            self._is_alone = True
            self.left += block.language in RUN
            return
        self._is_alone = False
        if kind == "file":
            Path(value).parent.mkdir(parents=True, exist_ok=True)
            Path(value).write_text(self._here(block.text), encoding="utf-8")
        elif kind == "output":
            same = doctest.OutputChecker().check_output(block.text, f"{self.printed.rstrip()}\n", doctest.ELLIPSIS)
            assert same, f"the page shows\n{block.text}\nbut this was printed\n{self.printed}"
        elif block.language == "python":
            self.printed = self._python(block)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "bash":
            self.printed = "".join(self._command(line) for line in _lines(block.text))
        else:
            assert block.language in ("text", "dockerfile"), f"a block in {block.language or 'no language'}"
            return
        self.done += 1

    def _here(self, text: str) -> str:
        if self._containers is not None:
            text = re.sub(r"\baenv-base\b", self._containers.base_image, text)
        if self._site is not None:
            for theirs, ours in self._site.stands_in.items():
                text = re.sub(theirs, ours, text)
        return re.sub(
            r"(localhost|127\.0\.0\.1):(80[89][01])\b",
            lambda found: f"{found[1]}:{self._ports.get(found[2], found[2])}",
            text,
        )

    def _python(self, block: Block) -> str:
        # Blank lines first, so that a traceback shows the page's own line.
        source = "\n" * (block.line - 1) + self._here(block.text)
        code = compile(source, str(self.page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            if code.co_flags & inspect.CO_COROUTINE:
                self._loop.run_until_complete(eval(code, self.names))
            else:
                exec(code, self.names)
        return printed.getvalue()

    def _command(self, line: str) -> str:
        words = shlex.split(line, comments=True)
        if not words:
            return ""
        if words[:2] == ["aenv", "run"]:
            self.serve(words[2:])
            return ""
        if words[:2] == ["aenv", "serve"]:
            options = [self._here(word) for word in words[2:]]
            if options[:1] == ["controller"]:
                self.serve_controller(options)
            else:
                self.serve_platform(options)
            return ""
        known = COMMANDS.get(words[0])
        assert known, f"{words[0]!r} is not a command that these pages use"
        return known(self, [self._here(word) for word in words])

    def serve(self, options: list[str]) -> None:
        """A sandbox of the project here, as ``aenv run`` makes it."""
        command = [*AENV, "run", "--quiet", "--output", "json", "--port", "0", "--no-control"]
        command += [word for word in options if word not in ("--quiet", "-q", "--reload")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._stack.callback(process.wait, 10)
        self._stack.callback(process.terminate)
        assert process.stdout is not None
        shown = ""
        for printed in process.stdout:
            shown += printed
            if printed == "}\n":
                break
        assert shown, f"{self.page.name}: aenv run did not start"
        self._stack.callback(process.stdout.close)
        self._url = json.loads(shown)["url"]
        self._ports["8081"] = self._url.rpartition(":")[2]

    def serve_controller(self, options: list[str]) -> None:
        """A controller, which lives beside a platform."""
        self._stack.callback(end_sandboxes, Path(os.environ["AENV_HOME"]))
        ports = ("8090", "8091")
        assert options[-4:] == ["--port", ports[0], "--data-port", ports[1]], "a controller has ports of its own"
        self._ports |= dict.fromkeys(ports, "0")
        process = self._served(options[:-4], ports)
        self._stack.callback(process.wait, 30)
        self._stack.callback(process.terminate)

    def serve_platform(self, options: list[str]) -> None:
        """A platform, as ``aenv serve`` makes it."""
        ports = ("8080", "8081")
        if self._platform is None:
            self._stack.callback(end_sandboxes, Path(os.environ["AENV_HOME"]))
            self._stack.callback(self.stop_platform)
            self._ports |= dict.fromkeys(ports, "0")
        self.stop_platform()
        self._platform = self._served(options, ports)

    def _served(self, options: list[str], ports: tuple[str, str]) -> subprocess.Popen[str]:
        taken = (self._ports[port] for port in ports)
        command = [*AENV, "serve", *options, "--port", next(taken), "--data-port", next(taken)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if found := _READY.search(line):
                self._ports |= dict(zip(ports, found.groups(), strict=True))
                threading.Thread(target=process.stderr.read, daemon=True).start()
                return process
        raise AssertionError(f"{self.page.name}: aenv serve did not start\n{said}")

    def stop_platform(self) -> None:
        if self._platform is not None and self._platform.poll() is None:
            self._platform.terminate()
            self._platform.wait(30)

    # Commands

    def change_directory(self, words: list[str]) -> str:
        self._patch.chdir(words[1])
        return ""

    def export(self, words: list[str]) -> str:
        name, _, value = words[1].partition("=")
        if name == "DUMMY_INSTANCE_IP" and self._url:
            value = self._url
        if name == "AENV_API_KEY":
            value = self._stack_here.token if self._site is None else self._site.first_token
        self._patch.setenv(name, value)
        return ""

    def run(self, words: list[str]) -> str:
        if words[:2] == ["aenv", "deploy"] and "--render" not in words and self._site is not None:
            words = [*words, "--namespace", self._site.namespace, "--values", str(self._site.values)]
        command = {"aenv": AENV, "python": [sys.executable], "pytest": [sys.executable, "-m", "pytest"]}.get(
            words[0], [words[0]]
        )
        found = subprocess.run([*command, *words[1:]], capture_output=True, text=True, timeout=600, check=False)
        assert found.returncode == 0, f"{shlex.join(words)} ended with {found.returncode}\n{found.stderr}"
        return found.stdout

    @property
    def _stack_here(self) -> Stack:
        assert self._containers is not None
        assert self._containers.stack is not None
        return self._containers.stack

    def compose(self, words: list[str]) -> str:
        stack = self._stack_here
        assert words[:3] == ["docker", "compose", "-f"]
        assert ROOT / words[3] == FILE
        if words[4] == "up":
            self.stop_platform()
            stack.up()
            self._ports = {"8080": str(stack.port), "8081": str(stack.data_port)}
            return ""
        return stack.compose(*words[4:])

    def kubectl(self, words: list[str]) -> str:
        """With files for what it reads and what it prints, as a shell has them."""
        assert self._site is not None, "say that the block needs a cluster"
        if words[1:3] == ["-n", "aenv"]:
            words = ["kubectl", "-n", self._site.namespace, *words[3:]]
        files = {}
        for sign in "<", ">":
            if sign in words:
                at = words.index(sign)
                files[sign] = Path(words[at + 1])
                words = [*words[:at], *words[at + 2 :]]
        given = files["<"].read_bytes() if "<" in files else b""
        found = subprocess.run(words, input=given, capture_output=True, timeout=600, check=False)
        said = found.stderr.decode(errors="replace")
        assert found.returncode == 0, f"{shlex.join(words)} ended with {found.returncode}\n{said}"
        if ">" not in files:
            return found.stdout.decode()
        files[">"].write_bytes(found.stdout)
        return ""

    def make(self, words: list[str]) -> str:
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for target in words[1:]:
            assert re.search(rf"^{re.escape(target)}\b.*:", makefile, re.MULTILINE), f"no make target {target}"
        return ""

    def skip(self, words: list[str]) -> str:
        return ""


COMMANDS: dict[str, Callable[[Reader, list[str]], str]] = {
    "aenv": Reader.run,
    "cd": Reader.change_directory,
    "curl": Reader.run,
    "docker": Reader.compose,
    "export": Reader.export,
    "git": Reader.skip,
    "kubectl": Reader.kubectl,
    "make": Reader.make,
    "npx": Reader.skip,
    "pip": Reader.skip,
    "pytest": Reader.run,
    "python": Reader.run,
}


def _lines(text: str) -> Iterator[str]:
    for line in text.replace("\\\n", " ").splitlines():
        yield from line.split(" && ")


def end_containers(containers: Containers, home: Path, folder: Path) -> None:
    """End what a reader left at the daemon: the containers and sockets of his engines, and the images that he built."""
    engines = [path.name for path in (home / "docker").glob("*")]
    built = [
        artifact["content"]
        for file in folder.rglob(CONFIG)
        for artifact in json.loads(file.read_bytes()).get("artifacts", ())
    ]

    async def end() -> None:
        daemon = await Daemon.find(containers.address)
        for engine in engines:
            query = {"filters": {"label": [f"{ENGINE}={engine}"]}}
            for row in await daemon.ask("GET", "/containers/json", query={**query, "all": "1"}):
                await _remove(daemon, f"/containers/{row['Id']}", v="1")
            for row in (await daemon.ask("GET", "/volumes", query=query)).get("Volumes") or ():
                await _remove(daemon, f"/volumes/{row['Name']}")
        for image in built:
            await _remove(daemon, f"/images/{image}")
        await http.close()

    asyncio.run(end())


async def _remove(daemon: Daemon, path: str, **query: str) -> None:
    with contextlib.suppress(NotFound, Conflict):
        await daemon.ask("DELETE", path, query={"force": "1", **query})


def environment(monkeypatch: Any, home: Path) -> None:
    """A user without settings, whose virtual environment is active."""
    monkeypatch.setenv("AENV_HOME", str(home))
    monkeypatch.setattr(sync, "_loops", {})  # what blocks has an engine of its own, in this home
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    for name in list(os.environ):
        if (name.startswith("AENV_") and name != "AENV_HOME") or name == "DUMMY_INSTANCE_IP":
            monkeypatch.delenv(name)
