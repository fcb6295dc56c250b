"""``aenv validate``: what would stop a project from working, or make it work badly, each with a fix."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import click

from aenv import config, project
from aenv.cleanup import finish
from aenv.cli.output import Check, output_option, show_checks, stdout_reserved
from aenv.cli.project import run_async, work_dir_option
from aenv.errors import AEnvError, Invalid

if TYPE_CHECKING:
    from aenv.client.environment import Environment
    from aenv.project import Project
    from aenv.runtime.preload import Verdict

HEALTHY_WITHIN = 5.0
SHOWN_REASONS = 8
"""Most reasons against preloading that are listed."""
_MOVE = "do it in a @register_setup function"
_REQUIREMENT = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*\s*(\[[^\]]*\])?\s*(@\s*\S+|\(?(\s*(===|[<>=!~]=|[<>])\s*[^\s,;()]+\s*,?)*\)?)\s*(;.*)?"
)


@click.command()
@work_dir_option
@click.option("--determinism", is_flag=True, help="Also compare two episodes with the same seed.")
@click.option(
    "--episode",
    "episodes",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --determinism: replay these recorded episodes twice instead.",
)
@click.option("--startup-timeout", type=float, default=60.0, help="Seconds the sandbox has to become ready.")
@output_option
def validate(*, work_dir: Path, determinism: bool, episodes: Path | None, startup_timeout: float, output: str) -> int:
    """Check the project, and say how to mend what is wrong.

    First the files, then a sandbox that is started for it. Exit code 1 when a check failed.

    --determinism runs an episode twice with the same seed, each in a fresh instance as an Environment makes it:
    every tool is called a few times with arguments drawn by its schema, then the rewards are taken that need no
    arguments. The first result that differs fails the check. With --episode, recorded episodes are replayed
    instead, which come as far as an agent does.

    \b
    Example:
      aenv validate
      aenv validate --determinism -o json
      aenv validate --determinism --episode trajectories.jsonl
    """
    if episodes is not None and not determinism:
        raise click.UsageError("--episode says how --determinism looks; give both")
    found, checks = static_checks(work_dir)
    if found is not None and not any(row.status == "fail" for row in checks):
        with stdout_reserved():
            checks += run_async(live_checks(found, startup_timeout))
            if determinism and not any(row.check == "start" and row.status == "fail" for row in checks):
                from aenv.cli.determinism import determinism_checks

                checks += determinism_checks(found, startup_timeout, episodes)
    return show_checks(checks, output)


# The files


def static_checks(path: Path, *, package: bool = True) -> tuple[Project | None, list[Check]]:
    """Checks that start nothing. No project when its config cannot be read. ``package``: whether it can be packed."""
    try:
        found = project.read(path)
    except AEnvError as exc:
        return None, [
            Check("config", "fail", line, exc.hint or "correct config.json") for line in exc.message.splitlines()
        ]
    rows = [Check("config", "warn", warning, "remove it, or correct its spelling") for warning in found.warnings]
    rows = rows or [Check("config", "ok", f"{found.name} {found.version}")]
    return found, [
        *rows,
        *_source(found),
        *_requirements(found),
        *_image(found),
        *_tests(found),
        *(_package(found) if package else ()),
    ]


def _source(found: Project) -> Iterator[Check]:
    files = sorted(found.source.rglob("*.py"))
    for file in files:
        try:
            compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as exc:
            line = getattr(exc, "lineno", None) or 1
            yield Check("source", "fail", f"{file.relative_to(found.root)}:{line}: {exc}", "correct the syntax")
            return
    if files:
        yield Check("source", "ok", f"files in {found.source.name}/: {len(files)}")
    else:
        yield Check("source", "fail", f"no .py file in {found.source}", "write a tool in src/custom_env.py")


def _requirements(found: Project) -> Iterator[Check]:
    file = found.root / "requirements.txt"
    if not file.is_file():
        yield Check("requirements", "warn", "no requirements.txt", "list the packages that src/ needs, or none")
        return
    bad = [
        f"{part.name}:{number}: {line.strip()}"
        for part in (file, found.root / "requirements-no-deps.txt")
        if part.is_file()
        for number, line in enumerate(part.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if not _is_requirement(line)
    ]
    if bad:
        yield Check("requirements", "fail", "\n".join(bad), "write each as name, or name>=1.0")
    else:
        yield Check("requirements", "ok", "every line can be read")


def _is_requirement(line: str) -> bool:
    text = re.sub(r"(^|\s)#.*", "", line).strip().rstrip("\\").strip()
    is_other = not text or text.startswith(("-", "./", "../", "/")) or "://" in text.split("@")[0]
    return is_other or _REQUIREMENT.fullmatch(re.sub(r"\s--hash=\S+", "", text)) is not None


def _image(found: Project) -> Iterator[Check]:
    name = str(found.value("buildConfig.dockerfile"))
    if found.dockerfile.is_file():
        yield Check("dockerfile", "ok", name)
    else:
        yield Check("dockerfile", "warn", f"{name} is not there, so no image can be built", "'aenv init' writes one")
    for artifact in found.value("artifacts"):
        if str(artifact.get("type", "")).lower() == "image" and artifact.get("content"):
            yield _built(str(artifact["content"]), str(artifact.get("id") or ""))
            if artifact.get("sources") and artifact["sources"] != _sources(found):
                detail = f"{artifact['content']} was built of other files than these, and is what runs in containers"
                yield Check("image", "warn", f"{detail}: 'aenv build' makes another", "run 'aenv build'")


def _sources(found: Project) -> str:
    from aenv.engines.docker.building import sources

    return sources(found)


def _built(reference: str, digest: str) -> Check:
    """An image that was built: engines of containers run it, whatever the files say by now."""
    from aenv.project.images import Reference

    try:
        registry = Reference.parse(reference).registry
    except Invalid as exc:
        return Check("image", "fail", exc.message, "correct artifacts in config.json, or build it again: 'aenv build'")
    if not registry or not digest:
        why = "it has no registry" if not registry else "it was not pushed"
        fix = "'aenv build --registry HOST --push' lets others get it"
        return Check("image", "warn", f"{reference} is at the daemon that built it only: {why}", fix)
    detail = f"{reference} is what runs in containers; after a change of the files, 'aenv build' makes another"
    return Check("image", "ok", detail)


def _tests(found: Project) -> Iterator[Check]:
    folder = next((name for name in ("test", "tests") if (found.root / name).is_dir()), None)
    if found.test_script or folder:
        yield Check("tests", "ok", found.test_script or f"{folder}/")
    else:
        yield Check("tests", "warn", "no tests", "write some in test/; 'aenv test' runs them")


def _package(found: Project) -> Iterator[Check]:
    try:
        package = project.pack(found)
    except AEnvError as exc:
        yield Check("package", "fail", exc.message, exc.hint or "")
    else:
        yield Check("package", "ok", f"{len(package) / 1024:.1f} KiB packed")


# A sandbox


async def live_checks(found: Project, startup_timeout: float) -> list[Check]:
    """Checks on a sandbox that is started for them."""
    try:
        async with _sandbox(found, startup_timeout) as env:
            rows = [Check("start", "ok", "the sandbox started"), *await _answers(env)]
        return [*rows, await _preloading(found, startup_timeout)]
    except AEnvError as exc:
        return [Check("start", "fail", exc.message, exc.hint or "correct what the message names")]


@asynccontextmanager
async def _sandbox(found: Project, startup_timeout: float) -> AsyncIterator[Environment]:
    from aenv.client.environment import Environment
    from aenv.client.provision import attach
    from aenv.client.serving import run_project

    variables = found.environment_variables
    async with run_project(found.root, environment_variables=variables, startup_timeout=startup_timeout) as url:
        async with Environment(found.name, provision=attach(url)) as env:
            yield env


async def _preloading(found: Project, patience: float) -> Check:
    """Whether instances fork from one process that has imported the project, and why not."""
    chosen = found.value("deployConfig.preload")
    if chosen is False:
        return Check("preload", "ok", "off: each instance imports the project")
    verdict = await _verdict(found, patience)
    if isinstance(verdict, str):
        return Check(
            "preload", "warn", f"the import could not be watched: {verdict}", "set deployConfig.preload: false"
        )
    if verdict.clean:
        return Check("preload", "ok", "preloaded: instances fork from the imported project")
    reasons = list(verdict.reasons[:SHOWN_REASONS])
    if len(verdict.reasons) > SHOWN_REASONS:
        reasons.append(f"and {len(verdict.reasons) - SHOWN_REASONS} more")
    if chosen is True:
        head = "preloaded, as config.json says, so all instances share what the import did once. It"
        return Check("preload", "warn", "\n".join([head, *reasons]), f'{_MOVE}, or set deployConfig.preload: "auto"')
    head = "not preloaded: each instance imports the project, since the import"
    return Check("preload", "ok", "\n".join([head, *reasons]), f"for faster starts, {_MOVE}")


async def _verdict(found: Project, patience: float) -> Verdict | str:
    """What a process of its own sees of the project's import, or why it could not."""
    import msgspec

    from aenv.runtime.preload import Verdict

    # Files, not pipes: what the import leaves running would hold a pipe open.
    with TemporaryFile() as answer, TemporaryFile() as talk:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "aenv.runtime.preload", str(found.root)),
            env=config.child_environment(found.environment_variables),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=answer,
            stderr=talk,
            start_new_session=True,
        )
        try:
            await asyncio.wait_for(process.wait(), patience)
        except TimeoutError:
            return f"it took longer than {patience:g} s"
        finally:
            await finish(_ended(process))
        answer.seek(0)
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(answer.read(), type=Verdict)
        talk.seek(0)
        last = talk.read().decode(errors="replace").strip().splitlines()[-1:]
        return "".join(last) or f"it ended with exit code {process.returncode}"


