"""``aenv init``, ``run`` and ``test``: from nothing to a project that runs on this machine."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import click

from aenv import config, project
from aenv.cli.control import Control
from aenv.cli.inspector import DEFAULT_PORT, PACKAGE, Inspector, problem
from aenv.cli.output import FAILED, label, output_option, say, show_json, stdout_reserved
from aenv.errors import NotFound

if TYPE_CHECKING:
    from aenv.project import Project
    from aenv.runtime.server import Served

T = TypeVar("T")
NO_TESTS = 5
"""pytest's exit code when it found no test."""

work_dir_option = click.option(
    "-w",
    "--work-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=".",
    help="The project's directory.",
)


class WithArguments(click.Command):
    """A command that passes on what stands after ``--``, and takes nothing else without a name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta["arguments"] = tuple(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- ARGUMENTS...]"]


@click.command()
@click.argument("name")
@click.option("-v", "--version", default="1.0.0", help="The project's version.")
@click.option(
    "-t",
    "--template",
    default="default",
    help="What to begin with: " + "; ".join(f"{name}, {about}" for name, about in project.TEMPLATES.items()) + ".",
)
@click.option(
    "-w",
    "--work-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=".",
    help="Where to make the project's directory.",
)
@click.option("--force", is_flag=True, help="Write over the template's files in a directory that is not empty.")
@click.option("--config-only", is_flag=True, help="Write config.json and nothing else.")
@output_option
def init(
    *, name: str, version: str, template: str, work_dir: Path, force: bool, config_only: bool, output: str
) -> None:
    """Make a new project.

    It is written into ./NAME and needs no server.

    \b
    Example:
      aenv init my-env
      aenv init my-shell --template terminal
    """
    root = work_dir / name
    written = project.scaffold(name, work_dir, template=template, version=version, force=force, config_only=config_only)
    files = [str(file.relative_to(root)) for file in written]
    if output == "json":
        show_json({"name": name, "version": version, "directory": str(root.absolute()), "files": files})
        return
    say(f"made {name} {version} in {root}: {', '.join(files)}")
    say(f"\nnext:\n  cd {shlex.quote(str(root))}")
    if (root / "requirements.txt").is_file() and not config_only:
        say("  pip install -r requirements.txt\n  aenv run        serve it on http://localhost:8081")
        say("  aenv test       run its tests against a live sandbox")


@click.command(cls=WithArguments)
@work_dir_option
@click.option("--host", default="127.0.0.1", help="Address to listen on. Beyond this machine, a token is asked for.")
@click.option("--port", type=click.IntRange(0, 65535), default=8081, help="Port to listen on; 0 for any free one.")
@click.option("-q", "--quiet", is_flag=True, help="Do not open the MCP inspector.")
@click.option(
    "--inspector-port", type=click.IntRange(1, 65535), default=DEFAULT_PORT, help="Port of the MCP inspector."
)
@click.option("--reload", is_flag=True, help="Load the project again when a file in it changes.")
@click.option(
    "--control-port",
    type=click.IntRange(0, 65535),
    help="Port of the control plane, on this machine only; 8080 when none is given and it is free.",
)
@click.option("--no-control", is_flag=True, help="Start no control plane.")
@output_option
@click.pass_context
def run(
    ctx: click.Context,
    *,
    work_dir: Path,
    host: str,
    port: int,
    quiet: bool,
    inspector_port: int,
    reload: bool,
    control_port: int | None,
    no_control: bool,
    output: str,
) -> None:
    """Run the project here as a sandbox on this machine.

    It runs until Ctrl-C. What stands after -- becomes the instance's arguments. With -o json, one JSON object
    is printed when the sandbox is ready.

    Beside the sandbox there is a control plane, as a platform has it, which makes further instances of the project as
    it is then: for programs that find their platform with AENV_SYSTEM_URL. What the project depends on is
    started, too.

    \b
    Example:
      aenv run --quiet
      aenv run --port 9000 --reload -- CartPole-v1
    """
    from aenv.cli.company import Company
    from aenv.runtime import server

    found = project.read(work_dir)
    _warn(found)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    inspector, control, company = Inspector(), Control(), Company(found)
    telling: list[Thread] = []

    def tell(served: Served) -> None:
        url = control.url()
        if not company.start(served):
            return
        if output == "json":
            show_json({**_summary(found, served), "control": url}, stdout)
            stdout.flush()
        _banner(found, served, url)
        if control.problem:
            say(f"no control plane: {control.problem}; --no-control leaves it out")
        if not quiet:
            _inspect(inspector, served, inspector_port)

    def ready(served: Served) -> None:
        telling.append(Thread(target=tell, args=(served,)))  # the control plane may take longer
        telling[0].start()

    with stdout_reserved() if output == "json" else nullcontext(sys.stdout) as stdout:
        try:
            if not no_control:
                control.start(found.root, control_port)
            server.run(
                found.root,
                host=host,
                port=port,
                arguments=ctx.meta.get("arguments", ()),
                reload=reload,
                on_ready=ready,
            )
        finally:
            for thread in telling:
                thread.join()
            company.stop()
            control.stop()
            inspector.stop()
    if company.problem is not None:
        raise company.problem


@click.command()
@work_dir_option
@click.option("--startup-timeout", type=float, default=60.0, help="Seconds the sandbox has to become ready.")
@output_option
def test(work_dir: Path, startup_timeout: float, output: str) -> int:
    """Run the project's tests against a live sandbox.

    That is testConfig.script of config.json, or pytest over test/ when there is none. DUMMY_INSTANCE_IP is
    set, so that Environment("name") in a test attaches to the sandbox.

    \b
    Example:
      aenv test
    """
    found = project.read(work_dir)
    _warn(found)
    command = _test_command(found)
    with stdout_reserved() if output == "json" else nullcontext():
        code = run_async(_run_tests(found, command, startup_timeout))
    reason = "no test was found" if code == NO_TESTS and not found.test_script else f"exit code {code}"
    if output == "json":
        shown = found.test_script or shlex.join(command)
        show_json({"name": found.name, "passed": code == 0, "exit_code": code, "command": shown})
    elif code:
        label("error", f"the tests failed: {reason}")
    return FAILED if code else 0


def _test_command(found: Project) -> list[str]:
    if found.test_script:
        return ["/bin/sh", "-c", found.test_script]
    folder = next((name for name in ("test", "tests") if (found.root / name).is_dir()), None)
    if folder is None:
        raise NotFound(
            f"{found.root} has no tests",
            hint="put them into test/, or name a command in testConfig.script of config.json",
        )
    if find_spec("pytest") is None:
        raise NotFound(f"pytest is not installed for {sys.executable}", hint="pip install pytest")
    return [sys.executable, "-m", "pytest", folder]


async def _run_tests(found: Project, command: list[str], startup_timeout: float) -> int:
    from aenv.client.serving import run_project

    variables = found.environment_variables
    async with run_project(found.root, environment_variables=variables, startup_timeout=startup_timeout) as url:
        say(f"{found.name} runs at {url}; testing with: {found.test_script or shlex.join(command)}")
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=found.root,
            env=config.child_environment({"DUMMY_INSTANCE_IP": url}),
            start_new_session=True,
        )
        try:
            return await process.wait()
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGTERM)


def run_async(work: Coroutine[Any, Any, T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> T:
    """``asyncio.run`` where SIGTERM and SIGHUP, like Ctrl-C, leave time to end what was started."""

    async def guarded() -> T:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await work

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(guarded())
    except asyncio.CancelledError:
        raise click.exceptions.Abort from None


def _warn(found: Project) -> None:
    for warning in found.warnings:
        label("warning", warning)


def _local(url: str) -> str:
    """``url`` as a program on this machine reaches it."""
    parts = urlsplit(url)
    if parts.hostname in ("0.0.0.0", "::", "127.0.0.1", "::1"):
        return parts._replace(netloc=f"localhost:{parts.port}" if parts.port else "localhost").geturl()
    return url


def _summary(found: Project, served: Served) -> dict[str, Any]:
    return {
        "name": found.name,
        "version": found.version,
        "url": served.url,
        "mcp": f"{served.url}/mcp",
        "openenv": f"{served.url}/openenv",
        "tools": list(served.tools),
        "rewards": list(served.rewards),
        "functions": list(served.functions),
        "owner_token": served.owner_token,
    }


def _banner(found: Project, served: Served, control: str | None) -> None:
    say(f"\n{found.name} {found.version} is ready at {served.url} (MCP: {served.url}/mcp)")
    for word, names in (
        ("tools", served.tools),
        ("rewards", served.rewards),
        ("functions", served.functions),
    ):
        if names:
            say(f"  {word + ':':<11}{', '.join(names)}")
    say(f"  {'OpenEnv:':<11}{served.url}/openenv")
    say("\nuse it from another terminal:")
    say(f"  export DUMMY_INSTANCE_IP={_local(served.url)}")
    if served.owner_token:
        say(f"  export AENV_API_KEY={served.owner_token}")
    if control:
        say(f"or, for instances of your own: export AENV_SYSTEM_URL={_local(control)}")
    say("stop it with Ctrl-C\n")


def _inspect(inspector: Inspector, served: Served, port: int) -> None:
    if reason := problem():
        say(f"no inspector: {reason}; --quiet leaves it out")
        return
    say(f"opening the MCP inspector on port {port}: npx {PACKAGE} (npx downloads it the first time)")
    try:
        inspector.start(f"{_local(served.url)}/mcp", port)
    except OSError as exc:
        say(f"no inspector: {exc}")