async def _ended(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):  # and with it what the import left running
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


async def _answers(env: Environment) -> list[Check]:
    rows = []
    try:
        await env.wait_for_ready(HEALTHY_WITHIN)
        rows.append(Check("health", "ok", "healthy"))
    except AEnvError as exc:
        rows.append(Check("health", "fail", exc.message, "see what the health check looks at"))
    tools = await env.list_tools()
    rows += _tools(tools)
    listed = await env.list_functions()
    if listed["reward"]:
        rows.append(Check("reward", "ok", ", ".join(_names(listed["reward"]))))
    else:
        rows.append(Check("reward", "warn", "no reward: agents can be run, not trained", "add a @register_reward"))
    return rows


def _names(listed: Any) -> list[str]:
    entries = listed if isinstance(listed, list) else [listed]
    return [str(entry["name"]) if isinstance(entry, dict) else str(entry) for entry in entries]


def _tools(tools: list[dict[str, Any]]) -> Iterator[Check]:
    if not tools:
        yield Check("tools", "warn", "no tools: an agent can do nothing", "add a @register_tool")
        return
    names = [_bare(tool) for tool in tools]
    if silent := [_bare(tool) for tool in tools if not (tool.get("description") or "").strip()]:
        yield Check("tools", "warn", f"no description: {', '.join(silent)}", "say in a docstring what each is for")
    else:
        yield Check("tools", "ok", ", ".join(names))
    if find_spec("jsonschema") is None:
        yield Check("schemas", "warn", "not checked: jsonschema is not installed", "pip install jsonschema")
        return
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    wrong = []
    for tool in tools:
        try:
            Draft202012Validator.check_schema(tool["inputSchema"])
        except SchemaError as exc:
            wrong.append(f"{_bare(tool)}: {exc.message}")
    if wrong:
        yield Check("schemas", "fail", "\n".join(wrong), "correct the tool's input_schema")
    else:
        yield Check("schemas", "ok", "each is valid JSON Schema")


def _bare(tool: dict[str, Any]) -> str:
    return str(tool["name"]).rsplit("/", 1)[-1]
